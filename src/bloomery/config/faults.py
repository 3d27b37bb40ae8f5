"""From plain values to a typed recipe, or to one problem per fault, in words that are not pydantic's."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field
from typing import Any

from pydantic import ValidationError

from bloomery.base.credentials import mask, where_instead
from bloomery.base.errors import Problem
from bloomery.config.draft import Draft
from bloomery.config.recipe import Recipe
from bloomery.config.schema import Spot, fields_at, spot_at
from bloomery.config.suggest import closest, meant_paths
from bloomery.families.registry import family_defaults

_SHOWN_CHARACTERS = 60


@dataclass
class Fault:
    path: tuple[str, ...]
    kind: str
    """Pydantic's name for it, such as `missing` or `int_type`."""
    limits: dict[str, Any]
    messages: list[str] = field(default_factory=list)

    @property
    def dotted(self) -> str:
        return ".".join(self.path)


def validate(raw: dict[str, Any], draft: Draft) -> None:
    """Set `draft.recipe`, or add every fault of the schema to the draft's problems. Puts the family's defaults into
    `raw`."""
    _mask_secrets(raw, "", draft)
    model = raw.get("model")
    if isinstance(model, dict):
        defaults = family_defaults(model)
        model.update(defaults)
        draft.by_family |= {f"model.{key}" for key in defaults}
    try:
        draft.recipe = Recipe.model_validate(raw)
    except ValidationError as error:
        faults = _faults(error, raw)
        misspelt = {path for fault in faults if fault.kind == "extra_forbidden" for path in meant_paths(fault.path)}
        missing = {fault.dotted for fault in faults if fault.kind == "missing"}
        draft.problems += [_problem(fault, raw, draft) for fault in faults if fault.dotted not in misspelt & missing]


def _mask_secrets(node: Any, path: str, draft: Draft) -> None:
    """Before any value is shown. Each is a problem, unless the recipe is that of a checkpoint."""
    for key, value in list(
        node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ()
    ):
        inner = f"{path}.{key}" if path else str(key)
        if isinstance(key, str) and mask(key) != key:
            node[mask(key)] = node.pop(key)
            what, rule = f"{mask(inner)} is a name with a secret in it", "a recipe is copied into checkpoints and logs"
            draft.problems.append(Problem(what, rule, "use another name", mask(draft.place(inner))))
            continue
        if not isinstance(value, str) or (masked := mask(value)) == value:
            _mask_secrets(value, inner, draft)
            continue
        node[key] = masked
        if not draft.is_saved:
            rule = "a recipe is copied into checkpoints, logs and reports, so it holds no password, key or signature"
            remedy = f"remove it from the URL, and {where_instead(value)}"
            draft.problems.append(
                Problem(f"{inner} is '{masked}', with a secret in it", rule, remedy, draft.place(inner))
            )


def _faults(error: ValidationError, raw: Any) -> list[Fault]:
    """One entry per faulty path: pydantic reports each member of a union on its own, under a made-up step."""
    faults: dict[tuple[str, ...], Fault] = {}
    for item in error.errors(include_url=False):
        path: list[str] = []
        node = raw
        for part in item["loc"]:
            if isinstance(node, dict) and (part in node or item["type"] == "missing"):
                node = node.get(str(part))
            elif isinstance(node, list) and isinstance(part, int):
                node = node[part]
            else:
                break
            path.append(str(part))
        fault = faults.setdefault(tuple(path), Fault(tuple(path), item["type"], item.get("ctx", {})))
        fault.messages.append(item["msg"].removeprefix("Value error, "))
    return list(faults.values())


def _problem(fault: Fault, raw: Any, draft: Draft) -> Problem:
    dotted, name = fault.dotted, fault.path[-1] if fault.path else ""
    parent = ".".join(fault.path[:-1])
    place = draft.place(dotted)
    if fault.kind == "extra_forbidden":
        return Problem(f"{dotted} is not a field of a recipe", remedy=_instead(fault.path), place=place)
    spot = spot_at(fault.path) or Spot(None, None)
    if fault.kind == "missing":
        where = f"`{parent}`" if parent else "the recipe"
        return Problem(f"{dotted} is missing", spot.meaning, f"add `{name}:` to {where}", place)
    value = _value_at(raw, fault.path)
    rule, remedy = _rule(fault, spot), ""
    if isinstance(value, str) and spot.options and (guess := closest(value, spot.options, cutoff=0.5)):
        remedy = f"did you mean {guess}?"
    elif isinstance(value, float) and value.is_integer() and fault.kind.startswith("int_"):
        remedy = f"write {value:.0f}"
    elif fault.kind == "model_type":
        remedy = f"its fields are {', '.join(fields_at(fault.path))}"
    elif fault.kind == "string_type" and isinstance(value, int | float):
        remedy = f'put it in quotes: "{_shown(value)}"'
    elif spot.meaning and spot.meaning != rule:
        remedy = f"`{next(part for part in reversed(fault.path) if not part.isdecimal())}`: {spot.meaning}"
    return Problem(f"{dotted} is {_shown(value)}", rule, remedy, place)


def _rule(fault: Fault, spot: Spot) -> str:
    match fault.kind:
        case "string_pattern_mismatch" if spot.meaning:
            return spot.meaning
        case "bool_type" | "literal_error" if spot.options:
            also = ["true", "false"] if "bool" in str(spot.annotation) else []
            return f"must be one of {', '.join([*also, *spot.options])}"
        case "too_short" | "too_long":
            bound, limit = ("least", "min_length") if fault.kind == "too_short" else ("most", "max_length")
            return f"must have at {bound} {fault.limits[limit]} item{'s' * (fault.limits[limit] != 1)}"
    plain = {
        "int_type": "must be a whole number",
        "int_from_float": "must be a whole number",
        "float_type": "must be a number",
        "finite_number": "must be a finite number",
        "string_type": "must be text",
        "string_too_short": "must not be empty",
        "bool_type": "must be true or false",
        "list_type": "must be a list",
        "dict_type": "must be a section with fields of its own",
        "model_type": "must be a section with fields of its own",
    }
    return plain.get(fault.kind) or " or ".join(text.replace("Input should be", "must be") for text in fault.messages)


def _instead(path: tuple[str, ...]) -> str:
    if meant := meant_paths(path):
        return f"did you mean {' or '.join(meant)}?"
    if path[-1] in ("base", "<<"):
        return "a base is named once, at the top of a recipe file: `base: other-recipe`"
    fields = fields_at(path[:-1])
    where = f"`{'.'.join(path[:-1])}`" if len(path) > 1 else "a recipe"
    return f"{where} has: {', '.join(fields)}" if fields else "remove it"


def _value_at(node: Any, path: tuple[str, ...] | list[str]) -> Any:
    for part in path:
        if isinstance(node, list):
            node = node[int(part)]
        elif isinstance(node, dict):
            node = node.get(part)
        else:
            return None
    return node


def _shown(value: Any) -> str:
    """The value as YAML writes it, cut short where it is long."""
    if isinstance(value, dict):
        return "a section"
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    text = f"'{value}'" if isinstance(value, str) and value.isprintable() else json.dumps(value)
    return text if len(text) <= _SHOWN_CHARACTERS else f"{text[: _SHOWN_CHARACTERS - 4]} ..."
