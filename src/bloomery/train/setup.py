"""Build a run, in the order in which things can fail: folder, resume point, data, journal, model, saver."""

from __future__ import annotations

import platform
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

import bloomery
from bloomery.base.accelerator import device_name, energy_sensor, out_of_memory_problem
from bloomery.base.errors import BloomeryError, LostRankError, Problem, RecipeError, StorageError
from bloomery.base.ranks import ALONE, Ranks, agreed
from bloomery.base.storage import locked, make_folder, own_folder, write_atomically
from bloomery.base.units import format_count
from bloomery.checkpoint.folder import CHECKPOINTS, LOCAL_CHECKPOINTS, FencedError, take_over
from bloomery.checkpoint.load import load_pieces
from bloomery.checkpoint.remote import RemoteSource, Uploader
from bloomery.checkpoint.retention import DURABLE, LOCAL, Tier, tier_roots
from bloomery.checkpoint.save import Saver
from bloomery.checkpoint.select import refuse_later
from bloomery.config.load import as_yaml, fingerprint
from bloomery.config.recipe import Recipe
from bloomery.data.batch import Loader
from bloomery.data.open import OpenData, open_data
from bloomery.monitor import names
from bloomery.monitor.history import Start, read_ledger
from bloomery.monitor.journal import Journal, open_sinks
from bloomery.monitor.meters import IntervalMeter, spent_before, start_meter
from bloomery.monitor.names import Event
from bloomery.monitor.sinks import Console
from bloomery.parallel.apply import DTYPES, make_runner, parallelise
from bloomery.parallel.feed import Feed
from bloomery.parallel.mesh import Mesh, make_mesh
from bloomery.sizing.layout import Layout
from bloomery.sizing.memory import precision_problems
from bloomery.sizing.parameters import count_parameters
from bloomery.train.optimizer import Optimizer
from bloomery.train.resume import (
    ResumePoint,
    archive_stale,
    check_tokenizer,
    checked_shards,
    find_resume_point,
)
from bloomery.train.run import Run
from bloomery.train.state import TrainState
from bloomery.train.stop import StopRules
from bloomery.train.trace import Tracer

_LAST_MOMENT_SECONDS = 60.0
_SLOW_STORAGE_BYTES_PER_SECOND = 1e8
"""Of a rank, for the deadline of a job that has not saved yet."""


@contextmanager
def prepared_run(
    recipe: Recipe,
    folder: Path,
    *,
    device: torch.device,
    ranks: Ranks = ALONE,
    quiet: bool = False,
    start_from: str | None = None,
    changes: Sequence[str] = (),
    trace: Tracer | None = None,
) -> Iterator[tuple[Run, TrainState]]:
    """A run ready for `train`, resumed from its newest checkpoint, or from the one named `start_from`; closed at the
    end in any case. `changes`: the fields that may differ from the checkpoint's, by --change.

    One training at a time may hold a run folder; its rank 0 holds it and reports."""
    with ExitStack() as closing:
        start = _Start(recipe, folder, device, ranks, closing)
        start.claim_folder()
        start.resolve_resume_point(start_from, changes)
        start.open_data()
        start.open_journal(quiet=quiet)
        with _errors_reported(start.journal, start.past.state, device, ranks):
            start.take_over_checkpoints(is_newest=start_from is None)
            start.build_model()
            start.build_saver()
            yield start.build_run(trace), start.past.state


