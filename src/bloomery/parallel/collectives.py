"""Collectives that gradients flow through. Functional ones, so that they can be compiled."""

from __future__ import annotations

from typing import Any, cast

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import Tensor

# torch 2.13 gave them new names and warns about the old ones, which are all that 2.11 has.
_ALL_GATHER: Any = getattr(functional, "all_gather_single", None) or functional.all_gather_tensor
_REDUCE_SCATTER: Any = getattr(functional, "reduce_scatter_single", None) or functional.reduce_scatter_tensor


class _Gather(torch.autograd.Function):
    """Everybody's part, along a dimension. Each rank uses the whole for its own purpose: backward sums and cuts."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
        ctx.dim, ctx.group = dim, group
        return all_gather(x, dim, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return reduce_scatter(grad, ctx.dim, ctx.group), None, None


class _AllGatherReplicated(torch.autograd.Function):
    """Everybody's part, along a dimension. All ranks compute the same from the whole: backward only cuts."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
        ctx.dim, ctx.group = dim, group
        return all_gather(x, dim, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return own_part(grad, ctx.dim, ctx.group).contiguous(), None, None


class _ReduceScatter(torch.autograd.Function):
    """The sum of what all ranks have, of which each keeps its part along a dimension."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
        ctx.dim, ctx.group = dim, group
        return reduce_scatter(x, dim, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return all_gather(grad, ctx.dim, ctx.group), None, None


class _Sum(torch.autograd.Function):
    """The sum of what all ranks have, with which all then compute the same: backward is the identity."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        return all_reduce(x, "sum", group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


def gather(x: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
    return cast(Tensor, _apply(_Gather, x, dim, group))


def all_gather_replicated(x: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
    return cast(Tensor, _apply(_AllGatherReplicated, x, dim, group))


def reduce_scatter_with_grad(x: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
    return cast(Tensor, _apply(_ReduceScatter, x, dim, group))


def sum_of_all(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    return cast(Tensor, _apply(_Sum, x, group))


def own_part(x: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
    """This rank's part of a tensor that all have."""
    return x.chunk(group.size(), dim)[group.rank()]


def all_gather(x: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
    """Without gradient."""
    return _wait(_ALL_GATHER(x.contiguous(), dim, group))


def reduce_scatter(x: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
    """Without gradient."""
    return _wait(_REDUCE_SCATTER(x.contiguous(), "sum", dim, group))


def all_reduce(x: Tensor, operation: str, group: dist.ProcessGroup) -> Tensor:
    """Without gradient."""
    return _wait(functional.all_reduce(x.contiguous(), operation, group))


def _apply(function: Any, *args: Any) -> Any:
    return function.apply(*args)


def _wait(result: Tensor) -> Tensor:
    wait: Any = functional.wait_tensor
    return cast(Tensor, wait(result))
