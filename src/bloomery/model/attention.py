"""Attention over plain tensors, and the choice of its kernel.

Shape suffixes: B batch, S sequence, E hidden size, H query heads, K key/value heads, D head size.

Everything that is the same for all layers (masks, ALiBi bias, rotary table) is made once per forward, by
`attention_context`, and handed down. Measured on one H200 (forward+backward TFLOP/s, 16 heads x 2048 x 128): SDPA
causal by cuDNN 383 and by flash 217, FlexAttention with ALiBi 273, SDPA with a materialised ALiBi bias 134. With
dropout a materialised bias is the only way: a step of a 6-layer BLOOM takes 107 ms by cuDNN, 146 without it.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention
from torch.utils.checkpoint import checkpoint

from bloomery.config.recipe import ModelSection
from bloomery.families.family import Family
from bloomery.model.linear import Linear

Kernel = Literal["sdpa", "flex", "bias"]

_FASTEST_FIRST = [
    SDPBackend.CUDNN_ATTENTION,
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.MATH,
]
_FLEX_BLOCK = 128


@dataclass(frozen=True)
class AttentionContext:
    """What the attention of one forward pass needs besides q, k and v."""

    kernel: Kernel
    causal: bool
    rotary: tuple[Tensor, Tensor] | None = None
    bias: Tensor | None = None
    """Kernel `bias`: (B or 1, H or 1, queries or 1, S), boolean (True is seen) or additive fp32."""
    block_mask: BlockMask | None = None
    """Kernel `flex`."""
    score_mod: Callable[..., Tensor] | None = None
    """Kernel `flex`."""


def choose_kernel(device_type: str, *, plain: bool, dropout: float, seq_length: int, head_dim: int) -> Kernel:
    """The fastest kernel that can do it. `plain`: no ALiBi, no documents, and queries for all of the sequence, else
    SDPA's own causal mask is not the right one. `dropout` is the probability in force: 0 in evaluation.

    FlexAttention has no dropout, no training kernel on CPUs, none for head sizes under 16, and works in blocks of 128.
    """
    if plain:
        return "sdpa"
    if device_type not in ("cpu", "meta") and dropout == 0 and head_dim >= 16 and seq_length >= _FLEX_BLOCK:
        return "flex"
    return "bias"


def attention_context(
    kernel: Kernel,
    *,
    causal: bool,
    seq_length: int,
    device: torch.device,
    slopes: Tensor | None = None,
    document_ids: Tensor | None = None,
    is_token: Tensor | None = None,
    query_places: Tensor | None = None,
    rotary: tuple[Tensor, Tensor] | None = None,
) -> AttentionContext:
    """Prepare one forward pass: the bias or the block mask is made here, once for all layers. `seq_length` counts the
    keys.

    slopes (H,): ALiBi's, in fp32, of the heads that are present.
    document_ids (B, S): a token sees only tokens of its own id.
    is_token (B, S): 0 for padding, which nobody sees; of a bidirectional model, alone.
    query_places (queries,): where each query stands, if they are only a part of the sequence; keys are always all.
    """
    if kernel == "sdpa":
        assert slopes is document_ids is is_token is query_places is None, "sdpa takes none of these"
        return AttentionContext(kernel, causal, rotary)
    keys = torch.arange(seq_length, device=device)
    queries = keys if query_places is None else query_places
    if is_token is not None and kernel == "bias":  # a number for each key: cuDNN reads no more, 14% faster than a mask
        bias = torch.zeros_like(is_token, dtype=torch.float32).masked_fill(is_token == 0, float("-inf"))
        return AttentionContext(kernel, causal, rotary, bias=bias[:, None, None])
    if kernel == "bias":
        return AttentionContext(kernel, causal, rotary, bias=_dense_bias(causal, keys, queries, slopes, document_ids))
    mask = _block_mask(causal, seq_length, document_ids if is_token is None else is_token, queries)
    score = None if slopes is None else _alibi_score(slopes, query_places)
    return AttentionContext(kernel, causal, rotary, block_mask=mask, score_mod=score)


def attend(q_BHSD: Tensor, k_BKSD: Tensor, v_BKSD: Tensor, context: AttentionContext, dropout: float = 0.0) -> Tensor:
    """softmax(q k / sqrt(D) + bias) v as o_BHSD, by the context's kernel. Query head h reads key head h * K // H."""
    kernel = _flex if context.kernel == "flex" else _sdpa
    return kernel(q_BHSD, k_BKSD, v_BKSD, context, dropout)


