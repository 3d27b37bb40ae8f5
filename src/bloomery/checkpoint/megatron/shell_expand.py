"""The variables of a script and what its words become. A value that only a running shell would know stays as it is
written, `$NAME` or `$(command)`, with the reason why: whoever uses it can say so."""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from bloomery.checkpoint.megatron.shell_words import Part, ShellError, Token, parts_of, tokens_of

_PARAMETER = re.compile(r"([A-Za-z_][A-Za-z0-9_]*|[0-9]{1,3})(?:\[([^\]]*)\])?(?:(:?[-=+?])(.*))?", re.DOTALL)
_UNSET = re.compile(r"\$\{?([A-Za-z_][A-Za-z0-9_]*|[0-9])")
_NOT_SET = "the script does not set it"
_KEPT_SPACE = "\ue000"
"""Stands for a space inside `$(a command)`, so that it stays one word; `shown` puts it back."""
_ASSIGNMENT = re.compile(r"([A-Za-z_][A-Za-z0-9_]*)(\+?)=")
_SUMS: dict[type, Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: lambda a, b: _quotient(a, b),
    ast.Mod: lambda a, b: a - b * _quotient(a, b),
    ast.Pow: lambda a, b: a**b if 0 <= b <= 64 else _no_number(),
}
_WIDEST_BITS = 63
"""A shell counts in 64 bits with a sign."""


def is_known(text: str) -> bool:
    return "$" not in text


def unset_names(text: str) -> list[str]:
    """The variables and arguments in a text that have no value."""
    return list(dict.fromkeys(_UNSET.findall(text)))


def is_settable(name: str) -> bool:
    """Whether it can be the name of a variable or the number of an argument."""
    return re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*|[1-9][0-9]{0,2}", name) is not None


def shown(text: str) -> str:
    """For people and for paths."""
    return text.replace(_KEPT_SPACE, " ")


