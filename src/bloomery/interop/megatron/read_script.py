"""A launch script read without running it: continuations, plain assignments and arrays, `$VAR`, `${VAR:-x}`,
`bash -c`, `#SBATCH`. Everything else (conditions, loops, functions, here-documents, arithmetic, programs) is not read:
what depends on it has no value, and the place is reported."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping
from pathlib import Path

from bloomery.base.errors import Problem, RecipeError
from bloomery.interop.megatron.run_script import Command, Script, scan

_QUOTED = r"""\\.|'[^']*'|"(?:\\.|[^"\\])*\""""
_COMMENT = re.compile(rf"({_QUOTED})|(?<!\S)\#.*", re.DOTALL)
_REDIRECTION = re.compile(rf"({_QUOTED})|(?<=\s)[0-9&]?(?:>>?|<)\s*&?[^\s;&|]*", re.DOTALL)
_STATEMENT = re.compile(rf"(?:{_QUOTED}|\$\([^()]*(?:\([^()]*\)[^()]*)*\)|`[^`]*`|[^;&|'\"\\])+|[;&|]+", re.DOTALL)
_EXPANSION = re.compile(
    r"""\\.|'[^']*'|"\$\{(?P<array>\w+)\[@\]\}"|\$\{(?P<items>\w+)\[[@*]\]\}|\$\{(?P<name>\w+)(?::?-(?P<default>[^}]*))?\}|\$(?P<plain>\w+)"""
    r"""|\$\((?P<sum>\(.*?\))\)|(?P<command>\$\([^()]*(?:\([^()]*\)[^()]*)*\)|`[^`]*`)|"?\$[@*]"?""",
    re.DOTALL,
)
_ASSIGNMENT = re.compile(r"(?:(?:export|declare|local|readonly)\s+(?:-\w+\s+)*)?(\w+)(\+?)=(.*)", re.DOTALL)
_OPENS = {"if": "fi", "for": "done", "while": "done", "until": "done", "case": "esac", "{": "}", "function": "}"}
_LEADING = re.compile(r"(?:then|else|do|elif|!|time|if|while|until|\{|fi|done|esac|\}|\(|[^\s()]+\))(?:\s+|$)")


def read_script(path: Path, text: str, given: Mapping[str, str]) -> Script:
    """RecipeError with the line that cannot be read."""
    script, outside = scan(text, given)
    _Reader(script, path, outside).read(text, 0, [], 0)
    return script


