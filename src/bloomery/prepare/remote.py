"""Bytes of a URL from some place on: http and https by the standard library, everything else by fsspec."""

from __future__ import annotations

import base64
import contextlib
import email.utils
import hashlib
import http.client
import re
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any
from urllib.parse import SplitResult, unquote_to_bytes, urlsplit, urlunsplit

from bloomery import __version__
from bloomery.base.errors import DataError
from bloomery.prepare.output import PIECE_BYTES
from bloomery.prepare.stores import first_line, is_stumble, open_store, version_of

_WORTH_ANOTHER_TRY = {408, 425, 429}
"""Besides every 5xx."""
_LONGEST_RETRY_AFTER_SECONDS = 3600.0


class FetchError(Exception):
    """The file cannot be had; the text says why."""


class TryAgainError(Exception):
    """It did not work this time."""

    def __init__(self, reason: str, *, wait_seconds: float | None = None, start_over: bool = False) -> None:
        super().__init__(reason)
        self.wait_seconds = wait_seconds
        """What the server asked for."""
        self.start_over = start_over
        """What has arrived so far is worth nothing."""


@dataclass(frozen=True)
class Remote:
    offset: int
    """Where in the file its bytes begin: what was asked for, or 0."""
    total: int | None
    """Bytes of the whole file, where the server says."""
    validator: str | None
    """Changes when the file does."""
    read: Callable[[], bytes]
    """Some bytes, as they come; empty at the end, also where that comes too early."""
    packing: str = ""
    """How the server has packed them on the way, which nobody had asked for."""


@contextlib.contextmanager
def open_remote(url: str, *, offset: int, validator: str | None, timeout_seconds: float) -> Iterator[Remote]:
    """The bytes from `offset` on, if the file is still the one of `validator` (None: not known)."""
    with contextlib.ExitStack() as closing:
        if split_url(url).scheme in ("http", "https"):
            yield _open_http(url, offset, validator, timeout_seconds, closing)
        else:
            yield _open_fsspec(url, offset, validator, closing)


def split_url(url: str) -> SplitResult:
    """As urlsplit, also of what is no URL, so that it can be named."""
    try:
        return urlsplit(url)
    except ValueError:  # its host has strange brackets or letters
        scheme, _, rest = url.partition("://")
        host, slash, path = re.split("[?#]", rest)[0].partition("/")
        return SplitResult(scheme.lower(), host, slash + path, "", "")


def public_url(url: str) -> str:
    """Without user, password and query, which may hold secrets."""
    parts = split_url(url)
    return urlunsplit((parts.scheme, parts.netloc.rpartition("@")[2], parts.path, "", ""))


def url_fingerprint(url: str) -> str:
    """Tells URLs apart without keeping their secrets."""
    return hashlib.sha256(url.encode()).hexdigest()[:32]


class _LoginStaysAtHome(urllib.request.HTTPRedirectHandler):
    """Who is sent on within a host still has to log in there, and nobody else may hear the password."""

    def redirect_request(self, req: urllib.request.Request, *answer: Any) -> urllib.request.Request | None:
        onward = super().redirect_request(req, *answer)
        login = req.unredirected_hdrs.get("Authorization")
        if onward is not None and login and (onward.type, onward.host) == (req.type, req.host):
            onward.add_unredirected_header("Authorization", login)
        return onward


def _open_http(
    url: str, offset: int, validator: str | None, timeout_seconds: float, closing: contextlib.ExitStack
) -> Remote:
    headers = {"User-Agent": f"bloomery/{__version__}", "Accept-Encoding": "identity"}
    if offset:
        headers["Range"] = f"bytes={offset}-"
        if validator:
            headers["If-Range"] = validator  # a changed file then comes whole
    try:
        address, login = _login(url)
        request = urllib.request.Request(address, headers=headers)
        if login:
            request.add_unredirected_header("Authorization", login)
        opener = urllib.request.build_opener(_LoginStaysAtHome)
        response = closing.enter_context(opener.open(request, timeout=timeout_seconds))
    except urllib.error.HTTPError as error:
        with error:
            reason, code = f"the server answers {error.code} {error.reason}", error.code
            if code not in _WORTH_ANOTHER_TRY and code < 500 and code != 416:
                raise FetchError(reason) from error
            wait_seconds = _retry_after(error.headers.get("Retry-After"))
            raise TryAgainError(reason, wait_seconds=wait_seconds, start_over=code == 416) from error
    except (ValueError, http.client.InvalidURL) as error:
        # The text of other errors may hold a part of the URL, and so a secret.
        why = f" ({first_line(error)})" if isinstance(error, UnicodeError) else ""
        raise FetchError(f"its URL, or one that the server sends it on to, is not valid{why}") from error
    except (OSError, http.client.HTTPException) as error:
        raise TryAgainError(f"no connection: {_why(error)}") from error
    start, total = _range_of(response, offset)
    etag = response.headers.get("ETag", "W/")
    now = response.headers.get("Last-Modified") if etag.startswith("W/") else etag
    if start and validator and now and now != validator:  # the server does not know If-Range
        raise TryAgainError("the file has changed since its first bytes came", start_over=True)

    def read() -> bytes:
        try:
            return bytes(response.read1(PIECE_BYTES))
        except (OSError, http.client.HTTPException) as error:
            raise TryAgainError(f"the connection was lost: {_why(error)}") from error

    return Remote(start, total, now or (validator if start else None), read, _packing(url, response))


