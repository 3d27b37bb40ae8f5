"""What is in the shards, and what a training takes from them, for people who want to see it."""

import os
from collections.abc import Iterator
from dataclasses import asdict, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bloomery.base.doing import doing
from bloomery.config.recipe import Recipe
from bloomery.data.batch import Batch, ShardSource, Stream
from bloomery.data.blend import TimelessBlend
from bloomery.data.manifest import manifest_of
from bloomery.data.open import OpenData
from bloomery.data.shards import ShardReader, damaged
from bloomery.data.tokenizer_files import HIGHEST_ID
from bloomery.families.family import IGNORED_LABEL, LM_LOSS


def read_samples(data: OpenData, first: int, last: int) -> Iterator[dict[str, Any]]:
    """The samples at positions first..last of the run, both included, read as the training reads them.

    A public contract: `index`, `source`, `epoch`, `documents` ({document, start, tokens}), `tokens` with the last
    label behind the inputs. For masked samples `tokens` is what the model sees, and `labels` what it has to find.
    """
    stream = data.train
    for position in range(first, last + 1):
        owners, ordinals = stream.blend.locate(np.array([position]))
        source = stream.sources[owners[0]]
        (epoch,), (sample,) = (found.tolist() for found in source.locate(ordinals))
        spans = [span for stretch in source.stretches(sample) for span in document_spans(source.shard, *stretch)]
        tokens, labels = _tokens_and_labels(stream.batch(position, 1), source, sample)
        yield {
            "index": position,
            "source": source.key,
            "epoch": epoch,
            "sample": sample,
            "shard": source.shard.prefix,
            "documents": spans,
            "tokens": tokens,
            **labels,
            "text": None if data.tokenizer is None else data.tokenizer.decode(tokens),
        }


def document_spans(shard: ShardReader, start: int, stop: int) -> Iterator[dict[str, Any]]:
    """The documents that tokens [start, stop) of a shard belong to, in order."""
    while start < stop:
        document, position = shard.document_at(start)
        end = min(stop, shard.document_start(document + 1))
        yield {"document": document, "start": position, "tokens": end - start}
        start = end


def _tokens_and_labels(batch: Batch, source: ShardSource, sample: int) -> tuple[list[int], dict[str, Any]]:
    """(tokens, facts about labels) of a batch of this sample."""
    tokens, labels = (tensor[0].tolist() for tensor in (batch.inputs["tokens"], batch.targets[LM_LOSS]))
    if (mask := batch.inputs.get("attention_mask")) is None:
        end = source.stretches(sample)[-1][1]  # not of the labels: that one may have no loss
        silent = [position for position, label in enumerate(labels) if label == IGNORED_LABEL]
        return [*tokens, int(source.shard.read(end - 1, 1)[0])], {"no_loss": silent} if silent else {}
    found = [{"position": at, "token": label} for at, label in enumerate(labels) if label != IGNORED_LABEL]
    others = {name: targets[0].tolist() for name, targets in batch.targets.items() if name != LM_LOSS}
    return tokens[: int(mask.sum())], {"labels": {LM_LOSS: found, **others}}  # padding stands at the end


def first_position(stream: Stream) -> int:
    """Where the stream's weights begin to hold: 0, or where a resumed run changed them."""
    return stream.blend.state.first_sample if isinstance(stream.blend, TimelessBlend) else 0


