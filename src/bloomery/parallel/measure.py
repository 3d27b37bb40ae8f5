"""How fast this machine is at what a training step is made of, for `bloomery calibrate`."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from bloomery.base.accelerator import (
    device_cores,
    device_count,
    device_name,
    device_of_rank,
    device_total_bytes,
    is_fast_in_bf16,
    lacks_fp8,
    pick_device,
    synchronize,
)
from bloomery.base.ranks import started_as
from bloomery.model.attention import AttentionContext, AttentionCore
from bloomery.model.linear import FORWARD, _scaled_product
from bloomery.parallel.links import received_bytes_per_second
from bloomery.parallel.ranks import joined

_SECONDS = 0.1
_GPU_SHAPES = ((1024, 32768), (2048, 4096), (2048, 32768), (4096, 4096), (4096, 16384))
_CPU_SHAPES = ((128, 1024), (256, 512), (256, 2048), (512, 1024))
"""Hidden size and tokens."""
_GPU_HEADS, _CPU_HEADS = ((8, 16, 2048, 64), (8, 16, 2048, 128), (2, 16, 8192, 128)), ((2, 4, 256, 64),)
"""Samples, heads, tokens of a sample, width of a head."""


def measure_rank(arguments: Sequence[str]) -> int:
    """As each rank of this machine: rank 0 writes what it has measured into the file that is named first."""
    started = started_as()
    assert started is not None, "`run_local_ranks` starts these"
    device = device_of_rank(pick_device(arguments[1] if len(arguments) > 1 else None), started.rank, started.size)
    with ExitStack() as closing:
        links = None
        if started.size > 1:
            closing.enter_context(joined(started, device))
            links = received_bytes_per_second(device)
        if started.rank == 0:
            Path(arguments[0]).write_text(json.dumps(_measured(device) | {"link_bytes_per_s": links}))
    return 0


def _measured(device: torch.device) -> dict[str, Any]:
    on_cpu = device.type == "cpu"
    dtype = torch.float32 if on_cpu else torch.bfloat16 if is_fast_in_bf16(device) else torch.float16
    has_fp8 = not on_cpu and not lacks_fp8(device)
    shapes = _CPU_SHAPES if on_cpu else _GPU_SHAPES
    block = torch.empty(2**26 if on_cpu else 2**30, dtype=torch.uint8, device=device)
    copy = torch.empty_like(block)
    copied = 2 * len(block) / _seconds(device, lambda: copy.copy_(block))
    return {
        "device": device_name(device),
        "devices": device_count(device) or 1,
        "memory_bytes": device_total_bytes(device),
        "cores": device_cores(device),
        "torch": torch.__version__,
        "precision": {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}[dtype],
        "copy_bytes_per_s": copied,
        "gemm": [*_products(device, shapes, dtype), *(_products(device, shapes, FORWARD) if has_fp8 else [])],
        "attention": list(_attention(device, _CPU_HEADS if on_cpu else _GPU_HEADS, dtype)),
    }


def _products(device: torch.device, shapes: Sequence[tuple[int, int]], dtype: torch.dtype) -> Iterator[dict[str, Any]]:
    """Of an MLP's matrix and tokens."""
    scale = torch.ones((), device=device)
    for hidden, tokens in shapes:
        a = torch.randn(tokens, hidden, device=device).to(dtype)
        b = torch.randn(4 * hidden, hidden, device=device).to(dtype)
        is_fp8 = dtype == FORWARD

        def product(a: Tensor = a, b: Tensor = b, is_fp8: bool = is_fp8) -> Tensor:
            return _scaled_product(a, b, scale, scale, torch.bfloat16, is_fast=True) if is_fp8 else F.linear(a, b)

        seconds = _seconds(device, product)
        yield {"m": tokens, "n": 4 * hidden, "k": hidden, "fp8": is_fp8, "seconds": seconds}


def _attention(device: torch.device, heads: Sequence[tuple[int, ...]], dtype: torch.dtype) -> Iterator[dict[str, Any]]:
    core, context = AttentionCore(dropout=0.0), AttentionContext("sdpa", causal=True)
    for samples, count, seq, width in heads:
        shape = (samples, seq, count, width)  # as the model has them; the kernel reads heads first
        q, k, v = (torch.randn(shape, device=device, dtype=dtype).transpose(1, 2).requires_grad_() for _ in range(3))

        def both(q: Tensor = q, k: Tensor = k, v: Tensor = v) -> None:
            out = core(q, k, v, context)
            torch.autograd.grad(out, (q, k, v), out.detach())

        yield {"samples": samples, "heads": count, "seq": seq, "width": width, "seconds": _seconds(device, both)}


def _seconds(device: torch.device, work: Callable[[], object]) -> float:
    """Of one call, when it is made again and again."""
    for _ in range(3):
        work()  # loads and chooses kernels
    count, seconds = 1, 0.0
    while seconds < _SECONDS / 2:
        count = count * 2 if not seconds else max(count + 1, int(count * _SECONDS / seconds))
        synchronize(device)  # sync
        began = time.perf_counter()
        for _ in range(count):
            work()
        synchronize(device)  # sync
        seconds = time.perf_counter() - began
    return seconds / count
