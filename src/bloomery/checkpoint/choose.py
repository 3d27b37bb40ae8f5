"""Which checkpoint to go on from: the newest one that is whole, of all the places where they are kept."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from bloomery.base.errors import DataError, Problem
from bloomery.base.ranks import ALONE, Ranks
from bloomery.checkpoint import folder as folders


@dataclass(frozen=True)
class Choice:
    folder: Path | None
    """None: there is no checkpoint, so the run starts from the beginning."""
    damaged: dict[Path, list[str]] = field(default_factory=dict)
    """Newer ones that cannot be used, and why. They still lie where they lay."""


def newest_good(roots: Sequence[Path], *, ranks: Ranks = ALONE) -> Choice:
    """Verify from the newest on. DataError if there are checkpoints but none that can be used: starting from the
    beginning would be a lie. All ranks call it, each reads its share of the files."""
    found = [path for root in roots for path in folders.complete_checkpoints(root)]
    order = sorted(found, key=lambda path: -folders.step_of(path))  # stable: of one step the first root's
    candidates: list[Path] = ranks.broadcast(order)
    damaged: dict[Path, list[str]] = {}
    for candidate in candidates:
        damage = folders.damage(candidate, ranks=ranks)
        if not damage:
            return Choice(candidate, damaged)
        damaged[candidate] = damage
    if damaged:
        problems = [Problem(text, place=str(path)) for path, texts in damaged.items() for text in texts]
        remedy = "bring one back from a backup, or move them away to start from the beginning"
        raise DataError([*problems, Problem("no checkpoint of this run can be used", remedy=remedy)])
    return Choice(None)


@dataclass(frozen=True)
class Tidied:
    """What `tidy` has done, by the names of folders."""

    quarantined: list[str]
    retired: list[str]
    debris: list[str]
    latest_said: str | None
    """If `latest` had to be changed: what it said, empty if it was not there."""


def tidy(root: Path, *, step: int, damaged: Iterable[Path] = (), keep_debris: bool = False) -> Tidied:
    """Put a folder of checkpoints in order for a run that goes on from `step`: for the one that may write here.

    Damaged ones get a name that nothing goes on from, those of a branch that is left are retired, debris is swept.
    Before any of them moves, `latest` names one that stays.
    """
    doomed = [path for path in damaged if path.parent == root]
    staying = [path for path in folders.complete_checkpoints(root) if folders.step_of(path) <= step]
    staying = [path for path in staying if path not in doomed]
    said, wanted = folders.read_latest(root), staying[-1].name if staying else None
    if staying and said != wanted:
        folders.point_latest(staying[-1])
    elif not staying:
        (root / folders.LATEST).unlink(missing_ok=True)
    return Tidied(
        quarantined=[folders.quarantine(path).name for path in doomed],
        retired=folders.retire_later(root, step),
        debris=folders.sweep_debris(root, keep=keep_debris),
        latest_said=(said or "") if said != wanted else None,
    )
