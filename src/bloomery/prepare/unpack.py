"""Compressed files as their content, hashed on the way; one that was cut off is an error, never a shorter file."""

from __future__ import annotations

import contextlib
import gzip
import io
import zlib
from collections.abc import Iterator
from typing import IO, Any

_BLOCK_BYTES = 1 << 20
_ZST_PIECE_BYTES = 1 << 17
"""Small, since they bound what one call returns."""


class HashedFile(io.RawIOBase):
    """A file whose bytes are hashed as they are read."""

    def __init__(self, file: IO[bytes], hasher: Any) -> None:
        self._file, self._hasher = file, hasher
        self.bytes = 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer).cast("B")
        count = int(self._file.readinto(view))  # type: ignore[attr-defined]
        self._hasher.update(view[:count])
        self.bytes += count
        return count


def unpacked(file: HashedFile, compression: str, *, zst_window_bytes: int = 1 << 31) -> Iterator[bytes]:
    """The content of a file that is packed with `zst`, `gz` or not at all. EOFError or zlib.error where it was cut off
    or damaged, and what the libraries raise besides. A zst file needs memory for its window: 128 MB where it was made
    with `zstd --long`, 2 GB with `--long=31`."""
    if compression == "zst":
        yield from _zst(file, zst_window_bytes)
    elif compression == "gz":
        yield from _gz(file)
    else:
        while block := file.read(_BLOCK_BYTES):
            yield block


def _zst(file: HashedFile, window_bytes: int) -> Iterator[bytes]:
    """Frame by frame, as many as there are. Not zstandard's stream_reader: it takes a cut-off file for a whole one."""
    import zstandard

    decompressor = zstandard.ZstdDecompressor(max_window_size=window_bytes)
    frame: Any = None
    while piece := file.read(_ZST_PIECE_BYTES):
        while piece:
            frame = frame or decompressor.decompressobj()
            if block := frame.decompress(piece):
                yield block
            piece, frame = (frame.unused_data, None) if frame.eof else (b"", frame)
    if frame is not None:
        raise EOFError("it ends inside a frame")


def _gz(file: HashedFile) -> Iterator[bytes]:
    reader: Any = gzip.GzipFile
    damage: Any = zlib.error
    with contextlib.suppress(ImportError):  # three times as fast
        from isal import igzip, isal_zlib

        reader, damage = igzip.IGzipFile, isal_zlib.error
    try:
        with reader(fileobj=file) as content:
            while block := content.read(_BLOCK_BYTES):
                yield block
        while file.read(_BLOCK_BYTES):  # padding after the last member
            pass
    except damage as error:
        raise zlib.error(str(error)) from error
