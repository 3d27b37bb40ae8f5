"""The resume contract: what may change when a run goes on, what it says, and that its remedies work when copied."""

from __future__ import annotations

import json
import re
import shlex
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml

from bloomery.monitor.history import read_metrics
from bloomery.train.contract import on_resume
from checkpoints import assert_same_tensors
from conftest import Workshop, write_shard
from test_parallel import run_ranks, said

STOP = "train.exit_after=5 steps"


def stopped(workshop: Workshop, *overrides: str, run: str = "run") -> Path:
    return workshop.train(*overrides, STOP, run=run)


def refusal(workshop: Workshop, capsys: pytest.CaptureFixture[str], *overrides: str, run: str = "run") -> list[str]:
    """What a start that must be refused says, line by line."""
    capsys.readouterr()
    workshop.train(*overrides, run=run, code=3)
    text = capsys.readouterr().err
    assert "Traceback" not in text
    return [line.removeprefix("bloomery: ") for line in text.splitlines()]


def test_free_fields_change_without_a_word(workshop: Workshop, capsys: pytest.CaptureFixture[str]) -> None:
    stopped(workshop)
    free = ("batch.micro_batch_size=2", "train.for=8 steps", "monitor.log_every=2 steps", "name=other")
    free += ("checkpoint.phases=[{every: 2 steps}]", "data.validation={v: [{path: valid}]}", "parallel.recompute=full")
    run = workshop.train(*free, "train.evaluate={every: 4 steps, steps: 1}", "train.stop_after_nan_steps=5")
    assert workshop.events(run, "changed") == []
    assert workshop.events(run, "stop")[-1]["reason"] == "finished"


def test_all_differences_of_all_kinds_are_told_at_once_with_both_values(
    workshop: Workshop, capsys: pytest.CaptureFixture[str]
) -> None:
    run = stopped(workshop)
    lines = refusal(workshop, capsys, "seed=8", "model.num_layers=3", "lr.peak=0.005", "batch.global_batch_size=16")
    values = [("seed", 8, 7), ("model.num_layers", 3, 2), ("batch.global_batch_size", 16, 8)]
    values += [("lr.peak", 0.005, 0.01), ("lr.decay", "280 samples", "160 samples")]  # 20 steps, with another batch
    for line, (field, new, old) in zip(lines, values, strict=False):
        back, rule = shlex.quote(f"{field}={old}"), on_resume(field)
        expected = f"{field} is {new} but the checkpoint has {old}. "
        if rule.kind == "fixed":
            expected += f"Fixed: {rule.why}. Use {back} to continue as before."
        else:
            expected += f"Changes only by name: {rule.why}. "
            expected += f"Use {back} to continue as before, or --change {field} to change it."
        assert line == expected
    assert lines[-1] == (
        f"cannot resume from {run}/checkpoints/step-00000005. "
        "Set these back, or start a new run under another name or --run-dir."
    )
    assert len(lines) == len(values) + 1
    assert len(workshop.events(run, "start")) == 1, "a refused start leaves no trace in the ledger"


def test_naming_what_may_change_does_not_open_what_may_not(
    workshop: Workshop, capsys: pytest.CaptureFixture[str]
) -> None:
    stopped(workshop)
    workshop.train("seed=8", "lr.peak=0.005", code=3, changes=["lr"])
    text = capsys.readouterr().err
    assert "seed is 8" in text
    assert "lr.peak" not in text


def test_names_that_are_no_fields_or_never_change_are_refused_with_a_remedy(
    workshop: Workshop, capsys: pytest.CaptureFixture[str]
) -> None:
    workshop.train(code=2, changes=["lr.peek", "model.num_layers", "lr.peak=1", "tokenizer", "data.order", ""])
    text = capsys.readouterr().err
    assert "--change lr.peek: this is not a field of a recipe. Did you mean lr.peak?" in text
    assert "--change lr.peak=1: this is not a field of a recipe. Did you mean lr.peak?" in text
    assert "--change : this is not a field of a recipe. Name a field such as lr.peak." in text
    for name in ("model.num_layers", "tokenizer", "data.order"):
        assert f"--change {name}: a resumed run cannot change it. Fixed: {on_resume(name).why}." in text


