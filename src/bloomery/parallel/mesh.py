"""The ranks of a run in their places: one named mesh, and the groups that are cut from it."""

from __future__ import annotations

from dataclasses import asdict, dataclass

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from bloomery.sizing.layout import Layout


@dataclass(frozen=True)
class Mesh:
    """Where this rank stands (`Layout.place_of`). A group is None where there is nobody to talk to."""

    layout: Layout
    rank: int
    pp: int
    dp: int
    cp: int
    tp: int
    copy: int
    """Which of the `layout.copies` equal copies of the weights' shards this rank belongs to."""
    shard: int
    """Which shard of a copy it holds."""
    tp_group: dist.ProcessGroup | None
    cp_group: dist.ProcessGroup | None
    pp_group: dist.ProcessGroup | None
    data: DeviceMesh | None
    """(copy, shard), or only (shard) when there is one copy: the ranks between which gradients are summed. None when
    that is one rank."""

    @property
    def is_last_stage(self) -> bool:
        """Whether this rank holds the end of the pipeline, where losses are."""
        return self.pp == self.layout.pp - 1

    @property
    def reports_loss(self) -> bool:
        """Of the tensor-parallel ranks that have the same loss, one reports it."""
        return self.is_last_stage and self.tp == 0


def alone() -> Mesh:
    """The mesh of a process without others."""
    return Mesh(Layout(), 0, 0, 0, 0, 0, 0, 0, None, None, None, None)


def make_mesh(layout: Layout, device: torch.device, *, groups_of_one: bool = False) -> Mesh:
    """Collective: every rank of the default process group calls it with the same layout.

    `groups_of_one`: wrap and communicate even where there is nobody to talk to. That is of no use, except to measure
    what wrapping costs and to run every collective of a backend on one device.
    """
    assert dist.get_world_size() == layout.world, "sizing decided the layout from this very world"
    if layout.world == 1 and not groups_of_one:
        return alone()
    shape = (layout.pp, layout.copies, layout.shard, layout.tp)
    mesh = init_device_mesh(device.type, shape, mesh_dim_names=("pp", "copy", "shard", "tp"))
    rank = dist.get_rank()
    return Mesh(
        layout=layout,
        rank=rank,
        **asdict(layout.place_of(rank)),
        tp_group=mesh["tp"].get_group() if layout.tp > 1 or groups_of_one else None,
        cp_group=_context_group(layout, rank) if layout.cp > 1 or groups_of_one else None,
        pp_group=mesh["pp"].get_group() if layout.pp > 1 else None,
        data=_data_mesh(mesh, layout) if layout.dp * layout.cp > 1 or groups_of_one else None,
    )


def _data_mesh(mesh: DeviceMesh, layout: Layout) -> DeviceMesh:
    return mesh["shard"] if layout.copies == 1 else mesh["copy", "shard"]


def _context_group(layout: Layout, rank: int) -> dist.ProcessGroup:
    """Context ranks lie inside the dimensions `copy` and `shard`, so their groups are made by hand."""
    span = layout.cp * layout.tp
    mine: dist.ProcessGroup | None = None
    for first in range(0, layout.world, span):
        for tp in range(layout.tp):
            ranks = list(range(first + tp, first + span, layout.tp))
            group = dist.new_group(ranks)
            if rank in ranks:
                mine = group
    assert mine is not None
    return mine
