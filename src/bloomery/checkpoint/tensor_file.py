"""One file of tensors in the safetensors layout, written as a stream and read by ranges. Nothing in it is code.

The layout: eight bytes with the length of the header, the header as JSON, the bytes of the tensors. Any safetensors
reader opens it. Written here so that each byte is hashed once, on its way to the disk, and no second copy is made.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import chain, product
from math import prod
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor

from bloomery.base.bounded import parse_json, require_regular
from bloomery.base.errors import DataError, Problem
from bloomery.base.storage import reserve, sync, write_all

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
_BLOCK_BYTES = 2**24
_SHORT_BYTES = 2**16
"""Stretches shorter than this are not worth a read of their own."""
_LARGEST_HEADER = 100_000_000
"""Of the safetensors format."""


@dataclass(frozen=True)
class FileFacts:
    """What a manifest says of a file."""

    bytes: int
    sha256: str


@dataclass(frozen=True)
class FileLayout:
    """How tensors will lie in a file, known before the first byte is written."""

    order: list[str]
    header: bytes
    data_bytes: int

    @classmethod
    def of(cls, tensors: Mapping[str, Tensor]) -> Self:
        order = sorted(tensors, key=lambda name: -tensors[name].element_size())  # so that every tensor is aligned
        entries: dict[str, Any] = {}
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
    return FileFacts(layout.file_bytes, hasher.hexdigest())


def raw_bytes(tensor: Tensor) -> memoryview:
    """The tensor's memory, or that of a copy if it lies on a device or not in one stretch."""
    return as_bytes(tensor.detach().to("cpu").contiguous()).numpy().data


def as_bytes(tensor: Tensor) -> Tensor:
    """The same memory in one dimension of bytes, for a tensor that lies in one stretch."""
    return tensor.detach().view(-1).view(torch.uint8)


