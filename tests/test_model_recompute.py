"""Recomputation: the same numbers from fewer stored bytes."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from bloomery.model.transformer import apply_recompute
from model_samples import FAMILIES, random_tokens, small_config, small_model


def measure(model: Any, tokens: torch.Tensor) -> tuple[torch.Tensor, list[torch.Tensor], int]:
    """Loss, gradients, and the bytes of the distinct storages that autograd keeps."""
    kept: dict[int, torch.UntypedStorage] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        if not isinstance(tensor, torch.nn.Parameter):
            kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage()
        return tensor

    torch.manual_seed(11)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        output = model(tokens)
        outputs = output if isinstance(output, tuple) else (output,)
        loss = sum(part.square().mean() for part in outputs)
    parameters = {p.untyped_storage().data_ptr() for p in model.parameters()}
    stored = sum(storage.nbytes() for pointer, storage in kept.items() if pointer not in parameters)
    return loss, list(torch.autograd.grad(loss, list(model.parameters()))), stored


@pytest.mark.parametrize("family", FAMILIES)
def test_recomputing_gives_identical_loss_and_gradients(family: str) -> None:
    config = small_config(family, dropout=0.2)
    model, tokens = small_model(config).train(), random_tokens(config)
    names = [name for name, _ in model.named_parameters()]
    apply_recompute(model, "none")
    loss, gradients, stored = measure(model, tokens)
    for mode in ("mlp", "selective", "full"):
        apply_recompute(model, mode)
        assert [name for name, _ in model.named_parameters()] == names
        other_loss, other_gradients, less = measure(model, tokens)
        assert torch.equal(loss, other_loss)
        assert all(torch.equal(a, b) for a, b in zip(gradients, other_gradients, strict=True))
        if mode == "full":
            assert less < 0.7 * stored
        else:
            assert less < stored


def test_selective_stores_no_scores() -> None:
    config = small_config("bloom", dropout=0.1, seq_length=128)
    model, tokens = small_model(config).train(), random_tokens(config)
    stored = {}
    for mode in ("none", "selective", "full"):
        apply_recompute(model, mode)
        stored[mode] = measure(model, tokens)[2]
    scores = 2 * 8 * 128 * 128 * 4 * config.num_layers
    assert stored["none"] - stored["selective"] >= scores
    assert stored["full"] < stored["selective"]


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_mlp_stores_neither_what_its_last_matrix_reads_nor_repeats_the_product(family: str) -> None:
    config = small_config(family)
    model, tokens = small_model(config).train(), random_tokens(config)
    calls: list[torch.Size] = []
    for layer in model.layers.values():
        layer.mlp.down.register_forward_hook(lambda _, args, out: calls.append(out.shape))
    stored = {}
    for mode in ("none", "mlp"):
        apply_recompute(model, mode)
        stored[mode] = measure(model, tokens)[2]
    assert stored["none"] - stored["mlp"] >= tokens.numel() * config.ffn_hidden_size * 4 * config.num_layers
    assert len(calls) == 2 * config.num_layers, "the second forward pass ends before the product"


@pytest.mark.parametrize("mode", ["none", "mlp", "selective", "full"])
def test_a_model_compiles_into_one_graph(mode: Any) -> None:
    config = small_config("bloom")
    model, tokens = small_model(config).train(), random_tokens(config)
    right = measure(model, tokens)[1]
    apply_recompute(model, mode)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    mine = torch.autograd.grad(compiled(tokens).square().mean(), list(model.parameters()))
    for a, b in zip(mine, right, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)
