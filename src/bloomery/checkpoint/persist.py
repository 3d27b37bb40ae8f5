"""Bring one save to the disk without a word between the ranks: each writes its part, rank 0 sees them and completes.

A part is a tensor file and, after it, a small `rank-00003.json` that says what it holds. When all of them are there,
rank 0 checks that together they are whole, writes the manifest last and gives the folder its name. A rank that fails
tells rank 0 without the storage, which may be what has failed.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Protocol

import torch

import bloomery
from bloomery.base.bounded import LARGE_BYTES, read_json
from bloomery.base.errors import BloomeryError, Problem, StorageError
from bloomery.base.ranks import ALONE, Ranks
from bloomery.base.storage import free_space, open_plain, own_folder, reason, remove_tree, sync, sync_folder
from bloomery.base.units import format_bytes, format_seconds
from bloomery.checkpoint import folder as folders
from bloomery.checkpoint.fence import FencedError, Writer
from bloomery.checkpoint.index import INDEX, RankReport, index_text, merge
from bloomery.checkpoint.manifest import RECIPE, STATE, facts_of, write_manifest
from bloomery.checkpoint.parts import PARTS, link_parts, sweep_parts
from bloomery.checkpoint.tensor_file import FileLayout, write_file

_FIRST_PAUSE_SECONDS = 0.005
_LONGEST_PAUSE_SECONDS = 1.0
_INDEX_BYTES = 256
"""Of index and manifest, for each tensor of a rank."""
_FULL = ("disk full", "ENOSPC", "EDQUOT")
_GRACE_SECONDS = 5.0
"""How long a failed save waits for ranks that are still writing."""


class Retention(Protocol):
    """What rank 0 deletes around a save; both return the names."""

    def make_room(self) -> list[str]:
        """Before the first byte, if the disk has no room for it."""
        ...

    def after_save(self, folder: Path) -> list[str]:
        """When the checkpoint is complete."""
        ...


@dataclass(frozen=True, kw_only=True)
class SavePlan:
    """A checkpoint that is due: where it goes, and all that is written beside its tensors."""

    root: Path
    step: int
    state: Mapping[str, Any]
    recipe_yaml: str
    facts: Mapping[str, Any] = field(default_factory=dict)
    """More for the manifest."""
    writer: Writer | None = None
    after: Sequence[Path] = ()
    """Files that must be on the disk before this save counts: records of the steps that it holds."""
    parts_root: Path | None = None
    """Folder on this node's disk for the tensor files (parts.py); None: they lie with all else."""
    retention: Retention | None = None


@dataclass(frozen=True, kw_only=True)
class SaveJob(SavePlan):
    """One save as one rank sees it."""

    rank: int
    ranks: int
    nonce: str
    """Of this attempt, the same on all ranks: a part of another attempt is never taken for one of this."""
    total_bytes: int
    """Of the files of all ranks."""
    state_text: str
    """As JSON: it must not change while the thread is at work."""
    timeout_seconds: float = 1800.0
    """How long rank 0 waits for the parts of the others."""
    spare: Collection[str] = ()
    """Folders in `parts_root` that belong to saves on their way."""
    told: Ranks = ALONE
    """Through whom a rank that fails tells rank 0."""
    removed: list[str] = field(default_factory=list)
    """Checkpoints that retention has deleted."""

    @classmethod
    def of(cls, plan: SavePlan, **more: Any) -> SaveJob:
        given = {each.name: getattr(plan, each.name) for each in fields(plan)}
        return cls(**given, **more, state_text=json.dumps(dict(plan.state), indent=1))

    @property
    def final(self) -> Path:
        return self.root / folders.step_name(self.step)

    def text_bytes(self, layout: FileLayout) -> int:
        """About what index, state, recipe and manifest will take."""
        return len(self.state_text) + len(self.recipe_yaml) + _INDEX_BYTES * (1 + len(layout.order)) * self.ranks

    @property
    def staging_dir(self) -> Path:
        return self.root if self.writer is None else self.writer.staging_dir

    @property
    def draft(self) -> Path:
        return self.staging_dir / f".{self.final.name}-{self.nonce}.tmp"

    @property
    def parts(self) -> Path:
        """Where this rank's tensor file is written."""
        return self.draft if self.parts_root is None else self.parts_root / f"{self.final.name}-{self.nonce}"

    def make_draft(self) -> None:
        """A staging dir that is gone is not made again: what is beneath a mount that vanished is another place."""
        self.draft.mkdir(parents=self.writer is None, exist_ok=True)

    def sweep_parts(self) -> None:
        """Delete what no checkpoint needs on this node's disk."""
        assert self.parts_root is not None
        sweep_parts(self.parts_root, folders.manifests_with_parts(self.root), spare={*self.spare, self.parts.name})

    def acting(self) -> contextlib.AbstractContextManager[None]:
        """Within it the trouble of a start that lost its staging dir to a newer one is a FencedError."""
        return contextlib.nullcontext() if self.writer is None else self.writer.acting()

    def word_of(self, rank: int) -> str:
        return f"save/{self.nonce}/{rank}"

    def done_file(self, rank: int) -> Path:
        return self.draft / f"rank-{rank:05d}.json"

    def failed(self, trouble: Trouble) -> StorageError:
        """The error that all ranks raise when some had this trouble."""
        problems = []
        for rank, texts in sorted(trouble.reasons.items()):
            on_rank = f" on rank {rank}" if self.ranks > 1 else ""
            problems += [f"the checkpoint of step {self.step} could not be written{on_rank}: {text}" for text in texts]
        rule, remedy = self._advice(trouble)
        if not trouble.fenced:
            gone = f"{', '.join(self.removed)} had to go, as `keep` allows"
            remedy = f"{remedy}; {gone if self.removed else 'older checkpoints are untouched'}"
        kind = FencedError if trouble.fenced else StorageError
        where = str(self.parts_root or self.root)
        return kind([*map(Problem, problems[:-1]), Problem(problems[-1], rule, remedy, where)])

    def _advice(self, trouble: Trouble) -> tuple[str, str]:
        """(rule, remedy)."""
        place = self.parts_root or self.root
        option = "--run-dir" if self.parts_root is None else "checkpoint.local.path"
        if trouble.fenced:
            return "", "stop this process: the newer start goes on"
        if not (place if self.parts_root else self.staging_dir).is_dir() and (self.writer or self.parts_root):
            rule = "the folder that this start took over is gone"
            return rule, "bring it back (is it mounted?), and saves go on, or start again"
        if any(word in text for texts in trouble.reasons.values() for text in texts for word in _FULL):
            rule = f"{free_space(place)}, about {format_bytes(self.total_bytes)} are needed"
            return rule, f"make room or name another {option}, then start again"
        return "", f"see to the storage (`df`, `dmesg`, its permissions) or name another {option}, then start again"


