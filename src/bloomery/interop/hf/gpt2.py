"""GPT2LMHeadModel: transposed linear layers (Conv1D), query, key and value as three blocks of columns."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from bloomery.config.recipe import ModelSection
from bloomery.interop.hf.layout import Entry, join_qkv, linear, same, split_qkv, transposed, vocabulary

PREFIX = "transformer."
EMBEDDING, HEAD = f"{PREFIX}wte.weight", "lm_head.weight"


def entries(config: ModelSection) -> list[Entry]:
    def export(t: Tensor) -> Sequence[Tensor]:
        return [torch.cat(split_qkv(t, config)).t()]  # t() leaves a bias as it is

    def load(ts: Sequence[Tensor]) -> Tensor:
        return join_qkv(ts[0].t().chunk(3), config)

    found = [
        vocabulary("embed.tokens.weight", EMBEDDING, config),
        same("embed.positions.weight", f"{PREFIX}wpe.weight"),
        *linear("final_norm", f"{PREFIX}ln_f"),
    ]
    if not config.tie_embeddings:
        found.append(vocabulary("head.weight", HEAD, config))
    for n in range(config.num_layers):
        ours, theirs = f"layers.{n}", f"{PREFIX}h.{n}"
        for part in ("weight", "bias"):
            found.append(Entry(f"{ours}.attention.qkv.{part}", (f"{theirs}.attn.c_attn.{part}",), export, load))
        found += [
            *linear(f"{ours}.attention_norm", f"{theirs}.ln_1"),
            *transposed(f"{ours}.attention.out", f"{theirs}.attn.c_proj"),
            *linear(f"{ours}.mlp_norm", f"{theirs}.ln_2"),
            *transposed(f"{ours}.mlp.up", f"{theirs}.mlp.c_fc"),
            *transposed(f"{ours}.mlp.down", f"{theirs}.mlp.c_proj"),
        ]
    return found


def hf_config(config: ModelSection) -> dict[str, Any]:
    return {
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        "activation_function": "gelu_new",  # the tanh form; "gelu" would be the exact one and change the logits
        "vocab_size": config.vocab_size,
        "n_positions": config.seq_length,
        "n_embd": config.hidden_size,
        "n_layer": config.num_layers,
        "n_head": config.num_heads,
        "n_inner": config.ffn_hidden_size,
        "resid_pdrop": config.dropout,
        "embd_pdrop": config.dropout,
        "attn_pdrop": config.dropout,
        "layer_norm_epsilon": config.norm_eps,
        "initializer_range": config.init_std,
        "tie_word_embeddings": config.tie_embeddings,
        "bos_token_id": None,
        "eos_token_id": None,
    }