class _Start:
    """The steps of a start. All ranks take them together; what fails on one is an error of all (`agreed`)."""

    def __init__(self, recipe: Recipe, folder: Path, device: torch.device, ranks: Ranks, closing: ExitStack) -> None:
        self.recipe, self.folder, self.device, self.ranks, self.closing = recipe, folder, device, ranks, closing
        self.roots = tier_roots(recipe.checkpoint, folder)
        self.all_roots = [folder / CHECKPOINTS, folder / LOCAL_CHECKPOINTS]
        """Also what the recipe named once: a run resumes from there too, and abandons branches there."""

    def claim_folder(self) -> None:
        taken_over, starts = "", list[Start]()
        with agreed(self.ranks):
            refuse_what_cannot_be_done(self.recipe)
        with agreed(self.ranks):
            if self.ranks.rank == 0:
                make_folder(self.folder)
                own_folder(self.folder / "control")
                for root in filter(Path.is_symlink, self.all_roots):
                    own_folder(root, may_be_linked=True)
                taken_over = self.closing.enter_context(locked(self.folder))
                starts = read_ledger(self.folder / names.EVENTS_FILE).starts
        self.taken_over, self.starts = self.ranks.broadcast((taken_over, starts))
        self.all_roots = [root for root in self.all_roots if root in self.roots.values() or root.is_dir()]

    def resolve_resume_point(self, start_from: str | None, changes: Sequence[str]) -> None:
        upload, remote = self.recipe.checkpoint.upload, None
        if upload is not None:
            remote = RemoteSource(upload.to, self.roots[DURABLE], self.recipe.name, self.starts, self.ranks)
        with agreed(self.ranks):
            self.past = find_resume_point(
                self.recipe, self.all_roots, wanted=start_from, changes=changes, ranks=self.ranks, remote=remote
            )
        state = self.past.state
        self.energy, self.energy_sensor = start_meter(energy_sensor(self.device), self.ranks)
        spent = spent_before(self.folder, state.energy) if self.ranks.rank == 0 else None
        self.energy.before = state.energy = self.ranks.broadcast(spent)
        if self.past.checkpoint is not None and self.past.checkpoint.parent != self.roots[DURABLE]:
            state.saved_step = None  # a node-local checkpoint is no promise: a run that stops here still saves

    def open_data(self) -> None:
        shards: dict[str, dict[str, Any]] = {}
        with agreed(self.ranks):
            opened = open_data(self.recipe, plan=self.past.plan, cursor=self.past.before)
            self.data = self.closing.enter_context(opened)
            check_tokenizer(self.past, self.data.tokenizer_hash)
            if self.ranks.rank == 0:
                shards = checked_shards(self.past, self.data.shards())
        self.shards = self.ranks.broadcast(shards)

    def open_journal(self, *, quiet: bool) -> None:
        """That of rank 0 writes; the others are silent."""
        self.journal = Journal()
        with agreed(self.ranks):
            if self.ranks.rank == 0:
                sinks = open_sinks(
                    self.folder,
                    job=1 + len(self.starts),
                    tensorboard=self.recipe.monitor.tensorboard,
                    resume_step=self.past.state.step,
                    console=Console(quiet=quiet),
                    recipe_text=as_yaml(self.recipe),
                    world_size=self.ranks.size,
                )
                self.journal = Journal(sinks, step=self.past.state.step)
        self.closing.callback(self.journal.close)

    def take_over_checkpoints(self, *, is_newest: bool) -> None:
        """Take the write lease of all folders of checkpoints. `is_newest`: it must still be the newest checkpoint that
        this start resumes from."""
        state, journal, tiers = self.past.state, self.journal, dict[str, Tier]()
        self.ranks.report_hang(lambda text: journal.event(Event.ERROR, state.step, text=text))
        if self.taken_over:
            journal.event(Event.TAKEN_OVER, state.step, text=self.taken_over)
        for warning in filter(None, [self.taken_over, *self.data.warnings]):
            journal.warning(warning)
        with agreed(self.ranks):
            if self.ranks.rank == 0:
                writers = {root: take_over(root) for root in self.all_roots}
                for name, root in self.roots.items():
                    tiers[name] = Tier.of(name, self.recipe.checkpoint, self.folder, writers[root])
                if is_newest:
                    refuse_later(self.all_roots, step=state.step, damaged=self.past.damaged)
                write_atomically(self.folder / "recipe.yaml", as_yaml(self.recipe))
        self.tiers: dict[str, Tier] = self.ranks.broadcast(tiers)
        self.durable = self.tiers[DURABLE]
        journal.silent_when(lambda: self.durable.writer.fenced() is not None)

    def build_model(self) -> None:
        recipe, device = self.recipe, self.device
        self.mesh = Mesh() if self.ranks is ALONE else make_mesh(Layout.of(recipe, self.ranks.size), device)
        compile_model = recipe.train.compile
        if compile_model == "auto":
            compile_model = device.type != "cpu" and recipe.parallel.schedule != "zero_bubble"
        parts = parallelise(recipe, self.mesh, device=device, compile_model=compile_model)
        self.optimizer = Optimizer(
            parts.weights,
            recipe.optimizer,
            compute_dtype=DTYPES[recipe.precision],
            offload=recipe.parallel.offload,
            counts_steps=self.ranks.rank == 0,
        )
        if self.past.checkpoint is not None:
            load_pieces(self.past.checkpoint, self.optimizer.pieces(), ranks=self.ranks)
            self.optimizer.restored()
        parts = replace(parts, weights=self.optimizer.weights)
        num_sources = len(self.data.train.keys)
        self.runner = make_runner(recipe, parts, device=device, compile_model=compile_model, num_sources=num_sources)

    def build_saver(self) -> None:
        """Now that the resume point is loaded, checkpoints that the run does not continue from are moved aside."""
        with agreed(self.ranks):
            if self.ranks.rank == 0:
                archive_stale(self.recipe, self.all_roots, self.past, self.journal)
        with agreed(self.ranks):
            for tier in self.tiers.values():
                tier.prepare_node_dir()
        timeout_seconds = self.recipe.checkpoint.timeout.seconds
        self.saver = Saver(
            self.optimizer.pieces(), device=self.device, ranks=self.ranks, timeout_seconds=timeout_seconds
        )
        self.closing.push(partial(_finish_saves, self.saver))

    def build_run(self, trace: Tracer | None) -> Run:
        recipe, past, data, meter = self.recipe, self.past, self.data, IntervalMeter(self.past.interval)
        facts = self._start_facts()
        self.journal.notice(_greeting(facts, past))
        _report_changes(past, data, self.journal)
        return Run(
            recipe=recipe,
            plan=past.plan,
            folder=self.folder,
            device=self.device,
            runner=self.runner,
            optimizer=self.optimizer,
            feed=Feed(self._loader(), self.ranks, self.mesh),
            data=data,
            mesh=self.mesh,
            ranks=self.ranks,
            saver=self.saver,
            durable=self.durable,
            local=self.tiers.get(LOCAL),
            uploader=self._uploader() if self.ranks.rank == 0 else None,
            journal=self.journal,
            meter=meter,
            energy=self.energy,
            stop=self._stop_rules(meter),
            job=1 + len(self.starts),
            start_facts=facts,
            trace=replace(trace, recipe_yaml=as_yaml(recipe), ranks=self.ranks) if trace else None,
        )

    def _loader(self) -> Loader:
        loader = Loader(
            self.data.train,
            micro_batch_size=self.recipe.batch.micro_batch_size,
            batch_size_at=self.past.plan.batch.global_batch_at,
            replica=self.mesh.dp,
            replicas=Layout.of(self.recipe, self.ranks.size).dp,
            pin_memory=self.device.type != "cpu",
        )
        self.closing.callback(loader.close)
        loader.seek(self.past.state.consumed_samples)
        return loader

    def _uploader(self) -> Uploader | None:
        upload = self.recipe.checkpoint.upload
        if upload is None:
            return None
        every_steps = upload.every.count if upload.every else None
        writer = self.durable.writer
        uploader = Uploader(upload.to, run=self.recipe.name, every_steps=every_steps, keep=upload.keep, writer=writer)
        uploader.offer_newest(self.durable.root, train_steps=self.past.plan.train_steps)
        return uploader

    def _stop_rules(self, meter: IntervalMeter) -> StopRules:
        return StopRules(
            self.past.plan,
            self.recipe.train,
            meter,
            control=self.folder / "control",
            save_seconds_estimate=self.saver.host_bytes / _SLOW_STORAGE_BYTES_PER_SECOND,
            ranks=self.ranks,
            writer=self.durable.writer,
        )

    def _start_facts(self) -> dict[str, Any]:
        recipe, past = self.recipe, self.past
        return {
            "recipe": recipe.name,
            "fingerprint": fingerprint(recipe),
            "parameters": count_parameters(recipe.model, vocab_size=recipe.model.vocab_size).total,
            "device": device_name(self.device),
            "ranks": self.ranks.size,
            "precision": recipe.precision,
            "resumed_from": past.checkpoint.name if past.checkpoint else None,
            "versions": {
                "bloomery": bloomery.__version__,
                "torch": torch.__version__,
                "python": platform.python_version(),
            },
            "start": self.durable.writer.token,
            "tokenizer": self.data.tokenizer_hash,
            "shards": self.shards,
            "save_host_bytes": self.saver.host_bytes,
            names.FACT_ENERGY: self.energy.before.to_json(),
            names.FACT_ENERGY_SENSOR: self.energy_sensor,
        }


