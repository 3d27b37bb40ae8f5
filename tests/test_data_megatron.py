"""Megatron's and BigScience's orders: pinned facts, plain referees, what is refused, and a training that follows them.

tests/test_oracle_megatron_core.py holds the same code against the real package, from which the pinned values come.
"""

from __future__ import annotations

import hashlib
import json
import math
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from bloomery.base.errors import DataError
from bloomery.checkpoint.folder import find_checkpoint
from bloomery.config.recipe import Recipe
from bloomery.data.inspect import document_spans
from bloomery.data.megatron import GreedyBlend, IndexCache, MegatronSource, wanted_samples
from bloomery.data.megatron_order import (
    PARTS,
    BlendRequest,
    Flavour,
    OrderShape,
    build_blend,
    build_index,
    split_boundaries,
)
from bloomery.data.open import open_data
from bloomery.data.shards import ShardReader
from bloomery.sizing.check import load_checked_recipe
from bloomery.sizing.schedule import TrainingPlan
from bloomery.train.setup import prepared_run
from checkpoints import assert_same_tensors
from conftest import Workshop, write_shard
from megatron_referee import bigscience_split, greedy, ordered_samples, random_lengths, write_lengths

VOCAB = 65521
FLAVOURS: list[Flavour] = ["megatron", "bigscience"]
LENGTHS = [(7 * i * i + 3 * i) % 50 for i in range(100)]
"""100 documents, some of them empty; the 97 of the train part of '969,30,1' have 2170 tokens."""


def open_source(prefix: str, folder: Path, **settings: Any) -> MegatronSource:
    usual: dict[str, Any] = {"flavour": "megatron", "samples": 1, "seq_length": 16, "vocab_size": VOCAB, "seed": 1234}
    return MegatronSource(ShardReader(prefix), cache=IndexCache(folder / "cache"), **(usual | settings))


def rows_of(source: MegatronSource, count: int | None = None) -> np.ndarray:
    batch = source.read(np.arange(source.total_samples if count is None else count))
    tokens, labels = batch.inputs["tokens"].numpy(), batch.targets["lm loss"].numpy()
    assert (tokens[:, 1:] == labels[:, :-1]).all()
    return np.concatenate([tokens, labels[:, -1:]], axis=1)


# ---------------------------------------------------------------- one source


@pytest.mark.parametrize("flavour", FLAVOURS)
@pytest.mark.parametrize(
    ("seq_length", "samples", "epochs", "total", "documents", "shuffle", "digest"),
    [
        (16, 300, 3, 406, [4, 51, 49, 56, 9, 59], [126, 172, 166, 29, 254, 91], "bb6ecc533240db48"),
        (7, 40, 1, 309, [40, 78, 93, 91, 63, 61], [111, 279, 247, 265, 44, 283], "724bb02de9f84978"),
    ],
)
def test_the_order_is_the_one_megatron_core_gave(
    tmp_path: Path,
    flavour: Flavour,
    seq_length: int,
    samples: int,
    epochs: int,
    total: int,
    documents: list[int],
    shuffle: list[int],
    digest: str,
) -> None:
    prefix = write_lengths(tmp_path / "x", LENGTHS)
    settings = {"seq_length": seq_length, "samples": samples, "part": "train", "split": "969,30,1"}
    source = open_source(prefix, tmp_path, flavour=flavour, **settings)
    assert (source.shape.epochs, source.total_samples) == (epochs, total)
    assert source.index["documents"][:6].tolist() == documents
    assert source.index["shuffle"][:6].tolist() == shuffle
    assert (source.index["documents"].dtype, source.index["samples"].dtype, source.index["shuffle"].dtype) == (
        np.int32,
        np.int32,
        np.uint32,
    )
    assert hashlib.sha256(rows_of(source)).hexdigest()[:16] == digest


