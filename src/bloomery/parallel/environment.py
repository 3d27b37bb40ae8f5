"""Who started this process and as which rank: torchrun's variables, Slurm's, or nobody's."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass

_SLURM_PORTS = range(15_000, 25_000)


@dataclass(frozen=True)
class Started:
    """This process as its launcher numbered it."""

    rank: int
    size: int
    local_rank: int
    local_size: int
    address: str
    port: int


def started_as(environment: Mapping[str, str] = os.environ) -> Started | None:
    """The rank that a launcher gave this process; None when it was started alone.

    torchrun's names come first, so that a user's own MASTER_ADDR and MASTER_PORT win. Slurm counts only inside `srun`:
    a batch script carries SLURM_PROCID too, but is one process, and so is a step of one task.
    """
    if "RANK" in environment and "WORLD_SIZE" in environment:
        size = int(environment["WORLD_SIZE"])
        return Started(
            rank=int(environment["RANK"]),
            size=size,
            local_rank=int(environment.get("LOCAL_RANK", environment["RANK"])),
            local_size=int(environment.get("LOCAL_WORLD_SIZE", size)),
            address=environment.get("MASTER_ADDR", "127.0.0.1"),
            port=int(environment.get("MASTER_PORT", "29500")),
        )
    if int(environment.get("SLURM_STEP_NUM_TASKS", "1")) > 1 and "SLURM_STEP_ID" in environment:
        job = int(environment.get("SLURM_JOB_ID", "0")) + 101 * int(environment["SLURM_STEP_ID"])
        nodes = environment.get("SLURM_STEP_NODELIST", "127.0.0.1")
        return Started(
            rank=int(environment["SLURM_PROCID"]),
            size=int(environment["SLURM_STEP_NUM_TASKS"]),
            local_rank=int(environment["SLURM_LOCALID"]),
            local_size=_tasks_here(environment),
            address=environment.get("MASTER_ADDR", first_host(nodes)),
            port=int(environment.get("MASTER_PORT", _SLURM_PORTS[job % len(_SLURM_PORTS)])),
        )
    return None


def first_host(nodes: str) -> str:
    """The first name of a Slurm node list: `gpu[017-020,031],login1` gives gpu017."""
    first = re.match(r"(?:[^,\[]|\[[^\]]*\])+", nodes)
    return re.sub(r"\[(\w+)[^\]]*\]", r"\1", first[0]) if first else "127.0.0.1"


def _tasks_here(environment: Mapping[str, str]) -> int:
    """SLURM_STEP_TASKS_PER_NODE is `4(x3),2`: tasks of each node in turn."""
    counts: list[int] = []
    for part in environment.get("SLURM_STEP_TASKS_PER_NODE", "1").split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part)
        assert match is not None, f"SLURM_STEP_TASKS_PER_NODE has {part!r}"
        counts += [int(match[1])] * int(match[2] or 1)
    return counts[int(environment.get("SLURM_NODEID", "0"))]
