"""The files of a checkpoint that are text: index.json, which says where each tensor lies, and manifest.json, written
last, which makes a checkpoint complete.

index.json     {"tensors": {"model.w": {"shape": [4, 2], "dtype": "F32", "pieces": [{"offset": [0, 0], "size": [2, 2],
               "file": "tensors-00000.safetensors", "key": "model.w"}, ...]}}}
manifest.json  {"format": 2, "step": 100, ..., "files": {"state.json": {"bytes": 770, "sha256": "7263..."}, ...},
               "sha256": "8edc..."}
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from functools import lru_cache
from itertools import chain, product
from math import prod
from pathlib import Path
from typing import Annotated, Any, Self

import torch
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, TypeAdapter, ValidationError
from safetensors import SafetensorError, safe_open
from torch import Tensor

from bloomery.base.bounded import LARGE_BYTES, open_regular, parse_json, read_json, read_small, wrong_fields
from bloomery.base.errors import DataError, Problem, StorageError
from bloomery.base.ranks import Piece
from bloomery.base.storage import reserve, sync, write_all, write_atomically
from bloomery.monitor.record import strict_json

FORMAT = 2
INDEX, MANIFEST, STATE, RECIPE = "index.json", "manifest.json", "state.json", "recipe.yaml"
SUSPICIOUS = "suspicious"
"""In a manifest: whether it was saved in a stretch of spikes or NaNs, so that older ones may be better."""
PARTS = "parts"
"""In a manifest: the folder on the nodes' disks that holds the tensor files, if they are links."""
ANOTHER = "use another checkpoint, `bloomery train` with --from"
_FILE_NAME = re.compile(r"[A-Za-z0-9._-]{1,200}")
_OWN_HASH = "sha256"
"""Of all else in the manifest; those of earlier versions have none."""
_MOST_PROBLEMS = 10
Count = Annotated[int, Field(ge=0, strict=True)]
Counts = Annotated[tuple[Count, ...], Field(max_length=8)]
Kind = tuple[str, tuple[int, ...]]
"""dtype and shape."""


def _known_dtype(name: str) -> str:
    if name not in DTYPES:
        raise ValueError("is no dtype of safetensors")
    return name


# ---------------------------------------------------------------- boxes and index


@dataclass(frozen=True)
class Box:
    """The part of a tensor that begins at `offset` and has this size. A scalar has the box of no dimensions."""

    offset: Counts
    size: Counts

    @classmethod
    def of(cls, piece: Piece) -> Box:
        return Box(tuple(piece.offset), tuple(piece.tensor.shape))

    def meet(self, other: Box) -> Box | None:
        """The intersection, in the coordinates of the whole tensor; None if it is empty."""
        start = tuple(map(max, self.offset, other.offset))
        size = tuple(
            min(a + m, b + n) - s
            for a, m, b, n, s in zip(self.offset, self.size, other.offset, other.size, start, strict=True)
        )
        return Box(start, size) if all(length > 0 for length in size) else None

    def slices_of(self, outer: Box) -> tuple[slice, ...]:
        """Where this box lies within one around it."""
        begin = [a - b for a, b in zip(self.offset, outer.offset, strict=True)]
        return tuple(slice(a, a + n) for a, n in zip(begin, self.size, strict=True))

    def inside(self, shape: tuple[int, ...]) -> bool:
        return len(shape) == len(self.offset) == len(self.size) and all(
            start >= 0 and length > 0 and start + length <= end
            for start, length, end in zip(self.offset, self.size, shape, strict=True)
        )

    def __str__(self) -> str:
        ranges = (f"{start}:{start + length}" for start, length in zip(self.offset, self.size, strict=True))
        return f"[{', '.join(ranges)}]"


@dataclass(frozen=True)
class SavedPiece(Box):
    file: str
    key: str


@dataclass(frozen=True)
class SavedTensor:
    shape: Counts
    dtype: Annotated[str, AfterValidator(_known_dtype)]
    """As safetensors call it: `F32`."""
    pieces: list[SavedPiece] = field(default_factory=list)

    @property
    def kind(self) -> Kind:
        return self.dtype, self.shape

    @property
    def num_bytes(self) -> int:
        return prod(self.shape) * DTYPES[self.dtype].itemsize


