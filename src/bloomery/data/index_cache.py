"""Arrays that cost seconds to make, kept on disk under the facts they follow from.

An entry is a folder named after its key, with one .npy per array and `entry.json` (the key and a checksum per file). It
is written beside its place and renamed, so it is whole or absent; one that is damaged all the same is made again. The
first process of a node builds while the others wait for its lock; where the file system has no locks, each builds and
the first to finish wins. Arrays are memory-mapped, so the processes of a node share them.
"""

from __future__ import annotations

import fcntl
import json
import os
import secrets
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from bloomery.base.bounded import read_json
from bloomery.base.errors import Problem, StorageError
from bloomery.base.storage import open_plain, reason, remove_tree

_FORMAT = 1
"""Counted up when the meaning of an entry changes, so that older ones are left alone."""
_BLOCK_BYTES = 1 << 24

Arrays = dict[str, NDArray[Any]]


class IndexCache:
    """A folder of entries. Nothing is created before the first entry is stored: a hit needs no write permission."""

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder = Path(folder)

    def arrays(self, kind: str, key: Mapping[str, Any], build: Callable[[], Arrays]) -> Arrays:
        """What `build` returns, from the disk if it was ever built for this key. `key` must decide the result."""
        facts = {"format": _FORMAT, "kind": kind, **key}
        name = f"{kind}-{xxhash.xxh3_128_hexdigest(json.dumps(facts, sort_keys=True).encode())}"
        found = _load(self.folder / name, facts)
        if found is not None:
            return found
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            with _lock(self.folder / f"{name}.lock") as alone:
                if alone:
                    self._remove_debris(name)
                found = _load(self.folder / name, facts)  # another process may have been faster
                if found is None:
                    self._store(name, facts, build())
                    found = _load(self.folder / name, facts)
        except OSError as error:
            raise _cannot_write(self.folder, error) from error
        if found is None:
            what = f"the index just written to {self.folder / name} reads back otherwise"
            raise StorageError(Problem(what, remedy="check the disk (`dmesg`), or choose another data.cache_dir"))
        return found

    def _store(self, name: str, facts: Mapping[str, Any], arrays: Arrays) -> None:
        partial = self.folder / f".{name}.partial-{secrets.token_hex(4)}"
        try:
            partial.mkdir()
            checksums = {}
            for array_name, array in arrays.items():
                path = partial / f"{array_name}.npy"
                with open(path, "wb") as file:
                    np.save(file, array, allow_pickle=False)
                    file.flush()
                    os.fsync(file.fileno())
                checksums[array_name] = _checksum(path)
            (partial / "entry.json").write_text(json.dumps({"key": facts, "checksums": checksums}, indent=1))
            self._put_in_place(partial, self.folder / name, facts)
        finally:
            shutil.rmtree(partial, ignore_errors=True)  # gone already when the rename succeeded

    def _put_in_place(self, partial: Path, final: Path, facts: Mapping[str, Any]) -> None:
        try:
            os.rename(partial, final)
        except OSError:
            if _load(final, facts) is not None:
                return  # a builder without lock was faster
            # Damaged. Moved away and not deleted where it stands: whoever has mapped its files keeps them.
            aside = self.folder / f".{final.name}.partial-{secrets.token_hex(4)}"
            with suppress(FileNotFoundError):
                os.rename(final, aside)
            os.rename(partial, final)
            remove_tree(aside)

    def _remove_debris(self, name: str) -> None:
        """What builders that were killed left behind. Only for the holder of the lock: no one else is building this."""
        for debris in self.folder.glob(f".{name}.partial-*"):
            remove_tree(debris)


def file_checksum(path: str) -> str:
    """Of a file's content, for keys."""
    return _checksum(Path(path))


def _load(entry: Path, facts: Mapping[str, Any]) -> Arrays | None:
    """The arrays of a whole entry, mapped from its files; None if it is absent, damaged or another's."""
    try:
        known = read_json(entry / "entry.json")
        if known["key"] != json.loads(json.dumps(facts)):
            return None
        arrays = {}
        for name, checksum in known["checksums"].items():
            path = entry / f"{name}.npy"
            if _checksum(path) != checksum:
                return None
            arrays[name] = _mapped(path)
        return arrays
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return None


def _mapped(path: Path) -> NDArray[Any]:
    try:
        array: NDArray[Any] = np.load(path, mmap_mode="r", allow_pickle=False)
    except ValueError:  # an empty array cannot be mapped
        array = np.load(path, allow_pickle=False)
    return array


def _checksum(path: Path) -> str:
    digest = xxhash.xxh3_128()
    with open(path, "rb", buffering=0) as file:
        while block := file.read(_BLOCK_BYTES):
            digest.update(block)
    return digest.hexdigest()


@contextmanager
def _lock(path: Path) -> Iterator[bool]:
    """Waits until no other process holds it; the system frees it on a crash. False where there are no locks."""
    while True:
        with open(path, "wb", opener=open_plain) as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX)
                locked = True
            except OSError:
                locked = False
            if locked and not _is_still(path, file.fileno()):
                continue  # its last holder has removed it while this process waited
            try:
                yield locked
            finally:
                path.unlink(missing_ok=True)
            return


def _is_still(path: Path, descriptor: int) -> bool:
    try:
        return os.path.samestat(os.stat(path), os.fstat(descriptor))
    except FileNotFoundError:
        return False


def _cannot_write(folder: Path, error: OSError) -> StorageError:
    remedy = "choose a data.cache_dir that can be written and has room, or mend this one"
    return StorageError(Problem(f"cannot keep index caches in {folder}: {reason(error)}", remedy=remedy))
