"""Remote checkpoints: copies in any store that fsspec knows, uploaded while training continues, fetched by a start.

A copy is complete if its manifest is there: uploads write it last. Nothing is ever deleted there: a lifecycle rule of
the bucket may do that, and also remove what an interrupted upload has left.
"""

import contextlib
import os
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import wait
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from bloomery.base.bounded import LARGE_BYTES, in_background, in_time, read_small
from bloomery.base.errors import DataError, Problem, RecipeError
from bloomery.base.ranks import ALONE, Ranks, agreed, first_rank_does
from bloomery.base.storage import own_folder, remove_tree
from bloomery.base.units import Amount, Duration
from bloomery.checkpoint import folder as folders
from bloomery.checkpoint.folder import MANIFEST, Writer, parse_manifest
from bloomery.checkpoint.load import Check, Checkpoint, Choice, read_checkpoint
from bloomery.monitor.history import Start

T = TypeVar("T")
_FILES_AT_A_TIME = 8
_ANSWER_SECONDS = 120.0
"""How long a store may take for one answer: libraries ask one that is silent again and again, for many minutes."""


@dataclass(frozen=True)
class RemoteCheckpoint:
    path: str
    """In its store."""
    step: int
    content: bytes
    """Of its manifest."""
    manifest: dict[str, Any]
    """Empty if it is not that of a checkpoint of this step."""
    sizes: Mapping[str, int]
    """Of the files that are there."""

    @property
    def saved_at(self) -> float:
        return float(self.manifest.get("time") or 0.0)

    def is_of(self, run: str) -> bool:
        return bool(self.manifest.get("run", run) == run)

    def is_whole(self) -> bool:
        files = self.manifest.get("files", {})
        return bool(files) and all(self.sizes.get(file) == facts["bytes"] for file, facts in files.items())

    def is_stale(self, starts: Sequence[Start]) -> bool:
        """Whether a start after the one that saved it began from an earlier step: its branch was abandoned. Of one that
        was saved from another folder nobody here knows."""
        saved_by = [n for n, start in enumerate(starts) if start.token == self.manifest.get("start")]
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

    def entries() -> tuple[Any, str, list[str]]:
        store, root = open_store(url)
        return store, root, store.ls(root, detail=False) if store.exists(root) else []

    store, root, found_there = _answer(entries)
    names = {entry.rstrip("/").rsplit("/", 1)[-1] for entry in found_there}
    found = [_answer(partial(_read_remote, store, f"{root}/{name}")) for name in filter(folders.is_step_name, names)]
    return sorted(filter(None, found), key=lambda each: each.step)


def _answer(question: Callable[[], T]) -> T:
    try:
        return in_time(_ANSWER_SECONDS, question)
    except TimeoutError as error:
        raise TimeoutError(str(error) or f"no answer within {_ANSWER_SECONDS:.0f} s") from error


def _read_remote(store: Any, path: str) -> RemoteCheckpoint | None:
    if _is_link(store, path):
        return None
    try:
        sizes = {entry["name"].rsplit("/", 1)[-1]: entry["size"] or 0 for entry in store.ls(path, detail=True)}
        if MANIFEST not in sizes:
            return None
        content = store.cat_file(f"{path}/{MANIFEST}") if sizes[MANIFEST] <= LARGE_BYTES else b""
    except (FileNotFoundError, NotADirectoryError):  # deleted meanwhile, or a file in the way
        return None
    step, manifest = folders.step_of(Path(path)), dict[str, Any]()
    with contextlib.suppress(ValueError):
        manifest = parse_manifest(content)
    return RemoteCheckpoint(path, step, content, manifest if manifest.get("step") == step else {}, sizes)


# ---------------------------------------------------------------- upload


@dataclass(frozen=True)
class UploadOutcome:
    step: int
    to: str
    seconds: float
    error: str = ""
    was_there: bool = False
    """Nothing was copied, because the same one lies there."""


