"""Whatever takes long says what it is doing: a line on standard error after two seconds, another one every ten as it
changes; on a terminal a bar, where it is known how much there is to do. The guard of signals.py asks for both, so there
is no further thread, none where nobody listens (in a notebook, in workers), and an exit waits for nothing."""

import contextlib
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import TypeVar

FIRST_SECONDS = 2.0
with contextlib.suppress(ValueError):
    FIRST_SECONDS = float(os.environ.get("BLOOMERY_SAY_AFTER", FIRST_SECONDS))
SECONDS_BETWEEN_LINES = 10.0
is_quiet = False
"""Whether the user wants warnings and errors only."""
_BAR = 20
T = TypeVar("T")


@dataclass(eq=False)
class Doing:
    what: str
    share: float | None = None
    """How much of it is done, from 0 to 1, where that is known. Both may be replaced at any time."""
    due: float = field(default_factory=lambda: time.monotonic() + FIRST_SECONDS)
    said: str = ""

    def over(self, items: Iterable[T], total: float, size: Callable[[T], float] = lambda _: 1.0) -> Iterator[T]:
        """The items, each counted when it is done; `total` is that of all."""
        self.share = self.share or 0.0
        for item in items:
            yield item
            self.share += size(item) / max(total, 1.0)

    def text(self) -> str:
        return self.what if self.share is None else f"{self.what}: {self.share:.0%}"

    def bar(self) -> str:
        filled = "#" * int(_BAR * min(1.0, self.share or 0))
        return f"{self.what[: 64 - _BAR]} [{filled:.<{_BAR}}] {self.share:4.0%}"


_now: list[Doing] = []
_imports = Doing("")
_terminal = threading.RLock()
_is_drawn = False


@contextlib.contextmanager
def doing(what: str) -> Iterator[Doing]:
    """Within it, this is what the process does."""
    _now.append(work := Doing(what))
    try:
        yield work
    finally:
        _now.remove(work)
        erase()


def erase() -> None:
    """Before anything else is written to the terminal: the bar, if there is one."""
    global _is_drawn
    with _terminal, contextlib.suppress(OSError):
        if _is_drawn:
            os.write(2, b"\r\x1b[K")
        _is_drawn = False


def draw() -> None:
    """The bar of what the process does now, where standard error is a terminal. Called by the guard again and again."""
    global _is_drawn
    with _terminal, contextlib.suppress(OSError):
        work = next((each for each in reversed(_now) if each.share is not None and each.due <= time.monotonic()), None)
        if work and _has_bar(work):
            os.write(2, f"\r\x1b[Kbloomery: {work.bar()}".encode())
            _is_drawn = True


def _has_bar(work: Doing) -> bool:
    return work.share is not None and not is_quiet and os.environ.get("RANK", "0") == "0" and os.isatty(2)


def lines_due() -> list[str]:
    """What is to be said now. Called by the guard again and again."""
    lines, now = [], time.monotonic()
    before, _imports.what = _imports.what, _imported()
    if not (before and _imports.what):  # from its first sight on: the guard may have waited for seconds
        _imports.due, _imports.said = now + FIRST_SECONDS, ""
    for work in (*_now, _imports):
        if now < work.due or is_quiet or _has_bar(work):
            continue
        text = work.text()
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
