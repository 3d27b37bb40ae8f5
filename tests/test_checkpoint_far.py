"""What a start and the end of a job make of copies far away, whatever has become of them or of those here."""

from __future__ import annotations

import json
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fsspec.implementations.local import LocalFileSystem  # type: ignore[import-untyped]

from bloomery.checkpoint import folder as folders
from bloomery.checkpoint import remote as remote_module
from bloomery.checkpoint.folder import take_over
from bloomery.checkpoint.load import read_checkpoint
from bloomery.checkpoint.remote import RemoteSource, Uploader
from checkpoints import assert_same_tensors
from conftest import Workshop
from forked import Forked
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


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    site = Site(Workshop(tmp_path_factory.mktemp("trained")))
    with pytest.MonkeyPatch.context() as here:
        here.chdir(site.workshop.folder)
        for _ in range(3):  # one copy at a time: each job's last one is waited for
            site.train("train.exit_after=2 steps")
    assert site.copies() == ["step-00000002", "step-00000004", "step-00000006"]
    return site.workshop.folder


@pytest.fixture
def site(workshop: Workshop, trained: Path) -> Site:
    shutil.copytree(trained, workshop.folder, symlinks=True, dirs_exist_ok=True)
    return Site(workshop)


def test_a_good_copy_replaces_a_damaged_newest(site: Site, capsys: pytest.CaptureFixture[str]) -> None:
    spoil(site.here / "step-00000006")
    capsys.readouterr()
    site.train()
    assert site.resumed_from() == "step-00000006"
    read_checkpoint(site.here / "step-00000006")
    assert (site.here / "damaged-step-00000006").is_dir()
    (event,) = site.workshop.events(site.run, "damaged")
    assert event["reasons"] == [f"{TENSORS} has been changed since it was saved"]
    assert "It is called damaged-step-00000006 now; step-00000006 is used" in capsys.readouterr().out
    assert not site.workshop.events(site.run, "retired")
    assert_same_tensors(site.run, site.workshop.train(STEPS, run="whole"))


def test_a_copy_is_fetched_when_all_here_are_damaged(site: Site) -> None:
    for checkpoint in folders.complete_checkpoints(site.here):
        spoil(checkpoint)
    site.train()
    assert site.resumed_from() == "step-00000006"
    assert len(site.workshop.events(site.run, "damaged")) == 3
    for checkpoint in folders.complete_checkpoints(site.here):
        read_checkpoint(checkpoint)


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
    read_checkpoint(site.far / "step-00000006")


def test_a_run_whose_copies_are_all_damaged_does_not_begin_anew(site: Site, capsys: pytest.CaptureFixture[str]) -> None:
    for checkpoint in folders.complete_checkpoints(site.far):
        spoil(checkpoint)
    shutil.rmtree(site.here / "step-00000002")
    spoil(site.here / "step-00000004")
    spoil(site.here / "step-00000006")
    site.train(code=3)
    assert "no checkpoint of this run can be used" in capsys.readouterr().err
    assert site.copies() == ["step-00000002", "step-00000004", "step-00000006"]


@pytest.mark.parametrize("ranks", [1, 3])
def test_debris_is_in_nobodys_way_and_in_no_checkpoint(site: Site, ranks: int) -> None:
    here = site.run / "elsewhere"
    (here / "step-00000006").mkdir(parents=True)
    (here / "step-00000006" / "junk").write_text("of a save that was killed")
    (here / ".step-00000006-fetch.tmp").mkdir()
    (here / ".step-00000006-fetch.tmp" / "junk").write_text("of a fetch that was killed")
    together(ranks, lambda rank: RemoteSource(str(site.far), here, "small", ranks=rank).fetch_newer(None))
    read_checkpoint(here / "step-00000006")
    names = {path.name for path in (here / "step-00000006").iterdir()}
    assert names == {"manifest.json", *json.loads((here / "step-00000006" / "manifest.json").read_text())["files"]}
    assert {path.name for path in here.iterdir()} == {"step-00000006", "damaged-step-00000006"}


