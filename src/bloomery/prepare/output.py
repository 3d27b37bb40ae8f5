"""Files under an `--output` folder: held by one process at a time, and proven by their hashes."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

import xxhash

from bloomery.base.errors import DataError, Problem

AGAIN = "; run the command again afterwards: what is complete is kept"
"""What `download` and `extract` add to errors of the disk."""
PIECE_BYTES = 1 << 20
"""Read and written at a time."""
HASHES: dict[str, Callable[[], Any]] = {
    "sha256": hashlib.sha256,
    "md5": lambda: hashlib.md5(usedforsecurity=False),
    "xxh3": xxhash.xxh3_64,
    "xxh3_128": xxhash.xxh3_128,
}


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


def file_hashes(path: Path, names: set[str]) -> dict[str, str]:
    """The hexadecimal hashes of a file, by their names in HASHES; all in one reading."""
    hashers = {name: HASHES[name]() for name in sorted(names)}
    with open(path, "rb") as file:
        while piece := file.read(PIECE_BYTES):
            for hasher in hashers.values():
                hasher.update(piece)
    return {name: hasher.hexdigest() for name, hasher in hashers.items()}
