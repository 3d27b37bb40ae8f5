"""Where raw text lies: files, folders, globs, URLs, and Python's own library. Each becomes a sorted list of files."""

from __future__ import annotations

import os
import re
import stat
import sysconfig
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from fnmatch import translate
from glob import has_magic
from typing import IO, NamedTuple, cast

from bloomery.base.errors import DataError, Problem
from bloomery.prepare.made import Made
from bloomery.prepare.stores import first_line, is_stumble, is_url, open_store, version_of

STDLIB = "python-stdlib"
"""The source that is on every machine: the source files of this Python's standard library."""
_NOT_STDLIB = frozenset(
    ("site-packages", "dist-packages", "__pycache__", "test", "tests", "idlelib", "lib2to3", "encodings")
)
"""Not part of it, missing from the Pythons of some distributions, or (encodings) tables rather than text."""
LINES = (".jsonl", ".ndjson", ".jsonlines")
"""Files with a record of JSON on each line, in capitals too."""
_TARS = ("tar", "tgz", "taz", "tzst", "tzstd", "tbz", "tbz2", "txz", "tlz", "tlz4")
"""Never read: many files in one, which as a text would be one document with all their headers."""
_READ = ("zst", "gz")
_NOT_READ = ("gzip", "zstd", "bz2", "xz", "lzma", "lz4", "lzo", "br", "sz", "snappy", "z", "zip", "7z", "rar")
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
        return compression_of(self.path)

    @property
    def kind(self) -> str:
        return kind_of(self.path)

    @property
    def is_json_text(self) -> bool:
        """A text that other tools might take for lines of JSON."""
        return _stem(self.path).endswith(".json")


def compression_of(path: str) -> str:
    """zst, gz or nothing."""
    return next((ending for ending in _READ if path.lower().endswith(f".{ending}")), "")


def kind_of(path: str) -> str:
    """jsonl, parquet, or text: one document."""
    stem = _stem(path)
    return "jsonl" if stem.endswith(LINES) else "parquet" if stem.endswith(".parquet") else "text"


def packing_problem(path: str) -> list[Problem]:
    """For records packed in a way that is not read, as a text they would be one broken document; and for every tar."""
    stem, packing = path, ""
    while (parts := stem.rpartition("."))[1] and parts[2].lower() in (*_READ, *_NOT_READ, *_TARS):
        stem, packing = parts[0], f".{parts[2]}{packing}"
    what = f"is packed as {packing}"
    if any(ending in _TARS for ending in packing.lower().split(".")):
        return [Problem(what, "an archive of files is no document", "unpack it, or leave it out of the sources", path)]
    kind = kind_of(stem)
    if not packing or kind == "text" or (kind == "jsonl" and packing[1:].lower() in _READ):
        return []
    if kind == "parquet":
        return [Problem(what, "a .parquet file is read only as it is", "unpack it", path)]
    return [Problem(what, "only .zst and .gz are read", "unpack it, or pack it again with zstd or gzip", path)]


def _stem(path: str) -> str:
    return path.lower().removesuffix(f".{compression_of(path)}")


def find_files(sources: Sequence[str], *, made: Sequence[str] = ()) -> list[InputFile]:
    """Always in the same order. DataError naming every source that matches nothing or reaches an output that is `made`,
    and files of two sources."""
    outputs = Made(made)
    problems: list[Problem] = []
    files: list[InputFile] = []
    owners: dict[str, int] = {}
    for number, source in enumerate(sources):
        try:
            if source == STDLIB:
                found = _stdlib()
            else:
                found = _remote(source, outputs) if is_url(source) else _local(source, outputs)
        except DataError as error:
            problems += error.problems
            continue
        if not found:
            rule = (
                f"a source is a file, a folder, a glob or a URL, or '{STDLIB}' for Python's own library; "
                "paths are relative to the working directory"
            )
            remedy = "correct the path in prepare.sources, or put the text there"
            if source.startswith("~"):
                remedy = "write the folder in full: `~` is not expanded in recipes"
            problems.append(Problem(f"the source {source!r} matches no file", rule, remedy, source))
        twice = [file for file in found if owners.setdefault(file.real, number) != number]
        if twice:
            more = f" ({len(twice) - 1} more are in two)" if len(twice) > 1 else ""
            what = f"is in the source {source!r} and in {sources[owners[twice[0].real]]!r}{more}"
            remedy = "leave it out of one; to train more often on a text, give a shard of its own a `weight`"
            problems.append(Problem(what, "each file counts once", remedy, twice[0].name))
        problems += [problem for file in found for problem in packing_problem(file.name) or _cut_off(file)]
        files += [InputFile(number, len(files) + index, *file[:-1]) for index, file in enumerate(found)]
    if problems:
        raise DataError(problems)
    return files


