"""A checkpoint as a set of tensors, each read when it is asked for: for exports, comparisons and looks inside."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Self

import torch
from torch import Tensor

from bloomery.base.errors import DataError, Problem
from bloomery.checkpoint.boxes import Box
from bloomery.checkpoint.index import SavedTensor, read_index
from bloomery.checkpoint.tensor_file import DTYPES, TensorFile

_MOST_OPEN_FILES = 128


class CheckpointReader:
    """Holds the index and some open files, never the model."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.tensors: dict[str, SavedTensor] = read_index(folder)
        self._closing = ExitStack()
        self._open: dict[str, TensorFile] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self._closing.close()

    def names(self) -> Iterator[str]:
        yield from sorted(self.tensors)

    def read(self, name: str) -> Tensor:
        """The whole tensor, however it was cut. DataError if it is not there."""
        saved = self.tensors.get(name)
        if saved is None:
            raise DataError(Problem(f"{name} is not in the checkpoint", place=str(self.folder)))
        whole = torch.empty(saved.shape, dtype=DTYPES[saved.dtype])
        for piece in saved.pieces:
            into = whole[tuple(map(slice, *piece.box.range_within(_all_of(saved))))]
            begin = (0,) * len(piece.box.size)
            for where, values in self._file(piece.file).blocks(piece.key, piece.box.size, begin, piece.box.size):
                into[where].copy_(values)
        return whole

    def _file(self, name: str) -> TensorFile:
        if name not in self._open:
            if len(self._open) >= _MOST_OPEN_FILES:
                self._closing.close()
                self._open.clear()
            self._open[name] = self._closing.enter_context(TensorFile(self.folder / name))
        return self._open[name]


def _all_of(saved: SavedTensor) -> Box:
    return Box((0,) * len(saved.shape), saved.shape)
