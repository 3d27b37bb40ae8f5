"""Saving behind the back of training: `begin` is the moment that is saved, trouble is told, nothing waits forever."""

from __future__ import annotations

import itertools
import json
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from bloomery.base.ranks import Piece
from bloomery.checkpoint import folder as folders
from bloomery.checkpoint import save as save_module
from bloomery.checkpoint.folder import FencedError, Writer, take_over
from bloomery.checkpoint.load import load_pieces, read_checkpoint
from bloomery.checkpoint.retention import Tier
from bloomery.checkpoint.save import SaveOutcome, SavePlan, Saver, raise_together
from checkpoints import latest_checkpoint
from threads_as_ranks import together

CPU = torch.device("cpu")


def begin(saver: Saver, root: Path, step: int, writer: Writer | None = None, **more: Any) -> None:
    saver.stage()
    saver.persist(
        SavePlan(tier=Tier(writer or Writer(root)), step=step, state={"step": step}, recipe_yaml="name: x\n", **more)
    )


def value_in(folder: Path, size: int = 4) -> list[float]:
    found = torch.zeros(size)
    load_pieces(read_checkpoint(folder, tensors=False), {"w": Piece.whole(found)})
    return found.tolist()


class After:
    """Retention that calls this when a checkpoint is complete."""

    def __init__(self, then: Callable[[], list[str]]) -> None:
        self.then = then

    def make_room(self) -> list[str]:
        return []

    def after_save(self, folder: Path) -> list[str]:
        return self.then()


