"""The feed-forward half of a block, plain or gated."""

from __future__ import annotations

import functools
from collections.abc import Callable

from torch import Tensor, nn
from torch.nn import functional as F

from bloomery.config.recipe import ModelSection
from bloomery.model.families import Architecture

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu_tanh": functools.partial(F.gelu, approximate="tanh"),
    "gelu": F.gelu,
    "silu": F.silu,
}


class MLP(nn.Module):
    """down(activation(up(x))), or down(activation(gate(x)) * up(x)) for a gated family."""

    def __init__(self, config: ModelSection, architecture: Architecture) -> None:
        super().__init__()
        narrow, wide, bias = config.hidden_size, config.ffn_hidden_size, architecture.bias
        self.activation = ACTIVATIONS[architecture.activation]
        self.gate = nn.Linear(narrow, wide, bias=bias) if architecture.gated else None
        self.up = nn.Linear(narrow, wide, bias=bias)
        self.down = nn.Linear(wide, narrow, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        up: Tensor = self.up(x)
        wide = self.activation(up) if self.gate is None else self.activation(self.gate(x)) * up
        narrow: Tensor = self.down(wide)
        return narrow