@pytest.mark.parametrize("flavour", FLAVOURS)
@pytest.mark.parametrize("case", range(12))
def test_every_sample_equals_the_plain_referee(tmp_path: Path, flavour: Flavour, case: int) -> None:
    random = np.random.default_rng(case)
    lengths = random_lengths(random)
    split = str(random.choice(["969,30,1", "90/5/5", "7,2,1", "1,1,1", "98,2,0"]))
    seq_length, seed = int(random.choice([1, 3, 7, 16, 50])), int(random.choice([0, 1234, 2**32 - 1]))
    prefix = write_lengths(tmp_path / "x", lengths)
    ends = split_boundaries(split, len(lengths), flavour)
    for part, (first, last) in zip(PARTS, pairwise(ends), strict=True):
        tokens = sum(lengths[max(first, 0) : last])
        samples = int(tokens / seq_length * random.choice([0.3, 1, 1.5, 1.85, 2.9])) + 1
        settings: dict[str, Any] = {"samples": samples, "seq_length": seq_length, "seed": seed}
        if tokens == 0 or first < 0:
            with pytest.raises(DataError, match=r"leaves none for|gives no sample"):
                open_source(prefix, tmp_path, flavour=flavour, part=part, split=split, **settings)
            continue
        source = open_source(prefix, tmp_path, flavour=flavour, part=part, split=split, **settings)
        below = {"megatron": 0.80, "bigscience": 0.95}[flavour]
        expected = ordered_samples(lengths, range(first, last), separate_below=below, **settings)
        assert rows_of(source).tolist() == expected
        assert len(expected) >= samples


def test_the_last_epoch_is_separate_below_80_or_95_percent() -> None:
    def separate(flavour: Flavour, samples: int) -> bool:
        return OrderShape.of(flavour, tokens_per_epoch=2170, seq_length=16, samples=samples).separate_last

    two_epochs, epoch = (2 * 2170 - 1) // 16, (2170 - 1) // 16
    assert (two_epochs, epoch) == (271, 135)
    limits = {"megatron": int(0.80 * epoch), "bigscience": int(0.95 * epoch)}
    for flavour in FLAVOURS:
        assert separate(flavour, two_epochs + limits[flavour] - 1)
        assert not separate(flavour, two_epochs + limits[flavour])
    assert not separate("megatron", 1)


def test_neighbours_overlap_by_one_token_and_every_token_is_seen(tmp_path: Path) -> None:
    source = open_source(write_lengths(tmp_path / "x", [200]), tmp_path, seq_length=9, samples=1)
    rows = rows_of(source)
    assert sorted(rows[:, 0]) == list(range(0, 198, 9))
    assert {token for row in rows for token in row} == set(range(199))


def test_a_text_shorter_than_a_sample_is_repeated(tmp_path: Path) -> None:
    source = open_source(write_lengths(tmp_path / "x", [3, 0, 2]), tmp_path, seq_length=16, samples=2)
    assert source.shape.epochs == 7
    assert source.num_samples == 1
    assert rows_of(source).shape == (2, 17)


def test_the_index_of_large_corpora_has_wider_types() -> None:
    """As int32 holds neither such a document nor so many: shown without building 2**31 entries."""
    starts = np.array([0, 2**31 + 10])
    shape = OrderShape.of("megatron", tokens_per_epoch=2**31 + 10, seq_length=2**30, samples=1)
    assert build_index(starts, first=0, last=1, shape=shape, seed=0)["samples"].dtype == np.int64


def test_sequences_are_ordered_and_documents_named(tmp_path: Path) -> None:
    """A shard whose documents have several sequences, or none: Megatron's documents are its sequences."""
    prefix = write_lengths(tmp_path / "x", [6, 4, 0, 8], documents=[0, 2, 2, 4])
    source = open_source(prefix, tmp_path, seq_length=17, samples=1)
    order = source.index["documents"].tolist()
    assert sorted(order) == [0, 1, 2, 3]
    spans_of = [document_spans(source.shard, *stretch) for stretch in source.stretches(0)]
    starts = [0, 6, 10, 10, 18]
    spans = [(start, tokens) for sequence in order if (tokens := starts[sequence + 1] - (start := starts[sequence]))]
    assert [tuple(span.values()) for found in spans_of for span in found] == [
        (0 if start < 10 else 2, start if start < 10 else start - 10, tokens) for start, tokens in spans
    ]
    assert [found.tolist() for found in source.locate(np.array([0]))] == [[0], [0]]