def test_a_change_is_an_event_a_notice_and_in_the_next_checkpoint_and_asking_again_is_harmless(
    workshop: Workshop, capsys: pytest.CaptureFixture[str]
) -> None:
    run = stopped(workshop)
    asked = ("lr.peak=0.005", "optimizer.weight_decay=0.2", "train.exit_after=3 steps")
    workshop.train(*asked, changes=["lr.peak", "optimizer"])
    changed = [(each["step"], each["field"], each["old"], each["new"]) for each in workshop.events(run, "changed")]
    assert changed == [(5, "optimizer.weight_decay", 0.1, 0.2), (5, "lr.peak", 0.01, 0.005)]
    told = "changed from step 6 on: optimizer.weight_decay 0.1 -> 0.2, lr.peak 0.01 -> 0.005"
    assert told in (run / "logs" / "main_log.txt").read_text()
    saved = yaml.safe_load((run / "checkpoints" / "step-00000008" / "recipe.yaml").read_text())
    assert (saved["lr"]["peak"], saved["optimizer"]["weight_decay"]) == (0.005, 0.2)
    workshop.train(*asked, changes=["lr.peak", "optimizer"])  # the job script is started again
    workshop.train(*asked)  # and without the option: it is the run's own recipe now
    assert len(workshop.events(run, "changed")) == 2
    assert "lr.peak is 0.01 but the checkpoint has 0.005" in refusal(workshop, capsys)[1]


CASES = {
    "end-of-training": ["lr.decay=null", "train.for=40 steps"],
    "wsd": ["lr={peak: 0.02, min: 0.001, schedule: wsd, cooldown: 3 steps}"],
    "batch": ["batch.global_batch_size=16"],
    "ramp": ["batch.rampup={start: 4, increment: 4, samples: 100}"],
    "sources": ["data.train=[{path: valid, name: more, weight: 0.5}, {path: train}]"],
    "skip": ["train.skip=['2-3 steps', '8-9 steps']"],
    "several": ["seed=8", "lr.min=0.002", "model.init_std=0.01", "data.eod_loss=false", "data.split='90,10'"],
    "positions": ["model.seq_length=8"],
}


@pytest.mark.parametrize("overrides", CASES.values(), ids=CASES)
def test_every_remedy_works_when_it_is_copied(
    workshop: Workshop, capsys: pytest.CaptureFixture[str], overrides: list[str]
) -> None:
    run = stopped(workshop)
    *lines, last = refusal(workshop, capsys, *overrides)
    backs = [word for line in lines for word in shlex.split(re.findall("Use (.*) to continue as before", line)[0])]
    names = [name for line in lines for name in re.findall("or --change ([^ ]+) to change it", line)]
    for folder in ("back", "changed"):
        shutil.copytree(run, workshop.folder / folder)
    same = workshop.train(*overrides, *backs, "train.exit_after=2 steps", run="back")
    assert workshop.events(same, "changed") == []
    assert_same_tensors(same, workshop.train("train.exit_after=2 steps"))
    if len(names) == len(lines):
        assert f"or add {' '.join(f'--change {name}' for name in names)} to change them" in last
        other = workshop.train(*overrides, "train.exit_after=2 steps", run="changed", changes=names)
        assert [event["field"] for event in workshop.events(other, "changed")] == names
    else:
        assert "start a new run under another name or --run-dir" in last


def test_only_the_proportions_of_a_blend_count(workshop: Workshop, capsys: pytest.CaptureFixture[str]) -> None:
    def blend(first: float, second: float, path: str = "train") -> str:
        return f"data.train=[{{path: {path}, name: a, weight: {first}}}, {{path: valid, weight: {second}}}]"

    run = stopped(workshop, blend(1, 3))
    (line, _) = refusal(workshop, capsys, blend(2, 3))
    assert line.startswith("data.train is [{path: train")
    assert line.endswith("or --change data.train to change it.")
    for end in ("idx", "bin"):
        (workshop.folder / f"train.{end}").rename(workshop.folder / f"moved.{end}")
    workshop.train(blend(2, 6, "moved"))
    assert workshop.events(run, "changed") == []


def test_a_schedule_that_follows_the_end_of_training_is_shown_in_samples(
    workshop: Workshop, capsys: pytest.CaptureFixture[str]
) -> None:
    stopped(workshop, "lr.decay=null")
    (line, _) = refusal(workshop, capsys, "lr.decay=null", "train.for=40 steps")
    assert line.startswith("lr.decay is 320 samples but the checkpoint has 160 samples.")
    assert line.endswith("Use 'lr.decay=160 samples' to continue as before, or --change lr.decay to change it.")
    longer = workshop.train("lr.decay=160 samples", "train.for=26 steps")
    assert_same_tensors(longer, workshop.train("lr.decay=160 samples", "train.for=26 steps", run="unbroken"))


