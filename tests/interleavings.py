"""A checker of interleavings: actors that share a folder, each a thread that runs the real code.

An actor decides, before each of its storage operations (Python's audit events), whose turn it is, so that a schedule
can be run again. By default an actor runs until it ends or waits. A schedule deviates from that: another one continues
instead (a switch), or one dies, rank 0 with its whole start. No state is explored twice."""

from __future__ import annotations

import contextlib
import itertools
import os
import sys
import threading
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

CHANGES = {"os.rename": 3, "os.mkdir": 2, "os.remove": 1, "os.rmdir": 1, "os.symlink": 2}  # which argument is dir_fd
here = threading.local()
Schedule = list[tuple[int, str, str]]  # at which turn, `switch` or `crash`, and whom: an actor (A0) or a start (A)


class DiedError(BaseException):
    """Raised at every storage operation of a dead actor: nothing that it still tries has an effect."""


@dataclass
class Actor:
    name: str
    run: Run
    act: Any
    needs: Any = lambda: True  # whether it can begin
    state: str = "ready"  # or waiting (until the folder changes), done or dead
    about_to: tuple[str, str, bool] = ("begin", "", False)  # event, path, whether it changes the folder
    seen: int = 0  # a hash of all that it did and saw
    baton: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))
    counts: Any = field(default_factory=itertools.count)

    def live(self) -> None:
        here.actor, here.busy = self, False
        with contextlib.suppress(DiedError):
            self.baton.acquire()
            try:
                if self.state != "dead":
                    self.act()
            except Exception as error:
                self.run.error = error
            self.run.pass_on(self, "done")

    def sleep(self, _: float) -> None:  # until somebody changes the folder, or nobody else can
        self.about_to = ("sleep", "", False)
        self.run.pass_on(self, "waiting")


class Run:  # of one schedule, on a folder of its own; `notes`: what actors tell the judge
    def __init__(self, root: Path, **notes: Any) -> None:
        self.root, self.notes, self.actors = root, notes, dict[str, Actor]()
        self.clock, self.turn, self.current, self.changed = 0.0, 0, "", False
        self.error, self.baton = None, threading.Semaphore(0)
        self.on_disk: int | None = None  # a hash of the folder, until somebody changes it
        self.more = list[Schedule]()  # with one deviation more
        self.board = dict[str, Any]()  # what ranks tell each other

    def follow(self, judge: Any, schedule: Schedule, states: dict[int, Any], limits: dict[str, int]) -> None:
        self.judge, self.schedule, self.states = judge, schedule, states
        self.planned = {turn: (kind, whom) for turn, kind, whom in schedule}
        self.left = {kind: most - sum(each[1] == kind for each in schedule) for kind, most in limits.items()}
        threads = [threading.Thread(target=each.live, daemon=True) for each in self.actors.values()]
        for thread in threads:
            thread.start()
        (self._next() or self).baton.release()
        assert self.baton.acquire(timeout=100), f"{self.current} hangs: {self.actors[self.current].about_to}"
        for actor, thread in zip(self.actors.values(), threads, strict=True):
            actor.state = "dead"
            actor.baton.release()
            thread.join()
        if self.error is not None:
            raise AssertionError(f"{self.error!r} in schedule {schedule}") from self.error

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
                (chosen or self).baton.release()
                if state != "done":
                    me.baton.acquire()
        event, path, changes = me.about_to
        me.seen = hash((me.seen, event, path, 0 if changes else glance(path)))
        here.busy = False
        if me.state == "dead":
            raise DiedError

    def _next(self) -> Actor | None:
        """Whose operation comes now; None if all have ended, or if the rest was seen before."""
        if self.changed:
            self.on_disk = None
        since = max(self.planned, default=0)  # what came before was judged when this schedule was one deviation shorter
        if self.turn == since or (self.changed and self.turn > since):
            self.judge(self, self.current)
        if self.changed:
            for each in self.actors.values():
                each.state = "ready" if each.state == "waiting" else each.state
        while able := self._able():
            kind, whom = self.planned.get(self.turn, ("", ""))
            self.turn += 1
            if kind == "crash":
                for name, each in self.actors.items():
                    each.state = "dead" if whom in (name, name[0]) else each.state
                continue
            forced = self.current not in able
            own = [name for name in able if name[:1] == self.current[:1]]  # start
            self.current = whom or ((own or able)[0] if forced else self.current)
            _, path, self.changed = self.actors[self.current].about_to
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
        if self.on_disk is None:
            files = sorted((folder, tuple(sorted(names))) for folder, _, names in os.walk(self.root))
            texts = [glance(f"{self.root}/{name}") for name in (".writer", "latest")]  # actors have seen the others
            self.on_disk = hash((*files, *texts))
        actors = [(each.name, each.state, each.seen, each.about_to) for each in self.actors.values()]
        key, left = hash((self.on_disk, *actors, *self.board, self.current, self.clock)), [*self.left.values()]
        known = key in self.states and all(a >= b for a, b in zip(self.states[key], left, strict=True))
        self.states[key] = self.states[key] if known else left
        return known

    def _others(self, able: list[str], forced: bool, path: str) -> list[tuple[str, str]]:
        """Instead of this turn: no switch within a draft or a checkpoint, nor to rank 2 before rank 1 has begun."""
        place, _, name = path.rpartition("/")
        private = place.endswith((".tmp", ".old")) or "/step-" in place or name.startswith((".tmp-", ".probe"))
        twins = {f"{each[0]}2" for each in able if each[1] == "1" and self.actors[each].about_to[0] == "begin"}
        found = [("crash", self.current.removesuffix("0"))] if self.left["crash"] and self.changed else []
        if self.left["switch"] and (forced or not private):
            found += [("switch", each) for each in able if each not in (self.current, *twins)]
        return found


def glance(path: str) -> int:
    try:
        return hash(tuple(sorted(os.listdir(path)))) if os.path.isdir(path) else hash(Path(path).read_bytes())
    except OSError:
        return 0


def hook(event: str, arguments: tuple[Any, ...]) -> None:
    actor: Actor | None = getattr(here, "actor", None)
    if actor is None or here.busy or event not in ("open", "os.listdir", "os.scandir", *CHANGES):
        return
    path, fd = str(arguments[event in ("os.rename", "os.symlink")]), arguments[CHANGES.get(event, 0)]
    fd = fd if event in CHANGES else -1
    path = f"{os.readlink(f'/proc/self/fd/{fd}')}/{path}" if fd >= 0 else path
    if path.startswith(str(actor.run.root)):
        writes = event == "open" and arguments[2] & (os.O_WRONLY | os.O_RDWR)
        actor.about_to = (event, path, bool(writes or event in CHANGES))
        actor.run.pass_on(actor, "ready")


sys.addaudithook(hook)


def explore(scenario: Any, leads: str = "BA", **limits: int) -> int:
    """How many states there are with either start in the lead. Raises what the judge does, with the schedule."""
    states: dict[int, list[int]] = {}
    for lead in leads:
        waiting, schedules = list[Schedule]([[]]), 0
        while waiting:
            run, schedules = scenario.begin(lead), schedules + 1
            run.follow(scenario.judge, waiting.pop(), states, limits)
            waiting += run.more
        print(f"{len(states):,} states so far, {schedules:,} schedules of at most {limits} with {lead} in the lead")
    return len(states)
