"""The parts of a transformer: norms, embeddings, MLP, block, and the heads of an encoder. A Family says which."""

import functools
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from bloomery.config.recipe import ModelSection
from bloomery.families.family import Family
from bloomery.model.attention import Attention, AttentionContext, RMSNorm, run_recomputable
from bloomery.model.linear import Linear
from bloomery.sizing.parameters import padded_vocab_size

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu_tanh": functools.partial(F.gelu, approximate="tanh"),
    "gelu": F.gelu,
    "silu": F.silu,
}


def make_norm(config: ModelSection, family: Family) -> nn.Module:
    """The family's norm over the hidden size. nn.LayerNorm keeps fp32 statistics for 16-bit inputs by itself."""
    if family.norm == "rms":
        return RMSNorm(config.hidden_size, config.norm_eps)
    return nn.LayerNorm(config.hidden_size, eps=config.norm_eps)


def drop(x: Tensor, probability: float, training: bool) -> Tensor:
    """Dropout. In compiled code a number is a hash of the place and of two random seeds (Wellons' lowbias32), in the
    kernel that reads x: Philox, which makes four and keeps one, takes longer there than the memory does."""
    if not (training and probability > 0 and torch.compiler.is_compiling()) or x.numel() >= 2**31:
        return F.dropout(x, probability, training)
    first, second = torch.randint(2**31 - 1, (2,), device=x.device).to(torch.int32).unbind()
    bits = torch.arange(x.numel(), dtype=torch.int32, device=x.device).view(x.shape) ^ first
    bits = (bits ^ (bits >> 16 & 0xFFFF)) * 0x7FEB352D + second
    bits = (bits ^ (bits >> 15 & 0x1FFFF)) * (0x846CA68B - 2**32)
    is_kept = ((bits ^ (bits >> 16 & 0xFFFF)) & 0x7FFFFFFF) >= int(probability * 2**31)
    return torch.where(is_kept, x * (1 / (1 - probability)), 0.0)


def _embedding(rows: int, config: ModelSection) -> nn.Embedding:
    """Without values: nn.Embedding draws normal ones, which on the device `meta` imports the compiler, for a second."""
    return nn.Embedding(rows, config.hidden_size, _weight=torch.empty(rows, config.hidden_size))


class Embeddings(nn.Module):
    """Tokens, plus learned positions and token types, then norm, then dropout: each where the family has it."""

    def __init__(self, config: ModelSection, family: Family) -> None:
        super().__init__()
        learned, types = family.positions == "learned", family.token_types
        self.dropout = config.dropout
        self.tokens = _embedding(padded_vocab_size(config), config)
        self.positions = _embedding(config.seq_length, config) if learned else None
        self.token_types = _embedding(types, config) if types else None
        self.norm = make_norm(config, family) if family.embedding_norm else None

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
        return drop(x, self.dropout, self.training)


class MLP(nn.Module):
    """down(activation(up(x))), or down(activation(gate(x)) * up(x)) for a gated family."""

    def __init__(self, config: ModelSection, family: Family) -> None:
        super().__init__()
        narrow, wide, bias = config.hidden_size, config.ffn_hidden_size, family.bias
        self.activation = ACTIVATIONS[family.activation]
        self.gate = Linear(narrow, wide, bias=bias) if family.gated else None
        self.up = Linear(narrow, wide, bias=bias)
        self.down = Linear(wide, narrow, bias=bias)
        self.recompute = False

    def forward(self, x: Tensor) -> Tensor:
        wide = (self.up(x),) if self.gate is None else (self.up(x), self.gate(x))
        return run_recomputable(self._narrow, *wide, recompute=self.recompute)

    def _narrow(self, up: Tensor, gate: Tensor | None = None) -> Tensor:
        """Recomputed, it ends where `down` has its input: the product itself is not repeated."""
        narrow: Tensor = self.down(self.activation(up) if gate is None else self.activation(gate) * up)
        return narrow


class Block(nn.Module):
    """One transformer block: pre-norm for decoders, post-norm for encoders."""

    def __init__(self, config: ModelSection, family: Family) -> None:
        super().__init__()
        self.post_norm = family.encoder
        self.dropout = config.dropout
        self.recompute = False
        self.attention_norm = make_norm(config, family)
        self.attention = Attention(config, family)
        self.mlp_norm = make_norm(config, family)
        self.mlp = MLP(config, family)

    def forward(self, x: Tensor, context: AttentionContext) -> Tensor:
        run_block = self._post_norm if self.post_norm else self._pre_norm
        return run_recomputable(lambda x: run_block(x, context), x, recompute=self.recompute)

    def _pre_norm(self, x: Tensor, context: AttentionContext) -> Tensor:
        x = x + self._drop(self.attention(self.attention_norm(x), context))
        return x + self._drop(self.mlp(self.mlp_norm(x)))

    def _post_norm(self, x: Tensor, context: AttentionContext) -> Tensor:
        x = self.attention_norm(x + self._drop(self.attention(x, context)))
        out: Tensor = self.mlp_norm(x + self._drop(self.mlp(x)))
        return out

    def _drop(self, x: Tensor) -> Tensor:
        return drop(x, self.dropout, self.training)


class MaskedHead(nn.Module):
    """BERT's: dense, activation, norm, then a vocabulary projection `weight` (tied by default) with its own bias; only
    at the places `predicted` (B, P), where they are given."""

    def __init__(self, config: ModelSection, family: Family) -> None:
        super().__init__()
        rows = padded_vocab_size(config)
        self.activation = ACTIVATIONS[family.activation]
        self.dense = nn.Linear(config.hidden_size, config.hidden_size)
        self.norm = make_norm(config, family)
        self.weight = nn.Parameter(torch.empty(rows, config.hidden_size))
        self.bias = nn.Parameter(torch.zeros(rows))

    def forward(self, x: Tensor, predicted: Tensor | None = None) -> Tensor:
        if predicted is not None:
            x = x.gather(1, predicted[..., None].expand(-1, -1, x.shape[-1]))
        return F.linear(self.norm(self.activation(self.dense(x))), self.weight, self.bias)


class Pooler(nn.Module):
    """tanh(dense(first token)), as (B, E)."""

    def __init__(self, config: ModelSection) -> None:
        super().__init__()
        self.dense = nn.Linear(config.hidden_size, config.hidden_size)

    def forward(self, x_BSE: Tensor) -> Tensor:
        return torch.tanh(self.dense(x_BSE[:, 0]))
