"""The parts of a run, put together once by setup.py and never changed."""

import platform
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

import bloomery
from bloomery.base.accelerator import device_name, device_total_bytes, memory_bytes
from bloomery.base.doing import Doing
from bloomery.base.ranks import Ranks, agreed
from bloomery.base.units import Energy
from bloomery.checkpoint.remote import Uploader
from bloomery.checkpoint.retention import Tier
from bloomery.checkpoint.save import Saver
from bloomery.config.load import fingerprint
from bloomery.config.recipe import Recipe
from bloomery.data.batch import GlobalBatch, Stream, read_batch
from bloomery.data.open import OpenData
from bloomery.monitor import names
from bloomery.monitor.carbon import Carbon, emissions
from bloomery.monitor.journal import Journal
from bloomery.monitor.meters import EnergyMeter, IntervalMeter
from bloomery.monitor.profile import Profiler
from bloomery.monitor.record import StepRecord
from bloomery.monitor.resources import Nodes, ResourceMeter
from bloomery.monitor.timers import PHASES, SlowRanks, spread
from bloomery.parallel.feed import Feed
from bloomery.parallel.mesh import Mesh
from bloomery.parallel.runner import Runner
from bloomery.sizing.flops import FlopCount, flops_per_token, hardware_count, megatron_flops_per_token, peak_flops
from bloomery.sizing.parameters import count_parameters, labels_per_sample
from bloomery.sizing.schedule import TrainingPlan
from bloomery.train.optimizer import Optimizer
from bloomery.train.origin import origin
from bloomery.train.resume import ResumePoint
from bloomery.train.spikes import Limits
from bloomery.train.state import PendingStep, TrainState
from bloomery.train.stop import StopRules
from bloomery.train.trace import Tracer

LOGGED_FLOPS = FlopCount.MODEL_FULL
"""Model FLOPs; the record has two other counts beside them."""


@dataclass(frozen=True)
class Opened:
    """What a run has before its model is built."""

    recipe: Recipe
    folder: Path
    device: torch.device
    ranks: Ranks
    past: ResumePoint
    data: OpenData
    shards: Mapping[str, Any]
    """On rank 0, by source, what identifies every shard that the run was ever trained on."""
    journal: Journal
    job: int
    """Which start of this run this is, from 1."""
    energy: EnergyMeter
    nodes: Nodes
    resources: ResourceMeter
    slow_ranks: SlowRanks
    carbon: Carbon | None
    """On the first rank of each node, if the recipe asks for it."""

    @property
    def plan(self) -> TrainingPlan:
        return self.past.plan

    @property
    def compiles(self) -> bool:
        """Whether torch.compile compiles the model, in the first step."""
        wanted = self.recipe.train.compile
        if wanted == "auto":
            return self.device.type != "cpu" and self.recipe.parallel.schedule != "zero_bubble"
        return wanted


