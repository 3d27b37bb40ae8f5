"""`bloomery init --from TEXT | SHARD | MODEL`: a small recipe that fits text and machine, ready to be trained."""

from __future__ import annotations

import argparse
import json
import math
import re
from pathlib import Path
from typing import Any, NamedTuple

from bloomery.base import exit_codes
from bloomery.base.errors import Problem, RecipeError, StorageError
from bloomery.base.hub import local_folder
from bloomery.base.storage import remove_tree, write_atomically
from bloomery.base.units import format_count
from bloomery.cli.arguments import add_device, warn, whole_number

_BYTES_PER_TOKEN = 3.0
"""Of a text with a small vocabulary of its own, roughly."""
_EPOCHS = 4
"""More of them teach little that is new."""
_TOKENS_PER_PARAMETER = 5
"""Fewer than is best for a budget of compute, because a small text is read several times."""
_STATE_BYTES = 18
"""Of a parameter in training, without activations; twice that must fit."""


class _Size(NamedTuple):
    layers: int
    hidden: int
    heads: int
    seq_length: int
    batch: int
    peak: float
    most_steps: int

    @property
    def parameters(self) -> int:
        """Without embeddings."""
        return 12 * self.layers * self.hidden**2


_ON_CPU = _Size(4, 128, 4, 128, 16, 3e-3, 1000)
_SIZES = (
    _ON_CPU._replace(most_steps=20_000),
    _Size(6, 384, 6, 256, 64, 1e-3, 50_000),
    _Size(12, 768, 12, 1024, 64, 6e-4, 200_000),
    _Size(24, 1024, 16, 2048, 128, 3e-4, 500_000),
    _Size(24, 2048, 16, 2048, 256, 2e-4, 1_000_000),
)
_VALIDATION = 0.05
"""The share of the text that is not trained on."""
_NO_VALIDATION = "no validation: the text is too short for a part of its own"
_SHORTEST = 32
"""Sequence of which validation says something."""
_VOCABULARIES = {2**20: 512, 2**25: 2048, 2**28: 8192, 2**31: 32_768}
"""Up to how many bytes of text which one; above all, 50,304."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    text = "files or folders of text, the prefix of a shard, a Hugging Face folder or hf://org/name; default: Python's "
    text += "own sources"
    parser.add_argument("--from", dest="sources", metavar="PATH", nargs="+", default=["python-stdlib"], help=text)
    parser.add_argument("--name", help="of the recipe and its run; default: that of the first PATH")
    size = "of the tokenizer that a text gets; default: by the size of the text"
    parser.add_argument("--vocab-size", type=whole_number(257, 1 << 24), help=size)
    characters = "a tokenizer of characters, for a small text"
    parser.add_argument("--characters", action="store_true", help=characters)
    add_device(parser)


def run(args: argparse.Namespace) -> int:
    from bloomery.config.recipe import RUN_NAME

    first = Path(args.sources[0])
    name = args.name or re.sub(r"[^A-Za-z0-9._-]+", "-", first.name.split(".")[0]).strip("-._")[:99] or "mine"
    if not re.fullmatch(RUN_NAME, name):
        rule = "letters, digits, `.`, `_` and `-`, at first a letter or digit, at most 100"
        raise RecipeError(Problem(f"--name is {name!r}", rule, "give another", "command line"))
    path = Path(f"{name}.yaml")
    place = f"{name}-data"
    for there in filter(Path.exists, (path, Path(place))):
        raise StorageError(Problem(f"{there} is there", "init replaces nothing", "give another --name"))
    if (model := Path(local_folder(args.sources[0], weights=True)) / "config.json").is_file():
        return _from_model(model.parent, args.sources[0], name, place, path)
    is_text, train = not Path(f"{first}.idx").is_file(), ["--kind", "characters"]
    if is_text:
        tokens, vocabulary = _of_text(args.sources, args.vocab_size)
        train = (
            train if args.characters else ["--vocab-size", str(vocabulary), *["--allow-fewer"] * (not args.vocab_size)]
        )
        shard, tokenizer = f"{place}/shard", f"tokenizer: {{path: {place}/tokenizer}}\n"
        prepare = f"prepare:  # text to tokens, by `bloomery prepare {path}`\n"
        prepare += f"  - {{output: {shard}, sources: [{', '.join(map(json.dumps, args.sources))}]}}\n"
    else:
        tokens, vocabulary, prepare = _of_shard(str(first))
        shard, tokenizer = str(first), ""
    code = exit_codes.BUG
    try:
        # First the tokenizer: in its training, which has no files yet, a Ctrl-C may end the process.
        words = ["tokenizer", "train", *args.sources, *train, "--output", f"{place}/tokenizer"]
        code = _do(*words) if is_text else exit_codes.OK
        if not code:
            if is_text:  # a recipe by the size of the text, with which it becomes a shard that is counted
                write_atomically(path, _recipe(name, args.device, vocabulary, tokens, tokenizer + prepare, shard))
                code = _do("prepare", str(path))
                tokens, vocabulary = (tokens, vocabulary) if code else _of_shard(shard)[:2]
            write_atomically(path, _recipe(name, args.device, vocabulary, tokens, tokenizer + prepare, shard))
    finally:
        if code:  # so that the same command can be given again
            path.unlink(missing_ok=True)
            remove_tree(place)
    if code:
        return code
    print(f"{path}: written" + f"; {_NO_VALIDATION}" * (not _has_validation(tokens)))
    then = "" if is_text else " --tokenizer FOLDER"
    print(f"next: bloomery train {path}\nthen: bloomery generate runs/{name} --prompt 'Once'{then}")
    return exit_codes.OK


def _do(*words: str) -> int:
    from bloomery.cli.main import main

    print(f"> bloomery {' '.join(words)}", flush=True)
    return main(words)


def _of_text(sources: list[str], vocab_size: int | None) -> tuple[float, int]:
    """(tokens, roughly, and a size of the vocabulary)."""
    from bloomery.prepare.sources import find_files

    size = sum(file.size * (4 if file.compression or file.kind == "parquet" else 1) for file in find_files(sources))
    usual = next((entries for most, entries in _VOCABULARIES.items() if size <= most), 50_304)
    return size / _BYTES_PER_TOKEN, vocab_size or usual


def _of_shard(prefix: str) -> tuple[float, int, str]:
    """(tokens, vocabulary, a comment)."""
    from bloomery.data.manifest import read_manifest
    from bloomery.data.shards import ShardReader

    with ShardReader(prefix) as shard:
        tokens, manifest = shard.num_tokens, read_manifest(prefix)
        vocabulary = manifest.vocab_size if manifest else int(shard.read(0, min(tokens, 10**7)).max()) + 1
    if manifest is None:
        warn(f"{prefix} has no manifest: model.vocab_size is the largest token of its beginning, plus one")
    return tokens, vocabulary, "# tokenizer: {path: FOLDER}  # that of the shard, to see and generate text\n"


def _fitting(tokens: float, wanted: str | None) -> _Size:
    from bloomery.base.accelerator import device_total_bytes, pick_device

    device = pick_device(wanted)
    if device.type == "cpu":
        return _ON_CPU
    room = device_total_bytes(device) / (2 * _STATE_BYTES)
    fits = [
        size
        for size in _SIZES
        if size.parameters * _TOKENS_PER_PARAMETER <= _EPOCHS * tokens and size.parameters <= room
    ]
    return fits[-1] if fits else _SIZES[0]


def _has_validation(tokens: float) -> bool:
    return _VALIDATION * tokens >= _SHORTEST + 2  # the label of the last, and one for rounding


def _recipe(name: str, device: str | None, vocabulary: int, tokens: float, text: str, shard: str) -> str:
    size, validates = _fitting(tokens, device), _has_validation(tokens)
    room = max(1, int(_VALIDATION * tokens if validates else tokens) - 2)
    size = size._replace(seq_length=min(size.seq_length, 2 ** int(math.log2(room))))
    steps = int(_EPOCHS * tokens / (size.batch * size.seq_length))
    steps = min(max(steps, 100), size.most_steps)
    seen = steps * size.batch * size.seq_length
    split, evaluate = f"  # {_NO_VALIDATION}\n", ""
    if validates:
        split = f'  split: "{100 - 100 * _VALIDATION:g},{100 * _VALIDATION:g}"  # train and valid\n  split_by: tokens\n'
        evaluate = f"  evaluate: {{every: {max(10, steps // 10)} steps, steps: 5}}\n"
    return f"""\
