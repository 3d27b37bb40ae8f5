"""index.json: which tensors a checkpoint holds, and in which boxes of which files they lie.

{"tensors": {"model.w": {"shape": [4, 2], "dtype": "F32", "pieces": [{"offset": [0, 0], "size": [2, 2],
"file": "tensors-00000.safetensors", "key": "model.w"}, ...]}}}
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from math import prod
from pathlib import Path
from typing import Any, Self

from bloomery.base.bounded import LARGE_BYTES, read_json
from bloomery.base.errors import DataError, Problem, StorageError
from bloomery.base.piece import Piece
from bloomery.checkpoint.boxes import Box, why_not_whole
from bloomery.checkpoint.tensor_file import DTYPE_NAMES, DTYPES, FileFacts

INDEX = "index.json"
_MOST_PROBLEMS = 10
_MOST_DIMENSIONS = 8
Kind = tuple[str, tuple[int, ...]]
"""dtype and shape."""


@dataclass(frozen=True)
class SavedPiece:
    box: Box
    file: str
    key: str


@dataclass(frozen=True)
class SavedTensor:
    shape: tuple[int, ...]
    dtype: str
    """As safetensors call it: `F32`."""
    pieces: list[SavedPiece] = field(default_factory=list)


@dataclass(frozen=True)
class RankReport:
    """What one rank tells the others about its part of a save, as plain values."""

    file: str
    """Empty if the rank owns nothing."""
    facts: FileFacts | None
    held: dict[str, tuple[tuple[int, ...], str]]
    """(shape of the whole, dtype) of every tensor of which the rank holds a piece, owned or not."""
    owned: dict[str, tuple[tuple[int, ...], tuple[int, ...]]]
    """(offset, size) of every piece in its file."""

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, told: dict[str, Any]) -> Self:
        return cls(
            file=told["file"],
            facts=FileFacts(**told["facts"]) if told["facts"] is not None else None,
            held={name: (tuple(shape), dtype) for name, (shape, dtype) in told["held"].items()},
            owned={name: (tuple(offset), tuple(size)) for name, (offset, size) in told["owned"].items()},
        )


def box_of(piece: Piece) -> Box:
    return Box(tuple(piece.offset), tuple(piece.tensor.shape))


def is_written(piece: Piece) -> bool:
    return piece.owned and piece.tensor.numel() > 0


def report(pieces: Mapping[str, Piece]) -> RankReport:
    """Before anything is written."""
    return RankReport(
        file="",
        facts=None,
        held={
            name: (tuple(piece.shape), DTYPE_NAMES[piece.tensor.dtype])
            for name, piece in pieces.items()
            if prod(piece.shape)
        },
        owned={
            name: (tuple(piece.offset), tuple(piece.tensor.shape))
            for name, piece in pieces.items()
            if is_written(piece)
        },
    )


def merge(reports: Sequence[RankReport]) -> dict[str, SavedTensor]:
    """The index of all ranks' files. StorageError unless every tensor is there exactly once."""
    tensors: dict[str, SavedTensor] = {}
    problems = []
    for rank, found in enumerate(reports):
        for name, (shape, dtype) in found.held.items():
            known = tensors.setdefault(name, SavedTensor(shape, dtype))
            if (known.shape, known.dtype) != (shape, dtype):
                other = f"{known.dtype} {known.shape} on a rank before"
                problems.append(Problem(f"{name} is {dtype} {shape} on rank {rank} and {other}"))
        for name, (offset, size) in found.owned.items():
            tensors[name].pieces.append(SavedPiece(Box(offset, size), found.file, name))
    problems += _not_whole(tensors)
    if problems:
        rule = "exactly one rank must own each element of each tensor"
        more = f" and {len(problems) - _MOST_PROBLEMS} more" if len(problems) > _MOST_PROBLEMS else ""
        last = Problem(f"{len(problems)} tensor(s) would not be saved whole{more}", rule, "this is a bug: report it")
        raise StorageError([*problems[:_MOST_PROBLEMS], last])
    return tensors


def _not_whole(tensors: Mapping[str, SavedTensor]) -> list[Problem]:
    """What is there twice or not at all."""
    boxes = {name: [piece.box for piece in tensor.pieces] for name, tensor in tensors.items()}
    wrong = {name: why_not_whole(tensor.shape, boxes[name]) for name, tensor in tensors.items()}
    return [Problem(f"{name} {tensors[name].shape}: {text}") for name, text in wrong.items() if text]


def index_text(tensors: Mapping[str, SavedTensor]) -> str:
    def facts(tensor: SavedTensor) -> dict[str, Any]:
        pieces = [
            {"offset": piece.box.offset, "size": piece.box.size, "file": piece.file, "key": piece.key}
            for piece in tensor.pieces
        ]
        return {"shape": tensor.shape, "dtype": tensor.dtype, "pieces": pieces}

    lines = (f"  {json.dumps(name)}: {json.dumps(facts(tensor))}" for name, tensor in sorted(tensors.items()))
    return '{"tensors": {\n' + ",\n".join(lines) + "\n}}\n"


def read_index(folder: Path) -> dict[str, SavedTensor]:
    """What the checkpoint holds, by name: every tensor whole, in boxes of its own. DataError if it is not so."""
    try:
        content = read_json(folder / INDEX, LARGE_BYTES)["tensors"]
        tensors = {name: _tensor(facts) for name, facts in content.items()}
        if astray := [name for name, each in tensors.items() if any(piece.key != name for piece in each.pieces)]:
            raise ValueError(f"pieces of {astray[0]!r:.80} have another key")
        if problems := _not_whole(tensors):
            raise ValueError("; ".join(problem.what for problem in problems[:_MOST_PROBLEMS]))
        places = [(piece.file, piece.key) for tensor in tensors.values() for piece in tensor.pieces]
        if len(places) != len(set(places)):
            raise ValueError("two pieces lie in one place")
        return tensors
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        reason = f"{type(error).__name__}: {error}"
        remedy = "use another checkpoint, `bloomery train` with --from"
        raise DataError(Problem(f"{INDEX} cannot be read: {reason}", remedy=remedy, place=str(folder))) from error


def _tensor(facts: dict[str, Any]) -> SavedTensor:
    pieces = [
        SavedPiece(Box(_counts(piece["offset"]), _counts(piece["size"])), str(piece["file"]), str(piece["key"]))
        for piece in facts["pieces"]
    ]
    DTYPES[facts["dtype"]]  # one that is unknown is a KeyError
    return SavedTensor(_counts(facts["shape"]), facts["dtype"], pieces)


def _counts(said: list[Any]) -> tuple[int, ...]:
    """ValueError if it is no shape and no place in a tensor."""
    if len(said) > _MOST_DIMENSIONS or not all(type(each) is int and each >= 0 for each in said):
        raise ValueError(f"{said!r:.80} is no shape and no offset")
    return tuple(said)