def test_a_named_checkpoint_is_fetched_if_it_is_not_here(site: Site) -> None:
    shutil.rmtree(site.here / "step-00000004")
    site.train("train.exit_after=1 steps", start_from="4")
    assert site.resumed_from() == "step-00000004"


# ---------------------------------------------------------------- branches that were left


def test_a_branch_left_without_the_far_place_does_not_come_back(site: Site) -> None:
    site.train("train.exit_after=1 steps", upload=False, start_from="4")
    site.train("train.exit_after=1 steps")
    assert site.resumed_from() == "step-00000005"
    assert site.workshop.events(site.run, "retired")[-1]["folders"] == ["step-00000006"]
    assert "step-00000006" in site.copies()  # of the new branch
    read_checkpoint(site.far / "step-00000006")
    there, here = ((place / "step-00000006" / "manifest.json").read_bytes() for place in (site.far, site.here))
    assert there == here


def test_an_older_copy_of_a_branch_that_was_left_is_not_used_either(site: Site) -> None:
    site.train("train.exit_after=3 steps", upload=False, start_from="4")
    shutil.rmtree(site.here)  # step 7 is lost, and step 6 there is of the other branch
    site.train("train.exit_after=1 steps")
    assert site.resumed_from() == "step-00000004"


def test_a_branch_left_without_the_fast_place_does_not_come_back(workshop: Workshop) -> None:
    local = f", local: {{path: {workshop.folder / 'fast'}, every: 1 steps, keep: 2}}"
    both, one = (f"checkpoint={{phases: [{{every: 4 steps}}]{more}}}" for more in (local, ""))
    run = workshop.train(STEPS, both, "train.exit_after=7 steps")
    shutil.rmtree(run / "checkpoints" / "step-00000007")  # as a kill would leave it: 6 in the fast place
    workshop.train(STEPS, one, "train.exit_after=1 steps", start_from="4")
    workshop.train(STEPS, both, "train.exit_after=1 steps")
    assert workshop.events(run, "start")[-1]["resumed_from"] == "step-00000005"


