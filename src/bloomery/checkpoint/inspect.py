"""The checkpoints of a run for people: a list of all, and what is in one. The list needs no torch."""

import math
import os
import re
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from bloomery.base.errors import DataError, Problem
from bloomery.checkpoint import folder as folders
from bloomery.checkpoint.folder import file_damage, find_checkpoint, is_tensor_file, read_manifest

_SMALL_BYTES = 2**20
_STEP = re.compile(r"step-(\d{8,})")
_PLACES = ("*", f"{folders.RETIRED}/*", f"{folders.DEBRIS}/*", f"{folders.STAGING}*/*", f"{folders.STALE}*/*")
_ORDER = ("model.embed", "model.layers", "model.", "optim.")
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
    latest, found = folders.read_latest(root), []
    for folder in (path for pattern in _PLACES for path in root.glob(pattern)):
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
        return "damaged", folders.LINK
    away = {file.name for file in os.scandir(folder) if file.is_symlink() and not os.path.exists(file)}
    try:
        reasons = _damage(folder, away, check_hashes=check_hashes)
    except DataError as error:
        reasons = sorted(problem.what for problem in error.problems)
    if reasons:
        return "damaged", "; ".join(reasons)
    if away:
        return "complete", f"{len(away)} of its files are on other nodes and were not checked"
    is_retired = folder.parent.name == folders.RETIRED
    return ("retired", "its branch of the run was abandoned") if is_retired else ("complete", "")


def _damage(folder: Path, away: set[str], *, check_hashes: bool) -> list[str]:
    """Without `check_hashes`, for lists of very many: what sizes and the hashes of small files tell."""
    if check_hashes:
        from bloomery.checkpoint.load import read_checkpoint

        read_checkpoint(folder, tensors=not away)
        return []
    wrong = [
        file_damage(folder / name, facts, read=not is_tensor_file(name) and facts["bytes"] <= _SMALL_BYTES)
        for name, facts in sorted(read_manifest(folder)["files"].items())
        if name not in away
    ]
    return list(filter(None, wrong))


def describe_checkpoint(path: Path, *, check_hashes: bool = False) -> dict[str, Any]:
    """The JSON of `inspect checkpoint`. DataError if the checkpoint is damaged."""
    from bloomery.checkpoint.load import read_checkpoint
    from bloomery.config.load import fingerprint

    checkpoint = read_checkpoint(find_checkpoint(path), tensors=check_hashes)
    manifest, recipe, state, tensors = checkpoint.manifest, checkpoint.recipe, checkpoint.state, checkpoint.tensors
    groups: dict[str, Counter[str]] = {}
    for name, each in tensors.items():
        group = groups.setdefault("model" if name.startswith("model.") else "optimizer", Counter())
        group.update(tensors=1, elements=math.prod(each.shape), bytes=each.num_bytes, pieces=len(each.pieces))
    parallel = recipe.parallel
    return {
        "folder": str(checkpoint.folder),
        "step": state["step"],
        "consumed_samples": state["consumed_samples"],
        "consumed_tokens": checkpoint.consumed_tokens,
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
            for name, t in sorted(tensors.items(), key=lambda item: _model_order(item[0]))
        },
        "state": state,
    }


def _model_order(name: str) -> tuple[int, list[tuple[int, str]]]:
    """Embeddings, layers by number, the rest of the model, then the optimizer's."""
    group = next(i for i, start in enumerate((*_ORDER, "")) if name.startswith(start))
    return group, [(int(part), "") if part.isdigit() else (-1, part) for part in name.split(".")]
