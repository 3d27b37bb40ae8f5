"""YAML with a memory: plain values, and for every one of them the file and line it was written on.

Scalars follow YAML 1.2: `on`, `off`, `yes` and `no` are words, `1e-4` is a number, `216_320` is a number.
"""

from __future__ import annotations

import re
from typing import Any

import yaml

from bloomery.base.errors import Problem

_INT = re.compile(r"^[-+]?[0-9][0-9_]*$")
_FLOAT = re.compile(r"^[-+]?(\.[0-9]+|[0-9][0-9_]*(\.[0-9]*)?)([eE][-+]?[0-9]+)?$")
_WORDS: dict[str, Any] = {"": None, "~": None, "null": None, "true": True, "false": False}
_WORDS |= {".nan": float("nan"), ".inf": float("inf"), "-.inf": float("-inf")}


def parse_yaml(text: str, *, file: str) -> tuple[Any, dict[str, str], list[Problem]]:
    """(value, places by dotted path, problems). Never raises for what a user wrote."""
    try:
        node = yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        place = f"{file}:{mark.line + 1}" if mark else file
        what = f"not valid YAML: {error.problem or error.context}"
        return None, {}, [Problem(what, remedy="mend the syntax on this line or the one above", place=place)]
    except yaml.YAMLError as error:
        return None, {}, [Problem(f"not valid YAML: {error}", remedy="save the file as plain UTF-8 text", place=file)]
    places: dict[str, str] = {}
    problems: list[Problem] = []
    value = None if node is None else _value(node, "", file, places, problems)
    return value, places, problems


def _value(node: yaml.Node, path: str, file: str, places: dict[str, str], problems: list[Problem]) -> Any:
    places[path] = f"{file}:{node.start_mark.line + 1}"
    if isinstance(node, yaml.ScalarNode):
        return _scalar(node)
    prefix = f"{path}." if path else ""
    if isinstance(node, yaml.SequenceNode):
        return [_value(item, f"{prefix}{i}", file, places, problems) for i, item in enumerate(node.value)]
    assert isinstance(node, yaml.MappingNode)
    mapping: dict[str, Any] = {}
    for key_node, value_node in node.value:
        key = str(key_node.value)
        place = f"{file}:{key_node.start_mark.line + 1}"
        if key in mapping:
            first = places[f"{prefix}{key}"]
            what = f"{prefix}{key} is written twice"
            problems.append(Problem(what, f"it already stands at {first}", "keep one of the two", place))
        mapping[key] = _value(value_node, f"{prefix}{key}", file, places, problems)
        places[f"{prefix}{key}"] = place
    return mapping


def _scalar(node: yaml.ScalarNode) -> Any:
    text: str = node.value
    if node.style is not None:
        return text
    if text in _WORDS:
        return _WORDS[text]
    if _INT.match(text):
        return int(text.replace("_", ""))
    if _FLOAT.match(text):
        return float(text.replace("_", ""))
    return text