@dataclass(frozen=True)
class Trouble:
    """What went wrong with a save, by rank, as plain values."""

    reasons: dict[int, list[str]]
    fenced: bool = False

    @classmethod
    def of(cls, error: BaseException, rank: int) -> Trouble:
        if isinstance(error, PartsError):
            return error.trouble
        return cls({rank: _reasons(error)}, isinstance(error, FencedError))

    @classmethod
    def sum(cls, troubles: Iterable[Trouble]) -> Trouble:
        found = list(troubles)
        return cls({rank: texts for one in found for rank, texts in one.reasons.items()}, any(t.fenced for t in found))


class PartsError(Exception):
    """Ranks have failed to deliver their parts."""

    def __init__(self, trouble: Trouble) -> None:
        super().__init__(trouble)
        self.trouble = trouble


def write_part(job: SaveJob, held: RankReport, layout: FileLayout, blocks: Iterable[memoryview]) -> None:
    """This rank's tensors and the word that they are there. What goes wrong is told to rank 0, and raised."""
    name = f"tensors-{job.rank:05d}.safetensors"
    try:
        with job.acting():
            job.make_draft()
            if job.parts_root is not None:
                job.sweep_parts()
                own_folder(job.parts)
            _require_room(job, layout)
            facts = write_file(job.parts / name, layout, blocks) if layout.data_bytes else None
            if job.parts_root is not None:
                sync_folder(job.parts)  # elsewhere rank 0 does it for all, with the manifest
            done = replace(held, file=name if facts else "", facts=facts)
            _tell(job, done.to_json())
    except Exception as error:
        job.told.tell(job.word_of(job.rank), [_reasons(error), isinstance(error, FencedError)])
        with contextlib.suppress(OSError):
            (job.parts / name).unlink(missing_ok=True)
        raise


def complete(job: SaveJob, mine: Exception | None = None) -> Path:
    """Wait for all parts, make the draft whole and give it its name: for rank 0, whose own part failed with `mine`.
    PartsError names the ranks that failed or never came; the draft is the caller's to remove."""
    reports = _wait_for_parts(job, [] if mine is None else [Trouble.of(mine, 0)])
    with job.acting():
        _make_whole(job, reports)
    with job.acting():
        _name(job)
    return job.final


def _make_whole(job: SaveJob, reports: Sequence[RankReport]) -> None:
    """All that a draft still lacks, the manifest last."""
    texts = {
        INDEX: index_text(merge(reports)),
        STATE: job.state_text,
        RECIPE: job.recipe_yaml,
    }
    for name, text in texts.items():
        _write(job.draft / name, text)
    for rank in range(job.ranks):
        job.done_file(rank).unlink()
    files = {told.file: told.facts for told in reports if told.facts is not None}
    where = {}
    if job.parts_root is not None:
        link_parts(job.draft, job.parts.absolute(), files)
        where = {PARTS: str(job.parts.absolute())}
    files |= {name: facts_of(text) for name, text in texts.items()}
    for name, found in files.items():
        if not where and (job.draft / name).stat().st_size != found.bytes:
            raise OSError(f"{name} does not have the {found.bytes:,} bytes that were written")
    for path in job.after:
        _sync(path)
    versions = {"bloomery": bloomery.__version__, "torch": torch.__version__}
    facts = {"step": job.step, "ranks": job.ranks, "versions": versions, **where, **job.facts}
    write_manifest(job.draft, facts, files)


