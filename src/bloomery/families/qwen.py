"""qwen2 and qwen3, dense: llama with biases of queries, keys and values (qwen2), or with norms of queries and keys and
a head whose width is a field of its own (qwen3)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from bloomery.families.family import Family, HuggingFace
from bloomery.families.llama import CONSTANTS, DEFAULTS, FIELDS, ONLY, TENSORS

_DEFAULTS = {"dropout": 0.0, "norm_eps": 1e-6, "tie_embeddings": False}
_READS = ("num_kv_heads", "head_dim", "rope_theta")


def _hf(architecture: str, tensors: Mapping[str, str | tuple[str, ...]], head_dim: int | None) -> HuggingFace:
    window: dict[str, tuple[tuple[Any, ...], str]] = {
        "use_sliding_window": ((False,), "attention looks at the whole sequence here")
    }
    return HuggingFace(
        architecture=architecture,
        prefix="model.",
        tensors=tensors,
        fields=FIELDS,
        defaults=DEFAULTS | {"head_dim": head_dim},
        only=ONLY | window,
        constants=CONSTANTS | {"use_sliding_window": False},
    )


QWEN2 = Family(
    name="qwen2",
    defaults=_DEFAULTS,
    hf=_hf("Qwen2ForCausalLM", TENSORS, head_dim=None),
    reads=_READS,
    positions="rotary",
    norm="rms",
    bias=False,
    qkv_bias=True,
    activation="silu",
    gated=True,
)

QWEN3 = Family(
    name="qwen3",
    defaults=_DEFAULTS,
    hf=_hf(
        "Qwen3ForCausalLM",
        TENSORS
        | {
            "layers.N.attention.q_norm": "model.layers.N.self_attn.q_norm",
            "layers.N.attention.k_norm": "model.layers.N.self_attn.k_norm",
        },
        head_dim=128,
    ),
    reads=_READS,
    positions="rotary",
    norm="rms",
    bias=False,
    qkv_bias=False,
    qk_norm=True,
    activation="silu",
    gated=True,
)
