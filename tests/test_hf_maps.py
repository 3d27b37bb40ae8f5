"""Hugging Face maps: logits equal in both directions, exact round trips, clear refusals."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from bloomery.base.errors import RecipeError
from bloomery.config.load import load_recipe
from bloomery.config.recipe import ModelSection
from bloomery.interop.hf.configs import hf_config, model_section
from bloomery.interop.hf.maps import sources_of
from bloomery.sizing.parameters import count_parameters
from hf_samples import their_state
from model_samples import FAMILIES, perturb, random_tokens, small_config, small_model

transformers = pytest.importorskip("transformers")

CASES = {
    "gpt2-untied-wide": small_config("gpt2", tie_embeddings=False, ffn_hidden_size=96),
    "bloom-8-heads": small_config("bloom"),
    "bloom-6-heads": small_config("bloom", hidden_size=48, num_heads=6),
    "llama-grouped": small_config("llama"),
    "llama-one-kv-head-tied": small_config("llama", num_kv_heads=1, tie_embeddings=True, rope_theta=500.0),
    "llama-wide-heads": small_config("llama", head_dim=12),
    "qwen2-tied": small_config("qwen2", tie_embeddings=True, rope_theta=1e6),
    "qwen3": small_config("qwen3"),
    "qwen3-tied-default-heads": small_config("qwen3", tie_embeddings=True, head_dim=None, num_kv_heads=8),
    "bert": small_config("bert"),
}
TIED_COPIES = {"lm_head.weight", "cls.predictions.decoder.weight", "cls.predictions.decoder.bias"}


def from_hf(state: dict[str, torch.Tensor], config: ModelSection) -> dict[str, torch.Tensor]:
    sources = sources_of({name: tuple(tensor.shape) for name, tensor in state.items()}, config)
    return {each.ours: each.loaded(state.__getitem__) for each in sources}


def their_model(config: ModelSection) -> Any:
    torch.manual_seed(0)
    fields = hf_config(config)
    made = transformers.AutoConfig.for_model(**{k: v for k, v in fields.items() if k != "architectures"})
    return getattr(transformers, fields["architectures"][0])(made).eval()


def all_logits(model: Any, config: ModelSection, tokens: torch.Tensor, *, ours: bool) -> list[torch.Tensor]:
    """Logits of the real vocabulary; for bert with token types and padding, at real tokens only."""
    if config.family != "bert":
        logits = model(tokens) if ours else model(tokens).logits
        return [logits[..., : config.vocab_size]]
    mask = torch.ones_like(tokens)
    mask[0, 20:] = 0
    types = (torch.arange(tokens.shape[1]) > 9).long().expand_as(tokens)
    if ours:
        masked, order = model(tokens, token_types=types, attention_mask=mask)
    else:
        made = model(tokens, token_type_ids=types, attention_mask=mask)
        masked, order = made.prediction_logits, made.seq_relationship_logits
    return [masked[mask.bool()][..., : config.vocab_size], order]


@torch.no_grad()
def assert_same_logits(our_model: Any, hf_model: Any, config: ModelSection) -> None:
    tokens = random_tokens(config)
    ours = all_logits(our_model, config, tokens, ours=True)
    theirs = all_logits(hf_model, config, tokens, ours=False)
    for mine, other in zip(ours, theirs, strict=True):
        assert mine.shape == other.shape
        assert mine.std() > 0.1, "logits too flat to prove anything"
        assert (mine - other).abs().max() <= 1e-4


@pytest.mark.parametrize("config", CASES.values(), ids=CASES.keys())
def test_our_model_exported_gives_the_same_logits_in_transformers(config: ModelSection) -> None:
    model, theirs = small_model(config), their_model(config)
    result = theirs.load_state_dict(their_state(dict(model.named_parameters()), config), strict=False)
    assert not result.unexpected_keys
    assert set(result.missing_keys) <= (TIED_COPIES if config.tie_embeddings else set())
    theirs.tie_weights()
    assert_same_logits(model, theirs, config)


@pytest.mark.parametrize("config", CASES.values(), ids=CASES.keys())
def test_their_model_imported_gives_the_same_logits_here(config: ModelSection) -> None:
    model, theirs = small_model(config), their_model(config)
    perturb(theirs)
    result = model.load_state_dict(from_hf(theirs.state_dict(), config), strict=False)
    assert not result.unexpected_keys
    assert set(result.missing_keys) <= ({"head.weight"} if config.tie_embeddings else set())
    assert_same_logits(model, theirs, config)


@pytest.mark.parametrize("config", CASES.values(), ids=CASES.keys())
def test_round_trips_are_exact(config: ModelSection) -> None:
    ours = {name: p.detach().clone() for name, p in small_model(config).named_parameters()}
    theirs = their_state(ours, config)
    back = from_hf(theirs, config)
    assert back.keys() == ours.keys()
    for name, tensor in ours.items():
        if name in ("embed.tokens.weight", "head.weight", "head.bias"):
            assert back[name][config.vocab_size :].eq(0).all()
            tensor[config.vocab_size :] = 0
        assert torch.equal(back[name], tensor), name
    again = their_state(back, config)
    assert again.keys() == theirs.keys()
    assert all(torch.equal(again[name], theirs[name]) and again[name].is_contiguous() for name in theirs)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_exported_config_survives_transformers_and_keeps_the_unpadded_vocabulary(family: str) -> None:
    config = small_config(family, dropout=0.25, norm_eps=1e-3)
    made = their_model(config).config
    assert made.vocab_size == 150
    assert made.tie_word_embeddings == config.tie_embeddings
    told = made.to_dict()
    assert {k: told[k] for k in hf_config(config) if k in told and k != "architectures"} == {
        k: v for k, v in hf_config(config).items() if k in told and k != "architectures"
    }
    assert 0.25 in hf_config(config).values()
    assert 1e-3 in hf_config(config).values()


def test_a_bloom_with_another_mlp_width_is_refused() -> None:
    config = small_config("bloom", ffn_hidden_size=96)
    with pytest.raises(RecipeError, match="4 \\* hidden_size = 256"):
        their_state(dict(small_model(config).named_parameters()), config)


@pytest.mark.parametrize("name", ["qwen3-0.6b", "llama-1b", "bloom-1.3b"])
def test_a_shipped_model_has_as_many_parameters_as_in_transformers(name: str) -> None:
    recipe = load_recipe(name).recipe
    with torch.device("meta"):
        theirs = sum(parameter.numel() for parameter in their_model(recipe.model).parameters())
    assert count_parameters(recipe.model).total == theirs


def test_the_published_config_of_qwen3_0_6b_is_the_shipped_recipe() -> None:
    published = {
        "architectures": ["Qwen3ForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
        "bos_token_id": 151643, "eos_token_id": 151645, "head_dim": 128, "hidden_act": "silu", "hidden_size": 1024,
        "initializer_range": 0.02,
        "intermediate_size": 3072, "max_position_embeddings": 40960, "max_window_layers": 28, "model_type": "qwen3",
        "num_attention_heads": 16, "num_hidden_layers": 28, "num_key_value_heads": 8, "rms_norm_eps": 1e-06,
        "rope_scaling": None, "rope_theta": 1000000, "sliding_window": None, "tie_word_embeddings": True,
        "torch_dtype": "bfloat16", "transformers_version": "4.51.0", "use_cache": True, "use_sliding_window": False,
        "vocab_size": 151936,
    }  # fmt: skip
    recipe = load_recipe("qwen3-0.6b").recipe
    section = model_section(published, "config.json")
    assert section == {key: recipe.model.model_dump()[key] for key in section} | {"seq_length": 40960}
