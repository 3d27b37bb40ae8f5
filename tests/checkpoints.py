"""Compare checkpoints bit by bit."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from bloomery.base.piece import Piece
from bloomery.checkpoint.folder import find_checkpoint
from bloomery.checkpoint.index import read_index
from bloomery.checkpoint.load import load_pieces
from bloomery.checkpoint.tensor_file import DTYPES


def tensors_of(run: Path) -> dict[str, Tensor]:
    """Everything in the newest checkpoint of a run."""
    folder = find_checkpoint(run)
    tensors = {name: torch.empty(facts.shape, dtype=DTYPES[facts.dtype]) for name, facts in read_index(folder).items()}
    load_pieces(folder, {name: Piece.whole(tensor) for name, tensor in tensors.items()})
    return tensors


def assert_same_tensors(left: Path, right: Path) -> None:
    a, b = tensors_of(left), tensors_of(right)
    assert a
    assert a.keys() == b.keys()
    different = [name for name in a if not torch.equal(a[name], b[name])]
    assert not different, f"{len(different)} of {len(a)} tensors differ: {different[:5]}"
