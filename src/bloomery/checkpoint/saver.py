"""Save behind the back of training: a picture in host memory in an instant, the disk in a thread, one at a time.

    saver = Saver(pieces, ranks=ranks, device=device)      once, before the first step: allocates the host memory
    saver.stage()                                          after the optimizer's step: queues the copies
    saver.persist(root, step=..., state=..., ...)          begins to write them
    saver.wait_staged()                                    before the optimizer changes what is being copied
    saver.poll()                                           now and then: what has come of it

Ranks do not wait for each other in the thread (see persist.py), so it never meets the collectives of training.
"""

from __future__ import annotations

import json
import secrets
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from bloomery.base.errors import Problem, StorageError
from bloomery.base.piece import Piece
from bloomery.base.pulse import PULSE
from bloomery.base.ranks import ALONE, Ranks
from bloomery.base.units import format_seconds
from bloomery.checkpoint.fence import Writer
from bloomery.checkpoint.index import report
from bloomery.checkpoint.persist import SaveJob, Trouble, abandon, complete, write_part
from bloomery.checkpoint.save import written_tensors
from bloomery.checkpoint.staging import HostImage

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
    ) -> None:
        """All ranks make theirs together."""
        self._image = HostImage(written_tensors(pieces), device)
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

    @property
    def step_in_flight(self) -> int | None:
        """The step whose save has begun last, if nobody has heard yet what came of it. The same on all ranks."""
        return self._flight.job.step if self._flight else None

    def stage(self) -> None:
        """Take the picture: the pieces as they are when the work queued on the device so far is done. `persist` must
        follow. All ranks call it in the same order; none waits for another.

        If the save before is still being written, this waits for it: that is the price of one image in memory.
        """
        started = time.monotonic()
        self._staged = self._land(wait=True)
        if self._staged:
            self._image.take()
        self._stage_seconds = time.monotonic() - started

    def persist(
        self,
        root: Path,
        *,
        step: int,
        state: Mapping[str, Any],
        recipe_yaml: str,
        writer: Writer | None = None,
        facts: Mapping[str, Any] | None = None,
        after: Sequence[Path] = (),
        parts_root: Path | None = None,
        then: Callable[[], list[str]] | None = None,
        make_room: Callable[[], list[str]] | None = None,
    ) -> None:
        """Begin to write the picture, and return. If the save before hangs beyond its time there is none, and `poll`
        says so. `parts_root`: this node's own disk, for tensor files that no folder shares (parts.py). `then` runs on
        rank 0 when the checkpoint is complete, for retention, and returns what it removed; so does `make_room`, before
        the first byte, if the disk has no room for it."""
        started = time.monotonic()
        removed: list[str] = []
        self._attempts += 1
        job = SaveJob(
            root=root,
            step=step,
            rank=self._rank,
            ranks=self._ranks,
            nonce=f"{self._nonce}-{self._attempts}",
            total_bytes=self._total_bytes,
            state_text=json.dumps(dict(state), indent=1),
            recipe_yaml=recipe_yaml,
            facts=facts or {},
            writer=writer,
            after=after,
            timeout_seconds=_PATIENCE * self._timeout_seconds,
            parts_root=parts_root,
            told=self._all,
            spare=self._parts_before,
            make_room=None if make_room is None else lambda: removed.extend(make_room()),
        )
        if parts_root is not None:
            self._parts_before = [job.parts.name]
        if not self._staged:
            assert self._flight is not None
            what = f"the checkpoint of step {step} was not made: the save of step {self._flight.job.step} still hangs"
            error = StorageError(Problem(what, remedy="look at the storage", place=str(root)))
            self._finished.append(SaveOutcome(step, job.final, error, self._stage_seconds, 0.0, job.total_bytes))
            return
        thread = threading.Thread(target=self._persist, args=(then, removed), name="bloomery-save", daemon=True)
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

    def _persist(self, then: Callable[[], list[str]] | None, removed: list[str]) -> None:
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
                    removed += then() if then else []
                except OSError as caught:
                    retention_trouble = str(caught)
            except Exception as caught:
                trouble = caught
                abandon(job)
        error = job.failed(Trouble.of(trouble, job.rank), removed) if trouble is not None else None
        seconds = time.monotonic() - started
        flight.outcome = SaveOutcome(
            job.step, job.final, error, 0.0, seconds, job.total_bytes, tuple(removed), retention_trouble
        )
