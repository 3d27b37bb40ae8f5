"""FLOPs per token against published TFLOP/s, each under the definition that was used there."""

from __future__ import annotations

from typing import Any

import pytest

from bloomery.config.recipe import ModelSection
from bloomery.families.registry import family_defaults
from bloomery.sizing.flops import FlopCount, flops_per_token, peak_flops


def model(**fields: Any) -> ModelSection:
    return ModelSection.model_validate(fields | family_defaults(fields))


def bloom(*, layers: int, heads: int = 112) -> ModelSection:
    return model(
        family="bloom", num_layers=layers, hidden_size=14336, num_heads=heads, seq_length=2048, vocab_size=250880
    )


LLAMA_3_8B = model(
    family="llama",
    num_layers=32,
    hidden_size=4096,
    num_heads=32,
    num_kv_heads=8,
    ffn_hidden_size=14336,
    seq_length=8192,
    vocab_size=128256,
)


@pytest.mark.parametrize(("seconds", "published"), [(104.70, 149.76), (105.22, 149.02)])
def test_bloom_176b_tflops_equal_the_log(seconds: float, published: float) -> None:
    flops = flops_per_token(bloom(layers=70), FlopCount.HARDWARE_FULL_RECOMPUTE)
    assert flops * 2048 * 2048 / seconds / 384 / 1e12 == pytest.approx(published, abs=0.005)


@pytest.mark.parametrize(
    ("layers", "samples_per_second", "gpus", "published"),
    [(10, 4.173, 16, 119.42), (8, 2.510, 8, 117.70), (8, 2.634, 8, 123.52)],
)
def test_azure_rows_are_reproduced(layers: int, samples_per_second: float, gpus: int, published: float) -> None:
    flops = flops_per_token(bloom(layers=layers, heads=32), FlopCount.HARDWARE_FULL_RECOMPUTE)
    assert flops * samples_per_second * 2048 / gpus / 1e12 == pytest.approx(published, abs=0.015)


def test_full_recompute_is_megatrons_equation_3() -> None:
    h, layers, s, v = 14336, 70, 2048, 250880
    equation_3 = 96 * layers * h**2 * (1 + s / (6 * h) + v / (16 * layers * h))
    assert flops_per_token(bloom(layers=70), FlopCount.HARDWARE_FULL_RECOMPUTE) == pytest.approx(equation_3, rel=1e-12)


@pytest.mark.parametrize(
    ("definition", "gflops"),
    [
        (FlopCount.MODEL_FULL, 57.9),
        (FlopCount.MODEL_CAUSAL, 51.5),
        (FlopCount.SIX_N_12LHS, 61.1),
        (FlopCount.SIX_N, 48.2),
    ],
)
def test_llama_3_8b_differs_by_a_quarter_between_definitions(definition: FlopCount, gflops: float) -> None:
    assert flops_per_token(LLAMA_3_8B, definition) / 1e9 == pytest.approx(gflops, abs=0.05)


def test_selective_recompute_adds_the_forward_pass_of_the_attention_core() -> None:
    added = flops_per_token(LLAMA_3_8B, FlopCount.HARDWARE_SELECTIVE) - flops_per_token(
        LLAMA_3_8B, FlopCount.MODEL_FULL
    )
    assert added == 4 * 32 * 4096 * 8192


def test_bert_has_no_causal_half() -> None:
    bert = model(family="bert", num_layers=2, hidden_size=64, num_heads=4, seq_length=32, vocab_size=128)
    assert flops_per_token(bert, FlopCount.MODEL_CAUSAL) == flops_per_token(bert, FlopCount.MODEL_FULL)


@pytest.mark.parametrize(
    ("device", "precision", "tflops"),
    [
        ("NVIDIA H200", "bf16", 989),
        ("NVIDIA A100-SXM4-80GB", "bf16", 312),
        ("NVIDIA A100 80GB PCIe", "fp16", 312),
        ("NVIDIA H100 80GB HBM3", "fp16", 989),
        ("Tesla V100-SXM2-32GB", "fp16", 125),
    ],
)
def test_peaks_by_the_names_torch_reports(device: str, precision: str, tflops: float) -> None:
    assert peak_flops(device, precision) == pytest.approx(tflops * 1e12)


@pytest.mark.parametrize(
    ("device", "precision"),
    [
        ("Tesla V100-SXM2-32GB", "bf16"),
        ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", "bf16"),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", "bf16"),
        ("NVIDIA H200", "fp32"),
        ("cpu", "bf16"),
    ],
)
def test_an_unknown_peak_is_none_and_never_a_guess(device: str, precision: str) -> None:
    assert peak_flops(device, precision) is None
