"""Whatever takes long says what it is doing: a line on standard error after two seconds, and where its text tells how
far it is, another one every ten. The guard of signals.py asks for the lines, so there is no further thread, none where
nobody listens (in a notebook, in workers), and an exit waits for nothing."""

import contextlib
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

FIRST_SECONDS = 2.0
with contextlib.suppress(ValueError):
    FIRST_SECONDS = float(os.environ.get("BLOOMERY_SAY_AFTER", FIRST_SECONDS))
SECONDS_BETWEEN_LINES = 10.0
is_quiet = False
"""Whether the user wants warnings and errors only."""


@dataclass(eq=False)
class Doing:
    what: str | Callable[[], str]
    """May be replaced at any time."""
    due: float = field(default_factory=lambda: time.monotonic() + FIRST_SECONDS)
    said: str = ""


_now: list[Doing] = []
_imports = Doing("")


@contextlib.contextmanager
def doing(what: str | Callable[[], str]) -> Iterator[Doing]:
    """Within it, this is what the process does."""
    _now.append(work := Doing(what))
    try:
        yield work
    finally:
        _now.remove(work)


def lines_due() -> list[str]:
    """What is to be said now. Called by the guard again and again."""
    lines, now = [], time.monotonic()
    _imports.what = _imported()
    if not _imports.what:
        _imports.due, _imports.said = now + FIRST_SECONDS, ""
    for work in (*_now, _imports):
        if now < work.due or is_quiet:
            continue
        text = work.what if isinstance(work.what, str) else work.what()
        if text != work.said and not (work is _imports and work.said):
            lines.append(text)
        work.due, work.said = now + SECONDS_BETWEEN_LINES, text
    return lines


def _imported() -> str:
    """What the main thread is importing, if it is."""
    frame, names = sys._current_frames().get(threading.main_thread().ident or 0), []
    while frame is not None:
        if frame.f_code.co_name == "_find_and_load" and frame.f_code.co_filename.startswith("<frozen importlib"):
            names.append(str(frame.f_locals.get("name", "")).partition(".")[0])
        frame = frame.f_back
    others = [name for name in names if name != "bloomery"]
    return f"loading {others[-1] if others else names[0]}" if names else ""
