"""The flags of Megatron-LM and Megatron-DeepSpeed (flags.yaml), and a command line split into flags and values.
A flag that is not in the table is `not understood`."""

import fnmatch
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from bloomery.base.bounded import parse_yaml, read_text

Kind = Literal["mapped", "default", "differs", "left out", "not needed", "not understood"]
_TABLE = parse_yaml(read_text(Path(__file__).with_name("flags.yaml")))
REQUIRED, POST_NORM = "REQUIRED", "apply-residual-connection-post-layernorm"
"""The second makes Megatron's BERT the one of its paper."""
FIELDS: dict[str, list[list[Any]]] = _TABLE["fields"]
MAPPED: list[str] = " ".join(names for rows in FIELDS.values() for names, *_ in rows).split()
SWITCHES: list[str] = _TABLE["switches"].split()
READ: list[str] = [*SWITCHES, *MAPPED, *_TABLE["read"].split()]
REFUSED: dict[str, list[str]] = {why: names.split() for why, names in _TABLE["refused"].items()}
RECORDED: dict[str, str] = _TABLE["recorded"]
OTHERS: list[tuple[Kind, str, list[str]]] = [
    ("not needed", "this training does not read it, or decides it with other flags", READ),
    ("not needed", "every run records it, where it can be measured", [*RECORDED]),
    *((kind, why, names.split()) for kind, table in _TABLE["others"].items() for why, names in table.items()),
]


def kind_of(name: str, values: Sequence[str]) -> tuple[Kind | Literal["refused"], str]:
    """What to report of a flag that no field came from, and why."""
    for why, names in REFUSED.items():
        if found := [word for word in names if word.partition("=")[0] == name]:
            is_off = bool(values) and all(f"{name}={value.removesuffix('.0')}" in found for value in values)
            return ("not needed", "that turns it off") if is_off else ("refused", why)
    for kind, why, names in OTHERS:
        if any(fnmatch.fnmatchcase(name, word) for word in names):
            return kind, why
    return "not understood", "check whether it changes what is trained"


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


@dataclass(frozen=True)
class Given:
    """A flag as it was written, with its dashes."""

    flag: str
    values: list[str]
    place: str

    @property
    def text(self) -> str:
        return " ".join(self.values)


@dataclass
class CommandLine:
    program: str = ""
    flags: dict[str, Given] = field(default_factory=dict)
    """By name. Of a flag that is given twice the last one counts, as in argparse."""
    stray: list[str] = field(default_factory=list)
    """Words that belong to no flag."""


def parse_command(words: Sequence[str], place: str) -> CommandLine:
    """The program and its flags, each with the words up to the next one. Nothing is refused here."""
    at = next((i for i, word in enumerate(words) if word.endswith(".py")), -1)
    line = CommandLine(words[at] if at >= 0 else "")
    last = line.stray
    for word in words[at + 1 :]:
        flag, equals, value = word.partition("=")
        name = flag.removeprefix("--")
        if not word.startswith("--"):
            last.append(word)
        elif name:
            last = [value] if equals else []
            line.flags[name] = Given(flag, last, place)
            last = line.stray if name in SWITCHES or re.match("(no-(?!rope)|use-|disable-)", name) else last
    return line
