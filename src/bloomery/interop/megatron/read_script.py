"""A launch script read without running it: continuations, plain assignments and arrays, `$VAR`, `${VAR:-x}`,
`bash -c`, `#SBATCH`. Everything else (conditions, loops, functions, here-documents, arithmetic, programs) is not read:
what depends on it has no value, and the place is reported."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from bloomery.base.errors import Problem, RecipeError
from bloomery.interop.megatron.run_script import Command, Script, scan

_PIECE = r"""'[^']*'|"(?:\\.|[^"\\])*"|\\.|\$\((?:[^()]|\((?:[^()]|\([^()]*\))*\))*\)|`[^`]*`|\$\{[^}]*\}|\$(?:\w+|[@*#?!-])?"""
_TOKEN = re.compile(
    rf"(?P<skip>(?:[ \t\r]|\\\n)+|(?<![^\s;&|(])\#[^\n]*)|(?P<heredoc><<-?[ \t]*['\"]?(?P<until>\w+)['\"]?)"
    rf"|(?P<into>(?:[0-9]|&)?(?:>>|>\||>&|<&|<<<|>|<)(?:[ \t]*&?[0-9-]\b)?)|(?P<array>[A-Za-z_]\w*\+?=\()"
    rf"|(?P<end>\n|;;?|&&|\|\||[&|()])|(?P<word>(?:{_PIECE}|[^\s;&|()<>'\"\\$`])+)|(?P<bad>.)",
    re.DOTALL,
)
_EXPANSION = re.compile(rf"{_PIECE}|[^'\"\\$`]+|.", re.DOTALL)
_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)(\+?)=(.*)", re.DOTALL)
_OPENS = {"if": "fi", "for": "done", "while": "done", "until": "done", "select": "done", "case": "esac", "{": "}"}
_DECLARES = ("export", "declare", "local", "readonly", "typeset")


@dataclass
class _Statement:
    line: int
    words: list[str] = field(default_factory=list)
    """As they are written; an array is `NAME=(` with its items behind it and `)`."""
    is_conditional: bool = False


def read_script(path: Path, text: str, given: Mapping[str, str]) -> Script:
    """RecipeError with the line that cannot be read."""
    script, outside = scan(text, given)
    _Reader(script, path, outside).read(text, 0, [])
    return script


