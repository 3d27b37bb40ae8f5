"""Where raw text lies: files, folders, globs, URLs, and Python's own library. Each becomes a sorted list of files."""

from __future__ import annotations

import os
import sysconfig
from collections.abc import Sequence
from dataclasses import dataclass
from glob import glob
from typing import IO, cast

from bloomery.base.errors import DataError, Problem
from bloomery.prepare.stores import first_line, is_url, open_store, version_of

STDLIB = "python-stdlib"
"""The source that is on every machine: the source files of this Python's standard library."""
_NOT_STDLIB = frozenset(
    ("site-packages", "dist-packages", "__pycache__", "test", "tests", "idlelib", "lib2to3", "encodings")
)
"""Not part of it, missing from the Pythons of some distributions, or (encodings) tables rather than text."""
_READ_AHEAD_BYTES = 1 << 23


@dataclass(frozen=True)
class InputFile:
    source: int
    """Which of prepare.sources it belongs to."""
    number: int
    """Among all files of all sources."""
    name: str
    """The source as the recipe writes it, and the path below it."""
    path: str
    """Where it lies on this machine, or in its store."""
    size: int
    stamp: str
    """Changes when the file does: its modification time, or what its store says about it."""
    store: str = ""
    """The URL it was found by, which also says how to log in; empty for local files."""

    @property
    def compression(self) -> str:
        return next((ending for ending in ("zst", "gz") if self.path.lower().endswith(f".{ending}")), "")

    @property
    def kind(self) -> str:
        """jsonl, parquet, or text: one document."""
        return next((kind for kind in ("jsonl", "parquet") if self._stem.endswith(f".{kind}")), "text")

    @property
    def is_json_text(self) -> bool:
        """A text that other tools might take for lines of JSON."""
        return self._stem.endswith(".json")

    @property
    def _stem(self) -> str:
        return self.path.lower().removesuffix(f".{self.compression}")


def find_files(sources: Sequence[str]) -> list[InputFile]:
    """Always in the same order. DataError naming every source that matches nothing."""
    problems: list[Problem] = []
    files: list[InputFile] = []
    for number, source in enumerate(sources):
        try:
            found = _stdlib() if source == STDLIB else _remote(source) if is_url(source) else _local(source)
        except DataError as error:
            problems += error.problems
            continue
        if not found:
            rule = (
                f"a source is a file, a folder, a glob or a URL, or '{STDLIB}' for Python's own library; "
                "paths are relative to the working directory"
            )
            remedy = "correct the path in prepare.sources, or put the text there"
            problems.append(Problem(f"the source '{source}' matches no file", rule, remedy, source))
        files += [InputFile(number, len(files) + index, *file) for index, file in enumerate(found)]
    if problems:
        raise DataError(problems)
    return files


def open_input(file: InputFile) -> IO[bytes]:
    """OSError or, in a store, whatever its library raises."""
    if not file.store:
        return open(file.path, "rb", buffering=0)
    # The store is opened anew: this may be a forked worker, where the parent's connections are of no use.
    return cast(IO[bytes], open_store(file.store)[0].open(file.path, "rb", block_size=_READ_AHEAD_BYTES))


_Found = tuple[str, str, int, str, str]
"""name, path, size, stamp, store"""


def _stdlib() -> list[_Found]:
    found = _below(STDLIB, sysconfig.get_paths()["stdlib"], skip=_NOT_STDLIB)
    return [file for file in found if file[0].endswith(".py")]


def _local(source: str) -> list[_Found]:
    """In folders, hidden files and folders are passed over."""
    found: list[_Found] = []
    for path in [source] if os.path.exists(source) else sorted(glob(source, recursive=True)):
        found += _below(path, path) if os.path.isdir(path) else [_facts(path, path)]
    return list({file[0]: file for file in found}.values())


def _below(name: str, folder: str, skip: frozenset[str] = frozenset()) -> list[_Found]:
    relative_paths = []
    for parent, folders, files in os.walk(folder):
        folders[:] = [entry for entry in folders if not entry.startswith(".") and entry not in skip]
        relative_paths += [os.path.relpath(os.path.join(parent, file), folder) for file in files if file[0] != "."]
    return [_facts(os.path.join(name, path), os.path.join(folder, path)) for path in sorted(relative_paths)]


def _facts(name: str, path: str) -> _Found:
    try:
        facts = os.stat(path)
    except OSError as error:
        raise unreadable(path, error) from error
    return name, path, facts.st_size, str(facts.st_mtime_ns), ""


def _remote(source: str) -> list[_Found]:
    try:
        store, path = open_store(source)
        if store.isfile(path):
            listing = {path: store.info(path)}
        elif store.isdir(path):
            listing = store.find(path, detail=True)
        else:
            listing = {name: info for name, info in store.glob(path, detail=True).items() if info["type"] == "file"}
        root = path.rstrip("/")
        found: list[_Found] = []
        for name, info in sorted(listing.items()):
            if any(part.startswith(".") for part in name.removeprefix(root).split("/")):
                continue
            url = store.unstrip_protocol(name)
            if info["size"] is None:
                what, remedy = "its server does not say how long it is", "fetch it with `bloomery download` first"
                raise DataError(Problem(what, "a file that ends early must be noticed", remedy, url))
            found.append((url, name, int(info["size"]), version_of(info), source))
        return found
    except DataError:
        raise
    except Exception as error:  # every store has its own kinds
        raise unreadable(source, error) from error


def unreadable(path: str, error: Exception) -> DataError:
    reason = (error.strerror if isinstance(error, OSError) else None) or first_line(error)
    remedy = "check the address and what it needs to log in" if is_url(path) else "mend its permissions or its storage"
    return DataError(Problem(f"cannot be read: {reason}", "", remedy, path))
