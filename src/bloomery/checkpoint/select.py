"""Which checkpoint a run resumes from: the newest good one."""

import os
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from bloomery.base.errors import DataError, Problem, RecipeError, StorageError
from bloomery.base.ranks import ALONE, Ranks, agreed, first_rank_does
from bloomery.checkpoint import folder as folders
from bloomery.checkpoint.folder import MANIFEST
from bloomery.checkpoint.load import Check, Checkpoint, Choice, read_checkpoint
from bloomery.checkpoint.remote import RemoteSource


def choose(
    roots: Sequence[Path], wanted: str | None, *, ranks: Ranks, remote: RemoteSource | None, check: Check
) -> Choice:
    """The checkpoint called `wanted`, or else the newest good one, local or remote. From one that is elsewhere, a run
    without a checkpoint branches off; a restart of the same command resumes from its own. All ranks call it."""
    branch = first_rank_does(ranks, partial(folders.checkpoint_elsewhere, roots, wanted)) if wanted else None
    if wanted is None or branch is not None:
        found = newest_good(roots, ranks=ranks, remote=remote, check=check)
        if branch is None or found.checkpoint is not None:
            return found
        return Choice(read_checkpoint(branch, ranks=ranks, check=check))
    if remote is not None and (found := remote.fetch_named(wanted, roots)).checkpoint is not None:
        return found
    return Choice(read_checkpoint(folders.checkpoint_named(roots, wanted), ranks=ranks))


def newest_good(
    roots: Sequence[Path], *, ranks: Ranks = ALONE, remote: RemoteSource | None = None, check: Check = None
) -> Choice:
    """Verify from the newest on; a newer remote one wins. DataError if there are checkpoints but none that can be used.
    All ranks call it, each reads its share."""
    damaged: dict[Path | str, list[str]] = {}
    with agreed(ranks):
        found = [path for root in roots for path in folders.step_folders(root)]
    order = sorted(found, key=lambda path: -folders.step_of(path))  # stable: of one step the first root's
    good: Checkpoint | None = None
    facts = [(path, os.path.isfile(path / MANIFEST), os.path.islink(path)) for path in order]
    for folder, is_complete, is_link in ranks.broadcast(facts):
        if good is not None and is_complete:
            continue
        if is_link or not is_complete:
            damaged[folder] = [folders.LINK if is_link else f"{MANIFEST} is missing, or cannot be read"]
        else:
            try:
                good = read_checkpoint(folder, ranks=ranks, check=check)
            except (DataError, RecipeError) as error:
                damaged[folder] = [problem.what for problem in error.problems]
    fetched = remote.fetch_newer(good, check) if remote else Choice()
    good, damaged = fetched.checkpoint or good, {**damaged, **fetched.damaged}
    if good is None and damaged:
        problems = [Problem(text, place=str(place)) for place, texts in damaged.items() for text in texts]
        remedy = "restore one from a backup, or move them away to start from the beginning"
        raise DataError([*problems, Problem("no checkpoint of this run can be used", remedy=remedy)])
    return replace(fetched, checkpoint=good, damaged=damaged)


def refuse_later(roots: Sequence[Path], *, step: int, damaged: Iterable[Path | str] = ()) -> None:
    """For a start that chose `step` and has just taken over: StorageError if an older start, which was still alive, has
    completed a later one in between. To resume from `step` would lose what that one has promised."""
    found = [path for root in roots for path in folders.complete_checkpoints(root) if folders.step_of(path) > step]
    later = [path for path in found if path not in set(damaged)]
    if later:
        what = f"another start saved {later[-1].name} while this one resumed from step {step}"
        rule = "a start resumes from the newest checkpoint"
        raise StorageError(Problem(what, rule, "start again; the other one can save no more", str(later[-1].parent)))
