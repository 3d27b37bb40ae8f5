"""Load a checkpoint: its state, its recipe, and its tensors, into the given pieces or whole."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from bloomery.base.bounded import read_json
from bloomery.base.energy import Energy
from bloomery.base.errors import DataError, Problem, RecipeError
from bloomery.base.piece import Piece
from bloomery.base.ranks import ALONE, Ranks, agreed
from bloomery.checkpoint.format import ANOTHER, RECIPE, STATE, Box, SavedPiece, SavedTensor, read_index, read_manifest
from bloomery.checkpoint.tensor_file import DTYPES, TensorFile, TensorFiles
from bloomery.checkpoint.verify import verify
from bloomery.config.load import load_recipe
from bloomery.config.recipe import Recipe
from bloomery.data.tokenizer import Tokenizer, is_other_tokenizer
from bloomery.model.transformer import build_model
from bloomery.sizing.schedule import History, TrainingPlan

_LARGEST_COUNT = 10**18


def read_state(folder: Path) -> dict[str, Any]:
    """What the training loop saved beside the tensors. DataError if it is not that."""
    with using_state(folder):
        facts: dict[str, Any] = read_json(folder / STATE)
        if not isinstance(facts, dict) or _has_absurd_counts(facts):
            raise ValueError(f"it must be an object whose whole numbers are from 0 to {_LARGEST_COUNT:,}")
        if {type(facts[name]) for name in ("step", "consumed_samples")} != {int}:
            raise ValueError("step and consumed_samples must be whole numbers")
        Energy.from_json(facts.get("energy"))
        dict(facts.get("imported_from") or {})
    return facts


@contextmanager
def using_state(place: Path | str = "") -> Iterator[None]:
    """Any value of state.json may be anything: an error that comes of it is reported as one of the file."""
    try:
        yield
    except (OSError, ArithmeticError, LookupError, TypeError, ValueError, AttributeError) as error:
        what = f"{STATE} cannot be used: {type(error).__name__}: {error}"[:500]
        raise DataError(Problem(what, "", ANOTHER, str(place))) from error


def _has_absurd_counts(value: Any) -> bool:
    if isinstance(value, dict | list):
        return any(map(_has_absurd_counts, value.values() if isinstance(value, dict) else value))
    return type(value) is int and not 0 <= value <= _LARGEST_COUNT


def read_recipe_of(folder: Path) -> Recipe:
    """The recipe this checkpoint was trained with. DataError if this version cannot read it."""
    try:
        recipe = load_recipe(str(folder / RECIPE), is_saved=True).recipe
    except RecipeError as error:
        raise DataError(error.problems) from error
    assert recipe is not None
    return recipe


def consumed_tokens(recipe: Recipe, state: Mapping[str, Any]) -> int:
    """Tokens that the training of this checkpoint has taken, whatever sequence lengths it has had."""
    with using_state():
        plan = TrainingPlan.of(recipe, History.from_json(state.get("history")))
        return plan.tokens_at(state["consumed_samples"])


class CheckpointReader:
    """A checkpoint as a set of tensors, each read when it is needed. Holds the index and some open files."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.tensors: dict[str, SavedTensor] = read_index(folder)
        self._files = TensorFiles(folder)

    def read(self, name: str) -> Tensor:
        """The whole tensor, however it was cut. DataError if it is not there."""
        saved = self.tensors.get(name)
        if saved is None:
            raise DataError(Problem(f"{name} is not in the checkpoint", place=str(self.folder)))
        whole = Piece.whole(torch.empty(saved.shape, dtype=DTYPES[saved.dtype]))
        for part in saved.pieces:
            _copy(self._files.open(part.file).view(part.key, part.size), part, whole)
        return whole.tensor


