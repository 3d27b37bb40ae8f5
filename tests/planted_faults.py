"""Mistakes that `bloomery verify` must find. Each function is what a rank runs instead of `run_trials`: it breaks one
thing in its own process, then does what it should."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from bloomery.base.piece import Piece
from bloomery.cli.verify_trials import run_trials
from bloomery.config.recipe import ModelSection
from bloomery.data.batch import Batch
from bloomery.parallel import apply, feed, gradients
from bloomery.parallel.gradients import Gradients
from bloomery.parallel.mesh import Mesh
from bloomery.parallel.runner import PlainExecution
from bloomery.sizing import tp_sharding
from bloomery.train.optimizer import Optimizer


def tied_gradients_are_not_added(arguments: Sequence[str]) -> int:
    """First and last stage each keep their own part of the tied embedding's gradient."""
    Gradients._add_the_other_end = lambda self, gradient: None  # type: ignore[method-assign]
    return run_trials(arguments)


def norms_are_not_summed(arguments: Sequence[str]) -> int:
    """Under sequence parallelism each rank keeps the gradient of its own tokens for the norm before attention."""
    rest = ((pattern.replace("attention_norm|", ""), cut) for pattern, cut in tp_sharding.CUTS)
    tp_sharding.CUTS = (*rest, (r"layers\.\d+\.attention_norm\.(weight|bias)", "alike"))  # type: ignore[misc]
    return run_trials(arguments)


def losses_are_averaged_by_micro_batch(arguments: Sequence[str]) -> int:
    """Every micro-batch weighs the same, however many tokens of it carry a loss."""
    original = PlainExecution.train

    def train(self: PlainExecution, micro_batches: Sequence[Batch], loss_of: Any, seed: Any) -> Any:
        waiting = iter(micro_batches)

        def averaged(rows: dict[str, Tensor]) -> Tensor:
            counts = next(waiting).row_counts()
            means = [each.sum() / int(counts[name].sum()) for name, each in rows.items()]
            return torch.stack(means).sum() / len(micro_batches)

        return original(self, micro_batches, averaged, seed)

    PlainExecution.train = train  # type: ignore[method-assign]
    return run_trials(arguments)


def replicated_weights_count_twice(arguments: Sequence[str]) -> int:
    """The global norm counts what every tensor-parallel rank has a copy of once for each rank."""

    def owned(self: Gradients) -> list[Tensor]:
        pairs = zip(self._weights, self.tensors(), strict=True)
        return [each for weight, each in pairs if (weight.piece.owned or weight.summed_over_tp) and each.numel()]

    Gradients._owned = owned  # type: ignore[method-assign]
    return run_trials(arguments)


def every_rank_takes_the_first_slopes(arguments: Sequence[str]) -> int:
    """A sharded buffer with the wrong offset: heads of the second rank get the slopes of the first."""

    def cut_buffers(model: nn.Module, mesh: Mesh) -> None:
        if mesh.tp_group is not None:
            for name, buffer in list(model.named_buffers()):
                setattr(model, name, buffer.chunk(mesh.layout.tp, 0)[0].contiguous())

    apply.cut_buffers = cut_buffers  # type: ignore[attr-defined]
    return run_trials(arguments)


def replicas_read_the_same_samples(arguments: Sequence[str]) -> int:
    """The second replica reads what the first one reads."""
    from bloomery.data import loader

    original: Callable[..., Any] = loader.read_batch
    loader.read_batch = lambda *args, **kwargs: original(*args, **{**kwargs, "replica": 0})  # type: ignore[assignment]
    return run_trials(arguments)


def pieces_lie_elsewhere(arguments: Sequence[str]) -> int:
    """A layout saves and loads one weight with the rows of its two ranks exchanged: among its like nobody notices."""
    original = Optimizer.pieces

    def pieces(self: Optimizer) -> dict[str, Piece]:
        return {
            name: _moved(piece) if "layers.0.mlp.up.weight" in name else piece for name, piece in original(self).items()
        }

    Optimizer.pieces = pieces  # type: ignore[method-assign]
    return run_trials(arguments)


def _moved(piece: Piece) -> Piece:
    rows = piece.tensor.shape[0]
    return dataclasses.replace(piece, offset=(0 if piece.offset[0] else piece.shape[0] - rows, 0))


def rank_one_dies(arguments: Sequence[str]) -> int:
    """A rank raises in the middle of a training of the layout tp2; what comes after is not its fault."""
    take = feed.Feed.take

    def failing(self: feed.Feed) -> Any:
        if os.environ["RANK"] == "1" and getattr(self, "_taken", 0) == 1 and _is_tp():
            raise AssertionError("planted: rank 1 stumbles")
        self._taken = getattr(self, "_taken", 0) + 1  # type: ignore[attr-defined]
        return take(self)

    feed.Feed.take = failing  # type: ignore[method-assign]
    original = apply.apply_tensor_parallel

    def remember(model: nn.Module, mesh: Mesh) -> None:
        _LAYOUT["tp"] = mesh.layout.tp
        original(model, mesh)

    apply.apply_tensor_parallel = remember  # type: ignore[attr-defined]
    return run_trials(arguments)


_LAYOUT = {"tp": 1}


def norms_are_summed_in_fp32(arguments: Sequence[str]) -> int:
    """As torch does it, which is too low on CPUs where tensors are large."""
    gradients.total_norm = torch.nn.utils.get_total_norm
    return run_trials(arguments)


def padding_takes_part(arguments: Sequence[str]) -> int:
    """The softmax goes over the padded vocabulary, in every layout."""
    return _over_padding(arguments, lambda tp: True)


def padding_takes_part_in_tp(arguments: Sequence[str]) -> int:
    """The same, in tensor-parallel layouts only."""
    return _over_padding(arguments, lambda tp: tp)


def _over_padding(arguments: Sequence[str], wrong: Callable[[bool], bool]) -> int:
    original = apply.vocabulary_losses

    def losses(model: ModelSection, group: Any, device: torch.device) -> Any:
        return original(model.model_copy(update={"softmax_over_padding": wrong(group is not None)}), group, device)

    apply.vocabulary_losses = losses  # type: ignore[attr-defined]
    return run_trials(arguments)


def _is_tp() -> bool:
    return _LAYOUT["tp"] > 1


def other_samples_after_the_checkpoint_of_single(arguments: Sequence[str]) -> int:
    """What is trained aside from the checkpoint of one rank begins eight samples too late."""
    from bloomery.cli import verify_trials

    read_state = verify_trials.read_state

    def wrong(folder: Path) -> dict[str, Any]:
        state = read_state(folder)
        late = "train-single" in str(folder)
        return state | {"consumed_samples": state["consumed_samples"] + 8 * late}

    verify_trials.read_state = wrong
    return run_trials(arguments)
