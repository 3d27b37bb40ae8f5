"""Read a checkpoint: `read_checkpoint` proves that it is whole and as it was saved; what it returns knows its manifest,
index, recipe and state, and gives its tensors, whole or into pieces."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property, lru_cache, partial
from itertools import islice
from math import prod
from pathlib import Path
from typing import Any

import torch
from pydantic import TypeAdapter, ValidationError
from safetensors import SafetensorError, safe_open
from torch import Tensor

from bloomery.base.bounded import LARGE_BYTES, open_regular, parse_json, read_small, wrong_fields
from bloomery.base.doing import Doing, doing
from bloomery.base.errors import DataError, Problem, RecipeError, first_few
from bloomery.base.ranks import ALONE, Piece, Ranks, agreed, first_rank_does
from bloomery.base.units import Energy
from bloomery.checkpoint.folder import (
    ANOTHER,
    INDEX,
    MANIFEST,
    RECIPE,
    STATE,
    damage_error,
    file_damage,
    is_tensor_file,
    read_manifest,
)
from bloomery.checkpoint.format import DTYPES, Box, Kind, SavedPiece, SavedTensor, not_whole
from bloomery.config.load import load_recipe
from bloomery.config.recipe import ModelSection, Recipe
from bloomery.data.tokenizer import Tokenizer, is_other_tokenizer
from bloomery.model.transformer import Transformer, build_model, materialise
from bloomery.sizing.parameters import parameter_shapes

_LARGEST_COUNT = 10**18
_MOST_OPEN_FILES = 128
_TENSORS = TypeAdapter(dict[str, SavedTensor])


@dataclass(frozen=True)
class Checkpoint:
    """A folder whose manifest and index are sound. From `read_checkpoint`: whose files are as they were saved."""

    folder: Path
    manifest: dict[str, Any]
    tensors: dict[str, SavedTensor]

    @cached_property
    def recipe(self) -> Recipe:
        """That it was trained with. DataError if this version cannot read it."""
        try:
            return load_recipe(str(self.folder / RECIPE), is_saved=True).recipe
        except RecipeError as error:
            found = [(f"{RECIPE} cannot be used: {each.what}", each.place) for each in error.problems]
            raise DataError([Problem(what, place=place) for what, place in found]) from error

    @cached_property
    def state(self) -> dict[str, Any]:
        """What the training loop saved beside the tensors. DataError if it is not that."""
        with self.using_state():
            facts: dict[str, Any] = parse_json(read_small(self.folder / STATE))
            if not isinstance(facts, dict) or _has_absurd_counts(facts):
                raise ValueError(f"it must be an object whose integers are from 0 to {_LARGEST_COUNT:,}")
            if {type(facts[name]) for name in ("step", "consumed_samples")} != {int}:
                raise ValueError("step and consumed_samples must be integers")
            Energy.from_json(facts.get("energy"))
            dict(facts.get("imported_from") or {})
        return facts

    @contextmanager
    def using_state(self) -> Iterator[None]:
        """Any value of state.json may be anything: an error that comes of it is reported as one of the file."""
        try:
            yield
        except (OSError, ArithmeticError, LookupError, TypeError, ValueError, AttributeError) as error:
            plain = wrong_fields(error) if isinstance(error, ValidationError) else f"{type(error).__name__}: {error}"
            raise damage_error(self.folder, f"{STATE} cannot be used: {plain}"[:500]) from error

    @property
    def consumed_tokens(self) -> int:
        """Tokens that its training has taken, whatever sequence lengths it has had; 0 of an imported model."""
        return int(self.manifest.get("consumed_tokens") or 0)

    @cached_property
    def _files(self) -> TensorFiles:
        return TensorFiles(self.folder)

    def read(self, name: str) -> Tensor:
        """The whole tensor, however it was cut. DataError if it is not there."""
        saved = self.tensors.get(name)
        if saved is None:
            raise DataError(Problem(f"{name} is not in the checkpoint", place=str(self.folder)))
        whole = Piece.whole(torch.empty(saved.shape, dtype=DTYPES[saved.dtype]))
        for part in saved.pieces:
            part.copy(self._files.open(part.file).view(part.key, part.size), whole)
        return whole.tensor


Check = Callable[[Checkpoint], object] | None
"""Raises DataError or RecipeError for a checkpoint whose recipe or state cannot be used."""


@dataclass(frozen=True)
class Choice:
    """What a start resumes from."""

    checkpoint: Checkpoint | None = None
    """None: there is none, so the run starts from the beginning."""
    damaged: Mapping[Path | str, list[str]] = field(default_factory=dict)
    """Those that cannot be used, by path or URL, and why: newer ones, and any that have lost their manifest. Not moved
    yet, except one whose name a fetched copy took."""
    fetched_from: str = ""
    """The URL of the remote place, if it comes from one."""
    put_aside: str = ""
    """The new name of the damaged local checkpoint whose name it took; empty if there was none."""


def _has_absurd_counts(value: Any) -> bool:
    if isinstance(value, dict | list):
        return any(map(_has_absurd_counts, value.values() if isinstance(value, dict) else value))
    return type(value) is int and not 0 <= value <= _LARGEST_COUNT


# ---------------------------------------------------------------- read and prove


def read_checkpoint(folder: Path, *, ranks: Ranks = ALONE, tensors: bool = True, check: Check = None) -> Checkpoint:
    """DataError names all that is missing, short, changed or contradicts the rest. All ranks call it: each reads its
    share, and all return or raise. `tensors`: at the end, read the tensor files too, and compare them with index and
    recipe; without it only their sizes are checked, of those on this node. `check`: before that, on rank 0, raises
    DataError or RecipeError for a recipe or a state that cannot be used."""
    with doing(f"verifying {folder}") as work:
        return _read_checkpoint(folder, ranks, tensors, check, work)


def _read_checkpoint(folder: Path, ranks: Ranks, tensors: bool, check: Check, work: Doing) -> Checkpoint:
    manifest = first_rank_does(ranks, partial(read_manifest, folder))  # another node may still see an older one
    files = manifest["files"]
    holders: list[set[str]] = ranks.gather({name for name in files if os.path.exists(folder / name)})
    readers = {name: [rank for rank, held in enumerate(holders) if name in held] for name in sorted(files)}
    mine = [name for i, (name, who) in enumerate(readers.items()) if who and who[i % len(who)] == ranks.rank]
    with agreed(ranks):
        wrong = [file_damage(folder / name, files[name], read=not is_tensor_file(name)) for name in mine]
        absent = {name: os.path.islink(folder / name) for name, who in readers.items() if not who}
        _refuse(folder, wrong + [f"{name} is missing" for name, is_link in absent.items() if not is_link])
    with agreed(ranks):
        checkpoint = Checkpoint(folder, manifest, read_index(folder))
        _refuse(folder, [_why_not_as_indexed(checkpoint)])
        if tensors and ranks.rank == 0 and any(name.startswith("model.") for name in checkpoint.tensors):
            _refuse(folder, [_why_not_of_its_recipe(checkpoint)])  # others: such as the gradients of a trace
        if check is not None and ranks.rank == 0:
            check(checkpoint)
    with agreed(ranks):
        read = [name for name in mine if tensors and is_tensor_file(name)]
        total = sum(files[name]["bytes"] for name in read)
        each = work.over(read, total, lambda name: files[name]["bytes"])
        wrong = [file_damage(folder / name, files[name], read=True) for name in each]  # hours, so it comes last
        _refuse(folder, wrong + [f"{name} is on none of the nodes" for name in absent if tensors])
        _refuse(folder, [_why_not_as_indexed(checkpoint, read)])
    return checkpoint


def _refuse(folder: Path, wrong: Iterable[str]) -> None:
    if found := list(filter(None, wrong)):
        raise damage_error(folder, *found)


def read_index(folder: Path) -> dict[str, SavedTensor]:
    """What the checkpoint holds, by name: every tensor whole, in boxes of its own. DataError if it is not so."""
    try:
        tensors = _TENSORS.validate_python(parse_json(read_small(folder / INDEX, LARGE_BYTES))["tensors"])
        if astray := [name for name, each in tensors.items() if any(piece.key != name for piece in each.pieces)]:
            raise ValueError(f"pieces of {astray[0]!r:.80} have another key")
        if problems := not_whole(tensors):
            raise ValueError("; ".join(problems[:10]))
        places = [(piece.file, piece.key) for tensor in tensors.values() for piece in tensor.pieces]
        if len(places) != len(set(places)):
            raise ValueError("two pieces overlap")
        return tensors
    except (OSError, ValueError, KeyError, TypeError) as error:
        why = wrong_fields(error) if isinstance(error, ValidationError) else f"{type(error).__name__}: {error}"
        raise damage_error(folder, f"{INDEX} cannot be read: {why:.1000}") from error


def _why_not_as_indexed(checkpoint: Checkpoint, read: Collection[str] = ()) -> str:
    """Where index, manifest and the headers of the tensor files `read` contradict each other."""
    listed: dict[str, dict[str, Kind]] = {name: {} for name in checkpoint.manifest["files"] if is_tensor_file(name)}
    for tensor in checkpoint.tensors.values():
        for piece in tensor.pieces:
            if piece.file not in listed:
                return f"{MANIFEST} does not list {piece.file}"
            listed[piece.file][piece.key] = tensor.dtype, piece.size
    for name, kinds in listed.items():
        num_bytes = sum(prod(shape) * DTYPES[dtype].itemsize for dtype, shape in kinds.values())
        if not 0 <= checkpoint.manifest["files"][name]["bytes"] - num_bytes <= LARGE_BYTES:  # that of the header
            return f"{name} has not the size that {INDEX} records"
    for name in read:
        if (found := TensorFile(checkpoint.folder / name).kinds()) != listed[name]:
            odd = sorted(dict(found.items() ^ listed[name].items()))
            return f"{name} does not match {INDEX}: {first_few(odd)}"
    return ""


def _why_not_of_its_recipe(checkpoint: Checkpoint) -> str:
    """Which tensors are not those that a training of its recipe saves."""
    tensors = checkpoint.tensors
    needed = dict(islice(saved_tensors(checkpoint.recipe.model), len(tensors) + 1))  # one more: there are too few
    if missing := [name for name in needed if name not in tensors]:
        return f"{INDEX} lacks {first_few(missing)}"
    if unknown := sorted(tensors.keys() - needed.keys()):
        return f"{INDEX} has tensors that the model does not: {first_few(unknown)}"
    wrong = [name for name, kind in needed.items() if tensors[name].kind != kind]
    return f"other in {INDEX} than in {RECIPE}: {first_few(wrong)}" if wrong else ""


def saved_tensors(model: ModelSection) -> Iterator[tuple[str, Kind]]:
    """What a training of this model saves."""
    yield "optim.step", ("F32", ())
    for name, shape in parameter_shapes(model):
        for full in (f"model.{name}", f"optim.{name}.exp_avg", f"optim.{name}.exp_avg_sq"):
            yield full, ("F32", shape)


# ---------------------------------------------------------------- tensors


class TensorFile:
    """A safetensors file, open for reading. DataError if it is not one: the library proves that the header is sane and
    that every byte belongs to exactly one tensor."""

    def __init__(self, path: Path, *, remedy: str = ANOTHER) -> None:
        """`remedy`: what to do about a file that cannot be read."""
        self.path = path
        self._remedy = remedy
        try:
            os.close(open_regular(path))
            self._file: Any = safe_open(path, framework="pt")
        except (OSError, ValueError, SafetensorError) as error:  # ValueError: a name that cannot be one
            raise self._damaged(str(error)) from error

    def kinds(self) -> dict[str, Kind]:
        """(dtype, shape) of every tensor."""
        slices = {name: self._file.get_slice(name) for name in self._file.keys()}  # noqa: SIM118 (no mapping)
        return {name: (found.get_dtype(), tuple(found.get_shape())) for name, found in slices.items()}

    def view(self, key: str, shape: tuple[int, ...] | None = None) -> Tensor:
        """A tensor, of this shape if one is given, as a view of the mapped file: it is read where it is used."""
        try:
            found = self._file.get_slice(key)
            if shape is None or tuple(found.get_shape()) == shape:
                values: Tensor = found[...]
                return values
        except (SafetensorError, ValueError, RuntimeError, AttributeError) as error:
            raise self._damaged(f"{key}: {error}") from error
        raise self._damaged(f"it holds no {key} of shape {shape}")

    def _damaged(self, why: str) -> DataError:
        what = f"{self.path.name} cannot be read: {why[:500]}"
        return DataError(Problem(what, "", self._remedy, str(self.path.parent)))


class TensorFiles:
    """Of one folder, opened when they are needed; some stay open."""

    def __init__(self, folder: Path, **options: str) -> None:
        self.open = lru_cache(_MOST_OPEN_FILES)(lambda name: TensorFile(folder / name, **options))


def load_pieces(checkpoint: Checkpoint, pieces: Mapping[str, Piece], *, ranks: Ranks = ALONE) -> None:
    """Fill the given pieces in place, however the checkpoint was cut; read no more than they need.

    Other tensors in the checkpoint are not touched. DataError names everything that does not fit. All ranks call it:
    what lies only on the disk of another node is broadcast from there, one tensor at a time.
    """
    folder = checkpoint.folder
    with agreed(ranks), doing(f"loading {folder}") as work:
        parts = _parts(checkpoint, pieces)
        here = {file for file in parts if ranks is ALONE or os.path.exists(folder / file)}
        total = sum(len(parts[file]) for file in here)
        for file in sorted(here):
            source = TensorFile(folder / file)
            for part, piece in work.over(parts[file], total):
                part.copy(source.view(part.key, part.size), piece)
    lacking = {(file, part.key): (part, piece) for file in parts.keys() - here for part, piece in parts[file]}
    wanted = sorted({each for found in ranks.gather(list(lacking)) for each in found})
    holders: list[set[str]] = ranks.gather({file for file, _ in wanted if os.path.exists(folder / file)})
    for file, key in wanted:
        sender = next(rank for rank, held in enumerate(holders) if file in held)  # read_checkpoint has found one
        values = TensorFile(folder / file).view(key).clone() if sender == ranks.rank else None
        values = ranks.broadcast(values, sender)
        if (file, key) in lacking:
            part, piece = lacking[file, key]
            part.copy(values, piece)


def _parts(checkpoint: Checkpoint, pieces: Mapping[str, Piece]) -> dict[str, list[tuple[SavedPiece, Piece]]]:
    """By file, what must be copied from it into which piece."""
    problems, parts = list[Problem](), dict[str, list[tuple[SavedPiece, Piece]]]()
    for name, piece in pieces.items():
        saved = checkpoint.tensors.get(name)
        if not prod(piece.shape):
            continue
        if saved is None or saved.shape != tuple(piece.shape):
            found = "not" if saved is None else saved.shape
            what = f"{name} is {found} in the checkpoint and {tuple(piece.shape)} in the recipe"
            problems.append(Problem(what, place=str(checkpoint.folder)))
            continue
        for part in saved.pieces:
            if part.meet(Box.of(piece)) is not None:
                parts.setdefault(part.file, []).append((part, piece))
    if problems:
        what = "the checkpoint does not fit this recipe"
        raise DataError([*problems, Problem(what, remedy="use the recipe it came from")])
    return parts


def load_model(checkpoint: Checkpoint, *, device: torch.device) -> Transformer:
    """The model of its recipe with its fp32 weights, ready to evaluate."""
    model = build_model(checkpoint.recipe.model)
    materialise(model, device)
    weights = {f"model.{name}": Piece.whole(parameter.data) for name, parameter in model.named_parameters()}
    load_pieces(checkpoint, weights)
    return model.eval()


def tokenizer_of(checkpoint: Checkpoint, path: str | None = None) -> Tokenizer:
    """The tokenizer at `path`, else the recipe's; the one that this checkpoint was trained with, or DataError."""
    recipe, remedy = checkpoint.recipe, "give the one it was trained with, with --tokenizer"
    where = path or (recipe.tokenizer.path if recipe.tokenizer else None)
    if where is None:
        raise DataError(Problem("the recipe names no tokenizer", remedy="give one with --tokenizer"))
    tokenizer = Tokenizer.load(where)
    tokenizer.check_fits(recipe.model.vocab_size, remedy)
    check_tokenizer(checkpoint, tokenizer.content_hash, remedy=remedy, place=where)
    return tokenizer


def check_tokenizer(checkpoint: Checkpoint, tokenizer_hash: str | None, *, remedy: str, place: str) -> None:
    """DataError if it is not the tokenizer that the checkpoint was trained with. Without a hash nobody knows."""
    then: str | None = checkpoint.manifest.get("tokenizer")
    if then and tokenizer_hash and is_other_tokenizer(then, tokenizer_hash):
        own, name = tokenizer_hash[:12], checkpoint.folder.name
        what = f"the tokenizer has the hash {own}, but {name} was trained with {then[:12]}"
        raise DataError(Problem(what, "with another one its tokens would mean other texts", remedy, place))
