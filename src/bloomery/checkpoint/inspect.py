"""Look at checkpoints without loading them: what one holds, which a run has and in what state, how two differ."""

from __future__ import annotations

import math
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from bloomery.base.errors import DataError, Problem
from bloomery.checkpoint.fence import STAGING, STALE
from bloomery.checkpoint.folder import (
    CHECKPOINTS,
    LOCAL_CHECKPOINTS,
    RETIRED,
    damage,
    find_checkpoint,
    read_latest,
    verify,
)
from bloomery.checkpoint.index import SavedTensor, read_index
from bloomery.checkpoint.load import consumed_tokens, read_recipe_of, read_state
from bloomery.checkpoint.manifest import read_manifest
from bloomery.checkpoint.reader import CheckpointReader
from bloomery.checkpoint.tensor_file import DTYPES
from bloomery.config.describe import as_dict, fingerprint

State = Literal["complete", "damaged", "debris", "retired"]
_STEP = re.compile(r"step-(\d{8,})")
_ORDER = ("model.embed", "model.layers", "model.", "optim.")


@dataclass(frozen=True)
class Listed:
    name: str
    """Within the checkpoints folder, or that of the run for those in its fast place."""
    state: State
    step: int | None
    bytes: int
    reason: str = ""
    """What is wrong with it."""
    is_latest: bool = False


@dataclass(frozen=True)
class TensorDifference:
    name: str
    shape: tuple[int, ...]
    elements: int
    """How many differ."""
    norm: float
    """Of the difference; NaN where an element is no number in one of the two."""
    relative: float
    """The norm over that of the first tensor."""
    largest: float
    first_index: tuple[int, ...]
    first_values: tuple[float, float]


@dataclass(frozen=True)
class Difference:
    only_a: list[str]
    only_b: list[str]
    reshaped: list[str]
    """Tensors of another shape or kind, with both."""
    tensors: list[TensorDifference]
    """Those that differ, in the order in which the model computes."""
    compared: int
    state: dict[str, tuple[Any, Any]]
    recipe: dict[str, tuple[Any, Any]]

    @property
    def is_equal(self) -> bool:
        return not (self.only_a or self.only_b or self.reshaped or self.tensors or self.state or self.recipe)


def describe_checkpoint(path: Path, *, check_hashes: bool = False) -> dict[str, Any]:
    """The JSON of `inspect checkpoint`. DataError if the checkpoint is damaged."""
    folder = find_checkpoint(path)
    verify(folder, tensors=check_hashes)
    manifest = read_manifest(folder)
    recipe, state, tensors = read_recipe_of(folder), read_state(folder), read_index(folder)
    groups: dict[str, dict[str, int]] = {}
    for name, tensor in tensors.items():
        kind = "model" if name.startswith("model.") else "optimizer"
        group = groups.setdefault(kind, {"tensors": 0, "elements": 0, "bytes": 0, "pieces": 0})
        group["tensors"] += 1
        group["elements"] += math.prod(tensor.shape)
        group["bytes"] += tensor_bytes(tensor)
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
            name: {"shape": t.shape, "dtype": t.dtype, "pieces": len(t.pieces)} for name, t in in_order(tensors)
        },
        "state": state,
    }


def list_checkpoints(path: Path, *, check_hashes: bool = False) -> list[Listed]:
    """Every checkpoint of a run, whatever became of it, oldest first. DataError if there is no such folder."""
    found = [one for root in _checkpoint_folders(path) for one in _listed_in(root, check_hashes=check_hashes)]
    return sorted(found, key=lambda one: (one.step or 0, one.name))


def _listed_in(root: Path, *, check_hashes: bool) -> list[Listed]:
    latest = read_latest(root)
    found = []
    for place in (root, root / RETIRED, root / "debris", *root.glob(f"{STAGING}*"), *root.glob(f"{STALE}*")):
        for folder in sorted(place.iterdir()) if place.is_dir() else ():
            match = _STEP.search(folder.name)
            if match is None or not folder.is_dir():
                continue
            state, reason = _state_of(folder, check_hashes=check_hashes)
            if place.name == RETIRED and state == "complete":
                state, reason = "retired", "its branch of the run was left"
            size = sum(file.stat().st_size for file in os.scandir(folder) if file.is_file())
            name = str(folder.relative_to(root))
            shown = f"{LOCAL_CHECKPOINTS}/{name}" if root.name == LOCAL_CHECKPOINTS else name
            found.append(Listed(shown, state, int(match[1]), size, reason, is_latest=name == latest))
    return found


