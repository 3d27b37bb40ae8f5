"""Asynchronous saves: a snapshot in pinned host memory in an instant, the disk in a thread, one save at a time.

    saver = Saver(pieces, ranks=ranks, device=device)      once, before the first step: allocates the host memory
    saver.stage()                                          after the optimizer's step: queues the copies
    saver.persist(SavePlan(tier=..., step=..., ...))       begins to write them
    saver.wait_staged()                                    before the optimizer changes what is being copied
    saver.poll()                                           now and then: the outcomes

In the thread ranks do not wait for each other, so it never meets the collectives of training. Each writes its tensor
file, and then reports its size and hash, or what went wrong, through the store of the ranks: storage may be what has
failed. When all have reported, rank 0 checks that together they are whole, writes the manifest last and gives the
folder its name (`SaveJob.commit`): then the checkpoint is valid.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import secrets
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import bloomery
from bloomery.base.accelerator import CopyQueue, host_memory
from bloomery.base.bounded import in_background
from bloomery.base.errors import BloomeryError, Problem, StorageError
from bloomery.base.ranks import ALONE, Piece, Ranks
from bloomery.base.signals import PULSE
from bloomery.base.storage import free_space, own_folder, reason, remove_tree, sync, sync_folder
from bloomery.base.units import format_bytes, format_seconds
from bloomery.checkpoint import folder as folders
from bloomery.checkpoint.folder import INDEX, RECIPE, STATE, FencedError, FileFacts, Writer
from bloomery.checkpoint.format import FileLayout, as_bytes, held_tensors, index_text, is_written, raw_bytes, write_file
from bloomery.checkpoint.retention import Retention, Tier, sweep_parts

_PATIENCE = 0.8
"""Of a save's time, the share in which rank 0 waits for the parts of the others; the rest is for the commit."""
_FIRST_PAUSE_SECONDS = 0.005
_LONGEST_PAUSE_SECONDS = 1.0
_HOST_BLOCK_BYTES = 2**28
"""A power of two: torch rounds pinned memory up to one, so that larger or odd sizes would waste half of it."""
_GRACE_SECONDS = 5.0
"""How long a failed save waits for ranks that are still writing."""


@dataclass(frozen=True, kw_only=True)
class SavePlan:
    """A checkpoint that is due: where it goes, and all that is written beside its tensors."""

    tier: Tier
    step: int
    state: Mapping[str, Any]
    recipe_yaml: str
    facts: Mapping[str, Any] = field(default_factory=dict)
    """More for the manifest."""
    after: Sequence[Path] = ()
    """Files that must be on the disk before this save counts: records of the steps that it holds."""
    retention: Retention | None = None


