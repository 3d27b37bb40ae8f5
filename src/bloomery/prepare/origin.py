"""What a shard is made from, as its manifest says it; and whether a shard that is there was made from just that."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace

import xxhash

from bloomery import __version__
from bloomery.base.errors import DataError
from bloomery.data.manifest import ShardManifest, SourceCount, SourceFile, check_describes, read_manifest
from bloomery.data.shards import ShardReader
from bloomery.prepare.parts import Part
from bloomery.prepare.read import hash_piece
from bloomery.prepare.sources import InputFile
from bloomery.prepare.tokenize import Settings
from bloomery.prepare.units import Unit

_FIELDS_OF_THEIR_OWN = ("tokenizer_hash", "dtype", "eod_id", "shuffle_seed")


def planned_manifest(settings: Settings, vocab_size: int, sources: Sequence[str]) -> ShardManifest:
    """The manifest, but for what is known only at the end."""
    return ShardManifest(
        tokenizer_hash=settings.tokenizer_hash,
        vocab_size=vocab_size,
        dtype=settings.dtype,
        eod_id=settings.eod_id,
        append_eod=settings.eod_id is not None,
        shuffle_seed=settings.shuffle_seed,
        documents=0,
        sequences=0,
        tokens=0,
        sources=tuple(SourceCount(name, 0, 0, 0) for name in sources),
        source_files=(),
        dropped={},
        settings={name: value for name, value in asdict(settings).items() if name not in _FIELDS_OF_THEIR_OWN},
        encoder="",
        bloomery_version=__version__,
    )


def source_files(files: Sequence[InputFile], units: Sequence[Unit], parts: Sequence[Part]) -> tuple[SourceFile, ...]:
    digests: dict[int, list[str]] = {}
    for unit, part in zip(units, parts, strict=True):
        for piece, (digest, _) in zip(unit.pieces, part.inputs, strict=True):
            digests.setdefault(piece.file.number, []).append(digest)
    return tuple(SourceFile(file.name, file.size, _combined(digests[file.number]), file.stamp) for file in files)


def finished(
    planned: ShardManifest, output: str, files: Sequence[InputFile], units: Sequence[Unit]
) -> ShardManifest | None:
    """The manifest of a shard that was made as planned, from these files, and is whole."""
    try:
        found = read_manifest(output)
        if found is None or _before_the_work(found) != _before_the_work(planned):
            return None
        if not _same_files(found.source_files, files, units):
            return None
        with ShardReader(output) as shard:
            whole = not check_describes(found, shard, place=output)
    except DataError:
        return None
    return found if whole else None


def _before_the_work(manifest: ShardManifest) -> ShardManifest:
    return replace(
        manifest,
        documents=0,
        sequences=0,
        tokens=0,
        sources=tuple(SourceCount(source.name, 0, 0, 0) for source in manifest.sources),
        source_files=(),
        dropped={},
        encoder="",
        bloomery_version="",
        index_hash=None,
    )


def _same_files(known: Sequence[SourceFile], files: Sequence[InputFile], units: Sequence[Unit]) -> bool:
    """By name, size and stamp; where the stamp is another one, by content."""
    if [(file.name, file.bytes) for file in known] != [(file.name, file.size) for file in files]:
        return False
    changed = {now.number: old.hash for old, now in zip(known, files, strict=True) if old.stamp != now.stamp}
    digests: dict[int, list[str]] = {}
    for unit in units:
        for piece in unit.pieces:
            if piece.file.number in changed:
                digests.setdefault(piece.file.number, []).append(hash_piece(piece))
    return all(_combined(found) == changed[number] for number, found in digests.items())


def _combined(digests: list[str]) -> str:
    return digests[0] if len(digests) == 1 else xxhash.xxh3_128("".join(digests).encode()).hexdigest()
