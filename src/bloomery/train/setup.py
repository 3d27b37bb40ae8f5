"""Put a run together, in the order in which things can fail: recipe, folder, data, then weights, then the past."""

from __future__ import annotations

import platform
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

import bloomery
from bloomery.base.accelerator import device_name, energy_sensor, out_of_memory_problem
from bloomery.base.errors import BloomeryError, LostRankError, Problem, RecipeError, StorageError
from bloomery.base.ranks import ALONE, Ranks, agreed
from bloomery.base.storage import locked, make_folder, own_folder, write_atomically
from bloomery.base.units import Duration, format_count
from bloomery.checkpoint.fence import FencedError, Writer, take_over
from bloomery.checkpoint.load import load_on_all
from bloomery.checkpoint.remote import RemoteSource, Uploader
from bloomery.checkpoint.saver import Saver, estimate_save_seconds
from bloomery.checkpoint.select import refuse_later
from bloomery.checkpoint.tiers import DURABLE, LOCAL, Tier, all_roots, kept_in, parts_in, tier_roots
from bloomery.config.describe import as_yaml, fingerprint
from bloomery.config.recipe import Recipe
from bloomery.data.batch import Source
from bloomery.data.loader import Loader
from bloomery.data.open import OpenData, open_data
from bloomery.monitor import names
from bloomery.monitor.history import Start, read_ledger
from bloomery.monitor.journal import Journal
from bloomery.monitor.meters import EnergyMeter, IntervalMeter, spent_before, start_meter
from bloomery.monitor.names import Event
from bloomery.monitor.sinks import Console, open_sinks
from bloomery.parallel.apply import DTYPES, make_runner, parallelise
from bloomery.parallel.feed import Feed
from bloomery.parallel.mesh import Mesh, alone, make_mesh
from bloomery.parallel.runner import Runner
from bloomery.sizing.flops import peak_flops
from bloomery.sizing.layout import Layout
from bloomery.sizing.memory import precision_problems
from bloomery.sizing.parameters import count_parameters
from bloomery.sizing.schedule import TrainingPlan
from bloomery.train.optimizer import Optimizer
from bloomery.train.resume import (
    ResumePoint,
    archive_stale,
    check_tokenizer,
    checked_shards,
    find_resume_point,
    report_fetched,
)
from bloomery.train.run import Run
from bloomery.train.state import TrainState
from bloomery.train.stop import StopRules
from bloomery.train.trace import TraceRequest

_LAST_MOMENT_SECONDS = 60.0


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
    trace: TraceRequest | None = None,
) -> Iterator[tuple[Run, TrainState]]:
    """A run ready for `train`, resumed from its newest checkpoint, or from the one named `start_from`; closed at the
    end, come what may. `changes`: the fields that may differ from the checkpoint's because the user asks for it.

    One training at a time may hold a run folder; its rank 0 holds it and reports."""
    with ExitStack() as closing:
        start = _Start(recipe, folder, device, ranks, closing)
        claim = start.claim_folder()
        past = start.resolve_resume_point(claim, start_from, changes)
        data = start.open_data(past)
        journal = start.open_journal(claim, past, quiet=quiet)
        with _errors_reported(journal, past.state, device, ranks):
            tiers = start.take_over_checkpoints(claim, past, data, journal, is_newest=start_from is None)
            parts = start.build_model(past, data)
            saver = start.build_saver(parts.optimizer, tiers, past, journal)
            yield start.build_run(claim, past, data, journal, tiers, parts, saver, trace), past.state


@dataclass(frozen=True)
class _Claim:
    """What a start learns when it claims its run folder."""

    taken_over: str
    """From whom, in words; empty if from nobody."""
    starts: Sequence[Start]
    """Before this one."""
    energy: EnergyMeter
    energy_sensor: str
    remote: RemoteSource | None

    @property
    def job(self) -> int:
        return 1 + len(self.starts)


@dataclass(frozen=True)
class _Data:
    open: OpenData
    shards: dict[str, dict[str, Any]]
    """All that the run was ever trained on."""


@dataclass(frozen=True)
class _Parts:
    mesh: Mesh
    runner: Runner
    optimizer: Optimizer


