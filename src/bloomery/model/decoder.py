"""The causal language model of the families gpt2, bloom and llama."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from bloomery.config.recipe import ModelSection
from bloomery.model.attention import AttentionContext, attention_context, choose_kernel
from bloomery.model.block import Block
from bloomery.model.embeddings import Embeddings
from bloomery.model.families import Architecture
from bloomery.model.heads import tie
from bloomery.model.norm import make_norm
from bloomery.model.positions import rotary_table
from bloomery.sizing.alibi import alibi_slopes
from bloomery.sizing.vocabulary import padded_vocab_size


class Decoder(nn.Module):
    """embed -> layers -> final_norm -> head.

    For a pipeline stage set `embed`, `final_norm` or `head` to None and delete layers by key; the names of what remains
    do not change. Per-head state is the buffer `slopes` (ALiBi): a tensor-parallel rule cuts it along dimension 0.
    """

    embed: Embeddings | None
    final_norm: nn.Module | None
    head: nn.Linear | None
    slopes: Tensor | None

    def __init__(self, config: ModelSection, architecture: Architecture) -> None:
        super().__init__()
        self.config = config
        self.architecture = architecture
        self.embed = Embeddings(config, architecture)
        self.layers = nn.ModuleDict({str(n): Block(config, architecture) for n in range(config.num_layers)})
        self.final_norm = make_norm(config, architecture)
        self.head = nn.Linear(config.hidden_size, padded_vocab_size(config), bias=False)
        has_slopes = architecture.positions == "alibi"
        self.register_buffer("slopes", torch.empty(config.num_heads) if has_slopes else None, persistent=False)
        self.tie_weights()

    def forward(
        self,
        tokens: Tensor,
        positions: Tensor | None = None,
        document_ids: Tensor | None = None,
        places: Tensor | None = None,
    ) -> Tensor:
        """Logits (B, S, padded vocabulary) of tokens (B, S). A stage without `embed` takes hidden states instead of
        tokens, one without `head` returns them.

        positions (B, S): default the places; attention is causal by place whatever they say, and ALiBi ignores them.
        document_ids (B, seq_length): tokens see only their own document.
        places (S,): where the tokens stand, if they are a part of a sequence of seq_length whose other keys and values
        the attention cores get from elsewhere; default 0..S-1, and that is all there is.
        """
        positions = places if positions is None else positions
        x = tokens if self.embed is None else self.embed(tokens, positions)
        context = self._context(x, positions, document_ids, places)
        for layer in self.layers.values():
            x = layer(x, context)
        if self.final_norm is not None:
            x = self.final_norm(x)
        return x if self.head is None else self.head(x)

    def tie_weights(self) -> None:
        """Share embedding and head again; anything that replaces parameters, such as `to_empty`, separates them."""
        tie(self.head, self.embed, self.config)

    def rebuild_buffers(self, device: torch.device | str) -> None:
        """Make the buffers anew: they are not in checkpoints, and `to_empty` leaves garbage in them. Always fp32,
        always for all heads: cut them afterwards."""
        if self.slopes is not None:
            self.slopes = torch.tensor(alibi_slopes(self.config.num_heads), dtype=torch.float32, device=device)

    def _context(
        self, x: Tensor, positions: Tensor | None, document_ids: Tensor | None, places: Tensor | None
    ) -> AttentionContext:
        config = self.config
        head_dim = config.hidden_size // config.num_heads
        # Hidden states do not tell the length: between attentions they may be cut along the sequence.
        seq_length = x.shape[1] if places is None else config.seq_length
        some = places if places is not None and len(places) < seq_length else None
        rotary = None
        if self.architecture.positions == "rotary":
            if positions is None:
                positions = torch.arange(seq_length, device=x.device)
            rotary = rotary_table(positions, head_dim=head_dim, theta=config.rope_theta)
        kernel = choose_kernel(
            x.device.type,
            alibi=self.slopes is not None,
            documents=document_ids is not None,
            dropout=config.dropout if self.training else 0.0,
            seq_length=seq_length,
            head_dim=head_dim,
            some_queries=some is not None,
        )
        return attention_context(
            kernel,
            causal=True,
            seq_length=seq_length,
            device=x.device,
            slopes=self.slopes,
            document_ids=document_ids,
            rotary=rotary,
            query_places=some,
        )
