"""How fast ranks reach each other, before a training depends on it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from statistics import median

import torch
import torch.distributed as dist

_BYTES = 2**26
_ROUNDS = 3
_SLOW = 0.5
"""Of the median."""


def received_bytes_per_second(device: torch.device) -> float:
    """In a ring: each rank sends to the next and receives from the one before. The best of some rounds. Collective."""
    rank, size = dist.get_rank(), dist.get_world_size()
    sent, received = (torch.zeros(_BYTES, dtype=torch.uint8, device=device) for _ in range(2))
    seconds = []
    for _ in range(_ROUNDS):
        began = time.monotonic()
        ring = [
            dist.P2POp(dist.isend, sent, (rank + 1) % size),
            dist.P2POp(dist.irecv, received, (rank - 1) % size),
        ]
        for work in dist.batch_isend_irecv(ring):
            work.wait()
        received[-1:].cpu()  # sync: with the device
        seconds.append(time.monotonic() - began)
    return _BYTES / min(seconds)


def slow_links(speeds: Sequence[float]) -> dict[int, float]:
    """Ranks whose faster link, to the one before or after, is well below the usual. `speeds`: what each received."""
    best = [max(speed, speeds[(rank + 1) % len(speeds)]) for rank, speed in enumerate(speeds)]
    return {rank: speed for rank, speed in enumerate(best) if speed < _SLOW * median(best)}
