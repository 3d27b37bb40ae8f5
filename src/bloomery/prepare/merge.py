"""All parts to one shard: duplicates out, documents in order. The bytes follow from the parts alone.

Where documents are shuffled, every run of a part is sorted by the keys of its documents, so the documents of a range of
keys (a bucket) are a slice of every run: they are read, sorted and appended, one bucket after the other. Else every run
is a bucket. Memory: two buckets of 64 MB (up to 512 MB for shards beyond 32 GB, whose slices would get too small), what
is known of their documents counted, and the 8 bytes a document of ShardWriter (9 where duplicates are removed).
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from tempfile import TemporaryFile
from typing import IO, Any, cast

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
"""Gathered at once: what is made for each of them besides the result stays below 1 MB."""


@dataclass
class _Run:
    """The documents of one block of a part that are still to be taken."""

    unit: int
    offset: int
    """Of their tokens in the file of the part, in bytes."""
    document: int
    end: int
    sequence: int
    """The first of them and the end, and the first of their sequences, among those of all runs."""


class Merge:
    def __init__(self, parts: list[ShardPart], folder: PartsFolder) -> None:
        """`parts`: of all units, in their order. What is known of their documents goes to files without a name."""
        self._folder = folder
        self._runs: list[_Run] = []
        document = sequence = 0
        place = folder.path
        with writing(place), TemporaryFile(dir=place) as lengths, TemporaryFile(dir=place) as table:
            for part in parts:
                offset = 0
                for documents, sequences, tokens in part.runs:
                    self._runs.append(_Run(part.unit, offset, document, document + documents, sequence))
                    offset += tokens * folder.dtype.itemsize
                    document, sequence = document + documents, sequence + sequences
                for values, file in zip(folder.index(part), (lengths, table), strict=True):
                    file.write(values.view(np.uint8).data)  # not tofile, which does not report why it fails
            mapped: list[NDArray[Any]] = [
                np.memmap(cast(IO[bytes], file), dtype, "r") if document else np.empty(0, dtype)
                for file, dtype in ((lengths, LENGTH), (table, folder.document))
            ]
        self.num_documents = document
        self._lengths, self._table = mapped
        self._duplicate = np.broadcast_to(np.False_, document)

    @property
    def num_dropped(self) -> int:
        return int(self._duplicate.sum())

    def find_duplicates(self) -> int:
        """Of documents with the same text all but the first, in the order of the units, are duplicates. How many."""
        return self._drop_repeated(lambda which: self._table["hash"][which])

    def find_similar(self) -> int:
        """Documents with a band that an earlier one has too are nearly the same. How many more that drops."""
        bands = self._table["bands"].swapaxes(0, 1)[..., None]
        return sum(self._drop_repeated(band.__getitem__) for band in bands)

    def _drop_repeated(self, hashes_of: Callable[[Any], NDArray[Any]]) -> int:
        before = self.num_dropped
        self._duplicate = self._duplicate.copy()
        passes = max(1, -(-self.num_documents * _HASH_ENTRY_BYTES // BUCKET_BYTES))
        for number in range(passes):
            here = np.flatnonzero(hashes_of(slice(None))[:, 0] % np.uint64(passes) == number)
            hashes = hashes_of(here)
            order = np.lexsort(hashes.T[::-1])  # stable: the first of equal ones stays first
            again = (hashes[order[1:]] == hashes[order[:-1]]).all(axis=1)
            self._duplicate[here[order[1:][again]]] = True
        return self.num_dropped - before

    def write(self, writer: ShardWriter, *, shuffle: bool, limit: int | None = None) -> Iterator[NDArray[Any]]:
        """Yields DOCUMENT of the documents that were appended, in their order. `limit`: the first so many."""
        for table, lengths, duplicate, tokens in self._buckets(shuffle):
            if limit is not None and writer.num_documents == limit:
                return
            if shuffle or duplicate.any():
                order = np.argsort(table["key"], kind="stable") if shuffle else np.arange(len(table))
                order = order[~duplicate[order]]
                order = order[: None if limit is None else limit - writer.num_documents]
                tokens, lengths = gather(tokens, table["tokens"], order), gather(lengths, table["sequences"], order)
                table = table[order]
            writer.append_many(tokens.data, lengths, table["sequences"])
            yield table

    def _buckets(self, shuffle: bool) -> Iterator[tuple[NDArray[Any], ...]]:
        if not shuffle:
            yield from (self._take(run, None) for run in self._runs)
            return
        total = int(self._table["tokens"].sum(dtype=np.int64)) * self._folder.dtype.itemsize
        total += len(self._lengths) * _SEQUENCE_BYTES
        total += self.num_documents * (self._folder.document.itemsize - DOCUMENT.itemsize)
        count = max(1, -(-total // min(max(BUCKET_BYTES, total // _BUCKETS), _LARGEST_BUCKET_BYTES)))
        for number in range(1, count + 1):
            edge = (1 << 64) * number // count if number < count else None
            if slices := [self._take(run, edge) for run in self._runs if run.document < run.end]:
                yield tuple(map(np.concatenate, zip(*slices, strict=True)))

    def _take(self, run: _Run, edge: int | None) -> tuple[NDArray[Any], ...]:
        """(DOCUMENT, lengths of sequences, whether it is a duplicate, tokens) of the next documents of a run, those
        with keys below `edge`."""
        table = self._table[run.document : run.end]
        if edge is not None:
            table = table[: int(np.searchsorted(table["key"], np.uint64(edge)))]
        end = run.sequence + int(table["sequences"].sum(dtype=np.int64))
        lengths, duplicate = self._lengths[run.sequence : end], self._duplicate[run.document :][: len(table)]
        count, dtype = int(table["tokens"].sum(dtype=np.int64)), self._folder.dtype
        tokens = np.fromfile(self._folder.file(run.unit), dtype, count, offset=run.offset)
        run.offset += count * dtype.itemsize
        run.document, run.sequence = run.document + len(table), end
        return table, lengths, duplicate, tokens


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
        for start, stop, count in zip(starts[rows].tolist(), ends[rows].tolist(), counts[rows].tolist(), strict=True):
            target[stop - count : stop] = source[start : start + count]
    return gathered
