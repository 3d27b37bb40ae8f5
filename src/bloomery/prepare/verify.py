"""`bloomery prepare --verify`: make the shard again beside it, and compare all that was written."""

import os
import tempfile
from collections.abc import Callable
from dataclasses import fields

from bloomery.base.errors import DataError, Problem
from bloomery.base.storage import writing, written_to
from bloomery.data.manifest import ShardManifest, manifest_path, read_manifest
from bloomery.data.shards import file_checksum
from bloomery.prepare.run import AGAIN, Preparation, Progress

_MAY_DIFFER = ("source_files", "encoder", "bloomery_version", "index_hash")
"""Fields of a manifest that do not follow from the inputs (of the files only the time stamps), or that earlier versions
have not written."""


def verify(preparation: Preparation, progress: Callable[[Progress], None] = lambda _: None) -> ShardManifest:
    """The manifest of a shard that is what its sources give today; DataError with the first difference otherwise.
    Nothing is left behind of what it makes beside the shard."""
    output = preparation.output
    manifest = read_manifest(output)
    if manifest is None:
        remedy = "run `bloomery prepare` without --verify"
        raise DataError(Problem("has no manifest", "there is nothing to compare", remedy, output))
    folder, name = os.path.split(output)
    with written_to("place for prepare.output", AGAIN), writing(output):
        beside = tempfile.TemporaryDirectory(prefix=f"{name}.verify-", dir=folder or ".", ignore_cleanup_errors=True)
    with beside:
        again = os.path.join(beside.name, "again")
        expected = preparation.elsewhere(again).run(progress=progress).manifest
        assert expected is not None
        if what := _difference(manifest, expected) or _other_bytes(output, again):
            rule = "the shard must hold exactly what its sources give"
            remedy = f"delete {manifest_path(output)}, by which the shard may count as up to date, and make it again "
            remedy += "with `bloomery prepare`, or restore the sources"
            raise DataError(Problem(what, rule, remedy, output))
    return manifest


def _difference(manifest: ShardManifest, expected: ShardManifest) -> str:
    """The first of two manifests; empty where they describe the same shard."""
    old = {file.name: (file.bytes, file.hash) for file in manifest.source_files}
    new = {file.name: (file.bytes, file.hash) for file in expected.source_files}
    for name in [*new, *old]:
        if old.get(name) != new.get(name):
            how = "is gone" if name not in new else "is new" if name not in old else "has changed"
            return f"the source file {name} {how} since the shard was made"
    for name in (field.name for field in fields(ShardManifest) if field.name not in _MAY_DIFFER):
        found, wanted = getattr(manifest, name), getattr(expected, name)
        if found != wanted:
            return f"its {name} is {found!s:.200} where now it would be {wanted!s:.200}"
    return ""


def _other_bytes(prefix: str, expected_prefix: str) -> str:
    """The first of the files of two shards that differs; empty where none does."""
    for ending in (".bin", ".idx"):
        path, expected = prefix + ending, expected_prefix + ending
        with writing(path, "read"):
            if len({file_checksum(each) if os.path.exists(each) else "" for each in (path, expected)}) > 1:
                return f"{path} is missing, or is not what the sources give"
    return ""
