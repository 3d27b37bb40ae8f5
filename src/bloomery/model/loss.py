"""The losses, as sums over the valid targets of each sample; who owns the global counts divides.

The global loss is the sum over names k of sums[k] / global_counts[k], however the batch is cut.
"""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor
from torch.nn import functional as F

from bloomery.config.recipe import ModelSection
from bloomery.families.family import IGNORED_LABEL, LM_LOSS
from bloomery.sizing.parameters import padded_vocab_size, softmax_size


def padding_of(model: ModelSection, device: torch.device) -> Tensor | None:
    """What `true_logits` adds: 0 for every word, -inf for every padded row; None if there are none to leave out."""
    words, rows = softmax_size(model), padded_vocab_size(model)
    return (torch.arange(rows, device=device) < words).float().log() if words < rows else None


def true_logits(logits: Tensor, padding: Tensor | None) -> Tensor:
    """In fp32, with padded rows at -inf: they get no probability and no gradient.

    A tensor that is read, not a slice or a mask: rows of an odd length cost a 124M model 4.8% of its step on an H200, a
    mask 1.2%. Of head and loss alone this costs half of what a mask does, and of a 1.3B model nothing measurable.
    """
    return logits.float() if padding is None else logits + padding


def token_losses(logits: Tensor, labels: Tensor, padding: Tensor | None = None) -> Tensor:
    """Cross-entropy of every label in fp32, from logits of any dtype; 0 where the label is IGNORED_LABEL. `padding`:
    see padding_of."""
    logits = true_logits(logits, padding).flatten(0, -2)
    return F.cross_entropy(logits, labels.flatten(), ignore_index=IGNORED_LABEL, reduction="none").view(labels.shape)


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
    (second,) = targets.keys() - {LM_LOSS}
    return {LM_LOSS: vocabulary_losses(words, targets[LM_LOSS]).sum(1), second: token_losses(order, targets[second])}
