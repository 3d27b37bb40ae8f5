"""`bloomery download`: every file of a manifest, complete and verified, or an error that names each one that is not.

`requests` speaks HTTP (redirects, proxies, logins, TLS), fsspec everything else.
"""

import errno
import hashlib
import os
import random
import re
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import as_completed
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path, PurePosixPath
from threading import Event
from typing import Annotated, Any
from urllib.parse import unquote

import requests
import urllib3
import xxhash
from pydantic import BaseModel, ConfigDict, Field, StringConstraints, TypeAdapter, ValidationError, field_validator

from bloomery import __version__
from bloomery.base.bounded import LARGE_BYTES, in_time, open_regular, parse_json, parse_yaml, read_text, wrong_fields
from bloomery.base.doing import doing
from bloomery.base.errors import DataError, Problem, StorageError, first_line
from bloomery.base.storage import locked, make_folder, open_plain, publish, write_all, writing, written_to
from bloomery.base.units import format_seconds
from bloomery.prepare.pool import thread_pool
from bloomery.prepare.sources import open_store

AGAIN = "; run the command again afterwards: what is complete is kept"
"""What `download` and `extract` add to errors of the disk."""
FIRST_WAIT_SECONDS, LONGEST_WAIT_SECONDS = 0.5, 60.0
"""Between attempts; doubled with every failure in a row."""
_LONGEST_ASKED_SECONDS = 600.0
"""A server may ask for; whoever asks for more is not waited for."""
_LEAST_BYTES_PER_SECOND = 1 << 10
"""A connection that brings less than this for the time of the timeout is ended, and does not count as a step ahead."""
_MOST_UNKNOWN_BYTES = 4 << 30
"""Of a file whose length neither the manifest nor the server knows."""
_NAME_ERRORS = (errno.ENAMETOOLONG, errno.EISDIR, errno.ENOTDIR, errno.EEXIST)
_BLOCK_BYTES = 1 << 20
_MOST_TIMEOUTS = 10
"""For all headers of an answer and of the redirects before it: a server can send some for ever."""
_FINAL = (FileNotFoundError, IsADirectoryError, PermissionError, ValueError, AttributeError, TypeError, LookupError)
_FORM = "a manifest is a list of {url, size, sha256 or md5 or xxh3, path}, of which all but url may be left out"


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
        return self.model_dump(include={"sha256", "md5", "xxh3"}, exclude_none=True)

    @field_validator("path")
    @classmethod
    def _below_the_output_folder(cls, path: str, info: Any) -> str:
        name = PurePosixPath(path or unquote(public_url(info.data.get("url", ""))).rpartition("/")[2])
        is_ours = re.fullmatch(r"\.lock(-\d+-of-\d+)?", name.name) or (
            name.name.startswith(".") and ".part" in name.name
        )
        is_path = name.parts and not name.is_absolute() and ".." not in name.parts
        if is_ours or not is_path or not re.fullmatch("[^\0\ud800-\udfff]+", str(name)):
            raise ValueError(f"{str(name)!r} is not a name below the output folder")
        return str(name)


def read_download_manifest(path: str) -> list[RemoteFile]:
    """A list of files in JSON, JSONL or YAML. DataError with everything that is wrong in it."""
    try:
        text = read_text(path, LARGE_BYTES, encoding="utf-8")
        parse = parse_yaml if path.endswith((".yaml", ".yml")) else parse_json
        content = [parse(line) for line in text.split("\n") if line.strip()] if path.endswith(".jsonl") else parse(text)
        wanted = TypeAdapter(Annotated[list[RemoteFile], Field(min_length=1)]).validate_python(content)
        path_of, count = Counter(file.path for file in wanted).most_common(1)[0]
        if count > 1:
            raise ValueError(f"it has two files for the path {path_of}: give one of them another `path`")
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or str(error)
        what = f"has {wrong_fields(error)}" if isinstance(error, ValidationError) else f"cannot be used: {why}"
        raise DataError(Problem(what, _FORM, "correct the file, or the path to it", path)) from error
    return wanted


def public_url(url: str) -> str:
    """Without user, password and query, which may hold secrets; also of what is no URL."""
    return re.sub("(?<=://)[^/?#]*@", "", re.split("[?#]", url)[0])


@dataclass
class DownloadResult:
    files: int = 0
    """In the manifest, or in a share of it."""
    bytes: int = 0
    """Of the files that are complete."""
    downloaded: int = 0
    already_there: int = 0
    without_checksum: int = 0
    """Complete files whose content the manifest cannot verify."""
    failures: list[dict[str, str]] = field(default_factory=list)
    """`path`, `url` and `reason` of each, by path."""


@dataclass(eq=False)
class FetchError(Exception):
    """The file cannot be downloaded. Another attempt may help if it is `retryable`, or has to `start_over`."""

    why: str
    retryable: bool = False
    start_over: bool = False
    wait_seconds: float = 0.0
    step_bytes: float = 0.0
    """What the attempt must have brought beyond, to count as one that got further."""


