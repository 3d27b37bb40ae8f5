"""The parts of a run, put together once by setup.py and never changed."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from bloomery.base.accelerator import memory_bytes
from bloomery.base.energy import Energy
from bloomery.base.ranks import Ranks
from bloomery.checkpoint.remote import Uploader
from bloomery.checkpoint.saver import Saver
from bloomery.checkpoint.tiers import Tier
from bloomery.config.recipe import Recipe
from bloomery.data.batch import GlobalBatch, Source
from bloomery.data.blend import TimelessBlend
from bloomery.monitor.journal import Journal
from bloomery.monitor.meters import IntervalMeter
from bloomery.monitor.record import StepRecord
from bloomery.parallel.feed import Feed, validation_batches
from bloomery.parallel.mesh import Mesh
from bloomery.parallel.runner import Runner
from bloomery.sizing.flops import FlopCount, tflops_per_device
from bloomery.sizing.layout import Layout
from bloomery.sizing.parameters import count_parameters
from bloomery.sizing.schedule import TrainingPlan
from bloomery.train.optimizer import Optimizer
from bloomery.train.spikes import Limits
from bloomery.train.state import PendingStep, TrainState
from bloomery.train.stop import StopRules
from bloomery.train.trace import Tracer

LOGGED_FLOPS = FlopCount.MODEL_FULL


@dataclass(frozen=True)
class Run:
    recipe: Recipe
    plan: TrainingPlan
    folder: Path
    device: torch.device
    runner: Runner
    optimizer: Optimizer
    feed: Feed
    blend: TimelessBlend | None
    """Of the training stream: its state belongs into the checkpoint. None for orders without state."""
    source_keys: Sequence[str]
    """Names of the training sources, as batches number them."""
    validation: Mapping[str, Source]
    validation_samples: Mapping[str, int]
    """Samples evaluated per group: at most as many as its sources have together."""
    mesh: Mesh
    ranks: Ranks
    saver: Saver
    durable: Tier
    local: Tier | None
    """A faster place for checkpoints, saved to more often."""
    uploader: Uploader | None
    recipe_text: str
    journal: Journal
    meter: IntervalMeter
    stop: StopRules
    job: int
    """Which start of this run this is, from 1."""
    peak_flops: float | None
    """Of the device, in the recipe's precision; None if unknown."""
    start_facts: Mapping[str, Any]
    trace: Tracer | None = None
    """Writes down the gradients and samples of the first steps, where that was asked for."""

    def validation_batches(self, group: str) -> Iterator[GlobalBatch]:
        """This process's share of a group's samples."""
        return validation_batches(
            self.validation[group],
            self.validation_samples[group],
            micro_batch_size=self.recipe.batch.micro_batch_size,
            mesh=self.mesh,
            ranks=self.ranks,
        )

    def evaluates_at(self, step: int) -> bool:
        every = self.recipe.train.evaluate
        return every is not None and step % every.every.count == 0

    def logs_at(self, step: int) -> bool:
        return step % self.recipe.monitor.log_every.count == 0 or step == self.plan.train_steps

    def gigaflops_at(self, consumed_samples: int) -> int:
        """Work done so far by the seeds' rule: 6 FLOPs per token and parameter outside the embeddings."""
        model = self.recipe.model
        parameters = count_parameters(model, vocab_size=model.vocab_size).without_embeddings
        return 6 * self.plan.tokens_at(consumed_samples) * parameters // 10**9

    def limits(self, state: TrainState) -> Limits:
        """What the loss and the gradient norm of the next step may reach; beyond it they are a spike."""
        return state.spikes.limits(self.recipe.train.spike_factor, self.recipe.optimizer.clip_grad_norm)

    def log_if_due(self, pending: PendingStep, energy: Energy, *, force: bool) -> None:
        """One record per log_every steps, one for the last step, and one for every step with a NaN."""
        if not (self.logs_at(pending.step) or force):
            return
        interval = self.meter.take()
        consumed = pending.consumed_samples
        tokens_per_second = interval.samples_per_second * self.plan.seq_length
        model = self.recipe.model
        tflops = tflops_per_device(
            model, LOGGED_FLOPS, tokens_per_second=tokens_per_second, num_devices=self.ranks.size
        )
        now, peak = memory_bytes(self.device)
        self.journal.step(
            StepRecord(
                step=pending.step,
                train_steps=self.plan.train_steps,
                consumed_samples=consumed,
                consumed_tokens=self.plan.tokens_at(consumed),
                consumed_gigaflops=self.gigaflops_at(consumed),
                global_batch=pending.global_batch,
                lr=pending.lr,
                losses=interval.losses,
                source_losses=interval.source_losses,
                grad_norm=interval.grad_norm,
                num_zeros=interval.num_zeros,
                loss_scale=pending.loss_scale if self.recipe.precision == "fp16" else None,
                skipped_steps=interval.skipped_steps,
                nan_steps=interval.nan_steps,
                seconds_per_step=interval.seconds_per_step,
                samples_per_second=interval.samples_per_second,
                tokens_per_second=tokens_per_second,
                tflops=tflops,
                tflops_definition=LOGGED_FLOPS.value,
                mfu=tflops * 1e12 / self.peak_flops if self.peak_flops else None,
                memory_bytes=now,
                peak_memory_bytes=peak,
                job=self.job,
                time=time.time(),
                replicas=Layout.of(self.recipe, self.ranks.size).dp,
                energy=energy.to_json(),
            )
        )
