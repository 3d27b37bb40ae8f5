"""What one unit became: `<unit>.part` (tokens, then its index) and `<unit>.done`, the marker that verifies it.

A run may be killed at any moment: a part counts only if its marker names these inputs and settings and its bytes still
have the hash that the marker holds. That is also why parts are not synced to the disk one by one: a power cut costs the
units it destroyed, never the result.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import fcntl
import json
import os
import secrets
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, Self

import numpy as np
import xxhash
from numpy.typing import NDArray
from pydantic import TypeAdapter

from bloomery.base.bounded import read_json, read_small
from bloomery.base.errors import DataError, Problem
from bloomery.base.storage import open_plain, own_folder, reason, write_atomically, writing

_TEMPORARY = ".tmp-"
_LOCK = "lock"
_LOCK_TIMEOUT_SECONDS = 5.0
"""For the workers of a killed run to end."""
LENGTH = np.dtype("<i4")
"""Of a sequence: a document, or one of its sentences."""
DOCUMENT = np.dtype(
    [("sequences", "<i4"), ("file", "<u4"), ("key", "<u8"), ("hash", "<u8", (2,)), ("text_bytes", "<i8")]
)
"""What is known of a document: its number of sequences, the number of its file, its place in the shuffled order, and
the two halves of the hash of its text. A part holds the tokens, the lengths of all sequences, then these."""


@dataclass(frozen=True)
class ShardPart:
    """The content of a marker."""

    unit: int
    key: str
    """Of everything that decides the bytes, the contents of the inputs apart."""
    encoder: str
    inputs: list[tuple[str, str]]
    """(hash, stamp) of every span of a file."""
    part_hash: str
    runs: list[tuple[int, int, int]]
    """(documents, sequences, tokens) of each block; where documents are shuffled, they are sorted within it."""
    text_bytes: int
    dropped: dict[str, int] = field(default_factory=dict)
    stamp: tuple[int, int, int] | None = None
    """Of its file when it was written or verified: inode, size, time. Not in the marker, which may be copied."""

    @property
    def documents(self) -> int:
        return sum(run[0] for run in self.runs)

    @property
    def sequences(self) -> int:
        return sum(run[1] for run in self.runs)

    @property
    def tokens(self) -> int:
        return sum(run[2] for run in self.runs)


class PartsFolder:
    """`<output>.parts`."""

    def __init__(self, output: str, itemsize: int) -> None:
        self.path = Path(f"{output}.parts")
        self.shared = self.path / "shared"
        """A file with the number of runs that share the units, so that no single one does them all."""
        self._itemsize = itemsize
        self._lock: IO[bytes] | None = None

    @contextlib.contextmanager
    def locked(self, share: str = "") -> Iterator[None]:
        """No other run does this work meanwhile: shares, each of a name of its own, may work beside each other, and
        but none beside a run without a share. The locks end with the process and its children."""
        give_up = time.monotonic() + _LOCK_TIMEOUT_SECONDS
        while True:
            with contextlib.ExitStack() as files:
                if self._take_locks(share, files):
                    yield
                    return
            if time.monotonic() > give_up:
                rule = "two runs would do the same work, or write over it"
                remedy = "wait for it; runs that work at the same time need a share each, with --unit k/n"
                raise DataError(Problem("another run is at work on this", rule, remedy, str(self.path)))
            time.sleep(0.05)

    def _take_locks(self, share: str, files: contextlib.ExitStack) -> bool:
        own_folder(self.path, parents=True)
        wanted = {_LOCK: fcntl.LOCK_SH, f"{_LOCK}-{share}": fcntl.LOCK_EX} if share else {_LOCK: fcntl.LOCK_EX}
        for name, how in wanted.items():
            file = None
            # Gone: the run before has just finished and removed the folder. On NFS a shared lock needs a file that may
            # be read, and an exclusive one a file that may be written.
            with writing(self.path / name), contextlib.suppress(FileNotFoundError):
                file = files.enter_context(open(self.path / name, "a+b", opener=open_plain))  # noqa: SIM115
            if file is None or not _try_lock(file, how) or not os.fstat(file.fileno()).st_nlink:
                return False
            if name == _LOCK:
                self._lock = file
        return True

    def remove(self) -> None:
        """Once the shard is finished, within `locked`. Stays where other shares are at work in it."""
        assert self._lock is not None
        if not _try_lock(self._lock, fcntl.LOCK_EX):
            return
        # The lock goes last: a run that makes a new one from then on finds nothing that could still be removed.
        others = [path for path in self.path.glob("*") if path.name != _LOCK]
        for remove in [*(path.unlink for path in others), (self.path / _LOCK).unlink, self.path.rmdir]:
            with contextlib.suppress(OSError):
                remove()

    def set_shares(self, n: int) -> None:
        write_atomically(self.shared, str(n))

    def shares(self) -> int | None:
        """How many runs share the units; None where none has recorded it."""
        try:
            return max(1, int(read_small(self.shared, 1 << 10)))
        except (OSError, ValueError):
            return None

    def file(self, unit: int) -> Path:
        return self.path / f"{unit:06d}.part"

    def marker(self, unit: int) -> Path:
        return self.path / f"{unit:06d}.done"

    def temporary(self, unit: int) -> Path:
        return self.path / f"{unit:06d}{_TEMPORARY}{os.getpid()}-{secrets.token_hex(4)}"

    def lengths(self, part: ShardPart) -> NDArray[np.int32]:
        """Of all sequences."""
        return self._read_index(part, LENGTH, part.sequences, part.tokens * self._itemsize)

    def documents(self, part: ShardPart) -> NDArray[Any]:
        """DOCUMENT of each."""
        offset = part.tokens * self._itemsize + part.sequences * LENGTH.itemsize
        return self._read_index(part, DOCUMENT, part.documents, offset)

    def _read_index(self, part: ShardPart, dtype: np.dtype[Any], count: int, offset: int) -> NDArray[Any]:
        try:
            return np.fromfile(self.file(part.unit), dtype, count, offset=offset) if count else np.empty(0, dtype)
        except OSError as error:
            raise _unreadable(self.file(part.unit), error) from error

    def mark(self, part: ShardPart) -> None:
        """From now on the part counts."""
        content = {name: value for name, value in dataclasses.asdict(part).items() if name != "stamp"}
        temporary = self.temporary(part.unit)
        with writing(self.path):
            with open(temporary, "x") as file:
                json.dump(content, file)
            os.replace(temporary, self.marker(part.unit))

    def read(self, unit: int) -> ShardPart | None:
        """The marker, whatever it holds; None where there is none that can be read."""
        try:
            part = TypeAdapter(ShardPart).validate_python(read_json(self.marker(unit)))
        except (OSError, ValueError):
            return None
        is_right = part.stamp is None and min((count for run in part.runs for count in run), default=0) >= 0
        return part if is_right else None

    def verified(self, part: ShardPart) -> ShardPart | None:
        """The part, if its file has the bytes that the marker names."""
        hasher = xxhash.xxh3_128()
        try:
            with open(self.file(part.unit), "rb", buffering=0) as file:
                while chunk := file.read(1 << 22):
                    hasher.update(chunk)
                stamp = _stamp(os.fstat(file.fileno()))
        except OSError:
            return None
        return dataclasses.replace(part, stamp=stamp) if hasher.hexdigest() == part.part_hash else None

    @contextlib.contextmanager
    def reading(self, parts: Sequence[ShardPart]) -> Iterator[None]:
        """For work that reads these parts: DataError if one of their files is at the end no longer the one that was
        written or verified, as where locks do not work and another run has put its own there."""
        try:
            yield
        except OSError as error:
            raise _unreadable(self.path, error) from error
        finally:
            for part in parts:
                with contextlib.suppress(OSError):
                    if _stamp(os.stat(self.file(part.unit))) == part.stamp:
                        continue
                what, rule = "was replaced or removed while it was being merged", "one run at a time merges parts"
                remedy = f"wait until no other run works on {self.path}, then run the command again"
                raise DataError(Problem(what, rule, remedy, str(self.file(part.unit))))

    def clean(self, units: Sequence[int] | None) -> None:
        """Remove what killed runs left behind for these units; None: for all."""
        prefixes = None if units is None else {f"{unit:06d}" for unit in units}
        for leftover in self.path.glob(f"*{_TEMPORARY}*"):
            if prefixes is None or leftover.name.partition(_TEMPORARY)[0] in prefixes:
                with writing(leftover, "remove"):
                    leftover.unlink(missing_ok=True)


def _try_lock(file: IO[bytes], how: int) -> bool:
    """False where another process holds it. File systems without locks let everyone in."""
    try:
        fcntl.flock(file, how | fcntl.LOCK_NB)
    except OSError as error:
        return error.errno not in (errno.EWOULDBLOCK, errno.EACCES)
    return True


def _unreadable(path: Path, error: OSError) -> DataError:
    remedy = "check the disk or mount (`df`, `dmesg`), then run the command again"
    return DataError(Problem(f"cannot be read: {reason(error)}", "what is merged must be there", remedy, str(path)))


def _stamp(facts: os.stat_result) -> tuple[int, int, int]:
    return facts.st_ino, facts.st_size, facts.st_mtime_ns


class PartWriter:
    """Writes one part beside its name and gives it the name at the end; without `finish`, nothing is left of it."""

    def __init__(self, folder: PartsFolder, unit: int) -> None:
        self._folder, self._unit = folder, unit
        self._hasher = xxhash.xxh3_128()
        self._runs: list[tuple[int, int, int]] = []
        self._lengths: list[NDArray[Any]] = []
        self._documents: list[NDArray[Any]] = []
        self._temporary = folder.temporary(unit)
        with writing(folder.path):
            self._file = open(self._temporary, "xb", buffering=0)  # noqa: SIM115 - closed by __exit__

    def append(self, tokens: NDArray[Any], lengths: NDArray[Any], documents: NDArray[Any]) -> None:
        self._write(tokens)
        self._runs.append((len(documents), len(lengths), len(tokens)))
        self._lengths.append(lengths.astype(LENGTH))
        self._documents.append(documents)

    def finish(
        self, *, key: str, encoder: str, inputs: list[tuple[str, str]], text_bytes: int, dropped: dict[str, int]
    ) -> ShardPart:
        for values in (*self._lengths, *self._documents):
            self._write(values)
        with writing(self._folder.path):
            os.replace(self._temporary, self._folder.file(self._unit))
            stamp = _stamp(os.fstat(self._file.fileno()))
        digest = self._hasher.hexdigest()
        return ShardPart(self._unit, key, encoder, inputs, digest, self._runs, text_bytes, dropped, stamp)

    def _write(self, values: NDArray[Any]) -> None:
        view = np.ascontiguousarray(values).view(np.uint8).data
        self._hasher.update(view)
        with writing(self._folder.path):
            while view:
                view = view[self._file.write(view) :]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(OSError):
            self._file.close()
        self._temporary.unlink(missing_ok=True)
