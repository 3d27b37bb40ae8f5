"""What the reference itself is held against: losses by plain torch in fp64, and the norm of a large gradient."""

from __future__ import annotations

import torch
from torch import nn

from bloomery.base.losses import LM_LOSS
from bloomery.base.piece import Piece
from bloomery.config.recipe import Recipe
from bloomery.data.batch import IGNORED_LABEL, GlobalBatch
from bloomery.model.build import build_model, materialise
from bloomery.parallel.gradients import Gradients
from bloomery.parallel.mesh import alone
from bloomery.parallel.weights import Weight

_LARGE = 1 << 24
"""Elements: fp32 sums that are added one by one are visibly low."""


@torch.no_grad()
def plain_losses(recipe: Recipe, batch: GlobalBatch, device: torch.device) -> dict[str, float]:
    """The losses of a first batch with the initial weights, on purpose not by the losses that are verified here."""
    config, totals = recipe.model, dict.fromkeys(batch.counts, 0.0)
    model = build_model(config)
    materialise(model, config, seed=recipe.seed, device=device, dtype=torch.float32)
    for part in batch.micro_batches:
        outputs = model(**{name: tensor.to(device) for name, tensor in part.inputs.items()})
        heads = (outputs,) if isinstance(outputs, torch.Tensor) else outputs
        for (name, labels), logits in zip(part.targets.items(), heads, strict=True):
            if name == LM_LOSS and not config.softmax_over_padding:
                logits = logits[..., : config.vocab_size]
            valid = labels != IGNORED_LABEL
            chosen = logits.cpu().double().log_softmax(-1)[valid].gather(-1, labels[valid][:, None])
            totals[name] -= chosen.sum().item()
    return {name: total / max(1, batch.counts[name]) for name, total in totals.items()}


def large_norm(device: torch.device) -> tuple[float, float]:
    """(as training finds it, in fp64): the norm of a gradient as large as an embedding's."""
    values = torch.randn(_LARGE, generator=torch.Generator().manual_seed(0))
    large = nn.Parameter(values.to(device))
    large.grad = large.detach()
    weight = Weight("large", large, Piece.whole(large.data), is_shared=False, summed_over_tp=False, tied_over_pp=False)
    return Gradients([weight], alone()).norm().item(), values.double().norm().item()