class Gate:
    """Holds the writing of tensor files until it is opened."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.open = threading.Event()
        self.reached = threading.Event()
        original = save_module.write_file

        def held(*arguments: Any) -> Any:
            self.reached.set()
            assert self.open.wait(60)
            return original(*arguments)

        monkeypatch.setattr(save_module, "write_file", held)


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    gate = Gate(monkeypatch)
    yield gate
    gate.open.set()


def test_what_was_there_at_begin_is_saved_while_training_goes_on(tmp_path: Path, gate: Gate) -> None:
    weight = torch.full((4,), 1.0)
    pieces = {"w": Piece.whole(weight)}
    saver = Saver(pieces, device=CPU)
    begin(saver, tmp_path, 1)
    saver.wait_staged()
    weight.fill_(2.0)  # the optimizer's next step, long before anything is on the disk
    assert gate.reached.wait(60)
    assert saver.poll() == []
    assert folders.complete_checkpoints(tmp_path) == []
    gate.open.set()
    (outcome,) = saver.wait()
    assert outcome.error is None
    assert outcome.folder == latest_checkpoint(tmp_path)
    assert value_in(outcome.folder) == [1.0] * 4
    assert saver.host_bytes == 16
    assert outcome.bytes == (outcome.folder / "tensors-00000.safetensors").stat().st_size


def test_the_state_is_that_of_the_moment_too(tmp_path: Path, gate: Gate) -> None:
    pieces = {"w": Piece.whole(torch.ones(4))}
    saver = Saver(pieces, device=CPU)
    cursors = {"books": 5}
    saver.stage()
    saver.persist(SavePlan(tier=Tier(Writer(tmp_path)), step=1, state={"cursors": cursors}, recipe_yaml=""))
    cursors["books"] = 6  # training goes on
    gate.open.set()
    (outcome,) = saver.wait()
    assert json.loads((outcome.folder / "state.json").read_text()) == {"cursors": {"books": 5}}


def test_one_save_is_in_flight_and_the_next_waits_for_it(tmp_path: Path, gate: Gate) -> None:
    weight = torch.full((4,), 1.0)
    pieces = {"w": Piece.whole(weight)}
    saver = Saver(pieces, device=CPU)
    begin(saver, tmp_path, 1)
    weight.fill_(2.0)
    second = threading.Thread(target=begin, args=(saver, tmp_path, 2))
    second.start()
    second.join(0.2)
    assert second.is_alive()  # back-pressure
    gate.open.set()
    second.join(60)
    first_outcome, second_outcome = saver.wait()
    assert [first_outcome.step, second_outcome.step] == [1, 2]
    assert second_outcome.blocking_seconds > 0.1
    assert value_in(tmp_path / "step-00000001") == [1.0] * 4
    assert value_in(tmp_path / "step-00000002") == [2.0] * 4


def test_storage_that_hangs_is_told_once_and_training_goes_on(tmp_path: Path, gate: Gate) -> None:
    pieces = {"w": Piece.whole(torch.ones(4))}
    saver = Saver(pieces, device=CPU, timeout_seconds=2.0)
    begin(saver, tmp_path, 1)
    assert gate.reached.wait(60)
    begin(saver, tmp_path, 2)  # waits until the time of the first is over, then goes on without a save
    skipped, late = saver.poll()
    assert "the checkpoint of step 2 was not saved: the save of step 1 still hangs" in str(skipped.error)
    assert "the save of step 1 is not on the disk after 2s" in str(late.error)
    assert saver.poll() == []
    gate.open.set()
    while not (outcomes := saver.wait()):  # its deadline is over, so `wait` only looks
        pass
    assert outcomes[0].error is None  # slow, not lost
    begin(saver, tmp_path, 3)
    assert [outcome.error for outcome in saver.wait()] == [None]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_save_whose_thread_dies_is_a_failed_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any) -> None:
        raise RuntimeError("a bug")

    saver = Saver({"w": Piece.whole(torch.ones(4))}, device=CPU)
    monkeypatch.setattr(save_module.SaveJob, "_write_part", fails)
    monkeypatch.setattr(save_module.SaveJob, "_error", fails)
    begin(saver, tmp_path, 1)
    (outcome,) = saver.wait()
    assert "the save of step 1 did not come to its end" in str(outcome.error)


def test_tensors_across_blocks_and_views_are_staged_right(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(save_module, "_HOST_BLOCK_BYTES", 64)
    tensors = {
        "a": torch.randn(7, 5),
        "b": torch.randn(2, 2).t(),
        "c": torch.randn(33).to(torch.bfloat16),
        "n": torch.tensor(3.0),
        "d": torch.randn(2).double(),
    }
    pieces = {name: Piece.whole(tensor) for name, tensor in tensors.items()}
    saver = Saver(pieces, device=CPU)
    for step in (1, 2):
        tensors["a"].add_(1.0)
        begin(saver, tmp_path, step)
        (outcome,) = saver.wait()
        found = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
        load_pieces(
            read_checkpoint(outcome.folder, tensors=False),
            {name: Piece.whole(tensor) for name, tensor in found.items()},
        )
        assert all(torch.equal(found[name], tensor) for name, tensor in tensors.items())


def test_what_follows_a_complete_save_runs_in_the_thread(tmp_path: Path) -> None:
    pieces = {"w": Piece.whole(torch.ones(4))}
    saver = Saver(pieces, device=CPU)
    where: list[str] = []

    def then() -> list[str]:
        where.append(threading.current_thread().name)
        return ["step-00000000"]

    begin(saver, tmp_path, 1, retention=After(then), facts={"tokens": 12})
    (outcome,) = saver.wait()
    assert where == ["bloomery-save"]
    assert outcome.removed == ["step-00000000"]
    manifest = json.loads((outcome.folder / "manifest.json").read_text())
    assert (manifest["tokens"], manifest["step"], manifest["ranks"]) == (12, 1, 1)
    assert set(manifest["versions"]) == {"bloomery", "torch"}


def test_older_ones_that_cannot_be_deleted_do_not_undo_a_save(tmp_path: Path) -> None:
    pieces = {"w": Piece.whole(torch.ones(4))}
    saver = Saver(pieces, device=CPU)

    def then() -> list[str]:
        raise PermissionError(13, "Permission denied", "step-00000000")

    begin(saver, tmp_path, 1, retention=After(then))
    (outcome,) = saver.wait()
    assert outcome.error is None
    assert "Permission denied" in outcome.retention_trouble
    read_checkpoint(outcome.folder)


def in_the_end(saver: Saver) -> SaveOutcome:
    """What came of it, also if it was late on the way."""
    outcomes = saver.wait()
    while saver._flight is not None:
        outcomes += saver.wait()
    return outcomes[-1]


def shard(rank: int, ranks: int) -> dict[str, Piece]:
    return {"w": Piece(torch.full((2,), float(rank)), (2 * ranks,), (2 * rank,))}


def on_ranks(size: int, root: Path, act: Callable[[Saver, Any, dict[str, Piece]], Any], **settings: Any) -> list[Any]:
    def one(ranks: Any) -> Any:
        pieces = shard(ranks.rank, size)
        return act(Saver(pieces, device=CPU, ranks=ranks, **settings), ranks, pieces)

    return together(size, one)


def saved(root: Path) -> Callable[[Saver, Any, dict[str, Piece]], None]:
    def act(saver: Saver, ranks: Any, pieces: dict[str, Piece]) -> None:
        begin(saver, root, 5)
        raise_together(ranks, in_the_end(saver).error)

    return act


def test_many_ranks_save_without_a_collective_in_their_threads(tmp_path: Path) -> None:
    assert on_ranks(8, tmp_path, saved(tmp_path)) == [None] * 8
    folder = latest_checkpoint(tmp_path)
    assert folder is not None
    read_checkpoint(folder)
    assert value_in(folder, 16) == [float(i // 2) for i in range(16)]
    assert sorted(path.name for path in folder.glob("rank-*")) == []


def test_a_rank_whose_part_never_comes_is_named(tmp_path: Path) -> None:
    def act(saver: Saver, ranks: Any, pieces: dict[str, Piece]) -> SaveOutcome | None:
        if ranks.rank == 1:
            return None
        begin(saver, tmp_path, 5)
        return in_the_end(saver)

    first, _, third = on_ranks(3, tmp_path, act, timeout_seconds=0.5)
    assert "on rank 1: its part did not arrive within" in str(first.error)
    assert "folder that all ranks share" in str(first.error)
    assert third.error is None  # its own part was written; rank 0 knows the truth
    assert list(tmp_path.iterdir()) == []


def test_a_rank_whose_save_still_hangs_says_so_to_the_next_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else each save would cost all of rank 0's patience."""
    ends, original = threading.Event(), save_module.SaveJob._write_part

    def held(job: save_module.SaveJob, *rest: Any) -> None:
        if job.ranks.rank == 1:
            assert ends.wait(60)
        original(job, *rest)

    monkeypatch.setattr(save_module.SaveJob, "_write_part", held)

    def act(saver: Saver, ranks: Any, pieces: dict[str, Piece]) -> str:
        for step in (5, 6):
            begin(saver, tmp_path, step)
        errors = {outcome.step: outcome.error for outcome in saver.wait()}
        ranks.gather(None)
        ends.set()
        return str(errors[6])

    first, second = on_ranks(2, tmp_path, act, timeout_seconds=1.0)
    assert "on rank 1: its save of step 5 still hangs" in first
    assert "the checkpoint of step 6 was not saved: the save of step 5 still hangs" in second


