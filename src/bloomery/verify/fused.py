"""The kernels of an accelerator as far as memory goes: what they keep for the backward pass, without computing it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from bloomery.model import recompute
from bloomery.model.attention import AttentionContext


@contextmanager
def fused_dropout() -> Iterator[None]:
    """Dropout that keeps one byte per element, as on accelerators; on a CPU it keeps a factor."""
    before = F.dropout

    def dropout(x: Tensor, p: float, training: bool) -> Tensor:
        return torch.native_dropout(x, p, True)[0] if training and p > 0 else x

    F.dropout = dropout  # type: ignore[assignment]
    try:
        yield
    finally:
        F.dropout = before


class _FusedAttention(torch.autograd.Function):
    """Keeps its arguments, its output and one number per query and head, whatever the kernel: never the scores."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None) -> Tensor:
        out, log_sum = torch.empty_like(q), q.new_empty(q.shape[:3], dtype=torch.float32)
        ctx.save_for_backward(q, k, v, out, log_sum, bias)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        q, k, v, *_ = ctx.saved_tensors
        return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v), None


def pretend_accelerator(model: nn.Module) -> None:
    """Let a Decoder or Encoder choose kernels as on an accelerator, and keep what they keep."""
    cast(Any, model).pretended_device = "cuda"
    for block in cast(Any, model).layers.values():
        block.attention.core.forward = _forward_of(block.attention.core)


def _forward_of(core: nn.Module) -> Any:
    def forward(q: Tensor, k: Tensor, v: Tensor, context: AttentionContext) -> Tensor:
        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            bias, groups = context.bias, q.shape[1] // k.shape[1]
            if context.kernel == "bias" and groups > 1:
                k, v = k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1)
            if bias is not None and bias.dtype != torch.bool:
                bias = bias.to(q.dtype)
            return cast(Tensor, cast(Any, _FusedAttention).apply(q, k, v, bias))

        return recompute.run(attend, q, k, v, recompute=cast(bool, core.recompute))

    return forward
