"""The arithmetic of a step: what the loss is the mean of, what decays, what is clipped, what fp32 keeps."""

from __future__ import annotations

import json
import math
import shutil
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

from bloomery.base.errors import DivergedError
from bloomery.base.ranks import Piece
from bloomery.base.units import Amount
from bloomery.config.recipe import LossScaleSection, OptimizerSection
from bloomery.data.batch import Batch, GlobalBatch
from bloomery.families.family import IGNORED_LABEL
from bloomery.model.loss import row_losses
from bloomery.parallel.gradients import Gradients, Weight, count_zeros, total_norm
from bloomery.parallel.mesh import Mesh
from bloomery.parallel.runner import PlainExecution, Runner
from bloomery.train.optimizer import LossScale, Optimizer
from conftest import Workshop


def test_training_learns(workshop: Workshop) -> None:
    losses = workshop.losses(workshop.train("train.for=60 steps"))
    assert losses[0] > 4.0  # ln 64 = 4.16
    assert losses[-1] < losses[0] - 1.0


def test_the_micro_batch_size_changes_nothing_but_rounding(workshop: Workshop) -> None:
    curves = [
        workshop.losses(workshop.train(f"batch.micro_batch_size={size}", run=f"mbs{size}")) for size in (1, 2, 4, 8)
    ]
    for curve in curves[1:]:
        assert curve == pytest.approx(curves[0], abs=1e-4)


def weights_of(**parameters: nn.Parameter) -> list[Weight]:
    return [
        Weight(name, parameter, Piece.whole(parameter.data), is_shared=False, summed_over_tp=False, tied_over_pp=False)
        for name, parameter in parameters.items()
    ]


def gradients_of(weights: list[Weight], values: list[torch.Tensor], *, micro_batches: int = 2) -> Gradients:
    gradients = Gradients(weights, Mesh())
    gradients.clear(micro_batches=micro_batches)
    for weight, value in zip(weights, values, strict=True):
        weight.parameter.grad = value.to(weight.parameter.dtype)
    gradients.accumulate()
    return gradients


class Probe(nn.Module):
    """Logits straight from a table, so that gradients can be checked by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(5, 5, generator=torch.Generator().manual_seed(0)))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.table[tokens]


def test_the_loss_is_the_mean_over_valid_tokens_however_the_batch_is_cut() -> None:
    tokens = torch.tensor([[0, 1, 2], [3, 4, 0], [1, 1, 1], [2, 3, 4]])
    labels = torch.tensor(
        [[1, IGNORED_LABEL, IGNORED_LABEL], [4, 0, 1], [IGNORED_LABEL, IGNORED_LABEL, IGNORED_LABEL], [3, 4, 0]]
    )
    found = []
    for rows in (1, 2, 4):
        probe = Probe()
        gradients = Gradients(weights_of(table=probe.table), Mesh())
        execution = PlainExecution(probe, gradients, row_losses, zero=0, compile_model=False)
        parts = {"execution": execution, "gradients": gradients, "mesh": Mesh(), "device": torch.device("cpu")}
        runner = Runner(**parts, seq_length=3, num_sources=1, dropout_seed=None)
        parts = [Batch({"tokens": tokens[i : i + rows]}, {"lm loss": labels[i : i + rows]}) for i in range(0, 4, rows)]
        batch = GlobalBatch(0, 4, parts, {"lm loss": np.array([1, 3, 0, 3])}, {"lm loss": 7})
        loss = runner.forward_backward(batch, loss_scale=1.0, step=1).means["lm loss"]
        found.append((loss.item(), runner.gradients.tensors()[0].clone()))
    expected = nn.functional.cross_entropy(Probe()(tokens).flatten(0, 1), labels.flatten(), ignore_index=IGNORED_LABEL)
    for loss, gradient in found:
        assert loss == pytest.approx(expected.item(), abs=1e-6)
        torch.testing.assert_close(gradient, found[0][1])


def test_updates_equal_torchs_adamw_with_clipping() -> None:
    def weights() -> list[nn.Parameter]:
        random = torch.Generator().manual_seed(1)
        return [nn.Parameter(torch.randn(6, 5, generator=random)), nn.Parameter(torch.randn(5, generator=random))]

    ours, theirs = weights(), weights()
    section = OptimizerSection(betas=[0.9, 0.99], weight_decay=0.3, clip_grad_norm=0.7)
    held = weights_of(a=ours[0], b=ours[1])
    optimizer = Optimizer(held, section, compute_dtype=torch.float32)
    groups = [{"params": theirs[:1], "weight_decay": 0.3}, {"params": theirs[1:], "weight_decay": 0.0}]
    reference = torch.optim.AdamW(groups, lr=0.0, betas=(0.9, 0.99), eps=1e-8)
    random = torch.Generator().manual_seed(2)
    for step in range(1, 6):
        gradients = [torch.randn(parameter.shape, generator=random) for parameter in ours]
        lr = 0.1 / step
        for parameter, gradient in zip(theirs, gradients, strict=True):
            parameter.grad = gradient.clone()
        norm = torch.nn.utils.clip_grad_norm_(theirs, 0.7)
        for group in reference.param_groups:
            group["lr"] = lr
        reference.step()
        scaled = gradients_of(held, [gradient.clone() * 8 for gradient in gradients])
        numbers = optimizer.update(scaled, lr=lr, loss_scale=8.0)
        assert numbers.grad_norm.item() == pytest.approx(norm.item(), rel=1e-6)
        assert numbers.skipped.item() == 0.0
        for a, b in zip(ours, theirs, strict=True):
            torch.testing.assert_close(a.data, b.data, rtol=1e-5, atol=1e-6)


def test_the_norm_of_a_large_gradient_is_right_however_it_is_cut() -> None:
    """torch's own fp32 norm is low by 1e-3 here."""
    values = torch.randn(10_000_001, generator=torch.Generator().manual_seed(3))
    right = float(np.linalg.norm(values.double().numpy()))
    for parts in (1, 2, 3, 1000):
        weights = {f"w{i}": nn.Parameter(torch.empty(len(part))) for i, part in enumerate(values.chunk(parts))}
        norm = gradients_of(weights_of(**weights), list(values.chunk(parts))).norm()
        assert norm.item() == pytest.approx(right, rel=1e-7), f"cut into {parts}"
    for wrong in (torch.inf, torch.nan):
        values[-1] = wrong
        assert not total_norm([values]).isfinite()


