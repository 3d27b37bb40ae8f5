"""The recipe's fields by dotted path, found by walking its classes; and from plain values to a typed recipe, or to one
problem per fault, with the field's meaning beside pydantic's rule and the field that an unknown name may mean."""

import difflib
import json
import re
import types
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from bloomery.base.errors import Problem, RecipeError
from bloomery.config.fields import FIXED, OnResume
from bloomery.config.recipe import Recipe

_SHOWN_CHARACTERS = 60
_ELSEWHERE = {
    name: f"did you mean {field}?"
    for names, field in (
        ("lr learning_rate max_lr", "lr.peak"),
        ("min_lr", "lr.min"),
        ("max_steps train_iters steps", "train.for, such as '1000 steps'"),
        ("epochs max_epochs", "train.for, such as '2 epochs'"),
        ("batch_size batch.size", "batch.global_batch_size, or batch.micro_batch_size"),
        ("checkpoint.every save_every save_steps save_interval", "checkpoint.phases.0.every, such as '1000 steps'"),
        ("n_layer", "model.num_layers"),
        ("n_embd d_model", "model.hidden_size"),
        ("n_head", "model.num_heads"),
        ("block_size max_position_embeddings", "model.seq_length"),
        ("data.path", "data.train.0.path"),
    )
    for name in names.split()
} | {
    **dict.fromkeys(
        ("dp", "data_parallel", "data_parallel_size", "parallel.ddp"),
        "it follows from the ranks: launch.nodes x launch.gpus_per_node / (parallel.tp x parallel.pp x parallel.cp)",
    ),
    **dict.fromkeys(
        ("run_dir", "output_dir", "checkpoint.dir"), "the folder of a run is --run-dir on the command line"
    ),
}
"""What fields of other systems are here, by their names or paths."""


@dataclass(frozen=True)
class FieldSpec:
    """What the schema knows of one path. `info` of an item of a list is that of the list."""

    annotation: Any
    info: FieldInfo
    on_resume: OnResume

    @property
    def meaning(self) -> str:
        return " ".join((self.info.description or "").split()).rstrip(".")

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
    dotted = ".".join("0" if part.isdecimal() else part for part in path)
    patterns = {other: re.escape(other).replace(r"\*", "[^.]+") for other in all_fields()}
    return next((all_fields()[other] for other, pattern in patterns.items() if re.fullmatch(pattern, dotted)), None)


def closest(word: str, known: Iterable[str], *, cutoff: float = 0.6) -> str | None:
    """The known word that looks most like this one; capitals and dashes do not count."""
    plain = {option.lower().replace("-", "_"): option for option in known}
    found = difflib.get_close_matches(word.lower().replace("-", "_"), plain, n=1, cutoff=cutoff)
    return plain[found[0]] if found else None


def meant(path: Sequence[str]) -> str | None:
    """The field that the writer of this unknown path may have meant: by its name elsewhere, or a path like this one."""
    known = all_paths()
    namesakes = [other for other in known if other.rpartition(".")[2] == path[-1]]
    fields = [other for other in known if other.count(".") + 1 >= len(path)]  # no section in the place of a field
    return namesakes[0] if len(namesakes) == 1 else closest(".".join(path), fields)


def instead_of(path: Sequence[str]) -> str:
    """What to do about a field that a recipe does not have."""
    guess = meant(path)
    remedy = f"did you mean {guess}?" if guess else "docs/recipe.md lists all fields"
    return _ELSEWHERE.get(".".join(path)) or _ELSEWHERE.get(path[-1], remedy)


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


def validate(raw: dict[str, Any], place: Callable[[str], str]) -> Recipe:
    """RecipeError with every fault of the schema. `place`: where a dotted path was written."""
    try:
        return Recipe.model_validate(raw)
    except ValidationError as error:
        faults = [(tuple(map(str, item["loc"])), item) for item in error.errors(include_url=False)]
    misspelt = {meant(path) for path, item in faults if item["type"] == "extra_forbidden"}
    problems = [
        _problem(path, item, place(".".join(path)))
        for path, item in faults
        if item["type"] != "missing" or ".".join(path) not in misspelt
    ]
    raise RecipeError(sorted(problems, key=by_place))


def by_place(problem: Problem) -> tuple[str, int]:
    """Sort key: the order in which a reader of the files meets the problems."""
    file, _, line = problem.place.rpartition(":")
    return (file, int(line)) if file and line.isdigit() else (problem.place, 0)


def _problem(path: tuple[str, ...], item: Any, place: str) -> Problem:
    path = path[:-1] if path[-1:] == ("[key]",) else path  # a name that the recipe gives: to a folder, a variable
    dotted, kind, value = ".".join(path), item["type"], item["input"]
    if kind == "extra_forbidden":
        return Problem(f"{dotted} is not a field of a recipe", remedy=instead_of(path), place=place)
    field = field_at(path)
    meaning, options = (field.meaning, field.options) if field else ("", [])
    if kind == "missing":
        where = f"`{'.'.join(path[:-1])}`" if path[:-1] else "the recipe"
        return Problem(f"{dotted} is missing", meaning, f"add `{path[-1]}:` to {where}", place)
    words = item["msg"].removeprefix("Value error, ").replace("Input should be", "must be")
    rule = f"must be one of {', '.join(options)}" if options else words
    remedy = f"`{next(part for part in reversed(path) if not part.isdecimal())}`: {meaning}" if meaning else ""
    if kind == "string_pattern_mismatch":
        rule, remedy = meaning, ""
    elif kind in ("model_type", "dict_type"):
        inner = [name for name in all_paths() if name.rpartition(".")[0] == dotted]
        rule = "must be a section with fields of its own"
        remedy = f"its fields: {', '.join(name.rpartition('.')[2] for name in inner)}" if inner else remedy
    elif kind == "list_type":
        example = re.search(r"such as '(.+?)'", meaning)
        rule = "must be a list"
        if example or isinstance(value, str | int | float):
            rule += f", such as [{example[1] if example else value}]"
    elif isinstance(value, str) and (guess := closest(value, options, cutoff=0.5)):
        remedy = f"did you mean {guess}?"
    return Problem(f"{dotted} is {shown(value)}", rule, remedy, place)


def shown(value: Any) -> str:
    """The value as YAML writes it, cut short where it is long."""
    if isinstance(value, dict):
        return "a section" if value else "empty"
    text = f"'{value}'" if isinstance(value, str) and value.isprintable() else json.dumps(value)
    return text if len(text) <= _SHOWN_CHARACTERS else f"{text[: _SHOWN_CHARACTERS - 4]} ..."
