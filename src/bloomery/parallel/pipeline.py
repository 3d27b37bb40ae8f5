"""Pipeline parallelism: a model cut into stages, and micro-batches through them by torch.distributed.pipelining.

What travels between stages are plain hidden states of a fixed shape. Everything else (tokens, masks, labels) every rank
reads for itself, so the schedule is only given the number of each micro-batch.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import pipelining

from bloomery.config.recipe import PipelineSchedule, Recipe
from bloomery.data.batch import Batch
from bloomery.model.loss import row_losses
from bloomery.model.transformer import Transformer
from bloomery.parallel.gradients import Gradients
from bloomery.parallel.mesh import Mesh
from bloomery.parallel.runner import DTYPES, Mark, RowLosses, Seed, no_mark
from bloomery.sizing.parameters import labels_per_sample, padded_vocab_size, second_loss

_SCHEDULES: dict[PipelineSchedule, Any] = {
    "gpipe": pipelining.ScheduleGPipe,
    "1f1b": pipelining.Schedule1F1B,
    "interleaved": pipelining.ScheduleInterleaved1F1B,
    "zero_bubble": pipelining.ScheduleInterleavedZeroBubble,
}


def schedule_in_force(kind: PipelineSchedule, *, num_stages: int, num_micro_batches: int) -> PipelineSchedule:
    """torch's 1F1B refuses fewer micro-batches than stages, as a batch ramp may begin with. GPipe does not, and what it
    holds is then no more than 1F1B may hold anyway: a micro-batch for every stage."""
    return "gpipe" if kind == "1f1b" and num_micro_batches < num_stages else kind


class PipelineExecution:
    def __init__(
        self,
        recipe: Recipe,
        stages: Mapping[int, Transformer],
        gradients: Gradients,
        vocabulary_losses: Callable[[Tensor, Tensor], Tensor],
        mesh: Mesh,
        device: torch.device,
        mark: Mark = no_mark,
    ) -> None:
        self._mark = mark
        self._kind = recipe.parallel.schedule
        self._num_stages = mesh.layout.pp * recipe.parallel.chunks
        self._hidden, self._outputs = hidden_states(recipe, mesh), _outputs(recipe, mesh)
        self._stages = dict(stages)
        self._gradients = gradients
        self._vocabulary_losses = vocabulary_losses
        self._mesh = mesh
        self._device = device
        self._micro_batches: Sequence[Batch] = ()
        self._seed: Seed = lambda i, stage: None
        self._loss_of: Callable[[RowLosses], Tensor] | None = None
        self._found: dict[int, RowLosses] = {}
        self._schedule: tuple[int, Any] | None = None
        for number, stage in self._stages.items():
            stage.register_forward_pre_hook(self._feeder(number), with_kwargs=True, prepend=True)

    def train(
        self, micro_batches: Sequence[Batch], loss_of: Callable[[RowLosses], Tensor], seed: Seed
    ) -> list[RowLosses]:
        self._micro_batches, self._seed, self._loss_of, self._found = micro_batches, seed, loss_of, {}
        for stage in self._stages.values():
            stage.train()
        numbers = torch.arange(len(micro_batches))
        args = (numbers,) if 0 in self._stages else ()
        targets = {"target": numbers, "losses": []} if self._num_stages - 1 in self._stages else {}
        self._schedule_for(len(micro_batches)).step(*args, **targets, micro_batch=numbers, return_outputs=False)
        self._mark("wait")
        return [self._found[i] for i in sorted(self._found)]

    def evaluate(self, micro_batches: Sequence[Batch]) -> list[RowLosses]:
        """One micro-batch after the other: rare enough for a bubble, and the same for every schedule."""
        self._micro_batches, self._seed = micro_batches, lambda i, stage: None
        for stage in self._stages.values():
            stage.eval()
        found = []
        for i, batch in enumerate(micro_batches):
            hidden: Any = None
            for number in range(self._num_stages):
                if number not in self._stages:
                    continue
                stage = self._stages[number]
                if number > 0 and number - 1 not in self._stages:
                    hidden = torch.empty_like(self._hidden, device=self._device)
                    dist.recv(hidden, self._rank_of(number - 1), self._mesh.pp_group)
                hidden = stage(*([] if number == 0 else [hidden]), micro_batch=torch.tensor([i]))
                if number == self._num_stages - 1:
                    found.append(row_losses(hidden, batch.targets, self._vocabulary_losses))
                elif number + 1 not in self._stages:
                    dist.send(hidden, self._rank_of(number + 1), self._mesh.pp_group)
        return found

    def _rank_of(self, stage: int) -> int:
        assert self._mesh.pp_group is not None
        return dist.get_global_rank(self._mesh.pp_group, stage % self._mesh.layout.pp)

    def _feeder(self, stage: int) -> Callable[..., tuple[tuple[Tensor, ...], dict[str, Tensor]]]:
        """A hook that turns (hidden states, number of the micro-batch) into what the model is called with."""

        def feed(
            _: nn.Module, args: tuple[Tensor, ...], kwargs: dict[str, Any]
        ) -> tuple[tuple[Tensor, ...], dict[str, Tensor]]:
            number = int(kwargs["micro_batch"])
            self._seed(number, stage)
            inputs = dict(self._micro_batches[number].inputs)
            tokens = inputs.pop("tokens")
            return (tokens if stage == 0 else args[0],), inputs

        return feed

    def _loss(self, outputs: Tensor | tuple[Tensor, Tensor], target: Tensor) -> Tensor:
        number = int(target)
        rows = row_losses(outputs, self._micro_batches[number].targets, self._vocabulary_losses)
        self._found[number] = {name: each.detach() for name, each in rows.items()}
        assert self._loss_of is not None
        loss = self._loss_of(rows)
        self._mark("forward")
        return loss

    def _schedule_for(self, num_micro_batches: int) -> Any:
        """Rebuilt when a batch ramp changes the number of micro-batches: torch fixes it for a schedule's life."""
        if self._schedule is None or self._schedule[0] != num_micro_batches:
            stages = [self._stage(number, stage) for number, stage in self._stages.items()]
            kind = schedule_in_force(self._kind, num_stages=self._num_stages, num_micro_batches=num_micro_batches)
            several = kind in ("interleaved", "zero_bubble")
            schedule = _SCHEDULES[kind](
                stages if several else stages[0], num_micro_batches, loss_fn=self._loss, scale_grads=False
            )
            self._schedule = (num_micro_batches, schedule)
        return self._schedule[1]

    def _stage(self, number: int, stage: nn.Module) -> pipelining.PipelineStage:
        return _TrainingStage(
            stage,
            number,
            self._num_stages,
            self._device,
            input_args=(torch.empty(1, dtype=torch.int64, device="meta") if number == 0 else self._hidden,),
            output_args=self._outputs if number == self._num_stages - 1 else (self._hidden,),
            group=self._mesh.pp_group,
            gradients=self._gradients,
            mark=self._mark,
        )


