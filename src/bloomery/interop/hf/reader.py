"""The weights of a Hugging Face folder, in one file or many: the headers at once, each tensor when it is asked for."""

from __future__ import annotations

from pathlib import Path

from torch import Tensor

from bloomery.base.bounded import LARGE_BYTES, read_json
from bloomery.base.errors import DataError, Problem
from bloomery.checkpoint.tensor_file import TensorFiles
from bloomery.interop.hf.shards import INDEX, SINGLE

_COPY_AGAIN = "copy the folder again"


class HfWeights:
    """Holds headers and some open files, never the model. DataError if the files are not whole or not safetensors."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.dtypes: dict[str, str] = {}
        """As safetensors call them: `BF16`."""
        self.shapes: dict[str, tuple[int, ...]] = {}
        self._places: dict[str, str] = {}
        self._files = TensorFiles(folder, remedy=_COPY_AGAIN)
        index = _read_index(folder)
        problems = []
        for file in sorted(set(index.values())) if index is not None else [_single(folder)]:
            for name, (dtype, shape) in self._files.open(file).kinds().items():
                if name in self._places:
                    problems.append(Problem(f"{name} is in {self._places[name]} and in {file}", "", _COPY_AGAIN))
                self._places[name], self.dtypes[name], self.shapes[name] = file, dtype, shape
        astray = [name for name, file in (index or {}).items() if self._places.get(name) != file]
        if astray:
            what = f"{len(astray)} tensors are not in the file that {INDEX} names: {', '.join(astray[:5])}"
            problems.append(Problem(what, "", _COPY_AGAIN, str(folder)))
        if problems:
            raise DataError(problems)

    def read(self, name: str) -> Tensor:
        """One tensor, as a view of its file: it is read where it is used."""
        return self._files.open(self._places[name]).view(name)


def _read_index(folder: Path) -> dict[str, str] | None:
    """Tensor -> file; None if the folder has no index."""
    path = folder / INDEX
    if not path.is_file():
        return None
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
