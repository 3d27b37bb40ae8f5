"""Say a recipe back: every resolved value with its origin, the file a run keeps, and the fingerprint of its science."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from bloomery.base.credentials import mask
from bloomery.config.draft import Draft
from bloomery.config.recipe import Recipe
from bloomery.config.yaml_nodes import dump_yaml

_NOT_SCIENCE = ("name", "prepare", "parallel", "checkpoint", "monitor", "launch")
"""Sections that may change without changing what is learned."""
_NOT_SCIENCE_FIELDS = (
    "batch.micro_batch_size",
    "train.exit_after",
    "train.evaluate",
    "train.compile",
    "data.cache_dir",
)


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
    family = draft.recipe.model.family
    values = []
    for path, value in _leaves(as_dict(draft.recipe), ""):
        origin = draft.places.get(path)
        if origin is None:
            origin = f"default of family {family}" if path in draft.by_family else "default"
        values.append(Value(path, value, origin))
    return values


def fingerprint(recipe: Recipe) -> str:
    """Sixteen hex digits over every field that decides what is learned; equal for every layout and every machine."""
    # Without defaults, so that a field added later does not change the fingerprint of every older recipe.
    written = recipe.model_dump(mode="json", by_alias=True, exclude_defaults=True)
    science = {section: value for section, value in written.items() if section not in _NOT_SCIENCE}
    for dotted in _NOT_SCIENCE_FIELDS:
        section, name = dotted.split(".")
        if science.get(section):
            science[section].pop(name, None)
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
