"""Sole owner of shards: `<prefix>.bin` (bare tokens, little endian) and `<prefix>.idx` (Megatron's MMIDIDX index).

The index is: 9 bytes of magic, u64 version 1, u8 dtype code, u64 sequences N, u64 entries D; then int32 lengths[N] in
tokens, int64 pointers[N] in bytes, int64 doc_idx[D] (the sequence at which each document begins: first 0, last N).
"""

from __future__ import annotations

import errno
import os
import secrets
import struct
from array import array
from collections.abc import Iterator
from contextlib import suppress
from glob import escape, glob
from types import TracebackType
from typing import IO, Any, Self

import numpy as np
import xxhash
from numpy.typing import DTypeLike, NDArray

from bloomery.base.errors import DataError, Problem
from bloomery.base.storage import make_run_folder, writing

MAGIC = b"MMIDIDX\x00\x00"
LEGACY_MAGIC = b"TNTIDX\x00\x00"
VERSION = 1
HEADER = struct.Struct("<9sQBQQ")
DTYPES = {1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}
"""Token types by code. Codes 6 and 7 are floats, which are never tokens."""

PARTIAL = ".partial-"
"""Between the prefix and a random name: files that a killed writer leaves."""
_INDEX_ENTRIES = 1 << 20
_FACT_PLACES, _FACT_TOKENS = 64, 1024
_BLOCK_TOKENS = 1 << 22
_REMAKE = "copy the shard again from where it was made, or make it again with `bloomery prepare`"


def token_dtype(vocab_size: int) -> np.dtype[Any]:
    """Megatron's rule, so that shards equal its own byte for byte."""
    return np.dtype(np.uint16 if vocab_size < 65500 else np.int32)


def partial_prefix(prefix: str) -> str:
    """Random, so that two writers of one shard never mix their bytes: the last to finish wins."""
    return f"{prefix}{PARTIAL}{secrets.token_hex(4)}"