class _Reader:
    def __init__(self, script: Script, path: Path, given: Mapping[str, str]) -> None:
        self.script, self.path, self.given = script, path, given
        self.values: dict[str, list[str]] = {name: [value] for name, value in given.items()}
        self.depth = 0

    def read(self, text: str, line: int, before: list[str]) -> None:
        """`line`: of a text inside another script, else 0. `before`: the launcher's words."""
        self.depth += 1
        if self.depth > 20:
            raise self.error(line, "it is nested too deeply, or calls itself")
        blocks: list[tuple[str, str]] = []
        for statement in self.statements(text):
            at = line or statement.line
            for word in statement.words[:1]:
                if blocks and word == blocks[-1][1]:
                    blocks.pop()
                elif word in _OPENS or word == "function":
                    if not blocks:
                        self.script.unread.append((at, f"the `{word}` of this line is not read"))
                    if word in _OPENS:  # `function` is followed by its `{`
                        blocks.append((f"it depends on the `{word}` of line {at}, which is not read", _OPENS[word]))
            words = statement.words
            while words and words[0] in ("then", "else", "do", "elif", "!", "time", *_OPENS, *_OPENS.values()):
                words = words[1:]
            reason = blocks[-1][0] if blocks else ""
            if words and not reason and statement.is_conditional and _ASSIGNMENT.fullmatch(words[0]):
                reason = f"it depends on a condition of line {at}, which is not read"
            if words and not self.assign(words, at, reason) and not self.command(words, at, reason, before, line):
                self.script.unread.append((at, "the script ends here with `exit`; what follows was not read"))
                break
        self.depth -= 1

    def statements(self, text: str) -> list[_Statement]:
        found, at, in_array, skip_next = [_Statement(1)], 0, False, False
        pending: list[str] = []
        while match := _TOKEN.match(text, at):
            at, line = match.end(), text.count("\n", 0, match.start()) + 1
            if match["bad"]:
                raise self.error(line, f"{match['bad']} has no end")
            if match["heredoc"]:
                pending.append(match["until"])
                self.script.unread.append((line, "a here-document, which is not read"))
            elif match["into"]:
                skip_next = match["into"].rstrip("0123456789-")[-1] != "&"
            elif match["array"]:
                in_array = True
                found[-1].words.append(match["array"])
            elif match["word"]:
                found[-1].line = found[-1].line if found[-1].words else line
                found[-1].words += [] if skip_next else [match["word"]]
                skip_next = False
            elif match["end"] == ")" and in_array:
                in_array = False
                found[-1].words.append(")")
            elif match["end"] and not in_array:
                found.append(_Statement(line, is_conditional=match["end"] in ("&&", "||")))
                while match["end"] == "\n" and pending:
                    body = re.compile(rf"(?:.*\n)*?\t*{pending.pop(0)}(?:\n|$)").match(text, at)
                    if body is None:
                        raise self.error(line, "the here-document has no end")
                    at = body.end()
        if in_array:
            raise self.error(found[-1].line, "the array has no end")
        return found

    def assign(self, words: list[str], line: int, reason: str) -> bool:
        """Take note of `A=1 B=2`, `A=(1 2)` or `export A=1`; whether that is all of the statement."""
        rest = words[1:] if words[0] in _DECLARES else words
        if words[0] not in _DECLARES and not all(_ASSIGNMENT.fullmatch(word) for word in rest) and "=(" not in rest[0]:
            return False  # a command, or `A=1 program`
        while rest:
            word, *rest = rest
            match = _ASSIGNMENT.fullmatch(word)
            if match is None:
                continue
            name, appends, value = match.groups()
            if value == "(":
                items = rest[: rest.index(")")]
                rest = rest[len(items) + 1 :]
                values = [each for item in items for each in self.expand(item)]
            else:
                values = [" ".join(self.expand(value, split=False))]
            if name in self.given:
                continue
            if reason:
                self.values.pop(name, None)
                self.script.reasons[name] = reason
            elif appends and value != "(":
                self.values[name] = ["".join([*self.values.get(name, [""])[:1], *values])]
            else:
                self.values[name] = [*(self.values.get(name, []) if appends else []), *values]
        return True

    def command(self, words: list[str], line: int, reason: str, before: list[str], inner: int) -> bool:
        """Note what it starts; False: the script ends with it."""
        expanded = [each for word in words if not _ASSIGNMENT.fullmatch(word) for each in self.expand(word)]
        if expanded[:1] == ["exit"] and not reason:
            return False
        if expanded[:1] in (["source"], ["."]):
            self.script.unread.append((line, f"`{' '.join(expanded)}`: what it sets is not read"))
        shell = next((i for i, word in enumerate(expanded) if word.rpartition("/")[2] in ("bash", "sh", "zsh")), None)
        if expanded[:1] == ["eval"]:
            self.read(" ".join(expanded[1:]), line, before)
        elif shell is not None and expanded[shell + 1 : shell + 2] == ["-c"] and len(expanded) > shell + 2:
            self.read(expanded[shell + 2], line, [*before, *expanded[:shell]])
        elif expanded:
            self.script.commands.append(Command([*before, *expanded], line, reason))
        return True

    def expand(self, word: str, *, split: bool = True) -> list[str]:
        """The words that one written word becomes; not `split`: one text, as on the right of an assignment."""
        found: list[str] = []
        is_open = False  # whether the last word may grow
        for match in _EXPANSION.finditer(word):
            piece = match[0]
            if piece[0] == '"':
                inside = [self.value(each) for each in _EXPANSION.findall(piece[1:-1].replace("'", "\\'"))]
                many = re.fullmatch(r"\$\{(\w+)\[@\]\}|\$@", piece[1:-1]) is not None
                texts = inside[0] if many and inside else ["".join(" ".join(each) for each in inside)]
            elif piece[0] == "$" and split:
                joined = " ".join(self.value(piece))
                texts = joined.split()
                is_open = is_open and not joined[:1].isspace()
            else:
                texts = [" ".join(self.value(piece))]
            for number, text in enumerate(texts):
                if is_open and number == 0:
                    found[-1] += text
                else:
                    found.append(text)
                is_open = True
            if piece[0] == "$" and split and texts and joined[-1:].isspace():
                is_open = False
        return found if split else ["".join(found)]

    def value(self, piece: str) -> list[str]:
        if piece.startswith("'"):
            return [piece[1:-1]]
        if piece.startswith("\\"):
            return ["" if piece[1] == "\n" else piece[1]]
        if piece.startswith(("$(", "`")):  # stays, as one word: nobody knows it
            return ["$(" + "".join(re.findall(r"[^\s$`()]+", piece)[:1]) + ")"]
        if not piece.startswith("$"):
            return [piece]
        match = re.fullmatch(r"\$\{?(\w+)(?:\[([@*]|[0-9]{1,3})\])?(?::?[-=](.*?))?\}?", piece, re.DOTALL)
        if match is None:
            return [] if piece in ("$@", "$*", "${@}") else [piece.replace(" ", "")]
        name, index, default = match.groups()
        items = self.values.get(name)
        if items is not None and not (default is not None and items in ([""], [])):
            index = index or "0"
            return items if index in "@*" else items[int(index) : int(index) + 1]
        if default is not None and name not in self.script.reasons:
            return self.expand(default) if default else [""]
        why = "it is an argument of the script" if name.isdecimal() else "the script does not set it"
        self.script.reasons.setdefault(name, why)
        return [f"${name}"]

    def error(self, line: int, what: str) -> RecipeError:
        remedy = "correct that line, or run the script: bloomery import megatron --script FILE"
        return RecipeError(Problem(f"this script cannot be read: {what}", "", remedy, f"{self.path}:{line}"))
