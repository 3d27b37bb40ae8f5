"""Who may write here: the newest start of a run, and nobody else.

A start takes the folder over by writing `.writer`. A process that was believed dead and comes back (a zombie) finds a
newer name there and can neither complete nor delete anything.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import secrets
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bloomery.base.errors import Problem, StorageError
from bloomery.base.storage import make_run_folder, write_atomically

WRITER = ".writer"
_LOCK = ".writer.lock"


class FencedError(StorageError):
    """A newer start has taken over: this process must stop."""


@dataclass(frozen=True)
class Writer:
    """The right to write into a folder of checkpoints. All ranks of a start share one."""

    root: Path
    incarnation: int
    """Counts the starts that wrote here, from 1."""
    token: str

    def require(self) -> None:
        """FencedError if a newer start has taken over."""
        newest = _read(self.root)
        if newest is not None and newest.get("token") != self.token:
            who = f"start {newest.get('incarnation')} ({newest.get('who')})"
            what = f"{who} has taken over {self.root}; this is start {self.incarnation}"
            rule = "an older start may neither complete nor delete a checkpoint"
            raise FencedError(Problem(what, rule, "stop this process; the newer one goes on"))

    @contextlib.contextmanager
    def holding(self) -> Iterator[None]:
        """Nobody can take over within. FencedError if somebody has."""
        with _locked(self.root):
            self.require()
            yield


def take_over(root: Path) -> Writer:
    """Become the one that writes here. Call it on one rank and tell the others."""
    make_run_folder(root)
    with _locked(root):
        newest = _read(root)
        incarnation = 1 + int(newest.get("incarnation", 0) if newest else 0)
        writer = Writer(root, incarnation, secrets.token_hex(8))
        who = f"process {os.getpid()} on {socket.gethostname()}"
        facts = {"incarnation": incarnation, "token": writer.token, "who": who}
        write_atomically(root / WRITER, json.dumps(facts) + "\n")
    return writer


def _read(root: Path) -> dict[str, Any] | None:
    """What `.writer` says; None if nobody has written it, or no start that went through."""
    try:
        facts = json.loads((root / WRITER).read_text())
    except (FileNotFoundError, ValueError):
        return None
    return facts if isinstance(facts, dict) else None


@contextlib.contextmanager
def _locked(root: Path) -> Iterator[None]:
    """One process at a time, where the file system has locks; elsewhere the window is the moment of a rename."""
    descriptor = os.open(root / _LOCK, os.O_RDWR | os.O_CREAT, 0o666)
    try:
        with contextlib.suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)
