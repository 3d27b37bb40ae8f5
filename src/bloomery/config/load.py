"""From a file or a shipped name, through `base:` and command-line overrides, to a typed recipe or all its problems; and
back: every value with its origin, the file that a run keeps, and the fingerprint of its science."""

import hashlib
import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from bloomery.base.bounded import read_small
from bloomery.base.errors import Problem, RecipeError, mask, where_instead
from bloomery.config.recipe import Recipe
from bloomery.config.schema import all_fields, closest, validate
from bloomery.config.yaml_nodes import dump_yaml, parse_yaml
from bloomery.families.registry import family_defaults

COMMAND_LINE = "command line"
_SHIPPED = Path(__file__).parents[1] / "recipes"
_RECIPE_BYTES = 1 << 19
"""PyYAML needs up to 15 seconds for so much."""
_DEEPEST_OVERRIDE = 12


@dataclass
class Places:
    """Where the user wrote each value."""

    source: str
    written: dict[str, str] = field(default_factory=dict)
    """By dotted path; a path that is missing here has its default."""

    def find(self, *paths: str) -> str:
        """Where to look: what the command line changed, else the first path that was written, else its section."""
        exact = [self.written[path] for path in paths if path in self.written]
        inside = [place for path in paths for inner, place in self.written.items() if is_inside(inner, path)]
        around = [place for path in paths for outer, place in reversed(self.written.items()) if is_inside(path, outer)]
        on_command_line = [place for place in (*exact, *inside) if place.startswith(COMMAND_LINE)]
        return next(iter([*on_command_line, *exact, *inside, *around]), self.source)

    def replace(self, path: str, places: dict[str, str]) -> None:
        """`path` and everything inside it now comes from `places`."""
        self.written = {old: place for old, place in self.written.items() if not is_inside(old, path)}
        self.written |= {new: place for new, place in places.items() if is_inside(new, path)}


@dataclass(frozen=True)
class LoadedRecipe:
    recipe: Recipe
    places: Places
    by_family: set[str]
    """Paths whose value is the model family's default."""
    warnings: list[Problem] = field(default_factory=list)
    """Of the rules between fields (sizing/check.py)."""


def is_inside(path: str, outer: str) -> bool:
    """Whether `path` is `outer` or lies within it."""
    return path == outer or path.startswith(f"{outer}.")


def shipped_recipes() -> list[str]:
    """Names of the recipes inside the package."""
    return sorted(file.stem for file in _SHIPPED.glob("*.yaml"))


def shipped_text(name: str) -> str:
    """RecipeError if there is no such recipe inside the package."""
    if name not in shipped_recipes():
        rule = f"shipped recipes: {', '.join(shipped_recipes())}"
        raise RecipeError(Problem(f"there is no shipped recipe {name!r}", rule, "name one of them"))
    return (_SHIPPED / f"{name}.yaml").read_text()


def load_recipe(name: str, overrides: Sequence[str] = (), *, is_saved: bool = False) -> LoadedRecipe:
    """RecipeError for what cannot be read, or else with every fault of the schema. The rules: sizing/check.py."""
    places = Places(source=name)
    raw = _read_with_bases(name, places, chain=(), is_saved=is_saved)
    if is_saved and isinstance(upload := raw.get("checkpoint", {}).get("upload"), dict):
        upload.pop("keep", None)  # of earlier versions; nothing reads it
    for override in overrides:
        apply_override(raw, override, places)
    return validated(raw, places)


def validated(raw: dict[str, Any], places: Places) -> LoadedRecipe:
    """RecipeError with every secret, or else with every fault of the schema."""
    rule = "a recipe is copied into checkpoints, logs and reports, so it holds no password, key or signature"
    secrets = []
    for path, value in leaves(raw):
        for text in map(str, value if isinstance(value, list) else [value]):
            if mask(path) != path or mask(text) != text:
                what = mask(f"{path} is {text!r}, with a secret in it")
                secrets.append(Problem(what, rule, f"remove it, and {where_instead(text)}", places.find(path)))
    if secrets:
        raise RecipeError(secrets)
    model = raw.get("model")
    defaults = family_defaults(model) if isinstance(model, dict) else {}
    if isinstance(model, dict):
        raw["model"] = {**model, **defaults}
    return LoadedRecipe(validate(raw, places.find), places, {f"model.{key}" for key in defaults})


def _read_with_bases(name: str, places: Places, chain: tuple[Path, ...], *, is_saved: bool = False) -> dict[str, Any]:
    """The merged values of this recipe and its bases. `chain`: the files that led here, each the base of the one
    before. `is_saved`: a secret is masked, not refused, because the recipe is that of a checkpoint."""
    path, text = _open(name, chain[-1].parent if chain else None)
    shown = _name(path)
    if path.resolve() in [other.resolve() for other in chain]:
        loop = " -> ".join(map(_name, [*chain, path]))
        raise RecipeError(Problem(f"circular base: {loop}", remedy="remove one of these bases"))
    values, written = parse_yaml(mask(text) if is_saved else text, lambda line: f"{shown}:{line}")
    if not isinstance(values, dict):
        rule, remedy = "a recipe is a mapping of sections such as `model:`", "start with `base: quickstart`"
        kind = "empty" if values is None else mask(repr(values))
        raise RecipeError(Problem(f"the recipe is {kind:.60}", rule, remedy, f"{shown}:1"))
    base, place = values.pop("base", None), written.pop("base", "")
    try:
        below = _read_with_bases(str(base), places, (*chain, path), is_saved=is_saved) if base else {}
    except RecipeError as error:  # what could not be opened has no place of its own: the line that names it is the one
        raise RecipeError([replace(found, place=found.place or place) for found in error.problems]) from None
    return _merge(below, values, "", written, places)


