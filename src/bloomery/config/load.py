"""From a file or a shipped name, through `base:` and command-line overrides, to a typed recipe or all its problems."""

from __future__ import annotations

import copy
import difflib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import Any, get_args

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from bloomery.base.errors import Problem, RecipeError
from bloomery.config.families import family_defaults
from bloomery.config.recipe import Recipe
from bloomery.config.yaml_nodes import parse_yaml


@dataclass
class Draft:
    """A recipe as far as it could be read. `recipe` is None only if not even a repaired one could be built."""

    source: str
    recipe: Recipe | None = None
    places: dict[str, str] = field(default_factory=dict)
    """Dotted path -> where the user wrote it; a path that is missing here was left to its default."""
    by_family: set[str] = field(default_factory=set)
    """Paths whose value is the model family's default."""
    problems: list[Problem] = field(default_factory=list)
    faulty: set[str] = field(default_factory=set)
    """Paths whose value in `recipe` is a stand-in, because what the user wrote is wrong."""

    def is_set(self, path: str) -> bool:
        return path in self.places

    def place(self, *paths: str) -> str:
        """Where the first of these paths that the user wrote stands; the recipe itself if none was."""
        return next((self.places[path] for path in paths if path in self.places), self.source)


def shipped_recipes() -> list[str]:
    """Names of the recipes inside the package."""
    folder = resources.files("bloomery") / "recipes"
    return sorted(entry.name.removesuffix(".yaml") for entry in folder.iterdir() if entry.name.endswith(".yaml"))


def load_recipe(name: str, overrides: Sequence[str] = ()) -> Draft:
    """A draft without problems, or RecipeError with every problem of the schema. Cross-field rules: sizing/check.py."""
    draft = read_recipe(name, overrides)
    if draft.problems:
        raise RecipeError(draft.problems)
    return draft


def read_recipe(name: str, overrides: Sequence[str] = ()) -> Draft:
    """Everything that can be known about the recipe, problems included."""
    draft = Draft(source=name)
    raw = _read_with_bases(name, None, draft, chain=[])
    for override in overrides:
        _apply_override(raw, override, draft)
    model = raw.get("model")
    if isinstance(model, dict):
        defaults = family_defaults(model)
        model.update(defaults)
        draft.by_family = {f"model.{key}" for key in defaults}
    if not draft.problems or raw:
        _validate(raw, draft)
    return draft


def _read_with_bases(name: str, beside: Path | None, draft: Draft, chain: list[str]) -> dict[str, Any]:
    text, file, folder = _open(name, beside, draft)
    if text is None:
        return {}
    value, places, problems = parse_yaml(text, file=file)
    draft.problems += problems
    if value is not None and not isinstance(value, dict):
        rule = "a recipe is a mapping of sections such as `model:` and `train:`"
        draft.problems.append(Problem(f"{file} holds a {type(value).__name__}", rule, place=f"{file}:1"))
        return {}
    raw: dict[str, Any] = value or {}
    base = raw.pop("base", None)
    base_place = places.pop("base", file)
    if base is not None:
        if not isinstance(base, str):
            draft.problems.append(Problem(f"base is {base!r}", "base names one other recipe", place=base_place))
        elif file in chain:
            loop = " -> ".join([*chain[chain.index(file) :], file])
            draft.problems.append(Problem(f"base goes round in a circle: {loop}", place=base_place))
        else:
            below = _read_with_bases(base, folder, draft, [*chain, file])
            merged: dict[str, Any] = _merge(below, raw, "", draft.places, places)
            return merged
    draft.places.update(places)
    draft.places.pop("", None)
    return raw


def _open(name: str, beside: Path | None, draft: Draft) -> tuple[str | None, str, Path | None]:
    """(text, name for messages, folder). A path wins over a shipped name when it exists."""
    for path in [*([beside / name] if beside else []), Path(name)]:
        if path.is_file():
            try:
                return path.read_text(encoding="utf-8"), str(path), path.parent
            except (OSError, UnicodeDecodeError) as error:
                draft.problems.append(Problem(f"cannot read {path}: {error}", place=str(path)))
                return None, str(path), None
    shipped = name.removesuffix(".yaml")
    if shipped in shipped_recipes():
        resource = resources.files("bloomery") / "recipes" / f"{shipped}.yaml"
        return resource.read_text(encoding="utf-8"), f"{shipped}.yaml", None
    guess = difflib.get_close_matches(shipped, shipped_recipes(), n=1)
    remedy = f"did you mean {guess[0]}?" if guess else f"shipped recipes: {', '.join(shipped_recipes())}"
    draft.problems.append(Problem(f"there is no recipe {name!r}", "it is neither a file nor a shipped recipe", remedy))
    return None, name, None


