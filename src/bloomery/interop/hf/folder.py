"""A Hugging Face folder on the disk: its safetensors files, read and written one tensor at a time, and the staging
folder in which an export or an import is written before it gets its name."""

import json
import os
import secrets
import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import torch
from torch import Tensor

from bloomery.base.bounded import LARGE_BYTES, read_json
from bloomery.base.errors import DataError, Problem, StorageError
from bloomery.base.storage import make_folder, remove_tree, sync_folder, write_atomically, writing
from bloomery.checkpoint.format import FileLayout, raw_bytes, write_file
from bloomery.checkpoint.load import TensorFiles

CONFIG, CHAT_TEMPLATE, PROOF_FILE = "config.json", "chat_template.jinja", "export-proof.json"
INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
_OWN = (
    CONFIG, "generation_config.json", "tokenizer.json", "tokenizer_config.json", CHAT_TEMPLATE, "README.md",
    PROOF_FILE, INDEX, SINGLE,
)  # fmt: skip
_STAGING = ".draft-"
_COPY_AGAIN = "copy the folder again"
Shapes = dict[str, tuple[int, ...]]


class HfWeights:
    """Holds headers and some open files, never the model. DataError if the files are not whole or not safetensors."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.dtypes: dict[str, str] = {}
        """As safetensors call them: `BF16`."""
        self.shapes: Shapes = {}
        self._places: dict[str, str] = {}
        self._files = TensorFiles(folder, remedy=_COPY_AGAIN)
        index, problems = _read_index(folder), []
        for file in sorted(set(index.values())) or [_single(folder)]:
            for name, (dtype, shape) in self._files.open(file).kinds().items():
                if name in self._places:
                    problems.append(Problem(f"{name} is in {self._places[name]} and in {file}", "", _COPY_AGAIN))
                self._places[name], self.dtypes[name], self.shapes[name] = file, dtype, shape
        astray = [name for name, file in index.items() if self._places.get(name) != file]
        if astray:
            what = f"{len(astray)} tensors are not in the file that {INDEX} names: {', '.join(astray[:5])}"
            problems.append(Problem(what, "", _COPY_AGAIN, str(folder)))
        if problems:
            raise DataError(problems)

    def read(self, name: str) -> Tensor:
        """One tensor, as a view of its file: it is read where it is used."""
        return self._files.open(self._places[name]).view(name)


def _read_index(folder: Path) -> dict[str, str]:
    """Tensor -> file; empty if the folder has no index."""
    path = folder / INDEX
    if not path.is_file():
        return {}
    try:
        places = read_json(path, LARGE_BYTES)["weight_map"]
        if not isinstance(places, dict) or not places:
            raise ValueError("its weight_map is empty or no object")
        strange = [file for file in places.values() if not isinstance(file, str) or Path(file).name != file]
        if strange:
            raise ValueError(f"{strange[0]!r} is no name of a file in this folder")
    except (OSError, ValueError, KeyError, TypeError) as error:
        reason = f"{error} is missing" if isinstance(error, KeyError) else error
        raise DataError(Problem(f"{path} cannot be read: {reason}", "", _COPY_AGAIN)) from error
    return places


def _single(folder: Path) -> str:
    if (folder / SINGLE).is_file():
        return SINGLE
    pickled = sorted(path.name for path in folder.glob("*.bin"))
    rule = f"there is {', '.join(pickled[:3])}, but pickled files can run code and are never loaded" if pickled else ""
    remedy = "save it again with transformers: model.save_pretrained(folder, safe_serialization=True)"
    raise DataError(Problem(f"there is no {SINGLE} in {folder}", rule, remedy))


def write_weights(
    folder: Path, shapes: Shapes, dtype: torch.dtype, tensors: Iterable[tuple[str, Tensor]], *, shard_bytes: int
) -> int:
    """Write the tensors, which come in the order of `shapes`; only one is in memory. As many go to a file as fit; one
    that is larger has a file of its own. Returns the number of files. OSError if that fails, DataError if a value does
    not fit `dtype`."""
    groups: list[dict[str, Tensor]] = [{}]
    total = filled = 0
    for name, shape in shapes.items():
        tensor = torch.empty(shape, dtype=dtype, device="meta")
        if groups[-1] and filled + tensor.nbytes > shard_bytes:
            groups.append({})
            filled = 0
        groups[-1][name] = tensor
        filled, total = filled + tensor.nbytes, total + tensor.nbytes
    source = iter(tensors)
    places: dict[str, str] = {}
    for number, group in enumerate(groups, 1):
        file = SINGLE if len(groups) == 1 else f"model-{number:05d}-of-{len(groups):05d}.safetensors"
        places |= dict.fromkeys(group, file)
        layout = FileLayout.of(group, metadata={"format": "pt"})
        write_file(folder / file, layout, _blocks(layout.order, dtype, source))
    if len(groups) > 1:
        index = {"metadata": {"total_size": total}, "weight_map": places}
        write_atomically(folder / INDEX, json.dumps(index, indent=2) + "\n")
    return len(groups)


def _blocks(order: list[str], dtype: torch.dtype, source: Iterator[tuple[str, Tensor]]) -> Iterator[memoryview]:
    for name in order:
        given, tensor = next(source)
        assert given == name, f"{given} came instead of {name}"
        yield raw_bytes(_rounded(name, tensor, dtype))


def _rounded(name: str, tensor: Tensor, dtype: torch.dtype) -> Tensor:
    made = tensor.to(dtype)
    if not bool(tensor.isfinite().all()):
        wrong = int((~tensor.isfinite()).sum())
        what = f"the checkpoint holds values that are not finite: {wrong:,} of {tensor.numel():,} in {name}"
        rule = "a model that has diverged computes nothing, and no other weights follow from it"
        raise DataError(Problem(what, rule, "export an earlier checkpoint, by its folder"))
    if dtype == torch.float16 and bool(made.isinf().any()):
        largest = float(tensor.abs().max())
        rule = "fp16 holds at most 65504"
        raise DataError(Problem(f"{name} has a value of {largest:.4g}", rule, "use --dtype bf16 or fp32"))
    return made


def require_empty(output: Path, rule: str, *, unless: str = "") -> None:
    """StorageError if the folder holds anything, which may be the user's, but not the file `unless`. Hidden files are
    left alone: an export may lie in a clone of a hub's repository."""
    with writing(output, "read"):
        paths = output.iterdir() if output.is_dir() else []
        found = sorted(path.name for path in paths if not path.name.startswith("."))
    if found and unless not in found:
        what = f"{output} is not empty: it holds {', '.join(found[:5])}" + (" and more" if len(found) > 5 else "")
        raise StorageError(Problem(what, rule, "name another folder, or empty this one"))


