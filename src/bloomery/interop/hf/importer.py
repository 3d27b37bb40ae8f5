"""A Hugging Face folder as the first checkpoint of a run: its weights, no steps done, moments that are zero."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bloomery.base.bounded import LARGE_BYTES, read_json, read_small
from bloomery.base.errors import DataError, Problem
from bloomery.base.piece import Piece
from bloomery.base.storage import make_folder, write_atomically, writing, written_to
from bloomery.checkpoint.folder import CHECKPOINTS
from bloomery.checkpoint.save import save_checkpoint
from bloomery.config.describe import as_yaml
from bloomery.config.recipe import ModelSection, Recipe
from bloomery.data.tokenizer import Tokenizer, read_settings
from bloomery.interop.hf.configs import model_section
from bloomery.interop.hf.draft import drafted, move_all, require_empty
from bloomery.interop.hf.export import why_unproven
from bloomery.interop.hf.maps import Source, embedding_and_head, sources_of, unused_tensors
from bloomery.interop.hf.proof import Proof, prove_import
from bloomery.interop.hf.reader import HfWeights
from bloomery.interop.hf.tokenizer import CHAT_TEMPLATE
from bloomery.sizing.parameters import parameter_shapes

_TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "vocab.json", "merges.txt", "vocab.txt",
    "added_tokens.json", CHAT_TEMPLATE,
)  # fmt: skip
TOKENIZER = "tokenizer"
_RECIPE = "recipe.yaml"
_WEIGHTS = ("F32", "BF16", "F16")
_BUFFERS = ("I64", "I32", "U8", "BOOL")
"""Of masks and positions, which no parameter is made of."""
_MOMENTS = ("exp_avg", "exp_avg_sq")
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
    proof: Proof


@dataclass(frozen=True)
class Model:
    section: dict[str, Any]
    """`model` of a recipe."""
    warnings: list[str]


def read_model(folder: Path) -> Model:
    """The model of a Hugging Face folder. DataError lists everything that is not supported."""
    path = folder / "config.json"
    try:
        content = read_json(path)
        if not isinstance(content, dict):
            raise ValueError("it is no JSON object")
    except (OSError, ValueError) as error:
        rule = "a Hugging Face folder has config.json and *.safetensors"
        raise DataError(Problem(f"{path} cannot be read: {error}", rule, "name another folder")) from error
    section = model_section(content, str(path))
    if section["tie_embeddings"] and (pair := _unequal_pair(folder, section["family"])):
        # As transformers 5 loads all families; 4 dropped the head.
        told = f"{path}: tie_word_embeddings is true, but {pair}: both are kept, and model.tie_embeddings is false"
        return Model({**section, "tie_embeddings": False}, [told])
    return Model(section, [])


def _unequal_pair(folder: Path, family: str) -> str:
    """What a head of its own is, in a folder that says it is the embedding; empty if there is none."""
    weights = HfWeights(folder)
    pair = embedding_and_head(weights.shapes, family)
    if pair is None or not {weights.dtypes[key] for key in pair} <= {*_WEIGHTS}:
        return ""
    embedding, head = (weights.read(key) for key in pair)
    is_same = embedding.shape == head.shape and bool((embedding == head).all())
    return "" if is_same else f"{pair[1]} differs from {pair[0]}"


def origin_of(folder: Path) -> dict[str, str]:
    """What a card says of the model that a run began with."""
    content = read_small(folder / "config.json")
    return {"folder": str(folder), "sha256 of its config.json": hashlib.sha256(content).hexdigest()}


def tokenizer_files(folder: Path) -> list[Path]:
    """The folder's tokenizer; nothing if it has none."""
    files = [folder / name for name in _TOKENIZER_FILES if (folder / name).is_file()]
    return files if {"tokenizer.json", "merges.txt", "vocab.txt"} & {path.name for path in files} else []


def import_weights(
    folder: Path, output: Path, recipe: Recipe, state: Mapping[str, Any], *, with_proof: bool = True
) -> Imported:
    """Write `output`: the tokenizer, checkpoints/step-00000000, and the recipe last. `state`: that of a training which
    has done nothing. All is checked before the first byte, and one tensor at a time is in memory until the proof.

    DataError names everything in the folder that does not fit, or that the proof fails; StorageError if `output` holds
    something. After any error it is as it was.
    """
    _require_new(output)
    _check_tokenizer(folder, recipe.model.vocab_size)
    if recipe.model.tie_embeddings and (pair := _unequal_pair(folder, recipe.model.family)):
        rule = "a tied model has one tensor for both"
        raise DataError(Problem(pair, rule, "leave out model.tie_embeddings=true", str(folder)))
    weights = HfWeights(folder)
    with written_to("OUT"):
        sources = _checked_sources(weights, recipe.model)
        _require_finite(weights, sources)
        shapes = parameter_shapes(recipe.model)
        with drafted(output, _publish) as draft:
            _copy(tokenizer_files(folder), draft / TOKENIZER)
            values = partial(_value, weights, {f"model.{each.entry.ours}": each for each in sources}, shapes)
            yaml, root = as_yaml(recipe), draft / CHECKPOINTS
            pieces = {name: Piece.whole(tensor) for name, tensor in _without_memory(shapes).items()}
            checkpoint = save_checkpoint(root, step=0, pieces=pieces, state=state, recipe_yaml=yaml, values=values)
            write_atomically(draft / _RECIPE, yaml)
            proof = _proof(checkpoint, folder, recipe) if with_proof else Proof(False, "--no-proof")
    at = output / CHECKPOINTS / checkpoint.name
    return Imported(recipe, at, len(sources), recipe.tokenizer is not None, proof)


