"""Units of work, and the documents of each in blocks of about 8 MB: lines, rows or whole files.

A unit is a range of lines of a large plain .jsonl, or one or more files. Units follow from the files alone, never from
the number of workers. What is broken is named or counted.
"""

from __future__ import annotations

import json
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
from bloomery.prepare.unpack import MOST_DOCUMENT_BYTES, HashedFile, bounded_lines, too_long, unpacked, whole_lines

BLOCK_BYTES = 8 << 20
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
        try:
            with open_input(file) as raw:
                for index in range(1, count):
                    cuts.append(_after_newline(raw, max(file.size * index // count, cuts[-1] - 1)))
        except Exception as error:  # an OSError, or what the library of a URL raises
            raise unreadable(file.name, error) from error
    return [Span(file, start, end) for start, end in pairwise([*cuts, file.size]) if end > start]


def _after_newline(raw: IO[bytes], offset: int) -> int:
    raw.seek(offset)
    while chunk := raw.read(1 << 16):
        if newline := chunk.find(b"\n") + 1:
            return offset + int(newline)
        offset += len(chunk)
    return offset


@dataclass
class Block:
    texts: list[str] = field(default_factory=list)
    places: list[NDArray[np.uint64]] = field(default_factory=list)
    """For each document two numbers that no other has: of its file, and where it stands in it (byte, row or 0)."""
    input_bytes: int = 0
    size: int = 0


Documents = Iterator[tuple[list[str], Any, int]]
"""(texts, where each stands, bytes of text and around it), some at a time."""


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
            for texts, offsets, size, input_bytes in self._read(span, hasher):
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
        """As Documents, with the bytes of the file."""
        kind, counted = span.file.kind, span.start
        if not span.file.size and kind == "jsonl" and not span.file.compression:
            return
        reader = {"jsonl": self._jsonl, "parquet": self._parquet, "text": self._text}[kind]
        try:
            with open_input(span.file) as raw:
                for documents in reader(span, raw, hasher):
                    before, counted = counted, counted if kind == "parquet" else raw.tell()
                    yield *documents, counted - before
                    del documents
            yield [], np.empty(0, np.int64), 0, span.end - counted
        except (BloomeryError, MemoryError, AssertionError, AttributeError, IndexError):  # ours
            raise
        except ImportError as error:
            remedy = "install it with `pip install 'bloomery[parquet]'`"
            raise DataError(Problem(f"needs pyarrow: {error}", "", remedy, span.file.name)) from error
        except Exception as error:  # files, decompressors, Arrow and URLs each have their own kinds
            if isinstance(error, OSError) and error.errno is not None:
                raise unreadable(span.file.name, error) from error
            what = f"is truncated or damaged: {error}"
            raise DataError(Problem(what, "", "copy or download the file again", span.file.name)) from error

    def _jsonl(self, span: Span, raw: IO[bytes], hasher: Any) -> Documents:
        offset, name = span.start, span.file.name
        chunks = bounded_lines(
            _chunks(span, raw, hasher, self._block_bytes),
            lambda line: f"{name}:{line + _newlines(span.file, span.start)}",
        )
        for data in whole_lines(chunks, self._block_bytes):
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

    def _parquet(self, span: Span, raw: IO[bytes], hasher: Any) -> Documents:
        import pyarrow.parquet  # type: ignore[import-untyped]

        key, row = self._text_key, 0
        try:
            # pre_buffer would read the column of a whole row group at once.
            table = pyarrow.parquet.ParquetFile(raw, buffer_size=_PARQUET_BUFFER_BYTES, pre_buffer=False)
            _check_columns(span, table.schema_arrow.names, key)
            for column in _columns(table, key, self._block_bytes):
                if len(column) == 1 and column.nbytes > MOST_DOCUMENT_BYTES:
                    raise too_long(place_of(span.file, row))
                texts, good, size = [], [], column.nbytes + _ROW_BYTES * len(column)
                for number, value in enumerate(_values(column), row):
                    if type(value) is str:
                        texts.append(value)
                        good.append(number)
                        continue
                    what = f"is not UTF-8: {value}" if isinstance(value, ValueError) else f"has {value!r:.40}"
                    self._reject(span.file, f"{what} in column '{key}'", number)
                row += len(column)
                del column
                yield texts, np.array(good, np.int64), size
                del texts
        finally:
            table = None
            pyarrow.default_memory_pool().release_unused()  # else it keeps the largest page there was
        for _ in _chunks(span, raw, hasher, self._block_bytes):  # last, so that a sample does not read so far
            pass

    def _text(self, span: Span, raw: IO[bytes], hasher: Any) -> Documents:
        data = bytearray()
        for chunk in _chunks(span, raw, hasher, self._block_bytes):
            data += chunk
            if len(data) > MOST_DOCUMENT_BYTES:
                raise too_long(span.file.name)
        try:
            texts = [data.decode("utf-8").removeprefix("\ufeff")]  # a byte order mark is no text
        except UnicodeDecodeError as error:
            line = data.count(b"\n", 0, error.start) + 1
            self._reject(span.file, f"is not UTF-8 at byte {error.start}", place=f"{span.file.name}:{line}")
            texts = []
        yield texts, np.zeros(len(texts), np.int64), len(data)

    def _reject(self, file: InputFile, what: str, offset: int = 0, *, place: str = "") -> None:
        self.bad += 1
        if not self._skip_bad:
            rule = "" if file.kind == "text" else f"a document is a string under '{self._text_key}'"
            remedy = "fix it, or leave such records out with `bad_records: skip`"
            raise DataError(Problem(what, rule, remedy, place or place_of(file, offset)))


def _check_columns(span: Span, names: list[str], key: str) -> None:
    if (count := names.count(key)) != 1:
        what = f"has {f'{count} columns' if count else 'no column'} '{key}': its columns are {', '.join(names)}"
        remedy = "give each its own name" if count else "set text_key to the column that holds the documents"
        raise DataError(Problem(what, "each row of a .parquet file is a document", remedy, span.file.name))


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


def _values(column: Any) -> Iterator[Any]:
    """Of a column of Arrow; the error in place of a text that is not UTF-8."""
    try:
        yield from column.to_pylist()
    except UnicodeDecodeError:
        for scalar in column:
            try:
                yield scalar.as_py()
            except UnicodeDecodeError as error:
                yield error


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
            for data in _chunks(Span(file, 0, file.size), raw, xxhash.xxh3_64(), BLOCK_BYTES):
                count += data.count(b"\n", 0, end)
                end -= min(end, len(data))
                if not end:
                    break
    return count


def hash_span(span: Span) -> str:
    hasher = xxhash.xxh3_128()
    try:
        with open_input(span.file) as raw:
            for _ in _stored_bytes(span, raw, hasher, BLOCK_BYTES):
                pass
    except Exception as error:  # an OSError, or what the library of a URL raises
        raise unreadable(span.file.name, error) from error
    return hasher.hexdigest()


def _chunks(span: Span, raw: IO[bytes], hasher: Any, block_bytes: int) -> Iterator[bytes]:
    """The content, unpacked; the hash is that of the bytes as they are stored."""
    if span.file.compression:
        return unpacked(HashedFile(raw, hasher), span.file.compression)
    return _stored_bytes(span, raw, hasher, block_bytes)


def _stored_bytes(span: Span, raw: IO[bytes], hasher: Any, block_bytes: int) -> Iterator[bytes]:
    raw.seek(span.start)
    left = span.end - span.start
    while left:
        chunk = raw.read(min(left, block_bytes))
        if not chunk:
            raise EOFError(f"it ends {left} bytes before the end it had")
        hasher.update(chunk)
        left -= len(chunk)
        yield chunk
