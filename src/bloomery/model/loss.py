"""The losses, as sums over valid targets; who owns the global counts divides.

The global loss is the sum over names k of sums[k] / global_counts[k], however the batch is cut.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn import functional as F

IGNORE = -100
"""The label of a position that has no loss."""

LM_LOSS = "lm loss"
SOP_LOSS = "sop loss"


def loss_sums(outputs: Tensor | tuple[Tensor, Tensor], targets: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Summed cross-entropy of each target, in fp32 from logits of any dtype; the outputs are a model's, the names as in
    `targets`. Padded vocabulary rows take part in the softmax, as in Megatron: training drives them down, and exports
    drop them."""
    logits = outputs if isinstance(outputs, tuple) else (outputs,)
    names = (LM_LOSS, SOP_LOSS)[: len(logits)]
    return {name: _summed_cross_entropy(part, targets[name]) for name, part in zip(names, logits, strict=True)}


def loss_counts(targets: Mapping[str, Tensor]) -> dict[str, int]:
    """Valid labels of each target. For host tensors: on a device this waits for it."""
    return {name: int(torch.count_nonzero(labels != IGNORE)) for name, labels in targets.items()}


def _summed_cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, -2).float(), labels.flatten(), ignore_index=IGNORE, reduction="sum")