class ShardWriter:
    """Appends documents; `finish` puts both files under their names, `abort` leaves nothing.

    As a context manager it finishes on success and aborts on an exception. Keeps 8 bytes in memory for each document
    of one sequence, 4 for each sequence more.
    """

    def __init__(self, prefix: str, dtype: DTypeLike) -> None:
        self.prefix = prefix
        self.dtype = np.dtype(dtype).newbyteorder("<")
        self._code = next(code for code, name in DTYPES.items() if np.dtype(name) == self.dtype)
        self._lengths = array("i")
        self._sequences = array("i")
        """How many sequences each document has."""
        self.num_tokens = 0
        partial = partial_prefix(prefix)
        self._partial_bin, self._partial_idx = f"{partial}.bin", f"{partial}.idx"
        make_run_folder(os.path.dirname(prefix) or ".")
        with writing(f"{prefix}.bin"):
            self._bin = open(self._partial_bin, "wb", buffering=1 << 20)  # noqa: SIM115 - closed by finish and abort

    @property
    def num_documents(self) -> int:
        return len(self._sequences)

    @property
    def num_sequences(self) -> int:
        return len(self._lengths)

    def append(self, document: NDArray[np.integer[Any]]) -> None:
        """One document, stored as one sequence. ValueError where it is empty or an id does not fit the dtype."""
        if document.ndim != 1 or document.size == 0:
            raise ValueError(f"a document is a row of at least one token, not an array of shape {document.shape}")
        limits = np.iinfo(self.dtype)
        if document.dtype != self.dtype and (document.min() < limits.min or document.max() > limits.max):
            raise ValueError(f"token ids {document.min()}..{document.max()} do not fit into {self.dtype}")
        self.append_many(document.astype(self.dtype).data, np.array([document.size], "<i4"))

    def append_many(
        self, tokens: bytes | memoryview, lengths: NDArray[np.int32], sequences: NDArray[np.int32] | None = None
    ) -> None:
        """Many documents at once: their tokens in the shard's dtype, the length of every sequence, and the number of
        sequences of every document (None: one each)."""
        with writing(f"{self.prefix}.bin"):
            written = self._bin.write(tokens)
        self._count(lengths, sequences, written)

    def append_file(
        self,
        file: IO[bytes],
        offset: int,
        lengths: NDArray[np.int32],
        sequences: NDArray[np.int32] | None = None,
    ) -> None:
        """As `append_many`, with the tokens copied from another file by the kernel."""
        unwritten = nbytes = int(lengths.sum(dtype=np.int64)) * self.dtype.itemsize
        with writing(f"{self.prefix}.bin"):
            self._bin.flush()
            while unwritten:
                copied = _copy(file.fileno(), self._bin.fileno(), offset + nbytes - unwritten, unwritten)
                if not copied:
                    raise _damaged(str(file.name), "ends too early", "it was cut off while it was being copied")
                unwritten -= copied
        self._count(lengths, sequences, nbytes)

    def _count(self, lengths: NDArray[np.int32], sequences: NDArray[np.int32] | None, written: int) -> None:
        tokens = int(lengths.sum(dtype=np.int64))
        assert written == tokens * self.dtype.itemsize, "lengths and tokens differ"
        assert sequences is None or sequences.sum(dtype=np.int64) == len(lengths), "sequences and documents differ"
        self.num_tokens += tokens
        self._lengths.frombytes(lengths.astype("<i4").tobytes())
        self._sequences.frombytes((np.ones_like(lengths) if sequences is None else sequences).astype("<i4").tobytes())

    def finish(self) -> None:
        """The data comes first and the index last: an index under its final name stands for a whole shard."""
        try:
            with writing(f"{self.prefix}.bin"):
                self._bin.flush()
                os.fsync(self._bin.fileno())
                self._bin.close()
            with writing(f"{self.prefix}.idx"):
                self._write_index()
                # An older shard of this name loses its index first, so that it never describes the new data.
                with suppress(FileNotFoundError):
                    os.unlink(f"{self.prefix}.idx")
                os.replace(self._partial_bin, f"{self.prefix}.bin")
                os.replace(self._partial_idx, f"{self.prefix}.idx")
        except BaseException:
            self.abort()
            raise

    def abort(self) -> None:
        """Removes what was written so far."""
        with suppress(OSError):
            self._bin.close()
        for partial in (self._partial_bin, self._partial_idx):
            with suppress(OSError):
                os.unlink(partial)

    def _write_index(self) -> None:
        lengths = np.frombuffer(self._lengths, dtype="<i4")
        sequences = np.frombuffer(self._sequences, dtype="<i4")
        with open(self._partial_idx, "wb") as file:
            file.write(HEADER.pack(MAGIC, VERSION, self._code, len(lengths), len(sequences) + 1))
            file.write(lengths.data)
            for starts in _running_sums(lengths):
                file.write((starts[:-1] * self.dtype.itemsize).data)
            file.write(np.zeros(1, "<i8").data)
            for starts in _running_sums(sequences):
                file.write(starts[1:].data)
            file.flush()
            os.fsync(file.fileno())

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.finish()
        else:
            self.abort()


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


def _copy(source: int, target: int, offset: int, count: int) -> int:
    """Bytes copied, at least one where there are any."""
    try:
        return os.copy_file_range(source, target, count, offset_src=offset)
    except OSError as error:
        if error.errno not in (errno.EXDEV, errno.ENOSYS, errno.EINVAL, errno.EOPNOTSUPP, errno.EPERM):
            raise
    data = os.pread(source, min(count, 1 << 24), offset)
    view = memoryview(data)
    while view:
        view = view[os.write(target, view) :]
    return len(data)


