"""Load a checkpoint: its state, its recipe, and its tensors, into the given pieces or whole."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from itertools import islice
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from bloomery.base.bounded import LARGE_BYTES, open_regular, read_json, read_small
from bloomery.base.errors import BloomeryError, DataError, Problem, RecipeError, first_few
from bloomery.base.ranks import ALONE, Piece, Ranks, agreed
from bloomery.base.storage import reason
from bloomery.base.units import Energy
from bloomery.checkpoint.folder import complete_checkpoints, is_step_name, step_of
from bloomery.checkpoint.format import (
    ANOTHER,
    DTYPES,
    INDEX,
    MANIFEST,
    PARTS,
    RECIPE,
    STATE,
    Box,
    Kind,
    SavedPiece,
    SavedTensor,
    TensorFile,
    TensorFiles,
    is_tensor_file,
    parse_manifest,
    read_index,
    read_manifest,
)
from bloomery.config.load import load_recipe
from bloomery.config.recipe import ModelSection, Recipe
from bloomery.data.tokenizer import Tokenizer, is_other_tokenizer
from bloomery.model.transformer import build_model
from bloomery.sizing.parameters import model_shapes, padded_vocab_size
from bloomery.sizing.schedule import History, TrainingPlan

_LARGEST_COUNT = 10**18


def read_state(folder: Path) -> dict[str, Any]:
    """What the training loop saved beside the tensors. DataError if it is not that."""
    with using_state(folder):
        facts: dict[str, Any] = read_json(folder / STATE)
        if not isinstance(facts, dict) or _has_absurd_counts(facts):
            raise ValueError(f"it must be an object whose integers are from 0 to {_LARGEST_COUNT:,}")
        if {type(facts[name]) for name in ("step", "consumed_samples")} != {int}:
            raise ValueError("step and consumed_samples must be integers")
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


# ---------------------------------------------------------------- verify

_LARGE_BYTES = 2**20


def verify(folder: Path, *, ranks: Ranks = ALONE, tensors: bool = True) -> None:
    """DataError names every file that is missing, short or changed. All ranks call it, and all return or raise."""
    found = damage(folder, ranks=ranks, tensors=tensors)
    if found:
        others = [path for path in complete_checkpoints(folder.parent) if path != folder]
        usable = [path.name for path in others if not damage(path, tensors=False)]
        remedy = f"use another one, `bloomery train` with --from: {', '.join(usable) or 'there is no other'}"
        problems = [Problem(text, place=str(folder)) for text in found]
        raise DataError([*problems, Problem(f"checkpoint {folder.name} cannot be used", "", remedy, str(folder))])


def damage(folder: Path, *, ranks: Ranks = ALONE, tensors: bool = True, quick: bool = False) -> list[str]:
    """Why a checkpoint cannot be used; nothing if it is complete, unchanged and of this version's format.

    All ranks call it: each reads its share, all return the same. `tensors`: read the tensor files too, and compare
    them with index and recipe; without it only their sizes are checked, of those on this node. `quick`: for very many
    checkpoints, sizes only also for other large files, and no comparison with the index.
    """
    manifest: dict[str, Any] | str = ranks.broadcast(_manifest_or_damage(folder) if ranks.rank == 0 else "")
    if isinstance(manifest, str):
        return [manifest]
    share, nowhere = _shares(manifest, ranks)
    found = [f"{name} is on none of the nodes" for name in nowhere if tensors]
    for name in share:
        facts = manifest["files"][name]
        is_read = tensors or not (is_tensor_file(name) or (quick and facts["bytes"] > _LARGE_BYTES))
        found.append(_damage(folder / name, facts, read=is_read))
    everywhere = sorted({text for texts in ranks.gather(found) for text in texts if text})
    if everywhere or quick:
        return everywhere
    wrong = _contradictions(folder, manifest, read=share if tensors else (), recipe=tensors and ranks.rank == 0)
    return sorted({text for texts in ranks.gather(wrong) for text in texts})


def _manifest_or_damage(folder: Path) -> dict[str, Any] | str:
    try:
        manifest = parse_manifest(read_small(folder / MANIFEST, LARGE_BYTES))
    except FileNotFoundError:
        return f"{MANIFEST} is missing"
    except (OSError, ValueError) as error:
        return f"{MANIFEST} cannot be used: {error}"
    if is_step_name(folder.name) and manifest["step"] != step_of(folder):
        return f"its manifest is of step {manifest['step']}: the folder was copied or renamed"
    return manifest


def _shares(manifest: Mapping[str, Any], ranks: Ranks) -> tuple[list[str], list[str]]:
    """(files that this rank should read, those on no node at all). Collective: every file is read by one rank that has
    it."""
    names = sorted(manifest["files"])
    if manifest.get(PARTS) is None:
        return names[ranks.rank :: ranks.size], []
    try:
        here = set(os.listdir(manifest[PARTS]))
    except OSError:
        here = set()
    seen: list[set[str]] = ranks.gather(here)
    readers = {
        name: [rank for rank, found in enumerate(seen) if name in found] if is_tensor_file(name) else [0]
        for name in names
    }
    mine = [
        name for i, name in enumerate(names) if readers[name] and readers[name][i % len(readers[name])] == ranks.rank
    ]
    return mine, [name for name in names if not readers[name]]


def _damage(path: Path, expected: dict[str, Any], *, read: bool) -> str:
    """What is wrong with a file; empty if nothing is."""
    try:
        with open(path, "rb", opener=open_regular) as file:
            size = os.fstat(file.fileno()).st_size
            if size != expected["bytes"]:
                return f"{path.name} has {size:,} bytes instead of {expected['bytes']:,}"
            same = not read or hashlib.file_digest(file, "sha256").hexdigest() == expected["sha256"]
    except FileNotFoundError:
        return f"{path.name} is missing"
    except OSError as error:
        return f"{path.name} cannot be read: {reason(error)}"
    return "" if same else f"{path.name} has been changed since it was saved"


def _contradictions(folder: Path, manifest: Mapping[str, Any], *, read: Collection[str], recipe: bool) -> list[str]:
    """`read`: the files whose headers are compared with the index. `recipe`: compare the tensors with those that the
    checkpoint's own recipe needs."""
    try:
        tensors = read_index(folder)
        files: dict[str, dict[str, Kind]] = {}
        for tensor in tensors.values():
            for piece in tensor.pieces:
                files.setdefault(piece.file, {})[piece.key] = tensor.dtype, piece.size
        if unlisted := sorted(files.keys() - set(filter(is_tensor_file, manifest["files"]))):
            return [f"{MANIFEST} does not list {first_few(unlisted)}"]
        small = [name for name, kinds in files.items() if _bytes(kinds) > manifest["files"][name]["bytes"]]
        if small:
            return [f"{name} is smaller than {INDEX} records" for name in small]
        for name in filter(is_tensor_file, read):
            if (kinds := TensorFile(folder / name).kinds()) != files.get(name, {}):
                odd = sorted(dict(kinds.items() ^ files.get(name, {}).items()))
                return [f"{name} does not match {INDEX}: {first_few(odd)}"]
        return _misfits(folder, tensors) if recipe else []
    except DataError as error:
        return [problem.what for problem in error.problems]


