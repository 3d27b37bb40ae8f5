"""What a rank holds of the model: every parameter's logical name, its piece, and what its gradient still lacks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from bloomery.base.ranks import Piece
from bloomery.parallel.mesh import Mesh
from bloomery.sizing.layout import cut_dimension, cut_of

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
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _offset(name: str, parameter: Tensor, shape: tuple[int, ...], mesh: Mesh) -> tuple[int, ...]:
    offset = [0] * len(shape)
    dim = cut_dimension(name)
    if dim is not None:
        offset[dim] = mesh.tp * (shape[dim] // mesh.layout.tp)
    if isinstance(parameter, DTensor):  # FSDP cuts rows, after tensor parallelism has cut what it cuts
        rows = -(-parameter.shape[0] // mesh.layout.shard)
        offset[0] += min(mesh.shard * rows, parameter.shape[0])
    return tuple(offset)
