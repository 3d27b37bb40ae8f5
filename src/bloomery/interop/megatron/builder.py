"""Values out of flags and into recipe fields, with a row for each and every problem kept."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from decimal import Decimal, InvalidOperation
from typing import Any, TypeVar

from bloomery.base.errors import Problem
from bloomery.interop.megatron.flags import CommandLine, Given, Kind, is_known

T = TypeVar("T")
LARGEST = 10**18
"""Of every number: it keeps nonsense out of later arithmetic."""


@dataclass(frozen=True)
class Row:
    """What became of a flag, or of a key of a ds_config."""

    kind: Kind
    flag: str
    value: str
    field: str = ""
    """Of the recipe."""
    result: str = ""
    remark: str = ""


@dataclass
class Builder:
    line: CommandLine
    reasons: Mapping[str, str] | None = None
    """Why a variable of the script has no value; None: there is no script."""
    deepspeed: bool = False
    """Whether DeepSpeed trains: --deepspeed, or a ds_config at hand."""
    raw: dict[str, Any] = field(default_factory=dict)
    """The recipe as plain values."""
    places: dict[str, str] = field(default_factory=dict)
    """Recipe field -> the flag it came from, for messages."""
    rows: list[Row] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)
    find_file: Callable[[str], tuple[str, str] | None] = lambda path: None
    """(text, place) of a file that a flag names; None if it is not here."""

    def given(self, name: str) -> Given | None:
        return self.line.flags.get(f"--{name}")

    def has(self, *names: str) -> bool:
        return any(f"--{name}" in self.line.flags for name in names)

    def first(self, *names: str) -> str:
        """Of several names of one flag the one that is given, else the first."""
        return next((name for name in names if self.has(name)), names[0])

    def value(self, name: str, kind: Callable[[str], T], default: T) -> T:
        """The flag's value; its default, and a problem, where it has none that can be used."""
        given = self.given(name)
        if given is None:
            return default
        if len(given.values) != 1:
            what = f"{given.flag} has {len(given.values)} values"
            self.problem(given, what, "it takes one", "write one behind it; of a script: --set what it comes from")
            return default
        return self.convert(given, given.values[0], kind, default)

    def convert(self, given: Given, text: str, kind: Callable[[str], T], default: T) -> T:
        if not is_known(text):
            self.unknown_value(given, text)
            return default
        parse: Callable[[str], T] = {int: whole_number, float: real_number}.get(kind, kind)  # type: ignore[call-overload]
        try:
            return parse(text)
        except ValueError as error:
            self.problem(given, f"{given.flag} is {text[:60]!r}", f"it is {error}", "write one, or remove the flag")
            return default

    def unset_names(self, text: str) -> list[str]:
        """The variables and arguments of a script in a text that have no value."""
        return list(dict.fromkeys(re.findall(r"\$\{?([A-Za-z_][A-Za-z0-9_]*|[0-9])", text)))

    def why_unknown(self, text: str) -> str:
        known = {name: (self.reasons or {}).get(name) for name in self.unset_names(text)}
        return "; ".join(f"${name}: {why}" for name, why in known.items() if why) or "only a running program knows it"

    def unknown_value(self, given: Given, text: str) -> None:
        names, remedy = self.unset_names(text), f"add {given.flag} VALUE behind the script"
        if self.reasons is None:
            remedy = f"write {given.flag} with its value"
        elif names:
            remedy = f"give it with --set {names[0]}=VALUE, or {remedy}"
        self.problem(given, f"{given.flag} is {text}", self.why_unknown(text), remedy)

    def put(self, path: str, value: Any, *flags: str, kind: Kind = "mapped", remark: str = "") -> None:
        """Set a field of the recipe. `flags` it came from; none of them given: Megatron's default."""
        holder = self.raw
        *sections, last = path.split(".")
        for section in sections:
            holder = holder.setdefault(section, {})
        holder[last] = value
        found = [given for name in flags if (given := self.given(name)) is not None]
        if found:
            self.places[path] = f"{found[0].place} {found[0].flag}"
        for given in found:
            self.rows.append(Row(kind, given.flag, given.text, path, as_text(value), remark))
        if not found:
            kind = "default" if kind == "mapped" else kind
            self.rows.append(Row(kind, "", "", path, as_text(value), remark or "Megatron's default"))

    def note(self, kind: Kind, name: str, remark: str, *, path: str = "", result: str = "") -> None:
        """A row without a field, where the flag is given: it is not needed, or means something else here."""
        if (given := self.given(name)) is not None:
            self.rows.append(Row(kind, given.flag, given.text, path, result, remark))

    def problem(self, given: Given | None, what: str, rule: str = "", remedy: str = "") -> None:
        place = given.place if given else next((g.place for g in self.line.flags.values()), "command line")
        found = Problem(what, rule, remedy, place)
        if found not in self.problems:  # several fields may ask for one flag
            self.problems.append(found)

    def refuse(self, name: str, what: str, rule: str, remedy: str = "remove it, if that is the training") -> None:
        self.problem(self.given(name), what, rule, remedy)


def whole_number(text: str) -> int:
    """Also `3e9` and `1.0`, which can only mean one thing. ValueError says what any other text should be."""
    try:
        exact = Decimal(text)
    except InvalidOperation:
        raise ValueError("a whole number") from None
    if not exact.is_finite() or (exact.adjusted() <= 18 and exact != exact.to_integral_value()):
        raise ValueError("a whole number")
    if exact.adjusted() > 18 or abs(exact) > LARGEST:
        raise ValueError(f"a whole number of at most {LARGEST:,}")
    return int(exact)


def real_number(text: str) -> float:
    """ValueError also for nan and infinity."""
    try:
        number = float(text)
    except ValueError:
        raise ValueError("a number") from None
    if not math.isfinite(number):
        raise ValueError("a finite number")
    return number


def steps(text: str) -> str:
    return f"{whole_number(text)} steps"


def as_text(value: Any) -> str:
    """A value as YAML would write it on one line."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key}: {as_text(inner)}" for key, inner in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(as_text(inner) for inner in value) + "]"
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return str(value)
