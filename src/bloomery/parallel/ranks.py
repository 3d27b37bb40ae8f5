"""All the ranks of a run: joining them, agreeing with them, and naming the one that was lost."""

from __future__ import annotations

import contextlib
import json
import os
import re
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, cast

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

from bloomery.base.errors import LostRankError, Problem
from bloomery.base.pulse import PULSE
from bloomery.parallel.environment import Started
from bloomery.parallel.watch import Watch

_TIMEOUT = timedelta(minutes=10)
"""How long a rank waits for another in a collective. A rank that dies is noticed at once, by its closed connection."""
_ROLL_CALL_SECONDS = 2.0
_COMMUNICATION_ERRORS = (dist.DistBackendError, dist.DistNetworkError, dist.DistStoreError)
_COMMUNICATION_WORDS = ("connection", "gloo", "timed out", "socket", "nccl")


class DistributedRanks:
    """The real `Ranks` (base/ranks.py), over the host network: nothing here touches a device."""

    def __init__(self) -> None:
        self.rank = dist.get_rank()
        self.size = dist.get_world_size()
        self._store = cast(Any, _get_default_store())
        self._board = self._store.clone()  # a connection of its own: a wait on the other one would hold it up
        self.watch = Watch(self._store.clone(), self.rank, self.size)

    def gather(self, value: Any) -> list[Any]:
        values: list[Any] = [None] * self.size
        with _agreeing():
            dist.all_gather_object(values, value)
        return values

    def broadcast(self, value: Any, source: int = 0) -> Any:
        values = [value]
        with _agreeing():
            dist.broadcast_object_list(values, src=source)
        return values[0]

    def sum(self, values: Sequence[float]) -> list[float]:
        total = torch.tensor(values, dtype=torch.float64)
        with _agreeing():
            dist.all_reduce(total)
        return total.tolist()

    def tell(self, key: str, word: Any) -> None:
        with contextlib.suppress(*_COMMUNICATION_ERRORS):
            self._board.set(f"bloomery/{key}", json.dumps(word))

    def told(self, key: str) -> Any:
        with contextlib.suppress(*_COMMUNICATION_ERRORS):
            if self._board.check([f"bloomery/{key}"]):
                return json.loads(self._board.get(f"bloomery/{key}"))
        return None

    def waits(self) -> str:
        return self.watch.waits()

    def silent_ranks(self) -> list[int]:
        return self.watch.silent_ranks()

    def report_hang(self, report: Callable[[str], None]) -> None:
        self.watch.report = report

    def lost(self, error: Exception) -> LostRankError | None:
        """If the error is a broken collective: who is missing. Everybody who is left answers a roll call."""
        if not _is_communication(error):
            return None
        if self.watch.hangs:  # the others leave for that, and one of them says so
            hung = LostRankError(Problem(self.waits()))
            hung.told_by_rank_0 = True
            return hung
        answers = self._roll_call()
        missing = [str(rank) for rank, answer in enumerate(answers) if not answer]
        what = f"rank {', '.join(missing) or '?'} of {self.size} is lost"
        if answers and not missing:
            what = f"all {self.size} ranks are alive, but they waited for different things or one was too slow"
        if not answers:
            what = f"rank 0 of {self.size} is gone: it was lost, or it left because another rank was"
        rule = f"rank {self.rank} cannot go on alone ({_short(error)})"
        remedy = "look at what that rank said last; start again to go on from the newest checkpoint"
        lost = LostRankError(Problem(what, rule, remedy))
        lost.told_by_rank_0 = True in answers and self.rank != answers.index(True)
        return lost

    def _roll_call(self) -> list[bool]:
        """Who answers, by rank; nothing when the store that answers go to is gone."""
        keys = [f"bloomery/here/{rank}" for rank in range(self.size)]
        try:
            self._store.set(keys[self.rank], "1")
            with contextlib.suppress(Exception):
                dist.destroy_process_group()  # its closed connections wake those who still wait for us
            # The store may live in rank 0, which therefore stays a little longer.
            deadline = time.monotonic() + _ROLL_CALL_SECONDS + (self.rank == 0)
            while time.monotonic() < deadline and not self._store.check(keys):
                time.sleep(0.05)
            return [self._store.check([key]) for key in keys]
        except Exception:
            return []


@contextmanager
def _agreeing() -> Iterator[None]:
    PULSE.mark(waiting=True)
    yield
    PULSE.mark(waiting=False)


@contextmanager
def joined(started: Started, device: torch.device) -> Iterator[DistributedRanks]:
    """Be one of the ranks until the end of the block. A collective that breaks becomes a LostRankError."""
    backend = (
        "gloo" if device.type == "cpu" else f"cpu:gloo,{device.type}:{dist.get_default_backend_for_device(device)}"
    )
    os.environ |= {
        "RANK": str(started.rank),
        "WORLD_SIZE": str(started.size),
        "MASTER_ADDR": started.address,
        "MASTER_PORT": str(started.port),
    }
    try:
        dist.init_process_group(backend, timeout=_TIMEOUT)
    except RuntimeError as error:
        if not _is_communication(error):
            raise
        raise _not_joined(started, error) from error
    ranks = DistributedRanks()
    try:
        yield ranks
    except Exception as error:
        lost = ranks.lost(error)
        if lost is None:
            raise
        raise lost from error
    finally:
        ranks.watch.end()
    if dist.is_initialized():
        dist.destroy_process_group()


def _not_joined(started: Started, error: Exception) -> LostRankError:
    """Without a common store there is no roll call: rank 0 keeps it, so most likely that one is gone."""
    what = f"the {started.size} ranks could not join at {started.address}:{started.port} ({_short(error)})"
    rule = "rank 0 is gone or cannot be reached there, or another rank died before it had joined"
    lost = LostRankError(Problem(what, rule, "look at what the ranks said last, and start again"))
    lost.told_by_rank_0 = started.rank > 1  # nobody knows which of the first two is left
    return lost


def _is_communication(error: Exception) -> bool:
    """Gloo reports a closed connection as a bare RuntimeError."""
    if isinstance(error, LostRankError) or not isinstance(error, RuntimeError):
        return False
    return isinstance(error, _COMMUNICATION_ERRORS) or any(word in str(error).lower() for word in _COMMUNICATION_WORDS)


def _short(error: Exception) -> str:
    """`Connection closed by peer`, out of a line that begins with a C++ file and ends with advice."""
    line = re.sub(r"^\[[^\]]*\]\s*", "", str(error).strip().splitlines()[0])
    return line.split(". ")[0][:160]
