"""How long this rank waits for others, without a change to what trains: for an experiment, not for every run."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
import torch.distributed._functional_collectives as functional

_POINT_TO_POINT = (12, 13, 14)
"""c10d's OpType, which torch gives Python as bare numbers: SEND, RECV, RECVANYSOURCE. A test holds it."""


@dataclass
class Waits:
    """Seconds in which the host did nothing but wait. Where a backend's wait only queues work on a device (NCCL), they
    say nothing."""

    collective: float = 0.0
    """All-reduce, all-gather, reduce-scatter and their kin."""
    pipeline: float = 0.0
    """Sends and receives between stages."""


@contextmanager
def waits_counted() -> Iterator[Waits]:
    """Count until the end of the block. Everything that torch.distributed waits for passes one of these two doors."""
    waits = Waits()
    work_wait, tensor_wait = dist.Work.wait, functional.wait_tensor

    def timed(wait: Callable[..., Any], kind_of: Callable[[Any], str]) -> Callable[..., Any]:
        def waiting(what: Any, *args: Any, **kwargs: Any) -> Any:
            kind, began = kind_of(what), time.perf_counter()
            try:
                return wait(what, *args, **kwargs)
            finally:
                setattr(waits, kind, getattr(waits, kind) + time.perf_counter() - began)

        return waiting

    cls: Any = dist.Work
    cls.wait = timed(work_wait, _kind)
    functional.wait_tensor = timed(tensor_wait, lambda tensor: "collective")
    try:
        yield waits
    finally:
        cls.wait, functional.wait_tensor = work_wait, tensor_wait


def _kind(work: Any) -> str:
    return "pipeline" if work._get_op_type() in _POINT_TO_POINT else "collective"
