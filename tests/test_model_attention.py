"""Attention: slopes, kernels against the definition, heads read from widths."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from bloomery.families.bloom import alibi_slopes
from bloomery.model.attention import choose_kernel
from model_samples import run_attention

run = partial(run_attention, sizes=(6, 20, 16))


def test_alibi_slopes_have_their_published_values() -> None:
    assert alibi_slopes(8) == pytest.approx([2.0**-n for n in range(1, 9)], rel=1e-7)
    twelve = [2.0**-n for n in range(1, 9)] + [0.70710678, 0.35355339, 0.17677670, 0.08838835]
    assert alibi_slopes(12) == pytest.approx(twelve, rel=1e-7)
    of_176b = alibi_slopes(112)
    assert len(of_176b) == 112
    assert [of_176b[0], of_176b[64]] == pytest.approx([0.9170040432, 0.9576032807], rel=1e-7)


CASES = [
    ("sdpa", False, False),
    *(
        (kernel, alibi, documents)
        for kernel in ("bias", "flex")
        for alibi in (False, True)
        for documents in (False, True)
    ),
]


@pytest.mark.parametrize("kv_heads", [6, 3])
@pytest.mark.parametrize(("kernel", "alibi", "documents"), CASES)
@pytest.mark.filterwarnings("ignore:flex_attention called without")
def test_every_kernel_agrees_with_the_definition(kernel: str, alibi: bool, documents: bool, kv_heads: int) -> None:
    case = {"alibi": alibi, "documents": documents, "kv_heads": kv_heads, "causal": True}
    for mine, right in zip(run(kernel, **case), run("reference", **case), strict=kernel != "flex"):
        torch.testing.assert_close(mine, right, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kernel", ["sdpa", "bias"])
def test_bidirectional_kernels_agree_with_the_definition(kernel: str) -> None:
    case = {"alibi": False, "documents": kernel == "bias", "kv_heads": 6, "causal": False}
    for mine, right in zip(run(kernel, **case), run("reference", **case), strict=True):
        torch.testing.assert_close(mine, right, rtol=1e-4, atol=1e-5)


def test_dropout_in_attention_drops_probabilities_not_whole_outputs() -> None:
    case = {"alibi": True, "documents": False, "kv_heads": 6, "causal": True}
    torch.manual_seed(0)
    dropped, whole = run("bias", **case, dropout=0.5)[0], run("bias", **case)[0]
    first = dropped[:, :, 0] / whole[:, :, 0]
    assert set(first.round(decimals=3).unique().tolist()) == {0.0, 2.0}, "one key: all or nothing, scaled"
    assert (dropped[:, :, -1] != 0).all(), "many keys: something always stays"


def test_the_kernel_is_the_fastest_that_can_do_it() -> None:
    plain = {"plain": True, "dropout": 0.1, "seq_length": 2048, "head_dim": 128}
    masked = plain | {"plain": False, "dropout": 0.0}
    assert choose_kernel("cuda", **plain) == choose_kernel("cpu", **plain) == "sdpa"
    assert choose_kernel("cuda", **masked) == "flex"
    assert choose_kernel("cuda", **(masked | {"dropout": 0.1})) == "bias", "FlexAttention has no dropout"
    assert choose_kernel("cpu", **masked) == "bias"
    assert choose_kernel("cuda", **(masked | {"head_dim": 8})) == "bias"
    assert choose_kernel("cuda", **(masked | {"seq_length": 64})) == "bias"
