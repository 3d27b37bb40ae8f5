"""Start the ranks of a job on this machine, watch them, and end them together."""

from __future__ import annotations

import multiprocessing
import os
import random
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import forkserver
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import cast

from bloomery.base import doing, exit_codes, signals
from bloomery.base.errors import LostRankError, Problem, mask_streams

_NO_SERVER = 255
"""What multiprocessing gives as the exit code of a process whose fork server is gone: nobody knows it."""
_POLL_SECONDS = 0.5
_RESUME = "Start again to resume from the newest checkpoint."


LOST_SECONDS = 6.0
"""After a rank died the others notice by themselves and say so; who has not after this time waits for ever."""
_ASKED_SECONDS = 1.0
"""The same, after somebody has asked all of them to stop."""
LAST_WORDS_SECONDS = 120.0
"""After a rank ended with an error that all agreed on, or the launcher is gone, the ranks finish what they are
writing."""


@dataclass(frozen=True)
class Node:
    """The part of a job that is started here."""

    first_rank: int
    world_size: int
    address: str
    port: int

    @classmethod
    def of(cls, environment: Mapping[str, str], ranks: int) -> Node | None:
        """Where `launch` has started one `bloomery train` on each of several hosts; None where it has not."""
        if "NODE_RANK" not in environment or "NNODES" not in environment:
            return None
        node, nodes = int(environment["NODE_RANK"]), int(environment["NNODES"])
        return cls(node * ranks, nodes * ranks, environment["MASTER_ADDR"], int(environment["MASTER_PORT"]))


