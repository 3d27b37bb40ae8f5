"""Where raw text lies: files, folders, globs, URLs (fsspec), and Python's own library. Each becomes a sorted list."""

import os
import re
import sysconfig
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from glob import escape, glob, has_magic
from typing import IO, Any, NoReturn

from bloomery.base.bounded import open_regular
from bloomery.base.errors import BloomeryError, DataError, Problem, first_line, unreadable
from bloomery.base.units import counted

STDLIB = "python-stdlib"
"""The source that is on every machine: the source files of this Python's standard library."""
_NOT_STDLIB = frozenset(
    ("site-packages", "dist-packages", "__pycache__", "test", "tests", "idlelib", "lib2to3", "encodings")
)
"""Not part of it, missing from the Pythons of some distributions, or (encodings) tables rather than text."""
LINES = (".jsonl", ".ndjson", ".jsonlines")
"""Files with a record of JSON on each line, in capitals too."""
_COMPRESSIONS = ("zst", "gz")
_NEVER_READ = tuple(
    ".tar .tgz .taz .tzst .tbz .tbz2 .txz .tlz .gzip .zstd .bz2 .xz .lzma .lz4 .br .snappy .zip .7z .rar".split()  # noqa: SIM905
)
"""Archives and other compressions: read as a text, each would be one broken document."""
_OUTPUT = re.compile(r"\.(bin|idx|manifest\.json|origins|(partial-|verify-|parts/).*)", re.DOTALL)
"""What `prepare` writes behind the prefix of a shard."""
EXTRAS = {"s3": ("s3", "s3a"), "gs": ("gs", "gcs"), "abfs": ("abfs", "abfss", "az"), "hf": ("hf",)}
"""What to install for which URLs: `pip install 'bloomery[s3]'`."""
_VERSIONS = ("ETag", "etag", "md5Hash", "blob_id", "last_commit", "LastModified", "last_modified", "mtime", "created")
_READ_AHEAD_BYTES = 1 << 23
_RULE = (
    f"a source is a file, a folder, a glob or a URL, or '{STDLIB}' for Python's own library; paths are relative to "
    "the working directory, `~` is not expanded, and outputs of the recipe are no sources"
)


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
        """zst, gz or nothing."""
        return next((ending for ending in _COMPRESSIONS if self.path.lower().endswith(f".{ending}")), "")

    @property
    def kind(self) -> str:
        """jsonl, parquet, or text: one document."""
        return "jsonl" if self.stem.endswith(LINES) else "parquet" if self.stem.endswith(".parquet") else "text"

    @property
    def stem(self) -> str:
        """The path in lower case, without its compression."""
        return self.path.lower().removesuffix(f".{self.compression}")


def natural_order(path: str) -> list[str | int]:
    """shard9 before shard10. Text and numbers alternate, so that like is compared with like."""
    return [int(part) if part.isdecimal() else part for part in re.split(r"(\d+)", path)]


def find_files(sources: Sequence[str], *, outputs: Sequence[str] = (), which: str | None = None) -> list[InputFile]:
    """Always in the same order, without what `prepare` writes for these `outputs`; `which`: only these, a slice of them
    in natural order. DataError naming every source that matches nothing, files of two sources, and files that are
    packed in a way that is not read."""
    problems: list[Problem] = []
    files: list[InputFile] = []
    owners: dict[str, int] = {}
    prefixes = [os.path.join(os.path.realpath(os.path.dirname(path)), os.path.basename(path)) for path in outputs]
    for number, source in enumerate(sources):
        try:
            found = [
                file
                for file in _find(source)
                if not any(file.real.startswith(each) and _OUTPUT.fullmatch(file.real, len(each)) for each in prefixes)
            ]
        except DataError as error:
            problems += error.problems
            continue
        if not found:
            what, remedy = f"the source {source!r} matches no file", "correct the path in prepare.sources"
            problems.append(Problem(what, _RULE, remedy, source))
        if twice := [file for file in found if owners.setdefault(file.real, number) != number]:
            what = f"is in the source {source!r} and in {sources[owners[twice[0].real]]!r}"
            remedy = "leave it out of one; to train more often on a text, give a shard of its own a `weight`"
            problems.append(Problem(what, "each file counts once", remedy, twice[0].name))
        for file in found:
            if file.stem.endswith((*_NEVER_READ, ".zst", ".gz")) or (file.compression and file.kind == "parquet"):
                rule = "of packed files only lines of JSON and texts in one .zst or .gz are read"
                remedy = "unpack it, or leave it out of the sources"
                problems.append(Problem("is packed in another way", rule, remedy, file.name))
        files += [replace(file, source=number, number=len(files) + index) for index, file in enumerate(found)]
    if problems:
        raise DataError(problems)
    if which is not None:
        first, last = (int(text) if text else None for text in which.split(":"))
        wanted = {file.number for file in sorted(files, key=lambda file: natural_order(file.path))[first:last]}
        if not wanted:
            what = f"prepare.files {which!r} takes none of {counted(len(files), 'file')}"
            raise DataError(Problem(what, "a shard needs a document", "correct it, or prepare.sources"))
        kept = [file for file in files if file.number in wanted]
        files = [replace(file, number=number) for number, file in enumerate(kept)]
    return files


def not_lines(files: Sequence[InputFile]) -> list[str]:
    """A note, or none."""
    whole = sum(file.stem.endswith(".json") for file in files)
    note = f"{counted(whole, '.json file')} taken for one text each: lines of JSON need the ending .jsonl"
    return [note] if whole else []


def _find(source: str) -> list[InputFile]:
    if source == STDLIB:
        folder = sysconfig.get_paths()["stdlib"]
        files = [file for file in find_local(folder, skip=_NOT_STDLIB) if file.path.endswith(".py")]
        return [replace(file, name=STDLIB + file.path.removeprefix(folder)) for file in files]
    return _find_remote(source) if "://" in source else find_local(source)


