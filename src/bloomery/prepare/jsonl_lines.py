"""The lines of a .jsonl, .jsonl.gz or .jsonl.zst file: all of them, or an error that names the file."""

from __future__ import annotations

import codecs
import contextlib
import gzip
import hashlib
import io
import json
import os
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, BinaryIO, cast

import zstandard

from bloomery.base.errors import DataError, Problem

_GzipFile: Any = gzip.GzipFile
_GZ_ERRORS: tuple[type[BaseException], ...] = (EOFError, zlib.error, gzip.BadGzipFile)
with contextlib.suppress(ImportError):  # three times as fast
    from isal import igzip, isal_zlib

    _GzipFile = igzip.GzipFile
    _GZ_ERRORS = (*_GZ_ERRORS, cast(Any, isal_zlib).error)

ENDINGS = (".jsonl", ".jsonl.gz", ".jsonl.zst")
MAX_WINDOW_BYTES = 1 << 27
"""What `zstd --long` uses; SlimPajama needs it."""
_BLOCK_BYTES = 1 << 20
_ZST_PIECE_BYTES = 1 << 17
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


class _HashedFile(io.RawIOBase):
    """Hashes what is read from a file."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.sha256 = hashlib.sha256()
        self.bytes = 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer).cast("B")
        count = int(cast(Any, self._file).readinto(view))
        self.sha256.update(view[:count])
        self.bytes += count
        return count


def copy_lines(path: str, counts: list[InputCount]) -> Iterator[bytes]:
    """Blocks of whole lines, each line with its newline, blank ones left out; the file's counts are appended at its
    end. DataError where the file is cut off or damaged."""
    try:
        with open(path, "rb") as raw:
            facts = os.fstat(raw.fileno())
            if facts.st_size == 0:
                raise _damaged(path, "is empty (0 bytes)")
            file = _HashedFile(raw)
            documents = text_bytes = blank = number = 0
            for lines, size, is_open in _split(_unpacked(path, file)):
                if number == 0:
                    lines[0] = lines[0].removeprefix(codecs.BOM_UTF8)  # inside a chunk it would break a line
                if is_open and lines[0].strip() and not _is_json(lines[0]):
                    raise _damaged(f"{path}:{number + 1}", "ends in the middle of a line")
                kept = [line for line in lines if line and not line.isspace()]
                _check_objects(path, number, lines)
                number, text_bytes = number + len(lines), text_bytes + size
                documents, blank = documents + len(kept), blank + len(lines) - len(kept)
                if kept:
                    kept.append(b"")
                    yield b"\n".join(kept)
            if file.bytes != facts.st_size:
                raise _damaged(path, f"had {facts.st_size} bytes and now {file.bytes}: it is being written")
    except OSError as error:
        raise DataError(Problem(f"cannot be read: {error.strerror or error}", "", "mend it", path)) from error
    counts.append(
        InputCount(path, file.bytes, file.sha256.hexdigest(), facts.st_mtime_ns, documents, text_bytes, blank)
    )


def _unpacked(path: str, file: _HashedFile) -> Iterator[bytes]:
    try:
        if path.endswith(".zst"):
            yield from _zst_blocks(file)
        elif path.endswith(".gz"):
            with _GzipFile(fileobj=file, mode="rb") as unpacked:
                while block := unpacked.read(_BLOCK_BYTES):
                    yield block
            while file.read(_BLOCK_BYTES):  # padding after the last member
                pass
        else:
            while block := file.read(_BLOCK_BYTES):
                yield block
    except _GZ_ERRORS as error:
        raise _damaged(path, f"is cut off or damaged: {error}") from error
    except zstandard.ZstdError as error:
        raise _damaged(path, f"is damaged: {error}") from error


def _zst_blocks(file: _HashedFile) -> Iterator[bytes]:
    """Frame by frame, as many as there are. Not zstandard's stream_reader: it takes a cut-off file for a whole one."""
    decompressor = zstandard.ZstdDecompressor(max_window_size=MAX_WINDOW_BYTES)
    frame: Any = None
    while piece := file.read(_ZST_PIECE_BYTES):
        while piece:
            frame = frame or decompressor.decompressobj()
            if block := frame.decompress(piece):
                yield block
            piece = b""
            if frame.eof:
                piece, frame = frame.unused_data, None
    if frame is not None:
        raise EOFError("it ends inside a frame")


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


def _check_objects(path: str, before: int, lines: list[bytes]) -> None:
    for number, line in enumerate(lines, before + 1):
        if line[:1] == b"{" and line[-1:] == b"}":
            continue
        text = line.strip()
        if text and not (text[:1] == b"{" and text[-1:] == b"}"):
            shown = text[:40].decode(errors="replace")
            what = f"is no JSON object: {shown!r}"
            raise DataError(Problem(what, "each line of a .jsonl file is one", _AGAIN, f"{path}:{number}"))


def _is_json(line: bytes) -> bool:
    try:
        json.loads(line)
    except ValueError:
        return False
    return True


def _damaged(place: str, what: str) -> DataError:
    return DataError(Problem(what, "", _AGAIN, place))
