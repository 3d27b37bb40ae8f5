"""What is in the shards, and what a training takes from them, for people who want to see it."""

from __future__ import annotations

import os
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from typing import Any, cast

import numpy as np

from bloomery.base.errors import DataError
from bloomery.config.recipe import Recipe, SourceSection
from bloomery.data.batch import Batch, SampleSource, Stream, Trace
from bloomery.data.blend import TimelessBlend
from bloomery.data.causal import ShardSource
from bloomery.data.manifest import ShardManifest, check_describes, file_of, manifest_path, read_manifest
from bloomery.data.megatron import MegatronSource
from bloomery.data.open import OpenData
from bloomery.data.shards import ShardReader
from bloomery.data.tokenizer import Tokenizer
from bloomery.families.family import IGNORED_LABEL, LM_LOSS

_SAMPLES_AT_A_TIME = 32


def read_samples(
    stream: Stream, sections: Sequence[SourceSection], first: int, last: int, *, tokenizer: Tokenizer | None
) -> Iterator[dict[str, Any]]:
    """The samples at positions first..last of the run, both included, read as the training reads them.

    A public contract: `index`, `source`, `epoch`, `documents` ({document, start, tokens}), `tokens` with the last
    label behind the inputs. For masked samples `tokens` is what the model sees, and `labels` what it has to find.
    """
    manifests = {section.path: read_manifest(section.path) for section in sections}
    for start in range(first, last + 1, _SAMPLES_AT_A_TIME):
        positions = np.arange(start, min(start + _SAMPLES_AT_A_TIME, last + 1))
        owners, ordinals = (found.tolist() for found in stream.blend.locate(positions))
        batch = stream.batch(start, len(positions))
        for row, (position, owner, ordinal) in enumerate(zip(positions, owners, ordinals, strict=True)):
            source, path = stream.sources[owner], sections[owner].path
            trace: Trace = cast(Any, source).trace(int(ordinal))
            tokens, extra = _row(batch, row, source, trace)
            yield {
                "index": int(position),
                "source": source.key,
                "epoch": trace.epoch,
                "sample": trace.sample,
                "shard": path,
                "documents": [
                    {**asdict(span), **_origin(span.document, path, manifests[path])} for span in trace.documents
                ],
                "tokens": tokens,
                **extra,
                "text": None if tokenizer is None else tokenizer.decode(tokens),
            }


def samples_taken(stream: Stream, consumed_samples: int) -> list[int]:
    """How many of the first `consumed_samples` of the run each source gives."""
    taken = stream.blend.taken(consumed_samples)
    return [taken[key] for key in stream.keys]


def _sources(stream: Stream) -> Sequence[ShardSource]:
    return cast(Sequence[ShardSource], stream.sources)


def order_facts(recipe: Recipe, stream: Stream, *, train_samples: int, at_samples: Sequence[int]) -> dict[str, Any]:
    """The JSON of `inspect order`: a public contract. `epoch` counts from 0, `samples_taken` before that position."""
    assert recipe.data is not None
    sections = recipe.data.train
    first = first_position(stream)
    weights = np.array([section.weight for section in sections])
    weights = weights / weights.sum()
    at_first, at_end = samples_taken(stream, first), samples_taken(stream, train_samples)
    at = {position: samples_taken(stream, position) for position in at_samples}
    repeats = _first_repeats(stream, at_end, train_samples)
    sources = []
    for number, (source, section) in enumerate(zip(_sources(stream), sections, strict=True)):
        taken, epoch_samples = at_end[number], source.num_samples
        sources.append(
            {
                "source": source.key,
                "shard": section.path,
                "document_range": list(source.documents),
                "samples_per_epoch": epoch_samples,
                "weight": float(weights[number]),
                "achieved": (taken - at_first[number]) / max(1, train_samples - first),
                "samples_taken": taken,
                "epochs": source.epochs(taken),
                "first_repeat_at": repeats[number],
                "at": [_standing(source, position, counts[number]) for position, counts in at.items()],
            }
        )
    return {
        "name": recipe.name,
        "order": recipe.data.order,
        "seed": recipe.seed,
        "train_samples": train_samples,
        "first_sample": first,
        "sources": sources,
    }


def _standing(source: ShardSource, position: int, taken: int) -> dict[str, Any]:
    """Where a source stands at a position of the run; in no epoch where several are shuffled together."""
    epoch, sample = source.standing(taken)
    facts = {"samples": position, "samples_taken": taken, "epochs": source.epochs(taken)}
    return {**facts, "epoch": epoch, "sample_of_epoch": sample}


