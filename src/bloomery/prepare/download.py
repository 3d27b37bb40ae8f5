"""`bloomery download`: every file of a manifest, complete and verified, or an error that names each one that is not.

`requests` speaks HTTP (redirects, proxies, logins, TLS), fsspec everything else.
"""

from __future__ import annotations

import errno
import hashlib
import json
import math
import os
import random
import re
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Annotated, Any
from urllib.parse import unquote

import requests
import urllib3
import xxhash
from pydantic import BaseModel, ConfigDict, Field, StringConstraints, TypeAdapter, ValidationError, field_validator
from pydantic import ValidationInfo as Info

from bloomery import __version__
from bloomery.base.bounded import LARGE_BYTES, open_regular, parse_json, parse_yaml, read_text, wrong_fields
from bloomery.base.errors import DataError, Problem
from bloomery.base.storage import locked, open_plain, publish, write_all, writing, written_to
from bloomery.prepare.sources import first_line, open_store

STATE_FILE = ".bloomery-download.jsonl"
AGAIN = "; run the command again afterwards: what is complete is kept"
"""What `download` and `extract` add to errors of the disk."""
FIRST_WAIT_SECONDS, LONGEST_WAIT_SECONDS = 0.5, 60.0
"""Between attempts; doubled with every failure in a row."""
_LONGEST_RETRY_AFTER_SECONDS = 3600.0
_BLOCK_BYTES = 1 << 20
_FORM = "a manifest is a list of {url, size, sha256 or md5 or xxh3, path}, of which all but url may be left out"
_HASHES: dict[str, Any] = {"sha256": "sha256", "md5": "md5", "xxh3": xxhash.xxh3_64, "xxh3_128": xxhash.xxh3_128}