@written_to("--output", AGAIN)
def download(
    wanted: Sequence[RemoteFile],
    folder: Path,
    *,
    jobs: int,
    retries: int = 8,
    timeout_seconds: float = 60.0,
    share: tuple[int, int] | None = None,
) -> DownloadResult:
    """Bring every file into `folder`. Files that cannot be downloaded are in the result; StorageError ends it at once.

    `retries`: attempts after the first, counted from 0 again whenever one has brought the file further.
    `share`: (k, n) for the files k, k + n, k + 2n, ..., as one of several processes or machines.
    """
    wanted = wanted[share[0] :: share[1]] if share else wanted
    result = DownloadResult(files=len(wanted))
    make_folder(folder)
    with doing(f"downloading to {folder}") as work, locked(folder, share), thread_pool(jobs) as (pool, stop):
        futures = {pool.submit(_bring, file, folder, retries, timeout_seconds, stop): file for file in wanted}
        for future in work.over(as_completed(futures), len(wanted)):
            file = futures[future]
            try:
                size, is_new = future.result()
            except (FetchError, StorageError) as error:
                why = error.why if isinstance(error, FetchError) else error.problems[0].what
                if isinstance(error, StorageError) and getattr(error.__cause__, "errno", 0) not in _NAME_ERRORS:
                    raise
                result.failures.append({"path": file.path, "url": public_url(file.url), "reason": why})
            else:
                result.bytes += size
                result.downloaded += is_new
                result.already_there += not is_new
                result.without_checksum += not file.hashes
    result.failures.sort(key=lambda failure: failure["path"])
    return result


def _bring(wanted: RemoteFile, folder: Path, retries: int, timeout_seconds: float, stop: Event) -> tuple[int, bool]:
    """(bytes, whether they had to be fetched). FetchError where it cannot be downloaded."""
    path = folder / wanted.path
    with writing(path):
        if any(parent.is_symlink() for parent in path.parents if folder in parent.parents):
            raise OSError(errno.ELOOP, os.strerror(errno.ELOOP))
        # Without size and checksum nothing tells whether a file that is there is the one that is wanted.
        is_known = path.is_file() and (wanted.size == path.stat().st_size or (wanted.size is None and wanted.hashes))
        is_new = not is_known or bool(_mismatch(path, wanted))
        if is_new:
            path.parent.mkdir(parents=True, exist_ok=True)
            _fetch(wanted, path, retries, timeout_seconds, stop)
        return path.stat().st_size, is_new


def _fetch(wanted: RemoteFile, path: Path, retries: int, timeout_seconds: float, stop: Event) -> None:
    """The retry loop. What has arrived waits in a hidden file, which no glob takes for data."""
    part = path.with_name(f".{path.name}.part")
    failures, furthest, wait_seconds = 0, _size_of(part), 0.0
    while not stop.wait(wait_seconds):
        try:
            if not wanted.hashes:  # the version of the file that the first bytes are of is unknown
                part.unlink(missing_ok=True)
            if not wanted.hashes or _size_of(part) != wanted.size:
                _receive(wanted, part, timeout_seconds, stop)
            if why := _mismatch(part, wanted):  # of what is on the disk, not of what has arrived
                raise FetchError(why, start_over=True)
            publish(part, path)
            return
        except FetchError as error:
            if not (error.retryable or error.start_over):
                raise
            failures = 1 if _size_of(part) - furthest > error.step_bytes else failures + 1
            furthest = max(furthest, _size_of(part))
            if error.start_over:
                part.unlink(missing_ok=True)
            if failures > retries:
                raise FetchError(f"{error.why} (gave up after {failures} attempts)") from error
            back_off = random.uniform(0.25, 0.5) * min(LONGEST_WAIT_SECONDS, FIRST_WAIT_SECONDS * 2**failures)
            wait_seconds = max(back_off, error.wait_seconds)
    raise FetchError("stopped")


def _receive(wanted: RemoteFile, part: Path, timeout_seconds: float, stop: Event) -> None:
    """Append what is missing. Read errors are retried, write errors are the user's."""
    with ExitStack() as stack:
        with _network_errors(wanted.url):
            have, total, read = _opened(wanted.url, _size_of(part), timeout_seconds, stack)
        file = stack.enter_context(open(part, "ab", 0, opener=open_plain))
        whole = total if wanted.size is None else wanted.size
        if whole is None and not wanted.hashes:
            raise FetchError("the server does not say how long it is: give its size or checksum in the manifest")
        if total not in (None, whole):
            raise FetchError(f"the server has {total} bytes, the manifest says {whole}", start_over=True)
        file.truncate(have)
        begun, before, least = time.monotonic(), have, _LEAST_BYTES_PER_SECOND * timeout_seconds
        while have <= (_MOST_UNKNOWN_BYTES if whole is None else whole):
            with _network_errors(wanted.url):
                block = bytes(read())
            if not block:
                break
            write_all(file.fileno(), block)
            have += len(block)
            if stop.is_set():
                raise FetchError("stopped")
            if time.monotonic() - begun > timeout_seconds:
                if have - before < least:
                    why = f"less than {_LEAST_BYTES_PER_SECOND} bytes a second arrived"
                    raise FetchError(why, retryable=True, step_bytes=least)
                begun, before = time.monotonic(), have
    if whole is None and have > _MOST_UNKNOWN_BYTES:
        raise FetchError(f"{have} bytes arrived, and nobody knows how many there are: give its size in the manifest")
    if whole not in (None, have):
        raise FetchError(f"{have} of {whole} bytes arrived", retryable=True, start_over=have > (whole or 0))


