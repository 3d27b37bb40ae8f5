"""The `megatron` order beside the real megatron-core package, sample by sample. docs/orders.md says how to run this.

megatron-core's blend depends on how its C++ was compiled: with fused multiply-add (its aarch64 wheels) it gives another
order for many blends than on x86. Ours is pinned to x86; the package is held against a referee that rounds as it does.
"""

from __future__ import annotations

import warnings
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from bloomery.base.errors import DataError
from bloomery.data.batch import Packing
from bloomery.data.megatron import GreedyBlend, IndexCache, MegatronSource
from bloomery.data.megatron_order import PARTS, BlendRequest, build_blend, split_boundaries
from bloomery.data.shards import ShardReader
from bloomery.families.family import IGNORED_LABEL
from megatron_referee import greedy, random_lengths, write_lengths

REASON = "needs the package megatron-core (pip install --no-deps megatron-core==0.16.1), see docs/orders.md"
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    core = pytest.importorskip("megatron.core.datasets.gpt_dataset", reason=REASON)
    builder = pytest.importorskip("megatron.core.datasets.blended_megatron_dataset_builder", reason=REASON)
    helpers = pytest.importorskip("megatron.core.datasets.helpers_cpp", reason=REASON)

VOCAB = 65521
SPLITS = ["969,30,1", "949,50,1", "90/5/5", "7,2,1", "1,1,1", "0.5,0.25,0.25", "98,2,0", "1,0,0", "0,1,1"]
SEEDS = [0, 1, 42, 1234, 2**31, 2**32 - 1]


EOD = 5


def configured(prefixes: list[str], weights: list[float] | None, split: str, **settings: int) -> Any:
    tokenizer = SimpleNamespace(vocab_size=VOCAB, eod=EOD, unique_identifiers={"class": "none"})
    packing = bool(settings.get("packing", False))
    return core.GPTDatasetConfig(
        random_seed=settings["seed"],
        sequence_length=settings["seq_length"],
        blend=(prefixes, weights),
        split=split,
        tokenizer=tokenizer,
        reset_position_ids=packing,
        reset_attention_mask=False,
        eod_mask_loss=packing,
        create_attention_mask=False,
    )


def build(prefixes: list[str], weights: list[float] | None, split: str, sizes: list[int], **settings: int) -> list[Any]:
    """Megatron's datasets for train, valid and test."""
    config = configured(prefixes, weights, split, **settings)
    datasets: list[Any] = builder.BlendedMegatronDatasetBuilder(core.GPTDataset, sizes, lambda: True, config).build()
    return datasets


def build_parts(prefix: str, split: str, sizes: list[int], wanted: list[bool], **settings: int) -> list[Any]:
    """As `build` for one source, without the parts that have no tokens: with those, Megatron never returns."""
    config = configured([prefix], None, split, **settings)
    low = core.GPTDataset.build_low_level_dataset(prefix, config)
    count = core.GPTDataset.numel_low_level_dataset(low)
    datasets: list[Any] = [None] * len(PARTS)
    for part in builder.Split:
        if wanted[part.value]:
            first, last = (round(end * count) for end in config.split_matrix[part.value])
            indices = np.arange(first, last, dtype=np.int32)
            datasets[part.value] = core.GPTDataset(low, prefix, indices, sizes[part.value], part, config)
    return datasets


def part_weight(split: str, number: int) -> float:
    return float(split.replace("/", ",").split(",")[number])


def assert_same_samples(ours: MegatronSource, theirs: Any) -> None:
    batch = ours.read(np.arange(ours.total_samples))
    for i in range(ours.total_samples):
        sample = theirs[i]
        assert (batch.inputs["tokens"][i] == sample["tokens"]).all(), i
        assert (batch.targets["lm loss"][i] == sample["labels"]).all(), i


