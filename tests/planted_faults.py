"""Mistakes that `bloomery verify` must find: each is a patch of one thing, played in the layout that it is planted in.

Ranks run `faults_by_layout` or `faults_of_the_reference` instead of `run_trial`, so that one reference serves many.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn

from bloomery.base.ranks import Piece, Ranks
from bloomery.config.recipe import ModelSection
from bloomery.data import batch as loader
from bloomery.data.batch import Batch
from bloomery.parallel import apply, feed, gradients
from bloomery.parallel.gradients import Gradients
from bloomery.parallel.mesh import Mesh
from bloomery.parallel.runner import PlainExecution
from bloomery.sizing import layout
from bloomery.train.optimizer import Optimizer
from bloomery.verify import trials as trial_runner
from bloomery.verify.trials import Trial, run_trial

Fault = Callable[[], AbstractContextManager[Any]]


def tied_gradients_are_not_added() -> AbstractContextManager[Any]:
    """First and last stage each keep their own part of the tied embedding's gradient."""
    return patch.object(Gradients, "_sum_tied_embedding", lambda self, gradient: None)


def norms_are_not_summed() -> AbstractContextManager[Any]:
    """Under sequence parallelism each rank keeps the gradient of its own tokens for the norm before attention."""
    rest = ((pattern.replace("attention_norm|", ""), cut) for pattern, cut in layout.CUTS)
    return patch.object(layout, "CUTS", (*rest, (r"layers\.\d+\.attention_norm\.(weight|bias)", "alike")))


def losses_are_averaged_by_micro_batch() -> AbstractContextManager[Any]:
    """Every micro-batch weighs the same, however many tokens of it carry a loss."""
    original = PlainExecution.train

    def train(self: PlainExecution, micro_batches: Sequence[Batch], loss_of: Any, seed: Any) -> Any:
        waiting = iter(micro_batches)

        def averaged(rows: dict[str, Tensor]) -> Tensor:
            counts = next(waiting).row_counts()
            means = [each.sum() / int(counts[name].sum()) for name, each in rows.items()]
            return torch.stack(means).sum() / len(micro_batches)

        return original(self, micro_batches, averaged, seed)

    return patch.object(PlainExecution, "train", train)


def replicated_weights_count_twice() -> AbstractContextManager[Any]:
    """The global norm counts what every tensor-parallel rank has a copy of once for each rank."""

    def owned(self: Gradients, tensors: Sequence[Tensor]) -> list[Tensor]:
        pairs = zip(self._weights, tensors, strict=True)
        return [each for weight, each in pairs if (weight.piece.owned or weight.summed_over_tp) and each.numel()]

    return patch.object(Gradients, "_owned", owned)


def every_rank_takes_the_first_slopes() -> AbstractContextManager[Any]:
    """A sharded buffer with the wrong offset: heads of the second rank get the slopes of the first."""

    def cut_buffers(model: nn.Module, mesh: Mesh) -> None:
        for name, buffer in list(model.named_buffers()):
            setattr(model, name, buffer.chunk(mesh.layout.tp, 0)[0].contiguous())

    return patch.object(apply, "cut_buffers", cut_buffers)


def replicas_read_the_same_samples() -> AbstractContextManager[Any]:
    """The second replica reads what the first one reads."""
    original: Callable[..., Any] = loader.read_batch
    return patch.object(loader, "read_batch", lambda *args, **kwargs: original(*args, **{**kwargs, "replica": 0}))


def pieces_lie_elsewhere() -> AbstractContextManager[Any]:
    """A layout saves and loads one weight with the rows of its two ranks exchanged: among its like nobody notices."""
    original = Optimizer.pieces

    def moved(piece: Piece) -> Piece:
        rows = piece.tensor.shape[0]
        return dataclasses.replace(piece, offset=(0 if piece.offset[0] else piece.shape[0] - rows, 0))

    def pieces(self: Optimizer) -> dict[str, Piece]:
        return {
            name: moved(piece) if "layers.0.mlp.up.weight" in name else piece for name, piece in original(self).items()
        }

    return patch.object(Optimizer, "pieces", pieces)


def rank_one_dies() -> AbstractContextManager[Any]:
    """A rank raises in the middle of a training; what comes after is not its fault."""
    take = feed.Feed.take

    def failing(self: feed.Feed) -> Any:
        if os.environ["RANK"] == "1":
            raise AssertionError("planted: rank 1 stumbles")
        return take(self)

    return patch.object(feed.Feed, "take", failing)


def padding_takes_part() -> AbstractContextManager[Any]:
    """The softmax goes over the padded vocabulary."""
    original = apply.vocabulary_losses

    def losses(model: ModelSection, group: Any, device: torch.device) -> Any:
        return original(model.model_copy(update={"softmax_over_padding": True}), group, device)

    return patch.object(apply, "vocabulary_losses", losses)


def norms_are_summed_in_fp32() -> AbstractContextManager[Any]:
    """As torch does it, which is too low on CPUs where tensors are large."""
    return patch.object(gradients, "total_norm", torch.nn.utils.get_total_norm)


FAULTS: dict[str, Fault] = {
    "tp2": pieces_lie_elsewhere,
    "tp2-dp1": norms_are_not_summed,
    "tp2-pp1": losses_are_averaged_by_micro_batch,
    "tp2-cp1": replicated_weights_count_twice,
    "tp2-zero1": every_rank_takes_the_first_slopes,
    "pp2": tied_gradients_are_not_added,
    "dp2": replicas_read_the_same_samples,
    "dp1-tp2": rank_one_dies,
}
"""By the layout that has it. A layout may be written in many ways, and each is a layout of its own here."""


@contextmanager
def _planted(fault_of: Callable[[Trial], AbstractContextManager[Any]]) -> Iterator[None]:
    train = trial_runner._train

    def faulty(trial: Trial, device: torch.device, ranks: Ranks) -> bool:
        with fault_of(trial):
            return train(trial, device, ranks)

    with patch.object(trial_runner, "_train", faulty):
        yield


def faults_by_layout(*arguments: Any) -> int:
    with _planted(lambda trial: FAULTS.get(trial.layout, nullcontext)()):
        return run_trial(*arguments)


def faults_of_the_reference(*arguments: Any) -> int:
    """Two that all layouts have, so that they agree: only plain torch, beside the reference, does not."""
    with padding_takes_part(), norms_are_summed_in_fp32():
        return run_trial(*arguments)


def other_samples_after_the_checkpoint_of_single(*arguments: Any) -> int:
    """Whoever resumes from the checkpoint of one rank reads eight samples too late."""
    original: Callable[..., Any] = loader.read_batch

    def late(source: Any, first: int, size: int, **options: Any) -> Any:
        return dataclasses.replace(original(source, first + 8, size, **options), first_sample=first)

    def fault_of(trial: Trial) -> AbstractContextManager[Any]:
        is_wrong = trial.source is not None and trial.source.layout == "single"
        return patch.object(loader, "read_batch", late) if is_wrong else nullcontext()

    with _planted(fault_of):
        return run_trial(*arguments)
