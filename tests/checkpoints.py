"""Compare checkpoints bit by bit."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bloomery.base.errors import DataError
from bloomery.base.ranks import Piece
from bloomery.checkpoint.folder import (
    MANIFEST,
    FileFacts,
    complete_checkpoints,
    facts_of,
    find_checkpoint,
    write_manifest,
)
from bloomery.checkpoint.format import DTYPES, SavedTensor, held_tensors
from bloomery.checkpoint.load import load_pieces, read_checkpoint
from bloomery.checkpoint.select import newest_good


def tensors_of(run: Path) -> dict[str, Tensor]:
    """Everything in the newest checkpoint of a run."""
    checkpoint = read_checkpoint(find_checkpoint(run), tensors=False)
    tensors = {name: torch.empty(facts.shape, dtype=DTYPES[facts.dtype]) for name, facts in checkpoint.tensors.items()}
    load_pieces(checkpoint, {name: Piece.whole(tensor) for name, tensor in tensors.items()})
    return tensors


def chosen(roots: list[Path]) -> Path | None:
    """What a run with checkpoints in these places resumes from."""
    checkpoint = newest_good(roots).checkpoint
    return checkpoint and checkpoint.folder


def damage(folder: Path) -> list[str]:
    """Why `read_checkpoint` refuses it; nothing if it does not."""
    try:
        read_checkpoint(folder)
    except DataError as error:
        return sorted(problem.what for problem in error.problems)
    return []


def latest_checkpoint(root: Path) -> Path | None:
    return next(reversed(complete_checkpoints(root)), None)


def held_by_all(pieces_of: Callable[[int], dict[str, Piece]], size: int) -> list[dict[str, SavedTensor]]:
    """What `Saver.held` is, for ranks that never speak to each other."""
    return [held_tensors(pieces_of(rank), f"tensors-{rank:05d}.safetensors") for rank in range(size)]


def assert_same_tensors(left: Path, right: Path) -> None:
    a, b = tensors_of(left), tensors_of(right)
    assert a
    assert a.keys() == b.keys()
    different = [name for name in a if not torch.equal(a[name], b[name])]
    assert not different, f"{len(different)} of {len(a)} tensors differ: {different[:5]}"


def change_manifest(folder: Path, **changes: Any) -> None:
    """Let it say something else, as if it had been saved so."""
    said = json.loads((folder / MANIFEST).read_text())
    said.pop("sha256", None)
    said |= changes
    files = {name: FileFacts(**facts) for name, facts in said.pop("files").items()}
    write_manifest(folder, said, files)


def forge(folder: Path, name: str, content: str) -> None:
    """Another content of a file of a checkpoint, which its manifest vouches for."""
    (folder / name).write_text(content)
    said = json.loads((folder / MANIFEST).read_text())
    said.pop("sha256", None)
    files = {each: FileFacts(**facts) for each, facts in said.pop("files").items()}
    write_manifest(folder, said, {**files, name: facts_of(content)})


def flip_bit(path: Path, bit: int) -> None:
    content = bytearray(path.read_bytes())
    content[bit // 8] ^= 1 << bit % 8
    path.write_bytes(content)
