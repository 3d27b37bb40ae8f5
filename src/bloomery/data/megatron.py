"""Sources and blends in the order of megatron-core or of BigScience's Megatron-DeepSpeed, to continue their runs.

The order follows from how many samples the run requests: the same recipe with another length is another order. Indices
are built once and kept in a cache; how they are built is in megatron_order.py.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import secrets
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np
import xxhash
from numpy.typing import NDArray

from bloomery.base.errors import DataError, Problem
from bloomery.base.storage import open_plain, publish, writing, written_to
from bloomery.config.recipe import Recipe, SourceSection
from bloomery.data.batch import ShardSource, Stream
from bloomery.data.blend import TimelessBlend
from bloomery.data.causal import DataCursor
from bloomery.data.megatron_order import BlendRequest, Flavour, OrderShape, Part, build_blend, build_index
from bloomery.data.shards import ShardReader, file_checksum
from bloomery.sizing.schedule import TrainingPlan

Arrays = dict[str, NDArray[Any]]
Bounds = Mapping[str, tuple[tuple[int, ...], int, int]]
"""Of each array: its shape, and where its integers begin and end."""


class MegatronSource(ShardSource):
    """Ordinals count the samples of the reference's dataset, from 0 to `total_samples`; there it ends."""

    def __init__(
        self, shard: ShardReader, *, flavour: Flavour, samples: int, cache: IndexCache, **settings: Any
    ) -> None:
        """`samples` is what the run asks of this source: the number of epochs follows from it. `settings`: those of
        ShardSource."""
        self.flavour, self._samples, self._cache = flavour, samples, cache
        super().__init__(shard, **settings)

    def _index_samples(self) -> None:
        """These orders cut the shard into parts between sequences, not documents."""
        self._starts = starts = self.shard.sequence_starts()
        self._sequences = first, last = self.part_of(self.shard.num_sequences)
        tokens = int(starts[last] - starts[first])
        self.num_samples, self.total_samples = 0, 0
        if tokens == 0:
            return
        self.num_samples = max(1, (tokens - 1) // self.seq_length)
        self.shape = shape = OrderShape.of(
            self.flavour, tokens_per_epoch=tokens, seq_length=self.seq_length, samples=self._samples
        )
        self.total_samples = shape.num_samples
        """Of all epochs; beyond them there is no order."""
        key = {"idx": file_checksum(f"{self.shard.prefix}.idx"), "sequences": [first, last], "seed": self.seed}
        build = partial(build_index, starts, first=first, last=last, shape=shape, seed=self.seed)
        count = shape.epochs * (last - first)
        bounds: Bounds = {
            "documents": ((count,), first, last),
            "samples": ((self.total_samples + 1, 2), 0, max(count, tokens)),
            "shuffle": ((self.total_samples,), 0, self.total_samples),
        }
        self.index = self._cache.arrays("samples", bounds, key | asdict(shape), build)

    @property
    def documents(self) -> tuple[int, int]:
        first, last = (int(self._starts[sequence]) for sequence in self._sequences)
        return self.shard.document_at(first)[0], self.shard.document_at(last - 1)[0] + 1

    def epochs(self, samples: int) -> float:
        """The end of the text need not be that of a sample."""
        return samples * self.seq_length / self.shape.tokens_per_epoch

    def locate(self, ordinals: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """The epochs count tokens: those that are shuffled together mix."""
        samples = self.index["shuffle"][ordinals].astype(np.int64)
        return samples * self.seq_length // self.shape.tokens_per_epoch, samples

    def stretches(self, sample: int) -> list[tuple[int, int]]:
        (first, offset), (last, end) = self.index["samples"][sample : sample + 2].tolist()
        sequences = self.index["documents"][first : last + 1]
        starts, stops = self._starts[sequences], self._starts[sequences + 1]
        stops[-1:] = starts[-1:] + end + 1
        starts[:1] += offset
        found = [(start, stop) for start, stop in zip(starts.tolist(), stops.tolist(), strict=True) if stop > start]
        if sum(stop - start for start, stop in found) != self.seq_length + 1:
            what = f"what {self._cache.folder} holds for {self.key} is no order of it: sample {sample}"
            raise DataError(Problem(what, "it was changed after it was built", "delete that folder", "data.cache_dir"))
        return found


class GreedyBlend:
    """Positions to sources: each takes from the source that is furthest behind its share. Knows `size` positions."""

    def __init__(self, request: BlendRequest, sources: Sequence[MegatronSource], cache: IndexCache) -> None:
        """DataError if a source has fewer samples than the blend takes from it."""
        self.size = max(1, request.size)  # empty arrays cannot be mapped
        key = {"weights": [weight.hex() for weight in request.weights.tolist()], "size": self.size}
        many = len(sources)
        bounds = {"sources": ((self.size,), 0, many), "ordinals": ((self.size,), 0, self.size)}
        bounds["taken"] = (many,), 0, self.size + 1
        arrays = cache.arrays("blend", bounds, key, lambda: build_blend(request.weights, self.size))
        self._keys = [source.key for source in sources]
        self._sources, self._ordinals = arrays["sources"], arrays["ordinals"]
        rule = "in the megatron and bigscience orders a source ends after the samples the run requested"
        remedy = "give train.for the length of the run to be continued, or use data.order=timeless"
        if problems := [
            Problem(f"{each.key}: the blend takes {count} samples of its {each.total_samples}", rule, remedy)
            for each, count in zip(sources, arrays["taken"].tolist(), strict=True)
            if count > each.total_samples
        ]:
            raise DataError(problems)

    def locate(self, positions: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """(index of the source, ordinal within it) of each position."""
        return self._sources[positions].astype(np.int64), np.array(self._ordinals[positions])

    def taken(self, consumed_samples: int) -> dict[str, int]:
        counts = np.bincount(self._sources[:consumed_samples], minlength=len(self._keys))
        return dict(zip(self._keys, counts.tolist(), strict=True))


def wanted_samples(recipe: Recipe, plan: TrainingPlan, part: Part) -> int:
    """What Megatron asks of its datasets, for validation of all evaluations of the run together. Its orders follow from
    these numbers."""
    if part == "train":
        return plan.asked_samples
    evaluate = recipe.train.evaluate
    times = 1 if part == "test" else plan.train_steps // evaluate.every.count + 1 if evaluate else 0
    steps = times * evaluate.steps if evaluate else 0
    return steps * recipe.batch.global_batch_size


class MegatronOpening:
    """Opens the sources and blends of one recipe."""

    def __init__(self, recipe: Recipe, plan: TrainingPlan, flavour: Flavour) -> None:
        assert recipe.data is not None
        self._recipe, self._plan, self._flavour = recipe, plan, flavour
        self._blends_one, self._cache = recipe.data.blend_one_source, IndexCache(recipe.data.cache_dir)

    def request(self, sections: Sequence[SourceSection], part: Part, plan: TrainingPlan | None = None) -> BlendRequest:
        """What the run asks of these sources, or what it would ask by another plan."""
        samples = wanted_samples(self._recipe, plan or self._plan, part)
        if len(sections) == 1 and not self._blends_one:
            return BlendRequest(np.ones(1), [samples], samples)
        return BlendRequest.of(self._flavour, [section.weight for section in sections], samples)

    def source(self, shard: ShardReader, **settings: Any) -> MegatronSource:
        return MegatronSource(shard, flavour=self._flavour, cache=self._cache, **settings)

    def stream(self, sections: Sequence[SourceSection], sources: Sequence[MegatronSource], part: Part) -> Stream:
        """DataError if a source has fewer samples than the blend takes from it."""
        if len(sources) == 1 and not self._blends_one:
            return Stream(sources, TimelessBlend.start({sources[0].key: 1.0}))  # its samples, one after the other
        return Stream(sources, GreedyBlend(self.request(sections, part), sources, self._cache))

    def check(self, stream: Stream, sections: Sequence[SourceSection], cursor: DataCursor | None) -> None:
        """DataError if the run is longer than its order, or if `cursor` gave its sources other epochs or another blend;
        all but the length is the same."""
        blend, asked = stream.blend, self._plan.asked_samples
        size = blend.size if isinstance(blend, GreedyBlend) else cast(MegatronSource, stream.sources[0]).total_samples
        if self._plan.train_samples > size:
            what = f"the training takes {self._plan.train_samples} samples, but data.order={self._flavour} has {size}"
            rule = "a training that ends within its batch ramp takes more samples than train.for"
            raise DataError(Problem(what, rule, "use a shorter ramp or a longer train.for"))
        if cursor is None:
            return
        then, request = cursor.plan.asked_samples, self.request(sections, "train", cursor.plan)
        for source, samples in zip(stream.sources, request.member_samples, strict=True):
            now = cast(MegatronSource, source).shape
            shard = {"tokens_per_epoch": now.tokens_per_epoch, "seq_length": now.seq_length}
            if OrderShape.of(self._flavour, samples=samples, **shard) != now:
                here, there = self._recipe.train.for_, cursor.recipe.train.for_
                what = f"train.for is {here} = {asked} samples but the checkpoint has {there} = {then} samples"
                why = f"with data.order={self._flavour} the order of all samples follows from it: some would repeat"
                back = there if cursor.plan.batch == self._plan.batch else f"{then} samples"
                remedy = f"use 'train.for={back}' to resume, or start a new run under another name or --run-dir"
                raise DataError(Problem(what, why, remedy))


class IndexCache:
    """A folder of arrays, each in a file that is named after its key and a checksum of itself. A file is written beside
    its place and renamed, so it is whole or absent; one that is damaged all the same is made again. The first process
    of a node builds while the others wait for its lock. Arrays are memory-mapped, so the processes of a node share
    them. Nothing is created before the first is stored: a hit needs no write permission.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder = Path(folder)

    def arrays(self, kind: str, bounds: Bounds, key: Mapping[str, Any], build: Callable[[], Arrays]) -> Arrays:
        """The arrays that `build` returns, from the disk if they were ever built for this key, which must decide
        them."""
        stem = f"{kind}-{xxhash.xxh3_128_hexdigest(json.dumps(key, sort_keys=True).encode())}"
        if found := self._load(stem, bounds):
            return found
        with written_to("data.cache_dir"), writing(self.folder, "keep index caches in"):
            self.folder.mkdir(parents=True, exist_ok=True)
            with open(self.folder / ".lock", "rb", opener=_created) as lock:
                with suppress(OSError):  # without locks, each process builds
                    fcntl.flock(lock, fcntl.LOCK_EX)
                    for stale in self.folder.glob(f".{stem}.*"):  # of a builder that was killed
                        stale.unlink()
                if found := self._load(stem, bounds):
                    return found
                for name, array in build().items():
                    self._store(f"{stem}.{name}", array)
                if found := self._load(stem, bounds):
                    return found
                raise OSError(errno.EIO, "what was just written there reads back otherwise")

    def _store(self, stem: str, array: NDArray[Any]) -> None:
        """Straight to the disk: one of a long training is as large as memory allows."""
        partial = self.folder / f".{stem}.{secrets.token_hex(4)}"
        try:
            with open(partial, "xb") as file:
                np.save(file, array, allow_pickle=False)
            publish(partial, self.folder / f"{stem}.{file_checksum(partial)}.npy")
        finally:
            partial.unlink(missing_ok=True)

    def _load(self, stem: str, bounds: Bounds) -> Arrays:
        """These arrays; empty where one of them is missing, damaged, or not within its bounds."""
        found = {}
        for path in self.folder.glob(f"{stem}.*.npy"):
            with suppress(Exception):  # whatever numpy makes of forged bytes
                _, name, checksum, _ = path.name.split(".")
                shape, first, end = bounds[name]
                if file_checksum(path) == checksum:
                    array = np.load(path, mmap_mode="r", allow_pickle=False)
                    if array.shape == shape and array.dtype.kind in "iu" and first <= array.min() <= array.max() < end:
                        found[name] = array
        return found if found.keys() == bounds.keys() else {}


def _created(path: str, flags: int) -> int:
    return open_plain(path, flags | os.O_CREAT)  # for reading, which is enough: it may be another user's
