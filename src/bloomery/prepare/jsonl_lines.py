"""The lines of a .jsonl file, packed with .gz or .zst or not: all of them, or an error that names the file."""

from __future__ import annotations

import codecs
import gzip
import hashlib
import json
import os
import zlib
from collections.abc import Iterator
from dataclasses import dataclass

import orjson
import zstandard

from bloomery.base.errors import DataError, Problem
from bloomery.prepare.sources import compression_of
from bloomery.prepare.unpack import HashedFile, bounded_lines, unpacked

_ZST_WINDOW_BYTES = 1 << 27
"""What `zstd --long` uses; SlimPajama needs it."""
_AGAIN = "download or copy it again"


@dataclass(frozen=True)
class InputCount:
    """What one file held."""

    path: str
    bytes: int
    """On the disk."""
    sha256: str
    mtime_ns: int
    documents: int
    text_bytes: int
    """Unpacked."""
    blank_lines: int
    """Left out."""


def copy_lines(path: str, counts: list[InputCount]) -> Iterator[bytes]:
    """Blocks of whole lines, each line with its newline, blank ones left out; the file's counts are appended at its
    end. DataError where the file is cut off or damaged."""
    try:
        with open(path, "rb") as raw:
            facts = os.fstat(raw.fileno())
            if facts.st_size == 0:
                raise _damaged(path, "is empty (0 bytes)")
            hasher = hashlib.sha256()
            file = HashedFile(raw, hasher)
            documents = text_bytes = blank = number = 0
            for lines, size, is_open in _split(bounded_lines(_content(path, file), lambda line: f"{path}:{line}")):
                if number == 0:
                    lines[0] = lines[0].removeprefix(codecs.BOM_UTF8)  # inside a chunk it would break a line
                kept = [line for line in lines if line and not line.isspace()]
                try:  # the way of every good block; what is wrong is found and named below
                    good = {*map(type, map(orjson.loads, kept))} <= {dict}
                except ValueError:
                    good = False
                if not good:
                    _check_objects(path, number, lines, is_open=is_open)
                number, text_bytes = number + len(lines), text_bytes + size
                documents, blank = documents + len(kept), blank + len(lines) - len(kept)
                if kept:
                    kept.append(b"")
                    yield b"\n".join(kept)
            if file.bytes != facts.st_size:
                raise _damaged(path, f"had {facts.st_size} bytes and now {file.bytes}: it is being written")
    except OSError as error:
        raise DataError(Problem(f"cannot be read: {error.strerror or error}", "", "mend it", path)) from error
    counts.append(InputCount(path, file.bytes, hasher.hexdigest(), facts.st_mtime_ns, documents, text_bytes, blank))


def _content(path: str, file: HashedFile) -> Iterator[bytes]:
    try:
        yield from unpacked(file, compression_of(path), zst_window_bytes=_ZST_WINDOW_BYTES)
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise _damaged(path, f"is cut off or damaged: {error}") from error
    except zstandard.ZstdError as error:
        raise _damaged(path, f"is damaged: {error}") from error


def _split(blocks: Iterator[bytes]) -> Iterator[tuple[list[bytes], int, bool]]:
    """(whole lines without their newlines, bytes they came from, False); at the end perhaps one without its newline:
    True."""
    begun: list[bytes] = []
    for block in blocks:
        if b"\n" not in block:
            begun.append(block)
            continue
        whole = b"".join((*begun, block))
        *lines, tail = whole.split(b"\n")
        begun = [tail] if tail else []
        yield lines, len(whole) - len(tail), False
    if begun:
        last = b"".join(begun)
        yield [last], len(last), True


def _check_objects(path: str, before: int, lines: list[bytes], *, is_open: bool) -> None:
    """`is_open`: the last line has no newline."""
    for number, line in enumerate(lines, before + 1):
        text = line.strip()
        if not text or (why := _why_no_object(text)) is None:
            continue
        place = f"{path}:{number}"
        if is_open and why:
            raise _damaged(place, f"ends in the middle of a line ({why})")
        what = f"is no JSON object: {text[:40].decode(errors='replace')!r}" + (f" ({why})" if why else "")
        raise DataError(Problem(what, "each line of a .jsonl file is one", _AGAIN, place))


def _why_no_object(line: bytes) -> str | None:
    """None of an object, empty of other JSON."""
    try:
        # Python's own reader, as in `prepare`: it also takes NaN, and numbers of any size.
        return None if isinstance(json.loads(line.decode("utf-8"), parse_int=str), dict) else ""
    except UnicodeDecodeError as error:
        return f"byte {error.start} is not UTF-8"
    except (ValueError, RecursionError) as error:
        return str(error)


def _damaged(place: str, what: str) -> DataError:
    return DataError(Problem(what, "", _AGAIN, place))
