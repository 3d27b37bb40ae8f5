"""The snapshot of a save in host memory: copied in an instant, written to the disk while training continues."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import torch
from torch import Tensor

from bloomery.base.accelerator import CopyQueue, host_memory
from bloomery.checkpoint.tensor_file import FileLayout, as_bytes, raw_bytes

_BLOCK_BYTES = 2**28
"""A power of two: torch rounds pinned memory up to one, so that larger or odd sizes would waste half of it."""


class HostImage:
    """The bytes of a file of these tensors, in blocks of host memory that are allocated once and used again for every
    save."""

    def __init__(self, tensors: Mapping[str, Tensor], device: torch.device) -> None:
        self.layout = FileLayout.of(tensors)
        self._queue = CopyQueue(device)
        rest = self.layout.data_bytes
        sizes = [_BLOCK_BYTES] * (rest // _BLOCK_BYTES) + ([rest % _BLOCK_BYTES] if rest % _BLOCK_BYTES else [])
        self._blocks = [host_memory(size, device) for size in sizes]
        self._copies: list[tuple[Tensor, Tensor]] = []
        """(where to, what): tensors that lie in one block, and parts of those that lie across two."""
        self._scattered: list[tuple[list[Tensor], Tensor]] = []
        """The same for tensors across two blocks that do not lie in one stretch themselves: copied together first."""
        position = 0
        for name in self.layout.order:
            tensor = tensors[name]
            parts = self._parts(position, tensor.nbytes)
            position += tensor.nbytes
            if len(parts) == 1:
                self._copies.append((parts[0].view(tensor.dtype).view(tensor.shape), tensor))
            elif tensor.is_contiguous():
                self._copies += zip(
                    parts, as_bytes(tensor).split_with_sizes([len(part) for part in parts]), strict=True
                )
            elif parts:
                self._scattered.append((parts, tensor))

    @torch.no_grad()
    def take(self) -> None:
        """Copy the tensors as they are when the work queued so far is done."""
        targets, sources = ([pair[side] for pair in self._copies] for side in (0, 1))
        with self._queue.after_all_so_far():
            if targets:
                torch._foreach_copy_(targets, sources, non_blocking=True)  # a loop in C++: a third of the host's time
            for parts, tensor in self._scattered:
                pieces = as_bytes(tensor.contiguous()).split_with_sizes([len(part) for part in parts])
                torch._foreach_copy_(parts, pieces, non_blocking=True)

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
            block, start = self._blocks[position // _BLOCK_BYTES], position % _BLOCK_BYTES
            parts.append(block[start : start + count])
            position, count = position + len(parts[-1]), count - len(parts[-1])
        return parts


class StreamedImage(HostImage):
    """Without memory: each tensor is made when its turn to be written comes, for pieces on the meta device."""

    def __init__(self, tensors: Mapping[str, Tensor], values: Callable[[str], Tensor]) -> None:
        self.layout = FileLayout.of(tensors)
        self._queue = CopyQueue(torch.device("cpu"))
        self._values = values

    def take(self) -> None: ...

    def blocks(self) -> Iterator[memoryview]:
        return (raw_bytes(self._values(name)) for name in self.layout.order)