def test_a_start_of_another_run_does_not_go_on_from_its_copies(site: Site, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.rmtree(site.run)
    site.train("name=other", code=3)
    assert "is of the run 'small', and this is 'other'" in capsys.readouterr().err
    site.train("name=small")
    assert site.resumed_from() == "step-00000006"
    site.workshop.train(STEPS, "name=other", run="other")
    upload = f"checkpoint.upload={{to: {site.far}}}"
    site.workshop.train(STEPS, "name=other", upload, run="other", code=3)  # also where none of them is newer


# ---------------------------------------------------------------- the end of a job, and the next start


def hold(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Copies do not come to an end before this is set."""
    opened, original = threading.Event(), remote_module.upload

    def held(*arguments: Any) -> bool:
        assert opened.wait(60)
        return original(*arguments)

    monkeypatch.setattr(remote_module, "upload", held)
    return opened


def test_a_copy_that_is_given_up_is_told_and_made_by_the_next_start(
    workshop: Workshop, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    site = Site(workshop)
    with monkeypatch.context() as patch:
        opened = hold(patch)
        site.train(more=", timeout: 1s")
        steps = [event["step"] for event in workshop.events(site.run, "upload_failed")]
        assert steps == [2, 10]  # the one on its way, and the newest
        assert "step 10 was not copied to" in capsys.readouterr().out
        shutil.rmtree(site.far, ignore_errors=True)
    site.train()  # nothing is left to train
    assert workshop.events(site.run, "upload")[-1]["step"] == 10
    assert site.copies() == ["step-00000010"]
    copied = len(workshop.events(site.run, "upload"))
    site.train()
    assert len(workshop.events(site.run, "upload")) == copied  # it is there
    opened.set()


def test_copies_are_waited_for_no_longer_than_the_job_may_last(
    workshop: Workshop, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bloomery.train.stop.job_seconds", lambda: 9.0)
    opened = hold(monkeypatch)
    begun = time.monotonic()
    site = Site(workshop)
    site.train("train.exit_after=10s")
    assert time.monotonic() - begun < 30
    assert {event["seconds"] for event in workshop.events(site.run, "upload_failed")} == {1.0}
    opened.set()


def puts_hang() -> None:
    LocalFileSystem.put_file = lambda *_, **__: threading.Event().wait()


def test_a_place_that_hangs_does_not_keep_the_process(workshop: Workshop) -> None:
    section = f"checkpoint={{timeout: 1s, upload: {{to: {workshop.folder / 'far'}}}}}"
    words = ["train", str(workshop.recipe), "train.exit_after=2 steps", section, "--run-dir", "run"]
    assert Forked([*words, "--device", "cpu"], workshop.folder / "err", puts_hang).wait(60) == 0
    assert workshop.events(workshop.folder / "run", "upload_failed")


def test_a_place_that_never_answers_a_start_is_told(
    workshop: Workshop, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(remote_module, "_ANSWER_SECONDS", 0.5)
    monkeypatch.setattr(LocalFileSystem, "exists", lambda *_, **__: threading.Event().wait(20))
    begun = time.monotonic()
    Site(workshop).train(code=3)
    assert time.monotonic() - begun < 15
    assert "cannot be read: TimeoutError: no answer within 0 s" in capsys.readouterr().err


def test_a_place_that_is_added_to_a_finished_run_gets_its_last_checkpoint(workshop: Workshop) -> None:
    site = Site(workshop)
    site.train(upload=False)
    site.train()
    assert site.copies() == ["step-00000010"]


def test_the_last_checkpoint_of_a_run_is_copied_at_any_step(workshop: Workshop) -> None:
    far = workshop.folder / "far"
    checkpoint = f"checkpoint={{phases: [{{every: 2 steps}}], upload: {{to: {far}, every: 4 steps}}}}"
    workshop.train(STEPS, checkpoint, "train.exit_after=6 steps")
    assert [path.name for path in folders.complete_checkpoints(far)] == ["step-00000004"]
    workshop.train(STEPS, checkpoint)
    assert folders.complete_checkpoints(far)[-1].name == "step-00000010"


# ---------------------------------------------------------------- zombies


def test_a_start_that_was_overtaken_changes_nothing_there(site: Site) -> None:
    zombie = take_over(site.here)
    take_over(site.here)
    before = {path: path.read_bytes() for path in site.far.rglob("*") if path.is_file()}
    other = site.workshop.train(STEPS, "seed=5", "checkpoint={phases: [{every: 2 steps}]}", run="other")
    uploader = Uploader(str(site.far), zombie)
    uploader.offer(other / "checkpoints" / "step-00000006")
    (outcome,) = uploader.wait(60)
    assert "has taken over" in outcome.error
    assert {path: path.read_bytes() for path in site.far.rglob("*") if path.is_file()} == before


def test_what_lies_there_already_is_not_copied_again(site: Site) -> None:
    before = {path: path.stat().st_mtime_ns for path in site.far.rglob("*") if path.is_file()}
    uploader = Uploader(str(site.far), take_over(site.here))
    uploader.offer(site.here / "step-00000006")
    (outcome,) = uploader.wait(60)
    assert (outcome.was_there, outcome.error) == (True, "")
    assert {path: path.stat().st_mtime_ns for path in site.far.rglob("*") if path.is_file()} == before
    lose_a_file(site.far / "step-00000006")
    uploader.offer(site.here / "step-00000006")
    (outcome,) = uploader.wait(60)
    assert (outcome.was_there, outcome.error) == (False, "")
    read_checkpoint(site.far / "step-00000006")
