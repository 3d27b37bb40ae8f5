"""qwen2 and qwen3, dense: llama with biases of queries, keys and values (qwen2), or with norms of queries and keys and
a head whose width is a field of its own (qwen3)."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from bloomery.families.family import HuggingFace
from bloomery.families.llama import CONSTANTS, DEFAULTS, FIELDS, LLAMA, ONLY, TENSORS

_DEFAULTS = {"dropout": 0.0, "norm_eps": 1e-6, "tie_embeddings": False}


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


QWEN2 = replace(
    LLAMA, name="qwen2", defaults=_DEFAULTS, hf=_hf("Qwen2ForCausalLM", TENSORS, head_dim=None), qkv_bias=True
)
_NORMS = {f"layers.N.attention.{name}": f"model.layers.N.self_attn.{name}" for name in ("q_norm", "k_norm")}
QWEN3 = replace(
    LLAMA, name="qwen3", defaults=_DEFAULTS, hf=_hf("Qwen3ForCausalLM", TENSORS | _NORMS, head_dim=128), qk_norm=True
)
