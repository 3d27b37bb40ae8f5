"""index.json, which says where each tensor lies, and tensor files.

index.json     {"tensors": {"model.w": {"shape": [4, 2], "dtype": "F32", "pieces": [{"offset": [0, 0], "size": [2, 2],
               "file": "tensors-00000.safetensors", "key": "model.w"}, ...]}}}
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from itertools import chain, product
from math import prod
from pathlib import Path
from typing import Annotated, Any, Self

import torch
from pydantic import Field
from torch import Tensor

from bloomery.base.errors import Problem, StorageError
from bloomery.base.ranks import Piece
from bloomery.base.storage import reserve, sync, write_all
from bloomery.checkpoint.folder import Count, FileFacts

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_MOST_PROBLEMS = 10
Counts = Annotated[tuple[Count, ...], Field(max_length=3)]
Kind = tuple[str, tuple[int, ...]]
"""dtype and shape."""


# ---------------------------------------------------------------- boxes and index


@dataclass(frozen=True)
class Box:
    """The part of a tensor that begins at `offset` and has this size. A scalar has the box of no dimensions."""

    offset: Counts
    size: Counts

    @classmethod
    def of(cls, piece: Piece) -> Box:
        return Box(tuple(piece.offset), tuple(piece.tensor.shape))

    def meet(self, other: Box) -> Box | None:
        """The intersection, in the coordinates of the whole tensor; None if it is empty."""
        start = tuple(map(max, self.offset, other.offset))
        size = tuple(
            min(a + m, b + n) - s
            for a, m, b, n, s in zip(self.offset, self.size, other.offset, other.size, start, strict=True)
        )
        return Box(start, size) if all(length > 0 for length in size) else None

    def slices_of(self, outer: Box) -> tuple[slice, ...]:
        """Where this box lies within one around it."""
        begin = [a - b for a, b in zip(self.offset, outer.offset, strict=True)]
        return tuple(slice(a, a + n) for a, n in zip(begin, self.size, strict=True))

    def inside(self, shape: tuple[int, ...]) -> bool:
        return len(shape) == len(self.offset) == len(self.size) and all(
            start >= 0 and length > 0 and start + length <= end
            for start, length, end in zip(self.offset, self.size, shape, strict=True)
        )

    def __str__(self) -> str:
        ranges = (f"{start}:{start + length}" for start, length in zip(self.offset, self.size, strict=True))
        return f"[{', '.join(ranges)}]"


@dataclass(frozen=True)
class SavedPiece(Box):
    file: str
    key: str

    @torch.no_grad()
    def copy(self, values: Tensor, piece: Piece) -> None:
        """What this part, of which these are the values, and the piece have in common."""
        box = Box.of(piece)
        shared = self.meet(box)
        assert shared is not None
        piece.tensor.detach()[shared.slices_of(box)].copy_(values[shared.slices_of(self)])


@dataclass(frozen=True)
class SavedTensor:
    shape: Counts
    dtype: Annotated[str, Field(pattern=f"^({'|'.join(DTYPES)})$")]
    """As safetensors call it: `F32`."""
    pieces: list[SavedPiece] = field(default_factory=list)

    @property
    def kind(self) -> Kind:
        return self.dtype, self.shape

    @property
    def num_bytes(self) -> int:
        return prod(self.shape) * DTYPES[self.dtype].itemsize


def is_written(piece: Piece) -> bool:
    return piece.owned and piece.tensor.numel() > 0


def held_tensors(pieces: Mapping[str, Piece], file: str) -> dict[str, SavedTensor]:
    """Every tensor of which this rank holds a piece, with the pieces that it writes into `file`."""
    held = {}
    for name, piece in pieces.items():
        box = Box.of(piece)
        written = [SavedPiece(box.offset, box.size, file, name)] if is_written(piece) else []
        held[name] = SavedTensor(tuple(piece.shape), DTYPE_NAMES[piece.tensor.dtype], written)
    return {name: tensor for name, tensor in held.items() if prod(tensor.shape)}


def merge(held: Sequence[Mapping[str, SavedTensor]]) -> dict[str, SavedTensor]:
    """All tensors, of what each rank holds. StorageError unless every one is there exactly once."""
    tensors: dict[str, SavedTensor] = {}
    for name, each in chain.from_iterable(found.items() for found in held):
        known = tensors.setdefault(name, SavedTensor(each.shape, each.dtype))
        assert known.kind == each.kind, f"{name} is {each.kind} on one rank and {known.kind} on another"
        known.pieces.extend(each.pieces)
    if problems := not_whole(tensors):
        what = f"{len(problems)} tensor(s) would not be saved completely: {'; '.join(problems[:_MOST_PROBLEMS])}"
        rule = "exactly one rank must own each element of each tensor"
        raise StorageError(Problem(what, rule, "this is a bug: report it"))
    return tensors


def why_not_whole(shape: tuple[int, ...], boxes: Sequence[Box]) -> str:
    """What is wrong with boxes that should cover a tensor of this shape exactly once; empty if nothing is."""
    for box in boxes:
        if not box.inside(shape):
            return f"{box} is outside of {shape}"
    if _corners(boxes) == _corners([Box((0,) * len(shape), shape)]):
        return ""
    missing = prod(shape) - sum(prod(box.size) for box in boxes)
    return f"{missing:,} of {prod(shape):,} elements are missing" if missing > 0 else "some elements are there twice"


def _corners(boxes: Sequence[Box]) -> dict[tuple[int, ...], int]:
    """The corners of all boxes with alternating signs, which determine how often each element is covered. Those inside
    a whole cancel out. Linear in the number of boxes, whatever they are."""
    counts: dict[tuple[int, ...], int] = {}
    for box in boxes:
        sides = [((start, 1), (start + length, -1)) for start, length in zip(box.offset, box.size, strict=True)]
        for ends in product(*sides):
            corner = tuple(place for place, _ in ends)
            counts[corner] = counts.get(corner, 0) + prod(sign for _, sign in ends)
    return {corner: count for corner, count in counts.items() if count}


def not_whole(tensors: Mapping[str, SavedTensor]) -> list[str]:
    """Those whose boxes do not cover them exactly once, and why."""
    wrong = {name: why_not_whole(tensor.shape, tensor.pieces) for name, tensor in tensors.items()}
    return [f"{name} {tensors[name].shape}: {text}" for name, text in wrong.items() if text]


def index_text(held: Sequence[Mapping[str, SavedTensor]]) -> str:
    """index.json, of what each rank holds. StorageError: see merge."""
    lines = (f"  {json.dumps(name)}: {json.dumps(asdict(tensor))}" for name, tensor in sorted(merge(held).items()))
    return '{"tensors": {\n' + ",\n".join(lines) + "\n}}\n"


# ---------------------------------------------------------------- tensor files

_BLOCK_BYTES = 2**24


@dataclass(frozen=True)
class FileLayout:
    """How tensors will lie in a file, known before the first byte is written."""

    order: list[str]
    header: bytes
    data_bytes: int

    @classmethod
    def of(cls, tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None) -> Self:
        """`metadata`: what transformers wants to find there."""
        order = sorted(tensors, key=lambda name: -tensors[name].element_size())  # so that every tensor is aligned
        entries: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
        end = 0
        for name in order:
            tensor = tensors[name]
            start, end = end, end + tensor.numel() * tensor.element_size()
            kind = DTYPE_NAMES[tensor.dtype]
            entries[name] = {"dtype": kind, "shape": list(tensor.shape), "data_offsets": [start, end]}
        text = json.dumps(entries, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        return cls(order, len(text).to_bytes(8, "little") + text, end)

    @property
    def file_bytes(self) -> int:
        return len(self.header) + self.data_bytes


def write_file(path: Path, layout: FileLayout, blocks: Iterable[memoryview]) -> FileFacts:
    """Write a new file, reserved before and on the disk after. `blocks` are the bytes of the tensors in the layout's
    order, cut anywhere. OSError if that fails."""
    hasher = hashlib.sha256()
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
    try:
        reserve(descriptor, layout.file_bytes)
        with ThreadPoolExecutor(1, "bloomery-hash") as beside:  # hashing and writing take about the same time
            for content in chain([memoryview(layout.header)], blocks):
                for start in range(0, len(content), _BLOCK_BYTES):
                    block = content[start : start + _BLOCK_BYTES]
                    hashed = beside.submit(hasher.update, block)
                    write_all(descriptor, block)
                    hashed.result()
                    del block
                del content  # the memory of a tensor that need not be there while the next one is made
        sync(descriptor)
    finally:
        os.close(descriptor)
    return FileFacts(bytes=layout.file_bytes, sha256=hasher.hexdigest())


def raw_bytes(tensor: Tensor) -> memoryview:
    """The tensor's memory, or that of a copy if it lies on a device or not in one stretch."""
    return as_bytes(tensor.detach().to("cpu").contiguous()).numpy().data


def as_bytes(tensor: Tensor) -> Tensor:
    """The same memory in one dimension of bytes, for a tensor that lies in one stretch."""
    return tensor.detach().view(-1).view(torch.uint8)
