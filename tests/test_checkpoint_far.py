"""What a start and the end of a job make of copies far away, whatever has become of them or of those here."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from bloomery.checkpoint import folder as folders
from bloomery.checkpoint.fetch import fetch_newest
from checkpoints import assert_same_tensors
from conftest import Workshop
from threads_as_ranks import together

TENSORS = "tensors-00000.safetensors"
STEPS = "train.for=10 steps"


def spoil(checkpoint: Path) -> None:
    data = bytearray((checkpoint / TENSORS).read_bytes())
    data[-1] ^= 1
    (checkpoint / TENSORS).write_bytes(bytes(data))


def lose_a_file(checkpoint: Path) -> None:
    (checkpoint / "state.json").unlink()


def cut_manifest(checkpoint: Path) -> None:
    path = checkpoint / "manifest.json"
    path.write_text(path.read_text()[:100])


class Site:
    """A run that saves at every second step and is copied to `far`."""

    def __init__(self, workshop: Workshop) -> None:
        self.workshop = workshop
        self.far = workshop.folder / "far"
        self.run = workshop.folder / "run"
        self.here = self.run / "checkpoints"

    def train(
        self, *words: str, more: str = "", upload: bool = True, code: int = 0, start_from: str | None = None
    ) -> None:
        far = f", upload: {{to: {self.far}}}" if upload else ""
        section = f"checkpoint={{phases: [{{every: 2 steps}}]{far}{more}}}"
        self.workshop.train(STEPS, section, *words, code=code, start_from=start_from)

    def resumed_from(self) -> str | None:
        found: str | None = self.workshop.events(self.run, "start")[-1]["resumed_from"]
        return found

    def copies(self) -> list[str]:
        return [path.name for path in folders.complete_checkpoints(self.far)]


@pytest.fixture
def site(workshop: Workshop) -> Site:
    site = Site(workshop)
    for _ in range(3):  # one copy at a time: each job's last one is waited for
        site.train("train.exit_after=2 steps")
    assert site.copies() == ["step-00000002", "step-00000004", "step-00000006"]
    return site


def test_a_good_copy_replaces_a_damaged_newest(site: Site, capsys: pytest.CaptureFixture[str]) -> None:
    spoil(site.here / "step-00000006")
    capsys.readouterr()
    site.train()
    assert site.resumed_from() == "step-00000006"
    folders.verify(site.here / "step-00000006")
    assert (site.here / "damaged-step-00000006").is_dir()
    (event,) = site.workshop.events(site.run, "damaged")
    assert event["reasons"] == [f"{TENSORS} has been changed since it was saved"]
    assert "its copy from" in capsys.readouterr().out
    assert not site.workshop.events(site.run, "retired")
    assert_same_tensors(site.run, site.workshop.train(STEPS, run="whole"))


def test_a_copy_is_fetched_when_all_here_are_damaged(site: Site) -> None:
    for checkpoint in folders.complete_checkpoints(site.here):
        spoil(checkpoint)
    site.train()
    assert site.resumed_from() == "step-00000006"
    assert len(site.workshop.events(site.run, "damaged")) == 3
    for checkpoint in folders.complete_checkpoints(site.here):
        folders.verify(checkpoint)


@pytest.mark.parametrize("damage", [spoil, lose_a_file, cut_manifest])
def test_the_next_older_copy_is_fetched_where_the_newest_is_damaged(
    site: Site, damage: Callable[[Path], None], capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.rmtree(site.here)
    damage(site.far / "step-00000006")
    capsys.readouterr()
    site.train("train.exit_after=2 steps")
    assert site.resumed_from() == "step-00000004"
    (event,) = site.workshop.events(site.run, "damaged")
    assert (event["folder"], event["place"]) == ("step-00000006", str(site.far))
    assert "step-00000006 is damaged" in capsys.readouterr().out
    assert site.copies()[-1] == "step-00000006"  # made again, and whole now
    folders.verify(site.far / "step-00000006")


def test_a_run_whose_copies_are_all_damaged_does_not_begin_anew(site: Site, capsys: pytest.CaptureFixture[str]) -> None:
    for checkpoint in folders.complete_checkpoints(site.far):
        spoil(checkpoint)
    shutil.rmtree(site.here / "step-00000002")
    spoil(site.here / "step-00000004")
    spoil(site.here / "step-00000006")
    site.train(code=3)
    assert "all checkpoints of this run are damaged, also the copies" in capsys.readouterr().err
    assert site.copies() == ["step-00000002", "step-00000004", "step-00000006"]


@pytest.mark.parametrize("ranks", [1, 3])
def test_debris_is_in_nobodys_way_and_in_no_checkpoint(site: Site, ranks: int) -> None:
    here = site.run / "elsewhere"
    (here / "step-00000006").mkdir(parents=True)
    (here / "step-00000006" / "junk").write_text("of a save that was killed")
    (here / ".step-00000006-fetch.tmp").mkdir()
    (here / ".step-00000006-fetch.tmp" / "junk").write_text("of a fetch that was killed")
    together(ranks, lambda rank: fetch_newest(str(site.far), here, newer_than=-1, ranks=rank))
    folders.verify(here / "step-00000006")
    names = {path.name for path in (here / "step-00000006").iterdir()}
    assert names == {"manifest.json", *json.loads((here / "step-00000006" / "manifest.json").read_text())["files"]}
    (aside,) = folders.sweep_debris(here)
    assert aside.startswith(".step-00000006-")


def test_a_start_clears_debris_of_the_step_that_it_fetches(site: Site) -> None:
    folders.condemn(site.here / "step-00000006")
    site.train()
    assert site.resumed_from() == "step-00000006"
    assert len(site.workshop.events(site.run, "debris_removed")[-1]["folders"]) == 1


def test_a_named_checkpoint_is_fetched_if_it_is_not_here(site: Site) -> None:
    folders.remove(site.here / "step-00000004")
    site.train("train.exit_after=1 steps", start_from="4")
    assert site.resumed_from() == "step-00000004"
