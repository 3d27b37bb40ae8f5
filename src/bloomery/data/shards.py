"""Sole owner of shards: `<prefix>.bin` (bare tokens, little endian) and `<prefix>.idx`, Megatron's MMIDIDX index: how
long each sequence is, where it lies, which ones a document has.

The index is: 9 bytes of magic, u64 version 1, u8 dtype code, u64 sequences N, u64 entries D; then int32 lengths[N] in
tokens, int64 pointers[N] in bytes, int64 doc_idx[D] (the sequence at which each document begins: first 0, last N). That
of a large corpus is larger than memory, and a training that starts needs two numbers of it.
"""

import errno
import hashlib
import os
import secrets
import struct
from array import array
from bisect import bisect_right
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, suppress
from glob import escape, glob
from io import FileIO
from pathlib import Path
from typing import IO, Any

import numpy as np
import xxhash
from numpy.typing import DTypeLike, NDArray

from bloomery.base.bounded import open_regular
from bloomery.base.errors import DataError, Problem, unreadable
from bloomery.base.storage import make_folder, publish, writing

MAGIC = b"MMIDIDX\x00\x00"
VERSION = 1
HEADER = struct.Struct("<9sQBQQ")
DTYPES = {1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}
"""Token types by code. Codes 6 and 7 are floats, which are never tokens."""
PARTIAL = ".partial-"
"""Between the prefix and a random name: files that a killed writer leaves."""
_REMAKE = "copy the shard again from where it was made, or make it again with `bloomery prepare`"
_DOCUMENTS = "doc_idx must start with 0, never fall and end with the number of sequences"
_SEQUENCES = "sequences must follow each other without gaps"
_AN_END = 256
"""Entries at the end that are read and checked when an index is opened."""
_INDEX_ENTRIES = 1 << 20
_FACT_DOCUMENTS, _FACT_PLACES, _FACT_TOKENS = 256, 64, 1024
_BLOCK_TOKENS = 1 << 22


def token_dtype(vocab_size: int) -> np.dtype[Any]:
    """Megatron's rule, so that shards equal its own byte for byte."""
    return np.dtype(np.uint16 if vocab_size < 65500 else np.int32)


