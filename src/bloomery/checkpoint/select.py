"""Which checkpoint to go on from: the newest one that is whole, of all the places where they are kept."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from bloomery.base.errors import DataError, Problem, StorageError
from bloomery.base.ranks import ALONE, Ranks
from bloomery.checkpoint import folder as folders

_LINK = "it is a link to another place, which no save makes"


@dataclass(frozen=True)
class Choice:
    folder: Path | None
    """None: there is no checkpoint, so the run starts from the beginning."""
    damaged: dict[Path, list[str]] = field(default_factory=dict)
    """Those that cannot be used, and why: newer ones, and any that have lost their manifest. They still lie where they
    lay."""


Elsewhere = Callable[[Path | None, Mapping[Path, list[str]]], Path | None]
"""Brings a checkpoint that is whole and newer than the best one here, given the damaged ones here; it may take the
place of one of those. None if there is none. Collective."""


def newest_good(
    roots: Sequence[Path],
    *,
    ranks: Ranks = ALONE,
    elsewhere: Elsewhere | None = None,
    why_not: Callable[[Path], list[str]] = lambda folder: [],
) -> Choice:
    """Verify from the newest on; a newer one from `elsewhere` wins. `why_not`: reasons against one whose files are as
    they were saved. DataError if there are checkpoints but none that can be used: starting from the beginning would be
    a lie. All ranks call it, each reads its share of the files."""

    def judge(folder: Path) -> list[str]:
        reasons: list[str] = ranks.broadcast(why_not(folder) if ranks.rank == 0 else [])
        return reasons

    found = [path for root in roots for path in folders.step_folders(root)]
    order = sorted(found, key=lambda path: -folders.step_of(path))  # stable: of one step the first root's
    has_manifest = [(path, (path / folders.MANIFEST).is_file(), path.is_symlink()) for path in order]
    candidates: list[tuple[Path, bool, bool]] = ranks.broadcast(has_manifest)
    damaged: dict[Path, list[str]] = {}
    good: Path | None = None
    for candidate, is_complete, is_link in candidates:
        if good is not None and is_complete:
            continue
        damage = [_LINK] if is_link else folders.damage(candidate, ranks=ranks, tensors=False)
        damage = damage or judge(candidate) or folders.damage(candidate, ranks=ranks)  # the hours of reading last
        if damage:
            damaged[candidate] = damage
        else:
            good = candidate
    brought = elsewhere(good, damaged) if elsewhere else None
    if brought is not None and (reasons := judge(brought)):
        damaged[brought] = reasons
    elif brought is not None:
        return Choice(brought, {path: texts for path, texts in damaged.items() if path != brought})
    if good is not None:
        return Choice(good, damaged)
    if damaged:
        problems = [Problem(text, place=str(path)) for path, texts in damaged.items() for text in texts]
        remedy = "bring one back from a backup, or move them away to start from the beginning"
        raise DataError([*problems, Problem("no checkpoint of this run can be used", remedy=remedy)])
    return Choice(None)


def refuse_later(roots: Sequence[Path], *, step: int, damaged: Iterable[Path] = ()) -> None:
    """For a start that chose `step` and has just taken over: StorageError if an older start, which was still alive, has
    completed a later one in between. To continue from `step` would lose what that one has promised."""
    found = [path for root in roots for path in folders.complete_checkpoints(root) if folders.step_of(path) > step]
    later = [path for path in found if path not in set(damaged)]
    if later:
        what = f"another start saved {later[-1].name} while this one began from step {step}"
        rule = "a start continues from the newest checkpoint"
        raise StorageError(Problem(what, rule, "start again; the other one can save no more", str(later[-1].parent)))


@dataclass(frozen=True)
class Tidied:
    """What `tidy` has done, by the names of folders."""

    quarantined: dict[Path, str]
    """The new names of damaged checkpoints."""
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
        quarantined={path: folders.quarantine(path).name for path in doomed},
        retired=folders.retire_later(root, step),
        debris=folders.sweep_debris(root, keep=keep_debris),
        latest_said=(said or "") if said != wanted else None,
    )
