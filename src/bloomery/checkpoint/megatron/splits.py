"""Weighted split paths of Megatron-DeepSpeed: `"NAME: WEIGHT START:END PATH, WEIGHT START:END PATH" "NAME: ..."`.

START and END are fractions of a shard's documents. A recipe cuts all training sources alike (`data.split`), and
validates on the part behind or on whole shards (`data.validation`). What is cut otherwise is told, group by group.
"""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from typing import Any

from bloomery.checkpoint.megatron.builder import Builder
from bloomery.checkpoint.megatron.flags import Given, Row
from bloomery.checkpoint.megatron.shell_expand import is_known, shown

_ONE = Decimal(1)
_FORM = '"NAME: WEIGHT START:END PATH, WEIGHT START:END PATH", WEIGHT > 0 and 0 <= START < END <= 1'
_OWN_SHARD = "prepare these documents as a shard of their own and add it to"


@dataclass(frozen=True)
class Member:
    """One line of a blend."""

    weight: Decimal
    start: Decimal
    end: Decimal
    path: str

    @property
    def is_whole(self) -> bool:
        return self.start == 0 and self.end == 1

    def source(self) -> dict[str, Any]:
        return {"path": shown(self.path), "weight": float(self.weight)}


@dataclass(frozen=True)
class Groups:
    """What one flag says, for `train` or `valid`."""

    flag: str
    """Without dashes: the flag that names them, or the file with them."""
    given: Given
    members: dict[str, list[Member]]


def split_flags(part: str) -> tuple[str, str]:
    return f"{part}-weighted-split-paths", f"{part}-weighted-split-paths-path"


def fill_weighted_splits(b: Builder) -> bool:
    """`data.train`, `data.split` and `data.validation` of these flags. Whether there is something to evaluate."""
    train, valid = _read(b, "train"), _read(b, "valid")
    if train is None:
        if valid is not None:
            remark = f"it is read with --{split_flags('train')[0]} only: add data.validation to the recipe"
            b.tell("left out", valid.flag, remark)
        return False
    for flag in ("data-path", "train-data-path", "valid-data-path", "split"):
        if (other := b.given(flag)) is not None:
            b.problem(
                other, f"--{flag} and {train.given.flag} are both set", "Megatron takes one of them", "remove one"
            )
    if len(train.members) != 1:
        what = f"{train.given.flag} has {len(train.members)} groups: {', '.join(train.members)}"
        b.problem(train.given, what, "a training has one", "leave one group")
        return False
    (members,) = train.members.values()
    b.put("data.train", [member.source() for member in members], train.flag)
    ends = {member.end for member in members}
    odd = [member for member in members if member.start != 0 or len(ends) > 1]
    if odd:
        told = ", ".join(f"{member.start}:{member.end} of {shown(member.path)}" for member in odd[:5])
        rule = "a recipe cuts all training sources at the same place, from their beginning on (data.split)"
        remedy = "use 0:END with one END, or prepare these documents as shards of their own"
        b.problem(train.given, f"{train.given.flag} asks for documents {told}", rule, remedy)
        return False
    end = ends.pop()
    if end == 1:
        return _whole_shards(b, valid)
    return _behind_the_cut(b, train, members, end, valid)


def _whole_shards(b: Builder, valid: Groups | None) -> bool:
    """Nothing is cut off the training sources, so validation has shards of its own."""
    if valid is None:
        return False
    groups = {name: members for name, members in valid.members.items() if all(each.is_whole for each in members)}
    for name, members in valid.members.items():
        if name not in groups:
            cut = next(each for each in members if not each.is_whole)
            what = f"documents {cut.start}:{cut.end} of {shown(cut.path)}, but a group reads whole shards"
            _left_out(b, valid, name, f"{what}: {_OWN_SHARD} data.validation.{name}")
    if groups:
        sources = {name: [member.source() for member in members] for name, members in groups.items()}
        b.put("data.validation", sources, valid.flag)
    return bool(groups)


