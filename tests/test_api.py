"""Bloomery from Python: what `import bloomery` offers, without the command line."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import bloomery
from bloomery.base.errors import DataError, RecipeError
from conftest import Workshop
from prepare_samples import make_texts, make_tokenizer, write_jsonl


def test_a_run_from_python_is_that_of_the_command(workshop: Workshop) -> None:
    by_command = workshop.train("train.for=6 steps", "checkpoint.phases=[{every: 3 steps}]", run="command")
    recipe = bloomery.load_recipe(workshop.recipe, "train.for=6 steps", "checkpoint.phases=[{every: 3 steps}]")
    run = bloomery.train(recipe, run_dir=workshop.folder / "api", device="cpu")
    assert run.metrics["lm loss"].tolist() == workshop.losses(by_command)
    assert run.metrics["step"].tolist() == [*range(1, 7)]
    assert (run.recipe.name, run.events[0]["kind"]) == (recipe.name, "start")
    assert [*run.checkpoints] == [3, 6]
    opened = bloomery.open_run(str(run.folder))
    assert np.array_equal(opened.metrics["lr"], run.metrics["lr"])
    tokens = torch.arange(8)[None]
    models = [bloomery.load_model(where, step) for where, step in ((run.folder, 3), (run.checkpoints[3], None))]
    assert torch.equal(models[0](tokens), models[1](tokens))
    assert not torch.equal(bloomery.load_model(str(run.folder))(tokens), models[0](tokens))
    with pytest.raises(RecipeError, match=r"--device is cpux\. This machine has: cpu"):
        bloomery.load_model(run.folder, device="cpux")
    again = bloomery.train(recipe, run_dir=run.folder, device="cpu", start_from=run.checkpoints[3])
    assert again.metrics["lm loss"].tolist() == run.metrics["lm loss"].tolist()


def test_validation_and_shards_and_tokenizers(workshop: Workshop, tmp_path: Path) -> None:
    make_tokenizer(tmp_path / "tok")
    path = tmp_path / "tok"
    write_jsonl(tmp_path / "a.jsonl", make_texts(30))
    recipe = bloomery.load_recipe(
        workshop.recipe, f"tokenizer={{path: {path}}}", f"prepare=[{{output: made, sources: [{tmp_path}/a.jsonl]}}]",
        "model.vocab_size=1000", "data={train: [{path: made}], split: '9,1', split_by: tokens}",
        "train={for: 2 steps, evaluate: {every: 2 steps, steps: 1}}",
    )  # fmt: skip
    assert bloomery.prepare(recipe)["made"].documents > 20
    run = bloomery.train(recipe, run_dir="run", device="cpu")
    assert run.validation["valid"]["step"].tolist() == [2]
    text = make_texts(1)[0]
    here, there = bloomery.load_tokenizer(path), bloomery.load_tokenizer(run.folder)
    assert here.content_hash == there.content_hash
    assert here.encode_batch([text])[0].tolist() == there.encode_batch([text])[0].tolist()


def test_mistakes_are_errors_with_remedies(workshop: Workshop, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="is no run folder"):
        bloomery.open_run(tmp_path)
    with pytest.raises(RecipeError, match="needs 2 ranks"):
        bloomery.train(workshop.recipe, "launch.gpus_per_node=2")
    with pytest.raises(RecipeError, match="Pass them to load_recipe"):
        bloomery.train(bloomery.load_recipe(workshop.recipe), "lr.peak=1")
    with pytest.raises(RecipeError, match=r"validation group vald\. There are: none"):
        bloomery.samples(workshop.recipe, group="vald")
    with pytest.raises(DataError, match="tokenizer"):
        bloomery.load_tokenizer("nope")
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = bloomery.nothing
    assert {*bloomery.__all__} <= {*dir(bloomery)}


def test_importing_it_is_instant_and_every_name_is_there() -> None:
    code = """
import sys, bloomery
assert not {"torch", "numpy", "pydantic", "bloomery.api"} & {*sys.modules}
import bloomery.train.loop, inspect
assert bloomery.train.__doc__.startswith("Train in this process")
assert "start_from" in inspect.signature(bloomery.train).parameters
assert all(callable(getattr(bloomery, name)) for name in bloomery.__all__)
"""
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
