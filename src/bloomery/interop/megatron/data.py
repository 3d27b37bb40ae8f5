"""Flags of the data and of evaluation: paths, blends, and BigScience's weighted split paths."""

import re
import shlex
from contextlib import suppress
from dataclasses import replace
from decimal import Decimal
from typing import Any

from bloomery.families.registry import FAMILIES
from bloomery.interop.megatron.recipe import Builder

_NUMBER = r"[0-9]*\.?[0-9]+"
_MEMBER = re.compile(rf"\s*({_NUMBER})\s+({_NUMBER}):({_NUMBER})\s+(\S+)\s*")
_PATHS = ("data-path", "train-data-path")
_GROUPS = ("train-weighted-split-paths", "train-weighted-split-paths-path")
Sources = list[dict[str, Any]]


def fill_data(b: Builder) -> None:
    """`data` and `train.evaluate`."""
    if FAMILIES[b.raw["model"]["family"]].encoder:
        b.fill("encoder")
        if b.has("bert-no-binary-head"):
            b.put("model.second_head", "none", "bert-no-binary-head")
    flag = b.one_of(*_PATHS, *_GROUPS)
    if flag in _GROUPS:
        _weighted_splits(b, flag)
    elif b.has(flag):
        _paths(b, flag)
    data = b.raw.get("data", {})
    if "train" not in data:
        b.raw.pop("data", None)
        for at, row in enumerate(b.rows):
            if row.field.startswith("data."):
                b.rows[at] = replace(row, kind="left out", remark="add it with `data:`")
        return
    share = re.match(r"[0-9.]+[,/]\s*([0-9.]*[1-9])", data.get("split", ""))
    if ("validation" in data or share) and (steps := b.value("eval-iters", 100)):
        every = f"{b.value('eval-interval', 1000)} steps"
        b.put("train.evaluate", {"every": every, "steps": steps}, "eval-interval", "eval-iters")


def _paths(b: Builder, flag: str) -> None:
    """--data-path or --train-data-path."""
    if not (sources := _sources(b, flag)):
        return
    blends_one = len(sources) == 1 and "weight" in sources[0]
    remark = "Megatron blends one source with a weight: data.order=megatron needs data.blend_one_source=true"
    b.put("data.train", sources, flag, remark=remark if blends_one else "")
    if b.has("valid-data-path"):
        if valid := _sources(b, "valid-data-path"):
            b.put("data.validation", {"valid": valid}, "valid-data-path")
    else:  # a shell leaves quotes in an item of an array
        b.put("data.split", b.value("split", "969,30,1").strip("'\""), "split")


def _sources(b: Builder, flag: str) -> Sources:
    given = b.line.flags[flag]
    words = given.values
    if any(word.startswith("$(") for word in words):
        b.note("left out", flag, "these paths are known only at run time: add `data:` to the recipe")
        return []
    if len(words) == 1:
        return [{"path": words[0]}]
    if not words or len(words) % 2 or not re.fullmatch(r"[0-9.eE+-]+", words[0]):
        rule = "it is one path, or pairs of weight and path; without weights Megatron blends by lengths, and ends when "
        rule += "all is read once, which no recipe can express"
        b.refuse(flag, f"--{flag} has {len(words)} words", rule, f"give each path a weight: `--{flag} 0.7 A 0.3 B`")
        return []
    pairs = zip(words[::2], words[1::2], strict=True)
    return [{"path": path, "weight": b.convert(given, weight, 1.0)} for weight, path in pairs]


def _weighted_splits(b: Builder, flag: str) -> None:
    """`NAME: WEIGHT START:END PATH, ...`, on the command line or in the file that it names: a recipe has one group, and
    cuts all its sources at one place (`data.split`)."""
    given = b.line.flags[flag]
    texts = given.values if any(" " in text for text in given.values) else [given.text]
    if flag.endswith("-path"):
        if (found := b.find_file(given.text)) is None:
            b.note("left out", flag, f"the file is not here: add --{flag} FILE after the script, or `data:` yourself")
            return
        texts = []
        with suppress(ValueError):  # quotes that have no end
            texts = shlex.split(found[0])
    parts = [_MEMBER.fullmatch(part) for text in texts for part in text.partition(":")[2].split(",")]
    members = [part.groups() for part in parts if part]
    ranges = {(Decimal(start), Decimal(end)) for _, start, end, _ in members}
    start, end = min(ranges, default=(Decimal(0), Decimal(0)))
    if len(texts) != 1 or len(members) < len(parts) or len(ranges) != 1 or start or not 0 < end <= 1:
        what = f"--{flag} is {' '.join(map(repr, texts))[:80]}"
        rule = 'a recipe has one group, all cut at one place: "NAME: WEIGHT 0:END PATH, WEIGHT 0:END PATH"'
        b.refuse(flag, what, rule, "correct it, --set its variables, or prepare shards of their own")
        return
    b.put("data.train", [{"path": path, "weight": float(weight)} for weight, *_, path in members], flag)
    if end < 1:
        b.put("data.split", f"{end},{1 - end},0", flag)
