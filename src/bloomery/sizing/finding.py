"""What a rule of `rules.py` says when a recipe breaks it."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Finding:
    """A broken rule. `paths` are the fields involved, the one to point at first."""

    paths: tuple[str, ...]
    what: str
    rule: str
    remedy: str
    is_warning: bool = False


def nearby_divisors(number: int, near: int) -> str:
    """The two divisors around a value that does not divide: '8 or 16'."""
    small = [d for d in range(1, min(math.isqrt(number), 10**6) + 1) if number % d == 0]
    divisors = {*small, *(number // d for d in small)}
    below = max((d for d in divisors if d < near), default=None)
    above = min((d for d in divisors if d > near), default=None)
    return " or ".join(str(d) for d in (below, above) if d is not None)