class TensorFile:
    """A file of tensors, open for reading. DataError if it is not one."""

    def __init__(self, path: Path, *, remedy: str = "use another checkpoint, `bloomery train` with --from") -> None:
        """`remedy`: what to do about a file that cannot be read."""
        self.path = path
        self._remedy = remedy
        try:
            self._descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
        except (OSError, ValueError) as error:  # ValueError: a name that cannot be one
            raise self._damaged(str(error)) from error
        try:
            require_regular(self._descriptor, path)
            length = int.from_bytes(self._read(0, 8).numpy().tobytes(), "little")
            if length > _LARGEST_HEADER:
                raise self._damaged(f"its header claims {length:,} bytes")
            self._entries: dict[str, Any] = parse_json(self._read(8, length).numpy().tobytes())
            if not isinstance(self._entries, dict):
                raise ValueError("its header is no JSON object")
        except DataError:
            self.close()
            raise
        except (OSError, ValueError) as error:
            self.close()
            raise self._damaged(str(error)) from error
        self._data_begins = 8 + length

    def close(self) -> None:
        os.close(self._descriptor)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def kinds(self) -> dict[str, tuple[str, tuple[int, ...]]]:
        """(dtype, shape) of every tensor, all of whose bytes are there. DataError if the header says what cannot be."""
        kinds = {name: self._kind(name) for name in self._entries if name != "__metadata__"}
        spans = sorted(self._entries[name]["data_offsets"] for name in kinds)
        if [0, *(end for _, end in spans)] != [*(start for start, _ in spans), self._data_bytes()]:
            raise self._damaged("tensors share bytes, or bytes belong to none")
        return kinds

    def _data_bytes(self) -> int:
        return os.fstat(self._descriptor).st_size - self._data_begins

    def _kind(self, name: str) -> tuple[str, tuple[int, ...]]:
        entry = self._entries[name]
        size = self._data_bytes()
        try:
            dtype, shape, (start, end) = str(entry["dtype"]), tuple(entry["shape"]), entry["data_offsets"]
            known = DTYPES.get(dtype)
            is_right = (
                all(type(each) is int and 0 <= each < 2**48 for each in (*shape, start, end)) and start <= end <= size
            )
        except (KeyError, TypeError, ValueError) as error:
            raise self._damaged(f"its header says of {name}: {entry!r}"[:300]) from error
        if not is_right or (known is not None and prod(shape) * known.itemsize != end - start):
            raise self._damaged(f"{name} should be {dtype} {shape} at bytes {start} to {end} of {size:,}")
        return dtype, shape

    def _entry(self, key: str, shape: tuple[int, ...] | None = None) -> dict[str, Any]:
        """What the header says of a tensor, of this shape if one is given. DataError if it cannot be."""
        if key not in self._entries:
            raise self._damaged(f"it holds no {key}" + (f" of shape {shape}" if shape is not None else ""))
        dtype, found = self._kind(key)
        if shape is not None and found != shape:
            raise self._damaged(f"it holds no {key} of shape {shape}")
        if dtype not in DTYPES:
            raise self._damaged(f"{key} is of the unknown kind {dtype}")
        entry: dict[str, Any] = self._entries[key]
        return entry

    def whole(self, key: str) -> Tensor:
        """All of a tensor that is there."""
        entry = self._entry(key)
        return self._elements(entry, 0, prod(entry["shape"])).reshape(entry["shape"])

    def blocks(
        self, key: str, shape: tuple[int, ...], begin: tuple[int, ...], end: tuple[int, ...]
    ) -> Iterator[tuple[tuple[int | slice, ...], Tensor]]:
        """The elements from `begin` to `end` of a tensor of this shape: (where in that range, values), in portions.

        Reads long stretches only: what lies between short ones is read too and thrown away.
        """
        entry = self._entry(key, shape)
        if not shape:
            yield (), self._elements(entry, 0, 1).reshape(())
            return
        strides = [prod(shape[dimension + 1 :]) for dimension in range(len(shape))]
        size = [last - first for first, last in zip(begin, end, strict=True)]
        itemsize = DTYPES[entry["dtype"]].itemsize
        level = len(shape) - 1  # the dimension whose rows lie one after the other in a stretch
        while level > 0 and (size[level] == shape[level] or size[level] * strides[level] * itemsize < _SHORT_BYTES):
            level -= 1
        rows = max(1, _BLOCK_BYTES // (strides[level] * itemsize))
        inner = tuple(map(slice, begin[level + 1 :], end[level + 1 :]))
        for outer in product(*map(range, size[:level])):
            corner = sum((begin[d] + index) * strides[d] for d, index in enumerate(outer))
            for row in range(0, size[level], rows):
                count = min(rows, size[level] - row)
                first = corner + (begin[level] + row) * strides[level]
                values = self._elements(entry, first, count * strides[level]).reshape(count, *shape[level + 1 :])
                yield (*outer, slice(row, row + count)), values[(slice(None), *inner)]

    def _elements(self, entry: dict[str, Any], first: int, count: int) -> Tensor:
        """`count` elements from number `first` on, in row-major order."""
        dtype = DTYPES[entry["dtype"]]
        begin = self._data_begins + entry["data_offsets"][0]
        return self._read(begin + first * dtype.itemsize, count * dtype.itemsize).view(dtype)

    def _read(self, start: int, count: int) -> Tensor:
        """That many bytes."""
        found = torch.empty(count, dtype=torch.uint8)
        rest = found.numpy().data
        while rest:
            try:
                got = os.preadv(self._descriptor, [rest[:_BLOCK_BYTES]], start)
            except OSError as error:
                raise self._damaged(str(error)) from error
            if got == 0:
                raise self._damaged(f"it ends before byte {start + len(rest):,}")
            start, rest = start + got, rest[got:]
        return found

    def _damaged(self, reason: str) -> DataError:
        what = f"{self.path.name} cannot be read: {reason[:500]}"
        return DataError(Problem(what, "", self._remedy, str(self.path.parent)))
