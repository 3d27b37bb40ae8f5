"""`bloomery train` as the only rank of a process group, with everything wrapped as if there were others.

    python benchmarks/wrapped_rank.py data train RECIPE ...

The first word says what is wrapped: `data` (FSDP2) or `all` (also tensor- and context-parallel collectives).
What it costs against `bloomery train` alone is the price of the wrappers; see throughput.py --wrapped.
"""

from __future__ import annotations

import os
import random
import sys

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from bloomery.cli.main import main
from bloomery.parallel.mesh import Mesh
from bloomery.sizing.layout import Layout
from bloomery.train import setup


def wrapped(layout: Layout, device: torch.device) -> Mesh:
    mesh = init_device_mesh(device.type, (1, 1, 1, 1), mesh_dim_names=("pp", "copy", "shard", "tp"))
    if sys.argv[1] == "data":
        return Mesh(layout=layout, data=mesh["shard"])
    return Mesh(layout=layout, data=mesh["shard"], tp_group=mesh["tp"].get_group(), cp_group=dist.new_group([0]))


if __name__ == "__main__":
    setup.make_mesh = wrapped  # type: ignore[assignment]
    os.environ |= {
        "RANK": "0",
        "WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(random.randrange(20_000, 30_000)),
    }
    sys.exit(main(sys.argv[2:]))
