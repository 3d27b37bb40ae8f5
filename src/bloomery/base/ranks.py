"""What code below `parallel` may know of other ranks: how many there are, and how to agree with them.

`ALONE` is a single process. `parallel/ranks.py` has the real thing.
"""

from __future__ import annotations

from typing import Any, Protocol


class Ranks(Protocol):
    """Every method is collective: all ranks call it, in the same order."""

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    def gather(self, value: Any) -> list[Any]:
        """What every rank gave, in the order of ranks, on every rank. Plain Python values."""
        ...

    def broadcast(self, value: Any) -> Any:
        """What rank 0 gave."""
        ...


class _Alone:
    rank = 0
    size = 1

    def gather(self, value: Any) -> list[Any]:
        return [value]

    def broadcast(self, value: Any) -> Any:
        return value


ALONE: Ranks = _Alone()
