"""Where raw text lies: files, folders, globs, URLs, and Python's own library. Each becomes a sorted list of files."""

from __future__ import annotations

import os
import sysconfig
from collections.abc import Sequence
from dataclasses import dataclass
from glob import glob
from typing import IO, Any, cast

from bloomery.base.errors import DataError, Problem

STDLIB = "python-stdlib"
"""The source that is on every machine: the source files of this Python's standard library."""
_NOT_STDLIB = frozenset(
    ("site-packages", "dist-packages", "__pycache__", "test", "tests", "idlelib", "lib2to3", "encodings")
)
"""Not part of it, missing from the Pythons of some distributions, or (encodings) tables rather than text."""


@dataclass(frozen=True)
class InputFile:
    source: int
    """Which of prepare.sources it belongs to."""
    number: int
    """Among all files of all sources."""
    name: str
    """The source as the recipe writes it, and the path below it."""
    path: str
    """A local path or a URL."""
    size: int
    stamp: str
    """Changes when the file does: its modification time, or what its store says about it."""

    @property
    def compression(self) -> str:
        return next((ending for ending in ("zst", "gz") if self.path.endswith(f".{ending}")), "")

    @property
    def kind(self) -> str:
        """jsonl, parquet, or text: one document."""
        stem = self.path.removesuffix(f".{self.compression}")
        return next((kind for kind in ("jsonl", "parquet") if stem.endswith(f".{kind}")), "text")


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


def open_input(path: str) -> IO[bytes]:
    """OSError or, for URLs, whatever their library raises."""
    if not is_url(path):
        return open(path, "rb", buffering=0)
    import fsspec  # type: ignore[import-untyped]

    return cast(IO[bytes], fsspec.open(path, "rb", block_size=1 << 23).open())


def is_url(source: str) -> bool:
    return "://" in source


_Found = tuple[str, str, int, str]
"""name, path, size, stamp"""


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
    return name, path, facts.st_size, str(facts.st_mtime_ns)


def _remote(source: str) -> list[_Found]:
    import fsspec

    try:
        store, path = fsspec.core.url_to_fs(source)
        if store.isfile(path):
            listing = {path: store.info(path)}
        elif store.isdir(path):
            listing = store.find(path, detail=True)
        else:
            listing = {name: info for name, info in store.glob(path, detail=True).items() if info["type"] == "file"}
        root = path.rstrip("/")
        shown = {
            name: info
            for name, info in listing.items()
            if not any(part.startswith(".") for part in name.removeprefix(root).split("/"))
        }
        return [
            (store.unstrip_protocol(name), store.unstrip_protocol(name), int(info["size"] or 0), _stamp(info))
            for name, info in sorted(shown.items())
        ]
    except ImportError as error:
        remedy = f"install what is missing ({error}) beside Bloomery with pip"
        raise DataError(Problem("needs a package that is not installed", str(error), remedy, source)) from error
    except Exception as error:  # every store has its own kinds
        raise unreadable(source, error) from error


def _stamp(info: dict[str, Any]) -> str:
    for key in ("ETag", "etag", "content_md5", "md5Hash", "last_commit", "LastModified", "mtime", "created"):
        if info.get(key) is not None:
            return str(info[key])
    return ""


def unreadable(path: str, error: Exception) -> DataError:
    reason = (error.strerror if isinstance(error, OSError) else None) or str(error) or type(error).__name__
    remedy = "check the address and what it needs to log in" if is_url(path) else "mend its permissions or its storage"
    return DataError(Problem(f"cannot be read: {reason}", "", remedy, path))
