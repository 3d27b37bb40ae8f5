"""The resume contract: what of the recipe may change when a run resumes.

Every field is free, or changes only by name (`--change lr.peak`), or is fixed: its mark in config/recipe.py says which,
and docs/training.md has the table. Values are compared resolved: amounts in samples, sources by name and share.
"""

import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from bloomery.base.errors import Problem, RecipeError
from bloomery.config.fields import OnResume
from bloomery.config.load import COMMAND_LINE, as_dict, is_inside
from bloomery.config.recipe import Recipe
from bloomery.config.schema import all_fields, field_at, meant
from bloomery.config.yaml_nodes import inline_yaml
from bloomery.data.blend import same_shares
from bloomery.families.registry import FAMILIES, READERS
from bloomery.sizing.check import source_key
from bloomery.sizing.schedule import TrainingPlan

_USED_AT_STEP_0 = ("seed", "model", "tokenizer")
"""What a checkpoint without a step has made use of: it has weights. Whatever else differs has not happened yet."""


@dataclass(frozen=True)
class Difference:
    """A field that is not as the checkpoint has it."""

    field: str
    old: Any
    """Plain values, as YAML has them."""
    new: Any
    is_fixed: bool

    def __str__(self) -> str:
        return f"{self.field} {inline_yaml(self.old)} -> {inline_yaml(self.new)}"

    def problem(self) -> Problem:
        what = f"{self.field} is {inline_yaml(self.new)} but the checkpoint has {inline_yaml(self.old)}"
        remedy = f"use {shlex.quote(f'{self.field}={inline_yaml(self.old)}')} to continue as before"
        if self.is_fixed:
            return Problem(what, f"fixed: {on_resume(self.field).why}", remedy)
        rule = f"changes only by name: {on_resume(self.field).why}"
        return Problem(what, rule, f"{remedy}, or --change {self.field} to change it")


@dataclass(frozen=True)
class Side:
    """A recipe and what it comes to: now, or when the checkpoint was saved."""

    recipe: Recipe
    plan: TrainingPlan

    def shown(self) -> dict[str, Any]:
        """The recipe with the learning rate in samples."""
        lr, found = self.plan.lr, as_dict(self.recipe)
        found["lr"]["warmup"] = f"{lr.warmup_samples} samples"
        found["lr"]["decay"] = None if lr.schedule == "constant" else f"{lr.decay_samples} samples"
        found["lr"]["cooldown"] = f"{lr.cooldown_samples} samples" if lr.schedule == "wsd" else None
        return found

    def compared(self, step: int) -> dict[str, Any]:
        """As shown, but without what no step so far has felt: skips to come, and the end of a wsd schedule that follows
        from the end of training."""
        lr, found = self.plan.lr, self.shown()
        ranges = self.plan.skip_ranges
        found["train"]["skip"] = [(first, min(last, step)) for first, last in ranges if first <= step]
        consumed = self.plan.batch.consumed_after_step(step)
        is_to_come = consumed <= lr.decay_samples - lr.cooldown_samples
        if lr.schedule == "wsd" and self.recipe.lr.decay is None and is_to_come:
            found["lr"]["decay"] = None
        return found


def differences(now: Side, then: Side, *, step: int, same_tokenizer: bool = False) -> list[Difference]:
    """All that the contract covers, in the order of the recipe. `step`: that of the checkpoint."""
    families = {now.recipe.model.family, then.recipe.model.family}
    ignored = [f"model.{name}" for name, readers in READERS.items() if not families & {*readers}]
    ignored += ["precision"] * (now.recipe.precision == "auto")  # a start resolves it before it asks
    ignored += ["tokenizer"] * same_tokenizer + ["data.train"] * _is_same_blend(now.recipe, then.recipe)
    new, old = now.compared(step), then.compared(step)
    sections = [name for name in new if step or name in _USED_AT_STEP_0]
    paths = [path for name in sections for path in _differing(new[name], old[name], name)]
    found = []
    for path in paths:
        kind = on_resume(path).kind
        if kind == "free" or any(is_inside(path, each) for each in ignored):
            continue
        is_fixed = kind == "fixed" or _is_fixed_here(path, now.recipe, step)
        if step or is_fixed:
            found.append(Difference(path, _at(then.shown(), path), _at(now.shown(), path), is_fixed))
    return found


def _differing(new: Any, old: Any, path: str) -> Iterator[str]:
    """Field by field, down to where only one side has a section."""
    if isinstance(new, dict) and isinstance(old, dict):
        for key in new:
            yield from _differing(new[key], old.get(key), f"{path}.{key}")
    elif new != old:
        yield path


def _at(values: Any, path: str) -> Any:
    for key in path.split("."):
        values = values.get(key) if isinstance(values, dict) else None
    return values


def _is_same_blend(now: Recipe, then: Recipe) -> bool:
    """By name and share: shards may move. Only proportions matter to a timeless blend; the other orders round."""
    if now.data is None or then.data is None:
        return False
    new, old = ({source_key(each): each.weight for each in data.train} for data in (now.data, then.data))
    return same_shares(new, old) if now.data.order == "timeless" else [*new.items()] == [*old.items()]


def _is_fixed_here(path: str, now: Recipe, step: int) -> bool:
    if path == "model.seq_length" and FAMILIES[now.model.family].positions == "learned":
        return True
    follows = is_inside(path, "data.train") or path == "model.seq_length"
    return follows and step > 0 and now.data is not None and now.data.order != "timeless"


def on_resume(field: str) -> OnResume:
    found = field_at(field.split("."))
    assert found is not None, f"{field} is not a field of a recipe"
    return found.on_resume


def check_change_names(names: Sequence[str]) -> None:
    """RecipeError for names of `--change` that are not fields, or that can never be changed."""
    problems = []
    for name in names:
        rules = [field.on_resume for path, field in all_fields().items() if is_inside(path, name)]
        if field_at(name.split(".")) is None:
            guess = meant(name.split("."))
            remedy = f"did you mean {guess}?" if guess else "name a field such as lr.peak"
            problems.append(Problem(f"--change {name}: this is not a field of a recipe", "", remedy, COMMAND_LINE))
        elif rules and all(rule.kind == "fixed" for rule in rules):
            what, rule = f"--change {name}: a resumed run cannot change it", f"fixed: {rules[0].why}"
            remedy = "remove it, or start a new run under another name or --run-dir"
            problems.append(Problem(what, rule, remedy, COMMAND_LINE))
    if problems:
        raise RecipeError(problems)


def refusals(differences: Sequence[Difference], changes: Sequence[str], *, checkpoint: str) -> list[Problem]:
    """Why this recipe cannot resume from the checkpoint; empty if all that differs is named in `changes`."""
    found = [d for d in differences if d.is_fixed or not any(is_inside(d.field, name) for name in changes)]
    if not found:
        return []
    remedy = "set these back, or start a new run under another name or --run-dir"
    if not any(each.is_fixed for each in found):
        remedy = f"set these back, or add {' '.join(f'--change {each.field}' for each in found)} to change them"
    return [*(each.problem() for each in found), Problem(f"cannot resume from {checkpoint}", remedy=remedy)]
