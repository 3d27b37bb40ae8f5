"""Arrays that cost seconds to make, kept on disk under the facts they follow from.

An entry is a folder named after its key, with one .npy per array and `entry.json` (the key and a checksum per file). It
is written beside its place and renamed, so it is whole or absent; one that is damaged all the same is made again. The
first process of a node builds while the others wait for its lock. Arrays are memory-mapped, so the processes of a node
share them.
"""

from __future__ import annotations

import fcntl
import json
import os
import tempfile
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from bloomery.base.bounded import open_regular, read_json
from bloomery.base.errors import Problem, StorageError
from bloomery.base.storage import open_plain, publish, reason, remove_tree

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
                with suppress(OSError):  # without locks, each process builds and the first to finish wins
                    fcntl.flock(lock, fcntl.LOCK_EX)
                if (found := _load(entry, facts)) is None:
                    _store(entry, facts, build())
                    found = _load(entry, facts)
            if found is None:
                raise OSError(f"{entry} reads back otherwise than it was written")
            return found
        except OSError as error:
            what = f"cannot keep index caches in {self.folder}: {reason(error)}"
            remedy = "choose a data.cache_dir that can be written and has room, or repair this one"
            raise StorageError(Problem(what, remedy=remedy)) from error


def _created(path: str, flags: int) -> int:
    return open_plain(path, flags | os.O_CREAT)  # for reading, which is enough: it may be another user's


def _store(entry: Path, facts: Mapping[str, Any], arrays: Arrays) -> None:
    with tempfile.TemporaryDirectory(prefix=f".{entry.name}.", dir=entry.parent, ignore_cleanup_errors=True) as folder:
        partial = Path(folder, "entry")
        partial.mkdir()
        for name, array in arrays.items():
            np.save(partial / f"{name}.npy", array, allow_pickle=False)
        checksums = {name: file_checksum(partial / f"{name}.npy") for name in arrays}
        (partial / "entry.json").write_text(json.dumps({"key": facts, "checksums": checksums}, indent=1))
        for path in partial.iterdir():
            publish(path, path)  # brings it to the disk
        if _load(entry, facts) is None:
            remove_tree(entry)  # absent, or damaged; whoever has mapped its files keeps them
            with suppress(FileExistsError):
                os.rename(partial, entry)


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