def _bytes(kinds: Mapping[str, Kind]) -> int:
    return sum(prod(shape) * DTYPES[dtype].itemsize for dtype, shape in kinds.values())


def _misfits(folder: Path, tensors: Mapping[str, SavedTensor]) -> list[str]:
    if not any(name.startswith("model.") for name in tensors):
        return []  # of something else, such as the gradients of a trace
    try:
        recipe = load_recipe(str(folder / RECIPE), is_saved=True).recipe
    except BloomeryError as error:
        return [f"{RECIPE} cannot be used: {problem.what}" for problem in error.problems]
    needed = dict(islice(_tensors_of(recipe.model), len(tensors) + 1))  # one more shows that there are too few
    if missing := [name for name in needed if name not in tensors]:
        return [f"{INDEX} lacks {first_few(missing)}"]
    if unknown := sorted(tensors.keys() - needed.keys()):
        return [f"{INDEX} has tensors that the model does not: {first_few(unknown)}"]
    wrong = [name for name, kind in needed.items() if tensors[name].kind != kind]
    return [f"{name} is {tensors[name].kind} in {INDEX} and {needed[name]} in {RECIPE}" for name in wrong]


def _tensors_of(model: ModelSection) -> Iterator[tuple[str, Kind]]:
    """What a training of this model saves."""
    yield "optim.step", ("F32", ())
    for weight in model_shapes(model, vocab_size=padded_vocab_size(model), num_layers=model.num_layers):
        for layer in range(weight.count):
            name = weight.name.replace("layers.0.", f"layers.{layer}.", 1)
            for full in (f"model.{name}", f"optim.{name}.exp_avg", f"optim.{name}.exp_avg_sq"):
                yield full, ("F32", weight.shape)
