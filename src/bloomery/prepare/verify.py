"""`bloomery prepare --verify`: make the shard again beside it, and compare all that was written."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, fields
from typing import Any

import numpy as np

from bloomery.base.errors import DataError, Problem
from bloomery.base.storage import writing, written_to
from bloomery.config.recipe import PrepareSection
from bloomery.data.manifest import ShardManifest, manifest_path, origins_path, read_manifest
from bloomery.data.shards import ShardReader
from bloomery.data.tokenizer import Tokenizer
from bloomery.prepare.run import Preparation, Progress

_ROOM = "; --verify needs room for the shard three times beside it, until it ends"
_TOKENS = 1 << 22
_BYTES = 1 << 20
_MAY_DIFFER = ("source_files", "encoder", "bloomery_version", "index_hash")
"""Fields of a manifest that do not follow from the inputs (of the files only the time stamps), or that earlier versions
have not written."""


def verify(
    section: PrepareSection,
    *,
    tokenizer: Tokenizer,
    seed: int,
    workers: int = 1,
    progress: Callable[[Progress], None] | None = None,
    outputs: Sequence[str] = (),
) -> ShardManifest:
    """The manifest of a shard that is what its sources give today; DataError with the first difference otherwise.
    Nothing is left behind of what it makes beside the shard.
    """
    manifest = read_manifest(section.output)
    if manifest is None:
        remedy = "run `bloomery prepare` without --verify"
        raise DataError(Problem("has no manifest", "there is nothing to compare", remedy, section.output))
    folder, name = os.path.split(section.output)
    with written_to("place for prepare.output", _ROOM), writing(section.output):
        beside = tempfile.TemporaryDirectory(prefix=f"{name}.verify-", dir=folder or ".", ignore_cleanup_errors=True)
    with beside:
        again = section.model_copy(update={"output": os.path.join(beside.name, "again")})
        beside_it = Preparation(
            again, tokenizer=tokenizer, seed=seed, workers=workers, outputs=[section.output, *outputs]
        )
        right_manifest = beside_it.run(progress=progress, then=_ROOM).manifest
        assert right_manifest is not None
        _compare_manifests(section, manifest, right_manifest)
        with ShardReader(section.output) as shard, ShardReader(again.output) as right:
            if not _are_equal(f"{shard.prefix}.idx", f"{right.prefix}.idx"):
                raise _other_index(shard, right)
            _compare_tokens(shard, right, tokenizer)
        if not _are_equal(origins_path(section.output), origins_path(again.output)):
            what = f"{origins_path(section.output)} is missing, or names other files than the documents came from"
            raise _differs(section.output, what)
    return manifest


def _compare_manifests(section: PrepareSection, manifest: ShardManifest, made: ShardManifest) -> None:
    old = {file.name: (file.bytes, file.hash) for file in manifest.source_files}
    new = {file.name: (file.bytes, file.hash) for file in made.source_files}
    for name in [*new, *old]:
        if old.get(name) != new.get(name):
            how = "is gone" if name not in new else "is new" if name not in old else "has changed"
            raise _differs(section.output, f"the source file {name} {how} since the shard was made")
    if [file.name for file in manifest.source_files] != [file.name for file in made.source_files]:
        raise _differs(section.output, "its source_files are in another order")
    for name in (field.name for field in fields(ShardManifest) if field.name not in _MAY_DIFFER):
        if getattr(manifest, name) != getattr(made, name):
            raise _differs(section.output, _in_words(name, getattr(manifest, name), getattr(made, name)))


def _in_words(name: str, old: Any, new: Any) -> str:
    """How two values of a field differ: of several sources or reasons, the first that does."""
    if name == "sources" and [source.name for source in old] == [source.name for source in new]:
        before, now = next((asdict(one), asdict(other)) for one, other in zip(old, new, strict=True) if one != other)
        what = next(count for count in before if before[count] != now[count])
        return f"its source '{before['name']}' has {before[what]} {what} where now it would have {now[what]}"
    if name == "sources":
        was, is_now = (", ".join(f"'{source.name}'" for source in sources) or "none" for sources in (old, new))
        return f"its sources are {was} where now they would be {is_now}"
    if isinstance(old, dict):
        values = {key: (old.get(key, "missing"), new.get(key, "missing")) for key in {**new, **old}}
        key, (old, new) = next(item for item in values.items() if item[1][0] != item[1][1])
        name = f"{name}.{key}"
    return f"its {name} is {old} where now it would be {new}"


def _are_equal(path: str, other: str) -> bool:
    """The same bytes, or neither is there."""
    if not os.path.exists(path) or not os.path.exists(other):
        return os.path.exists(path) == os.path.exists(other)
    with open(path, "rb") as file, open(other, "rb") as right:
        while piece := file.read(_BYTES):
            if piece != right.read(_BYTES):
                return False
        return not right.read(1)


def _other_index(shard: ShardReader, right: ShardReader) -> DataError:
    if shard.num_documents != right.num_documents:
        what = f"it has {shard.num_documents} documents instead of {right.num_documents}"
    elif len(wrong := np.flatnonzero(shard.index.document_starts() != right.index.document_starts())):
        what = f"document {int(wrong[0]) - 1} has another length than its source gives"
    elif shard.num_sequences != right.num_sequences:
        what = f"it has {shard.num_sequences} sequences instead of {right.num_sequences}"
    elif len(wrong := np.flatnonzero(shard.index.sequence_starts() != right.index.sequence_starts())):
        what = f"sequence {int(wrong[0]) - 1} has another length than its source gives"
    else:
        what = "documents have other sequences, or tokens another type, than their sources give"
    return _differs(shard.prefix, f"{what} ({shard.prefix}.idx)")


def _compare_tokens(shard: ShardReader, right: ShardReader, tokenizer: Tokenizer) -> None:
    for start in range(0, right.num_tokens, _TOKENS):
        count = min(_TOKENS, right.num_tokens - start)
        wrong = np.flatnonzero(shard.read(start, count) != right.read(start, count))
        if len(wrong):
            document, position = right.index.document_at(start + int(wrong[0]))
            begin = right.index.document_start(document)
            text = tokenizer.decode(right.read(begin, min(20, right.num_tokens - begin)))
            raise _differs(
                shard.prefix,
                f"document {document} has token {shard.read(start + int(wrong[0]), 1)[0]} at {position} where its "
                f"source gives {right.read(start + int(wrong[0]), 1)[0]}; it begins {text!r:.80}",
            )


def _differs(prefix: str, what: str) -> DataError:
    rule = "the shard must hold exactly what its sources give"
    first = f"delete {manifest_path(prefix)}, by which the shard may count as up to date"
    return DataError(
        Problem(what, rule, f"{first}, and make it again with `bloomery prepare`, or restore the sources", prefix)
    )
