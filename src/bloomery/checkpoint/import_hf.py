"""A Hugging Face folder as the first checkpoint of a run: its weights, no steps done, moments that are zero."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from bloomery.base.errors import DataError, Problem, StorageError
from bloomery.base.piece import Piece
from bloomery.base.storage import make_run_folder, write_atomically, writing, written_to
from bloomery.checkpoint.folder import complete_checkpoints
from bloomery.checkpoint.hf.configs import model_section
from bloomery.checkpoint.hf.maps import from_hf
from bloomery.checkpoint.hf.shards import INDEX, SINGLE
from bloomery.checkpoint.save import save_checkpoint
from bloomery.config.describe import as_yaml
from bloomery.config.recipe import ModelSection, Recipe

_TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "vocab.json", "merges.txt", "vocab.txt",
    "added_tokens.json",
)  # fmt: skip
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
START = {
    "name": "imported",
    "batch": {"micro_batch_size": 1, "global_batch_size": 8},
    "lr": {"peak": 1e-5, "schedule": "constant"},
    "train": {"for": "1000 steps"},
}
"""What a recipe must say and a config.json does not: small and careful, to be overridden."""


@dataclass(frozen=True)
class Imported:
    recipe: Recipe
    checkpoint: Path
    tensors: int
    has_tokenizer: bool


def read_model(folder: Path) -> dict[str, Any]:
    """The recipe's `model` section of a Hugging Face folder. DataError lists everything that is not supported."""
    path = folder / "config.json"
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(content, dict):
            raise ValueError("it is no JSON object")
    except (OSError, ValueError) as error:
        rule = "a Hugging Face folder has config.json and *.safetensors"
        raise DataError(Problem(f"{path} cannot be read: {error}", rule, "name another folder")) from error
    return model_section(content, str(path))


def copy_tokenizer(folder: Path, output: Path) -> Path | None:
    """The folder's tokenizer beside the run; None if it has none."""
    files = [name for name in _TOKENIZER_FILES if (folder / name).is_file()]
    if not {"tokenizer.json", "merges.txt", "vocab.txt"} & set(files):
        return None
    place = output / "tokenizer"
    with written_to("OUT"):
        make_run_folder(place)
        for name in files:
            with writing(place / name):
                shutil.copyfile(folder / name, place / name)
    return place


def import_weights(folder: Path, output: Path, recipe: Recipe, state: Mapping[str, Any]) -> Imported:
    """Write `output`/checkpoints/step-00000000 and the recipe. `state`: that of a training which has done nothing.

    Holds the weights in fp32: four bytes a parameter. StorageError if the run has begun already.
    """
    root = output / "checkpoints"
    begun = complete_checkpoints(root)
    if begun:
        remedy = "name another folder, or move its checkpoints away"
        what = f"{output} already has {', '.join(path.name for path in begun)}"
        raise StorageError(Problem(what, "an import is the beginning of a run", remedy))
    weights = _load(folder, recipe.model)
    pieces = {"optim.step": Piece.whole(torch.zeros((), dtype=torch.float32))}
    for name, tensor in weights.items():
        pieces[f"model.{name}"] = Piece.whole(tensor)
        zeros = Piece.whole(torch.zeros((), dtype=torch.float32).expand(tensor.shape))  # takes no memory
        pieces |= {f"optim.{name}.{moment}": zeros for moment in ("exp_avg", "exp_avg_sq")}
    with written_to("OUT"):
        make_run_folder(output)
        checkpoint = save_checkpoint(root, step=0, pieces=pieces, state=state, recipe_yaml=as_yaml(recipe))
        write_atomically(output / "recipe.yaml", as_yaml(recipe))
    return Imported(recipe, checkpoint, len(weights), recipe.tokenizer is not None)


def _load(folder: Path, config: ModelSection) -> dict[str, Tensor]:
    """Our weights in fp32. DataError names every tensor that is missing or of another shape or kind."""
    with ExitStack() as closing:
        state: dict[str, Tensor] = {}
        for path in _weight_files(folder):
            try:
                file = closing.enter_context(safe_open(path, framework="pt"))
                names: list[str] = list(file.keys())
                state |= {name: file.get_tensor(name) for name in names}
            except (OSError, SafetensorError) as error:
                raise DataError(Problem(f"{path.name} cannot be read: {error}", place=str(folder))) from error
        odd = [f"{name} is {tensor.dtype}" for name, tensor in state.items() if _is_odd(tensor)]
        if odd:
            rule = "weights must be fp32, bf16 or fp16"
            raise DataError(
                Problem(f"{len(odd)} tensors are of another kind: {', '.join(odd[:5])}", rule, "", str(folder))
            )
        made = from_hf(state, config)
        return {name: made.pop(name).to(torch.float32).contiguous() for name in list(made)}


def _is_odd(tensor: Tensor) -> bool:
    return tensor.is_floating_point() and tensor.dtype not in _DTYPES


def _weight_files(folder: Path) -> Sequence[Path]:
    index = folder / INDEX
    if index.is_file():
        try:
            names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
        except (OSError, ValueError, KeyError, AttributeError) as error:
            raise DataError(Problem(f"{index} cannot be read: {error}", "", "copy it again")) from error
        return [folder / name for name in names]
    if (folder / SINGLE).is_file():
        return [folder / SINGLE]
    pickled = sorted(path.name for path in folder.glob("*.bin"))
    rule = f"there is {', '.join(pickled)}, but pickled files can run code and are never loaded" if pickled else ""
    remedy = "save it again with transformers: model.save_pretrained(folder, safe_serialization=True)"
    raise DataError(Problem(f"there is no {SINGLE} in {folder}", rule, remedy))