# ---------------------------------------------------------------- splits


@pytest.mark.parametrize(
    ("split", "documents", "boundaries"),
    [
        ("969,30,1", 10000, [0, 9690, 9990, 10000]),
        ("949,50,1", 304230423, [0, 288714672, 303926193, 304230423]),
        ("98,2,0", 99, [0, 97, 99, 99]),
        ("969,30,1", 10, [0, 10, 10, 10]),
        ("90,5,5", 7, [0, 7, 7, 7]),
        ("0,1,1", 3, [0, -1, 1, 3]),
    ],
)
def test_bigscience_rounds_the_parts(split: str, documents: int, boundaries: list[int]) -> None:
    assert split_boundaries(split, documents, "bigscience") == boundaries


def test_splits_of_every_size_equal_the_referees() -> None:
    differ = 0
    for documents in range(1, 2000):
        for split in ("969,30,1", "949,50,1", "90/5/5", "95,5"):
            megatron = split_boundaries(split, documents, "megatron")
            bigscience = split_boundaries(split, documents, "bigscience")
            assert megatron == split_boundaries(split, documents), "as in the timeless order"
            assert bigscience == bigscience_split(split, documents)
            differ += megatron != bigscience
    assert differ > 500, "the two systems do round differently"


@pytest.mark.parametrize("flavour", FLAVOURS)
def test_an_empty_part_is_an_error_and_never_waits(tmp_path: Path, flavour: Flavour) -> None:
    prefix = write_lengths(tmp_path / "x", [20] * 10)
    with pytest.raises(DataError, match=r"x\.idx: the split '949,50,1' of 10 documents leaves none for test"):
        open_source(prefix, tmp_path, flavour=flavour, part="test", split="949,50,1")
    empty = write_lengths(tmp_path / "y", [0, 0, 0, 9])
    with pytest.raises(DataError, match=r"y\.bin: the train part of 9 tokens in 4 documents gives no sample"):
        open_source(empty, tmp_path, flavour=flavour, part="train", split="3,1")


# ---------------------------------------------------------------- blends


@pytest.mark.parametrize(
    ("weights", "sources"),
    [([0.5, 0.3, 0.2], [0, 1, 2, 0, 1, 0, 2, 0, 1, 0]), ([0.3, 0.7], [1, 0, 1, 1, 0, 1, 1, 0, 1, 1])],
)
def test_a_blend_takes_from_whoever_is_furthest_behind(weights: list[float], sources: list[int]) -> None:
    blend = build_blend(np.array(weights), 10)
    assert blend["sources"].tolist() == sources
    assert blend["ordinals"].tolist() == [sources[:i].count(source) for i, source in enumerate(sources)]
    assert blend["taken"].tolist() == [sources.count(source) for source in range(len(weights))]


@pytest.mark.parametrize("count", [1, 3, 30])
def test_blends_equal_the_referee_that_rounds_twice(count: int) -> None:
    random = np.random.default_rng(count)
    for raw in (random.dirichlet(np.ones(count)), random.integers(1, 9, count)):
        weights = BlendRequest.of("megatron", raw.tolist(), 1).weights
        assert build_blend(weights, 400)["sources"].tolist() == greedy(weights.tolist(), 400)


def test_rounding_is_that_of_x86_and_not_of_a_fused_multiply_add() -> None:
    differ = 0
    for total in range(4, 30):
        weights = [1 / total, 2 / total, (total - 3) / total]
        plain = greedy(weights, 200)
        assert build_blend(np.array(weights), 200)["sources"].tolist() == plain
        differ += plain != greedy(weights, 200, fused=True)
    assert differ > 3, "so it matters"


