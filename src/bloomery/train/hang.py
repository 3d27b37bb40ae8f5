"""What is written about a run that hangs, and the stacks of its ranks on demand: `control/stacks`, or `stacks-3` for
that of rank 3."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from bloomery.base import exit_codes, signals
from bloomery.base.ranks import Ranks
from bloomery.base.signals import PULSE
from bloomery.base.stacks import call, stacks
from bloomery.base.storage import append_line
from bloomery.monitor import names
from bloomery.monitor.record import strict_json
from bloomery.monitor.sinks import iso_time

_POLL_SECONDS = 1.0
_REQUEST = "stacks"


def write_hang(folder: Path, job: int, text: str, found: Mapping[int, str]) -> None:
    """Into the ledger, and the stacks beside it. Any rank may do it: rank 0 may be the one that hangs."""
    now = time.time()
    facts = {"kind": names.Event.HANG, "step": PULSE.step, "iso_time": iso_time(now), "time": now, "job": job}
    append_line(folder / names.EVENTS_FILE, strict_json({**facts, "text": text, "stacks": names.STACKS_FILE}))
    append_line(folder / names.TEXT_LOG_FILE, f"[{iso_time(now)}] {text}")
    _write_stacks(folder, text, found)


def _write_stacks(folder: Path, why: str, found: Mapping[int, str]) -> None:
    ranks = "".join(f"\nrank {rank}:\n{text}" for rank, text in sorted(found.items()))
    append_line(folder / names.STACKS_FILE, f"[{iso_time(time.time())}] {why}\n{ranks}")


@contextmanager
def watched(folder: Path, ranks: Ranks, write: Callable[[str, Mapping[int, str]], None]) -> Iterator[None]:
    """Within it, rank 0 answers requests for stacks; a rank that is alone has no other that notices that it hangs."""
    ended = threading.Event()

    def watch() -> None:
        seen = time.monotonic()
        while not ended.wait(_POLL_SECONDS):
            was_stopped, seen = time.monotonic() - seen > 2 * _POLL_SECONDS, time.monotonic()
            _answer(folder, ranks)
            if was_stopped:  # by SIGSTOP, or a suspended machine: nothing could happen meanwhile
                PULSE.since = seen
            elif ranks.size == 1 and PULSE.is_learned and PULSE.silent_seconds > PULSE.limit:
                text = f"nothing has happened for {PULSE.silent_seconds:.0f} s, since step {PULSE.step}: in {call()}"
                signals.say(f"{text}. Start again to resume")
                with suppress(Exception):  # storage may be what hangs or fails
                    write(text, {0: stacks()})
                os._exit(exit_codes.LOST_RANK)

    if ranks.rank == 0:
        threading.Thread(target=watch, name="bloomery-watch", daemon=True).start()
    try:
        yield
    finally:
        ended.set()


def _answer(folder: Path, ranks: Ranks) -> None:
    with suppress(OSError):
        for path in sorted((folder / "control").glob(f"{_REQUEST}*")):
            path.unlink()
            wanted = path.name.removeprefix(_REQUEST).removeprefix("-")
            found = {rank: text for rank, text in ranks.stacks().items() if wanted in ("", str(rank))}
            _write_stacks(folder, f"control/{path.name}", found)
            signals.say(f"the stacks of {len(found)} ranks are in {folder / names.STACKS_FILE}")
