"""What tells the families apart. Everything else about a model is a number in the recipe."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from bloomery.config.recipe import Family


@dataclass(frozen=True)
class Architecture:
    """The shape of one family: one decoder and one encoder are parametrised by it."""

    encoder: bool = False
    """Bidirectional with post-norm blocks (BERT); otherwise causal with pre-norm blocks."""
    norm: Literal["layer", "rms"] = "layer"
    bias: bool = True
    """Whether the linear layers have biases."""
    activation: Literal["gelu_tanh", "gelu", "silu"] = "gelu_tanh"
    gated: bool = False
    """MLP computes activation(gate) * up instead of activation(up)."""
    positions: Literal["learned", "alibi", "rotary"] = "learned"
    embedding_norm: bool = False
    token_types: int = 0
    """Rows of the token-type embedding; 0: none."""
    scaled_residual_init: bool = True
    """Whether output projections start smaller by 1/sqrt(2 * num_layers)."""


ARCHITECTURES: dict[Family, Architecture] = {
    "gpt2": Architecture(),
    "bloom": Architecture(positions="alibi", embedding_norm=True),
    "llama": Architecture(norm="rms", bias=False, activation="silu", gated=True, positions="rotary"),
    "bert": Architecture(
        encoder=True, activation="gelu", embedding_norm=True, token_types=2, scaled_residual_init=False
    ),
}
