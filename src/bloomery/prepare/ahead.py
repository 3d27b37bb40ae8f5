"""Blocks made ahead in a thread: one worker unpacks a file while it encodes what it has unpacked."""

from __future__ import annotations

import contextlib
import os
import threading
from collections import deque
from collections.abc import Collection, Iterator

_AHEAD_BYTES = 8 << 20


def made_ahead(blocks: Iterator[bytes], cpus: Collection[int]) -> Iterator[bytes]:
    """The same blocks, at most `_AHEAD_BYTES` and one of them early, by a thread that may use `cpus`. An error comes
    where its block would have come; when the reader leaves, the thread ends."""
    waiting: deque[bytes | BaseException | None] = deque()
    changed = threading.Condition()
    held, left = 0, False

    def put(item: bytes | BaseException | None, size: int = 0) -> bool:
        nonlocal held
        with changed:
            changed.wait_for(lambda: held < _AHEAD_BYTES or left)
            waiting.append(item)
            held += size
            changed.notify_all()
            return not left

    def work() -> None:
        with contextlib.suppress(OSError, AttributeError):  # of this thread alone: its process is bound to one
            os.sched_setaffinity(0, cpus)
        try:
            for block in blocks:
                if not put(block, len(block)):
                    return
            put(None)
        except BaseException as error:
            put(error)

    thread = threading.Thread(target=work, name="bloomery-unpack", daemon=True)
    thread.start()
    try:
        while True:
            with changed:
                changed.wait_for(lambda: waiting)
                item = waiting.popleft()
                held -= len(item) if isinstance(item, bytes) else 0
                changed.notify_all()
            if item is None:
                return
            if isinstance(item, BaseException):
                raise item
            yield item
    finally:
        with changed:
            left = True
            changed.notify_all()
        thread.join()
