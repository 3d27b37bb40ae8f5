"""Every parser of foreign bytes gives a value or an error of its own, whatever it reads: never a traceback, never late.

BLOOMERY_FUZZ_INPUTS says how many inputs each parser gets (`make chaos`: 100,000); they follow from their number alone.
"""

# ruff: noqa: E501  (tables of cases, one a line)

from __future__ import annotations

import gzip
import io
import json
import os
import random
import shutil
import time
from collections.abc import Callable
from contextlib import suppress
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
import zstandard
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from bloomery.base.errors import BloomeryError
from bloomery.base.units import parse_amount, parse_duration
from bloomery.checkpoint import folder as folders
from bloomery.checkpoint import remote
from bloomery.checkpoint.folder import read_latest, read_manifest, step_of
from bloomery.checkpoint.load import Checkpoint, TensorFile, read_index
from bloomery.config.load import load_recipe
from bloomery.config.recipe import AlertsSection
from bloomery.data.manifest import read_manifest as read_shard_manifest
from bloomery.data.megatron import IndexCache
from bloomery.data.shards import ShardReader, file_checksum, token_dtype
from bloomery.data.tokenizer import Tokenizer
from bloomery.interop.hf.folder import HfWeights
from bloomery.interop.hf.importer import read_model
from bloomery.interop.megatron.checkpoint import read_checkpoint as read_megatron
from bloomery.interop.megatron.checkpoint import reading
from bloomery.interop.megatron.continued import continued, recipe_of
from bloomery.interop.megatron.importer import import_megatron
from bloomery.launch.hosts import read_hostfile
from bloomery.launch.restart import ATTEMPTS_FILE, judge
from bloomery.launch.watch import JOB_FILE, remember_job, status_of
from bloomery.monitor.history import read_events, read_metrics
from bloomery.monitor.record import to_json
from bloomery.prepare.download import read_download_manifest
from bloomery.prepare.extract import _lines
from bloomery.prepare.parts import PartsFolder
from bloomery.prepare.read import UnitReader, plan_units
from bloomery.prepare.sources import find_files
from bloomery.sizing.check import load_checked_recipe
from bloomery.train.resume import resume_point_at
from conftest import Workshop
from hf_samples import hf_folder, in_shards
from megatron_checkpoints import made_of
from megatron_scripts import SMALL
from model_samples import small_config
from monitor_samples import step_record, validation_record
from prepare_samples import jsonl, make, make_texts, make_tokenizer

INPUTS = int(os.environ.get("BLOOMERY_FUZZ_INPUTS", "200"))
FOUND = {"corpus_parquet": (7852, 21984), "megatron_flags": (1118,)}
"""Far numbers that once were no error: pyarrow ended the process, and a path that is not UTF-8 a traceback."""
MOST_SECONDS = 20.0
"""For one input, on a machine that does much else."""
DEEP = "[" * 100_000
NASTY: tuple[Any, ...] = (
    None, True, False, 0, -1, 1, 2**31, 2**32, 4_000_000_000, 2**53 + 1, 2**63, 2**64, -(2**63), 10**39, 0.5, -0.0, 1e308, float("nan"),
    float("inf"), float("-inf"), "", "0", "NaN", "a" * 5000, "\0", "\ud800", "../../etc/passwd", "/", ".", "\n", "🙂", "%s{}$(x)", "1" * 5000,
    [], {}, [[]], [{}], {"": {}}, [None], [0] * 100, [-1, -1], ["a", "a"], {"a": 1, "type": "BPE"}, [[["a"]] * 3] * 3,
)  # fmt: skip


@dataclass
class Parser:
    """Reads what lies at `path`, and uses it as its users do."""

    path: Path
    read: Callable[[], object]
    fields: bool = False
    """Whether the example is JSON, of which single values are replaced too."""
    refuses_with: type[Exception] = BloomeryError
    without: tuple[str, ...] = ()
    """Keys that prove the rest, and would make every change in it a broken proof."""
    wrap: Callable[[bytes], bytes] = lambda content: content
    """Around each input: what packs it."""


