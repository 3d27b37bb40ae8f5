"""Copies far away: complete or absent, behind training, and fetched when there is nothing as new here."""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch

from bloomery.base.errors import DataError, Problem, StorageError
from bloomery.base.ranks import ALONE, Piece, Ranks
from bloomery.base.units import Amount, Duration
from bloomery.checkpoint import folder as folders
from bloomery.checkpoint import remote as remote_module
from bloomery.checkpoint.folder import take_over
from bloomery.checkpoint.load import Checkpoint, read_checkpoint
from bloomery.checkpoint.remote import RemoteSource, Uploader, UploadOutcome, list_remote
from bloomery.checkpoint.retention import apply_retention
from bloomery.checkpoint.save import save_checkpoint
from bloomery.checkpoint.select import newest_good
from bloomery.config.recipe import KeepSection
from checkpoints import assert_same_tensors
from conftest import Workshop
from object_stores import bucket_in
from threads_as_ranks import together

RUN = "mine"
URL = "memory://bucket/run"


def save(root: Path, step: int, *, loss: float | None = None) -> Path:
    pieces = {"w": Piece.whole(torch.full((3,), float(step)))}
    facts: dict[str, Any] = {"run": RUN}
    facts |= {"validation": {"step": step, "loss": loss}} if loss is not None else {}
    return save_checkpoint(root, step=step, pieces=pieces, state={}, recipe_yaml="", facts=facts)


@pytest.fixture(autouse=True)
def empty_bucket() -> Iterator[None]:
    store = fsspec.filesystem("memory")
    yield
    for path in list(store.store):
        store.rm_file(path)


def fetch(url: str, root: Path, *, ranks: Ranks = ALONE, local: Path | None = None) -> Path | None:
    copy = RemoteSource(url, root, RUN, ranks=ranks).fetch_newer(local and read_checkpoint(local)).checkpoint
    return copy and copy.folder


def upload(*folders_: Path, **settings: Any) -> list[str]:
    writer = settings.pop("writer", None) or take_over(folders_[0].parent)
    uploader = Uploader(URL, writer, **settings)
    errors = []
    for folder in folders_:
        uploader.offer(folder)
        errors += [outcome.error for outcome in uploader.wait(60)]
    return errors


@pytest.mark.parametrize("ranks", [1, 3])
def test_a_copy_comes_back_whole(tmp_path: Path, ranks: int) -> None:
    assert upload(save(tmp_path / "here", 1), save(tmp_path / "here", 2)) == ["", ""]
    there = tmp_path / "there"
    fetched = together(ranks, lambda rank: fetch(URL, there, ranks=rank))
    assert fetched == [there / "step-00000002"] * ranks
    read_checkpoint(there / "step-00000002")
    assert fetch(URL, there, local=there / "step-00000002") is None
    assert fetch("memory://nothing", there) is None


def test_a_copy_whose_state_cannot_be_used_is_damaged_and_the_next_older_one_is_tried(tmp_path: Path) -> None:
    assert upload(save(tmp_path / "here", 1), save(tmp_path / "here", 2)) == ["", ""]

    def check(checkpoint: Checkpoint) -> None:
        if checkpoint.manifest["step"] == 2:
            raise DataError(Problem("its state makes no sense"))

    there = tmp_path / "there"
    choices = together(
        3, lambda rank: newest_good([there], remote=RemoteSource(URL, there, RUN, ranks=rank), ranks=rank, check=check)
    )
    assert {choice.checkpoint.folder for choice in choices} == {there / "step-00000001"}
    assert choices[0].damaged == {f"{URL}/step-00000002": ["its state makes no sense"]}
    assert [path.name for path in there.iterdir()] == ["step-00000001"]


def test_only_marked_steps_are_copied(tmp_path: Path) -> None:
    assert upload(save(tmp_path, 3), save(tmp_path, 4), every=Amount(4, "steps")) == [""]
    assert fetch(URL, tmp_path / "there") == tmp_path / "there" / "step-00000004"


def test_copies_by_the_clock_keep_their_distance_but_for_the_last_of_a_run(tmp_path: Path) -> None:
    uploader = Uploader(URL, take_over(tmp_path), every=Duration(3600.0))
    assert uploader.offer(save(tmp_path, 3))
    assert not uploader.offer(save(tmp_path, 4))
    assert uploader.offer(save(tmp_path, 5), final=True)
    uploader.wait(60)