def _name(job: SaveJob) -> None:
    """Let the draft be the checkpoint of its step, and the latest."""
    old = job.staging_dir / f".{job.final.name}-{job.nonce}.old"
    latest = job.staging_dir / f".tmp-{folders.LATEST}-{job.nonce}"
    if os.path.lexists(job.final):  # one of the same step, which this replaces
        os.rename(job.final, old)
    os.rename(job.draft, job.final)
    sync_folder(job.root)
    _write(latest, job.final.name + "\n")
    os.replace(latest, job.root / folders.LATEST)
    sync_folder(job.root)
    remove_tree(old)


def _tell(job: SaveJob, word: Mapping[str, Any]) -> None:
    """Say what came of this rank's part. Readers see all of it or nothing; it need not outlive a power cut."""
    path = job.done_file(job.rank)
    hidden = path.with_name(f".{path.name}")
    with open(hidden, "w", opener=open_plain) as file:
        file.write(json.dumps(word))
    os.replace(hidden, path)


def _write(path: Path, text: str) -> None:
    """A file on the disk. Its name gets there with the manifest's, before anything but this save can see it."""
    with path.open("x") as file:
        file.write(text)
        file.flush()
        sync(file.fileno())


def abandon(job: SaveJob) -> None:
    """Remove what a failed save has left. A rank that still writes into it fails, and its word is lost with it."""
    shutil.rmtree(job.draft, ignore_errors=True)


def _reasons(error: BaseException) -> list[str]:
    if isinstance(error, BloomeryError):
        return [str(problem) for problem in error.problems]
    if isinstance(error, OSError) and error.errno is not None:
        return [reason(error)]
    return [str(error) if isinstance(error, OSError) else f"{type(error).__name__}: {error}"]


def _require_room(job: SaveJob, layout: FileLayout) -> None:
    """Before the first byte: rank 0 asks for all of them if they share a disk, each rank for itself;
    `reserve` then takes it for real."""
    needed = job.total_bytes + job.text_bytes(layout) if job.rank == 0 and job.parts_root is None else layout.file_bytes
    free = shutil.disk_usage(job.parts).free
    if free < needed and job.retention is not None and job.rank == 0:
        with contextlib.suppress(OSError):  # the trouble to report is the lack of room
            job.removed.extend(job.retention.make_room())
            if job.parts_root is not None:
                job.sweep_parts()
        free = shutil.disk_usage(job.parts).free
    if free < needed:
        raise OSError(f"disk full: {format_bytes(free)} of {format_bytes(needed)} are free")


def _wait_for_parts(job: SaveJob, troubles: list[Trouble]) -> list[RankReport]:
    """Every rank's word. PartsError when one has failed, or when patience ends.

    After a failure the others are still waited for, for a while: what they write must not be left behind. Not so when
    a newer start has taken over: it sweeps what is left, and an older one may have lost the folder of its draft.
    FileNotFoundError where the draft is gone while nobody has failed: no word will ever come.
    """
    deadline = time.monotonic() + job.timeout_seconds
    pause = _FIRST_PAUSE_SECONDS
    missing = set(range(job.ranks)) - {rank for trouble in troubles for rank in trouble.reasons}
    found: dict[int, RankReport] = {}
    while True:
        for rank in sorted(missing):
            if (told := _read_part(job.done_file(rank))) is not None:
                missing.remove(rank)
                found[rank] = RankReport.from_json(told)
            elif (word := job.told.told(job.word_of(rank))) is not None:
                missing.remove(rank)
                troubles.append(Trouble({rank: word[0]}, word[1]))
        if missing:
            with job.acting():
                if not troubles:
                    job.draft.stat()
        if troubles:
            grace = _GRACE_SECONDS if job.staging_dir.is_dir() else 0.0
            deadline = min(deadline, time.monotonic() + grace)
        if not missing or time.monotonic() >= deadline:
            break
        time.sleep(min(pause, max(0.0, deadline - time.monotonic())))
        pause = min(2 * pause, _LONGEST_PAUSE_SECONDS)
    if missing and not troubles:
        patience = format_seconds(job.timeout_seconds)
        text = f"its part did not come within {patience}: it hangs, or this is no folder that all ranks share"
        troubles.append(Trouble({rank: [text] for rank in missing}))
    if troubles:
        raise PartsError(Trouble.sum(troubles))
    return [found[rank] for rank in range(job.ranks)]


def _sync(path: Path) -> None:
    with contextlib.suppress(FileNotFoundError):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            sync(descriptor)  # brings the file to the disk, whoever wrote it
        finally:
            os.close(descriptor)


def _read_part(path: Path) -> dict[str, Any] | None:
    try:
        told: dict[str, Any] = read_json(path, LARGE_BYTES)
    except FileNotFoundError:
        return None
    return told