def _merge(below: Any, above: Any, path: str, kept: dict[str, str], places: dict[str, str]) -> Any:
    """`above` over `below`: mappings merge, everything else replaces. `kept` follows the winner's places."""
    if isinstance(below, dict) and isinstance(above, dict):
        merged = dict(below)
        for key, value in above.items():
            below_path = f"{path}.{key}" if path else key
            if key in below:
                merged[key] = _merge(below[key], value, below_path, kept, places)
            else:
                merged[key] = value
                _replace_places(below_path, kept, places)
        if path in places and path:
            kept[path] = places[path]
        return merged
    _replace_places(path, kept, places)
    return above


def _replace_places(path: str, kept: dict[str, str], places: dict[str, str]) -> None:
    under = f"{path}."
    for old in [old for old in kept if old == path or old.startswith(under)]:
        del kept[old]
    kept.update({new: place for new, place in places.items() if new == path or new.startswith(under)})


def _apply_override(raw: dict[str, Any], override: str, draft: Draft) -> None:
    place = f"command line '{override}'"
    path, equals, text = override.partition("=")
    if not equals or not path.strip():
        remedy = "write it as section.field=value, for example batch.micro_batch_size=4"
        draft.problems.append(Problem(f"{override!r} is not an override", remedy=remedy, place="command line"))
        return
    value, _, problems = parse_yaml(text, file=place)
    draft.problems += problems
    keys = path.strip().split(".")
    target: Any = raw
    for key in keys[:-1]:
        if isinstance(target, list) and key.isdigit() and int(key) < len(target):
            target = target[int(key)]
        elif isinstance(target, dict):
            if not isinstance(target.get(key), dict | list):
                target[key] = {}
            target = target[key]
        else:
            draft.problems.append(Problem(f"{path} cannot be set: {key!r} is not inside a section", place=place))
            return
    last = keys[-1]
    if isinstance(target, list) and last.isdigit() and int(last) < len(target):
        target[int(last)] = value
    elif isinstance(target, dict):
        target[last] = value
    else:
        draft.problems.append(Problem(f"{path} cannot be set: the list has no item {last!r}", place=place))
        return
    _replace_places(path, draft.places, {path: place})


def _validate(raw: dict[str, Any], draft: Draft) -> None:
    try:
        draft.recipe = Recipe.model_validate(raw)
        return
    except ValidationError as error:
        faults = _faults(error, raw)
    repaired = copy.deepcopy(raw)
    for path, kind, messages in faults:
        draft.problems.append(_problem(path, kind, messages, raw, draft))
        draft.faulty.add(".".join(path))
        _repair(repaired, path)
    try:  # so that cross-field rules can report what else is wrong, in the same breath
        draft.recipe = Recipe.model_validate(repaired)
    except ValidationError:
        draft.recipe = None


def _faults(error: ValidationError, raw: Any) -> list[tuple[list[str], str, list[str]]]:
    """One entry per faulty path: pydantic reports each member of a union on its own."""
    faults: dict[tuple[str, ...], tuple[str, list[str]]] = {}
    for item in error.errors():
        path, node = [], raw
        for part in item["loc"]:
            known = isinstance(node, dict) and (part in node or item["type"] == "missing")
            if not known and not (isinstance(node, list) and isinstance(part, int)):
                break
            path.append(str(part))
            node = (node.get(part) if isinstance(node, dict) else node[part]) if part is not None else None
        message = item["msg"].removeprefix("Value error, ")
        kind, messages = faults.setdefault(tuple(path), (item["type"], []))
        messages.append(message)
    return [(list(path), kind, messages) for path, (kind, messages) in faults.items()]