def at(path: Path, example: object, read: Callable[[Path], object], *, fields: bool = False) -> Parser:
    """`example`: bytes, a text, or what its JSON says."""
    path.parent.mkdir(parents=True, exist_ok=True)
    text = example if isinstance(example, bytes | str) else json.dumps(example)
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return Parser(path, lambda: read(path), fields)


def mutated(example: bytes, parser: Parser, chance: random.Random) -> bytes:
    """An input: the example with some of its bytes, lines or values changed, or bytes that are nothing."""
    if chance.random() < 0.03:
        return chance.randbytes(chance.randrange(200))
    content = example
    if parser.fields and chance.random() < 0.7:
        content = _with_other_values(example, parser, chance)
        if chance.random() < 0.8:
            return content
    changed = bytearray(content)
    for _ in range(chance.choice((1, 1, 2, 5))):
        place, size = chance.randrange(len(changed) + 1), chance.choice((1, 1, 2, 8, 100))
        match chance.randrange(7):
            case 0 if changed:
                changed[place % len(changed)] ^= 1 << chance.randrange(8)
            case 1:
                del changed[place : place + size]
            case 2:
                del changed[place:]
            case 3:
                changed[place:place] = chance.randbytes(size)
            case 4:
                changed[place:place] = changed[(other := chance.randrange(len(changed) + 1)) : other + size]
            case 5:
                changed[place : place + size] = _word(chance)
            case 6:
                lines = changed.split(b"\n")
                line = chance.randrange(len(lines))
                lines[line:line] = [lines[chance.randrange(len(lines))]] * chance.randrange(3)
                del lines[chance.randrange(len(lines))]
                changed = bytearray(b"\n".join(lines))
    return bytes(changed)


def _word(chance: random.Random) -> bytes:
    if chance.random() < 0.01:
        return DEEP.encode()
    value = chance.choice(NASTY)
    return value.encode(errors="surrogatepass") if isinstance(value, str) else json.dumps(value).encode()


def _with_other_values(example: bytes, parser: Parser, chance: random.Random) -> bytes:
    """Of one of its lines of JSON, or of all as one."""
    try:
        lines, value = [], json.loads(example)
    except ValueError:
        lines = [line for line in example.split(b"\n") if line]
        value = json.loads(lines.pop(chance.randrange(len(lines))))
    if chance.random() < 0.9:
        for name in parser.without:
            value.pop(name, None)
    for _ in range(chance.choice((1, 1, 2, 4))):
        _change(value, chance)
    text = json.dumps(value)
    if chance.random() < 0.02:
        text = text.replace("null", DEEP, 1)
    return b"\n".join([text.encode(), *lines])


def _change(value: Any, chance: random.Random) -> None:
    """Somewhere in it: replace, remove or add a value."""
    while isinstance(value, dict | list) and value:
        key = chance.choice([*value]) if isinstance(value, dict) else chance.randrange(len(value))
        inner = value[key]
        if isinstance(inner, dict | list) and inner and chance.random() < 0.8:
            value = inner
            continue
        match chance.randrange(6):
            case 0:
                del value[key]
            case 1 if isinstance(value, dict):
                value[chance.choice(("", "x", "type", "step", "__metadata__"))] = deepcopy(chance.choice(NASTY))
            case 2 if isinstance(inner, int):
                value[key] = inner + chance.choice((-1, 1, 10, 10**6, -(10**6)))
            case _:
                value[key] = deepcopy(chance.choice(NASTY))
        return


# ---------------------------------------------------------------- the table: a good example for every parser


def checkpoint(folder: Path, *words: str) -> Path:
    return Workshop(folder).train("train.for=2 steps", *words) / "checkpoints" / "step-00000002"


def unproven(folder: Path) -> Checkpoint:
    """Its state and recipe as they are now, whatever the manifest says of them."""
    return Checkpoint(folder, {"step": step_of(folder)}, {})


def resumed(saved: Path, file: str, *, fields: bool = False) -> Parser:
    recipe = unproven(saved).recipe
    return Parser(saved / file, lambda: resume_point_at(unproven(saved), recipe), fields)


