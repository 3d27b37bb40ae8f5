"""YAML with source positions: plain values, and for each the file and line it was written on.

Scalars follow YAML 1.2: `on`, `off`, `yes` and `no` are words, `1e-4` is a number; and `216_320` is a number too.
"""

import re
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import yaml

from bloomery.base.errors import Problem, RecipeError

_INT = re.compile(r"^[-+]?[0-9]+(_[0-9]+)*$")
_FLOAT = re.compile(r"^[-+]?(\.[0-9]+|[0-9]+(_[0-9]+)*(\.[0-9]*)?)([eE][-+]?[0-9]+)?$")
_WORDS: dict[str, Any] = {
    **dict.fromkeys(("", "~", "null")),
    **{"true": True, "false": False, ".nan": float("nan")},
    **{".inf": float("inf"), "+.inf": float("inf"), "-.inf": float("-inf")},
}
_NO_TEXT = re.compile("[\0\ud800-\udfff]")
_MOST_VALUES = 100_000
"""More cannot be a recipe: it is aliases of aliases of aliases."""
_MOST_NESTED = 2_000


def parse_yaml(text: str, place: Callable[[int], str]) -> tuple[Any, dict[str, str]]:
    """(the value, the place of each dotted path in it). `place`: the name of a line, from 1. RecipeError for what
    is not YAML as a recipe uses it."""
    reader = _Reader(place)
    try:
        node = _compose(text)
        value = None if node is None else reader.value(node, "", ())
    except yaml.YAMLError as error:
        mark, position = getattr(error, "problem_mark", None), getattr(error, "position", 0)
        what = getattr(error, "problem", None) or str(error).partition("\n")[0]
        at = place((mark.line if mark else text.count("\n", 0, position)) + 1)
        remedy = (
            "indent with spaces: YAML has no tabs" if "'\\t'" in what else "fix the syntax here or on the line above"
        )
        raise RecipeError(Problem(f"not valid YAML: {what}", remedy=remedy, place=at)) from None
    except RecursionError:
        what = "not a recipe: nested too deeply, or too many values"
        raise RecipeError(Problem(what, place=place(1))) from None
    if reader.problems:
        raise RecipeError(reader.problems)
    return value, reader.places


def dump_yaml(value: Any) -> str:
    """Block style, in the order given; `parse_yaml` reads the same values back."""
    return yaml.dump(value, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=120)


def inline_yaml(value: Any) -> str:
    """On one line, as an override takes it: `[0.9, 0.95]`, `{path: train}`, `null`."""
    text = yaml.dump(value, Dumper=_Dumper, sort_keys=False, allow_unicode=True, default_flow_style=True, width=10**9)
    return text.removesuffix("...\n").rstrip("\n")


def _compose(text: str) -> Any:
    """By libyaml, ten times as fast as PyYAML, which says better what is wrong and survives any nesting."""
    if sum(map(text.count, "[{-?")) <= _MOST_NESTED:
        with suppress(yaml.YAMLError, UnicodeError, AttributeError):
            return yaml.compose(text, Loader=yaml.CSafeLoader)
    return yaml.compose(text, Loader=yaml.SafeLoader)


class _Reader:
    def __init__(self, place: Callable[[int], str]) -> None:
        self.place = place
        self.places: dict[str, str] = {}
        self.problems: list[Problem] = []

    def value(self, node: yaml.Node, path: str, around: tuple[yaml.Node, ...]) -> Any:
        place = self.places[path] = self.place(node.start_mark.line + 1)
        if len(self.places) > _MOST_VALUES or any(node is outer for outer in around):
            raise RecursionError
        if isinstance(node, yaml.ScalarNode):
            if _NO_TEXT.search(node.value):
                what = f"{path or 'the recipe'} is {node.value!r:.60}"
                self.problems.append(Problem(what, "text has no NUL and no lone surrogate", "remove it", place))
            return node.value if node.style else _scalar(node.value)
        prefix, around = f"{path}." if path else "", (*around, node)
        if isinstance(node, yaml.SequenceNode):
            return [self.value(item, f"{prefix}{i}", around) for i, item in enumerate(node.value)]
        assert isinstance(node, yaml.MappingNode)
        mapping: dict[str, Any] = {}
        for key_node, value_node in node.value:
            place = self.place(key_node.start_mark.line + 1)
            if not isinstance(key_node, yaml.ScalarNode) or not key_node.value.isprintable():
                what = f"{path or 'the recipe'} has a key that is not a word"
                self.problems.append(Problem(what, "a key is the name of a field", "write `field: value`", place))
                continue
            key = f"{prefix}{key_node.value}"
            if key_node.value in mapping:
                rule = f"it is already set at {self.places[key]}"
                self.problems.append(Problem(f"{key} is set twice", rule, "keep one of the two", place))
            mapping[key_node.value] = self.value(value_node, key, around)
            self.places[key] = place
        return mapping


def _scalar(text: str) -> Any:
    if text.lower() in _WORDS:
        return _WORDS[text.lower()]
    try:
        if _INT.match(text):
            return int(text.replace("_", ""))
        if _FLOAT.match(text):
            return float(text.replace("_", ""))
    except ValueError:  # more digits than Python converts: no number that a recipe could hold
        pass
    return text


class _Dumper(getattr(yaml, "CSafeDumper", yaml.SafeDumper)):  # type: ignore[misc]
    """Quotes every text that `_scalar` would take for something else; PyYAML's own idea of numbers is YAML 1.1."""


def _represent_text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=None if _scalar(text) is text else "'")


_Dumper.add_representer(str, _represent_text)
