"""`section.field=value` from the command line, put into the plain values of a recipe."""

from __future__ import annotations

from typing import Any

from bloomery.base.credentials import mask
from bloomery.base.errors import Problem
from bloomery.config.draft import COMMAND_LINE, Draft
from bloomery.config.yaml_nodes import parse_yaml

_DEEPEST = 12
_LONGEST_SHOWN = 200


def apply_override(raw: dict[str, Any], override: str, draft: Draft) -> None:
    """Change `raw` and remember that this value came from the command line, or add a problem to the draft."""
    shown = mask(override.encode(errors="backslashreplace").decode())
    place = f"{COMMAND_LINE} '{shown if len(shown) <= _LONGEST_SHOWN else f'{shown[:_LONGEST_SHOWN]} ...'}'"
    name, equals, text = override.partition("=")
    keys = [key.strip() for key in name.split(".")]
    path = ".".join(keys)
    if not equals or not all(keys) or len(keys) > _DEEPEST or not name.isprintable() or "://" in name:
        remedy = "write it as section.field=value, for example batch.micro_batch_size=4"
        draft.problems.append(Problem("this is not an override", remedy=remedy, place=place))
        return
    parsed = parse_yaml(text, file=place)
    if parsed.problems:
        draft.problems += [
            Problem(found.what, found.rule, "mend the value, or quote it", place) for found in parsed.problems
        ]
        return
    target: Any = raw
    for i, key in enumerate(keys):
        is_last = i + 1 == len(keys)
        if isinstance(target, list):
            if not (key.isdecimal() and int(key) < len(target)):
                draft.problems.append(_no_such_item(path, ".".join(keys[:i]), len(target), key, place))
                return
            index: Any = int(key)
        elif isinstance(target, dict):
            index = key
        else:
            what = f"{path} cannot be set: {'.'.join(keys[:i])} is {target!r}"
            draft.problems.append(Problem(what, "it has no fields of its own", "set it as a whole", place))
            return
        if is_last:
            target[index] = parsed.value
        else:
            if isinstance(target, dict) and target.get(index) is None:
                target[index] = {}
            target = target[index]
    draft.replace_places(path, {f"{path}.{inner}" if inner else path: place for inner in parsed.places} | {path: place})


def _no_such_item(path: str, listed: str, length: int, key: str, place: str) -> Problem:
    remedy = f"set it as a whole: {listed}=[...]"
    if length:
        remedy = f"use {'0' if length == 1 else f'0 to {length - 1}'}, or {remedy}"
    return Problem(f"{path} cannot be set: {listed} has no item {key!r}", f"it has {length}", remedy, place)
