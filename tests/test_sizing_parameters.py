"""Parameter counts against the integers that others published."""

from __future__ import annotations

from typing import Any

import pytest

from bloomery.config.recipe import ModelSection
from bloomery.families.registry import family_defaults
from bloomery.sizing.parameters import ParameterCount, count_parameters


def count(family: str, layers: int, hidden: int, heads: int, seq: int, vocab: int, **more: Any) -> ParameterCount:
    fields = {"family": family, "num_layers": layers, "hidden_size": hidden, "num_heads": heads}
    fields |= {"seq_length": seq, "vocab_size": vocab, **more}
    model = ModelSection.model_validate(fields | family_defaults(fields))
    return count_parameters(model)


@pytest.mark.parametrize(
    ("layers", "hidden", "heads", "seq", "vocab", "total"),
    [
        pytest.param(40, 5120, 32, 2048, 50257, 12_853_386_240, id="tr1-13B"),
        pytest.param(40, 5120, 32, 1024, 50257, 12_848_133_120 + 2 * 5120, id="tr1-13B-short"),
        pytest.param(24, 1024, 16, 1024, 50257, 354_823_168, id="gpt2-medium"),
        pytest.param(24, 2048, 16, 2048, 50368, 1_315_950_592, id="MPT-1B"),
        pytest.param(32, 4096, 32, 2048, 50368, 6_658_859_008, id="MPT-7B"),
        pytest.param(80, 8192, 64, 2048, 50368, 64_862_437_376, id="MPT-70B"),
    ],
)
def test_gpt2_equals_published_count(layers: int, hidden: int, heads: int, seq: int, vocab: int, total: int) -> None:
    assert count("gpt2", layers, hidden, heads, seq, vocab).total == total


@pytest.mark.parametrize(("vocab", "total"), [(250_000, 176_234_655_744), (250_880, 176_247_271_424)])
def test_bloom_176b_equals_published_count(vocab: int, total: int) -> None:
    bloom = count("bloom", 70, 14336, 112, 2048, vocab)
    assert bloom.total == total
    assert bloom.groups["token_embedding"] == vocab * 14336
    block = bloom.groups["attention"] + bloom.groups["mlp"] + bloom.groups["norms"]
    assert block == 70 * 2_466_437_120
    assert bloom.groups["embedding_norm"] == bloom.groups["final_norm"] == 2 * 14336


@pytest.mark.parametrize(
    ("layers", "hidden", "heads", "kv_heads", "ffn", "vocab", "total"),
    [
        pytest.param(32, 4096, 32, 32, 11008, 32000, 6_738_415_616, id="Llama-2-7B"),
        pytest.param(80, 8192, 64, 8, 28672, 32000, 68_976_648_192, id="Llama-2-70B"),
        pytest.param(32, 4096, 32, 8, 14336, 128256, 8_030_261_248, id="Llama-3-8B"),
        pytest.param(80, 8192, 64, 8, 28672, 128256, 70_553_706_496, id="Llama-3-70B"),
        pytest.param(126, 16384, 128, 8, 53248, 128256, 405_853_388_800, id="Llama-3.1-405B"),
        pytest.param(22, 2048, 32, 4, 5632, 32000, 1_100_048_384, id="TinyLlama"),
    ],
)
def test_llama_equals_published_count(
    layers: int, hidden: int, heads: int, kv_heads: int, ffn: int, vocab: int, total: int
) -> None:
    llama = count("llama", layers, hidden, heads, 4096, vocab, num_kv_heads=kv_heads, ffn_hidden_size=ffn)
    assert llama.total == total
    assert llama.groups["head"] == llama.groups["token_embedding"] == vocab * hidden


@pytest.mark.parametrize(
    ("layers", "hidden", "heads", "trunk"), [(12, 768, 12, 109_482_240), (24, 1024, 16, 335_141_888)]
)
def test_bert_without_its_pretraining_heads_equals_published_count(
    layers: int, hidden: int, heads: int, trunk: int
) -> None:
    bert = count("bert", layers, hidden, heads, 512, 30522)
    assert bert.total - bert.groups["mlm_head"] - bert.groups["order_head"] == trunk


def test_bert_base_for_pretraining_equals_hugging_face() -> None:
    bert = count("bert", 12, 768, 12, 512, 30522)
    assert bert.total == 110_106_428
    assert "final_norm" not in bert.groups
    assert "head" not in bert.groups


def test_groups_that_a_model_lacks_are_absent_and_the_rest_adds_up() -> None:
    gpt2 = count("gpt2", 2, 64, 4, 32, 128)
    assert set(gpt2.groups) == {"token_embedding", "position_embedding", "attention", "mlp", "norms", "final_norm"}
    assert gpt2.total == sum(gpt2.groups.values())
    assert gpt2.without_embeddings == gpt2.total - 128 * 64 - 32 * 64


def test_an_untied_head_and_a_narrow_mlp_are_counted() -> None:
    tied = count("gpt2", 2, 64, 4, 32, 128)
    assert count("gpt2", 2, 64, 4, 32, 128, tie_embeddings=False).total - tied.total == 128 * 64
    narrow = count("gpt2", 2, 64, 4, 32, 128, ffn_hidden_size=100)
    assert narrow.groups["mlp"] == 2 * (2 * 64 * 100 + 100 + 64)
    assert count("llama", 2, 64, 4, 32, 128, tie_embeddings=True).groups.get("head") is None
