"""Every parser of foreign bytes gives a value or an error of its own, whatever it reads: never a traceback, never late.

BLOOMERY_FUZZ_INPUTS says how many inputs each parser gets (`make chaos`: 100,000); they follow from their number alone.
"""

# ruff: noqa: E501  (tables of cases, one a line)

from __future__ import annotations

import gzip
import json
import os
import random
import shutil
import time
from collections.abc import Callable
from contextlib import suppress
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zstandard
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from bloomery.base.errors import BloomeryError
from bloomery.base.units import parse_amount, parse_duration
from bloomery.checkpoint import folder, remote
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
from megatron_scripts import SMALL
from monitor_samples import step_record, validation_record
from prepare_samples import jsonl, make, make_texts, make_tokenizer

INPUTS = int(os.environ.get("BLOOMERY_FUZZ_INPUTS", "200"))
FOUND = {"corpus_parquet": (7852, 21984)}
"""Far numbers that once were no error: pyarrow ended the process."""
MOST_SECONDS = 20.0
"""For one input, on a machine that does much else."""
DEEP = "[" * 100_000
NASTY: tuple[Any, ...] = (
    None, True, False, 0, -1, 1, 2**31, 2**32, 4_000_000_000, 2**53 + 1, 2**63, 2**64, -(2**63), 10**39, 0.5, -0.0, 1e308, float("nan"),
    float("inf"), float("-inf"), "", "0", "NaN", "a" * 5000, "\0", "\ud800", "../../etc/passwd", "/", ".", "\n", "🙂", "%s{}$(x)", "1" * 5000,
    [], {}, [[]], [{}], {"": {}}, [None], [0] * 100, [-1, -1], ["a", "a"], {"a": 1, "type": "BPE"}, [[["a"]] * 3] * 3,
)  # fmt: skip


def unproven(folder: Path) -> Checkpoint:
    """Its state and recipe as they are now, whatever the manifest says of them."""
    return Checkpoint(folder, {"step": step_of(folder)}, {})


@dataclass
class Parser:
    """Reads what lies at `path`, and uses it as its users do."""

    path: Path
    read: Callable[[], object]
    refuses_with: tuple[type[Exception], ...] = (BloomeryError,)
    fields: bool = False
    """Whether the example is JSON, of which single values are replaced too."""
    without: tuple[str, ...] = ()
    """Keys that prove the rest, and would make every change in it a broken proof."""
    wrap: Callable[[bytes], bytes] = field(default=lambda content: content)
    """Around each input: what packs it."""


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


