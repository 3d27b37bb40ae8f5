"""The Triton kernels of linear.py: the largest value of a matrix, and its cast, which reads it once and writes it and
its transpose."""

import torch
import triton
import triton.language as tl
from torch import Tensor

TILE, BLOCK = 128, 8192


def cast_and_transpose(x: Tensor, dtype: torch.dtype, exponent: int) -> tuple[Tensor, Tensor, Tensor]:
    """`cast_to_fp8` for x (M, N) of 16 bits, contiguous; `exponent` is the LARGEST_EXPONENT of dtype."""
    assert x.element_size() == 2, "what is computed beside the products has 16 bits"
    rows, columns = x.shape
    out, out_t = x.new_empty(rows, columns, dtype=dtype), x.new_empty(columns, rows, dtype=dtype)
    largest, inverse = x.new_zeros((), dtype=torch.int32), x.new_empty((), dtype=torch.float32)
    _largest_bits[(triton.cdiv(x.numel(), BLOCK),)](x.view(torch.int16), largest, x.numel(), BLOCK, num_warps=8)
    grid = (triton.cdiv(rows, TILE), triton.cdiv(columns, TILE))
    _cast_and_transpose[grid](x, largest, out, out_t, inverse, rows, columns, exponent, TILE, num_warps=8)
    return out, out_t, inverse


@triton.jit
def _largest_bits(x, largest, numel, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Of the magnitudes, as integers: these have the order of the floats, and NaN above all."""
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    values = tl.load(x + place, mask=place < numel, other=0).to(tl.int32)
    tl.atomic_max(largest, tl.max(values & 0x7FFF), sem="relaxed")


@triton.jit
def _cast_and_transpose(  # type: ignore[no-untyped-def]
    x, largest, out, out_t, inverse, rows, columns, exponent, TILE: tl.constexpr
):
    bits = tl.load(largest).to(tl.int16).to(x.dtype.element_ty, bitcast=True).to(tl.float32).to(tl.int32, bitcast=True)
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
