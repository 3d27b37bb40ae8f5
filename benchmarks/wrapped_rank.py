"""`bloomery train` as the only rank of a process group, with everything wrapped as if there were others.

    python benchmarks/wrapped_rank.py data train RECIPE ...

The first word says what is wrapped: `data` (FSDP2) or `all` (also tensor- and context-parallel collectives).
What it costs against `bloomery train` alone is the price of the wrappers; see throughput.py --wrapped.
"""

from __future__ import annotations

import dataclasses
import os
import sys

from bloomery.cli.main import main
from bloomery.parallel.mesh import Mesh, make_mesh
from bloomery.train import setup


def wrapped(layout: object, device: object) -> Mesh:
    mesh = make_mesh(layout, device, groups_of_one=True)  # type: ignore[arg-type]
    return mesh if sys.argv[1] == "all" else dataclasses.replace(mesh, tp_group=None, cp_group=None)


if __name__ == "__main__":
    setup.make_mesh = wrapped  # type: ignore[assignment]
    os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29517"}
    sys.exit(main(sys.argv[2:]))
