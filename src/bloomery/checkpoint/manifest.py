"""manifest.json: written last, it makes a checkpoint whole. Every file with size and hash, and a hash of itself.

{"format": 2, "step": 100, ..., "files": {"state.json": {"bytes": 770, "sha256": "7263..."}, ...}, "sha256": "8edc..."}
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from bloomery.base.bounded import LARGE_BYTES, parse_json, read_small
from bloomery.base.errors import DataError, Problem
from bloomery.base.storage import write_atomically
from bloomery.checkpoint.index import INDEX
from bloomery.checkpoint.parts import PARTS
from bloomery.checkpoint.tensor_file import FileFacts
from bloomery.monitor.record import strict_json

MANIFEST = "manifest.json"
FORMAT = 2
STATE, RECIPE = "state.json", "recipe.yaml"
SUSPICIOUS = "suspicious"
"""Whether it was saved in a stretch of spikes or NaNs, so that older ones may be better."""
_OWN_HASH = "sha256"
"""Of all else that the manifest says; those of earlier versions have none."""
_SHA256 = re.compile(r"[0-9a-f]{64}")


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
    wrong = [name for name, is_right in _RIGHT.items() if not is_right(said.get(name))]
    if wrong:
        raise ValueError(f"entries are missing or malformed: {', '.join(wrong)}")
    lacking = [name for name in (INDEX, STATE, RECIPE) if name not in said["files"]]
    if lacking:
        raise ValueError(f"it does not list {', '.join(lacking)}")
    return said


def _hash(said: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(said, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def _is_count(value: Any) -> bool:
    return type(value) is int and value >= 0


def _are_files(value: Any) -> bool:
    return isinstance(value, dict) and all(
        Path(name).name == name != ""
        and isinstance(facts, dict)
        and _is_count(facts.get("bytes"))
        and isinstance(facts.get("sha256"), str)
        and _SHA256.fullmatch(facts["sha256"]) is not None
        for name, facts in value.items()
    )


def _is_validation(value: Any) -> bool:
    """None, or the last loss and its step; a loss that is no number is a string, as in the metrics."""
    if value is None:
        return True
    if not isinstance(value, dict) or not _is_count(value.get("step")):
        return False
    try:
        float(value["loss"])
    except (KeyError, TypeError, ValueError):
        return False
    return True


def _are_shards(value: Any) -> bool:
    return value is None or (
        isinstance(value, dict)
        and all(
            isinstance(facts, dict)
            and _is_count(facts.get("documents"))
            and _is_count(facts.get("tokens"))
            and isinstance(facts.get("sample_digest", ""), str)
            and isinstance(facts.get("path", ""), str)
            for facts in value.values()
        )
    )


_RIGHT: dict[str, Callable[[Any], bool]] = {
    "format": lambda value: type(value) is int,
    "step": _is_count,
    "ranks": lambda value: _is_count(value) and value > 0,
    "files": _are_files,
    "versions": lambda value: value is None or isinstance(value, dict),
    "tokenizer": lambda value: value is None or isinstance(value, str),
    "shards": _are_shards,
    "time": lambda value: value is None or type(value) in (int, float),
    "validation": _is_validation,
    SUSPICIOUS: lambda value: value is None or type(value) is bool,
    PARTS: lambda value: value is None or isinstance(value, str),
}
