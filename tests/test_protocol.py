"""Saving and taking over as a protocol: interleavings of two starts of three ranks, with deaths, over the real code.

Start A has saved step 1 and saves step 2; start B chooses, takes over, tidies and saves the next step."""

import os
import shutil
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from bloomery.base.errors import BloomeryError
from bloomery.base.piece import Piece
from bloomery.checkpoint import choose, fence, folder, persist, retention, saver
from bloomery.checkpoint.load import load_pieces
from bloomery.config.recipe import KeepSection
from interleavings import Actor, Run, explore, here

DEPTH = int(os.environ.get("BLOOMERY_SIMULATION_DEPTH", "2"))
complete, take_over = persist.complete, fence.take_over


class Inline(SimpleNamespace):
    """A thread of the saver that runs at once, as its actor."""

    def start(self) -> None:
        self.target(*self.args)

    join, is_alive = staticmethod(lambda _: None), staticmethod(lambda: False)


def save(run: Run, start: str, rank: int, writer: fence.Writer, step: int) -> None:
    """One rank's part of a save, as training does it."""

    def promise() -> list[str]:
        run.notes["promised"] = max(step, run.notes["promised"])
        return retention.apply_retention(run.root, KeepSection(last=1), writer=writer)

    values = torch.full((2,), float(step * 1000 + ord(start)))
    ranks: Any = SimpleNamespace(rank=rank, size=3, gather=lambda value: [value], broadcast=lambda _: f"{start}{step}")
    one = saver.Saver({"w": Piece(values, (6,), (2 * rank,))}, device=values.device, ranks=ranks, timeout_seconds=100.0)
    one.stage()
    one.persist(run.root, step=step, state={}, recipe_yaml="", writer=writer, then=promise)


def take_over_and_save(run: Run) -> None:
    """Rank 0 of start B, in the order of train/setup.py."""
    try:
        choice = choose.newest_good([run.root])
        step = folder.step_of(choice.folder) if choice.folder else 0
        writer = fence.take_over(run.root)
        run.notes["fenced"] = "A"
        choose.refuse_later([run.root], step=step, damaged=choice.damaged)
        choose.tidy(run.root, step=step, damaged=choice.damaged)
    except BloomeryError:
        return  # it does not start, and says why
    run.notes["save"] = (writer, step + 1)
    save(run, "B", 0, writer, step + 1)


class Scenario:
    def __init__(self, place: Path) -> None:
        self.place, self.chosen = place, dict[Any, int]()
        self.writer = fence.take_over(place / "template")
        for rank in (2, 1, 0):
            save(Run(place / "template", promised=0), "A", rank, self.writer, 1)

    def begin(self) -> Run:
        root = self.place / "run"
        shutil.rmtree(root, ignore_errors=True)
        shutil.copytree(self.place / "template", root, copy_function=os.link)
        run = Run(root, promised=1, fenced="", save=None)
        acts = {f"A{rank}": partial(save, run, "A", rank, replace(self.writer, root=root), 2) for rank in range(3)}
        acts |= {"B0": partial(take_over_and_save, run)}
        acts |= {f"B{rank}": lambda rank=rank: save(run, "B", rank, *run.notes["save"]) for rank in (1, 2)}
        needs = {"B1": lambda: run.notes["save"], "B2": lambda: run.notes["save"]}
        run.actors = {name: Actor(name, run, act, needs.get(name, lambda: True)) for name, act in acts.items()}
        return run

    def judge(self, run: Run, actor: str) -> None:
        whole = {path.name: (path / "manifest.json").stat().st_ino for path in folder.complete_checkpoints(run.root)}
        assert actor[0] != run.notes["fenced"] or whole == run.notes["whole"], f"{actor} is fenced and changed {whole}"
        run.notes["whole"], latest, key = whole, folder.read_latest(run.root), tuple(whole.items())
        assert latest in whole, f"latest is {latest}, there are {sorted(whole)}"
        if key not in self.chosen:
            chosen, found = choose.newest_good([run.root]).folder, torch.zeros(6)
            assert chosen is not None
            load_pieces(chosen, {"w": Piece.whole(found)})
            assert len(set(found.tolist())) == 1, f"{chosen.name} is of several saves: {found.tolist()}"
            self.chosen[key] = int(found[0]) // 1000
            assert self.chosen[key] == folder.step_of(chosen)
        assert self.chosen[key] >= run.notes["promised"], f"step {run.notes['promised']} is lost: {sorted(whole)}"


@pytest.fixture
def scenario(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Scenario:
    """With clocks and chance that are the same in each run."""
    outside = Actor("outside", Run(tmp_path), lambda: None)
    actor = lambda: getattr(here, "actor", outside)  # noqa: E731
    clock = SimpleNamespace(monotonic=lambda: actor().run.clock, sleep=lambda seconds: actor().sleep(seconds))
    monkeypatch.setattr("secrets.token_hex", lambda _: f"{actor().name}{next(actor().counts)}")
    monkeypatch.setattr(persist, "time", clock)
    monkeypatch.setattr(saver, "time", clock)
    monkeypatch.setattr(saver, "threading", SimpleNamespace(Thread=Inline))
    return Scenario(tmp_path)


@pytest.mark.parametrize("limits", [{"switch": DEPTH, "crash": 0}, {"switch": DEPTH - 1, "crash": 1}], ids=str)
def test_nothing_promised_is_lost_and_nothing_partial_is_chosen(scenario: Scenario, limits: dict[str, int]) -> None:
    states, schedules = explore(scenario.begin, scenario.judge, **limits)
    print(f"{states:,} states in {schedules:,} schedules of at most {limits}")
    assert states > 5000


def only_a_look(root: Path) -> fence.Writer:
    """Leaves an older start its desk: that one looks whether it is fenced, and then acts."""
    writer = take_over(root)
    for left in root.glob(f"{fence.LEFT}*"):
        left.rename(root / f"{fence.DESK}{left.name.split('-')[1]}")
    return writer


def deleting_first(job: persist.SaveJob, mine: Exception | None) -> Path:
    for path in folder.complete_checkpoints(job.root):
        folder.remove(path, job.desk)
    return complete(job, mine)


@pytest.mark.parametrize(
    ("place", "name", "defect"),
    [
        (saver, "complete", lambda job, _: (persist._wait_for_parts(job, []), persist._name(job))),  # no manifest yet
        (saver, "complete", deleting_first),
        (fence, "take_over", only_a_look),
        (choose, "refuse_later", lambda *_, **__: None),
    ],
)
def test_planted_defects_are_found(
    scenario: Scenario, monkeypatch: pytest.MonkeyPatch, place: Any, name: str, defect: Any
) -> None:
    monkeypatch.setattr(place, name, defect)
    with pytest.raises(AssertionError, match=r"latest is|is lost|is fenced and"):
        explore(scenario.begin, scenario.judge, switch=2, crash=0)
