"""Whether a checkpoint can be used: every file as it was saved, and index, tensor files and recipe fit each other.

Hashes find damage. They do not find what somebody has changed who also wrote new hashes, so the contents are compared
too, before anything is built.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Collection, Iterator, Mapping
from itertools import islice
from math import prod
from pathlib import Path
from typing import Any

from bloomery.base.bounded import LARGE_BYTES, open_regular, read_small
from bloomery.base.errors import BloomeryError, DataError, Problem, first_few
from bloomery.base.ranks import ALONE, Ranks
from bloomery.base.storage import reason
from bloomery.checkpoint.folder import complete_checkpoints, is_step_name, step_of
from bloomery.checkpoint.format import (
    INDEX,
    MANIFEST,
    PARTS,
    RECIPE,
    Kind,
    SavedTensor,
    is_tensor_file,
    parse_manifest,
    read_index,
)
from bloomery.checkpoint.tensor_file import DTYPES, TensorFile
from bloomery.config.load import load_recipe
from bloomery.config.recipe import ModelSection
from bloomery.sizing.parameters import model_shapes, padded_vocab_size

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
        return f"its manifest says step {manifest['step']}: the folder was copied or renamed"
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
            return [f"{name} is too small for what {INDEX} says of it" for name in small]
        for name in filter(is_tensor_file, read):
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
        return []  # of something else, such as the gradients of a trace
    try:
        recipe = load_recipe(str(folder / RECIPE), is_saved=True).recipe
    except BloomeryError as error:
        return [f"{RECIPE} cannot be used: {problem.what}" for problem in error.problems]
    assert recipe is not None
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
