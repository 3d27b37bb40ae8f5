"""Gradients of one global batch, summed in fp32 whatever the precision of the weights."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


class GradientSum:
    """Owns the fp32 sum. fp32 weights let autograd add into `.grad`; 16-bit weights get an fp32 buffer beside them,
    because adding many micro-batches in 16 bits loses the small ones."""

    def __init__(self, parameters: Sequence[Tensor]) -> None:
        self._parameters = list(parameters)
        self._buffers: list[Tensor] | None = None
        self._empty = True
        if any(parameter.dtype != torch.float32 for parameter in self._parameters):
            self._buffers = [torch.zeros_like(parameter, dtype=torch.float32) for parameter in self._parameters]

    def absorb(self) -> None:
        """Take in the gradients that one backward pass left behind. Call it after every micro-batch."""
        if self._buffers is None:
            return
        fresh = [_grad(parameter) for parameter in self._parameters]
        if self._empty:
            torch._foreach_copy_(self._buffers, fresh)
        else:
            torch._foreach_add_(self._buffers, fresh)
        self._empty = False
        for parameter in self._parameters:
            parameter.grad = None

    def tensors(self) -> list[Tensor]:
        """The sums, in the order of the parameters."""
        return self._buffers if self._buffers is not None else [_grad(parameter) for parameter in self._parameters]

    def clear(self) -> None:
        """Forget them, before the next global batch."""
        self._empty = True
        for parameter in self._parameters:
            parameter.grad = None


def _grad(parameter: Tensor) -> Tensor:
    assert parameter.grad is not None, "a parameter took no part in the loss"
    return parameter.grad
