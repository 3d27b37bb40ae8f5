"""All the ranks of a run: joining them, agreeing with them, and naming the one that was lost."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore

from bloomery.base.errors import LostRankError, Problem
from bloomery.parallel.environment import Started

_TIMEOUT = timedelta(minutes=10)
"""How long a rank waits for another in a collective. A rank that dies is noticed at once, by its closed connection."""
_ROLL_CALL_SECONDS = 3.0
_COMMUNICATION_ERRORS = (dist.DistBackendError, dist.DistNetworkError, dist.DistStoreError)


class DistributedRanks:
    """The real `Ranks` (base/ranks.py), over the host network: nothing here touches a device."""

    def __init__(self) -> None:
        self.rank = dist.get_rank()
        self.size = dist.get_world_size()

    def gather(self, value: Any) -> list[Any]:
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value)
        return values

    def broadcast(self, value: Any) -> Any:
        values = [value]
        dist.broadcast_object_list(values, src=0)
        return values[0]

    def sum(self, values: Sequence[float]) -> list[float]:
        total = torch.tensor(values, dtype=torch.float64)
        dist.all_reduce(total)
        return total.tolist()


@contextmanager
def joined(started: Started, device: torch.device) -> Iterator[DistributedRanks]:
    """Be one of the ranks until the end of the block.

    A collective that breaks becomes a LostRankError that names who is missing. The group is left behind then: taking
    it apart could wait for a rank that will not answer.
    """
    backend = (
        "gloo" if device.type == "cpu" else f"cpu:gloo,{device.type}:{dist.get_default_backend_for_device(device)}"
    )
    os.environ.setdefault("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")  # restarted workers would read stale addresses
    is_host = started.rank == 0
    store = TCPStore(started.address, started.port, started.size, is_host, timeout=_TIMEOUT, multi_tenant=True)
    dist.init_process_group(backend, store=store, rank=started.rank, world_size=started.size, timeout=_TIMEOUT)
    try:
        yield DistributedRanks()
    except (RuntimeError, *_COMMUNICATION_ERRORS) as error:
        if not _is_communication(error):
            raise
        raise LostRankError(_problem_of_lost(error, store, started)) from error
    dist.destroy_process_group()


def _is_communication(error: Exception) -> bool:
    """Gloo reports a closed connection as a bare RuntimeError."""
    words = ("connection", "gloo", "timed out", "socket", "nccl")
    return isinstance(error, _COMMUNICATION_ERRORS) or any(word in str(error).lower() for word in words)


def _problem_of_lost(error: Exception, store: TCPStore, started: Started) -> Problem:
    """Who does not answer a roll call within a few seconds is the lost one."""
    missing: list[int] | None = None
    try:
        store.set(f"bloomery/here/{started.rank}", "1")
        deadline = time.monotonic() + _ROLL_CALL_SECONDS
        keys = {rank: f"bloomery/here/{rank}" for rank in range(started.size)}
        while time.monotonic() < deadline and not all(store.check([key]) for key in keys.values()):
            time.sleep(0.1)
        missing = [rank for rank, key in keys.items() if not store.check([key])]
    except Exception:  # the store lives in rank 0: it is gone with it
        missing = [0]
    who = f"rank {', '.join(map(str, missing))}" if missing else "a rank"
    reason = str(error).strip().splitlines()[0][:200]
    remedy = "look at the log of that rank; start again to go on from the newest checkpoint"
    return Problem(f"rank {started.rank} lost {who}: {reason}", "every rank must live for the others to go on", remedy)
