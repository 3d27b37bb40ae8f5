"""Cross-entropy over logits whose vocabulary is cut between ranks: nobody ever holds all logits of a token."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from bloomery.model.loss import IGNORE
from bloomery.parallel.collectives import all_reduce, sum_of_all


def vocabulary_parallel_losses(group: dist.ProcessGroup) -> Callable[[Tensor, Tensor], Tensor]:
    """`token_losses` (model/loss.py) for logits (..., vocabulary / ranks)."""

    def losses(logits: Tensor, labels: Tensor) -> Tensor:
        logits = logits.float()
        rows = logits.shape[-1]
        highest = all_reduce(logits.detach().amax(-1), "max", group)
        total = sum_of_all(torch.exp(logits - highest[..., None]).sum(-1), group)
        own = labels - group.rank() * rows
        absent = (own < 0) | (own >= rows)
        chosen = logits.gather(-1, own.masked_fill(absent, 0)[..., None])[..., 0]
        chosen = sum_of_all(chosen.masked_fill(absent, 0.0), group)
        return (torch.log(total) + highest - chosen).masked_fill(labels == IGNORE, 0.0)

    return losses