@dataclass(frozen=True)
class RankReport:
    """What one rank reports about its part of a save."""

    held: dict[str, tuple[tuple[int, ...], str]]
    """(shape of the whole, dtype) of every tensor of which the rank holds a piece, owned or not."""
    owned: dict[str, tuple[tuple[int, ...], tuple[int, ...]]]
    """(offset, size) of every piece in its file."""
    file: str = ""
    """Empty if the rank owns nothing."""
    facts: FileFacts | None = None


REPORT = TypeAdapter(RankReport)
_TENSORS = TypeAdapter(dict[str, SavedTensor])


def is_tensor_file(name: str) -> bool:
    return name.endswith(".safetensors")


def is_written(piece: Piece) -> bool:
    return piece.owned and piece.tensor.numel() > 0


def report(pieces: Mapping[str, Piece]) -> RankReport:
    """Before anything is written."""
    held = {name: (tuple(each.shape), DTYPE_NAMES[each.tensor.dtype]) for name, each in pieces.items()}
    owned = {name: Box.of(piece) for name, piece in pieces.items() if is_written(piece)}
    return RankReport(
        held={name: (shape, dtype) for name, (shape, dtype) in held.items() if prod(shape)},
        owned={name: (box.offset, box.size) for name, box in owned.items()},
    )


def merge(reports: Sequence[RankReport]) -> dict[str, SavedTensor]:
    """The index of all ranks' files. StorageError unless every tensor is there exactly once."""
    tensors: dict[str, SavedTensor] = {}
    problems = []
    for rank, found in enumerate(reports):
        for name, (shape, dtype) in found.held.items():
            known = tensors.setdefault(name, SavedTensor(shape, dtype))
            if known.kind != (dtype, shape):
                problems.append(f"{name} is {dtype} {shape} on rank {rank} and {known.dtype} {known.shape} on another")
        for name, (offset, size) in found.owned.items():
            tensors[name].pieces.append(SavedPiece(offset, size, found.file, name))
    problems += _not_whole(tensors)
    if problems:
        what = f"{len(problems)} tensor(s) would not be saved completely: {'; '.join(problems[:_MOST_PROBLEMS])}"
        rule = "exactly one rank must own each element of each tensor"
        raise StorageError(Problem(what, rule, "this is a bug: report it"))
    return tensors


def why_not_whole(shape: tuple[int, ...], boxes: Sequence[Box]) -> str:
    """What is wrong with boxes that should cover a tensor of this shape exactly once; empty if nothing is."""
    for box in boxes:
        if not box.inside(shape):
            return f"{box} is outside of {shape}"
    if _corners(boxes) == _corners([Box((0,) * len(shape), shape)]):
        return ""
    missing = prod(shape) - sum(prod(box.size) for box in boxes)
    return f"{missing:,} of {prod(shape):,} elements are missing" if missing > 0 else "some elements are there twice"


def _corners(boxes: Sequence[Box]) -> dict[tuple[int, ...], int]:
    """The corners of all boxes with alternating signs, which determine how often each element is covered. Those inside
    a whole cancel out. Linear in the number of boxes, whatever they are."""
    counts: dict[tuple[int, ...], int] = {}
    for box in boxes:
        sides = [((start, 1), (start + length, -1)) for start, length in zip(box.offset, box.size, strict=True)]
        for ends in product(*sides):
            corner = tuple(place for place, _ in ends)
            counts[corner] = counts.get(corner, 0) + prod(sign for _, sign in ends)
    return {corner: count for corner, count in counts.items() if count}


def _not_whole(tensors: Mapping[str, SavedTensor]) -> list[str]:
    wrong = {name: why_not_whole(tensor.shape, tensor.pieces) for name, tensor in tensors.items()}
    return [f"{name} {tensors[name].shape}: {text}" for name, text in wrong.items() if text]


def index_text(tensors: Mapping[str, SavedTensor]) -> str:
    lines = (f"  {json.dumps(name)}: {json.dumps(asdict(tensor))}" for name, tensor in sorted(tensors.items()))
    return '{"tensors": {\n' + ",\n".join(lines) + "\n}}\n"