def _behind_the_cut(b: Builder, train: Groups, members: list[Member], end: Decimal, valid: Groups | None) -> bool:
    """One group validates on the same sources behind the cut, as data.split does. The others have no place."""
    chosen, until = "", end
    for name, group in valid.members.items() if valid is not None else ():
        (first, *_), ends = group, {each.end for each in group}
        same = [(each.path, each.weight) for each in group] == [(each.path, each.weight) for each in members]
        if not chosen and same and {each.start for each in group} == {end} and len(ends) == 1:
            chosen, until = name, first.end
            continue
        assert valid is not None
        what = f"documents {first.start}:{first.end} of {shown(first.path)}"
        rule = "with data.split the one group is `valid`: all training sources behind the cut"
        _left_out(b, valid, name, f"{what}, but {rule}; {_OWN_SHARD} data.validation.{name}, and drop data.split")
    shares = ",".join(_plain(share) for share in (end, until - end, _ONE - until))
    b.put("data.split", shares, train.flag)
    if chosen and valid is not None:
        b.rows.append(
            Row(
                "mapped" if chosen == "valid" else "differs",
                valid.given.flag,
                chosen,
                "data.split",
                shares,
                "its group is called valid",
            )
        )
    return bool(chosen)


def _left_out(b: Builder, groups: Groups, name: str, remark: str) -> None:
    b.rows.append(Row("left out", groups.given.flag, name, remark=remark))


def _read(b: Builder, part: str) -> Groups | None:
    """The groups of a flag or of the file that it names; None if there are none, which a row or a problem tells."""
    direct, by_file = split_flags(part)
    given, file = b.given(direct), b.given(by_file)
    if given is not None and file is not None:
        b.problem(file, f"--{direct} and --{by_file} are both set", "Megatron takes one of them", "remove one")
        return None
    if given is not None:
        texts = given.values if any(" " in value for value in given.values) else [" ".join(given.values)]
        return _parsed(b, direct, given, given.place, texts)
    if file is None:
        return None
    found = b.find_file(file.text)
    if found is None:
        remedy = f"add --{by_file} FILE behind the script, or `data:` to the recipe"
        b.tell("left out", by_file, f"weighted ranges of documents: the file is not here; {remedy}")
        return None
    text, place = found
    try:
        texts = shlex.split(text)
    except ValueError as error:
        b.problem(
            file, f"{place} cannot be read: {error}", 'it holds groups in quotes: "NAME: ..." "NAME: ..."', "mend it"
        )
        return None
    return _parsed(b, by_file, file, place, texts)


def _parsed(b: Builder, flag: str, given: Given, place: str, texts: list[str]) -> Groups | None:
    members: dict[str, list[Member]] = {}
    before = len(b.problems)
    for text in texts:
        name, colon, rest = text.partition(":")
        name = name.strip()
        if not colon or not name or name in members:
            what = f"two groups are called {name!r}" if name in members else f"{text[:60]!r} has no name"
            b.problem(given, f"in {place}: {what}", f"a group is {_FORM}", "mend it")
            continue
        members[name] = [found for part in rest.split(",") if (found := _member(b, given, place, part)) is not None]
    if not texts:
        b.problem(given, f"{place} is empty", f"a group is {_FORM}", "mend it")
    return Groups(flag, given, members) if len(b.problems) == before else None


def _member(b: Builder, given: Given, place: str, text: str) -> Member | None:
    words = text.split()
    try:
        weight, span, path = words
        start, end = span.split(":")
        found = Member(Decimal(weight), Decimal(start), Decimal(end), path)
        if 0 <= found.start < found.end <= 1 and found.weight > 0:
            return found
    except (ValueError, InvalidOperation):
        if words and any(not is_known(word) for word in words[:2]):
            b.unknown_value(given, text.strip())
            return None
    b.problem(given, f"in {place}: {text.strip()[:80]!r} is no part of a group", f"a group is {_FORM}", "mend it")
    return None


def _plain(number: Decimal) -> str:
    return f"{number.normalize():f}" if number else "0"
