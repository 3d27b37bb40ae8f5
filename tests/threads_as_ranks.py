"""Ranks that are threads of this process, for what needs many of them and no network."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

SECONDS = 60
"""A rank that waits longer for the others is a failed test."""


class ThreadRanks:
    """One rank; `together` makes them."""

    def __init__(
        self, rank: int, size: int, barrier: threading.Barrier, board: list[Any], words: dict[str, Any]
    ) -> None:
        self.rank = rank
        self.size = size
        self._barrier = barrier
        self._board = board
        self._words = words

    def gather(self, value: Any) -> list[Any]:
        self._board[self.rank] = value
        self._barrier.wait(SECONDS)
        values = list(self._board)
        self._barrier.wait(SECONDS)
        return values

    def broadcast(self, value: Any, source: int = 0) -> Any:
        return self.gather(value)[source]

    def store_set(self, key: str, word: Any) -> None:
        self._words[key] = word

    def store_take(self, key: str) -> Any:
        return self._words.pop(key, None)


def together(size: int, act: Callable[[ThreadRanks], Any]) -> list[Any]:
    """What `act` returned, or the exception it raised, on each of `size` ranks at once."""
    barrier, board, words = threading.Barrier(size), [None] * size, dict[str, Any]()

    def one(rank: int) -> Any:
        try:
            return act(ThreadRanks(rank, size, barrier, board, words))
        except Exception as error:
            return error

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(one, range(size)))
