"""`train.for` in epochs: counted exactly, for one source and for blends, shown, trained and resumed."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from bloomery.base.errors import RecipeError
from bloomery.config.load import load_recipe
from bloomery.data.epochs import counted
from bloomery.data.open import open_data
from bloomery.sizing.schedule import TrainingPlan
from conftest import Workshop, write_shard

Command = Callable[..., tuple[int, str, str]]
BLEND = "data.train=[{path: train, name: big, weight: 3}, {path: valid, name: small, weight: 2}]"
UNTIED = "lr={peak: 1e-2, schedule: cosine}"


@pytest.mark.parametrize(
    ("length", "overrides", "key"),
    [
        ("1 epochs", [], "train"),
        ("3 epochs", [BLEND], "small"),
        ("1 epoch of big", [BLEND], "big"),
        ("1 epochs", ["batch.rampup={start: 2, increment: 2, samples: 40}", "batch.micro_batch_size=2"], "train"),
        ("1 epochs", ["batch.rampup={start: 2, increment: 2, samples: 400000}", "batch.micro_batch_size=2"], "train"),
    ],
)
def test_the_last_step_is_the_first_with_all_samples_of_the_epochs(
    workshop: Workshop, length: str, overrides: list[str], key: str
) -> None:
    recipe = load_recipe(str(workshop.recipe), [f"train.for={length}", UNTIED, *overrides]).recipe
    found = counted(recipe)
    plan = TrainingPlan.of(found)
    with open_data(found) as data:
        assert data.blend is not None
        source = next(each for each in data.train.sources if each.key == key)
        wanted = int(length.split()[0]) * source.num_samples
        before, after = (plan.batch.consumed_after_step(plan.train_steps - back) for back in (1, 0))
        assert data.blend.taken(before)[key] < wanted <= data.blend.taken(after)[key]
    assert counted(found) is found


def test_a_training_of_an_epoch_resumes_and_is_the_one_in_samples(workshop: Workshop, command: Command) -> None:
    write_shard(workshop.folder / "train", documents=6)
    words = ("inspect", "schedule", str(workshop.recipe), "train.for=1 epochs", UNTIED, "--json")
    steps = json.loads(command(*words)[1])["train_steps"]
    assert "1 epochs, fingerprint" in command("check", str(workshop.recipe), "train.for=1 epochs", UNTIED)[1]
    run = workshop.train("train.for=1 epochs", UNTIED, "train.exit_after=2 steps")
    workshop.train("train.for=1 epochs", UNTIED)
    assert len(workshop.losses(run)) == steps
    saved = yaml.safe_load((run / "recipe.yaml").read_text())
    assert saved["train"]["for"] == f"{8 * steps} samples"
    assert workshop.losses(run) == workshop.losses(workshop.train(f"train.for={steps} steps", UNTIED, run="other"))


def test_epochs_that_cannot_be_counted_name_the_rule(workshop: Workshop, command: Command) -> None:
    recipe = str(workshop.recipe)
    for overrides, message in (
        (["train.for=1 epochs", "data.order=megatron"], "The order of these follows from the length"),
        (["train.for=1 epochs of wiki"], "The sources of data.train are train. Name one of them"),
        (["train.for=0 epochs"], "Must be greater than 0"),
    ):
        code, _, err = command("check", recipe, *overrides)
        assert (code, message in err) == (2, True), err
    with pytest.raises(RecipeError, match="They are counted when the data is opened"):
        TrainingPlan.of(load_recipe(recipe, ["train.for=1 epochs"]).recipe)
    warmup = "lr={peak: 1e-2, schedule: cosine, warmup: 100k samples}"
    with pytest.raises(RecipeError, match=r"train.for is 1 epochs, which is \d+ samples. A warm-up of 100,000"):
        counted(load_recipe(recipe, ["train.for=1 epochs", warmup]).recipe)


def test_missing_data_is_named(workshop: Workshop, command: Command) -> None:
    Path("train.idx").unlink()
    code, _, err = command("inspect", "schedule", str(workshop.recipe), "train.for=1 epochs", UNTIED)
    assert code == 3
    assert "train.idx" in err