class ShardWriter(AbstractContextManager["ShardWriter"]):
    """Appends documents. On leaving its context both files get their names; after an exception nothing is left. Keeps
    8 bytes in memory for each document of one sequence, 4 for each sequence more."""

    def __init__(self, prefix: str, dtype: DTypeLike) -> None:
        self.prefix = prefix
        self.dtype = np.dtype(dtype).newbyteorder("<")
        self._code = next(code for code, name in DTYPES.items() if np.dtype(name) == self.dtype)
        self._lengths = array("i")
        self._sequences = array("i")
        """How many sequences each document has."""
        self.num_tokens = self.num_documents = self.num_sequences = 0
        partial = f"{prefix}{PARTIAL}{secrets.token_hex(4)}"  # two writers of one shard never mix their bytes
        self._partial_bin, self._partial_idx = f"{partial}.bin", f"{partial}.idx"
        make_folder(os.path.dirname(prefix) or ".")
        with writing(f"{prefix}.bin"):
            self._bin = open(self._partial_bin, "xb", buffering=1 << 20)  # noqa: SIM115 - closed by __exit__

    def append(self, document: NDArray[np.integer[Any]]) -> None:
        """One document, stored as one sequence. ValueError where it is empty or an id does not fit the dtype."""
        tokens = document.astype(self.dtype)
        if tokens.ndim != 1 or not tokens.size or (tokens != document).any():
            raise ValueError(f"not a row of at least one token, or they do not fit into {self.dtype}")
        self.append_many(tokens.data, np.array([tokens.size], "<i4"), np.ones(1, "<i4"))

    def append_many(self, tokens: bytes | memoryview, lengths: NDArray[np.int32], sequences: NDArray[np.int32]) -> None:
        """Many documents at once: their tokens in the shard's dtype, the length of every sequence, and the number of
        sequences of every document."""
        with writing(f"{self.prefix}.bin"):
            written = self._bin.write(tokens)
        num_tokens = int(lengths.sum(dtype=np.int64))
        assert written == num_tokens * self.dtype.itemsize, "lengths and tokens differ"
        assert sequences.sum(dtype=np.int64) == len(lengths), "sequences and documents differ"
        self.num_tokens += num_tokens
        self.num_sequences += len(lengths)
        self.num_documents += len(sequences)
        self._lengths.frombytes(lengths.astype("<i4").tobytes())
        self._sequences.frombytes(sequences.astype("<i4").tobytes())

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            if kind is None:
                self._finish()
        finally:
            with suppress(OSError):
                self._bin.close()
            for partial in (self._partial_bin, self._partial_idx):
                with suppress(OSError):  # gone where it got its name
                    os.unlink(partial)

    def _finish(self) -> None:
        """The data comes first and the index last: an index under its final name stands for a whole shard."""
        with writing(f"{self.prefix}.bin"):
            self._bin.close()
            self._write_index()
            # An older shard of this name loses its index first, so that it never describes the new data.
            with suppress(FileNotFoundError):
                os.unlink(f"{self.prefix}.idx")
            publish(Path(self._partial_bin), Path(f"{self.prefix}.bin"))
            publish(Path(self._partial_idx), Path(f"{self.prefix}.idx"))

    def _write_index(self) -> None:
        lengths = np.frombuffer(self._lengths, dtype="<i4")
        sequences = np.frombuffer(self._sequences, dtype="<i4")
        with open(self._partial_idx, "xb") as file:
            file.write(HEADER.pack(MAGIC, VERSION, self._code, len(lengths), len(sequences) + 1))
            file.write(lengths.data)
            for starts in _running_sums(lengths):
                file.write((starts[:-1] * self.dtype.itemsize).data)
            file.write(np.zeros(1, "<i8").data)
            for starts in _running_sums(sequences):
                file.write(starts[1:].data)


def _running_sums(counts: NDArray[np.int32]) -> Iterator[NDArray[np.int64]]:
    """Piece by piece, so that an index of a billion entries is not held in memory: the sum before each, and after."""
    before = 0
    for start in range(0, len(counts), _INDEX_ENTRIES):
        piece = counts[start : start + _INDEX_ENTRIES]
        sums = np.zeros(len(piece) + 1, "<i8")
        np.cumsum(piece, dtype="<i8", out=sums[1:])
        sums += before
        yield sums
        before = int(sums[-1])


