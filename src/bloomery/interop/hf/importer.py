"""A Hugging Face folder as the first checkpoint of a run: its weights, no steps done, moments that are zero."""

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bloomery.base.bounded import LARGE_BYTES, read_json, read_small
from bloomery.base.doing import doing
from bloomery.base.errors import DataError, Problem
from bloomery.base.ranks import Piece
from bloomery.base.storage import make_folder, write_atomically, writing, written_to
from bloomery.checkpoint.folder import CHECKPOINTS
from bloomery.checkpoint.load import Checkpoint, read_checkpoint, saved_tensors
from bloomery.checkpoint.save import save_checkpoint
from bloomery.config.load import as_yaml
from bloomery.config.recipe import ModelSection, Recipe
from bloomery.data.tokenizer import Tokenizer
from bloomery.data.tokenizer_files import FILES, read_settings, tokenizer_file
from bloomery.interop.hf.configs import model_section
from bloomery.interop.hf.folder import CHAT_TEMPLATE, CONFIG, HfWeights, move_all, require_empty, staged
from bloomery.interop.hf.maps import embedding_and_head, sources_of, unused_tensors
from bloomery.interop.hf.proof import Proof, prove_import, why_unproven

_TOKENIZER_FILES = (
    *FILES, "tokenizer_config.json", "special_tokens_map.json", "*vocab.json", "added_tokens.json", CHAT_TEMPLATE,
)  # fmt: skip
TOKENIZER = "tokenizer"
_RECIPE = "recipe.yaml"
_WEIGHTS = ("F32", "BF16", "F16")
_FREE = ("seq_length", "dropout")
"""Of the model: what a new training may choose. Learned positions still must fit."""
START = Path(__file__).with_name("start.yaml")
"""What a recipe must say and a config.json does not."""
Value = Callable[[str, tuple[int, ...]], Tensor]
"""A tensor of a checkpoint, by its name and shape."""


@dataclass(frozen=True)
class Imported:
    checkpoint: Path
    tensors: int
    proof: Proof


def read_model(folder: Path) -> dict[str, Any]:
    """The model of a Hugging Face folder as `model` of a recipe. DataError lists everything that is not supported."""
    path = folder / CONFIG
    try:
        content = read_json(path)
        if not isinstance(content, dict):
            raise ValueError("it is no JSON object")
    except (OSError, ValueError) as error:
        rule = "a Hugging Face folder has config.json and *.safetensors; one of the Hub is hf://org/name"
        raise DataError(Problem(f"{path} cannot be read: {error}", rule, "name another folder")) from error
    return model_section(content, str(path))


def origin_of(folder: Path, name: str) -> dict[str, str]:
    """What a card says of the model that a run began with."""
    content = read_small(folder / CONFIG)
    return {"folder": name, "sha256 of its config.json": hashlib.sha256(content).hexdigest()}


def tokenizer_files(folder: Path) -> list[Path]:
    """The folder's tokenizer; nothing if it has none."""
    if tokenizer_file(str(folder)) is None:
        return []
    return [path for pattern in _TOKENIZER_FILES for path in folder.glob(pattern) if path.is_file()]


def import_weights(
    folder: Path, output: Path, recipe: Recipe, state: Mapping[str, Any], *, with_proof: bool = True
) -> Imported:
    """Write `output`: the tokenizer, checkpoints/step-00000000, and the recipe last. `state`: that of a training which
    has done nothing. All is checked before the first byte, and one tensor at a time is in memory until the proof.

    DataError names everything in the folder that does not fit, or that the proof fails; StorageError if `output` holds
    something. After any error it is as it was.
    """
    _check_tokenizer(folder, recipe.model.vocab_size)
    sources, value = _checked_sources(HfWeights(folder), recipe.model)

    def prove(checkpoint: Checkpoint) -> Proof:
        return proven(checkpoint, folder) if with_proof else Proof(False, "--no-proof")

    made, proof = begin_run(output, recipe, state, value, prove, tokenizer=tokenizer_files(folder))
    return Imported(made, sources, proof)


def begin_run(
    output: Path,
    recipe: Recipe,
    state: Mapping[str, Any],
    value: Value,
    prove: Callable[[Checkpoint], Proof],
    *,
    tokenizer: Sequence[Path] = (),
    step: int = 0,
    facts: Mapping[str, Any] | None = None,
) -> tuple[Path, Proof]:
    """Write `output` as a run folder: the tokenizer, a checkpoint of tensors that come from elsewhere, and the recipe
    last, by which it is a run. StorageError if it holds something. After any error it is as it was."""
    rule = "an import is the beginning of a run folder and replaces nothing"
    require_empty(output, rule)

    def publish(staging: Path, output: Path) -> None:
        require_empty(output, rule)  # still
        move_all(staging, output, last=_RECIPE)

    with written_to("OUT"), staged(output, publish) as staging:
        for path in tokenizer:
            with writing(make_folder(staging / TOKENIZER) / path.name):
                write_atomically(staging / TOKENIZER / path.name, read_small(path, LARGE_BYTES))
        checkpoint = _save(staging / CHECKPOINTS, recipe, state, value, step=step, facts=facts)
        write_atomically(staging / _RECIPE, as_yaml(recipe))
        proof = prove(read_checkpoint(checkpoint))
    return output / CHECKPOINTS / checkpoint.name, proof