def read_index(folder: Path) -> dict[str, SavedTensor]:
    """What the checkpoint holds, by name: every tensor whole, in boxes of its own. DataError if it is not so."""
    try:
        tensors = _TENSORS.validate_python(read_json(folder / INDEX, LARGE_BYTES)["tensors"])
        if astray := [name for name, each in tensors.items() if any(piece.key != name for piece in each.pieces)]:
            raise ValueError(f"pieces of {astray[0]!r:.80} have another key")
        if problems := _not_whole(tensors):
            raise ValueError("; ".join(problems[:_MOST_PROBLEMS]))
        places = [(piece.file, piece.key) for tensor in tensors.values() for piece in tensor.pieces]
        if len(places) != len(set(places)):
            raise ValueError("two pieces overlap")
        return tensors
    except (OSError, ValueError, KeyError, TypeError) as error:
        reason = wrong_fields(error) if isinstance(error, ValidationError) else f"{type(error).__name__}: {error}"
        what = f"{INDEX} cannot be read: {reason:.1000}"
        raise DataError(Problem(what, remedy=ANOTHER, place=str(folder))) from error


# ---------------------------------------------------------------- manifest


def plain_name(name: str) -> str:
    """A file of the checkpoint's own folder; ValueError for any other."""
    if not _FILE_NAME.fullmatch(name) or name in (".", ".."):
        raise ValueError(f"{name!r} is no plain file name")
    return name


class _Entry(BaseModel):
    """What code relies on; more is allowed."""

    model_config = ConfigDict(strict=True)


class _File(_Entry):
    bytes: Count
    sha256: Annotated[str, Field(pattern="^[0-9a-f]{64}$")]


class _Shard(_Entry):
    documents: Count
    tokens: Count
    sample_digest: str = ""
    path: str = ""


class _Validation(_Entry):
    step: Count
    loss: Annotated[float | str, AfterValidator(float)]
    """One that is no number is a string, as in the metrics."""


class _Manifest(_Entry):
    format: int
    step: Count
    ranks: Annotated[int, Field(gt=0)]
    files: dict[Annotated[str, AfterValidator(plain_name)], _File]
    versions: dict[str, Any] | None = None
    tokenizer: str | None = None
    shards: dict[str, _Shard] | None = None
    time: Annotated[float, Field(ge=0, le=1e11)] | None = None
    validation: _Validation | None = None
    suspicious: bool | None = None
    parts: str | None = None


def facts_of(text: str) -> FileFacts:
    content = text.encode()
    return FileFacts(len(content), hashlib.sha256(content).hexdigest())


def write_manifest(folder: Path, facts: Mapping[str, Any], files: Mapping[str, FileFacts]) -> None:
    """List every file with size and hash. Call it last: with it the folder is complete."""
    listed = {name: asdict(files[name]) for name in sorted(files)}
    content = json.loads(strict_json({"format": FORMAT, **facts, "files": listed}))
    write_atomically(folder / MANIFEST, json.dumps({**content, _OWN_HASH: _hash(content)}, indent=1))


def read_manifest(folder: Path) -> dict[str, Any]:
    """DataError if it is damaged or of another format."""
    try:
        return parse_manifest(read_small(folder / MANIFEST, LARGE_BYTES))
    except (OSError, ValueError) as error:
        remedy = f"see `bloomery inspect checkpoint {folder.parent} --list` for others"
        raise DataError(Problem(f"{MANIFEST} cannot be used: {error}", remedy=remedy, place=str(folder))) from error


def parse_manifest(content: bytes) -> dict[str, Any]:
    """All that code relies on is there and of the right kind; ValueError names what is not."""
    manifest = parse_json(content)
    if not isinstance(manifest, dict):
        raise ValueError("it is no JSON object")
    if _OWN_HASH in manifest and manifest[_OWN_HASH] != _hash({k: manifest[k] for k in manifest if k != _OWN_HASH}):
        raise ValueError("it has been changed since it was saved")
    number = manifest.get("format")
    if type(number) is int and number != FORMAT:
        rule = f"This Bloomery reads format {FORMAT}"
        raise ValueError(f"it has format {number}. {rule}. Use the version of Bloomery that saved it")
    try:
        _Manifest.model_validate(manifest)
    except ValidationError as error:
        wrong = sorted({str(fault["loc"][0]) for fault in error.errors(include_url=False)})
        raise ValueError(f"entries are missing or malformed: {', '.join(wrong)}") from None
    if lacking := [name for name in (INDEX, STATE, RECIPE) if name not in manifest["files"]]:
        raise ValueError(f"it does not list {', '.join(lacking)}")
    return manifest