@contextmanager
def _errors_reported(journal: Journal, state: TrainState, device: torch.device, ranks: Ranks) -> Iterator[None]:
    """Whatever ends the run early is an event; out of memory is reported as a problem of the recipe, a broken
    collective by the rank that was lost."""
    try:
        yield
    except Exception as found:
        error = ranks.lost(found) or found
        if isinstance(error, FencedError):
            journal.silent_when(lambda: True)
        journal.event(Event.ERROR, state.step, text=str(error) or type(error).__name__)
        if isinstance(error, BloomeryError):
            try:
                journal.close()
            except StorageError as more:  # report both: why it ended, and what could not be written
                error.problems += more.problems
        problem = out_of_memory_problem(error, device)
        if problem is not None:
            raise RecipeError(problem) from found
        if error is found:
            raise
        raise error from found


def _finish_saves(saver: Saver, kind: type[BaseException] | None, *_: object) -> None:
    """Whatever ended the training, a save in flight is worth a moment; unless a user wants to leave at once, or a rank
    is lost, whose part will never come."""
    if kind is None or (issubclass(kind, Exception) and not issubclass(kind, LostRankError)):
        saver.wait(at_most_seconds=_LAST_MOMENT_SECONDS)


def _report_changes(past: ResumePoint, data: OpenData, journal: Journal) -> None:
    step = past.state.step
    for change in past.changes:
        journal.event(Event.CHANGED, step, field=change.field, old=change.old, new=change.new)
    if past.changes:
        journal.notice(f"changed from step {step + 1:,} on: {', '.join(map(str, past.changes))}")
    for notice in data.notices:
        journal.notice(notice)


def refuse_what_cannot_be_done(recipe: Recipe) -> None:
    """RecipeError for everything in the recipe that this version of `train` would have to ignore."""
    problems = precision_problems(recipe)
    if recipe.monitor.carbon is not None:
        problems.append(
            Problem("monitor.carbon is set", "this version does not measure emissions", "override monitor.carbon=null")
        )
    if recipe.data is None:
        problems.append(Problem("data is missing", "training needs shards", "add `data:` with `train:` to the recipe"))
    if problems:
        raise RecipeError(problems)


def _greeting(facts: Mapping[str, Any], past: ResumePoint) -> str:
    how = f"resumed at step {past.state.step:,}" if past.checkpoint else "from the beginning"
    many = f"{facts['ranks']} x " if facts["ranks"] > 1 else ""
    size, where = format_count(facts["parameters"]), f"{facts['precision']} on {many}{facts['device']}"
    return f"{facts['recipe']}: {size} parameters, {where}, {past.plan.train_steps:,} steps, {how}"