def import_into(folder: Path, run: Path, recipe: Recipe, state: Mapping[str, Any]) -> None:
    """Only checkpoints/step-00000000, for a run whose recipe begins with this folder. DataError names every field of
    the recipe's model that is not the folder's."""
    ours = recipe.model.model_dump()
    problems = [
        Problem(f"model.{name} is {ours[name]} but {folder} has {value}", "", f"use model.{name}={json.dumps(value)}")
        for name, value in read_model(folder).items()
        if name not in _FREE and ours[name] != value
    ]
    if problems:
        raise DataError(problems)
    _, value = _checked_sources(HfWeights(folder), recipe.model)

    def publish(staging: Path, _: Path) -> None:
        (run / CHECKPOINTS).mkdir(exist_ok=True)
        move_all(staging / CHECKPOINTS, run / CHECKPOINTS, last="")

    with written_to("--run-dir"), staged(run, publish) as staging:
        proven(read_checkpoint(_save(staging / CHECKPOINTS, recipe, state, value)), folder)


def _save(
    root: Path,
    recipe: Recipe,
    state: Mapping[str, Any],
    value: Value,
    *,
    step: int = 0,
    facts: Mapping[str, Any] | None = None,
) -> Path:
    """One tensor at a time."""
    shapes = {name: shape for name, (_, shape) in saved_tensors(recipe.model)}
    with torch.device("meta"):
        pieces = {name: Piece.whole(torch.empty(shape)) for name, shape in shapes.items()}
    with doing("converting the weights") as work:

        def counted(name: str) -> Tensor:
            work.share = (work.share or 0.0) + 1 / len(shapes)
            return value(name, shapes[name])

        return save_checkpoint(
            root, step=step, pieces=pieces, state=state, recipe_yaml=as_yaml(recipe), facts=facts, values=counted
        )


def proven(checkpoint: Checkpoint, folder: Path) -> Proof:
    """DataError if transformers computes something else; there are folders that only we can read."""
    if reason := why_unproven(checkpoint.recipe):
        return Proof(False, reason)
    try:
        with doing("verifying the import with transformers"):
            proof = prove_import(checkpoint, folder)
    except DataError:
        raise
    except Exception as error:  # whatever transformers may raise
        return Proof(False, f"transformers cannot load or run the folder: {type(error).__name__}: {error}")
    if not proof.proven:
        rule = "its logits and its loss must be ours to rounding"
        remedy = "remove overrides of `model`, or report it as a bug; --no-proof imports it as it is"
        raise DataError(Problem(f"transformers computes something else: {proof}", rule, remedy, str(folder)))
    return proof


def _check_tokenizer(folder: Path, vocab_size: int) -> None:
    """DataError if the folder's tokenizer could not be trained with: better now than after the import."""
    if not tokenizer_files(folder):
        return
    remedy = "fix it, or import a copy of the folder without it and name one with tokenizer.path=..."
    try:
        Tokenizer.load(str(folder)).check_fits(vocab_size, remedy)
        read_settings(str(folder))
    except DataError as error:
        raise DataError([*error.problems, Problem(f"the tokenizer of {folder} cannot be used", "", remedy)]) from error


def _checked_sources(weights: HfWeights, config: ModelSection) -> tuple[int, Value]:
    """How many parameters there are, and what gives each tensor of a checkpoint: moments are zero."""

    def refuse(wrong: Sequence[str], what: str, rule: str, remedy: str) -> None:
        if wrong:
            text = f"{len(wrong)} {what}: {', '.join(wrong[:5])}"
            raise DataError(Problem(text, rule, remedy, str(weights.folder)))

    sources = sources_of(weights.shapes, config)
    unused = unused_tensors(weights.shapes, sources, config)
    remedy = "import a plain model of this family, or save this one again without them"
    refuse(unused, f"tensors have no place in a {config.family} model", "it would compute something else", remedy)
    keys = list(dict.fromkeys(key for each in sources for key in each.keys))
    odd = [f"{key} is {weights.dtypes[key]}" for key in keys if weights.dtypes[key] not in _WEIGHTS]
    rule = "weights must be fp32, bf16 or fp16"
    refuse(odd, "tensors are of another kind", rule, "import the model as it was before it was quantized")
    infinite = [key for key in keys if not bool(weights.read(key).isfinite().all())]
    rule = "a model with NaN or infinity computes nothing, and no training repairs it"
    refuse(infinite, "tensors hold values that are not finite", rule, "import a model that has not diverged")
    if config.tie_embeddings and (pair := embedding_and_head(weights.shapes, config.family)):
        embedding, head = (weights.read(key) for key in pair)
        if embedding.shape != head.shape or not bool((embedding == head).all()):
            what, rule = f"{pair[1]} differs from {pair[0]}", "a tied model has one tensor for both"
            remedy = 'say "tie_word_embeddings": false in its config.json, as transformers 5 computes'
            raise DataError(Problem(what, rule, remedy, str(weights.folder)))
    entries = {f"model.{each.ours}": each for each in sources}

    def value(name: str, shape: tuple[int, ...]) -> Tensor:
        found = entries.get(name)
        return torch.zeros(shape) if found is None else found.loaded(weights.read).to(torch.float32)

    return len(entries), value
