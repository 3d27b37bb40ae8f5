"""8-bit products on a device: the kernels against their emulation to the bit, and training against bf16."""

from __future__ import annotations

import math

import pytest
import torch

from bloomery.base.accelerator import lacks_fp8
from bloomery.model.linear import FORWARD, GRADIENT, Linear, cast_to_fp8
from conftest import Workshop

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.accelerator.is_available() or bool(lacks_fp8(torch.device("cuda"))),
        reason="needs a device with 8-bit matrix units; this machine has none",
    ),
]


@pytest.mark.parametrize("dtype", [FORWARD, GRADIENT])
@pytest.mark.parametrize("compute", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(16, 16), (130, 48), (4160, 1008)])
def test_a_cast_equals_its_emulation_to_the_bit(
    dtype: torch.dtype, compute: torch.dtype, shape: tuple[int, int]
) -> None:
    for size in (1e-4, 3.0, 1e4):
        x = (torch.randn(shape, generator=torch.Generator().manual_seed(7)) * size).to(compute)
        mine, right = cast_to_fp8(x.cuda(), dtype), cast_to_fp8(x, dtype)
        for found, expected in zip(mine[:2], right[:2], strict=True):
            assert torch.equal(found.cpu().view(torch.uint8), expected.view(torch.uint8))
        assert mine[2].item() == right[2].item()


@pytest.mark.parametrize("bad", [math.inf, math.nan])
def test_what_is_not_finite_stays_visible(bad: float) -> None:
    x = torch.randn(64, 64, dtype=torch.bfloat16)
    x[3, 5] = bad
    cast, _, inverse = cast_to_fp8(x.cuda(), FORWARD)
    assert cast.float().isnan().all()
    assert inverse.isnan()


def test_a_layer_equals_its_emulation_also_when_compiled() -> None:
    there, here = Linear(512, 1024).bfloat16().cuda(), Linear(512, 1024).bfloat16()
    here.load_state_dict({name: each.cpu() for name, each in there.state_dict().items()})
    x, gradient = torch.randn(4, 256, 512, dtype=torch.bfloat16), torch.randn(4, 256, 1024, dtype=torch.bfloat16)
    here.fp8 = there.fp8 = True

    def outcome(layer: torch.nn.Module, device: str) -> list[torch.Tensor]:
        given = x.detach().to(device).requires_grad_()  # on a CPU, x.to is x itself
        out = layer(given)
        layer.zero_grad()
        out.backward(gradient.to(device))
        found = [out.detach(), given.grad, *(each.grad for each in layer.parameters())]
        return [each.float().cpu() for each in found if each is not None]

    plain = outcome(there, "cuda")
    for mine, right in zip(plain, outcome(here, "cpu"), strict=True):
        assert (mine - right).norm() < 3e-3 * right.norm()
    for mine, right in zip(outcome(torch.compile(there), "cuda"), plain, strict=True):
        assert (mine - right).norm() < 1e-3 * right.norm()


def test_training_follows_bf16(workshop: Workshop) -> None:
    settings = ("model.seq_length=128", "model.hidden_size=64", "train.for=12 steps", "lr.peak=2e-3")
    exact = workshop.losses(workshop.train(*settings, "precision=bf16", run="bf16", device=None))
    fast = workshop.losses(workshop.train(*settings, "precision=fp8", run="fp8", device=None))
    assert fast == pytest.approx(exact, rel=1e-2)
    assert fast != exact
