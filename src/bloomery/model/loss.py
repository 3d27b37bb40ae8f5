"""The losses, as sums over the valid targets of each sample; who owns the global counts divides.

The global loss is the sum over names k of sums[k] / global_counts[k], however the batch is cut.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from torch import Tensor
from torch.nn import functional as F

IGNORE = -100
"""The label of a position that has no loss."""

LM_LOSS = "lm loss"
SOP_LOSS = "sop loss"


def token_losses(logits: Tensor, labels: Tensor) -> Tensor:
    """Cross-entropy of every label in fp32, from logits of any dtype; 0 where the label is IGNORE."""
    each = F.cross_entropy(logits.flatten(0, -2).float(), labels.flatten(), ignore_index=IGNORE, reduction="none")
    return each.view(labels.shape)


def row_losses(
    outputs: Tensor | tuple[Tensor, Tensor],
    targets: Mapping[str, Tensor],
    vocabulary_losses: Callable[[Tensor, Tensor], Tensor] = token_losses,
) -> dict[str, Tensor]:
    """The loss of each target summed over each sample, (B,) in fp32; names as in targets.

    `vocabulary_losses` is `token_losses` for the logits over the vocabulary, wherever those may lie. Padded vocabulary
    rows take part in the softmax, as in Megatron: training drives them down, and exports drop them.
    """
    if isinstance(outputs, Tensor):
        return {LM_LOSS: vocabulary_losses(outputs, targets[LM_LOSS]).sum(1)}
    words, order = outputs
    return {
        LM_LOSS: vocabulary_losses(words, targets[LM_LOSS]).sum(1),
        SOP_LOSS: token_losses(order, targets[SOP_LOSS]),
    }
