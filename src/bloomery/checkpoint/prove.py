"""Whether a checkpoint can be what it says: index, headers of tensor files, and recipe, before anything is built.

Hashes find damage. They do not find what somebody has changed who also wrote new hashes.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from itertools import islice
from math import prod
from pathlib import Path
from typing import Any

from bloomery.base.errors import BloomeryError, DataError, first_few
from bloomery.checkpoint.index import INDEX, Kind, SavedTensor, read_index
from bloomery.checkpoint.manifest import MANIFEST, RECIPE
from bloomery.checkpoint.parts import is_part
from bloomery.checkpoint.tensor_file import DTYPES, TensorFile
from bloomery.config.load import load_recipe
from bloomery.config.recipe import ModelSection
from bloomery.sizing.parameters import model_shapes, padded_vocab_size


def contradictions(folder: Path, manifest: Mapping[str, Any], *, read: Collection[str], recipe: bool) -> list[str]:
    """What cannot be; nothing if all fits. `read`: the files whose headers are compared with the index. `recipe`:
    compare the tensors with those that the checkpoint's own recipe needs."""
    try:
        tensors = read_index(folder)
        files: dict[str, dict[str, Kind]] = {}
        for tensor in tensors.values():
            for piece in tensor.pieces:
                files.setdefault(piece.file, {})[piece.key] = tensor.dtype, piece.box.size
        if unlisted := sorted(files.keys() - set(filter(is_part, manifest["files"]))):
            return [f"{MANIFEST} does not list {name}" for name in unlisted]
        small = [name for name, kinds in files.items() if _bytes(kinds) > manifest["files"][name]["bytes"]]
        if small:
            return [f"{name} is too small for what {INDEX} says of it" for name in small]
        for name in filter(is_part, read):
            if (kinds := TensorFile(folder / name).kinds()) != files.get(name, {}):
                odd = sorted(dict(kinds.items() ^ files.get(name, {}).items()))
                return [f"{name} does not hold what {INDEX} says: {first_few(odd)}"]
        return _misfits(folder, tensors) if recipe else []
    except DataError as error:
        return [problem.what for problem in error.problems]


def _bytes(kinds: Mapping[str, Kind]) -> int:
    return sum(prod(shape) * DTYPES[dtype].itemsize for dtype, shape in kinds.values())


def _misfits(folder: Path, tensors: Mapping[str, SavedTensor]) -> list[str]:
    if not any(name.startswith("model.") for name in tensors):
        return []  # of something else, such as the gradients of a trial
    try:
        made = load_recipe(str(folder / RECIPE), is_saved=True).recipe
    except BloomeryError as error:
        return [f"{RECIPE} cannot be used: {problem.what}" for problem in error.problems]
    assert made is not None
    needed = dict(islice(_tensors_of(made.model), len(tensors) + 1))  # one more shows that there are too few
    if missing := [name for name in needed if name not in tensors]:
        return [f"{INDEX} lacks {first_few(missing)}"]
    if unknown := sorted(tensors.keys() - needed.keys()):
        return [f"{INDEX} has tensors that the model does not: {first_few(unknown)}"]
    said = {name: (tensor.dtype, tensor.shape) for name, tensor in tensors.items()}
    return [
        f"{name} is {said[name]} in {INDEX} and {kind} in {RECIPE}"
        for name, kind in needed.items()
        if said[name] != kind
    ]


def _tensors_of(model: ModelSection) -> Iterator[tuple[str, Kind]]:
    """What a training of this model saves."""
    yield "optim.step", ("F32", ())
    for weight in model_shapes(model, vocab_size=padded_vocab_size(model), num_layers=model.num_layers):
        for layer in range(weight.count):
            name = weight.name.replace("layers.0.", f"layers.{layer}.", 1)
            for full in (f"model.{name}", f"optim.{name}.exp_avg", f"optim.{name}.exp_avg_sq"):
                yield full, ("F32", weight.shape)