def _hash(manifest: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(manifest, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


# ---------------------------------------------------------------- tensor files

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_BLOCK_BYTES = 2**24
_MOST_OPEN_FILES = 128


@dataclass(frozen=True)
class FileFacts:
    """What a manifest says of a file."""

    bytes: int
    sha256: str


@dataclass(frozen=True)
class FileLayout:
    """How tensors will lie in a file, known before the first byte is written."""

    order: list[str]
    header: bytes
    data_bytes: int

    @classmethod
    def of(cls, tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None) -> Self:
        """`metadata`: what transformers wants to find there."""
        order = sorted(tensors, key=lambda name: -tensors[name].element_size())  # so that every tensor is aligned
        entries: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
        end = 0
        for name in order:
            tensor = tensors[name]
            start, end = end, end + tensor.numel() * tensor.element_size()
            kind = DTYPE_NAMES[tensor.dtype]
            entries[name] = {"dtype": kind, "shape": list(tensor.shape), "data_offsets": [start, end]}
        text = json.dumps(entries, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        return cls(order, len(text).to_bytes(8, "little") + text, end)

    @property
    def file_bytes(self) -> int:
        return len(self.header) + self.data_bytes


def write_file(path: Path, layout: FileLayout, blocks: Iterable[memoryview]) -> FileFacts:
    """Write a new file, reserved before and on the disk after. `blocks` are the bytes of the tensors in the layout's
    order, cut anywhere. OSError if that fails."""
    hasher = hashlib.sha256()
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
    try:
        reserve(descriptor, layout.file_bytes)
        with ThreadPoolExecutor(1, "bloomery-hash") as beside:  # hashing and writing take about the same time
            for content in chain([memoryview(layout.header)], blocks):
                for start in range(0, len(content), _BLOCK_BYTES):
                    block = content[start : start + _BLOCK_BYTES]
                    hashed = beside.submit(hasher.update, block)
                    write_all(descriptor, block)
                    hashed.result()
                    del block
                del content  # the memory of a tensor that need not be there while the next one is made
        sync(descriptor)
    finally:
        os.close(descriptor)
    return FileFacts(layout.file_bytes, hasher.hexdigest())


def raw_bytes(tensor: Tensor) -> memoryview:
    """The tensor's memory, or that of a copy if it lies on a device or not in one stretch."""
    return as_bytes(tensor.detach().to("cpu").contiguous()).numpy().data


def as_bytes(tensor: Tensor) -> Tensor:
    """The same memory in one dimension of bytes, for a tensor that lies in one stretch."""
    return tensor.detach().view(-1).view(torch.uint8)


class TensorFile:
    """A safetensors file, open for reading. DataError if it is not one: the library proves that the header is sane and
    that every byte belongs to exactly one tensor."""

    def __init__(self, path: Path, *, remedy: str = "use another checkpoint, `bloomery train` with --from") -> None:
        """`remedy`: what to do about a file that cannot be read."""
        self.path = path
        self._remedy = remedy
        try:
            os.close(open_regular(path))
            self._file: Any = safe_open(path, framework="pt")
        except (OSError, ValueError, SafetensorError) as error:  # ValueError: a name that cannot be one
            raise self._damaged(str(error)) from error

    def kinds(self) -> dict[str, tuple[str, tuple[int, ...]]]:
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

    def _damaged(self, reason: str) -> DataError:
        what = f"{self.path.name} cannot be read: {reason[:500]}"
        return DataError(Problem(what, "", self._remedy, str(self.path.parent)))


class TensorFiles:
    """Of one folder, opened when they are needed; some stay open."""

    def __init__(self, folder: Path, **options: str) -> None:
        self.open = lru_cache(_MOST_OPEN_FILES)(lambda name: TensorFile(folder / name, **options))
