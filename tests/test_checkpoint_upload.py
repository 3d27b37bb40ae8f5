"""Copies far away: complete or absent, behind training, and fetched when there is nothing as new here."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch

from bloomery.base.errors import DataError
from bloomery.base.piece import Piece
from bloomery.checkpoint import folder as folders
from bloomery.checkpoint import upload as upload_module
from bloomery.checkpoint.fence import take_over
from bloomery.checkpoint.retention import apply_retention
from bloomery.checkpoint.save import save_checkpoint
from bloomery.checkpoint.upload import Uploader, fetch_newest
from bloomery.config.recipe import KeepSection
from checkpoints import assert_same_tensors
from conftest import Workshop
from threads_as_ranks import together

URL = "memory://bucket/run"


def save(root: Path, step: int) -> Path:
    pieces = {"w": Piece.whole(torch.full((3,), float(step)))}
    return save_checkpoint(root, step=step, pieces=pieces, state={}, recipe_yaml="")


@pytest.fixture(autouse=True)
def empty_bucket() -> Iterator[None]:
    store = fsspec.filesystem("memory")
    yield
    for path in list(store.store):
        store.rm_file(path)


def upload(*folders_: Path, **settings: Any) -> list[str]:
    uploader = Uploader(URL, **settings)
    errors = []
    for folder in folders_:
        uploader.offer(folder)
        errors += [outcome.error for outcome in uploader.wait(60)]
    return errors


@pytest.mark.parametrize("ranks", [1, 3])
def test_a_copy_comes_back_whole(tmp_path: Path, ranks: int) -> None:
    assert upload(save(tmp_path / "here", 1), save(tmp_path / "here", 2)) == ["", ""]
    there = tmp_path / "there"
    fetched = together(ranks, lambda rank: fetch_newest(URL, there, newer_than=-1, ranks=rank))
    assert fetched == [there / "step-00000002"] * ranks
    folders.verify(there / "step-00000002")
    assert fetch_newest(URL, there, newer_than=2) is None
    assert fetch_newest("memory://nothing", there, newer_than=-1) is None


def test_only_marked_steps_are_copied(tmp_path: Path) -> None:
    assert upload(save(tmp_path, 3), save(tmp_path, 4), every_steps=4) == [""]
    assert fetch_newest(URL, tmp_path / "there", newer_than=0) == tmp_path / "there" / "step-00000004"


def test_a_copy_without_manifest_is_debris(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    older, newer = save(tmp_path, 1), save(tmp_path, 2)
    old = take_over(tmp_path)
    assert upload(older, writer=old) == [""]
    take_over(tmp_path)
    (error,) = upload(newer, writer=old)  # a zombie copies, but its copy does not count
    assert "has taken over" in error
    assert fetch_newest(URL, tmp_path / "there", newer_than=-1) == tmp_path / "there" / "step-00000001"


def test_copies_wait_for_each_other_and_retention_for_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened, reached = threading.Event(), threading.Event()
    original = upload_module._upload

    def held(*arguments: Any) -> None:
        reached.set()
        assert opened.wait(60)
        original(*arguments)

    monkeypatch.setattr(upload_module, "_upload", held)
    uploader = Uploader(URL)
    for step in (1, 2, 3, 4):
        uploader.offer(save(tmp_path, step))
        assert reached.wait(60)
    assert uploader.protected() == {1, 4}  # the one on its way, and the newest
    assert apply_retention(tmp_path, KeepSection(last=1), spare=uploader.protected()) == [
        "step-00000002", "step-00000003"
    ]  # fmt: skip
    assert uploader.poll() == []
    opened.set()
    assert [(outcome.step, outcome.error) for outcome in uploader.wait(60)] == [(1, ""), (4, "")]
    assert uploader.protected() == set()


def test_a_place_that_fails_is_told(tmp_path: Path) -> None:
    uploader = Uploader("nosuchstore://x")
    uploader.offer(save(tmp_path, 1))
    (outcome,) = uploader.wait(60)
    assert "nosuchstore" in outcome.error
    raised = together(2, lambda rank: fetch_newest("nosuchstore://x", tmp_path, newer_than=-1, ranks=rank))
    assert all(isinstance(error, DataError) for error in raised)
    assert "checkpoint.upload=null" in str(raised[0])


def test_a_copy_that_breaks_off_while_it_is_fetched_leaves_nothing(tmp_path: Path) -> None:
    upload(save(tmp_path / "here", 1))
    fsspec.filesystem("memory").rm_file("/bucket/run/step-00000001/state.json")
    with pytest.raises(DataError, match=r"cannot be read.*state.json"):
        fetch_newest(URL, tmp_path / "there", newer_than=-1)
    assert list((tmp_path / "there").iterdir()) == []


def test_a_run_goes_on_from_its_copy_on_a_new_machine(workshop: Workshop, tmp_path: Path) -> None:
    settings = ("train.for=8 steps", f"checkpoint={{phases: [{{every: 2 steps}}], upload: {{to: {tmp_path / 'far'}}}}}")
    run = workshop.train(*settings, "train.exit_after=5 steps")
    assert workshop.events(run, "upload")[-1]["step"] == 5
    shutil.rmtree(run)  # the machine is gone
    workshop.train(*settings)
    assert workshop.events(run, "start")[-1]["resumed_from"] == "step-00000005"
    assert workshop.events(run, "fetched")[-1]["folder"] == "step-00000005"
    assert_same_tensors(run, workshop.train("train.for=8 steps", run="whole"))


def test_a_copy_that_fails_stops_nothing(workshop: Workshop, capsys: pytest.CaptureFixture[str]) -> None:
    far = workshop.folder / "far"
    settings = ("train.for=4 steps", f"checkpoint={{phases: [{{every: 2 steps}}], upload: {{to: {far}}}}}")
    far.mkdir()
    (far / "step-00000002").write_text("a file in the way")
    run = workshop.train(*settings)
    assert {event["step"] for event in workshop.events(run, "upload_failed")} <= {2}
    assert workshop.events(run, "upload")[-1]["step"] == 4
    assert (run / "checkpoints" / "latest").read_text() == "step-00000004\n"
