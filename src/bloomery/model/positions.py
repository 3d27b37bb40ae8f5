"""Positions inside attention: rotary embeddings. (ALiBi is one slope a head: sizing/alibi.py.)

Shape suffixes: B batch, S sequence, H heads, D head size.
"""

from __future__ import annotations

import torch
from torch import Tensor


def rotary_table(positions: Tensor, *, head_dim: int, theta: float) -> tuple[Tensor, Tensor]:
    """Cosine and sine in fp32 for positions (B, S) or (S,), shaped to broadcast against x_BSHD."""
    exponents = torch.arange(0, head_dim, 2, device=positions.device, dtype=torch.float32) / head_dim
    angles = positions[..., None].float() * (1.0 / theta**exponents)
    angles = torch.cat((angles, angles), dim=-1).unsqueeze(-2)
    return angles.cos(), angles.sin()


def rotate(x_BSHD: Tensor, table: tuple[Tensor, Tensor]) -> Tensor:
    """Rotary embedding in Hugging Face's rotate-half convention: element i pairs with i + D/2, so weights need no
    permutation. Computed in fp32."""
    cos, sin = table
    x = x_BSHD.float()
    first, second = x.chunk(2, dim=-1)
    return (x * cos + torch.cat((-second, first), dim=-1) * sin).to(x_BSHD.dtype)
