"""BloomForCausalLM: the same layout as ours, query, key and value side by side for each head."""

from __future__ import annotations

from typing import Any

from bloomery.config.recipe import ModelSection
from bloomery.interop.hf.layout import Entry, linear, vocabulary

PREFIX = "transformer."
EMBEDDING, HEAD = f"{PREFIX}word_embeddings.weight", "lm_head.weight"


def entries(config: ModelSection) -> list[Entry]:
    found = [
        vocabulary("embed.tokens.weight", EMBEDDING, config),
        *linear("embed.norm", f"{PREFIX}word_embeddings_layernorm"),
        *linear("final_norm", f"{PREFIX}ln_f"),
    ]
    if not config.tie_embeddings:
        found.append(vocabulary("head.weight", HEAD, config))
    for n in range(config.num_layers):
        ours, theirs = f"layers.{n}", f"{PREFIX}h.{n}"
        found += [
            *linear(f"{ours}.attention_norm", f"{theirs}.input_layernorm"),
            *linear(f"{ours}.attention.qkv", f"{theirs}.self_attention.query_key_value"),
            *linear(f"{ours}.attention.out", f"{theirs}.self_attention.dense"),
            *linear(f"{ours}.mlp_norm", f"{theirs}.post_attention_layernorm"),
            *linear(f"{ours}.mlp.up", f"{theirs}.mlp.dense_h_to_4h"),
            *linear(f"{ours}.mlp.down", f"{theirs}.mlp.dense_4h_to_h"),
        ]
    return found


def hf_config(config: ModelSection) -> dict[str, Any]:
    """Its activation is always the tanh form and its MLP always 4 wide: there is no field for either."""
    return {
        "architectures": ["BloomForCausalLM"],
        "model_type": "bloom",
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "n_layer": config.num_layers,
        "n_head": config.num_heads,
        "seq_length": config.seq_length,
        "hidden_dropout": config.dropout,
        "attention_dropout": config.dropout,
        "layer_norm_epsilon": config.norm_eps,
        "initializer_range": config.init_std,
        "apply_residual_connection_post_layernorm": False,
        "tie_word_embeddings": config.tie_embeddings,
        "bos_token_id": None,
        "eos_token_id": None,
    }
