"""Timeless blends: shares by weight, nothing repeated or lost, whatever changes on the way."""

from __future__ import annotations

import json
import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from bloomery.data.blend import DRIFT, PERIOD, BlendState, TimelessBlend
from bloomery.data.causal import DataCursor, blend_after
from bloomery.data.order import TimelessOrder
from conftest import Workshop


def _drift(blend: TimelessBlend) -> float:
    """The most samples by which any source is off its share of the slots in prefixes of the run: short ones, and some
    around the end of the first period."""
    worst = 0.0
    for first in (0, PERIOD // 3, PERIOD - 1000):
        positions = np.arange(first, first + 20_000)
        owners, ordinals = blend.locate(positions)
        for number, slots in enumerate(blend.taken(PERIOD).values()):
            share = slots / PERIOD
            mine = owners == number  # after its n-th sample, and just before it
            taken, here = ordinals[mine] + 1, positions[mine]
            worst = max([worst, *np.abs(taken - (here + 1) * share), *np.abs(taken - 1 - here * share)])
    return worst


def resumed(state: BlendState, weights: dict[str, float], *, consumed_samples: int) -> TimelessBlend:
    recipe: Any = SimpleNamespace(model=SimpleNamespace(seq_length=8))
    cursor = DataCursor(recipe, cast(Any, None), consumed_samples, state)
    return blend_after(cursor, weights, [], seq_length=8)[0]


def test_every_prefix_holds_each_share_to_within_two_samples() -> None:
    dice = random.Random(11)
    fibonacci = [1.0, 1.0]
    for _ in range(20):
        fibonacci.append(fibonacci[-1] + fibonacci[-2])
    blends = [fibonacci, [299.0] + [1.0] * 299, [29.0] + [1.0] * 29, [1.0] * 7, [1.0]]
    blends += [
        [dice.random() ** power + dice.choice([0, 0, number]) for _ in range(number)]
        for number in (2, 3, 5, 16, 30, 61)
        for power in (0.1, 1, 4)
    ]
    for weights in blends:
        blend = TimelessBlend.start({f"s{number}": weight for number, weight in enumerate(weights)})
        assert _drift(blend) < DRIFT, weights


def test_shares_hold_over_many_periods() -> None:
    weights = {"a": 0.5, "b": 0.3, "c": 0.2 - 1e-8, "d": 1e-8}
    blend = TimelessBlend.start(weights)
    for consumed in (10**9, 10**10, 10**11):
        for weight, taken in zip(weights.values(), blend.taken(consumed).values(), strict=True):
            assert abs(taken - weight * consumed) < DRIFT + 1 + consumed / PERIOD, "exact to one sample a period"


def test_many_equal_light_sources_do_not_come_in_bursts() -> None:
    blend = TimelessBlend.start({"heavy": 299, **{f"s{number}": 1 for number in range(299)}})
    owners, _ = blend.locate(np.arange(256 * 256))
    heavy = (owners == 0).reshape(256, 256).sum(axis=1)
    assert (np.abs(heavy - 128) <= 1).all(), "half of every batch"
    light = owners[owners != 0][: 299 * 100].reshape(100, 299)
    assert min(len(np.unique(turn)) for turn in light) > 200, "and the others take turns"


def test_ordinals_of_each_source_count_up_without_gaps() -> None:
    blend = TimelessBlend.start({"a": 3, "b": 1, "c": 1e-12})
    for first in (0, PERIOD - 5000, 7 * PERIOD - 5000):
        owners, ordinals = blend.locate(np.arange(first, first + 10_000))
        for number, before in enumerate(blend.taken(first).values()):
            assert (ordinals[owners == number] == before + np.arange((owners == number).sum())).all()
    assert blend.taken(2 * PERIOD)["c"] == 2, "the smallest weight still gets a slot in every period"


def test_changing_weights_sizes_and_layouts_never_repeats_or_loses_a_sample() -> None:
    """A simulated run that changes its blend, its batch size and its length at random, restarting each time."""
    dice = random.Random(5)
    sizes = {"a": 997, "b": 350, "c": 1201, "d": 60}
    for _ in range(20):
        consumed, state, seen = 0, None, {key: [] for key in sizes}
        for _ in range(dice.randint(2, 6)):
            members = dice.sample(sorted(sizes), dice.randint(1, 4))
            weights = {key: dice.choice([0.1, 1.0, 2.5, 7.0]) for key in members}
            if state is None:
                blend = TimelessBlend.start(weights)
            else:
                blend = resumed(state, weights, consumed_samples=consumed)
            for _ in range(dice.randint(1, 40)):
                size = dice.choice([1, 4, 16, 48])
                replicas = dice.choice([replicas for replicas in (1, 2, 4) if size % replicas == 0])
                batch = np.arange(consumed, consumed + size).reshape(-1, replicas)
                for replica in range(replicas):  # every replica asks for its own positions only
                    for owner, ordinal in zip(*blend.locate(batch[:, replica]), strict=True):
                        seen[members[owner]].append(int(ordinal))
                consumed += size
            state = BlendState.from_json(blend.state.to_json())
            assert {key: len(ordinals) for key, ordinals in seen.items() if ordinals} == {
                key: taken for key, taken in blend.taken(consumed).items() if taken
            }
        for key, ordinals in seen.items():
            assert sorted(ordinals) == list(range(len(ordinals)))
            order = TimelessOrder(3, key, sizes[key])
            epochs, samples = order.locate(np.array(ordinals, dtype=np.int64))
            for epoch in set(epochs.tolist()):
                shown = samples[epochs == epoch]
                assert len(set(shown.tolist())) == len(shown), "no sample twice in an epoch"


def test_a_blend_keeps_the_slots_that_it_began_with() -> None:
    """The states of earlier versions do not say their period, which was 65,536; the values are what they gave."""
    facts = {"first_sample": 0, "cursors": {}, "weights": {"a": 0.7, "b": 0.2, "c": 0.1}}
    blend = TimelessBlend(BlendState.from_json(facts))
    owners, ordinals = blend.locate(np.arange(65536 + 2, 65536 + 12))
    assert owners.tolist() == [0, 0, 2, 0, 0, 0, 1, 0, 0, 1]
    assert ordinals.tolist() == [45876, 45877, 6554, 45878, 45879, 45880, 13108, 45881, 45882, 13109]
    again = TimelessBlend(BlendState.from_json(blend.state.to_json()))
    assert again.state == blend.state
    changed = resumed(blend.state, {"a": 1, "b": 1}, consumed_samples=70_000)
    assert changed.state.period == PERIOD
    with_past = {**changed.state.to_json(), "earlier": [facts | {"period": 65536}]}
    assert BlendState.from_json(with_past) == changed.state, "some versions kept all weights that ever held"


def test_resuming_with_the_same_weights_keeps_the_state() -> None:
    blend = TimelessBlend.start({"a": 2, "b": 6})
    again = resumed(blend.state, {"a": 1, "b": 3}, consumed_samples=500)
    assert again.state == blend.state
    scaled = resumed(blend.state, {"a": 0.1, "b": 0.3}, consumed_samples=500)
    assert scaled.state == blend.state, "rounding is no change"
    nearly = resumed(blend.state, {"a": 1, "b": 3.001}, consumed_samples=500)
    assert nearly.state.first_sample == 500
    with pytest.raises(ValueError, match="hold from sample 500"):
        resumed(blend.state, {"a": 1, "b": 1}, consumed_samples=500).locate(np.array([499]))


def test_a_blend_trains_resumes_exactly_and_says_each_sources_loss(workshop: Workshop, tmp_path: Path) -> None:
    from checkpoints import assert_same_tensors

    blend = "data.train=[{path: train, weight: 3}, {path: valid, name: other, weight: 1}]"
    whole = workshop.train(blend, run="whole")
    workshop.train(blend, "train.exit_after=7 steps", run="halves")
    halves = workshop.train(blend, run="halves")
    assert_same_tensors(whole, halves)
    for record in workshop.metrics(whole):
        by_source = record["source_losses"]
        assert set(by_source) == {"train", "other"}
        assert min(by_source.values()) <= record["losses"]["lm loss"] <= max(by_source.values())


def test_changed_weights_hold_from_where_the_run_stands(workshop: Workshop) -> None:
    def blend(weight: int) -> str:
        return f"data.train=[{{path: train, weight: {weight}}}, {{path: valid, weight: 1}}]"

    workshop.train(blend(1), "train.exit_after=6 steps")
    run = workshop.train(blend(7), changes=["data.train"])

    state = json.loads((run / "checkpoints" / "step-00000020" / "state.json").read_text())
    assert state["blend"]["first_sample"] == 48
    assert state["blend"]["cursors"] == {"train": 24, "valid": 24}
