"""Put a run together, in the order in which things can fail: recipe, folder, data, then weights, then the past."""

from __future__ import annotations

import platform
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

import bloomery
from bloomery.base.accelerator import device_name, energy_sensor, out_of_memory_problem
from bloomery.base.errors import BloomeryError, LostRankError, Problem, RecipeError, StorageError
from bloomery.base.ranks import ALONE, Ranks, every_rank_does, first_rank_does
from bloomery.base.storage import locked, make_run_folder, own_folder, write_atomically
from bloomery.base.units import Duration, format_count
from bloomery.checkpoint.choose import refuse_later
from bloomery.checkpoint.fence import FencedError, Writer, take_over
from bloomery.checkpoint.load import load_on_all
from bloomery.checkpoint.remote import RemoteSource, Uploader
from bloomery.checkpoint.saver import Saver, estimate_save_seconds
from bloomery.checkpoint.tiers import Tier, all_roots, kept_in, parts_in, tier_roots
from bloomery.config.describe import as_yaml, fingerprint
from bloomery.config.recipe import Recipe
from bloomery.data.batch import Source
from bloomery.data.loader import Loader
from bloomery.data.open import OpenData, open_data
from bloomery.monitor import names
from bloomery.monitor.console import Console
from bloomery.monitor.energy import EnergyMeter, spent_before, start_meter
from bloomery.monitor.history import read_ledger
from bloomery.monitor.journal import Journal, SilentJournal
from bloomery.monitor.meters import IntervalMeter
from bloomery.monitor.names import Event
from bloomery.parallel.apply import DTYPES, make_runner, parallelise
from bloomery.parallel.feed import Feed, validation_batches
from bloomery.parallel.mesh import Mesh, alone, make_mesh
from bloomery.parallel.runner import Runner
from bloomery.sizing.hardware import peak_flops
from bloomery.sizing.layout import Layout
from bloomery.sizing.memory import precision_problems
from bloomery.sizing.parameters import count_parameters
from bloomery.sizing.plan import TrainingPlan
from bloomery.train.optimizer import Optimizer
from bloomery.train.past import Past, check_tokenizer, checked_shards, find_past, put_in_order, report_fetched
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

    One training at a time may hold a run folder; its rank 0 holds it and does the telling."""
    every_rank_does(ranks, lambda: refuse_what_cannot_be_done(recipe))
    layout = Layout.of(recipe, ranks.size)
    with ExitStack() as closing:
        taken = first_rank_does(ranks, lambda: _take_folder(folder, closing))
        energy, sensor = start_meter(energy_sensor(device), ranks)
        roots = tier_roots(recipe.checkpoint, folder)
        starts = first_rank_does(ranks, lambda: read_ledger(folder / names.EVENTS_FILE).starts)
        upload, remote = recipe.checkpoint.upload, None
        if upload is not None:
            remote = RemoteSource(upload.to, roots["durable"], recipe.name, starts, ranks)
        places = [*roots.values(), *_not_named(folder, roots)]
        past = every_rank_does(
            ranks, lambda: find_past(recipe, places, wanted=start_from, changes=changes, ranks=ranks, remote=remote)
        )
        state, plan = past.state, past.plan
        state.energy = energy.before = first_rank_does(ranks, lambda: spent_before(folder, state.energy))
        if past.checkpoint is not None and past.checkpoint.parent != roots["durable"]:
            state.saved_step = None  # a fast place is no promise: a run that stops here still saves
        data = every_rank_does(ranks, lambda: closing.enter_context(_data_of(recipe, past)))
        every_rank_does(ranks, lambda: check_tokenizer(past, data.tokenizer_hash))
        shards = first_rank_does(ranks, lambda: checked_shards(past, data.shards()))
        job = 1 + len(starts)
        journal = _journal_of_rank(recipe, folder, ranks, plan, job=job, step=state.step, quiet=quiet)
        closing.callback(journal.close)
        with _errors_told(journal, state, device, ranks):
            ranks.report_hang(lambda text: journal.event(Event.ERROR, state.step, text=text))
            if taken:
                journal.event(Event.TAKEN_OVER, state.step, text=taken)
            for warning in [taken, *data.warnings] if taken else data.warnings:
                journal.warning(warning)
            tiers = first_rank_does(ranks, lambda: _tiers(recipe, folder, roots))
            journal.silent_when(lambda: tiers["durable"].writer.fenced() is not None)
            if start_from is None:
                first_rank_does(ranks, lambda: refuse_later(places, step=state.step, damaged=past.damaged))
            if remote is not None:
                report_fetched(remote, state.step, journal)
            first_rank_does(ranks, lambda: write_atomically(folder / "recipe.yaml", as_yaml(recipe)))
            mesh = alone() if ranks is ALONE else make_mesh(layout, device)
            num_sources = len(data.train.keys)
            runner, optimizer = _runner_and_optimizer(recipe, mesh, ranks, device, past, num_sources=num_sources)
            first_rank_does(ranks, lambda: put_in_order(recipe, places, past, journal))
            for tier in tiers.values():
                every_rank_does(ranks, tier.prepare_node_dir)
            timeout_seconds = recipe.checkpoint.timeout.seconds
            saver = Saver(optimizer.pieces(), device=device, ranks=ranks, timeout_seconds=timeout_seconds)
            closing.push(_finishing(saver))
            loader = Loader(
                data.train,
                micro_batch_size=recipe.batch.micro_batch_size,
                batch_size_at=plan.batch.global_batch_at,
                replica=mesh.dp,
                replicas=layout.dp,
                pin_memory=device.type != "cpu",
            )
            closing.callback(loader.close)
            loader.seek(state.consumed_samples)
            facts = {
                **_start_facts(recipe, device, ranks, past),
                "start": tiers["durable"].writer.token,
                "tokenizer": data.tokenizer_hash,
                "shards": shards,
                "save_host_bytes": saver.host_bytes,
                names.FACT_ENERGY: energy.before.to_json(),
                names.FACT_ENERGY_SENSOR: sensor,
            }
            journal.notice(_greeting(facts, plan, past))
            _tell_changes(past, data, journal)
            samples = _validation_samples(recipe, data.validation)
            uploader = None
            if upload is not None and ranks.rank == 0:
                every_steps = upload.every.count if upload.every else None
                writer = tiers["durable"].writer
                uploader = Uploader(
                    upload.to, run=recipe.name, every_steps=every_steps, keep=upload.keep, writer=writer
                )
                uploader.offer_newest(roots["durable"], train_steps=plan.train_steps)
            yield (
                Run(
                    recipe=recipe,
                    plan=plan,
                    folder=folder,
                    device=device,
                    runner=runner,
                    optimizer=optimizer,
                    feed=Feed(loader, ranks, mesh),
                    blend=data.blend,
                    source_keys=data.train.keys,
                    validation=data.validation,
                    validation_samples=samples,
                    validation_batches=lambda group: validation_batches(
                        data.validation[group],
                        samples[group],
                        micro_batch_size=recipe.batch.micro_batch_size,
                        mesh=mesh,
                        ranks=ranks,
                    ),
                    ranks=ranks,
                    saver=saver,
                    durable=tiers["durable"],
                    local=tiers.get("local"),
                    uploader=uploader,
                    recipe_text=as_yaml(recipe),
                    journal=journal,
                    meter=IntervalMeter(past.interval),
                    stop=_stop_rules(recipe, plan, folder, optimizer, ranks, energy, tiers["durable"].writer),
                    job=job,
                    peak_flops=peak_flops(device_name(device), recipe.precision),
                    start_facts=facts,
                    trace=trace.begin(recipe, ranks) if trace else None,
                ),
                state,
            )


def _take_folder(folder: Path, closing: ExitStack) -> str:
    make_run_folder(folder)
    own_folder(folder / "control")
    for root in all_roots(folder):
        if root.is_symlink():
            own_folder(root, may_be_linked=True)
    return closing.enter_context(locked(folder))


def _data_of(recipe: Recipe, past: Past) -> AbstractContextManager[OpenData]:
    return open_data(recipe, plan=past.plan, cursor=past.before)


def _journal_of_rank(
    recipe: Recipe, folder: Path, ranks: Ranks, plan: TrainingPlan, *, job: int, step: int, quiet: bool
) -> Journal:
    """The journal of rank 0, and silence for the others."""
    journal: list[Journal] = []

    def make() -> None:
        journal.append(
            Journal(
                folder,
                job=job,
                train_steps=plan.train_steps,
                tensorboard=recipe.monitor.tensorboard,
                resume_step=step,
                console=Console(plan.train_steps, quiet=quiet),
                recipe_text=as_yaml(recipe),
                world_size=ranks.size,
            )
        )

    first_rank_does(ranks, make)
    return journal[0] if journal else SilentJournal()


@contextmanager
def _errors_told(journal: Journal, state: TrainState, device: torch.device, ranks: Ranks) -> Iterator[None]:
    """Whatever ends the run early stands in the ledger; a device out of memory is told as a problem of the recipe, a
    broken collective by the rank that was lost."""
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
            except StorageError as more:  # tell both: why it ended, and what could not be written
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


def _tell_changes(past: Past, data: OpenData, journal: Journal) -> None:
    step = past.state.step
    for change in past.changes:
        journal.event(Event.CHANGED, step, field=change.field, old=change.old, new=change.new)
    if past.changes:
        journal.notice(f"changed from step {step + 1:,} on, as asked: {', '.join(map(str, past.changes))}")
    for notice in data.notices:
        journal.notice(notice)


def _not_named(folder: Path, roots: Mapping[str, Path]) -> list[Path]:
    """Places of this run that its recipe named once: it goes on from them too, and leaves a branch in all of them."""
    return [root for root in all_roots(folder) if root.is_dir() and root not in roots.values()]


def _tiers(recipe: Recipe, folder: Path, roots: Mapping[str, Path]) -> dict[str, Tier]:
    """Become the one that writes checkpoints, also in the places that this recipe does not name."""
    section = recipe.checkpoint
    for root in _not_named(folder, roots):
        take_over(root)
    return {
        name: Tier(name, root, take_over(root), kept_in(name, section), parts_in(name, section, folder))
        for name, root in roots.items()
    }


def _runner_and_optimizer(
    recipe: Recipe, mesh: Mesh, ranks: Ranks, device: torch.device, past: Past, *, num_sources: int
) -> tuple[Runner, Optimizer]:
    compile_model = recipe.train.compile
    if compile_model == "auto":
        compile_model = device.type != "cpu" and recipe.parallel.schedule != "zero_bubble"
    parts = parallelise(recipe, mesh, device=device, compile_model=compile_model)
    optimizer = Optimizer(
        parts.weights,
        recipe.optimizer,
        compute_dtype=DTYPES[recipe.precision],
        offload=recipe.parallel.offload,
        counts_steps=ranks.rank == 0,
    )
    checkpoint = past.checkpoint
    if checkpoint is not None:
        load_on_all(checkpoint, optimizer.pieces(), ranks=ranks)
        optimizer.restored()
    parts = replace(parts, weights=optimizer.weights)
    runner = make_runner(recipe, parts, device=device, compile_model=compile_model, num_sources=num_sources)
    return runner, optimizer


def _stop_rules(
    recipe: Recipe,
    plan: TrainingPlan,
    folder: Path,
    optimizer: Optimizer,
    ranks: Ranks,
    energy: EnergyMeter,
    writer: Writer,
) -> StopRules:
    exit_after, evaluate = recipe.train.exit_after, recipe.train.evaluate
    estimate = 0.0
    if isinstance(exit_after, Duration):
        seconds = first_rank_does(ranks, lambda: estimate_save_seconds(folder, optimizer.pieces()))
        estimate = max(ranks.gather(seconds))
    return StopRules(
        plan,
        exit_after=exit_after,
        control=folder / "control",
        save_seconds_estimate=estimate,
        evaluate_every=evaluate.every.count if evaluate else None,
        ranks=ranks,
        energy=energy,
        spike_patience=recipe.train.stop_after_spike_steps,
        writer=writer,
    )


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


def _start_facts(recipe: Recipe, device: torch.device, ranks: Ranks, past: Past) -> dict[str, Any]:
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


def _greeting(facts: Mapping[str, Any], plan: TrainingPlan, past: Past) -> str:
    how = f"resumed at step {past.state.step:,}" if past.checkpoint else "from the beginning"
    many = f"{facts['ranks']} x " if facts["ranks"] > 1 else ""
    size, where = format_count(facts["parameters"]), f"{facts['precision']} on {many}{facts['device']}"
    return f"{facts['recipe']}: {size} parameters, {where}, {plan.train_steps:,} steps, {how}"