@pytest.mark.parametrize(
    "schedule",
    [
        "lr={peak: 0.01, schedule: wsd, warmup: 4 steps, cooldown: 6 steps}",
        "lr={peak: 0.01, schedule: linear, warmup: 4 steps, decay: 12 steps}",
    ],
    ids=["wsd", "linear"],
)
def test_the_length_is_free_where_no_rate_so_far_follows_from_it(workshop: Workshop, schedule: str) -> None:
    stopped(workshop, schedule)
    longer = workshop.train(schedule, "train.for=24 steps")
    unbroken = workshop.train(schedule, "train.for=24 steps", run="unbroken")
    assert workshop.losses(longer) == workshop.losses(unbroken)
    assert_same_tensors(longer, unbroken)


def test_the_end_of_a_cooldown_that_has_begun_is_by_name(
    workshop: Workshop, capsys: pytest.CaptureFixture[str]
) -> None:
    wsd = "lr={peak: 0.01, schedule: wsd, warmup: 1 steps, cooldown: 6 steps}"
    stopped(workshop, wsd, "train.for=10 steps")
    assert refusal(workshop, capsys, wsd, "train.for=12 steps")[0].startswith("lr.decay is 96 samples")


def test_ranges_to_pass_over_are_free_in_the_future_only(
    workshop: Workshop, capsys: pytest.CaptureFixture[str]
) -> None:
    stopped(workshop, "train.skip=['4-7 steps']")
    line, *_ = refusal(workshop, capsys, "train.skip=['7-8 steps']")
    assert "nly for past steps (redo them with --from)" in line
    assert "Use 'train.skip=[4-7 steps]' to continue as before" in line
    workshop.train("train.skip=['4-5 steps', '7-8 steps']")


def test_before_the_first_step_nothing_has_been_used_but_the_weights(
    workshop: Workshop, capsys: pytest.CaptureFixture[str]
) -> None:
    run = workshop.folder / "run"
    (run / "control").mkdir(parents=True)
    (run / "control" / "stop").touch()
    workshop.train()
    assert (run / "checkpoints" / "latest").read_text() == "step-00000000\n"
    lines = refusal(workshop, capsys, "seed=9", "model.seq_length=8", "lr.peak=0.02", "data.order=megatron")
    assert [line.split()[0] for line in lines] == ["seed", "model.seq_length", "cannot"]
    workshop.train("lr.peak=0.02", "batch.global_batch_size=4", "data.order=megatron", "data.split='90,10'")
    assert workshop.events(run, "changed") == []


def test_a_tokenizer_may_move_but_not_change(workshop: Workshop, capsys: pytest.CaptureFixture[str]) -> None:
    def make(folder: Path, letters: str) -> None:
        from tokenizers import Tokenizer, models

        folder.mkdir()
        vocabulary = {"<|endoftext|>": 0, **{letter: number for number, letter in enumerate(letters, 1)}}
        Tokenizer(models.BPE(vocab=vocabulary, merges=[])).save(str(folder / "tokenizer.json"))

    make(workshop.folder / "one", "abc")
    make(workshop.folder / "other", "abd")
    shutil.copytree(workshop.folder / "one", workshop.folder / "moved")
    stopped(workshop, "tokenizer={path: one}")
    workshop.train("tokenizer={path: moved}", "train.exit_after=1 steps")
    line, *_ = refusal(workshop, capsys, "tokenizer={path: other}")
    assert line.startswith("tokenizer.path is other but the checkpoint has moved. Fixed: compared by content")
    shutil.rmtree(workshop.folder / "moved")
    shutil.copytree(workshop.folder / "other", workshop.folder / "moved")
    line, *_ = refusal(workshop, capsys, "tokenizer={path: moved}")
    assert "was trained with" in line


def test_orders_of_a_whole_run_refuse_what_would_reorder_the_past(
    workshop: Workshop, capsys: pytest.CaptureFixture[str]
) -> None:
    write_shard(workshop.folder / "other", seed=3)
    whole = ("data.order=bigscience", "model.family=bloom", "train.for=160 samples", "lr.decay=160 samples")
    both = "data.train=[{path: train}, {path: other}]"
    run = stopped(workshop, *whole, both)
    names = ["data.train", "model.seq_length", "batch"]
    workshop.train(*whole, "data.train=[{path: train, weight: 2}, {path: other}]", code=3, changes=names)
    follows = "With data.order=bigscience the order of all samples follows from it: some would repeat."
    assert re.search(r"data\.train is .* but the checkpoint has .* Fixed: ", capsys.readouterr().err)
    workshop.train(*whole, both, "model.seq_length=8", code=3, changes=names)
    assert "model.seq_length is 8 but the checkpoint has 16. Fixed: " in capsys.readouterr().err
    workshop.train(*whole, both, "train.for=6000 samples", code=3, changes=names)
    text = capsys.readouterr().err
    assert (
        f"train.for is 6000 samples = 6000 samples but the checkpoint has 160 samples = 160 samples. {follows}" in text
    )
    assert "Use 'train.for=160 samples' to resume" in text
    workshop.train(*whole, both, "batch.global_batch_size=16", changes=names)  # the samples asked for are the same
    assert workshop.events(run, "changed")[-1]["field"] == "batch.global_batch_size"
    assert [record.consumed_samples for record in read_metrics(run / "metrics.jsonl")][-2:] == [136, 152]


