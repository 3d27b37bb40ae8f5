"""Raw text as documents: files, folders and globs, a document a file or a line of .jsonl, and Python's own library."""

from __future__ import annotations

import json
import os
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from glob import glob

from bloomery.base.errors import DataError, Problem

STDLIB = "python-stdlib"
"""The source that is on every machine: the source files of this Python's standard library."""
_NOT_STDLIB = frozenset(
    ("site-packages", "dist-packages", "__pycache__", "test", "tests", "idlelib", "lib2to3", "encodings")
)
"""Not part of it, missing from the Pythons of some distributions, or (encodings) tables rather than text."""


@dataclass(frozen=True)
class Document:
    name: str
    """Stable and unlike any other: the source as the recipe writes it, the path below it, the line."""
    text: str


@dataclass
class ReadCounts:
    """What was seen while reading a source."""

    files: int = 0
    empty: int = 0
    """Documents without any text, dropped."""
    undecodable: int = 0
    """Documents that are not UTF-8, dropped."""


def iter_documents(source: str, counts: ReadCounts) -> Iterator[Document]:
    """The documents of one source, always in the same order. DataError where it matches nothing or a line is broken."""
    for name, path in _stdlib_files() if source == STDLIB else _files(source):
        counts.files += 1
        for document_name, text in _jsonl_texts(name, path) if path.endswith(".jsonl") else [(name, _read(path))]:
            if text is None:
                counts.undecodable += 1
            elif not text:
                counts.empty += 1
            else:
                yield Document(document_name, text)


def _stdlib_files() -> list[tuple[str, str]]:
    files = _below(STDLIB, sysconfig.get_paths()["stdlib"], skip=_NOT_STDLIB)
    return [(name, path) for name, path in files if name.endswith(".py")]


def _files(source: str) -> list[tuple[str, str]]:
    """(name, path) of every file of a path or a glob; in folders, hidden files and folders are passed over."""
    found: list[tuple[str, str]] = []
    for path in [source] if os.path.exists(source) else sorted(glob(source, recursive=True)):
        found += _below(path, path) if os.path.isdir(path) else [(path, path)]
    if not found:
        raise DataError(
            Problem(
                what=f"the source '{source}' matches no file",
                rule="a source is a file, a folder or a glob, relative to the working directory, "
                f"or '{STDLIB}' for Python's own library",
                remedy="correct the path in prepare.sources, or put the text there",
                place=source,
            )
        )
    return list(dict.fromkeys(found))


def _below(name: str, folder: str, skip: frozenset[str] = frozenset()) -> list[tuple[str, str]]:
    relative_paths = []
    for parent, folders, files in os.walk(folder):
        folders[:] = [entry for entry in folders if not entry.startswith(".") and entry not in skip]
        relative_paths += [os.path.relpath(os.path.join(parent, file), folder) for file in files if file[0] != "."]
    return [(os.path.join(name, path), os.path.join(folder, path)) for path in sorted(relative_paths)]


def _jsonl_texts(name: str, path: str) -> Iterator[tuple[str, str | None]]:
    for number, line in enumerate(_lines(path), start=1):
        if not line.strip():
            continue
        try:
            record = json.loads(line.strip().decode("utf-8"))
        except ValueError as error:
            raise _broken_line(path, number, f"is not JSON: {error}") from error
        text = record.get("text") if isinstance(record, dict) else None
        if not isinstance(text, str):
            keys = f"its keys are {', '.join(record) or 'none'}" if isinstance(record, dict) else "it is no object"
            wrong = "has a 'text' that is no string" if text is not None else f"has no 'text': {keys}"
            raise _broken_line(path, number, wrong)
        yield f"{name}:{number}", text if _is_unicode(text) else None


def _is_unicode(text: str) -> bool:
    """False for half a surrogate pair, which JSON can spell but UTF-8 cannot."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


def _broken_line(path: str, number: int, what: str) -> DataError:
    rule = "each line of a .jsonl file is one JSON object with its document under the key 'text'"
    return DataError(Problem(what, rule, "mend or remove the line", f"{path}:{number}"))


def _read(path: str) -> str | None:
    """None where it is not UTF-8."""
    try:
        with open(path, "rb") as file:
            return file.read().decode("utf-8")
    except UnicodeDecodeError:
        return None
    except OSError as error:
        raise _unreadable(path, error) from error


def _lines(path: str) -> Iterator[bytes]:
    try:
        with open(path, "rb") as file:
            yield from file
    except OSError as error:
        raise _unreadable(path, error) from error


def _unreadable(path: str, error: OSError) -> DataError:
    return DataError(Problem(f"cannot be read: {error.strerror or error}", "", "mend its permissions", path))
