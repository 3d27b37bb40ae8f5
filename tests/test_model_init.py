"""Initial values: one rule a parameter, any slice without the whole, the promised statistics."""

from __future__ import annotations

import hashlib
import math
import re

import numpy as np
import pytest
import torch

from bloomery.model import init
from bloomery.model.init import RULES, initial_slice, rule_of
from bloomery.model.transformer import build_model
from bloomery.sizing.layout import CUTS
from model_samples import FAMILIES, initialised, small_config

UP = "layers.0.mlp.up.weight"
GOLDEN = -0.0347182266


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("tied", [True, False])
def test_every_parameter_matches_exactly_one_rule_and_one_cut(family: str, tied: bool) -> None:
    config = small_config(family, tie_embeddings=tied)
    model = build_model(config)
    for name, _ in model.named_parameters():
        assert [rule for pattern, rule in RULES if re.fullmatch(pattern, name)] == [rule_of(name, config)], name
    for name, _ in [*model.named_parameters(), *model.named_buffers()]:
        assert sum(re.fullmatch(pattern, name) is not None for pattern, _ in CUTS) == 1, name


@pytest.mark.parametrize(
    ("shape", "offset", "size"),
    [
        ((40, 30), (7, 0), (11, 30)),
        ((40, 30), (3, 7), (5, 9)),
        ((40, 31), (12, 1), (20, 29)),
        ((3, 100_001), (1, 131), (2, 90_000)),
        ((4, 6, 5), (1, 2, 1), (3, 3, 4)),
        ((64,), (13,), (9,)),
    ],
)
def test_a_slice_equals_that_slice_of_the_whole(
    shape: tuple[int, ...], offset: tuple[int, ...], size: tuple[int, ...]
) -> None:
    config = small_config("gpt2")
    whole = initial_slice(config, 3, UP, shape, [0] * len(shape), shape)
    block = initial_slice(config, 3, UP, shape, offset, size)
    assert block.dtype == np.float32
    assert np.array_equal(block, whole[tuple(slice(o, o + s) for o, s in zip(offset, size, strict=True))])


def test_threads_do_not_change_a_value(monkeypatch: pytest.MonkeyPatch) -> None:
    config, shape = small_config("gpt2"), (300, 1000)
    one = initial_slice(config, 3, UP, shape, (0, 0), shape)
    before = torch.get_num_threads()
    monkeypatch.setattr(init, "_MOST_PAIRS", 170)
    torch.set_num_threads(3)
    try:
        assert np.array_equal(initial_slice(config, 3, UP, shape, (0, 0), shape), one)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("error", [init._DEVICE_ERROR, 2.0**-30])
def test_values_of_a_device_are_the_cpus_to_the_bit(monkeypatch: pytest.MonkeyPatch, error: float) -> None:
    """Its steps, taken here: test_model_gpu.py takes them on a GPU. The larger error has the CPU repeat thousands."""
    monkeypatch.setattr(init, "_DEVICE_ERROR", error)
    shape, offset, size = (3, 1001, 777), (1, 3, 5), (2, 900, 701)
    block = (init._key(7, UP), 0.02, shape, offset, size)
    made = init._device_block(torch.device("cpu"), *block)
    assert made.dtype == torch.float32
    assert torch.equal(made, torch.from_numpy(init._normal_block(*block)))


def by_hand(seed: int, name: str, pair: int, std: float) -> list[float]:
    """The definition in plain Python: splitmix64 of key and counter, then Box-Muller."""
    z = int.from_bytes(hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=8).digest(), "little")
    z = (z + (pair + 1) * 0x9E3779B97F4A7C15) % 2**64
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) % 2**64
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) % 2**64
    z ^= z >> 31
    radius = std * math.sqrt(-2 * math.log(((z >> 32) + 1) / 2**32)) * (-1 if z >> 31 & 1 else 1)
    angle = math.pi * ((z & 0x7FFFFFFF) / 2**31 - 0.5)
    return [radius * math.cos(angle), radius * math.sin(angle)]


def test_values_are_those_of_the_definition() -> None:
    made = initial_slice(small_config("gpt2"), 42, UP, (200, 7), (0, 0), (200, 7))
    right = [(by_hand(42, UP, 4 * row, 0.02) + by_hand(42, UP, 4 * row + 3, 0.02))[:3] for row in range(200)]
    np.testing.assert_allclose(made[:, [0, 1, 6]], right, rtol=1e-6, atol=1e-9)
    assert made[0, 0] == pytest.approx(GOLDEN, rel=1e-7), "a change here changes every run that starts anew"


def test_values_are_normal_and_independent() -> None:
    config, shape = small_config("gpt2"), (1000, 1001)
    x = initial_slice(config, 1, UP, shape, (0, 0), shape).astype(np.float64) / 0.02
    assert x.mean() == pytest.approx(0, abs=0.004)
    assert x.std() == pytest.approx(1, abs=0.003)
    assert (x**3).mean() == pytest.approx(0, abs=0.01)
    assert (x**4).mean() == pytest.approx(3, abs=0.03)
    assert (abs(x) > 3).mean() == pytest.approx(0.0027, abs=0.0003)
    for neighbour in (x[:, 1:] * x[:, :-1], x[1:] * x[:-1], (x**2 - 1)[:, 1:] * (x**2 - 1)[:, :-1]):
        assert neighbour.mean() == pytest.approx(0, abs=0.008)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_model_starts_with_the_standard_deviations_of_its_family(family: str) -> None:
    config = small_config(family, hidden_size=128, num_layers=8, init_std=0.05)
    model = initialised(config)
    residual = 0.05 if family == "bert" else 0.05 / 4
    for name, parameter in model.named_parameters():
        if name.endswith(".bias"):
            assert (parameter == 0).all(), name
        elif "norm" in name:
            assert (parameter == 1).all(), name
        else:
            std = residual if ("attention.out" in name or "mlp.down" in name) else 0.05
            if parameter.numel() > 5000:
                assert parameter.std().item() == pytest.approx(std, rel=0.05), name


def test_any_dtype_gets_the_rounded_float32_values() -> None:
    config = small_config("llama")
    models = [initialised(config, seed=9, dtype=dtype) for dtype in (torch.float32, torch.bfloat16)]
    for exact, rounded in zip(models[0].parameters(), models[1].parameters(), strict=True):
        assert torch.equal(exact.to(torch.bfloat16), rounded)


@pytest.mark.parametrize("tied", [True, False])
def test_a_head_alone_on_its_stage_starts_like_the_embedding_it_is_tied_to(tied: bool) -> None:
    config, shape = small_config("gpt2", tie_embeddings=tied), (160, 64)
    head, embedding = (
        initial_slice(config, 1, name, shape, (0, 0), shape) for name in ("head.weight", "embed.tokens.weight")
    )
    assert np.array_equal(head, embedding) == tied
