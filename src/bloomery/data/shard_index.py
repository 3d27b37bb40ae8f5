"""The `.idx` of a shard, Megatron's MMIDIDX index: how long each sequence is, where it lies, which ones a document has.

It is: 9 bytes of magic, u64 version 1, u8 dtype code, u64 sequences N, u64 entries D; then int32 lengths[N] in tokens,
int64 pointers[N] in bytes, int64 doc_idx[D] (the sequence at which each document begins: first 0, last N). That of a
large corpus is larger than memory, and a training that starts needs two numbers of it.
"""

from __future__ import annotations

import errno
import os
import struct
from bisect import bisect_right
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from bloomery.base.bounded import open_regular
from bloomery.base.errors import DataError, Problem

MAGIC = b"MMIDIDX\x00\x00"
LEGACY_MAGIC = b"TNTIDX\x00\x00"
VERSION = 1
HEADER = struct.Struct("<9sQBQQ")
DTYPES = {1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}
"""Token types by code. Codes 6 and 7 are floats, which are never tokens."""

REMAKE = "copy the shard again from where it was made, or make it again with `bloomery prepare`"
_DOCUMENTS = "doc_idx must start with 0, never fall and end with the number of sequences"
_AN_END = 256
"""Entries at the end that are read and checked when an index is opened."""


class ShardIndex:
    """Opened by its end, which is all there is of a small one; what is asked for whole is read and checked then.
    DataError where something is wrong. May be used by several threads."""

    def __init__(self, path: str) -> None:
        """OSError where it cannot be opened."""
        self.path = path
        self._whole: NDArray[np.int64] | None = None
        self._file = open(path, "rb", buffering=0, opener=open_regular)  # noqa: SIM115 - closed by close
        try:
            found = os.fstat(self._file.fileno()).st_size
            header = np.empty(min(HEADER.size, found), np.uint8)
            read_into(header, self._file, 0)
            self.dtype, self.num_sequences, entries = _read_header(path, header.tobytes(), found)
            self.num_documents = entries - 1
            self.num_tokens = self._look_at_ends()
        except BaseException:
            self.close()
            raise

    def document_start(self, document: int) -> int:
        """The token at which it begins; behind the last one, the number of tokens. What is read is compared with the
        entries beside it."""
        if self._whole is not None:
            return int(self._whole[document])
        first = max(0, document - 1)
        sequence = int(self._documents(first, min(document + 2, self.num_documents + 1))[document - first])
        if not 0 <= sequence <= self.num_sequences:
            what = f"document {document} begins at sequence {sequence} of {self.num_sequences}"
            raise damaged(self.path, what, _DOCUMENTS)
        before = max(0, sequence - 1)
        start = int(self._sequences(before, min(sequence + 1, self.num_sequences))[sequence - before])
        if not 0 <= start <= self.num_tokens or (sequence == self.num_sequences and start != self.num_tokens):
            what = f"sequence {sequence} begins at token {start} of {self.num_tokens}"
            raise damaged(self.path, what, "sequences must follow each other without gaps")
        return start

    def document_at(self, token: int) -> tuple[int, int]:
        """(document, position inside it) of a token of the shard."""
        document = bisect_right(range(self.num_documents + 1), token, key=self.document_start) - 1
        return document, token - self.document_start(document)

    def documents_of(self, first: int, last: int) -> tuple[int, int]:
        """[first, last) of the documents that have a sequence in [first, last), of which there is at least one."""
        begins = self._documents(0, self.num_documents + 1)
        return int(np.searchsorted(begins, first, "right")) - 1, int(np.searchsorted(begins, last - 1, "right"))

    def document_starts(self) -> NDArray[np.int64]:
        """Of every document, and the number of tokens at the end. Stays in memory."""
        if self._whole is None:
            self._whole = self.sequence_starts()[self._documents(0, self.num_documents + 1)]
        return self._whole

    def sequence_starts(self) -> NDArray[np.int64]:
        """The token at which every sequence begins, and the number of tokens at the end."""
        return self._sequences(0, self.num_sequences)

    def close(self) -> None:
        self._file.close()

    def _look_at_ends(self) -> int:
        """The number of tokens."""
        count, entries = self.num_sequences, self.num_documents + 1
        if count <= _AN_END and entries <= _AN_END:
            starts = self._sequences(0, count)
            self._whole = starts[self._documents(0, entries)]
            return int(starts[-1])
        self._documents(0, 1)
        self._documents(max(0, entries - _AN_END), entries)
        return int(self._sequences(max(0, count - _AN_END), count)[-1])

    def _sequences(self, first: int, last: int) -> NDArray[np.int64]:
        """The token at which each of these begins, and the end of the last one."""
        lengths = self._array("<i4", 4 * first, last - first)
        pointers = self._array("<i8", 4 * self.num_sequences + 8 * first, last - first)
        if len(lengths) and lengths.min() < 0:
            bad = int(np.argmax(lengths < 0))
            what = f"sequence {first + bad} has length {lengths[bad]}"
            raise damaged(self.path, what, "lengths must not be negative")
        starts = np.zeros(last - first + 1, np.int64)
        np.cumsum(lengths, dtype=np.int64, out=starts[1:])
        if first:
            starts += pointers[0] // self.dtype.itemsize
        wrong = pointers != starts[:-1] * self.dtype.itemsize
        if wrong.any():
            bad = int(np.argmax(wrong))
            sums = f"the lengths before it add up to {starts[bad] * self.dtype.itemsize}"
            what = f"sequence {first + bad} points to byte {pointers[bad]} where {sums}"
            raise damaged(self.path, what, "sequences must follow each other without gaps")
        return starts

    def _documents(self, first: int, last: int) -> NDArray[np.int64]:
        """The sequence at which each of these begins."""
        begins = self._array("<i8", 12 * self.num_sequences + 8 * first, last - first)
        if (first == 0 and begins[0] != 0) or (last > self.num_documents and begins[-1] != self.num_sequences):
            what = f"document {first} begins at sequence {begins[0]}"
            if last > self.num_documents:
                what += f", and the last one ends at {begins[-1]} of {self.num_sequences}"
            raise damaged(self.path, what, _DOCUMENTS)
        falls = begins[1:] < begins[:-1]
        if falls.any():
            bad = int(np.argmax(falls)) + 1
            what = f"document {first + bad} begins at sequence {begins[bad]}, the one before it at {begins[bad - 1]}"
            raise damaged(self.path, what, _DOCUMENTS)
        if self.num_documents == self.num_sequences and (wrong := begins != np.arange(first, last)).any():
            bad = int(np.argmax(wrong))
            what = f"document {first + bad} begins at sequence {begins[bad]}"
            raise damaged(self.path, what, "where there are as many documents as sequences, each has one")
        return begins

    def _array(self, dtype: str, offset: int, count: int) -> NDArray[Any]:
        """`offset`: in bytes behind the header. Read, not mapped: the header's 34 bytes leave every array misaligned,
        and numpy then copies on every use."""
        values = np.empty(count, dtype)
        read_into(values, self._file, HEADER.size + offset)
        return values


