"""Saving and taking over as a protocol: interleavings of two starts of two ranks, with deaths, over the real code.

Every rank is an actor: a thread that decides, before each of its storage operations (Python's audit events), whose turn
it is, so that a schedule can be run again. By default an actor runs until it ends or waits. A schedule deviates from
that: another one continues instead (a switch), or one dies, rank 0 with its whole start. No state is explored twice.
Start A has saved step 1 and saves step 2; start B chooses, takes over, tidies and saves the next step."""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import sys
import tempfile
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from bloomery.base.errors import BloomeryError
from bloomery.base.ranks import Piece
from bloomery.checkpoint import folder, retention, select
from bloomery.checkpoint import save as saving
from bloomery.checkpoint.load import load_pieces
from bloomery.config.recipe import KeepSection
from checkpoints import latest_checkpoint

DEPTH = int(os.environ.get("BLOOMERY_SIMULATION_DEPTH", "1"))
RANKS = 2 if DEPTH == 1 else 3
CHANGES = {"os.rename": 3, "os.mkdir": 2, "os.remove": 1, "os.rmdir": 1, "os.symlink": 2}  # which argument is dir_fd
here = threading.local()
commit, take_over, remove = saving.SaveJob.commit, folder.take_over, folder.remove
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
    rounds: tuple[int, int] = (0, 0)  # `seen` when it last woke up, and what it has done and seen since then
    slept: tuple[int, int] = (0, 0)  # the same when it fell asleep before: a round of looking that saw nothing new
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
        if self.slept[1] == self.rounds[1]:  # it looked again and saw the same: it stands where it stood
            self.seen = self.slept[0]
        self.slept, self.about_to = (self.seen, self.rounds[1]), ("sleep", "", False)
        self.run.pass_on(self, "waiting")
        self.rounds = (self.seen, 0)


class Run:  # of one schedule, on a folder of its own; `notes`: what actors tell the judge
    def __init__(self, root: Path, **notes: Any) -> None:
        self.root, self.notes, self.actors = root, notes, dict[str, Actor]()
        self.clock, self.turn, self.current, self.changed = 0.0, 0, "", False
        self.error, self.baton = None, threading.Semaphore(0)
        self.on_disk: int | None = None  # a hash of the folder, until somebody changes it
        self.more, self.board = (
            list[Schedule](),
            dict[str, Any](),
        )  # with one deviation more; what ranks tell each other

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
        saw = hash((event, path, 0 if changes else glance(path)))
        me.seen, me.rounds = hash((me.seen, saw)), (me.rounds[0], hash((me.rounds[1], saw)))
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
        if self.left["switch"] and (forced or name.startswith("rank-") or not private):
            others = [each for each in able if each not in (self.current, *twins)]
            found += [("switch", each) for each in others if forced or self._meet(each)]
        return found

    def _meet(self, other: str) -> bool:
        """Whether this turn's operation and any of the other actor's depend on their order. Of two that do not, one
        order is enough: the switch comes before the next operation."""
        event, path, changes = self.actors[self.current].about_to
        name, in_staging = path.rpartition("/")[2], "/.writer-" in path or "/.left-" in path
        if self.current[0] == other[0]:  # ranks of one start meet in their draft, where rank 0 reads reports of others
            ranks = {self.current[1], other[1]} - {"0"}
            is_met = not name.startswith("rank-") or name == f"rank-0000{min(ranks)}.json"
            return in_staging and len(ranks) == 1 and is_met
        if self.current[0] == "B" and in_staging:  # A never enters it; but what is renamed to there was in the root
            return event == "os.rename" and not name.startswith("rank-")
        return event != "begin" and (self.current[0] == "A" or changes or name != ".writer")  # A never writes that


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


def save(run: Run, start: str, rank: int, writer: folder.Writer, step: int) -> None:
    def promise(folder: Path) -> list[str]:
        run.notes["promised"] = max(step, run.notes["promised"])
        return retention.apply_retention(run.root, KeepSection(last=1), writer=writer)

    values = torch.full((2,), float(step * 1000 + ord(start)))
    ranks: Any = SimpleNamespace(
        rank=rank, size=RANKS, gather=lambda value: [value], broadcast=lambda _: f"{start}{step}"
    )
    ranks.store_get, ranks.store_set = run.board.get, run.board.__setitem__
    one = saving.Saver(
        {"w": Piece(values, (2 * RANKS,), (2 * rank,))}, device=values.device, ranks=ranks, timeout_seconds=100.0
    )
    one.stage()
    plan: dict[str, Any] = {"writer": writer, "retention": SimpleNamespace(after_save=promise)}
    one.persist(saving.SavePlan(root=run.root, step=step, state={}, recipe_yaml="", **plan))
    one._flight.run(one._held, one._snapshot)  # in the place of its thread


def take_over_and_save(run: Run) -> None:
    """Rank 0 of start B, in the order of train/setup.py."""
    try:
        choice = select.newest_good([run.root])
        step = folder.step_of(choice.checkpoint.folder) if choice.checkpoint else 0
        writer = folder.take_over(run.root)
        run.notes["fenced"] = "A"
        select.refuse_later([run.root], step=step, damaged=choice.damaged)
        folder.tidy(run.root, step=step, damaged=choice.damaged)
    except BloomeryError:
        return  # it does not start
    run.notes["save"] = (writer, step + 1)
    save(run, "B", 0, writer, step + 1)


