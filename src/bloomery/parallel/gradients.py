"""What a rank trains: its pieces of the weights, and their gradients of one global batch, summed in fp32 over
micro-batches and ranks; and the norm of these, every element once."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from bloomery.base.ranks import Piece
from bloomery.parallel.mesh import Mesh
from bloomery.sizing.layout import cut_dimension, cut_of

_LARGEST_EXACT_COUNT = 2**24
"""fp32 counts every one up to here."""
_ELEMENTS_AT_ONCE = 1 << 20
"""That are turned into fp64 to be summed: 8 MiB."""
_EMBEDDING, _HEAD = "embed.tokens.weight", "head.weight"


@dataclass(frozen=True)
class Weight:
    name: str
    """Of the logical tensor: the head of a tied model is the embedding, wherever it lies."""
    parameter: nn.Parameter
    """What the module computes with; under data parallelism a DTensor."""
    piece: Piece
    """The fp32 values of this rank."""
    is_shared: bool
    """Whether other ranks hold the same piece, which must stay the same."""
    summed_over_tp: bool
    """Each tensor-parallel rank has a part of the gradient."""
    tied_over_pp: bool
    """The first and the last stage have copies, and each a part of the gradient."""

    def at(self, parameter: nn.Parameter) -> Weight:
        """The same weight in another place in memory."""
        return replace(self, parameter=parameter, piece=self.piece.with_tensor(local_of(parameter.data)))


def weights_of(
    models: Iterable[nn.Module], shapes: Mapping[str, tuple[int, ...]], mesh: Mesh, *, tied: bool
) -> list[Weight]:
    """Everything this rank trains, in the order of the models' parameters. `shapes`: before anything was cut."""
    weights = []
    across = tied and mesh.layout.pp > 1
    for model in models:
        for name, parameter in model.named_parameters():
            cut = cut_of(name)
            is_copy = across and name == _HEAD
            whole_on_tp = cut in ("summed", "alike")
            weights.append(
                Weight(
                    name=_EMBEDDING if is_copy else name,
                    parameter=parameter,
                    piece=Piece(
                        tensor=local_of(parameter.data),
                        shape=shapes[name],
                        offset=_offset(name, parameter, shapes[name], mesh),
                        owned=mesh.copy == 0 and not is_copy and (mesh.tp == 0 or not whole_on_tp),
                    ),
                    is_shared=mesh.layout.copies > 1
                    or (mesh.layout.tp > 1 and whole_on_tp)
                    or (across and name in (_EMBEDDING, _HEAD)),
                    summed_over_tp=mesh.layout.tp > 1 and cut == "summed",
                    tied_over_pp=is_copy or (across and name == _EMBEDDING),
                )
            )
    return weights


def local_of(tensor: Tensor) -> Tensor:
    """The memory of this rank behind a tensor that may be distributed."""
    return cast(Any, tensor).to_local() if is_distributed(tensor) else tensor