# By `bloomery init`. docs/recipe.md has every field; `bloomery check {name}.yaml` says what this one comes to.
name: {name}
model:  # a small Llama: {format_count(size.parameters)} parameters, and embeddings
  family: llama
  num_layers: {size.layers}
  hidden_size: {size.hidden}
  num_heads: {size.heads}
  seq_length: {size.seq_length}
  vocab_size: {vocabulary}
{text}data:
  train:
    - {{path: {shard}}}
{split}batch: {{micro_batch_size: {min(size.batch, 16)}, global_batch_size: {size.batch}}}
lr: {{peak: {size.peak}, min: {size.peak / 10:g}, schedule: cosine, warmup: {max(10, steps // 50)} steps}}
train:
  for: {steps} steps  # {format_count(seen)} tokens, {seen / max(tokens, 1):.1f} times the text
{evaluate}checkpoint:
  phases:
    - {{every: {max(10, steps // 4)} steps}}
monitor: {{log_every: {max(1, min(10, steps // 50))} steps}}
# precision: auto  # bf16 where the device is fast in it, else fp32
"""


def _from_model(folder: Path, given: str, name: str, place: str, path: Path) -> int:
    """A recipe that begins with its weights, for a text that the user names."""
    from bloomery.config.yaml_nodes import dump_yaml
    from bloomery.interop.hf.importer import read_model, tokenizer_files

    model = read_model(folder)
    found: dict[str, Any] = {"name": name, "init": {"from": given}, "model": model}
    if tokenizer_files(folder):
        found["tokenizer"] = {"path": given}
        found["prepare"] = [{"output": f"{place}/shard", "sources": ["TEXT"]}]
    found["data"] = {"train": [{"path": f"{place}/shard"}], "split": "95,5", "split_by": "tokens"}
    found["batch"] = {"micro_batch_size": 1, "global_batch_size": 8}
    found["lr"] = {"peak": 1e-5, "schedule": "constant", "warmup": "10 steps"}
    found["train"] = {"for": "1000 steps", "evaluate": {"every": "100 steps", "steps": 5}}
    head = (
        "# By `bloomery init`: the weights of a Hugging Face model, trained on. Put your files in the place of TEXT.\n"
    )
    write_atomically(path, head + dump_yaml(found))
    print(f"{path}: written\nnext: name your text in it, then bloomery prepare {path} and bloomery train {path}")
    return exit_codes.OK
