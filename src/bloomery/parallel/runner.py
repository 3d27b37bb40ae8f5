"""Runs a global batch through the model, whatever the layout: the one interface that training sees of the machine."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from bloomery.data.batch import Batch, GlobalBatch
from bloomery.families.family import LM_LOSS
from bloomery.parallel.context import own_tokens
from bloomery.parallel.fsdp import set_fsdp_sync
from bloomery.parallel.gradients import Gradients
from bloomery.parallel.mesh import Mesh

DTYPES = {"fp32": torch.float32, "fp16": torch.float16} | dict.fromkeys(("bf16", "fp8", "auto"), torch.bfloat16)
"""What a recipe's precision computes in, fp8 all but the products of model/linear.py. A start has resolved `auto`:
elsewhere it counts as on an accelerator."""
RowLosses = dict[str, Tensor]
"""By name, the loss of each sample of a micro-batch: (B,)."""


@dataclass(frozen=True)
class StepLosses:
    """What a forward and backward pass found over all ranks, still on the device."""

    means: dict[str, Tensor]
    """Each loss, as the mean over the valid targets of the global batch."""
    by_source: Tensor | None
    """Of a blend: (2, sources), the sum of the language-model loss and the tokens it was summed over."""


class Execution(Protocol):
    """How micro-batches go through what this rank has of the model: one after the other, or through a pipeline."""

    def train(
        self, micro_batches: Sequence[Batch], loss_of: Callable[[RowLosses], Tensor], seed: Seed
    ) -> list[RowLosses]:
        """Forward and backward, of `loss_of(rows)`. The row losses of each, where this rank has the end of the model;
        otherwise nothing. Calls `seed(i, stage)` before micro-batch i enters a stage."""
        ...

    def evaluate(self, micro_batches: Sequence[Batch]) -> list[RowLosses]:
        """Forward only, without dropout."""
        ...


Seed = Callable[[int, int], None]
Mark = Callable[[str], None]
"""Says which phase has just ended (monitor/timers.py)."""


def no_mark(phase: str) -> None:
    """Of who times nothing."""


@dataclass(frozen=True, kw_only=True)
class Runner:
    execution: Execution
    gradients: Gradients
    mesh: Mesh
    device: torch.device
    seq_length: int
    num_sources: int
    dropout_seed: int | None
    """None without dropout."""
    mark: Mark = no_mark

    def forward_backward(self, batch: GlobalBatch, *, loss_scale: float, step: int) -> StepLosses:
        """Leave loss_scale * d(loss)/d(weights) in `gradients`; return the losses, unscaled.

        The loss is the mean over the valid tokens of the whole global batch, however it is cut.
        """

        def loss_of(rows: RowLosses) -> Tensor:
            parts = [each.sum() / max(1, batch.counts[name]) for name, each in rows.items()]
            return torch.stack(parts).sum() * loss_scale

        self.gradients.clear(micro_batches=len(batch.micro_batches))
        own = self._own(batch)
        self.mark("data")
        found = self.execution.train(own, loss_of, partial(self._seed_dropout, step))
        self.gradients.reduce_across_ranks()
        sums = self._sums(found, list(batch.counts))
        sources = self._by_source(found, batch)
        if self.mesh.layout.world > 1:
            together = torch.cat([sums, *([] if sources is None else [sources.flatten()])])
            dist.all_reduce(together)
            sums, rest = together[: len(sums)], together[len(sums) :]
            sources = None if sources is None else rest.view_as(sources)
        self.mark("backward")
        means = {name: sums[i] / max(1, count) for i, (name, count) in enumerate(batch.counts.items())}
        return StepLosses(means, sources)

    @torch.no_grad()
    def evaluate(self, batch: GlobalBatch) -> Tensor:
        """(2, losses): over all replicas the sum of each loss and the labels it was summed over; in the order of
        `batch.counts`. Without gradients or dropout."""
        sums = self._sums(self.execution.evaluate(self._own(batch)), list(batch.counts))
        counts = torch.zeros_like(sums)
        if self.mesh.reports_loss and self.mesh.cp == 0:
            counts = torch.tensor(list(batch.counts.values()), dtype=sums.dtype, device=self.device)
        both = torch.stack([sums, counts])
        if self.mesh.layout.world > 1:
            dist.all_reduce(both)
        return both

    def _own(self, batch: GlobalBatch) -> list[Batch]:
        """This rank's part of each micro-batch, on its device."""

        def move(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
            return {name: tensor.to(self.device, non_blocking=True) for name, tensor in tensors.items()}

        mine = [own_tokens(each, self.mesh, self.seq_length) for each in batch.micro_batches]
        return [replace(each, inputs=move(each.inputs), targets=move(each.targets)) for each in mine]

    def _sums(self, found: Sequence[RowLosses], names: Sequence[str]) -> Tensor:
        """Each loss summed over this rank's samples; zeros where another rank reports the same."""
        sums = torch.zeros(len(names), device=self.device)
        for i, name in enumerate(names):
            # A loss over whole samples is known to every context-parallel rank, one over tokens only in parts.
            if found and self.mesh.reports_loss and (name == LM_LOSS or self.mesh.cp == 0):
                sums[i] = torch.stack([rows[name].detach().sum() for rows in found]).sum()
        return sums

    def _by_source(self, found: Sequence[RowLosses], batch: GlobalBatch) -> Tensor | None:
        if self.num_sources < 2 or batch.sources is None:
            return None
        sums = torch.zeros(2, self.num_sources, device=self.device)
        if found and self.mesh.reports_loss:
            index = torch.from_numpy(batch.sources).to(self.device, non_blocking=True)
            sums[0].index_add_(0, index, torch.cat([rows[LM_LOSS].detach() for rows in found]))
            if self.mesh.cp == 0:
                tokens = torch.from_numpy(batch.row_counts[LM_LOSS]).to(self.device, torch.float32, non_blocking=True)
                sums[1].index_add_(0, index, tokens)
        return sums

    def _seed_dropout(self, step: int, micro_batch: int, stage: int) -> None:
        """Dropout depends on where training stands, not on what ran before: a resumed run drops the same units. Ranks
        that see other tokens, heads or layers drop others, so masks depend on the layout."""
        if self.dropout_seed is not None:
            place = f"{stage}/{self.mesh.dp}/{self.mesh.cp}/{self.mesh.tp}"
            key = f"{self.dropout_seed}/{step}/{micro_batch}" + ("" if place == "0/0/0/0" else f"/{place}")
            torch.manual_seed(int.from_bytes(hashlib.blake2b(key.encode(), digest_size=8).digest(), "little") >> 1)


class PlainExecution:
    """Micro-batches one after the other through a whole model: every layout without a pipeline."""

    def __init__(
        self,
        model: nn.Module,
        gradients: Gradients,
        losses: Callable[[Tensor | tuple[Tensor, Tensor], Mapping[str, Tensor]], RowLosses],
        *,
        zero: int,
        compile_model: bool,
        mark: Mark = no_mark,
    ) -> None:
        self._model = model
        self._mark = mark
        self._gradients = gradients
        self._zero = zero

        def rows_of(inputs: Mapping[str, Tensor], targets: Mapping[str, Tensor]) -> RowLosses:
            return losses(model(**inputs), targets)

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
            loss = loss_of(rows)
            self._mark("forward")
            torch.autograd.backward(loss)
            self._gradients.accumulate()
            self._mark("backward")
            found.append({name: each.detach() for name, each in rows.items()})
        return found

    def evaluate(self, micro_batches: Sequence[Batch]) -> list[RowLosses]:
        self._model.eval()
        return [self._rows_of(batch.inputs, batch.targets) for batch in micro_batches]