def test_fp32_masters_keep_updates_that_bf16_would_lose() -> None:
    weight = nn.Parameter(torch.ones(4, 4))
    held = weights_of(w=weight)
    optimizer = Optimizer(held, OptimizerSection(weight_decay=0.0), compute_dtype=torch.bfloat16)
    assert weight.dtype == torch.bfloat16
    for _ in range(20):  # each step moves 1.0 by 1e-4, far below the spacing of bf16 near 1, which is 2^-8
        optimizer.update(gradients_of(held, [torch.ones(4, 4)]), lr=1e-4, loss_scale=1.0)
    master = optimizer.pieces()["model.w"].tensor
    assert master.dtype == torch.float32
    assert master[0, 0].item() == pytest.approx(1 - 20e-4, abs=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_one_micro_batch_needs_no_fp32_gradients_and_updates_the_same(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A few weights at a time, as of large models; the last one is added up over ranks."""
    monkeypatch.setattr("bloomery.train.optimizer._ELEMENTS_AT_ONCE", 40)
    random = torch.Generator().manual_seed(4)
    values = [torch.randn(size, generator=random) for size in ((6, 5), (5,), (50, 2), (3,), (7,))]
    values[1][2] = 0.0
    found = []
    for micro_batches in (1, 2):
        held = weights_of(**{f"w{i}": nn.Parameter(value.clone()) for i, value in enumerate(values)})
        held[-1] = replace(held[-1], summed_over_tp=True)
        optimizer = Optimizer(held, OptimizerSection(clip_grad_norm=0.7), compute_dtype=dtype)
        for _ in range(3):
            gradients = gradients_of(held, values, micro_batches=micro_batches)
            pieces = [piece.tensor for piece in gradients.pieces(scale=0.1).values()]
            numbers = optimizer.update(gradients, lr=0.1, loss_scale=2.0, logs=True)
        kept = [gradient.dtype for gradient in gradients.tensors()]
        assert kept == ([dtype] * 4 if micro_batches == 1 else [torch.float32] * 4) + [torch.float32]
        masters = [piece.tensor for piece in optimizer.pieces().values()]
        found.append([numbers.grad_norm, numbers.num_zeros, *pieces, *masters, *(w.parameter.data for w in held)])
    assert found[0][1] == 1
    assert all(torch.equal(a, b) and a.dtype == b.dtype for a, b in zip(*found, strict=True))


def test_gradients_of_16_bit_weights_are_summed_in_fp32() -> None:
    weight = nn.Parameter(torch.zeros(1, dtype=torch.bfloat16))
    total = Gradients(weights_of(w=weight), Mesh())
    total.clear(micro_batches=101)
    for value in [256.0] + [1.0] * 100:  # 256 + 1 is 256 in bf16
        weight.grad = torch.tensor([value], dtype=torch.bfloat16)
        total.accumulate()
    assert total.tensors()[0].item() == 356.0


@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile on a CPU needs g++")
def test_a_compiled_run_equals_an_eager_one(workshop: Workshop) -> None:
    settings = ("train.for=3 steps", "model.num_layers=1")
    eager = workshop.losses(workshop.train(*settings, run="eager"))
    assert workshop.losses(workshop.train(*settings, "train.compile=true", run="compiled")) == pytest.approx(
        eager, abs=1e-5
    )


def test_the_logged_rate_and_batch_are_those_of_the_plan(workshop: Workshop) -> None:
    run = workshop.train("batch.rampup={start: 4, increment: 4, samples: 30}", "train.for=120 samples", "lr.decay=null")
    rows = [(r["consumed_samples"], r["global_batch"], r["lr"]) for r in workshop.metrics(run)]
    assert [row[:2] for row in rows[:9]] == [
        (4, 4), (8, 4), (12, 4), (16, 4), (20, 4), (24, 4), (28, 4), (32, 4), (40, 8)
    ]  # fmt: skip
    warmup, decay = 16, 120  # four steps of four samples; the end of training
    for consumed, _, lr in rows:
        share = (consumed - warmup) / (decay - warmup)
        cosine = 1e-3 + (1e-2 - 1e-3) * 0.5 * (1 + math.cos(math.pi * share))
        assert lr == pytest.approx(1e-2 * consumed / warmup if consumed <= warmup else cosine, rel=1e-12)


def test_validation_groups_are_evaluated_by_name_and_do_not_touch_the_training(workshop: Workshop) -> None:
    settings = ("train.for=9 steps", "model.dropout=0.1")
    groups = "data.validation={near: [{path: train}], far: [{path: valid}]}"
    run = workshop.train(*settings, groups, "train.evaluate={every: 4 steps, steps: 2}")
    assert workshop.losses(run) == workshop.losses(workshop.train(*settings, run="plain"))
    rows = workshop.metrics(run, "validation")
    assert [(row["step"], row["group"]) for row in rows] == [
        (4, "near"), (4, "far"), (8, "near"), (8, "far"), (9, "near"), (9, "far")
    ]  # fmt: skip
    for row in rows:
        assert row["perplexity"] == pytest.approx(math.exp(row["losses"]["lm loss"]))
    text = (run / "logs" / "main_log.txt").read_text()
    assert "near loss at iteration 4" in text


def test_skipped_steps_count_as_consumed_and_learn_nothing(workshop: Workshop) -> None:
    plain = workshop.train("train.for=6 steps", "lr={peak: 1e-2, schedule: constant}", run="plain")
    run = workshop.train(
        "train.for=6 steps", "lr={peak: 1e-2, schedule: constant}", "train.skip=['2-4 steps']", run="skip"
    )
    rows = workshop.metrics(run)
    assert [row["step"] for row in rows] == [1, 5, 6]
    assert rows[-1]["consumed_samples"] == workshop.metrics(plain)[-1]["consumed_samples"] == 48
    assert [event["first_sample"] for event in workshop.events(run, "skip")] == [8]
    assert "steps 2 to 4 are skipped, as train.skip says" in (run / "logs" / "main_log.txt").read_text()
    # Step 5 sees its own samples with the weights of step 1: a run of two steps over samples 0-7 and 32-39.
    assert rows[1]["losses"] != workshop.metrics(plain)[1]["losses"]


@pytest.mark.parametrize("consecutive", [False, True])
@pytest.mark.parametrize("hysteresis", [1, 2, 5])
@pytest.mark.parametrize(("window", "chance"), [(1, 0.4), (2, 0.3), (7, 0.1), (50, 0.02), (500, 0.006)])
def test_the_loss_scale_follows_deepspeeds_scaler_over_20_000_random_steps(
    window: int, chance: float, hysteresis: int, consecutive: bool
) -> None:
    """Against DeepSpeed's rules of 2021, which count iterations: `(this - last overflow) % window == 0` doubles. An
    overflow comes by chance, or because the scale is too high; at the minimum both give up, and begin again."""
    fields = {"initial": 4096.0, "min": 8.0, "hysteresis": hysteresis, "consecutive_hysteresis": consecutive}
    section = LossScaleSection(window=Amount(window, "steps"), **fields)  # type: ignore[arg-type]
    random, given_up = np.random.default_rng([window, hysteresis, consecutive]), 0
    ours, scale, left, last_overflow = LossScale.start(section), 4096.0, hysteresis, -1
    for iteration in range(20_000):
        assert (ours.scale, ours.patience) == (scale, left), f"after {iteration} steps"
        overflow = bool(random.random() < chance or scale > 2.0**24)
        if overflow and left == 1 and scale == 8.0:
            given_up += 1
            with pytest.raises(DivergedError):
                ours.update(section, overflow=True)
            ours, scale, left, last_overflow = LossScale.start(section), 4096.0, hysteresis, iteration
            continue
        ours.update(section, overflow=overflow)
        if overflow:
            scale, left = (scale / 2, 1) if left == 1 else (scale, left - 1)
            last_overflow = iteration
        elif (iteration - last_overflow) % window == 0:
            scale, left = scale * 2, hysteresis
        elif consecutive:
            left = hysteresis
    if window == 500 and not consecutive:
        assert given_up, "the minimum was met"


def test_an_overflow_at_the_smallest_loss_scale_stops_the_training_with_a_suspicious_checkpoint(
    workshop: Workshop, capsys: pytest.CaptureFixture[str]
) -> None:
    run = workshop.train("precision=fp16", "loss_scale={initial: 1e12, min: 1e12, hysteresis: 1}", code=4)
    said = capsys.readouterr().err
    assert "smallest loss scale, 1000000000000.0" in said
    assert "o checkpoint is known to be good" in said
    assert workshop.events(run, "stop")[-1]["reason"] == "diverged"
    (manifest,) = (run / "checkpoints").glob("step-*/manifest.json")
    assert json.loads(manifest.read_text())["suspicious"]


def test_an_overflow_skips_the_update_and_does_not_advance_the_rate(workshop: Workshop) -> None:
    settings = (
        "precision=fp16",
        "loss_scale={initial: 1e12, hysteresis: 1}",
        "train.for=40 steps",
        "lr={peak: 1e-2, warmup: 30 steps}",
    )
    run = workshop.train(*settings)
    rows = workshop.metrics(run)
    skipped = [row["skipped_steps"] for row in rows]
    assert skipped[0] == 1
    assert sum(skipped) == len(workshop.events(run, "skipped_update")) > 3
    good = 0
    for row in rows:
        expected = 1e-2 * (good + 1) / 30
        assert row["lr"] == pytest.approx(min(expected, row["lr"] if good >= 29 else expected))
        good += not row["skipped_steps"]
    assert [row["consumed_samples"] for row in rows] == [8 * (i + 1) for i in range(40)]
    assert "number of skipped iterations:   1" in (run / "logs" / "main_log.txt").read_text()


def test_a_diverging_run_shows_its_nan_deletes_no_checkpoint_saves_and_stops(
    workshop: Workshop, capsys: pytest.CaptureFixture[str]
) -> None:
    keep = ("checkpoint={phases: [{every: 1 steps}], keep: {last: 1}}", "monitor.log_every=100 steps")
    run = workshop.train("lr={peak: 1e38, schedule: constant}", "optimizer.weight_decay=0", *keep, code=4)
    assert len(list((run / "checkpoints").glob("step-*"))) >= 2
    assert [record["nan_steps"] for record in workshop.metrics(run)] == [1, 1, 1, 1]  # three, and the one under way
    said = capsys.readouterr().err
    assert "3 steps in a row" in said
    assert "train.skip" in said
    assert "Traceback" not in said
    assert workshop.events(run, "stop")[-1]["reason"] == "diverged"
    assert (run / "checkpoints" / "latest").is_file()
    text = (run / "logs" / "main_log.txt").read_text()
    assert "lm loss: NAN" in text or "lm loss: INF" in text
    assert "number of nan iterations:   1" in text


def test_zeros_are_counted_one_by_one_in_large_tensors_too() -> None:
    large = torch.ones(2**25 + 3)  # more than fp32 can count
    large[[0, 5, 2**24, 2**25 + 2]] = 0.0
    odd = torch.tensor([[0.0, -0.0, float("nan")], [float("inf"), 1e-45, 0.0]])
    assert count_zeros([large, odd.T], device=odd.device).item() == 4 + 3
    assert count_zeros([], device=odd.device).item() == 0
