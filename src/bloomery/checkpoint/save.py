"""Write a checkpoint so that a crash at any moment leaves the older ones whole and no half-made one looks real."""

from __future__ import annotations

import json
import os
import shutil
import time
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint.state_dict_saver as dcp
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemWriter

from bloomery.base.errors import Problem, StorageError
from bloomery.base.storage import write_atomically
from bloomery.checkpoint import folder as folders
from bloomery.config.recipe import KeepSection


def save_checkpoint(
    root: Path, *, step: int, tensors: Mapping[str, Tensor], state: Mapping[str, Any], recipe_yaml: str
) -> Path:
    """The new folder, complete and named by `latest`. StorageError if there is no room; then nothing has changed."""
    final = root / folders.step_name(step)
    draft = root / f".{final.name}.tmp"
    try:
        for debris in (draft, final):
            if debris.exists():
                shutil.rmtree(debris)
        _require_room(root, tensors)
        draft.mkdir(parents=True)
        writer = FileSystemWriter(draft, single_file_per_rank=True, sync_files=True)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # dcp warns that no process group exists: that is what no_dist says
            dcp.save(dict(tensors), storage_writer=writer, no_dist=True)
        write_atomically(draft / "state.json", json.dumps(dict(state), indent=1))
        write_atomically(draft / "recipe.yaml", recipe_yaml)
        folders.write_manifest(draft, {"step": step, "torch": torch.__version__})
        os.rename(draft, final)
        write_atomically(root / folders.LATEST, final.name + "\n")
    except StorageError:
        shutil.rmtree(draft, ignore_errors=True)
        raise
    except (OSError, RuntimeError, CheckpointException) as error:
        # torch reports a full disk as a RuntimeError or wraps it; either way the save did not happen.
        shutil.rmtree(draft, ignore_errors=True)
        what = f"the checkpoint of step {step} could not be written: {_first_line(error)}"
        free = f"{shutil.disk_usage(root).free:,} bytes are free, about {_bytes_of(tensors):,} are needed"
        remedy = "make room or name another --run-dir, then start again; older checkpoints are untouched"
        raise StorageError(Problem(what, free, remedy, str(root))) from error
    return final


def apply_retention(root: Path, keep: KeepSection | None) -> list[Path]:
    """Delete what `keep` does not ask for; never the newest complete one. Returns what was deleted."""
    if keep is None:
        return []
    whole = folders.complete_checkpoints(root)
    doomed = []
    for path in whole[: -keep.last]:
        step = int(path.name.removeprefix("step-"))
        if keep.every is None or step % keep.every.count:
            folders.remove(path)
            doomed.append(path)
    return doomed


def estimate_save_seconds(root: Path, tensors: Mapping[str, Tensor], *, probe_bytes: int = 2**24) -> float:
    """Seconds a save is likely to take here, from a measured write to this very folder."""
    probe = root / ".write-probe"
    started = time.monotonic()
    try:
        with probe.open("wb") as file:
            file.write(os.urandom(probe_bytes))
            file.flush()
            os.fsync(file.fileno())
    except OSError:
        return 0.0  # no room to measure; the save itself will say so
    finally:
        probe.unlink(missing_ok=True)
    return (time.monotonic() - started) * max(1.0, _bytes_of(tensors) / probe_bytes)


def _bytes_of(tensors: Mapping[str, Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())


def _require_room(root: Path, tensors: Mapping[str, Tensor]) -> None:
    root.mkdir(parents=True, exist_ok=True)
    free, needed = shutil.disk_usage(root).free, _bytes_of(tensors)
    if free < needed:
        raise OSError(f"disk full: {free:,} bytes are free")


def _first_line(error: BaseException) -> str:
    if isinstance(error, CheckpointException):  # its own text names ranks; the cause is inside
        error = next(iter(error.failures.values()))[0]
    return (str(error).strip() or type(error).__name__).splitlines()[0]
