"""What a run goes on from: nothing, its newest checkpoint, or the one a user names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bloomery.base.errors import DataError, Problem
from bloomery.base.ranks import ALONE, Ranks
from bloomery.checkpoint.choose import Choice, newest_good
from bloomery.checkpoint.folder import checkpoint_named, verify
from bloomery.checkpoint.load import read_recipe_of, read_state
from bloomery.config.describe import as_dict
from bloomery.config.recipe import Recipe
from bloomery.data.blend import BlendState
from bloomery.train.loss_scale import LossScale
from bloomery.train.state import TrainState

_FIXED_FOR_A_RUN = (
    "model",
    "seed",
    "tokenizer",
    "data.order",
    "data.split",
    "data.masking",
    "data.mask_documents",
    "data.reset_positions",
    "data.eod_loss",
    "batch.global_batch_size",
    "batch.rampup",
    "optimizer.name",
)
"""Fields that a resumed run may not change: they would make it another training, or miscount its samples."""


@dataclass(frozen=True)
class Past:
    state: TrainState
    checkpoint: Path | None = None
    recipe: Recipe | None = None
    """As it was when the checkpoint was saved."""
    interval: Mapping[str, Any] | None = None
    """The logging interval that the stop cut in two."""
    blend: BlendState | None = None
    damaged: Mapping[Path, list[str]] = field(default_factory=dict)
    """Newer checkpoints that cannot be used, and why."""


def find_past(recipe: Recipe, roots: Sequence[Path], *, wanted: str | None, ranks: Ranks = ALONE) -> Past:
    """The checkpoint called `wanted`, else the newest that is whole; of this very training. DataError if it is not.

    All ranks call it: they share the work of verifying."""
    if wanted:
        named = checkpoint_named(roots, wanted)
        verify(named, ranks=ranks)
        choice = Choice(named)
    else:
        choice = newest_good(roots, ranks=ranks)
    checkpoint = choice.folder
    if checkpoint is None:
        scale = LossScale.start(recipe.loss_scale) if recipe.precision == "fp16" else None
        return Past(TrainState(loss_scale=scale))
    saved = read_recipe_of(checkpoint)
    _check_same_training(recipe, saved, checkpoint)
    facts = read_state(checkpoint)
    state = TrainState.from_json(facts)
    if recipe.precision != "fp16":
        state.loss_scale = None
    elif state.loss_scale is None:
        state.loss_scale = LossScale.start(recipe.loss_scale)
    blend = BlendState.from_json(facts["blend"]) if facts["blend"] is not None else None
    return Past(state, checkpoint, saved, facts["interval"], blend, choice.damaged)


def _check_same_training(recipe: Recipe, saved: Recipe, checkpoint: Path) -> None:
    now, then = as_dict(recipe), as_dict(saved)
    problems = []
    for path in _FIXED_FOR_A_RUN:
        old, new = _at(then, path), _at(now, path)
        if isinstance(old, dict) and isinstance(new, dict):
            pairs = [(f"{path}.{key}", old.get(key), new.get(key)) for key in new]
        else:
            pairs = [(path, old, new)]
        rule = "it would make this another training"
        problems += [Problem(f"{name} is {b} but the checkpoint has {a}", rule) for name, a, b in pairs if a != b]
    if problems:
        remedy = "set these back, or start afresh under another name or --run-dir"
        raise DataError([*problems, Problem(f"cannot resume from {checkpoint}", remedy=remedy)])


def _at(tree: Any, path: str) -> Any:
    for key in path.split("."):
        tree = tree.get(key) if isinstance(tree, dict) else None
    return tree
