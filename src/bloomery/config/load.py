"""From a file or a shipped name, through `base:` and command-line overrides, to a typed recipe or all its problems."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from bloomery.base.bounded import read_small
from bloomery.base.credentials import mask
from bloomery.base.errors import Problem, RecipeError
from bloomery.config.draft import Draft, by_place
from bloomery.config.overrides import apply_override
from bloomery.config.yaml_nodes import Parsed, parse_yaml

_RECIPE_BYTES = 1 << 19
"""PyYAML needs up to 15 seconds for so much."""


@dataclass(frozen=True)
class _Source:
    """An opened recipe file."""

    text: str
    file: str
    """For messages."""
    folder: Path | None
    """Where its `base` is looked for; None for a shipped recipe."""
    identity: str
    """Equal for two names of one file."""


def shipped_recipes() -> list[str]:
    """Names of the recipes inside the package."""
    folder = resources.files("bloomery") / "recipes"
    return sorted(entry.name.removesuffix(".yaml") for entry in folder.iterdir() if entry.name.endswith(".yaml"))


def load_recipe(name: str, overrides: Sequence[str] = (), *, is_saved: bool = False) -> Draft:
    """A draft without problems, or RecipeError with every problem of the schema. More rules: sizing/check.py."""
    draft = read_recipe(name, overrides, is_saved=is_saved)
    if draft.problems:
        raise RecipeError(sorted(draft.problems, key=by_place))
    return draft


def read_recipe(
    name: str,
    overrides: Sequence[str] = (),
    *,
    is_saved: bool = False,
) -> Draft:
    """Everything that can be known about the recipe, problems included. `is_saved`: see Draft."""
    draft = Draft(source=name, is_saved=is_saved)
    raw = _read_with_bases(name, draft, chain=[])
    if raw is None:
        return draft
    for override in overrides:
        apply_override(raw, override, draft)
    if draft.problems:
        return draft
    from bloomery.config.faults import validate

    validate(raw, draft)
    return draft


def _read_with_bases(name: str, draft: Draft, chain: list[_Source]) -> dict[str, Any] | None:
    """The merged values of this recipe and its bases, their places in the draft; None if it could not be read.
    `chain`: the recipes that led here, each the base of the one before."""
    source = _open(name, chain[-1].folder if chain else None, draft)
    if source is None:
        return None
    if source.identity in [link.identity for link in chain]:
        loop = " -> ".join([*(link.file for link in chain), source.file])
        draft.problems.append(Problem(f"base goes round in a circle: {loop}", remedy="remove one of these bases"))
        return None
    parsed = parse_yaml(source.text, file=source.file)
    draft.problems += parsed.problems
    if not isinstance(parsed.value, dict):
        if not parsed.problems:
            draft.problems.append(_not_a_recipe(source.file, parsed.value))
        return None
    base, base_place = parsed.value.pop("base", None), parsed.places.pop("base", source.file)
    parsed.places.pop("")
    below: dict[str, Any] | None = {}
    if base is not None:
        below = _read_base(base, base_place, draft, [*chain, source])
    return _merge(below or {}, parsed.value, "", parsed, draft)


def _read_base(base: Any, place: str, draft: Draft, chain: list[_Source]) -> dict[str, Any] | None:
    if not isinstance(base, str):
        rule, remedy = "base names one other recipe", "write `base: other-recipe`"
        draft.problems.append(Problem(f"base is {base!r}", rule, remedy, place))
        return None
    known = len(draft.problems)
    below = _read_with_bases(base, draft, chain)
    # What could not be opened has no place of its own: the line that names it is the one to mend.
    draft.problems[known:] = [
        Problem(problem.what, problem.rule, problem.remedy, problem.place or place)
        for problem in draft.problems[known:]
    ]
    return below


def _merge(below: dict[str, Any], above: dict[str, Any], path: str, parsed: Parsed, draft: Draft) -> dict[str, Any]:
    """`above` over `below`: mappings merge, everything else replaces. The draft's places follow the winner."""
    merged = dict(below)
    for key, value in above.items():
        inner = f"{path}.{key}" if path else key
        if isinstance(value, dict) and isinstance(below.get(key), dict):
            merged[key] = _merge(below[key], value, inner, parsed, draft)
            draft.places[inner] = parsed.places[inner]
        else:
            merged[key] = value
            draft.replace_places(inner, parsed.places)
    return merged


def _not_a_recipe(file: str, value: Any) -> Problem:
    remedy = "start from a shipped one, for example `base: quickstart`"
    if value is None:
        return Problem(f"{file} is empty", "a recipe has sections such as `model:` and `train:`", remedy, file)
    kind = "a list" if isinstance(value, list) else f"only {mask(repr(value)):.60}"
    return Problem(f"{file} holds {kind}", "a recipe is a mapping of sections such as `model:`", remedy, f"{file}:1")


def _open(name: str, beside: Path | None, draft: Draft) -> _Source | None:
    """A file wins over a shipped name; a base is looked for beside its child, then in the working directory."""
    paths = [*([beside / name] if beside else []), Path(name)]
    folder = None
    for path in paths:
        try:
            content = read_small(path, _RECIPE_BYTES)
        except IsADirectoryError:
            folder = path
        except (FileNotFoundError, NotADirectoryError, ValueError):
            pass
        except OSError as error:
            draft.problems.append(Problem(f"cannot read {path}: {error.strerror}", remedy="check the path"))
            return None
        else:
            return _decode(content, path, draft)
    shipped = name.removesuffix(".yaml")
    if shipped in shipped_recipes():
        text = (resources.files("bloomery") / "recipes" / f"{shipped}.yaml").read_text(encoding="utf-8")
        return _Source(text, f"{shipped}.yaml", None, f"shipped {shipped}")
    draft.problems.append(_no_such_recipe(name, folder, paths[0]))
    return None


def _decode(content: bytes, path: Path, draft: Draft) -> _Source | None:
    try:
        return _Source(content.decode("utf-8"), str(path), path.parent, str(path.resolve()))
    except UnicodeDecodeError as error:
        what = f"not a text file: byte {error.start} is not UTF-8"
        line = content.count(b"\n", 0, error.start) + 1
        draft.problems.append(Problem(what, "a recipe is YAML in UTF-8", "save it as UTF-8", f"{path}:{line}"))
        return None


def _no_such_recipe(name: str, folder: Path | None, path: Path) -> Problem:
    if folder is not None and name:
        resolved = folder / "recipe.yaml"
        remedy = f"did you mean {resolved}?" if resolved.is_file() else "name the file inside it"
        return Problem(f"{folder} is a folder", "a recipe is a file", remedy)
    from bloomery.config.suggest import closest

    files = [str(path.with_name(f"{path.name}{suffix}")) for suffix in (".yaml", ".yml") if path.name]
    guess = next((file for file in files if Path(file).is_file()), None)
    guess = guess or closest(name.removesuffix(".yaml"), shipped_recipes()) or closest(str(path), _recipes_near(path))
    remedy = f"did you mean {guess}?" if guess else f"shipped recipes: {', '.join(shipped_recipes())}"
    return Problem(f"there is no recipe {name!r}", "it is neither a file nor a shipped recipe", remedy)


def _recipes_near(path: Path) -> list[str]:
    try:
        return [str(file) for file in path.parent.iterdir() if file.suffix in (".yaml", ".yml")]
    except (OSError, ValueError):
        return []