@dataclass
class SaveOutcome:
    """How a save ended. On rank 0 the truth about all of it, on the others about their part."""

    step: int
    folder: Path
    bytes: int
    """Of all ranks."""
    error: StorageError | None = None
    blocking_seconds: float = 0.0
    """How long training stood still for it."""
    persist_seconds: float = 0.0
    """From then until all was on the disk."""
    removed: list[str] = field(default_factory=list)
    """Checkpoints that retention deleted, to make room or afterwards."""
    retention_trouble: str = ""
    """The checkpoint is complete, but older ones could not be deleted."""


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
        tensors = {name: piece.tensor for name, piece in pieces.items() if is_written(piece)}
        self.snapshot = HostSnapshot(tensors, device) if values is None else StreamedSnapshot(tensors, values)
        self.ranks, self.timeout_seconds = ranks, timeout_seconds
        self.total_bytes = sum(ranks.gather(self.snapshot.layout.file_bytes))
        self.nonce = ranks.broadcast(secrets.token_hex(4))
        held = ranks.gather(held_tensors(pieces, _tensor_file(ranks.rank)))
        self.held = held if ranks.rank == 0 else []
        self._attempts = 0
        self._staged = False
        self._stage_seconds = 0.0
        self._flight: SaveJob | None = None
        self._finished: list[SaveOutcome] = []

    @cached_property
    def index(self) -> str:
        """index.json of every save, for rank 0. StorageError if the ranks' pieces do not make all tensors once."""
        return index_text(self.held)

    @property
    def host_bytes(self) -> int:
        """Memory on this rank's host that saves take."""
        return self.snapshot.layout.data_bytes

    def stage(self) -> None:
        """Take the snapshot: the pieces as they are when the work queued on the device so far is done. `persist` must
        follow. All ranks call it in the same order; none waits for another.

        If the save before is still being written, this waits for it: that is the price of one snapshot in memory.
        """
        started = time.monotonic()
        self._staged = self._land()
        if self._staged:
            self.snapshot.take()
        self._stage_seconds = time.monotonic() - started

    def persist(self, plan: SavePlan) -> None:
        """Begin to write the snapshot, and return. If the save before hangs beyond its time, nothing is written, and
        `poll` reports it. Retention acts on rank 0, in the thread."""
        started = time.monotonic()
        self._attempts += 1
        job = SaveJob(plan, self, self._attempts)
        if not self._staged:
            assert self._flight is not None
            hung = self._flight.plan.step
            what = f"the checkpoint of step {plan.step} was not saved: the save of step {hung} still hangs"
            job.report({}, [f"its save of step {hung} still hangs"])
            self._finished.append(replace(job.outcome, error=StorageError(Problem(what, remedy="check the storage"))))
            return
        self._flight = job
        self._deadline, self._reported_late = time.monotonic() + self.timeout_seconds, False
        self._thread = threading.Thread(target=job.run, name="bloomery-save", daemon=True)
        self._thread.start()
        job.outcome.blocking_seconds = self._stage_seconds + time.monotonic() - started

    def wait_staged(self) -> None:
        """What is queued on the device from now on happens after the copies of the last `stage`. Does not block."""
        self.snapshot.queue.hold_back()

    def poll(self) -> list[SaveOutcome]:
        """How saves since the last call have ended. One that is late is reported once as an error, and again when it
        ends."""
        self.snapshot.check()
        self._land(0.0)
        job = self._flight
        if job is not None and not self._reported_late and time.monotonic() > self._deadline:
            self._reported_late = True
            what = f"the save of step {job.plan.step} is not on the disk after {format_seconds(self.timeout_seconds)}"
            remedy = "check the storage: it hangs or is too slow; no other save is made until this one ends"
            error = StorageError(Problem(what, remedy=remedy, place=str(job.plan.tier.root)))
            self._finished.append(replace(job.outcome, error=error))
        finished, self._finished = self._finished, []
        return finished

    def wait(self, *, at_most_seconds: float = math.inf) -> list[SaveOutcome]:
        """Until the save in flight has ended, or its time is over; then as `poll`."""
        self._land(at_most_seconds)
        return self.poll()

    def _land(self, at_most_seconds: float = math.inf) -> bool:
        """Collect the outcome of a save that has ended. False if one is still in flight."""
        if self._flight is None:
            return True
        left = max(0.0, min(at_most_seconds, self._deadline - time.monotonic()))
        with PULSE.excuse(left):
            self._thread.join(left)
        if self._thread.is_alive():
            return False
        self._finished.append(self._flight.outcome)
        self._flight = None
        return True


