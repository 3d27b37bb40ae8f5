"""Batches for a replica: each reads its own samples, and all know when one of them cannot."""

from dataclasses import replace
from typing import Any

from bloomery.base.errors import DataError
from bloomery.base.ranks import Ranks, agreed
from bloomery.data.batch import GlobalBatch, Loader, Stream
from bloomery.parallel.mesh import Mesh
from bloomery.parallel.runner import Mark, no_mark

_MOST_TARGETS = 2


class Feed(Loader):
    """What the training loop takes its batches from."""

    def __init__(self, source: Stream, mesh: Mesh, ranks: Ranks, *, mark: Mark = no_mark, **settings: Any) -> None:
        """`settings`: those of Loader."""
        super().__init__(source, replica=mesh.dp, replicas=mesh.layout.dp, **settings)
        self._ranks, self._mark = ranks, mark
        self._speaks = mesh.pp == mesh.cp == mesh.tp == 0  # one rank counts for its replica

    def take(self) -> GlobalBatch:
        """The next global batch, its counts summed over all replicas. DataError on every rank if any could not read."""
        error: DataError | None = None
        try:
            batch = super().take()
            counts = list(batch.counts.values()) if self._speaks else []
        except DataError as found:
            error, counts = found, []
        self._mark("data")
        failed, *totals = self._ranks.sum([float(error is not None), *counts, *[0.0] * (_MOST_TARGETS - len(counts))])
        self._mark("wait")
        if failed:
            with agreed(self._ranks):
                if error is not None:
                    raise error
        return replace(batch, counts={name: int(total) for name, total in zip(batch.counts, totals, strict=False)})
