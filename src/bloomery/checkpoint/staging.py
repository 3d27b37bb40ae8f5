"""The picture of a save in host memory: taken in an instant, written to the disk while training goes on."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from bloomery.base.accelerator import CopyQueue, host_memory
from bloomery.checkpoint.tensor_file import FileLayout, as_bytes

_BLOCK_BYTES = 2**28
"""A power of two: torch rounds pinned memory up to one, so that larger or odd sizes would waste half of it."""


class HostImage:
    """The bytes of a tensor file, in blocks of host memory that are allocated once and used again for every save."""

    def __init__(self, tensors: Mapping[str, Tensor], device: torch.device) -> None:
        self.layout = FileLayout.of(tensors)
        self._queue = CopyQueue(device)
        rest = self.layout.data_bytes
        sizes = [_BLOCK_BYTES] * (rest // _BLOCK_BYTES) + ([rest % _BLOCK_BYTES] if rest % _BLOCK_BYTES else [])
        self._blocks = [host_memory(size, device) for size in sizes]
        self._whole: dict[str, Tensor] = {}
        """Where each tensor goes; those that lie across two blocks are not here but in `_cut`."""
        self._cut: dict[str, list[Tensor]] = {}
        position = 0
        for name in self.layout.order:
            parts = self._parts(position, tensors[name].nbytes)
            position += tensors[name].nbytes
            if len(parts) == 1:
                self._whole[name] = parts[0].view(tensors[name].dtype).view(tensors[name].shape)
            else:
                self._cut[name] = parts

    @torch.no_grad()
    def take(self, tensors: Mapping[str, Tensor]) -> None:
        """Copy these tensors as they are when the work queued so far is done. They must be shaped like the first."""
        assert tensors.keys() == self._whole.keys() | self._cut.keys(), "the tensors of a save do not change"
        with self._queue.after_all_so_far():
            for name, target in self._whole.items():
                target.copy_(tensors[name], non_blocking=True)
            for name, parts in self._cut.items():
                source = as_bytes(tensors[name].contiguous())
                for part in parts:
                    part.copy_(source[: len(part)], non_blocking=True)
                    source = source[len(part) :]

    def hold_back(self) -> None:
        """Whatever the device is told from now on happens after the copies. Costs the host nothing."""
        self._queue.hold_back()

    def wait(self) -> None:
        """Until the picture is complete."""
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