class _Reader:
    def __init__(self, script: Script, path: Path, given: Mapping[str, str]) -> None:
        self.script, self.path, self.given = script, path, given
        self.values = dict(given)

    def read(self, text: str, inner: int, before: list[str], depth: int) -> None:
        """`inner`: the line of a text inside another script, else 0. `before`: the launcher's words."""
        if depth > 20:
            raise self.error(inner, "it is nested too deeply, or calls itself")
        blocks: list[tuple[str, str]] = []
        for number, line in self.lines(text):
            at, condition = inner or number, ""
            for statement in (found.strip() for found in _STATEMENT.findall(line)):
                first = statement.split(maxsplit=1)[0] if statement else ""
                if first[:1] in ("&", "|", ";"):
                    condition = f"it depends on a condition of line {at}, which is not read" if len(first) > 1 else ""
                    continue
                if blocks and first == blocks[-1][1]:
                    blocks.pop()
                elif first in _OPENS or statement.endswith("() {") or re.fullmatch(r"\w+\s*\(\)", statement):
                    if not blocks:
                        self.script.unread.append((at, f"the `{first}` of this line is not read"))
                    reason = f"it depends on the `{first}` of line {at}, which is not read"
                    blocks.append((reason, _OPENS.get(first, "}")))
                while match := _LEADING.match(statement):
                    statement = statement[match.end() :]
                reason = blocks[-1][0] if blocks else ""
                match = _ASSIGNMENT.fullmatch(statement)
                plain = re.sub(r"\$\(.*\)|`[^`]*`", "", match[3], flags=re.DOTALL) if match else ""
                if match and (plain.startswith("(") or len(self.split(plain, at)) < 2):
                    self.assign(match[1], match[2], match[3], at, reason or condition)
                elif statement == "exit" or statement.startswith("exit "):
                    self.script.unread += [] if reason else [(at, "the script ends here with `exit`")]
                    if not reason:
                        return
                elif statement:
                    self.command(self.split(self.expand(statement), at), at, reason, before, depth)

    def lines(self, text: str) -> Iterator[tuple[int, str]]:
        """Logical lines: continuations, quotes and arrays joined; here-documents, comments and redirections removed."""
        rows = iter(enumerate(text.splitlines(), 1))
        for number, row in rows:
            whole = _COMMENT.sub(lambda match: match[1] or "", row)
            while True:
                rest = re.sub(_QUOTED, "", whole, flags=re.DOTALL)
                if not (whole.endswith("\\") or re.search("['\"]", rest) or re.search(r"=\([^)]*$", rest)):
                    break
                _, more = next(rows, (0, None))
                if more is None:
                    raise self.error(number, "a quote or an array has no end")
                is_quoted = re.search("['\"]", rest) is not None
                more = more if is_quoted else _COMMENT.sub(lambda match: match[1] or "", more)
                whole = whole.removesuffix("\\") + (" " if whole.endswith("\\") else "\n") + more
            if heredoc := re.search(r"<<-?\s*['\"]?(\w+)['\"]?", whole):
                self.script.unread.append((number, "a here-document, which is not read"))
                while next(rows, (0, heredoc[1]))[1].strip("\t") != heredoc[1]:
                    continue
                whole = whole.replace(heredoc[0], "")
            yield number, _REDIRECTION.sub(lambda match: match[1] or "", whole)

    def assign(self, name: str, appends: str, value: str, line: int, reason: str) -> None:
        if name in self.given:
            return
        expanded = self.expand(value)
        if value.startswith("("):
            items = self.split(expanded.strip()[1:-1], line)
            expanded = " ".join(f'"{item}"' if re.search(r"\s|^$", item) else item for item in items)
        else:
            expanded = " ".join(self.split(expanded, line))
        self.values[name] = (
            self.values.get(name, "") + (" " if value[:1] == "(" else "") if appends else ""
        ) + expanded
        if reason:
            del self.values[name]
            self.script.reasons[name] = reason

    def command(self, words: list[str], line: int, reason: str, before: list[str], depth: int) -> None:
        if words[:1] in (["source"], ["."]):
            self.script.unread.append((line, f"`{' '.join(words)}`: what it sets is not read"))
        if all(_ASSIGNMENT.fullmatch(word) for word in words if word != "export"):
            for match in filter(None, map(_ASSIGNMENT.fullmatch, words)):
                self.assign(match[1], match[2], shlex.quote(match[3]), line, reason)
            return
        shell = next((i for i, word in enumerate(words) if re.search(r"(^|/)(ba|z)?sh$", word)), None)
        if words[:1] == ["eval"]:
            self.read(" ".join(words[1:]), line, before, depth + 1)
        elif shell is not None and words[shell + 1 : shell + 2] == ["-c"] and len(words) > shell + 2:
            self.read(words[shell + 2], line, [*before, *words[:shell]], depth + 1)
        elif words:
            self.script.commands.append(Command([*before, *words], line, reason))

    def expand(self, text: str) -> str:
        return _EXPANSION.sub(self.value, text)

    def value(self, match: re.Match[str]) -> str:
        if match["sum"] or match["command"]:  # stays, as one word: nobody knows it
            return (
                "$(" + ("".join(match["sum"].split()) if match["sum"] else re.findall(r"[\w./-]+|$", match[0])[0]) + ")"
            )
        name = match["array"] or match["items"] or match["name"] or match["plain"]
        if name is None:
            return match[0] if match[0][0] in "\\'" else ""  # `$@`
        known = self.values.get(name, "")
        if name in self.values and (known or match["default"] is None):
            return known
        if match["default"] is not None and name not in self.script.reasons:
            return self.expand(match["default"])
        why = "it is an argument of the script" if name.isdecimal() else "the script does not set it"
        self.script.reasons.setdefault(name, why)
        return f"${name}"

    def split(self, text: str, line: int) -> list[str]:
        try:
            return shlex.split(text)
        except ValueError as error:
            raise self.error(line, str(error)) from error

    def error(self, line: int, what: str) -> RecipeError:
        remedy = "correct that line, or run the script: bloomery import megatron --script FILE"
        return RecipeError(Problem(f"this script cannot be read: {what}", "", remedy, f"{self.path}:{line}"))
