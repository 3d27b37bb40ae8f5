"""Bring a checkpoint back from a far place: the newest there that is whole, verified before it gets its name here."""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bloomery.base.errors import DataError, Problem
from bloomery.base.ranks import ALONE, Ranks
from bloomery.base.storage import own_folder, remove_tree
from bloomery.checkpoint import folder as folders
from bloomery.checkpoint.remote import There, all_at_once, complete_there, is_ours, store_of

_MISSING = "is missing"


@dataclass(frozen=True)
class Fetched:
    folder: Path | None
    """None: nothing newer that is whole lies there."""
    damaged: dict[str, list[str]] = field(default_factory=dict)
    """Newer ones there that cannot be used, by name, and why."""
    put_aside: str = ""
    """The new name of what lay here under the name of a damaged checkpoint; empty if nothing did."""


def fetch_newest(
    source: str,
    root: Path,
    *,
    newer_than: int,
    only: int | None = None,
    refused: Callable[[There], bool] = lambda there: False,
    ranks: Ranks = ALONE,
) -> Fetched:
    """Bring the newest checkpoint of a far place here that is whole and whose step is beyond `newer_than`.

    All ranks call it, each fetches its share, and all of them return or raise DataError: if the place cannot be read.
    `only`: no other step. `refused`: asked on rank 0 of all that are there, the newest first; those count as not
    there, and it may raise DataError.
    """
    found: list[There] | str | DataError = []
    if ranks.rank == 0:
        try:
            there = [each for each in reversed(complete_there(*store_of(source))) if not refused(each)]
            found = [each for each in there if each.step > newer_than and only in (None, each.step)]
        except DataError as error:
            found = error
        except Exception as error:  # whatever a store may raise
            found = f"{type(error).__name__}: {error}"
    found = ranks.broadcast(found)
    if isinstance(found, DataError):
        raise found
    if isinstance(found, str):
        raise _unreachable(source, [found])
    damaged: dict[str, list[str]] = {}
    for candidate in found:
        if not is_ours(candidate):
            damaged[candidate.name] = [f"{folders.MANIFEST} is not that of a checkpoint of step {candidate.step}"]
            continue
        draft = root / f".{candidate.name}-fetch.tmp"
        wrong = _bring(source, candidate, draft, ranks)
        if wrong:
            damaged[candidate.name] = wrong
            continue
        aside = _name(draft, root / candidate.name) if ranks.rank == 0 else ""
        return Fetched(root / candidate.name, damaged, ranks.broadcast(aside))  # nobody looks before it has its name
    return Fetched(None, damaged)


def _bring(source: str, there: There, draft: Path, ranks: Ranks) -> list[str]:
    """Copy one into an empty `draft` and verify it there; what is wrong with it. DataError if it cannot be read."""
    trouble, missing = "", []
    if ranks.rank == 0:
        remove_tree(draft)  # of a start that was killed
    ranks.gather(None)
    try:
        own_folder(draft, parents=True)
        store, path = store_of(source)
        files = sorted(there.manifest["files"])[ranks.rank :: ranks.size]
        tasks = [_getting(store, f"{path}/{there.name}/{file}", draft / file) for file in files]
        missing = [
            f"{file} {_MISSING}" for file, is_there in zip(files, all_at_once(tasks), strict=True) if not is_there
        ]
        if ranks.rank == 0:
            (draft / folders.MANIFEST).write_text(there.text)
    except Exception as caught:  # whatever a store may raise
        trouble = f"{type(caught).__name__}: {caught}"
    told = ranks.gather((trouble, missing))
    errors, wrong = [text for text, _ in told if text], sorted(text for _, texts in told for text in texts)
    try:
        if errors:
            raise _unreachable(source, errors)
        wrong = wrong or folders.damage(draft, ranks=ranks)
    except DataError:
        wrong = [""]
        raise
    finally:
        if wrong and ranks.rank == 0:
            remove_tree(draft)
    return wrong


def _name(draft: Path, final: Path) -> str:
    """Give what was fetched its name. What has it gives way; the new name, if that is a damaged checkpoint."""
    aside = ""
    if (final / folders.MANIFEST).is_file() or (os.path.lexists(final) and not final.is_dir()):
        aside = folders.quarantine(final).name
    elif final.exists():
        final.rename(final.with_name(f".{final.name}-{secrets.token_hex(4)}.tmp"))  # swept, and told, as debris
    draft.rename(final)
    return aside


def _getting(store: Any, source: str, target: Path) -> Callable[[], bool]:
    def get() -> bool:
        """Whether it is there."""
        try:
            store.get_file(source, str(target))
        except FileNotFoundError:
            return False
        return True

    return get


def _unreachable(source: str, errors: Sequence[str]) -> DataError:
    rule = "a newer checkpoint may lie there"
    remedy = "mend the connection, or go on without it: checkpoint.upload=null"
    return DataError([Problem(f"checkpoints at {source} cannot be read: {error}", rule, remedy) for error in errors])