class Uploader:
    """Copies complete checkpoints, one at a time, in a thread. Of those that wait, only the newest is copied."""

    def __init__(self, to: str, writer: Writer, *, every: Amount | Duration | None = None) -> None:
        self.to, self._writer, self._every = to, writer, every
        self._due_at = 0.0
        self._changed = threading.Condition()
        self._queue: list[Path] = []
        """The checkpoint that is being copied, and one that waits."""
        self._outcomes: list[UploadOutcome] = []

    def offer(self, folder: Path, *, final: bool = False) -> bool:
        """Copy a complete checkpoint if it is due by its step. It must stay until `protected` no longer names its step.
        `final`: the last one of the run, copied at any step."""
        if isinstance(self._every, Duration):
            if not final and time.monotonic() < self._due_at:
                return False
            self._due_at = time.monotonic() + self._every.seconds
        elif self._every and not final and folders.step_of(folder) % self._every.count:
            return False
        with self._changed:
            self._queue[1:] = [folder]
            if len(self._queue) == 1:
                threading.Thread(target=self._work, name="bloomery-upload", daemon=True).start()
        return True

    def offer_newest(self, root: Path, *, train_steps: int) -> None:
        """The newest local checkpoint that is due: an earlier job may have failed to copy it."""
        newest_first = reversed(folders.complete_checkpoints(root))
        any(self.offer(each, final=folders.step_of(each) >= train_steps) for each in newest_first)

    def protected(self) -> set[int]:
        """Steps that retention must not delete for now."""
        with self._changed:
            return {folders.step_of(folder) for folder in self._queue}

    def poll(self) -> list[UploadOutcome]:
        """How uploads since the last call have ended."""
        with self._changed:
            outcomes, self._outcomes = self._outcomes, []
        return outcomes

    def wait(self, at_most_seconds: float) -> list[UploadOutcome]:
        """Until no upload is in flight, or the time is over; then as `poll`."""
        with self._changed:
            self._changed.wait_for(lambda: not self._queue, at_most_seconds)
        return self.poll()

    def _work(self) -> None:
        is_done = False
        while not is_done:
            outcome = self._copy(self._queue[0])
            with self._changed:
                self._outcomes.append(outcome)
                del self._queue[0]
                self._changed.notify_all()
                is_done = not self._queue

    def _copy(self, folder: Path) -> UploadOutcome:
        step, started = folders.step_of(folder), time.monotonic()
        try:
            was_there = upload(folder, self.to, self._writer)
        except Exception as error:  # whatever a store may raise: it is reported, and training continues
            return UploadOutcome(step, self.to, time.monotonic() - started, f"{type(error).__name__}: {error}")
        return UploadOutcome(step, self.to, time.monotonic() - started, was_there=was_there)


def upload(folder: Path, to: str, writer: Writer) -> bool:
    """Copy a checkpoint, its manifest last. True: the same one was there already. FencedError, before any change there,
    if a newer start has taken over."""
    store, root = open_store(to)
    path = f"{root}/{folder.name}"
    content = read_small(folder / MANIFEST, LARGE_BYTES)
    there = _read_remote(store, path)
    if there is not None and there.content == content and there.is_whole():
        return True
    writer.require()
    if _is_link(store, path):
        raise OSError(f"{path} is a link, which is not followed")
    if there is not None:  # of another branch of the run: no longer complete
        store.rm_file(f"{path}/{MANIFEST}")
    store.makedirs(path, exist_ok=True)

    def put(file: str) -> None:
        writer.require()
        if (folder / file).is_symlink():
            raise OSError(f"{folder / file} is a link, which is not followed")
        if _is_link(store, f"{path}/{file}"):
            os.unlink(f"{path}/{file}")
        store.put_file(str(folder / file), f"{path}/{file}")

    _at_once(put, parse_manifest(content)["files"])
    put(MANIFEST)
    return False