def compare_checkpoints(a: Path, b: Path) -> Difference:
    """All that differs; one tensor of each is in memory at a time. Meets any two layouts."""
    left, right = find_checkpoint(a), find_checkpoint(b)
    for folder in (left, right):
        verify(folder, tensors=False)
    one, other = CheckpointReader(left), CheckpointReader(right)
    shared = [(name, t) for name, t in in_order(one.tensors) if name in other.tensors]
    alike = [name for name, t in shared if _kind(t) == _kind(other.tensors[name])]
    reshaped = [
        f"{name}: {t.dtype} {list(t.shape)} and {other.tensors[name].dtype} {list(other.tensors[name].shape)}"
        for name, t in shared
        if _kind(t) != _kind(other.tensors[name])
    ]
    found = [_difference(name, one.read(name), other.read(name)) for name in alike]
    return Difference(
        only_a=[name for name, _ in in_order(one.tensors) if name not in other.tensors],
        only_b=[name for name, _ in in_order(other.tensors) if name not in one.tensors],
        reshaped=reshaped,
        tensors=[each for each in found if each is not None],
        compared=len(alike),
        state=_fields(_plain(read_state(left)), _plain(read_state(right))),
        recipe=_fields(as_dict(read_recipe_of(left)), as_dict(read_recipe_of(right))),
    )


def in_order(tensors: dict[str, SavedTensor]) -> list[tuple[str, SavedTensor]]:
    """Embeddings, layers by number, the rest of the model, then the optimizer's."""

    def key(name: str) -> tuple[int, list[Any]]:
        group = next(i for i, start in enumerate((*_ORDER, "")) if name.startswith(start))
        return group, [(int(part), "") if part.isdigit() else (-1, part) for part in name.split(".")]

    return sorted(tensors.items(), key=lambda item: key(item[0]))


def tensor_bytes(tensor: SavedTensor) -> int:
    return math.prod(tensor.shape) * DTYPES[tensor.dtype].itemsize


def _state_of(folder: Path, *, check_hashes: bool) -> tuple[State, str]:
    if folder.name.startswith("damaged-"):
        return "damaged", "put aside by a restart"
    if folder.name.startswith("."):
        return "debris", "the save or the deletion was cut off, or still goes on"
    if folder.is_symlink():
        return "damaged", "it is a link"
    reasons = damage(folder, tensors=False, quick=not check_hashes)
    if not reasons:
        away = [file.name for file in os.scandir(folder) if file.is_symlink() and not os.path.exists(file)]
        if away:
            return "complete", f"{len(away)} of its files lie on other nodes and were not looked at"
        reasons = damage(folder) if check_hashes else []
    return ("damaged", "; ".join(reasons)) if reasons else ("complete", "")


def _checkpoint_folders(path: Path) -> list[Path]:
    for places in ([path / CHECKPOINTS, path / LOCAL_CHECKPOINTS], [path], [path.parent]):
        found = [place for place in places if place.is_dir() and any(map(_is_of_step, place.iterdir()))]
        if found:
            return found
    rule = "a run folder has checkpoints/step-00000100 and the like"
    raise DataError(Problem(f"there are no checkpoints at {path}", rule, "name a run folder"))


def _is_of_step(path: Path) -> bool:
    return path.is_dir() and _STEP.search(path.name) is not None


def _difference(name: str, a: Tensor, b: Tensor) -> TensorDifference | None:
    if torch.equal(a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8)):
        return None
    left, right = a.double().reshape(-1), b.double().reshape(-1)
    delta = (left - right).abs()
    differs = (delta != 0) | delta.isnan()
    if not bool(differs.any()):  # -0.0 and 0.0: other bits, the same value
        return None
    first = int(differs.nonzero()[0])
    index = tuple(int(i) for i in torch.unravel_index(torch.tensor(first), a.shape))
    norm, size = float(delta.norm()), float(left.norm())
    return TensorDifference(
        name=name,
        shape=tuple(a.shape),
        elements=int(differs.sum()),
        norm=norm,
        relative=norm / size if size else math.inf,
        largest=float(delta.max()),
        first_index=index,
        first_values=(float(left[first]), float(right[first])),
    )


def _kind(tensor: SavedTensor) -> tuple[str, tuple[int, ...]]:
    return tensor.dtype, tuple(tensor.shape)


def _plain(state: dict[str, Any]) -> dict[str, Any]:
    """Without what a clock measured."""
    return {
        key: value for key, value in state.items() if key not in ("save_seconds", "save_costs", "interval", "energy")
    }


def _fields(a: Any, b: Any, path: str = "") -> dict[str, tuple[Any, Any]]:
    if isinstance(a, dict) and isinstance(b, dict):
        found: dict[str, tuple[Any, Any]] = {}
        for key in sorted({*a, *b}):
            found |= _fields(a.get(key), b.get(key), f"{path}.{key}" if path else str(key))
        return found
    return {} if a == b else {path: (a, b)}