def state(folder: Path) -> Parser:
    parser = resumed(checkpoint(folder), "state.json", fields=True)
    resume = parser.read
    parser.read = lambda: (unproven(parser.path.parent).consumed_tokens, resume())
    return parser


def manifest(folder: Path) -> Parser:
    path = checkpoint(folder) / "manifest.json"
    return Parser(path, lambda: read_manifest(path.parent), fields=True, without=("sha256",))


def remote_manifest(folder: Path) -> Parser:
    path = checkpoint(folder) / "manifest.json"

    def read() -> bool:
        found = remote._read_remote(*remote.open_store(str(path.parent)))
        return found is not None and found.is_of("small") and found.is_whole()

    return Parser(path, read, fields=True)


def index(folder: Path) -> Parser:
    path = checkpoint(folder) / "index.json"
    return Parser(path, lambda: read_index(path.parent), fields=True)


def recipe_fields(folder: Path) -> Parser:
    """JSON is YAML."""
    path = Workshop(folder).recipe
    return at(path, yaml.safe_load(path.read_text()), lambda path: load_checked_recipe(str(path)), fields=True)


def override(folder: Path) -> Parser:
    recipe = str(Workshop(folder).recipe)
    return at(
        folder / "override",
        "data.train=[{path: train, weight: 2.5e-1}]",
        lambda path: load_recipe(recipe, [text_of(path)]),
    )


def text_of(path: Path) -> str:
    return path.read_text(errors="surrogateescape")


def writer(folder: Path) -> Parser:
    folders.take_over(folder)
    return Parser(folder / folders.WRITER, lambda: folders._read(folder), fields=True)


def tensor_file(folder: Path) -> Parser:
    path = hf_folder(folder / "hf") / "model.safetensors"
    content = path.read_bytes()
    length = int.from_bytes(content[:8], "little")
    header, data = json.loads(content[8 : 8 + length]), content[8 + length :]
    some = dict(sorted(header.items(), key=lambda item: item[1].get("data_offsets", [0])[0])[:4])
    data = data[: max(entry["data_offsets"][1] for entry in some.values() if "data_offsets" in entry)]

    def read(path: Path) -> None:
        file = TensorFile(path)
        for name in file.kinds():
            file.view(name).sum()

    parser = at(path, some, read, fields=True)
    parser.wrap = lambda text: len(text).to_bytes(8, "little") + text + data
    return parser


def tensor_file_bytes(folder: Path) -> Parser:
    whole = tensor_file(folder)
    whole.path.write_bytes(whole.wrap(whole.path.read_bytes()))
    return Parser(whole.path, whole.read)


def hf_config(folder: Path) -> Parser:
    made = hf_folder(folder / "hf")
    return Parser(made / "config.json", lambda: read_model(made), fields=True)


def hf_index(folder: Path) -> Parser:
    made = hf_folder(folder / "hf")
    in_shards(made, 2)
    return Parser(made / "model.safetensors.index.json", lambda: HfWeights(made), fields=True)


def shard(folder: Path) -> str:
    (folder / "in").mkdir()
    (folder / "in" / "a.jsonl").write_bytes(jsonl(make_texts(20)))
    make(make_tokenizer(folder / "tok"), output="x", sources=["in"])
    return str(folder / "x")


def shard_index(folder: Path) -> Parser:
    prefix = shard(folder)

    def read() -> None:
        with ShardReader(prefix) as opened:
            for document in range(min(opened.num_documents, 50)):
                opened.document_start(document)
            opened.read(0, min(opened.num_tokens, 1000))

    return Parser(Path(f"{prefix}.idx"), read)


def shard_manifest(folder: Path) -> Parser:
    prefix = shard(folder)
    return Parser(Path(f"{prefix}.manifest.json"), lambda: read_shard_manifest(prefix), fields=True)