class Samples:
    """A good example for every parser, in a folder of its own."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder = folder
        monkeypatch.chdir(folder)

    def parser(self, name: str) -> Parser:
        made: Parser = getattr(self, name)()
        return made

    def recipe(self) -> Parser:
        path = Workshop(self.folder).recipe
        return Parser(path, lambda: load_checked_recipe(str(path)))

    def recipe_fields(self) -> Parser:
        """JSON is YAML."""
        path = Workshop(self.folder).recipe
        path.write_text(json.dumps(_plain(path)))
        return Parser(path, lambda: load_checked_recipe(str(path)), fields=True)

    def override(self) -> Parser:
        recipe, path = str(Workshop(self.folder).recipe), self.folder / "override"
        path.write_text("data.train=[{path: train, weight: 2.5e-1}]")
        return Parser(path, lambda: load_recipe(recipe, [path.read_text(errors="surrogateescape")]))

    def _checkpoint(self) -> Path:
        return Workshop(self.folder).train("train.for=2 steps") / "checkpoints" / "step-00000002"

    def checkpoint_manifest(self) -> Parser:
        folder = self._checkpoint()
        return Parser(folder / "manifest.json", lambda: read_manifest(folder), fields=True, without=("sha256",))

    def remote_manifest(self) -> Parser:
        path = self._checkpoint() / "manifest.json"

        def read() -> bool:
            found = remote._read_remote(*remote.open_store(str(path.parent)))
            return found is not None and found.is_of("small") and found.is_whole()

        return Parser(path, read, fields=True)

    def index(self) -> Parser:
        folder = self._checkpoint()
        return Parser(folder / "index.json", lambda: read_index(folder), fields=True)

    def state(self) -> Parser:
        folder = self._checkpoint()
        recipe = unproven(folder).recipe

        def read() -> None:
            _ = unproven(folder).consumed_tokens
            resume_point_at(unproven(folder), recipe)

        return Parser(folder / "state.json", read, fields=True)

    def state_of_a_blend(self) -> Parser:
        two = "data.train=[{path: train, name: a, weight: 2}, {path: valid, name: b}]"
        folder = Workshop(self.folder).train("train.for=2 steps", two) / "checkpoints" / "step-00000002"
        recipe = unproven(folder).recipe
        return Parser(folder / "state.json", lambda: resume_point_at(unproven(folder), recipe), fields=True)

    def recipe_of_a_checkpoint(self) -> Parser:
        folder = self._checkpoint()
        recipe = unproven(folder).recipe
        return Parser(folder / "recipe.yaml", lambda: resume_point_at(unproven(folder), recipe))

    def writer(self) -> Parser:
        folder.take_over(self.folder)
        return Parser(self.folder / folder.WRITER, lambda: folder._read(self.folder), fields=True)

    def latest(self) -> Parser:
        (self.folder / "latest").write_text("step-00000002\n")
        return Parser(self.folder / "latest", lambda: read_latest(self.folder))

    def tensor_file(self) -> Parser:
        path = hf_folder(self.folder / "hf") / "model.safetensors"
        content = path.read_bytes()
        length = int.from_bytes(content[:8], "little")
        header, data = json.loads(content[8 : 8 + length]), content[8 + length :]
        some = dict(sorted(header.items(), key=lambda item: item[1].get("data_offsets", [0])[0])[:4])
        path.write_text(json.dumps(some))
        data = data[: max(entry["data_offsets"][1] for entry in some.values() if "data_offsets" in entry)]

        def wrap(text: bytes) -> bytes:
            return len(text).to_bytes(8, "little") + text + data

        def read() -> None:
            file = TensorFile(path)
            for name in file.kinds():
                file.view(name).sum()

        return Parser(path, read, fields=True, wrap=wrap)

    def tensor_file_bytes(self) -> Parser:
        whole = self.tensor_file()
        whole.path.write_bytes(whole.wrap(whole.path.read_bytes()))
        return Parser(whole.path, whole.read)

    def hf_config(self) -> Parser:
        folder = hf_folder(self.folder / "hf")
        return Parser(folder / "config.json", lambda: read_model(folder), fields=True)

    def hf_index(self) -> Parser:
        folder = hf_folder(self.folder / "hf")
        in_shards(folder, 2)
        return Parser(folder / "model.safetensors.index.json", lambda: HfWeights(folder), fields=True)

    def _shard(self) -> Path:
        (self.folder / "in").mkdir()
        (self.folder / "in" / "a.jsonl").write_bytes(jsonl(make_texts(20)))
        make(make_tokenizer(self.folder / "tok"), output="x", sources=["in"])
        return self.folder / "x"

    def shard_index(self) -> Parser:
        prefix = str(self._shard())

        def read() -> None:
            with ShardReader(prefix) as shard:
                for document in range(min(shard.num_documents, 50)):
                    shard.document_start(document)
                shard.read(0, min(shard.num_tokens, 1000))

        return Parser(Path(f"{prefix}.idx"), read)

    def shard_manifest(self) -> Parser:
        prefix = str(self._shard())
        return Parser(Path(f"{prefix}.manifest.json"), lambda: read_shard_manifest(prefix), fields=True)

    def _tokenizer(self, name: str, **more: Any) -> Parser:
        make_tokenizer(self.folder / "tok")

        def read() -> None:
            tokenizer = Tokenizer.load(str(self.folder / "tok"))
            _ = tokenizer.content_hash, tokenizer.vocab_size, tokenizer.special_tokens, tokenizer.end_of_document
            assert len(tokenizer.encode_batch(["Some text, 17.", "<|endoftext|> 漢字"])) == 2
            tokenizer.decode([0, 1, 299])

        return Parser(self.folder / "tok" / name, read, **more)

    def tokenizer(self) -> Parser:
        return self._tokenizer("tokenizer.json", fields=True)

    def tokenizer_config(self) -> Parser:
        parser = self._tokenizer("tokenizer_config.json", fields=True)
        parser.path.write_text('{"eos_token": {"content": "x"}, "added_tokens_decoder": {}, "add_prefix_space": false}')
        whole = json.loads((self.folder / "tok" / "tokenizer.json").read_text())
        whole["added_tokens"][0]["content"] = "x"
        (self.folder / "tok" / "tokenizer.json").write_text(json.dumps(whole))
        return parser

    def _gpt2(self, name: str, **more: Any) -> Parser:
        parser = self._tokenizer(name, **more)
        model = json.loads((self.folder / "tok" / "tokenizer.json").read_text())["model"]
        (self.folder / "tok" / "tokenizer.json").unlink()
        (self.folder / "tok" / "vocab.json").write_text(json.dumps(model["vocab"]))
        (self.folder / "tok" / "merges.txt").write_text(
            "#version: 0.2\n" + "".join(f"{a} {b}\n" for a, b in model["merges"])
        )
        return parser

    def vocab_json(self) -> Parser:
        return self._gpt2("vocab.json", fields=True)

    def merges_txt(self) -> Parser:
        return self._gpt2("merges.txt")

    def vocab_txt(self) -> Parser:
        parser = self._tokenizer("vocab.txt")
        (self.folder / "tok" / "tokenizer.json").unlink()
        parser.path.write_text("[PAD]\n[UNK]\n[CLS]\n[SEP]\n[MASK]\nsome\ntext\n##s\n")
        return parser

    def ds_config(self) -> Parser:
        path = self.folder / "ds.json"
        fp16 = {
            "enabled": True,
            "loss_scale": 0,
            "loss_scale_window": 500,
            "hysteresis": 2,
            "min_loss_scale": 1,
            "initial_scale_power": 12,
        }
        adam = {"type": "Adam", "params": {"lr": 1e-4, "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.1}}
        zero = {"stage": 1, "overlap_comm": True}
        path.write_text(json.dumps({"train_micro_batch_size_per_gpu": 1, "train_batch_size": 8, "gradient_clipping": 1.0, "zero_optimization": zero, "fp16": fp16, "optimizer": adam, "scheduler": {"type": "auto"}, "nebula": {"enabled": True, "persistent_storage_path": "/b", "num_of_version_in_retention": 2}, "steps_per_print": 2000, "wall_clock_breakdown": False}))  # fmt: skip
        flags = "--num-layers 2 --hidden-size 32 --num-attention-heads 2 --seq-length 16 --max-position-embeddings 16 --micro-batch-size 1 --global-batch-size 8 --lr 1e-4 --train-iters 10 --tokenizer-type GPT2BPETokenizer --data-path x --fp16 --adam-beta2 0.95 --weight-decay 0.1"
        return Parser(path, lambda: import_megatron(flags.split(), ds_config=path), fields=True)

    def megatron_flags(self) -> Parser:
        path = self.folder / "flags"
        path.write_text(" ".join(SMALL) + " --rampup-batch-size 2 2 16 --fp16 --split 9,1,0 --data-path 0.3 a 0.7 b")
        return Parser(path, lambda: import_megatron(path.read_text(errors="surrogateescape").split()))

    def events(self) -> Parser:
        path = self.folder / "events.jsonl"
        lines = [
            {"kind": kind, "step": 1, "job": 1, "time": 1.5, "start": "a", "energy": {"joules": 1.0}}
            for kind in ("start", "save", "stop")
        ]
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))
        metrics = self.folder / "metrics.jsonl"
        metrics.write_text(to_json(step_record(1)) + "\n")

        def read() -> None:
            read_events(path)
            read_metrics(metrics)

        return Parser(path, read, fields=True)

    def watched_events(self) -> Parser:
        parser = self.events()
        return Parser(parser.path, lambda: status_of(self.folder, "a", AlertsSection()), fields=True)

    def watched_job(self) -> Parser:
        self.events()
        (self.folder / "launch").mkdir()
        remember_job(self.folder, on="local", process=os.getpid())
        return Parser(self.folder / JOB_FILE, lambda: status_of(self.folder, "a", AlertsSection()), fields=True)

    def attempts(self) -> Parser:
        self.events()
        path = self.folder / ATTEMPTS_FILE
        path.parent.mkdir()
        for _ in range(2):
            judge(self.folder, 6, restarts=3)
        return Parser(path, lambda: judge(self.folder, 6, restarts=3), fields=True)

    def hostfile(self) -> Parser:
        path = self.folder / "hosts"
        path.write_text("10.10.100.101 slots=8\nme@b.example # the second\n")
        return Parser(path, lambda: read_hostfile(path, nodes=2, ranks_per_node=8))

    def metrics(self) -> Parser:
        path = self.folder / "metrics.jsonl"
        records = [step_record(1), validation_record(1), step_record(2, job=2)]
        path.write_text("".join(to_json(record) + "\n" for record in records))
        return Parser(path, lambda: read_metrics(path), fields=True)

    def part_marker(self) -> Parser:
        folder = PartsFolder(str(self.folder / "x"), token_dtype(300))
        folder.path.mkdir()
        content = {
            "unit": 3,
            "key": "k",
            "encoder": "e 1",
            "inputs": [["a", "b"]],
            "part_hash": "h",
            "runs": [[1, 1, 5]],
            "dropped": {},
        }
        folder.marker(3).write_text(json.dumps(content))

        return Parser(folder.marker(3), lambda: folder.verified(3, "k", [0]), fields=True)

    def download_json(self) -> Parser:
        path = self.folder / "list.json"
        path.write_text(
            json.dumps(
                [{"url": "https://host/a.zst", "size": 5, "sha256": "a" * 64, "path": "x/a.zst"}, {"url": "s3://b/c"}]
            )
        )
        return Parser(path, lambda: read_download_manifest(str(path)), fields=True)

    def download_yaml(self) -> Parser:
        path = self.folder / "list.yaml"
        path.write_text(
            "- {url: https://host/a.zst, size: 5}\n- url: s3://b/c\n  md5: " + "a" * 32 + "\n- &x {url: a/b}\n"
        )
        return Parser(path, lambda: read_download_manifest(str(path)))

    def download_lines(self) -> Parser:
        path = self.folder / "list.jsonl"
        path.write_text('{"url": "https://host/a.zst", "size": 5}\n{"url": "s3://b/c"}\n')
        return Parser(path, lambda: read_download_manifest(str(path)), fields=True)

    def _corpus(self, name: str, **more: Any) -> Parser:
        path = self.folder / name

        def read() -> None:
            units = plan_units(find_files([str(path)]))
            for unit in units:
                for block in UnitReader(unit, text_key="text", skip_bad=False).blocks():
                    assert {*map(type, block.texts)} <= {str}
            for _ in _lines(find_files([str(path)])[0], []) if ".jsonl" in name else ():
                pass

        return Parser(path, read, **more)

    def corpus(self) -> Parser:
        parser = self._corpus("a.jsonl", fields=True)
        parser.path.write_bytes(jsonl(make_texts(4)))
        return parser

    def corpus_zst(self) -> Parser:
        parser = self._corpus("a.jsonl.zst")
        parser.path.write_bytes(zstandard.compress(jsonl(make_texts(4))))
        return parser

    def corpus_gz(self) -> Parser:
        parser = self._corpus("a.jsonl.gz")
        parser.path.write_bytes(gzip.compress(jsonl(make_texts(4)), mtime=0))
        return parser

    def corpus_parquet(self) -> Parser:
        import pyarrow
        import pyarrow.parquet

        parser = self._corpus("a.parquet")
        pyarrow.parquet.write_table(pyarrow.table({"text": make_texts(4)}), parser.path)
        return parser

    def index_cache(self) -> Parser:
        """Under the checksum of what it has become, as a forger would write it."""
        cache, bounds = IndexCache(self.folder / "cache"), {"a": ((5,), 0, 5)}
        path, key, array = self.folder / "array.npy", {"seed": 1}, np.arange(5)
        np.save(path, array)
        cache.arrays("x", bounds, key, lambda: {"a": array})
        (stored,) = cache.folder.glob("x-*.npy")

        def read() -> None:
            for old in cache.folder.glob("x-*.npy"):
                old.unlink()
            name = stored.name.split(".")
            shutil.copy(path, cache.folder / f"{name[0]}.a.{file_checksum(path)}.npy")
            found = cache.arrays("x", bounds, key, lambda: {"a": array})["a"]
            assert (found.shape, found.min() >= 0, found.max() < 5) == ((5,), True, True)

        return Parser(path, read)

    def amount(self) -> Parser:
        path = self.folder / "amount"
        path.write_text("216_320 samples")

        def read() -> None:
            text = path.read_text(errors="surrogateescape")
            with suppress(ValueError):
                parse_duration(text)
            parse_amount(text)

        return Parser(path, read, refuses_with=(ValueError,))


def _plain(path: Path) -> Any:
    import yaml

    return yaml.safe_load(path.read_text())


PARSERS = [name for name in vars(Samples) if not name.startswith("_") and name != "parser"]


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


@pytest.mark.parametrize("name", PARSERS)
def test_whatever_a_parser_reads_it_gives_a_value_or_an_error_of_its_own(name, tmp_path, monkeypatch):
    folder = (
        Path("/dev/shm") / f"bloomery-fuzz-{os.getpid()}-{name}" if Path("/dev/shm").is_dir() else tmp_path / "fuzz"
    )
    folder.mkdir()
    try:
        parser = Samples(folder, monkeypatch).parser(name)
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
        print(f"{name}: {INPUTS:,} inputs, {taken:,} taken, {INPUTS - taken:,} refused, none with a traceback")
    finally:
        shutil.rmtree(folder, ignore_errors=True)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=10), inner, max_size=4),
    max_leaves=10,
)
SHRUNK = (
    "checkpoint_manifest",
    "index",
    "state",
    "tensor_file",
    "hf_config",
    "tokenizer",
    "shard_index",
    "ds_config",
    "recipe",
)


@pytest.mark.parametrize("name", SHRUNK)
def test_whatever_hypothesis_thinks_of_is_a_value_or_an_error(name, tmp_path, monkeypatch):
    parser = Samples(tmp_path, monkeypatch).parser(name)

    @settings(
        max_examples=max(25, INPUTS // 50),
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(st.binary(max_size=300) | JSON.map(lambda value: json.dumps(value).encode()))
    def check(content: bytes) -> None:
        survives(parser, content)

    check()
