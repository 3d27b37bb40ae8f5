"""Units of work, and the documents of each in blocks of about 8 MB: lines, rows or whole files.

A unit is a range of lines of a large plain .jsonl, or one or more files. Units follow from the files alone, never from
the number of workers. What is broken is named or counted; a file that was cut off is an error, never a shorter file.
"""

import gzip
import io
import json
import os
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from typing import IO, Any, cast

import numpy as np
import orjson
import xxhash
from numpy.typing import NDArray

from bloomery.base.errors import DataError, Problem
from bloomery.base.units import format_bytes
from bloomery.prepare.sources import InputFile, open_input

BLOCK_BYTES = 8 << 20
_PIECE_BYTES = 1 << 20
"""Of unpacked content at a time."""
_MOST_ZST_WINDOW_BYTES = 1 << 31
"""What a decompressor may have to hold: 128 MB where a file was made with `zstd --long`, 2 GB with `--long=31`."""
_PARQUET_BUFFER_BYTES = 1 << 20
_MOST_ROWS = 256
"""Of a .parquet file at a time. With fewer, short ones would take notably longer."""
_ROW_BYTES = 16
"""What a row counts beyond its text: what a line of JSON would have around it. Else short ones make large blocks."""
_LARGEST_UNIT_BYTES = 64 << 20
_SMALLEST_UNIT_BYTES = 4 << 20
_UNITS = 64
"""As many as this where the sizes allow, so that a small corpus keeps every worker busy too."""
_MOST_FILES = 4096
_EXPANSION = 4
"""Of compressed text, roughly."""
MOST_DOCUMENT_BYTES = 256 << 20
"""Of a line, a row or a text file. Encoding takes up to ten times as much memory."""
MOST_BLANK_BYTES = 16 << 20
"""White space in a row."""


# ---------------------------------------------------------------- units


@dataclass(frozen=True)
class Span:
    """The bytes [start, end) of a file: the whole file, or whole lines of it."""

    file: InputFile
    start: int
    end: int


@dataclass(frozen=True)
class Unit:
    number: int
    spans: tuple[Span, ...]
    """All of one source."""

    @property
    def input_bytes(self) -> int:
        return sum(span.end - span.start for span in self.spans)


