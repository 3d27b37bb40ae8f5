"""Remote checkpoints: copies in any store that fsspec knows, uploaded behind training, fetched when a start needs one.

A copy is complete if its manifest is there: uploads write it last, deletions remove it first. Only folders whose
manifest is one of this run are ever changed. What an upload or a deletion that was cut off leaves has no manifest;
a lifecycle rule of the bucket may remove it.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, TypeVar

from bloomery.base.bounded import LARGE_BYTES, read_small
from bloomery.base.errors import DataError, Problem
from bloomery.base.ranks import ALONE, Ranks, first_rank_does
from bloomery.base.storage import own_folder, remove_tree
from bloomery.checkpoint import folder as folders
from bloomery.checkpoint.fence import Writer
from bloomery.checkpoint.manifest import SUSPICIOUS, parse_manifest, read_manifest
from bloomery.checkpoint.retention import loss_at
from bloomery.config.recipe import KeepSection
from bloomery.monitor.history import Start
from bloomery.sizing.saves import kept_steps

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
        if folders.MANIFEST not in sizes:
            return None
        is_bounded = sizes[folders.MANIFEST] <= LARGE_BYTES
        content = store.cat_file(f"{path}/{folders.MANIFEST}") if is_bounded else b""
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

    def offer_newest(self, root: Path, *, train_steps: int) -> None:
        """The newest checkpoint here that should be there: an earlier job may have failed to copy it."""
        for folder in reversed(folders.complete_checkpoints(root)):
            is_final = folders.step_of(folder) >= train_steps
            if is_final or self.wants(folder):
                self.offer(folder, keep_all=True, final=is_final)
                return

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
            offer = self._current
            assert offer is not None
            outcome = self._copy(offer)
            with self._changed:
                self._outcomes.append(outcome)
                self._current, self._waiting = self._waiting, None
                self._changed.notify_all()
                if self._current is None:
                    return

    def _copy(self, offer: _Offer) -> UploadOutcome:
        step, started = folders.step_of(offer.folder), time.monotonic()
        error, trouble, removed, was_there = "", "", [], False
        try:
            was_there = upload(offer.folder, self.to, self._writer)
        except Exception as caught:  # whatever a store may raise: it is reported, and training continues
            error = f"{type(caught).__name__}: {caught}"
        seconds = time.monotonic() - started
        if self._keep is not None and not offer.keep_all and not error:
            try:
                removed = apply_remote_retention(self.to, self._keep, step, self._run, self._writer)
            except Exception as caught:
                trouble = f"{type(caught).__name__}: {caught}"
        return UploadOutcome(step, self.to, seconds, error, tuple(removed), was_there, trouble)


def upload(folder: Path, to: str, writer: Writer | None = None) -> bool:
    """Copy a checkpoint, its manifest last. True: the very same was there already. FencedError before any change there
    that a start makes which a newer one has replaced."""
    require = writer.require if writer is not None else lambda: None
    store, root = open_store(to)
    path = f"{root}/{folder.name}"
    content = read_small(folder / folders.MANIFEST, LARGE_BYTES)
    there = _read_remote(store, path)
    if there is not None and there.content == content and there.is_whole():
        return True
    require()
    if _is_link(store, path):
        raise OSError(f"{path} is a link, which is not followed")
    if there is not None:  # of another branch of the run: no longer complete
        store.rm_file(f"{path}/{folders.MANIFEST}")
    store.makedirs(path, exist_ok=True)
    for file in store.ls(path, detail=False) if "file" in store.protocol else ():
        if os.path.islink(file):
            os.unlink(file)

    def put(file: str) -> None:
        require()
        if (folder / file).is_symlink():
            raise OSError(f"{folder / file} is a link, which is not followed")
        store.put_file(str(folder / file), f"{path}/{file}")

    _at_once(put, parse_manifest(content)["files"])
    require()
    store.pipe_file(f"{path}/{folders.MANIFEST}", content)
    return False


def apply_remote_retention(
    url: str, keep: KeepSection, newest: int, run: str, writer: Writer | None = None
) -> list[str]:
    """Delete there what `keep` does not ask for, now that the checkpoint of step `newest` has arrived; the names.

    Never touches that one, later ones, which belong to another branch, nor those of another run. OSError, and nothing
    is deleted, if it is not whole there.
    """
    store, _ = open_store(url)
    found = {each.step: each for each in list_remote(url) if each.is_of(run) and each.step <= newest}
    if newest not in found or not found[newest].is_whole():
        raise OSError(f"{folders.step_name(newest)} is not whole in {url}, so nothing older was deleted there")
    manifests = {step: each.manifest or {} for step, each in found.items()}
    losses = {step: loss for step, manifest in manifests.items() if (loss := loss_at(manifest, step)) is not None}
    suspicious = {step for step, manifest in manifests.items() if manifest.get(SUSPICIOUS)}
    doomed = sorted(found.keys() - kept_steps(list(found), keep, losses, suspicious))
    for step in doomed:
        if writer is not None:
            writer.require()
        for file in (folders.MANIFEST, *manifests[step]["files"]):
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
    damaged: dict[str, list[str]] = field(default_factory=dict)
    """Newer ones there that cannot be used, by name, and why."""
    put_aside: str = ""
    """The new name of the damaged local checkpoint whose place it took; empty if there was none."""
    reasons: Sequence[str] = ()
    """What was wrong with that one."""


@dataclass
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
    fetched: Fetched = field(default_factory=Fetched)
    """What has come of the last call."""

    def fetch_newer(self, local: Path | None, damaged: Mapping[Path, list[str]]) -> Path | None:
        """The newest that is whole and was saved after the `local` one. DataError if the place cannot be read, holds
        copies of another run, or if there is no local one and all that lie here and there are damaged."""
        after = float(read_manifest(local).get("time") or 0.0) if local else -1.0
        step = folders.step_of(local) if local else -1

        def is_newer(each: RemoteCheckpoint) -> bool:
            if each.manifest is None:
                return each.step > step
            return each.saved_at > after and not each.is_stale(self.starts)

        found = self._fetch(is_newer)
        if found.folder is None and found.damaged and local is None:
            here = [Problem(text, place=str(path)) for path, texts in damaged.items() for text in texts]
            there = [Problem(text, place=self.place(name)) for name, texts in found.damaged.items() for text in texts]
            remedy = "restore one from a backup, or move them away to start from the beginning"
            what = "all checkpoints of this run are damaged, also the remote ones"
            raise DataError([*here, *there, Problem(what, remedy=remedy)])
        if found.folder is not None:
            self.fetched = replace(found, reasons=damaged.get(found.folder, ()))
        return found.folder

    def fetch_named(self, name: str, roots: Sequence[Path]) -> None:
        """The one that a user names, if it is there and not here."""
        wanted = folders.name_of(name)
        is_here = any(path.name == wanted for root in roots for path in folders.complete_checkpoints(root))
        if folders.is_step_name(wanted) and not self.ranks.broadcast(is_here):
            self._fetch(lambda each: each.name == wanted)

    def place(self, name: str) -> str:
        return f"{self.url.rstrip('/')}/{name}"

    def _fetch(self, is_wanted: Callable[[RemoteCheckpoint], bool]) -> Fetched:
        """The one that was saved last: a branch that began from an earlier step wins over the one it abandoned."""
        damaged: dict[str, list[str]] = {}
        for candidate in first_rank_does(self.ranks, lambda: self._candidates(is_wanted)):
            staging = self.root / f".{candidate.name}-fetch.tmp"
            if wrong := self._download(candidate, staging):
                damaged[candidate.name] = wrong
                continue
            final = self.root / candidate.name
            aside = first_rank_does(
                self.ranks, partial(_publish, staging, final)
            )  # nobody looks before it has its name
            self.fetched = Fetched(final, damaged, aside)
            return self.fetched
        self.fetched = Fetched(None, damaged)
        return self.fetched

    def _candidates(self, is_wanted: Callable[[RemoteCheckpoint], bool]) -> list[RemoteCheckpoint]:
        try:
            found = list_remote(self.url)
        except Exception as error:  # whatever a store may raise
            raise self._unreachable([f"{type(error).__name__}: {error}"]) from error
        for each in found:
            if each.manifest is not None and not each.is_of(self.run):
                other = each.manifest["run"]
                what = f"{self.place(each.name)} is of the run {other!r}, and this is {self.run!r}"
                rule = "every run has a place of its own for its copies"
                remedy = f"use another checkpoint.upload.to, or name={other} to resume that run"
                raise DataError(Problem(what, rule, remedy))
        wanted = filter(is_wanted, found)
        return sorted(wanted, key=lambda each: (each.manifest is None, each.saved_at, each.step), reverse=True)

    def _download(self, remote: RemoteCheckpoint, staging: Path) -> list[str]:
        """Copy one into an empty folder and verify it there; what is wrong with it. DataError if it cannot be read."""
        if remote.manifest is None:
            return [f"{folders.MANIFEST} is not that of a checkpoint of step {remote.step}"]
        ranks, trouble, missing = self.ranks, "", []
        if ranks.rank == 0:
            remove_tree(staging)  # of a start that was killed
        ranks.gather(None)
        try:
            own_folder(staging, parents=True)
            store, _ = open_store(self.url)
            files = sorted(remote.manifest["files"])[ranks.rank :: ranks.size]
            got = _at_once(partial(_get, store, remote.path, staging), files)
            missing = [f"{file} is missing" for file, is_there in zip(files, got, strict=True) if not is_there]
            if ranks.rank == 0:
                (staging / folders.MANIFEST).write_bytes(remote.content)
        except Exception as caught:  # whatever a store may raise
            trouble = f"{type(caught).__name__}: {caught}"
        reports = ranks.gather((trouble, missing))
        errors, wrong = [text for text, _ in reports if text], sorted(text for _, texts in reports for text in texts)
        wrong = wrong or ([] if errors else folders.damage(staging, ranks=ranks))
        if (errors or wrong) and ranks.rank == 0:
            remove_tree(staging)
        if errors:
            raise self._unreachable(errors)
        return wrong

    def _unreachable(self, errors: Sequence[str]) -> DataError:
        rule = "a newer checkpoint may lie there"
        remedy = "fix the connection, or start without it: checkpoint.upload=null"
        texts = [f"checkpoints at {self.url} cannot be read: {error}" for error in errors]
        return DataError([Problem(text, rule, remedy) for text in texts])


def _publish(staging: Path, final: Path) -> str:
    """Give what was fetched its name. What has it gives way; the new name, if that is a damaged checkpoint."""
    aside = ""
    if (final / folders.MANIFEST).is_file() or (os.path.lexists(final) and not final.is_dir()):
        aside = folders.quarantine(final).name
    elif final.exists():
        final.rename(final.with_name(f".{final.name}-{secrets.token_hex(4)}.tmp"))  # swept, and reported, as debris
    staging.rename(final)
    return aside


def _get(store: Any, path: str, folder: Path, file: str) -> bool:
    """Whether it is there."""
    try:
        store.get_file(f"{path}/{file}", str(folder / file))
    except FileNotFoundError:
        return False
    return True


def _at_once(function: Callable[[str], T], files: Collection[str]) -> list[T]:
    with ThreadPoolExecutor(_FILES_AT_A_TIME) as pool:
        return [done.result() for done in [pool.submit(function, file) for file in files]]
