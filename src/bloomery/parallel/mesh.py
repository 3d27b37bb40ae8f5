"""The ranks of a run in their places: one named mesh, and the groups that are cut from it."""

from dataclasses import asdict, dataclass, field
from typing import Any, cast

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from bloomery.sizing.layout import Layout, Place


@dataclass(frozen=True, kw_only=True)
class Mesh(Place):
    """Where this rank stands. A group is None where there is nobody to talk to. As it is, a process without others."""

    layout: Layout = field(default_factory=Layout)
    tp_group: dist.ProcessGroup | None = None
    cp_group: dist.ProcessGroup | None = None
    pp_group: dist.ProcessGroup | None = None
    data: DeviceMesh | None = None
    """(copy, shard), or only (shard) when there is one copy: the ranks between which gradients are summed. None when
    that is one rank."""

    @property
    def reports_loss(self) -> bool:
        """It holds the end of the pipeline, where losses are; of the tensor-parallel ranks there, one reports them."""
        return self.pp == self.layout.pp - 1 and self.tp == 0


def make_mesh(layout: Layout, device: torch.device) -> Mesh:
    """Collective: every rank of the default process group calls it with the same layout."""
    if layout.world == 1:
        return Mesh()
    assert dist.get_world_size() == layout.world, "sizing decided the layout from this very world"
    shape = (layout.pp, layout.copies, layout.shard, layout.tp)
    mesh = init_device_mesh(device.type, shape, mesh_dim_names=("pp", "copy", "shard", "tp"))
    return Mesh(
        layout=layout,
        **asdict(layout.place_of(dist.get_rank())),
        tp_group=mesh["tp"].get_group() if layout.tp > 1 else None,
        cp_group=_context_group(layout) if layout.cp > 1 else None,
        pp_group=mesh["pp"].get_group() if layout.pp > 1 else None,
        data=(mesh["shard"] if layout.copies == 1 else mesh["copy", "shard"]) if layout.dp * layout.cp > 1 else None,
    )


def _context_group(layout: Layout) -> dist.ProcessGroup:
    """Context ranks lie inside the dimensions `copy` and `shard`, so their groups are made by hand."""
    span = layout.cp * layout.tp
    firsts = [first + tp for first in range(0, layout.world, span) for tp in range(layout.tp)]
    make_groups: Any = dist.new_subgroups_by_enumeration
    mine, _ = make_groups([list(range(first, first + span, layout.tp)) for first in firsts])
    return cast(dist.ProcessGroup, mine)