def _problem(path: list[str], kind: str, messages: list[str], raw: Any, draft: Draft) -> Problem:
    dotted = ".".join(path)
    parent = ".".join(path[:-1])
    place = draft.place(dotted, parent) if path else draft.source
    if kind == "extra_forbidden":
        return Problem(f"{dotted} is not a field of a recipe", remedy=_did_you_mean(path), place=place)
    info = _field(path)
    meaning = (info.description or "").rstrip(".") if info else ""
    if kind == "missing":
        remedy = f"add `{path[-1]}:` to `{parent}`" if parent else f"add `{path[-1]}:` to the recipe"
        return Problem(f"{dotted} is missing", meaning, remedy, place)
    value: Any = raw
    for part in path:
        value = value[int(part)] if isinstance(value, list) else value[part]
    shown = "a section" if isinstance(value, dict) else "a list" if isinstance(value, list) else repr(value)
    if kind == "string_pattern_mismatch":
        return Problem(f"{dotted} is {shown}", meaning or messages[0], place=place)
    rule = " or ".join(message.replace("Input should be", "must be") for message in messages)
    remedy = f"{path[-1]}: {meaning}" if meaning else ""
    if kind == "literal_error" and info and isinstance(value, str):
        guess = difflib.get_close_matches(value, [str(option) for option in get_args(info.annotation)], n=1)
        remedy = f"did you mean {guess[0]}?" if guess else remedy
    return Problem(f"{dotted} is {shown}", rule, remedy, place)


def _did_you_mean(path: list[str]) -> str:
    siblings = _fields_of(path[:-1])
    guess = difflib.get_close_matches(path[-1], siblings, n=1, cutoff=0.6)
    if guess:
        return f"did you mean {'.'.join([*path[:-1], guess[0]])}?"
    elsewhere = [known for known in all_paths() if known.rsplit(".", 1)[-1] == path[-1]]
    if elsewhere:
        return f"did you mean {elsewhere[0]}?"
    where = f"`{'.'.join(path[:-1])}` has" if len(path) > 1 else "a recipe has"
    return f"{where}: {', '.join(siblings)}"


def all_paths() -> list[str]:
    """Every dotted path of the schema; items of a list stand as `0`."""

    def walk(section: type[BaseModel], prefix: str) -> Iterator[str]:
        for name, info in section.model_fields.items():
            path = f"{prefix}{info.alias or name}"
            yield path
            inner = _section_in(info.annotation)
            if inner:
                middle = ".0" if "list" in str(info.annotation).split("[")[0] else ""
                yield from walk(inner, f"{path}{middle}.")

    return list(walk(Recipe, ""))


def _section_in(annotation: Any) -> type[BaseModel] | None:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next((found for arg in get_args(annotation) if (found := _section_in(arg))), None)


def _fields_of(path: list[str]) -> list[str]:
    section: type[BaseModel] | None = Recipe
    for part in path:
        info = _field_in(section, part)
        if info is not None:
            section = _section_in(info.annotation)
    return [info.alias or name for name, info in section.model_fields.items()] if section else []


def _field_in(section: type[BaseModel] | None, part: str) -> FieldInfo | None:
    fields = section.model_fields if section else {}
    return next((info for name, info in fields.items() if part == (info.alias or name)), None)


def _field(path: list[str]) -> FieldInfo | None:
    section: type[BaseModel] | None = Recipe
    info: FieldInfo | None = None
    for part in path:
        found = _field_in(section, part)
        if found is not None:
            info = found
            section = _section_in(found.annotation)
    return info


def _repair(raw: Any, path: list[str]) -> None:
    """Drop what is wrong, or put a harmless stand-in where a value is required."""
    target = raw
    for part in path[:-1]:
        target = target[int(part)] if isinstance(target, list) else target.setdefault(part, {})
        if not isinstance(target, dict | list):
            return
    if isinstance(target, list):
        return
    target.pop(path[-1], None)
    info = _field(path)
    if info is not None and info.is_required() and _section_in(info.annotation) is None:
        options = get_args(info.annotation)
        text = str(info.annotation)
        stand_in: Any = 1
        if "Amount" in text:
            stand_in = "1 steps"
        elif info.annotation is float:
            stand_in = 1e-9
        elif info.annotation is bool:
            stand_in = True
        elif info.annotation is str:
            stand_in = "unnamed"
        elif options and isinstance(options[0], str):
            stand_in = options[0]
        target[path[-1]] = stand_in