class SaveJob:
    """One attempt at a save as one rank sees it: write this rank's part; on rank 0, wait for the others and commit."""

    def __init__(self, plan: SavePlan, saver: Saver, attempt: int) -> None:
        self.plan, self.ranks, self._saver = plan, saver.ranks, saver
        self.root, self._writer, self._parts_root = plan.tier.root, plan.tier.writer, plan.tier.parts_root
        self._nonce = f"{saver.nonce}-{attempt}"
        """The same on all ranks, so that a part of another attempt is never taken for one of this."""
        self._spare = tuple(f"-{saver.nonce}-{number}" for number in (attempt, attempt - 1))
        """Ends of the names of folders in parts_root that may belong to saves in flight: rank 0 may still be completing
        the one before when this rank has long done its part."""
        self._texts = {STATE: json.dumps(dict(plan.state), indent=1), RECIPE: plan.recipe_yaml}
        self.final = self.root / folders.step_name(plan.step)
        self.staging_dir = self._writer.staging_dir
        self.draft = self.staging_dir / f".{self.final.name}-{self._nonce}.tmp"
        self.parts = self._parts_root / f"{self.final.name}-{self._nonce}" if self._parts_root else self.draft
        """Where this rank's tensor file is written."""
        never = StorageError(Problem(f"the save of step {plan.step} did not come to its end"))
        self.outcome = SaveOutcome(plan.step, self.final, saver.total_bytes, never)
        self._files: dict[str, FileFacts] = {}
        """Tensor files that are written: on rank 0 in the end those of all ranks."""
        self._trouble: dict[int, list[str]] = {}
        """What went wrong, by rank."""
        self._fenced = False

    def run(self) -> None:
        """In the thread: nothing may be raised there, because nobody would see it."""
        started = time.monotonic()
        try:
            self._saver.snapshot.queue.wait()
            if self.ranks.rank == 0:
                self._texts[INDEX] = self._saver.index
            self._write_part(self._saver.snapshot)
        except Exception as error:
            self._note(error)
        if self.ranks.rank > 0:
            files = {name: facts.model_dump() for name, facts in self._files.items()}
            self.report(files, self._trouble.get(self.ranks.rank))
        else:
            try:
                self.commit()
                self._retain()
            except Exception as error:
                self._note(error)
            if self._trouble:
                shutil.rmtree(self.draft, ignore_errors=True)  # a rank that still writes into it fails
        self.outcome.persist_seconds = time.monotonic() - started
        self.outcome.error = self._error() if self._trouble else None

    def report(self, files: Mapping[str, Any], trouble: list[str] | None) -> None:
        """To rank 0, which waits for it."""
        self.ranks.store_set(self._key_of(self.ranks.rank), [files, trouble, self._fenced])

    def commit(self) -> None:
        """Wait for all parts, complete the draft and give it its name. For rank 0."""
        self.wait_for_parts()
        if not self._trouble:
            with self._writer.acting():
                self._complete_draft()
            with self._writer.acting():
                self.publish()

    def _write_part(self, snapshot: HostSnapshot) -> None:
        """This rank's tensors."""
        name, layout = _tensor_file(self.ranks.rank), snapshot.layout
        try:
            with self._writer.acting():
                # A staging dir that is gone is not made again: what is beneath a lost mount is another place.
                self.draft.mkdir(parents=not self._writer.token, exist_ok=True)
                if self._parts_root is not None:
                    self._sweep_parts()
                    own_folder(self.parts)
                self._require_room(layout.file_bytes)
                if layout.data_bytes:
                    self._files[name] = write_file(self.parts / name, layout, snapshot.blocks())
                if self._parts_root is not None:
                    sync_folder(self.parts)  # elsewhere rank 0 does it for all, with the manifest
        except Exception:
            with contextlib.suppress(OSError):
                (self.parts / name).unlink(missing_ok=True)
            raise

    def _require_room(self, needed: int) -> None:
        """Before the first byte: rank 0 checks for all ranks if they share a disk, else each for itself. write_file
        then reserves it."""
        is_first = self.ranks.rank == 0
        if is_first and self._parts_root is None:
            needed = self.outcome.bytes + sum(map(len, self._texts.values()))
        if is_first and self.plan.retention is not None and shutil.disk_usage(self.parts).free < needed:
            with contextlib.suppress(OSError):  # the lack of room is reported instead
                self.outcome.removed += self.plan.retention.make_room()
                self._sweep_parts()
        if (free := shutil.disk_usage(self.parts).free) < needed:
            raise OSError(f"disk full: {format_bytes(free)} of {format_bytes(needed)} are free")

    def wait_for_parts(self) -> None:
        """Until all ranks have reported, one has failed, or the time is over, which is then noted.

        After a failure the others are waited for a little longer: what they write must not be left behind. Not so when
        a newer start has taken over, which sweeps what is left. FileNotFoundError where the draft is gone while nobody
        has failed: no report will ever come.
        """
        deadline, pause = time.monotonic() + _PATIENCE * self._saver.timeout_seconds, _FIRST_PAUSE_SECONDS
        missing = set(range(1, self.ranks.size))
        while True:
            for rank in sorted(missing):
                if (report := self.ranks.store_take(self._key_of(rank))) is not None:
                    files, trouble, fenced = report
                    missing.remove(rank)
                    self._files |= {name: FileFacts(**facts) for name, facts in files.items()}
                    self._trouble |= {rank: trouble} if trouble else {}
                    self._fenced |= fenced
            if self._trouble:
                deadline = min(deadline, time.monotonic() + (_GRACE_SECONDS if self.staging_dir.is_dir() else 0.0))
            elif missing:
                with self._writer.acting():
                    self.draft.stat()
            if not missing or time.monotonic() >= deadline:
                break
            time.sleep(min(pause, max(0.0, deadline - time.monotonic())))
            pause = min(2 * pause, _LONGEST_PAUSE_SECONDS)
        if missing and not self._trouble:
            patience = format_seconds(_PATIENCE * self._saver.timeout_seconds)
            text = f"its part did not arrive within {patience}: it hangs, or this is no folder that all ranks share"
            self._trouble = {rank: [text] for rank in missing}

    def _complete_draft(self) -> None:
        """All that a draft still lacks, the manifest last."""
        for name, facts in self._files.items():
            if self._parts_root is not None:
                os.symlink(self.parts.absolute() / name, self.draft / name)
            elif not (self.draft / name).exists():
                raise OSError(f"{name} is written but not here: this is no folder that all ranks share")
            elif (self.draft / name).stat().st_size != facts.bytes:
                raise OSError(f"{name} does not have the {facts.bytes:,} bytes that were written")
        for name, text in self._texts.items():
            _write_synced(self.draft / name, text)
        for path in filter(Path.exists, self.plan.after):
            with open(path, "rb") as file:
                sync(file.fileno())  # brings the file to the disk, whoever wrote it
        versions = {"bloomery": bloomery.__version__, "torch": torch.__version__}
        known = {"step": self.plan.step, "ranks": self.ranks.size, "versions": versions, **self.plan.facts}
        texts = {name: folders.facts_of(text) for name, text in self._texts.items()}
        folders.write_manifest(self.draft, known, self._files | texts)
        folders.read_manifest(self.draft)  # no save counts that the next start would refuse

    def publish(self) -> None:
        """Make the draft the checkpoint of its step, and the latest, by renames."""
        old = self.staging_dir / f".{self.final.name}-{self._nonce}.old"
        latest = self.staging_dir / f".tmp-{folders.LATEST}-{self._nonce}"
        if os.path.lexists(self.final):  # one of the same step, which this replaces
            os.rename(self.final, old)
        os.rename(self.draft, self.final)
        sync_folder(self.root)
        _write_synced(latest, self.final.name + "\n")
        os.replace(latest, self.root / folders.LATEST)
        sync_folder(self.root)
        remove_tree(old)

    def _retain(self) -> None:
        if self.plan.retention is not None and not self._trouble:
            try:
                self.outcome.removed += self.plan.retention.after_save(self.final)
            except OSError as error:
                self.outcome.retention_trouble = str(error)

    def _sweep_parts(self) -> None:
        if self._parts_root is not None:
            sweep_parts(self._parts_root, self.root, spare=self._spare)

    def _key_of(self, rank: int) -> str:
        return f"save/{self._nonce}/{rank}"

    def _note(self, error: Exception) -> None:
        """Remember what went wrong on this rank."""
        self._fenced |= isinstance(error, FencedError)
        texts = [reason(error) if isinstance(error, OSError) else f"{type(error).__name__}: {error}"]
        if isinstance(error, BloomeryError):
            texts = [str(problem) for problem in error.problems]
        self._trouble[self.ranks.rank] = texts

    def _error(self) -> StorageError:
        """The error that all ranks raise."""
        problems = []
        for rank, texts in sorted(self._trouble.items()):
            where = f" on rank {rank}" if self.ranks.size > 1 else ""
            what = f"the checkpoint of step {self.plan.step} could not be written{where}"
            problems += [Problem(f"{what}: {each}") for each in texts]
        *first, last = problems
        if self._fenced:
            return FencedError([*first, replace(last, remedy="stop this process: the newer one continues")])
        place, option = self.root, "--run-dir"
        if self._parts_root is not None:
            place, option = self._parts_root, "checkpoint.local.path"
        rule = f"{free_space(place)}, about {format_bytes(self.outcome.bytes)} are needed"
        gone = ", ".join(self.outcome.removed)
        older = f"{gone} had to go, as `keep` allows" if gone else "older checkpoints are untouched"
        advice = "make room, check the storage (`df`, `dmesg`, permissions; is it mounted?) or name another"
        remedy = f"{advice} {option}; {older}"
        return StorageError([*first, replace(last, rule=rule, remedy=remedy, place=str(place))])


