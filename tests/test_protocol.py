"""Saving and taking over as a protocol: interleavings of two starts of two ranks, with deaths, over the real code.

Start A has saved step 1 and saves step 2; start B chooses, takes over, tidies and saves the next step."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import replace
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
from checkpoints import held_by_all, latest_checkpoint
from interleavings import Actor, Run, explore, here

DEPTH = int(os.environ.get("BLOOMERY_SIMULATION_DEPTH", "1"))
RANKS = 2 if DEPTH == 1 else 3
commit, take_over, remove = saving.SaveJob.commit, folder.take_over, folder.remove


def save(run: Run, start: str, rank: int, writer: folder.Writer, step: int) -> None:
    def promise(folder: Path) -> list[str]:
        run.notes["promised"] = max(step, run.notes["promised"])
        return retention.apply_retention(writer, KeepSection(last=1))

    values = torch.full((2,), float(step * 1000 + ord(start)))
    ranks: Any = SimpleNamespace(rank=rank, size=RANKS, gather=lambda value: [value])
    ranks.broadcast, ranks.store_take = lambda _: f"{start}{step}", lambda key: run.board.pop(key, None)

    def report(key: str, word: Any) -> None:
        os.listdir(run.root)  # a turn of its own
        run.board[key] = word

    ranks.store_set = report
    piece = Piece(values, (2 * RANKS,), (2 * rank,))
    one = saving.Saver({"w": piece}, device=values.device, ranks=ranks, timeout_seconds=100.0)
    one.held = held_by_all(lambda rank: {"w": Piece(values, (2 * RANKS,), (2 * rank,))}, RANKS)
    one.stage()
    plan: dict[str, Any] = {"tier": retention.Tier(writer), "retention": SimpleNamespace(after_save=promise)}
    one.persist(saving.SavePlan(step=step, state={}, recipe_yaml="", **plan))
    one._flight.run()  # in the place of its thread


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
        template = Run(place / "template", promised=0)
        for rank in reversed(range(RANKS)):
            save(template, "A", rank, self.writer, 1)

    def begin(self, lead: str) -> Run:
        root = self.place / "run"
        shutil.rmtree(root, ignore_errors=True)
        shutil.copytree(self.place / "template", root, copy_function=os.link)
        run = Run(root, promised=1, fenced="", save=None)
        writer, ready = replace(self.writer, root=root), lambda: run.notes["save"]
        actors = [Actor(f"A{rank}", run, partial(save, run, "A", rank, writer, 2)) for rank in range(RANKS)]
        actors += [Actor("B0", run, partial(take_over_and_save, run))]
        for rank in range(1, RANKS):
            actors += [Actor(f"B{rank}", run, lambda rank=rank: save(run, "B", rank, *ready()), ready)]
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
        outside = Actor("outside", Run(Path(place)), lambda: None)
        actor = lambda: getattr(here, "actor", outside)  # noqa: E731
        clock = SimpleNamespace(monotonic=lambda: actor().run.clock, sleep=lambda seconds: actor().sleep(seconds))
        monkeypatch.setattr("secrets.token_hex", lambda _: f"{actor().name}{next(actor().counts)}")
        monkeypatch.setattr(saving, "time", clock)
        monkeypatch.setattr(saving, "threading", SimpleNamespace(Thread=partial(SimpleNamespace, start=lambda: None)))
        yield Scenario(Path(place))


def test_nothing_promised_is_lost_and_nothing_partial_is_chosen(scenario: Scenario) -> None:
    assert explore(scenario, switch=DEPTH, crash=0) + explore(scenario, switch=DEPTH - 1, crash=1) > 5_000


def only_a_look(root: Path) -> folder.Writer:
    writer = take_over(root)  # but leaves an older start its staging dir: that one looks, and then acts
    for left in root.glob(f"{folder.STALE}*"):
        left.rename(root / f"{folder.STAGING}{left.name.split('-')[1]}")
    return writer


def deletes_first(job: saving.SaveJob) -> None:
    remove(latest_checkpoint(job.root), job.plan.tier.writer)
    commit(job)


PLANTED: dict[str, tuple[Any, str, Any]] = {
    "named too early": (saving.SaveJob, "commit", lambda job: (job.wait_for_parts(), job.publish())),
    "deleted too early": (saving.SaveJob, "commit", deletes_first),
    "fenced by a look": (folder, "take_over", only_a_look),
    "no second look": (select, "refuse_later", lambda *_, **__: None),
}


@pytest.mark.parametrize("defect", PLANTED)
def test_a_planted_defect_is_found(scenario: Scenario, monkeypatch: pytest.MonkeyPatch, defect: str) -> None:
    monkeypatch.setattr(*PLANTED[defect])
    with pytest.raises(AssertionError, match=r"latest is|is lost|is fenced and"):
        explore(scenario, "BA" if defect == "no second look" else "AB", switch=1, crash=0)
