"""Shards in numbers: documents, tokens, lengths and how much of the vocabulary they use."""

from __future__ import annotations

import os
from dataclasses import asdict, replace
from typing import Any

import numpy as np

from bloomery.base.errors import DataError
from bloomery.config.recipe import Recipe
from bloomery.data.inspect import document_range, epochs_of, samples_taken
from bloomery.data.manifest import ShardManifest, check_describes, manifest_path, read_manifest
from bloomery.data.open import SPLIT_GROUP, OpenData
from bloomery.data.shards import ShardReader
from bloomery.data.split import Part
from bloomery.data.stream import Stream
from bloomery.data.tokenizer import Tokenizer

_COUNTED_IDS = 1 << 24
"""Larger ids are no vocabulary; a table of counts for them could fill the memory."""


def shard_facts(prefix: str, *, quick: bool, eod_id: int | None = None) -> dict[str, Any]:
    """One shard, from its index and, unless `quick`, from all its tokens. DataError where it is damaged or its
    manifest is of another."""
    with ShardReader(prefix) as shard:
        lengths = np.diff(shard.index.document_starts())
        manifest = read_manifest(prefix)
        if manifest and (problems := check_describes(manifest, shard, place=manifest_path(prefix))):
            raise DataError(problems)
        eod_id = manifest.eod_id if manifest else eod_id
        return {
            "shard": prefix,
            "documents": shard.num_documents,
            "sequences": shard.num_sequences,
            "tokens": shard.num_tokens,
            "bytes": os.path.getsize(f"{prefix}.bin"),
            "dtype": shard.dtype.name,
            "document_tokens": {
                "mean": float(lengths.mean()) if len(lengths) else 0.0,
                "median": float(np.median(lengths)) if len(lengths) else 0.0,
                "max": int(lengths.max()) if len(lengths) else 0,
            },
            "vocabulary": None if quick else _vocabulary(shard, eod_id),
            "manifest": None if manifest is None else _manifest_facts(manifest),
        }


def recipe_facts(recipe: Recipe, data: OpenData, *, train_samples: int, quick: bool) -> dict[str, Any]:
    """The JSON of `inspect data RECIPE`: a public contract. Validation sources have no weight and no epochs."""
    assert recipe.data is not None
    seen: dict[str, dict[str, Any]] = {}
    eod_id = _eod_id(recipe)

    def rows(group: str, stream: Stream, paths: list[str]) -> list[dict[str, Any]]:
        found = []
        for source, path in zip(stream.sources, paths, strict=True):
            if path not in seen:
                seen[path] = shard_facts(path, quick=quick, eod_id=eod_id)
            part: Part = "valid" if group == SPLIT_GROUP else "train"
            is_split = recipe.data is not None and recipe.data.split is not None
            found.append(
                {
                    "group": group,
                    "source": source.key,
                    **seen[path],
                    "document_range": document_range(recipe, source, part) if is_split else None,
                    "samples_per_epoch": source.num_samples,
                }
            )
        return found

    sections = recipe.data.train
    sources = rows("train", data.train, [section.path for section in sections])
    total_weight = sum(section.weight for section in sections)
    taken = samples_taken(data.train, train_samples)
    for row, section, source, samples in zip(sources, sections, data.train.sources, taken, strict=True):
        row["weight"] = section.weight / total_weight
        row["samples_taken"] = samples
        row["epochs"] = epochs_of(source, samples)
    for group, stream in data.validation.items():
        own = recipe.data.validation.get(group, sections)
        sources += rows(group, stream, [section.path for section in own])
    return {
        "name": recipe.name,
        "seq_length": recipe.model.seq_length,
        "vocab_size": recipe.model.vocab_size,
        "train_samples": train_samples,
        "sources": sources,
    }


def _eod_id(recipe: Recipe) -> int | None:
    """For shards without a manifest. None where nothing tells."""
    try:
        return Tokenizer.load(recipe.tokenizer.path).eod_id if recipe.tokenizer else None
    except DataError:
        return None


def _vocabulary(shard: ShardReader, eod_id: int | None) -> dict[str, Any]:
    counts = np.zeros(1, np.int64)
    largest, smallest, outside = 0, 0, 0
    for tokens in shard.blocks():
        high, low = int(tokens.max()), int(tokens.min())
        largest, smallest = max(largest, high), min(smallest, low)
        if high >= _COUNTED_IDS or low < 0:
            inside = tokens[(tokens >= 0) & (tokens < _COUNTED_IDS)]
            outside, tokens = outside + len(tokens) - len(inside), inside
        new = np.bincount(tokens, minlength=len(counts))
        new[: len(counts)] += counts
        counts = new
    facts: dict[str, Any] = {"distinct_ids": int((counts > 0).sum()), "max_id": largest, "eod_id": eod_id}
    if outside:  # damaged, or made by something that is no tokenizer
        facts |= {"min_id": smallest, "ids_that_are_none": outside}
    eod = int(counts[eod_id]) if eod_id is not None and eod_id < len(counts) else 0
    facts["eod_share"] = None if eod_id is None else eod / max(1, shard.num_tokens)
    return facts


def _manifest_facts(manifest: ShardManifest) -> dict[str, Any]:
    """Without the list of files, of which there may be many thousands."""
    return {**asdict(replace(manifest, source_files=())), "source_files": len(manifest.source_files)}
