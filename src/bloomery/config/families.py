"""Defaults that depend on the model family. The loader puts them into the recipe before it is validated."""

from __future__ import annotations

from typing import Any

_FIXED: dict[str, dict[str, Any]] = {
    "gpt2": {"dropout": 0.1, "norm_eps": 1e-5, "tie_embeddings": True},
    "bloom": {"dropout": 0.1, "norm_eps": 1e-5, "tie_embeddings": True},
    "llama": {"dropout": 0.0, "norm_eps": 1e-5, "tie_embeddings": False},
    "bert": {"dropout": 0.1, "norm_eps": 1e-12, "tie_embeddings": True},
}

ONLY_FOR: dict[str, tuple[str, ...]] = {"num_kv_heads": ("llama",), "rope_theta": ("llama",)}
"""Model fields that only some families read."""


def family_defaults(model: dict[str, Any]) -> dict[str, Any]:
    """Values for the `model` fields that the user left out; of a faulty recipe, values that do no further harm."""
    family = model.get("family")
    fixed = _FIXED.get(family if isinstance(family, str) else "", _FIXED["gpt2"])
    hidden_size, num_heads = _size(model.get("hidden_size")), _size(model.get("num_heads"))
    wide = -(-8 * hidden_size // 3 // 256) * 256 if family == "llama" else 4 * hidden_size
    defaults = {**fixed, "ffn_hidden_size": wide, "num_kv_heads": num_heads}
    return {field: value for field, value in defaults.items() if field not in model}


def _size(value: Any) -> int:
    return value if isinstance(value, int) and value > 0 else 1
