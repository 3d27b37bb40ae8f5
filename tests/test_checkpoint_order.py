"""Which checkpoints are kept, put aside, deleted and gone on from, and how often they are made."""

from __future__ import annotations

import contextlib
import json
import math
import os
import random
import re
import tempfile
from collections.abc import Iterator
from math import isclose, sqrt
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError

from bloomery.base.errors import DataError, Problem, StorageError
from bloomery.base.ranks import Piece
from bloomery.base.units import Amount, Duration
from bloomery.checkpoint import folder as folders
from bloomery.checkpoint import load as load_module
from bloomery.checkpoint import retention
from bloomery.checkpoint.folder import FencedError, take_over, tidy
from bloomery.checkpoint.inspect import list_checkpoints
from bloomery.checkpoint.load import Checkpoint
from bloomery.checkpoint.retention import Tier, apply_retention
from bloomery.checkpoint.save import save_checkpoint
from bloomery.checkpoint.select import newest_good, refuse_later
from bloomery.config.recipe import KeepSection, LocalTierSection, PhaseSection
from bloomery.sizing.schedule import cadence, daly_seconds, kept_steps, resolve_phases, seconds_between_failures
from bloomery.train.spikes import SpikeWatch
from checkpoints import change_manifest, chosen
from threads_as_ranks import together


def save(root: Path, step: int, *, loss: float | None = None, loss_step: int | None = None) -> Path:
    validation = None if loss is None else {"step": step if loss_step is None else loss_step, "loss": loss}
    pieces = {"w": Piece.whole(torch.full((3,), float(step)))}
    return save_checkpoint(root, step=step, pieces=pieces, state={}, recipe_yaml="", facts={"validation": validation})


def names(root: Path) -> list[str]:
    return sorted(path.name for path in root.iterdir() if not path.name.startswith("."))


def flip(folder: Path) -> None:
    path = folder / "tensors-00000.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


def test_retention_keeps_the_newest_the_marked_the_named_and_the_best(tmp_path: Path) -> None:
    losses = {10: 3.0, 20: 1.0, 30: 2.0, 40: 1.5, 50: 0.5, 60: 9.0, 70: 9.0}
    for step, loss in losses.items():
        save(tmp_path, step, loss=loss, loss_step=40 if step == 50 else None)  # 50 was not evaluated itself
    keep = KeepSection(last=1, every=Amount(30, "steps"), steps=[10, 999], best=2)
    assert apply_retention(take_over(tmp_path), keep) == ["step-00000050"]
    assert names(tmp_path) == [
        "latest", "step-00000010", "step-00000020", "step-00000030", "step-00000040", "step-00000060", "step-00000070"
    ]  # fmt: skip
    assert apply_retention(take_over(tmp_path), KeepSection(last=1)) == [f"step-000000{n}0" for n in (1, 2, 3, 4, 6)]
    assert names(tmp_path) == ["latest", "step-00000070"]
    assert apply_retention(take_over(tmp_path), None) == []


def test_retention_never_touches_the_newest_whatever_is_asked() -> None:
    chance = random.Random(3)
    for _ in range(300):
        steps = sorted(chance.sample(range(1, 200), chance.randint(1, 12)))
        every = Amount(chance.randint(1, 50), "steps") if chance.random() < 0.5 else None
        keep = KeepSection(last=chance.randint(1, 3), every=every, best=chance.randint(0, 2))
        losses = {step: chance.random() for step in steps if chance.random() < 0.5}
        kept = kept_steps(steps, keep, losses)
        assert set(steps[-keep.last :]) <= kept <= set(steps)
        assert not losses or not keep.best or min(losses, key=lambda step: losses[step]) in kept


def test_retention_reads_no_loss_from_a_broken_manifest(tmp_path: Path) -> None:
    (save(tmp_path, 1) / "manifest.json").write_text("{")
    save(tmp_path, 2)
    assert apply_retention(take_over(tmp_path), KeepSection(last=1, best=1)) == ["step-00000001"]


def test_an_older_start_deletes_nothing(tmp_path: Path) -> None:
    old = take_over(tmp_path)
    for step in (1, 2, 3):
        save(tmp_path, step)
    take_over(tmp_path)
    with pytest.raises(FencedError):
        apply_retention(old, KeepSection(last=1))
    assert len(folders.complete_checkpoints(tmp_path)) == 3


