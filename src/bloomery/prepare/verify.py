"""`bloomery prepare --verify`: make the shard again beside it, and compare every token."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable

import numpy as np

from bloomery.base.errors import DataError, Problem
from bloomery.config.recipe import PrepareSection
from bloomery.data.manifest import ShardManifest, manifest_path, read_manifest
from bloomery.data.shards import ShardReader
from bloomery.data.tokenizer import Tokenizer
from bloomery.prepare.run import Progress, prepare

_TOKENS = 1 << 22


def verify(
    section: PrepareSection,
    *,
    tokenizer: Tokenizer,
    seed: int,
    workers: int = 1,
    progress: Callable[[Progress], None] | None = None,
) -> ShardManifest:
    """The manifest of a shard that is what its sources give today; DataError with the first difference otherwise.

    Needs room for the shard three times, beside it; nothing of it is left behind.
    """
    manifest = read_manifest(section.output)
    if manifest is None:
        remedy = "run `bloomery prepare` without --verify"
        raise DataError(Problem("has no manifest", "there is nothing to compare", remedy, section.output))
    folder = f"{section.output}.verify"
    shutil.rmtree(folder, ignore_errors=True)
    try:
        again = section.model_copy(update={"output": os.path.join(folder, "again")})
        made = prepare(again, tokenizer=tokenizer, seed=seed, workers=workers, progress=progress).manifest
        assert made is not None
        _compare_manifests(section, manifest, made)
        with ShardReader(section.output) as shard, ShardReader(again.output) as right:
            _compare_shards(shard, right, tokenizer)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return manifest


def _compare_manifests(section: PrepareSection, manifest: ShardManifest, made: ShardManifest) -> None:
    old = {file.name: (file.bytes, file.hash) for file in manifest.source_files}
    new = {file.name: (file.bytes, file.hash) for file in made.source_files}
    for name in [*new, *old]:
        if old.get(name) != new.get(name):
            how = "is gone" if name not in new else "is new" if name not in old else "has changed"
            raise _differs(section.output, f"the source file {name} {how} since the shard was made")
    for name in ("tokenizer_hash", "dtype", "eod_id", "shuffle_seed", "settings", "documents", "tokens", "sources"):
        if getattr(manifest, name) != getattr(made, name):
            raise _differs(
                section.output, f"its {name} is {getattr(manifest, name)} where now it would be {getattr(made, name)}"
            )


def _compare_shards(shard: ShardReader, right: ShardReader, tokenizer: Tokenizer) -> None:
    if not np.array_equal(shard.document_token_starts, right.document_token_starts):
        raise _differs(shard.prefix, f"it has other documents: {shard.num_documents} instead of {right.num_documents}")
    for start in range(0, right.num_tokens, _TOKENS):
        count = min(_TOKENS, right.num_tokens - start)
        wrong = np.flatnonzero(shard.read(start, count) != right.read(start, count))
        if len(wrong):
            document, position = right.document_at(start + int(wrong[0]))
            begin = int(right.document_token_starts[document])
            text = tokenizer.decode(right.read(begin, min(20, right.num_tokens - begin)))
            raise _differs(
                shard.prefix,
                f"document {document} has token {shard.read(start + int(wrong[0]), 1)[0]} at {position} where its "
                f"source gives {right.read(start + int(wrong[0]), 1)[0]}; it begins {text!r:.80}",
                f"delete {manifest_path(shard.prefix)}, by which the shard counts as up to date, and ",
            )


def _differs(place: str, what: str, first: str = "") -> DataError:
    """`first`: what to do before the shard can be made again."""
    rule = "the shard must hold exactly what its sources give"
    remedy = f"{first}make it again with `bloomery prepare`, or restore the sources"
    return DataError(Problem(what, rule, remedy, place))
