"""A dataset of a package's own as a source of samples."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from bloomery.base.errors import DataError, Problem
from bloomery.data.batch import Batch, ShardSource
from bloomery.data.order import TimelessOrder


class OwnSource(ShardSource):
    """Items (inputs, targets) of a dataset, each once an epoch, in timeless order."""

    def __init__(self, dataset: Any, path: str, *, seed: int, key: str) -> None:
        self.dataset, self.key, self.num_samples = dataset, key, len(dataset)
        if self.num_samples < 1:
            raise DataError(Problem("the dataset has no items", "", "correct data.train or the package", path))
        facts = {"documents": self.num_samples, "tokens": 0, "sample_digest": f"{path}, {self.num_samples} items"}
        self.shard: Any = SimpleNamespace(prefix=path, facts=lambda: facts)
        self.order = TimelessOrder(seed, key, self.num_samples)

    @property
    def documents(self) -> tuple[int, int]:
        return 0, self.num_samples

    def read(self, ordinals: NDArray[np.int64]) -> Batch:
        items = [self.dataset[sample] for sample in self.locate(ordinals)[1].tolist()]
        inputs, targets = (
            {name: torch.stack([item[part][name] for item in items]) for name in items[0][part]} for part in (0, 1)
        )
        return Batch(inputs, targets)