class ShardReader(AbstractContextManager["ShardReader"]):
    """One shard, opened in no time whatever its size: by the end of its index, which is all there is of a small one.
    The rest is read and checked when it is requested. DataError where something is wrong. Several threads may read."""

    def __init__(self, prefix: str) -> None:
        self.prefix = prefix
        with ExitStack() as closing:
            try:
                self._idx, self._bin = (
                    closing.enter_context(FileIO(prefix + suffix, opener=open_regular)) for suffix in (".idx", ".bin")
                )
            except OSError as error:
                raise _not_opened(prefix, error) from error
            self.dtype, count, entries = _read_header(self._idx)
            self.num_sequences, self.num_documents = count, entries - 1
            self._documents(max(0, entries - _AN_END), entries)
            self.num_tokens = int(self._sequences(max(0, count - _AN_END), count)[-1])
            found, expected = os.fstat(self._bin.fileno()).st_size, self.num_tokens * self.dtype.itemsize
            if found != expected:
                what = f"holds {found} bytes where its index says {expected} "
                what += f"({self.num_tokens} tokens of {self.dtype.itemsize} bytes)"
                rule = f"the data is {'shorter' if found < expected else 'longer'} than the index: it was cut off, "
                rule += "is still being written, or belongs to another .idx"
                raise damaged(f"{prefix}.bin", what, rule)
            self._closing = closing.pop_all()

    def facts(self) -> dict[str, Any]:
        """What identifies this shard: its size, and a hash of some of its tokens and of where some documents
        begin."""
        hasher = xxhash.xxh3_128()
        for document in np.linspace(0, self.num_documents, _FACT_DOCUMENTS, dtype=np.int64):
            hasher.update(self.document_start(int(document)).to_bytes(8, "little"))
        count = min(_FACT_TOKENS, self.num_tokens)
        for start in np.linspace(0, self.num_tokens - count, _FACT_PLACES, dtype=np.int64):
            hasher.update(self.read(int(start), count).tobytes())
        return {"documents": self.num_documents, "tokens": self.num_tokens, "sample_digest": hasher.hexdigest()}

    def read(self, start_token: int, count: int) -> NDArray[Any]:
        """Tokens [start_token, start_token + count) in the shard's own dtype."""
        tokens = np.empty(count, self.dtype)
        read_into(tokens, self._bin, start_token * self.dtype.itemsize)
        return tokens

    def blocks(self) -> Iterator[NDArray[Any]]:
        """All tokens, some after the other."""
        for start in range(0, self.num_tokens, _BLOCK_TOKENS):
            yield self.read(start, min(_BLOCK_TOKENS, self.num_tokens - start))

    def document_start(self, document: int) -> int:
        """The token at which it begins; behind the last one, the number of tokens. What is read is compared with the
        entries beside it."""
        if document in (0, self.num_documents):  # every shard begins at 0; its end was compared at opening
            return self.num_tokens if document else 0
        first = max(0, document - 1)
        sequence = int(self._documents(first, min(document + 2, self.num_documents + 1))[document - first])
        if not 0 <= sequence <= self.num_sequences:
            what = f"document {document} begins at sequence {sequence} of {self.num_sequences}"
            raise damaged(self._idx.name, what, _DOCUMENTS)
        before = max(0, sequence - 1)
        start = int(self._sequences(before, min(sequence + 1, self.num_sequences))[sequence - before])
        if not 0 <= start <= self.num_tokens or (sequence == self.num_sequences and start != self.num_tokens):
            what = f"sequence {sequence} begins at token {start} of {self.num_tokens}"
            raise damaged(self._idx.name, what, _SEQUENCES)
        return start

    def document_at(self, token: int) -> tuple[int, int]:
        """(document, position inside it) of a token of the shard."""
        document = bisect_right(range(self.num_documents + 1), token, key=self.document_start) - 1
        return document, token - self.document_start(document)

    def document_starts(self) -> NDArray[np.int64]:
        """Of every document, and the number of tokens at the end."""
        return self.sequence_starts()[self._documents(0, self.num_documents + 1)]

    def sequence_starts(self) -> NDArray[np.int64]:
        """The token at which every sequence begins, and the number of tokens at the end."""
        return self._sequences(0, self.num_sequences)

    def __exit__(self, *_: object) -> None:
        self._closing.close()

    def _sequences(self, first: int, last: int) -> NDArray[np.int64]:
        """The token at which each of these begins, and the end of the last one."""
        lengths = self._array("<i4", 4 * first, last - first)
        pointers = self._array("<i8", 4 * self.num_sequences + 8 * first, last - first)
        starts = np.zeros(last - first + 1, np.int64)
        np.cumsum(lengths, dtype=np.int64, out=starts[1:])
        if first:
            starts += pointers[0] // self.dtype.itemsize
        wrong = (pointers != starts[:-1] * self.dtype.itemsize) | (lengths < 0)
        if wrong.any():
            bad = int(np.argmax(wrong))
            what = f"sequence {first + bad} has length {lengths[bad]} and points to byte {pointers[bad]}"
            sums = f"where the lengths before it add up to {starts[bad] * self.dtype.itemsize}"
            raise damaged(self._idx.name, f"{what} {sums}", _SEQUENCES)
        return starts

    def _documents(self, first: int, last: int) -> NDArray[np.int64]:
        """The sequence at which each of these begins."""
        begins = self._array("<i8", 12 * self.num_sequences + 8 * first, last - first)
        wrong = np.concatenate(([begins[0] < 0], begins[1:] < begins[:-1]))
        wrong[0] |= first == 0 and begins[0] != 0
        wrong[-1] |= last > self.num_documents and begins[-1] != self.num_sequences
        if self.num_documents == self.num_sequences:  # each document has one
            wrong |= begins != np.arange(first, last)
        if wrong.any():
            bad = int(np.argmax(wrong))
            raise damaged(self._idx.name, f"document {first + bad} begins at sequence {begins[bad]}", _DOCUMENTS)
        return begins

    def _array(self, dtype: str, offset: int, count: int) -> NDArray[Any]:
        """`offset`: in bytes behind the header. Read, not mapped: the header's 34 bytes leave every array misaligned,
        and numpy then copies on every use."""
        values = np.empty(count, dtype)
        read_into(values, self._idx, HEADER.size + offset)
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
            raise damaged(str(file.name), f"ends at byte {offset}", "it was truncated while it was being read")
        unread, offset = unread[got:], offset + got