def _proof(checkpoint: Path, folder: Path, recipe: Recipe) -> Proof:
    """DataError if transformers computes something else; there are folders that only we can read."""
    reason = why_unproven(recipe)
    try:
        proof = Proof(False, reason) if reason else prove_import(checkpoint, folder)
    except Exception as error:  # whatever transformers may raise
        return Proof(False, f"transformers cannot load or run the folder: {type(error).__name__}: {error}")
    if proof.limit is not None and not proof.proven:
        rule = "its logits and its loss must be ours to rounding"
        remedy = "remove overrides of `model`, or report it as a bug; --no-proof imports it as it is"
        raise DataError(Problem(f"transformers computes something else: {proof}", rule, remedy, str(folder)))
    return proof


def _require_new(output: Path) -> None:
    require_empty(output, "an import is the beginning of a run and replaces nothing")


def _publish(draft: Path, output: Path) -> None:
    """With the recipe, by which the folder is a run, last."""
    _require_new(output)  # still
    move_all(draft, output, last=_RECIPE)


def _check_tokenizer(folder: Path, vocab_size: int) -> None:
    """DataError if the folder's tokenizer could not be trained with: better now than after the import."""
    if not tokenizer_files(folder):
        return
    remedy = "mend it, or import a copy of the folder without it and name one with tokenizer.path=..."
    try:
        found = Tokenizer.load(str(folder)).vocab_size
        read_settings(str(folder))
    except DataError as error:
        raise DataError([*error.problems, Problem(f"the tokenizer of {folder} cannot be used", "", remedy)]) from error
    if found > vocab_size:
        what = f"the tokenizer has {found} entries but vocab_size is {vocab_size}"
        raise DataError(Problem(what, "every token needs a row of the embedding", remedy, str(folder)))


def _checked_sources(weights: HfWeights, config: ModelSection) -> list[Source]:
    odd = [f"{name} is {dtype}" for name, dtype in weights.dtypes.items() if dtype not in (*_WEIGHTS, *_BUFFERS)]
    if odd:
        what = f"{len(odd)} tensors are of another kind: {', '.join(odd[:5])}"
        remedy = "import the model as it was before it was quantized or converted"
        raise DataError(Problem(what, "weights must be fp32, bf16 or fp16", remedy, str(weights.folder)))
    sources = sources_of(weights.shapes, config)
    unused = unused_tensors(weights.shapes, sources, config)
    if unused:
        what = f"{len(unused)} tensors have no place in a {config.family} model: {', '.join(unused[:5])}"
        remedy = "import a plain model of this family, or save this one again without them"
        raise DataError(Problem(what, "without them it would compute something else", remedy, str(weights.folder)))
    whole = [key for each in sources for key in each.keys if weights.dtypes[key] in _BUFFERS]
    if whole:
        what = f"{len(whole)} weights are whole numbers: {', '.join(whole[:5])}"
        raise DataError(
            Problem(what, "weights must be fp32, bf16 or fp16", "import another model", str(weights.folder))
        )
    return sources


def _require_finite(weights: HfWeights, sources: Sequence[Source]) -> None:
    keys = dict.fromkeys(key for each in sources for key in each.keys)
    wrong = [key for key in keys if not bool(weights.read(key).isfinite().all())]
    if wrong:
        what = f"{len(wrong)} tensors hold values that are not finite: {', '.join(wrong[:5])}"
        rule = "a model with NaN or infinity computes nothing, and no training mends it"
        raise DataError(Problem(what, rule, "import a model that has not diverged", str(weights.folder)))


def _without_memory(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Tensor]:
    """All tensors of a first checkpoint, as shapes: weights, moments, and the optimizer's steps."""
    with torch.device("meta"):
        made = {f"model.{name}": torch.empty(shape) for name, shape in shapes.items()}
        made |= {f"optim.{name}.{part}": torch.empty(s) for name, s in shapes.items() for part in _MOMENTS}
        return {"optim.step": torch.empty(()), **made}


def _value(
    weights: HfWeights, sources: Mapping[str, Source], shapes: Mapping[str, tuple[int, ...]], name: str
) -> Tensor:
    """A tensor of the first checkpoint."""
    if name in sources:
        return sources[name].load(weights.read).to(torch.float32)
    moment_of = name.removeprefix("optim.").rpartition(".")[0]
    return torch.zeros(shapes.get(moment_of, ()))


def _copy(files: Sequence[Path], place: Path) -> None:
    if files:
        make_folder(place)
    for path in files:
        with writing(place / path.name):
            write_atomically(place / path.name, read_small(path, LARGE_BYTES))
