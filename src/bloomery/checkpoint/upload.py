"""A second home for checkpoints, far away: any folder or URL that fsspec knows. Copied to behind training."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bloomery.base.bounded import LARGE_BYTES, parse_json, read_small
from bloomery.checkpoint import folder as folders
from bloomery.checkpoint.fence import FencedError, Writer
from bloomery.checkpoint.remote import ARRIVING, all_at_once, forget_marks, holds, retain_there, store_of, sweep_cut_off
from bloomery.config.recipe import KeepSection


@dataclass(frozen=True)
class UploadOutcome:
    step: int
    to: str
    seconds: float
    error: str = ""
    removed: tuple[str, ...] = ()
    """Older copies that were deleted there."""
    was_there: bool = False
    """Nothing was copied, because the very same lies there."""
    retention_trouble: str = ""
    """Why older copies could not be deleted; this one is complete."""


@dataclass(frozen=True)
class _Offer:
    folder: Path
    keep_all: bool


class Uploader:
    """Copies complete checkpoints, one at a time, in a thread. Of those that wait, only the newest is copied."""

    def __init__(
        self,
        to: str,
        *,
        run: str,
        every_steps: int | None = None,
        keep: KeepSection | None = None,
        writer: Writer | None = None,
    ) -> None:
        """`run`: its name. `keep`: which of its copies stay there; None: all."""
        self.to = to
        self._run = run
        self._every_steps = every_steps
        self._keep = keep
        self._writer = writer
        self._changed = threading.Condition()
        self._waiting: _Offer | None = None
        self._current: _Offer | None = None
        self._outcomes: list[UploadOutcome] = []

    def wants(self, folder: Path) -> bool:
        """Whether it is one of those that are copied, by its step."""
        return self._every_steps is None or folders.step_of(folder) % self._every_steps == 0

    def offer(self, folder: Path, *, keep_all: bool = False, final: bool = False) -> None:
        """A complete checkpoint. It must stay until `protected` no longer names its step. `keep_all`: delete nothing
        for it, because it may be worse than the older ones. `final`: the last one of the run, copied at any step."""
        if not (final or self.wants(folder)):
            return
        with self._changed:
            self._waiting = _Offer(folder, keep_all)
            if self._current is None:
                self._current, self._waiting = self._waiting, None
                threading.Thread(target=self._work, name="bloomery-upload", daemon=True).start()

    def protected(self) -> set[int]:
        """Steps that retention must leave alone for now."""
        with self._changed:
            return {folders.step_of(each.folder) for each in (self._current, self._waiting) if each is not None}

    def poll(self) -> list[UploadOutcome]:
        """What has come of uploads since the last call."""
        with self._changed:
            outcomes, self._outcomes = self._outcomes, []
        return outcomes

    def wait(self, at_most_seconds: float) -> list[UploadOutcome]:
        """Until nothing is on its way, or the time is over; then as `poll`."""
        with self._changed:
            self._changed.wait_for(lambda: self._current is None, at_most_seconds)
        return self.poll()

    def _work(self) -> None:
        while True:
            offer, started = self._current, time.monotonic()
            assert offer is not None
            step = folders.step_of(offer.folder)
            error, trouble, removed, was_there = "", "", [], False
            try:
                was_there = _upload(offer.folder, self.to, self._run, self._writer)
            except Exception as caught:  # whatever a store may raise: it is told, and training goes on
                error = f"{type(caught).__name__}: {caught}"
            seconds = time.monotonic() - started
            if self._keep is not None and not offer.keep_all and not error:
                try:
                    removed = retain_there(self.to, self._keep, step, self._run, self._writer)
                except Exception as caught:
                    trouble = f"{type(caught).__name__}: {caught}"
            with self._changed:
                self._outcomes.append(
                    UploadOutcome(step, self.to, seconds, error, tuple(removed), was_there, retention_trouble=trouble)
                )
                self._current, self._waiting = self._waiting, None
                self._changed.notify_all()
                if self._current is None:
                    return


def _upload(folder: Path, to: str, run: str, writer: Writer | None) -> bool:
    """The manifest goes last, so that a copy without one is debris there too; a mark that names its files goes first,
    so that the next copy can delete it. True: the very same was there already.

    Every change there is asked for: one that a newer start has made must not be touched by an older one."""
    require = writer.require if writer is not None else lambda: None
    store, path = store_of(to)
    place = f"{path}/{folder.name}"
    manifest = read_small(folder / folders.MANIFEST, LARGE_BYTES)
    if holds(store, place, manifest):
        return True
    require()
    sweep_cut_off(store, path, run, writer)
    forget_marks(store, place)  # of an older branch of the run
    store.makedirs(place, exist_ok=True)
    store.pipe_file(f"{place}/{ARRIVING}", manifest)
    try:
        files = parse_json(manifest)["files"]
        all_at_once([_putting(store, folder / name, f"{place}/{name}", require) for name in files])
        require()
        store.pipe_file(f"{place}/{folders.MANIFEST}", manifest)
    except FencedError:
        raise
    except Exception:
        with contextlib.suppress(Exception):  # else the next copy does it
            sweep_cut_off(store, path, run, writer)
        raise
    with contextlib.suppress(Exception):
        store.rm_file(f"{place}/{ARRIVING}")
    return False


def _putting(store: Any, source: Path, target: str, require: Callable[[], None]) -> Callable[[], None]:
    def put() -> None:
        require()
        if source.is_symlink():
            raise OSError(f"{source} is a link, which is not followed")
        store.put_file(str(source), target)

    return put
