"""The losses, as sums over the valid targets of each sample; who owns the global counts divides.

The global loss is the sum over names k of sums[k] / global_counts[k], however the batch is cut.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn import functional as F

IGNORE = -100
"""The label of a position that has no loss."""

LM_LOSS = "lm loss"
SOP_LOSS = "sop loss"


class _TrueLogits(torch.autograd.Function):
    """The logits of the first `rows` words in fp32. One pass each way, which turning them into fp32 takes anyway: the
    product with the head keeps its aligned, padded shape, and the gradient of padding is zero."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, rows: int) -> Tensor:
        ctx.shape, ctx.dtype, ctx.rows = logits.shape, logits.dtype, rows
        if rows == 0:  # all of a rank's words are padding: one that nobody chooses stands for them
            return logits.new_full((*logits.shape[:-1], 1), -torch.inf, dtype=torch.float32)
        return logits[..., :rows].to(torch.float32, copy=True)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        whole = grad.new_empty(ctx.shape, dtype=ctx.dtype)
        whole[..., : ctx.rows].copy_(grad[..., : ctx.rows])
        whole[..., ctx.rows :].zero_()
        return whole, None


def true_logits(logits: Tensor, rows: int | None) -> Tensor:
    """In fp32, without the padding that follows the first `rows`."""
    if rows is None or rows >= logits.shape[-1]:
        return logits.float()
    return cast(Tensor, cast(Any, _TrueLogits).apply(logits, rows))


def token_losses(logits: Tensor, labels: Tensor, rows: int | None = None) -> Tensor:
    """Cross-entropy of every label in fp32, from logits of any dtype; 0 where the label is IGNORE. The softmax goes
    over the first `rows` of the vocabulary (sizing/vocabulary.py); None: there is no padding."""
    logits = true_logits(logits, rows).flatten(0, -2)
    return F.cross_entropy(logits, labels.flatten(), ignore_index=IGNORE, reduction="none").view(labels.shape)


def row_losses(
    outputs: Tensor | tuple[Tensor, Tensor],
    targets: Mapping[str, Tensor],
    vocabulary_losses: Callable[[Tensor, Tensor], Tensor] = token_losses,
) -> dict[str, Tensor]:
    """The loss of each target summed over each sample, (B,) in fp32; names as in targets.

    `vocabulary_losses` is `token_losses` for the logits over the vocabulary, wherever those may lie.
    """
    if isinstance(outputs, Tensor):
        return {LM_LOSS: vocabulary_losses(outputs, targets[LM_LOSS]).sum(1)}
    words, order = outputs
    return {
        LM_LOSS: vocabulary_losses(words, targets[LM_LOSS]).sum(1),
        SOP_LOSS: token_losses(order, targets[SOP_LOSS]),
    }
