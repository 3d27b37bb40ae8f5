"""Generation: greedy, sampled, bounded."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from bloomery.model.generate import _pick, generate
from model_samples import random_tokens, small_config, small_model

CONFIG = small_config("bloom", seq_length=16)
ENDLESS: dict[str, Any] = {"eod_id": -1}


class Counter(nn.Module):
    """Likes the id after the last one best, and the padded rows above all; a flat second choice."""

    config = CONFIG

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        assert tokens.shape[1] <= 16
        logits = torch.zeros(*tokens.shape, 160)
        logits.scatter_(-1, (tokens[..., None] + 1).clamp(max=159), 5.0)
        logits[..., 150:] = 50.0
        return logits


def test_greedy_takes_the_likeliest_real_token_past_the_sequence_length() -> None:
    made = generate(Counter(), torch.tensor([[3], [100]]), max_new_tokens=30, temperature=0, **ENDLESS)
    assert made.tolist() == [list(range(3, 34)), list(range(100, 131))]


def test_sampling_follows_the_seed_and_never_leaves_the_vocabulary() -> None:
    model, tokens = small_model(CONFIG), random_tokens(CONFIG, length=4)
    one, again, other = (
        generate(model, tokens, max_new_tokens=20, temperature=3.0, seed=seed, **ENDLESS) for seed in (1, 1, 2)
    )
    assert torch.equal(one, again)
    assert not torch.equal(one, other)
    assert torch.equal(one[:, :4], tokens)
    wild = generate(Counter(), tokens, max_new_tokens=200, temperature=100.0, **ENDLESS)
    assert wild.max() < CONFIG.vocab_size


def test_top_k_one_is_greedy_at_any_temperature() -> None:
    model, tokens = small_model(CONFIG), random_tokens(CONFIG, length=4)
    greedy = generate(model, tokens, max_new_tokens=10, temperature=0, **ENDLESS)
    assert torch.equal(generate(model, tokens, max_new_tokens=10, temperature=9.0, top_k=1, **ENDLESS), greedy)


def test_rows_end_at_the_end_of_document() -> None:
    made = generate(Counter(), torch.tensor([[3], [6]]), max_new_tokens=30, temperature=0, eod_id=8)
    assert made.tolist() == [[3, 4, 5, 6, 7, 8], [6, 7, 8, 8, 8, 8]]


def test_top_p_chooses_among_the_likeliest_that_together_have_it() -> None:
    logits, random = torch.tensor([[0.15, 0.5, 0.05, 0.3]] * 500).log(), torch.Generator().manual_seed(0)
    for top_p, among in ((0.0, {1}), (0.5, {1}), (0.7, {1, 3}), (0.9, {0, 1, 3}), (1.0, {0, 1, 2, 3})):
        assert {*_pick(logits, 1.0, None, top_p, random).tolist()} == among, top_p
