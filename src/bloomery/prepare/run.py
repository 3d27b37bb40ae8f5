"""`bloomery prepare`: read the sources, order the documents, tokenize them, write one shard and its manifest."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace

import numpy as np

from bloomery import __version__
from bloomery.base.errors import DataError, Problem
from bloomery.config.recipe import PrepareSection
from bloomery.data.manifest import ShardManifest, SourceCount, manifest_path, read_manifest
from bloomery.data.shards import ShardReader, ShardWriter, token_dtype
from bloomery.data.tokenizer import Tokenizer
from bloomery.prepare.sources import Document, ReadCounts, iter_documents

_BATCH_BYTES = 1 << 20
"""Text tokenized at a time: the library keeps some hundred bytes for each token of a batch."""


@dataclass(frozen=True)
class Progress:
    """How far a preparation is."""

    documents: int
    total_documents: int
    bytes: int
    total_bytes: int
    tokens: int


@dataclass(frozen=True)
class PrepareResult:
    manifest: ShardManifest
    reused: bool
    """True when the shard was already there, made from the same texts in the same way, and was left as it is."""
    empty_documents: int
    """Dropped: nothing in them."""
    undecodable_documents: int
    """Dropped: not UTF-8."""


@dataclass(frozen=True)
class _Text:
    """A document on its way, with the source it counts for."""

    source: int
    document: Document
    bytes: int


@dataclass
class _Total:
    documents: int = 0
    tokens: int = 0
    bytes: int = 0


def prepare(
    section: PrepareSection,
    *,
    tokenizer: Tokenizer,
    seed: int,
    progress: Callable[[Progress], None] | None = None,
) -> PrepareResult:
    """Makes the shard `section.output` from its sources. The same inputs always give the same bytes."""
    counts = ReadCounts()
    texts = _read_sources(section, counts)
    sources_hash = _hash(texts)
    plan = ShardManifest(
        tokenizer_hash=tokenizer.content_hash,
        vocab_size=tokenizer.vocab_size,
        dtype=token_dtype(tokenizer.vocab_size).name,
        eod_id=tokenizer.eod_id if section.append_eod else None,
        append_eod=section.append_eod,
        shuffle_seed=seed if section.shuffle else None,
        documents=0,
        tokens=0,
        sources=(),
        source_files=counts.files,
        sources_hash=sources_hash,
        bloomery_version=__version__,
    )
    manifest, reused = _matching(section.output, plan), True
    if manifest is None:
        if section.shuffle:
            texts.sort(key=lambda text: _shuffle_key(seed, text.document.name))
        manifest, reused = _write(section, plan, texts, tokenizer, counts, progress), False
    return PrepareResult(manifest, reused, counts.empty, counts.undecodable)


def _read_sources(section: PrepareSection, counts: ReadCounts) -> list[_Text]:
    texts: list[_Text] = []
    for number, source in enumerate(section.sources):
        before = len(texts)
        for document in iter_documents(source, counts):
            texts.append(_Text(number, document, len(document.text.encode())))
        if len(texts) == before:
            raise DataError(
                Problem(
                    what=f"the source '{source}' holds no text",
                    rule=f"of all documents so far {counts.empty} were empty and {counts.undecodable} were not UTF-8",
                    remedy="remove it from prepare.sources, or correct the path",
                    place=source,
                )
            )
    return texts


def _hash(texts: list[_Text]) -> str:
    """Of names and texts: what the shard is made from, wherever the working directory is."""
    combined = hashlib.sha256()
    for text in texts:
        combined.update(hashlib.sha256(text.document.name.encode(errors="surrogateescape")).digest())
        combined.update(hashlib.sha256(text.document.text.encode()).digest())
    return combined.hexdigest()


def _shuffle_key(seed: int, name: str) -> bytes:
    """Documents sorted by this stand in a random order that adding or removing others does not change."""
    return hashlib.sha256(f"{seed}\0{name}".encode(errors="surrogateescape")).digest()


def _matching(prefix: str, plan: ShardManifest) -> ShardManifest | None:
    """The manifest of a shard that was made as planned and is whole."""
    try:
        found = read_manifest(prefix)
        if found is None:
            return None
        made_alike = replace(
            plan,
            documents=found.documents,
            tokens=found.tokens,
            sources=found.sources,
            bloomery_version=found.bloomery_version,
        )
        if found != made_alike:
            return None
        with ShardReader(prefix) as shard:
            whole = (shard.num_documents, shard.num_tokens) == (found.documents, found.tokens)
    except DataError:
        return None
    return found if whole else None


def _write(
    section: PrepareSection,
    plan: ShardManifest,
    texts: list[_Text],
    tokenizer: Tokenizer,
    counts: ReadCounts,
    progress: Callable[[Progress], None] | None,
) -> ShardManifest:
    totals = [_Total() for _ in section.sources]
    done, done_bytes, all_bytes = 0, 0, sum(text.bytes for text in texts)
    ending = np.array([] if plan.eod_id is None else [plan.eod_id], dtype=np.int64)
    with ShardWriter(section.output, plan.dtype) as writer:
        for batch in _batches(texts):
            for text, tokens in zip(batch, tokenizer.encode_batch([text.document.text for text in batch]), strict=True):
                if not len(tokens):  # a normalizer can leave nothing of a text
                    counts.empty += 1
                    continue
                writer.append(np.concatenate((tokens, ending)))
                total = totals[text.source]
                total.documents, total.bytes = total.documents + 1, total.bytes + text.bytes
                total.tokens += len(tokens) + len(ending)
            done, done_bytes = done + len(batch), done_bytes + sum(text.bytes for text in batch)
            if progress is not None:
                progress(Progress(done, len(texts), done_bytes, all_bytes, writer.num_tokens))
        # An older manifest must not describe the new shard, not even for the moment until its own is written.
        with suppress(FileNotFoundError):
            os.unlink(manifest_path(section.output))
    manifest = replace(
        plan,
        documents=writer.num_documents,
        tokens=writer.num_tokens,
        sources=tuple(
            SourceCount(name, total.documents, total.tokens, total.bytes)
            for name, total in zip(section.sources, totals, strict=True)
        ),
    )
    manifest.write(section.output)
    return manifest


def _batches(texts: list[_Text]) -> Iterator[list[_Text]]:
    batch: list[_Text] = []
    size = 0
    for text in texts:
        batch.append(text)
        size += text.bytes
        if size >= _BATCH_BYTES:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch
