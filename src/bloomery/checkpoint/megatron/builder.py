"""Values out of flags and into recipe fields, with a row for each and every problem kept."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from bloomery.base.errors import Problem
from bloomery.checkpoint.megatron.flags import CommandLine, Given, Kind, Row
from bloomery.checkpoint.megatron.shell_expand import is_known, shown

T = TypeVar("T")


@dataclass
class Builder:
    line: CommandLine
    reasons: Mapping[str, str] = field(default_factory=dict)
    """Why a variable of the script has no value."""
    raw: dict[str, Any] = field(default_factory=dict)
    """The recipe as plain values."""
    places: dict[str, str] = field(default_factory=dict)
    """Recipe field -> the flag it came from, for messages."""
    rows: list[Row] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)
    read: set[str] = field(default_factory=set)
    find_file: Callable[[str], tuple[str, str] | None] = lambda path: None
    """(text, place) of a file that a flag names; None if it is not here."""

    def has(self, name: str) -> bool:
        """Whether a flag without a value stands there; it counts as read."""
        self.read.add(name)
        return f"--{name}" in self.line.flags

    def given(self, name: str) -> Given | None:
        self.read.add(name)
        return self.line.flags.get(f"--{name}")

    def value(self, name: str, kind: Callable[[str], T], default: T) -> T:
        """The flag's value; its default, and a problem, where it has none that can be used."""
        given = self.given(name)
        if given is None:
            return default
        if len(given.values) != 1:
            self.problem(given, f"{given.flag} has {len(given.values)} values", "it takes one", "")
            return default
        return self.convert(given, given.values[0], kind, default)

    def convert(self, given: Given, text: str, kind: Callable[[str], T], default: T) -> T:
        if not is_known(text):
            self.unknown_value(given, text)
            return default
        try:
            return kind(text)
        except ValueError:
            wanted = {int: "a whole number", float: "a number"}.get(kind, "another kind of value")  # type: ignore[call-overload]
            self.problem(given, f"{given.flag} is {text!r}", f"it is {wanted}", "mend it")
            return default

    def unknown_value(self, given: Given, text: str) -> None:
        names = [name for name in self.reasons if f"${name}" in text or f"${{{name}" in text]
        why = "; ".join(f"${name}: {self.reasons[name]}" for name in names) or "only a running shell knows it"
        example = names[0] if names else "NAME"
        remedy = f"give it with --set {example}=VALUE, or add {given.flag} VALUE behind the script"
        self.problem(given, f"{given.flag} is {shown(text)}", why, remedy)

    def text(self, name: str) -> str | None:
        """A word or a path; one with an unset variable in it stays as written."""
        given = self.given(name)
        return shown(given.text) if given is not None else None

    def put(self, path: str, value: Any, *flags: str, kind: Kind = "mapped", remark: str = "") -> None:
        """Set a field of the recipe. `flags` it came from; none: Megatron's default."""
        holder = self.raw
        *sections, last = path.split(".")
        for section in sections:
            holder = holder.setdefault(section, {})
        holder[last] = value
        found = [given for name in flags if (given := self.line.flags.get(f"--{name}")) is not None]
        if found:
            self.places[path] = f"{found[0].place} {found[0].flag}"
            for given in found:
                self.rows.append(Row(kind, given.flag, shown(given.text), path, say(value), remark))
        else:
            remark = remark or "Megatron's default"
            self.rows.append(Row("default" if kind == "mapped" else kind, "", "", path, say(value), remark))

    def tell(self, kind: Kind, name: str, remark: str, *, path: str = "", result: str = "") -> None:
        """A row without a field: a flag that is not needed, or that means something else here."""
        given = self.given(name)
        value = shown(given.text) if given else ""
        self.rows.append(Row(kind, f"--{name}", value, path, result, remark))

    def problem(self, given: Given | None, what: str, rule: str = "", remedy: str = "") -> None:
        place = given.place if given else next((g.place for g in self.line.flags.values()), "command line")
        self.problems.append(Problem(what, rule, remedy, place))


def say(value: Any) -> str:
    """A value as YAML would write it on one line."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key}: {say(inner)}" for key, inner in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(say(inner) for inner in value) + "]"
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return str(value)
