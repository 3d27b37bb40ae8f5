"""Start the ranks of a job on this machine, watch them, and end them together."""

from __future__ import annotations

import multiprocessing
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any, cast

from bloomery.base import exit_codes
from bloomery.base.credentials import mask_streams

_FORWARDED = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)


@dataclass(frozen=True)
class Patience:
    """How long the launcher and the ranks wait for each other when something ends."""

    lost_seconds: float = 6.0
    """After a rank died the others notice by themselves and say so; who has not after this time waits for ever."""
    one_request_seconds: float = 3.0
    """Signals within this time are one request, passed on twice; a later one means that the ranks do not answer."""
    last_words_seconds: float = 120.0
    """After a rank ended with an error that all agreed on, or the launcher is gone, the ranks finish what they are
    writing."""


USUAL = Patience()


def run_local_ranks(
    size: int,
    command: Callable[[Sequence[str]], int],
    arguments: Sequence[str],
    *,
    preload: Sequence[str] = (),
    patience: Patience = USUAL,
) -> int:
    """Run `command(arguments)` as ranks 0..size-1 and return the exit code of all: the first failure's, if any.

    Ranks are forked from one server process that has imported the modules `preload`: eight ranks start like one.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(preload))
    port = _free_port()
    alive, watched = context.Pipe(duplex=False)
    what = (size, port, command, list(arguments), alive, patience)
    ranks = [context.Process(target=_be_rank, args=(rank, *what), name=f"rank {rank}") for rank in range(size)]
    for rank in ranks:
        rank.start()
    alive.close()
    with _signals_forwarded(ranks, patience):
        code = _watch(ranks, patience)
    watched.close()
    return code


def _be_rank(
    rank: int,
    size: int,
    port: int,
    command: Callable[[Sequence[str]], int],
    arguments: list[str],
    alive: Connection,
    patience: Patience,
) -> None:
    mask_streams()
    os.setpgid(0, 0)  # a Ctrl-C reaches the launcher, which passes it on: once
    os.environ |= {
        "RANK": str(rank),
        "WORLD_SIZE": str(size),
        "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": str(size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    if "OMP_NUM_THREADS" not in os.environ:
        import torch  # the server has imported it already, with the threads of one process

        torch.set_num_threads(max(1, (os.cpu_count() or 1) // size))
    threading.Thread(target=_stop_with_launcher, args=(alive, patience), daemon=True).start()
    sys.exit(command(arguments))


def _stop_with_launcher(alive: Connection, patience: Patience) -> None:
    try:
        alive.recv()
    except (EOFError, OSError):
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(patience.last_words_seconds)  # who waits for another rank cannot hear a signal
        os._exit(exit_codes.LOST_RANK)


def _watch(ranks: Sequence[BaseProcess], patience: Patience) -> int:
    """Wait for all; when one fails, for the others only a while."""
    running = {rank.sentinel: number for number, rank in enumerate(ranks)}
    failed: list[int] = []
    deadline: float | None = None
    while running:
        left = None if deadline is None else max(0.0, deadline - time.monotonic())
        ended = wait(list(running), timeout=left)
        if not ended:
            for number in running.values():
                _signal(ranks[number], signal.SIGKILL)
            deadline = None
        for sentinel in ended:
            number = running.pop(cast(int, sentinel))
            ranks[number].join()
            if ranks[number].exitcode:
                failed.append(number)
                abrupt = _code(ranks[number]) in (exit_codes.LOST_RANK, exit_codes.BUG)
                wait_seconds = patience.lost_seconds if abrupt else patience.last_words_seconds
                deadline = min(deadline or float("inf"), time.monotonic() + wait_seconds)
    if not failed:
        return exit_codes.OK
    killed = [number for number in failed if (ranks[number].exitcode or 0) < 0]
    if killed:
        name = signal.Signals(-(ranks[killed[0]].exitcode or 0)).name
        remedy = "Start again to go on from the newest checkpoint."
        print(f"bloomery: rank {killed[0]} was killed by {name}, so the others stopped. {remedy}", file=sys.stderr)
    return next(
        (_code(ranks[number]) for number in failed if _code(ranks[number]) != exit_codes.LOST_RANK),
        exit_codes.LOST_RANK,
    )


def _code(rank: BaseProcess) -> int:
    """A rank that was killed counts as lost."""
    code = rank.exitcode or 0
    return exit_codes.LOST_RANK if code < 0 else code


@contextmanager
def _signals_forwarded(ranks: Sequence[BaseProcess], patience: Patience) -> Iterator[None]:
    asked: float | None = None

    def forward(number: int, frame: Any) -> None:
        """A wrapper passes on what the terminal has sent already: at once, it is one request. A later one means that
        the ranks do not answer."""
        nonlocal asked
        ends = number != signal.SIGUSR1
        again = ends and asked is not None
        if again and time.monotonic() - (asked or 0.0) < patience.one_request_seconds:
            return
        asked = time.monotonic() if ends and not again else asked
        for rank in ranks:
            _signal(rank, signal.SIGKILL if again else signal.Signals(number))

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, forward) for number in _FORWARDED}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _signal(rank: BaseProcess, number: signal.Signals) -> None:
    if rank.pid is not None and rank.is_alive():
        os.kill(rank.pid, number)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
