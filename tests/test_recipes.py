"""Every shipped recipe loads, has a plan, has the size it claims, and is the model that gets built."""

from __future__ import annotations

from importlib import resources

import pytest

from bloomery.config.load import load_recipe, shipped_recipes
from bloomery.config.recipe import Recipe
from bloomery.model.transformer import build_model
from bloomery.sizing.check import load_checked_recipe
from bloomery.sizing.layout import Layout
from bloomery.sizing.parameters import count_parameters
from bloomery.sizing.schedule import TrainingPlan

PARAMETERS = {
    "bert-large": 336_297_858,
    "bloom-1.3b": 1_311_629_312,
    "bloom-176b": 176_247_271_424,
    "bloom-azure-20b": 23_328_169_984,
    "bloom-azure-25b": 28_261_044_224,
    "bloom13b-hostfile": 12_853_626_880,
    "gpt-1.3b": 1_315_819_520,
    "gpt3-175b": 174_604_836_864,
    "gpt3-356m": 355_919_872,
    "gpt3-64m-smoke": 64_109_568,
    "llama-1b": 1_100_048_384,
    "quickstart": 1_071_872,
    "qwen3-0.6b": 596_049_920,
    "tr1-13b": 12_853_626_880,
}
"""With the padded vocabulary: what is built, trained and saved."""


def recipe(name: str) -> Recipe:
    return load_recipe(name).recipe


def test_the_pinned_recipes_are_the_shipped_ones() -> None:
    assert sorted(PARAMETERS) == shipped_recipes()


@pytest.mark.parametrize("name", sorted(PARAMETERS))
def test_a_shipped_recipe_is_whole_from_raw_text(name: str) -> None:
    found = recipe(name)
    assert found.data is not None
    groups = [found.data.train, *found.data.validation.values(), *found.data.test.values()]
    assert {source.path for group in groups for source in group} <= {section.output for section in found.prepare}
    assert all(section.split_sentences == (found.model.family == "bert") for section in found.prepare)


@pytest.mark.parametrize("name", sorted(PARAMETERS))
def test_a_shipped_recipe_is_sound_and_is_the_model_that_gets_built(name: str) -> None:
    text = (resources.files("bloomery") / "recipes" / f"{name}.yaml").read_text(encoding="utf-8")
    assert text.startswith("# ")
    checked = load_checked_recipe(name)
    assert (checked.recipe.name, checked.warnings) == (name, [])
    plan = TrainingPlan.of(checked.recipe)
    assert plan.train_steps > 0
    assert plan.lr.warmup_samples < plan.lr.decay_samples
    assert plan.save_steps()
    samples_at_once = checked.recipe.batch.micro_batch_size * Layout.of(checked.recipe).dp
    assert all(level.global_batch % samples_at_once == 0 for level in plan.batch.levels)
    model = checked.recipe.model
    assert count_parameters(model, padded=True).total == PARAMETERS[name]
    assert sum(parameter.numel() for parameter in build_model(model).parameters()) == PARAMETERS[name]


def test_tr1_keeps_the_loss_scale_of_its_ds_config() -> None:
    tr1 = recipe("tr1-13b")
    scale = tr1.loss_scale
    assert tr1.precision == "fp16"
    assert (scale.initial, scale.window.count, scale.hysteresis, scale.min) == (4096.0, 500, 2, 1.0)


def test_the_hostfile_recipe_is_tr1_in_bf16_on_other_machines() -> None:
    tr1, habana = recipe("tr1-13b"), recipe("bloom13b-hostfile")
    assert (habana.model, habana.batch, habana.lr, habana.seed) == (tr1.model, tr1.batch, tr1.lr, tr1.seed)
    assert (habana.precision, habana.train.exit_after, Layout.of(habana).dp) == ("bf16", None, 4)