def run_local_ranks(
    size: int,
    command: Callable[[Sequence[str]], int],
    arguments: Sequence[str],
    *,
    preload: Sequence[str] = (),
    node: Node | None = None,
) -> int:
    """Run `command(arguments)` as ranks 0..size-1, or those of this `node`. The exit code of all: the first failure's.

    Ranks are forked from one server process that has imported the modules `preload`: eight ranks start like one.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["bloomery.launch.fork_server", *preload])
    node = node or Node(0, size, "127.0.0.1", _free_port())
    alive, watched = context.Pipe(duplex=False)
    what = (size, node, command, list(arguments), alive)
    ranks = [context.Process(target=_be_rank, args=(rank, *what), name=f"rank {rank}") for rank in range(size)]
    try:
        with doing.doing(f"starting {size} rank{'s' * (size > 1)}"):
            for rank in ranks:
                rank.start()
    except BaseException as error:
        for rank in ranks:
            _signal(rank, signal.SIGKILL)
        if not isinstance(error, (EOFError, OSError)):
            raise
        ended = f"the process that starts the {size} ranks has ended before they had begun"
        raise LostRankError(Problem(ended, remedy="start again")) from error
    alive.close()
    job = _Job(ranks)
    with signals.handled(job.forward):
        with suppress(BrokenPipeError):  # all are dead already: watch() will say so
            os.write(watched.fileno(), bytes(size))  # all are there: one byte for each, and they begin
        code = job.watch()
        if any(rank.exitcode == _NO_SERVER for rank in ranks):
            signals.say(f"the process that started the ranks has exited, so they were asked to stop. {_RESUME}")
            job.see_them_end(watched)
    watched.close()
    return code


def _be_rank(
    local_rank: int,
    size: int,
    node: Node,
    command: Callable[[Sequence[str]], int],
    arguments: list[str],
    alive: Connection,
) -> None:
    signals.end_with_parent(signal.SIGKILL)
    if not os.read(alive.fileno(), 1):  # the launcher was stopped before all ranks were there
        return
    signals.listen()
    try:
        mask_streams()
        signals.end_with_parent(signal.SIGTERM)
        os.setpgid(0, 0)  # a Ctrl-C reaches the launcher, which passes it on: once
        os.environ |= {
            "RANK": str(node.first_rank + local_rank),
            "WORLD_SIZE": str(node.world_size),
            "LOCAL_RANK": str(local_rank),
            "LOCAL_WORLD_SIZE": str(size),
            "MASTER_ADDR": node.address,
            "MASTER_PORT": str(node.port),
        }
        if "OMP_NUM_THREADS" not in os.environ:
            import torch  # the server has imported it already, with the threads of one process

            torch.set_num_threads(max(1, (os.cpu_count() or 1) // size))
        threading.Thread(target=_stop_with_launcher, args=(alive,), daemon=True).start()
        code = command(arguments)
    except KeyboardInterrupt:  # `command` has not answered it
        signals.say_once(f"interrupted by {signals.requested}")
        code = exit_codes.INTERRUPTED
    signals.ignore()
    sys.exit(code)


def _stop_with_launcher(alive: Connection) -> None:
    poll = select.poll()
    poll.register(alive, 0)
    poll.poll()  # until nobody is left who could write
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(LAST_WORDS_SECONDS)  # who waits for another rank cannot hear a signal
    os._exit(exit_codes.LOST_RANK)


class _Job:
    """The ranks, from the last one's start to the last one's end."""

    def __init__(self, ranks: Sequence[BaseProcess]) -> None:
        self._ranks = ranks
        self._asked: float | None = None
        self._deadline = float("inf")
        self._ended_here: set[int] = set()

    def forward(self, number: signal.Signals) -> None:
        """Pass a signal on, once; a later Ctrl-C too. A rank that was stopped (SIGSTOP) must hear it as well."""
        now = time.monotonic()
        if self._asked is not None:
            if number != signal.SIGINT or now - self._asked < signals.ONE_REQUEST_SECONDS:
                return
            self._deadline = min(self._deadline, now + LOST_SECONDS)
        self._asked = self._asked or now
        with suppress(ProcessLookupError, TypeError):  # it reports the ends of ranks, and may be stopped as well
            os.kill(forkserver._forkserver._forkserver_pid, signal.SIGCONT)  # type: ignore[attr-defined]
        for rank in self._ranks:
            _signal(rank, number)
            _signal(rank, signal.SIGCONT)

    def watch(self) -> int:
        """Wait for all; when one fails, for the others only a while."""
        ranks = self._ranks
        running = {rank.sentinel: number for number, rank in enumerate(ranks)}
        failed: list[int] = []
        while running:
            ended = wait(list(running), timeout=_POLL_SECONDS)
            is_late = time.monotonic() > self._deadline
            for number in set(running.values()) - self._ended_here:
                if is_late or (failed and signals.is_stopped(ranks[number].pid or 0)):
                    self._ended_here.add(number)
                    _signal(ranks[number], signal.SIGKILL)
            for sentinel in ended:
                number = running.pop(cast(int, sentinel))
                ranks[number].join()
                if ranks[number].exitcode:
                    failed.append(number)
                    self._deadline = min(self._deadline, time.monotonic() + self._patience_after(_code(ranks[number])))
        return self._result(failed)

    def _patience_after(self, code: int) -> float:
        if code not in (exit_codes.LOST_RANK, exit_codes.BUG, exit_codes.INTERRUPTED):
            return LAST_WORDS_SECONDS
        return LOST_SECONDS if self._asked is None else _ASKED_SECONDS

    def _result(self, failed: Sequence[int]) -> int:
        codes = {number: _code(self._ranks[number]) for number in failed}
        killed = [number for number in failed if (self._ranks[number].exitcode or 0) < 0]
        if others := [number for number in killed if number not in self._ended_here]:
            name = signal.Signals(-(self._ranks[others[0]].exitcode or 0)).name
            signals.say(f"rank {others[0]} was killed by {name}, so the others stopped. {_RESUME}")
        elif killed:
            signals.say(f"rank {', '.join(map(str, killed))} did not answer and was killed. {_RESUME}")
        left = [number for number, code in codes.items() if code == exit_codes.INTERRUPTED]
        if left and 0 not in left:  # rank 0 speaks for itself
            signals.say(f"rank {left[0]} was interrupted, so the others stopped")
        return next((code for code in codes.values() if code != exit_codes.LOST_RANK), max(codes.values(), default=0))

    def see_them_end(self, watched: Connection) -> None:
        """Without a fork server: the ranks save and stop by themselves (`end_with_parent`), but nothing reports it. All
        have ended when nobody is left who could read what we write."""
        poll = select.poll()
        poll.register(watched, 0)
        if not poll.poll(1000 * LAST_WORDS_SECONDS):
            for rank in self._ranks:
                with suppress(ProcessLookupError):
                    os.kill(rank.pid or 0, signal.SIGKILL)


def _code(rank: BaseProcess) -> int:
    """A rank that was killed, or of which nobody knows, counts as lost."""
    code = rank.exitcode or 0
    return exit_codes.LOST_RANK if code < 0 or code == _NO_SERVER else code


def _signal(rank: BaseProcess, number: signal.Signals) -> None:
    if rank.pid is not None and rank.is_alive():
        os.kill(rank.pid, number)


def _free_port() -> int:
    """Below the ports that systems give to outgoing connections: one of those could be gone before rank 0 listens."""
    while True:
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port := random.SystemRandom().randrange(16384, 32768)))
            return port
