"""What is kept: the newest, the marked, the named and the best. Nothing is deleted before something newer is whole."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from bloomery.base.errors import DataError
from bloomery.checkpoint import folder as folders
from bloomery.checkpoint.fence import Writer
from bloomery.checkpoint.manifest import SUSPICIOUS, read_manifest
from bloomery.config.recipe import KeepSection
from bloomery.sizing.saves import kept_steps


def apply_retention(
    root: Path, keep: KeepSection | None, *, writer: Writer | None = None, spare: Collection[int] = ()
) -> list[str]:
    """Delete the complete checkpoints that `keep` does not ask for, never the newest and none of `spare`; their names,
    oldest first."""
    if keep is None:
        return []
    found = {folders.step_of(path): path for path in folders.complete_checkpoints(root)}
    measured = found.items() if keep.best else ()
    losses = {step: loss for step, path in measured if (loss := _validation_loss(path, step)) is not None}
    kept = kept_steps(list(found), keep, losses, {step for step, path in found.items() if is_suspicious(path)})
    removed = []
    for step, path in sorted(found.items()):
        if step not in kept and step not in spare:
            with writer.acting() if writer is not None else contextlib.nullcontext():
                folders.remove(path, root if writer is None else writer.staging_dir)
            removed.append(path.name)
    return removed


def _validation_loss(folder: Path, step: int) -> float | None:
    try:
        return loss_at(read_manifest(folder), step)
    except DataError:
        return None


def is_suspicious(folder: Path) -> bool:
    """Whether it was saved in a stretch of spikes or NaNs; so is one whose manifest cannot be read."""
    try:
        return bool(read_manifest(folder).get(SUSPICIOUS))
    except DataError:
        return True


def loss_at(manifest: Mapping[str, Any], step: int) -> float | None:
    """The validation loss that was measured at this very step; None if none was."""
    measured = manifest.get("validation")
    return float(measured["loss"]) if measured and measured["step"] == step else None


def good_steps(root: Path, *, proven_until: int, given_up: range) -> Iterator[int]:
    """Complete checkpoints that are known to be good, the newest first: up to the step that later steps have proven,
    less those that a rewind gave up and those saved in a stretch of spikes or NaNs."""
    found = [path for path in folders.complete_checkpoints(root) if folders.step_of(path) <= proven_until]
    kept = (path for path in reversed(found) if folders.step_of(path) not in given_up)
    return (folders.step_of(path) for path in kept if not is_suspicious(path))
