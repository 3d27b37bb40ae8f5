"""A language model of causal convolutions, which no family of Bloomery has, and cross-entropy with a z-loss."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

REACH = 4
Z_LOSS = 1e-3


class Mixer(nn.Module):
    """The contract: `layers` is a ModuleDict with the keys "0" to "n-1", whose blocks are alike; no buffers; `forward`
    takes the inputs of a batch by their names and returns what the loss takes."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.config = config
        self.embed = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleDict({str(n): MixerBlock(config) for n in range(config.num_layers)})
        self.final_norm = nn.LayerNorm(config.hidden_size, eps=config.norm_eps)
        self.head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers.values():
            x = layer(x)
        return self.head(self.final_norm(x))


class MixerBlock(nn.Module):
    def __init__(self, config: Any) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(config.hidden_size, eps=config.norm_eps)
        self.mix = nn.Conv1d(config.hidden_size, config.hidden_size, REACH, bias=False)
        self.up = nn.Linear(config.hidden_size, config.ffn_hidden_size)
        self.down = nn.Linear(config.ffn_hidden_size, config.hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        past = F.pad(self.norm(x).mT, (REACH - 1, 0))  # a place sees itself and what came before
        return x + self.down(F.gelu(self.up(self.mix(past).mT)))


class Sums:
    """A dataset of one's own: sums as digits, 10 for + and 11 for =, with a loss for the digits of the result alone."""

    def __init__(self, count: int, length: int) -> None:
        self.count, self.length = count, length

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        a, b = index * 7919 % 97, index * 104729 % 89
        question = [*map(int, str(a)), 10, *map(int, str(b)), 11]
        tokens = torch.tensor(question + [*map(int, str(a + b))] + [0] * self.length)[: self.length + 1]
        labels = tokens[1:].clone()
        labels[: len(question) - 1] = labels[len(question) + len(str(a + b)) - 1 :] = -100
        return {"tokens": tokens[:-1]}, {"lm loss": labels}


def losses_of(logits: Tensor, targets: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """By the name of the target, the loss of each sample: a sum over its labels, of which -100 is none."""
    labels = targets["lm loss"]
    losses = F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten(), ignore_index=-100, reduction="none")
    size = torch.logsumexp(logits.float(), -1).square() * (labels != -100)
    return {"lm loss": losses.view_as(labels).sum(1) + Z_LOSS * size.sum(1)}
