"""Flags of the data: paths, blends, and the weighted split paths of BigScience's Megatron-DeepSpeed."""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from typing import Any

from bloomery.families.family import Family
from bloomery.interop.megatron.builder import Builder, Row
from bloomery.interop.megatron.flags import Given, is_known

_FORM = 'a group is "NAME: WEIGHT START:END PATH, WEIGHT START:END PATH", WEIGHT > 0 and 0 <= START < END <= 1'
_ONE_OF = "Megatron takes one of them"
_GROUPS = ("weighted-split-paths", "weighted-split-paths-path")


def fill_data(b: Builder, family: Family) -> bool:
    """`data`; whether there is something to evaluate."""
    if family.encoder:
        b.put("data.masking.probability", b.value("mask-prob", float, 0.15), "mask-prob")
        b.put("data.masking.short_sequence_probability", b.value("short-seq-prob", float, 0.1), "short-seq-prob")
        if b.has("bert-no-binary-head"):
            b.refuse("bert-no-binary-head", "--bert-no-binary-head is set", "bert has its order head here")
    groups = [f"train-{name}" for name in _GROUPS]
    flags = [name for name in ("data-path", "train-data-path", *groups) if b.has(name)]
    also = [name for name in ("split", "valid-data-path") if b.has(name) and b.has(*groups)]
    if len(flags + also) > 1 and (also or len(flags) > 1):
        one, two, *_ = [*also, *flags]
        b.refuse(one, f"--{one} and --{two} are both set", _ONE_OF, "remove one")
    evaluates = b.has(*groups) and _weighted_splits(b)
    for name in () if b.has(*groups) else _GROUPS:
        b.note("left out", f"valid-{name}", "Megatron reads it with --train-weighted-split-paths only")
    if not b.has(*groups) and flags and (sources := _sources(b, flags[0])):
        blends_one = len(sources) == 1 and "weight" in sources[0]
        remark = "Megatron blends one source with a weight: data.order=megatron needs data.blend_one_source=true"
        b.put("data.train", sources, flags[0], remark=remark if blends_one else "")
        if b.has("valid-data-path"):
            b.put("data.validation", {"valid": _sources(b, "valid-data-path")}, "valid-data-path")
            evaluates = True
        else:
            split = b.value("split", str, "969,30,1").strip("'\"")  # quotes that a shell left in an item of an array
            b.put("data.split", split, "split")
            shares = re.findall(r"[0-9]+(?:\.[0-9]+)?", split)
            evaluates = len(shares) > 1 and float(shares[1]) > 0
    if "train" not in b.raw.get("data", {}):
        for number, row in enumerate(b.rows):
            if row.field.startswith("data."):
                remark = f"add it to `data:` as {row.field.removeprefix('data.')}: {row.result}"
                b.rows[number] = Row("left out", row.flag, row.value, remark=remark)
        b.rows = [row for row in b.rows if row.flag or row.field]
        b.raw.pop("data", None)
    return evaluates


def _sources(b: Builder, flag: str) -> list[dict[str, Any]]:
    given = b.given(flag)
    assert given is not None
    words, rule = given.values, "it is one path, or pairs of weight and path"
    if any(word.startswith("$(") for word in words):
        b.note("left out", flag, "only a running program knows these paths: add `data:` to the recipe")
    elif len(words) == 1:
        return [{"path": words[0]}]
    elif words and not any(re.fullmatch(r"[0-9.eE+-]+", word) for word in words):
        rule = "Megatron then blends by their lengths and ends when all is read once, which no recipe can express"
        what, remedy = f"names {len(words)} paths without weights", f"give each path a weight, `--{flag} 0.7 A 0.3 B`"
        b.problem(given, f"--{flag} {what}", rule, remedy)
    elif not words or len(words) % 2:
        b.problem(given, f"--{flag} has {len(words)} words", rule, "give one path, or pairs")
    else:
        pairs = zip(words[::2], words[1::2], strict=True)
        return [{"path": path, "weight": b.convert(given, weight, float, 1.0)} for weight, path in pairs]
    return []


