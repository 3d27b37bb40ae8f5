"""Context parallelism: ranks share the tokens of a sample; for attention each gets the keys and values of all.

A sequence is cut into 2 * cp pieces, and rank r takes piece r from the front and piece r from the back: so under a
causal mask all ranks have the same work.
"""

from typing import Any, cast

import torch
from torch import Tensor, nn

from bloomery.data.batch import Batch
from bloomery.families.family import LM_LOSS
from bloomery.model.transformer import Transformer
from bloomery.parallel.collectives import gather
from bloomery.parallel.mesh import Mesh

_CUT_INPUTS = ("tokens", "positions")
"""Inputs that follow the tokens; others, such as document ids, describe the whole sequence."""


def places_of(seq_length: int, cp: int, cp_rank: int) -> Tensor:
    """Where the tokens of a context-parallel rank stand in the sequence."""
    pieces = torch.arange(seq_length).chunk(2 * cp)
    return torch.cat([pieces[cp_rank], pieces[2 * cp - 1 - cp_rank]])


def own_tokens(batch: Batch, mesh: Mesh, seq_length: int) -> Batch:
    """This rank's tokens of a micro-batch, and their places."""
    layout = mesh.layout
    if layout.cp * layout.tp * layout.pp == 1:
        return batch
    places = places_of(seq_length, layout.cp, mesh.cp)
    inputs, targets = dict(batch.inputs), dict(batch.targets)
    if layout.cp > 1:
        inputs |= {name: inputs[name][:, places] for name in _CUT_INPUTS if name in inputs}
        targets[LM_LOSS] = targets[LM_LOSS][:, places]
    return Batch({**inputs, "places": places}, targets, batch.sources)


def apply_context_parallel(model: Transformer, mesh: Mesh, seq_length: int) -> None:
    """Give every attention core the keys and values of the whole sequence."""
    group, cp = mesh.cp_group, mesh.layout.cp
    if group is None:
        return
    order = torch.cat([places_of(seq_length, cp, rank) for rank in range(cp)]).argsort()

    def everybodys(_: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        q, k, v, context = args
        both = gather(torch.stack([k, v]), 3, group).index_select(3, order.to(k.device))
        return q, both[0], both[1], context

    for block in cast(Any, model.layers).values():
        block.attention.core.register_forward_pre_hook(everybodys)
