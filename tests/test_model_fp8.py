"""Products of 8-bit floats: their rounding against its definition, layouts and resumes, and where they may be used."""

from __future__ import annotations

import math

import pytest
import torch

import rank_commands  # noqa: F401  (ranks are forked with it)
from bloomery.base import exit_codes
from bloomery.model.linear import FORWARD, GRADIENT, Linear, cast_to_fp8
from checkpoints import assert_same_tensors
from conftest import Workshop
from test_parallel import run_ranks, said

LARGEST = {FORWARD: 448.0, GRADIENT: 57344.0}
FP8 = ("precision=fp8", "model.hidden_size=64", "lr.peak=2e-3", "train.for=8 steps")


@pytest.mark.parametrize("dtype", [FORWARD, GRADIENT])
@pytest.mark.parametrize("largest", [1.0, 1.75, 1.7578125, 448.0, 449.0, 3e38, 1e-30, 2.0**-140])
def test_the_scale_is_the_largest_power_of_two_that_fits(dtype: torch.dtype, largest: float) -> None:
    x = torch.tensor([[largest, -largest / 2, 0.0]])
    cast, transposed, inverse = cast_to_fp8(x, dtype)
    scale = 1 / inverse.item()
    assert math.frexp(scale)[0] == 0.5
    assert largest * scale <= LARGEST[dtype]
    assert 2 * largest * scale > LARGEST[dtype] or scale == 2.0**126
    assert torch.equal(transposed.float(), cast.float().t())
    assert torch.equal(cast.float(), (x * scale).to(dtype).float())


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_what_is_not_finite_stays_visible(bad: float) -> None:
    x = torch.ones(4, 4)
    x[1, 2] = bad
    cast, _, inverse = cast_to_fp8(x, FORWARD)
    assert cast.float().isnan().all()
    assert inverse.isnan()
    assert cast_to_fp8(torch.zeros(2, 2), FORWARD)[0].float().eq(0).all()


def test_products_and_gradients_are_those_of_the_rounded_matrices() -> None:
    generator = torch.Generator().manual_seed(0)
    linear = Linear(48, 32)
    x = torch.randn(3, 5, 48, generator=generator, requires_grad=True)
    gradient = torch.randn(3, 5, 32, generator=generator)

    def rounded(matrix: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        scale = 2.0 ** math.floor(math.log2(LARGEST[dtype] / matrix.abs().max().item()))
        return (matrix * scale).to(dtype).float() / scale

    linear.fp8 = True
    out = linear(x)
    out.backward(gradient)
    x8, w8 = rounded(x.detach(), FORWARD), rounded(linear.weight.detach(), FORWARD)
    g8 = rounded(gradient, GRADIENT)
    torch.testing.assert_close(out.detach(), x8 @ w8.t() + linear.bias)
    torch.testing.assert_close(x.grad, g8 @ w8)
    torch.testing.assert_close(linear.weight.grad, torch.einsum("bsn,bsk->nk", g8, x8))
    torch.testing.assert_close(linear.bias.grad, gradient.sum((0, 1)))


def test_a_part_is_rounded_as_the_whole_is() -> None:
    whole = torch.randn(64, 64, generator=torch.Generator().manual_seed(1))
    whole[0, 0] = 9.0  # so that the halves need different powers
    (upper, _, first), (lower, _, second) = (cast_to_fp8(part, FORWARD) for part in whole.chunk(2))
    cast, _, inverse = cast_to_fp8(whole, FORWARD)
    assert first != second
    parts = torch.cat([upper.float() * first, lower.float() * second])
    torch.testing.assert_close(parts, cast.float() * inverse, rtol=0, atol=2.0**-10 * inverse.item())


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_layouts_and_recomputation_learn_the_same(workshop: Workshop, family: str) -> None:
    settings = (*FP8, f"model.family={family}")
    one = workshop.losses(workshop.train(*settings, run="one"))
    exact = workshop.losses(workshop.train(*settings, "precision=fp32", run="exact"))
    assert one != pytest.approx(exact, rel=1e-5), "8 bits leave no trace"
    assert one == pytest.approx(exact, rel=2e-2)
    layouts = {
        "tp2": ("parallel.tp=2",),
        "zero3": ("launch={on: local, gpus_per_node: 2}", "parallel.zero=3", "parallel.recompute=full"),
        "pp2": ("parallel.pp=2",),
    }
    for name, layout in layouts.items():
        assert run_ranks(workshop, *settings, *layout, run=name) == exit_codes.OK
        assert workshop.losses(workshop.folder / name) == pytest.approx(one, rel=4e-3), name
    repeated = workshop.losses(workshop.train(*settings, "parallel.recompute=full", run="repeated"))
    assert repeated == one
    assert "matrix products in fp8 take " in said(workshop)


def test_stop_and_resume_equals_one_unbroken_run(workshop: Workshop) -> None:
    whole = workshop.train(*FP8, run="whole")
    workshop.train(*FP8, "train.exit_after=5 steps", run="halves")
    assert_same_tensors(whole, workshop.train(*FP8, run="halves"))


def test_a_device_without_8_bit_units_gets_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    from bloomery.base.accelerator import lacks_fp8

    monkeypatch.setattr(torch.version, "cuda", "12.8")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    assert lacks_fp8(torch.device("cuda")) == "8-bit matrix units begin with compute capability 8.9, not 8.0"
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 9))
    assert lacks_fp8(torch.device("cuda")) == ""
    assert "NVIDIA" in lacks_fp8(torch.device("xpu"))
