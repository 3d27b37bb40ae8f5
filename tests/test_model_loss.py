"""Losses: sums, counts, and that cutting a batch changes nothing."""

from __future__ import annotations

import shutil
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch.nn import functional as F

from bloomery.data.batch import Batch
from bloomery.families.family import IGNORED_LABEL
from bloomery.model.layers import drop
from bloomery.model.loss import row_losses
from bloomery.parallel.tensor import vocabulary_losses
from bloomery.sizing.parameters import padded_vocab_size
from model_samples import random_tokens, small_config, small_model


def labels_for(tokens: torch.Tensor) -> torch.Tensor:
    labels = tokens.roll(-1, dims=1)
    labels[0, 5:9] = IGNORED_LABEL
    labels[1, -1] = IGNORED_LABEL
    return labels


def test_the_sum_runs_over_valid_tokens_only() -> None:
    config = small_config("gpt2")
    tokens = random_tokens(config)
    labels = labels_for(tokens)
    logits = small_model(config)(tokens)
    total = row_losses(logits, {"lm loss": labels})["lm loss"]
    chosen = -logits.log_softmax(-1).gather(-1, labels.clamp(min=0)[..., None])[..., 0]
    torch.testing.assert_close(total, torch.where(labels == IGNORED_LABEL, 0.0, chosen).sum(1))


def test_bert_has_two_losses() -> None:
    config = small_config("bert")
    tokens = random_tokens(config)
    targets = {"lm loss": torch.full_like(tokens, IGNORED_LABEL), "sop loss": torch.tensor([1, IGNORED_LABEL])}
    targets["lm loss"][:, 3] = tokens[:, 3]
    outputs = small_model(config)(tokens)
    sums = row_losses(outputs, targets)
    torch.testing.assert_close(sums["lm loss"], F.cross_entropy(outputs[0][:, 3], tokens[:, 3], reduction="none"))
    torch.testing.assert_close(sums["sop loss"][0], -outputs[1][0].log_softmax(-1)[1])
    assert sums["sop loss"][1] == 0


def test_a_head_only_where_labels_are_learns_the_same() -> None:
    config = small_config("bert", dropout=0.0)
    tokens = random_tokens(config)
    targets = {"lm loss": torch.full_like(tokens, IGNORED_LABEL), "sop loss": torch.tensor([1, 0])}
    targets["lm loss"][0, [3, 9, 31]] = tokens[0, [3, 9, 31]]
    targets["lm loss"][1, 7] = tokens[1, 7]
    everywhere = Batch({"tokens": tokens}, targets)
    found = []
    for batch in (everywhere, everywhere.labelled_only(3), everywhere.labelled_only(5)):
        model = small_model(config)
        outputs = model(**batch.inputs)
        assert outputs[0].shape[1] == batch.targets["lm loss"].shape[1]
        sums = row_losses(outputs, batch.targets)
        (sums["lm loss"] + sums["sop loss"]).sum().backward()
        found.append([sums["lm loss"], *(parameter.grad for parameter in model.parameters())])
        assert batch.row_counts()["lm loss"].tolist() == [3, 1]
    for other in found[1:]:
        torch.testing.assert_close(other, found[0], rtol=1e-4, atol=1e-5)


def test_sixteen_bit_logits_are_summed_in_fp32() -> None:
    logits = torch.zeros(1, 4096, 8, dtype=torch.bfloat16)
    total = row_losses(logits, {"lm loss": torch.zeros(1, 4096, dtype=torch.long)})["lm loss"]
    assert total.dtype == torch.float32
    assert total.item() == pytest.approx(4096 * torch.log(torch.tensor(8.0)).item(), rel=1e-5)


@pytest.fixture
def group() -> Iterator[dist.ProcessGroup | None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("is_cut", [False, True])
def test_padding_has_no_part_whatever_the_dtype_and_however_low_the_logits(
    dtype: torch.dtype, is_cut: bool, group: dist.ProcessGroup
) -> None:
    """Also none in the stability of the sum: beside zeros, `exp(-200)` is 0."""
    config = small_config("gpt2", vocab_size=300)
    words, rows = 300, padded_vocab_size(config)
    assert rows > words
    logits = torch.cat((torch.randn(2, 5, words) - 200, torch.zeros(2, 5, rows - words)), dim=-1).to(dtype)
    labels = torch.randint(words, (2, 5))
    found = vocabulary_losses(config, group if is_cut else None, logits.device)(logits, labels)
    right = F.cross_entropy(logits[..., :words].float().flatten(0, 1), labels.flatten(), reduction="none")
    torch.testing.assert_close(found.flatten(), right)


@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile on a CPU needs g++")
def test_compiled_dropout_drops_its_share_independently_and_repeats_from_a_seed() -> None:
    values = torch.ones(64, 129, 96, requires_grad=True)
    compiled = torch.compile(lambda x: drop(x, 0.1, training=True))
    torch.manual_seed(0)
    first, second = compiled(values), compiled(values)
    torch.manual_seed(0)
    assert torch.equal(first, compiled(values))
    one, other = ((each != 0).flatten().double() - 0.9 for each in (first, second))
    assert first.mean().item() == pytest.approx(1.0, abs=2e-3)
    for left, right in ((one, other), *((one[:-lag], one[lag:]) for lag in (1, 2, 96, 129 * 96))):
        assert abs((left * right).mean().item() / 0.09) < 5e-3, "uncorrelated"
    assert torch.equal(torch.autograd.grad(first.sum(), values)[0], first.detach())
