"""Losses: sums, counts, and that cutting a batch changes nothing."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch.nn import functional as F

from bloomery.families.family import IGNORED_LABEL
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