def test_the_newest_good_one_of_all_places_is_chosen(tmp_path: Path) -> None:
    durable, local = tmp_path / "durable", tmp_path / "local"
    assert chosen([durable, local]) is None
    for step in (10, 20):
        save(durable, step)
    for step in (20, 25):
        save(local, step)
    assert chosen([durable, local]) == local / "step-00000025"
    flip(local / "step-00000025")
    choice = newest_good([durable, local])
    assert choice.checkpoint.folder == durable / "step-00000020"  # of one step, the durable one
    assert list(choice.damaged) == [local / "step-00000025"]
    flip(durable / "step-00000020")
    assert chosen([durable, local]) == local / "step-00000020"
    (local / "step-00000020" / "state.json").unlink()
    (durable / "step-00000010" / "manifest.json").write_text("")
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    with pytest.raises(DataError, match="no checkpoint of this run can be used") as caught:
        newest_good([durable, local])
    assert "state.json is missing" in str(caught.value)
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == before  # nothing was moved


def test_folders_that_may_not_be_read_are_damaged_ones(tmp_path: Path) -> None:
    """In a run folder that colleagues share. What root may not read does not exist, so somebody else looks."""
    with tempfile.TemporaryDirectory() as place, as_nobody(Path(place)):
        root = Path(place) / "checkpoints"
        save(root, 10)
        save(root, 20).chmod(0)
        choice = newest_good([root])
        assert choice.checkpoint is not None
        assert choice.checkpoint.folder == root / "step-00000010"
        assert choice.damaged == {root / "step-00000020": ["manifest.json is missing, or cannot be read"]}
        root.chmod(0)
        with pytest.raises(DataError, match="cannot be read: Permission denied"):
            newest_good([root])
        root.chmod(0o755)


@contextlib.contextmanager
def as_nobody(place: Path) -> Iterator[None]:
    """The owner of this place, and not root."""
    if os.geteuid() != 0:
        yield
        return
    os.chown(place, 65534, 65534)
    os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(0)


def test_frequent_saves_leave_time_to_prove_one(tmp_path: Path) -> None:
    """Five steps prove a checkpoint, which retention alone would have deleted by then."""
    for step in range(2, 22, 2):
        folder = save(tmp_path, step)
        tier = Tier(take_over(tmp_path), KeepSection(last=2))
        retention.Retention(tier, is_good=SpikeWatch().good_at(step)).after_save(folder)
    assert names(tmp_path) == ["latest", *(f"step-000000{step}" for step in (14, 16, 18, 20))]


