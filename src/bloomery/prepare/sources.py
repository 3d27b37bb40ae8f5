"""Where raw text lies: files, folders, globs, URLs, and Python's own library. Each becomes a sorted list of files."""

from __future__ import annotations

import os
import stat
import sysconfig
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from glob import escape, glob, has_magic
from typing import IO, NoReturn, cast

from bloomery.base.errors import DataError, Problem
from bloomery.data.manifest import manifest_path, origins_path
from bloomery.data.shards import PARTIAL
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
    name: str
    """The source as the recipe writes it, and the path below it."""
    path: str
    """Where it lies on this machine, or in its store."""
    size: int
    stamp: str
    """Changes when the file does: its modification time, or what its store reports."""
    real: str
    """The same for the same file, however it was reached: its path without symbolic links, or its URL."""
    store: str = ""
    """The URL it was found by, which may also name the account; empty for local files."""
    source: int = 0
    """Which of prepare.sources it belongs to."""
    number: int = 0
    """Among all files of all sources."""

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


def find_files(sources: Sequence[str], *, outputs: Sequence[str] = ()) -> list[InputFile]:
    """Always in the same order. DataError naming every source that matches nothing or reaches one of the `outputs`, and
    files of two sources."""
    guard = OutputGuard(outputs)
    problems: list[Problem] = []
    files: list[InputFile] = []
    owners: dict[str, int] = {}
    for number, source in enumerate(sources):
        try:
            found = _find(source, guard)
        except DataError as error:
            problems += error.problems
            continue
        if not found:
            problems.append(_matches_nothing(source))
        if twice := [file for file in found if owners.setdefault(file.real, number) != number]:
            more = f" ({len(twice) - 1} more are in two)" if len(twice) > 1 else ""
            what = f"is in the source {source!r} and in {sources[owners[twice[0].real]]!r}{more}"
            remedy = "leave it out of one; to train more often on a text, give a shard of its own a `weight`"
            problems.append(Problem(what, "each file counts once", remedy, twice[0].name))
        problems += [problem for file in found for problem in packing_problem(file.name) or _cut_off(file)]
        files += [replace(file, source=number, number=len(files) + index) for index, file in enumerate(found)]
    if problems:
        raise DataError(problems)
    return files


def _find(source: str, guard: OutputGuard) -> list[InputFile]:
    if source == STDLIB:
        folder = sysconfig.get_paths()["stdlib"]
        files = find_local(folder, wanted=lambda name: name.endswith(".py"), skip=_NOT_STDLIB)
        return [replace(file, name=STDLIB + file.path.removeprefix(folder)) for file in files]
    return _find_remote(source, guard) if is_url(source) else find_local(source, guard=guard)


def _matches_nothing(source: str) -> Problem:
    rule = (
        f"a source is a file, a folder, a glob or a URL, or '{STDLIB}' for Python's own library; "
        "paths are relative to the working directory"
    )
    remedy = "correct the path in prepare.sources, or put the text there"
    if source.startswith("~"):
        remedy = "write the folder in full: `~` is not expanded in recipes"
    return Problem(f"the source {source!r} matches no file", rule, remedy, source)


def _cut_off(file: InputFile) -> list[Problem]:
    """For a file without bytes that would have some even without a document."""
    if file.size or not (file.compression or file.kind == "parquet"):
        return []
    what, rule = "has no bytes", "a packed or .parquet file has some even if it holds nothing, so this one was cut off"
    return [Problem(what, rule, "copy or download it again, or leave it out of the sources", file.name)]


def open_input(file: InputFile) -> IO[bytes]:
    """OSError or, in a store, whatever its library raises."""
    if not file.store:
        return open(file.path, "rb", buffering=0)
    # The store is opened again: this may be a forked worker, where the parent's connections are of no use.
    return cast(IO[bytes], open_store(file.store)[0].open(file.path, "rb", block_size=_READ_AHEAD_BYTES))


