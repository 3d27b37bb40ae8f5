"""What one unit became: `<unit>.part` (tokens, then its index) and `<unit>.done`, the marker that proves it.

A run may be killed at any moment: a part counts only if its marker says that it was made from these inputs this way,
and its bytes still have the hash that the marker holds. That is also why parts are not brought to the disk one by one:
a power cut costs the units it destroyed, never the result.
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
from functools import cache
from pathlib import Path
from typing import IO, Any

import numpy as np
import xxhash
from numpy.typing import NDArray
from pydantic import TypeAdapter

from bloomery.base.bounded import read_json, read_small
from bloomery.base.errors import DataError, Problem
from bloomery.base.storage import open_plain, own_folder, reason, write_atomically, writing
from bloomery.data.manifest import ORIGINS_DTYPE as DTYPE
from bloomery.prepare.units import Unit

EMPTY, SHORT, LONG, DUPLICATE, BAD = "empty", "short", "long", "duplicate", "bad"
REASONS = (EMPTY, SHORT, LONG, DUPLICATE, BAD)
_TEMPORARY = ".tmp-"
_LIAR = "wrong-"
_LOCK = "lock"
_LOCK_PATIENCE_SECONDS = 5.0
"""For the workers of a killed run to end."""
COLUMNS: dict[str, np.dtype[Any]] = {
    "lengths": np.dtype("<i4"),
    "sequences": np.dtype("<i4"),
    "keys": np.dtype("<u8"),
    "hashes": np.dtype("<u8"),
    "text_bytes": np.dtype("<i8"),
    "files": DTYPE,
}
"""Behind the tokens, one after the other: the length of every sequence; and of every document its number of sequences
(where sentences are split), its place in the shuffled order, the two halves of its hash and its size (where duplicates
are removed), and the number of its file."""


@dataclass(frozen=True)
class Part:
    """The content of a marker."""

    unit: int
    key: str
    """Of everything that decides the bytes, the contents of the inputs apart."""
    encoder: str
    inputs: list[tuple[str, str]]
    """(hash, stamp) of every piece."""
    part_hash: str
    runs: list[tuple[int, int, int]]
    """(documents, sequences, tokens) of each block; where documents are shuffled, they are sorted within it."""
    columns: dict[str, int]
    """Entries of each column that is there."""
    text_bytes: int
    dropped: dict[str, int] = field(default_factory=dict)
    stamp: tuple[int, int, int] | None = None
    """Of its file when its bytes were known: inode, size, time. Not in the marker, which may be copied elsewhere."""

    @property
    def documents(self) -> int:
        return sum(run[0] for run in self.runs)

    @property
    def tokens(self) -> int:
        return sum(run[2] for run in self.runs)


class PartFolder:
    """`<output>.parts`."""

    def __init__(self, output: str, itemsize: int) -> None:
        self.path = Path(f"{output}.parts")
        self.shared = self.path / "shared"
        """A file that says how many runs share the units, so that no single one does them all."""
        self._itemsize = itemsize
        self._lock: IO[bytes] | None = None

    @contextlib.contextmanager
    def alone(self, share: str = "") -> Iterator[None]:
        """Nobody else does this work meanwhile: shares, each of a name of its own, may work beside each other, and
        beside a run without a share nobody. The locks end with the process and its children."""
        give_up = time.monotonic() + _LOCK_PATIENCE_SECONDS
        while True:
            with contextlib.ExitStack() as files:
                if self._is_mine(share, files):
                    yield
                    return
            if time.monotonic() > give_up:
                rule = "two runs would do the same work, or write over it"
                remedy = "wait for it; runs that work at the same time need a share each, with --unit k/n"
                raise DataError(Problem("another run is at work on this", rule, remedy, str(self.path)))
            time.sleep(0.05)

    def _is_mine(self, share: str, files: contextlib.ExitStack) -> bool:
        """Whether the locks could be taken; `files` keeps them."""
        own_folder(self.path, parents=True)
        wanted = {_LOCK: fcntl.LOCK_SH, f"{_LOCK}-{share}": fcntl.LOCK_EX} if share else {_LOCK: fcntl.LOCK_EX}
        for name, how in wanted.items():
            file = None
            # Gone: the run before has just finished and tidied up. On NFS a shared lock needs a file that may be read,
            # and an exclusive one a file that may be written.
            with writing(self.path / name), contextlib.suppress(FileNotFoundError):
                file = files.enter_context(open(self.path / name, "a+b", opener=open_plain))  # noqa: SIM115
            if file is None or not _has_locked(file, how) or not os.fstat(file.fileno()).st_nlink:
                return False
            if name == _LOCK:
                self._lock = file
        return True

    def remove(self) -> None:
        """For a shard that is finished, by whoever has the folder. Stays where other shares are at work in it."""
        assert self._lock is not None, "only within `alone`"
        if not _has_locked(self._lock, fcntl.LOCK_EX):
            return
        # The lock goes last: whoever makes a new one from then on finds nothing that could still be taken away.
        others = [path for path in self.path.glob("*") if path.name != _LOCK]
        for remove in [*(path.unlink for path in others), (self.path / _LOCK).unlink, self.path.rmdir]:
            with contextlib.suppress(OSError):
                remove()

    def share(self, n: int) -> None:
        write_atomically(self.shared, str(n))

    def shares(self) -> int | None:
        """How many runs share the units; None where nobody has said so, or was cut off in saying it."""
        try:
            return max(1, int(read_small(self.shared, 1 << 10)))
        except (OSError, ValueError):
            return None

    def file(self, unit: int) -> Path:
        return self.path / f"{unit:06d}.part"

    def marker(self, unit: int) -> Path:
        return self.path / f"{unit:06d}.done"

    def column(self, part: Part, name: str) -> NDArray[Any]:
        """A whole column of a part."""
        offset = part.tokens * self._itemsize
        for other, entries in part.columns.items():
            if other == name:
                try:
                    return np.fromfile(self.file(part.unit), COLUMNS[name], entries, offset=offset)
                except OSError as error:
                    raise _unreadable(self.file(part.unit), error) from error
            offset += entries * COLUMNS[other].itemsize
        raise KeyError(name)

    def mark(self, part: Part) -> None:
        """From now on the part counts."""
        with writing(self.path):
            temporary, file = self.begin(part.unit)
            with file:
                content = {name: value for name, value in dataclasses.asdict(part).items() if name != "stamp"}
                file.write(json.dumps(content).encode())
                os.replace(temporary, self.marker(part.unit))

    def read(self, unit: int) -> Part | None:
        """The marker, whatever it says; None where there is none that can be read."""
        try:
            part = _part_adapter().validate_python(read_json(self.marker(unit)))
        except (OSError, ValueError):
            return None
        counts = [*part.columns.values(), *(count for run in part.runs for count in run)]
        is_right = part.columns.keys() <= COLUMNS.keys() and min(counts, default=0) >= 0 and part.stamp is None
        return part if is_right and part.encoder.strip() else None

    def proven(self, part: Part) -> Part | None:
        """The part, if its file has the bytes that the marker speaks of."""
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
    def undisturbed(self, parts: Sequence[Part]) -> Iterator[None]:
        """For work that reads these parts: DataError if one of their files is at the end no longer the one that was
        made or proven, as where locks do not work and another run has put its own there."""
        try:
            yield
        except Exception as error:
            self._refuse_replaced(parts)
            if isinstance(error, OSError):
                raise _unreadable(self.path, error) from error
            raise
        self._refuse_replaced(parts)

    def _refuse_replaced(self, parts: Sequence[Part]) -> None:
        for part in parts:
            path = self.file(part.unit)
            with contextlib.suppress(OSError):
                if _stamp(os.stat(path)) == part.stamp:
                    continue
            if self.proven(part) is None:  # else the same bytes: some file systems give a file another inode
                what, rule = "was replaced or removed while it was being merged", "one run at a time merges parts"
                remedy = f"wait until no other run works on {self.path}, then run the command again"
                raise DataError(Problem(what, rule, remedy, str(path)))

    def refuse(self, encoder: str) -> None:
        """No part that this encoder made counts any more, on no machine, even if this run is killed now."""
        with writing(self.path):
            os.close(open_plain(self.path / f"{_LIAR}{encoder.split()[0]}", os.O_WRONLY | os.O_CREAT))

    def liars(self) -> list[str]:
        return sorted(path.name.removeprefix(_LIAR) for path in self.path.glob(f"{_LIAR}*"))

    def temporary(self, unit: int) -> Path:
        return self.path / f"{unit:06d}{_TEMPORARY}{os.getpid()}-{secrets.token_hex(4)}"

    def begin(self, unit: int) -> tuple[Path, IO[bytes]]:
        """A new temporary file, held until it is closed, so that nobody cleans it away."""
        while True:
            path = self.temporary(unit)
            file = open(path, "xb", buffering=0)  # noqa: SIM115 - closed by the caller
            with contextlib.suppress(OSError):  # file systems without locks
                fcntl.flock(file, fcntl.LOCK_EX)
            if os.fstat(file.fileno()).st_nlink:
                return path, file
            file.close()  # cleaned away between the two

    def clean(self, units: list[Unit] | None) -> None:
        """Remove what killed runs left behind for these units; None: for all. What a living run holds stays."""
        prefixes = None if units is None else {f"{unit.number:06d}" for unit in units}
        for leftover in self.path.glob(f"*{_TEMPORARY}*"):
            if prefixes is None or leftover.name.partition(_TEMPORARY)[0] in prefixes:
                with (
                    writing(leftover, "remove"),
                    contextlib.suppress(FileNotFoundError),
                    open(leftover, "rb", opener=open_plain) as file,
                ):
                    if _has_locked(file, fcntl.LOCK_EX):
                        leftover.unlink()


@cache
def _part_adapter() -> TypeAdapter[Part]:
    return TypeAdapter(Part)


def _has_locked(file: IO[bytes], how: int) -> bool:
    """False where somebody else holds it. File systems without locks let everyone in: then the user has to know."""
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
    """Writes one part beside its name and gives it the name at the end; an exception leaves nothing."""

    def __init__(self, folder: PartFolder, unit: Unit) -> None:
        self._folder, self._unit = folder, unit
        self._hasher = xxhash.xxh3_128()
        self._runs: list[tuple[int, int, int]] = []
        self._columns: dict[str, list[NDArray[Any]]] = {}
        with writing(folder.path):
            self._temporary, self._file = folder.begin(unit.number)

    def append(self, tokens: NDArray[Any], columns: dict[str, NDArray[Any]], *, documents: int) -> None:
        self._write(tokens)
        self._runs.append((documents, len(columns["lengths"]), len(tokens)))
        for name, values in columns.items():
            self._columns.setdefault(name, []).append(values.astype(COLUMNS[name], copy=False).reshape(-1))

    def finish(
        self, *, key: str, encoder: str, inputs: list[tuple[str, str]], text_bytes: int, dropped: dict[str, int]
    ) -> Part:
        columns = {name: self._columns[name] for name in COLUMNS if name in self._columns}
        for values in columns.values():
            for piece in values:
                self._write(piece)
        with writing(self._folder.path):
            os.replace(self._temporary, self._folder.file(self._unit.number))  # while it is still held
            stamp = _stamp(os.fstat(self._file.fileno()))
            self._file.close()
        entries = {name: sum(map(len, values)) for name, values in columns.items()}
        digest = self._hasher.hexdigest()
        return Part(self._unit.number, key, encoder, inputs, digest, self._runs, entries, text_bytes, dropped, stamp)

    def abort(self) -> None:
        with contextlib.suppress(OSError):
            self._file.close()
        with contextlib.suppress(OSError):
            self._temporary.unlink()

    def _write(self, values: NDArray[Any]) -> None:
        if not values.size:
            return
        view = np.ascontiguousarray(values).data.cast("B")
        self._hasher.update(view)
        with writing(self._folder.path):
            while view:
                view = view[self._file.write(view) :]
