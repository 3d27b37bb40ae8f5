"""A package with a model and a loss of its own is installed, found and trained; our samples feed another loop."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

import bloomery
from bloomery.data.open import open_data
from conftest import Workshop

EXAMPLE = Path(__file__).parents[1] / "examples" / "own-model"


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    source, target = tmp_path_factory.mktemp("source") / "own-model", tmp_path_factory.mktemp("installed")
    shutil.copytree(EXAMPLE, source)  # where it is built, something is left behind
    options = ["--no-deps", "--no-build-isolation", "--no-index", "--quiet", "--target", str(target)]
    subprocess.run([sys.executable, "-m", "pip", "install", *options, str(source)], check=True, timeout=120)
    return target


@pytest.fixture
def python(workshop: Workshop, installed: Path) -> Callable[..., str]:
    path = os.pathsep.join([str(installed), os.environ.get("PYTHONPATH", "")])

    def run(*words: object, code: int = 0) -> str:
        variables = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
        done = subprocess.run(
            [sys.executable, *map(str, words)], env=variables, capture_output=True, text=True, timeout=300
        )
        assert done.returncode == code, done.stderr
        assert "Traceback" not in done.stderr
        return done.stdout + done.stderr

    return run


def test_a_model_of_a_package_is_trained_resumed_and_shared(workshop: Workshop, python: Callable[..., str]) -> None:
    script = """
import bloomery, torch
from bloomery.base.errors import RecipeError
from bloomery.cli.main import main

run = lambda folder, *words: bloomery.train(recipe, *words, run_dir=folder, device="cpu")
run("uncut"), run("cut", "train.exit_after=20 steps"), run("cut")
assert bloomery.load_model("uncut")(torch.arange(16)[None]).shape == (1, 16, 64)
sums = ("model.family=own-sums", "data.train=[{path: '500'}]", "data.validation={few: [{path: '20'}]}")
sums += ("train={for: 6 steps, evaluate: {every: 6 steps, steps: 2}}",)
run("sums", *sums), run("half", *sums, "train.exit_after=3 steps"), run("half", *sums)
try:
    run("other", "parallel.tp=2")
except RecipeError as error:
    print(error)
words = ["launch={nodes: 1, gpus_per_node: 2}", "parallel.zero=3", "train.exit_after=6 steps", "--run-dir", "shared"]
assert main(["train", recipe, *words, "--device", "cpu", "--quiet"]) == 0
"""
    assert "A model of a package's own is not cut" in python("-c", f"recipe = {str(EXAMPLE / 'own.yaml')!r}{script}")
    losses = workshop.losses(Path("uncut"))
    assert losses[-1] < losses[0] - 0.5
    assert workshop.losses(Path("cut")) == losses
    assert workshop.losses(Path("half")) == workshop.losses(Path("sums"))
    assert np.allclose(workshop.losses(Path("shared")), losses[:6], atol=1e-4)


def test_a_loop_of_ones_own_goes_on_behind_the_last_sample(workshop: Workshop, python: Callable[..., str]) -> None:
    script = """
import runpy, sys
for state, steps in (("whole.pt", "6"), ("cut.pt", "4"), ("cut.pt", "2")):
    sys.argv = ["loop.py", "own.yaml", state, steps]
    runpy.run_path("loop.py")
"""
    shutil.copy(EXAMPLE / "loop.py", ".")
    shutil.copy(EXAMPLE / "own.yaml", ".")
    lines = python("-c", script).splitlines()
    assert len(lines) == 12
    assert lines[6:] == lines[:6]


def test_samples_are_those_of_the_run_wherever_one_begins(workshop: Workshop) -> None:
    words = ("data={train: [{path: train, weight: 3}, {path: valid}]}", "train.for=400 samples", "lr.decay=400 samples")
    recipe = bloomery.load_recipe(workshop.recipe, *words)
    samples = bloomery.samples(recipe)
    assert len(samples) == 400
    with open_data(recipe) as data:
        expected = data.train.batch(312, 8)
    batch = next(iter(DataLoader(samples.after(312), batch_size=8, num_workers=1)))
    assert torch.equal(batch["tokens"], expected.inputs["tokens"])
    assert torch.equal(batch["lm loss"], expected.targets["lm loss"])
    assert torch.equal(samples[312]["tokens"], batch["tokens"][0])
    assert len(samples.after(312)) == 88
    with pytest.raises(IndexError, match="400 is not below 400"):
        samples[400]
