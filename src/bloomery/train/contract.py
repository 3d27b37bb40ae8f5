"""What a resumed run may change. Every field of the recipe is free, or changes only by name (`--change lr.peak`), or is
fixed: its mark in config/recipe.py says which, and docs/training.md has the table."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from bloomery.base.errors import Problem, RecipeError
from bloomery.config.fields import OnResume
from bloomery.config.load import COMMAND_LINE, is_inside
from bloomery.config.schema import all_fields, field_at, meant_paths
from bloomery.config.yaml_nodes import inline_yaml


@dataclass(frozen=True)
class Difference:
    """A field that is not as the checkpoint has it."""

    field: str
    old: Any
    """Plain values, as YAML has them."""
    new: Any
    why: str = ""
    """Of a field that is by name and cannot be changed here: why not. Otherwise how the difference comes about."""
    is_fixed: bool = False
    back: tuple[str, ...] = ()
    """Overrides that set it back; by default `field=old`."""

    def __str__(self) -> str:
        return f"{self.field} {inline_yaml(self.old)} -> {inline_yaml(self.new)}"

    def problem(self) -> Problem:
        what = f"{self.field} is {inline_yaml(self.new)} but the checkpoint has {inline_yaml(self.old)}"
        overrides = self.back or (f"{self.field}={inline_yaml(self.old)}",)
        remedy = f"use {' '.join(map(shlex.quote, overrides))} to continue as before"
        if self.is_fixed:
            return Problem(what, self.why or "it would make this another training", remedy)
        rule = "it changes only by name"
        rule = f"{self.why}, and {rule}" if self.why else rule
        return Problem(what, rule, f"{remedy}, or --change {self.field} to change it")


def on_resume(field: str) -> OnResume:
    found = field_at(field.split("."))
    assert found is not None, f"{field} is not a field of a recipe"
    return found.on_resume


def check_change_names(names: Sequence[str]) -> None:
    """RecipeError for names of `--change` that are not fields, or that can never be changed."""
    problems = []
    for name in names:
        kinds = {field.on_resume.kind for path, field in all_fields().items() if is_inside(path, name)}
        if field_at(name.split(".")) is None:
            meant = meant_paths(name.split("."))
            remedy = f"did you mean {' or '.join(meant)}?" if meant else "name a field such as lr.peak"
            problems.append(Problem(f"--change {name}: this is not a field of a recipe", "", remedy, COMMAND_LINE))
        elif kinds == {"fixed"}:
            what, rule = f"--change {name}: a resumed run cannot change it", "it would make this another training"
            remedy = "remove it, or start a new run under another name or --run-dir"
            problems.append(Problem(what, rule, remedy, COMMAND_LINE))
    if problems:
        raise RecipeError(problems)


def refusals(differences: Sequence[Difference], changes: Sequence[str], *, checkpoint: str) -> list[Problem]:
    """Why this recipe cannot resume from the checkpoint; empty if every difference was named by --change."""
    left = [each for each in differences if each.is_fixed or not _is_named(each, changes)]
    if not left:
        return []
    remedy = "set these back, or start a new run under another name or --run-dir"
    if not any(each.is_fixed for each in left):
        remedy = f"set these back, or add {' '.join(f'--change {each.field}' for each in left)} to change them"
    return [*(each.problem() for each in left), Problem(f"cannot resume from {checkpoint}", remedy=remedy)]


def _is_named(difference: Difference, changes: Sequence[str]) -> bool:
    return any(is_inside(difference.field, name) for name in changes)
