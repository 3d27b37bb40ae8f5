"""The recipe's fields by dotted path, found by walking its classes; and which of them an unknown name may mean."""

from __future__ import annotations

import difflib
import types
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from bloomery.config.fields import OnResume
from bloomery.config.recipe import FIXED, Recipe

_MOST_SUGGESTIONS = 3


@dataclass(frozen=True)
class FieldSpec:
    """What the schema knows of one path. `info` of an item of a list is that of the list."""

    annotation: Any
    info: FieldInfo
    on_resume: OnResume

    @property
    def meaning(self) -> str:
        return (self.info.description or "").rstrip(".")

    @property
    def options(self) -> list[str]:
        """The allowed words of a field with a fixed choice, as YAML writes them."""
        kinds = [kind for kind in _kinds(self.annotation) if get_origin(kind) is Literal]
        return [str(word).lower() if isinstance(word, bool) else str(word) for kind in kinds for word in get_args(kind)]


@cache
def all_fields() -> dict[str, FieldSpec]:
    """Every dotted path in the order of the recipe; an item of a list is `0`, of a mapping `*`."""
    return dict(_walk(Recipe, "", FieldInfo(annotation=Recipe), FIXED))


def all_paths() -> list[str]:
    return [path for path in all_fields() if path[-2:] not in (".0", ".*")]


def field_at(path: Sequence[str]) -> FieldSpec | None:
    """None for a path that a recipe cannot have."""
    return all_fields().get(_known(path) or "")


def names_in(path: Sequence[str]) -> list[str]:
    """The fields of the section at this path; empty where it is not a section."""
    section = _known(path)
    prefix = f"{section}." if section else ""
    if section is None:
        return []
    return [name for other in all_fields() if other.startswith(prefix) and "." not in (name := other[len(prefix) :])]


def closest(word: str, known: Iterable[str], *, cutoff: float = 0.6) -> str | None:
    """The known word that looks most like this one; capitals and dashes do not count."""
    plain = {option.lower().replace("-", "_"): option for option in known}
    found = difflib.get_close_matches(word.lower().replace("-", "_"), plain, n=1, cutoff=cutoff)
    return plain[found[0]] if found else None


def meant_paths(path: Sequence[str]) -> list[str]:
    """Dotted paths that the writer of this unknown field may have meant; the likeliest first, at most three."""
    around, name = list(path[:-1]), path[-1]
    if name in all_fields():  # `batch.micro_batch_size: 4` as one key
        return [name]
    if sibling := closest(name, names_in(around)):
        return [".".join([*around, sibling])]
    ends = {other: other.rpartition(".")[2] for other in all_paths()}
    similar = closest(name, ends.values(), cutoff=0.8)
    found = [other for other, end in ends.items() if end == similar]
    return ([other for other in found if other.split(".")[0] == path[0]] or found)[:_MOST_SUGGESTIONS]


def _known(path: Sequence[str]) -> str | None:
    """The path with `0` and `*` for items, or None."""
    found = ""
    for part in path:
        prefix = f"{found}." if found else ""
        names = (f"{prefix}{part}", f"{prefix}{'0' if part.isdecimal() else '*'}")
        found = next((name for name in names if name in all_fields()), "")
        if not found:
            return None
    return found


def _walk(annotation: Any, path: str, info: FieldInfo, mark: OnResume) -> Iterator[tuple[str, FieldSpec]]:
    if path:
        yield path, FieldSpec(annotation, info, mark)
    prefix = f"{path}." if path else ""
    for kind in _kinds(annotation):
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            for name, inner in kind.model_fields.items():
                own = next((each for each in inner.metadata if isinstance(each, OnResume)), mark)
                yield from _walk(inner.annotation, f"{prefix}{inner.alias or name}", inner, own)
        elif get_origin(kind) in (list, dict):
            item = "0" if get_origin(kind) is list else "*"
            yield from _walk(get_args(kind)[-1], f"{prefix}{item}", info, mark)


def _kinds(annotation: Any) -> list[Any]:
    """The types that a value may have, without `None` and without metadata."""
    if get_origin(annotation) is Annotated:
        return _kinds(get_args(annotation)[0])
    if get_origin(annotation) in (Union, types.UnionType):
        return [kind for part in get_args(annotation) if part is not type(None) for kind in _kinds(part)]
    return [annotation]