def _tensor_file(rank: int) -> str:
    return f"tensors-{rank:05d}.safetensors"


def save_checkpoint(
    root: Path,
    *,
    step: int,
    pieces: Mapping[str, Piece],
    state: Mapping[str, Any],
    recipe_yaml: str,
    ranks: Ranks = ALONE,
    facts: Mapping[str, Any] | None = None,
    values: Callable[[str], Tensor] | None = None,
) -> Path:
    """An asynchronous save and a wait: the new folder, complete and named by `latest`. All ranks call it, and all of
    them return or raise StorageError; then nothing has changed. `values`: gives each tensor when its turn comes, for
    pieces on the meta device."""
    device = next((piece.tensor.device for piece in pieces.values()), torch.device("cpu"))
    saver = Saver(pieces, device=device, ranks=ranks, values=values)
    saver.stage()
    tier = Tier(Writer(root))
    plan = SavePlan(tier=tier, step=step, state=state, recipe_yaml=recipe_yaml, facts=facts or {})
    saver.persist(plan)
    outcome = saver.wait()[-1]
    raise_together(ranks, outcome.error)
    return outcome.folder


def raise_together(ranks: Ranks, error: StorageError | None) -> None:
    """Raise the error of the first rank that has one, on every rank. Collective."""
    found = next((each for each in ranks.gather(error) if each is not None), None)
    if found is not None:
        raise found.reported_once(ranks.rank)


