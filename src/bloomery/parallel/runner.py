"""Runs a global batch through the model. One interface for every layout; today the plain one of a single process."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from bloomery.data.batch import Batch, GlobalBatch
from bloomery.model.loss import LM_LOSS, row_losses
from bloomery.parallel.gradients import GradientSum


@dataclass(frozen=True)
class StepLosses:
    """What a forward and backward pass found, still on the device."""

    means: dict[str, Tensor]
    """Each loss, as the mean over the valid targets of the global batch."""
    rows: Tensor
    """The language-model loss summed over each sample of this replica, in the order of its micro-batches."""


class Runner(Protocol):
    """What the training step sees of the machine."""

    gradients: GradientSum

    def forward_backward(self, batch: GlobalBatch, *, loss_scale: float, step: int) -> StepLosses:
        """Leave loss_scale * d(loss)/d(weights) in `gradients`; return the losses, unscaled.

        The loss is the mean over the valid tokens of the whole global batch, however it is cut into micro-batches.
        """
        ...

    def evaluate(self, batch: GlobalBatch) -> dict[str, Tensor]:
        """The sum of each loss over the batch, without gradients or dropout."""
        ...


class PlainRunner:
    """One process, one device."""

    def __init__(
        self, model: nn.Module, *, device: torch.device, compile_model: bool, dropout_seed: int | None
    ) -> None:
        self.gradients = GradientSum(list(model.parameters()))
        self._model = model
        self._device = device
        self._dropout_seed = dropout_seed

        def rows_of(inputs: Mapping[str, Tensor], targets: Mapping[str, Tensor]) -> dict[str, Tensor]:
            return row_losses(model(**inputs), targets)

        # Compiled together, so that the loss fuses with the head and the logits are never kept in fp32.
        self._rows_of = torch.compile(rows_of, dynamic=False) if compile_model else rows_of

    def forward_backward(self, batch: GlobalBatch, *, loss_scale: float, step: int) -> StepLosses:
        self._model.train()
        self.gradients.clear()
        counts = batch.counts
        means: dict[str, Tensor] = {}
        rows: list[Tensor] = []
        for i, micro_batch in enumerate(batch.micro_batches):
            self._seed_dropout(step, i)
            found = self._rows_of(*self._on_device(micro_batch))
            parts = {name: each.sum() / max(1, counts[name]) for name, each in found.items()}
            torch.autograd.backward(torch.stack(list(parts.values())).sum() * loss_scale)
            self.gradients.absorb()
            for name, part in parts.items():
                means[name] = means[name] + part.detach() if name in means else part.detach()
            rows.append(found[LM_LOSS].detach())
        return StepLosses(means, torch.cat(rows))

    @torch.no_grad()
    def evaluate(self, batch: GlobalBatch) -> dict[str, Tensor]:
        self._model.eval()
        totals: dict[str, Tensor] = {}
        for micro_batch in batch.micro_batches:
            for name, rows in self._rows_of(*self._on_device(micro_batch)).items():
                totals[name] = totals[name] + rows.sum() if name in totals else rows.sum()
        return totals

    def _on_device(self, batch: Batch) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        def move(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
            return {name: tensor.to(self._device, non_blocking=True) for name, tensor in tensors.items()}

        return move(batch.inputs), move(batch.targets)

    def _seed_dropout(self, step: int, micro_batch: int) -> None:
        """Dropout depends on where training stands, not on what ran before: a resumed run drops the same units."""
        if self._dropout_seed is not None:
            key = f"{self._dropout_seed}/{step}/{micro_batch}".encode()
            torch.manual_seed(int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "little") >> 1)
