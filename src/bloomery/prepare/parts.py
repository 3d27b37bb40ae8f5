"""What one unit became: `<unit>.part` (tokens, then its index) and `<unit>.done`, the marker that verifies it.

A run may be killed at any moment: a part counts only if its marker names these inputs and settings and its bytes still
have the hash that the marker holds. That is also why parts are not synced to the disk one by one: a power cut costs the
units it destroyed, never the result.
"""

import contextlib
import dataclasses
import fcntl
import json
import os
import secrets
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO, Any

import numpy as np
import xxhash
from numpy.typing import NDArray
from pydantic import NonNegativeInt, TypeAdapter

from bloomery.base.bounded import read_json
from bloomery.base.errors import DataError, Problem
from bloomery.base.storage import open_plain, own_folder, remove_tree, try_lock, write_all, writing
from bloomery.data.shards import file_checksum

_TEMPORARY = ".tmp-"
_LOCK_TIMEOUT_SECONDS = 5.0
"""For the workers of a killed run to end."""
LENGTH = np.dtype("<i4")
"""Of a sequence: a document, or one of its sentences."""
DOCUMENT = np.dtype(
    [
        ("sequences", "<i4"),
        ("tokens", "<i4"),
        ("file", "<u4"),
        ("key", "<u8"),
        ("hash", "<u8", 2),
        ("text_bytes", "<i8"),
    ]
)
"""What is known of a document: its sequences and tokens, the number of its file, its place in the shuffled order, and
the two halves of the hash of its text. A part holds the tokens, the lengths of all sequences, then these."""


@dataclasses.dataclass(frozen=True)
class ShardPart:
    """The content of a marker."""

    unit: int
    key: str
    """Of everything that decides the bytes, the contents of the inputs apart."""
    encoder: str
    inputs: list[tuple[str, str]]
    """(hash, stamp) of every span of a file."""
    part_hash: str
    runs: list[tuple[NonNegativeInt, NonNegativeInt, NonNegativeInt]]
    """(documents, sequences, tokens) of each block; where documents are shuffled, they are sorted within it."""
    dropped: dict[str, NonNegativeInt]

    def num_bytes(self, *dtypes: np.dtype[Any]) -> int:
        """Of its file, with documents, lengths and tokens of these types."""
        counts = (sum(run[field] for run in self.runs) for field in range(3))
        return sum(count * of.itemsize for count, of in zip(counts, dtypes, strict=True))


class PartsFolder:
    """`<output>.parts`."""

    def __init__(self, output: str, dtype: np.dtype[Any], *, bands: int = 0) -> None:
        """`dtype`: of tokens. `bands`: how many hashes of each document tell near duplicates."""
        self.path, self.dtype = Path(f"{output}.parts"), dtype
        self.document = np.dtype([*DOCUMENT.descr, ("bands", "<u8", (bands,))]) if bands else DOCUMENT
        self._lock = self.path.with_name(f".{self.path.stem}.lock")

    @contextlib.contextmanager
    def locked(self, *, shared: bool) -> Iterator[IO[bytes]]:
        """Runs that share the units may work beside each other, but none beside a run that merges them. The lock ends
        with the process and its children. Its file stays: without it two runs could each lock one of their own."""
        own_folder(self.path, parents=True)
        with writing(self._lock):  # on NFS a shared lock needs a file to read, and an exclusive one a file to write
            lock = open(self._lock, "a+b", opener=open_plain)  # noqa: SIM115 - closed below
        give_up = time.monotonic() + _LOCK_TIMEOUT_SECONDS
        with lock:
            while not try_lock(lock, fcntl.LOCK_SH if shared else fcntl.LOCK_EX):
                if time.monotonic() > give_up:
                    rule = "two runs would do the same work, or write over it"
                    remedy = "wait for it; runs that work at the same time need a share each, with --unit k/n"
                    raise DataError(Problem("another run is at work on this", rule, remedy, str(self.path)))
                time.sleep(0.05)
            own_folder(self.path)  # the run before may have finished and removed it
            for stale in self.path.glob(f"*{_TEMPORARY}*") if not shared else ():  # of a run that was killed
                with writing(stale, "remove"):
                    stale.unlink(missing_ok=True)
            yield lock

    def remove(self, lock: IO[bytes]) -> None:
        """Once the shard is finished, within `locked`. Stays where other shares are at work in it."""
        if try_lock(lock, fcntl.LOCK_EX):
            remove_tree(self.path)

    def file(self, unit: int) -> Path:
        return self.path / f"{unit:06d}.part"

    def marker(self, unit: int) -> Path:
        return self.path / f"{unit:06d}.done"

    def temporary(self, unit: int) -> Path:
        return self.path / f"{unit:06d}{_TEMPORARY}{os.getpid()}-{secrets.token_hex(4)}"

    def index(self, part: ShardPart) -> tuple[NDArray[np.int32], NDArray[Any]]:
        """The lengths of all sequences, and DOCUMENT of each document."""
        documents, sequences, tokens = (sum(run[field] for run in part.runs) for field in range(3))
        with open(self.file(part.unit), "rb") as file:
            file.seek(tokens * self.dtype.itemsize)
            return np.fromfile(file, LENGTH, sequences), np.fromfile(file, self.document, documents)

    def mark(self, part: ShardPart) -> None:
        """From now on the part counts."""
        temporary = self.temporary(part.unit)
        with writing(self.path):  # unlike write_atomically: with many workers there are many a second
            temporary.write_text(json.dumps(dataclasses.asdict(part)))
            os.replace(temporary, self.marker(part.unit))

    def verified(self, unit: int, key: str) -> ShardPart | None:
        """The part of an earlier run, if its marker has this key and its file the bytes that the marker names."""
        with contextlib.suppress(OSError, ValueError):
            part, path = TypeAdapter(ShardPart).validate_python(read_json(self.marker(unit))), self.file(unit)
            size = part.num_bytes(self.document, LENGTH, self.dtype)
            if (part.unit, part.key, size, part.part_hash) == (unit, key, path.stat().st_size, file_checksum(path)):
                return part
        return None


def write_part(
    folder: PartsFolder, unit: int, blocks: Iterable[tuple[NDArray[Any], ...]]
) -> tuple[str, list[tuple[int, int, int]]]:
    """Writes one part beside its name, then gives it the name; returns the hash of all bytes, and its runs. `blocks`:
    (tokens, lengths of sequences, DOCUMENT of each document)."""
    hasher, temporary = xxhash.xxh3_128(), folder.temporary(unit)
    runs: list[tuple[int, int, int]] = []
    lengths: list[NDArray[Any]] = []
    tables: list[NDArray[Any]] = []

    def write(values: NDArray[Any]) -> None:
        view = np.ascontiguousarray(values).view(np.uint8).data
        hasher.update(view)
        write_all(file.fileno(), view)

    with writing(folder.path):
        try:
            with open(temporary, "xb", buffering=0) as file:
                for block in blocks:
                    runs.append((len(block[2]), len(block[1]), len(block[0])))
                    lengths.append(block[1].astype(LENGTH))
                    tables.append(block[2])
                    write(block[0])
                    del block  # before the next one is made
                for values in (*lengths, *tables):
                    write(values)
            os.replace(temporary, folder.file(unit))
        finally:
            temporary.unlink(missing_ok=True)
    return hasher.hexdigest(), runs