class RemoteFile(BaseModel):
    """An entry of a manifest."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    url: Annotated[str, StringConstraints(pattern=r"^\S+$")]
    size: Annotated[int, Field(ge=0)] | None = None
    sha256: Annotated[str, StringConstraints(pattern="^[0-9a-fA-F]{64}$", to_lower=True)] | None = None
    md5: Annotated[str, StringConstraints(pattern="^[0-9a-fA-F]{32}$", to_lower=True)] | None = None
    xxh3: Annotated[str, StringConstraints(pattern="^([0-9a-fA-F]{16}){1,2}$", to_lower=True)] | None = None
    path: str = Field("", validate_default=True)
    """Below the output folder; by default the last part of the URL."""

    @property
    def hashes(self) -> dict[str, str]:
        """Empty where nothing but the size can be verified."""
        found = {"sha256": self.sha256, "md5": self.md5, f"xxh3{'_128' * (len(self.xxh3 or '') == 32)}": self.xxh3}
        return {name: value for name, value in found.items() if value is not None}

    @field_validator("path")
    @classmethod
    def _below_the_output_folder(cls, path: str, info: Info) -> str:
        name = PurePosixPath(path or unquote(public_url(info.data.get("url", ""))).rpartition("/")[2])
        is_ours = name.name == STATE_FILE or (name.name.startswith(".") and ".part" in name.name)
        is_path = name.parts and not name.is_absolute() and ".." not in name.parts
        if is_ours or not is_path or not re.fullmatch("[^\0\ud800-\udfff]+", str(name)):
            raise ValueError(f"{str(name)!r} is not a name below the output folder")
        return str(name)


def read_download_manifest(path: str) -> list[RemoteFile]:
    """A list of files in JSON, JSONL or YAML. DataError with everything that is wrong in it."""
    try:
        text = read_text(path, LARGE_BYTES, encoding="utf-8")
        if path.endswith(".jsonl"):
            content = [parse_json(line) for line in text.split("\n") if line.strip()]
        else:
            content = parse_yaml(text) if path.endswith((".yaml", ".yml")) else parse_json(text)
        wanted = TypeAdapter(list[RemoteFile]).validate_python(content)
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or str(error)
        what = f"has {wrong_fields(error)}" if isinstance(error, ValidationError) else f"cannot be read: {why}"
        raise DataError(Problem(what, _FORM, "correct the file, or the path to it", path)) from error
    counts = Counter(file.path for file in wanted)
    if not wanted or max(counts.values()) > 1:
        what = f"has two files for the path {max(counts, key=counts.__getitem__)}" if wanted else "lists no file"
        raise DataError(Problem(what, "every file needs a path of its own", "give one of them another `path`", path))
    return wanted


def public_url(url: str) -> str:
    """Without user, password and query, which may hold secrets; also of what is no URL."""
    return re.sub("(?<=://)[^/?#]*@", "", re.split("[?#]", url)[0])


@dataclass
class DownloadResult:
    files: int = 0
    """In the manifest."""
    bytes: int = 0
    """Of the files that are complete."""
    downloaded: int = 0
    already_there: int = 0
    without_checksum: int = 0
    """Complete files whose content the manifest cannot verify."""
    failures: list[dict[str, str]] = field(default_factory=list)
    """`path`, `url` and `reason` of each."""


class FetchError(Exception):
    """The file cannot be downloaded; the text is the reason. Another attempt may help if it is `retryable`."""

    def __init__(
        self, why: str, *, retryable: bool = False, start_over: bool = False, wait_seconds: float = 0.0
    ) -> None:
        super().__init__(why)
        self.retryable, self.start_over, self.wait_seconds = retryable or start_over, start_over, wait_seconds


@written_to("--output", AGAIN)
def download(
    wanted: Sequence[RemoteFile],
    folder: Path,
    *,
    jobs: int,
    retries: int = 8,
    timeout_seconds: float = 60.0,
    progress: Callable[[DownloadResult], None] = lambda _: None,
) -> DownloadResult:
    """Bring every file into `folder`. Files that cannot be downloaded are in the result; StorageError ends it at once.

    `retries`: attempts after the first, counted from 0 again whenever one has received more of the file.
    """
    result = DownloadResult(files=len(wanted))
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
    with locked(folder), ThreadPoolExecutor(jobs) as pool:
        downloads = _Downloads(folder, retries, timeout_seconds)
        try:
            futures = {pool.submit(downloads.one, file): file for file in wanted}
            for future in as_completed(futures):
                file = futures[future]
                try:
                    size, is_new = future.result()
                except FetchError as error:
                    result.failures.append({"path": file.path, "url": public_url(file.url), "reason": str(error)})
                else:
                    result.bytes += size
                    result.downloaded += is_new
                    result.already_there += not is_new
                    result.without_checksum += not file.hashes
                progress(result)
        except BaseException:
            downloads.stop.set()
            pool.shutdown(wait=True, cancel_futures=True)
            raise
        finally:
            downloads.state.close()
    order = [file.path for file in wanted]
    result.failures.sort(key=lambda failure: order.index(failure["path"]))
    return result


class _Downloads:
    """What all threads share: which files are verified, and a stop."""

    def __init__(self, folder: Path, retries: int, timeout_seconds: float) -> None:
        self._folder, self._retries, self._timeout_seconds = folder, retries, timeout_seconds
        self.stop = threading.Event()
        self._verified: dict[str, tuple[list[int], dict[str, str]]] = {}
        """By path, size and time of change of a file that was verified, and its hashes: it is hashed once."""
        with writing(folder / STATE_FILE):
            self.state = open(folder / STATE_FILE, "a+b", opener=open_plain)  # noqa: SIM115 - closed by download
            self.state.seek(0)
            for line in self.state.read(LARGE_BYTES).split(b"\n"):
                with suppress(ValueError, KeyError, TypeError):  # the last one may have been cut off
                    facts = parse_json(line)
                    self._verified[facts["path"]] = [facts["size"], facts["mtime_ns"]], dict(facts["hashes"])

    def one(self, wanted: RemoteFile) -> tuple[int, bool]:
        """(bytes, whether they had to be fetched). FetchError where it cannot be downloaded."""
        path = self._folder / wanted.path
        with writing(path):
            if any(parent.is_symlink() for parent in path.parents if self._folder in parent.parents):
                raise OSError(errno.ELOOP, os.strerror(errno.ELOOP))
            if path.is_dir():
                raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
            is_new = not self._is_there(wanted, path)
            if is_new:
                path.parent.mkdir(parents=True, exist_ok=True)
                self._remember(wanted, path, self._fetch(wanted, path))
            return path.stat().st_size, is_new

    def _is_there(self, wanted: RemoteFile, path: Path) -> bool:
        """Whether the file is there and is the one that is wanted; only what was not verified before is hashed."""
        if not path.is_file() or wanted.size not in (None, path.stat().st_size):
            return False
        stamp, hashes = self._verified.get(wanted.path, ([], {}))
        is_known = stamp == [path.stat().st_size, path.stat().st_mtime_ns]
        if not wanted.hashes:  # nor a size: only what was fetched before is known to be complete
            return wanted.size is not None or is_known
        if not is_known or not wanted.hashes.keys() <= hashes.keys():
            hashes = _hashes(path, wanted)
            self._remember(wanted, path, hashes)
        return wanted.hashes.items() <= hashes.items()

    def _remember(self, wanted: RemoteFile, path: Path, hashes: Mapping[str, str]) -> None:
        facts = {"path": wanted.path, "size": path.stat().st_size, "mtime_ns": path.stat().st_mtime_ns}
        self.state.write(json.dumps({**facts, "hashes": hashes}).encode() + b"\n")
        self.state.flush()

    def _fetch(self, wanted: RemoteFile, path: Path) -> dict[str, str]:
        """The retry loop; returns hashes. What has arrived waits in a hidden file, which no glob takes for data."""
        stem = path.name if len(os.fsencode(path.name)) < 250 else hashlib.sha256(path.name.encode()).hexdigest()
        part = path.with_name(f".{stem}.part")
        failures, furthest, wait_seconds = 0, _size_of(part), 0.0
        while True:
            if self.stop.wait(wait_seconds):
                raise FetchError("stopped")
            try:
                if not wanted.hashes:  # the version of the file that the first bytes are of is unknown
                    part.unlink(missing_ok=True)
                if not wanted.hashes or _size_of(part) != wanted.size:
                    self._receive(wanted, part)
                hashes = _hashes(part, wanted)  # of what is on the disk, not of what has arrived
                for name, expected in wanted.hashes.items():
                    if hashes[name] != expected:
                        why = f"its {name} is {hashes[name]}, the manifest says {expected}"
                        raise FetchError(why, start_over=True)
                publish(part, path)
                return hashes
            except FetchError as error:
                if not error.retryable:
                    raise
                failures = 1 if _size_of(part) > furthest else failures + 1
                furthest = max(furthest, _size_of(part))
                if error.start_over:
                    part.unlink(missing_ok=True)
                if failures > self._retries:
                    raise FetchError(f"{error} (gave up after {failures} attempts)") from error
                back_off = random.uniform(0.25, 0.5) * min(LONGEST_WAIT_SECONDS, FIRST_WAIT_SECONDS * 2**failures)
                wait_seconds = max(back_off, error.wait_seconds)

    def _receive(self, wanted: RemoteFile, part: Path) -> None:
        """Append what is missing. Read errors are retried, write errors are the user's."""
        begun = _size_of(part) if _size_of(part) <= (wanted.size or math.inf) else 0
        with ExitStack() as stack:
            with _network_errors(wanted.url):
                have, total, read = _opened(wanted.url, begun, self._timeout_seconds, stack)
            file = stack.enter_context(open(part, "ab", 0, opener=open_plain))
            whole = total if wanted.size is None else wanted.size
            if whole is None and not wanted.hashes:
                raise FetchError("the server does not say how long it is: give its size or checksum in the manifest")
            if total not in (None, whole):
                raise FetchError(f"the server has {total} bytes, the manifest says {whole}", start_over=True)
            file.truncate(have)
            while True:
                with _network_errors(wanted.url):
                    block = bytes(read())
                if not block:
                    break
                write_all(file.fileno(), block)
                have += len(block)
                if self.stop.is_set():
                    raise FetchError("stopped")
                if whole is not None and have > whole:
                    raise FetchError(f"the server sent more than {whole} bytes", start_over=True)
        if whole is not None and have < whole:
            raise FetchError(f"only {have} of {whole} bytes arrived", retryable=True)


