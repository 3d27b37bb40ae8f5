"""Die by SIGKILL at the n-th storage operation: what a rank runs instead of `bloomery` in the tests of crashes.

A point is what the process does, not when: the n-th call of the os functions that change a file system, counted over
all threads of one rank. Of a write, half of the bytes arrive first.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bloomery.cli.main import main

OPERATIONS = ("write", "fsync", "mkdir", "rename", "replace", "unlink", "rmdir", "ftruncate", "open")
_CHANGES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC


@dataclass(frozen=True)
class KillPoint:
    """Where a start of a training ends."""

    victim: int
    """The rank that counts its operations."""
    operation: int | None
    """The number of its last one, which it does not come to do; None: somebody else ends it, or nobody does."""
    all_ranks: bool
    """Whether the others die with it."""


class Counter:
    """Counts this process's operations, and ends it at one of them."""

    def __init__(self, folder: Path, point: KillPoint) -> None:
        self._folder, self._point = folder, point
        self._lock = threading.Lock()
        self.count = 0

    def install(self) -> None:
        for name in OPERATIONS:
            setattr(os, name, self._counting(getattr(os, name), is_open=name == "open", is_write=name == "write"))

    def _counting(self, original: Any, *, is_open: bool, is_write: bool) -> Any:
        def counted(*arguments: Any, **options: Any) -> Any:
            if (is_open and not arguments[1] & _CHANGES) or (is_write and arguments[0] <= 2):
                return original(*arguments, **options)
            with self._lock:
                self.count += 1
                if self.count == self._point.operation:
                    if is_write:
                        original(arguments[0], bytes(arguments[1])[: len(arguments[1]) // 2])
                    end(self._folder, self._point)
            return original(*arguments, **options)

        return counted


def end(folder: Path, point: KillPoint) -> None:
    """SIGKILL for the others, if they are to die as well, and for the victim."""
    pids = {int(path.name): int(path.read_text()) for path in folder.iterdir() if path.name.isdigit()}
    others = [pid for rank, pid in pids.items() if rank != point.victim and point.all_ranks]
    for pid in [*others, pids[point.victim]]:
        os.kill(pid, signal.SIGKILL)


def train_until_killed(folder: str, point: KillPoint, arguments: Sequence[str]) -> int:
    """`bloomery train` as one rank. `folder` gets the process id of each rank as a file `<rank>`, and in
    `<rank>.count` the operations of one that came to its end."""
    rank, place = int(os.environ.get("RANK", "0")), Path(folder)
    log = os.open(place / "said.txt", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    hidden = place / f".{rank}"
    hidden.write_text(str(os.getpid()))
    hidden.rename(place / str(rank))
    counter = Counter(place, point if rank == point.victim else KillPoint(rank, None, False))
    counter.install()
    code = main(list(arguments))
    (place / f"{rank}.count").write_text(str(counter.count))
    return code
