"""A resolved recipe in words: every value with its origin, the file a run keeps, and the fingerprint of its science."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from bloomery.base.errors import mask
from bloomery.config.load import Draft
from bloomery.config.recipe import Recipe
from bloomery.config.schema import all_fields
from bloomery.config.yaml_nodes import dump_yaml


@dataclass(frozen=True)
class Value:
    path: str
    value: Any
    origin: str
    """A place such as `my.yaml:31`, or `default`, or `default of family gpt2`."""


def as_dict(recipe: Recipe) -> dict[str, Any]:
    """The recipe as plain YAML values, every field present."""
    return recipe.model_dump(mode="json", by_alias=True)


def explain(draft: Draft) -> list[Value]:
    """Every resolved value and where it came from."""
    assert draft.recipe is not None
    by_family = dict.fromkeys(draft.by_family, f"default of family {draft.recipe.model.family}")
    origins = by_family | draft.places
    return [Value(path, value, origins.get(path, "default")) for path, value in _leaves(as_dict(draft.recipe), "")]


def fingerprint(recipe: Recipe) -> str:
    """Sixteen hex digits over every field that decides what is learned; equal for every layout and every machine."""
    # Without defaults, so that a field added later does not change the fingerprint of every older recipe.
    science = recipe.model_dump(mode="json", by_alias=True, exclude_defaults=True)
    for path, field in all_fields().items():
        section, _, name = path.rpartition(".")
        holder = science.get(section) if section else science
        if not field.on_resume.in_fingerprint and isinstance(holder, dict):
            holder.pop(name, None)
    return hashlib.sha256(json.dumps(science, sort_keys=True).encode()).hexdigest()[:16]


def as_yaml(recipe: Recipe) -> str:
    """The file a run folder keeps: every field, loadable again, headed by the fingerprint."""
    return f"# Resolved by Bloomery. fingerprint: {fingerprint(recipe)}\n{mask(dump_yaml(as_dict(recipe)))}"


def _leaves(node: Any, path: str) -> Iterator[tuple[str, Any]]:
    if isinstance(node, dict) and node:
        for key, value in node.items():
            yield from _leaves(value, f"{path}.{key}" if path else key)
    elif isinstance(node, list) and any(isinstance(item, dict) for item in node):
        for i, item in enumerate(node):
            yield from _leaves(item, f"{path}.{i}")
    else:
        yield path, node