class ShardReader:
    """One shard, checked whole when opened (DataError). `read` may be called from several threads."""

    prefix: str
    dtype: np.dtype[Any]
    num_sequences: int
    document_token_starts: NDArray[np.int64]
    """The token at which each document begins; one more entry than documents, the last is the number of tokens."""

    def __init__(self, prefix: str) -> None:
        self.prefix = prefix
        _require_files(prefix)
        self.dtype, sequence_starts, doc_idx = _read_index(f"{prefix}.idx")
        self.num_sequences = len(sequence_starts) - 1
        self.document_token_starts = sequence_starts[doc_idx]
        try:
            self._file = open(f"{prefix}.bin", "rb", buffering=0)  # noqa: SIM115 - closed by close
        except OSError as error:
            raise unreadable(f"{prefix}.bin", error) from error
        found, expected = os.fstat(self._file.fileno()).st_size, self.num_tokens * self.dtype.itemsize
        if found != expected:
            self.close()
            raise _damaged(
                f"{prefix}.bin",
                f"holds {found} bytes where its index says {expected} "
                f"({self.num_tokens} tokens of {self.dtype.itemsize} bytes)",
                f"the data is {'shorter' if found < expected else 'longer'} than the index: it was cut off, "
                "is still being written, or belongs to another .idx",
            )

    @property
    def num_tokens(self) -> int:
        return int(self.document_token_starts[-1])

    @property
    def num_documents(self) -> int:
        return len(self.document_token_starts) - 1

    def facts(self) -> dict[str, Any]:
        """What tells this shard from another: its size, and a hash of where documents begin and of some of the tokens.
        Costs no more than opening it."""
        hasher = xxhash.xxh3_128(self.document_token_starts.astype("<i8").tobytes())
        count = min(_FACT_TOKENS, self.num_tokens)
        for start in np.linspace(0, self.num_tokens - count, _FACT_PLACES, dtype=np.int64):
            hasher.update(self.read(int(start), count).tobytes())
        return {"documents": self.num_documents, "tokens": self.num_tokens, "digest": hasher.hexdigest()}

    def read(self, start_token: int, count: int) -> NDArray[Any]:
        """Tokens [start_token, start_token + count) in the shard's own dtype."""
        if start_token < 0 or count < 0 or start_token + count > self.num_tokens:
            raise IndexError(f"tokens {start_token}..{start_token + count} of a shard of {self.num_tokens}")
        tokens = np.empty(count, self.dtype)
        unread = tokens.view(np.uint8)
        offset = start_token * self.dtype.itemsize
        while len(unread):
            # Not mmap: readahead pulled 87% of a cold file into memory for 4 MB of samples; this is 20 times faster.
            try:
                got = os.preadv(self._file.fileno(), [unread.data], offset)
            except OSError as error:
                raise unreadable(f"{self.prefix}.bin", error) from error
            if got == 0:
                raise _damaged(f"{self.prefix}.bin", f"ends at byte {offset}", "it was cut off while it was being read")
            unread, offset = unread[got:], offset + got
        return tokens

    def blocks(self) -> Iterator[NDArray[Any]]:
        """All tokens, some after the other."""
        for start in range(0, self.num_tokens, _BLOCK_TOKENS):
            yield self.read(start, min(_BLOCK_TOKENS, self.num_tokens - start))

    def sequence_starts(self) -> NDArray[np.int64]:
        """The token at which each sequence begins, the total at the end. Read anew: only some samples need it."""
        lengths = np.fromfile(f"{self.prefix}.idx", "<i4", self.num_sequences, offset=HEADER.size)
        return _starts(lengths)

    def document_at(self, token: int) -> tuple[int, int]:
        """(document, position inside it) of a token of the shard."""
        document = int(np.searchsorted(self.document_token_starts, token, side="right")) - 1
        return document, token - int(self.document_token_starts[document])

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _damaged(place: str, what: str, rule: str, remedy: str = _REMAKE) -> DataError:
    return DataError(Problem(what=what, rule=rule, remedy=remedy, place=place))


def unreadable(place: str, error: OSError) -> DataError:
    remedy = "correct the path" if error.errno == errno.ENAMETOOLONG else "mend its permissions or its storage"
    return _damaged(place, f"cannot be read: {error.strerror or error}", "", remedy)


def is_missing(path: str) -> bool:
    try:
        os.stat(path)
    except OSError as error:  # any other reason is told by who opens it
        return error.errno in (errno.ENOENT, errno.ENOTDIR)
    return False


def _require_files(prefix: str) -> None:
    missing = [suffix for suffix in (".bin", ".idx") if is_missing(prefix + suffix)]
    if not missing:
        return
    remedy = "make the shard with `bloomery prepare`, or correct the path"
    if prefix.endswith((".bin", ".idx")):
        remedy = f"write the path without its ending: {prefix[:-4]}"
    elif near := sorted(glob(escape(prefix) + "*.idx")):
        remedy = "did you mean " + " or ".join(path[:-4] for path in near[:3] if path[:-4] != prefix) + "?"
        remedy = _REMAKE if near == [prefix + ".idx"] else remedy
    rule = "a shard is a pair of files, <path>.bin and <path>.idx"
    raise DataError([Problem("no such file", rule, remedy, prefix + suffix) for suffix in missing])


