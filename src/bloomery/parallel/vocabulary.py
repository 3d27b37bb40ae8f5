"""Cross-entropy over logits whose vocabulary is cut between ranks: nobody ever holds all logits of a token."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from bloomery.config.recipe import ModelSection
from bloomery.model.loss import IGNORE, padding_of, token_losses, true_logits
from bloomery.parallel.collectives import all_reduce, own_part, sum_of_all


def vocabulary_losses(
    model: ModelSection, group: dist.ProcessGroup | None, device: torch.device
) -> Callable[[Tensor, Tensor], Tensor]:
    """`token_losses` (model/loss.py) for this model's logits, which may be cut between the ranks of a group."""
    padding = padding_of(model, device)
    if group is None:
        return partial(token_losses, padding=padding)
    return _parallel_losses(None if padding is None else own_part(padding, 0, group), group)


def _parallel_losses(padding: Tensor | None, group: dist.ProcessGroup) -> Callable[[Tensor, Tensor], Tensor]:
    """For logits (..., vocabulary / ranks). Padding may be a part of a rank's words, or all of them."""

    def losses(logits: Tensor, labels: Tensor) -> Tensor:
        logits = true_logits(logits, padding)
        rows = logits.shape[-1]
        highest = all_reduce(logits.detach().amax(-1), "max", group)
        total = sum_of_all(torch.exp(logits - highest[..., None]).sum(-1), group)
        own = labels - group.rank() * rows
        absent = (own < 0) | (own >= rows)
        chosen = logits.gather(-1, own.masked_fill(absent, 0)[..., None])[..., 0]
        chosen = sum_of_all(chosen.masked_fill(absent, 0.0), group)
        return (torch.log(total) + highest - chosen).masked_fill(labels == IGNORE, 0.0)

    return losses
