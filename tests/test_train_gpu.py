"""The training loop on an accelerator: the same numbers as on a CPU, and the fast paths agree with the plain ones."""

from __future__ import annotations

import pytest
import torch

from checkpoints import assert_same_tensors
from conftest import Workshop

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.accelerator.is_available(), reason="needs an accelerator; this machine has none"),
]
WIDE = ("model.seq_length=128", "model.hidden_size=64", "train.for=12 steps")


def test_fp32_training_equals_the_cpu(workshop: Workshop) -> None:
    settings = (*WIDE, "train.compile=false")
    here = workshop.losses(workshop.train(*settings, run="cpu"))
    there = workshop.losses(workshop.train(*settings, run="gpu", device=None))
    assert there == pytest.approx(here, abs=2e-3)


@pytest.mark.parametrize("family", ["gpt2", "bloom", "llama"])
def test_compiled_and_bf16_training_follow_eager_fp32(workshop: Workshop, family: str) -> None:
    # A calm learning rate: at 1e-2 the loss bumps and any rounding grows a hundredfold, in eager mode as well.
    settings = (*WIDE, "lr.peak=2e-3", f"model.family={family}")
    exact, compiled, fast = (
        workshop.losses(
            workshop.train(*settings, f"precision={precision}", f"train.compile={on}", run=run, device=None)
        )
        for precision, on, run in (
            ("fp32", "false", "exact"),
            ("fp32", "true", "compiled"),
            ("bf16", "true", "fast"),
        )
    )
    assert compiled == pytest.approx(exact, abs=1e-4)
    assert fast == pytest.approx(exact, abs=5e-3)  # an H200 was 0.001 away


@pytest.mark.parametrize("recompute", ["mlp", "selective", "full"])
def test_recomputation_works_compiled(workshop: Workshop, recompute: str) -> None:
    settings = (*WIDE, "model.family=bloom", "precision=bf16")
    plain = workshop.losses(workshop.train(*settings, run="plain", device=None))
    again = workshop.losses(workshop.train(*settings, f"parallel.recompute={recompute}", run="again", device=None))
    assert again == pytest.approx(plain, abs=0.02)


def test_fp16_skips_overflows_and_recovers(workshop: Workshop) -> None:
    settings = (
        "precision=fp16",
        "loss_scale={initial: 1e12, hysteresis: 1}",
        "lr.decay=60 steps",
        "train.for=60 steps",
    )
    run = workshop.train(*WIDE[:2], *settings, device=None)
    rows = workshop.metrics(run)
    assert rows[0]["skipped_steps"] == 1
    assert rows[-1]["skipped_steps"] == 0
    assert workshop.losses(run)[-1] < workshop.losses(run)[0] - 0.5


def test_stop_and_resume_equals_one_unbroken_run(workshop: Workshop) -> None:
    settings = (*WIDE, "precision=bf16", "model.dropout=0.1", "train.compile=false")
    whole = workshop.train(*settings, run="whole", device=None)
    workshop.train(*settings, "train.exit_after=5 steps", run="halves", device=None)
    assert_same_tensors(whole, workshop.train(*settings, run="halves", device=None))


def test_device_memory_and_a_known_peak_are_logged(workshop: Workshop) -> None:
    record = workshop.metrics(workshop.train(*WIDE, "precision=bf16", device=None))[-1]
    assert record["peak_memory_bytes"] >= record["memory_bytes"] > 0
