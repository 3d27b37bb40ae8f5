"""Compressed files as their content, hashed on the way; one that was cut off is an error, never a shorter file."""

from __future__ import annotations

import gzip
import io
from collections.abc import Callable, Iterator
from typing import IO, Any

from bloomery.base.errors import DataError, Problem
from bloomery.base.units import format_bytes

_BLOCK_BYTES = 1 << 20
_ZST_BLOCKS = 3
"""At a time: the format lets one unpack to 128 KiB at most, so this bounds what one call returns. With eight, which no
longer fit a cache, a whole preparation took 5% more CPU."""
_ZST_BUFFER_BYTES = 1 << 17
_SKIPPABLE = 0x184D2A50
"""The magic number of frames without content, in sixteen variants."""


MOST_DOCUMENT_BYTES = 256 << 20
"""Of a line, a row or a text file. Encoding takes up to ten times as much memory."""
MOST_BLANK_BYTES = 16 << 20
"""White space in a row."""


def too_long(place: str) -> DataError:
    what, rule = "is too long", f"a document has at most {format_bytes(MOST_DOCUMENT_BYTES)}, as it is written"
    return DataError(Problem(what, rule, "cut it into several, or leave it out", place))


def bounded_lines(blocks: Iterator[bytes], place: Callable[[int], str]) -> Iterator[bytes]:
    """The same blocks. DataError, at the `place` of a line, where one has no end or there is nothing but blank ones."""
    line, begun, blank = 1, 0, 0
    for block in blocks:
        first, last = block.find(b"\n"), block.rfind(b"\n")
        if begun + (first if first >= 0 else len(block)) > MOST_DOCUMENT_BYTES:
            raise too_long(place(line))
        begun = len(block) - 1 - last if last >= 0 else begun + len(block)
        blank = blank + len(block) if block.isspace() else 0
        if blank > MOST_BLANK_BYTES:
            what, rule = "follows blank lines without end", f"at most {format_bytes(MOST_BLANK_BYTES)} are passed over"
            raise DataError(Problem(what, rule, "remove the blank lines, or copy the file again", place(line)))
        line += block.count(b"\n")
        yield block


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
    """The content of a file that is packed with `zst`, `gz` or not at all. Where it was cut off or damaged: EOFError,
    or what the libraries raise. A zst file needs memory for its window: 128 MB where it was made with `zstd --long`,
    2 GB with `--long=31`."""
    if compression == "zst":
        yield from _zst(file, zst_window_bytes)
    else:
        content: Any = _gz(file) if compression == "gz" else file
        while block := content.read(_BLOCK_BYTES):
            yield block
    while file.read(_BLOCK_BYTES):  # padding after the last member
        pass
    if compression and not file.bytes:
        raise EOFError("it has no bytes")


def _zst(file: HashedFile, window_bytes: int) -> Iterator[bytes]:
    """Frame by frame, as many as there are. Not zstandard's stream_reader: it takes a cut-off file for a whole one."""
    import zstandard

    decompressor = zstandard.ZstdDecompressor(max_window_size=window_bytes)
    frame: Any = None
    for piece in _pieces(io.BufferedReader(file, _ZST_BUFFER_BYTES)):
        while piece:
            frame = frame or decompressor.decompressobj()
            if block := frame.decompress(piece):
                yield block
            piece, frame = (frame.unused_data, None) if frame.eof else (b"", frame)
    if frame is not None:
        raise EOFError("it ends inside a frame")


def _pieces(file: io.BufferedReader) -> Iterator[bytes]:
    """All bytes of a zst file, cut where blocks end (RFC 8878, 3.1.1). What is damaged is cut anywhere: it is the
    decompressor that finds it."""
    while head := file.read(5):
        if int.from_bytes(head[:4], "little") & ~0xF == _SKIPPABLE:
            head += file.read(3)
            left = int.from_bytes(head[4:], "little")
            while left and (content := file.read(min(left, _ZST_BUFFER_BYTES))):
                yield head + content
                head, left = b"", left - len(content)
            yield head
            continue
        descriptor = head[-1]  # which fields follow: the window, the number of a dictionary, the size of the content
        has_window, has_checksum = not descriptor >> 5 & 1, descriptor >> 2 & 1
        fields = has_window + (0, 1, 2, 4)[descriptor & 3] + (not has_window, 2, 4, 8)[descriptor >> 6]
        piece, is_last = [head, file.read(fields)], 0
        while not is_last:
            header = file.read(3)
            block = int.from_bytes(header, "little")
            is_last = block & 1 or len(header) < 3
            is_one_byte_repeated = block >> 1 & 3 == 1
            piece += header, file.read(1 if is_one_byte_repeated else block >> 3)
            if len(piece) >= 2 * _ZST_BLOCKS:
                yield b"".join(piece)
                piece = []
        yield b"".join((*piece, file.read(4 * has_checksum)))


def _gz(file: HashedFile) -> Any:
    try:
        from isal import igzip  # three times as fast
    except ImportError:
        return gzip.GzipFile(fileobj=file)
    return igzip.IGzipFile(fileobj=file)  # type: ignore[no-untyped-call]


def whole_lines(chunks: Iterator[bytes], block_bytes: int = _BLOCK_BYTES) -> Iterator[bytes]:
    """The same bytes in blocks that end with a newline, of about `block_bytes`; the last one may lack it."""
    waiting: list[bytes] = []
    size = 0
    for chunk in chunks:
        waiting.append(chunk)
        size += len(chunk)
        cut = chunk.rfind(b"\n") + 1
        if size < block_bytes or not cut:  # too little, or inside a long line
            continue
        waiting[-1] = chunk[:cut]
        whole = [b"".join(waiting)]
        waiting = [chunk[cut:]]
        size = len(waiting[0])
        yield whole.pop()  # so that nothing of it stays here
    if rest := b"".join(waiting):
        yield rest
