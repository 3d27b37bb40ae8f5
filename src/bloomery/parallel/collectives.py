"""Collectives that gradients flow through. Functional ones, so that they can be compiled."""

from collections.abc import Callable
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import Tensor

# torch 2.13 gave them new names and warns about the old ones, which are all that 2.11 has.
_ALL_GATHER: Any = getattr(functional, "all_gather_single", None) or functional.all_gather_tensor
_WAIT: Any = functional.wait_tensor
_REDUCE_SCATTER: Any = getattr(functional, "reduce_scatter_single", None) or functional.reduce_scatter_tensor


class _Collective(torch.autograd.Function):
    """One of the table below; backward is the one that `_BACKWARD` names."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, name: str, dim: int, group: dist.ProcessGroup) -> Tensor:
        ctx.name, ctx.dim, ctx.group = name, dim, group
        return _COLLECTIVES[name](x, dim, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return _COLLECTIVES[_BACKWARD[ctx.name]](grad, ctx.dim, ctx.group), None, None, None


def gather(x: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
    """Everybody's part, along a dimension. Each rank uses the whole for its own purpose: backward sums and cuts."""
    return _with_gradient("all_gather", x, dim, group)


def all_gather_replicated(x: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
    """Everybody's part, along a dimension. All ranks compute the same from the whole: backward only cuts."""
    return _with_gradient("all_gather_replicated", x, dim, group)


def reduce_scatter_with_grad(x: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
    """The sum of what all ranks have, of which each keeps its part along a dimension."""
    return _with_gradient("reduce_scatter", x, dim, group)


def sum_of_all(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The sum of what all ranks have, with which all then compute the same: backward is the identity."""
    return _with_gradient("sum", x, 0, group)


def own_part(x: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
    """This rank's part of a tensor that all have."""
    return x.chunk(group.size(), dim)[group.rank()]


def all_gather(x: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
    """Without gradient."""
    return cast(Tensor, _WAIT(_ALL_GATHER(x.contiguous(), dim, group)))


def reduce_scatter(x: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
    """Without gradient."""
    return cast(Tensor, _WAIT(_REDUCE_SCATTER(x.contiguous(), "sum", dim, group)))


def all_reduce(x: Tensor, operation: str, group: dist.ProcessGroup) -> Tensor:
    """Without gradient."""
    return cast(Tensor, _WAIT(functional.all_reduce(x.contiguous(), operation, group)))


def _with_gradient(name: str, x: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
    apply: Any = _Collective.apply
    return cast(Tensor, apply(x, name, dim, group))


_COLLECTIVES: dict[str, Callable[[Tensor, int, dist.ProcessGroup], Tensor]] = {
    "all_gather": all_gather,
    "all_gather_replicated": all_gather,
    "reduce_scatter": reduce_scatter,
    "own_part": lambda x, dim, group: own_part(x, dim, group).contiguous(),
    "sum": lambda x, _, group: all_reduce(x, "sum", group),
    "identity": lambda x, _, group: x,
}
_BACKWARD = {
    "all_gather": "reduce_scatter",
    "all_gather_replicated": "own_part",
    "reduce_scatter": "all_gather",
    "sum": "identity",
}