def load_pieces(folder: Path, pieces: Mapping[str, Piece], *, ranks: Ranks = ALONE) -> None:
    """Fill the given pieces in place, however the checkpoint was cut; read no more than they need.

    Other tensors in the checkpoint are not touched. DataError names everything that does not fit. All ranks call it:
    what lies only on the disk of another node is broadcast from there, one tensor at a time.
    """
    with agreed(ranks):
        parts = _parts(read_index(folder), folder, pieces)
        here = {file for file in parts if ranks is ALONE or (folder / file).exists()}
        for file in sorted(here):
            source = TensorFile(folder / file)
            for part, piece in parts[file]:
                _copy(source.view(part.key, part.size), part, piece)
    lacking = {(file, part.key): (part, piece) for file in parts.keys() - here for part, piece in parts[file]}
    wanted = sorted({each for found in ranks.gather(list(lacking)) for each in found})
    files = {file for file, _ in wanted}
    holders: list[set[str]] = ranks.gather({file for file in files if (folder / file).exists()})
    for file, key in wanted:
        sender = next(rank for rank, held in enumerate(holders) if file in held)  # `damage` has found one
        values = TensorFile(folder / file).view(key).clone() if sender == ranks.rank else None
        values = ranks.broadcast(values, sender)
        if (file, key) in lacking:
            _copy(values, *lacking[file, key])


def _parts(
    saved: Mapping[str, SavedTensor], folder: Path, pieces: Mapping[str, Piece]
) -> dict[str, list[tuple[SavedPiece, Piece]]]:
    """By file, what must be copied from it into which piece."""
    wanted = {name: piece for name, piece in pieces.items() if prod(piece.shape)}
    problems = []
    for name, piece in wanted.items():
        shape = saved[name].shape if name in saved else None
        if shape != tuple(piece.shape):
            found = "not" if shape is None else shape
            what = f"{name} is {found} in the checkpoint and {tuple(piece.shape)} in the recipe"
            problems.append(Problem(what, place=str(folder)))
    if problems:
        what = "the checkpoint does not fit this recipe"
        raise DataError([*problems, Problem(what, remedy="use the recipe it came from")])
    parts: dict[str, list[tuple[SavedPiece, Piece]]] = {}
    for name, piece in wanted.items():
        for part in saved[name].pieces:
            if part.meet(Box.of(piece)) is not None:
                parts.setdefault(part.file, []).append((part, piece))
    return parts


@torch.no_grad()
def _copy(values: Tensor, part: SavedPiece, piece: Piece) -> None:
    """What the saved part, of which these are the values, and the piece have in common."""
    box = Box.of(piece)
    shared = part.meet(box)
    assert shared is not None
    piece.tensor.detach()[shared.slices_of(box)].copy_(values[shared.slices_of(part)])


def load_model(folder: Path, *, device: torch.device) -> tuple[Recipe, nn.Module]:
    """The recipe and its model with the checkpoint's fp32 weights, ready to evaluate."""
    verify(folder)
    recipe = read_recipe_of(folder)
    model = build_model(recipe.model)
    model.to_empty(device=device)
    model.tie_weights()
    model.rebuild_buffers(device)
    load_pieces(folder, {f"model.{name}": Piece.whole(parameter.data) for name, parameter in model.named_parameters()})
    return recipe, model.eval()


def tokenizer_of(folder: Path, recipe: Recipe, path: str | None = None) -> Tokenizer:
    """The tokenizer at `path`, else the recipe's; the one that this checkpoint was trained with, or DataError."""
    where = path or (recipe.tokenizer.path if recipe.tokenizer else None)
    if where is None:
        raise DataError(Problem("the recipe names no tokenizer", remedy="give one with --tokenizer"))
    tokenizer = Tokenizer.load(where)
    if tokenizer.vocab_size > recipe.model.vocab_size:
        what = (
            f"the tokenizer has {tokenizer.vocab_size} entries but the model's vocabulary is {recipe.model.vocab_size}"
        )
        raise DataError(Problem(what, remedy="give the one it was trained with, with --tokenizer", place=where))
    trained_with: str | None = read_manifest(folder).get("tokenizer")
    if trained_with is not None and is_other_tokenizer(trained_with, tokenizer.content_hash):
        own, other = tokenizer.content_hash[:12], trained_with[:12]
        what = f"the tokenizer has the hash {own}, but {folder.name} was trained with {other}"
        rule = "with another one its tokens would mean other texts"
        raise DataError(Problem(what, rule, "give the one it was trained with, with --tokenizer", where))
    return tokenizer
