"""The timeless order: a bijection in every epoch, the same for ever."""

import numpy as np
import pytest

from bloomery.data.order import TimelessOrder


@pytest.mark.parametrize("num_samples", [1, 2, 3, 7, 64, 1000, 3001])
def test_every_epoch_shows_every_sample_once(num_samples):
    order = TimelessOrder(42, "shards/a", num_samples)
    positions = np.arange(3 * num_samples)
    epochs, samples = order.locate(positions)
    assert (epochs == positions // num_samples).all()
    for epoch in range(3):
        assert (np.sort(samples[epochs == epoch]) == np.arange(num_samples)).all()
    few = np.array([num_samples, 0])
    for found, right in zip(order.locate(few), (epochs, samples), strict=True):
        assert found.dtype == np.int64
        assert (found == right[few]).all(), "whatever else was asked"


def test_golden_values():
    """A change here changes the data of every existing run: never adapt these numbers."""
    for num_samples, golden in [
        (7, [1, 6, 4, 2, 3, 5, 0]),
        (1000, [809, 458, 268, 141, 432, 128]),
        (100003, [60977, 77023, 92540, 29512, 8018, 32751]),
    ]:
        _, samples = TimelessOrder(42, "shards/a", num_samples).locate(np.arange(len(golden)))
        assert samples.tolist() == golden
    large = TimelessOrder(1234, "shards/oscar-en", 10**12)
    _, samples = large.locate(np.array([0, 1, 2, 10**12]))
    assert samples.tolist() == [995716487220, 942066021319, 864999861582, 285292538335]


def test_seeds_sources_and_epochs_have_orders_of_their_own():
    count = 10_000
    _, base = TimelessOrder(42, "shards/a", count).locate(np.arange(2 * count))
    _, other_seed = TimelessOrder(43, "shards/a", count).locate(np.arange(count))
    _, other_source = TimelessOrder(42, "shards/b", count).locate(np.arange(count))
    for other in (base[count:], other_seed, other_source):
        assert (base[:count] == other).sum() < 10
        assert abs(np.corrcoef(base[:count], other)[0, 1]) < 0.05


def test_the_order_has_no_visible_structure():
    count = 100_003
    _, samples = TimelessOrder(0, "s", count).locate(np.arange(count))
    displacement = np.abs(samples - np.arange(count)).mean() / count
    assert abs(displacement - 1 / 3) < 0.01, "the mean distance of a random permutation is a third"
    assert (samples == np.arange(count)).sum() < 10, "about one fixed point"
    assert abs(np.corrcoef(samples[:-1], samples[1:])[0, 1]) < 0.02
    assert abs((np.diff(samples) > 0).mean() - 0.5) < 0.01
    observed = np.bincount(samples * 50 // count + 50 * (np.arange(count) * 50 // count), minlength=2500)
    chi_squared = ((observed - count / 2500) ** 2 / (count / 2500)).sum()
    assert 2401 - 6 * 70 < chi_squared < 2401 + 6 * 70, "49 * 49 degrees of freedom"
