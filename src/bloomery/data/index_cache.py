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
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from bloomery.base.bounded import open_regular, read_json
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
        entry = self.folder / f"{kind}-{xxhash.xxh3_128_hexdigest(json.dumps(facts, sort_keys=True).encode())}"
        if (found := _load(entry, facts)) is not None:
            return found
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            with open(self.folder / ".lock", "rb", opener=_created) as lock:
                is_locked = _lock(lock.fileno())
                if (found := _load(entry, facts)) is None:  # else another process was faster
                    _store(entry, facts, build(), is_alone=is_locked)
                    found = _load(entry, facts)
        except OSError as error:
            what, remedy = (
                f"cannot keep index caches in {self.folder}: {reason(error)}",
                "that can be written and has room",
            )
            raise StorageError(Problem(what, remedy=f"choose a data.cache_dir {remedy}, or repair this one")) from error
        if found is None:
            what = f"the index just written to {entry} reads back otherwise"
            raise StorageError(Problem(what, remedy="check the disk (`dmesg`), or choose another data.cache_dir"))
        return found


def _created(path: str, flags: int) -> int:
    return open_plain(path, flags | os.O_CREAT)  # for reading, which is enough: it may be another user's


def _lock(descriptor: int) -> bool:
    """Waits until no other process holds it; the system frees it on a crash. False where there are no locks."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
    except OSError:
        return False
    return True


def _store(entry: Path, facts: Mapping[str, Any], arrays: Arrays, *, is_alone: bool) -> None:
    for debris in entry.parent.glob(f".{entry.name}.partial-*") if is_alone else ():
        remove_tree(debris)  # of builders that were killed
    partial = entry.with_name(f".{entry.name}.partial-{secrets.token_hex(4)}")
    try:
        partial.mkdir()
        checksums = {}
        for name, array in arrays.items():
            path = partial / f"{name}.npy"
            with open(path, "wb") as file:
                np.save(file, array, allow_pickle=False)
                file.flush()
                os.fsync(file.fileno())
            checksums[name] = file_checksum(path)
        (partial / "entry.json").write_text(json.dumps({"key": facts, "checksums": checksums}, indent=1))
        try:
            os.rename(partial, entry)
        except OSError:
            if _load(entry, facts) is None:  # it is damaged; else a builder without lock was faster
                remove_tree(entry)  # whoever has mapped its files keeps them
                os.rename(partial, entry)
    finally:
        remove_tree(partial)


def _load(entry: Path, facts: Mapping[str, Any]) -> Arrays | None:
    """The arrays of a whole entry, mapped from its files; None if it is absent, damaged or another's."""
    try:
        known = read_json(entry / "entry.json")
        paths = {name: entry / f"{name}.npy" for name in known["checksums"]}
        is_whole = all(file_checksum(path) == known["checksums"][name] for name, path in paths.items())
        if not is_whole or known["key"] != json.loads(json.dumps(facts)):
            return None
        return {name: _mapped(path) for name, path in paths.items()}
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return None


def _mapped(path: Path) -> NDArray[Any]:
    try:
        array: NDArray[Any] = np.load(path, mmap_mode="r", allow_pickle=False)
    except ValueError:  # an empty array cannot be mapped
        array = np.load(path, allow_pickle=False)
    return array


def file_checksum(path: str | os.PathLike[str]) -> str:
    digest = xxhash.xxh3_128()
    with open(path, "rb", buffering=0, opener=open_regular) as file:
        while block := file.read(_BLOCK_BYTES):
            digest.update(block)
    return digest.hexdigest()
