"""Asynchronous saves: a snapshot in pinned host memory in an instant, the disk in a thread, one save at a time.

    saver = Saver(pieces, ranks=ranks, device=device)      once, before the first step: allocates the host memory
    saver.stage()                                          after the optimizer's step: queues the copies
    saver.persist(SavePlan(root=..., step=..., ...))       begins to write them
    saver.wait_staged()                                    before the optimizer changes what is being copied
    saver.poll()                                           now and then: what has come of it

Ranks do not wait for each other in the thread (see persist.py), so it never meets the collectives of training.
"""

from __future__ import annotations

import os
import secrets
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bloomery.base.errors import Problem, StorageError
from bloomery.base.piece import Piece
from bloomery.base.pulse import PULSE
from bloomery.base.ranks import ALONE, Ranks
from bloomery.base.storage import open_plain
from bloomery.base.units import format_seconds
from bloomery.checkpoint.fence import Writer
from bloomery.checkpoint.index import is_written, report
from bloomery.checkpoint.persist import SaveJob, SavePlan, Trouble, abandon, complete, write_part
from bloomery.checkpoint.staging import HostImage, StreamedImage

_PATIENCE = 0.8
"""Of a save's time, the share in which rank 0 waits for the parts of the others; the rest is for completing it."""


@dataclass(frozen=True)
class SaveOutcome:
    """What has come of a save. On rank 0 the truth about all of it, on the others about their part."""

    step: int
    folder: Path
    error: StorageError | None
    blocking_seconds: float
    """How long training stood still for it."""
    persist_seconds: float
    """From then until all was on the disk."""
    bytes: int
    """Of all ranks."""
    removed: tuple[str, ...] = ()
    """Checkpoints that retention deleted, to make room or afterwards."""
    retention_trouble: str = ""
    """The checkpoint is complete, but older ones could not be deleted."""


@dataclass
class _Flight:
    job: SaveJob
    thread: threading.Thread
    deadline: float
    blocking_seconds: float = 0.0
    told_late: bool = False
    outcome: SaveOutcome | None = None


