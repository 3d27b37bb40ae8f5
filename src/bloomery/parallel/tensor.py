"""Tensor parallelism: parameters are cut, and the cut modules do some things differently; and the cross-entropy over
logits whose vocabulary is cut between ranks: no rank ever holds all logits of a token.

Between attention and MLP the sequence is cut too (sequence parallelism), so a rank computes norms, dropout and
residuals only for its part of the tokens. Modules compute on plain local tensors; what has to be communicated is
attached to them here. Two tables say it all, CUTS (sizing/layout.py) and BEHAVIOURS; a new family needs neither
unless it brings a new kind of layer.
"""

import re
from collections.abc import Callable
from functools import partial
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from bloomery.config.recipe import ModelSection
from bloomery.families.family import IGNORED_LABEL
from bloomery.model.linear import Linear
from bloomery.model.loss import padding_of, token_losses, true_logits
from bloomery.model.transformer import Transformer
from bloomery.parallel.collectives import (
    all_gather_replicated,
    all_reduce,
    gather,
    own_part,
    reduce_scatter_with_grad,
    sum_of_all,
)
from bloomery.parallel.mesh import Mesh
from bloomery.sizing.layout import cut_dimension


def apply_tensor_parallel(model: Transformer, mesh: Mesh) -> None:
    """Cut the parameters of a meta-device model to this rank's part and make its modules communicate."""
    if mesh.tp_group is None:
        return
    for module_name, module in model.named_modules():
        for name, parameter in module.named_parameters(module_name, recurse=False):
            dim = cut_dimension(name)
            if dim is not None:
                part = parameter.data.chunk(mesh.layout.tp, dim)[mesh.tp]
                setattr(module, name.rpartition(".")[2], nn.Parameter(torch.empty_like(part)))
        for pattern, kind, attach in BEHAVIOURS:
            if re.fullmatch(pattern, module_name) and isinstance(module, kind):
                attach(module, mesh.tp_group)
    model.tie_weights()


def cut_buffers(model: Transformer, mesh: Mesh) -> None:
    """Cut freshly rebuilt buffers, such as the slopes of all heads, to this rank's part."""
    if mesh.tp_group is not None:
        for name, buffer in list(model.named_buffers()):
            dim = cut_dimension(name)
            assert dim is not None, f"buffer {name} has no dimension to cut"
            setattr(model, name, buffer.chunk(mesh.layout.tp, dim)[mesh.tp].contiguous())


Attach = Callable[[nn.Module, dist.ProcessGroup], None]


def _on_input(collective: Callable[[Tensor, int, dist.ProcessGroup], Tensor]) -> Attach:
    """What the module is given goes through a collective along its tokens."""

    def attach(module: nn.Module, group: dist.ProcessGroup) -> None:
        module.register_forward_pre_hook(lambda _, args: (collective(args[0], 1, group), *args[1:]))

    return attach


def _on_output(collective: Callable[[Tensor, int, dist.ProcessGroup], Tensor]) -> Attach:
    """What the module returns, which ends in (tokens, features), goes through a collective along its tokens."""

    def attach(module: nn.Module, group: dist.ProcessGroup) -> None:
        module.register_forward_hook(lambda _, args, output: collective(output, output.ndim - 2, group))

    return attach


def _sum_output(module: nn.Module, group: dist.ProcessGroup) -> None:
    """A linear layer whose inputs lie on all ranks: the products are summed, then the bias is added once."""
    linear = cast(Linear, module)

    def forward(x: Tensor) -> Tensor:
        out = reduce_scatter_with_grad(linear.product(x), 1, group)
        return out if linear.bias is None else out + linear.bias

    module.forward = forward


def _embed_vocabulary_parallel(embedding: nn.Module, group: dist.ProcessGroup) -> None:
    """An embedding of which each rank has some rows: who has a word's row gives it, the others give zeros."""

    def forward(tokens: Tensor) -> Tensor:
        weight = cast(Tensor, embedding.weight)
        own, absent = _own_rows(tokens, weight.shape[0], group)
        return reduce_scatter_with_grad(F.embedding(own, weight).masked_fill(absent[..., None], 0.0), 1, group)

    embedding.forward = forward


BEHAVIOURS: tuple[tuple[str, type[nn.Module], Attach], ...] = (
    (r"embed\.tokens", nn.Embedding, _embed_vocabulary_parallel),
    (r"embed\.(positions|token_types)", nn.Embedding, _on_output(own_part)),
    (r"layers\.\d+\.(attention|mlp)", nn.Module, _on_input(gather)),
    (r"layers\.\d+\.(attention\.out|mlp\.down)", Linear, _sum_output),
    (r"head", nn.Module, _on_input(gather)),
    (r"pooler", nn.Module, _on_input(all_gather_replicated)),
)
"""What is attached to which modules, by name and kind."""


def vocabulary_losses(
    model: ModelSection, group: dist.ProcessGroup | None, device: torch.device
) -> Callable[[Tensor, Tensor], Tensor]:
    """`token_losses` (model/loss.py) for this model's logits, which may be cut between the ranks of a group."""
    padding = padding_of(model, device)
    if group is None:
        return partial(token_losses, padding=padding)
    return partial(_parallel_losses, padding=None if padding is None else own_part(padding, 0, group), group=group)


def _parallel_losses(logits: Tensor, labels: Tensor, padding: Tensor | None, group: dist.ProcessGroup) -> Tensor:
    """For logits (..., vocabulary / ranks). Padding may be a part of a rank's words, or all of them."""
    logits = true_logits(logits, padding)
    highest = all_reduce(logits.detach().amax(-1), "max", group)
    total = sum_of_all(torch.exp(logits - highest[..., None]).sum(-1), group)
    own, absent = _own_rows(labels, logits.shape[-1], group)
    chosen = logits.gather(-1, own[..., None])[..., 0]
    chosen = sum_of_all(chosen.masked_fill(absent, 0.0), group)
    return (torch.log(total) + highest - chosen).masked_fill(labels == IGNORED_LABEL, 0.0)


def _own_rows(words: Tensor, rows: int, group: dist.ProcessGroup) -> tuple[Tensor, Tensor]:
    """Which of this rank's rows of the vocabulary each word has, 0 for those of other ranks; and which those are."""
    own = words - group.rank() * rows
    absent = (own < 0) | (own >= rows)
    return own.masked_fill(absent, 0), absent
