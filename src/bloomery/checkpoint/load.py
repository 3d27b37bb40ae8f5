"""Read a checkpoint back: its state, its recipe, and its tensors straight into the ones you give."""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint.state_dict_loader as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from bloomery.base.errors import DataError, Problem
from bloomery.checkpoint.folder import verify
from bloomery.config.load import load_recipe
from bloomery.config.recipe import Recipe
from bloomery.data.tokenizer import Tokenizer
from bloomery.model.build import build_model


def read_state(folder: Path) -> dict[str, Any]:
    """What the training loop saved beside the tensors."""
    facts: dict[str, Any] = json.loads((folder / "state.json").read_text())
    return facts


def read_recipe_of(folder: Path) -> Recipe:
    """The recipe this checkpoint was trained with."""
    recipe = load_recipe(str(folder / "recipe.yaml")).recipe
    assert recipe is not None
    return recipe


def load_tensors(folder: Path, tensors: Mapping[str, Tensor]) -> None:
    """Fill the given tensors in place; others in the checkpoint are left alone. DataError names what does not fit."""
    saved = FileSystemReader(folder).read_metadata().state_dict_metadata
    problems = []
    for name, tensor in tensors.items():
        facts = saved.get(name)
        if not isinstance(facts, TensorStorageMetadata):
            problems.append(Problem(f"{name} is not in the checkpoint", place=str(folder)))
        elif tuple(facts.size) != tuple(tensor.shape):
            what = f"{name} is {tuple(facts.size)} in the checkpoint and {tuple(tensor.shape)} in the recipe"
            problems.append(Problem(what, place=str(folder)))
    if problems:
        raise DataError(
            [*problems, Problem("the checkpoint does not fit this recipe", remedy="use the recipe it came from")]
        )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # dcp warns that no process group exists: that is what no_dist says
        dcp.load(dict(tensors), storage_reader=FileSystemReader(folder), no_dist=True)


def load_model(folder: Path, *, device: torch.device) -> tuple[Recipe, nn.Module]:
    """The recipe and its model with the checkpoint's fp32 weights, ready to evaluate."""
    verify(folder)
    recipe = read_recipe_of(folder)
    model = build_model(recipe.model)
    model.to_empty(device=device)
    model.tie_weights()
    model.rebuild_buffers(device)
    load_tensors(folder, {f"model.{name}": parameter.data for name, parameter in model.named_parameters()})
    return recipe, model.eval()


def tokenizer_of(recipe: Recipe, path: str | None = None) -> Tokenizer:
    """The tokenizer at `path`, else the recipe's."""
    where = path or (recipe.tokenizer.path if recipe.tokenizer else None)
    if where is None:
        raise DataError(Problem("the recipe names no tokenizer", remedy="give one with --tokenizer"))
    tokenizer = Tokenizer.load(where)
    if tokenizer.vocab_size > recipe.model.vocab_size:
        what = (
            f"the tokenizer has {tokenizer.vocab_size} entries but the model's vocabulary is {recipe.model.vocab_size}"
        )
        raise DataError(Problem(what, remedy="give the one it was trained with, with --tokenizer", place=where))
    return tokenizer
