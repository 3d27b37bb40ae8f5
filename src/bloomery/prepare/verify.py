"""`bloomery prepare --verify`: make the shard again beside it, and compare all that was written."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import fields

import numpy as np

from bloomery.base.errors import DataError, Problem
from bloomery.base.storage import writing, written_to
from bloomery.config.recipe import PrepareSection
from bloomery.data.manifest import ShardManifest, manifest_path, origins_path, read_manifest
from bloomery.data.shards import ShardReader, file_checksum
from bloomery.data.tokenizer import Tokenizer
from bloomery.prepare.run import Preparation, Progress

_ROOM = "; --verify needs room for the shard three times beside it, until it ends"
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
        preparation = Preparation(
            again, tokenizer=tokenizer, seed=seed, workers=workers, outputs=[section.output, *outputs]
        )
        expected = preparation.run(progress=progress, then=_ROOM).manifest
        assert expected is not None
        if what := _difference(manifest, expected) or _other_bytes(section.output, again.output, tokenizer):
            rule = "the shard must hold exactly what its sources give"
            remedy = f"delete {manifest_path(section.output)}, by which the shard may count as up to date, and make it "
            remedy += "again with `bloomery prepare`, or restore the sources"
            raise DataError(Problem(what, rule, remedy, section.output))
    return manifest


def _difference(manifest: ShardManifest, expected: ShardManifest) -> str:
    """The first of two manifests; empty where they describe the same shard."""
    old = {file.name: (file.bytes, file.hash) for file in manifest.source_files}
    new = {file.name: (file.bytes, file.hash) for file in expected.source_files}
    for name in [*new, *old]:
        if old.get(name) != new.get(name):
            how = "is gone" if name not in new else "is new" if name not in old else "has changed"
            return f"the source file {name} {how} since the shard was made"
    if list(old) != list(new):
        return "its source_files are in another order"
    for name in (field.name for field in fields(ShardManifest) if field.name not in _MAY_DIFFER):
        found, wanted = getattr(manifest, name), getattr(expected, name)
        if found != wanted:
            return f"its {name} is {found!s:.200} where now it would be {wanted!s:.200}"
    return ""


def _other_bytes(prefix: str, expected_prefix: str, tokenizer: Tokenizer) -> str:
    """The first difference of the files of two shards; empty where there is none."""
    with ShardReader(prefix) as shard, ShardReader(expected_prefix) as right:
        if file_checksum(f"{prefix}.idx") != file_checksum(f"{expected_prefix}.idx"):
            return f"{prefix}.idx has other documents or sequences than their sources give"
        start = 0
        for tokens, expected in zip(shard.blocks(), right.blocks(), strict=True):
            if len(wrong := np.flatnonzero(tokens != expected)):
                first = int(wrong[0])
                document, position = right.document_at(start + first)
                begin = right.document_start(document)
                text = tokenizer.decode(right.read(begin, min(20, right.num_tokens - begin)))
                has = f"document {document} has token {tokens[first]} at {position}"
                return f"{has} where its source gives {expected[first]}; it begins {text!r:.80}"
            start += len(tokens)
    origins = [origins_path(prefix), origins_path(expected_prefix)]
    if len({file_checksum(path) if os.path.exists(path) else "" for path in origins}) > 1:
        return f"{origins[0]} is missing, or names other files than the documents came from"
    return ""