def read_into(values: NDArray[Any], file: IO[bytes], offset: int) -> None:
    """Fill an array from this byte of a file on; DataError where it cannot be read or ends before."""
    unread = values.view(np.uint8)
    while len(unread):
        # Not mmap: readahead pulled 87% of a cold file into memory for 4 MB of samples; this is 20 times faster.
        try:
            got = os.preadv(file.fileno(), [unread.data], offset)
        except OSError as error:
            raise unreadable(str(file.name), error) from error
        if got == 0:
            raise damaged(str(file.name), f"ends at byte {offset}", "it was cut off while it was being read")
        unread, offset = unread[got:], offset + got


def damaged(place: str, what: str, rule: str, remedy: str = REMAKE) -> DataError:
    return DataError(Problem(what=what, rule=rule, remedy=remedy, place=place))


def unreadable(place: str, error: OSError) -> DataError:
    remedy = "correct the path" if error.errno == errno.ENAMETOOLONG else "correct its permissions or its storage"
    return damaged(place, f"cannot be read: {error.strerror or error}", "", remedy)


def _read_header(path: str, header: bytes, found: int) -> tuple[np.dtype[Any], int, int]:
    if header.startswith(LEGACY_MAGIC):
        raise damaged(
            path,
            "is in the old TNTIDX format (Megatron's --dataset-impl lazy or cached)",
            "only the mmap format (MMIDIDX) is read",
            "make the shard again from its text, with `bloomery prepare` or with --dataset-impl mmap",
        )
    if not header.startswith(MAGIC[: len(header)]):
        raise damaged(
            path, f"starts with {header[:9]!r}", f"an index starts with {MAGIC!r}: this is another kind of file"
        )
    if len(header) < HEADER.size:
        raise damaged(path, f"holds {found} bytes", f"the header alone takes {HEADER.size}: the file was cut off")
    _, version, code, num_sequences, num_entries = HEADER.unpack(header)
    if version != VERSION:
        raise damaged(path, f"has format version {version}", f"only version {VERSION} is read")
    if code not in DTYPES:
        known = ", ".join(f"{known} ({np.dtype(name).name})" for known, name in DTYPES.items())
        raise damaged(path, f"has dtype code {code}", f"tokens are integers; the known codes are {known}")
    if num_entries == 0:
        raise damaged(path, "has no document entries", "even a shard without documents has one, the closing 0")
    expected = HEADER.size + 12 * num_sequences + 8 * num_entries
    if found == expected + num_sequences and num_sequences:
        raise damaged(path, "carries a mode for every sequence", "multimodal shards are not read", "use text shards")
    if found != expected:
        raise damaged(
            path,
            f"holds {found} bytes where its header says {expected} ({num_sequences} sequences, {num_entries} entries)",
            f"the index is {'cut off' if found < expected else 'longer than it should be'}",
        )
    return np.dtype(DTYPES[code]), num_sequences, num_entries
