"""Sources and blends in the order of megatron-core or of BigScience's Megatron-DeepSpeed, to continue their runs.

The order follows from how many samples the run requests: the same recipe with another length is another order. Indices
are built once and kept in a cache; how they are built is in megatron_order.py.
"""

from __future__ import annotations

import fcntl
import json
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, Literal, cast

import numpy as np
import xxhash
from numpy.typing import NDArray

from bloomery.base.bounded import read_json
from bloomery.base.errors import DataError, Problem, RecipeError, StorageError
from bloomery.base.storage import open_plain, publish, reason, remove_tree
from bloomery.config.recipe import Recipe, SourceSection
from bloomery.data.batch import Batch, DocumentSpan, SampleSource, Stream, Trace, causal_batch
from bloomery.data.causal import DataCursor, ShardSource, check_ids
from bloomery.data.megatron_order import BlendRequest, Flavour, OrderShape, SampleIndex, build_blend, build_index
from bloomery.data.shards import file_checksum
from bloomery.sizing.schedule import TrainingPlan

_COUNTED_AT_A_TIME = 1 << 24
_FORMAT = 1
"""Counted up when the meaning of an entry changes, so that older ones are left alone."""
Arrays = dict[str, NDArray[Any]]


class MegatronSource(ShardSource):
    """Ordinals count the samples of the reference's dataset, from 0 to `total_samples`; there it ends."""

    def __init__(self, prefix: str, *, flavour: Flavour, samples: int, cache: IndexCache, **settings: Any) -> None:
        """`samples` is what the run asks of this source: the number of epochs follows from it. `settings`: those of
        ShardSource."""
        self._flavour: Flavour = flavour
        self._samples, self._cache = samples, cache
        super().__init__(prefix, **settings)

    def _index_samples(self) -> None:
        self._starts = self.shard.index.sequence_starts()
        self.sequences = first, last = self._part_of(self.shard.num_sequences, self._flavour)
        """[first, last) of the shard: these orders cut it there, not between documents."""
        tokens = int(self._starts[last] - self._starts[first])
        if tokens == 0:
            what, rule = f"{self.where} has no tokens", "samples are cut from tokens"
            raise DataError(Problem(what, rule, "prepare text for it", f"{self.shard.prefix}.bin"))
        self.shape = OrderShape.of(
            self._flavour, tokens_per_epoch=tokens, seq_length=self.seq_length, samples=self._samples
        )
        self.index = self._index()

    @property
    def num_samples(self) -> int:
        """Samples of one epoch."""
        return max(1, (self.shape.tokens_per_epoch - 1) // self.seq_length)

    @property
    def total_samples(self) -> int:
        """Samples of all epochs; beyond them there is no order."""
        return self.shape.num_samples

    @property
    def documents(self) -> tuple[int, int]:
        return self.shard.index.documents_of(*self.sequences)

    def epochs(self, samples: int) -> float:
        """The end of the text need not be that of a sample."""
        return samples * self.seq_length / self.shape.tokens_per_epoch

    def standing(self, samples: int) -> tuple[int | None, int | None]:
        """(epoch, sample of it) behind so many; nothing among epochs that are shuffled together."""
        shape = self.shape
        if shape.separate_last and samples >= shape.samples_shuffled_first:
            return shape.epochs - 1, samples - shape.samples_shuffled_first
        return (0, samples) if shape.epochs - shape.separate_last == 1 else (None, None)

    def read(self, ordinals: NDArray[np.int64]) -> Batch:
        """The samples that a run takes from this source at these places."""
        rows = np.empty((len(ordinals), self.seq_length + 1), np.int64)
        for row, ordinal in zip(rows, ordinals, strict=True):
            for start, tokens in self._cut(row, int(ordinal)):
                tokens[:] = self.shard.read(start, len(tokens))
        if rows.size and rows.view(np.uint64).max() >= self.vocab_size:
            for row, ordinal in zip(rows, ordinals, strict=True):
                for start, tokens in self._cut(row, int(ordinal)):
                    check_ids(tokens[None], np.array([start]), shard=self.shard, vocab_size=self.vocab_size)
        return causal_batch(rows, self.packing)

    def trace(self, ordinal: int) -> Trace:
        """Where the sample at this place comes from. `epoch` counts tokens: epochs that are shuffled together mix."""
        stretches = self._stretches(ordinal)
        sample = int(self.index.shuffle[ordinal])
        spans = []
        for start, stop in stretches:
            document, position = self.shard.index.document_at(start)
            spans.append(DocumentSpan(document, position, stop - start))
        return Trace(self.key, sample * self.seq_length // self.shape.tokens_per_epoch, sample, spans)

    def _index(self) -> SampleIndex:
        first, last = self.sequences
        key = {
            "idx": file_checksum(f"{self.shard.prefix}.idx"),
            "sequences": [first, last],
            "tokens": self.shape.tokens_per_epoch,
            "seq_length": self.seq_length,
            "epochs": self.shape.epochs,
            "separate_last": self.shape.separate_last,
            "seed": self.seed,
        }
        build = partial(build_index, self._starts, first=first, last=last, shape=self.shape, seed=self.seed)
        return SampleIndex(**self._cache.arrays("samples", key, lambda: build().as_arrays()))

    def _cut(self, row: NDArray[np.int64], ordinal: int) -> Iterator[tuple[int, NDArray[np.int64]]]:
        """(first token in the shard, place in the row) of each stretch of a sample."""
        at = 0
        for start, stop in self._stretches(ordinal):
            yield start, row[at : at + stop - start]
            at += stop - start

    def _stretches(self, ordinal: int) -> list[tuple[int, int]]:
        """Tokens [start, stop) of the shard that make up a sample, in order."""
        if not 0 <= ordinal < self.total_samples:
            raise DataError(_exhausted(self.key, f"sample {ordinal} was requested", self.total_samples))
        sample = int(self.index.shuffle[ordinal])
        (first, offset), (last, end) = self.index.samples[sample : sample + 2].tolist()
        sequences = self.index.documents[first : last + 1]
        starts, stops = self._starts[sequences], self._starts[sequences + 1]
        stops[-1] = starts[-1] + end + 1
        starts[0] += offset
        return [(start, stop) for start, stop in zip(starts.tolist(), stops.tolist(), strict=True) if stop > start]


class GreedyBlend:
    """Positions to sources: each takes from the source that is furthest behind its share. Knows `size` positions."""

    def __init__(self, request: BlendRequest, sources: Sequence[MegatronSource], cache: IndexCache) -> None:
        """DataError if a source has fewer samples than the blend takes from it."""
        key = {"weights": [weight.hex() for weight in request.weights.tolist()], "size": request.size}
        arrays = cache.arrays("blend", key, lambda: build_blend(request.weights, request.size))
        self.size = request.size
        self._keys = [source.key for source in sources]
        self._sources, self._ordinals = arrays["sources"], arrays["ordinals"]
        problems = [
            _exhausted(source.key, f"the blend takes {count} samples from it", source.total_samples)
            for source, count in zip(sources, arrays["taken"].tolist(), strict=True)
            if count > source.total_samples
        ]
        if problems:
            raise DataError(problems)

    def locate(self, positions: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """(index of the source, ordinal within it) of each position."""
        positions = np.asarray(positions, np.int64)
        if positions.size and not 0 <= int(positions.min()) <= int(positions.max()) < self.size:
            what = f"samples {positions.min()} to {positions.max()} were requested"
            raise DataError(_exhausted("the blend", what, self.size))
        return self._sources[positions].astype(np.int64), np.array(self._ordinals[positions])

    def taken(self, consumed_samples: int) -> dict[str, int]:
        counts = np.zeros(len(self._keys), np.int64)
        for start in range(0, consumed_samples, _COUNTED_AT_A_TIME):
            part = self._sources[start : min(start + _COUNTED_AT_A_TIME, consumed_samples)]
            counts += np.bincount(part, minlength=len(counts))
        return dict(zip(self._keys, counts.tolist(), strict=True))


class OneSource:
    """No blend: the only source, from its first sample on."""

    def __init__(self, source: MegatronSource) -> None:
        self.size, self._key = source.total_samples, source.key

    def taken(self, consumed_samples: int) -> dict[str, int]:
        return {self._key: consumed_samples}

    def locate(self, positions: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        positions = np.asarray(positions, np.int64)
        return np.zeros_like(positions), positions


def _exhausted(name: str, what: str, have: int) -> Problem:
    return Problem(
        what=f"{name}: {what}, but it has {have}",
        rule="in the megatron and bigscience orders a source ends after the samples the run requested",
        remedy="give train.for the length of the run to be continued, or use data.order=timeless",
    )


Use = Literal["train", "validation"]
MAX_SEED = 2**32 - 1
"""RandomState takes no larger one."""


def wanted_samples(recipe: Recipe, plan: TrainingPlan, use: Use) -> int:
    """What Megatron asks of its datasets, for validation of all evaluations of the run together. Its orders follow from
    these numbers."""
    if use == "train":
        return plan.asked_samples
    evaluate = recipe.train.evaluate
    steps = (plan.train_steps // evaluate.every.count + 1) * evaluate.steps if evaluate else 0
    return steps * recipe.batch.global_batch_size


class MegatronOpening:
    """Opens the sources and blends of one recipe."""

    def __init__(self, recipe: Recipe, plan: TrainingPlan, flavour: Flavour) -> None:
        assert recipe.data is not None
        if recipe.seed > MAX_SEED:
            rule = f"with data.order={flavour} it is at most {MAX_SEED}"
            raise RecipeError(Problem(f"seed is {recipe.seed}", rule, "use the seed of the run to be continued"))
        self._recipe, self._plan = recipe, plan
        self._flavour: Flavour = flavour
        self._cache = IndexCache(recipe.data.cache_dir)
        self._blends_one = recipe.data.blend_one_source

    def request(self, sections: Sequence[SourceSection], samples: int) -> BlendRequest | None:
        """None for one source that is not blended."""
        if len(sections) == 1 and not self._blends_one:
            return None
        return BlendRequest.of(self._flavour, [section.weight for section in sections], samples)

    def member_samples(self, sections: Sequence[SourceSection], use: Use) -> list[int]:
        """What is requested of each of these sources."""
        samples = wanted_samples(self._recipe, self._plan, use)
        request = self.request(sections, samples)
        return request.member_samples if request else [samples]

    def source(self, path: str, samples: int, **settings: Any) -> MegatronSource:
        return MegatronSource(path, flavour=self._flavour, samples=samples, cache=self._cache, **settings)

    def stream(self, sections: Sequence[SourceSection], sources: Sequence[SampleSource], use: Use) -> Stream:
        """DataError if a source has fewer samples than the blend takes from it."""
        members = cast(Sequence[MegatronSource], sources)
        request = self.request(sections, wanted_samples(self._recipe, self._plan, use))
        return Stream(sources, GreedyBlend(request, members, self._cache) if request else OneSource(members[0]))

    def train_stream(
        self, sections: Sequence[SourceSection], sources: Sequence[SampleSource], cursor: DataCursor | None
    ) -> Stream:
        """DataError also if the run is longer than its order, or resumes another order than that of `cursor`."""
        stream = self.stream(sections, sources, "train")
        size = cast(GreedyBlend | OneSource, stream.blend).size
        if self._plan.train_samples > size:
            what = f"the training takes {self._plan.train_samples} samples, but data.order={self._flavour} has {size}"
            rule = "a training that ends within its batch ramp takes more samples than train.for"
            raise DataError(Problem(what, rule, "use a shorter ramp or a longer train.for"))
        if cursor is not None:
            self._check_order(cursor, sections, cast(Sequence[MegatronSource], sources))
        return stream

    def _check_order(
        self, cursor: DataCursor, sections: Sequence[SourceSection], sources: Sequence[MegatronSource]
    ) -> None:
        """DataError unless `cursor` gave these sources the same epochs and the same blend; all but the length is the
        same."""
        then, now = cursor.plan.asked_samples, self._plan.asked_samples
        request = self.request(sections, then)
        for source, samples in zip(sources, request.member_samples if request else [then], strict=True):
            tokens, seq_length = source.shape.tokens_per_epoch, source.seq_length
            shape = OrderShape.of(self._flavour, tokens_per_epoch=tokens, seq_length=seq_length, samples=samples)
            if shape != source.shape:
                here, there = self._recipe.train.for_, cursor.recipe.train.for_
                what = f"train.for is {here} = {now} samples but the checkpoint has {there} = {then} samples"
                why = f"with data.order={self._flavour} the order of all samples follows from it: some would repeat"
                back = there if cursor.plan.batch == self._plan.batch else f"{then} samples"
                remedy = f"use 'train.for={back}' to resume, or start a new run under another name or --run-dir"
                raise DataError(Problem(what, why, remedy))


# ---------------------------------------------------------------- the cache


class IndexCache:
    """A folder of entries. Nothing is created before the first entry is stored: a hit needs no write permission.

    An entry is a folder named after its key, with one .npy per array and `entry.json` (the key and a checksum per
    file). It is written beside its place and renamed, so it is whole or absent; one that is damaged all the same is
    made again. The first process of a node builds while the others wait for its lock. Arrays are memory-mapped, so the
    processes of a node share them.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder = Path(folder)

    def arrays(self, kind: str, key: Mapping[str, Any], build: Callable[[], Arrays]) -> Arrays:
        """What `build` returns, from the disk if it was ever built for this key. `key` must decide the result."""
        facts = {"format": _FORMAT, "kind": kind, **key}
        entry = self.folder / f"{kind}-{xxhash.xxh3_128_hexdigest(json.dumps(facts, sort_keys=True).encode())}"
        if (found := _load(entry, facts)) is not None:
            return found
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            with open(self.folder / ".lock", "rb", opener=_created) as lock:
                with suppress(OSError):  # without locks, each process builds and the first to finish wins
                    fcntl.flock(lock, fcntl.LOCK_EX)
                if (found := _load(entry, facts)) is None:
                    _store(entry, facts, build())
                    found = _load(entry, facts)
            if found is None:
                raise OSError(f"{entry} reads back otherwise than it was written")
            return found
        except OSError as error:
            what = f"cannot keep index caches in {self.folder}: {reason(error)}"
            remedy = "choose a data.cache_dir that can be written and has room, or repair this one"
            raise StorageError(Problem(what, remedy=remedy)) from error


def _created(path: str, flags: int) -> int:
    return open_plain(path, flags | os.O_CREAT)  # for reading, which is enough: it may be another user's


def _store(entry: Path, facts: Mapping[str, Any], arrays: Arrays) -> None:
    with tempfile.TemporaryDirectory(prefix=f".{entry.name}.", dir=entry.parent, ignore_cleanup_errors=True) as folder:
        partial = Path(folder, "entry")
        partial.mkdir()
        for name, array in arrays.items():
            np.save(partial / f"{name}.npy", array, allow_pickle=False)
        checksums = {name: file_checksum(partial / f"{name}.npy") for name in arrays}
        (partial / "entry.json").write_text(json.dumps({"key": facts, "checksums": checksums}, indent=1))
        for path in partial.iterdir():
            publish(path, path)  # brings it to the disk
        if _load(entry, facts) is None:
            remove_tree(entry)  # absent, or damaged; whoever has mapped its files keeps them
            with suppress(FileExistsError):
                os.rename(partial, entry)


def _load(entry: Path, facts: Mapping[str, Any]) -> Arrays | None:
    """The arrays of a whole entry, mapped from its files; None if it is absent, damaged or another's."""
    try:
        known = read_json(entry / "entry.json")
        paths = {name: entry / f"{name}.npy" for name in known["checksums"]}
        is_whole = all(file_checksum(path) == known["checksums"][name] for name, path in paths.items())
        if not is_whole or known["key"] != json.loads(json.dumps(facts)):
            return None
        return {name: _mapped(path) for name, path in paths.items()}
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return None


def _mapped(path: Path) -> NDArray[Any]:
    try:
        array: NDArray[Any] = np.load(path, mmap_mode="r", allow_pickle=False)
    except ValueError:  # an empty array cannot be mapped
        array = np.load(path, allow_pickle=False)
    return array