def test_a_copy_without_manifest_is_debris(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    older, newer = save(tmp_path, 1), save(tmp_path, 2)
    old = take_over(tmp_path)
    assert upload(older, writer=old) == [""]
    take_over(tmp_path)
    (error,) = upload(newer, writer=old)  # a zombie copies, but its copy does not count
    assert "has taken over" in error
    assert fetch(URL, tmp_path / "there") == tmp_path / "there" / "step-00000001"


def test_a_file_that_is_a_link_is_not_copied(tmp_path: Path) -> None:
    checkpoint, secret = save(tmp_path / "here", 1), tmp_path / "secret"
    (checkpoint / "state.json").rename(secret)
    (checkpoint / "state.json").symlink_to(secret)
    (error,) = upload(checkpoint)
    assert "state.json is a link, which is not followed" in error
    assert fetch(URL, tmp_path / "there") is None


def test_a_link_that_takes_the_place_of_what_is_fetched_is_not_followed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    upload(save(tmp_path / "here", 1))
    (tmp_path / "victim").mkdir()

    def swept_and_planted(path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.symlink_to(tmp_path / "victim")

    monkeypatch.setattr(remote_module, "remove_tree", swept_and_planted)
    with pytest.raises((DataError, StorageError), match=r"symbolic links|Too many levels"):
        fetch(URL, tmp_path / "there")
    assert not [*(tmp_path / "victim").iterdir()]


def test_copies_wait_for_each_other_and_retention_for_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened, reached = threading.Event(), threading.Event()
    original = remote_module.upload

    def held(*arguments: Any) -> bool:
        reached.set()
        assert opened.wait(60)
        return original(*arguments)

    monkeypatch.setattr(remote_module, "upload", held)
    writer = take_over(tmp_path)
    uploader = Uploader(URL, writer)
    for step in (1, 2, 3, 4):
        uploader.offer(save(tmp_path, step))
        assert reached.wait(60)
    assert uploader.protected() == {1, 4}  # the one on its way, and the newest
    assert apply_retention(writer, KeepSection(last=1), spare=uploader.protected()) == [
        "step-00000002", "step-00000003"
    ]  # fmt: skip
    assert uploader.poll() == []
    opened.set()
    assert [(outcome.step, outcome.error) for outcome in uploader.wait(60)] == [(1, ""), (4, "")]
    assert uploader.protected() == set()


def test_a_place_that_fails_is_told(tmp_path: Path) -> None:
    uploader = Uploader("nosuchstore://x", take_over(tmp_path))
    uploader.offer(save(tmp_path, 1))
    (outcome,) = uploader.wait(60)
    assert "nosuchstore" in outcome.error
    raised = together(2, lambda rank: fetch("nosuchstore://x", tmp_path, ranks=rank))
    assert all(isinstance(error, DataError) for error in raised)
    assert "checkpoint.upload=null" in str(raised[0])


def test_a_copy_that_breaks_off_while_it_is_fetched_is_fetched_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    upload(save(tmp_path / "here", 1))
    store = fsspec.filesystem("memory")

    def break_off(source: str, target: str) -> None:
        raise ConnectionError(f"lost at {source}")

    with monkeypatch.context() as broken:
        broken.setattr(store, "get_file", break_off)
        with pytest.raises(DataError, match=r"cannot be read: ConnectionError: lost"):
            fetch(URL, tmp_path / "there")
    assert folders.complete_checkpoints(tmp_path / "there") == []
    assert fetch(URL, tmp_path / "there") == tmp_path / "there" / "step-00000001"
    assert [path.name for path in (tmp_path / "there").iterdir()] == ["step-00000001"]


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


# ---------------------------------------------------------------- what is kept there


@pytest.fixture(scope="module")
def s3() -> Iterator[str]:
    """The URL of an empty bucket."""
    with bucket_in("s3", "checkpoints") as url:
        yield url


@pytest.fixture(params=["memory", "file", "s3"])
def far(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "s3":
        return f"{request.getfixturevalue('s3')}/{tmp_path.name}"
    return URL if request.param == "memory" else str(tmp_path / "far")


def put(url: str, text: str) -> None:
    store, path = fsspec.core.url_to_fs(url)
    store.makedirs(path.rsplit("/", 1)[0], exist_ok=True)
    store.pipe_file(path, text.encode())


def files_at(url: str) -> list[str]:
    store, path = fsspec.core.url_to_fs(url)
    store.invalidate_cache()
    return sorted(name.removeprefix(path).removeprefix("/") for name in store.find(path))


def steps_at(url: str) -> list[int]:
    return [remote.step for remote in list_remote(url)]


def copy_to(url: str, *checkpoints: Path, **settings: Any) -> list[UploadOutcome]:
    writer = settings.pop("writer", None) or take_over(checkpoints[0].parent)
    uploader = Uploader(url, writer, **settings)
    outcomes = []
    for folder in checkpoints:
        uploader.offer(folder)
        outcomes += uploader.wait(60)
    assert [outcome.error for outcome in outcomes] == [""] * len(outcomes)
    return outcomes


def test_nothing_is_ever_deleted_there(far: str, tmp_path: Path) -> None:
    copy_to(far, *(save(tmp_path / "here", step) for step in (1, 2, 3)))
    assert steps_at(far) == [1, 2, 3]


@pytest.mark.parametrize("clock", [0, -86400], ids=["", "on a machine whose clock is behind"])
def test_a_run_goes_back_without_the_later_ones(
    workshop: Workshop, tmp_path: Path, clock: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    far = tmp_path / "far"
    upload = f"{{to: {far}}}"
    settings = ("train.for=6 steps", f"checkpoint={{phases: [{{every: 1 steps}}], upload: {upload}}}")
    run = workshop.train(*settings)
    assert steps_at(str(far))[-1] == 6
    now = time.time
    monkeypatch.setattr(time, "time", lambda: now() + clock)
    workshop.train(*settings, "train.exit_after=1 steps", start_from="3")
    assert {4, 6} <= {*steps_at(str(far))}
    shutil.rmtree(run)  # a new machine resumes the branch that was saved last
    workshop.train(*settings, "train.exit_after=1 steps")
    assert workshop.events(run, "start")[-1]["resumed_from"] == "step-00000004"
