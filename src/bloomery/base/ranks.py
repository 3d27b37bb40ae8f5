"""What code below `parallel` may know of other ranks: how many there are, and how to agree with them.

`ALONE` is a single process. `parallel/ranks.py` has the real thing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol, TypeVar, cast

from bloomery.base.errors import BloomeryError, LostRankError
from bloomery.base.pulse import PULSE

T = TypeVar("T")


class Ranks(Protocol):
    """Every method is collective: all ranks call it, in the same order."""

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    def gather(self, value: Any) -> list[Any]:
        """What every rank gave, in the order of ranks, on every rank. Plain Python values."""
        ...

    def broadcast(self, value: Any, source: int = 0) -> Any:
        """What that rank gave."""
        ...

    def sum(self, values: Sequence[float]) -> list[float]:
        """The sum over all ranks of each number. Cheap enough for every step."""
        ...

    def tell(self, key: str, word: Any) -> None:
        """Leave a word for all ranks, without storage. Not collective, and from any thread; lost if nobody can hear."""
        ...

    def told(self, key: str) -> Any:
        """The word that a rank has left under this key; None if there is none. Not collective."""
        ...

    def waits(self) -> str:
        """Who waits for whom, as a sentence; empty for a single rank. Not collective."""
        ...

    def silent_ranks(self) -> list[int]:
        """Those that no longer report: stopped, or on a host that is gone. Not collective."""
        ...

    def report_hang(self, report: Callable[[str], None]) -> None:
        """Call this when the ranks wait for each other for too long; then the job ends. Not collective."""
        ...

    def lost(self, error: Exception) -> LostRankError | None:
        """Whom we lost, if that is what the error means. Not collective."""
        ...


class _Alone:
    rank = 0
    size = 1

    def gather(self, value: Any) -> list[Any]:
        return [value]

    def broadcast(self, value: Any, source: int = 0) -> Any:
        return value

    def sum(self, values: Sequence[float]) -> list[float]:
        PULSE.mark(waiting=False)
        return list(values)

    def tell(self, key: str, word: Any) -> None: ...

    def told(self, key: str) -> Any:
        return None

    def waits(self) -> str:
        return ""

    def silent_ranks(self) -> list[int]:
        return []

    def report_hang(self, report: Callable[[str], None]) -> None: ...

    def lost(self, error: Exception) -> LostRankError | None:
        return None


ALONE: Ranks = _Alone()


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
        raise type(errors[0])(problems).told_once(ranks.rank)


def first_rank_does(ranks: Ranks, function: Callable[[], T]) -> T:
    """What `function` returns on rank 0, on every rank. A mistake of the user's is raised on every rank."""
    answer: T | None = None
    with agreed(ranks):
        if ranks.rank == 0:
            answer = function()
    return cast(T, ranks.broadcast(answer))
