"""manifest.json: written last, it makes a checkpoint whole. Every file with size and hash, and a hash of itself.

{"format": 2, "step": 100, ..., "files": {"state.json": {"bytes": 770, "sha256": "7263..."}, ...}, "sha256": "8edc..."}
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from bloomery.base.bounded import LARGE_BYTES, parse_json, read_small
from bloomery.base.errors import DataError, Problem
from bloomery.base.storage import write_atomically
from bloomery.checkpoint.index import INDEX
from bloomery.checkpoint.tensor_file import FileFacts
from bloomery.monitor.record import strict_json

MANIFEST = "manifest.json"
FORMAT = 2
STATE, RECIPE = "state.json", "recipe.yaml"
SUSPICIOUS = "suspicious"
"""Whether it was saved in a stretch of spikes or NaNs, so that older ones may be better."""
_FILE_NAME = re.compile(r"[A-Za-z0-9._-]{1,200}")
_OWN_HASH = "sha256"
"""Of all else that the manifest says; those of earlier versions have none."""


def plain_name(name: str) -> str:
    """A file of the checkpoint's own folder; ValueError for any other."""
    if not _FILE_NAME.fullmatch(name) or name in (".", ".."):
        raise ValueError(f"{name!r} is no plain file name")
    return name


Count = Annotated[int, Field(ge=0)]


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
    """Name every file with size and hash. Call it last: with it the folder is whole."""
    listed = {name: asdict(files[name]) for name in sorted(files)}
    said = json.loads(strict_json({"format": FORMAT, **facts, "files": listed}))
    write_atomically(folder / MANIFEST, json.dumps({**said, _OWN_HASH: _hash(said)}, indent=1))


def read_manifest(folder: Path) -> dict[str, Any]:
    """DataError if it is damaged or of another format."""
    try:
        return parse_manifest(read_small(folder / MANIFEST, LARGE_BYTES))
    except (OSError, ValueError) as error:
        remedy = f"see `bloomery inspect checkpoint {folder.parent} --list` for others"
        raise DataError(Problem(f"{MANIFEST} cannot be used: {error}", remedy=remedy, place=str(folder))) from error


def parse_manifest(content: bytes) -> dict[str, Any]:
    """All that code relies on is there and of the right kind; ValueError says what is not."""
    said = parse_json(content)
    if not isinstance(said, dict):
        raise ValueError("it is no JSON object")
    if _OWN_HASH in said and said[_OWN_HASH] != _hash({key: said[key] for key in said if key != _OWN_HASH}):
        raise ValueError("it has been changed since it was saved")
    number = said.get("format")
    if type(number) is int and number != FORMAT:
        rule = f"This Bloomery reads format {FORMAT}"
        raise ValueError(f"it has format {number}. {rule}. Use the version of Bloomery that saved it")
    try:
        _Manifest.model_validate(said)
    except ValidationError as error:
        wrong = sorted({str(fault["loc"][0]) for fault in error.errors(include_url=False)})
        raise ValueError(f"entries are missing or malformed: {', '.join(wrong)}") from None
    lacking = [name for name in (INDEX, STATE, RECIPE) if name not in said["files"]]
    if lacking:
        raise ValueError(f"it does not list {', '.join(lacking)}")
    return said


def _hash(said: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(said, sort_keys=True, separators=(",", ":")).encode()).hexdigest()
