"""Micro-batches one after the other through a whole model: every layout without a pipeline."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, nn

from bloomery.data.batch import Batch
from bloomery.model.loss import row_losses
from bloomery.parallel.gradients import Gradients
from bloomery.parallel.runner import RowLosses, Seed
from bloomery.parallel.sharding import set_fsdp_sync


class PlainExecution:
    def __init__(
        self,
        model: nn.Module,
        gradients: Gradients,
        vocabulary_losses: Callable[[Tensor, Tensor], Tensor],
        *,
        zero: int,
        compile_model: bool,
    ) -> None:
        self._model = model
        self._gradients = gradients
        self._zero = zero

        def rows_of(inputs: Mapping[str, Tensor], targets: Mapping[str, Tensor]) -> RowLosses:
            return row_losses(model(**inputs), targets, vocabulary_losses)

        # Compiled together, so that the loss fuses with the head and the logits are never kept in fp32.
        self._rows_of = torch.compile(rows_of, dynamic=False) if compile_model else rows_of

    def train(
        self, micro_batches: Sequence[Batch], loss_of: Callable[[RowLosses], Tensor], seed: Seed
    ) -> list[RowLosses]:
        self._model.train()
        found = []
        for i, batch in enumerate(micro_batches):
            seed(i, 0)
            set_fsdp_sync(self._model, zero=self._zero, last=i == len(micro_batches) - 1)
            rows = self._rows_of(batch.inputs, batch.targets)
            torch.autograd.backward(loss_of(rows))
            self._gradients.absorb()
            found.append({name: each.detach() for name, each in rows.items()})
        return found

    def evaluate(self, micro_batches: Sequence[Batch]) -> list[RowLosses]:
        self._model.eval()
        return [self._rows_of(batch.inputs, batch.targets) for batch in micro_batches]
