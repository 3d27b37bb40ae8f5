"""Batches for a replica: each reads its own samples, and all know when one of them cannot."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

from bloomery.base.errors import DataError, Problem
from bloomery.base.ranks import Ranks
from bloomery.data.batch import GlobalBatch, Loader, Stream, read_batch
from bloomery.parallel.mesh import Mesh

_MOST_TARGETS = 2


class Feed:
    """What the training loop takes its batches from."""

    def __init__(self, loader: Loader, ranks: Ranks, mesh: Mesh) -> None:
        self._loader = loader
        self._ranks = ranks
        self._speaks = mesh.pp == mesh.cp == mesh.tp == 0  # one rank counts for its replica

    def take(self) -> GlobalBatch:
        """The next global batch, its counts summed over all replicas. DataError on every rank if any could not read."""
        batch, problems = _try_read(self._loader.take)
        counts = list(batch.counts.values()) if batch is not None and self._speaks else []
        gathered = [float(problems is not None), *counts, *[0.0] * (_MOST_TARGETS - len(counts))]
        failed, *totals = self._ranks.sum(gathered)
        if failed:
            raise _common_error(self._ranks, problems)
        assert batch is not None
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
        read = partial(read_batch, source, first, window, replica=mesh.dp, replicas=mesh.layout.dp, end=num_samples)
        batch, problems = _try_read(partial(read, micro_batch_size=micro_batch_size))
        if ranks.sum([float(problems is not None)])[0]:
            raise _common_error(ranks, problems)
        assert batch is not None
        yield batch


def _try_read(read: Callable[[], GlobalBatch]) -> tuple[GlobalBatch | None, list[Problem] | None]:
    try:
        return read(), None
    except DataError as error:
        return None, error.problems


def _common_error(ranks: Ranks, problems: list[Problem] | None) -> DataError:
    """Every problem of every rank once; a rank that only fails because of another adds none."""
    gathered: list[list[Problem] | None] = ranks.gather(problems)
    return DataError(list(dict.fromkeys(one for each in gathered for one in each or ()))).reported_once(ranks.rank)