def _write_synced(path: Path, text: str) -> None:
    """A file on the disk. Its name gets there with the manifest's, before anything but this save can see it."""
    with path.open("x") as file:
        file.write(text)
        file.flush()
        sync(file.fileno())


# ---------------------------------------------------------------- the snapshot


class HostSnapshot:
    """The bytes of a file of these tensors, in blocks of host memory that are allocated once and used again for every
    save. For a device they are allocated in a thread, which takes seconds in which the first step compiles."""

    def __init__(self, tensors: Mapping[str, Tensor], device: torch.device) -> None:
        self.layout = FileLayout.of(tensors)
        self.queue = CopyQueue(device)
        self._tensors, self._device = tensors, device
        self._allocated = in_background(self._allocate)
        if device.type == "cpu":
            self._allocated.result()

    def check(self) -> None:
        """Raise what kept the memory from being allocated, once that is known."""
        if self._allocated.done():
            self._allocated.result()

    def _allocate(self) -> list[Tensor]:
        starts = range(0, self.layout.data_bytes, _HOST_BLOCK_BYTES)
        sizes = [min(_HOST_BLOCK_BYTES, self.layout.data_bytes - start) for start in starts]
        return [host_memory(size, self._device) for size in sizes]

    @cached_property
    def _copies(self) -> tuple[list[Tensor], list[Tensor]]:
        """Targets and sources. Views are made once: made at every save they would cost it milliseconds."""
        targets: list[Tensor] = []
        sources: list[Tensor] = []
        position = 0
        for name in self.layout.order:
            tensor = self._tensors[name]
            parts = self._parts(position, tensor.nbytes)
            position += tensor.nbytes
            if len(parts) == 1:
                targets.append(parts[0].view(tensor.dtype).view(tensor.shape))
                sources.append(tensor)
            else:  # across blocks: only in bytes, so it must lie in one stretch, as weights and moments do
                targets += parts
                sources += as_bytes(tensor).split_with_sizes([len(part) for part in parts])
        return targets, sources

    @torch.no_grad()
    def take(self) -> None:
        """Copy the tensors as they are when the work queued so far is done."""
        targets, sources = self._copies
        with self.queue.after_all_so_far():
            if targets:  # a loop in C++: a third of the host's time
                torch._foreach_copy_(targets, sources, non_blocking=True)

    def blocks(self) -> Iterator[memoryview]:
        return (block.numpy().data for block in self._allocated.result())

    def _parts(self, position: int, count: int) -> list[Tensor]:
        """That many bytes from a position on."""
        parts, blocks = [], self._allocated.result()
        while count > 0:
            block, start = blocks[position // _HOST_BLOCK_BYTES], position % _HOST_BLOCK_BYTES
            parts.append(block[start : start + count])
            position, count = position + len(parts[-1]), count - len(parts[-1])
        return parts


class StreamedSnapshot(HostSnapshot):
    """Without memory: each tensor is made when its turn to be written comes, for pieces on the meta device."""

    def __init__(self, tensors: Mapping[str, Tensor], values: Callable[[str], Tensor]) -> None:
        self.layout = FileLayout.of(tensors)
        self.queue = CopyQueue(torch.device("cpu"))
        self._values = values

    def check(self) -> None: ...

    def take(self) -> None: ...

    def blocks(self) -> Iterator[memoryview]:
        return (raw_bytes(self._values(name)) for name in self.layout.order)
