"""Ranks that do not answer: they note a SIGTERM and go on waiting. Without torch, so that they start at once."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

from bloomery.launch import local


def wait_for_ever(arguments: Sequence[str]) -> int:
    """Leaves `here-<rank>` in the folder when it waits, and `asked-<rank>` when somebody wants it to stop."""
    folder, rank = Path(arguments[0]), os.environ["RANK"]
    signal.signal(signal.SIGTERM, lambda *_: (folder / f"asked-{rank}").touch())
    (folder / f"here-{rank}").touch()
    while True:
        threading.Event().wait(0.1)  # returns to Python for the handler


def rank_1_dies(arguments: Sequence[str]) -> int:
    """The others do not notice."""
    if os.environ["RANK"] == "1":
        os.kill(os.getpid(), signal.SIGKILL)
    return wait_for_ever(arguments)


def is_interrupted(arguments: Sequence[str]) -> int:
    """What it says is in `said`: the fork server's standard error is that of an earlier test."""
    os.dup2(os.open(Path(arguments[0]) / "said", os.O_CREAT | os.O_WRONLY), 2)
    os.kill(os.getpid(), signal.SIGINT)
    return wait_for_ever(arguments)


if __name__ in ("__main__", "__mp_main__"):  # a launcher to be killed, and its ranks
    local.LAST_WORDS_SECONDS = 2.0
if __name__ == "__main__":
    sys.exit(local.run_local_ranks(2, wait_for_ever, sys.argv[1:]))
