"""All parts to one shard: duplicates out, documents in order. The bytes follow from the parts alone.

Without shuffling, the tokens of a part are copied as they are. With it, every run of a part is sorted by the keys of
its documents, so the documents of a range of keys (a bucket) are a slice of every run: they are read, sorted and
appended, one bucket after the other. Memory: two buckets of 64 MB (up to 512 MB for shards beyond 32 GB, whose slices
would get too small), what is known of their documents counted, and the 8 bytes a document of ShardWriter (9 where
duplicates are removed).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bloomery.base.storage import writing
from bloomery.data.shards import ShardWriter
from bloomery.prepare.parts import DOCUMENT, LENGTH, PartsFolder, ShardPart

BUCKET_BYTES = 64 << 20
_LARGEST_BUCKET_BYTES = 512 << 20
_BUCKETS = 512
_HASH_ENTRY_BYTES = 64
"""Of one document while duplicates are looked for."""
_SEQUENCE_BYTES = 64
"""Of one document, or sentence, of a bucket while it is sorted, besides its tokens: many are shorter than that."""
_ROWS = 1 << 12
"""Gathered at once: what is made for each of them besides the result stays below 16 MB."""
_LONG_ROW = 128
"""Entries from which copying row by row is faster than an index array: nine times at five thousand, while at seven
the array is four times as fast."""


@dataclass(frozen=True)
class _Documents:
    """Documents one after the other, with the lengths of their sequences and, once they are read, their tokens."""

    table: NDArray[Any]
    lengths: NDArray[np.int32]
    duplicate: NDArray[np.bool_]
    tokens: NDArray[Any]


@dataclass
class _Run:
    """The documents of one block of a part that are still to be taken."""

    part: ShardPart
    offset: int
    """Of their tokens in the file of the part, in bytes."""
    document: int
    end: int
    sequence: int
    """The first of them and the end, and the first of their sequences, among those of all runs."""


class Merge:
    def __init__(self, parts: list[ShardPart], folder: PartsFolder, dtype: np.dtype[Any]) -> None:
        """`parts`: of all units, in their order."""
        self.parts, self._folder, self._dtype = parts, folder, dtype
        self.first_document = np.cumsum([0, *(part.documents for part in parts)])
        """Of each part, among all documents of all parts."""
        self.duplicate = np.broadcast_to(np.False_, int(self.first_document[-1]))
        """Of each document; none before `find_duplicates`."""

    def find_duplicates(self) -> None:
        """Of documents with the same text all but the first, in the order of the units, are duplicates."""
        total = int(self.first_document[-1])
        self.duplicate = np.zeros(total, bool)
        passes = max(1, -(-total * _HASH_ENTRY_BYTES // BUCKET_BYTES))
        for number in range(passes):
            found = [np.empty((0, 3), np.uint64)]
            for part, first in zip(self.parts, self.first_document, strict=False):
                hashes = self._folder.documents(part)["hash"]
                here = np.flatnonzero(hashes[:, 0] % np.uint64(passes) == number)
                found.append(np.column_stack((hashes[here], (first + here).astype(np.uint64))))
            entries = np.concatenate(found)
            entries = entries[np.lexsort((entries[:, 2], entries[:, 1], entries[:, 0]))]
            again = (entries[1:, :2] == entries[:-1, :2]).all(axis=1)
            self.duplicate[entries[1:, 2][again].astype(np.int64)] = True

    def counts(self, number: int) -> tuple[int, int, int, int]:
        """(documents, tokens, bytes of text, duplicates) that the part of this number gives to the shard."""
        part = self.parts[number]
        kept = ~self._duplicates(number)
        if kept.all():
            return part.documents, part.tokens, part.text_bytes, 0
        table = self._folder.documents(part)
        tokens = sums(self._folder.lengths(part), table["sequences"])
        left_out = int((~kept).sum())
        return part.documents - left_out, int(tokens[kept].sum()), int(table["text_bytes"][kept].sum()), left_out

    def write(
        self,
        writer: ShardWriter,
        add_origins: Callable[[NDArray[np.uint32]], None],
        shuffle: bool,
        done: Callable[[float], None],
    ) -> None:
        """`add_origins` gets the number of the file of each document, `done` the share that is written."""
        if shuffle:
            self._write_shuffled(writer, add_origins, done)
            return
        for number, part in enumerate(self.parts):
            if part.documents:
                self._write_part(writer, add_origins, number)
            done((number + 1) / len(self.parts))

    def _write_part(self, writer: ShardWriter, add_origins: Callable[[NDArray[np.uint32]], None], number: int) -> None:
        part, duplicate = self.parts[number], self._duplicates(number)
        table, lengths = self._folder.documents(part), self._folder.lengths(part)
        add_origins(table["file"][~duplicate])
        if not duplicate.any():
            tokens = np.memmap(self._folder.file(part.unit), self._dtype, "r", shape=part.tokens)
            writer.append_many(tokens.data, lengths, table["sequences"])
            return
        known = _Documents(table, lengths, duplicate, np.empty(0, self._dtype))
        for run in self._runs([part]):
            documents = self._take(run, known, None)
            _append(writer, documents, np.arange(len(documents.table)))

    def _write_shuffled(
        self, writer: ShardWriter, add_origins: Callable[[NDArray[np.uint32]], None], done: Callable[[float], None]
    ) -> None:
        table, lengths = self._spooled(DOCUMENT, self._folder.documents), self._spooled(LENGTH, self._folder.lengths)
        known = _Documents(table, lengths, self.duplicate, np.empty(0, self._dtype))
        runs = list(self._runs(self.parts))
        tokens, sequences = (sum(run[field] for part in self.parts for run in part.runs) for field in (2, 1))
        total = tokens * self._dtype.itemsize + sequences * _SEQUENCE_BYTES
        buckets = max(1, -(-total // min(max(BUCKET_BYTES, total // _BUCKETS), _LARGEST_BUCKET_BYTES)))
        for number in range(1, buckets + 1):
            edge = (1 << 64) * number // buckets if number < buckets else None
            if left := [run for run in runs if run.document < run.end]:
                pieces = [self._take(run, known, edge) for run in left]
                columns = zip(
                    *((each.table, each.lengths, each.duplicate, each.tokens) for each in pieces), strict=True
                )
                bucket = _Documents(*map(np.concatenate, columns))
                order = np.argsort(bucket.table["key"], kind="stable")
                add_origins(bucket.table["file"][order[~bucket.duplicate[order]]])
                _append(writer, bucket, order)
            done(number / buckets)

    def _duplicates(self, number: int) -> NDArray[np.bool_]:
        return self.duplicate[self.first_document[number] : self.first_document[number + 1]]

    def _runs(self, parts: list[ShardPart]) -> Iterator[_Run]:
        document = sequence = 0
        for part in parts:
            offset = 0
            for documents, sequences, tokens in part.runs:
                yield _Run(part, offset, document, document + documents, sequence)
                offset += tokens * self._dtype.itemsize
                document, sequence = document + documents, sequence + sequences

    def _take(self, run: _Run, known: _Documents, edge: int | None) -> _Documents:
        """The next documents of a run, those with keys below `edge`. `known`: all documents that runs number."""
        table = known.table[run.document : run.end]
        count = len(table) if edge is None else int(np.searchsorted(table["key"], np.uint64(edge)))
        table = table[:count]
        end = run.sequence + int(table["sequences"].sum(dtype=np.int64))
        lengths = known.lengths[run.sequence : end]
        tokens = int(lengths.sum(dtype=np.int64))
        values = known.tokens
        if tokens:
            values = np.fromfile(self._folder.file(run.part.unit), self._dtype, tokens, offset=run.offset)
        duplicate = known.duplicate[run.document : run.document + count]
        run.offset += tokens * self._dtype.itemsize
        run.document, run.sequence = run.document + count, end
        return _Documents(table, lengths, duplicate, values)

    def _spooled(self, dtype: np.dtype[Any], read: Callable[[ShardPart], NDArray[Any]]) -> NDArray[Any]:
        """An index of all parts, in a file, so that it needs no memory."""
        path = self._folder.temporary(0)
        with writing(path), open(path, "xb") as file:
            for part in self.parts:
                file.write(read(part).view(np.uint8).data)  # not tofile, which does not report why it fails
            file.flush()
            empty = not file.tell()
        values = np.empty(0, dtype) if empty else np.memmap(path, dtype, "r")
        path.unlink()  # the memory map keeps it alive
        return values


def _append(writer: ShardWriter, documents: _Documents, order: NDArray[np.int64]) -> None:
    order = order[~documents.duplicate[order]]
    if len(order):
        sequences = documents.table["sequences"]
        tokens = gather(documents.tokens, sums(documents.lengths, sequences), order)
        writer.append_many(tokens.data, gather(documents.lengths, sequences, order), sequences[order])


def gather(values: NDArray[Any], lengths: NDArray[Any], order: NDArray[np.int64]) -> NDArray[Any]:
    """Rows of different lengths, which lie one after the other in `values`, in another order, or some of them. Needs
    the result and 40 bytes for each row."""
    counts = lengths[order].astype(np.int64)
    starts = np.cumsum(lengths, dtype=np.int64)[order] - counts
    ends = np.cumsum(counts)
    gathered = np.empty(ends[-1] if len(ends) else 0, values.dtype)
    source, target = np.ascontiguousarray(values).data, gathered.data
    for first in range(0, len(order), _ROWS):
        rows = slice(first, first + _ROWS)
        begin, end = int(ends[first] - counts[first]), int(ends[rows][-1])
        if end - begin < _LONG_ROW * len(ends[rows]):
            index = np.repeat(starts[rows] - ends[rows] + counts[rows], counts[rows])
            index += np.arange(begin, end)
            np.take(values, index, out=gathered[begin:end])
            continue
        for start, stop, count in zip(starts[rows].tolist(), ends[rows].tolist(), counts[rows].tolist(), strict=True):
            target[stop - count : stop] = source[start : start + count]
    return gathered


def sums(values: NDArray[Any], lengths: NDArray[Any]) -> NDArray[np.int64]:
    """The sum of each row."""
    totals = np.concatenate(([0], np.cumsum(values, dtype=np.int64)))
    ends = np.cumsum(lengths, dtype=np.int64)
    return np.asarray(totals[ends] - totals[ends - lengths], np.int64)