def is_distributed(tensor: Tensor) -> bool:
    """A DTensor. Where nobody has imported their module, which takes a second, there are none."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def _offset(name: str, parameter: Tensor, shape: tuple[int, ...], mesh: Mesh) -> tuple[int, ...]:
    offset = [0] * len(shape)
    dim = cut_dimension(name)
    if dim is not None:
        offset[dim] = mesh.tp * (shape[dim] // mesh.layout.tp)
    if is_distributed(parameter):  # FSDP cuts rows, after tensor parallelism has cut what it cuts
        rows = -(-parameter.shape[0] // mesh.layout.shard)
        offset[0] += min(mesh.shard * rows, parameter.shape[0])
    return tuple(offset)


class Gradients:
    """Owns the sums of what this rank trains, in the order of its weights.

    fp32 weights let autograd add into `.grad`, and FSDP adds in fp32 by itself. Plain 16-bit weights get fp32 buffers
    beside them where something is to be added, because adding many micro-batches in 16 bits loses the small ones. With
    one micro-batch the sum is `.grad` as it is, in 16 bits: whoever reads it computes in fp32.
    """

    def __init__(self, weights: Sequence[Weight], mesh: Mesh) -> None:
        self._weights = list(weights)
        self._mesh = mesh
        self._buffers: dict[int, Tensor] = {}
        """By the place of their weight. They stay when a batch does without them."""
        self._added: list[int] = []
        """Which gradients have one."""
        self._empty: set[int] = set()
        """Buffers that hold nothing yet."""

    def clear(self, *, micro_batches: int) -> None:
        """Forget them, before the next global batch, of so many micro-batches."""
        is_added = [
            weight.parameter.dtype != torch.float32
            and (micro_batches > 1 or weight.summed_over_tp or weight.tied_over_pp)
            for weight in self._weights
        ]
        self._added = [i for i, each in enumerate(is_added) if each]
        self._empty = set(self._added)
        for weight in self._weights:
            weight.parameter.grad = None
        for i in self._empty - self._buffers.keys():
            self._buffers[i] = torch.empty_like(self._weights[i].parameter, dtype=torch.float32)

    def accumulate(self) -> None:
        """Take in the gradients that a backward pass left behind. Call it after every one."""
        for is_first in (True, False):
            chosen = [
                i for i in self._added if self._weights[i].parameter.grad is not None and (i in self._empty) == is_first
            ]
            if chosen:
                add = torch._foreach_copy_ if is_first else torch._foreach_add_
                add([self._buffers[i] for i in chosen], [_grad(self._weights[i]) for i in chosen])
            for i in chosen:
                self._weights[i].parameter.grad = None
                self._empty.discard(i)

    def reduce_across_ranks(self) -> None:
        """After the last micro-batch: add what other ranks have of the same gradients."""
        sums = self.tensors()
        parts = [each for weight, each in zip(self._weights, sums, strict=True) if weight.summed_over_tp]
        if self._mesh.tp_group is not None and parts:
            _all_reduce_coalesced(parts, self._mesh.tp_group)
        for weight, each in zip(self._weights, sums, strict=True):
            if weight.tied_over_pp:
                self._sum_tied_embedding(each)

    def tensors(self) -> list[Tensor]:
        """The sums, in the order of the weights: fp32 or, of one micro-batch, what is computed in."""
        assert not self._empty, f"{self._weights[min(self._empty)].name} took no part in the loss"
        added = set(self._added)
        return [self._buffers[i] if i in added else _grad(weight) for i, weight in enumerate(self._weights)]

    def pieces(self, *, scale: float) -> dict[str, Piece]:
        """A scaled copy of what this rank has of every gradient, by the logical name of its weight."""
        pairs = zip(self._weights, self.tensors(), strict=True)
        return {weight.name: weight.piece.with_tensor(each.detach().float() * scale) for weight, each in pairs}

    def norm(self) -> Tensor:
        """Global L2 norm: every element of every logical tensor counts once, whoever holds it."""
        return self.norm_of(self.tensors())

    def norm_of(self, tensors: Sequence[Tensor]) -> Tensor:
        """That of other tensors which lie as the gradients do."""
        owned = self._owned(tensors)
        norm = total_norm(owned) if owned else tensors[0].new_zeros((), dtype=torch.float32)
        if self._mesh.layout.world == 1:
            return norm
        total = norm.double().square()  # in fp32 a square overflows where the norm does not
        dist.all_reduce(total)
        return total.sqrt().to(norm.dtype)

    def num_zeros(self) -> Tensor:
        """Entries that are exactly zero, counted like the norm."""
        tensors = self.tensors()
        total = count_zeros(self._owned(tensors), device=tensors[0].device)
        if self._mesh.layout.world > 1:
            dist.all_reduce(total)
        return total

    def _owned(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        pairs = zip(self._weights, tensors, strict=True)
        return [each for weight, each in pairs if weight.piece.owned and each.numel()]

    def _sum_tied_embedding(self, gradient: Tensor) -> None:
        """First and last stage swap their parts of a tied gradient; a sum of two is the same from either side."""
        mesh = self._mesh
        assert mesh.pp_group is not None
        other = dist.get_global_rank(mesh.pp_group, mesh.layout.pp - 1 if mesh.pp == 0 else 0)
        theirs = torch.empty_like(gradient)
        swap = [
            dist.P2POp(dist.isend, gradient, other, mesh.pp_group),
            dist.P2POp(dist.irecv, theirs, other, mesh.pp_group),
        ]
        for work in dist.batch_isend_irecv(swap):
            work.wait()
        gradient.add_(theirs)


def total_norm(tensors: Sequence[Tensor]) -> Tensor:
    """L2 norm of all of them in fp32, the same however they are cut. On CPUs torch's fp32 norm is low for large tensors
    (1e-3 at 10^7 elements, 3e-2 at 10^8), so chunks are summed in fp64. On CUDA it is right to 2e-8 up to 10^9."""
    if tensors[0].device.type != "cpu":
        total: Tensor = torch.stack(torch._foreach_norm(list(tensors), 2, dtype=torch.float32)).norm()
        return total
    parts = [part for each in tensors for part in torch.split(each.flatten(), _ELEMENTS_AT_ONCE)]
    norms: list[Tensor] = [torch.linalg.vector_norm(part, dtype=torch.float64) for part in parts]
    return torch.stack(norms).square().sum().sqrt().to(torch.float32)


def count_zeros(tensors: Sequence[Tensor], *, device: torch.device) -> Tensor:
    """In one pass over the memory, where count_nonzero makes four."""
    parts = [part for each in tensors for part in torch.split(each.flatten(), _LARGEST_EXACT_COUNT)]
    nonzero = [torch.linalg.vector_norm(part, 0, dtype=torch.float32) for part in parts]  # a count
    total = torch.zeros((), dtype=torch.float64, device=device)
    if nonzero:
        total = sum(part.numel() for part in parts) - torch.stack(nonzero).double().sum()
    return total.to(torch.float32)


def _all_reduce_coalesced(tensors: Sequence[Tensor], group: dist.ProcessGroup) -> None:
    """One collective for many small tensors."""
    flat = torch.cat([tensor.flatten() for tensor in tensors])
    dist.all_reduce(flat, group=group)
    sums = torch.split(flat, [tensor.numel() for tensor in tensors])
    torch._foreach_copy_(list(tensors), [part.view_as(tensor) for part, tensor in zip(sums, tensors, strict=True)])


def _grad(weight: Weight) -> Tensor:
    grad = weight.parameter.grad
    assert grad is not None, f"{weight.name} took no part in the loss"
    return local_of(grad)
