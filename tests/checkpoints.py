"""Compare checkpoints bit by bit."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from bloomery.checkpoint.folder import find_checkpoint
from bloomery.checkpoint.load import load_tensors


def tensors_of(run: Path) -> dict[str, Tensor]:
    """Everything in the newest checkpoint of a run."""
    folder = find_checkpoint(run)
    saved = FileSystemReader(folder).read_metadata().state_dict_metadata
    tensors = {
        name: torch.empty(facts.size, dtype=facts.properties.dtype)
        for name, facts in saved.items()
        if isinstance(facts, TensorStorageMetadata)
    }
    load_tensors(folder, tensors)
    return tensors


def assert_same_tensors(left: Path, right: Path) -> None:
    a, b = tensors_of(left), tensors_of(right)
    assert a
    assert a.keys() == b.keys()
    different = [name for name in a if not torch.equal(a[name], b[name])]
    assert not different, f"{len(different)} of {len(a)} tensors differ: {different[:5]}"
