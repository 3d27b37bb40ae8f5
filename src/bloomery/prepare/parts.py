"""What one unit became: `<unit>.part` (tokens, then its index) and `<unit>.done`, the marker that proves it.

A run may be killed at any moment: a part counts only if its marker says that it was made from these inputs this way,
and its bytes still have the hash that the marker holds. That is also why parts are not brought to the disk one by one:
a power cut costs the units it destroyed, never the result.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import json
import os
import secrets
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from bloomery.base.errors import DataError, Problem
from bloomery.base.storage import writing
from bloomery.data.origins import DTYPE
from bloomery.prepare.units import Unit

EMPTY, SHORT, LONG, DUPLICATE, BAD = "empty", "short", "long", "duplicate", "bad"
REASONS = (EMPTY, SHORT, LONG, DUPLICATE, BAD)
_TEMPORARY = ".tmp-"
_LIAR = "wrong-"
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
        self._itemsize = itemsize

    @contextlib.contextmanager
    def alone(self, name: str) -> Iterator[None]:
        """Nobody else does this work meanwhile; the lock ends with the process and its children."""
        give_up = time.monotonic() + _LOCK_PATIENCE_SECONDS
        while True:
            with writing(self.path, "create the folder"):
                self.path.mkdir(parents=True, exist_ok=True)
            with writing(self.path), open(self.path / name, "w") as file:
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError as error:
                    if time.monotonic() > give_up:
                        rule = "two runs would do the same work"
                        remedy = "wait for it, or give each a share with --unit k/n"
                        raise DataError(
                            Problem("another run is at work on this", rule, remedy, str(self.path))
                        ) from error
                    time.sleep(0.05)
                    continue
                except OSError:  # file systems without locks: then the user has to know
                    pass
                if os.fstat(file.fileno()).st_nlink:  # else the run before has just finished and tidied up
                    yield
                    return

    def file(self, unit: int) -> Path:
        return self.path / f"{unit:06d}.part"

    def marker(self, unit: int) -> Path:
        return self.path / f"{unit:06d}.done"

    def column(self, part: Part, name: str) -> NDArray[Any]:
        """A whole column of a part."""
        offset = part.tokens * self._itemsize
        for other, entries in part.columns.items():
            if other == name:
                return np.fromfile(self.file(part.unit), COLUMNS[name], entries, offset=offset)
            offset += entries * COLUMNS[other].itemsize
        raise KeyError(name)

    def mark(self, part: Part) -> None:
        """From now on the part counts."""
        with writing(self.path):
            temporary, file = self.begin(part.unit)
            with file:
                file.write(json.dumps(dataclasses.asdict(part)).encode())
                os.replace(temporary, self.marker(part.unit))

    def read(self, unit: int) -> Part | None:
        """The marker, whatever it says; None where there is none that can be read."""
        try:
            content = json.loads(self.marker(unit).read_bytes())
            content["inputs"] = [tuple(entry) for entry in content["inputs"]]
            content["runs"] = [tuple(run) for run in content["runs"]]
            return Part(**content)
        except (OSError, ValueError, TypeError, LookupError):
            return None

    def is_whole(self, part: Part) -> bool:
        hasher = xxhash.xxh3_128()
        try:
            with open(self.file(part.unit), "rb", buffering=0) as file:
                while chunk := file.read(1 << 22):
                    hasher.update(chunk)
        except OSError:
            return False
        return hasher.hexdigest() == part.part_hash

    def refuse(self, encoder: str) -> None:
        """No part that this encoder made counts any more, on no machine, even if this run is killed now."""
        with writing(self.path):
            (self.path / f"{_LIAR}{encoder.split()[0]}").touch()

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
                _remove_unless_held(leftover)


def _remove_unless_held(path: Path) -> None:
    with contextlib.suppress(FileNotFoundError), open(path, "rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return
        except OSError:  # file systems without locks: then the user has to know
            pass
        path.unlink()


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
            self._file.close()
        entries = {name: sum(map(len, values)) for name, values in columns.items()}
        digest = self._hasher.hexdigest()
        return Part(self._unit.number, key, encoder, inputs, digest, self._runs, entries, text_bytes, dropped)

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