def _size_of(part: Path) -> int:
    return part.stat().st_size if part.exists() else 0


def _hashes(path: Path, wanted: RemoteFile) -> dict[str, str]:
    found = {}
    for name in {"sha256": "", **wanted.hashes}:
        with open(path, "rb", opener=open_regular) as file:
            found[name] = hashlib.file_digest(file, _HASHES[name]).hexdigest()
    return found


def _opened(
    url: str, offset: int, timeout_seconds: float, stack: ExitStack
) -> tuple[int, int | None, Callable[[], Any]]:
    """(the byte at which its content begins: `offset` or 0; bytes of the whole file, where that is known; a function
    that reads some more of them)."""
    if re.match("https?://", url, re.I):
        headers = {"User-Agent": f"bloomery/{__version__}", "Accept-Encoding": "identity"}
        headers |= {"Range": f"bytes={offset}-"} if offset else {}
        answer = stack.enter_context(requests.get(url, headers=headers, stream=True, timeout=timeout_seconds))
        return *_checked(answer, offset), partial(answer.raw.read1, _BLOCK_BYTES, decode_content=False)
    store, path = open_store(url)
    if store.isdir(path):
        raise FetchError("it is a folder, not a file")
    file = stack.enter_context(store.open(path, "rb"))
    file.seek(offset)
    return offset, store.info(path).get("size"), partial(file.read, _BLOCK_BYTES)


