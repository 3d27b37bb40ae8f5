"""From the residual stream to logits."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from bloomery.config.recipe import ModelSection
from bloomery.model.embeddings import Embeddings
from bloomery.model.families import Architecture
from bloomery.model.mlp import ACTIVATIONS
from bloomery.model.norm import make_norm
from bloomery.sizing.vocabulary import padded_vocab_size


class MaskedHead(nn.Module):
    """BERT's: dense, activation, norm, then a vocabulary projection `weight` (tied by default) with its own bias."""

    def __init__(self, config: ModelSection, architecture: Architecture) -> None:
        super().__init__()
        rows = padded_vocab_size(config)
        self.activation = ACTIVATIONS[architecture.activation]
        self.dense = nn.Linear(config.hidden_size, config.hidden_size)
        self.norm = make_norm(config, architecture)
        self.weight = nn.Parameter(torch.empty(rows, config.hidden_size))
        self.bias = nn.Parameter(torch.zeros(rows))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(self.norm(self.activation(self.dense(x))), self.weight, self.bias)


class Pooler(nn.Module):
    """tanh(dense(first token)), as (B, E)."""

    def __init__(self, config: ModelSection) -> None:
        super().__init__()
        self.dense = nn.Linear(config.hidden_size, config.hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.dense(x[:, 0]))


def tie(head: nn.Module | None, embed: Embeddings | None, config: ModelSection) -> None:
    """Make `head.weight` the embedding's parameter if the recipe ties them and both are here. On a pipeline stage that
    has only the head, `head.weight` stays a parameter of its own, a copy that `parallel` must keep equal."""
    if config.tie_embeddings and head is not None and embed is not None:
        head.weight = embed.tokens.weight