@pytest.mark.parametrize("failing", [[0], [1], [0, 1, 2]])
def test_storage_that_takes_nothing_at_all_is_told_without_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing: list[int]
) -> None:
    """Read-only or dead: not even the word that a rank has failed can be written."""
    original = save_module.SaveJob._write_part

    def fails(job: save_module.SaveJob, *rest: Any) -> None:
        if job.ranks.rank in failing:
            raise OSError(30, "Read-only file system")
        original(job, *rest)

    monkeypatch.setattr(save_module.SaveJob, "_write_part", fails)
    started = time.monotonic()
    errors = on_ranks(3, tmp_path, saved(tmp_path))
    assert time.monotonic() - started < 30  # rank 0's patience is 24 minutes
    for error, rank in itertools.product(errors, failing):
        assert f"on rank {rank}: Read-only file system (EROFS)" in str(error)
    assert list(tmp_path.iterdir()) == []


def test_after_a_failure_a_rank_that_hangs_is_waited_for_a_little_longer_only(tmp_path: Path) -> None:
    def act(saver: Saver, ranks: Any, pieces: dict[str, Piece]) -> SaveOutcome | None:
        if ranks.rank == 2:
            return None
        begin(saver, tmp_path / "w" if ranks.rank == 1 else tmp_path, 5)
        return in_the_end(saver)

    (tmp_path / "w").write_text("a file in the way")
    first, *_ = on_ranks(3, tmp_path, act)
    assert "on rank 1: Not a directory (ENOTDIR)" in str(first.error)
    assert first.persist_seconds < 30  # its patience is 24 minutes
    assert folders.complete_checkpoints(tmp_path) == []