def _size_of(part: Path) -> int:
    return part.stat().st_size if part.exists() else 0


def _mismatch(path: Path, wanted: RemoteFile) -> str:
    """The first checksum that differs; empty where none does."""
    for name, expected in wanted.hashes.items():
        xxh3 = xxhash.xxh3_64 if len(expected) == 16 else xxhash.xxh3_128
        with open(path, "rb", opener=open_regular) as file:
            found = hashlib.file_digest(file, xxh3 if name == "xxh3" else name).hexdigest()
        if found != expected:
            return f"its {name} is {found}, the manifest says {expected}"
    return ""


def _opened(url: str, offset: int, timeout: float, stack: ExitStack) -> tuple[int, int | None, Callable[[], Any]]:
    """(the byte at which its content begins: `offset` or 0; bytes of the whole file, where that is known; a function
    that reads some more of them)."""
    if not re.match("https?://", url, re.I):
        store, path = open_store(url)
        file = stack.enter_context(store.open(path, "rb"))
        file.seek(offset)
        return offset, store.info(path).get("size"), partial(file.read, _BLOCK_BYTES)
    headers = {"User-Agent": f"bloomery/{__version__}", "Accept-Encoding": "identity"}
    headers |= {"Range": f"bytes={offset}-"} if offset else {}
    hub = os.environ.get("HF_ENDPOINT", "https://huggingface.co").rstrip("/")
    if url.startswith(f"{hub}/") and (token := os.environ.get("HF_TOKEN")):
        headers["Authorization"] = f"Bearer {token}"  # which `requests` does not send to another host
    hooks = {"response": _leave_redirect}
    ask = partial(requests.get, url, headers=headers, hooks=hooks, stream=True, timeout=timeout)
    try:
        answer = stack.enter_context(in_time(_MOST_TIMEOUTS * timeout, ask))
    except TimeoutError:
        raise FetchError("its headers do not come to an end", retryable=True) from None
    if (status := answer.status_code) not in (200, 206):
        may_pass = status >= 500 or status in (408, 425, 429)
        why, asked = f"the server answers {status} {answer.reason}", 0.0
        with suppress(ValueError, urllib3.exceptions.InvalidHeader):
            asked = (urllib3.Retry().get_retry_after(answer.raw) or 0.0) if may_pass else 0.0
        if asked > _LONGEST_ASKED_SECONDS:
            raise FetchError(
                f"{why}, and asks for a wait of {format_seconds(asked)} or more: run the command again then"
            )
        raise FetchError(why, may_pass, status == 416, asked)
    length = answer.headers.get("Content-Length", "")
    if status == 206:
        found = re.fullmatch(r"bytes (\d+)-\d+/(\d+|\*)", answer.headers.get("Content-Range", "").strip())
        if found is None or int(found[1]) != offset:
            raise FetchError(f"the server sent another range than the one from byte {offset}", start_over=True)
        length = found[2]
    is_packed = re.search(r"\.(t?gz|zst)$", public_url(url), re.I)  # which servers call an encoding of the body too
    is_encoded = not is_packed and answer.headers.get("Content-Encoding", "identity").lower() != "identity"
    total = int(length) if length.isdecimal() and not is_encoded else None
    return offset if status == 206 else 0, total, partial(answer.raw.read1, _BLOCK_BYTES, decode_content=False)


def _leave_redirect(answer: requests.Response, **_: Any) -> None:
    """`requests` would read all of its body, which may have no end."""
    if answer.is_redirect:
        answer.close()
        answer._content = b""


@contextmanager
def _network_errors(url: str) -> Iterator[None]:
    """What libraries raise, as FetchError. Never with the URL, which may hold secrets."""
    try:
        yield
    except FetchError:
        raise
    except DataError as error:
        raise FetchError(f"it {error.problems[0].what}: {error.problems[0].remedy}") from error
    except Exception as error:  # every library has its own
        is_final = isinstance(error, _FINAL)
        is_http = re.match("https?://", url, re.I)
        if is_http and is_final:
            raise FetchError("its URL, or one that it redirects to, is not valid") from error
        cause: BaseException = error
        while is_http and (inner := cause.__cause__ or cause.__context__):  # the texts of the outer ones hold the URL
            cause = inner
        why = f"{'no connection, or it was lost' if is_http else 'it cannot be read'}: {first_line(cause)}"
        raise FetchError(why, retryable=not is_final) from error
