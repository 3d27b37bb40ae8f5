"""A recipe that keeps every rule, or all its problems; and the recipe fitted to another number of ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

from bloomery.base.errors import Problem, RecipeError
from bloomery.config.load import Draft, by_place, read_recipe
from bloomery.config.recipe import LaunchSection, Recipe
from bloomery.sizing import data_rules, rules
from bloomery.sizing.layout import data_parallel_size, ranks_per_replica, world_size
from bloomery.sizing.rules import Finding

Rule = Callable[[Recipe], Iterator[Finding]]
_LAYOUT_RULES: tuple[Rule, ...] = (
    rules.tensor_parallel,
    rules.context,
    rules.pipeline,
    rules.data_parallel,
    rules.batch,
    rules.ramp,
)
RULES: tuple[Rule, ...] = (
    rules.heads,
    rules.ignored,
    *_LAYOUT_RULES,
    rules.launch,
    rules.learning_rate,
    rules.lengths,
    rules.skips,
    rules.loss_scale,
    rules.phases,
    data_rules.data,
    data_rules.samples,
)


@dataclass(frozen=True)
class CheckedRecipe:
    """A recipe that keeps every rule."""

    recipe: Recipe
    draft: Draft
    warnings: list[Problem]


def load_checked_recipe(name: str, overrides: Sequence[str] = ()) -> CheckedRecipe:
    """The recipe, or RecipeError with every problem in the order of the file: of the schema, or else of the rules."""
    return check(read_recipe(name, overrides))


def check(draft: Draft) -> CheckedRecipe:
    problems, warnings = list(draft.problems), list[Problem]()
    for found in [found for rule in RULES for found in rule(draft.recipe)] if draft.recipe else ():
        problem = Problem(found.what, found.rule, found.remedy, draft.place(*found.paths))
        (warnings if found.is_warning else problems).append(problem)
    if problems:
        raise RecipeError(sorted(problems, key=by_place))
    assert draft.recipe is not None
    return CheckedRecipe(draft.recipe, draft, warnings)


@dataclass(frozen=True)
class Fitted:
    """A recipe for another number of ranks."""

    recipe: Recipe
    reasons: list[str]
    """What had to change, and why; empty when only the number of replicas did."""


def fit(recipe: Recipe, *, nodes: int, ranks_per_node: int) -> Fitted | None:
    """The recipe for this world, with as little changed as possible; None if nothing fits.

    Tried in this order: as it is, smaller micro-batches, other pipeline sizes, other tensor-parallel sizes, no context
    parallelism. HSDP groups that no longer divide become one group.
    """
    here = _on(recipe, nodes, ranks_per_node)
    wrong = _problems(here)
    if not wrong:
        return Fitted(here, [])
    why = f"{world_size(here)} ranks instead of {world_size(recipe)}: {wrong[0]}"
    fitting = (Fitted(found, [why, *_changes(here, found)]) for found in _candidates(here) if not _problems(found))
    return next(fitting, None)


def _on(recipe: Recipe, nodes: int, ranks_per_node: int) -> Recipe:
    launch = recipe.launch or LaunchSection()
    on = "hosts" if launch.on == "local" and nodes > 1 else launch.on
    launch = launch.model_copy(update={"on": on, "nodes": nodes, "gpus_per_node": ranks_per_node})
    return recipe.model_copy(update={"launch": launch})


def _candidates(recipe: Recipe) -> Iterator[Recipe]:
    """Layouts by how much they change."""
    world, parallel, size = world_size(recipe), recipe.parallel, recipe.batch.micro_batch_size
    micro_sizes = [n for n in range(size, 0, -1) if size % n == 0]
    divisors = [n for n in range(1, world + 1) if world % n == 0]
    stages = sorted(divisors, key=lambda n: abs(n - parallel.pp))
    tensors = sorted(divisors, key=lambda n: abs(n - parallel.tp))
    for cp, tp, pp, micro in product(dict.fromkeys((parallel.cp, 1)), tensors, stages, micro_sizes):
        if world % (tp * pp * cp):
            continue
        changed: dict[str, Any] = {"tp": tp, "pp": pp, "cp": cp}
        if pp == 1:
            changed |= {"schedule": "1f1b", "chunks": 1}
        elif parallel.zero > 1:
            changed["zero"] = 1
        if parallel.shard_size is not None and world // (tp * pp) % parallel.shard_size:
            changed["shard_size"] = None
        yield recipe.model_copy(
            update={
                "parallel": parallel.model_copy(update=changed),
                "batch": recipe.batch.model_copy(update={"micro_batch_size": micro}),
            }
        )


def _problems(recipe: Recipe) -> list[str]:
    if world_size(recipe) % ranks_per_replica(recipe) or not data_parallel_size(recipe):
        return [f"one replica takes {ranks_per_replica(recipe)} ranks"]
    return [finding.what for rule in _LAYOUT_RULES for finding in rule(recipe) if not finding.is_warning]


def _changes(before: Recipe, after: Recipe) -> list[str]:
    pairs = [
        (f"parallel.{name}", getattr(before.parallel, name), getattr(after.parallel, name))
        for name in type(before.parallel).model_fields
    ]
    pairs.append(("batch.micro_batch_size", before.batch.micro_batch_size, after.batch.micro_batch_size))
    return [f"{name} {new} instead of {old}" for name, old, new in pairs if old != new]
