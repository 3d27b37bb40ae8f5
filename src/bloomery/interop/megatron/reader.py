"""A launch script that is only read, without running any of it: continuations, plain assignments and arrays, `$VAR`,
`${VAR:-x}`, `bash -c`. Conditions, loops, functions, here-documents and programs are not: what they set has no value.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import NoReturn

from bloomery.base.errors import Problem, RecipeError
from bloomery.interop.megatron.flags import SWITCHES
from bloomery.interop.megatron.script import Command, Script

_COMMENT = r"(?<!\S)\#[^\n]*"
_QUOTED = r"""\\.|'[^']*'|"(?:\\.|[^"\\])*\""""
_PROGRAM = r"\$\((?:[^()]|\((?:[^()]|\([^()]*\))*\))*\)|`[^`]*`|[<>]\([^()]*\)"
_ARRAY = rf"=\((?:{_COMMENT}|{_QUOTED}|{_PROGRAM}|[^()'\"\\])*\)"
_HEREDOC = re.compile(r"(?<!<)<<-?[ \t]*(['\"]?)(\w+)\1([^\n]*)\n.*?^\t*\2$", re.DOTALL | re.MULTILINE)
_LINE = re.compile(rf"(?:{_COMMENT}|{_QUOTED}|{_ARRAY}|[^\n'\"\\])+|(?P<wrong>['\"\\])", re.DOTALL)
_NOISE = re.compile(rf"({_QUOTED}|{_PROGRAM})|{_COMMENT}|(?<=\s)[0-9&]?(?:>>?|<)\s*&?[^\s;&|]*", re.DOTALL)
_STATEMENT = re.compile(rf"(?:{_QUOTED}|{_PROGRAM}|{_ARRAY}|[^;&|\n'\"\\])+|[;&|\n]+", re.DOTALL)
_VARIABLE = re.compile(rf"{_PROGRAM}|\$\{{(?P<name>\w+)(?P<rest>[^}}]*)\}}|\$(?P<plain>\w+)|\$[@*#]", re.DOTALL)
_EXPANSION = re.compile(rf'"\$(?:\{{\w+\[@\]\}}|@)"|{_QUOTED}|{_VARIABLE.pattern}', re.DOTALL)
_ASSIGNMENT = re.compile(r"(?:(?:export|declare|local|readonly)\s+(?:-\w+\s+)*)?(\w+)(\+?)=(.*)", re.DOTALL)
_OPENS = {"if": "fi", "for": "done", "while": "done", "until": "done", "select": "done", "case": "esac", "{": "}"}
_LEADING = re.compile(r"(?:(?:then|else|do|elif|!|time|if|while|until|\{|eval|exec|\(|[^\s()$]+\))(?:\s+|$))*")


def read_script(path: Path, text: str, given: Mapping[str, str]) -> Script:
    """RecipeError with a line that cannot be read."""
    reader = _Reader(path, Script(text), given)
    reader.read(text, 0, 0)
    return reader.script


