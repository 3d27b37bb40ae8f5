"""Hugging Face folders of small models, for the tests of import."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from bloomery.config.recipe import ModelSection
from bloomery.interop.hf.configs import hf_config
from bloomery.interop.hf.maps import to_hf
from model_samples import small_config, small_model

Command = Callable[..., tuple[int, str, str]]
GPT2 = small_config("gpt2", vocab_size=300)


def their_state(state: dict[str, torch.Tensor], config: ModelSection) -> dict[str, torch.Tensor]:
    """The state dict of the same model in transformers, from ours."""
    return {name: tensor.contiguous() for name, tensor in to_hf(state.__getitem__, config)}


def hf_folder(folder: Path, config: ModelSection = GPT2, **changes: Any) -> Path:
    """A model as transformers saves it, with `changes` in its config.json."""
    folder.mkdir(parents=True)
    state = their_state({name: p.detach() for name, p in small_model(config).named_parameters()}, config)
    save_file({name: tensor.clone() for name, tensor in state.items()}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({**hf_config(config), **changes}))
    return folder


def change(folder: Path, **tensors: torch.Tensor | None) -> None:
    """Replace, add or (None) remove tensors of a folder; __ stands for a dot."""
    state = load_file(folder / "model.safetensors")
    for name, tensor in tensors.items():
        key = name.replace("__", ".")
        state.pop(key, None)
        if tensor is not None:
            state[key] = tensor
    save_file(state, folder / "model.safetensors")


def in_shards(folder: Path, count: int) -> dict[str, str]:
    """Cut the one file of a folder into `count` and an index; the index."""
    state = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    places = {name: f"model-{i % count + 1:05d}-of-{count:05d}.safetensors" for i, name in enumerate(state)}
    for file in set(places.values()):
        save_file({name: state[name] for name in state if places[name] == file}, folder / file)
    write_index(folder, places)
    return places


def write_index(folder: Path, places: dict[str, Any]) -> None:
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