# ---------------------------------------------------------------- fetch


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

    def fetch_newer(self, local: Checkpoint | None, check: Check = None) -> Choice:
        """The newest that is whole, passes `check` and was saved after the `local` one. DataError if the place cannot
        be read or holds copies of another run."""
        after = float(local.manifest.get("time") or 0.0) if local else -1.0
        step = local.manifest["step"] if local else -1

        def is_newer(each: RemoteCheckpoint) -> bool:
            if not each.manifest:
                return each.step > step
            return each.saved_at > after and not each.is_stale(self.starts)

        return self._fetch(is_newer, check)

    def fetch_named(self, name: str, roots: Sequence[Path]) -> Choice:
        """The one that a user names, if it is there and not here."""
        wanted = folders.name_of(name)
        is_here = any(path.name == wanted for root in roots for path in folders.complete_checkpoints(root))
        if not folders.is_step_name(wanted) or self.ranks.broadcast(is_here):
            return Choice()
        return self._fetch(lambda each: folders.step_name(each.step) == wanted)

    def _fetch(self, is_wanted: Callable[[RemoteCheckpoint], bool], check: Check = None) -> Choice:
        """The one that was saved last: a branch that began from an earlier step wins over the one it abandoned."""
        damaged: dict[Path | str, list[str]] = {}
        for candidate in first_rank_does(self.ranks, lambda: self._candidates(is_wanted)):
            name = folders.step_name(candidate.step)
            staging, final = self.root / f".{name}-fetch.tmp", self.root / name
            place = f"{self.url.rstrip('/')}/{name}"
            if not candidate.manifest:
                damaged[place] = [f"{MANIFEST} is not that of a checkpoint of step {candidate.step}"]
                continue
            self._download(candidate, staging)
            try:
                checkpoint = read_checkpoint(staging, ranks=self.ranks, check=check)
            except (DataError, RecipeError) as error:
                damaged[place] = [problem.what for problem in error.problems]
                first_rank_does(self.ranks, partial(remove_tree, staging))
                continue
            aside = first_rank_does(self.ranks, partial(_publish, staging, final))  # all see it only under its name
            return Choice(replace(checkpoint, folder=final), damaged, self.url, aside)
        return Choice(None, damaged)

    def _candidates(self, is_wanted: Callable[[RemoteCheckpoint], bool]) -> list[RemoteCheckpoint]:
        with self._reachable():
            found = list_remote(self.url)
        for each in found:
            if not each.is_of(self.run):
                other = each.manifest["run"]
                what = f"{self.url}: {folders.step_name(each.step)} is of the run {other!r}, and this is {self.run!r}"
                rule = "every run has a place of its own for its copies"
                remedy = f"use another checkpoint.upload.to, or name={other} to resume that run"
                raise DataError(Problem(what, rule, remedy))
        return sorted(
            filter(is_wanted, found), key=lambda each: (not each.manifest, each.saved_at, each.step), reverse=True
        )

    def _download(self, remote: RemoteCheckpoint, staging: Path) -> None:
        """Copy one into an empty folder. DataError if it cannot be read; the next start sweeps what is left."""
        first_rank_does(self.ranks, partial(remove_tree, staging))

        def get(file: str) -> None:
            with contextlib.suppress(FileNotFoundError):  # read_checkpoint finds that it is missing
                store.get_file(f"{remote.path}/{file}", str(staging / file))

        with agreed(self.ranks), self._reachable():
            own_folder(staging, parents=True)
            store, _ = open_store(self.url)
            _at_once(get, sorted(remote.manifest["files"])[self.ranks.rank :: self.ranks.size])
            if self.ranks.rank == 0:
                (staging / MANIFEST).write_bytes(remote.content)

    @contextlib.contextmanager
    def _reachable(self) -> Iterator[None]:
        """Whatever a store raises within it is a DataError that says what to do."""
        try:
            yield
        except Exception as error:
            what = f"checkpoints at {self.url} cannot be read: {type(error).__name__}: {error}"
            remedy = "fix the connection, or start without it: checkpoint.upload=null"
            raise DataError(Problem(what, "a newer checkpoint may be there", remedy)) from error


def _publish(staging: Path, final: Path) -> str:
    """Give what was fetched its name; the new name of the damaged checkpoint that had it, if one had."""
    aside = folders.quarantine(final) if os.path.lexists(final) else ""
    staging.rename(final)
    return aside


def _at_once(function: Callable[[str], None], files: Collection[str]) -> None:
    """For some files at a time; raises the first error."""
    waiting = iter([*files])

    def work() -> None:
        try:
            for file in waiting:  # of a list: each goes to one thread
                function(file)
        finally:
            list(waiting)  # after an error no other begins a file

    found = [in_background(work) for _ in range(min(_FILES_AT_A_TIME, len(files)))]
    for each in wait(found).done:
        each.result()
