"""Who may write here: the newest start of a run, and nobody else.

A start takes the folder over by writing its name into `.writer`, and gets a staging dir there, `.writer-<its token>`.
All that changes which checkpoints the folder holds is one rename from that staging dir or to it: a draft becomes a
checkpoint, a checkpoint goes to be deleted. Taking over moves the staging dirs of older starts away, so a process that
was believed dead and comes back (a zombie) can neither complete nor delete anything, wherever it was stopped. There is
no lock, which a stopped process would hold for ever.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bloomery.base.bounded import read_json
from bloomery.base.errors import Problem, StorageError
from bloomery.base.storage import make_folder, storage_error, write_atomically

WRITER = ".writer"
STAGING = ".writer-"
STALE = ".left-"
"""What the names of staging dirs begin with: of the start that writes, and of older ones."""


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
            raise FencedError(Problem(what, rule, "stop this process; the newer one continues"))

    def fenced(self) -> FencedError | None:
        """The error, if a newer start is known to have taken over."""
        try:
            self.require()
        except StorageError as error:
            return error if isinstance(error, FencedError) else None
        return None

    @property
    def staging_dir(self) -> Path:
        """Where this start's drafts are made, and what it deletes goes to."""
        return self.root / f"{STAGING}{self.token}"

    @contextlib.contextmanager
    def acting(self) -> Iterator[None]:
        """For renames from the staging dir or to it. FencedError if a newer start has taken over, before or within."""
        self.require()
        try:
            yield
        except FileNotFoundError:
            self.require()
            raise


def take_over(root: Path) -> Writer:
    """Become the one that writes here. Call it on one rank and tell the others."""
    make_folder(root)
    newest = _read(root)
    incarnation = 1 + (newest["incarnation"] if newest else 0)
    writer = Writer(root, incarnation, secrets.token_hex(8))
    who = f"process {os.getpid()} on {socket.gethostname()}"
    facts = {"incarnation": incarnation, "token": writer.token, "who": who}
    write_atomically(root / WRITER, json.dumps(facts) + "\n")
    try:
        for staging_dir in filter(Path.is_dir, root.glob(f"{STAGING}*")):
            staging_dir.rename(root / f"{STALE}{staging_dir.name.removeprefix(STAGING)}-{secrets.token_hex(4)}")
        writer.staging_dir.mkdir()
    except OSError as error:
        raise storage_error(root, error, action="take over the folder") from error
    return writer


def _read(root: Path) -> dict[str, Any] | None:
    """What `.writer` says; None if nobody has written it, or no start that went through."""
    try:
        facts = read_json(root / WRITER)
    except (FileNotFoundError, ValueError):
        return None
    except OSError as error:
        raise storage_error(root / WRITER, error, action="read") from error
    return facts if isinstance(facts, dict) and isinstance(facts.get("incarnation"), int) else None
