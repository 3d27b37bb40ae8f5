"""The Triton kernels of linear.py: the largest value of a matrix, and its cast, which writes it and its transpose while it
reads it once."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from bloomery.model.linear import LARGEST_EXPONENT

TILE, BLOCK = 128, 8192


def cast_and_transpose(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """`cast_to_fp8` for x (M, N), contiguous."""
    rows, columns = x.shape
    out, out_t = x.new_empty(rows, columns, dtype=dtype), x.new_empty(columns, rows, dtype=dtype)
    largest, inverse = x.new_zeros((), dtype=torch.int32), x.new_empty((), dtype=torch.float32)
    bits = x.view(torch.int16 if x.element_size() == 2 else torch.int32)
    _largest_bits[(triton.cdiv(x.numel(), BLOCK),)](bits, largest, x.numel(), BLOCK, num_warps=8)
    grid = (triton.cdiv(rows, TILE), triton.cdiv(columns, TILE))
    exponent = LARGEST_EXPONENT[dtype]
    _cast_and_transpose[grid](x, largest, out, out_t, inverse, rows, columns, exponent, TILE, num_warps=8)
    return out, out_t, inverse


@triton.jit
def _largest_bits(x, largest, numel, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Of the magnitudes, as integers: these have the order of the floats, and NaN above all."""
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    values = tl.load(x + place, mask=place < numel, other=0).to(tl.int32)
    magnitude = 0x7FFF if x.dtype.element_ty == tl.int16 else 0x7FFFFFFF
    tl.atomic_max(largest, tl.max(values & magnitude), sem="relaxed")


@triton.jit
def _cast_and_transpose(x, largest, out, out_t, inverse, rows, columns, exponent, TILE: tl.constexpr):  # type: ignore[no-untyped-def]
    bits = tl.load(largest)
    if x.dtype.element_ty == tl.float16:
        bits = bits.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32).to(tl.int32, bitcast=True)
    elif x.dtype.element_ty == tl.bfloat16:
        bits = bits << 16
    power = exponent - ((bits >> 23) - 126) - ((bits & 0x7FFFFF) > 0x600000).to(tl.int32)
    power = tl.minimum(tl.maximum(power, -126), 126)
    scale = ((power + 127) << 23).to(tl.float32, bitcast=True)
    scale = tl.where(bits < 0x7F800000, scale, float("nan"))
    row = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    column = tl.program_id(1).to(tl.int64) * TILE + tl.arange(0, TILE)
    inside = (row < rows)[:, None] & (column < columns)[None, :]
    values = tl.load(x + row[:, None] * columns + column[None, :], mask=inside, other=0.0)
    values = (values.to(tl.float32) * scale).to(out.dtype.element_ty)
    tl.store(out + row[:, None] * columns + column[None, :], values, mask=inside)
    inside_t = (column < columns)[:, None] & (row < rows)[None, :]
    tl.store(out_t + column[:, None] * rows + row[None, :], tl.trans(values), mask=inside_t)
    if (tl.program_id(0) == 0) & (tl.program_id(1) == 0):
        tl.store(inverse, 1.0 / scale)