def _read_index(path: str) -> tuple[np.dtype[Any], NDArray[np.int64], NDArray[np.int64]]:
    """(dtype, token at which each sequence begins with the total at the end, doc_idx), all checked."""
    try:
        with open(path, "rb") as file:
            found = os.fstat(file.fileno()).st_size
            dtype, num_sequences, num_entries = _read_header(path, file.read(HEADER.size), found)
            # Read, not mapped: the header's 34 bytes leave every array misaligned, and numpy then copies on every use.
            lengths = np.empty(num_sequences, "<i4")
            pointers, doc_idx = np.empty(num_sequences, "<i8"), np.empty(num_entries, "<i8")
            read = sum(file.readinto(array.data) for array in (lengths, pointers, doc_idx))
    except OSError as error:
        raise unreadable(path, error) from error
    if read < lengths.nbytes + pointers.nbytes + doc_idx.nbytes:
        raise _damaged(path, f"ends at byte {HEADER.size + read}", "it was cut off while it was being read")
    if num_sequences and lengths.min() < 0:
        bad = int(np.argmax(lengths < 0))
        raise _damaged(path, f"sequence {bad} has length {lengths[bad]}", "lengths must not be negative")
    starts = _starts(lengths)
    wrong = pointers != starts[:-1] * dtype.itemsize
    if wrong.any():
        bad = int(np.argmax(wrong))
        raise _damaged(
            path,
            f"sequence {bad} points to byte {pointers[bad]} where the lengths before it say "
            f"{starts[bad] * dtype.itemsize}",
            "sequences must follow each other without gaps",
        )
    rule = "doc_idx must start with 0, never fall and end with the number of sequences"
    if doc_idx[0] != 0 or doc_idx[-1] != num_sequences:
        what = f"its documents begin at sequence {doc_idx[0]} and end at {doc_idx[-1]} of {num_sequences}"
        raise _damaged(path, what, rule)
    falls = doc_idx[1:] < doc_idx[:-1]
    if falls.any():
        bad = int(np.argmax(falls)) + 1
        what = f"document {bad} begins at sequence {doc_idx[bad]}, the one before it at {doc_idx[bad - 1]}"
        raise _damaged(path, what, rule)
    return dtype, starts, doc_idx


def _starts(lengths: NDArray[np.int32]) -> NDArray[np.int64]:
    starts = np.zeros(len(lengths) + 1, np.int64)
    np.cumsum(lengths, dtype=np.int64, out=starts[1:])
    return starts


def _read_header(path: str, header: bytes, found: int) -> tuple[np.dtype[Any], int, int]:
    if header.startswith(LEGACY_MAGIC):
        raise _damaged(
            path,
            "is in the old TNTIDX format (Megatron's --dataset-impl lazy or cached)",
            "only the mmap format (MMIDIDX) is read",
            "make the shard again from its text, with `bloomery prepare` or with --dataset-impl mmap",
        )
    if not header.startswith(MAGIC[: len(header)]):
        raise _damaged(
            path, f"starts with {header[:9]!r}", f"an index starts with {MAGIC!r}: this is another kind of file"
        )
    if len(header) < HEADER.size:
        raise _damaged(path, f"holds {found} bytes", f"the header alone takes {HEADER.size}: the file was cut off")
    _, version, code, num_sequences, num_entries = HEADER.unpack(header)
    if version != VERSION:
        raise _damaged(path, f"has format version {version}", f"only version {VERSION} is read")
    if code not in DTYPES:
        known = ", ".join(f"{known} ({np.dtype(name).name})" for known, name in DTYPES.items())
        raise _damaged(path, f"has dtype code {code}", f"tokens are integers; the known codes are {known}")
    if num_entries == 0:
        raise _damaged(path, "has no document entries", "even a shard without documents has one, the closing 0")
    expected = HEADER.size + 12 * num_sequences + 8 * num_entries
    if found == expected + num_sequences and num_sequences:
        raise _damaged(path, "carries a mode for every sequence", "multimodal shards are not read", "use text shards")
    if found != expected:
        raise _damaged(
            path,
            f"holds {found} bytes where its header says {expected} ({num_sequences} sequences, {num_entries} entries)",
            f"the index is {'cut off' if found < expected else 'longer than it should be'}",
        )
    return np.dtype(DTYPES[code]), num_sequences, num_entries
