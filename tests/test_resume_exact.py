"""What was changed by name is really right afterwards: no sample lost or repeated, every count goes on."""

from __future__ import annotations

import json
import random
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from pydantic import TypeAdapter

from bloomery.cli.main import main
from bloomery.config.load import load_recipe
from bloomery.config.recipe import Recipe
from bloomery.data.blend import PERIOD
from bloomery.sizing.schedule import History, TrainingPlan
from checkpoints import assert_same_tensors
from conftest import SMALL, Workshop


def recipe_of(workshop: Workshop, *overrides: str) -> Recipe:
    return load_recipe(str(workshop.recipe), overrides).recipe


def traced(workshop: Workshop, *overrides: str, run: str = "run", changes: tuple[str, ...] = ()) -> dict[int, str]:
    """Train, and say the hash of every sample that was trained on, by its position in the run."""
    folder = workshop.folder / f"trace-{run}-{len(list(workshop.folder.glob('trace-*')))}"
    asked = [word for field in changes for word in ("--change", field)]
    where = ["--run-dir", str(workshop.folder / run), "--device", "cpu", "--quiet"]
    assert (
        main(["train", str(workshop.recipe), *overrides, *asked, *where, "--trace", str(folder), "--trace-steps", "99"])
        == 0
    )
    seen: dict[int, str] = {}
    for line in (folder / "samples.jsonl").read_text().splitlines():
        for place, digest in json.loads(line)["samples"].items():
            assert int(place) not in seen, "no position is trained on twice"
            seen[int(place)] = digest
    return seen


def state_of(run: Path) -> dict[str, Any]:
    latest = (run / "checkpoints" / "latest").read_text().strip()
    state: dict[str, Any] = json.loads((run / "checkpoints" / latest / "state.json").read_text())
    return state


def test_after_another_batch_size_every_sample_comes_once_and_every_count_goes_on(workshop: Workshop) -> None:
    fixed = ("lr.decay=160 samples", "train.for=164 samples", "checkpoint.phases=[{every: 4 steps}]")
    whole = traced(workshop, *fixed, run="whole")
    seen = traced(workshop, *fixed, "train.exit_after=5 steps")
    bigger = (*fixed, "batch.global_batch_size=16")
    seen |= traced(workshop, *bigger, "train.exit_after=3 steps", changes=("batch.global_batch_size",))
    seen |= traced(workshop, *bigger)
    run = workshop.folder / "run"
    records = workshop.metrics(run)
    steps = [(record["step"], record["consumed_samples"], record["global_batch"]) for record in records]
    assert steps == [(n, 8 * n, 8) for n in range(1, 6)] + [(n, 40 + 16 * (n - 5), 16) for n in range(6, 13)]
    assert sorted(seen) == list(range(152)), "152 of 164 samples make whole batches"
    assert all(seen[place] == whole[place] for place in seen), "the order has nothing to do with the batch"
    lr = TrainingPlan.of(recipe_of(workshop, *fixed)).lr
    assert [record["lr"] for record in records] == [lr.at(record["consumed_samples"]) for record in records]
    assert [record["consumed_tokens"] for record in records] == [record["consumed_samples"] * 16 for record in records]
    assert {record["train_steps"] for record in records[5:]} == {12}
    saved = {path.name for path in (run / "checkpoints").glob("step-*")}
    assert saved == {f"step-{step:08d}" for step in (4, 5, 8, 12)}


