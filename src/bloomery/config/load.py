"""From a file or a shipped name, through `base:` and command-line overrides, to a typed recipe or all its problems."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bloomery.base.bounded import read_small
from bloomery.base.errors import Problem, RecipeError, mask
from bloomery.config.faults import mask_secrets, validate
from bloomery.config.recipe import Recipe
from bloomery.config.schema import closest
from bloomery.config.yaml_nodes import parse_yaml
from bloomery.families.registry import family_defaults

COMMAND_LINE = "command line"
_SHIPPED = Path(__file__).parents[1] / "recipes"
_RECIPE_BYTES = 1 << 19
"""PyYAML needs up to 15 seconds for so much."""
_DEEPEST_OVERRIDE = 12
_LONGEST_SHOWN = 200


@dataclass
class Draft:
    """A recipe as far as it could be read. `recipe` is None if there are problems."""

    source: str
    recipe: Recipe | None = None
    places: dict[str, str] = field(default_factory=dict)
    """Dotted path -> where the user wrote it; a path that is missing here has its default."""
    by_family: set[str] = field(default_factory=set)
    """Paths whose value is the model family's default."""
    problems: list[Problem] = field(default_factory=list)

    def place(self, *paths: str) -> str:
        """Where to look: what the command line changed, else the first path that was written, else its section."""
        written = [self.places[path] for path in paths if path in self.places]
        inside = [place for path in paths for inner, place in self.places.items() if is_inside(inner, path)]
        around = [place for path in paths for outer, place in reversed(self.places.items()) if is_inside(path, outer)]
        on_command_line = [place for place in (*written, *inside) if place.startswith(COMMAND_LINE)]
        return next(iter([*on_command_line, *written, *inside, *around]), self.source)

    def set_places(self, path: str, places: dict[str, str]) -> None:
        """`path` and everything inside it now comes from `places`."""
        self.places = {old: place for old, place in self.places.items() if not is_inside(old, path)}
        self.places |= {new: place for new, place in places.items() if is_inside(new, path)}

    def validate(self, raw: dict[str, Any], *, is_saved: bool = False) -> None:
        """Set `recipe`, or add every fault of the schema. `is_saved`: a secret is masked, not refused, because the
        recipe is that of a checkpoint."""
        secrets = mask_secrets(raw, "", self.place)
        self.problems += [] if is_saved else secrets
        if isinstance(model := raw.get("model"), dict):
            defaults = family_defaults(model)
            raw["model"] = {**model, **defaults}
            self.by_family |= {f"model.{key}" for key in defaults}
        found = validate(raw, self.place)
        if isinstance(found, list):
            self.problems += found
        elif not self.problems:
            self.recipe = found


def is_inside(path: str, outer: str) -> bool:
    """Whether `path` is `outer` or lies within it."""
    return path == outer or path.startswith(f"{outer}.")


def by_place(problem: Problem) -> tuple[str, int]:
    """Sort key: the order in which a reader of the files meets the problems."""
    file, _, line = problem.place.rpartition(":")
    return (file, int(line)) if file and line.isdigit() else (problem.place, 0)


def shipped_recipes() -> list[str]:
    """Names of the recipes inside the package."""
    return sorted(file.stem for file in _SHIPPED.glob("*.yaml"))


def load_recipe(name: str, overrides: Sequence[str] = (), *, is_saved: bool = False) -> Draft:
    """A draft without problems, or RecipeError with every problem of the schema. More rules: sizing/check.py."""
    draft = read_recipe(name, overrides, is_saved=is_saved)
    if draft.problems:
        raise RecipeError(sorted(draft.problems, key=by_place))
    return draft


def read_recipe(name: str, overrides: Sequence[str] = (), *, is_saved: bool = False) -> Draft:
    """Everything that can be known about the recipe, problems included. `is_saved`: see Draft.validate."""
    draft = Draft(source=name)
    raw = _read_with_bases(name, draft, chain=[])
    for override in overrides if raw is not None else ():
        _apply_override(raw, override, draft)
    if raw is not None and not draft.problems:
        draft.validate(raw, is_saved=is_saved)
    return draft


def _read_with_bases(name: str, draft: Draft, chain: list[Path]) -> dict[str, Any] | None:
    """The merged values of this recipe and its bases, their places in the draft; None if it could not be read.
    `chain`: the recipe files that led here, each the base of the one before."""
    try:
        path, text = _open(name, chain[-1].parent if chain else None)
    except RecipeError as error:
        draft.problems += error.problems
        return None
    if path.resolve() in [other.resolve() for other in chain]:
        loop = " -> ".join(map(_name, [*chain, path]))
        draft.problems.append(Problem(f"circular base: {loop}", remedy="remove one of these bases"))
        return None
    parsed = parse_yaml(text, file=_name(path))
    draft.problems += parsed.problems
    values = parsed.value
    if not isinstance(values, dict):
        if not parsed.problems:
            kind = {type(None): "empty", list: "a list"}.get(type(values), f"only {mask(repr(values)):.60}")
            rule, remedy = "a recipe is a mapping of sections such as `model:`", "start with `base: quickstart`"
            draft.problems.append(Problem(f"the recipe is {kind}", rule, remedy, f"{_name(path)}:1"))
        return None
    base, place = values.pop("base", None), parsed.places.pop("base", "")
    below: dict[str, Any] | None = {}
    if isinstance(base, str):
        known = len(draft.problems)
        below = _read_with_bases(base, draft, [*chain, path])
        # What could not be opened has no place of its own: the line that names it is the one to fix.
        draft.problems[known:] = [
            Problem(found.what, found.rule, found.remedy, found.place or place) for found in draft.problems[known:]
        ]
    elif base is not None:
        rule, remedy = "base names one other recipe", "write `base: other-recipe`"
        draft.problems.append(Problem(f"base is {base!r}", rule, remedy, place))
    return _merge(below or {}, values, "", parsed.places, draft)


