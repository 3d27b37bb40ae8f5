"""Save a checkpoint at once, and how long that will take. `saver.py` saves behind the back of training."""

from __future__ import annotations

import json
import os
import secrets
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from bloomery.base.errors import StorageError
from bloomery.base.piece import Piece
from bloomery.base.ranks import ALONE, Ranks
from bloomery.base.storage import open_plain
from bloomery.checkpoint.fence import Writer
from bloomery.checkpoint.index import is_written, report
from bloomery.checkpoint.persist import SaveJob, Trouble, abandon, complete, write_part
from bloomery.checkpoint.tensor_file import FileLayout, raw_bytes


def save_checkpoint(
    root: Path,
    *,
    step: int,
    pieces: Mapping[str, Piece],
    state: Mapping[str, Any],
    recipe_yaml: str,
    ranks: Ranks = ALONE,
    writer: Writer | None = None,
    facts: Mapping[str, Any] | None = None,
    values: Callable[[str], Tensor] | None = None,
) -> Path:
    """The new folder, complete and named by `latest`. All ranks call it, and all of them return or raise StorageError;
    then nothing has changed. `values`: gives each tensor when its turn comes, for pieces on the meta device."""
    tensors = written_tensors(pieces)
    layout = FileLayout.of(tensors)
    job = SaveJob(
        root=root,
        step=step,
        rank=ranks.rank,
        ranks=ranks.size,
        nonce=ranks.broadcast(secrets.token_hex(4)),
        total_bytes=sum(ranks.gather(layout.file_bytes)),
        state_text=json.dumps(dict(state), indent=1),
        recipe_yaml=recipe_yaml,
        facts=facts or {},
        writer=writer,
    )
    trouble: Exception | None = None
    try:
        give = values or tensors.__getitem__
        write_part(job, report(pieces), layout, (raw_bytes(give(name)) for name in layout.order))
    except Exception as error:  # of any kind: the other ranks must not be left waiting
        trouble = error
    _agree(job, ranks, trouble)
    if ranks.rank == 0:
        try:
            complete(job)
        except Exception as error:
            trouble = error
    _agree(job, ranks, trouble)
    return job.final


def written_tensors(pieces: Mapping[str, Piece]) -> dict[str, Tensor]:
    """What this rank puts into its file."""
    return {name: piece.tensor for name, piece in pieces.items() if is_written(piece)}


def agreed(ranks: Ranks, error: StorageError | None) -> StorageError | None:
    """The error of the first rank that has one, on every rank. All ranks call it."""
    return next((told for told in ranks.gather(error) if told is not None), None)


def _agree(job: SaveJob, ranks: Ranks, error: Exception | None) -> None:
    """Go on, or raise on every rank what went wrong on any; the draft is then gone. All ranks call it."""
    told = ranks.gather(Trouble.of(error, ranks.rank) if error is not None else None)
    troubles = [trouble for trouble in told if trouble is not None]
    if not troubles:
        return
    if ranks.rank == 0:
        abandon(job)
    raise job.failed(Trouble.sum(troubles)).told_once(ranks.rank) from error


def estimate_save_seconds(root: Path, pieces: Mapping[str, Piece], *, probe_bytes: int = 2**24) -> float:
    """Seconds a save is likely to take here, from a measured write to this very folder."""
    probe = root / ".write-probe"
    started = time.monotonic()
    try:
        with open(probe, "wb", opener=open_plain) as file:
            file.write(os.urandom(probe_bytes))
            file.flush()
            os.fsync(file.fileno())
    except OSError:
        return 0.0  # no room to measure; the save itself will say so
    finally:
        probe.unlink(missing_ok=True)
    size = sum(tensor.numel() * tensor.element_size() for tensor in written_tensors(pieces).values())
    return (time.monotonic() - started) * max(1.0, size / probe_bytes)