def tokenizer(folder: Path, name: str = "tokenizer.json", *, fields: bool = True) -> Parser:
    made = make_tokenizer(folder / "tok")

    def read() -> None:
        tokenizer = Tokenizer.load(str(folder / "tok"))
        _ = tokenizer.content_hash, tokenizer.vocab_size, tokenizer.special_tokens, tokenizer.end_of_document
        assert len(tokenizer.encode_batch(["Some text, 17.", "<|endoftext|> 漢字"])) == 2
        tokenizer.decode([0, 1, 299])

    assert made
    return Parser(folder / "tok" / name, read, fields)


def tokenizer_config(folder: Path) -> Parser:
    parser = tokenizer(folder, "tokenizer_config.json")
    parser.path.write_text('{"eos_token": {"content": "x"}, "added_tokens_decoder": {}, "add_prefix_space": false}')
    whole = json.loads((folder / "tok" / "tokenizer.json").read_text())
    whole["added_tokens"][0]["content"] = "x"
    (folder / "tok" / "tokenizer.json").write_text(json.dumps(whole))
    return parser


def pair(folder: Path, name: str, *, fields: bool) -> Parser:
    """GPT-2's vocabulary and merges."""
    parser, whole = tokenizer(folder, name, fields=fields), folder / "tok" / "tokenizer.json"
    model = json.loads(whole.read_text())["model"]
    whole.unlink()
    (folder / "tok" / "vocab.json").write_text(json.dumps(model["vocab"]))
    merges = "".join(f"{a} {b}\n" for a, b in model["merges"])
    (folder / "tok" / "merges.txt").write_text(f"#version: 0.2\n{merges}")
    return parser


def vocab_txt(folder: Path) -> Parser:
    parser = tokenizer(folder, "vocab.txt", fields=False)
    (folder / "tok" / "tokenizer.json").unlink()
    parser.path.write_text("[PAD]\n[UNK]\n[CLS]\n[SEP]\n[MASK]\nsome\ntext\n##s\n")
    return parser