def _merge(
    below: dict[str, Any], above: dict[str, Any], path: str, places: dict[str, str], draft: Draft
) -> dict[str, Any]:
    """`above` over `below`: mappings merge, everything else replaces. The draft's places follow the winner."""
    merged = dict(below)
    for key, value in above.items():
        inner = f"{path}.{key}" if path else key
        if isinstance(value, dict) and isinstance(below.get(key), dict):
            merged[key] = _merge(below[key], value, inner, places, draft)
            draft.places[inner] = places[inner]
        else:
            merged[key] = value
            draft.set_places(inner, places)
    return merged


def _open(name: str, beside: Path | None) -> tuple[Path, str]:
    """A file wins over a shipped name; a base is looked for beside its child, then in the working directory."""
    paths = [*([beside / name] if beside else []), Path(name)]
    for path in paths:
        try:
            content = read_small(path, _RECIPE_BYTES)
        except (FileNotFoundError, NotADirectoryError, IsADirectoryError, ValueError):
            continue
        except OSError as error:
            raise RecipeError(Problem(f"cannot read {path}: {error.strerror}", remedy="check the path")) from error
        try:
            return path, content.decode("utf-8")
        except UnicodeDecodeError as error:
            what, place = f"byte {error.start} is not UTF-8", f"{path}:{1 + content[: error.start].count(10)}"
            raise RecipeError(Problem(what, "a recipe is YAML in UTF-8", "save it as UTF-8", place)) from error
    if name.removesuffix(".yaml") in shipped_recipes():
        path = _SHIPPED / f"{name.removesuffix('.yaml')}.yaml"
        return path, path.read_text(encoding="utf-8")
    inside, beside_it = _yaml_files(paths[0]), _yaml_files(paths[0].parent)
    guess = inside[0] if inside else closest(name, [*shipped_recipes(), *beside_it])
    remedy = f"did you mean {guess}?" if guess else f"shipped recipes: {', '.join(shipped_recipes())}"
    raise RecipeError(Problem(f"there is no recipe {name!r}", "it is neither a file nor a shipped recipe", remedy))


def _name(path: Path) -> str:
    """For messages."""
    return path.name if path.parent == _SHIPPED else str(path)


def _yaml_files(folder: Path) -> list[str]:
    try:
        return [str(file) for file in folder.iterdir() if file.suffix in (".yaml", ".yml")]
    except (OSError, ValueError):
        return []


def _apply_override(raw: Any, override: str, draft: Draft) -> None:
    """Put `section.field=value` into `raw`; its place is the command line."""
    shown = mask(override.encode(errors="backslashreplace").decode())
    place = f"{COMMAND_LINE} '{shown if len(shown) <= _LONGEST_SHOWN else f'{shown[:_LONGEST_SHOWN]} ...'}'"
    name, equals, text = override.partition("=")
    keys = [key.strip() for key in name.split(".")]
    if not equals or not all(keys) or len(keys) > _DEEPEST_OVERRIDE or not name.isprintable() or "://" in name:
        remedy = "write it as section.field=value, for example batch.micro_batch_size=4"
        draft.problems.append(Problem("this is not an override", remedy=remedy, place=place))
        return
    parsed = parse_yaml(text, file=place)
    problems = [Problem(found.what, found.rule, "fix the value, or quote it", place) for found in parsed.problems]
    path, target = ".".join(keys), raw
    for i, key in enumerate(keys):
        outer = ".".join(keys[:i])
        index: Any = int(key) if isinstance(target, list) and key.isdecimal() else key
        if not isinstance(target, dict) and not (isinstance(target, list) and index in range(len(target))):
            has = f"{len(target)} items, counted from 0" if isinstance(target, list) else "no fields of its own"
            what, remedy = f"{path} cannot be set", f"set {outer} as a whole"
            problems.append(Problem(what, f"{outer} has {has}", remedy, place))
            break
        if i + 1 == len(keys):
            target[index] = parsed.value
        elif isinstance(target, dict) and target.get(index) is None:
            target[index] = {}
        target = target[index]
    draft.problems += problems
    draft.set_places(path, {f"{path}.{inner}" if inner else path: place for inner in parsed.places} | {path: place})
