"""DeepSpeed's ds_config.json as flags with the names `ds:KEY`, for the tables of flags.py."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from bloomery.base.bounded import parse_json
from bloomery.base.errors import Problem, RecipeError
from bloomery.interop.megatron.flags import Given, kind_of

_SECTIONS = (
    "zero_optimization", "zero_optimization.offload_optimizer", "zero_optimization.offload_param", "fp16", "bf16",
    "nebula", "scheduler",
)  # fmt: skip


def read_ds_config(text: str, place: str) -> dict[str, Given]:
    """By name; without `auto` and null, which Hugging Face's Trainer fills in. RecipeError if it is no ds_config."""
    try:
        content = parse_json(text)
        if not isinstance(content, dict):
            raise ValueError("it is no object")
    except ValueError as error:
        rule = "a ds_config is a JSON object: numbers have no underscores, and nothing is computed in it"
        raise RecipeError(Problem(f"not valid JSON: {error}", rule, "correct it", place)) from error
    if "bfloat16" in content:
        content["bf16"] = content.pop("bfloat16")
    found, given = dict(_leaves(content, "")), {}
    for key, value in found.items():
        section, text = key.partition(".")[0], value if isinstance(value, str) else json.dumps(value)
        is_off = section in ("fp16", "nebula") and key[-8:] != ".enabled" and not found.get(f"{section}.enabled")
        if isinstance(value, dict) and kind_of(f"ds:{key}", [])[0] == "refused":
            is_off = not value or ('"enabled": false' in text and '"enabled": true' not in text)
        given[f"ds:off:{key}" if is_off else f"ds:{key}"] = Given(f"ds_config {key}", [text], place)
    return given


def _leaves(content: dict[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    for key, value in content.items():
        if f"{prefix}{key}" in _SECTIONS and isinstance(value, dict):
            yield from _leaves(value, f"{prefix}{key}.")
        elif value not in (None, "auto"):
            yield f"{prefix}{key}", value
