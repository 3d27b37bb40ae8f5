"""A checkpoint as a set of tensors, each read when it is asked for: for exports, comparisons and looks inside."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from bloomery.base.errors import DataError, Problem
from bloomery.checkpoint.boxes import Box
from bloomery.checkpoint.index import SavedTensor, read_index
from bloomery.checkpoint.tensor_file import DTYPES, TensorFiles


class CheckpointReader:
    """Holds the index and some open files, never the model."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.tensors: dict[str, SavedTensor] = read_index(folder)
        self._files = TensorFiles(folder)

    def names(self) -> Iterator[str]:
        yield from sorted(self.tensors)

    def read(self, name: str) -> Tensor:
        """The whole tensor, however it was cut. DataError if it is not there."""
        saved = self.tensors.get(name)
        if saved is None:
            raise DataError(Problem(f"{name} is not in the checkpoint", place=str(self.folder)))
        whole = torch.empty(saved.shape, dtype=DTYPES[saved.dtype])
        for piece in saved.pieces:
            into = whole[tuple(map(slice, *piece.box.range_within(Box((0,) * len(saved.shape), saved.shape))))]
            into.copy_(self._files.open(piece.file).view(piece.key, piece.box.size))
        return whole