def order_facts(recipe: Recipe, stream: Stream, *, train_samples: int) -> dict[str, Any]:
    """The JSON of `inspect order`: a public contract."""
    assert recipe.data is not None
    first, total_weight = first_position(stream), sum(section.weight for section in recipe.data.train)
    before, after = stream.blend.taken(first), stream.blend.taken(train_samples)
    sources = []
    for source, section in zip(stream.sources, recipe.data.train, strict=True):
        taken = after[source.key]
        sources.append(
            {
                "source": source.key,
                "shard": section.path,
                "document_range": list(source.documents),
                "samples_per_epoch": source.num_samples,
                "weight": section.weight / total_weight,
                "achieved": (taken - before[source.key]) / max(1, train_samples - first),
                "samples_taken": taken,
                "epochs": source.epochs(taken),
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


def recipe_facts(recipe: Recipe, data: OpenData, *, train_samples: int, quick: bool) -> dict[str, Any]:
    """The JSON of `inspect data RECIPE`: a public contract. Validation sources have no weight and no epochs."""
    assert recipe.data is not None
    eod_id = data.tokenizer.eod_id if data.tokenizer and data.tokenizer.end_of_document else None
    seen: dict[str, dict[str, Any]] = {}
    rows = []
    for group, stream in {"train": data.train, **data.validation, **data.test}.items():
        for source in stream.sources:
            path = source.shard.prefix
            if path not in seen:
                seen[path] = shard_facts(path, quick=quick, eod_id=eod_id)
            ranges = {"document_range": list(source.documents) if recipe.data.split else None}
            facts = {"group": group, "source": source.key, **seen[path], **ranges}
            rows.append({**facts, "samples_per_epoch": source.num_samples})
    order = order_facts(recipe, data.train, train_samples=train_samples)
    for facts, taken in zip(rows, order["sources"], strict=False):
        facts |= {name: taken[name] for name in ("weight", "samples_taken", "epochs")}
    return {
        "name": recipe.name,
        "seq_length": recipe.model.seq_length,
        "vocab_size": recipe.model.vocab_size,
        "train_samples": train_samples,
        "sources": rows,
    }


def shard_facts(prefix: str, *, quick: bool, eod_id: int | None = None) -> dict[str, Any]:
    """One shard, from its index and, unless `quick`, from all its tokens. DataError where it is damaged or its
    manifest is of another."""
    with doing(f"reading {prefix}"), ShardReader(prefix) as shard:
        lengths = np.diff(shard.document_starts())
        manifest = manifest_of(shard)
        facts = {
            "shard": prefix,
            "documents": shard.num_documents,
            "sequences": shard.num_sequences,
            "tokens": shard.num_tokens,
            "bytes": os.path.getsize(f"{prefix}.bin"),
            "dtype": shard.dtype.name,
            "document_tokens": {
                "mean": float(lengths.mean()) if len(lengths) else 0.0,
                "median": float(np.median(lengths)) if len(lengths) else 0.0,
                "max": int(lengths.max(initial=0)),
            },
            "vocabulary": None if quick else _vocabulary(shard, manifest.eod_id if manifest else eod_id),
        }
    if manifest is None:
        return {**facts, "manifest": None}
    without_files = asdict(replace(manifest, source_files=()))  # there may be many thousands
    return {**facts, "manifest": {**without_files, "source_files": len(manifest.source_files)}}


def _vocabulary(shard: ShardReader, eod_id: int | None) -> dict[str, Any]:
    counts = _token_counts(shard)
    share = None if eod_id is None else int(counts[eod_id : eod_id + 1].sum()) / max(1, shard.num_tokens)
    distinct = int((counts > 0).sum())
    return {"distinct_ids": distinct, "max_id": len(counts) - 1, "eod_id": eod_id, "eod_share": share}


def unigram_entropy(shard: ShardReader) -> float:
    """Nats per token of a model that knows only how often each token occurs: the loss to beat."""
    counts = _token_counts(shard)
    shares = counts[counts > 0] / counts.sum()
    return float(-(shares * np.log(shares)).sum())


def _token_counts(shard: ShardReader) -> NDArray[np.int64]:
    """How often each id occurs. DataError for what is no id."""
    counts = np.zeros(1, np.int64)
    for tokens in shard.blocks():
        low, high = int(tokens.min()), int(tokens.max())
        if low < 0 or high > HIGHEST_ID:
            rule = f"token ids are from 0 to {HIGHEST_ID:,}"
            raise damaged(f"{shard.prefix}.bin", f"holds tokens from {low:,} to {high:,}", rule)
        new = np.bincount(tokens, minlength=len(counts))
        new[: len(counts)] += counts
        counts = new
    return counts