@dataclass(frozen=True)
class Run(Opened):
    mesh: Mesh
    runner: Runner
    optimizer: Optimizer
    feed: Feed
    saver: Saver
    durable: Tier
    local: Tier | None
    """The node-local tier, saved to more often."""
    uploader: Uploader | None
    meter: IntervalMeter
    stop: StopRules
    profiler: Profiler
    trace: Tracer | None = None
    """Records the gradients and samples of the first steps, for --trace."""

    @property
    def ancestor(self) -> str | None:
        """The checkpoint of another run that this start takes its weights from, or its whole state."""
        source = self.past.checkpoint or self.past.weights
        return None if source is None or source.folder.parent.parent == self.folder else str(source.folder)

    @cached_property
    def start_facts(self) -> dict[str, Any]:
        """For the ledger. Checkpoints have some of them too."""
        recipe, checkpoint = self.recipe, self.past.checkpoint
        return {
            "recipe": recipe.name,
            "fingerprint": fingerprint(recipe),
            "parameters": count_parameters(recipe.model).total,
            "device": device_name(self.device),
            "ranks": self.ranks.size,
            "precision": recipe.precision,
            "resumed_from": checkpoint.folder.name if checkpoint else None,
            names.FACT_ANCESTOR: self.ancestor,
            "versions": {
                "bloomery": bloomery.__version__,
                "torch": torch.__version__,
                "python": platform.python_version(),
            },
            "start": self.durable.writer.token,
            "tokenizer": self.data.tokenizer_hash,
            "shards": self.shards,
            "save_host_bytes": self.saver.host_bytes,
            **(origin() if self.ranks.rank == 0 else {}),
            names.FACT_ENERGY: self.energy.before.to_json(),
            names.FACT_ENERGY_SENSOR: self.energy.counted_by,
        }

    def evaluation_batches(self, stream: Stream, work: Doing) -> Iterator[GlobalBatch]:
        """This replica's share of a group's samples, one micro-batch at a time: always the same samples, whatever the
        layout, at most as many as the sources have. DataError on every rank if any could not read."""
        evaluate, batch = self.recipe.train.evaluate, self.recipe.batch
        wanted = evaluate.steps * batch.global_batch_size if evaluate else 0
        end = min(wanted, sum(source.num_samples for source in stream.sources))
        rows, mesh = batch.micro_batch_size, self.mesh
        window = rows * mesh.layout.dp
        for first in work.over(range(0, end, window), end / window):
            with agreed(self.ranks):
                found = read_batch(
                    stream,
                    first,
                    window,
                    micro_batch_size=rows,
                    replica=mesh.dp,
                    replicas=mesh.layout.dp,
                    end=end,
                    labels_per_sample=labels_per_sample(self.recipe),
                )
            yield found

    def evaluates_at(self, step: int) -> bool:
        every = self.recipe.train.evaluate
        return every is not None and step % every.every.count == 0

    def logs_at(self, step: int) -> bool:
        return step % self.recipe.monitor.log_every.count == 0 or step == self.plan.train_steps

    def gigaflops_at(self, consumed_samples: int) -> int:
        """Work done so far by the seeds' rule: 6 FLOPs per token and parameter outside the embeddings."""
        model = self.recipe.model
        parameters = count_parameters(model).without_embeddings
        return 6 * self.plan.tokens_at(consumed_samples) * parameters // 10**9

    def limits(self, state: TrainState) -> Limits:
        """What the loss and the gradient norm of the next step may reach; beyond it they are a spike."""
        return state.spikes.limits(self.recipe.train.spike_factor, self.recipe.optimizer.clip_grad_norm)

    def count_energy(self, state: TrainState, *, fresh: bool = False) -> None:
        """What the run has spent up to now; `fresh` at its end. Collective."""
        state.energy = self.energy.total(self.ranks, fresh=fresh)
        if fresh and self.recipe.monitor.carbon is not None:
            if self.carbon is not None:
                self.carbon.close()
            self._emissions(state.step, self.ranks.table(self._emitted))

    @property
    def _emitted(self) -> list[float]:
        return self.carbon.numbers if self.carbon else [0.0, 0.0]

    def _emissions(self, step: int, rows: Sequence[Sequence[float]]) -> dict[str, float]:
        """Of all nodes, reported; `rows`: what every rank has `_emitted`."""
        if self.recipe.monitor.carbon is None:
            return {}
        total = emissions(rows[members[0]] for members in self.nodes.members)
        if self.carbon is not None:
            self.carbon.report(self.journal, step, total)
        return total

    def _name_slow_rank(self, step: int, timers: Sequence[Mapping[str, float]]) -> None:
        layout = self.mesh.layout
        if found := self.slow_ranks.follow(timers, [layout.place_of(rank).pp for rank in range(self.ranks.size)]):
            host = self.nodes.hosts[found["rank"]]
            self.journal.event(names.Event.SLOW_RANK, step, **found, host=host)
            self.journal.warning(
                f"rank {found['rank']} on {host} is slow: its own work takes {found['seconds']:.4g} s a step, that of "
                f"the others {found['usual_seconds']:.4g} s; most of it in {found['phase']}"
            )

    def log_if_due(self, pending: PendingStep, state: TrainState, *, force: bool) -> None:
        """One record per log_every steps, one for the last step, and one for every step with a NaN. Collective."""
        self.energy.own()  # its counter is read before it wraps around
        if not (self.logs_at(pending.step) or force):
            return
        interval, consumed = self.meter.take(), pending.consumed_samples
        spent, memory = self.energy.own().to_json().values(), memory_bytes(self.device)
        timers = [interval["timers"].get(phase, 0.0) for phase in PHASES]
        rows = self.ranks.table([*spent, *memory, *self._emitted, *timers, *self.resources.row()])
        joules, measured, seconds, memory_now, memory_peak, *_ = zip(*rows, strict=True)
        by_rank = [dict(zip(PHASES, row[7:], strict=False)) for row in rows]
        self._name_slow_rank(pending.step, by_rank)
        state.energy = self.energy.before + Energy(sum(joules), sum(measured), sum(seconds))
        model, recompute = self.recipe.model, self.recipe.parallel.recompute
        tokens_per_second = interval["samples_per_second"] * self.plan.seq_length
        per_device = tokens_per_second / self.ranks.size / 1e12
        hardware = hardware_count(recompute)
        tflops = flops_per_token(model, LOGGED_FLOPS) * per_device
        peak = peak_flops(device_name(self.device), self.recipe.precision)
        total_bytes = device_total_bytes(self.device)
        self.journal.record(
            StepRecord(
                **interval,
                step=pending.step,
                train_steps=self.plan.train_steps,
                consumed_samples=consumed,
                consumed_tokens=self.plan.tokens_at(consumed),
                consumed_gigaflops=self.gigaflops_at(consumed),
                global_batch=pending.global_batch,
                lr=pending.lr,
                loss_scale=pending.loss_scale if self.recipe.precision == "fp16" else None,
                tokens_per_second=tokens_per_second,
                tflops=tflops,
                tflops_definition=LOGGED_FLOPS.value,
                hardware_tflops=flops_per_token(model, hardware) * per_device,
                hardware_tflops_definition=hardware.value,
                megatron_tflops=megatron_flops_per_token(model, recompute) * per_device,
                mfu=tflops * 1e12 / peak if peak else None,
                memory_bytes=int(max(memory_now)),
                peak_memory_bytes=int(max(memory_peak)),
                memory_share=max(memory_peak) / total_bytes if total_bytes else None,
                rank_timers={
                    name: spread([row[name] for row in by_rank]) for name in interval["timers"] if len(by_rank) > 1
                },
                job=self.job,
                time=time.time(),
                replicas=self.mesh.layout.dp,
                world_size=self.ranks.size,
                source_samples=self.data.train.blend.taken(consumed) if len(self.data.train.sources) > 1 else {},
                energy=state.energy.to_json(),
                resources=self.resources.due([row[7 + len(PHASES) :] for row in rows]),
                emissions=self._emissions(pending.step, [row[5:7] for row in rows]),
            )
        )
