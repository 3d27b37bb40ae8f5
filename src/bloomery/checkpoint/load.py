"""Read a checkpoint back: its state, its recipe, and its tensors straight into the ones you give."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
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
from bloomery.base.ranks import Ranks, agreed
from bloomery.checkpoint.folder import verify
from bloomery.checkpoint.index import SavedPiece, SavedTensor, box_of, read_index
from bloomery.checkpoint.manifest import STATE, read_manifest
from bloomery.checkpoint.tensor_file import TensorFile
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
    """What state.json says may be anything, in any of its values: an error that comes of it is one of the file."""
    try:
        yield
    except (OSError, ArithmeticError, LookupError, TypeError, ValueError, AttributeError) as error:
        what = f"{STATE} cannot be used: {type(error).__name__}: {error}"[:500]
        remedy = "use another checkpoint, `bloomery train` with --from"
        raise DataError(Problem(what, "", remedy, str(place))) from error


def _has_absurd_counts(value: Any) -> bool:
    if isinstance(value, dict | list):
        return any(map(_has_absurd_counts, value.values() if isinstance(value, dict) else value))
    return type(value) is int and not 0 <= value <= _LARGEST_COUNT


def read_recipe_of(folder: Path) -> Recipe:
    """The recipe this checkpoint was trained with. DataError if this version cannot read it."""
    try:
        recipe = load_recipe(str(folder / "recipe.yaml"), is_saved=True).recipe
    except RecipeError as error:
        raise DataError(error.problems) from error
    assert recipe is not None
    return recipe


def plan_of(recipe: Recipe, state: Mapping[str, Any]) -> TrainingPlan:
    """The plan that the training of this checkpoint followed."""
    with using_state():
        return TrainingPlan.of(recipe, History.from_json(state.get("history")))


def consumed_tokens(recipe: Recipe, state: Mapping[str, Any]) -> int:
    """Tokens that the training of this checkpoint has taken, whatever sequence lengths it has had."""
    with using_state():
        return plan_of(recipe, state).tokens_at(state["consumed_samples"])


def load_pieces(folder: Path, pieces: Mapping[str, Piece]) -> None:
    """Fill the given pieces in place, however the checkpoint was cut; read no more than they need. For one rank.

    Other tensors in the checkpoint are left alone. DataError names everything that does not fit.
    """
    _read(folder, _parts(read_index(folder), folder, pieces))


def load_on_all(folder: Path, pieces: Mapping[str, Piece], *, ranks: Ranks) -> None:
    """Fill the pieces of every rank, as `load_pieces`. All ranks call it: what lies on the disk of another node is sent
    from there, one tensor at a time."""
    with agreed(ranks):
        parts = _parts(read_index(folder), folder, pieces)
    here = {file for file in parts if (folder / file).exists()}
    with agreed(ranks):
        _read(folder, {file: parts[file] for file in here})
    lacking = {(file, part.key): (part, piece) for file in parts.keys() - here for part, piece in parts[file]}
    asked = sorted({each for told in ranks.gather(list(lacking)) for each in told})
    files = {file for file, _ in asked}
    holders: list[set[str]] = ranks.gather({file for file in files if (folder / file).exists()})
    for file, key in asked:
        sender = next(rank for rank, held in enumerate(holders) if file in held)  # `damage` has found one
        values = None
        if sender == ranks.rank:
            values = TensorFile(folder / file).view(key).clone()
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
        facts = saved.get(name)
        if facts is None:
            problems.append(Problem(f"{name} is not in the checkpoint", place=str(folder)))
        elif facts.shape != tuple(piece.shape):
            what = f"{name} is {facts.shape} in the checkpoint and {tuple(piece.shape)} in the recipe"
            problems.append(Problem(what, place=str(folder)))
    if problems:
        raise DataError(
            [*problems, Problem("the checkpoint does not fit this recipe", remedy="use the recipe it came from")]
        )
    parts: dict[str, list[tuple[SavedPiece, Piece]]] = {}
    for name, piece in wanted.items():
        for part in saved[name].pieces:
            if part.box.meet(box_of(piece)) is not None:
                parts.setdefault(part.file, []).append((part, piece))
    return parts


def _read(folder: Path, parts: Mapping[str, Sequence[tuple[SavedPiece, Piece]]]) -> None:
    for file, found in sorted(parts.items()):
        source = TensorFile(folder / file)
        for part, piece in found:
            _copy(source.view(part.key, part.box.size), part, piece)


@torch.no_grad()
def _copy(values: Tensor, part: SavedPiece, piece: Piece) -> None:
    """What the saved part, of which these are the values, and the piece have in common."""
    shared = part.box.meet(box_of(piece))
    assert shared is not None
    into = piece.tensor.detach()[tuple(map(slice, *shared.range_within(box_of(piece))))]
    into.copy_(values[tuple(map(slice, *shared.range_within(part.box)))])


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
