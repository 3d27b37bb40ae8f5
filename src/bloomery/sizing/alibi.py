"""ALiBi slopes: one number a head, from the number of heads alone."""

from __future__ import annotations


def alibi_slopes(num_heads: int) -> list[float]:
    """A geometric row for a power of two; otherwise the row of the power below, then every second slope of the row
    of twice that power."""
    below = 1 << (num_heads.bit_length() - 1)
    return _geometric(below) + _geometric(2 * below)[0::2][: num_heads - below]


def _geometric(count: int) -> list[float]:
    """2^(-8/count), and its powers."""
    return [2.0 ** (-8.0 * (i + 1) / count) for i in range(count)]