@pytest.mark.parametrize("case", range(150))
def test_every_index_and_sample_of_one_source(tmp_path: Path, case: int) -> None:
    random = np.random.default_rng(case)
    lengths = random_lengths(random)
    prefix = write_lengths(tmp_path / "x", lengths)
    split = str(random.choice(SPLITS))
    settings = {"seed": int(random.choice(SEEDS)), "seq_length": int(random.choice([1, 2, 3, 5, 8, 13, 32, 100]))}
    ends = split_boundaries(split, len(lengths), "megatron")
    parts = [range(first, last) for first, last in pairwise(ends)]
    epoch_samples = [sum(lengths[document] for document in part) // settings["seq_length"] for part in parts]
    wanted = [int(samples * random.choice([0, 0.5, 1, 1.5, 1.9, 2.3, 4])) + 1 for samples in epoch_samples]
    cache = IndexCache(tmp_path / "cache")
    ours: list[MegatronSource | None] = []
    for part, samples in zip(PARTS, wanted, strict=True):
        common = {"flavour": "megatron", "samples": samples, "vocab_size": VOCAB, "part": part, "split": split}
        try:
            ours.append(MegatronSource(ShardReader(prefix), cache=cache, **common, **settings))  # type: ignore[arg-type]
        except DataError:
            ours.append(None)
            assert not sum(lengths[document] for document in parts[PARTS.index(part)])
    if any(mine is None and part_weight(split, number) for number, mine in enumerate(ours)):
        theirs = build_parts(prefix, split, wanted, [mine is not None for mine in ours], **settings)
    else:
        theirs = build([prefix], None, split, wanted, **settings)
    assert [mine is None for mine in ours] == [dataset is None for dataset in theirs]
    for mine, dataset in zip(ours, theirs, strict=True):
        if mine is None:
            continue
        for name, expected in (
            (mine.index["documents"], dataset.document_index),
            (mine.index["samples"], dataset.sample_index),
            (mine.index["shuffle"], dataset.shuffle_index),
        ):
            assert name.dtype == expected.dtype
            assert (name == expected).all()
        assert mine.total_samples == len(dataset)
        assert_same_samples(mine, dataset)


def test_positions_and_loss_at_the_ends_of_documents(tmp_path: Path) -> None:
    prefix = write_lengths(tmp_path / "x", [9, 30, 4, 17] * 20, vocab=11)
    packing = Packing(EOD, reset_positions=True, eod_loss=False)
    settings = {"seed": 3, "seq_length": 24}
    ours = MegatronSource(
        ShardReader(prefix),
        flavour="megatron",
        samples=100,
        vocab_size=11,
        cache=IndexCache(tmp_path / "cache"),
        packing=packing,
        **settings,
    )
    theirs = build([prefix], None, "1,0,0", [100, 0, 0], packing=1, **settings)[0]
    batch = ours.read(np.arange(ours.total_samples))
    for i in range(ours.total_samples):
        sample = theirs[i]
        assert (batch.inputs["positions"][i] == sample["position_ids"]).all()
        has_loss = batch.targets["lm loss"][i] != IGNORED_LABEL
        assert (has_loss == (sample["loss_mask"] > 0)).all()
        assert not has_loss.all()
        assert (batch.targets["lm loss"][i][has_loss] == sample["labels"][has_loss]).all()


def rounds_once() -> bool:
    """Whether this build of megatron-core fuses product and difference: seen at a blend where that matters."""
    for total in range(3, 100):
        weights = [1 / total, 2 / total, (total - 3) / total]
        plain, once = greedy(weights, 300), greedy(weights, 300, fused=True)
        if plain != once:
            theirs = their_blend(weights, 300)
            assert theirs in (plain, once), "rounds in a third way"
            return theirs == once
    raise AssertionError("no blend that shows it")


def their_blend(weights: list[float], size: int) -> list[int]:
    sources, ordinals = np.zeros(size, np.int16), np.zeros(size, np.int64)
    helpers.build_blending_indices(sources, ordinals, weights, len(weights), size, False)
    return [int(source) for source in sources]


@pytest.fixture(scope="module")
def fused() -> bool:
    return rounds_once()


@pytest.mark.parametrize("case", range(60))
def test_every_sample_of_a_blend(tmp_path: Path, case: int, fused: bool) -> None:
    random = np.random.default_rng(1000 + case)
    count = int(random.choice([1, 2, 3, 4, 7, 11]))
    prefixes = []
    for number in range(count):
        lengths = [length + 3 for length in random_lengths(random)] + [40, 40, 40]
        prefixes.append(write_lengths(tmp_path / str(number), lengths))
    weights = (random.integers(1, 9, count) if case % 2 else random.dirichlet([1] * count)).astype(float).tolist()
    settings = {"seed": int(random.choice(SEEDS)), "seq_length": int(random.choice([2, 5, 16]))}
    samples = int(random.choice([1, 10, 100, 400]))
    request = BlendRequest.of("megatron", weights, samples)
    cache = IndexCache(tmp_path / "cache")
    sources = [
        MegatronSource(
            ShardReader(prefix), flavour="megatron", samples=wanted, vocab_size=VOCAB, cache=cache, **settings
        )
        for prefix, wanted in zip(prefixes, request.member_samples, strict=True)
    ]
    expected = greedy(request.weights.tolist(), request.size)
    theirs_expected = greedy(request.weights.tolist(), request.size, fused=fused)
    exhausted = [theirs_expected.count(number) > source.total_samples for number, source in enumerate(sources)]
    if any(exhausted):
        with pytest.raises(IndexError, match="oversamples"):
            build(prefixes, weights, "1,0,0", [samples, 0, 0], **settings)
        if not fused:
            with pytest.raises(DataError, match="the blend takes"):
                GreedyBlend(request, sources, cache)
        return
    theirs = build(prefixes, weights, "1,0,0", [samples, 0, 0], **settings)[0]
    blend = GreedyBlend(request, sources, cache)
    owners, ordinals = blend.locate(np.arange(blend.size))
    assert owners.tolist() == expected
    assert theirs.dataset_index.tolist() == theirs_expected
    assert len(theirs) == blend.size
    for mine, dataset in zip(sources, theirs.datasets, strict=True):
        assert mine.total_samples == len(dataset)
        assert_same_samples(mine, dataset)
    if expected == theirs_expected:
        assert ordinals.tolist() == theirs.dataset_sample_index.tolist()
        for position in range(blend.size):
            batch = sources[owners[position]].read(ordinals[position : position + 1])
            assert (batch.inputs["tokens"][0] == theirs[position]["tokens"]).all()


@pytest.mark.parametrize("count", [2, 5, 30, 300])
def test_long_blends_of_many_sources(count: int, fused: bool) -> None:
    random = np.random.default_rng(count)
    weights = BlendRequest.of("megatron", random.dirichlet(np.ones(count)).tolist(), 1).weights
    ours = build_blend(weights, 1000)["sources"].tolist()
    assert ours == greedy(weights.tolist(), 1000)
    assert their_blend(weights.tolist(), 1000) == greedy(weights.tolist(), 1000, fused=fused)
