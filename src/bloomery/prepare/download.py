"""`bloomery download`: every file of a manifest, whole and proven, or an error that names each one that is not."""

from __future__ import annotations

import errno
import json
import re
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any
from urllib.parse import unquote

import yaml

from bloomery.base.bounded import LARGE_BYTES, parse_json, read_text
from bloomery.base.errors import DataError, Problem, StorageError, on_one_line
from bloomery.base.storage import AppendFile, open_plain, reason, writing, written_to
from bloomery.prepare.fetch import Patience, RemoteFile, Stopped, Traffic, fetch, tidy
from bloomery.prepare.output import AGAIN, file_hashes, held_alone
from bloomery.prepare.remote import FetchError, public_url, split_url, url_fingerprint

STATE_FILE = ".bloomery-download.jsonl"
"""What has been proven so far: a line for each file, the last one of a path holds."""
_DIGITS = {"sha256": (64,), "md5": (32,), "xxh3": (16, 32)}
_FIELDS = ("url", "size", *_DIGITS, "path")
_OF_THE_DISK = {errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO, errno.ESTALE}
"""No other file could be written either. Everything else, such as a name that is too long, is about one file."""
_DEEPEST = 64
_FORM = "each entry is {url, size, sha256 or md5 or xxh3, path}; all but url may be left out"


@dataclass(frozen=True)
class Failure:
    path: str
    url: str
    reason: str


@dataclass
class DownloadResult:
    files: int = 0
    """In the manifest."""
    bytes: int = 0
    """Of the files that are complete."""
    downloaded: int = 0
    already_there: int = 0
    without_checksum: int = 0
    """Complete files whose content the manifest does not prove."""
    failures: list[Failure] = field(default_factory=list)


def read_download_manifest(path: str) -> list[RemoteFile]:
    """A list of files in JSON, JSONL or YAML. DataError with everything that is wrong in it."""
    problems: list[Problem] = []
    wanted: list[RemoteFile] = []
    taken: dict[str, str] = {}
    folders: dict[str, str] = {}
    for place, entry in _entries(path):
        try:
            file = _parse(entry)
        except ValueError as error:
            problems.append(Problem(str(error), _FORM, "mend the entry", place))
            continue
        parents = [str(parent) for parent in PurePosixPath(file.path).parents]
        clash = next((taken[path] for path in (file.path, *parents) if path in taken), folders.get(file.path))
        if clash is not None:
            what = f"its path {on_one_line(file.path)} is in the way of that of {clash}"
            problems.append(Problem(what, "every file needs a place of its own", "give it another `path`", place))
        folders |= dict.fromkeys(parents, place)
        taken[file.path] = place
        wanted.append(file)
    if not wanted and not problems:
        problems.append(Problem("lists no file", _FORM, "", path))
    if problems:
        raise DataError(problems)
    return wanted


@written_to("--output", AGAIN)
def download(
    wanted: Sequence[RemoteFile],
    folder: Path,
    *,
    jobs: int,
    patience: Patience,
    progress: Callable[[DownloadResult], None] | None = None,
) -> DownloadResult:
    """Bring every file into `folder`. Files that cannot be had are in the result; StorageError ends it at once."""
    result = DownloadResult(files=len(wanted))
    traffic = Traffic()
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
    with _opened_state(folder / STATE_FILE) as state, ThreadPoolExecutor(jobs) as pool:
        try:
            futures = {pool.submit(_one, file, folder, state, patience, traffic): file for file in wanted}
            for future in as_completed(futures):
                file = futures[future]
                try:
                    size, is_new = future.result()
                except FetchError as error:
                    result.failures.append(Failure(file.path, public_url(file.url), str(error)))
                else:
                    result.bytes += size
                    result.downloaded += is_new
                    result.already_there += not is_new
                    result.without_checksum += not file.hashes
                if progress is not None:
                    progress(result)
        except BaseException:
            traffic.stop.set()
            pool.shutdown(wait=True, cancel_futures=True)
            raise
    order = {file.path: number for number, file in enumerate(wanted)}
    result.failures.sort(key=lambda failure: order[failure.path])
    return result


