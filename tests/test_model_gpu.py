"""What needs an accelerator: the fast attention kernels and the compiled model, against the definition."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch

from bloomery.base.accelerator import pick_device
from bloomery.base.ranks import Piece
from bloomery.model import transformer
from bloomery.model.init import initial_slice, initialise
from bloomery.model.loss import row_losses
from bloomery.model.transformer import apply_recompute
from model_samples import random_tokens, run_attention, small_config, small_model

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.accelerator.is_available(), reason="needs an accelerator"),
]
run = partial(
    run_attention, sizes=(8, 320, 64), device=torch.accelerator.current_accelerator() or "cpu", dtype=torch.bfloat16
)


@pytest.fixture(autouse=True)
def _forget_compiled_code() -> None:
    """Else the cases, compiled from one function, would add up to the recompile limit."""
    torch._dynamo.reset()


def assert_near(mine: list[torch.Tensor], right: list[torch.Tensor]) -> None:
    for one, other in zip(mine, right, strict=True):
        error = (one.float() - other.float()).norm() / other.float().norm()
        assert error < 0.01, f"relative error {error:.4f}"


@pytest.mark.parametrize("kv_heads", [8, 2])
@pytest.mark.parametrize("documents", [False, True])
@pytest.mark.parametrize("alibi", [False, True])
@pytest.mark.parametrize(("kernel", "compiled"), [("flex", False), ("flex", True), ("bias", False)])
def test_masked_kernels_agree_with_the_definition(
    kernel: str, compiled: bool, alibi: bool, documents: bool, kv_heads: int
) -> None:
    case = {"alibi": alibi, "documents": documents, "kv_heads": kv_heads}
    assert_near(run(kernel, **case, compiled=compiled), run("reference", **case))


def test_dropout_with_a_bias_keeps_the_mean() -> None:
    case = {"alibi": True, "documents": True, "kv_heads": 8}
    torch.manual_seed(0)
    mean = sum(run("bias", **case, dropout=0.2)[0].float() for _ in range(200)) / 200
    whole = run("reference", **case)[0].float()
    assert (mean - whole).norm() / whole.norm() < 0.05
    assert not torch.equal(run("bias", **case, dropout=0.2)[0], run("bias", **case, dropout=0.2)[0])


@pytest.mark.parametrize("kv_heads", [8, 2])
@pytest.mark.parametrize("compiled", [False, True])
def test_causal_sdpa_agrees_with_the_definition(compiled: bool, kv_heads: int) -> None:
    case = {"alibi": False, "documents": False, "kv_heads": kv_heads}
    assert_near(run("sdpa", **case, compiled=compiled), run("reference", **case))


def test_causal_sdpa_runs_on_cudnn_or_flash_also_when_compiled() -> None:
    for compiled in (False, True):
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            run("sdpa", alibi=False, documents=False, kv_heads=8, compiled=compiled)
        names = {event.name for event in profile.events()}
        assert names & {"aten::_scaled_dot_product_cudnn_attention", "aten::_scaled_dot_product_flash_attention"}


@pytest.mark.parametrize("recompute", ["none", "mlp", "selective", "full"])
@pytest.mark.parametrize("family", ["gpt2", "bloom", "llama"])
def test_a_compiled_model_has_the_loss_and_gradients_of_a_plain_bias(
    family: str, recompute: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = small_config(family, hidden_size=256, seq_length=256)
    device = str(torch.accelerator.current_accelerator())
    model = small_model(config, device=device).train()
    tokens = random_tokens(config).to(device)
    ids = (torch.arange(256, device=device) // 100).expand(2, -1)

    def measure(function: Any) -> list[torch.Tensor]:
        with torch.autocast(device, torch.bfloat16):
            total = row_losses(function(tokens, document_ids=ids), {"lm loss": tokens.roll(-1, 1)})["lm loss"].sum()
        return [total, *torch.autograd.grad(total, list(model.parameters()))]

    apply_recompute(model, recompute)
    mine = measure(torch.compile(model, fullgraph=True))
    apply_recompute(model, "none")
    eager = measure(model)
    monkeypatch.setattr(transformer, "choose_kernel", lambda *args, **kwargs: "bias")
    right = measure(model)
    for made in (mine, eager):
        assert made[0].item() == pytest.approx(right[0].item(), rel=2e-3)
        for (name, _), one, other in zip(model.named_parameters(), made[1:], right[1:], strict=True):
            error = (one - other).norm() / other.norm()
            assert error < 0.05, f"{name}: relative error {error:.4f}"


@pytest.mark.parametrize("family", ["gpt2", "bloom", "llama", "bert"])
def test_a_compiled_model_can_be_cached(family: str) -> None:
    """What AOTAutograd's cache refuses is traced again at every start, which takes 12 s of gpt-1.3b's."""
    config = small_config(family, hidden_size=256, seq_length=256)
    device = str(torch.accelerator.current_accelerator())
    tokens = random_tokens(config).to(device)
    torch._dynamo.utils.counters.clear()
    with torch.autocast(device, torch.bfloat16):
        outputs = torch.compile(small_model(config, device=device), fullgraph=True)(tokens)
    (outputs[0] if isinstance(outputs, tuple) else outputs).sum().backward()
    assert torch._dynamo.utils.counters["aot_autograd"]["autograd_cache_bypass"] == 0


def test_blocks_compiled_one_by_one_take_the_context(monkeypatch: pytest.MonkeyPatch) -> None:
    config = small_config("bloom", hidden_size=256, seq_length=256)
    model = small_model(config, device=str(torch.accelerator.current_accelerator()))
    tokens = random_tokens(config).to(model.embed.tokens.weight.device)
    right = model(tokens)
    for block in model.layers.values():
        block.compile(fullgraph=True)
    torch.testing.assert_close(model(tokens), right, rtol=1e-2, atol=1e-2)


def test_initial_values_made_on_a_device_are_the_cpus_to_the_bit() -> None:
    config, shape, offset, size = small_config("gpt2"), (5000, 8191), (7, 3), (4000, 8001)
    name = "layers.0.mlp.up.weight"
    piece = Piece(torch.empty(size, device=pick_device()), shape, offset)
    initialise([(name, piece)], config, 42)
    assert torch.equal(piece.tensor.cpu(), torch.from_numpy(initial_slice(config, 42, name, shape, offset, size)))
