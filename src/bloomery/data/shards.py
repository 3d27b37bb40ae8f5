"""Sole owner of shards: `<prefix>.bin` (bare tokens, little endian) and `<prefix>.idx` (see shard_index.py)."""

from __future__ import annotations

import errno
import os
import secrets
from array import array
from collections.abc import Iterator
from contextlib import suppress
from glob import escape, glob
from types import TracebackType
from typing import IO, Any, Self

import numpy as np
import xxhash
from numpy.typing import DTypeLike, NDArray

from bloomery.base.bounded import open_regular
from bloomery.base.errors import DataError, Problem
from bloomery.base.storage import make_folder, writing
from bloomery.data.shard_index import (
    DTYPES,
    HEADER,
    MAGIC,
    REMAKE,
    VERSION,
    ShardIndex,
    damaged,
    read_into,
    unreadable,
)

PARTIAL = ".partial-"
"""Between the prefix and a random name: files that a killed writer leaves."""
_INDEX_ENTRIES = 1 << 20
_FACT_DOCUMENTS, _FACT_PLACES, _FACT_TOKENS = 256, 64, 1024
_BLOCK_TOKENS = 1 << 22


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
        make_folder(os.path.dirname(prefix) or ".")
        with writing(f"{prefix}.bin"):
            self._bin = open(self._partial_bin, "xb", buffering=1 << 20)  # noqa: SIM115 - closed by finish and abort

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
                copied = os.sendfile(self._bin.fileno(), file.fileno(), offset + nbytes - unwritten, unwritten)
                if not copied:
                    raise damaged(str(file.name), "ends too early", "it was cut off while it was being copied")
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
        with open(self._partial_idx, "xb") as file:
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


class ShardReader:
    """One shard, opened in no time whatever its size: see ShardIndex. `read` may be called from several threads."""

    def __init__(self, prefix: str) -> None:
        self.prefix = prefix
        try:
            self.index = ShardIndex(f"{prefix}.idx")
        except OSError as error:
            raise _not_opened(prefix, error) from error
        try:
            self._file = open(f"{prefix}.bin", "rb", buffering=0, opener=open_regular)  # noqa: SIM115 - closed by close
        except OSError as error:
            self.index.close()
            raise _not_opened(prefix, error) from error
        found, expected = os.fstat(self._file.fileno()).st_size, self.num_tokens * self.dtype.itemsize
        if found != expected:
            self.close()
            raise damaged(
                f"{prefix}.bin",
                f"holds {found} bytes where its index says {expected} "
                f"({self.num_tokens} tokens of {self.dtype.itemsize} bytes)",
                f"the data is {'shorter' if found < expected else 'longer'} than the index: it was cut off, "
                "is still being written, or belongs to another .idx",
            )

    @property
    def dtype(self) -> np.dtype[Any]:
        return self.index.dtype

    @property
    def num_tokens(self) -> int:
        return self.index.num_tokens

    @property
    def num_documents(self) -> int:
        return self.index.num_documents

    @property
    def num_sequences(self) -> int:
        return self.index.num_sequences

    def facts(self) -> dict[str, Any]:
        """What identifies this shard: its size, and a hash of some of its tokens and of where some documents
        begin."""
        hasher = xxhash.xxh3_128()
        for document in np.linspace(0, self.num_documents, _FACT_DOCUMENTS, dtype=np.int64):
            hasher.update(self.index.document_start(int(document)).to_bytes(8, "little"))
        count = min(_FACT_TOKENS, self.num_tokens)
        for start in np.linspace(0, self.num_tokens - count, _FACT_PLACES, dtype=np.int64):
            hasher.update(self.read(int(start), count).tobytes())
        return {"documents": self.num_documents, "tokens": self.num_tokens, "sample_digest": hasher.hexdigest()}

    def read(self, start_token: int, count: int) -> NDArray[Any]:
        """Tokens [start_token, start_token + count) in the shard's own dtype."""
        if start_token < 0 or count < 0 or start_token + count > self.num_tokens:
            raise IndexError(f"tokens {start_token}..{start_token + count} of a shard of {self.num_tokens}")
        tokens = np.empty(count, self.dtype)
        read_into(tokens, self._file, start_token * self.dtype.itemsize)
        return tokens

    def blocks(self) -> Iterator[NDArray[Any]]:
        """All tokens, some after the other."""
        for start in range(0, self.num_tokens, _BLOCK_TOKENS):
            yield self.read(start, min(_BLOCK_TOKENS, self.num_tokens - start))

    def close(self) -> None:
        self.index.close()
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def is_missing(path: str) -> bool:
    try:
        os.stat(path)
    except OSError as error:  # any other reason is reported by who opens it
        return error.errno in (errno.ENOENT, errno.ENOTDIR)
    return False


def _not_opened(prefix: str, error: OSError) -> DataError:
    missing = [suffix for suffix in (".bin", ".idx") if is_missing(prefix + suffix)]
    if not missing:
        return unreadable(str(error.filename), error)
    remedy = "make the shard with `bloomery prepare`, or correct the path"
    if prefix.endswith((".bin", ".idx")):
        remedy = f"write the path without its ending: {prefix[:-4]}"
    elif near := sorted(glob(escape(prefix) + "*.idx")):
        remedy = "did you mean " + " or ".join(path[:-4] for path in near[:3] if path[:-4] != prefix) + "?"
        remedy = REMAKE if near == [prefix + ".idx"] else remedy
    rule = "a shard is a pair of files, <path>.bin and <path>.idx"
    return DataError([Problem("no such file", rule, remedy, prefix + suffix) for suffix in missing])