def _cut_off(file: _Found) -> list[Problem]:
    """For a file without bytes that would have some even without a document."""
    if file.size or not (compression_of(file.name) or kind_of(file.name) == "parquet"):
        return []
    what, rule = "has no bytes", "a packed or .parquet file has some even if it holds nothing, so this one was cut off"
    return [Problem(what, rule, "copy or download it again, or leave it out of the sources", file.name)]


def open_input(file: InputFile) -> IO[bytes]:
    """OSError or, in a store, whatever its library raises."""
    if not file.store:
        return open(file.path, "rb", buffering=0)
    # The store is opened anew: this may be a forked worker, where the parent's connections are of no use.
    return cast(IO[bytes], open_store(file.store)[0].open(file.path, "rb", block_size=_READ_AHEAD_BYTES))


class _Found(NamedTuple):
    name: str
    path: str
    size: int
    stamp: str
    store: str
    real: str
    """The same for the same file, however it was reached."""


def _stdlib() -> list[_Found]:
    folder = sysconfig.get_paths()["stdlib"]
    files = find_local(folder, wanted=lambda name: name.endswith(".py"), skip=_NOT_STDLIB)
    return [file._replace(name=STDLIB + file.path.removeprefix(folder)) for file in map(_found, files)]


def _local(source: str, made: Made) -> list[_Found]:
    return [_found(file) for file in find_local(source, made=made)]


def _found(file: LocalFile) -> _Found:
    return _Found(file.path, file.path, file.size, file.stamp, "", file.real)


def _remote(source: str, made: Made) -> list[_Found]:
    try:
        store, path = open_store(source)
        if source.startswith(("file://", "local://")):
            return [_found(file)._replace(name=f"file://{file.path}") for file in find_local(path, made=made)]
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
            found.append(_Found(url, name, int(info["size"]), version_of(info), source, url))
        return found
    except DataError:
        raise
    except Exception as error:  # every store has its own kinds
        raise unreadable(source, error) from error


class LocalFile(NamedTuple):
    path: str
    real: str
    """Without symbolic links."""
    size: int
    stamp: str


def find_local(
    source: str,
    *,
    wanted: Callable[[str], bool] = lambda _: True,
    skip: frozenset[str] = frozenset(),
    made: Made | None = None,
) -> list[LocalFile]:
    """A file, all files below a folder, or those that a glob matches, by path, each once. In folders, hidden names and
    folders called as in `skip` are passed over, and files whose name is not `wanted`. DataError where anything cannot
    be looked at: a folder that is passed over unnoticed is text that is lost. DataError where it reaches what is
    `made`."""
    found: dict[str, LocalFile] = {}
    made = made or Made()
    try:
        for path in [source] if os.path.lexists(source) else _matches(source, made):
            if _is_folder(path, made):
                below = [entry for entry in _walk(path, made, skip) if not entry.is_folder]
                inner = sorted((entry.path, entry.real) for entry in below if wanted(os.path.basename(entry.path)))
            else:
                inner = [(path, os.path.realpath(path))]
            for name, real in inner:
                made.refuse(name, real, source)
                if real not in found:
                    found[real] = _facts(name, real)
    except (OSError, ValueError) as error:  # ValueError: a path that cannot be one
        raise unreadable(getattr(error, "filename", None) or source, error) from error
    return list(found.values())


