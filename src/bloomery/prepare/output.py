"""Files under an `--output` folder: written beside their name, brought to the disk, and only then given it."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import IO, Any

import xxhash

from bloomery.base.errors import DataError, Problem, StorageError
from bloomery.base.storage import storage_error

PIECE_BYTES = 1 << 20
"""Read and written at a time."""
HASHES: dict[str, Callable[[], Any]] = {
    "sha256": hashlib.sha256,
    "md5": lambda: hashlib.md5(usedforsecurity=False),
    "xxh3": xxhash.xxh3_64,
    "xxh3_128": xxhash.xxh3_128,
}


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """An OSError inside becomes the StorageError that says what to do about `path`."""
    try:
        yield
    except OSError as error:
        told = storage_error(path, error)
        again = "run the command again afterwards: what is complete is kept"
        raise StorageError(
            [
                replace(problem, remedy=f"{problem.remedy.replace('--run-dir', '--output')}; {again}")
                for problem in told.problems
            ]
        ) from error


@contextlib.contextmanager
def held_alone(file: IO[Any], path: Path) -> Iterator[None]:
    """Nobody else holds this file meanwhile; DataError where somebody does. Ends with the process, come what may."""
    taken = False
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        taken = not os.path.samestat(os.fstat(file.fileno()), os.stat(path))  # its last holder has renamed it
    except FileNotFoundError:
        taken = True
    except OSError as error:  # some network file systems have no locks: then the user has to know
        taken = error.errno in (errno.EWOULDBLOCK, errno.EACCES)
    if taken:
        rule = "two writers would destroy each other's files"
        raise DataError(Problem("another process is at work on this", rule, "wait for it to end", str(path)))
    yield


def publish(partial: Path, final: Path) -> None:
    """Give a written file its name: whoever sees the name sees all of it, also after a power cut."""
    with open(partial, "rb") as file:
        _sync(file.fileno())
    os.replace(partial, final)
    folder = os.open(final.parent, os.O_RDONLY)
    try:
        _sync(folder)
    finally:
        os.close(folder)


def file_hashes(path: Path, names: set[str]) -> dict[str, str]:
    """The hexadecimal hashes of a file, by their names in HASHES; all in one reading."""
    hashers = {name: HASHES[name]() for name in sorted(names)}
    with open(path, "rb") as file:
        while piece := file.read(PIECE_BYTES):
            for hasher in hashers.values():
                hasher.update(piece)
    return {name: hasher.hexdigest() for name, hasher in hashers.items()}


def _sync(descriptor: int) -> None:
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP, errno.ENOSYS, errno.EBADF):
            raise