class Saver:
    def __init__(
        self,
        pieces: Mapping[str, Piece],
        *,
        device: torch.device,
        ranks: Ranks = ALONE,
        timeout_seconds: float = 1800.0,
        values: Callable[[str], Tensor] | None = None,
    ) -> None:
        """All ranks make theirs together. `values`: see save_checkpoint."""
        tensors = _written_tensors(pieces)
        self._image = HostImage(tensors, device) if values is None else StreamedImage(tensors, values)
        self._held = report(pieces)
        self._all, self._rank, self._ranks = ranks, ranks.rank, ranks.size
        self._timeout_seconds = timeout_seconds
        self._total_bytes = sum(ranks.gather(self._image.layout.file_bytes))
        self._nonce = ranks.broadcast(secrets.token_hex(4))
        self._attempts = 0
        self._parts_before: list[str] = []
        """Of the save before, which rank 0 may still be completing when this rank has long done its part."""
        self._staged = False
        self._stage_seconds = 0.0
        self._flight: _Flight | None = None
        self._finished: list[SaveOutcome] = []

    @property
    def host_bytes(self) -> int:
        """Memory on this rank's host that saves take."""
        return self._image.layout.data_bytes

    def stage(self) -> None:
        """Take the snapshot: the pieces as they are when the work queued on the device so far is done. `persist` must
        follow. All ranks call it in the same order; none waits for another.

        If the save before is still being written, this waits for it: that is the price of one image in memory.
        """
        started = time.monotonic()
        self._staged = self._land(wait=True)
        if self._staged:
            self._image.take()
        self._stage_seconds = time.monotonic() - started

    def persist(self, plan: SavePlan) -> None:
        """Begin to write the snapshot, and return. If the save before hangs beyond its time there is none, and `poll`
        reports it. Retention acts on rank 0, in the thread."""
        started = time.monotonic()
        self._attempts += 1
        job = SaveJob.of(
            plan,
            rank=self._rank,
            ranks=self._ranks,
            nonce=f"{self._nonce}-{self._attempts}",
            total_bytes=self._total_bytes,
            timeout_seconds=_PATIENCE * self._timeout_seconds,
            told=self._all,
            spare=self._parts_before,
        )
        if job.parts_root is not None:
            self._parts_before = [job.parts.name]
        if not self._staged:
            assert self._flight is not None
            what = (
                f"the checkpoint of step {job.step} was not made: the save of step {self._flight.job.step} still hangs"
            )
            error = StorageError(Problem(what, remedy="look at the storage", place=str(job.root)))
            self._finished.append(SaveOutcome(job.step, job.final, error, self._stage_seconds, 0.0, job.total_bytes))
            return
        thread = threading.Thread(target=self._persist, name="bloomery-save", daemon=True)
        self._flight = _Flight(job, thread, deadline=time.monotonic() + self._timeout_seconds)
        thread.start()
        self._flight.blocking_seconds = self._stage_seconds + time.monotonic() - started

    def wait_staged(self) -> None:
        """What the device is told from now on happens after the copies of the last `stage`. Does not wait itself."""
        self._image.hold_back()

    def poll(self) -> list[SaveOutcome]:
        """What has come of saves since the last call. A save that is late is told once as an error; what becomes of it
        in the end is told as well."""
        self._land(wait=False)
        flight = self._flight
        if flight is not None and not flight.told_late and time.monotonic() > flight.deadline:
            flight.told_late = True
            what = (
                f"the save of step {flight.job.step} is not on the disk after {format_seconds(self._timeout_seconds)}"
            )
            remedy = "look at the storage: it hangs or is too slow; no other save is made until this one ends"
            late = SaveOutcome(
                flight.job.step,
                flight.job.final,
                StorageError(Problem(what, remedy=remedy, place=str(flight.job.root))),
                flight.blocking_seconds,
                self._timeout_seconds,
                flight.job.total_bytes,
            )
            self._finished.append(late)
        finished, self._finished = self._finished, []
        return finished

    def wait(self, *, at_most_seconds: float | None = None) -> list[SaveOutcome]:
        """Until the save in flight has come to its end, or its time is over; then as `poll`."""
        self._land(wait=True, at_most_seconds=at_most_seconds)
        return self.poll()

    def _land(self, *, wait: bool, at_most_seconds: float | None = None) -> bool:
        """Take up what a finished save has left. False if one is still on its way."""
        flight = self._flight
        if flight is None:
            return True
        left = max(0.0, flight.deadline - time.monotonic()) if wait else 0.0
        with PULSE.excuse(left) if wait else nullcontext():
            flight.thread.join(left if at_most_seconds is None else min(left, at_most_seconds))
        if flight.thread.is_alive():
            return False
        assert flight.outcome is not None
        self._finished.append(replace(flight.outcome, blocking_seconds=flight.blocking_seconds))
        self._flight = None
        return True

    def _persist(self) -> None:
        flight = self._flight
        assert flight is not None
        job, started = flight.job, time.monotonic()
        trouble: Exception | None = None
        retention_trouble = ""
        try:
            self._image.wait()
            write_part(job, self._held, self._image.layout, self._image.blocks())
        except Exception as caught:  # nothing may be lost in a thread
            trouble = caught
        if job.rank == 0:
            try:
                complete(job, trouble)
                try:
                    job.removed.extend(job.retention.after_save(job.final) if job.retention else ())
                except OSError as caught:
                    retention_trouble = str(caught)
            except Exception as caught:
                trouble = caught
                abandon(job)
        error = job.failed(Trouble.of(trouble, job.rank)) if trouble is not None else None
        seconds = time.monotonic() - started
        flight.outcome = SaveOutcome(
            job.step, job.final, error, 0.0, seconds, job.total_bytes, tuple(job.removed), retention_trouble
        )


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
    """An asynchronous save and a wait: the new folder, complete and named by `latest`. All ranks call it, and all of
    them return or raise StorageError; then nothing has changed. `values`: gives each tensor when its turn comes, for
    pieces on the meta device."""
    device = next((piece.tensor.device for piece in pieces.values()), torch.device("cpu"))
    saver = Saver(pieces, device=device, ranks=ranks, values=values)
    saver.stage()
    plan = SavePlan(root=root, step=step, state=state, recipe_yaml=recipe_yaml, facts=facts or {}, writer=writer)
    saver.persist(plan)
    outcome = saver.wait()[-1]
    error = agreed(ranks, outcome.error)
    if error is not None:
        raise error.told_once(ranks.rank)
    return outcome.folder


def agreed(ranks: Ranks, error: StorageError | None) -> StorageError | None:
    """The error of the first rank that has one, on every rank. All ranks call it."""
    return next((found for found in ranks.gather(error) if found is not None), None)


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
        return 0.0  # no room to measure; the save itself will report it
    finally:
        probe.unlink(missing_ok=True)
    size = sum(tensor.numel() * tensor.element_size() for tensor in _written_tensors(pieces).values())
    return (time.monotonic() - started) * max(1.0, size / probe_bytes)


def _written_tensors(pieces: Mapping[str, Piece]) -> dict[str, Tensor]:
    """What this rank puts into its file."""
    return {name: piece.tensor for name, piece in pieces.items() if is_written(piece)}
