"""Flags of the data and of evaluation: paths, blends, and BigScience's weighted split paths."""

from __future__ import annotations

import re
import shlex
from decimal import Decimal
from typing import Any, NamedTuple

from bloomery.families.registry import FAMILIES
from bloomery.interop.megatron.flags import Row
from bloomery.interop.megatron.recipe import Builder

_NUMBER = r"[0-9]*\.?[0-9]+"
_MEMBER = re.compile(rf"\s*({_NUMBER})\s+({_NUMBER}):({_NUMBER})\s+(\S+)\s*")
_FORM = 'a group is "NAME: WEIGHT START:END PATH, WEIGHT START:END PATH", WEIGHT > 0 and 0 <= START < END <= 1'
_GROUPS = ("weighted-split-paths", "weighted-split-paths-path")


def fill_data(b: Builder) -> None:
    """`data` and `train.evaluate`."""
    if FAMILIES[b.raw["model"]["family"]].encoder:
        b.fill("encoder")
        if b.has("bert-no-binary-head"):
            b.refuse("bert-no-binary-head", "--bert-no-binary-head is set", "bert has its order head here")
    groups = [f"train-{name}" for name in _GROUPS]
    flags = [name for name in (*groups, "data-path", "train-data-path") if b.has(name)]
    evaluates = _weighted_splits(b) if b.has(*groups) else bool(flags) and _paths(b, flags[0])
    for name in () if b.has(*groups) else _GROUPS:
        b.note("left out", f"valid-{name}", "Megatron reads it with --train-weighted-split-paths only")
    if "train" not in b.raw.get("data", {}):
        b.raw.pop("data", None)
        for row in [row for row in b.rows if row.field.startswith("data.")]:
            b.rows.remove(row)
            remark = f"add it to `data:` as {row.field.removeprefix('data.')}: {row.result}"
            b.rows += [Row("left out", row.flag, row.value, remark=remark)] if row.flag else []
    every, steps = b.value("eval-interval", 1000), b.value("eval-iters", 100)
    if steps and evaluates:
        b.put("train.evaluate", {"every": f"{every} steps", "steps": steps}, "eval-interval", "eval-iters")
    else:
        for name in ("eval-interval", "eval-iters"):
            b.note("left out", name, "there is nothing to evaluate")


def _paths(b: Builder, flag: str) -> bool:
    """--data-path or --train-data-path; whether there is something to evaluate."""
    if not (sources := _sources(b, flag)):
        return False
    blends_one = len(sources) == 1 and "weight" in sources[0]
    remark = "Megatron blends one source with a weight: data.order=megatron needs data.blend_one_source=true"
    b.put("data.train", sources, flag, remark=remark if blends_one else "")
    if b.has("valid-data-path"):
        b.put("data.validation", {"valid": _sources(b, "valid-data-path")}, "valid-data-path")
        return True
    split = b.value("split", "969,30,1").strip("'\"")  # quotes that a shell left in an item of an array
    b.put("data.split", split, "split")
    shares = re.findall(r"[0-9]+(?:\.[0-9]+)?", split)
    return len(shares) > 1 and float(shares[1]) > 0


def _sources(b: Builder, flag: str) -> list[dict[str, Any]]:
    words = b.line.flags[flag].values
    if any(word.startswith("$(") for word in words):
        b.note("left out", flag, "these paths are known only at run time: add `data:` to the recipe")
    elif len(words) == 1:
        return [{"path": words[0]}]
    elif not words or len(words) % 2 or not re.fullmatch(r"[0-9.eE+-]+", words[0]):
        rule = "it is one path, or pairs of weight and path; without weights Megatron blends by lengths, and ends when "
        rule += "all is read once, which no recipe can express"
        b.refuse(flag, f"--{flag} has {len(words)} words", rule, f"give each path a weight: `--{flag} 0.7 A 0.3 B`")
    else:
        pairs = zip(words[::2], words[1::2], strict=True)
        return [{"path": path, "weight": b.convert(b.line.flags[flag], weight, 1.0)} for weight, path in pairs]
    return []


class _Member(NamedTuple):
    """Of a group of weighted split paths: the documents from one fraction of a shard to another."""

    weight: float
    path: str
    start: Decimal
    end: Decimal


def _weighted_splits(b: Builder) -> bool:
    """A recipe cuts all training sources at one place (`data.split`), and validates behind it or on whole shards
    (`data.validation`). Whether there is something to evaluate."""
    flag, valid_flag = (b.first(*(f"{part}-{name}" for name in _GROUPS)) for part in ("train", "valid"))
    train, valid = _groups(b, flag), _groups(b, valid_flag)
    if not train:
        return False
    members = next(iter(train.values()))
    b.put("data.train", _as_sources(members), flag)
    end = until = members[0].end
    if len(train) > 1 or any(each.start != 0 or each.end != end for each in members):
        shown = ", ".join(f"{each.start}:{each.end} of {each.path}" for each in members[:5])
        rule = "a training has one group, and a recipe cuts all its sources at the same place, from their beginning on"
        remedy = "use one group with 0:END and one END, or prepare shards of their own"
        b.refuse(flag, f"--{flag} has {len(train)} groups with documents {shown}", rule, remedy)
        return False
    validation: dict[str, Any] = {}
    for name, group in valid.items():
        last = group[0].end
        if end == 1 and all(each.start == 0 and each.end == 1 for each in group):
            validation[name] = _as_sources(group)
        elif until == end < 1 and group == [each._replace(start=end, end=last) for each in members]:
            until = last
            b.note("differs", valid_flag, "its group is called valid, behind data.split", name)
        else:
            remark = f"documents {group[0].start}:{last} of {group[0].path}: prepare these documents as a shard of "
            b.note("left out", valid_flag, f"{remark}their own and add it to data.validation.{name}", name)
    if end < 1:
        shares = (f"{share.normalize():f}" if share else "0" for share in (end, until - end, 1 - until))
        b.put("data.split", ",".join(shares), flag)
    if validation:
        b.put("data.validation", validation, valid_flag)
    return bool(validation) or until > end


def _as_sources(members: list[_Member]) -> list[dict[str, Any]]:
    return [{"path": member.path, "weight": member.weight} for member in members]


def _groups(b: Builder, flag: str) -> dict[str, list[_Member]]:
    """The groups of a flag or of the file that it names; empty if there are none, which a row or a problem reports."""
    if not b.has(flag):
        return {}
    given = b.line.flags[flag]
    texts = given.values if any(" " in text for text in given.values) else [given.text]
    if flag.endswith("-path"):
        if (found := b.find_file(given.text)) is None:
            b.note("left out", flag, f"the file is not here: add --{flag} FILE after the script, or `data:` yourself")
            return {}
        try:
            texts = shlex.split(found[0])
        except ValueError as error:
            texts = [f"{found[1]}: {error}"]
    members: dict[str, list[_Member]] = {}
    for text in texts or [""]:
        name, _, rest = text.partition(":")
        parts = [_MEMBER.fullmatch(part) for part in rest.split(",")]
        group = [_Member(float(part[1]), part[4], Decimal(part[2]), Decimal(part[3])) for part in parts if part]
        is_right = all(0 <= each.start < each.end <= 1 and each.weight > 0 for each in group)
        if not name.strip() or name.strip() in members or len(group) < len(parts) or not is_right:
            remedy = "correct it, and --set the variables in it"
            b.refuse(flag, f"--{flag}: {text[:80]!r} is no group of its own", _FORM, remedy)
            return {}
        members[name.strip()] = group
    return members