def _find_remote(source: str, guard: OutputGuard) -> list[InputFile]:
    try:
        store, path = open_store(source)
        if source.startswith(("file://", "local://")):
            return [replace(file, name=f"file://{file.path}") for file in find_local(path, guard=guard)]
        if store.isfile(path):
            listing = {path: store.info(path)}
        elif store.isdir(path):
            listing = store.find(path, detail=True)
        else:
            listing = {name: info for name, info in store.glob(path, detail=True).items() if info["type"] == "file"}
        root = path.rstrip("/")
        found: list[InputFile] = []
        for name, info in sorted(listing.items()):
            if any(part.startswith(".") for part in name.removeprefix(root).split("/")):
                continue
            url = store.unstrip_protocol(name)
            if info["size"] is None:
                what, remedy = "its server does not report its length", "fetch it with `bloomery download` first"
                raise DataError(Problem(what, "a file that ends early must be noticed", remedy, url))
            found.append(InputFile(url, name, int(info["size"]), version_of(info), url, source))
        return found
    except DataError:
        raise
    except Exception as error:  # every store has its own kinds
        raise unreadable(source, error) from error


def find_local(
    source: str,
    *,
    wanted: Callable[[str], bool] = lambda _: True,
    skip: frozenset[str] = frozenset(),
    guard: OutputGuard | None = None,
) -> list[InputFile]:
    """A file, all files below a folder, or those that a glob matches, by path, each once. In folders, hidden names and
    folders called as in `skip` are passed over, and files whose name is not `wanted`. DataError where anything cannot
    be looked at (a folder that is passed over unnoticed is text that is lost), or where `guard` refuses it."""
    found: dict[str, InputFile] = {}
    guard = guard or OutputGuard()
    try:
        is_there = os.path.lexists(source)
        if not is_there:
            guard.check_pattern(source)
        for path in [source] if is_there else _glob(source):
            inner = [(path, os.path.realpath(path))]
            if os.path.isdir(path):
                inner = []
                for folder, real, names in _walk(path, skip):
                    guard.check_folder(folder, real, source)
                    inner += [(os.path.join(folder, name), os.path.join(real, name)) for name in names if wanted(name)]
            for name, real in sorted(inner):
                real = os.path.realpath(name) if os.path.islink(name) else real
                guard.check_file(name, real, source)
                if real not in found:
                    found[real] = _facts(name, real)
    except (OSError, ValueError) as error:  # ValueError: a path that cannot be one
        path = str(getattr(error, "filename", None) or source)
        raise unreadable(path.removesuffix("/."), error) from error
    return list(found.values())


def _facts(path: str, real: str) -> InputFile:
    try:
        facts = os.stat(path)
    except FileNotFoundError:
        if not os.path.islink(path):
            raise
        what, rule = f"is a link to nothing: there is no {real}", "a link stands for a file"
        raise DataError(Problem(what, rule, "correct the link, or remove it", path)) from None
    if not stat.S_ISREG(facts.st_mode):
        what, rule = "is no regular file", "a pipe, a socket or a device has no content that stays"
        raise DataError(Problem(what, rule, "remove it, or name the files with a glob such as 'folder/**/*.py'", path))
    return InputFile(path, path, facts.st_size, str(facts.st_mtime_ns), real)


def _walk(folder: str, skip: frozenset[str] = frozenset()) -> Iterator[tuple[str, str, list[str]]]:
    """(folder, its real path, the names of its files) of the folder and all below it, hidden ones apart. Links are
    followed last, so that what is also reached without them keeps its name. No folder is entered twice, so that a link
    to a folder above does no harm."""
    entered: set[str] = set()
    waiting = [folder]
    while waiting:
        for here, folders, names in os.walk(waiting.pop(0), onerror=_raise):
            real = os.path.realpath(here)
            visible = (
                [] if real in entered else [name for name in sorted(folders) if name[0] != "." and name not in skip]
            )
            links = [name for name in visible if os.path.islink(os.path.join(here, name))]
            folders[:] = [name for name in visible if name not in links]
            waiting += [os.path.join(here, name) for name in links]
            if real not in entered:
                entered.add(real)
                yield here, real, [name for name in names if name[0] != "."]


def _raise(error: OSError) -> NoReturn:
    raise error


def _glob(pattern: str) -> list[str]:
    """As glob.glob, but a folder that it may not read is an error, and `**` enters no folder twice."""
    segments = pattern.split("/")
    if "**" in segments:
        at = segments.index("**")
        tops = _glob("/".join(segments[:at])) if any(segments[:at]) else ["/" if at else "."]
        folders = [here for top in tops if os.path.isdir(top) for here, _, _ in _walk(top)]
        if not at:
            folders = ["" if folder == "." else folder.removeprefix("./") for folder in folders]
        tail = "/".join(segments[at + 1 :])
        found = ([folder or "."] if not tail else _glob(os.path.join(escape(folder), tail)) for folder in folders)
        return sorted({path for paths in found for path in paths})
    for at in range(1, len(segments)):
        if has_magic("/".join(segments[: at + 1])):
            for folder in glob("/".join(segments[:at]) + "/"):
                os.scandir(f"{folder}.").close()  # OSError where it may not be listed or searched
    return sorted(glob(pattern))


