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
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from bloomery.base.storage import writing
from bloomery.data.shards import ShardWriter
from bloomery.prepare.parts import COLUMNS, Part, PartFolder
from bloomery.prepare.ragged import gather, sums

BUCKET_BYTES = 64 << 20
_LARGEST_BUCKET_BYTES = 512 << 20
_BUCKETS = 512
_HASH_ENTRY_BYTES = 64
"""Of one document while duplicates are looked for."""
_SEQUENCE_BYTES = 64
"""Of one document, or sentence, of a bucket while it is sorted, besides its tokens: many are shorter than that."""


@dataclass(frozen=True)
class _Documents:
    """Documents one after the other: what is known of them and, once they are read, their tokens."""

    lengths: NDArray[np.int32]
    sequences: NDArray[np.int32] | None
    keys: NDArray[np.uint64]
    files: NDArray[np.uint32]
    duplicate: NDArray[np.bool_]
    tokens: NDArray[Any]


@dataclass
class _Run:
    """The documents of one block of a part that are still to be taken."""

    part: Part
    offset: int
    """Of their tokens in the file of the part, in bytes."""
    document: int
    end: int
    sequence: int
    """The first of them and the end, and the first of their sequences, among those of all runs."""


class Merge:
    def __init__(self, parts: list[Part], folder: PartFolder, dtype: np.dtype[Any]) -> None:
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
                hashes = self._column(part, "hashes").reshape(-1, 2)
                here = np.flatnonzero(hashes[:, 0] % np.uint64(passes) == number)
                found.append(np.column_stack((hashes[here], (first + here).astype(np.uint64))))
            entries = np.concatenate(found)
            entries = entries[np.lexsort((entries[:, 2], entries[:, 1], entries[:, 0]))]
            again = (entries[1:, :2] == entries[:-1, :2]).all(axis=1)
            self.duplicate[entries[1:, 2][again].astype(np.int64)] = True

    def counts(self, number: int) -> tuple[int, int, int, int]:
        """(documents, tokens, bytes of text, duplicates) that the part of this number gives to the shard."""
        part, first = self.parts[number], int(self.first_document[number])
        duplicate = self.duplicate[first : first + part.documents]
        if not duplicate.any():
            return part.documents, part.tokens, part.text_bytes, 0
        lengths = self._column(part, "lengths")
        tokens = sums(lengths, self._column(part, "sequences")) if "sequences" in part.columns else lengths
        text_bytes = self._column(part, "text_bytes")[~duplicate].sum()
        left_out = int(duplicate.sum())
        return part.documents - left_out, int(tokens[~duplicate].sum(dtype=np.int64)), int(text_bytes), left_out

    def write(self, writer: ShardWriter, origins: IO[bytes], *, shuffle: bool, done: Callable[[float], None]) -> None:
        """`origins` gets the number of the file of each document; `done` is told the share that is written."""
        if shuffle:
            self._write_shuffled(writer, origins, done)
            return
        for number, part in enumerate(self.parts):
            if part.documents:
                self._write_part(writer, origins, part, int(self.first_document[number]))
            done((number + 1) / len(self.parts))

    def _write_part(self, writer: ShardWriter, origins: IO[bytes], part: Part, first: int) -> None:
        lengths = self._column(part, "lengths")
        sequences = self._column(part, "sequences") if "sequences" in part.columns else None
        duplicate = self.duplicate[first : first + part.documents]
        files = self._column(part, "files")
        origins.write(files[~duplicate].data)
        if not duplicate.any():
            with open(self._folder.file(part.unit), "rb", buffering=0) as file:
                writer.append_file(file, 0, lengths, sequences)
            return
        keys = np.zeros(part.documents, np.uint64)
        known = _Documents(lengths, sequences, keys, files, duplicate, np.empty(0, self._dtype))
        for run in self._runs([part]):
            documents = self._take(run, known, None)
            _append(writer, documents, np.arange(len(documents.keys)))

    def _write_shuffled(self, writer: ShardWriter, origins: IO[bytes], done: Callable[[float], None]) -> None:
        sentences = any("sequences" in part.columns for part in self.parts)
        known = _Documents(
            self._spooled("lengths"),
            self._spooled("sequences") if sentences else None,
            self._spooled("keys"),
            self._spooled("files"),
            self.duplicate,
            np.empty(0, self._dtype),
        )
        runs = list(self._runs(self.parts))
        tokens, sequences = (sum(run[field] for part in self.parts for run in part.runs) for field in (2, 1))
        total = tokens * self._dtype.itemsize + sequences * _SEQUENCE_BYTES
        buckets = max(1, -(-total // min(max(BUCKET_BYTES, total // _BUCKETS), _LARGEST_BUCKET_BYTES)))
        for number in range(1, buckets + 1):
            edge = (1 << 64) * number // buckets if number < buckets else None
            if left := [run for run in runs if run.document < run.end]:
                bucket = _joined([self._take(run, known, edge) for run in left])
                order = np.argsort(bucket.keys, kind="stable")
                origins.write(bucket.files[order[~bucket.duplicate[order]]].data)
                _append(writer, bucket, order)
            done(number / buckets)

    def _runs(self, parts: list[Part]) -> Iterator[_Run]:
        document = sequence = 0
        for part in parts:
            offset = 0
            for documents, sequences, tokens in part.runs:
                yield _Run(part, offset, document, document + documents, sequence)
                offset += tokens * self._dtype.itemsize
                document, sequence = document + documents, sequence + sequences

    def _take(self, run: _Run, known: _Documents, edge: int | None) -> _Documents:
        """The next documents of a run, those with keys below `edge`. `known`: all documents that runs number."""
        keys = known.keys[run.document : run.end]
        count = len(keys) if edge is None else int(np.searchsorted(keys, np.uint64(edge)))
        documents = slice(run.document, run.document + count)
        sequences = None if known.sequences is None else known.sequences[documents]
        end = run.sequence + (count if sequences is None else int(sequences.sum(dtype=np.int64)))
        lengths = known.lengths[run.sequence : end]
        tokens = int(lengths.sum(dtype=np.int64))
        values = known.tokens
        if tokens:
            values = np.fromfile(self._folder.file(run.part.unit), self._dtype, tokens, offset=run.offset)
        run.offset += tokens * self._dtype.itemsize
        run.document, run.sequence = documents.stop, end
        return _Documents(lengths, sequences, keys[:count], known.files[documents], known.duplicate[documents], values)

    def _column(self, part: Part, name: str) -> NDArray[Any]:
        return self._folder.column(part, name) if name in part.columns else np.empty(0, COLUMNS[name])

    def _spooled(self, name: str) -> NDArray[Any]:
        """A column of all parts, in a file, so that it needs no memory."""
        path = self._folder.temporary(0)
        path = path.with_name(f"{path.name}-{name}")  # still a temporary one, which `clean` finds
        with writing(path), open(path, "xb") as file:
            for part in self.parts:
                file.write(self._column(part, name).data)  # not tofile, which does not say why it fails
            file.flush()
            empty = not file.tell()
        column = np.empty(0, COLUMNS[name]) if empty else np.memmap(path, COLUMNS[name], "r")
        path.unlink()  # the memory map keeps it alive
        return column


def _joined(pieces: list[_Documents]) -> _Documents:
    sequences = [piece.sequences for piece in pieces if piece.sequences is not None]
    return _Documents(
        np.concatenate([piece.lengths for piece in pieces]),
        np.concatenate(sequences) if sequences else None,
        np.concatenate([piece.keys for piece in pieces]),
        np.concatenate([piece.files for piece in pieces]),
        np.concatenate([piece.duplicate for piece in pieces]),
        np.concatenate([piece.tokens for piece in pieces]),
    )


def _append(writer: ShardWriter, documents: _Documents, order: NDArray[np.int64]) -> None:
    order = order[~documents.duplicate[order]]
    if not len(order):
        return
    lengths, sequences = documents.lengths, documents.sequences
    tokens_each = lengths if sequences is None else sums(lengths, sequences)
    tokens = gather(documents.tokens, tokens_each, order)
    if sequences is None:
        writer.append_many(tokens.data, lengths[order])
    else:
        writer.append_many(tokens.data, gather(lengths, sequences, order), sequences[order])
