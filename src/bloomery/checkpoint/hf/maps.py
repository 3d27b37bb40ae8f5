"""Hugging Face state and config for any family: `to_hf`, `from_hf`, `hf_config`."""

from __future__ import annotations

from collections.abc import Mapping
from types import ModuleType
from typing import Any

from torch import Tensor

from bloomery.base.errors import Problem, RecipeError
from bloomery.checkpoint.hf import bert, bloom, gpt2, llama
from bloomery.checkpoint.hf.layout import Entry, export_state, load_state
from bloomery.config.recipe import Family, ModelSection
from bloomery.model.build import build_model

_FAMILIES: dict[Family, ModuleType] = {"gpt2": gpt2, "bloom": bloom, "llama": llama, "bert": bert}


def to_hf(state: Mapping[str, Tensor], config: ModelSection) -> dict[str, Tensor]:
    """Their state dict from ours (by parameter name). Padded vocabulary rows are dropped. Tied copies
    (lm_head.weight) are left out, as `save_pretrained` does. Tensors may share memory with `state`."""
    return export_state(state, entries_of(config))


def entries_of(config: ModelSection) -> list[Entry]:
    """How each parameter becomes tensors there, one by one. RecipeError if Hugging Face has no such model."""
    if config.family == "bloom" and config.ffn_hidden_size != 4 * config.hidden_size:
        raise RecipeError(
            Problem(
                f"model.ffn_hidden_size is {config.ffn_hidden_size}",
                f"Hugging Face's BLOOM knows only 4 * hidden_size = {4 * config.hidden_size}",
                "train with that width, or keep the checkpoint as it is",
            )
        )
    found: list[Entry] = _FAMILIES[config.family].entries(config)
    return found


def from_hf(state: Mapping[str, Tensor], config: ModelSection) -> dict[str, Tensor]:
    """Our state from theirs; padded vocabulary rows are zero. Raises DataError if a tensor is missing or its shape does
    not fit the config."""
    family = _FAMILIES[config.family]
    expected = to_hf(dict(build_model(config).named_parameters()), config)
    return load_state(state, family.entries(config), prefix=family.PREFIX, expected=expected)


def hf_config(config: ModelSection) -> dict[str, Any]:
    """What goes into config.json. The token ids (bos, eos, pad) are null: only the tokenizer knows them, so the
    exporter fills them in, with the dtype."""
    config_json: dict[str, Any] = _FAMILIES[config.family].hf_config(config)
    return config_json
