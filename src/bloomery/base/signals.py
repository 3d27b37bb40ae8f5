"""Requests to stop: SIGTERM, SIGINT, SIGHUP and SIGUSR1 mean the same from the first import to the last line.

Outside of training they raise `Interrupted` in the main thread: one line, exit code 130. Who can do better takes them
over with `handled`: the loop saves first, the launcher passes them on. A thread, the guard, sees each of them even
while the main thread is in a call that does not return, and ends a process that does not answer. `PULSE` is how far the
main thread is, for those who must judge that.
"""

import contextlib
import faulthandler
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import FrameType, TracebackType
from typing import Any, NamedTuple, NoReturn

from bloomery.base import doing, exit_codes

STOPS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)
ANSWER_SECONDS = 1.2
"""How long the main thread may take to answer, where nothing is saved."""
ONE_REQUEST_SECONDS = 1.0
"""Signals within this time are one request: a wrapper passes on what the terminal has sent already. A Ctrl-C after it
insists: leave at once."""
_INSISTED_SECONDS = 0.5
_POLL_SECONDS = 0.1
_IDLE_SECONDS = 0.5
_PR_SET_PDEATHSIG = 1


class Interrupted(KeyboardInterrupt):
    """Somebody wants this process to stop, and it has nothing to save."""


class Request(NamedTuple):
    """As the guard sees it, in seconds of time.monotonic."""

    name: str
    since: float
    insisted: float | None = None
    """Since when there is a later Ctrl-C as well."""

    def is_overdue(self) -> bool:
        now = time.monotonic()
        insisted = self.insisted is not None and now - self.insisted > _INSISTED_SECONDS
        return insisted or now - self.since > ANSWER_SECONDS


Verdict = Callable[[Request], tuple[int, str] | None]
"""Asked again and again while a request is not answered: the exit code and the last words, when it is time."""


def _nothing_to_save(request: Request) -> tuple[int, str] | None:
    return (exit_codes.INTERRUPTED, f"interrupted by {request.name}") if request.is_overdue() else None


asked: str = ""
"""The signal that has raised Interrupted, whatever became of that: libraries swallow it, or raise something else."""
requested: str = ""
"""The newest signal, whoever has taken it over."""
_verdict: Verdict = _nothing_to_save
_guard: threading.Thread | None = None


def listen() -> None:
    """From now on, for the whole life of this process. Call it in the main thread."""
    global _guard
    if _guard is not None:
        return
    open_streams()
    faulthandler.enable(2)  # a library that corrupts memory is named by the stacks of all threads
    _install(_interrupt)
    sys.excepthook = _last_words
    read, write = os.pipe()
    os.set_blocking(write, False)
    signal.set_wakeup_fd(write, warn_on_full_buffer=False)
    _guard = threading.Thread(target=_watch, args=(read,), name="bloomery-guard", daemon=True)
    _guard.start()


def open_streams() -> None:
    """A standard stream that was closed is opened, to nowhere: else the next file would get its number, and what is
    said would be written into that file."""
    while (number := os.open(os.devnull, os.O_RDWR)) <= 2:
        pass
    os.close(number)
    sys.stderr = sys.stderr or open(2, "w")  # noqa: SIM115 - to the end


def ignore() -> None:
    """For a process that is at its end, and for workers, which end with their parent."""
    for number in STOPS:
        signal.signal(number, signal.SIG_IGN)
    signal.set_wakeup_fd(-1)  # the pipe is the parent's


def end_with_parent(number: signal.Signals) -> None:
    """Get this signal when the thread ends that started this process, however it does."""
    import ctypes

    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number)


