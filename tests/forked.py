"""`bloomery ...` in a process of its own, forked from one that has imported torch: a new interpreter needs seconds."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

PRELOAD = ["bloomery.launch.fork_server", "bloomery.train.loop", "bloomery.train.setup"]


def _be_bloomery(words: Sequence[str], log: str, first: Callable[[], None] | None) -> None:
    import torch

    from bloomery.cli.main import command

    os.dup2(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), 2)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    torch.set_num_threads(1)
    sys.argv = ["bloomery", *words]
    if first is not None:
        first()
    command()


class Forked:
    """Like a subprocess.Popen, whose standard error is the file `log`."""

    def __init__(self, words: Sequence[str], log: Path, first: Callable[[], None] | None = None) -> None:
        """`first` is called before bloomery is."""
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(PRELOAD)
        self._log = log
        self._process = context.Process(target=_be_bloomery, args=(list(words), str(log.absolute()), first))
        self._process.start()
        assert self._process.pid is not None
        self.pid = self._process.pid

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        if (code := self._process.exitcode) is None:
            raise subprocess.TimeoutExpired("bloomery", timeout or 0)
        return code

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        self.wait(timeout)
        return "", self._log.read_text()

    def send_signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def kill(self) -> None:
        self._process.kill()

    def terminate(self) -> None:
        self._process.terminate()
