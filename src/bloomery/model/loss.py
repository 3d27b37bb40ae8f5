"""The losses, as sums over the valid targets of each sample; who owns the global counts divides.

The global loss is the sum over names k of sums[k] / global_counts[k], however the batch is cut.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor
from torch.nn import functional as F

IGNORE = -100
"""The label of a position that has no loss."""

LM_LOSS = "lm loss"
SOP_LOSS = "sop loss"


def row_losses(outputs: Tensor | tuple[Tensor, Tensor], targets: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Cross-entropy of each target summed over each sample, (B,) in fp32 from logits of any dtype; names as in targets.

    Padded vocabulary rows take part in the softmax, as in Megatron: training drives them down, and exports drop them.
    """
    logits = outputs if isinstance(outputs, tuple) else (outputs,)
    names = (LM_LOSS, SOP_LOSS)[: len(logits)]
    return {name: _row_cross_entropy(part, targets[name]) for name, part in zip(names, logits, strict=True)}


def _row_cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    rows = F.cross_entropy(logits.flatten(0, -2).float(), labels.flatten(), ignore_index=IGNORE, reduction="none")
    return rows.view(labels.shape[0], -1).sum(1)