def test_ranks_agree_on_a_change_and_report_a_refusal_once(workshop: Workshop) -> None:
    two = ("launch={gpus_per_node: 2}", "batch.micro_batch_size=2", "train.for=4 steps")
    workshop.train(*two, "train.exit_after=2 steps")
    assert run_ranks(workshop, *two, "lr.peak=0.005") == 3
    assert said(workshop).count("lr.peak is 0.005 but the checkpoint has 0.01") == 1, said(workshop)
    run = workshop.train(*two, "lr.peak=0.005", changes=["lr.peak"])
    assert workshop.events(run, "start")[-1]["ranks"] == 2
    (event,) = workshop.events(run, "changed")
    assert (event["field"], event["step"], event["new"]) == ("lr.peak", 2, 0.005)


@pytest.mark.parametrize("order", ["timeless", "megatron"])
def test_another_shard_under_the_same_name_is_refused_if_only_one_token_differs(
    workshop: Workshop, capsys: pytest.CaptureFixture[str], order: str
) -> None:
    settings = (f"data.order={order}", "data.train=[{path: train, name: web}]")
    workshop.train(*settings, "train.exit_after=5 steps")
    for ending in (".bin", ".idx"):
        shutil.copy(workshop.folder / f"train{ending}", workshop.folder / f"kept{ending}")
    content = bytearray((workshop.folder / "train.bin").read_bytes())
    content[100] ^= 1
    (workshop.folder / "train.bin").write_bytes(content)
    capsys.readouterr()
    workshop.train(*settings, code=3)
    said = capsys.readouterr().err
    assert "the source 'web' has 60 documents and " in said
    assert "but the checkpoint is of another shard, with 60 documents and " in said
    assert "Restore the shard, or add the new one under another `name` with --change data.train" in said
    if order == "timeless":
        both = "data.train=[{path: kept, name: web}, {path: train, name: more}]"
        workshop.train("data.order=timeless", both, changes=["data.train"])
    else:
        workshop.train(settings[0], "data.train=[{path: kept, name: web}]")  # it may lie elsewhere


def test_a_source_that_was_away_is_still_known_by_its_shard(
    workshop: Workshop, capsys: pytest.CaptureFixture[str]
) -> None:
    write_shard(workshop.folder / "other", seed=5)
    both = "data.train=[{path: train}, {path: %s, name: b}]"
    ask: dict[str, Any] = {"changes": ["data.train"]}
    stopped(workshop, both % "valid")
    run = workshop.train("data.train=[{path: train}]", "train.exit_after=1 steps", **ask)
    manifest = json.loads((run / "checkpoints" / "step-00000006" / "manifest.json").read_text())
    assert set(manifest["shards"]) == {"train", "b"}
    workshop.train("data.train=[{path: train}]", "train.exit_after=1 steps")
    capsys.readouterr()
    workshop.train(both % "other", code=3, **ask)
    said = capsys.readouterr().err
    assert "the source 'b' has 60 documents and " in said
    assert "but the checkpoint is of another shard, with 20 documents and " in said
    workshop.train(both % "valid", **ask)


def test_a_shard_that_has_moved_does_not_begin_again_under_a_new_name(
    workshop: Workshop, capsys: pytest.CaptureFixture[str]
) -> None:
    run = stopped(workshop, "data.train=[{path: train}, {path: valid}]")
    for ending in (".bin", ".idx"):
        shutil.copy(workshop.folder / f"train{ending}", workshop.folder / f"moved{ending}")
    moved = "data.train=[{path: moved}, {path: valid}]"
    assert "a shard that has moved needs the `name` it had" in refusal(workshop, capsys, moved)[0]
    workshop.train(moved, code=3, changes=["data.train"])
    assert capsys.readouterr().err.splitlines()[-1] == (
        "bloomery: the source 'moved' is the shard that the run knows as 'train'. "
        "Under another name its samples would repeat from the beginning. Add `name: train` to the source."
    )
    twice = "data.train=[{path: train}, {path: valid}, {path: moved}]"
    workshop.train(twice, code=3, changes=["data.train"])
    assert capsys.readouterr().err.splitlines()[-1].endswith("Give 'train' more weight instead.")
    workshop.train("data.train=[{path: moved, name: train}, {path: valid}]")
    assert workshop.events(run, "changed") == []