def plan_units(files: Sequence[InputFile]) -> list[Unit]:
    """All documents of all files, in their order. Files between two large ones share a unit while they fit."""
    target = min(max(sum(map(_work, files)) // _UNITS, _SMALLEST_UNIT_BYTES), _LARGEST_UNIT_BYTES)
    groups: list[list[Span]] = []
    work = 0
    for file in files:
        spans = _split_at_lines(file, target) if file.kind == "jsonl" and not file.compression else []
        if len(spans) > 1:
            groups += [[span] for span in spans]
            work = target
            continue
        last = groups[-1] if groups else []
        if not last or last[0].file.source != file.source or work + _work(file) > target or len(last) == _MOST_FILES:
            groups.append([])
            work = 0
        groups[-1].append(Span(file, 0, file.size))
        work += _work(file)
    return [Unit(number, tuple(group)) for number, group in enumerate(groups)]


def _work(file: InputFile) -> int:
    return file.size * (_EXPANSION if file.compression or file.kind == "parquet" else 1)


def _split_at_lines(file: InputFile, target: int) -> list[Span]:
    """At the first newline after each multiple of an equal share."""
    count = -(-file.size // target)
    cuts = [0]
    if count > 1:
        with open_input(file) as raw:
            lines = io.BufferedReader(cast(io.RawIOBase, raw))
            for index in range(1, count):
                cuts.append(next_line(lines, max(file.size * index // count, cuts[-1] - 1)))
    return [Span(file, start, end) for start, end in pairwise([*cuts, file.size]) if end > start]


def next_line(lines: IO[bytes], offset: int) -> int:
    """Where the first line begins behind this one, of any length."""
    lines.seek(offset)
    while (line := lines.readline(io.DEFAULT_BUFFER_SIZE)) and not line.endswith(b"\n"):
        pass
    return lines.tell()


# ---------------------------------------------------------------- content


class StoredBytes:
    """The bytes of a span as they are stored, hashed while they are read. EOFError where the file has fewer by now."""

    def __init__(self, span: Span, raw: IO[bytes], hasher: Any) -> None:
        self.raw, self.hasher, self.left, self.then = raw, hasher, span.end - span.start, b""
        raw.seek(span.start)

    def read(self, size: int) -> bytes:
        data = self.raw.read(min(size, self.left))
        if self.left and not data:
            raise EOFError(f"it ends {self.left} bytes before the end it had")
        self.hasher.update(data)
        self.left -= len(data)
        if not self.left:
            data, self.then = data + self.then, b""
        return data


@contextmanager
def open_span(span: Span, new_hasher: Callable[[], Any] = xxhash.xxh3_128) -> Iterator[StoredBytes]:
    with open_input(span.file) as raw:
        yield StoredBytes(span, raw, new_hasher())


def content(stored: StoredBytes, compression: str, block_bytes: int = _PIECE_BYTES) -> Iterator[bytes]:
    """The unpacked content in pieces of at most this size, however far it expands. Where it is cut off or damaged:
    EOFError, or what the libraries raise."""
    if compression and not stored.left:
        raise EOFError("it has no bytes")
    if compression == "zst":
        yield from _zst(stored)
        return
    reader: Any = gzip.GzipFile(fileobj=cast(Any, stored)) if compression else stored
    while piece := reader.read(_PIECE_BYTES if compression else block_bytes):
        yield piece


def _zst(stored: StoredBytes) -> Iterator[bytes]:
    """zstandard's reader takes a file that is cut off for a whole one. So one more frame follows the last one: what it
    holds, more than its own bytes, arrives only where no frame before it lacks an end. It comes together with the last
    bytes of the file: libzstd takes a frame at the start of a buffer for one even in the middle of a header."""
    import zstandard

    end = os.urandom(16) * 64
    stored.then = zstandard.ZstdCompressor(write_checksum=True).compress(end)
    decompressor = zstandard.ZstdDecompressor(max_window_size=_MOST_ZST_WINDOW_BYTES)
    reader, held = decompressor.stream_reader(stored, read_across_frames=True), b""  # type: ignore[arg-type]
    while piece := reader.read(_PIECE_BYTES):
        if not stored.left:
            piece = held + piece
            piece, held = piece[: -len(end)], piece[-len(end) :]
        if piece:
            yield piece
    if held != end:
        raise EOFError("it ends inside a frame")


def whole_lines(
    pieces: Iterator[bytes], file: InputFile, offset: int = 0, block_bytes: int = _PIECE_BYTES
) -> Iterator[bytes]:
    """The same bytes, from this offset of the content, in blocks that end with a newline, of about `block_bytes`; the
    last one may lack it. DataError where a line is too long, or there is nothing but blank ones."""
    waiting: list[bytes] = []
    size = begun = blank = 0
    for piece in pieces:
        cut = piece.rfind(b"\n") + 1
        if begun + (piece.find(b"\n") if cut else len(piece)) > MOST_DOCUMENT_BYTES:
            raise too_long(file, offset - begun)
        blank = blank + len(piece) if piece.isspace() else 0
        if blank > MOST_BLANK_BYTES:
            what, remedy = "follows blank lines without end", "remove the blank lines, or copy the file again"
            rule = f"at most {format_bytes(MOST_BLANK_BYTES)} are passed over"
            raise DataError(Problem(what, rule, remedy, place_of(file, offset)))
        begun = len(piece) - cut if cut else begun + len(piece)
        offset += len(piece)
        waiting.append(piece)
        size += len(piece)
        if size < block_bytes or not cut:  # too little, or inside a long line
            continue
        waiting[-1] = piece[:cut]
        whole = [b"".join(waiting)]
        waiting = [piece[cut:]]
        size = len(waiting[0])
        yield whole.pop()  # so that nothing of it stays here
    if rest := b"".join(waiting):
        yield rest


def too_long(file: InputFile, offset: int) -> DataError:
    what, rule = "is too long", f"a document has at most {format_bytes(MOST_DOCUMENT_BYTES)}, as it is written"
    return DataError(Problem(what, rule, "cut it into several, or leave it out", place_of(file, offset)))


def place_of(file: InputFile, offset: int) -> str:
    """A document as an error names it: its file, with the line or the row. `offset`: as in Block.places."""
    if file.kind == "text":
        return file.name
    if file.kind == "parquet":
        return f"{file.name}:row {offset + 1}"
    line = 1
    with open_span(Span(file, 0, file.size)) as stored:
        pieces = content(stored, file.compression)
        while offset > 0 and (piece := next(pieces, b"")):
            line += piece.count(b"\n", 0, offset)
            offset -= len(piece)
    return f"{file.name}:{line}"


def hash_span(span: Span) -> str:
    with open_span(span) as stored:
        while stored.read(BLOCK_BYTES):
            pass
        return str(stored.hasher.hexdigest())


# ---------------------------------------------------------------- documents


@dataclass
class Block:
    texts: list[str] = field(default_factory=list)
    places: list[NDArray[np.uint64]] = field(default_factory=list)
    """For each document two numbers that no other has: of its file, and where it stands in it (byte, row or 0)."""
    size: int = 0


Documents = Iterator[tuple[list[str], Any, int]]
"""(texts, where each stands, bytes of text and around it), some at a time."""


class UnitReader:
    """Reads one unit once. `input_bytes` has been read; `bad` and `hashes` are complete when `blocks` has ended."""

    def __init__(self, unit: Unit, *, text_key: str, skip_bad: bool, block_bytes: int = BLOCK_BYTES) -> None:
        self.unit = unit
        self._block_bytes = block_bytes
        self.input_bytes = 0
        self.bad = 0
        """Records that were left out: broken JSON, no text, not UTF-8."""
        self.hashes: list[str] = []
        """xxh3-128 of the bytes of each span."""
        self._text_key, self._skip_bad = text_key, skip_bad

    def blocks(self) -> Iterator[Block]:
        block = Block()
        for span in self.unit.spans:
            for texts, offsets, size in self._read(span):
                block.texts += texts
                places = np.empty((len(texts), 2), np.uint64)
                places[:, 0], places[:, 1] = span.file.number, offsets
                block.places.append(places)
                block.size += size
                if block.size >= self._block_bytes:
                    del texts  # else the next block is read while this one is still held
                    yield block
                    block = Block()
        if block.texts:
            yield block

    def _read(self, span: Span) -> Documents:
        end, read = self.input_bytes + span.end - span.start, self._jsonl if span.file.kind == "jsonl" else self._text
        with open_span(span) as stored:
            if span.file.kind == "parquet":
                yield from self._parquet(span, stored.raw)
                self.hashes.append(hash_span(span))  # not before them: a sample needs the first rows only
            else:
                for documents in read(span, content(stored, span.file.compression, self._block_bytes)):
                    self.input_bytes = end - stored.left
                    yield documents
                    del documents
                self.hashes.append(stored.hasher.hexdigest())
        self.input_bytes = end

    def _jsonl(self, span: Span, pieces: Iterator[bytes]) -> Documents:
        offset = span.start
        for data in whole_lines(pieces, span.file, offset, self._block_bytes):
            # With their newlines, of which each has one: this is five times as fast as `split`.
            lines = io.BytesIO(data if data.endswith(b"\n") else data + b"\n").readlines()
            if offset == 0 and lines[0].startswith(b"\xef\xbb\xbf"):
                lines[0] = b"   " + lines[0][3:]  # a byte order mark; JSON may begin with spaces
            lengths = np.fromiter(map(len, lines), np.int64, len(lines))
            offsets = offset + np.cumsum(lengths) - lengths
            try:  # the way of every good block; the slow way below finds and names what is wrong
                texts = [orjson.loads(line)[self._text_key] for line in lines if line != b"\n"]
                if not {*map(type, texts)} <= {str}:
                    raise TypeError
                offsets = offsets[lengths > 1]
            except (ValueError, LookupError, TypeError):
                texts, offsets = self._checked_lines(span, lines, offsets)
            offset += len(data)
            size = len(data)
            del data, lines
            yield texts, offsets, size
            del texts

    def _checked_lines(
        self, span: Span, lines: list[bytes], offsets: NDArray[np.int64]
    ) -> tuple[list[str], NDArray[np.int64]]:
        good: list[int] = []
        texts: list[str] = []
        for line, offset in zip(lines, offsets.tolist(), strict=True):
            if line.strip():
                try:
                    texts.append(_text_of(line.removesuffix(b"\n"), self._text_key))
                    good.append(offset)
                except ValueError as error:
                    self._reject(span.file, str(error), offset)
        return texts, np.array(good, np.int64)

    def _parquet(self, span: Span, raw: IO[bytes]) -> Documents:
        try:
            import pyarrow.parquet  # type: ignore[import-untyped]
        except ImportError as error:
            remedy = "install it with `pip install 'bloomery[parquet]'`"
            raise DataError(Problem(f"needs pyarrow: {error}", "", remedy, span.file.name)) from error
        key, row, begun = self._text_key, 0, self.input_bytes
        try:
            # pre_buffer would read the column of a whole row group at once.
            table = pyarrow.parquet.ParquetFile(raw, buffer_size=_PARQUET_BUFFER_BYTES, pre_buffer=False)
            names = table.schema_arrow.names
            if names.count(key) != 1:
                what = f"has {names.count(key)} columns '{key}': its columns are {', '.join(names)}"
                remedy = "set text_key to the one column that holds the documents"
                raise DataError(Problem(what, "each row of a .parquet file is a document", remedy, span.file.name))
            for column in _columns(table, raw, key, self._block_bytes):
                if len(column) == 1 and column.nbytes > MOST_DOCUMENT_BYTES:
                    raise too_long(span.file, row)
                texts, good, size = [], [], column.nbytes + _ROW_BYTES * len(column)
                for number, scalar in enumerate(column, row):
                    try:
                        value = scalar.as_py()
                    except UnicodeDecodeError as error:
                        value = error
                    if type(value) is str:
                        texts.append(value)
                        good.append(number)
                    else:
                        self._reject(span.file, f"is no text in column '{key}': {value!s:.90}", number)
                row += len(column)
                self.input_bytes = begun + span.file.size * row // table.metadata.num_rows
                del column
                yield texts, np.array(good, np.int64), size
                del texts
        finally:
            table = None
            pyarrow.default_memory_pool().release_unused()  # else it keeps the largest page there was

    def _text(self, span: Span, pieces: Iterator[bytes]) -> Documents:
        data = bytearray()
        for piece in pieces:
            data += piece
            if len(data) > MOST_DOCUMENT_BYTES:
                raise too_long(span.file, 0)
        try:
            texts = [data.decode("utf-8").removeprefix("\ufeff")]  # a byte order mark is no text
        except UnicodeDecodeError as error:
            self._reject(span.file, f"is not UTF-8 at byte {error.start}", 0)
            texts = []
        yield texts, np.zeros(len(texts), np.int64), len(data)

    def _reject(self, file: InputFile, what: str, offset: int) -> None:
        self.bad += 1
        if not self._skip_bad:
            rule = "" if file.kind == "text" else f"a document is a string under '{self._text_key}'"
            remedy = "fix it, or leave such records out with `bad_records: skip`"
            raise DataError(Problem(what, rule, remedy, place_of(file, offset)))


def _columns(table: Any, raw: IO[bytes], name: str, block_bytes: int) -> Iterator[Any]:
    """The column of a .parquet file in arrays of about an eighth of a block, going by its average row. Rows far above
    it come at most `_MOST_ROWS` at a time from the file, and are cut to blocks; one that may be too long is alone.
    Fewer where all of them could be one long value that is stored once."""
    groups = [table.metadata.row_group(number) for number in range(table.num_row_groups)]
    stored_bytes = max(sum(group.total_byte_size for group in groups), 1)
    for number in range(len(groups)):  # where this is an error of pyarrow's, `group.column` would end the process
        next(table.iter_batches(1, row_groups=[number], columns=[name]), None)
    leaves = [leaf for leaf in range(len(table.schema)) if f"{table.schema.column(leaf).path}.".startswith(f"{name}.")]
    longest = max((_dictionary_bytes(raw, group.column(leaf)) for group in groups for leaf in leaves), default=0)
    rows = min(block_bytes * table.metadata.num_rows // (8 * stored_bytes), MOST_DOCUMENT_BYTES // max(longest, 1))
    rows = min(max(rows, 1), _MOST_ROWS)
    for batch in table.iter_batches(rows, columns=[name], use_threads=False):
        column = batch.column(batch.schema.get_field_index(name))
        may_be_long = column.nbytes > MOST_DOCUMENT_BYTES
        step = 1 if may_be_long else max(block_bytes * len(column) // max(column.nbytes, 1), 1)
        for first in range(0, len(column), step):
            yield column[first : first + step]


def _dictionary_bytes(raw: IO[bytes], chunk: Any) -> int:
    """Of the values of a column that stand once and are referred to, by the header of its first page: in Thrift's
    compact protocol the page's type, where 2 is a dictionary, and its unpacked bytes, both as zigzag varints."""
    raw.seek(chunk.dictionary_page_offset or chunk.data_page_offset)
    found = re.match(rb"\x15\x04\x15([\x80-\xff]{,4}[\0-\x7f])", raw.read(8), re.S)
    return sum(int(digit & 127) << 7 * place for place, digit in enumerate(found[1] if found else b"")) >> 1


def _text_of(line: bytes, key: str) -> str:
    """The text of a record; ValueError where it has none."""
    try:
        # Python's own reader, because it also takes what it writes: NaN, and numbers of any size.
        record = json.loads(line.decode("utf-8"), parse_int=float)
        text = record.get(key) if isinstance(record, dict) else None
        if isinstance(text, str):
            text.encode("utf-8")  # half a surrogate pair is no character
            return text
    except (ValueError, RecursionError) as error:
        raise ValueError(f"is not JSON in UTF-8: {error}") from error
    keys = f"its keys are {', '.join(record) or 'none'}" if isinstance(record, dict) else "it is no object"
    raise ValueError(f"has no string under '{key}': {f'it is {text!r:.40}' if text is not None else keys}")
