"""One transformer block: pre-norm for decoders, post-norm for encoders."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional as F

from bloomery.config.recipe import ModelSection
from bloomery.model import recompute
from bloomery.model.attention import Attention, AttentionContext
from bloomery.model.families import Architecture
from bloomery.model.mlp import MLP
from bloomery.model.norm import make_norm


class Block(nn.Module):
    def __init__(self, config: ModelSection, architecture: Architecture) -> None:
        super().__init__()
        self.post_norm = architecture.encoder
        self.dropout = config.dropout
        self.recompute = False
        self.attention_norm = make_norm(config, architecture)
        self.attention = Attention(config, architecture)
        self.mlp_norm = make_norm(config, architecture)
        self.mlp = MLP(config, architecture)

    def forward(self, x: Tensor, context: AttentionContext) -> Tensor:
        run_block = self._post_norm if self.post_norm else self._pre_norm
        return recompute.run(lambda x: run_block(x, context), x, recompute=self.recompute)

    def _pre_norm(self, x: Tensor, context: AttentionContext) -> Tensor:
        x = x + self._drop(self.attention(self.attention_norm(x), context))
        return x + self._drop(self.mlp(self.mlp_norm(x)))

    def _post_norm(self, x: Tensor, context: AttentionContext) -> Tensor:
        x = self.attention_norm(x + self._drop(self.attention(x, context)))
        out: Tensor = self.mlp_norm(x + self._drop(self.mlp(x)))
        return out

    def _drop(self, x: Tensor) -> Tensor:
        return F.dropout(x, self.dropout, self.training)