def _checked(answer: Any, offset: int) -> tuple[int, int | None]:
    """(first byte of its body, bytes of the whole file) of an answer to a request for the bytes from `offset` on."""
    status, headers = answer.status_code, answer.headers
    if status >= 500 or status in (408, 416, 425, 429):
        wait_seconds = min(urllib3.Retry().get_retry_after(answer.raw) or 0.0, _LONGEST_RETRY_AFTER_SECONDS)
        what, start_over = f"the server answers {status} {answer.reason}", status == 416
        raise FetchError(what, retryable=True, start_over=start_over, wait_seconds=wait_seconds)
    if status not in (200, 206):
        raise FetchError(f"the server answers {status} {answer.reason}")
    length = headers.get("Content-Length", "")
    if status == 206:
        found = re.fullmatch(r"bytes (\d+)-\d+/(\d+|\*)", headers.get("Content-Range", "").strip())
        if found is None or int(found[1]) != offset:
            raise FetchError(f"the server sent another range than the one from byte {offset}", start_over=True)
        length = found[2]
    is_encoded = headers.get("Content-Encoding", "identity").lower() != "identity"  # the length is not of the file
    return offset if status == 206 else 0, int(length) if length.isdecimal() and not is_encoded else None


@contextmanager
def _network_errors(url: str) -> Iterator[None]:
    """What libraries raise, as FetchError. Never with the URL, which may hold secrets."""
    try:
        yield
    except FetchError:
        raise
    except DataError as error:
        raise FetchError(f"it {error.problems[0].what}: {error.problems[0].remedy}") from error
    except FileNotFoundError as error:
        raise FetchError("there is no such file") from error
    except Exception as error:  # every library has its own
        is_final = isinstance(error, ValueError | PermissionError | AttributeError | TypeError | LookupError)
        is_http = re.match("https?://", url, re.I)
        if is_http and is_final:
            raise FetchError("its URL, or one that it redirects to, is not valid") from error
        cause: BaseException = error
        while is_http and (inner := cause.__cause__ or cause.__context__):  # the texts of the outer ones hold the URL
            cause = inner
        why = f"{'no connection, or it was lost' if is_http else 'it cannot be read'}: {first_line(cause)}"
        raise FetchError(why, retryable=not is_final) from error
