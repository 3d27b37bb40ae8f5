"""Norms. Both compute in fp32 whatever the input."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from bloomery.config.recipe import ModelSection
from bloomery.model.families import Architecture


class RMSNorm(nn.Module):
    """x / rms(x) * weight, in fp32 inside, in the input's dtype outside."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x.float(), self.weight.shape, self.weight.float(), self.eps).to(x.dtype)


def make_norm(config: ModelSection, architecture: Architecture) -> nn.Module:
    """The family's norm over the hidden size. nn.LayerNorm keeps fp32 statistics for 16-bit inputs by itself."""
    if architecture.norm == "rms":
        return RMSNorm(config.hidden_size, config.norm_eps)
    return nn.LayerNorm(config.hidden_size, eps=config.norm_eps)