def _facts(path: str, real: str) -> LocalFile:
    try:
        facts = os.stat(path)
    except FileNotFoundError:
        if not os.path.islink(path):
            raise
        what, rule = f"is a link to nothing: there is no {real}", "a link stands for a file"
        raise DataError(Problem(what, rule, "mend the link, or remove it", path)) from None
    if not stat.S_ISREG(facts.st_mode):
        what, rule = "is no regular file", "a pipe, a socket or a device has no content that stays"
        raise DataError(Problem(what, rule, "remove it, or name the files with a glob such as 'folder/**/*.py'", path))
    return LocalFile(path, real, facts.st_size, str(facts.st_mtime_ns))


class _Entry(NamedTuple):
    path: str
    real: str
    is_folder: bool


def _walk(folder: str, made: Made, skip: frozenset[str] = frozenset()) -> Iterator[_Entry]:
    """The folder and everything below it but hidden names, and what will be made there. Links are
    followed, last, so that what is also reached without them keeps its name; no folder is entered twice, so that a link
    to a folder above does no harm."""
    entered: set[str] = set()
    waiting, links = [_Entry(folder, os.path.realpath(folder), True)], list[_Entry]()
    while waiting or links:
        here = (waiting or links).pop()
        if here.real in entered:
            continue
        entered.add(here.real)
        yield here
        for name in made.names_in(here.real):
            real = os.path.join(here.real, name)
            inner = _Entry(os.path.join(here.path, name), real, made.is_new_folder(real))
            if name[0] != "." and inner.is_folder:
                waiting.append(inner)
            elif name[0] != ".":
                yield inner
        if made.is_new_folder(here.real):
            continue
        with os.scandir(here.path or ".") as listing:
            entries = sorted((entry for entry in listing if entry.name[0] != "."), key=lambda entry: entry.name)
        for entry in reversed(entries):
            path, is_link = os.path.join(here.path, entry.name), entry.is_symlink()
            real = os.path.realpath(path) if is_link else os.path.join(here.real, entry.name)
            inner = _Entry(path, real, entry.is_dir())
            if not inner.is_folder:
                yield inner
            elif entry.name not in skip:
                (links if is_link else waiting).append(inner)


def _matches(pattern: str, made: Made) -> list[str]:
    """As glob.glob, which takes a folder that it may not read for an empty one; with what will be made."""
    paths = ["/" if pattern.startswith("/") else ""]
    for segment in filter(None, pattern.split("/")):
        if segment == "**":
            folders = [path for path in paths if _is_folder(path, made)]
            paths = [entry.path for path in folders for entry in _walk(path, made) if entry.is_folder]
        elif has_magic(segment):
            matches, hidden = re.compile(translate(segment)).match, segment[0] == "."
            paths = [
                os.path.join(path, name)
                for path in paths
                if _is_folder(path, made)
                for name in _names_in(path, made)
                if matches(name) and (hidden or name[0] != ".")
            ]
        else:
            paths = [path for path in (os.path.join(path, segment) for path in paths) if _is_there(path, made)]
    return sorted({path for path in paths if not pattern.endswith("/") or _is_folder(path, made)})


def _names_in(folder: str, made: Made) -> list[str]:
    there = [] if made.is_new_folder(os.path.realpath(folder)) else os.listdir(folder or ".")
    return [*there, *made.names_at(folder)]


def _is_folder(path: str, made: Made) -> bool:
    """OSError where that cannot be told."""
    try:
        return stat.S_ISDIR(os.stat(path or ".").st_mode)
    except (FileNotFoundError, NotADirectoryError):
        return made.is_new_folder(os.path.realpath(path))


def _is_there(path: str, made: Made) -> bool:
    try:
        os.lstat(path)
    except (FileNotFoundError, NotADirectoryError):
        return os.path.basename(path) in made.names_at(os.path.dirname(path))
    return True


def unreadable(path: str, error: Exception) -> DataError:
    reason = (error.strerror if isinstance(error, OSError) else None) or first_line(error)
    remedy = "check the address and what it needs to log in" if is_url(path) else "mend its permissions or its storage"
    if is_url(path) and is_stumble(error):
        remedy = (
            "write the address in full, such as s3://bucket/path, or dir://path::s3://bucket for a store in another"
        )
    return DataError(Problem(f"cannot be read: {reason}", "", remedy, path))
