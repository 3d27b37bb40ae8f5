"""From plain values to a typed recipe, or to one problem per fault, with the field's meaning beside pydantic's rule."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from pydantic import ValidationError

from bloomery.base.errors import Problem, mask, where_instead
from bloomery.config.recipe import Recipe
from bloomery.config.schema import closest, field_at, meant_paths, names_in

_SHOWN_CHARACTERS = 60
_RULES = {
    "model_type": "must be a section with fields of its own",
    "dict_type": "must be a section with fields of its own",
    "int_from_float": "must be a valid integer",
    "string_too_short": "must not be empty",
}
"""Where pydantic's own words are those of a programmer, by its name of the fault."""


def validate(raw: dict[str, Any], place: Callable[[str], str]) -> Recipe | list[Problem]:
    """The recipe, or every fault of the schema. `place`: where a dotted path was written."""
    try:
        return Recipe.model_validate(raw)
    except ValidationError as error:
        faults = {tuple(map(str, item["loc"])): item for item in error.errors(include_url=False)}
    unknown = [path for path, item in faults.items() if item["type"] == "extra_forbidden"]
    misspelt = {other for path in unknown for other in meant_paths(path)}
    return [
        _problem(path, item, place(".".join(path)))
        for path, item in faults.items()
        if item["type"] != "missing" or ".".join(path) not in misspelt
    ]


def mask_secrets(node: Any, path: str, place: Callable[[str], str]) -> list[Problem]:
    """Masks each secret among the values and keys, before any is shown; returns a problem for each."""
    problems = []
    for key, value in list(
        node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ()
    ):
        inner = f"{path}.{key}" if path else str(key)
        what = ""
        if isinstance(key, str) and mask(key) != key:
            node[mask(key)] = node.pop(key)
            what, remedy = f"{mask(inner)} is a name with a secret in it", "use another name"
        elif isinstance(value, str) and (masked := mask(value)) != value:
            node[key] = masked
            what, remedy = f"{inner} is '{masked}', with a secret in it", f"remove it, and {where_instead(value)}"
        else:
            problems += mask_secrets(value, inner, place)
        if what:
            rule = "a recipe is copied into checkpoints, logs and reports, so it holds no password, key or signature"
            problems.append(Problem(what, rule, remedy, mask(place(inner))))
    return problems


def _problem(path: tuple[str, ...], item: Any, place: str) -> Problem:
    dotted, kind, value = ".".join(path), item["type"], item["input"]
    if kind == "extra_forbidden":
        return Problem(f"{dotted} is not a field of a recipe", remedy=_instead(path), place=place)
    field = field_at(path)
    meaning, options = (field.meaning, field.options) if field else ("", [])
    if kind == "missing":
        where = f"`{'.'.join(path[:-1])}`" if path[:-1] else "the recipe"
        return Problem(f"{dotted} is missing", meaning, f"add `{path[-1]}:` to {where}", place)
    words = item["msg"].removeprefix("Value error, ").replace("Input should be", "must be")
    rule = f"must be one of {', '.join(options)}" if options else _RULES.get(kind, words)
    remedy = f"`{next(part for part in reversed(path) if not part.isdecimal())}`: {meaning}" if meaning else ""
    if kind == "string_pattern_mismatch":
        rule, remedy = meaning, ""
    elif kind == "model_type":
        remedy = f"its fields are {', '.join(names_in(path))}"
    elif isinstance(value, str) and (guess := closest(value, options, cutoff=0.5)):
        remedy = f"did you mean {guess}?"
    return Problem(f"{dotted} is {_shown(value)}", rule, remedy, place)


def _instead(path: tuple[str, ...]) -> str:
    if path[-1] == "base":
        return "a base is named once, at the top of a recipe file: `base: other-recipe`"
    if meant := meant_paths(path):
        return f"did you mean {' or '.join(meant)}?"
    where = f"`{'.'.join(path[:-1])}`" if len(path) > 1 else "a recipe"
    return f"{where} has: {', '.join(names_in(path[:-1]))}"


def _shown(value: Any) -> str:
    """The value as YAML writes it, cut short where it is long."""
    if isinstance(value, dict):
        return "a section"
    text = f"'{value}'" if isinstance(value, str) and value.isprintable() else json.dumps(value)
    return text if len(text) <= _SHOWN_CHARACTERS else f"{text[: _SHOWN_CHARACTERS - 4]} ..."
