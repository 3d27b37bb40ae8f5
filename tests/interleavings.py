"""Explore the interleavings of actors that run real code on a real folder, and their deaths.

Every actor is a thread; before each of its storage operations (Python's audit events) it decides whose turn it is, so a
schedule can be run again. By default an actor runs until it ends or waits. A schedule deviates from that: another actor
continues instead (a switch), or an actor dies, rank 0 with its whole start. All schedules with at most so many switches
and crashes are run, but no state is explored twice.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

_EVENTS = {"open", "os.rename", "os.mkdir", "os.remove", "os.rmdir", "os.listdir", "os.scandir", "os.symlink"}
_DIR_FD = {"os.rename": 3, "os.mkdir": 2, "os.remove": 1, "os.rmdir": 1}
here = threading.local()
Schedule = list[tuple[int, str, str]]
"""Deviations: at which turn, `switch` or `crash`, and whom: an actor such as A0, or a start such as A."""


class Died(BaseException):
    """Raised at every storage operation of an actor that is dead: nothing that it still tries has an effect."""


@dataclass
class Actor:
    name: str
    run: Run
    act: Callable[[], None]
    needs: Callable[[], object] = lambda: True
    """Whether it can begin."""
    state: str = "ready"
    """ready, waiting (until the folder changes), done or dead."""
    about_to: tuple[str, str, bool] = ("begin", "", False)
    """Event, path, whether it changes the folder."""
    seen: int = 0  # a hash of all that it did and saw
    turn: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))
    counts: Any = field(default_factory=itertools.count)

    def live(self) -> None:
        here.actor, here.busy = self, False
        with contextlib.suppress(Died):
            self.turn.acquire()
            try:
                if self.state != "dead":
                    self.act()
            except Exception as error:
                self.run.error = error
            self.run.pass_on(self, "done")

    def wake(self) -> None:
        self.turn.release()

    def sleep(self, _: float) -> None:
        """In the place of time.sleep: until somebody changes the folder, or nobody else can."""
        self.about_to = ("sleep", "", False)
        self.run.pass_on(self, "waiting")


class Run:
    """One run of a schedule, on a folder of its own."""

    def __init__(self, root: Path, **notes: Any) -> None:
        self.root, self.notes = root, notes
        """`notes`: what actors tell the judge."""
        self.actors: dict[str, Actor] = {}
        self.clock, self.turn, self.current, self.changed = 0.0, 0, "", False
        self.error: BaseException | None = None
        self.over = threading.Event()
        self.wake = self.over.set
        self.more: list[Schedule] = []
        """Schedules with one deviation more."""

    def follow(self, judge: Any, schedule: Schedule, states: dict[int, Any], limits: dict[str, int]) -> None:
        self.judge, self.schedule, self.states = judge, schedule, states
        self.planned = {turn: (kind, whom) for turn, kind, whom in schedule}
        self.left = {kind: most - sum(each[1] == kind for each in schedule) for kind, most in limits.items()}
        threads = [threading.Thread(target=each.live, daemon=True) for each in self.actors.values()]
        for thread in threads:
            thread.start()
        (self._next() or self).wake()
        assert self.over.wait(100), f"{self.current} hangs: {[each.about_to for each in self.actors.values()]}"
        for each, thread in zip(self.actors.values(), threads, strict=True):
            each.state = "dead"
            each.turn.release()
            thread.join()
        if self.error is not None:
            raise self.error

    def pass_on(self, me: Actor, state: str) -> None:
        """Decide who continues, and wait for the next turn if that is somebody else."""
        here.busy = True
        if me.state != "dead":
            me.state = state
            try:
                chosen = None if self.error else self._next()
            except BaseException as error:
                self.error, chosen = error, None
            if chosen is not me:
                (chosen or self).wake()
                if state != "done":
                    me.turn.acquire()
        event, path, changes = me.about_to
        me.seen = hash((me.seen, event, path, 0 if changes else _glance(path)))
        here.busy = False
        if me.state == "dead":
            raise Died

    def _next(self) -> Actor | None:
        """Whose operation comes now; None if all have ended, or if the rest was seen before."""
        if self.changed:
            self.judge(self, self.current)
            for each in self.actors.values():
                each.state = "ready" if each.state == "waiting" else each.state
        while able := self._able():
            kind, whom = self.planned.get(self.turn, ("", ""))
            self.turn += 1
            if kind == "crash":
                for name in self.actors:
                    self.actors[name].state = "dead" if whom in (name, name[0]) else self.actors[name].state
                continue
            forced = self.current not in able
            self.current = whom or (able[0] if forced else self.current)
            event, path, self.changed = self.actors[self.current].about_to
            if self.turn > 1 + max(self.planned, default=-1):
                if self._known():
                    return None
                self.more += [[*self.schedule, (self.turn - 1, *each)] for each in self._others(able, forced, path)]
            self.actors[self.current].state = "ready"
            return self.actors[self.current]
        return None

    def _able(self) -> list[str]:
        able = [name for name, each in self.actors.items() if each.state == "ready" and each.needs()]
        waiting = [name for name, each in self.actors.items() if each.state == "waiting"]
        self.clock += 1e6 * bool(waiting and not able)  # nobody can change anything: time passes
        return able or waiting

    def _known(self) -> bool:
        """Whether this state was met before with as many deviations left."""
        files = sorted((folder, tuple(sorted(names))) for folder, _, names in os.walk(self.root))
        texts = [_glance(f"{self.root}/{name}") for name in (".writer", "latest")]  # what is in others actors have seen
        actors = [(each.state, each.seen, each.about_to) for each in self.actors.values()]
        known = self.states.setdefault(hash((*files, *texts, *actors, self.current, self.clock)), [])
        budget = tuple(self.left.values())
        if any(all(a >= b for a, b in zip(had, budget, strict=True)) for had in known):
            return True
        known.append(budget)
        return False

    def _others(self, able: list[str], forced: bool, path: str) -> list[tuple[str, str]]:
        """What may happen instead. A switch comes where others may notice it: not within a draft or a checkpoint, whose
        files count together, and not to rank 2 where rank 1 has not begun either."""
        place, _, name = path.rpartition("/")
        private = place.endswith((".tmp", ".old")) or "/step-" in place or name.startswith((".tmp-", ".probe"))
        twins = {f"{each[0]}2" for each in able if each[1] == "1" and self.actors[each].about_to[0] == "begin"}
        found = [("crash", self.current.removesuffix("0"))] if self.left["crash"] and self.changed else []
        if self.left["switch"] and (forced or name.startswith("rank-") or not private):
            found += [("switch", each) for each in able if each not in (self.current, *twins)]
        return found


def explore(make: Callable[[], Run], judge: Callable[[Run, str], None], **limits: int) -> tuple[int, int]:
    """How many states, and schedules of at most so many deviations of each kind. Raises what the judge raises after an
    operation of an actor, with the schedule that leads there."""
    waiting: list[Schedule] = [[]]
    states: dict[int, list[tuple[int, ...]]] = {}
    for number in itertools.count(1):
        schedule, run = waiting.pop(), make()
        try:
            run.follow(judge, schedule, states, limits)
        except BaseException as error:
            error.add_note(f"schedule {number}: {schedule}")
            raise
        waiting += run.more
        if not waiting:
            break
    return len(states), number


def _glance(path: str) -> int:
    try:
        return hash(tuple(sorted(os.listdir(path)))) if os.path.isdir(path) else hash(Path(path).read_bytes())
    except OSError:
        return 0


def _hook(event: str, arguments: tuple[Any, ...]) -> None:
    actor: Actor | None = getattr(here, "actor", None)
    if actor is None or event not in _EVENTS or here.busy:
        return
    if actor.state == "dead":
        raise Died
    path, folder = arguments[int(event == "os.rename")], arguments[_DIR_FD[event]] if event in _DIR_FD else -1
    path = f"{os.readlink(f'/proc/self/fd/{folder}')}/{path}" if folder >= 0 else str(path)
    if path.startswith(str(actor.run.root)):
        writes = event == "open" and arguments[2] & (os.O_WRONLY | os.O_RDWR)
        actor.about_to = (event, path, bool(writes or event in _DIR_FD or event == "os.symlink"))
        actor.run.pass_on(actor, "ready")


sys.addaudithook(_hook)
