"""What a training takes from its data, for people who want to see it: the very samples, and each source's share."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import count
from typing import Any, cast

import numpy as np

from bloomery.base.errors import DataError
from bloomery.config.recipe import Recipe, SourceSection
from bloomery.data.batch import IGNORED_LABEL, Batch, SampleSource
from bloomery.data.blend import TimelessBlend
from bloomery.data.manifest import ShardManifest, file_of, read_manifest
from bloomery.data.megatron import MegatronSource
from bloomery.data.split import Part, part_range
from bloomery.data.stream import Stream
from bloomery.data.tokenizer import Tokenizer
from bloomery.data.trace import Trace

LM_LOSS = "lm loss"
_SAMPLES_AT_A_TIME = 32
_POSITIONS_AT_A_TIME = 1 << 20


def read_samples(
    stream: Stream, sections: Sequence[SourceSection], first: int, last: int, *, tokenizer: Tokenizer | None
) -> Iterator[dict[str, Any]]:
    """The samples at positions first..last of the run, both included, read as the training reads them.

    A public contract: `index`, `source`, `epoch`, `documents` ({document, start, tokens}), `tokens` with the last
    label behind the inputs. For masked samples `tokens` is what the model sees, and `labels` what it has to find.
    """
    manifests = {section.path: _manifest(section.path) for section in sections}
    for start in range(first, last + 1, _SAMPLES_AT_A_TIME):
        positions = np.arange(start, min(start + _SAMPLES_AT_A_TIME, last + 1))
        owners, ordinals = (found.tolist() for found in stream.blend.locate(positions))
        batch = stream.batch(start, len(positions))
        for row, (position, owner, ordinal) in enumerate(zip(positions, owners, ordinals, strict=True)):
            source, section = stream.sources[owner], sections[owner]
            trace: Trace = cast(Any, source).trace(int(ordinal))
            tokens, extra = _row(batch, row, source, trace)
            yield {
                "index": int(position),
                "source": source.key,
                "epoch": trace.epoch,
                "sample": trace.sample,
                "shard": section.path,
                "documents": [_span(span, manifests[section.path], section.path) for span in trace.documents],
                "tokens": tokens,
                **extra,
                "text": None if tokenizer is None else tokenizer.decode(tokens),
            }


def samples_taken(stream: Stream, consumed_samples: int) -> list[int]:
    """How many of the first `consumed_samples` of the run each source gives."""
    if isinstance(stream.blend, TimelessBlend):
        by_key = stream.blend.taken(consumed_samples)
        return [int(by_key[key]) for key in stream.keys]
    counts = np.zeros(len(stream.sources), np.int64)
    for start in range(0, consumed_samples, _POSITIONS_AT_A_TIME):
        positions = np.arange(start, min(start + _POSITIONS_AT_A_TIME, consumed_samples))
        counts += np.bincount(stream.blend.locate(positions)[0], minlength=len(counts))
    return [int(count) for count in counts]


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
    for number, (source, section) in enumerate(zip(stream.sources, sections, strict=True)):
        taken, epoch_samples = at_end[number], source.num_samples
        sources.append(
            {
                "source": source.key,
                "shard": section.path,
                "document_range": document_range(recipe, source, "train"),
                "samples_per_epoch": epoch_samples,
                "weight": float(weights[number]),
                "achieved": (taken - at_first[number]) / max(1, train_samples - first),
                "samples_taken": taken,
                "epochs": epochs_of(source, taken),
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


def epochs_of(source: SampleSource, taken: int) -> float:
    """How often a training goes through a source from which it takes so many samples."""
    return source.epochs(taken) if isinstance(source, MegatronSource) else taken / source.num_samples


def _standing(source: SampleSource, position: int, taken: int) -> dict[str, Any]:
    """Where a source stands at a position of the run; in no epoch where several are shuffled together."""
    epoch: int | None
    sample: int | None
    epoch, sample = divmod(taken, source.num_samples)
    if isinstance(source, MegatronSource):
        epoch, sample = source.standing(taken)
    facts = {"samples": position, "samples_taken": taken, "epochs": epochs_of(source, taken)}
    return {**facts, "epoch": epoch, "sample_of_epoch": sample}


def first_position(stream: Stream) -> int:
    """Where the stream's weights begin to hold: 0, or where a resumed run changed them."""
    return stream.blend.state.first_sample if isinstance(stream.blend, TimelessBlend) else 0


def document_range(recipe: Recipe, source: SampleSource, part: Part) -> list[int]:
    """Documents [first, last) of the shard that the source reads, at least a sequence of each."""
    assert recipe.data is not None
    shard = cast(Any, source).shard
    if isinstance(source, MegatronSource):
        return list(shard.index.documents_of(*source.sequences))
    if recipe.data.split is None:
        return [0, int(shard.num_documents)]
    return list(part_range(recipe.data.split, part, shard.num_documents, place=f"{shard.prefix}.idx"))


def _row(batch: Batch, row: int, source: SampleSource, trace: Trace) -> tuple[list[int], dict[str, Any]]:
    """(tokens, what else there is to say) of one sample of a batch."""
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
    """The position of the run at which each source begins its second epoch; None where that is never, was earlier than
    the stream goes back, or where epochs are shuffled together."""
    found: list[int | None] = [None] * len(stream.sources)
    if not isinstance(stream.blend, TimelessBlend):
        second = {
            number: source.shape.samples_shuffled_first
            for number, source in enumerate(cast(Sequence[MegatronSource], stream.sources))
            if source.standing(0)[0] == 0 and source.shape.samples_shuffled_first < at_end[number]
        }
        return [
            _position_of(stream, number, second[number]) if number in second else None for number in range(len(found))
        ]
    first = first_position(stream)
    at_first = samples_taken(stream, first)
    for number, source in enumerate(stream.sources):
        wanted = source.num_samples
        if at_first[number] <= wanted < at_end[number]:
            taken = partial(_taken_of, stream, number)
            found[number] = bisect_right(range(train_samples + 1), wanted, lo=first, key=taken) - 1
    return found


def _position_of(stream: Stream, number: int, ordinal: int) -> int:
    """Of a sample of a source, which the training takes."""
    for start in count(0, _POSITIONS_AT_A_TIME):
        positions = np.arange(start, min(start + _POSITIONS_AT_A_TIME, cast(Any, stream.blend).size))
        owners, ordinals = stream.blend.locate(positions)
        if len(hit := positions[(owners == number) & (ordinals == ordinal)]):
            return int(hit[0])
    raise AssertionError


def _taken_of(stream: Stream, number: int, position: int) -> int:
    return samples_taken(stream, position)[number]


def _manifest(path: str) -> ShardManifest | None:
    try:
        return read_manifest(path)
    except DataError:  # opening the data has already judged it
        return None


def _span(span: Any, manifest: ShardManifest | None, prefix: str) -> dict[str, Any]:
    facts: dict[str, Any] = {"document": span.document, "start": span.start, "tokens": span.tokens}
    if manifest is not None and (origin := file_of(span.document, manifest, prefix)):
        facts["origin"] = origin
    return facts
