"""Checkpoints in a far place (any fsspec store): which are complete there, and which need not be kept.

A folder is ours if its manifest says so; nothing else is ever touched. A deletion first puts a tombstone with the list
of files beside the manifest, so that one that was cut off is finished by the next.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from bloomery.base.bounded import parse_json
from bloomery.checkpoint import folder as folders
from bloomery.checkpoint.fence import Writer
from bloomery.checkpoint.manifest import SUSPICIOUS
from bloomery.checkpoint.retention import loss_at
from bloomery.config.recipe import KeepSection
from bloomery.sizing.kept import kept_steps

T = TypeVar("T")
_AT_A_TIME = 8
"""Files that are on their way at once."""
TOMBSTONE = "manifest.deleted.json"
RETIRED = "manifest.retired.json"
"""The manifest of a checkpoint whose branch of the run was left."""
ARRIVING = "manifest.arriving.json"
"""The manifest of a checkpoint whose files are on their way there."""


@dataclass(frozen=True)
class There:
    """One of our folders in a far place."""

    place: str
    step: int
    text: str
    """Its manifest."""

    @property
    def name(self) -> str:
        return folders.step_name(self.step)

    @property
    def manifest(self) -> dict[str, Any]:
        found: dict[str, Any] = parse_json(self.text)
        return found

    def path(self, file: str) -> str:
        return f"{self.place}/{file}"


def store_of(url: str) -> tuple[Any, str]:
    """(fsspec's store, path in it)."""
    import fsspec  # type: ignore[import-untyped]

    store, path = fsspec.core.url_to_fs(url)
    store.invalidate_cache()
    return store, str(path).rstrip("/")


def complete_there(store: Any, path: str, *, marker: str = folders.MANIFEST) -> list[There]:
    """Folders of steps that have a manifest, or another `marker` that holds one; oldest first."""
    if not store.exists(path):
        return []
    names = [entry.rstrip("/").rsplit("/", 1)[-1] for entry in store.ls(path, detail=False)]
    found = []
    for name in filter(folders.is_step_name, names):
        place = f"{path}/{name}"
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):  # debris, or a file in the way
            found.append(
                There(place, folders.step_of(Path(name)), store.cat_file(f"{place}/{marker}").decode(errors="replace"))
            )
    return sorted(found, key=lambda there: there.step)


def retain_there(url: str, keep: KeepSection, newest: int, run: str, writer: Writer | None = None) -> list[str]:
    """Delete there what `keep` does not ask for, now that the checkpoint of step `newest` has arrived; the names.

    Never touches that one, nor later ones: those are of another branch of the run; nor those of another run. OSError,
    and nothing is deleted, if it is not whole there.
    """
    store, path = store_of(url)
    for cut_off in complete_there(store, path, marker=TOMBSTONE):
        if is_ours(cut_off, run):
            _delete(store, cut_off, writer)
    ours = [there for there in complete_there(store, path) if is_ours(there, run)]
    found = {there.step: there for there in ours if there.step <= newest}
    if newest not in found or not _is_whole(store, found[newest]):
        raise OSError(f"{folders.step_name(newest)} is not whole in {url}, so nothing older was deleted there")
    losses = {step: loss for step, there in found.items() if (loss := loss_at(there.manifest, step)) is not None}
    suspicious = {step for step, there in found.items() if there.manifest.get(SUSPICIOUS)}
    doomed = sorted(found.keys() - kept_steps(list(found), keep, losses, suspicious))
    for step in doomed:
        _delete(store, found[step], writer)
    return [found[step].name for step in doomed]


def retire_later_there(
    url: str,
    step: int,
    run: str,
    writer: Writer | None = None,
    *,
    is_left: Callable[[There], bool] = lambda there: False,
) -> list[str]:
    """Put aside what lies there beyond `step`: the run goes on from an earlier checkpoint, so no start may fetch it.
    Likewise what `is_left` names. All files stay, and the manifest under another name; the names."""
    store, path = store_of(url)
    ours = [there for there in complete_there(store, path) if is_ours(there, run)]
    later = [there for there in ours if there.step > step or is_left(there)]
    for there in later:
        if writer is not None:
            writer.require()
        store.pipe_file(there.path(RETIRED), there.text.encode())
        store.rm_file(there.path(folders.MANIFEST))
    return [there.name for there in later]


def holds(store: Any, place: str, manifest: bytes) -> bool:
    """Whether a folder there is whole, has this very manifest, and is not about to be deleted."""
    try:
        there = There(place, folders.step_of(Path(place)), store.cat_file(f"{place}/{folders.MANIFEST}").decode())
    except (FileNotFoundError, NotADirectoryError, UnicodeDecodeError):
        return False
    return there.text.encode() == manifest and not store.exists(there.path(TOMBSTONE)) and _is_whole(store, there)


def sweep_cut_off(store: Any, path: str, run: str, writer: Writer | None = None) -> None:
    """Delete what copies of this run that were cut off have left there."""
    for there in complete_there(store, path, marker=ARRIVING):
        if not is_ours(there, run):
            continue
        if store.exists(there.path(folders.MANIFEST)):  # only the mark was left behind
            store.rm_file(there.path(ARRIVING))
        else:
            _delete(store, there, writer)


def forget_marks(store: Any, place: str) -> None:
    """Before a folder there is written again: it is no longer complete, deleted or retired."""
    for mark in (folders.MANIFEST, TOMBSTONE, RETIRED, ARRIVING):
        if store.exists(f"{place}/{mark}"):
            store.rm_file(f"{place}/{mark}")


def is_plain_name(file: str) -> bool:
    """Whether a manifest means a file of its own folder."""
    return Path(file).name == file != ""


def is_ours(there: There, run: str | None = None) -> bool:
    """Whether its manifest is that of a checkpoint of this step, and of this run if one is named."""
    try:
        manifest = there.manifest
        return (
            manifest["format"] == folders.FORMAT
            and manifest["step"] == there.step
            and (run is None or manifest.get("run", run) == run)
            and all(is_plain_name(file) for file in manifest["files"])
        )
    except (ValueError, KeyError, TypeError):
        return False


def _is_whole(store: Any, there: There) -> bool:
    sizes = {entry["name"].rsplit("/", 1)[-1]: entry["size"] for entry in store.ls(there.place, detail=True)}
    return all(sizes.get(file) == facts["bytes"] for file, facts in there.manifest["files"].items())


def _delete(store: Any, there: There, writer: Writer | None) -> None:
    if writer is not None:
        writer.require()
    store.pipe_file(there.path(TOMBSTONE), there.text.encode())
    for file in (folders.MANIFEST, *there.manifest["files"], ARRIVING, TOMBSTONE):
        with contextlib.suppress(FileNotFoundError):
            store.rm_file(there.path(file))
    with contextlib.suppress(Exception):  # a store without folders has none to remove, and a file of somebody's stays
        store.rmdir(there.place)


def all_at_once(tasks: Sequence[Callable[[], T]]) -> list[T]:
    """What the tasks return, done side by side."""
    with ThreadPoolExecutor(_AT_A_TIME) as pool:
        return [done.result() for done in [pool.submit(task) for task in tasks]]
