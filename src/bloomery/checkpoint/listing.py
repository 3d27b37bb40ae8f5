"""The list of a run's checkpoints, for people. Without torch."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from bloomery.base.errors import DataError, Problem
from bloomery.checkpoint import folder as folders
from bloomery.checkpoint.folder import LINK, STAGING, STALE, file_damage, is_tensor_file, read_manifest

_SMALL_BYTES = 2**20
_STEP = re.compile(r"step-(\d{8,})")
State = Literal["complete", "damaged", "debris", "retired"]


@dataclass(frozen=True)
class Listed:
    name: str
    """Within the checkpoints folder, or that of the run for node-local ones."""
    state: State
    step: int | None
    bytes: int
    reason: str = ""
    """What is wrong with it."""
    is_latest: bool = False


def list_checkpoints(path: Path, *, check_hashes: bool = False) -> list[Listed]:
    """Every checkpoint of a run, complete or not, oldest first. DataError if there is no such folder."""
    found: list[Listed] = []
    for places in ([path / folders.CHECKPOINTS, path / folders.LOCAL_CHECKPOINTS], [path], [path.parent]):
        if found := [one for root in places for one in _listed_in(root, check_hashes=check_hashes)]:
            return sorted(found, key=lambda one: (one.step or 0, one.name))
    rule = "a run folder has checkpoints/step-00000100 and the like"
    raise DataError(Problem(f"there are no checkpoints at {path}", rule, "name a run folder"))


def _listed_in(root: Path, *, check_hashes: bool) -> list[Listed]:
    latest = folders.read_latest(root)
    found = []
    staging_dirs = [*root.glob(f"{STAGING}*"), *root.glob(f"{STALE}*")]
    for place in (root, root / folders.RETIRED, root / folders.DEBRIS, *staging_dirs):
        for folder in sorted(place.iterdir()) if place.is_dir() else ():
            match = _STEP.search(folder.name)
            if match is None or not folder.is_dir():
                continue
            state, reason = _state_of(folder, check_hashes=check_hashes)
            size = sum(file.stat().st_size for file in os.scandir(folder) if file.is_file())
            name = str(folder.relative_to(root))
            shown = f"{root.name}/{name}" if root.name == folders.LOCAL_CHECKPOINTS else name
            found.append(Listed(shown, state, int(match[1]), size, reason, is_latest=name == latest))
    return found


def _state_of(folder: Path, *, check_hashes: bool) -> tuple[State, str]:
    if folder.name.startswith("damaged-"):
        return "damaged", "moved aside by a restart"
    if folder.name.startswith("."):
        return "debris", "a save or a deletion was interrupted, or is in progress"
    if folder.is_symlink():
        return "damaged", LINK
    if check_hashes:
        from bloomery.checkpoint.load import damage

    away = [file.name for file in os.scandir(folder) if file.is_symlink() and not os.path.exists(file)]
    reasons = damage(folder, tensors=not away) if check_hashes else _quick_damage(folder)
    if reasons:
        return "damaged", "; ".join(reasons)
    if away:
        return "complete", f"{len(away)} of its files are on other nodes and were not checked"
    is_retired = folder.parent.name == folders.RETIRED
    return ("retired", "its branch of the run was abandoned") if is_retired else ("complete", "")


def _quick_damage(folder: Path) -> list[str]:
    """For lists of very many: what sizes and the hashes of small files tell of those that are here."""
    try:
        files = read_manifest(folder)["files"]
    except DataError as error:
        return [problem.what for problem in error.problems]
    here = {
        name: facts for name, facts in files.items() if not (folder / name).is_symlink() or (folder / name).exists()
    }
    wrong = [
        file_damage(folder / name, facts, read=not is_tensor_file(name) and facts["bytes"] <= _SMALL_BYTES)
        for name, facts in sorted(here.items())
    ]
    return list(filter(None, wrong))
