"""The model contract: names, meta build, removable parts, causality, documents, tying."""

from __future__ import annotations

import pytest
import torch
from pydantic import ValidationError

from bloomery.families.bloom import alibi_slopes
from bloomery.model.transformer import build_model
from bloomery.sizing.parameters import padded_vocab_size
from model_samples import DECODERS, FAMILIES, initialised, random_tokens, small_config, small_model

BLOCK = ["attention_norm", "attention.qkv", "attention.out", "mlp_norm", "mlp.up", "mlp.down"]


def both(*names: str) -> set[str]:
    return {f"{name}.{part}" for name in names for part in ("weight", "bias")}


def rotary(*more: str) -> set[str]:
    """llama, with more in every layer."""
    names = [*(f"{name}.weight" for name in [*BLOCK, "mlp.gate"]), *more]
    return {"embed.tokens.weight", "final_norm.weight", "head.weight"} | {
        f"layers.{n}.{name}" for n in range(2) for name in names
    }


LAYERS = both(*(f"layers.{n}.{name}" for n in range(2) for name in BLOCK))
NAMES = {
    "gpt2": {"embed.tokens.weight", "embed.positions.weight"} | LAYERS | both("final_norm"),
    "bloom": {"embed.tokens.weight"} | both("embed.norm") | LAYERS | both("final_norm"),
    "llama": rotary(),
    "qwen2": rotary("attention.qkv.bias"),
    "qwen3": rotary("attention.q_norm.weight", "attention.k_norm.weight"),
    "bert": {"embed.tokens.weight", "embed.positions.weight", "embed.token_types.weight", "head.bias"}
    | both("embed.norm", "head.dense", "head.norm", "pooler.dense", "order_head")
    | LAYERS,
}


@pytest.mark.parametrize("family", FAMILIES)
def test_parameter_names_are_the_public_contract(family: str) -> None:
    names = [name for name, _ in build_model(small_config(family)).named_parameters()]
    assert sorted(names) == sorted(NAMES[family])


@pytest.mark.parametrize("family", FAMILIES)
def test_building_a_huge_model_allocates_nothing(family: str) -> None:
    config = small_config(family, hidden_size=16384, num_heads=128, num_layers=4, vocab_size=250_000)
    model = build_model(config)
    assert all(tensor.is_meta for tensor in [*model.parameters(), *model.buffers()])
    assert model.embed.tokens.weight.shape == (padded_vocab_size(config), 16384)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_largest_sizes_that_a_recipe_takes_are_none_too_many_for_torch(family: str) -> None:
    sizes = dict.fromkeys(("hidden_size", "ffn_hidden_size", "vocab_size", "vocab_multiple", "seq_length"), 10**9)
    heads = {"num_heads": 65536, "num_kv_heads": 65536, "head_dim": 4096, "num_layers": 1}
    config = small_config(family, **sizes, **heads)
    assert all(tensor.is_meta for tensor in build_model(config).parameters())
    for name in (*sizes, *heads):
        with pytest.raises(ValidationError):
            small_config(family, **{**sizes, **heads, name: 10**9 + 1})


@pytest.mark.parametrize("family", DECODERS)
@torch.no_grad()
def test_a_changed_token_leaves_earlier_logits_alone(family: str) -> None:
    config = small_config(family)
    model, tokens = small_model(config), random_tokens(config)
    before = model(tokens)
    tokens[:, 11] = (tokens[:, 11] + 1) % config.vocab_size
    after = model(tokens)
    torch.testing.assert_close(after[:, :11], before[:, :11], rtol=0, atol=1e-6)
    assert (after[:, 11:] - before[:, 11:]).abs().amax(-1).min() > 1e-4, "every later position sees it"


@pytest.mark.parametrize("family", DECODERS)
@torch.no_grad()
def test_packed_documents_get_the_logits_they_would_get_alone(family: str) -> None:
    config = small_config(family)
    model, tokens = small_model(config), random_tokens(config, batch=1)
    ids = torch.tensor([[0] * 12 + [1] * 20])
    positions = torch.cat((torch.arange(12), torch.arange(20)))[None]
    packed = model(tokens, positions=positions, document_ids=ids)
    alone = torch.cat((model(tokens[:, :12]), model(tokens[:, 12:])), dim=1)
    torch.testing.assert_close(packed, alone, rtol=1e-4, atol=1e-5)
    assert (model(tokens) - alone)[:, 12:].abs().max() > 1e-2


@torch.no_grad()
def test_padding_of_an_encoder_changes_nothing_at_real_tokens() -> None:
    config = small_config("bert")
    model, tokens = small_model(config), random_tokens(config)
    mask = torch.ones_like(tokens)
    mask[:, 20:] = 0
    masked, order = model(tokens, attention_mask=mask)
    short_masked, short_order = model(tokens[:, :20])
    torch.testing.assert_close(masked[:, :20], short_masked, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(order, short_order, rtol=1e-4, atol=1e-5)
    assert torch.isfinite(masked).all()


@pytest.mark.parametrize("family", FAMILIES)
def test_materialising_keeps_weights_tied_and_slopes_right(family: str) -> None:
    config = small_config(family)
    model = initialised(config, dtype=torch.bfloat16)
    assert all(parameter.dtype == torch.bfloat16 for parameter in model.parameters())
    assert (model.head.weight is model.embed.tokens.weight) == config.tie_embeddings
    if family == "bloom":
        assert torch.equal(model.slopes, torch.tensor(alibi_slopes(8)))
        assert model.slopes.dtype == torch.float32
        assert "slopes" not in model.state_dict()
