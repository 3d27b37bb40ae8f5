"""Write a checkpoint so that a crash at any moment leaves the older ones whole and no half-made one looks real."""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from bloomery.base.errors import BloomeryError, Problem, StorageError
from bloomery.base.piece import Piece
from bloomery.base.ranks import ALONE, Ranks
from bloomery.base.storage import reason, write_atomically
from bloomery.base.units import format_bytes
from bloomery.checkpoint import folder as folders
from bloomery.checkpoint.index import INDEX, RankReport, index_text, is_written, merge, report
from bloomery.checkpoint.tensor_file import file_bytes, write_tensors
from bloomery.config.recipe import KeepSection


def save_checkpoint(
    root: Path,
    *,
    step: int,
    pieces: Mapping[str, Piece],
    state: Mapping[str, Any],
    recipe_yaml: str,
    ranks: Ranks = ALONE,
) -> Path:
    """The new folder, complete and named by `latest`. All ranks call it, and all of them return or raise StorageError;
    then nothing has changed."""
    final = root / folders.step_name(step)
    draft = root / f".{final.name}.tmp"
    mine = {name: piece.tensor for name, piece in pieces.items() if is_written(piece)}
    total = sum(ranks.gather(file_bytes(mine) if mine else 0))
    trouble: Exception | None = None
    if ranks.rank == 0:
        try:
            _begin(root, draft, total)
        except Exception as error:  # of any kind: the other ranks must not be left waiting
            trouble = error
    _agree(ranks, trouble, draft, step=step, total=total)
    written: RankReport | None = None
    try:
        name = f"tensors-{ranks.rank:05d}.safetensors"
        facts = write_tensors(draft / name, mine) if mine else None
        written = report(pieces, name if mine else "", facts)
    except Exception as error:
        trouble = error
    _agree(ranks, trouble, draft, step=step, total=total)
    reports = ranks.gather(written)
    if ranks.rank == 0:
        try:
            _complete(draft, final, reports, step=step, state=state, recipe_yaml=recipe_yaml)
        except Exception as error:
            trouble = error
    _agree(ranks, trouble, draft, step=step, total=total)
    return final


def _begin(root: Path, draft: Path, total: int) -> None:
    root.mkdir(parents=True, exist_ok=True)
    if draft.exists():
        shutil.rmtree(draft)
    free = shutil.disk_usage(root).free
    if free < total:
        raise OSError(f"disk full: {format_bytes(free)} are free")
    draft.mkdir()


def _complete(
    draft: Path,
    final: Path,
    reports: list[RankReport],
    *,
    step: int,
    state: Mapping[str, Any],
    recipe_yaml: str,
) -> None:
    """Make the draft whole and give it its name: what rank 0 does when all tensors are on the disk."""
    texts = {
        INDEX: index_text(merge(reports)),
        "state.json": json.dumps(dict(state), indent=1),
        "recipe.yaml": recipe_yaml,
    }
    for name, text in texts.items():
        write_atomically(draft / name, text)
    files = {found.file: found.facts for found in reports if found.facts is not None}
    files |= {name: folders.facts_of(text) for name, text in texts.items()}
    facts = {"step": step, "ranks": len(reports), "torch": torch.__version__}
    folders.write_manifest(draft, facts, files)
    old = final.with_name(f".{final.name}.old")
    if final.exists():  # debris, or a save of the same step that is replaced now
        os.rename(final, old)
    os.rename(draft, final)
    write_atomically(final.parent / folders.LATEST, final.name + "\n")
    shutil.rmtree(old, ignore_errors=True)


def _agree(ranks: Ranks, trouble: Exception | None, draft: Path, *, step: int, total: int) -> None:
    """Go on, or raise on every rank what went wrong on any; the draft is then gone."""
    told = ranks.gather(_told(trouble) if trouble is not None else None)
    if not any(told):
        return
    if ranks.rank == 0:
        shutil.rmtree(draft, ignore_errors=True)
    problems = []
    for rank, found in enumerate(told):
        for text in found or ():
            on_rank = f" on rank {rank}" if ranks.size > 1 else ""
            problems.append(Problem(f"the checkpoint of step {step} could not be written{on_rank}: {text}"))
    root = draft.parent
    free = f"{_free(root)} are free, about {format_bytes(total)} are needed"
    remedy = "make room or name another --run-dir, then start again; older checkpoints are untouched"
    problems[-1] = Problem(problems[-1].what, free, remedy, str(root))
    raise StorageError(problems).told_once(ranks.rank) from trouble


def _told(error: Exception) -> list[str]:
    if isinstance(error, BloomeryError):
        return [str(problem) for problem in error.problems]
    if isinstance(error, OSError):
        return [reason(error)]
    return [f"{type(error).__name__}: {error}"]


def _free(root: Path) -> str:
    try:
        return format_bytes(shutil.disk_usage(root).free)
    except OSError:
        return "an unknown number of bytes"


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


def estimate_save_seconds(root: Path, pieces: Mapping[str, Piece], *, probe_bytes: int = 2**24) -> float:
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
    return (time.monotonic() - started) * max(1.0, _bytes_of(pieces) / probe_bytes)


def _bytes_of(pieces: Mapping[str, Piece]) -> int:
    return sum(piece.tensor.numel() * piece.tensor.element_size() for piece in pieces.values() if is_written(piece))
