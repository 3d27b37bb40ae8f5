"""Save what the loop has: the optimizer's tensors, the state, the recipe. How it reaches the disk is checkpoint/'s."""

from __future__ import annotations

import time

from bloomery.base.errors import StorageError
from bloomery.checkpoint.retention import apply_retention
from bloomery.checkpoint.save import save_checkpoint
from bloomery.config.describe import as_yaml
from bloomery.train.run import Run
from bloomery.train.state import TrainState
from bloomery.train.step import settle


def save(run: Run, state: TrainState, *, last: bool = False, keep_all: bool = False) -> None:
    """A complete checkpoint of this step, unless it exists.

    A save that fails on the way is an event and a warning, and training goes on: the older checkpoints are untouched.
    The `last` one of a job is a promise, so there StorageError is raised. `keep_all`: delete nothing, because this
    state may be worse than the older ones.
    """
    settle(run, state)
    if state.saved_step == state.step:
        return
    root = run.folder / "checkpoints"
    started = time.monotonic()
    blend = run.blend.state.to_json() if run.blend else None
    facts = {**state.to_json(), "interval": run.meter.partial(), "blend": blend}
    with run.meter.paused():
        try:
            folder = save_checkpoint(
                root, step=state.step, pieces=run.optimizer.pieces(), state=facts, recipe_yaml=as_yaml(run.recipe)
            )
        except StorageError as error:
            run.journal.event("save_failed", state.step, reason=str(error))
            if last:
                raise
            run.journal.warning(f"{error} Training goes on.")
            return
        run.journal.flush()  # records of steps that a checkpoint holds are on the disk before it counts
        suspicious = keep_all or state.nan_steps_in_a_row > 0
        removed = [] if suspicious else apply_retention(root, run.recipe.checkpoint.keep)
    seconds = time.monotonic() - started
    state.saved_step = state.step
    state.save_seconds = max(seconds, state.save_seconds or 0.0)
    run.journal.event("save", state.step, folder=folder.name, seconds=seconds, removed=removed)
