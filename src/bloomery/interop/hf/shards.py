"""A Hugging Face model as safetensors files, planned from shapes and written tensor by tensor."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from bloomery.base.errors import DataError, Problem
from bloomery.base.storage import reserve, sync, write_all, write_atomically
from bloomery.checkpoint.tensor_file import DTYPE_NAMES, raw_bytes

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"


@dataclass(frozen=True)
class Shard:
    file: str
    shapes: dict[str, tuple[int, ...]]


def plan_shards(shapes: Mapping[str, tuple[int, ...]], dtype: torch.dtype, *, shard_bytes: int) -> list[Shard]:
    """Tensors in their order, as many to a file as fit; one that is larger has a file of its own."""
    groups: list[dict[str, tuple[int, ...]]] = [{}]
    filled = 0
    for name, shape in shapes.items():
        size = _size(shape, dtype)
        if groups[-1] and filled + size > shard_bytes:
            groups.append({})
            filled = 0
        groups[-1][name] = shape
        filled += size
    if len(groups) == 1:
        return [Shard(SINGLE, groups[0])]
    count = len(groups)
    return [Shard(f"model-{number:05d}-of-{count:05d}.safetensors", group) for number, group in enumerate(groups, 1)]


def write_shards(folder: Path, shards: list[Shard], dtype: torch.dtype, tensors: Iterable[tuple[str, Tensor]]) -> None:
    """Write the tensors, which come in the order of the plan; only one is in memory. OSError if that fails, DataError
    if a value does not fit `dtype`."""
    source = iter(tensors)
    for shard in shards:
        descriptor = os.open(folder / shard.file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
        try:
            header = _header(shard, dtype)
            reserve(descriptor, len(header) + sum(_size(shape, dtype) for shape in shard.shapes.values()))
            write_all(descriptor, header)
            for name, shape in shard.shapes.items():
                given, tensor = next(source)
                assert (given, tuple(tensor.shape)) == (name, shape), f"{given} came instead of {name}"
                write_all(descriptor, raw_bytes(_rounded(name, tensor, dtype)))
            sync(descriptor)
        finally:
            os.close(descriptor)
    if len(shards) > 1:
        total = sum(_size(shape, dtype) for shard in shards for shape in shard.shapes.values())
        places = {name: shard.file for shard in shards for name in shard.shapes}
        index = {"metadata": {"total_size": total}, "weight_map": places}
        write_atomically(folder / INDEX, json.dumps(index, indent=2) + "\n")


def _rounded(name: str, tensor: Tensor, dtype: torch.dtype) -> Tensor:
    made = tensor.to(dtype)
    if not bool(tensor.isfinite().all()):
        wrong = int((~tensor.isfinite()).sum())
        what = f"the checkpoint holds values that are not finite: {wrong:,} of {tensor.numel():,} in {name}"
        rule = "a model that has diverged computes nothing, and no other weights follow from it"
        raise DataError(Problem(what, rule, "export an earlier checkpoint, by its folder"))
    if dtype == torch.float16 and bool((made.isinf() & ~tensor.isinf()).any()):
        largest = float(tensor.abs().max())
        rule = "fp16 holds at most 65504"
        raise DataError(Problem(f"{name} has a value of {largest:.4g}", rule, "use --dtype bf16 or fp32"))
    return made


def _header(shard: Shard, dtype: torch.dtype) -> bytes:
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, shape in shard.shapes.items():
        start, end = end, end + _size(shape, dtype)
        entries[name] = {"dtype": DTYPE_NAMES[dtype], "shape": list(shape), "data_offsets": [start, end]}
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _size(shape: tuple[int, ...], dtype: torch.dtype) -> int:
    return torch.Size(shape).numel() * dtype.itemsize