def test_all_ranks_choose_the_same(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        save(tmp_path, step)
    flip(tmp_path / "step-00000003")
    choices = together(4, lambda ranks: newest_good([tmp_path], ranks=ranks))
    assert all(choice.damaged == choices[0].damaged for choice in choices)
    assert {choice.checkpoint.folder for choice in choices} == {tmp_path / "step-00000002"}


def test_a_candidate_is_judged_before_its_tensors_are_read_and_rank_0_reads_the_manifest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for step in (1, 2, 3):
        save(tmp_path, step)
    tensors, manifests, original = set[str](), list[str](), load_module.file_damage

    def file_damage(path: Path, facts: dict[str, Any], *, read: bool) -> str:
        tensors.update([path.parent.name] if read and path.suffix == ".safetensors" else [])
        return original(path, facts, read=read)

    def read_manifest(folder: Path) -> Any:
        manifests.append(folder.name)
        return folders.read_manifest(folder)

    def check(checkpoint: Checkpoint) -> None:
        if checkpoint.manifest["step"] == 3:
            raise DataError(Problem("its state makes no sense"))

    monkeypatch.setattr(load_module, "file_damage", file_damage)
    monkeypatch.setattr(load_module, "read_manifest", read_manifest)
    choices = together(4, lambda ranks: newest_good([tmp_path], ranks=ranks, check=check))
    assert {choice.checkpoint.folder for choice in choices} == {tmp_path / "step-00000002"}
    assert tensors == {"step-00000002"}
    assert manifests == ["step-00000003", "step-00000002"]  # of four ranks


def test_another_format_is_told_by_number_and_stops_no_run_that_has_an_older_checkpoint(tmp_path: Path) -> None:
    change_manifest(save(tmp_path, 2), format=99)
    with pytest.raises(DataError, match="format 99"):
        newest_good([tmp_path])
    older = save(tmp_path, 1)
    choice = newest_good([tmp_path])
    assert choice.checkpoint.folder == older
    assert "it has format 99. This Bloomery reads format 2" in choice.damaged[tmp_path / "step-00000002"][0]


def test_a_loss_that_is_no_number_is_never_the_best(tmp_path: Path) -> None:
    keep = KeepSection(last=1, best=1)
    losses = {1: 3.0, 2: math.nan, 3: 2.0, 4: 2.5, 5: -math.inf}
    assert kept_steps([1, 2, 3, 4, 5, 6], keep, losses) == {3, 6}
    assert kept_steps([1, 2], keep, {1: math.nan}) == {2}
    for step, loss in losses.items():
        change_manifest(save(tmp_path, step), validation={"step": step, "loss": loss})
        strict = json.loads((tmp_path / f"step-{step:08d}" / "manifest.json").read_text(), parse_constant=pytest.fail)
        assert strict["validation"]["loss"] == loss or isinstance(strict["validation"]["loss"], str)
    save(tmp_path, 6)
    apply_retention(take_over(tmp_path), keep)
    assert [path.name for path in folders.complete_checkpoints(tmp_path)] == ["step-00000003", "step-00000006"]


def test_tidying_puts_everything_in_its_place_and_latest_never_names_what_moves(tmp_path: Path) -> None:
    for step in (1, 2, 3, 4):
        save(tmp_path, step)
    (tmp_path / ".step-00000008-abcd-1.tmp").mkdir()
    (tmp_path / ".left-abcd" / ".step-00000009-abcd-2.tmp").mkdir(parents=True)
    (tmp_path / "damaged-step-00000003").mkdir()  # of an earlier time
    done = tidy(tmp_path, step=2, damaged=[tmp_path / "step-00000003", Path("elsewhere/step-00000001")])
    assert list(done.quarantined.values()) == ["damaged-step-00000003.2"]
    assert done.retired == ["step-00000004"]
    assert done.debris == [".step-00000008-abcd-1.tmp", ".step-00000009-abcd-2.tmp"]
    assert done.latest_said == "step-00000004"
    assert (tmp_path / "latest").read_text() == "step-00000002\n"
    assert names(tmp_path) == [
        "damaged-step-00000003", "damaged-step-00000003.2", "latest", "retired", "step-00000001", "step-00000002"
    ]  # fmt: skip
    assert tidy(tmp_path, step=2).latest_said is None
    assert tidy(tmp_path, step=0).latest_said == "step-00000002"
    assert not (tmp_path / "latest").exists()


def test_debris_is_kept_without_following_links_however_late_they_are_planted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root, victim = tmp_path / "checkpoints", tmp_path / "victim"
    (victim / ".step-00000001.tmp").mkdir(parents=True)
    for name in (".left-a", ".left-b"):
        (root / name / ".step-00000002.tmp").mkdir(parents=True)
    (root / ".left-link").symlink_to(victim)
    original = folders.os.rename

    def planted(*arguments: Any, **descriptors: Any) -> None:
        for place in (root / "debris", root / ".left-a", root / ".left-b"):
            if not place.is_symlink():
                original(place, tmp_path / f"moved-{place.name}")
                place.symlink_to(victim)
        original(*arguments, **descriptors)

    monkeypatch.setattr(folders.os, "rename", planted)
    with contextlib.suppress(StorageError):  # the second time `debris` is a link
        tidy(root, step=0, keep_debris=True)
    assert [path.name for path in victim.iterdir()] == [".step-00000001.tmp"]
    assert [path.name for path in (tmp_path / "moved-debris").iterdir()] == [".step-00000002.tmp"]


def test_the_local_place_of_a_run_is_its_own(tmp_path: Path) -> None:
    section = LocalTierSection(path=str(tmp_path), every=Amount(5, "steps"), keep=2)
    tiers = [Tier.node_local(section, tmp_path / side / "run", take_over(tmp_path / side)) for side in ("a", "b")]
    here, there = (tier.parts_root for tier in tiers)
    assert here is not None
    assert here != there
    assert here.parent == tmp_path
    assert tiers[0].keep == KeepSection(last=2)


def test_the_three_rounds_of_tr1_save_exactly_the_wanted_steps() -> None:
    rounds = [(100, 10), (1000, 18), (None, 1500)]
    phases = resolve_phases(
        [
            PhaseSection(until=Amount(until, "steps") if until else None, every=Amount(every, "steps"))
            for until, every in rounds
        ]
    )
    wanted = [*range(10, 101, 10), *range(108, 991, 18), 1000, *range(1500, 150_001, 1500)]
    assert [step for step in range(1, 150_001) if any(phase.saves_at(step) for phase in phases)] == wanted
    assert [step for phase in phases for step in phase.steps(train_steps=150_000)] == wanted


def test_a_phase_of_auto_saves_at_its_end_only_by_plan() -> None:
    auto, last = resolve_phases(
        [PhaseSection(until=Amount(50, "steps"), every="auto"), PhaseSection(every=Amount(20, "steps"))]
    )
    assert [step for step in range(1, 80) if auto.saves_at(step)] == [50]
    assert list(auto.steps(train_steps=100)) == [50]
    assert list(auto.steps(train_steps=30)) == []
    assert list(last.steps(train_steps=100)) == [60, 80, 100]


@pytest.mark.parametrize(
    ("every", "said"),
    [
        (7, "an amount is a number and a unit"),
        ("often", "such as '2000 steps'"),
        ("7 tokens", "must be counted in steps"),
        (None, "such as '2000 steps'"),
    ],
)
def test_an_interval_is_steps_or_auto(every: object, said: str) -> None:
    with pytest.raises(ValidationError, match=re.escape(said)):
        PhaseSection.model_validate({"every": every})
    assert PhaseSection.model_validate({"every": "auto"}).every == "auto"
    assert PhaseSection(every=Amount(7, "steps")).model_dump() == {"until": None, "every": "7 steps"}


def test_the_interval_of_daly() -> None:
    assert isclose(daly_seconds(1.0, 1e6), sqrt(2e6), rel_tol=0.001)  # Young's rule where saving is cheap
    assert daly_seconds(300.0, 100.0) == 100.0  # saving costs more than failures: as often as they come
    best, cost, failure = daly_seconds(60.0, 3600.0), 60.0, 3600.0

    def lost(interval: float) -> float:
        return cost / interval + (interval + cost) / (2 * failure)

    assert lost(best) <= min(lost(best * 0.5), lost(best * 2))


def test_the_cadence_says_why() -> None:
    cheap = cadence(blocking_seconds=0.005, persist_seconds=16.0, step_seconds=0.5, failure_seconds=1e7)
    assert cheap.every_steps == pytest.approx(sqrt(2 * 0.005 * 1e7) / 0.5, rel=0.01)
    assert "0.005s" in cheap.reasoning
    assert "Young/Daly" in cheap.reasoning
    slow = cadence(blocking_seconds=0.005, persist_seconds=1000.0, step_seconds=0.5, failure_seconds=1e4)
    assert slow.every_steps == 4000  # not before storage has rested as long as it worked
    assert "storage needs 1e+03s" in slow.reasoning
    assert cadence(blocking_seconds=1e-9, persist_seconds=0.0, step_seconds=99.0, failure_seconds=1.0).every_steps == 1


def test_failures_are_known_from_the_recipe_or_the_number_of_devices() -> None:
    assert seconds_between_failures(Duration(7200.0), num_devices=512) == 7200.0
    assert seconds_between_failures(None, num_devices=16_384) == pytest.approx(3.05 * 3600, rel=0.01)


def test_a_start_that_was_overtaken_between_its_choice_and_its_take_over_refuses(tmp_path: Path) -> None:
    save(tmp_path, 1)
    choice = newest_good([tmp_path])
    newer = save(tmp_path, 2)  # by a start that was still alive: it has promised this one
    assert choice.checkpoint.folder == tmp_path / "step-00000001"
    with pytest.raises(StorageError, match="another start saved step-00000002 while this one resumed from step 1"):
        refuse_later([tmp_path], step=1)
    refuse_later([tmp_path], step=1, damaged=[newer])
    refuse_later([tmp_path], step=2)


def test_many_checkpoints_are_listed_and_deleted_with_few_reads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for step in range(1, 21):
        save(tmp_path, step, loss=1.0)
    read: list[Path] = []
    real = retention.read_manifest
    monkeypatch.setattr(retention, "read_manifest", lambda folder: read.append(folder) or real(folder))
    monkeypatch.setattr(load_module, "read_index", lambda folder: pytest.fail("an index was parsed"))
    assert [one.state for one in list_checkpoints(tmp_path)] == ["complete"] * 20
    assert len(apply_retention(take_over(tmp_path), KeepSection(last=15))) == 5
    assert len(read) == 20  # each once
    assert len(apply_retention(take_over(tmp_path), KeepSection(last=1, best=1))) == 13
    assert len(read) == 20 + 15
