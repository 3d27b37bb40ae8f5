"""From token ids to the residual stream."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from bloomery.config.recipe import ModelSection
from bloomery.model.families import Architecture
from bloomery.model.norm import make_norm
from bloomery.sizing.vocabulary import padded_vocab_size


class Embeddings(nn.Module):
    """Tokens, plus learned positions and token types, then norm, then dropout: each where the family has it."""

    def __init__(self, config: ModelSection, architecture: Architecture) -> None:
        super().__init__()
        learned = architecture.positions == "learned"
        types = architecture.token_types
        self.dropout = config.dropout
        self.tokens = nn.Embedding(padded_vocab_size(config), config.hidden_size)
        self.positions = nn.Embedding(config.seq_length, config.hidden_size) if learned else None
        self.token_types = nn.Embedding(types, config.hidden_size) if types else None
        self.norm = make_norm(config, architecture) if architecture.embedding_norm else None

    def forward(self, tokens: Tensor, positions: Tensor | None = None, token_types: Tensor | None = None) -> Tensor:
        """Positions default to 0..S-1, token types to 0."""
        x = self.tokens(tokens)
        if self.positions is not None:
            if positions is None:
                positions = torch.arange(tokens.shape[1], device=tokens.device)
            x = x + self.positions(positions)
        if self.token_types is not None:
            x = x + self.token_types(torch.zeros_like(tokens) if token_types is None else token_types)
        if self.norm is not None:
            x = self.norm(x)
        return F.dropout(x, self.dropout, self.training)