class Variables:
    def __init__(self, given: Mapping[str, str]) -> None:
        self.values: dict[str, list[str]] = {name: [value] for name, value in given.items()}
        """Every variable is a list; a plain one has one item."""
        self.given = set(given)
        """What the user set: the script's own assignments do not change it."""
        self.reasons: dict[str, str] = {}
        """Why a name has no value here."""
        self.asked: set[str] = set()
        """Names that were looked up."""

    def assign(self, name: str, items: list[str], *, append: bool, array: bool, line: int) -> None:
        if name in self.given:
            return
        before = self.values.get(name, [])
        if not append:
            after = items
        elif array:
            after = before + items
        else:
            after = [("".join(before[:1]) if before else "") + items[0], *before[1:]]
        self.values[name] = after
        if any(not is_known(item) for item in items):
            self.reasons.setdefault(name, f"line {line} sets it to something that only a running shell knows")

    def forget(self, name: str, reason: str) -> None:
        """From here on its value is not known."""
        if name not in self.given:
            self.values.pop(name, None)
            self.reasons[name] = reason

    @property
    def arguments(self) -> list[str]:
        """`$1`, `$2` and so on, as far as they are given without a gap."""
        found: list[str] = []
        while str(len(found) + 1) in self.values:
            found += self.values[str(len(found) + 1)][:1]
        return found

    def set_arguments(self, items: Sequence[str] | None, reason: str) -> None:
        """What `shift` and `set --` do; None: nobody knows them from here on."""
        for name in [name for name in self.values if name.isdecimal()]:
            self.values.pop(name)
            if items is None:
                self.reasons[name] = reason
        self.values |= {str(number): [item] for number, item in enumerate(items or (), 1)}

    def words(self, tokens: Sequence[Token]) -> list[str]:
        return [word for token in tokens for word in self.split(token.parts)]

    def text(self, parts: Sequence[Part]) -> str:
        """As inside double quotes or on the right of an assignment: one text."""
        return "".join(" ".join(self._value(part)) for part in parts)

    def split(self, parts: Sequence[Part]) -> list[str]:
        """The words that one written word becomes: unquoted expansions are split at blanks."""
        found: list[str] = []
        current: str | None = None
        for part in parts:
            values = self._value(part)
            if part.kind == "text" or (part.quoted and part.text != "@" and "[@]" not in part.text):
                current = (current or "") + " ".join(values)
                continue
            if not part.quoted:
                text = " ".join(values)
                pieces = text.split()
                if current is not None and text[:1].isspace():
                    found.append(current)
                    current = None
                ends_open = not text[-1:].isspace()
            else:
                pieces, ends_open = values, True
            for number, piece in enumerate(pieces):
                if number and current is not None:
                    found.append(current)
                    current = None
                current = (current or "") + piece
            if pieces and not ends_open and current is not None:
                found.append(current)
                current = None
        return found if current is None else [*found, current]

    def _value(self, part: Part) -> list[str]:
        match part.kind:
            case "text":
                return [part.text]
            case "command":
                return [f"$({_KEPT_SPACE.join(part.text.split())})"]
            case "math":
                return [self.sum(part.text)]
        return self._variable(part.text)

    def _variable(self, text: str) -> list[str]:
        if text in ("@", "*", "#"):
            self.asked.update(name for name in self.values if name.isdecimal())
            return self.arguments if text != "#" else [str(len(self.arguments))]
        match = _PARAMETER.fullmatch(text)
        if match is None:
            return ["$" + text if len(text) == 1 else "${" + _KEPT_SPACE.join(text.split()) + "}"]
        name, index, how, word = match.groups()
        self.asked.add(name)
        items = self.values.get(name)
        if items is not None and index and index not in "@*":
            is_number = re.fullmatch("[0-9]{1,9}", index) is not None
            items = [items[int(index)]] if is_number and int(index) < len(items) else None
        elif items is not None and index is None:
            items = items[:1] or [""]
        is_missing = items is None or (how is not None and how[0] == ":" and items in ([], [""]))
        if how and how[-1] == "+":
            return [""] if is_missing else [self.default(word)]
        if not is_missing:
            return items or []
        if how and how[-1] in "-=" and name not in self.reasons:
            made = self.default(word)
            if how[-1] == "=":
                self.values[name] = [made]
            return [made]
        self.reasons.setdefault(name, "it is an argument of the script" if name.isdecimal() else _NOT_SET)
        return [f"${name}"]

    def default(self, text: str) -> str:
        try:
            return " ".join(self.words([token for token in tokens_of(text) if token.kind == "word"]))
        except ShellError:
            return text

    def sum(self, text: str) -> str:
        """The value of `$(( text ))`, or the text itself where a part of it is not known."""
        plain = self.text(parts_of(text))

        def lookup(match: re.Match[str]) -> str:
            self.asked.add(match[0])
            return (self.values.get(match[0]) or [match[0]])[0]

        filled = re.sub(r"[A-Za-z_]\w*", lookup, plain)
        try:
            return str(_calculate(ast.parse(filled.strip(), mode="eval").body))
        except (ValueError, SyntaxError, RecursionError, MemoryError):
            return f"$(({_KEPT_SPACE.join(text.split())}))"


def assignment(token: Token) -> tuple[str, bool, list[Part]] | None:
    """(name, whether it appends, the value) of a word such as `NAME=value`."""
    first = token.parts[0] if token.parts else None
    if first is None or first.kind != "text" or first.quoted:
        return None
    match = _ASSIGNMENT.match(first.text)
    if match is None:
        return None
    rest = [Part("text", first.text[match.end() :], False), *token.parts[1:]]
    return match[1], bool(match[2]), rest


def _calculate(node: Any) -> int:
    value = _value_of(node)
    return value if value.bit_length() <= _WIDEST_BITS else _no_number()


def _value_of(node: Any) -> int:
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return node.value
    if isinstance(node, ast.BinOp) and type(node.op) in _SUMS:
        return _SUMS[type(node.op)](_calculate(node.left), _calculate(node.right))
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_calculate(node.operand)
    raise ValueError("not a sum of whole numbers")


def _quotient(a: int, b: int) -> int:
    """Cut off towards zero, as a shell does."""
    if b == 0:
        return _no_number()
    whole = abs(a) // abs(b)
    return whole if (a < 0) == (b < 0) else -whole


def _no_number() -> int:
    raise ValueError("not a number")