@dataclass(frozen=True)
class _Start:
    """The steps of a start. All ranks take them together; what fails on one is an error of all (`agreed`)."""

    recipe: Recipe
    folder: Path
    device: torch.device
    ranks: Ranks
    closing: ExitStack

    @property
    def _roots(self) -> dict[str, Path]:
        return tier_roots(self.recipe.checkpoint, self.folder)

    @property
    def _places(self) -> list[Path]:
        """Also those that the recipe named once: a run resumes from them too, and abandons branches in all of them."""
        roots = list(self._roots.values())
        return [*roots, *(root for root in all_roots(self.folder) if root.is_dir() and root not in roots)]

    def claim_folder(self) -> _Claim:
        taken, starts, ranks = "", list[Start](), self.ranks
        with agreed(ranks):
            refuse_what_cannot_be_done(self.recipe)
        with agreed(ranks):
            if ranks.rank == 0:
                make_folder(self.folder)
                own_folder(self.folder / "control")
                for root in all_roots(self.folder):
                    if root.is_symlink():
                        own_folder(root, may_be_linked=True)
                taken = self.closing.enter_context(locked(self.folder))
                starts = read_ledger(self.folder / names.EVENTS_FILE).starts
        taken, starts = ranks.broadcast((taken, starts))
        energy, sensor = start_meter(energy_sensor(self.device), ranks)
        upload, remote = self.recipe.checkpoint.upload, None
        if upload is not None:
            remote = RemoteSource(upload.to, self._roots[DURABLE], self.recipe.name, starts, ranks)
        return _Claim(taken, starts, energy, sensor, remote)

    def resolve_resume_point(self, claim: _Claim, start_from: str | None, changes: Sequence[str]) -> ResumePoint:
        with agreed(self.ranks):
            past = find_resume_point(
                self.recipe, self._places, wanted=start_from, changes=changes, ranks=self.ranks, remote=claim.remote
            )
        state = past.state
        state.energy = self.ranks.broadcast(spent_before(self.folder, state.energy) if self.ranks.rank == 0 else None)
        claim.energy.before = state.energy
        if past.checkpoint is not None and past.checkpoint.parent != self._roots[DURABLE]:
            state.saved_step = None  # a fast place is no promise: a run that stops here still saves
        return past

    def open_data(self, past: ResumePoint) -> _Data:
        shards: dict[str, dict[str, Any]] = {}
        with agreed(self.ranks):
            data = self.closing.enter_context(open_data(self.recipe, plan=past.plan, cursor=past.before))
            check_tokenizer(past, data.tokenizer_hash)
            if self.ranks.rank == 0:
                shards = checked_shards(past, data.shards())
        return _Data(data, self.ranks.broadcast(shards))

    def open_journal(self, claim: _Claim, past: ResumePoint, *, quiet: bool) -> Journal:
        """That of rank 0 writes; the others are silent."""
        journal = Journal()
        with agreed(self.ranks):
            if self.ranks.rank == 0:
                sinks = open_sinks(
                    self.folder,
                    job=claim.job,
                    tensorboard=self.recipe.monitor.tensorboard,
                    resume_step=past.state.step,
                    console=Console(quiet=quiet),
                    recipe_text=as_yaml(self.recipe),
                    world_size=self.ranks.size,
                )
                journal = Journal(sinks, step=past.state.step)
        self.closing.callback(journal.close)
        return journal

    def take_over_checkpoints(
        self, claim: _Claim, past: ResumePoint, data: _Data, journal: Journal, *, is_newest: bool
    ) -> dict[str, Tier]:
        """Become the one that writes checkpoints, also in the places that this recipe does not name. `is_newest`: it
        must still be the newest that this start resumes from."""
        step, section = past.state.step, self.recipe.checkpoint
        tiers: dict[str, Tier] = {}
        self.ranks.report_hang(lambda text: journal.event(Event.ERROR, past.state.step, text=text))
        if claim.taken_over:
            journal.event(Event.TAKEN_OVER, step, text=claim.taken_over)
        for warning in filter(None, [claim.taken_over, *data.open.warnings]):
            journal.warning(warning)
        with agreed(self.ranks):
            if self.ranks.rank == 0:
                writers = {root: take_over(root) for root in self._places}
                for name, root in self._roots.items():
                    node_dir = parts_in(name, section, self.folder)
                    tiers[name] = Tier(name, root, writers[root], kept_in(name, section), node_dir)
                if is_newest:
                    refuse_later(self._places, step=step, damaged=past.damaged)
                write_atomically(self.folder / "recipe.yaml", as_yaml(self.recipe))
        tiers = dict(self.ranks.broadcast(tiers))
        journal.silent_when(lambda: tiers[DURABLE].writer.fenced() is not None)
        if claim.remote is not None:
            report_fetched(claim.remote, step, journal)
        return tiers

    def build_model(self, past: ResumePoint, data: _Data) -> _Parts:
        recipe, device = self.recipe, self.device
        mesh = alone() if self.ranks is ALONE else make_mesh(Layout.of(recipe, self.ranks.size), device)
        compile_model = recipe.train.compile
        if compile_model == "auto":
            compile_model = device.type != "cpu" and recipe.parallel.schedule != "zero_bubble"
        parts = parallelise(recipe, mesh, device=device, compile_model=compile_model)
        optimizer = Optimizer(
            parts.weights,
            recipe.optimizer,
            compute_dtype=DTYPES[recipe.precision],
            offload=recipe.parallel.offload,
            counts_steps=self.ranks.rank == 0,
        )
        if past.checkpoint is not None:
            load_on_all(past.checkpoint, optimizer.pieces(), ranks=self.ranks)
            optimizer.restored()
        parts = replace(parts, weights=optimizer.weights)
        num_sources = len(data.open.train.keys)
        runner = make_runner(recipe, parts, device=device, compile_model=compile_model, num_sources=num_sources)
        return _Parts(mesh, runner, optimizer)

    def build_saver(
        self, optimizer: Optimizer, tiers: Mapping[str, Tier], past: ResumePoint, journal: Journal
    ) -> Saver:
        """Now that the resume point is loaded, checkpoints that the run does not continue from are moved aside."""
        with agreed(self.ranks):
            if self.ranks.rank == 0:
                archive_stale(self.recipe, self._places, past, journal)
        with agreed(self.ranks):
            for tier in tiers.values():
                tier.prepare_node_dir()
        timeout_seconds = self.recipe.checkpoint.timeout.seconds
        saver = Saver(optimizer.pieces(), device=self.device, ranks=self.ranks, timeout_seconds=timeout_seconds)
        self.closing.push(_finishing(saver))
        return saver

    def build_run(
        self,
        claim: _Claim,
        past: ResumePoint,
        data: _Data,
        journal: Journal,
        tiers: Mapping[str, Tier],
        parts: _Parts,
        saver: Saver,
        trace: TraceRequest | None,
    ) -> Run:
        recipe, plan, device, opened = self.recipe, past.plan, self.device, data.open
        facts = {
            **_start_facts(recipe, device, self.ranks, past),
            "start": tiers[DURABLE].writer.token,
            "tokenizer": opened.tokenizer_hash,
            "shards": data.shards,
            "save_host_bytes": saver.host_bytes,
            names.FACT_ENERGY: claim.energy.before.to_json(),
            names.FACT_ENERGY_SENSOR: claim.energy_sensor,
        }
        journal.notice(_greeting(facts, plan, past))
        _report_changes(past, opened, journal)
        return Run(
            recipe=recipe,
            plan=plan,
            folder=self.folder,
            device=device,
            runner=parts.runner,
            optimizer=parts.optimizer,
            feed=Feed(self._loader(past, opened, parts.mesh), self.ranks, parts.mesh),
            blend=opened.blend,
            source_keys=opened.train.keys,
            validation=opened.validation,
            validation_samples=_validation_samples(recipe, opened.validation),
            mesh=parts.mesh,
            ranks=self.ranks,
            saver=saver,
            durable=tiers[DURABLE],
            local=tiers.get(LOCAL),
            uploader=self._uploader(tiers[DURABLE], plan) if self.ranks.rank == 0 else None,
            recipe_text=as_yaml(recipe),
            journal=journal,
            meter=IntervalMeter(past.interval),
            stop=self._stop_rules(plan, parts.optimizer, claim.energy, tiers[DURABLE].writer),
            job=claim.job,
            peak_flops=peak_flops(device_name(device), recipe.precision),
            start_facts=facts,
            trace=trace.begin(recipe, self.ranks) if trace else None,
        )

    def _loader(self, past: ResumePoint, opened: OpenData, mesh: Mesh) -> Loader:
        loader = Loader(
            opened.train,
            micro_batch_size=self.recipe.batch.micro_batch_size,
            batch_size_at=past.plan.batch.global_batch_at,
            replica=mesh.dp,
            replicas=Layout.of(self.recipe, self.ranks.size).dp,
            pin_memory=self.device.type != "cpu",
        )
        self.closing.callback(loader.close)
        loader.seek(past.state.consumed_samples)
        return loader

    def _uploader(self, durable: Tier, plan: TrainingPlan) -> Uploader | None:
        upload = self.recipe.checkpoint.upload
        if upload is None:
            return None
        every_steps = upload.every.count if upload.every else None
        uploader = Uploader(
            upload.to, run=self.recipe.name, every_steps=every_steps, keep=upload.keep, writer=durable.writer
        )
        uploader.offer_newest(durable.root, train_steps=plan.train_steps)
        return uploader

    def _stop_rules(self, plan: TrainingPlan, optimizer: Optimizer, energy: EnergyMeter, writer: Writer) -> StopRules:
        train, estimate = self.recipe.train, 0.0
        if isinstance(train.exit_after, Duration):
            own = estimate_save_seconds(self.folder, optimizer.pieces()) if self.ranks.rank == 0 else 0.0
            estimate = self.ranks.broadcast(own)
        return StopRules(
            plan,
            exit_after=train.exit_after,
            control=self.folder / "control",
            save_seconds_estimate=estimate,
            evaluate_every=train.evaluate.every.count if train.evaluate else None,
            ranks=self.ranks,
            energy=energy,
            spike_patience=train.stop_after_spike_steps,
            writer=writer,
        )


