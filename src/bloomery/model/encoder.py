"""The bidirectional model of the family bert: masked tokens and sentence order."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from bloomery.config.recipe import ModelSection
from bloomery.model.attention import attention_context, choose_kernel
from bloomery.model.block import Block
from bloomery.model.embeddings import Embeddings
from bloomery.model.families import Architecture
from bloomery.model.heads import MaskedHead, Pooler, tie


class Encoder(nn.Module):
    """embed -> layers -> head, pooler and order_head. Post-norm blocks end in a norm, so `final_norm` is None.

    For a pipeline stage set `embed` or `head` to None and delete layers by key; without `head` the pooler and the
    order head are skipped too.
    """

    embed: Embeddings | None
    head: MaskedHead | None
    pooler: Pooler | None
    order_head: nn.Linear | None

    def __init__(self, config: ModelSection, architecture: Architecture) -> None:
        super().__init__()
        self.config = config
        self.embed = Embeddings(config, architecture)
        self.layers = nn.ModuleDict({str(n): Block(config, architecture) for n in range(config.num_layers)})
        self.final_norm = None
        self.head = MaskedHead(config, architecture)
        self.pooler = Pooler(config)
        self.order_head = nn.Linear(config.hidden_size, 2)
        self.tie_weights()

    def forward(
        self,
        tokens: Tensor,
        token_types: Tensor | None = None,
        attention_mask: Tensor | None = None,
        places: Tensor | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """(masked-token logits (B, S, padded vocabulary), order logits (B, 2)) of tokens (B, S). A stage without
        `embed` takes hidden states instead of tokens, one without `head` returns them.

        attention_mask (B, S): 1 for a real token. Padding sees only padding, so no row of the softmax is empty; what it
        computes there means nothing.
        places (S,): 0..S-1, needed where hidden states do not tell the length because they are cut.
        """
        x = tokens if self.embed is None else self.embed(tokens, places, token_types)
        seq_length = x.shape[1] if places is None else len(places)
        kernel = choose_kernel(
            x.device.type,
            alibi=False,
            documents=attention_mask is not None,
            dropout=self.config.dropout if self.training else 0.0,
            seq_length=seq_length,
            head_dim=self.config.hidden_size // self.config.num_heads,
        )
        context = attention_context(
            kernel, causal=False, seq_length=seq_length, device=x.device, document_ids=attention_mask
        )
        for layer in self.layers.values():
            x = layer(x, context)
        if self.head is None:
            return x
        assert self.pooler is not None, "the heads live on one stage"
        assert self.order_head is not None, "the heads live on one stage"
        return self.head(x), self.order_head(self.pooler(x))

    def tie_weights(self) -> None:
        """Share embedding and head again; anything that replaces parameters, such as `to_empty`, separates them."""
        tie(self.head, self.embed, self.config)

    def rebuild_buffers(self, device: torch.device | str) -> None:
        """Nothing to do: an encoder has no buffers."""
