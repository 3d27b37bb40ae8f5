"""A shell script cut into tokens: words with their expansions still in them, operators, here-documents, arrays.

Nothing is run or looked up here. What the cutter does not know is a ShellError with its line.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Literal

_OPERATORS = ("&&", "||", ";;", "&>>", "&>", ">>", ">&", "<&", "<<<", "\n", ";", "|", "&", "(", ")", ">", "<")
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_ARRAY = re.compile(r"[A-Za-z_][A-Za-z0-9_]*\+?=")
_HEREDOC = re.compile(r"<<(?!<)(-?)[ \t]*(['\"]?)([^\s'\";|&<>]+)\2")
_IN_DOUBLE_QUOTES = '$`"\\\n'


class ShellError(Exception):
    def __init__(self, line: int, what: str) -> None:
        super().__init__(what)
        self.line = line


@dataclass(frozen=True)
class Part:
    """A stretch of a word."""

    kind: Literal["text", "variable", "command", "math"]
    text: str
    """As written; of a variable, what stands between the braces."""
    quoted: bool


@dataclass
class Token:
    kind: Literal["word", "operator", "array", "heredoc"]
    line: int
    text: str = ""
    """Of an operator; of an array, `NAME=` or `NAME+=`."""
    parts: list[Part] = field(default_factory=list)
    words: list[Token] = field(default_factory=list)
    """The items of an array."""

    @property
    def plain(self) -> str | None:
        """The text of a word without quotes and expansions, such as a keyword; None for any other."""
        if self.kind == "word" and all(part.kind == "text" and not part.quoted for part in self.parts):
            return "".join(part.text for part in self.parts)
        return None


def tokens_of(text: str) -> list[Token]:
    """All tokens of a script. ShellError names the line that cannot be read."""
    return _Cutter(text).all_tokens()


def parts_of(text: str) -> list[Part]:
    """The expansions in the body of a here-document."""
    cutter = _Cutter(text)
    return cutter.double_quoted(end="")


class _Cutter:
    def __init__(self, text: str) -> None:
        self.text = text
        self.at = 0
        self.waiting: list[tuple[Token, str, bool, bool]] = []
        """Here-documents whose body begins after this line: (token, delimiter, expands, strips tabs)."""

    @property
    def line(self) -> int:
        return self.text.count("\n", 0, self.at) + 1

    def all_tokens(self) -> list[Token]:
        found: list[Token] = []
        while (token := self.token()) is not None:
            found.append(token)
        for _, delimiter, _, _ in self.waiting:
            raise ShellError(self.line, f"the here-document up to {delimiter} has no end")
        return found

    def token(self) -> Token | None:
        self.skip_blanks()
        if self.at >= len(self.text):
            return None
        line = self.line
        if match := _HEREDOC.match(self.text, self.at):
            self.at = match.end()
            token = Token("heredoc", line)
            self.waiting.append((token, match[3], not match[2], bool(match[1])))
            return token
        if self.text[self.at : self.at + 2] not in ("<(", ">("):
            for operator in _OPERATORS:
                if self.text.startswith(operator, self.at):
                    self.at += len(operator)
                    if operator == "\n":
                        self.read_heredocs()
                    return Token("operator", line, operator)
        return self.word(line)

    def skip_blanks(self) -> None:
        while self.at < len(self.text):
            if self.text[self.at] in " \t\r":
                self.at += 1
            elif self.text.startswith("\\\n", self.at):
                self.at += 2
            elif self.text[self.at] == "#":
                end = self.text.find("\n", self.at)
                self.at = len(self.text) if end < 0 else end
            else:
                return

    def read_heredocs(self) -> None:
        for token, delimiter, expands, strips in self.waiting:
            body: list[str] = []
            while True:
                if self.at >= len(self.text):
                    raise ShellError(token.line, f"the here-document up to {delimiter} has no end")
                end = self.text.find("\n", self.at)
                end = len(self.text) if end < 0 else end
                row = self.text[self.at : end]
                row = row.lstrip("\t") if strips else row
                self.at = min(end + 1, len(self.text))
                if row == delimiter:
                    break
                body.append(row + "\n")
            text = "".join(body)
            token.parts = parts_of(text) if expands else [Part("text", text, True)]
        self.waiting = []

    def word(self, line: int) -> Token:
        parts: list[Part] = []
        while self.at < len(self.text):
            char = self.text[self.at]
            if char in "<>" and self.text.startswith("(", self.at + 1):
                self.at += 1
                parts.append(Part("command", self.bracketed("(", ")"), False))
            elif char in " \t\r\n;|&<>)":
                break
            elif char == "(":
                name = "".join(part.text for part in parts)
                if _ARRAY.fullmatch(name):
                    return self.array(name, line)
                break
            elif char == "'":
                parts.append(Part("text", self.upto("'", line), True))
            elif char == '"':
                self.at += 1
                parts += self.double_quoted(end='"') or [Part("text", "", True)]
            elif char == "\\":
                if not self.text.startswith("\\\n", self.at):
                    parts.append(Part("text", self.text[self.at + 1 : self.at + 2], True))
                self.at += 2
            elif char in "$`":
                parts.append(self.expansion(quoted=False))
            else:
                parts.append(Part("text", char, False))
                self.at += 1
        if parts and self.text[self.at : self.at + 1] in tuple("<>") and "".join(p.text for p in parts).isdigit():
            return self.token() or Token("operator", line, "\n")  # the 2 of `2>&1`
        return Token("word", line, parts=_joined(parts))

    def array(self, name: str, line: int) -> Token:
        self.at += 1
        token = Token("array", line, name)
        while (item := self.token()) is not None:
            if item.kind == "operator" and item.text == ")":
                return token
            if item.kind == "word":
                token.words.append(item)
        raise ShellError(line, f"the array {name}( has no end")

    def upto(self, quote: str, line: int) -> str:
        end = self.text.find(quote, self.at + 1)
        if end < 0:
            raise ShellError(line, f"the quote {quote} has no end")
        text = self.text[self.at + 1 : end]
        self.at = end + 1
        return text

    def double_quoted(self, *, end: str) -> list[Part]:
        """The inside of double quotes, or with no `end` the whole text."""
        line = self.line
        parts: list[Part] = []
        while self.at < len(self.text):
            char = self.text[self.at]
            if char == end:
                self.at += 1
                return _joined(parts)
            if char == "\\" and self.text[self.at + 1 : self.at + 2] in tuple(_IN_DOUBLE_QUOTES):
                kept = self.text[self.at + 1]
                parts.append(Part("text", "" if kept == "\n" else kept, True))
                self.at += 2
            elif char in "$`":
                parts.append(self.expansion(quoted=True))
            else:
                parts.append(Part("text", char, True))
                self.at += 1
        if end:
            raise ShellError(line, f"the quote {end} has no end")
        return _joined(parts)

    def expansion(self, *, quoted: bool) -> Part:
        if self.text[self.at] == "`":
            return Part("command", self.upto("`", self.line), quoted)
        self.at += 1
        if self.text.startswith("((", self.at):
            inner = self.bracketed("(", ")")
            if inner.startswith("(") and inner.endswith(")"):
                return Part("math", inner[1:-1], quoted)
            return Part("command", inner, quoted)
        if self.text.startswith("(", self.at):
            return Part("command", self.bracketed("(", ")"), quoted)
        if self.text.startswith("{", self.at):
            return Part("variable", self.bracketed("{", "}"), quoted)
        if match := _NAME.match(self.text, self.at):
            self.at = match.end()
            return Part("variable", match[0], quoted)
        if self.text[self.at : self.at + 1] in tuple("0123456789@*#?$!-"):
            self.at += 1
            return Part("variable", self.text[self.at - 1], quoted)
        return Part("text", "$", quoted)

    def bracketed(self, opening: str, closing: str) -> str:
        """What stands between a bracket at this place and its partner."""
        line, start, depth = self.line, self.at + 1, 0
        while self.at < len(self.text):
            char = self.text[self.at]
            if char == "'" and opening == "(":
                self.upto("'", line)
                continue
            depth += (char == opening) - (char == closing)
            self.at += 1
            if depth == 0:
                return self.text[start : self.at - 1]
        raise ShellError(line, f"the bracket {opening} has no end")


def _joined(parts: list[Part]) -> list[Part]:
    """Neighbouring texts as one."""
    found: list[Part] = []
    for part in parts:
        if found and part.kind == "text" == found[-1].kind and part.quoted == found[-1].quoted:
            found[-1] = Part("text", found[-1].text + part.text, part.quoted)
        else:
            found.append(part)
    return found