def test_the_order_does_not_depend_on_where_it_was_cut() -> None:
    weights = np.random.default_rng(0).dirichlet(np.ones(5000))
    long = build_blend(weights, 1000)  # in pieces of 209 positions
    assert long["sources"].tolist()[:300] == build_blend(weights, 300)["sources"].tolist()
    assert long["ordinals"].max() == long["taken"].max() - 1


def test_there_may_be_any_number_of_sources() -> None:
    """megatron-core stops at 32,766, BigScience at 254."""
    count = 40_000
    assert build_blend(np.full(count, 1 / count), 100)["sources"].tolist() == list(range(100))
    last = np.full(count, 0.5 / count)
    last[-1] = 0.5
    assert build_blend(last, 10)["sources"][0] == count - 1


def test_what_a_blend_asks_of_its_members() -> None:
    weights = [1.0, 2.0, 4.0]
    megatron = BlendRequest.of("megatron", weights, 1000)
    targets = [math.ceil(1000 * share) for share in (1 / 7, 2 / 7, 4 / 7)]
    assert (megatron.size, megatron.member_samples) == (sum(targets), [math.ceil(t * 1.005) for t in targets])
    bigscience = BlendRequest.of("bigscience", weights, 1000)
    assert bigscience.member_samples == [math.ceil(1000 * share * 1.005) for share in (1 / 7, 2 / 7, 4 / 7)]
    assert bigscience.size == 1000
    many = np.random.default_rng(0).dirichlet(np.ones(40)).tolist()
    asked = [BlendRequest.of(flavour, many, 99_991).member_samples for flavour in FLAVOURS]
    assert asked[0] != asked[1], "the target is rounded up before the surplus, or not"


def test_a_member_that_would_run_out_is_named(tmp_path: Path) -> None:
    sources = [
        open_source(write_lengths(tmp_path / name, [9]), tmp_path, seq_length=4, samples=2, key=name) for name in "ab"
    ]
    request = BlendRequest(np.array([0.9, 0.1]), [2, 2], 6)
    with pytest.raises(DataError, match="a: the blend takes 5 samples of its 2"):
        GreedyBlend(request, sources, IndexCache(tmp_path / "cache"))
    blend = GreedyBlend(BlendRequest(np.array([0.5, 0.5]), [2, 2], 4), sources, IndexCache(tmp_path / "cache"))
    assert blend.locate(np.arange(4))[0].tolist() == [0, 1, 0, 1]


# ---------------------------------------------------------------- recipes


def recipe_of(workshop: Workshop, *overrides: str) -> Recipe:
    return load_checked_recipe(str(workshop.recipe), overrides).recipe


def lengths_of(prefix: Path) -> list[int]:
    count = int.from_bytes(prefix.with_suffix(".idx").read_bytes()[18:26], "little")
    return np.fromfile(prefix.with_suffix(".idx"), "<i4", count, offset=34).tolist()