def run_recomputable(function: Callable[..., Tensor], *args: Any, recompute: bool) -> Tensor:
    """function(*args); with `recompute` its inner activations are computed again in the backward pass, with the same
    dropout. Tensors given as args are stored, those that `function` closes over are only referenced. Blocks and
    attention cores carry a flag rather than a wrapper, so that parameter names never change."""
    if recompute and torch.is_grad_enabled():
        return cast(Tensor, checkpoint(function, *args, use_reentrant=False, preserve_rng_state=True))
    return function(*args)


def rotary_table(positions: Tensor, *, head_dim: int, theta: float) -> tuple[Tensor, Tensor]:
    """Cosine and sine in fp32 for positions (B, S) or (S,), shaped to broadcast against x_BSHD."""
    exponents = torch.arange(0, head_dim, 2, device=positions.device, dtype=torch.float32) / head_dim
    angles = positions[..., None].float() * (1.0 / theta**exponents)
    angles = torch.cat((angles, angles), dim=-1).unsqueeze(-2)
    return angles.cos(), angles.sin()


def rotate(x_BSHD: Tensor, table: tuple[Tensor, Tensor]) -> Tensor:
    """Rotary embedding in Hugging Face's rotate-half convention: element i pairs with i + D/2, so weights need no
    permutation. Computed in fp32."""
    cos, sin = table
    x = x_BSHD.float()
    first, second = x.chunk(2, dim=-1)
    return (x * cos + torch.cat((-second, first), dim=-1) * sin).to(x_BSHD.dtype)


class RMSNorm(nn.Module):
    """x / rms(x) * weight, in fp32 inside, in the input's dtype outside."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x.float(), self.weight.shape, self.weight.float(), self.eps).to(x.dtype)


class AttentionCore(nn.Module):
    """Scores, softmax and values: no parameters. A module of its own so that it can be recomputed or, for context
    parallelism, replaced."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.dropout = dropout
        self.recompute = False
        _try_fastest_first()

    def forward(self, q_BHSD: Tensor, k_BKSD: Tensor, v_BKSD: Tensor, context: AttentionContext) -> Tensor:
        dropout = self.dropout if self.training else 0.0
        return run_recomputable(
            lambda q, k, v: attend(q, k, v, context, dropout), q_BHSD, k_BKSD, v_BKSD, recompute=self.recompute
        )


class Attention(nn.Module):
    """Fused projection, norms of queries and keys where the family has them, attention, output projection.

    Rows of `qkv` are laid out [num_kv_heads, q_per_kv + 2, head_dim]: the queries of a group, its key, its value. So a
    cut along dimension 0 gives whole groups. The number of heads is read from the width of qkv's output.
    """

    def __init__(self, config: ModelSection, family: Family) -> None:
        super().__init__()
        self.head_dim = config.head_size
        self.q_per_kv = config.num_heads // config.num_kv_heads
        width = config.num_kv_heads * (self.q_per_kv + 2) * self.head_dim
        self.qkv = Linear(config.hidden_size, width, bias=family.qkv_bias)
        self.q_norm = RMSNorm(self.head_dim, config.norm_eps) if family.qk_norm else None
        self.k_norm = RMSNorm(self.head_dim, config.norm_eps) if family.qk_norm else None
        self.out = Linear(config.num_heads * self.head_dim, config.hidden_size, bias=family.bias)
        self.core = AttentionCore(config.dropout)

    def forward(self, x_BSE: Tensor, context: AttentionContext) -> Tensor:
        qkv = self.qkv(x_BSE).unflatten(-1, (-1, self.q_per_kv + 2, self.head_dim))
        q_BSHD = qkv[..., : self.q_per_kv, :].flatten(2, 3)
        k_BSKD, v_BSKD = qkv[..., -2, :], qkv[..., -1, :]
        if self.q_norm is not None and self.k_norm is not None:
            q_BSHD, k_BSKD = self.q_norm(q_BSHD), self.k_norm(k_BSKD)
        if context.rotary is not None:
            q_BSHD, k_BSKD = rotate(q_BSHD, context.rotary), rotate(k_BSKD, context.rotary)
        o_BHSD = self.core(q_BSHD.transpose(1, 2), k_BSKD.transpose(1, 2), v_BSKD.transpose(1, 2), context)
        out_BSE: Tensor = self.out(o_BHSD.transpose(1, 2).flatten(2))
        return out_BSE


