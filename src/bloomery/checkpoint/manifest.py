"""manifest.json, written last, which makes a checkpoint complete, and whether files are as it says. Without torch: it
takes longer to import than a long list of checkpoints to read.

    {"format": 2, "step": 100, ..., "files": {"state.json": {"bytes": 770, "sha256": "72..."}, ...}, "sha256": "8e..."}
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from bloomery.base.bounded import open_regular, parse_json
from bloomery.base.storage import reason, write_atomically
from bloomery.monitor.record import strict_json

FORMAT = 2
INDEX, MANIFEST, STATE, RECIPE = "index.json", "manifest.json", "state.json", "recipe.yaml"
SUSPICIOUS = "suspicious"
"""In a manifest: whether it was saved in a stretch of spikes or NaNs, so that older ones may be better."""
PARTS = "parts"
"""In a manifest: the folder on the nodes' disks that holds the tensor files, if they are links."""
ANOTHER = "use another checkpoint, `bloomery train` with --from; `bloomery inspect checkpoint RUN --list` names them"
Count = Annotated[int, Field(ge=0, strict=True)]


@dataclass(frozen=True)
class FileFacts:
    """What a manifest says of a file."""

    bytes: int
    sha256: str


def is_tensor_file(name: str) -> bool:
    return name.endswith(".safetensors")


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


class Manifest(_Entry):
    """Only for `check`: what code reads is the JSON, which may hold more."""

    format: int
    step: Count
    ranks: Annotated[int, Field(gt=0)]
    files: dict[Annotated[str, Field(pattern="^[A-Za-z0-9_-][A-Za-z0-9._-]{0,199}$")], _File]
    """By names in the checkpoint's own folder."""
    versions: dict[str, Any] | None = None
    tokenizer: str | None = None
    shards: dict[str, _Shard] | None = None
    time: Annotated[float, Field(ge=0, le=1e11)] | None = None
    validation: _Validation | None = None
    suspicious: bool | None = None
    parts: str | None = None

    @classmethod
    def check(cls, manifest: Mapping[str, Any]) -> None:
        """ValueError names what is missing or malformed."""
        number = manifest.get("format")
        if type(number) is int and number != FORMAT:
            rule = f"This Bloomery reads format {FORMAT}"
            raise ValueError(f"it has format {number}. {rule}. Use the version of Bloomery that saved it")
        try:
            lacking = {INDEX, STATE, RECIPE} - cls.model_validate(manifest).files.keys()
        except ValidationError as error:
            wrong = sorted({str(fault["loc"][0]) for fault in error.errors(include_url=False)})
            raise ValueError(f"entries are missing or malformed: {', '.join(wrong)}") from None
        if lacking:
            raise ValueError(f"it does not list {', '.join(sorted(lacking))}")


def facts_of(text: str) -> FileFacts:
    content = text.encode()
    return FileFacts(len(content), hashlib.sha256(content).hexdigest())


def write_manifest(folder: Path, facts: Mapping[str, Any], files: Mapping[str, FileFacts]) -> None:
    """List every file with size and hash. Call it last: with it the folder is complete."""
    listed = {name: asdict(files[name]) for name in sorted(files)}
    content = json.loads(strict_json({"format": FORMAT, **facts, "files": listed}))
    write_atomically(folder / MANIFEST, json.dumps({**content, "sha256": own_hash(content)}, indent=1))


def own_hash(manifest: Mapping[str, Any]) -> str:
    """Of all else in a manifest."""
    rest = {name: value for name, value in manifest.items() if name != "sha256"}
    return hashlib.sha256(json.dumps(rest, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def parse_manifest(content: bytes) -> dict[str, Any]:
    """All that code relies on is there and of the right kind; ValueError names what is not."""
    manifest = parse_json(content)
    if not isinstance(manifest, dict):
        raise ValueError("it is no JSON object")
    if manifest.get("sha256", own_hash(manifest)) != own_hash(manifest):  # those of earlier versions have none
        raise ValueError("it has been changed since it was saved")
    Manifest.check(manifest)
    return manifest


def file_damage(path: Path, expected: dict[str, Any], *, read: bool) -> str:
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
