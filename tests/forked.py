"""`bloomery ...` in a process of its own, forked from one that has imported torch: a new interpreter needs seconds."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from multiprocessing import forkserver, get_context
from pathlib import Path

from bloomery.base import signals

PRELOAD = ["bloomery.launch.fork_server", "bloomery.train.loop", "bloomery.train.setup"]
PRELOAD += ["bloomery.parallel.pipeline", "torch.distributed.fsdp"]
"""With torch._dynamo, which pipelines import, and which takes longer than the training of a test."""


def start_server() -> None:
    """What the first one preloads, all that this process forks has: also the ranks of `bloomery train` within it."""
    assert all(find_spec(name) for name in PRELOAD), "the server would pass over it"
    forkserver.set_forkserver_preload(PRELOAD)
    forkserver.ensure_running()


def alone(command: Callable[[Sequence[str]], int], words: Sequence[str]) -> int:
    """The exit code of `command(words)` as the only rank, without a launcher."""
    process = get_context("forkserver").Process(target=_exit_with, args=(command, words))
    process.start()
    process.join(120)
    if process.exitcode is None:
        process.kill()
    assert process.exitcode is not None, "it hangs"
    return process.exitcode


def _exit_with(command: Callable[[Sequence[str]], int], words: Sequence[str]) -> None:
    signals.listen()  # as the first line of `python -m bloomery` does
    sys.exit(command(words))


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
        self._log = log
        what = (list(words), str(log.absolute()), first)
        self._process = get_context("forkserver").Process(target=_be_bloomery, args=what)
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