class _Reader:
    def __init__(self, path: Path, script: Script, given: Mapping[str, str]) -> None:
        self.path, self.script, self.given = path, script, given
        self.values = script.variables(given)
        self.unread: set[str] = set()
        """Names that are set where nothing is read."""

    def read(self, text: str, inside: int, depth: int) -> None:
        """`inside`: the line of a text that `bash -c` runs, else 0."""
        blocks: list[tuple[int, str]] = []
        text = _HEREDOC.sub(lambda match: f"here-document{match[3]}" + "\n" * match[0].count("\n"), text)
        for match in _LINE.finditer(text):
            at, before = inside or text.count("\n", 0, match.start()) + 1, ""
            if match["wrong"] or depth > 20:
                self.fail(at, "a quote has no end, or it calls itself")
            line = _NOISE.sub(lambda found: found[1] or "", match[0]).replace("\\\n", " ")
            for part in filter(None, map(str.strip, _STATEMENT.findall(line))):
                first = part.split(maxsplit=1)[0]
                if first[0] in ";&|":
                    before = part
                    continue
                opens = "}" if re.match(r"(function\s+)?\w+\s*\(\)", part) else _OPENS.get(first)
                if blocks and first == blocks[-1][1]:
                    blocks.pop()
                elif opens and not (blocks and first == "{"):
                    self.script.unread += [] if blocks else [(at, f"the `{first}` of this line is not read")]
                    blocks.append((at, opens))
                doubt = f"it depends on line {blocks[0][0] if blocks else at}, which is not read"
                doubt = doubt if blocks or before in ("&&", "||") else ""
                self.statement(part[_LEADING.match(part).end() :], at, doubt, depth)  # type: ignore[union-attr]

    def statement(self, part: str, at: int, doubt: str, depth: int) -> None:
        match = _ASSIGNMENT.fullmatch(part)
        if doubt:
            names = re.findall(r"\b([A-Za-z_]\w*)\+?=", part) + re.findall(r"\b(?:for|read|select)\b.*?(\w+)", part)
            self.unread |= {*names} - self.given.keys()
            self.values = {name: value for name, value in self.values.items() if name not in self.unread}
        elif match and (match[3][:1] == "(" or len(self.split(re.sub(_PROGRAM, "", match[3]), at)) < 2):
            name, is_array = match[1], match[3][:1] == "("
            if is_array and match[3][-1] != ")":
                self.fail(at, "an array has no end")
            items = self.split(self.expand(match[3][1:-1] if is_array else match[3]), at)
            value = " ".join(map(shlex.quote, items) if is_array else items)
            old = self.values.get(name, "") + " " * is_array if match[2] else ""
            self.values[name] = self.given.get(name, old + value)
            return
        words = self.split(self.expand(part), at)
        shell = next((i for i, word in enumerate(words) if re.search(r"(^|/)(ba|z)?sh$", word)), len(words))
        if words[:1] in (["source"], ["."], ["cat"], ["exit"]):
            self.script.unread += [] if doubt else [(at, f"`{' '.join(words)}` is not read")]
        elif words[shell + 1 : shell + 2] in (["-c"], ["-lc"]) and len(words) > shell + 2:
            self.read(words[shell + 2], at, depth + 1)
        elif words and words[0] != "echo":
            self.script.commands.append(Command(words, at, doubt or _hidden_flags(words)))

    def split(self, text: str, at: int) -> list[str]:
        try:
            return shlex.split(text)
        except ValueError as error:
            return self.fail(at, str(error))

    def expand(self, text: str) -> str:
        def expanded(match: re.Match[str]) -> str:
            if match[0].startswith('"') and not match["name"]:
                if re.fullmatch(r'"\$(\{\w+\[@\]\}|@)"', match[0]):
                    return _VARIABLE.sub(self.value, match[0][1:-1])
                return _VARIABLE.sub(lambda found: re.sub(r'(["\\])', r"\\\1", self.value(found)), match[0])
            return match[0] if match[0][0] in "\\'" else self.value(match)

        return _EXPANSION.sub(expanded, text)

    def value(self, match: re.Match[str]) -> str:
        name, rest = match["name"] or match["plain"], match["rest"] or ""
        known = self.values.get(name or "")
        if name is None:  # a program stays, as one word: nobody knows what it prints; `$@` is empty
            inner = re.sub(r"[\s'\"`]|^\$\(|\)$", "", match[0])
            return "" if len(match[0]) == 2 else f"$({inner})"
        if rest.lstrip(":").startswith("-") and name not in self.unread:
            return known or self.expand(rest.lstrip(":")[1:])
        return f"${name}" if known is None or rest not in ("", "[@]", "[*]") else known

    def fail(self, line: int, what: str) -> NoReturn:
        remedy = "correct that line, or run the script: bloomery import megatron --script FILE"
        raise RecipeError(Problem(f"this script cannot be read: {what}", "", remedy, f"{self.path}:{line}"))


def _hidden_flags(words: list[str]) -> str:
    """A variable without a value that may hold flags."""
    for before, word in pairwise(words):
        if re.fullmatch(r"\$\w+", word) and (not before.startswith("--") or before[2:] in SWITCHES.split()):
            return f"{word} has no value, and may hold flags"
    return ""
