"""Questions about the recipe's schema: what stands at a path, what may stand there, which paths exist."""

from __future__ import annotations

import types
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from bloomery.config.recipe import Recipe


@dataclass(frozen=True)
class Spot:
    """What the schema says about one path."""

    annotation: Any
    info: FieldInfo | None
    """The field, or for an item of a list the field that holds the list."""

    @property
    def meaning(self) -> str:
        return (self.info.description or "").rstrip(".") if self.info else ""

    @property
    def options(self) -> list[str]:
        """The words that may stand here, for a field with a fixed choice."""
        kinds = _kinds(self.annotation)
        return [str(option) for kind in kinds if get_origin(kind) is Literal for option in get_args(kind)]


def spot_at(path: Sequence[str]) -> Spot | None:
    """None for a path that a recipe cannot have."""
    annotation: Any = Recipe
    info: FieldInfo | None = None
    for part in path:
        if section := _section(annotation):
            info = _fields(section).get(part)
            if info is None:
                return None
            annotation = info.annotation
        else:
            items = _items(annotation)
            if items is None:
                return None
            annotation = items
    return Spot(annotation, info)


def fields_at(path: Sequence[str]) -> list[str]:
    """The fields that may be written inside this path; none where it is no section."""
    spot = spot_at(path)
    section = _section(spot.annotation) if spot else None
    return list(_fields(section)) if section else []


def all_paths() -> list[str]:
    """Every dotted path of the schema; an item of a list stands as `0`, the name of a validation group as nothing."""
    return list(_paths(Recipe, ""))


def _paths(annotation: Any, prefix: str) -> Iterator[str]:
    if section := _section(annotation):
        for name, info in _fields(section).items():
            yield f"{prefix}{name}"
            yield from _paths(info.annotation, f"{prefix}{name}.")
    elif any(get_origin(kind) is dict for kind in _kinds(annotation)):
        yield from _paths(_items(_items(annotation)), prefix)
    elif (items := _items(annotation)) is not None:
        yield from _paths(items, f"{prefix}0.")


def _fields(section: type[BaseModel]) -> dict[str, FieldInfo]:
    return {info.alias or name: info for name, info in section.model_fields.items()}


def _section(annotation: Any) -> type[BaseModel] | None:
    return next((kind for kind in _kinds(annotation) if isinstance(kind, type) and issubclass(kind, BaseModel)), None)


def _items(annotation: Any) -> Any:
    """The type of the items of a list or of the values of a mapping; None for anything else."""
    kinds = _kinds(annotation)
    return next((get_args(kind)[-1] for kind in kinds if get_origin(kind) in (list, dict)), None)


def _kinds(annotation: Any) -> list[Any]:
    """The types that a value may have, without `None` and without pydantic's remarks."""
    if get_origin(annotation) is Annotated:
        return _kinds(get_args(annotation)[0])
    if get_origin(annotation) in (Union, types.UnionType):
        return [kind for part in get_args(annotation) if part is not type(None) for kind in _kinds(part)]
    return [annotation]