@contextmanager
def staged(output: Path, publish: Callable[[Path, Path], None]) -> Iterator[Path]:
    """A hidden folder inside `output` to write into; `publish(it, output)` gives its files their names. After an error
    all is as before."""
    is_new = not output.exists()
    make_folder(output)
    for stale in output.glob(f"{_STAGING}*.tmp"):  # of one that was killed
        remove_tree(stale)
    staging = output / f"{_STAGING}{secrets.token_hex(4)}.tmp"
    try:
        with writing(staging, "create the folder"):
            staging.mkdir()
        yield staging
        with writing(output):
            publish(staging, output)
    finally:
        shutil.rmtree(staging, ignore_errors=True)
        if is_new:
            with suppress(OSError):  # it is not empty
                output.rmdir()


def replace_export(staging: Path, output: Path) -> None:
    """The older config goes first and the new one comes last: in between nothing loads."""
    for path in (*(output / name for name in _OWN), *output.glob("model-*-of-*.safetensors")):
        path.unlink(missing_ok=True)
    move_all(staging, output, last=CONFIG)


def move_all(staging: Path, output: Path, *, last: str) -> None:
    for path in sorted(staging.iterdir(), key=lambda path: path.name == last):
        os.rename(path, output / path.name)
    sync_folder(output)