class Scenario:
    def __init__(self, place: Path) -> None:
        self.place, self.chosen, self.writer = place, dict[Any, int](), folder.take_over(place / "template")
        for rank in reversed(range(RANKS)):
            save(Run(place / "template", promised=0), "A", rank, self.writer, 1)

    def begin(self, lead: str) -> Run:
        root = self.place / "run"
        shutil.rmtree(root, ignore_errors=True)
        shutil.copytree(self.place / "template", root, copy_function=os.link)
        run = Run(root, promised=1, fenced="", save=None)
        writer, ready = replace(self.writer, root=root), lambda: run.notes["save"]
        actors = [Actor(f"A{rank}", run, partial(save, run, "A", rank, writer, 2)) for rank in range(RANKS)]
        actors += [Actor("B0", run, partial(take_over_and_save, run))]
        actors += [
            Actor(f"B{rank}", run, lambda rank=rank: save(run, "B", rank, *ready()), ready) for rank in range(1, RANKS)
        ]
        run.actors = {each.name: each for each in sorted(actors, key=lambda each: each.name[0] != lead)}
        return run

    def judge(self, run: Run, actor: str) -> None:
        whole = {path.name: (path / "manifest.json").stat().st_ino for path in folder.complete_checkpoints(run.root)}
        assert actor[:1] != (run.notes["fenced"] or None) or whole == run.notes.get("whole", whole), (
            f"{actor} is fenced and changed {whole}"
        )
        run.notes["whole"], latest, key = whole, folder.read_latest(run.root), tuple(whole.items())
        assert latest in whole, f"latest is {latest}, there are {sorted(whole)}"
        if key not in self.chosen:
            good, found = select.newest_good([run.root]).checkpoint, torch.zeros(2 * RANKS)
            assert good is not None, f"none is chosen of {sorted(whole)}"
            load_pieces(good, {"w": Piece.whole(found)})
            one = [{1000.0 * good.manifest["step"] + ord(start)} for start in "AB"]  # save's values
            assert set(found.tolist()) in one, f"{good.folder.name} is not of one save: {found.tolist()}"
            self.chosen[key] = int(found[0]) // 1000
        assert self.chosen[key] >= run.notes["promised"], f"step {run.notes['promised']} is lost: {sorted(whole)}"


@pytest.fixture
def scenario(monkeypatch: pytest.MonkeyPatch) -> Iterator[Scenario]:
    """With clocks and chance that are the same in each run, and no threads but actors. In memory: nothing waits for a
    disk, and all is still done through the file system."""
    memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with tempfile.TemporaryDirectory(dir=memory) as place:
        yield deterministic(monkeypatch, Path(place))


def deterministic(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Scenario:
    outside = Actor("outside", Run(tmp_path), lambda: None)
    actor = lambda: getattr(here, "actor", outside)  # noqa: E731
    clock = SimpleNamespace(monotonic=lambda: actor().run.clock, sleep=lambda seconds: actor().sleep(seconds))
    monkeypatch.setattr("secrets.token_hex", lambda _: f"{actor().name}{next(actor().counts)}")
    monkeypatch.setattr(saving, "time", clock)
    monkeypatch.setattr(saving, "threading", SimpleNamespace(Thread=partial(SimpleNamespace, start=lambda: None)))
    return Scenario(tmp_path)


def explore(scenario: Scenario, leads: str = "BA", **limits: int) -> int:
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


def test_nothing_promised_is_lost_and_nothing_partial_is_chosen(scenario: Scenario) -> None:
    assert explore(scenario, switch=DEPTH, crash=0) + explore(scenario, switch=DEPTH - 1, crash=1) > 5_000


def only_a_look(root: Path) -> folder.Writer:
    writer = take_over(root)  # but leaves an older start its staging dir: that one looks, and then acts
    for left in root.glob(f"{folder.STALE}*"):
        left.rename(root / f"{folder.STAGING}{left.name.split('-')[1]}")
    return writer


PLANTED: dict[str, tuple[Any, str, Any]] = {
    "named too early": (saving.SaveJob, "commit", lambda job: job.wait_for_parts() and job.publish()),
    "deleted too early": (
        saving.SaveJob,
        "commit",
        lambda job: remove(latest_checkpoint(job.plan.root), job.staging_dir) or commit(job),
    ),
    "fenced by a look": (folder, "take_over", only_a_look),
    "no second look": (select, "refuse_later", lambda *_, **__: None),
}


@pytest.mark.parametrize("defect", PLANTED)
def test_a_planted_defect_is_found(scenario: Scenario, monkeypatch: pytest.MonkeyPatch, defect: str) -> None:
    monkeypatch.setattr(*PLANTED[defect])
    with pytest.raises(AssertionError, match=r"latest is|is lost|is fenced and"):
        explore(scenario, "BA" if defect == "no second look" else "AB", switch=1, crash=0)