def test_a_trouble_before_there_is_a_draft_is_told_at_once(tmp_path: Path) -> None:
    """Rank 1 sees a newer start first; rank 0's own view of `.writer` is old, as on some network file systems."""
    old = take_over(tmp_path)
    stale = StaleWriter(old.root, old.incarnation, old.token)
    take_over(tmp_path)

    def act(saver: Saver, ranks: Any, pieces: dict[str, Piece]) -> SaveOutcome:
        begin(saver, tmp_path, 5, writer=stale if ranks.rank == 0 else old)
        return in_the_end(saver)

    first, second = on_ranks(2, tmp_path, act)
    assert "on rank 0: No such file or directory" in str(first.error)
    assert isinstance(second.error, FencedError)
    assert first.persist_seconds < 30  # its patience is 24 minutes
    assert folders.complete_checkpoints(tmp_path) == []


def test_a_draft_that_is_taken_away_while_rank_0_waits_ends_the_wait(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The newer start comes when rank 0 has written its part, and rank 0 does not see its word."""
    old = take_over(tmp_path)
    stale = StaleWriter(old.root, old.incarnation, old.token)
    waits, original = threading.Event(), save_module.SaveJob.wait_for_parts

    def waiting(*arguments: Any) -> Any:
        waits.set()
        return original(*arguments)

    monkeypatch.setattr(save_module.SaveJob, "wait_for_parts", waiting)

    def act(saver: Saver, ranks: Any, pieces: dict[str, Piece]) -> SaveOutcome:
        if ranks.rank == 1:
            assert waits.wait(60)
            take_over(tmp_path)
            ranks.store_set = lambda *_: None  # it is gone before it can say so
        begin(saver, tmp_path, 5, writer=stale if ranks.rank == 0 else old)
        return in_the_end(saver)

    first, second = on_ranks(2, tmp_path, act, timeout_seconds=60)
    assert "on rank 0: No such file or directory" in str(first.error)
    assert "is it mounted?" in str(first.error)
    assert isinstance(second.error, FencedError)
    assert folders.complete_checkpoints(tmp_path) == []


class StaleWriter(Writer):
    def require(self) -> None:
        """It does not see the newer start yet."""


def test_an_older_start_can_neither_complete_nor_write(tmp_path: Path, gate: Gate) -> None:
    pieces = {"w": Piece.whole(torch.ones(4))}
    old = take_over(tmp_path)
    saver = Saver(pieces, device=CPU)
    begin(saver, tmp_path, 1, writer=old)
    assert gate.reached.wait(60)
    new = take_over(tmp_path)
    assert (old.incarnation, new.incarnation) == (1, 2)
    gate.open.set()
    (outcome,) = saver.wait()
    assert isinstance(outcome.error, FencedError)
    assert "start 2 (process" in str(outcome.error)
    assert folders.complete_checkpoints(tmp_path) == []
    begin(saver, tmp_path, 2, writer=old)
    assert isinstance(saver.wait()[0].error, FencedError)
    begin(saver, tmp_path, 3, writer=new)
    assert saver.wait()[0].error is None
    with pytest.raises(FencedError), old.acting():
        pass
    assert [path.name for path in folders.complete_checkpoints(tmp_path)] == ["step-00000003"]


@pytest.mark.parametrize("content", ["", "[]", "{"])
def test_a_torn_writer_file_fences_nobody(tmp_path: Path, content: str) -> None:
    writer = take_over(tmp_path)
    (tmp_path / ".writer").write_text(content)
    writer.require()
    (tmp_path / ".writer").unlink()
    writer.require()
    assert take_over(tmp_path).incarnation == 1


def test_a_read_only_place_is_an_outcome_not_a_crash(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    pieces = {"w": Piece.whole(torch.ones(4))}
    saver = Saver(pieces, device=CPU)
    begin(saver, tmp_path / "file" / "root", 1)
    (outcome,) = saver.wait()
    assert "could not be written: Not a directory" in str(outcome.error)
    assert "check the storage" in str(outcome.error).lower()
    assert os.listdir(tmp_path) == ["file"]


def test_a_file_that_shrinks_behind_our_back_is_not_completed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    original = save_module.write_file

    def shrinks(path: Path, *rest: Any) -> Any:
        facts = original(path, *rest)
        os.truncate(path, 3)
        return facts

    monkeypatch.setattr(save_module, "write_file", shrinks)
    pieces = {"w": Piece.whole(torch.ones(4))}
    saver = Saver(pieces, device=CPU)
    begin(saver, tmp_path, 1)
    assert "does not have the" in str(saver.wait()[0].error)
    assert list(tmp_path.iterdir()) == []
