"""LlamaForCausalLM: separate projections; our rotary convention is theirs, so rows keep their order."""

from __future__ import annotations

from typing import Any

from bloomery.config.recipe import ModelSection
from bloomery.interop.hf.layout import Entry, same, separate_qkv, vocabulary

PREFIX = "model."
EMBEDDING, HEAD = f"{PREFIX}embed_tokens.weight", "lm_head.weight"


def entries(config: ModelSection) -> list[Entry]:
    found = [
        vocabulary("embed.tokens.weight", EMBEDDING, config),
        same("final_norm.weight", f"{PREFIX}norm.weight"),
    ]
    if not config.tie_embeddings:
        found.append(vocabulary("head.weight", HEAD, config))
    for n in range(config.num_layers):
        ours, theirs = f"layers.{n}", f"{PREFIX}layers.{n}"
        projections = [f"{theirs}.self_attn.{letter}_proj" for letter in "qkv"]
        found += [
            separate_qkv(f"{ours}.attention.qkv", projections, "weight", config),
            same(f"{ours}.attention.out.weight", f"{theirs}.self_attn.o_proj.weight"),
            same(f"{ours}.attention_norm.weight", f"{theirs}.input_layernorm.weight"),
            same(f"{ours}.mlp_norm.weight", f"{theirs}.post_attention_layernorm.weight"),
            *(same(f"{ours}.mlp.{part}.weight", f"{theirs}.mlp.{part}_proj.weight") for part in ("gate", "up", "down")),
        ]
    return found


def hf_config(config: ModelSection) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.ffn_hidden_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.hidden_size // config.num_heads,
        "max_position_embeddings": config.seq_length,
        "rms_norm_eps": config.norm_eps,
        "rope_theta": config.rope_theta,  # transformers 4
        "rope_parameters": {"rope_type": "default", "rope_theta": config.rope_theta},  # transformers 5
        "attention_bias": False,
        "mlp_bias": False,
        "attention_dropout": config.dropout,
        "initializer_range": config.init_std,
        "tie_word_embeddings": config.tie_embeddings,
        "bos_token_id": None,
        "eos_token_id": None,
    }