def test_a_recipe_asks_what_megatron_asks(workshop: Workshop) -> None:
    evaluate = ("data.split=7,2,1", "train.evaluate={every: 6 steps, steps: 3}")
    evaluating = recipe_of(workshop, *evaluate)
    assert wanted_samples(evaluating, TrainingPlan.of(evaluating), "train") == 160
    assert wanted_samples(evaluating, TrainingPlan.of(evaluating), "valid") == (20 // 6 + 1) * 3 * 8
    uneven = recipe_of(workshop, "train.for=163 samples")
    assert wanted_samples(uneven, TrainingPlan.of(uneven), "train") == 163, "more than the 160 of whole steps"
    assert wanted_samples(uneven, TrainingPlan.of(uneven), "valid") == 0


@pytest.mark.parametrize("flavour", FLAVOURS)
def test_parts_and_blends_of_a_recipe_follow_the_referee(workshop: Workshop, flavour: Flavour) -> None:
    write_shard(workshop.folder / "other", seed=3, documents=30)
    overrides = (f"data.order={flavour}", "data.split=80,20,0", "data.train=[{path: train, weight: 3}, {path: other}]")
    recipe = recipe_of(workshop, *overrides, "train.for=100 steps", "train.evaluate={every: 50 steps, steps: 2}")
    with open_data(recipe) as data:
        assert data.blend is None
        for stream, wanted, part in ((data.train, 800, 0), (data.validation["valid"], 3 * 2 * 8, 1)):
            request = BlendRequest.of(flavour, [3.0, 1.0], wanted)
            chosen = greedy(request.weights.tolist(), wanted)
            batch = stream.batch(0, wanted)
            assert batch.sources is not None
            assert batch.sources.tolist() == chosen
            expected = {}
            for number, name in enumerate(("train", "other")):
                lengths = lengths_of(workshop.folder / name)
                ends = split_boundaries("80,20,0", len(lengths), flavour)
                places = ordered_samples(
                    lengths,
                    range(ends[part], ends[part + 1]),
                    samples=request.member_samples[number],
                    seq_length=16,
                    seed=7,
                    separate_below={"megatron": 0.80, "bigscience": 0.95}[flavour],
                )
                shard = np.fromfile(workshop.folder / f"{name}.bin", "<u2")
                expected[number] = iter(shard[np.array(places)])
            rows = np.stack([next(expected[number]) for number in chosen])
            assert (batch.inputs["tokens"].numpy() == rows[:, :-1]).all()
            assert (batch.targets["lm loss"].numpy() == rows[:, 1:]).all()


def test_an_empty_part_of_a_recipe_is_refused(workshop: Workshop) -> None:
    split = ("data.split=999,1,0", "train.evaluate={every: 5 steps}")
    with pytest.raises(DataError, match="leaves none for valid"):
        open_data(recipe_of(workshop, "data.order=megatron", *split)).__enter__()


def test_a_training_follows_the_order_and_resumes_bit_by_bit(workshop: Workshop) -> None:
    flavour: Flavour = "bigscience"
    order = (f"data.order={flavour}", "data.split=80,20,0", "train.evaluate={every: 5 steps, steps: 1}")
    whole = workshop.train(*order, run="whole")
    workshop.train(*order, "train.exit_after=7 steps", run="halves")
    halves = workshop.train(*order, run="halves")
    assert workshop.losses(halves) == workshop.losses(whole)
    assert_same_tensors(whole, halves)
    assert json.loads((find_checkpoint(whole) / "state.json").read_text())["blend"] is None
    assert list((workshop.folder / "cache").glob("samples-*")), "kept in data.cache_dir"
    lengths = lengths_of(workshop.folder / "train")
    part = range(split_boundaries("80,20,0", len(lengths), flavour)[1])
    below = {"megatron": 0.80, "bigscience": 0.95}[flavour]
    places = ordered_samples(lengths, part, samples=160, seq_length=16, seed=7, separate_below=below)
    expected = np.fromfile(workshop.folder / "train.bin", "<u2")[np.array(places[:24])]
    with prepared_run(
        recipe_of(workshop, *order), workshop.folder / "third", device=torch.device("cpu"), quiet=True
    ) as (run, _):
        batches = [run.feed.take() for _ in range(3)]
    rows = np.concatenate([m.inputs["tokens"].numpy() for batch in batches for m in batch.micro_batches])
    assert (rows == expected[:, :-1]).all()


def test_a_resumed_run_may_not_change_its_order(workshop: Workshop, capsys: pytest.CaptureFixture[str]) -> None:
    write_shard(workshop.folder / "other", seed=3)
    order = ("data.order=megatron", "data.train=[{path: train}, {path: other}]")
    workshop.train(*order, "train.for=4 steps")
    workshop.train(*order, "train.for=6 steps")  # the epochs are the same, and so is the order
    capsys.readouterr()
    workshop.train(*order, "train.for=100 steps", code=3)
    assert "data.order=megatron the order of all samples follows" in capsys.readouterr().err
    weights = "data.train=[{path: train, weight: 2}, {path: other}]"
    workshop.train("data.order=megatron", weights, "train.for=8 steps", code=3)
    assert "data.train is [{path: train, name: null, weight: 2.0}" in capsys.readouterr().err
    workshop.train("data.order=megatron", "train.for=8 steps", code=3)
