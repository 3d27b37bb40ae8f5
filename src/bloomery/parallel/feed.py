"""Batches for a replica: each reads its own samples, and all know when one of them cannot."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from bloomery.base.errors import DataError
from bloomery.base.ranks import Ranks, agreed
from bloomery.data.batch import GlobalBatch, Loader, Stream, read_batch
from bloomery.parallel.mesh import Mesh

_MOST_TARGETS = 2


class Feed:
    """What the training loop takes its batches from."""

    def __init__(
        self,
        source: Stream,
        *,
        batch_size_at: Callable[[int], int],
        micro_batch_size: int,
        mesh: Mesh,
        ranks: Ranks,
        pin_memory: bool,
    ) -> None:
        """`batch_size_at`: see Loader."""
        self._ranks = ranks
        self._speaks = mesh.pp == mesh.cp == mesh.tp == 0  # one rank counts for its replica
        self._loader = Loader(
            source,
            batch_size_at=batch_size_at,
            micro_batch_size=micro_batch_size,
            replica=mesh.dp,
            replicas=mesh.layout.dp,
            pin_memory=pin_memory,
        )

    def take(self) -> GlobalBatch:
        """The next global batch, its counts summed over all replicas. DataError on every rank if any could not read."""
        error: DataError | None = None
        try:
            batch = self._loader.take()
            counts = list(batch.counts.values()) if self._speaks else []
        except DataError as found:
            error, counts = found, []
        failed, *totals = self._ranks.sum([float(error is not None), *counts, *[0.0] * (_MOST_TARGETS - len(counts))])
        if failed:
            with agreed(self._ranks):
                if error is not None:
                    raise error
        return replace(batch, counts={name: int(total) for name, total in zip(batch.counts, totals, strict=False)})

    def seek(self, consumed_samples: int) -> None:
        self._loader.seek(consumed_samples)

    def close(self) -> None:
        self._loader.close()


def validation_batches(
    source: Stream, num_samples: int, *, micro_batch_size: int, mesh: Mesh, ranks: Ranks
) -> Iterator[GlobalBatch]:
    """This replica's share of exactly the first `num_samples`, one micro-batch at a time, whatever the layout.
    DataError on every rank if any could not read."""
    window = micro_batch_size * mesh.layout.dp
    for first in range(0, num_samples, window):
        with agreed(ranks):
            batch = read_batch(
                source,
                first,
                window,
                micro_batch_size=micro_batch_size,
                replica=mesh.dp,
                replicas=mesh.layout.dp,
                end=num_samples,
            )
        yield batch