def _packing(url: str, response: Any) -> str:
    """How the bytes of the file are packed on the way; nothing where the server only says that the file itself is."""
    packing = str(response.headers.get("Content-Encoding", "")).strip().lower()
    own = {"gzip": (".gz", ".tgz"), "x-gzip": (".gz", ".tgz"), "zstd": (".zst",)}.get(packing, ())
    return "" if packing == "identity" or split_url(url).path.lower().endswith(own) else packing


def _login(url: str) -> tuple[str, str]:
    """(the URL without user and password, the header that tells them); urllib takes them for a part of the host."""
    parts = urlsplit(url)
    login, at, host = parts.netloc.rpartition("@")
    if not at:
        return url, ""
    user, _, password = login.partition(":")
    secret = base64.b64encode(unquote_to_bytes(user) + b":" + unquote_to_bytes(password)).decode()
    return urlunsplit(parts._replace(netloc=host)), f"Basic {secret}"


def _range_of(response: Any, offset: int) -> tuple[int, int | None]:
    """(first byte, bytes of the whole file) of an answer; a server may ignore the wish for a range."""
    if response.status == 200:
        length = response.headers.get("Content-Length", "")
        return 0, int(length) if length.isdecimal() else None
    if response.status != 206:
        raise TryAgainError(f"the server answers {response.status} {response.reason}")
    found = re.fullmatch(r"bytes (\d+)-\d+/(\d+|\*)", response.headers.get("Content-Range", "").strip())
    if found is None or int(found[1]) != offset:
        raise TryAgainError(f"the server sent another range than the one from byte {offset}", start_over=True)
    return offset, None if found[2] == "*" else int(found[2])


def _open_fsspec(url: str, offset: int, validator: str | None, closing: contextlib.ExitStack) -> Remote:
    try:
        system, path = open_store(url)
        facts = system.info(path)
        if facts.get("type") == "directory":
            raise FetchError("it is a folder, not a file")
        now = version_of(facts) or None
        if validator not in (None, now):
            offset = 0
        file = closing.enter_context(system.open(path, "rb"))
        file.seek(offset)
    except FetchError:
        raise
    except DataError as error:
        raise FetchError(f"it {error.problems[0].what}: {error.problems[0].remedy}") from error
    except FileNotFoundError as error:
        raise FetchError("there is no such file") from error
    except (ValueError, PermissionError) as error:
        raise FetchError(f"it cannot be opened: {error}") from error
    except Exception as error:  # every file system has its own
        if is_stumble(error):
            raise FetchError(f"it cannot be opened: {first_line(error)}") from error
        raise TryAgainError(f"it cannot be opened: {_why(error)}") from error

    def read() -> bytes:
        try:
            return bytes(file.read(PIECE_BYTES))
        except Exception as error:
            raise TryAgainError(f"it cannot be read: {_why(error)}") from error

    return Remote(offset, facts.get("size"), now, read)


def _retry_after(text: str | None) -> float | None:
    """Seconds, from a number or a date."""
    if text is None:
        return None
    seconds = 0.0
    if text.strip().isdigit():
        seconds = float(text)
    else:
        with contextlib.suppress(ValueError, TypeError):
            seconds = (email.utils.parsedate_to_datetime(text) - datetime.now(UTC)).total_seconds()
    return min(max(seconds, 0.0), _LONGEST_RETRY_AFTER_SECONDS)


def _why(error: BaseException) -> str:
    inner = getattr(error, "reason", None)
    return str(inner) if inner else first_line(error)
