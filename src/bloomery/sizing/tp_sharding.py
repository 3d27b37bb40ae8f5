"""How tensor-parallel ranks share each weight, by its name."""

from __future__ import annotations

import re
from typing import Literal

Cut = Literal["rows", "columns", "summed", "alike"]
"""rows, columns: cut along dimension 0 or 1. summed: whole on every rank, but each sees a part of the tokens, so that
gradients are to be summed. alike: whole, and every rank computes the same with it."""

CUTS: tuple[tuple[str, Cut], ...] = (
    (r"embed\.tokens\.weight|head\.(weight|bias)|slopes", "rows"),
    (r"layers\.\d+\.(attention\.qkv|mlp\.up|mlp\.gate)\.(weight|bias)", "rows"),
    (r"layers\.\d+\.(attention\.out|mlp\.down)\.weight", "columns"),
    (r"layers\.\d+\.(attention\.out|mlp\.down)\.bias", "summed"),
    (
        r"(layers\.\d+\.(attention_norm|mlp_norm)|embed\.norm|final_norm|head\.norm|head\.dense)\.(weight|bias)",
        "summed",
    ),
    (r"layers\.\d+\.attention\.(q_norm|k_norm)\.weight", "summed"),  # each rank sees only its own heads
    (r"embed\.(positions|token_types)\.weight", "summed"),
    (r"(pooler\.dense|order_head)\.(weight|bias)", "alike"),
)
"""Every parameter and buffer of every family matches exactly one; a test holds that."""


def cut_of(name: str) -> Cut:
    """How the parameter or buffer called `name` lies on tensor-parallel ranks."""
    for pattern, cut in CUTS:
        if re.fullmatch(pattern, name):
            return cut
    raise AssertionError(f"no tensor-parallel rule for {name}: add one to CUTS")


def cut_dimension(name: str) -> int | None:
    """The dimension along which it is cut; None if every rank has all of it."""
    return {"rows": 0, "columns": 1}.get(cut_of(name))
