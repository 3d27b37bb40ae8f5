"""A layout for the ranks that there are, when the recipe's own does not fit them.

Global batch, learning rate and data order never change: only who does what. So every layout found here trains the same.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from bloomery.config.recipe import LaunchSection, Recipe
from bloomery.sizing.layout import data_parallel_size, ranks_per_replica, world_size
from bloomery.sizing.layout_rules import context, data_parallel, pipeline, tensor_parallel
from bloomery.sizing.rules import batch, ramp

_RULES = (tensor_parallel, context, pipeline, data_parallel, batch, ramp)


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
    before = world_size(recipe)
    wrong = _problems(here)
    if not wrong:
        return Fitted(here, [])
    for candidate in _candidates(here):
        if not _problems(candidate):
            return Fitted(
                candidate, [f"{world_size(here)} ranks instead of {before}: {wrong[0]}", *_changes(here, candidate)]
            )
    return None


def _on(recipe: Recipe, nodes: int, ranks_per_node: int) -> Recipe:
    launch = recipe.launch or LaunchSection(on="local" if nodes == 1 else "hosts")
    on = "local" if launch.on == "local" and nodes == 1 else ("hosts" if launch.on == "local" else launch.on)
    launch = launch.model_copy(update={"on": on, "nodes": nodes, "gpus_per_node": ranks_per_node})
    return recipe.model_copy(update={"launch": launch})


def _candidates(recipe: Recipe) -> Iterator[Recipe]:
    """Layouts by how much they change."""
    world, parallel, size = world_size(recipe), recipe.parallel, recipe.batch.micro_batch_size
    micro_sizes = [n for n in range(size, 0, -1) if size % n == 0]
    divisors = [n for n in range(1, world + 1) if world % n == 0]
    stages = sorted(divisors, key=lambda n: abs(n - parallel.pp))
    tensors = sorted(divisors, key=lambda n: abs(n - parallel.tp))
    for cp in dict.fromkeys((parallel.cp, 1)):
        for tp in tensors:
            for pp in stages:
                if world % (tp * pp * cp):
                    continue
                changed: dict[str, Any] = {"tp": tp, "pp": pp, "cp": cp}
                if pp == 1:
                    changed |= {"schedule": "1f1b", "chunks": 1}
                copies = world // (tp * pp * cp) * cp
                if parallel.shard_size is not None and copies % parallel.shard_size:
                    changed["shard_size"] = None
                if pp > 1 and parallel.zero > 1:
                    changed["zero"] = 1
                for micro in micro_sizes:
                    yield recipe.model_copy(
                        update={
                            "parallel": parallel.model_copy(update=changed),
                            "batch": recipe.batch.model_copy(update={"micro_batch_size": micro}),
                        }
                    )


def _problems(recipe: Recipe) -> list[str]:
    if world_size(recipe) % ranks_per_replica(recipe) or not data_parallel_size(recipe):
        return [f"one replica takes {ranks_per_replica(recipe)} ranks"]
    return [finding.what for rule in _RULES for finding in rule(recipe) if not finding.is_warning]


def _changes(before: Recipe, after: Recipe) -> list[str]:
    pairs = [
        (f"parallel.{name}", getattr(before.parallel, name), getattr(after.parallel, name))
        for name in type(before.parallel).model_fields
    ]
    pairs.append(("batch.micro_batch_size", before.batch.micro_batch_size, after.batch.micro_batch_size))
    return [f"{name} {new} instead of {old}" for name, old, new in pairs if old != new]
