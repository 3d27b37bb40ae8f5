"""The files that the merge writes: names that can be written at all, and errors that say which of them could not be."""

from __future__ import annotations

import contextlib
import io
import os
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from bloomery.base.errors import Problem, StorageError
from bloomery.base.storage import writing
from bloomery.data.manifest import manifest_path, origins_path
from bloomery.data.shards import partial_prefix


def refuse_folders(output: str) -> None:
    """StorageError where a file of the shard could not get its name, which would be noticed once all is done."""
    names = (f"{output}.bin", f"{output}.idx", manifest_path(output), origins_path(output))
    rule, remedy = "a shard needs this name for a file", "move the folder away, or choose another prepare.output"
    problems = [Problem("is a folder", rule, remedy, name) for name in names if _is_folder(name)]
    if problems:
        raise StorageError(problems)


def refuse_long_names(output: str) -> None:
    """StorageError likewise. Its folder must be there, for only that knows how long a name may be."""
    longest = f"{partial_prefix(output)}.bin"
    with writing(longest), contextlib.suppress(FileNotFoundError):
        os.lstat(longest)


def _is_folder(path: str) -> bool:
    return os.path.isdir(path) and not os.path.islink(path)  # a link is replaced


def remove(path: str | Path) -> None:
    with writing(path, "remove"):
        Path(path).unlink(missing_ok=True)


class _OriginsFile(io.BufferedWriter):
    """Says itself that it cannot be written, to whoever writes into it."""

    def __init__(self, path: Path) -> None:
        self._path = path
        super().__init__(io.FileIO(path, "x"))

    def write(self, data: Any, /) -> int:
        with writing(self._path):
            return super().write(data)


@contextlib.contextmanager
def origins_file(partial: Path) -> Iterator[IO[bytes]]:
    """The file that says where documents came from; gone at the end unless it was given its name."""
    with writing(partial):
        file = _OriginsFile(partial)
    try:
        yield file
    finally:
        with contextlib.suppress(OSError):  # what was published was flushed before
            file.close()
        partial.unlink(missing_ok=True)