def first_position(stream: Stream) -> int:
    """Where the stream's weights begin to hold: 0, or where a resumed run changed them."""
    return stream.blend.state.first_sample if isinstance(stream.blend, TimelessBlend) else 0


def _row(batch: Batch, row: int, source: SampleSource, trace: Trace) -> tuple[list[int], dict[str, Any]]:
    """(tokens, other facts) of one sample of a batch."""
    tokens = batch.inputs["tokens"][row].tolist()
    labels = batch.targets[LM_LOSS][row].tolist()
    if set(batch.targets) != {LM_LOSS} or "attention_mask" in batch.inputs:
        return _masked_row(batch, row, tokens, labels)
    last = labels[-1]
    if last == IGNORED_LABEL:  # the label has no loss, but the token is there
        shard, span = cast(Any, source).shard, trace.documents[-1]
        last = int(shard.read(shard.index.document_start(span.document) + span.start + span.tokens - 1, 1)[0])
    silent = [position for position, label in enumerate(labels) if label == IGNORED_LABEL]
    return [*tokens, last], {"no_loss": silent} if silent else {}


def _masked_row(batch: Batch, row: int, tokens: list[int], labels: list[int]) -> tuple[list[int], dict[str, Any]]:
    if (mask := batch.inputs.get("attention_mask")) is not None:
        tokens = tokens[: int(mask[row].sum())]  # padding stands at the end
    found: dict[str, Any] = {
        LM_LOSS: [
            {"position": position, "token": label} for position, label in enumerate(labels) if label != IGNORED_LABEL
        ]
    }
    found |= {name: targets[row].tolist() for name, targets in batch.targets.items() if name != LM_LOSS}
    return tokens, {"labels": found}


def _first_repeats(stream: Stream, at_end: Sequence[int], train_samples: int) -> list[int | None]:
    """The position of the run at which each source begins its second epoch; None where that is never, was before the
    present blend segment, or where epochs are shuffled together."""
    first, found = first_position(stream), list[int | None]()
    at_first = samples_taken(stream, first)
    for number, source in enumerate(stream.sources):
        epoch_samples = source.num_samples
        if isinstance(source, MegatronSource):
            is_alone = source.standing(0)[0] == 0
            epoch_samples = source.shape.samples_shuffled_first if is_alone else at_end[number]
        repeats = at_first[number] <= epoch_samples < at_end[number]
        position = bisect_right(range(train_samples + 1), epoch_samples, lo=first, key=_taken_of(stream, source.key))
        found.append(position - 1 if repeats else None)
    return found


def _taken_of(stream: Stream, key: str) -> Callable[[int], int]:
    return lambda position: stream.blend.taken(position)[key]


def _origin(document: int, prefix: str, manifest: ShardManifest | None) -> dict[str, str]:
    origin = manifest and file_of(document, manifest, prefix)
    return {"origin": origin} if origin else {}


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

    def row(group: str, source: ShardSource, path: str) -> dict[str, Any]:
        if path not in seen:
            seen[path] = shard_facts(path, quick=quick, eod_id=eod_id)
        facts = {"group": group, "source": source.key, **seen[path]}
        ranges = list(source.documents) if recipe.data and recipe.data.split else None
        return {**facts, "document_range": ranges, "samples_per_epoch": source.num_samples}

    sections = recipe.data.train
    sources = [row("train", *each) for each in zip(_sources(data.train), (one.path for one in sections), strict=True)]
    total_weight = sum(section.weight for section in sections)
    taken = samples_taken(data.train, train_samples)
    for facts, section, source, samples in zip(sources, sections, _sources(data.train), taken, strict=True):
        shares = {"weight": section.weight / total_weight, "samples_taken": samples}
        facts |= {**shares, "epochs": source.epochs(samples)}
    for group, stream in data.validation.items():
        own = recipe.data.validation.get(group, sections)
        sources += [row(group, *each) for each in zip(_sources(stream), (one.path for one in own), strict=True)]
    return {
        "name": recipe.name,
        "seq_length": recipe.model.seq_length,
        "vocab_size": recipe.model.vocab_size,
        "train_samples": train_samples,
        "sources": sources,
    }


def _eod_id(recipe: Recipe) -> int | None:
    """For shards without a manifest. None where that is unknown."""
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


def unigram_entropy(shard: ShardReader, *, vocab_size: int) -> float:
    """Nats per token of a model that knows only how often each token occurs: the loss to beat."""
    counts = np.zeros(vocab_size, dtype=np.int64)
    for tokens in shard.blocks():
        counts += np.bincount(tokens, minlength=vocab_size)[:vocab_size]
    shares = counts[counts > 0] / counts.sum()
    return float(-(shares * np.log(shares)).sum())
