"""Every collective of the accelerator's backend, on one rank: wrapped as if there were others, it trains the same."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from conftest import Workshop

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.accelerator.is_available(), reason="needs an accelerator; this machine has none"),
]
WRAPPED = Path(__file__).parents[1] / "benchmarks" / "wrapped_rank.py"
WIDE = ("model.seq_length=128", "model.hidden_size=64", "train.for=8 steps")


@pytest.mark.parametrize("family", ["gpt2", "bloom", "llama"])
@pytest.mark.parametrize("wrapped", ["data", "all"])
@pytest.mark.parametrize("options", [("train.compile=false",), ("precision=bf16",)], ids=["fp32", "bf16-compiled"])
def test_one_wrapped_rank_trains_as_one_process(
    workshop: Workshop, family: str, wrapped: str, options: tuple[str, ...]
) -> None:
    settings = (*WIDE, f"model.family={family}", *options)
    plain = workshop.losses(workshop.train(*settings, run="plain", device=None))
    folder = workshop.folder / "wrapped"
    command = [sys.executable, str(WRAPPED), wrapped, "train", str(workshop.recipe), *settings, "--quiet"]
    done = subprocess.run(
        [*command, "--run-dir", str(folder)], cwd=workshop.folder, env=os.environ, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert workshop.losses(folder) == pytest.approx(plain, abs=1e-5 if "train.compile=false" in options else 0.02)
