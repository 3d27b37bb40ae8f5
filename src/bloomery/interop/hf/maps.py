"""Hugging Face state and config for any family: `to_hf`, `from_hf`, `hf_config`."""

from __future__ import annotations

import re
from collections.abc import Callable, Container, Iterable, Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from torch import Tensor

from bloomery.base.errors import Problem, RecipeError
from bloomery.config.recipe import Family, ModelSection
from bloomery.interop.hf import bert, bloom, gpt2, llama
from bloomery.interop.hf.layout import Entry, export_state, match_names, spellings
from bloomery.model.build import build_model

_FAMILIES: dict[Family, ModuleType] = {"gpt2": gpt2, "bloom": bloom, "llama": llama, "bert": bert}
_BUFFER = re.compile(r"(^|\.)(attn\.bias|attn\.masked_bias|rotary_emb\.inv_freq|position_ids|token_type_ids)$")
"""Constants that versions of transformers have saved with the weights."""


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
    not fit the config; other tensors are left alone."""
    sources = sources_of({name: tuple(tensor.shape) for name, tensor in state.items()}, config)
    return {each.entry.ours: each.load(state.__getitem__) for each in sources}


@dataclass(frozen=True)
class Source:
    """Where one of our parameters comes from."""

    entry: Entry
    keys: tuple[str, ...]
    """Of the tensors in the state that it is made of."""

    def load(self, read: Callable[[str], Tensor]) -> Tensor:
        return self.entry.load([read(key) for key in self.keys]).contiguous()


def sources_of(shapes: Mapping[str, tuple[int, ...]], config: ModelSection) -> list[Source]:
    """How to make each of our parameters of a state that has tensors of these shapes. DataError as `from_hf`."""
    made = to_hf(dict(build_model(config).named_parameters()), config)
    expected = {name: tuple(tensor.shape) for name, tensor in made.items()}
    if config.family == "bert":
        bert.require_heads(shapes)
    prefix, twins = _FAMILIES[config.family].PREFIX, _twins(config)
    keys = match_names(shapes, prefix=prefix, expected=expected, twins=twins)
    return [Source(entry, tuple(keys[name] for name in entry.theirs)) for entry in entries_of(config)]


def strangers(keys: Iterable[str], sources: Iterable[Source], config: ModelSection) -> list[str]:
    """Tensors of a state that no parameter is made of, and that are neither buffers nor copies of tied weights."""
    known = {key for source in sources for key in source.keys} | _twins(config).keys()
    known |= {_FAMILIES[config.family].HEAD} if config.tie_embeddings else set()
    return sorted(key for key in keys if key not in known and not _BUFFER.search(key))


def _twins(config: ModelSection) -> Mapping[str, tuple[str, ...]]:
    return bert.TWINS if config.family == "bert" else {}


def embedding_and_head(keys: Container[str], family: Family) -> tuple[str, str] | None:
    """Under which keys a state has both; None if it has one, which is then both."""
    module = _FAMILIES[family]
    found = [key for key in spellings(module.EMBEDDING, module.PREFIX) if key in keys]
    return (found[-1], module.HEAD) if found and module.HEAD in keys else None


def hf_config(config: ModelSection) -> dict[str, Any]:
    """What goes into config.json. The token ids (bos, eos, pad) are null: only the tokenizer knows them, so the
    exporter fills them in, with the dtype."""
    config_json: dict[str, Any] = _FAMILIES[config.family].hf_config(config)
    return config_json
