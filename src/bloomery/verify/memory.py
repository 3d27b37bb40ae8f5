"""How much memory tensors take, and when most: counted from the tensors themselves, so that fake ones count as well."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class MemoryMeter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Bytes of all storages that were made while it was on and still live. It knows no allocator: no rounding, no
    fragmentation, no workspaces of libraries."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.live_bytes = 0
        self.peak_bytes = 0
        self._sizes: dict[int, int] = {}
        """Of each living storage, by its identity."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # it comes back in pieces, and those are what takes memory
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, Tensor) and leaf.device.type != "meta":
                self._count(leaf.untyped_storage())
        return out

    @contextmanager
    def running(self) -> Iterator[MemoryMeter]:
        """Count, also what is resized: that is how FSDP frees weights."""
        resize = torch.UntypedStorage.resize_

        def counted(storage: torch.UntypedStorage, size: int) -> Any:
            result = resize(storage, size)
            if storage._cdata in self._sizes:
                self._change(storage._cdata, storage.nbytes())
            return result

        torch.UntypedStorage.resize_ = counted  # type: ignore[method-assign, assignment]
        try:
            with self:
                yield self
        finally:
            torch.UntypedStorage.resize_ = resize  # type: ignore[method-assign]

    def restart(self) -> None:
        """Look for a new peak from here on."""
        self.peak_bytes = self.live_bytes

    def _count(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        if key not in self._sizes:
            self._sizes[key] = 0
            weakref.finalize(storage, self._forget, key).atexit = False
        self._change(key, storage.nbytes())

    def _change(self, key: int, size: int) -> None:
        self.live_bytes += size - self._sizes[key]
        self._sizes[key] = size
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)

    def _forget(self, key: int) -> None:
        self.live_bytes -= self._sizes.pop(key)
