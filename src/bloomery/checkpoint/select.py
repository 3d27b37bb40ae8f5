"""Which checkpoints a run has: the newest good one to resume from, and the list of all of them for people."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from bloomery.base.errors import DataError, Problem, StorageError
from bloomery.base.ranks import ALONE, Ranks
from bloomery.base.storage import write_atomically
from bloomery.checkpoint import folder as folders
from bloomery.checkpoint.folder import STAGING, STALE
from bloomery.checkpoint.format import MANIFEST, SavedTensor, read_index, read_manifest
from bloomery.checkpoint.load import consumed_tokens, damage, read_recipe_of, read_state, verify
from bloomery.checkpoint.remote import Fetched, RemoteSource
from bloomery.config.load import fingerprint

_LINK = "it is a link to another place, which no save makes"
_STEP = re.compile(r"step-(\d{8,})")
_ORDER = ("model.embed", "model.layers", "model.", "optim.")


# ---------------------------------------------------------------- to resume from


@dataclass(frozen=True)
class Choice:
    folder: Path | None
    """None: there is no checkpoint, so the run starts from the beginning."""
    damaged: dict[Path, list[str]] = field(default_factory=dict)
    """Those that cannot be used, and why: newer ones, and any that have lost their manifest. Not moved yet, except one
    whose name a fetched copy took."""
    fetched: Fetched = field(default_factory=Fetched)


def newest_good(
    roots: Sequence[Path],
    *,
    ranks: Ranks = ALONE,
    remote: RemoteSource | None = None,
    why_not: Callable[[Path], list[str]] = lambda folder: [],
) -> Choice:
    """Verify from the newest on; a newer remote one wins. `why_not`: reasons against one whose files are as they were
    saved. DataError if there are checkpoints but none that can be used. All ranks call it, each reads its share."""

    def judge(folder: Path) -> list[str]:
        reasons: list[str] = ranks.broadcast(why_not(folder) if ranks.rank == 0 else [])
        return reasons

    found = [path for root in roots for path in folders.step_folders(root)]
    order = sorted(found, key=lambda path: -folders.step_of(path))  # stable: of one step the first root's
    facts = [(path, (path / MANIFEST).is_file(), path.is_symlink()) for path in order]
    candidates: list[tuple[Path, bool, bool]] = ranks.broadcast(facts)
    damaged: dict[Path, list[str]] = {}
    good: Path | None = None
    for candidate, is_complete, is_link in candidates:
        if good is not None and is_complete:
            continue
        reasons = [_LINK] if is_link else damage(candidate, ranks=ranks, tensors=False)
        reasons = reasons or judge(candidate) or damage(candidate, ranks=ranks)  # the hours of reading last
        if reasons:
            damaged[candidate] = reasons
        else:
            good = candidate
    fetched = remote.fetch_newer(good) if remote else Fetched()
    if fetched.folder is not None and (reasons := judge(fetched.folder)):
        damaged[fetched.folder] = reasons
    else:
        good = fetched.folder or good
    if good is None and (damaged or fetched.damaged):
        everything = [*damaged.items(), *fetched.damaged.items()]
        problems = [Problem(text, place=str(place)) for place, texts in everything for text in texts]
        remedy = "restore one from a backup, or move them away to start from the beginning"
        raise DataError([*problems, Problem("no checkpoint of this run can be used", remedy=remedy)])
    return Choice(good, damaged, fetched)


def refuse_later(roots: Sequence[Path], *, step: int, damaged: Iterable[Path] = ()) -> None:
    """For a start that chose `step` and has just taken over: StorageError if an older start, which was still alive, has
    completed a later one in between. To resume from `step` would lose what that one has promised."""
    found = [path for root in roots for path in folders.complete_checkpoints(root) if folders.step_of(path) > step]
    later = [path for path in found if path not in set(damaged)]
    if later:
        what = f"another start saved {later[-1].name} while this one resumed from step {step}"
        rule = "a start resumes from the newest checkpoint"
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
    """Prepare a folder of checkpoints for a run that resumes from `step`: only for the holder of its write lease.

    Damaged ones get a name that nothing resumes from, those of an abandoned branch are retired, debris is swept. Before
    any of them moves, `latest` names one that stays.
    """
    doomed = [path for path in damaged if path.parent == root]
    staying = [path for path in folders.complete_checkpoints(root) if folders.step_of(path) <= step]
    staying = [path for path in staying if path not in doomed]
    said, wanted = folders.read_latest(root), staying[-1].name if staying else None
    if wanted is not None and said != wanted:
        write_atomically(root / folders.LATEST, wanted + "\n")
    elif wanted is None:
        (root / folders.LATEST).unlink(missing_ok=True)
    return Tidied(
        quarantined={path: folders.quarantine(path).name for path in doomed},
        retired=folders.retire_later(root, step),
        debris=folders.sweep_debris(root, keep=keep_debris),
        latest_said=(said or "") if said != wanted else None,
    )


# ---------------------------------------------------------------- for people

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


def describe_checkpoint(path: Path, *, check_hashes: bool = False) -> dict[str, Any]:
    """The JSON of `inspect checkpoint`. DataError if the checkpoint is damaged."""
    folder = folders.find_checkpoint(path)
    verify(folder, tensors=check_hashes)
    manifest = read_manifest(folder)
    recipe, state, tensors = read_recipe_of(folder), read_state(folder), read_index(folder)
    groups: dict[str, dict[str, int]] = {}
    for name, tensor in tensors.items():
        kind = "model" if name.startswith("model.") else "optimizer"
        group = groups.setdefault(kind, {"tensors": 0, "elements": 0, "bytes": 0, "pieces": 0})
        group["tensors"] += 1
        group["elements"] += math.prod(tensor.shape)
        group["bytes"] += tensor.num_bytes
        group["pieces"] += len(tensor.pieces)
    parallel = recipe.parallel
    return {
        "folder": str(folder),
        "step": state["step"],
        "consumed_samples": state["consumed_samples"],
        "consumed_tokens": consumed_tokens(recipe, state),
        "name": recipe.name,
        "fingerprint": fingerprint(recipe),
        "format": manifest["format"],
        "ranks": manifest.get("ranks"),
        "layout": {"tp": parallel.tp, "pp": parallel.pp, "cp": parallel.cp, "zero": parallel.zero},
        "versions": manifest.get("versions") or {},
        "time": manifest.get("time"),
        "validation": manifest.get("validation"),
        "tokenizer": manifest.get("tokenizer"),
        "verified": check_hashes,
        "bytes": sum(file["bytes"] for file in manifest["files"].values()),
        "files": {name: file["bytes"] for name, file in sorted(manifest["files"].items())},
        "groups": groups,
        "tensors": {
            name: {"shape": t.shape, "dtype": t.dtype, "pieces": len(t.pieces)}
            for name, t in sorted(tensors.items(), key=_model_order)
        },
        "state": state,
    }


def _model_order(item: tuple[str, SavedTensor]) -> tuple[int, list[tuple[int, str]]]:
    """Embeddings, layers by number, the rest of the model, then the optimizer's."""
    name = item[0]
    group = next(i for i, start in enumerate((*_ORDER, "")) if name.startswith(start))
    return group, [(int(part), "") if part.isdigit() else (-1, part) for part in name.split(".")]


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
    for place in (root, root / folders.RETIRED, root / "debris", *root.glob(f"{STAGING}*"), *root.glob(f"{STALE}*")):
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
        return "damaged", _LINK
    reasons = damage(folder, tensors=False, quick=not check_hashes)
    if not reasons:
        away = [file.name for file in os.scandir(folder) if file.is_symlink() and not os.path.exists(file)]
        if away:
            return "complete", f"{len(away)} of its files are on other nodes and were not checked"
        reasons = damage(folder) if check_hashes else []
    if reasons:
        return "damaged", "; ".join(reasons)
    is_retired = folder.parent.name == folders.RETIRED
    return ("retired", "its branch of the run was abandoned") if is_retired else ("complete", "")
