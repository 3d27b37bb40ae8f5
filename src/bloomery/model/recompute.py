"""Recompute activations in the backward pass instead of storing them.

Blocks and attention cores carry a `recompute` flag rather than a wrapper, so that parameter names never change.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from bloomery.config.recipe import Recompute


def run(function: Callable[..., Tensor], *args: Any, recompute: bool) -> Tensor:
    """function(*args); with `recompute` its inner activations are computed again in the backward pass, with the same
    dropout. Tensors given as args are stored, those that `function` closes over are only referenced."""
    if recompute and torch.is_grad_enabled():
        return cast(Tensor, checkpoint(function, *args, use_reentrant=False, preserve_rng_state=True))
    return function(*args)


def apply_recompute(model: nn.Module, mode: Recompute) -> None:
    """Set what `model` (a Decoder or an Encoder) recomputes: nothing, the attention cores (their scores are not
    stored) or whole blocks (only the input of each is stored). May be called again to change it."""
    for block in cast(Any, model.layers).values():
        block.recompute = mode == "full"
        block.attention.core.recompute = mode == "selective"