def _one(wanted: RemoteFile, folder: Path, state: _State, patience: Patience, traffic: Traffic) -> tuple[int, bool]:
    """(bytes, whether they had to be fetched). FetchError where this file cannot be had or cannot have its name."""
    if traffic.stop.is_set():
        raise Stopped
    path = folder / wanted.path
    try:
        with writing(path):
            if any(parent.is_symlink() for parent in path.parents if folder in parent.parents):
                raise OSError(errno.ELOOP, "")
            if path.is_dir():
                raise IsADirectoryError(errno.EISDIR, "")
            is_new = not state.proves(wanted)
            if not is_new:
                tidy(wanted, folder)
            else:
                hashes = fetch(wanted, folder, patience=patience, traffic=traffic)
                state.remember(wanted, hashes)
            return path.stat().st_size, is_new
    except StorageError as error:
        cause = error.__cause__
        if not isinstance(cause, OSError) or cause.errno in _OF_THE_DISK:
            raise
        remedy = "give it another `path` in the manifest, or mend what stands in its way"
        raise FetchError(f"cannot be written: {reason(cause)}: {remedy}") from error


class _State:
    """Remembers which files have been proven, by their size and time of change, so that each is hashed only once."""

    def __init__(self, path: Path) -> None:
        self._folder = path.parent
        self._lines = AppendFile(path, is_whole=_is_json)
        self._known: dict[str, dict[str, Any]] = {}
        self._lock = threading.Lock()
        for line in path.read_bytes().splitlines():
            if _is_json(line):
                facts = parse_json(line)
                self._known[facts["path"]] = facts

    def proves(self, wanted: RemoteFile) -> bool:
        """Whether the file is there and is the one that is wanted."""
        path = self._folder / wanted.path
        try:
            facts = path.stat()
        except (FileNotFoundError, NotADirectoryError):
            return False
        if wanted.size not in (None, facts.st_size) or not path.is_file():
            return False
        known = self._known.get(wanted.path, {})
        if (known.get("size"), known.get("mtime_ns")) == (facts.st_size, facts.st_mtime_ns):
            if not wanted.hashes:
                return wanted.size is not None or bool(known["url"] == url_fingerprint(wanted.url))
            if wanted.hashes.items() <= known["hashes"].items():
                return True
        if wanted.size is None and not wanted.hashes:
            return False  # nothing says that it is whole
        hashes = file_hashes(path, {"sha256", *wanted.hashes})
        if any(hashes[name] != expected for name, expected in wanted.hashes.items()):
            return False
        self.remember(wanted, hashes)
        return True

    def remember(self, wanted: RemoteFile, hashes: Mapping[str, str]) -> None:
        facts = (self._folder / wanted.path).stat()
        record = {
            "path": wanted.path,
            "size": facts.st_size,
            "mtime_ns": facts.st_mtime_ns,
            "hashes": dict(hashes),
            "url": url_fingerprint(wanted.url),
        }
        with self._lock:
            self._known[wanted.path] = record
            self._lines.append(json.dumps(record))

    def close(self) -> None:
        self._lines.close()


@contextmanager
def _opened_state(path: Path) -> Iterator[_State]:
    """The state of a folder, held against other processes."""
    with writing(path):
        lock = open(path, "ab", opener=open_plain)  # noqa: SIM115 - closed below
    with lock, held_alone(lock, path):
        state = _State(path)
        try:
            yield state
        finally:
            state.close()


def _is_json(line: bytes) -> bool:
    try:
        facts = parse_json(line)
    except ValueError:
        return False
    return isinstance(facts, dict) and {"path", "size", "mtime_ns", "hashes", "url"} <= set(facts)