# ---------------------------------------------------------------- on this machine


def find_local(source: str, *, skip: frozenset[str] = frozenset()) -> list[InputFile]:
    """A file, all files below a folder, or those that a glob matches, by path, each once. In folders, hidden names and
    folders called as in `skip` are passed over. DataError where anything cannot be listed: a folder that is passed over
    unnoticed is text that is lost."""
    found: dict[str, InputFile] = {}
    try:
        for path in [source] if os.path.lexists(source) else _glob(source):
            inner = (os.path.join(folder, name) for folder, names in _walk(path, skip) for name in names)
            for name in sorted(inner) if os.path.isdir(path) else [path]:
                facts, real = os.stat(name), os.path.realpath(name)
                found.setdefault(real, InputFile(name, name, facts.st_size, str(facts.st_mtime_ns), real))
    except (OSError, ValueError) as error:  # ValueError: a path that cannot be one
        raise unreadable(str(getattr(error, "filename", None) or source), error) from error
    return list(found.values())


def _walk(top: str, skip: frozenset[str] = frozenset()) -> Iterator[tuple[str, list[str]]]:
    """(folder, the names of its files) of a folder and of all below it, hidden ones apart. Links are followed, but no
    folder is entered twice."""
    entered: set[str] = set()
    for here, folders, names in os.walk(top, onerror=_raise, followlinks=True):
        if (real := os.path.realpath(here)) in entered:
            folders.clear()
            continue
        entered.add(real)
        visible = [name for name in sorted(folders) if name[0] != "." and name not in skip]
        folders[:] = sorted(visible, key=lambda name: os.path.islink(os.path.join(here, name)))
        yield here, [name for name in names if name[0] != "."]


def _raise(error: OSError) -> NoReturn:
    raise error


def _glob(pattern: str) -> list[str]:
    """As glob.glob, but a folder on the way that may not be listed is an error, and `**` enters no folder twice: that
    of glob.glob follows links in circles."""
    before, recursive, after = pattern.partition("**/")
    if recursive and before.endswith(("/", "")[not before]):
        tops = _glob(before.rstrip("/") or "/") if before else ["."]
        folders = [os.path.normpath(here) for top in tops if os.path.isdir(top) for here, _ in _walk(top)]
        return sorted(
            {path for here in folders for path in _glob(os.path.join("" if here == "." else escape(here), after))}
        )
    segments = pattern.split("/")
    for end in range(1, len(segments)):
        if has_magic("/".join(segments[: end + 1])):
            for folder in glob("/".join([*segments[:end], ""])):
                os.scandir(f"{folder}.").close()
    return sorted(glob(pattern))


@contextmanager
def open_input(file: InputFile) -> Iterator[IO[bytes]]:
    """DataError, which names it, for what fails while it is open: files, stores, decompressors and Arrow each have
    their own kinds of errors."""
    try:
        if file.store:  # opened again: this may be a forked worker, where the parent's connections are of no use
            store = open_store(file.store)[0]
            opened = store.open(file.path, "rb", block_size=_READ_AHEAD_BYTES)
        else:
            opened = open(file.path, "rb", 0, opener=open_regular)  # noqa: SIM115 - closed by `with`
        with opened as raw:
            yield raw
    except (BloomeryError, MemoryError, AssertionError, AttributeError, IndexError):  # ours
        raise
    except Exception as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise unreadable(file.name, error) from error
        what = f"is truncated or damaged: {error}"
        raise DataError(Problem(what, "", "copy or download the file again", file.name)) from error


# ---------------------------------------------------------------- in stores


def open_store(url: str) -> tuple[Any, str]:
    """(fsspec's file system, the path in it). DataError if a package is missing; else what the library raises."""
    import fsspec  # type: ignore[import-untyped]

    fsspec.config.conf.setdefault("http", {}).setdefault("client_kwargs", {"trust_env": True})  # reads ~/.netrc
    try:
        store, path = fsspec.core.url_to_fs(url)
    except ImportError as error:
        scheme = url.partition("://")[0].rpartition("::")[2]
        extra = next((name for name, schemes in EXTRAS.items() if scheme in schemes), None)
        remedy = f"run `pip install 'bloomery[{extra}]'`" if extra else "install it beside Bloomery with pip"
        what = f"needs a package that is not installed: {first_line(error)}"
        raise DataError(Problem(what, remedy=remedy, place=url)) from error
    return store, str(path)


def _find_remote(source: str) -> list[InputFile]:
    try:
        store, path = open_store(source)
        if source.startswith(("file://", "local://")):
            return [replace(file, name=f"file://{file.path}") for file in find_local(path)]
        if store.isfile(path):
            listing = {path: store.info(path)}
        elif store.isdir(path):
            listing = store.find(path, detail=True)
        else:
            listing = {name: info for name, info in store.glob(path, detail=True).items() if info["type"] == "file"}
        found: list[InputFile] = []
        for name, info in sorted(listing.items()):
            if any(part.startswith(".") for part in name.removeprefix(path.rstrip("/")).split("/")):
                continue
            url = store.unstrip_protocol(name)
            if info["size"] is None:
                what, remedy = "its server does not report its length", "fetch it with `bloomery download` first"
                raise DataError(Problem(what, "a file that ends early must be noticed", remedy, url))
            stamp = next((str(info[key]) for key in _VERSIONS if info.get(key) is not None), "")
            found.append(InputFile(url, name, int(info["size"]), stamp, url, source))
        return found
    except DataError:
        raise
    except Exception as error:  # every store has its own kinds
        raise unreadable(source, error) from error