@contextmanager
def _errors_reported(journal: Journal, state: TrainState, device: torch.device, ranks: Ranks) -> Iterator[None]:
    """Whatever ends the run early stands in the ledger; out of memory is reported as a problem of the recipe, a broken
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


def _finishing(saver: Saver) -> Callable[..., None]:
    """Whatever ended the training, a save on its way is worth a moment; unless a user wants to leave at once."""

    def finish(kind: type[BaseException] | None, *_: object) -> None:
        lost = kind is not None and issubclass(kind, LostRankError)  # its part will never come
        if kind is None or (issubclass(kind, Exception) and not lost):
            saver.wait(at_most_seconds=_LAST_MOMENT_SECONDS)

    return finish


def _report_changes(past: ResumePoint, data: OpenData, journal: Journal) -> None:
    step = past.state.step
    for change in past.changes:
        journal.event(Event.CHANGED, step, field=change.field, old=change.old, new=change.new)
    if past.changes:
        journal.notice(f"changed from step {step + 1:,} on, as asked: {', '.join(map(str, past.changes))}")
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


def _validation_samples(recipe: Recipe, validation: Mapping[str, Source]) -> dict[str, int]:
    evaluate = recipe.train.evaluate
    wanted = evaluate.steps * recipe.batch.global_batch_size if evaluate else 0
    return {group: min(wanted, source.num_samples) for group, source in validation.items()}


def _start_facts(recipe: Recipe, device: torch.device, ranks: Ranks, past: ResumePoint) -> dict[str, Any]:
    return {
        "recipe": recipe.name,
        "fingerprint": fingerprint(recipe),
        "parameters": count_parameters(recipe.model, vocab_size=recipe.model.vocab_size).total,
        "device": device_name(device),
        "ranks": ranks.size,
        "precision": recipe.precision,
        "resumed_from": past.checkpoint.name if past.checkpoint else None,
        "versions": {
            "bloomery": bloomery.__version__,
            "torch": torch.__version__,
            "python": platform.python_version(),
        },
    }


def _greeting(facts: Mapping[str, Any], plan: TrainingPlan, past: ResumePoint) -> str:
    how = f"resumed at step {past.state.step:,}" if past.checkpoint else "from the beginning"
    many = f"{facts['ranks']} x " if facts["ranks"] > 1 else ""
    size, where = format_count(facts["parameters"]), f"{facts['precision']} on {many}{facts['device']}"
    return f"{facts['recipe']}: {size} parameters, {where}, {plan.train_steps:,} steps, {how}"