@dataclass(frozen=True)
class _Member:
    """Of a group of weighted split paths: the documents from one fraction of a shard to another."""

    weight: Decimal
    start: Decimal
    end: Decimal
    path: str

    def source(self) -> dict[str, Any]:
        return {"path": self.path, "weight": float(self.weight)}


def _weighted_splits(b: Builder) -> bool:
    """A recipe cuts all training sources at one place (`data.split`), and validates behind it or on whole shards
    (`data.validation`). Whether there is something to evaluate."""
    flag, valid_flag = (b.first(*(f"{part}-{name}" for name in _GROUPS)) for part in ("train", "valid"))
    train, valid = _groups(b, flag), _groups(b, valid_flag)
    if not train:
        return False
    (members, *others), ends = train.values(), {each.end for group in train.values() for each in group}
    b.put("data.train", [member.source() for member in members], flag)
    if others or len(ends) > 1 or any(each.start for each in members):
        shown = ", ".join(f"{each.start}:{each.end} of {each.path}" for each in members[:5])
        what = f"--{flag} has {len(train)} groups with documents {shown}"
        rule = "a training has one group, and a recipe cuts all its sources at the same place, from their beginning on"
        b.refuse(flag, what, rule, "use one group with 0:END and one END, or prepare shards of their own")
        return False
    end = until = ends.pop()
    validation: dict[str, Any] = {}
    for name, group in valid.items():
        same = [(each.path, each.weight) for each in group] == [(each.path, each.weight) for each in members]
        spans = {(each.start, each.end) for each in group}
        if end == 1 and spans == {(Decimal(0), Decimal(1))}:
            validation[name] = [member.source() for member in group]
        elif until == end < 1 and same and len(spans) == 1 and group[0].start == end:
            until = group[0].end
            b.rows.append(Row("differs", f"--{valid_flag}", name, "data.split", "", "its group is called valid"))
        else:
            remark = f"documents {group[0].start}:{group[0].end} of {group[0].path}: prepare these documents as a shard"
            remark += f" of their own and add it to data.validation.{name}"
            b.rows.append(Row("left out", f"--{valid_flag}", name, remark=remark))
    if end < 1:
        shares = (f"{share.normalize():f}" if share else "0" for share in (end, until - end, 1 - until))
        b.put("data.split", ",".join(shares), flag)
    if validation:
        b.put("data.validation", validation, valid_flag)
    return bool(validation) or until > end


def _groups(b: Builder, flag: str) -> dict[str, list[_Member]]:
    """The groups of a flag or of the file that it names; empty if there are none, which a row or a problem reports."""
    given = b.given(flag)
    if given is None:
        return {}
    texts, place, before = given.values, given.place, len(b.problems)
    if not flag.endswith("-path"):
        texts = texts if any(" " in text for text in texts) else [" ".join(texts)]
    elif (found := b.find_file(given.text)) is None:
        b.note("left out", flag, f"the file is not here: add --{flag} FILE behind the script, or `data:` to the recipe")
        return {}
    else:
        try:
            texts, place = shlex.split(found[0]), found[1]
        except ValueError as error:
            b.problem(given, f"{found[1]} cannot be read: {error}", _FORM, "correct it")
    members: dict[str, list[_Member]] = {}
    for text in texts or [""]:
        name, _, rest = text.partition(":")
        if not rest or not name.strip() or name.strip() in members:
            what = f"{text[:60]!r} has no name, or that of another group" if text else "it is empty"
            b.problem(given, f"in {place}: {what}", _FORM, "correct it")
        members[name.strip()] = [each for part in rest.split(",") if (each := _member(b, given, place, part))]
    return members if len(b.problems) == before else {}


def _member(b: Builder, given: Given, place: str, text: str) -> _Member | None:
    words = text.split()
    if not is_known(" ".join(words[:2])):
        b.unknown_value(given, text.strip())
        return None
    try:
        weight, span, path = words
        start, end = span.split(":")
        found = _Member(Decimal(weight), Decimal(start), Decimal(end), path)
        if 0 <= found.start < found.end <= 1 and found.weight > 0:
            return found
    except (ValueError, InvalidOperation):
        pass
    b.problem(given, f"in {place}: {text.strip()[:80]!r} is no part of a group", _FORM, "correct it")
    return None