def _merge(
    below: dict[str, Any], above: dict[str, Any], path: str, written: dict[str, str], places: Places
) -> dict[str, Any]:
    """`above` over `below`: mappings merge, everything else replaces. The places follow the winner."""
    merged = dict(below)
    for key, value in above.items():
        inner = f"{path}.{key}" if path else key
        if isinstance(value, dict) and isinstance(below.get(key), dict):
            merged[key] = _merge(below[key], value, inner, written, places)
            places.written[inner] = written[inner]
        else:
            merged[key] = value
            places.replace(inner, written)
    return merged


def _open(name: str, beside: Path | None) -> tuple[Path, str]:
    """A file wins over a shipped name; a base is looked for beside its child, then in the working directory."""
    shipped = [] if os.sep in name else [_SHIPPED / f"{name.removesuffix('.yaml')}.yaml"]
    for path in [*([beside / name] if beside else []), Path(name), *shipped]:
        try:
            content = read_small(path, _RECIPE_BYTES)
            return path, content.decode("utf-8")
        except UnicodeDecodeError as error:
            what, place = f"byte {error.start} is not UTF-8", f"{path}:{1 + content[: error.start].count(10)}"
            raise RecipeError(Problem(what, "a recipe is YAML in UTF-8", "save it as UTF-8", place)) from error
        except (FileNotFoundError, NotADirectoryError, IsADirectoryError, ValueError):
            continue
        except OSError as error:
            raise RecipeError(Problem(f"cannot read {path}: {error.strerror}", remedy="check the path")) from error
    here = [f"{name}/recipe.yaml", f"{name}.yaml", *map(str, Path(name).parent.glob("*.yaml"))]
    guess = closest(name, [*filter(os.path.isfile, here[:2])], cutoff=0) or closest(
        name, [*here[2:], *shipped_recipes()]
    )
    remedy = f"did you mean {guess}?" if guess else f"shipped recipes: {', '.join(shipped_recipes())}"
    raise RecipeError(Problem(f"there is no recipe {name!r}", "it is neither a file nor a shipped recipe", remedy))


def _name(path: Path) -> str:
    """For messages."""
    return path.name if path.parent == _SHIPPED else str(path)


def apply_override(raw: Any, override: str, places: Places) -> None:
    """Put `section.field=value` into `raw`; its place is the command line."""
    place = f"{COMMAND_LINE} '{mask(override.encode(errors='backslashreplace').decode()):.200}'"
    name, equals, text = override.partition("=")
    keys = [key.strip() for key in name.split(".")]
    if not equals or not all(keys) or len(keys) > _DEEPEST_OVERRIDE or not name.isprintable():
        remedy = "write it as section.field=value, for example batch.micro_batch_size=4"
        raise RecipeError(Problem("this is not an override", remedy=remedy, place=place))
    value, written = parse_yaml(text, lambda line: place)
    path, target = ".".join(keys), raw
    for i, key in enumerate(keys):
        index: Any = int(key) if isinstance(target, list) and key.isdecimal() else key
        if not isinstance(target, dict) and not (isinstance(target, list) and index in range(len(target))):
            outer = ".".join(keys[:i])
            has = f"{len(target)} items, counted from 0" if isinstance(target, list) else "no fields of its own"
            raise RecipeError(Problem(f"{path} cannot be set", f"{outer} has {has}", f"set {outer} as a whole", place))
        if i + 1 == len(keys):
            target[index] = value
        elif isinstance(target, dict) and target.get(index) is None:
            target[index] = {}
        target = target[index]
    places.replace(path, {f"{path}.{inner}" if inner else path: place for inner in written} | {path: place})


def explain(loaded: LoadedRecipe) -> dict[str, dict[str, Any]]:
    """Every resolved value and its origin: a place such as `my.yaml:31`, `default`, or `default of family gpt2`."""
    by_family = dict.fromkeys(loaded.by_family, f"default of family {loaded.recipe.model.family}")
    origins = by_family | loaded.places.written
    values = leaves(as_dict(loaded.recipe))
    return {path: {"value": value, "origin": origins.get(path, "default")} for path, value in values}


def as_dict(recipe: Recipe) -> dict[str, Any]:
    """The recipe as plain YAML values, every field present."""
    return recipe.model_dump(mode="json", by_alias=True)


def as_yaml(recipe: Recipe) -> str:
    """The file a run folder keeps: every field, loadable again, headed by the fingerprint."""
    return f"# Resolved by Bloomery. fingerprint: {fingerprint(recipe)}\n{mask(dump_yaml(as_dict(recipe)))}"


def fingerprint(recipe: Recipe) -> str:
    """Sixteen hex digits over every field that decides what is learned; equal for every layout and every machine."""
    # Without defaults, so that a field added later does not change the fingerprint of every older recipe.
    science = recipe.model_dump(mode="json", by_alias=True, exclude_defaults=True)
    for path, spec in all_fields().items():
        section, _, name = path.rpartition(".")
        holder = science.get(section) if section else science
        if not spec.on_resume.in_fingerprint and isinstance(holder, dict):
            holder.pop(name, None)
    if science.get("precision") == "bf16":  # what `auto` is on accelerators, and the default once was
        del science["precision"]
    return hashlib.sha256(json.dumps(science, sort_keys=True).encode()).hexdigest()[:16]


def leaves(node: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Every value of plain YAML values by its dotted path; a list of values counts as one."""
    prefix = f"{path}." if path else ""
    if isinstance(node, dict) and node:
        for key, value in node.items():
            yield from leaves(value, f"{prefix}{key}")
    elif isinstance(node, list) and any(isinstance(item, dict) for item in node):
        for i, item in enumerate(node):
            yield from leaves(item, f"{prefix}{i}")
    else:
        yield path, node
