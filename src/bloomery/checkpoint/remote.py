"""Remote checkpoints: copies in any store that fsspec knows, uploaded while training continues, fetched by a start.

A copy is complete if its manifest is there: uploads write it last, deletions remove it first. Only folders whose
manifest is one of this run are ever changed. What an interrupted upload or deletion leaves has no manifest; a lifecycle
rule of the bucket may remove it.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import Any, TypeVar

from bloomery.base.bounded import LARGE_BYTES, read_small
from bloomery.base.errors import DataError, Problem
from bloomery.base.ranks import ALONE, Ranks, first_rank_does
from bloomery.base.storage import own_folder, remove_tree
from bloomery.checkpoint import folder as folders
from bloomery.checkpoint.folder import Writer
from bloomery.checkpoint.format import MANIFEST, parse_manifest, read_manifest
from bloomery.checkpoint.load import damage
from bloomery.checkpoint.retention import kept_by
from bloomery.config.recipe import KeepSection
from bloomery.monitor.history import Start

T = TypeVar("T")
_FILES_AT_A_TIME = 8


@dataclass(frozen=True)
class RemoteCheckpoint:
    path: str
    """In its store."""
    step: int
    content: bytes
    """Of its manifest."""
    sizes: Mapping[str, int]
    """Of the files that are there."""

    @property
    def name(self) -> str:
        return folders.step_name(self.step)

    @cached_property
    def manifest(self) -> dict[str, Any] | None:
        """None if it is not that of a checkpoint of this step."""
        try:
            found = parse_manifest(self.content)
        except ValueError:
            return None
        return found if found["step"] == self.step else None

    @property
    def saved_at(self) -> float:
        return float((self.manifest or {}).get("time") or 0.0)

    def is_of(self, run: str) -> bool:
        return self.manifest is not None and self.manifest.get("run", run) == run

    def is_whole(self) -> bool:
        files = self.manifest["files"] if self.manifest else {}
        return bool(files) and all(self.sizes.get(file) == facts["bytes"] for file, facts in files.items())

    def is_stale(self, starts: Sequence[Start]) -> bool:
        """Whether a start after the one that saved it began from an earlier step: its branch was abandoned. Of one that
        was saved from another folder nobody here knows."""
        saved_by = [n for n, start in enumerate(starts) if start.token == (self.manifest or {}).get("start")]
        return bool(saved_by) and any(start.step < self.step for start in starts[saved_by[-1] + 1 :])


def open_store(url: str) -> tuple[Any, str]:
    """(fsspec's file system, path in it)."""
    import fsspec  # type: ignore[import-untyped]

    store, path = fsspec.core.url_to_fs(url)
    store.invalidate_cache()
    return store, str(path).rstrip("/")


def _is_link(store: Any, path: str) -> bool:
    """Of a store that is a local folder: nothing there is read or written through a link."""
    return "file" in store.protocol and os.path.islink(path)


def list_remote(url: str) -> list[RemoteCheckpoint]:
    """All that have a manifest, by step."""
    store, root = open_store(url)
    if not store.exists(root):
        return []
    names = {entry.rstrip("/").rsplit("/", 1)[-1] for entry in store.ls(root, detail=False)}
    found = [_read_remote(store, f"{root}/{name}") for name in sorted(filter(folders.is_step_name, names))]
    return sorted((each for each in found if each is not None), key=lambda each: each.step)


def _read_remote(store: Any, path: str) -> RemoteCheckpoint | None:
    if _is_link(store, path):
        return None
    try:
        sizes = {entry["name"].rsplit("/", 1)[-1]: entry["size"] or 0 for entry in store.ls(path, detail=True)}
        if MANIFEST not in sizes:
            return None
        is_bounded = sizes[MANIFEST] <= LARGE_BYTES
        content = store.cat_file(f"{path}/{MANIFEST}") if is_bounded else b""
    except (FileNotFoundError, NotADirectoryError):  # deleted meanwhile, or a file in the way
        return None
    return RemoteCheckpoint(path, folders.step_of(Path(path)), content, sizes)


# ---------------------------------------------------------------- upload


@dataclass(frozen=True)
class UploadOutcome:
    step: int
    to: str
    seconds: float
    error: str = ""
    removed: tuple[str, ...] = ()
    """Older copies that were deleted there."""
    was_there: bool = False
    """Nothing was copied, because the same one lies there."""
    retention_trouble: str = ""
    """Why older copies could not be deleted; this one is complete."""


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
        self._run, self._every_steps, self._keep, self._writer = run, every_steps, keep, writer
        self._changed = threading.Condition()
        self._waiting: tuple[Path, bool] | None = None
        """(checkpoint, whether to delete nothing for it), like the one that is being copied."""
        self._current: tuple[Path, bool] | None = None
        self._outcomes: list[UploadOutcome] = []

    def offer(self, folder: Path, *, keep_all: bool = False, final: bool = False) -> bool:
        """Copy a complete checkpoint if it is due by its step. It must stay until `protected` no longer names its step.
        `keep_all`: delete nothing for it, because it may be worse than older ones. `final`: the last one of the run,
        copied at any step."""
        if not final and self._every_steps is not None and folders.step_of(folder) % self._every_steps:
            return False
        with self._changed:
            self._waiting = folder, keep_all
            if self._current is None:
                self._current, self._waiting = self._waiting, None
                threading.Thread(
                    target=self._work, args=[folder, keep_all], name="bloomery-upload", daemon=True
                ).start()
        return True

    def offer_newest(self, root: Path, *, train_steps: int) -> None:
        """The newest local checkpoint that is due: an earlier job may have failed to copy it."""
        newest_first = reversed(folders.complete_checkpoints(root))
        any(self.offer(each, keep_all=True, final=folders.step_of(each) >= train_steps) for each in newest_first)

    def protected(self) -> set[int]:
        """Steps that retention must not delete for now."""
        with self._changed:
            return {folders.step_of(each[0]) for each in (self._current, self._waiting) if each is not None}

    def poll(self) -> list[UploadOutcome]:
        """How uploads since the last call have ended."""
        with self._changed:
            outcomes, self._outcomes = self._outcomes, []
        return outcomes

    def wait(self, at_most_seconds: float) -> list[UploadOutcome]:
        """Until no upload is in flight, or the time is over; then as `poll`."""
        with self._changed:
            self._changed.wait_for(lambda: self._current is None, at_most_seconds)
        return self.poll()

    def _work(self, folder: Path, keep_all: bool) -> None:
        while True:
            outcome = self._copy(folder, keep_all)
            with self._changed:
                self._outcomes.append(outcome)
                self._current, self._waiting = self._waiting, None
                self._changed.notify_all()
                if self._current is None:
                    return
                folder, keep_all = self._current

    def _copy(self, folder: Path, keep_all: bool) -> UploadOutcome:
        step, started = folders.step_of(folder), time.monotonic()
        error, trouble, removed, was_there = "", "", [], False
        try:
            was_there = upload(folder, self.to, self._writer)
        except Exception as caught:  # whatever a store may raise: it is reported, and training continues
            error = f"{type(caught).__name__}: {caught}"
        seconds = time.monotonic() - started
        if self._keep is not None and not keep_all and not error:
            try:
                removed = apply_remote_retention(self.to, self._keep, step, self._run, self._writer)
            except Exception as caught:
                trouble = f"{type(caught).__name__}: {caught}"
        return UploadOutcome(step, self.to, seconds, error, tuple(removed), was_there, trouble)


def upload(folder: Path, to: str, writer: Writer | None = None) -> bool:
    """Copy a checkpoint, its manifest last. True: the same one was there already. FencedError, before any change there,
    if a newer start has taken over."""
    store, root = open_store(to)
    path = f"{root}/{folder.name}"
    content = read_small(folder / MANIFEST, LARGE_BYTES)
    there = _read_remote(store, path)
    if there is not None and there.content == content and there.is_whole():
        return True
    _require(writer)
    if _is_link(store, path):
        raise OSError(f"{path} is a link, which is not followed")
    if there is not None:  # of another branch of the run: no longer complete
        store.rm_file(f"{path}/{MANIFEST}")
    store.makedirs(path, exist_ok=True)
    for file in store.ls(path, detail=False) if "file" in store.protocol else ():
        if os.path.islink(file):
            os.unlink(file)
    _at_once(partial(_put, store, path, folder, writer), parse_manifest(content)["files"])
    _require(writer)
    store.pipe_file(f"{path}/{MANIFEST}", content)
    return False


def _put(store: Any, path: str, folder: Path, writer: Writer | None, file: str) -> None:
    _require(writer)
    if (folder / file).is_symlink():
        raise OSError(f"{folder / file} is a link, which is not followed")
    store.put_file(str(folder / file), f"{path}/{file}")


def _require(writer: Writer | None) -> None:
    if writer is not None:
        writer.require()


def apply_remote_retention(
    url: str, keep: KeepSection, newest: int, run: str, writer: Writer | None = None
) -> list[str]:
    """Delete there what `keep` does not name, now that the checkpoint of step `newest` has arrived; the names.

    Never touches that one, later ones, which belong to another branch, nor those of another run. OSError, and nothing
    is deleted, if it is not whole there.
    """
    store, _ = open_store(url)
    found = {each.step: each for each in list_remote(url) if each.is_of(run) and each.step <= newest}
    if newest not in found or not found[newest].is_whole():
        raise OSError(f"{folders.step_name(newest)} is not complete in {url}, so nothing older was deleted there")
    manifests = {step: each.manifest or {} for step, each in found.items()}
    doomed = sorted(found.keys() - kept_by(manifests, keep))
    for step in doomed:
        _require(writer)
        for file in (MANIFEST, *manifests[step]["files"]):
            with contextlib.suppress(FileNotFoundError):
                store.rm_file(f"{found[step].path}/{file}")
        with contextlib.suppress(Exception):  # a store without folders has none to remove, and a file of a user stays
            store.rmdir(found[step].path)
    return [found[step].name for step in doomed]


# ---------------------------------------------------------------- fetch


@dataclass(frozen=True)
class Fetched:
    folder: Path | None = None
    """None: nothing newer that is whole lies there."""
    damaged: Mapping[str, list[str]] = field(default_factory=dict)
    """Newer ones there that cannot be used, by URL, and why."""
    put_aside: str = ""
    """The new name of the damaged local checkpoint whose name it took; empty if there was none."""


@dataclass(frozen=True)
class RemoteSource:
    """Where a start may fetch checkpoints from. All ranks call its methods together."""

    url: str
    root: Path
    """Where fetched checkpoints go."""
    run: str
    """Its name."""
    starts: Sequence[Start] = ()
    """Of this run folder, which know abandoned branches."""
    ranks: Ranks = ALONE

    def fetch_newer(self, local: Path | None) -> Fetched:
        """The newest that is whole and was saved after the `local` one. DataError if the place cannot be read or holds
        copies of another run."""
        after = float(read_manifest(local).get("time") or 0.0) if local else -1.0
        step = folders.step_of(local) if local else -1

        def is_newer(each: RemoteCheckpoint) -> bool:
            if each.manifest is None:
                return each.step > step
            return each.saved_at > after and not each.is_stale(self.starts)

        return self._fetch(is_newer)

    def fetch_named(self, name: str, roots: Sequence[Path]) -> Fetched:
        """The one that a user names, if it is there and not here."""
        wanted = folders.name_of(name)
        is_here = any(path.name == wanted for root in roots for path in folders.complete_checkpoints(root))
        if not folders.is_step_name(wanted) or self.ranks.broadcast(is_here):
            return Fetched()
        return self._fetch(lambda each: each.name == wanted)

    def _fetch(self, is_wanted: Callable[[RemoteCheckpoint], bool]) -> Fetched:
        """The one that was saved last: a branch that began from an earlier step wins over the one it abandoned."""
        damaged: dict[str, list[str]] = {}
        for candidate in first_rank_does(self.ranks, lambda: self._candidates(is_wanted)):
            staging = self.root / f".{candidate.name}-fetch.tmp"
            if wrong := self._download(candidate, staging):
                damaged[f"{self.url.rstrip('/')}/{candidate.name}"] = wrong
                continue
            final = self.root / candidate.name
            aside = first_rank_does(self.ranks, partial(_publish, staging, final))  # all see it only under its name
            return Fetched(final, damaged, aside)
        return Fetched(None, damaged)

    def _candidates(self, is_wanted: Callable[[RemoteCheckpoint], bool]) -> list[RemoteCheckpoint]:
        try:
            found = list_remote(self.url)
        except Exception as error:  # whatever a store may raise
            raise self._unreachable([f"{type(error).__name__}: {error}"]) from error
        for each in found:
            if each.manifest is not None and not each.is_of(self.run):
                other = each.manifest["run"]
                what = f"{self.url}: {each.name} is of the run {other!r}, and this is {self.run!r}"
                rule = "every run has a place of its own for its copies"
                remedy = f"use another checkpoint.upload.to, or name={other} to resume that run"
                raise DataError(Problem(what, rule, remedy))
        wanted = filter(is_wanted, found)
        return sorted(wanted, key=lambda each: (each.manifest is None, each.saved_at, each.step), reverse=True)

    def _download(self, remote: RemoteCheckpoint, staging: Path) -> list[str]:
        """Copy one into an empty folder and verify it there; what is wrong with it. DataError if it cannot be read."""
        if remote.manifest is None:
            return [f"{MANIFEST} is not that of a checkpoint of step {remote.step}"]
        ranks, trouble = self.ranks, ""
        if ranks.rank == 0:
            remove_tree(staging)  # of a start that was killed
        ranks.gather(None)
        try:
            own_folder(staging, parents=True)
            store, _ = open_store(self.url)
            _at_once(
                partial(_get, store, remote.path, staging), sorted(remote.manifest["files"])[ranks.rank :: ranks.size]
            )
            if ranks.rank == 0:
                (staging / MANIFEST).write_bytes(remote.content)
        except Exception as caught:  # whatever a store may raise
            trouble = f"{type(caught).__name__}: {caught}"
        errors = [text for text in ranks.gather(trouble) if text]
        wrong = errors or damage(staging, ranks=ranks)
        if wrong and ranks.rank == 0:
            remove_tree(staging)
        if errors:
            raise self._unreachable(errors)
        return wrong

    def _unreachable(self, errors: Sequence[str]) -> DataError:
        rule = "a newer checkpoint may be there"
        remedy = "fix the connection, or start without it: checkpoint.upload=null"
        texts = [f"checkpoints at {self.url} cannot be read: {error}" for error in errors]
        return DataError([Problem(text, rule, remedy) for text in texts])


def _publish(staging: Path, final: Path) -> str:
    """Give what was fetched its name; the new name of the damaged checkpoint that had it, if one had."""
    aside = folders.quarantine(final).name if os.path.lexists(final) else ""
    staging.rename(final)
    return aside


def _get(store: Any, path: str, folder: Path, file: str) -> None:
    with contextlib.suppress(FileNotFoundError):  # that it is missing is found by `damage`
        store.get_file(f"{path}/{file}", str(folder / file))


def _at_once(function: Callable[[str], T], files: Collection[str]) -> list[T]:
    with ThreadPoolExecutor(_FILES_AT_A_TIME) as pool:
        return [done.result() for done in [pool.submit(function, file) for file in files]]
