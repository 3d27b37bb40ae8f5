"""The watch over a hang: each rank notes once a second how far it has come, and who waits too long reads the notes.

Notes go through the store that the ranks have joined by, from threads: the main thread may be in a collective that
never ends. One thread speaks with the store, which may not answer either; the other one judges.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable
from typing import Any, NamedTuple

from bloomery.base import exit_codes, signals
from bloomery.base.pulse import PULSE

_EVERY_SECONDS = 1.0
_QUIET_SECONDS = 3.0
"""A rank whose note has not changed for so long is stopped, or its machine is gone."""
_LAST_WORDS_SECONDS = 2.0


class _Note(NamedTuple):
    number: int
    step: int
    beats: int
    waiting: bool
    limit: float


class Watch:
    """Of one rank, for as long as it is one."""

    def __init__(self, store: Any, rank: int, size: int) -> None:
        self.hangs = False
        self.report: Callable[[str], None] = lambda text: None
        """Called with what is said of a hang."""
        self._store, self._rank, self._size = store, rank, size
        self._keys = [f"bloomery/watch/{number}" for number in range(size)]
        self._notes: dict[int, _Note] = {}
        self._changed: dict[int, float] = {}
        self._ended = threading.Event()
        for work in (self._write_notes, self._judge):
            threading.Thread(target=work, name=f"bloomery{work.__name__}", daemon=True).start()

    def end(self) -> None:
        self._ended.set()

    def waits(self) -> str:
        """Who waits for whom."""
        behind, seconds = self._behind(), f"{PULSE.silent_seconds:.0f} s"
        if not behind:
            return f"All {self._size} ranks have waited {seconds} for each other, since step {PULSE.step}"
        step = self._notes[behind[0]].step if behind[0] in self._notes else PULSE.step
        whom = f"rank {', '.join(map(str, behind[:8]))}{' and more' if len(behind) > 8 else ''}"
        return f"rank {self._rank} has waited {seconds} for {whom}, which last reported step {step}"

    def silent_ranks(self) -> list[int]:
        """Those whose notes no longer change, or that are not heard soon after this rank has begun to read notes."""
        now, begun = time.monotonic(), PULSE.since + 2 * _EVERY_SECONDS
        heard = {rank: self._changed.get(rank, begun) for rank in range(self._size) if rank != self._rank}
        return [rank for rank, last in heard.items() if now - last > _QUIET_SECONDS]

    def _behind(self) -> list[int]:
        """Whom all wait for: ranks that are silent, or else those that have not come to what the others wait in."""
        if silent := self.silent_ranks():
            return [0] if 0 in silent else silent  # rank 0 keeps the store: without it nobody is heard
        notes = {**self._notes, self._rank: self._mine(0)}
        least = min((note.beats, note.waiting) for note in notes.values())
        slow = [rank for rank, note in notes.items() if (note.beats, note.waiting) == least]
        return slow if len(slow) < self._size else []

    def _mine(self, number: int) -> _Note:
        return _Note(number, PULSE.step, PULSE.beats, PULSE.waiting, PULSE.limit)

    def _write_notes(self) -> None:
        number = 0
        while not self._ended.wait(_EVERY_SECONDS):
            number += 1
            try:
                self._store.set(self._keys[self._rank], json.dumps(self._mine(number)))
                if PULSE.silent_seconds < _EVERY_SECONDS:
                    continue
                found = {rank: _Note(*json.loads(text)) for rank, text in enumerate(self._store.multi_get(self._keys))}
            except Exception:
                continue  # no store any more: the ranks are leaving
            for rank, note in found.items():
                if self._notes.get(rank) != note:
                    self._changed[rank] = time.monotonic()
            self._notes = found

    def _judge(self) -> None:
        while not self._ended.wait(_EVERY_SECONDS / 2):
            if PULSE.silent_seconds <= max(PULSE.limit, *(note.limit for note in self._notes.values()), 0.0):
                continue
            self.hangs, behind, text = True, self._behind(), f"{self.waits()}. Start again to resume"
            if self._rank == min(set(range(self._size)) - set(behind)):  # the first of those that wait speaks for all
                signals.say(text)
                reporting = threading.Thread(target=self.report, args=(text,), daemon=True)
                reporting.start()
                reporting.join(_LAST_WORDS_SECONDS)  # storage may hang as well
            else:
                time.sleep(_LAST_WORDS_SECONDS)
            if not self._ended.is_set():
                os._exit(exit_codes.LOST_RANK)