DS_CONFIG = {
    "train_micro_batch_size_per_gpu": 2, "train_batch_size": 8, "gradient_clipping": 1.0,
    "zero_optimization": {"stage": 1, "overlap_comm": True}, "scheduler": {"type": "auto"},
    "fp16": {"enabled": True, "loss_scale": 0, "loss_scale_window": 500, "hysteresis": 2, "min_loss_scale": 1, "initial_scale_power": 12},
    "optimizer": {"type": "Adam", "params": {"lr": 1e-4, "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.1}},
    "nebula": {"enabled": True, "persistent_storage_path": "/b", "num_of_version_in_retention": 2}, "steps_per_print": 2000, "wall_clock_breakdown": False,
}  # fmt: skip
FLAGS = " ".join(SMALL) + " --rampup-batch-size 2 2 16 --fp16 --split 9,1,0 --data-path 0.3 a 0.7 b"
EVENTS = "".join(
    json.dumps({"kind": kind, "step": 1, "job": 1, "time": 1.5, "start": "a", "energy": {"joules": 1.0}}) + "\n"
    for kind in ("start", "save", "stop")
)


def events(folder: Path) -> Parser:
    (folder / "metrics.jsonl").write_text(to_json(step_record(1)) + "\n")
    return at(
        folder / "events.jsonl",
        EVENTS,
        lambda path: (read_events(path), read_metrics(folder / "metrics.jsonl")),
        fields=True,
    )


def megatron_checkpoint(folder: Path) -> Parser:
    source = made_of(folder / "theirs", small_config("gpt2", vocab_size=160), tp=1, pp=1)

    def read() -> None:
        found = read_megatron(source)
        with reading(source):
            continued(found, recipe_of(found, None, ["data=null"], weights_only=True), weights_only=False)

    return Parser(next(source.rglob("*.pt")), read)


def watched(folder: Path) -> object:
    return status_of(folder, "a", AlertsSection())


def watched_job(folder: Path) -> Parser:
    events(folder)
    (folder / "launch").mkdir()
    remember_job(folder, on="local", process=os.getpid())
    return Parser(folder / JOB_FILE, lambda: watched(folder), fields=True)


def attempts(folder: Path) -> Parser:
    events(folder)
    (folder / ATTEMPTS_FILE).parent.mkdir()
    for _ in range(2):
        judge(folder, 6, restarts=3)
    return Parser(folder / ATTEMPTS_FILE, lambda: judge(folder, 6, restarts=3), fields=True)


def part_marker(folder: Path) -> Parser:
    parts = PartsFolder(str(folder / "x"), token_dtype(300))
    content = {
        "unit": 3,
        "key": "k",
        "encoder": "e 1",
        "inputs": [["a", "b"]],
        "part_hash": "h",
        "runs": [[1, 1, 5]],
        "dropped": {},
    }
    return at(parts.marker(3), content, lambda _: parts.verified(3, "k"), fields=True)


def read_corpus(path: Path) -> None:
    for unit in plan_units(find_files([str(path)])):
        for block in UnitReader(unit, text_key="text", skip_bad=False).blocks():
            assert {*map(type, block.texts)} <= {str}
    for _ in _lines(find_files([str(path)])[0], []) if ".jsonl" in path.name else ():
        pass


def parquet() -> bytes:
    import pyarrow
    import pyarrow.parquet

    sink = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.table({"text": make_texts(4)}), sink)
    return sink.getvalue()


def index_cache(folder: Path) -> Parser:
    """Under the checksum of what it has become, as a forger would write it."""
    cache, bounds = IndexCache(folder / "cache"), {"a": ((5,), 0, 5)}
    path, key, array = folder / "array.npy", {"seed": 1}, np.arange(5)
    np.save(path, array)
    cache.arrays("x", bounds, key, lambda: {"a": array})
    (stored,) = cache.folder.glob("x-*.npy")

    def read() -> None:
        for old in cache.folder.glob("x-*.npy"):
            old.unlink()
        shutil.copy(path, cache.folder / f"{stored.name.split('.')[0]}.a.{file_checksum(path)}.npy")
        found = cache.arrays("x", bounds, key, lambda: {"a": array})["a"]
        assert (found.shape, found.min() >= 0, found.max() < 5) == ((5,), True, True)

    return Parser(path, read)


def amount(folder: Path) -> Parser:
    def read(path: Path) -> None:
        with suppress(ValueError):
            parse_duration(text_of(path))
        parse_amount(text_of(path))

    parser = at(folder / "amount", "216_320 samples", read)
    parser.refuses_with = ValueError
    return parser


def manifest_of(path: Path) -> object:
    return read_download_manifest(str(path))


BLEND = "data.train=[{path: train, name: a, weight: 2}, {path: valid, name: b}]"
URLS = [{"url": "https://host/a.zst", "size": 5, "sha256": "a" * 64, "path": "x/a.zst"}, {"url": "s3://b/c"}]
YAML_URLS = "- {url: https://host/a.zst, size: 5}\n- url: s3://b/c\n  md5: " + "a" * 32 + "\n- &x {url: a/b}\n"
HOSTS = "10.10.100.101 slots=8\nme@b.example # the second\n"
METRICS = (step_record(1), validation_record(1), step_record(2, job=2))
PARSERS: dict[str, Callable[[Path], Parser]] = {
    "recipe": lambda f: Parser(path := Workshop(f).recipe, lambda: load_checked_recipe(str(path))),
    "recipe_fields": recipe_fields,
    "override": override,
    "checkpoint_manifest": manifest,
    "remote_manifest": remote_manifest,
    "index": index,
    "state": state,
    "state_of_a_blend": lambda f: resumed(checkpoint(f, BLEND), "state.json", fields=True),
    "recipe_of_a_checkpoint": lambda f: resumed(checkpoint(f), "recipe.yaml"),
    "writer": writer,
    "latest": lambda f: at(f / "latest", "step-00000002\n", lambda path: read_latest(path.parent)),
    "tensor_file": tensor_file,
    "tensor_file_bytes": tensor_file_bytes,
    "hf_config": hf_config,
    "hf_index": hf_index,
    "shard_index": shard_index,
    "shard_manifest": shard_manifest,
    "tokenizer": tokenizer,
    "tokenizer_config": tokenizer_config,
    "vocab_json": lambda f: pair(f, "vocab.json", fields=True),
    "merges_txt": lambda f: pair(f, "merges.txt", fields=False),
    "vocab_txt": vocab_txt,
    "ds_config": lambda f: at(f / "ds.json", DS_CONFIG, lambda path: import_megatron([*SMALL, "--fp16"], ds_config=path).yaml(), fields=True),
    "megatron_flags": lambda f: at(f / "flags", FLAGS, lambda path: import_megatron(text_of(path).split()).yaml()),
    "megatron_checkpoint": megatron_checkpoint,
    "events": events,
    "watched_events": lambda f: Parser(events(f).path, lambda: watched(f), fields=True),
    "watched_job": watched_job,
    "attempts": attempts,
    "hostfile": lambda f: at(f / "hosts", HOSTS, lambda path: read_hostfile(path, nodes=2, ranks_per_node=8)),
    "metrics": lambda f: at(f / "m.jsonl", "".join(to_json(each) + "\n" for each in METRICS), read_metrics, fields=True),
    "part_marker": part_marker,
    "download_json": lambda f: at(f / "list.json", URLS, manifest_of, fields=True),
    "download_yaml": lambda f: at(f / "list.yaml", YAML_URLS, manifest_of),
    "download_lines": lambda f: at(f / "list.jsonl", "\n".join(map(json.dumps, URLS)), manifest_of, fields=True),
    "corpus": lambda f: at(f / "a.jsonl", jsonl(make_texts(4)), read_corpus, fields=True),
    "corpus_zst": lambda f: at(f / "a.jsonl.zst", zstandard.compress(jsonl(make_texts(4))), read_corpus),
    "corpus_gz": lambda f: at(f / "a.jsonl.gz", gzip.compress(jsonl(make_texts(4)), mtime=0), read_corpus),
    "corpus_parquet": lambda f: at(f / "a.parquet", parquet(), read_corpus),
    "index_cache": index_cache,
    "amount": amount,
}  # fmt: skip


# ---------------------------------------------------------------- the property


def survives(parser: Parser, content: bytes) -> bool:
    """Whether it was taken for good. Fails where the parser does something else than that or to refuse it."""
    parser.path.write_bytes(parser.wrap(content))
    began, said = time.monotonic(), "fine"
    try:
        parser.read()
        taken = True
    except parser.refuses_with as error:
        taken, said = False, str(error)
    assert said.strip()
    assert time.monotonic() - began < MOST_SECONDS
    return taken


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=10), inner, max_size=4),
    max_leaves=10,
)