class _TrainingStage(pipelining.PipelineStage):
    """Hands 16-bit gradients to their fp32 sums after every backward pass, instead of adding them in 16 bits; and says
    when it has computed. In between, its rank sends, receives and waits for others."""

    def __init__(self, *args: Any, gradients: Gradients, mark: Mark, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._gradients, self._mark = gradients, mark

    def forward_one_chunk(self, *args: Any, **kwargs: Any) -> Any:
        self._mark("wait")
        outputs = super().forward_one_chunk(*args, **kwargs)
        self._mark("forward")
        return outputs

    def backward_one_chunk(
        self, bwd_chunk_id: int, loss: Any = None, full_backward: bool = True, last_backward: bool = False
    ) -> None:
        self._mark("wait")
        super().backward_one_chunk(bwd_chunk_id, loss, full_backward, last_backward)
        if full_backward:
            self._gradients.accumulate()
        self._mark("backward")

    def backward_weight_one_chunk(self, bwd_chunk_id: int, last_backward: bool = False) -> None:
        self._mark("wait")
        super().backward_weight_one_chunk(bwd_chunk_id, last_backward)
        self._gradients.accumulate()
        self._mark("backward")


def hidden_states(recipe: Recipe, mesh: Mesh) -> Tensor:
    """What travels between stages, as it is on the meta device: the tokens of this rank, between blocks. Gradients
    travel back."""
    tokens = recipe.model.seq_length // (mesh.layout.cp * mesh.layout.tp)
    shape = (recipe.batch.micro_batch_size, tokens, recipe.model.hidden_size)
    return torch.empty(shape, dtype=DTYPES[recipe.precision], device="meta", requires_grad=True)


def _outputs(recipe: Recipe, mesh: Mesh) -> tuple[Tensor, ...]:
    """What the last stage returns, as it is on the meta device."""
    rows, dtype = recipe.batch.micro_batch_size, DTYPES[recipe.precision]
    words = padded_vocab_size(recipe.model) // mesh.layout.tp
    places = labels_per_sample(recipe) or recipe.model.seq_length // mesh.layout.cp
    logits = torch.empty((rows, places, words), dtype=dtype, device="meta")
    order = torch.empty((rows, 2), dtype=dtype, device="meta")
    return (logits, order) if second_loss(recipe.model) else (logits,)
