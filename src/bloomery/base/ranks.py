"""What code below `parallel` may know of other ranks: how many there are, how a launcher (torchrun, Slurm) numbered
them, how to agree with them, and what a rank holds of a tensor.

`ALONE` is a single process. `parallel/ranks.py` has the real thing.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar, cast

from bloomery.base.errors import BloomeryError, LostRankError
from bloomery.base.signals import PULSE
from bloomery.base.stacks import stacks

if TYPE_CHECKING:
    from torch import Tensor

T = TypeVar("T")


class Ranks:
    """All the ranks of a training, as one of them sees them; this one is alone. What is collective, all ranks call in
    the same order."""

    rank = 0
    size = 1

    def gather(self, value: Any) -> list[Any]:
        """What every rank gave, in the order of ranks, on every rank. Plain Python values. Collective."""
        PULSE.mark(waiting=False)
        return [value]

    def broadcast(self, value: Any, source: int = 0) -> Any:
        """What that rank gave. Collective."""
        return value

    def sum(self, values: Sequence[float]) -> list[float]:
        """The sum over all ranks of each number. Cheap enough for every step. Collective."""
        PULSE.mark(waiting=False)
        return list(values)

    def table(self, row: Sequence[float]) -> list[list[float]]:
        """The rows of all ranks, of one length. As cheap as `sum`. Collective."""
        size = len(row)
        padded = [0.0] * (size * self.size)
        padded[size * self.rank : size * (self.rank + 1)] = row
        total = self.sum(padded)
        return [total[size * rank : size * (rank + 1)] for rank in range(self.size)]

    def store_set(self, key: str, word: Any) -> None:
        """Leave a word for all ranks, without storage; from any thread. Lost if nobody can hear."""

    def store_take(self, key: str) -> Any:
        """The word that a rank has left under this key, and nothing after that; None if there is none."""
        return None

    def waits(self) -> str:
        """Who waits for whom, as a sentence."""
        return ""

    def silent_ranks(self) -> list[int]:
        """Those that no longer report: stopped, or on a host that is gone."""
        return []

    def stacks(self) -> dict[int, str]:
        """Those of all ranks that answer within seconds; from any thread."""
        return {0: stacks()}

    def report_hang(self, report: Callable[[str, Mapping[int, str]], None]) -> None:
        """Call this, with the stacks of the ranks, when they wait for each other for too long; then the job ends."""

    def lost(self, error: Exception) -> LostRankError | None:
        """Whom we lost, if that is what the error means."""
        return None


ALONE = Ranks()


@contextmanager
def agreed(ranks: Ranks) -> Iterator[None]:
    """A mistake of the user's that any rank meets within it is raised on all of them at its end."""
    error: BloomeryError | None = None
    try:
        yield
    except BloomeryError as found:
        error = found
    errors = [each for each in ranks.gather(error) if each is not None]
    if errors:
        problems = list(dict.fromkeys(problem for each in errors for problem in each.problems))
        raise type(errors[0])(problems).reported_once(ranks.rank)


def first_rank_does(ranks: Ranks, function: Callable[[], T]) -> T:
    """What `function` returns on rank 0, on every rank. A mistake of the user's is raised on every rank."""
    answer: T | None = None
    with agreed(ranks):
        if ranks.rank == 0:
            answer = function()
    return cast(T, ranks.broadcast(answer))


@dataclass(frozen=True)
class Piece:
    """The box of a logical tensor that one rank holds: the one description of how tensors lie on a machine. Initial
    weights, gradients, norms and checkpoints speak of pieces, so none of them needs to know why a tensor was cut."""

    tensor: Tensor
    """The very memory of the rank; its shape is the size of the box. A rank that holds nothing has an empty one."""
    shape: tuple[int, ...]
    """Of the whole tensor."""
    offset: tuple[int, ...]
    """Where the box begins in the whole."""
    owned: bool = True
    """Of all the ranks that hold this box, exactly one owns it: it alone writes it and counts it in a norm."""

    @classmethod
    def whole(cls, tensor: Tensor) -> Piece:
        """A tensor that has not been cut."""
        return cls(tensor, tuple(tensor.shape), (0,) * tensor.ndim)

    def with_tensor(self, tensor: Tensor) -> Piece:
        """The same box of another tensor: the gradient or a moment of a weight."""
        return Piece(tensor, self.shape, self.offset, self.owned)


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


def started_as(environment: Mapping[str, str] = os.environ, *, ranks_per_node: int = 0) -> Started | None:
    """The rank that a launcher gave this process; None when it was started alone. `ranks_per_node`: what was asked for,
    where the launcher does not say it.

    torchrun's names come first, so that a user's own MASTER_ADDR and MASTER_PORT win. Slurm counts only inside `srun`:
    a batch script carries SLURM_PROCID too, but is one process, and so is a step of one task.
    """
    if "RANK" in environment and "WORLD_SIZE" in environment:
        size = int(environment["WORLD_SIZE"])
        return Started(
            rank=int(environment["RANK"]),
            size=size,
            local_rank=int(environment.get("LOCAL_RANK", environment["RANK"])),
            local_size=int(environment.get("LOCAL_WORLD_SIZE", 0)) or _ranks_per_node(environment, ranks_per_node),
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


def _ranks_per_node(environment: Mapping[str, str], asked: int) -> int:
    """AzureML numbers nodes and the ranks of each, but does not say how many ranks a node has."""
    rank, size, node = int(environment["RANK"]), int(environment["WORLD_SIZE"]), int(environment.get("NODE_RANK", 0))
    if node > 0:
        return (rank - int(environment["LOCAL_RANK"])) // node
    nodes = int(environment.get("AZUREML_NODE_COUNT", 0))
    found = size // nodes if nodes else asked if "NODE_RANK" in environment else size
    return found if found and size % found == 0 else size


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
