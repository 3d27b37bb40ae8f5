"""Write the field tables of docs/recipe.md from the schema, and the table of docs/training.md of what a resumed run may
change: `python docs/generate_recipe_reference.py`.

The tables stand between two markers; the rest of a page is written by hand. A test fails while they are out of date.
"""

from __future__ import annotations

import types
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from bloomery.config import fields as kinds
from bloomery.config import recipe
from bloomery.config.fields import OnResume, Section
from bloomery.config.recipe import Recipe
from bloomery.config.schema import all_fields
from bloomery.families.registry import READERS, family_defaults

PAGE, CONTRACT_PAGE = Path(__file__).with_name("recipe.md"), Path(__file__).with_name("training.md")
_ALIASES = {
    kinds.AnyAmount: "amount (steps, samples, tokens)",
    kinds.Length: "amount (steps, samples, tokens, epochs)",
    kinds.Steps: "amount (steps)",
    kinds.Documents: "amount (documents)",
    kinds.WallClock: "duration",
    kinds.AmountOrDuration: "amount, duration",
    kinds.StepsOrTime: "amount (steps), duration",
    kinds.StepsOrTimeOrAuto: "amount (steps), duration, `auto`",
}
_BY_VALIDATOR = {id(get_args(alias)[1]): words for alias, words in _ALIASES.items()}
"""An amount is known by its validator: that is where the units it takes are fixed."""
_WORDS = {int: "whole number", float: "number", str: "text", bool: "true or false"}
_LIMITS = {"gt": ">", "ge": ">=", "lt": "<", "le": "<="}
_NO_LIMIT = 10**9
"""Limits from here on only keep nonsense out; they would be noise in a table."""


def main() -> None:
    PAGE.write_text(updated(PAGE.read_text()))
    CONTRACT_PAGE.write_text(updated(CONTRACT_PAGE.read_text(), "contract", contract()))


def updated(page: str, name: str = "fields", table: str = "") -> str:
    """The page with a fresh table between the markers of this name; by default, all fields of the recipe."""
    begin, end = f"<!-- {name}: begin -->", f"<!-- {name}: end -->"
    before, rest = page.split(begin)
    return f"{before}{begin}\n\n{table or tables()}\n{end}{rest.split(end)[1]}"


def contract() -> str:
    """What a resumed run may change: one row for each mark, with the outermost fields that have it."""
    fields: dict[OnResume, list[str]] = {}
    for path, field in all_fields().items():
        same = [other.on_resume for inner, other in all_fields().items() if inner.startswith(f"{path}.")]
        if all(mark == field.on_resume for mark in same):
            outer = fields.setdefault(field.on_resume, [])
            outer += [] if any(path.startswith(f"{other}.") for other in outer) else [path]
    order = [mark for mark in vars(recipe).values() if isinstance(mark, OnResume)]
    rows = [
        f"| {mark.kind} | {', '.join(f'`{name}`' for name in fields[mark])} | {mark.why} |"
        for mark in dict.fromkeys(order)
        if mark in fields
    ]
    return "\n".join(["| may change | fields | why |", "|---|---|---|", *rows, ""])


def tables() -> str:
    """The top level, then a table for every section, each where the one that holds it names it first."""
    return "\n".join(_table("", Recipe))


def _table(path: str, section: type[Section]) -> Iterator[str]:
    yield f"### {f'`{path}`' if path else 'Top level'}\n"
    if section.__doc__ and section.__doc__ != Section.__doc__:
        yield f"{section.__doc__.strip()}\n"
    yield "| field | type | default | meaning |\n|---|---|---|---|"
    inner: list[tuple[str, type[Section]]] = []
    for name, info in section.model_fields.items():
        written = info.alias or name
        found = _section_in(info.annotation)
        where = f"{path}.{written}" if path else written
        words = section.model_fields[name].description or (f"See [`{where}`](#{_anchor(where)})." if found else "")
        cells = (f"`{written}`", _type(info.annotation, info.metadata), _default(section, name, info), words)
        yield f"| {' | '.join(_cell(text) for text in cells)} |"
        if found:
            inner.append((where, found))
    yield ""
    for where, found in inner:
        yield from _table(where, found)


def _cell(text: str) -> str:
    """Markdown: a bar would end the cell, and `<name>` outside of code would be taken for HTML."""
    parts = text.replace("|", r"\|").split("`")
    return "`".join(part if i % 2 else part.replace("<", "&lt;") for i, part in enumerate(parts))


def _type(annotation: Any, metadata: list[Any]) -> str:
    for remark in metadata:
        if words := _BY_VALIDATOR.get(id(remark)):
            return words
    origin, parts = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        flat = [remark for part in parts[1:] for remark in getattr(part, "metadata", None) or [part]]
        return _type(parts[0], flat)
    if origin in (Union, types.UnionType):
        kinds = [_type(part, metadata) for part in parts if part is not type(None)]
        return " or ".join([*kinds, *(["null"] if type(None) in parts else [])])
    if origin is Literal:
        return ", ".join(f"`{option}`" for option in parts)
    if origin is list:
        limits = "".join(f", {words}" for words in _lengths(metadata))
        return f"list of: {_type(parts[0], [])}{limits}"
    if origin is dict:
        return f"names, each with a {_type(parts[1], [])}"
    if isinstance(annotation, type) and issubclass(annotation, Section):
        return "section"
    if limits := _limits(metadata):
        return f"{_WORDS[annotation]} {limits}"
    return _WORDS[annotation]


def _limits(metadata: list[Any]) -> str:
    found = [(sign, getattr(remark, key, None)) for remark in metadata for key, sign in _LIMITS.items()]
    return ", ".join(f"{sign} {limit}" for sign, limit in found if limit is not None and limit < _NO_LIMIT)


def _lengths(metadata: list[Any]) -> Iterator[str]:
    least = next((r.min_length for r in metadata if hasattr(r, "min_length")), None)
    most = next((r.max_length for r in metadata if hasattr(r, "max_length")), None)
    if least is not None:
        yield f"exactly {least}" if least == most else f"at least {least}"


def _default(section: type[Section], name: str, info: FieldInfo) -> str:
    if section is recipe.ModelSection and name in family_defaults({}):
        return "by family" if name not in READERS else "`num_heads`"
    if info.default_factory is not None:
        return f"`{info.default_factory()}`"  # type: ignore[call-arg]
    default = info.default
    if default is PydanticUndefined:
        return "required"
    if default is None:
        return "null"
    if isinstance(default, Section):
        return "its defaults"
    if isinstance(default, list) and default and isinstance(default[0], Section):
        return f"`[{', '.join(_inline(item) for item in default)}]`"
    if isinstance(default, bool):
        return f"`{str(default).lower()}`"
    return f"`{default}`"


def _inline(section: Section) -> str:
    dumped = section.model_dump(mode="json", by_alias=True, exclude_none=True)
    return "{" + ", ".join(f"{key}: {value}" for key, value in dumped.items()) + "}"


def _section_in(annotation: Any) -> type[Section] | None:
    if isinstance(annotation, type) and issubclass(annotation, Section):
        return annotation
    return next((found for part in get_args(annotation) if (found := _section_in(part))), None)


def _anchor(where: str) -> str:
    """GitHub's: lower case, dots dropped."""
    return where.lower().replace(".", "")


if __name__ == "__main__":
    main()
