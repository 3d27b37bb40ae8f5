"""The matrices of a block, and their products of 8-bit floats, for `precision: fp8`.

A tensor is multiplied by a power of two that takes its largest value just below the largest of the format, and rounded:
e4m3 forwards, e5m2 for gradients. A power of two only moves the exponent, so a part of a tensor is rounded as the whole
is, except for values 2^15 times smaller than the largest: ranks that hold parts need not agree on a scale. Sums have
32 bits; what goes in and comes out has the dtype it would have without fp8. On CPUs the same rounding is emulated.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

FORWARD, GRADIENT = torch.float8_e4m3fn, torch.float8_e5m2
LARGEST_EXPONENT = {FORWARD: 9, GRADIENT: 16}
"""The largest value of both is 0.875 times two to this power."""


class Linear(nn.Linear):
    """nn.Linear whose product may be one of 8-bit floats."""

    fp8 = False

    def product(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """x times the weights, plus this bias."""
        if not self.fp8:
            return F.linear(x, self.weight, bias)
        out: Tensor = _Product.apply(x.flatten(0, -2), self.weight)  # type: ignore[no-untyped-call]
        out = out.reshape(*x.shape[:-1], -1)
        return out if bias is None else out + bias

    def forward(self, x: Tensor) -> Tensor:
        return self.product(x, self.bias)


class _Product(torch.autograd.Function):
    """x (M, K) @ weight (N, K).T. Of both, only the 8-bit forms are kept for the backward pass."""

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor) -> Tensor:  # type: ignore[no-untyped-def]
        x8_MK, x8_KM, x_scale = cast_to_fp8(x, FORWARD)
        w8_NK, w8_KN, w_scale = cast_to_fp8(weight, FORWARD)
        ctx.save_for_backward(x8_KM, w8_KN, x_scale, w_scale)
        return _scaled_product(x8_MK, w8_NK, x_scale, w_scale, x.dtype, is_fast=True)

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[no-untyped-def]
        x8_KM, w8_KN, x_scale, w_scale = ctx.saved_tensors
        g8_MN, g8_NM, g_scale = cast_to_fp8(gradient, GRADIENT)
        of_x = _scaled_product(g8_MN, w8_KN, g_scale, w_scale, gradient.dtype, is_fast=False)
        return of_x, _scaled_product(g8_NM, x8_KM, g_scale, x_scale, gradient.dtype, is_fast=False)


@torch.library.custom_op("bloomery::cast_to_fp8", mutates_args=())
def cast_to_fp8(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """x (M, N) times a power of two in `dtype`, the same transposed, both contiguous, and what undoes the power. A
    value that is not finite leaves none that is."""
    if x.is_cuda:
        from bloomery.model.fp8_kernel import cast_and_transpose  # Triton comes with torch for GPUs only

        return cast_and_transpose(x.contiguous(), dtype, LARGEST_EXPONENT[dtype])
    mantissa, exponent = torch.frexp(x.abs().amax().float())  # in [0.5, 1)
    power = LARGEST_EXPONENT[dtype] - exponent - (mantissa > 0.875).int()
    scale = torch.where(mantissa.isfinite(), torch.exp2(power.clamp(-126, 126).float()), torch.nan)
    cast = (x.float() * scale).to(dtype)
    return cast, cast.t().clone(memory_format=torch.contiguous_format), scale.reciprocal()


@cast_to_fp8.register_fake
def _(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    cast = x.new_empty(x.shape, dtype=dtype)
    return cast, x.new_empty(x.shape[::-1], dtype=dtype), x.new_empty((), dtype=torch.float32)


def _scaled_product(
    a: Tensor, b: Tensor, a_scale: Tensor, b_scale: Tensor, dtype: torch.dtype, *, is_fast: bool
) -> Tensor:
    """(a * a_scale) @ (b * b_scale).T for contiguous a (M, K) and b (N, K). `is_fast`: with sums of 22 bits between
    the tensor cores' own steps."""
    if a.is_cuda:
        return torch._scaled_mm(a, b.t(), scale_a=a_scale, scale_b=b_scale, out_dtype=dtype, use_fast_accum=is_fast)
    return ((a.float() @ b.float().t()) * (a_scale * b_scale)).to(dtype)