def _dense_bias(
    causal: bool, keys: Tensor, queries: Tensor, slopes: Tensor | None, document_ids: Tensor | None
) -> Tensor | None:
    mask: Tensor | None = None
    if causal:
        mask = (keys[None, :] <= queries[:, None])[None, None]
    if document_ids is not None:
        same = document_ids[:, None, queries, None] == document_ids[:, None, None, :]
        mask = same if mask is None else mask & same
    if slopes is None:
        return mask
    # slope * (k - q) equals Megatron's slope * k after the softmax, and is exact in 16 bits where it matters: nearby.
    bias = slopes[None, :, None, None] * (keys[None, :] - queries[:, None])
    return bias if mask is None else bias.masked_fill(~mask, float("-inf"))


def _block_mask(causal: bool, seq_length: int, document_ids: Tensor | None, places: Tensor) -> BlockMask:
    """`places`: of the queries."""

    def is_causal(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return places[q] >= k

    def same_document(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        assert document_ids is not None
        same = document_ids[b, places[q]] == document_ids[b, k]
        return same & (places[q] >= k) if causal else same

    queries, device = len(places), places.device
    if document_ids is None:
        return create_block_mask(is_causal, None, None, queries, seq_length, device=device)
    return create_block_mask(same_document, document_ids.shape[0], None, queries, seq_length, device=device)


def _alibi_score(slopes: Tensor, query_places: Tensor | None) -> Callable[..., Tensor]:
    def alibi(score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return score + slopes[h] * (k - q)

    def alibi_of_some(score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        assert query_places is not None
        return score + slopes[h] * (k - query_places[q])

    return alibi if query_places is None else alibi_of_some


@cache
def _compiled_flex() -> Callable[..., Tensor]:
    return torch.compile(flex_attention)


def _flex(q: Tensor, k: Tensor, v: Tensor, context: AttentionContext, dropout: float) -> Tensor:
    assert dropout == 0, "FlexAttention has no dropout"
    direct = torch.compiler.is_compiling() or q.device.type == "cpu"
    function: Any = flex_attention if direct else _compiled_flex()
    grouped = q.shape[1] != k.shape[1]
    out: Tensor = function(q, k, v, score_mod=context.score_mod, block_mask=context.block_mask, enable_gqa=grouped)
    return out


def _sdpa(q: Tensor, k: Tensor, v: Tensor, context: AttentionContext, dropout: float) -> Tensor:
    bias, groups = context.bias, q.shape[1] // k.shape[1]
    if context.kernel == "bias" and groups > 1:  # the backends that take a bias know no groups
        k, v = k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1)
    if bias is not None and bias.dtype != torch.bool:
        bias = bias.to(q.dtype).expand(-1, -1, q.shape[2], -1)
    options: dict[str, Any] = {"attn_mask": bias, "is_causal": context.causal and context.kernel == "sdpa"}
    options |= {"dropout_p": dropout, "enable_gqa": q.shape[1] != k.shape[1]}
    return F.scaled_dot_product_attention(q, k, v, **options)


@cache
def _try_fastest_first() -> AbstractContextManager[None]:
    """In this process, from now on. Entered inside a compiled model, it would keep that out of AOTAutograd's cache."""
    order = sdpa_kernel(_FASTEST_FIRST, set_priority=True)
    if torch.version.cuda or torch.version.hip:
        order.__enter__()
    return order  # kept by the cache: it restores torch's own order when it is deleted
