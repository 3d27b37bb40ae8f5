"""What each module of a model costs: parameters, FLOPs as torch counts them while it runs, and on a device its time."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from bloomery.config.recipe import ModelSection
from bloomery.model.transformer import build_model, materialise


@dataclass(frozen=True)
class ModuleCost:
    name: str
    """Empty: the whole model."""
    kind: str
    """Name of its class."""
    depth: int
    parameters: int
    forward_flops: int
    backward_flops: int
    seconds: float | None
    """Of the forward pass; None where nothing was really computed."""

    @property
    def macs(self) -> int:
        """Of the forward pass. All that is counted are products, of two FLOPs each."""
        return self.forward_flops // 2


def module_costs(
    config: ModelSection,
    *,
    micro_batch_size: int,
    device: torch.device | None = None,
    dtype: torch.dtype = torch.float32,
) -> list[ModuleCost]:
    """Of one forward and backward pass of a micro-batch, every module before its parts. FLOPs are counted without
    computing anything, where the counter knows all kernels. Times are of a forward pass on `device`, if it is given."""
    shape = (micro_batch_size, config.seq_length)
    model = build_model(config)
    materialise(model, "meta")
    tokens = torch.empty(shape, dtype=torch.int64, device="meta")
    with FlopCounterMode(display=False) as forward, torch.no_grad():
        model(tokens)
    with FlopCounterMode(display=False) as both:
        _sum(model(tokens)).backward()  # type: ignore[no-untyped-call]
    seconds = _seconds(config, shape, device, dtype) if device is not None else {}
    counts = [{name: sum(ops.values()) for name, ops in each.get_flop_counts().items()} for each in (forward, both)]
    root = type(model).__name__
    found = []
    for name, module in model.named_modules():
        ahead, total = (_flops(each, f"{root}.{name}".rstrip(".")) for each in counts)
        depth = name.count(".") + 1 if name else 0
        size = sum(parameter.numel() for parameter in module.parameters())
        found.append(ModuleCost(name, type(module).__name__, depth, size, ahead, total - ahead, seconds.get(name)))
    return found


def _sum(outputs: Any) -> Tensor:
    tensors = [outputs] if isinstance(outputs, Tensor) else outputs
    return torch.stack([each.float().sum() for each in tensors]).sum()


def _flops(counts: dict[str, int], name: str) -> int:
    """A container never runs itself: it has what its parts have."""
    if name in counts:
        return counts[name]
    below = [each for each in counts if each.startswith(f"{name}.")]
    shallowest = min((each.count(".") for each in below), default=0)
    return sum(counts[each] for each in below if each.count(".") == shallowest)


def _seconds(
    config: ModelSection, shape: tuple[int, int], device: torch.device, dtype: torch.dtype
) -> dict[str, float]:
    """Of each module in one forward pass, after another one."""
    marks: dict[str, list[Any]] = {}
    model = build_model(config)
    materialise(model, device)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.02)
    model = model.to(dtype)
    tokens = torch.randint(config.vocab_size, shape, device=device)
    with torch.no_grad():
        model(tokens)
        with _hooked(model, marks):
            model(tokens)
        if tokens.device.type == "cpu":
            return {name: end - begin for name, (begin, end) in marks.items()}
        for _, end in marks.values():
            end.synchronize()
        return {name: begin.elapsed_time(end) / 1e3 for name, (begin, end) in marks.items()}


@contextmanager
def _hooked(model: nn.Module, marks: dict[str, list[Any]]) -> Iterator[None]:
    def mark(name: str, device: torch.device) -> None:
        now: Any = time.perf_counter()
        if device.type != "cpu":
            now = torch.Event(device, enable_timing=True)
            now.record()
        marks.setdefault(name, []).append(now)

    device = next(model.parameters()).device
    handles = []
    for name, module in model.named_modules():
        handles.append(module.register_forward_pre_hook(lambda *_, name=name: mark(name, device)))
        handles.append(module.register_forward_hook(lambda *_, name=name: mark(name, device)))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
