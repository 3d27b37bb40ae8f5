"""Tensors in host memory and in a file: the snapshot of a save, and one file in the safetensors layout (eight bytes
with the length of the header, the header as JSON, the bytes of the tensors).

Read by the safetensors library; written here so that each byte is hashed once, on its way to the disk, and no second
copy is made.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain
from pathlib import Path
from typing import Any, Self

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from bloomery.base.accelerator import CopyQueue, host_memory
from bloomery.base.bounded import open_regular
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
_HOST_BLOCK_BYTES = 2**28
"""A power of two: torch rounds pinned memory up to one, so that larger or odd sizes would waste half of it."""
_MOST_OPEN_FILES = 128


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
    return FileFacts(layout.file_bytes, hasher.hexdigest())


def raw_bytes(tensor: Tensor) -> memoryview:
    """The tensor's memory, or that of a copy if it lies on a device or not in one stretch."""
    return as_bytes(tensor.detach().to("cpu").contiguous()).numpy().data


def as_bytes(tensor: Tensor) -> Tensor:
    """The same memory in one dimension of bytes, for a tensor that lies in one stretch."""
    return tensor.detach().view(-1).view(torch.uint8)


class HostSnapshot:
    """The bytes of a file of these tensors, in blocks of host memory that are allocated once and used again for every
    save."""

    def __init__(self, tensors: Mapping[str, Tensor], device: torch.device) -> None:
        self.layout = FileLayout.of(tensors)
        self._queue = CopyQueue(device)
        starts = range(0, self.layout.data_bytes, _HOST_BLOCK_BYTES)
        sizes = [min(_HOST_BLOCK_BYTES, self.layout.data_bytes - start) for start in starts]
        self._blocks = [host_memory(size, device) for size in sizes]
        self._copies: list[tuple[Tensor, Tensor]] = []
        """(target, source) of tensors that lie in one block."""
        self._split: list[tuple[list[Tensor], Tensor]] = []
        """The same for tensors across several blocks."""
        position = 0
        for name in self.layout.order:
            tensor = tensors[name]
            parts = self._parts(position, tensor.nbytes)
            position += tensor.nbytes
            if len(parts) == 1:
                self._copies.append((parts[0].view(tensor.dtype).view(tensor.shape), tensor))
            elif parts:
                self._split.append((parts, tensor))

    @torch.no_grad()
    def take(self) -> None:
        """Copy the tensors as they are when the work queued so far is done."""
        targets, sources = ([pair[side] for pair in self._copies] for side in (0, 1))
        with self._queue.after_all_so_far():
            for parts, tensor in self._split:
                targets += parts
                sources += as_bytes(tensor.contiguous()).split_with_sizes([len(part) for part in parts])
            if targets:
                torch._foreach_copy_(targets, sources, non_blocking=True)  # a loop in C++: a third of the host's time

    def hold_back(self) -> None:
        """What is queued on the device from now on happens after the copies. Costs the host nothing."""
        self._queue.hold_back()

    def wait(self) -> None:
        """Until the snapshot is complete."""
        self._queue.wait()

    def blocks(self) -> Iterator[memoryview]:
        return (block.numpy().data for block in self._blocks)

    def _parts(self, position: int, count: int) -> list[Tensor]:
        """That many bytes from a position on."""
        parts = []
        while count > 0:
            block, start = self._blocks[position // _HOST_BLOCK_BYTES], position % _HOST_BLOCK_BYTES
            parts.append(block[start : start + count])
            position, count = position + len(parts[-1]), count - len(parts[-1])
        return parts


class StreamedSnapshot(HostSnapshot):
    """Without memory: each tensor is made when its turn to be written comes, for pieces on the meta device."""

    def __init__(self, tensors: Mapping[str, Tensor], values: Callable[[str], Tensor]) -> None:
        self.layout = FileLayout.of(tensors)
        self._queue = CopyQueue(torch.device("cpu"))
        self._values = values

    def take(self) -> None: ...

    def blocks(self) -> Iterator[memoryview]:
        return (raw_bytes(self._values(name)) for name in self.layout.order)


class TensorFile:
    """A safetensors file, open for reading. DataError if it is not one: the library proves that the header is sane and
    that every byte belongs to exactly one tensor."""

    def __init__(self, path: Path, *, remedy: str = "use another checkpoint, `bloomery train` with --from") -> None:
        """`remedy`: what to do about a file that cannot be read."""
        self.path = path
        self._remedy = remedy
        try:
            os.close(open_regular(path))
            self._file: Any = safe_open(path, framework="pt")
        except (OSError, ValueError, SafetensorError) as error:  # ValueError: a name that cannot be one
            raise self._damaged(str(error)) from error

    def kinds(self) -> dict[str, tuple[str, tuple[int, ...]]]:
        """(dtype, shape) of every tensor."""
        slices = {name: self._file.get_slice(name) for name in self._file.keys()}  # noqa: SIM118 (no mapping)
        return {name: (found.get_dtype(), tuple(found.get_shape())) for name, found in slices.items()}

    def view(self, key: str, shape: tuple[int, ...] | None = None) -> Tensor:
        """A tensor, of this shape if one is given, as a view of the mapped file: it is read where it is used."""
        try:
            found = self._file.get_slice(key)
            if shape is None or tuple(found.get_shape()) == shape:
                values: Tensor = found[...]
                return values
        except (SafetensorError, ValueError, RuntimeError, AttributeError) as error:
            raise self._damaged(f"{key}: {error}") from error
        raise self._damaged(f"it holds no {key} of shape {shape}")

    def _damaged(self, reason: str) -> DataError:
        what = f"{self.path.name} cannot be read: {reason[:500]}"
        return DataError(Problem(what, "", self._remedy, str(self.path.parent)))


class TensorFiles:
    """Of one folder, opened when they are needed; some stay open."""

    def __init__(self, folder: Path, **options: str) -> None:
        self.open = lru_cache(_MOST_OPEN_FILES)(lambda name: TensorFile(folder / name, **options))
