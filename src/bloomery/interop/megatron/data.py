"""Flags of the data and of evaluation: paths, blends, and BigScience's weighted split paths."""

from __future__ import annotations

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
            b.refuse("bert-no-binary-head", "--bert-no-binary-head is set", "bert has its order head here")
    if b.has(*_GROUPS):
        _weighted_splits(b, b.first(*_GROUPS))
    elif b.has(*_PATHS):
        _paths(b, b.first(*_PATHS))
    data = b.raw.get("data", {})
    if "train" not in data:
        b.raw.pop("data", None)
        for at, row in enumerate(b.rows):
            if row.field.startswith("data."):
                b.rows[at] = replace(row, kind="left out", remark="add it with `data:`")
        return
    _, share, *_ = *re.findall(r"[0-9]+(?:\.[0-9]+)?", data.get("split", "")), "0", "0"
    if ("validation" in data or float(share)) and (steps := b.value("eval-iters", 100)):
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
        b.put("data.validation", {"valid": _sources(b, "valid-data-path")}, "valid-data-path")
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
    """A recipe cuts all training sources at one place (`data.split`), and validates behind it or on whole shards
    (`data.validation`)."""
    valid_flag = b.first(*(name.replace("train", "valid") for name in _GROUPS))
    train, valid = _groups(b, flag), _groups(b, valid_flag)
    if not train:
        return
    sources, ranges = next(iter(train.values()))
    b.put("data.train", sources, flag)
    start, end = ranges[0]
    if len(train) > 1 or len(ranges) > 1 or start or not 0 < end <= 1:
        what = f"--{flag} has {len(train)} groups, and documents {_shown(ranges)}"
        rule = "a training has one group, and a recipe cuts all its sources at the same place, from their beginning on"
        b.refuse(flag, what, rule, "use one group with 0:END and one END, or prepare shards of their own")
        return
    validation, until = dict[str, Any](), end
    for name, (group, parts) in valid.items():
        if end == 1 and parts == [(Decimal(0), Decimal(1))]:
            validation[name] = group
        elif until == end < 1 and group == sources and len(parts) == 1 and parts[0][0] == end:
            until = parts[0][1]
            b.note("differs", valid_flag, "its group is called valid, behind data.split", name)
        else:
            remark = f"documents {_shown(parts)}: prepare them as shards of their own, for data.validation.{name}"
            b.note("left out", valid_flag, remark, name)
    if end < 1:
        shares = (f"{share.normalize():f}" if share else "0" for share in (end, until - end, 1 - until))
        b.put("data.split", ",".join(shares), flag)
    if validation:
        b.put("data.validation", validation, valid_flag)


def _shown(ranges: list[tuple[Decimal, Decimal]]) -> str:
    return ", ".join(f"{start}:{end}" for start, end in ranges[:5])


def _groups(b: Builder, flag: str) -> dict[str, tuple[Sources, list[tuple[Decimal, Decimal]]]]:
    """Sources and ranges of documents of the groups of a flag, or of the file that it names. Empty if there are none,
    which a row or a problem reports."""
    if not b.has(flag):
        return {}
    given = b.line.flags[flag]
    texts = given.values if any(" " in text for text in given.values) else [given.text]
    if flag.endswith("-path"):
        if (found := b.find_file(given.text)) is None:
            b.note("left out", flag, f"the file is not here: add --{flag} FILE after the script, or `data:` yourself")
            return {}
        texts = []
        with suppress(ValueError):  # quotes that have no end
            texts = shlex.split(found[0])
    groups = {}
    for text in texts or [""]:
        name, _, rest = text.partition(":")
        parts = [match for part in rest.split(",") if (match := _MEMBER.fullmatch(part))]
        if not name.strip() or name.strip() in groups or len(parts) < len(rest.split(",")):
            rule = 'a group is "NAME: WEIGHT START:END PATH, WEIGHT START:END PATH"'
            b.refuse(
                flag, f"--{flag}: {text[:80]!r} is no group of its own", rule, "correct it, or --set its variables"
            )
            return {}
        sources = [{"path": part[4], "weight": float(part[1])} for part in parts]
        groups[name.strip()] = sources, sorted({(Decimal(part[2]), Decimal(part[3])) for part in parts})
    return groups
