"""The nodes of a run."""

import socket
from dataclasses import dataclass
from typing import Self

from bloomery.base.ranks import Ranks
from bloomery.monitor.meters import machine


@dataclass(frozen=True)
class Nodes:
    """Those of the run, as one of its ranks sees them."""

    own: int
    members: list[list[int]]
    """The ranks of each."""
    hosts: list[str]
    """By rank."""
    leads: bool
    """Whether it is the first rank of its node, which measures it."""

    @classmethod
    def of(cls, ranks: Ranks) -> Self:
        """Collective."""
        found = ranks.gather((machine(), socket.gethostname()))
        machines = [name for name, _ in found]
        members = [[rank for rank, name in enumerate(machines) if name == each] for each in dict.fromkeys(machines)]
        own = next(i for i, each in enumerate(members) if ranks.rank in each)
        return cls(own, members, [name for _, name in found], members[own][0] == ranks.rank)