@pytest.mark.parametrize("name", PARSERS)
def test_whatever_a_parser_reads_it_gives_a_value_or_an_error_of_its_own(name, tmp_path, monkeypatch):
    """Of numbered inputs, and of what hypothesis thinks of."""
    shared = Path("/dev/shm")
    folder = (shared if shared.is_dir() else tmp_path) / f"bloomery-fuzz-{os.getpid()}-{name}"
    folder.mkdir()
    monkeypatch.chdir(folder)
    try:
        parser = PARSERS[name](folder)
        example = parser.path.read_bytes()
        assert survives(parser, example), f"the example for {name} is refused, so its inputs would prove little"
        taken = 0
        for number in (*FOUND.get(name, ()), *range(INPUTS)):
            content = mutated(example, parser, random.Random(f"{name} {number}"))
            try:
                taken += survives(parser, content)
            except BaseException as error:
                kept = tmp_path / "input"
                kept.write_bytes(content)
                raise AssertionError(f"{name}, input {number} ({kept}): {content[:300]!r}") from error
        options = {"deadline": None, "derandomize": True, "database": None}

        @settings(max_examples=max(10, INPUTS // 50), suppress_health_check=list(HealthCheck), **options)
        @given(st.binary(max_size=300) | JSON.map(lambda value: json.dumps(value).encode()))
        def check(content: bytes) -> None:
            survives(parser, content)

        check()
        print(f"{name}: {INPUTS:,} inputs, {taken:,} taken, {INPUTS - taken:,} refused, none with a traceback")
    finally:
        shutil.rmtree(folder, ignore_errors=True)