def _entries(path: str) -> list[tuple[str, Any]]:
    """(place, entry) of everything in the manifest."""
    try:
        text = read_text(path, LARGE_BYTES, encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        what = f"cannot be read: {getattr(error, 'strerror', None) or error}"
        raise DataError(Problem(what, "a manifest lists the files to download", "correct the path", path)) from error
    ending = Path(path).suffix
    try:
        if ending == ".jsonl":
            lines = enumerate(text.split("\n"), 1)
            return [(f"{path}:{number}", _line(line)) for number, line in lines if line.strip()]
        if ending == ".json":
            content = parse_json(text)
        elif ending in (".yaml", ".yml"):
            content = _yaml(text)
        else:
            raise DataError(Problem("is no manifest", "it ends in .json, .jsonl or .yaml", "rename it", path))
    except (ValueError, yaml.YAMLError) as error:
        raise DataError(Problem(f"cannot be read: {error}", _FORM, "mend the file", path)) from error
    if not isinstance(content, list):
        raise DataError(Problem(f"holds a {type(content).__name__}", f"a manifest is a list; {_FORM}", "", path))
    return [(f"{path}, entry {number}", entry) for number, entry in enumerate(content, 1)]


def _yaml(text: str) -> Any:
    """ValueError for what could take all memory or crash the library: aliases, and lists deep in each other."""
    loader, depth = getattr(yaml, "CSafeLoader", yaml.SafeLoader), 0
    for event in yaml.parse(text, Loader=loader):
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        if depth > _DEEPEST or isinstance(event, yaml.AliasEvent):
            raise ValueError(f"it has aliases, or is nested more than {_DEEPEST} levels deep")
    return yaml.load(text, Loader=loader)


def _line(text: str) -> Any:
    """The JSON of a line, or the line itself, which is then no entry."""
    try:
        return parse_json(text)
    except ValueError:
        return text


def _parse(entry: Any) -> RemoteFile:
    """ValueError says what is wrong."""
    if not isinstance(entry, dict):
        raise ValueError(f"is {json.dumps(entry, default=str, skipkeys=True)[:80]}, not an object")
    if unknown := [str(key) for key in entry if key not in _FIELDS]:
        raise ValueError(f"has unknown {', '.join(unknown)}")
    url = entry.get("url")
    if not isinstance(url, str) or not url.strip() or any(char.isspace() for char in url) or not _is_text(url):
        raise ValueError(f"has the url {url!r}")
    size = entry.get("size")
    if size is not None and (type(size) is not int or size < 0):
        raise ValueError(f"has the size {size!r}, which is no number of bytes")
    hashes = {}
    for name, lengths in _DIGITS.items():
        if (value := entry.get(name)) is None:
            continue
        if not isinstance(value, str) or len(value) not in lengths or not re.fullmatch("[0-9a-fA-F]+", value):
            digits = " or ".join(str(length) for length in lengths)
            raise ValueError(f"has the {name} {value!r}, which is not {digits} hexadecimal digits")
        hashes["xxh3_128" if name == "xxh3" and len(value) == 32 else name] = value.lower()
    path = entry.get("path") or unquote(split_url(url).path).rpartition("/")[2]
    if not isinstance(path, str) or not _is_safe(path):
        raise ValueError(f"has the path {path!r}, which is not a name below the output folder")
    return RemoteFile(url, str(PurePosixPath(path)), size, hashes)


def _is_text(text: str) -> bool:
    """Not with half a surrogate pair, which JSON can spell but no file name or request can hold."""
    return not any("\ud800" <= char <= "\udfff" for char in text)


def _is_safe(path: str) -> bool:
    """Inside the folder, and not the name of a file of ours."""
    parts = PurePosixPath(path).parts
    hidden = bool(parts) and (parts[-1] == STATE_FILE or (parts[-1][0] == "." and ".part" in parts[-1]))
    return (
        bool(parts)
        and not path.startswith("/")
        and ".." not in parts
        and "\0" not in path
        and not hidden
        and _is_text(path)
    )
