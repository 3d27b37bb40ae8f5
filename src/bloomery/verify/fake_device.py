"""A device that is not there, as far as memory goes: kernels that keep what those of an accelerator keep, and a meter
that counts fake tensors as well."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from bloomery.model import transformer
from bloomery.model.attention import AttentionContext, choose_kernel, run_recomputable


@contextmanager
def accelerator_kernels() -> Iterator[None]:
    """Models choose kernels as on an accelerator, and dropout keeps a byte per element; on a CPU it keeps a factor."""

    def dropout(x: Tensor, p: float, training: bool) -> Tensor:
        return torch.native_dropout(x, p, True)[0] if training and p > 0 else x

    def kernel(device_type: str, **facts: Any) -> str:
        return choose_kernel("cuda", **facts)

    places: list[tuple[Any, str, Any]] = [(F, "dropout", dropout), (transformer, "choose_kernel", kernel)]
    before = [getattr(place, name) for place, name, _ in places]
    for place, name, instead in places:
        setattr(place, name, instead)
    try:
        yield
    finally:
        for (place, name, _), original in zip(places, before, strict=True):
            setattr(place, name, original)


class _FusedAttention(torch.autograd.Function):
    """Keeps its arguments, its output and one number per query and head, whatever the kernel: never the scores."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None) -> Tensor:
        out, log_sum = torch.empty_like(q), q.new_empty(q.shape[:3], dtype=torch.float32)
        ctx.save_for_backward(q, k, v, out, log_sum, bias)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        q, k, v, *_ = ctx.saved_tensors
        return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v), None


def fuse_attention(model: nn.Module) -> None:
    """Let a Decoder or Encoder keep what the attention kernels of an accelerator keep."""
    for block in cast(Any, model).layers.values():
        block.attention.core.forward = _forward_of(block.attention.core)


def _forward_of(core: nn.Module) -> Any:
    def forward(q: Tensor, k: Tensor, v: Tensor, context: AttentionContext) -> Tensor:
        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            bias, groups = context.bias, q.shape[1] // k.shape[1]
            if context.kernel == "bias" and groups > 1:
                k, v = k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1)
            if bias is not None and bias.dtype != torch.bool:
                bias = bias.to(q.dtype)
            return cast(Tensor, cast(Any, _FusedAttention).apply(q, k, v, bias))

        return run_recomputable(attend, q, k, v, recompute=cast(bool, core.recompute))

    return forward


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
