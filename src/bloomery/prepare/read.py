"""Units of work, and the documents of each in blocks of about 8 MB: lines, rows or whole files.

A unit is a range of lines of a large plain .jsonl, or one or more files. Units follow from the files alone, never from
the number of workers. What is broken is named or counted.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from io import BytesIO
from itertools import pairwise
from typing import IO, Any

import numpy as np
import orjson
import xxhash
from numpy.typing import NDArray

from bloomery.base.errors import BloomeryError, DataError, Problem
from bloomery.prepare.sources import InputFile, open_input, unreadable
from bloomery.prepare.unpack import MOST_DOCUMENT_BYTES, HashedFile, bounded_lines, too_long, unpacked

BLOCK_BYTES = 8 << 20
_PARQUET_BUFFER_BYTES = 1 << 20
_MOST_ROWS = 256
"""Of a .parquet file at a time. With fewer, short ones would take notably longer."""
_ROW_BYTES = 16
"""What a row counts beyond its text: what a line of JSON would have around it. Else short ones make large blocks."""
_SKIP = "fix it, or leave such records out with `bad_records: skip`"
_LARGEST_UNIT_BYTES = 64 << 20
_SMALLEST_UNIT_BYTES = 4 << 20
_UNITS = 64
"""As many as this where the sizes allow, so that a small corpus keeps every worker busy too."""
_MOST_FILES = 4096
_EXPANSION = 4
"""Of compressed text, roughly."""


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
    def source(self) -> int:
        return self.spans[0].file.source

    @property
    def input_bytes(self) -> int:
        return sum(span.end - span.start for span in self.spans)


def plan_units(files: Sequence[InputFile]) -> list[Unit]:
    """All documents of all files, in their order. Files between two large ones share a unit while they fit."""
    target = min(max(sum(map(_work, files)) // _UNITS, _SMALLEST_UNIT_BYTES), _LARGEST_UNIT_BYTES)
    groups: list[list[Span]] = []
    work = 0
    for file in files:
        spans = _lines(file, target) if file.kind == "jsonl" and not file.compression else []
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


def _lines(file: InputFile, target: int) -> list[Span]:
    """Cut at the first newline after each multiple of an equal share."""
    count = -(-file.size // target)
    cuts = [0]
    if count > 1:
        try:
            with open_input(file) as raw:
                for index in range(1, count):
                    share = file.size * index // count
                    cuts.append(cuts[-1] if share < cuts[-1] else _after_newline(raw, share))
        except Exception as error:  # an OSError, or what the library of a URL raises
            raise unreadable(file.name, error) from error
    cuts.append(file.size)
    return [Span(file, start, end) for start, end in pairwise(cuts) if end > start]


def _after_newline(raw: IO[bytes], offset: int) -> int:
    raw.seek(offset)
    while chunk := raw.read(1 << 16):
        newline = chunk.find(b"\n")
        if newline >= 0:
            return offset + int(newline) + 1
        offset += len(chunk)
    return offset


@dataclass
class Block:
    texts: list[str] = field(default_factory=list)
    places: list[NDArray[np.uint64]] = field(default_factory=list)
    """For each document two numbers that no other has: of its file, and where it stands in it (byte, row or 0)."""
    input_bytes: int = 0
    size: int = 0


class UnitReader:
    """Reads one unit once. `bad` and `hashes` are complete when `blocks` has ended."""

    def __init__(self, unit: Unit, *, text_key: str, skip_bad: bool, block_bytes: int = BLOCK_BYTES) -> None:
        self.unit = unit
        self._block_bytes = block_bytes
        self.bad = 0
        """Records that were left out: broken JSON, no text, not UTF-8."""
        self.hashes: list[str] = []
        """xxh3-128 of the bytes of each span."""
        self._text_key, self._skip_bad = text_key, skip_bad

    def blocks(self) -> Iterator[Block]:
        block = Block()
        for span in self.unit.spans:
            hasher = xxhash.xxh3_128()
            for texts, offsets, input_bytes, size in self._read(span, hasher):
                block.texts += texts
                places = np.empty((len(texts), 2), np.uint64)
                places[:, 0], places[:, 1] = span.file.number, offsets
                block.places.append(places)
                block.input_bytes += input_bytes
                block.size += size
                if block.size >= self._block_bytes:
                    del texts  # else the next block is read while this one is still held
                    yield block
                    block = Block()
            self.hashes.append(hasher.hexdigest())
        if block.texts or block.input_bytes:
            yield block

    def _read(self, span: Span, hasher: Any) -> Iterator[tuple[list[str], Any, int, int]]:
        """(texts, where each stands, bytes of the file, size) again and again."""
        if not span.file.size and span.file.kind != "text":
            return
        reader = {"jsonl": self._jsonl, "parquet": self._parquet, "text": self._text}[span.file.kind]
        try:
            with open_input(span.file) as raw:
                yield from reader(span, raw, hasher)
        except (BloomeryError, MemoryError, AssertionError, AttributeError, IndexError):  # ours
            raise
        except ImportError as error:
            remedy = "install it with `pip install 'bloomery[parquet]'`"
            raise DataError(Problem(f"needs pyarrow: {error}", "", remedy, span.file.name)) from error
        except Exception as error:  # files, decompressors, Arrow and URLs each have their own kinds
            raise _damaged(span, error) from error

    def _jsonl(self, span: Span, raw: IO[bytes], hasher: Any) -> Iterator[tuple[list[str], Any, int, int]]:
        offset, line_number, told = span.start, 1, span.start
        blocks = _bytes_of(span, raw, hasher, self._block_bytes)
        blocks = bounded_lines(blocks, lambda line: f"{span.file.name}:{_line_number(span, line)}")
        for data in _whole_lines(blocks, self._block_bytes):
            # With their newlines, of which each has one: this is five times as fast as `split`.
            lines = BytesIO(data if data.endswith(b"\n") else data + b"\n").readlines()
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
                texts, offsets = self._slow_lines(span, lines, offsets, line_number)
            offset += len(data)
            line_number += len(lines)
            consumed = (raw.tell() if span.file.compression else offset) - told
            told += consumed
            size = len(data)
            del data, lines
            yield texts, offsets, consumed, size
            del texts

    def _slow_lines(
        self, span: Span, lines: list[bytes], offsets: NDArray[np.int64], first_line: int
    ) -> tuple[list[str], NDArray[np.int64]]:
        good: list[int] = []
        texts: list[str] = []
        for index, line in enumerate(lines):
            if not line.strip():
                continue
            text = _text_of(line.removesuffix(b"\n"), self._text_key)
            if isinstance(text, Exception):
                self._bad(span, str(text), lambda index=index: _line_number(span, first_line + index))
                continue
            texts.append(text)
            good.append(index)
        return texts, offsets[good]

    def _parquet(self, span: Span, raw: IO[bytes], hasher: Any) -> Iterator[tuple[list[str], Any, int, int]]:
        import pyarrow.parquet  # type: ignore[import-untyped]

        try:
            # pre_buffer would read the column of a whole row group at once.
            table = pyarrow.parquet.ParquetFile(raw, buffer_size=_PARQUET_BUFFER_BYTES, pre_buffer=False)
            self._check_columns(span, table.schema_arrow.names)
            row = told = 0
            rows = max(table.metadata.num_rows, 1)
            for column in _columns(table, self._text_key, self._block_bytes):
                if len(column) == 1 and column.nbytes > MOST_DOCUMENT_BYTES:
                    raise too_long(f"{span.file.name}:row {row + 1}")
                size, values = column.nbytes + _ROW_BYTES * len(column), _rows(column)
                good = [index for index, value in enumerate(values) if type(value) is str]
                if len(good) < len(values):
                    self._bad_rows(span, row, values, len(values) - len(good))
                offsets = row + np.array(good, np.int64)
                row += len(values)
                consumed = span.file.size * row // rows - told
                told += consumed
                texts = [values[index] for index in good]
                del column, values
                yield texts, offsets, consumed, size
                del texts
        finally:
            table = None
            pyarrow.default_memory_pool().release_unused()  # else it keeps the largest page there was
        for _ in _ranges(span, raw, hasher, self._block_bytes):  # last, since who wants a sample does not read so far
            pass
        yield [], np.empty(0, np.int64), span.file.size - told, 0

    def _check_columns(self, span: Span, names: list[str]) -> None:
        if (count := names.count(self._text_key)) == 1:
            return
        what = f"has {count} columns" if count else "has no column"
        what += f" '{self._text_key}': its columns are {', '.join(names)}"
        remedy = "set text_key to the column that holds the documents" if not count else "give each its own name"
        raise DataError(Problem(what, "each row of a .parquet file is a document", remedy, span.file.name))

    def _bad_rows(self, span: Span, before: int, values: list[Any], count: int) -> None:
        first = next(index for index, value in enumerate(values) if type(value) is not str)
        what = f"has no text in column '{self._text_key}' but {values[first]!r:.40}"
        if isinstance(values[first], UnicodeDecodeError):
            what = f"is not UTF-8 at byte {values[first].start} of column '{self._text_key}'"
        self._bad(span, what, lambda: f"row {before + first + 1}", count)

    def _text(self, span: Span, raw: IO[bytes], hasher: Any) -> Iterator[tuple[list[str], Any, int, int]]:
        data = bytearray()
        for block in _bytes_of(span, raw, hasher, self._block_bytes):
            data += block
            if len(data) > MOST_DOCUMENT_BYTES:
                raise too_long(span.file.name)
        try:
            texts = [data.decode("utf-8").removeprefix("\ufeff")]  # a byte order mark is no text
        except UnicodeDecodeError as error:
            line = data.count(b"\n", 0, error.start) + 1
            self._bad(span, f"is not UTF-8 at byte {error.start}", lambda: str(line))
            texts = []
        yield texts, np.zeros(len(texts), np.int64), span.end - span.start, len(data)

    def _bad(self, span: Span, what: str, place: Any, count: int = 1) -> None:
        self.bad += count
        if not self._skip_bad:
            rule = "" if span.file.kind == "text" else f"a document is a string under '{self._text_key}'"
            raise DataError(Problem(what, rule, _SKIP, f"{span.file.name}:{place()}"))


def _columns(table: Any, name: str, block_bytes: int) -> Iterator[Any]:
    """The column of a .parquet file in arrays of about an eighth of a block, going by the average row of each row
    group. Rows far above it come at most `_MOST_ROWS` at a time from the file, and cut to blocks from here."""
    for number in range(table.num_row_groups):
        group = table.metadata.row_group(number)
        leaves = [group.column(index) for index in range(group.num_columns)]
        own = [leaf for leaf in leaves if f"{leaf.path_in_schema}.".startswith(f"{name}.")]
        stored_bytes = max(sum(leaf.total_uncompressed_size for leaf in own), 1)
        rows = min(max(block_bytes * group.num_rows // (8 * stored_bytes), 1), _MOST_ROWS)
        for batch in table.iter_batches(rows, row_groups=[number], columns=[name], use_threads=False):
            yield from _cut(batch.column(batch.schema.get_field_index(name)), block_bytes)


def _cut(column: Any, most_bytes: int) -> Iterator[Any]:
    """In slices that are no larger, or a single row."""
    if column.nbytes <= most_bytes or len(column) < 2:
        yield column
    else:
        yield from _cut(column[: len(column) // 2], most_bytes)
        yield from _cut(column[len(column) // 2 :], most_bytes)


def _rows(column: Any) -> list[Any]:
    """Of a column of Arrow; the error in place of a text that is not UTF-8."""
    try:
        return list(column.to_pylist())
    except UnicodeDecodeError:
        return [_value(scalar) for scalar in column]


def _value(scalar: Any) -> Any:
    try:
        return scalar.as_py()
    except UnicodeDecodeError as error:
        return error


def hash_span(span: Span) -> str:
    hasher = xxhash.xxh3_128()
    try:
        with open_input(span.file) as raw:
            for _ in _ranges(span, raw, hasher):
                pass
    except Exception as error:  # an OSError, or what the library of a URL raises
        raise unreadable(span.file.name, error) from error
    return hasher.hexdigest()


def _text_of(line: bytes, key: str) -> str | Exception:
    """The text of a line, or why it has none."""
    try:
        # Python's own reader, because it also takes what it writes: NaN, and numbers of any size.
        record = json.loads(line.decode("utf-8"), parse_int=float)
    except UnicodeDecodeError as error:
        return ValueError(f"is not UTF-8: byte {error.start} of the line is {line[error.start]:#04x}")
    except (ValueError, RecursionError) as error:
        return ValueError(f"is not JSON: {error}")
    if not isinstance(record, dict):
        return ValueError(f"has no '{key}': it is no object")
    if key not in record:
        return ValueError(f"has no '{key}': its keys are {', '.join(record) or 'none'}")
    text = record[key]
    if not isinstance(text, str):
        return ValueError(f"has a '{key}' that is no string but {text!r:.40}")
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return ValueError(f"has half a surrogate pair in its '{key}', which is no character")
    return text


def _line_number(span: Span, line: int) -> str:
    """Of the file, not of the range."""
    return str(line + _newlines(span.file, span.start))


def place_of(file: InputFile, offset: int) -> str:
    """A document as an error names it: its file, with the line or the row. `offset`: as in Block.places."""
    if file.kind == "text":
        return file.name
    return f"{file.name}:{f'row {offset + 1}' if file.kind == 'parquet' else 1 + _newlines(file, offset)}"


def _newlines(file: InputFile, end: int) -> int:
    """Before this byte of its content."""
    count = 0
    if end:
        with open_input(file) as raw:
            for data in _bytes_of(Span(file, 0, file.size), raw, xxhash.xxh3_64(), BLOCK_BYTES):
                count += data.count(b"\n", 0, end)
                end -= min(end, len(data))
                if not end:
                    break
    return count


def _whole_lines(chunks: Iterator[bytes], block_bytes: int) -> Iterator[bytes]:
    """Blocks that end with a newline, of about `block_bytes`; the last one may lack it."""
    waiting: list[bytes] = []
    size = 0
    for chunk in chunks:
        waiting.append(chunk)
        size += len(chunk)
        if size < block_bytes:
            continue
        cut = chunk.rfind(b"\n") + 1
        if not cut:  # inside a long line
            continue
        waiting[-1] = chunk[:cut]
        whole = [b"".join(waiting)]
        waiting = [chunk[cut:]]
        size = len(waiting[0])
        yield whole.pop()  # so that nothing of it stays here
    if rest := b"".join(waiting):
        yield rest


def _bytes_of(span: Span, raw: IO[bytes], hasher: Any, block_bytes: int) -> Iterator[bytes]:
    if span.file.compression:
        return unpacked(HashedFile(raw, hasher), span.file.compression)
    return _ranges(span, raw, hasher, block_bytes)


def _ranges(span: Span, raw: IO[bytes], hasher: Any, block_bytes: int = BLOCK_BYTES) -> Iterator[bytes]:
    raw.seek(span.start)
    left = span.end - span.start
    while left:
        chunk = raw.read(min(left, block_bytes))
        if not chunk:
            raise EOFError(f"it ends {left} bytes before the end it had")
        hasher.update(chunk)
        left -= len(chunk)
        yield chunk


def _damaged(span: Span, error: Exception) -> DataError:
    if isinstance(error, OSError) and error.errno is not None:
        return unreadable(span.file.name, error)
    cut = isinstance(error, EOFError | zlib.error)
    kind = span.file.compression or span.file.kind
    what = f"is cut off or damaged: {error}" if cut else f"cannot be read as {kind}: {error}"
    return DataError(Problem(what, "", "copy or download the file again", span.file.name))
