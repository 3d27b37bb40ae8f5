"""Blocks made ahead in a thread: the same ones, errors in their place, and no thread that stays."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator

import pytest

from bloomery.prepare import ahead
from bloomery.prepare.ahead import made_ahead

CPUS = os.sched_getaffinity(0)


def threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name == "bloomery-unpack"]


def test_the_blocks_are_the_same_and_the_thread_ends() -> None:
    blocks = [bytes([i]) * (i * 1000) for i in range(200)]
    assert list(made_ahead(iter(blocks), CPUS)) == blocks
    assert not threads()


def test_an_error_comes_after_the_blocks_before_it() -> None:
    def broken() -> Iterator[bytes]:
        yield b"good"
        raise EOFError("it ends inside a frame")

    found = made_ahead(broken(), CPUS)
    assert next(found) == b"good"
    with pytest.raises(EOFError, match="inside a frame"):
        next(found)
    assert not threads()


def test_a_reader_that_leaves_takes_the_thread_along_and_little_is_made_for_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(ahead, "_AHEAD_BYTES", 100)
    made = 0

    def endless() -> Iterator[bytes]:
        nonlocal made
        while True:
            made += 1
            yield bytes(60)

    found = made_ahead(endless(), CPUS)
    for _ in range(5):
        next(found)
    found.close()  # type: ignore[attr-defined]
    assert not threads()
    assert made <= 5 + 4  # two that fill the room, one that waits for it, one that saw the end