class OutputGuard:
    """What a command writes. No source may reach it, or the next run would take it for text. What is not written yet
    counts as if it were there: a first run is refused like the second."""

    def __init__(self, outputs: Iterable[str] = (), *, chunks: Sequence[str] = ()) -> None:
        """`outputs`: those of the sections of a recipe. `chunks`: paths that `bloomery extract` writes."""
        self._owners: dict[str, str] = {}
        """By real path."""
        self._begun: dict[str, str] = {}
        """By how real paths begin: what a run writes before the shard."""
        self._rule = "chunks would be made of chunks" if chunks else "the next run would take the shard for text"
        for path in chunks:
            self._owners[os.path.realpath(path)] = f"--output {os.path.dirname(path)}"
        for output in outputs:
            real = os.path.join(os.path.realpath(os.path.dirname(output)), os.path.basename(output))
            files = (f"{real}.bin", f"{real}.idx", manifest_path(real), origins_path(real), f"{real}.parts")
            owner = f"prepare.output {output}"
            self._owners |= dict.fromkeys(files, owner)
            self._begun |= dict.fromkeys((f"{real}.parts/", f"{real}{PARTIAL}", f"{real}.verify-"), owner)

    def check_file(self, path: str, real: str, source: str) -> None:
        owner = self._owners.get(real) or next(
            (self._begun[start] for start in self._begun if real.startswith(start)), ""
        )
        if owner:
            self._refuse(path, owner, source)

    def check_folder(self, folder: str, real: str, source: str) -> None:
        """A folder of which all files are read."""
        for target, owner in self._owners.items():
            there, names = _existing_folder(target)
            if there == real and _visible(names):
                self._refuse(os.path.join(folder, *names), owner, source)

    def check_pattern(self, pattern: str) -> None:
        """A glob, or the path of what does not exist: it may reach, by links as well, what will be written."""
        root = "/" if pattern.startswith("/") else "."
        segments = [*filter(None, pattern.split("/")), *(["*"] if pattern.endswith("/") else [])]
        for target, owner in self._owners.items():
            there, names = _existing_folder(target)
            for at in range(len(segments)):
                if _fits(segments[at:], names):
                    tops = _glob(os.path.join(root, *segments[:at]))
                    if there in map(os.path.realpath, tops):
                        self._refuse(target, owner, pattern)

    def _refuse(self, path: str, owner: str, source: str) -> NoReturn:
        what = f"belongs to {owner}, and the source {source!r} reaches it"
        raise DataError(Problem(what, self._rule, "choose an output outside of all sources", path))


def _existing_folder(path: str) -> tuple[str, list[str]]:
    """The nearest one above that is there, and the names below it."""
    folder, name = os.path.split(path)
    names = [name]
    while not os.path.lexists(folder):
        folder, name = os.path.split(folder)
        names.insert(0, name)
    return folder, names


def _visible(names: list[str]) -> bool:
    return not any(name.startswith(".") for name in names)


def _fits(segments: list[str], names: list[str]) -> bool:
    """Whether a glob reaches a path, or a folder of it, of which then all is read that is not hidden."""
    if not segments:
        return _visible(names)
    if segments[0] == "**":
        return any(_fits(segments[1:], names[count:]) for count in range(len(names) + 1) if _visible(names[:count]))
    if not names or not fnmatchcase(names[0], segments[0]):
        return False
    return (_visible(names[:1]) or segments[0].startswith(".")) and _fits(segments[1:], names[1:])


def unreadable(path: str, error: Exception) -> DataError:
    reason = (error.strerror if isinstance(error, OSError) else None) or first_line(error)
    remedy = "check the address and what it needs to log in" if is_url(path) else "check its permissions and storage"
    if is_url(path) and is_stumble(error):
        remedy = (
            "write the address in full, such as s3://bucket/path, or dir://path::s3://bucket for a store in another"
        )
    return DataError(Problem(f"cannot be read: {reason}", "", remedy, path))