def file_checksum(path: str | os.PathLike[str]) -> str:
    with open(path, "rb", buffering=0, opener=open_regular) as file:
        return hashlib.file_digest(file, xxhash.xxh3_128).hexdigest()


def damaged(place: str, what: str, rule: str) -> DataError:
    return DataError(Problem(what, rule, _REMAKE, place))


def _read_header(file: IO[bytes]) -> tuple[np.dtype[Any], int, int]:
    """(type of the tokens, sequences, entries of documents) of an index."""
    path, found = str(file.name), os.fstat(file.fileno()).st_size
    values = np.empty(min(HEADER.size, found), np.uint8)
    read_into(values, file, 0)
    header = values.tobytes()
    if len(header) < HEADER.size or not header.startswith(MAGIC):
        rule = f"an index starts with {MAGIC!r}: this was truncated, is of Megatron's older TNTIDX format, or no index"
        raise damaged(path, f"holds {found} bytes and starts with {header[:9]!r}", rule)
    _, version, code, num_sequences, num_entries = HEADER.unpack(header)
    if version != VERSION or code not in DTYPES or num_entries == 0:
        what = f"has version {version}, dtype code {code} and {num_entries} entries of documents"
        known = ", ".join(f"{known} ({np.dtype(name).name})" for known, name in DTYPES.items())
        raise damaged(path, what, f"the version is {VERSION}, tokens are {known}, and the last entry closes the list")
    expected = HEADER.size + 12 * num_sequences + 8 * num_entries
    if found != expected:
        what = f"holds {found} bytes where its header says {expected}"
        rule = f"{num_sequences} sequences and {num_entries} entries, without modes (multimodal shards are not read)"
        raise damaged(path, what, rule)
    return np.dtype(DTYPES[code]), num_sequences, num_entries


def _not_opened(prefix: str, error: OSError) -> DataError:
    missing = [suffix for suffix in (".bin", ".idx") if not os.path.exists(prefix + suffix)]
    if not missing or error.errno not in (errno.ENOENT, errno.ENOTDIR):
        return unreadable(str(error.filename), error)
    remedy = "make the shard with `bloomery prepare`, or correct the path"
    near = sorted(glob(f"{escape(prefix.removesuffix('.bin').removesuffix('.idx'))}*.idx"))
    if near and ".idx" in missing:
        remedy += f" (there is {', '.join(path[:-4] for path in near[:3])})"
    rule = "a shard is a pair of files, <path>.bin and <path>.idx"
    return DataError([Problem("no such file", rule, remedy, prefix + suffix) for suffix in missing])