def is_stopped(process: int) -> bool:
    """Whether a process of this machine is stopped, by SIGSTOP or a debugger."""
    try:
        with open(f"/proc/{process}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] in "Tt"
    except OSError:
        return False


def say_once(text: str) -> None:
    """What all ranks have to say: rank 0 does, if there are any."""
    if os.environ.get("RANK", "0") == "0":
        say(text)


def say(text: str) -> None:
    """To standard error, at any moment and from any thread."""
    with contextlib.suppress(OSError):  # nobody may be left to read it
        doing.erase()
        os.write(2, f"bloomery: {text}\n".encode())


@contextlib.contextmanager
def handled(handler: Callable[[signal.Signals], None], verdict: Verdict = lambda _: None) -> Iterator[None]:
    """Within it, `handler` answers in the main thread; `verdict` says when that takes too long."""
    global _verdict
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    if asked:
        raise Interrupted(asked)

    def take(number: int, frame: FrameType | None) -> None:
        global requested
        requested = signal.Signals(number).name
        handler(signal.Signals(number))

    before, verdict_before = _install(take), _verdict
    _verdict = verdict
    try:
        yield
    finally:
        _verdict = verdict_before
        for number, earlier in before.items():
            signal.signal(number, earlier)


def _install(handler: Callable[[int, FrameType | None], None]) -> dict[signal.Signals, Any]:
    kept = {signal.SIGHUP} if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN else set()  # nohup
    return {number: signal.signal(number, handler) for number in STOPS if number not in kept}


def _interrupt(number: int, frame: FrameType | None) -> None:
    global asked, requested
    if asked:
        return  # a second one would only disturb what the first has begun
    asked = requested = signal.Signals(number).name
    while frame is not None and not frame.f_code.co_filename.startswith("<frozen importlib"):
        frame = frame.f_back
    if frame is not None:  # a module is loading: C++ code that is not made for exceptions, and nothing to tidy up
        _leave()
    raise Interrupted(asked)


def _leave() -> NoReturn:
    say_once(f"interrupted by {requested}")
    os._exit(exit_codes.INTERRUPTED)


def _last_words(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Of a process that was interrupted where nobody catches it: between its first import and its last line."""
    if asked:
        _leave()
    sys.__excepthook__(kind, error, trace)


def _watch(pipe: int) -> None:
    pending: tuple[Request, Verdict] | None = None
    while True:
        for line in doing.lines_due():
            say_once(line)
        doing.draw()
        if select.select([pipe], [], [], _IDLE_SECONDS if pending is None else _POLL_SECONDS)[0]:
            number, now = os.read(pipe, 1)[0], time.monotonic()
            if number in STOPS and (pending is None or pending[1] is not _verdict):
                pending = Request(signal.Signals(number).name, now), _verdict
            elif pending and number == signal.SIGINT and now - pending[0].since > ONE_REQUEST_SECONDS:
                pending = pending[0]._replace(insisted=pending[0].insisted or now), pending[1]
        if pending and pending[1] is not _verdict:
            pending = None  # answered: training has ended, or begun
        elif pending and (end := pending[1](pending[0])):
            (say_once if end[0] == exit_codes.INTERRUPTED else say)(end[1])
            os._exit(end[0])


# ---------------------------------------------------------------- the pulse of the main thread

_STARTED = time.monotonic()
"""The command line imports this first, so that imports and set-up count towards a deadline."""


PATIENCE_STEPS = 10.0
"""How long the ranks of a run may wait for each other: so many times the median of the last steps,"""
PATIENCE_SECONDS = 60.0
"""but at least this."""
FIRST_SECONDS = 590.0
"""For what is done once and may compile or load: set-up, the first step, the first evaluation."""


@dataclass
class Pulse:
    step: int = 0
    """The last one that is done."""
    beats: int = 0
    """Agreements with other ranks that are behind us."""
    waiting: bool = False
    """Whether the main thread waits for other ranks to agree."""
    since: float = field(default_factory=time.monotonic)
    """When any of that changed last."""
    limit: float = FIRST_SECONDS
    """How long it may take to change again."""
    excused: bool = False
    """Whether `limit` is that of something that has a time limit of its own."""

    @property
    def is_learned(self) -> bool:
        """Whether `limit` is that of a step."""
        return not self.excused and self.limit != FIRST_SECONDS

    @property
    def silent_seconds(self) -> float:
        return time.monotonic() - self.since

    def mark(self, *, waiting: bool) -> None:
        """An agreement begins, or has come."""
        self.beats += not waiting
        self.waiting, self.since = waiting, time.monotonic()

    def learn(self, step_seconds: float) -> None:
        """From the median step; 0 before there is one."""
        self.limit = max(PATIENCE_SECONDS, PATIENCE_STEPS * step_seconds) if step_seconds else FIRST_SECONDS

    @contextlib.contextmanager
    def excuse(self, seconds: float) -> Iterator[None]:
        """Within it, the main thread does something else that may take so long."""
        before = self.limit, self.excused
        self.limit, self.excused, self.since = max(self.limit, seconds), True, time.monotonic()
        try:
            yield
        finally:
            (self.limit, self.excused), self.since = before, time.monotonic()


PULSE = Pulse()
"""Of this process."""


def job_seconds() -> float:
    """Wall-clock seconds since this process began its work."""
    return time.monotonic() - _STARTED