def test_a_batch_changed_and_back_again_equals_the_run_that_never_did_in_its_counts(
    workshop: Workshop, capsys: pytest.CaptureFixture[str]
) -> None:
    samples = ("lr.decay=160 samples", "lr.warmup=32 samples")
    workshop.train(*samples, "train.exit_after=4 steps")
    workshop.train(*samples, "batch.global_batch_size=16", "train.exit_after=2 steps", changes=["batch"])
    run = workshop.train(*samples, "train.for=160 samples", changes=["batch"])
    assert workshop.metrics(run)[-1]["step"] == 4 + 2 + 12
    history = TypeAdapter(History).validate_python(state_of(run)["history"])
    assert (history.steps, history.samples, history.tokens) == (6, 64, 1024)
    assert [(each.first_step, each.global_batch) for each in history.stretches] == [(1, 8), (5, 16)]
    capsys.readouterr()
    assert main(["inspect", "schedule", str(workshop.recipe), *samples, "--run-dir", str(run), "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert [(each["first_step"], each["consumed_samples"]) for each in facts["levels"]] == [(1, 0), (5, 32), (7, 64)]
    assert main(["inspect", "step", str(workshop.recipe), "5", "--run-dir", str(run), "--json"]) == 0
    assert [sample["index"] for sample in json.loads(capsys.readouterr().out)] == list(range(32, 48))


def test_a_changed_batch_goes_on_bit_by_bit_after_a_further_stop(workshop: Workshop) -> None:
    ramp = ("batch={micro_batch_size: 4, global_batch_size: 16, rampup: {start: 8, increment: 4, samples: 100}}",)
    ramp += ("lr.decay=160 samples", "lr.warmup=32 samples", "train.for=200 samples")
    for run in ("one", "two"):
        workshop.train("lr.decay=160 samples", "lr.warmup=32 samples", "train.exit_after=5 steps", run=run)
    one = workshop.train(*ramp, run="one", changes=["batch"])
    workshop.train(*ramp, "train.exit_after=4 steps", run="two", changes=["batch"])
    two = workshop.train(*ramp, run="two")
    assert workshop.losses(one) == workshop.losses(two)
    assert_same_tensors(one, two)
    assert [record["global_batch"] for record in workshop.metrics(one)][5:9] == [8, 8, 12, 12]


BLENDS = {
    "weights": ("[{path: train, weight: 1}, {path: valid, weight: 1}]", "[{path: train, weight: 7}, {path: valid}]"),
    "added": ("[{path: train}]", "[{path: train, weight: 3}, {path: valid}]"),
    "removed": ("[{path: train, weight: 2}, {path: valid}]", "[{path: train}]"),
}


@pytest.mark.parametrize(("then", "now"), BLENDS.values(), ids=BLENDS)
def test_after_another_blend_no_sample_repeats_before_its_epoch_ends(workshop: Workshop, then: str, now: str) -> None:
    seen = traced(workshop, f"data.train={then}", "train.exit_after=6 steps")
    alone = {
        name: list(traced(workshop, f"data.train=[{{path: {name}}}]", run=name).values()) for name in ("train", "valid")
    }
    after = traced(workshop, f"data.train={now}", changes=("data.train",))
    assert sorted(seen) == list(range(48))
    assert sorted(after) == list(range(48, 160))
    hashes = [*seen.values(), *after.values()]
    assert len(set(hashes)) == 160, "fewer than an epoch of each source"
    for order in alone.values():  # of each source exactly the first ones of its own order, none left out
        taken = [digest for digest in hashes if digest in order]
        assert taken == order[: len(taken)]
    blend = state_of(workshop.folder / "run")["blend"]
    assert blend["first_sample"] == 48


LONGER = ("model.family=bloom", "lr.warmup=32 samples", "lr.decay=160 samples")


def test_another_sequence_length_begins_the_next_epoch_and_counts_tokens_right(workshop: Workshop) -> None:
    short = traced(workshop, *LONGER, "train.exit_after=5 steps")
    long = traced(workshop, *LONGER, "model.seq_length=32", "train.for=4480 tokens", changes=("model.seq_length",))
    run = workshop.folder / "run"
    records = workshop.metrics(run)
    # 5 steps of 8 x 16 tokens, then 15 steps of 8 x 32
    assert [record["consumed_tokens"] for record in records] == [128 * n for n in range(1, 6)] + [
        640 + 256 * n for n in range(1, 16)
    ]
    assert [record["consumed_samples"] for record in records] == [8 * n for n in range(1, 21)]
    per_token = {record["consumed_gigaflops"] / record["consumed_tokens"] for record in records if record["step"] > 15}
    assert max(per_token) - min(per_token) < 1e-4
    assert sorted(long) == list(range(40, 160))
    assert len(set(long.values())) == 120
    assert not {*short.values()} & {*long.values()}
    blend = state_of(run)["blend"]
    tokens = tokens_of(workshop, "train")
    assert blend == {
        "first_sample": 40,
        "cursors": {"train": (tokens - 1) // 32},
        "weights": {"train": 1.0},
        "lengths": {},
        "period": PERIOD,
    }
    unread = ((tokens - 1) // 16 - 40) * 16
    text = (run / "logs" / "main_log.txt").read_text()
    assert f"train: samples of 32 tokens begin with epoch 1; {unread:,} tokens of epoch 0 stay unread" in text
    from bloomery.checkpoint.inspect import describe_checkpoint

    assert describe_checkpoint(run)["consumed_tokens"] == 4480
    manifest = json.loads((run / "checkpoints" / "step-00000020" / "manifest.json").read_text())
    assert manifest["consumed_tokens"] == 4480


def tokens_of(workshop: Workshop, name: str) -> int:
    return (workshop.folder / f"{name}.bin").stat().st_size // 2


def test_a_rate_in_tokens_is_told_when_the_sequence_length_changes(
    workshop: Workshop, capsys: pytest.CaptureFixture[str]
) -> None:
    tokens = ("model.family=llama", "lr.warmup=512 tokens", "lr.decay=2560 tokens")
    workshop.train(*tokens, "train.exit_after=5 steps")
    capsys.readouterr()
    workshop.train(*tokens, "model.seq_length=32", code=3, changes=["model.seq_length"])
    text = capsys.readouterr().err
    assert "lr.decay is 100 samples but the checkpoint has 160 samples." in text
    assert "lr.warmup" not in text, "it has been, at the old length"
    run = workshop.train(*tokens, "model.seq_length=32", changes=["model.seq_length", "lr.decay"])
    ends = [record["consumed_tokens"] for record in workshop.metrics(run) if record["lr"] == pytest.approx(1e-3)]
    assert ends[0] == 640 + 8 * 256, "the first whole step that reaches 2560 tokens"


def test_a_source_that_was_away_when_the_length_changed_comes_back_at_the_new_one(workshop: Workshop) -> None:
    both, one = "data.train=[{path: train}, {path: valid}]", "data.train=[{path: train}]"
    workshop.train(*LONGER, both, "train.exit_after=4 steps")
    asked = ["model.seq_length", "data.train"]
    longer = (*LONGER, "model.seq_length=32")
    run = workshop.train(*longer, one, "train.exit_after=2 steps", changes=asked)
    blend = state_of(run)["blend"]
    assert (blend["cursors"]["valid"], blend["lengths"]) == (16, {"valid": 16})
    workshop.train(*longer, both, "train.exit_after=2 steps", changes=asked)
    blend = state_of(run)["blend"]
    tokens = tokens_of(workshop, "valid")
    assert (blend["cursors"]["valid"], blend["lengths"]) == ((tokens - 1) // 32, {})


# ---------------------------------------------------------------- arithmetic


def settings(dice: random.Random) -> dict[str, Any]:
    full = dice.choice([8, 16, 24])
    rampup = {"start": 4, "increment": 4, "samples": dice.randint(20, 200)} if dice.random() < 0.4 else None
    batch = {"micro_batch_size": 4, "global_batch_size": full, "rampup": rampup}
    return {"batch": batch, "model": {**SMALL["model"], "family": "bloom", "seq_length": dice.choice([8, 16, 32])}}


def test_a_plan_that_goes_on_counts_what_really_was() -> None:
    """Runs that change their batch and sequence length at random, step by step, against the closed forms."""
    from bloomery.families.registry import family_defaults

    dice = random.Random(3)
    for _ in range(60):
        lived, samples, tokens = [(0, 0)], 0, 0
        plan: TrainingPlan | None = None
        for _ in range(dice.randint(1, 5)):
            raw: dict[str, Any] = {**SMALL, **settings(dice)}
            raw["model"] |= family_defaults(raw["model"])
            recipe = Recipe.model_validate(raw)
            plan = TrainingPlan.resumed(recipe, plan, len(lived) - 1) if plan else TrainingPlan.of(recipe)
            plan = TrainingPlan.of(recipe, TypeAdapter(History).validate_json(json.dumps(asdict(plan.history))))
            for _ in range(dice.randint(0, 12)):
                size = plan.batch.global_batch_at(samples)
                samples, tokens = samples + size, tokens + size * recipe.model.seq_length
                lived.append((samples, tokens))
        assert plan is not None
        for step, (had, had_tokens) in enumerate(lived):
            assert plan.batch.consumed_after_step(step) == had
            assert plan.tokens_at(had) == had_tokens
            assert plan.history.samples_at(had_tokens, seq_length=plan.seq_length) == had
            assert plan.batch.first_step_reaching(had) == step
            if step:
                assert plan.batch.global_batch_at_step(step) == had - lived[step - 1][0]
        for asked in range(0, plan.history.samples, 5):
            assert plan.batch.train_steps_for_samples(asked) == max(
                n for n, (had, _) in enumerate(lived) if had <= asked
            )
        beyond = max(plan.batch.ramp_samples, samples) + 100  # outside the ramp, where Megatron counts as everybody
        steps = plan.batch.train_steps_for_samples(beyond)
        assert plan.batch.consumed_after_step(steps) <= beyond < plan.batch.consumed_after_step(steps + 1)
