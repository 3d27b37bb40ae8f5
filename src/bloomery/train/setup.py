"""Put a run together, in the order in which things can fail: recipe, folder, data, then weights, then the past."""

from __future__ import annotations

import platform
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch

import bloomery
from bloomery.base.accelerator import device_name, out_of_memory_problem, pick_device
from bloomery.base.errors import BloomeryError, DataError, Problem, RecipeError, StorageError
from bloomery.base.ranks import ALONE, Ranks
from bloomery.base.storage import locked, make_run_folder, write_atomically
from bloomery.base.units import Duration, format_count
from bloomery.checkpoint.choose import tidy
from bloomery.checkpoint.fence import take_over
from bloomery.checkpoint.folder import RETIRED, complete_checkpoints, step_of
from bloomery.checkpoint.load import load_pieces
from bloomery.checkpoint.save import estimate_save_seconds
from bloomery.checkpoint.saver import Saver
from bloomery.checkpoint.tiers import Tier, kept_in, tier_roots
from bloomery.checkpoint.upload import Uploader, fetch_newest
from bloomery.config.describe import as_yaml, fingerprint
from bloomery.config.recipe import Recipe
from bloomery.data.batch import Source
from bloomery.data.loader import Loader
from bloomery.data.open import open_data
from bloomery.model.build import build_model, materialise
from bloomery.model.recompute import apply_recompute
from bloomery.monitor import names
from bloomery.monitor.console import Console
from bloomery.monitor.history import read_events
from bloomery.monitor.journal import Journal
from bloomery.monitor.meters import IntervalMeter
from bloomery.parallel.runner import PlainRunner
from bloomery.sizing.hardware import peak_flops
from bloomery.sizing.layout import world_size
from bloomery.sizing.parameters import count_parameters
from bloomery.sizing.plan import TrainingPlan
from bloomery.train.optimizer import Optimizer
from bloomery.train.past import Past, find_past
from bloomery.train.run import Run
from bloomery.train.state import TrainState
from bloomery.train.stop import StopRules

_LAST_MOMENT_SECONDS = 60.0
_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@contextmanager
def prepared_run(
    recipe: Recipe, folder: Path, *, device: str | None = None, quiet: bool = False, start_from: str | None = None
) -> Iterator[tuple[Run, TrainState]]:
    """A run ready for `train`, resumed from its newest checkpoint, or from the one named `start_from`; closed at the
    end, come what may. One process at a time may hold a run folder."""
    refuse_what_one_process_cannot_do(recipe)
    plan, target = TrainingPlan.of(recipe), pick_device(device)
    with ExitStack() as closing:
        make_run_folder(folder / "control")
        closing.enter_context(locked(folder))
        roots = tier_roots(recipe.checkpoint, folder)
        ranks = ALONE
        fetched = _fetch(recipe, roots, ranks)
        past = find_past(recipe, list(roots.values()), wanted=start_from, ranks=ranks)
        state = past.state
        data = closing.enter_context(
            open_data(recipe, blend_state=past.blend, consumed_samples=state.consumed_samples, before=past.recipe)
        )
        job = 1 + _starts_so_far(folder)
        journal = Journal(
            folder,
            job=job,
            train_steps=plan.train_steps,
            tensorboard=recipe.monitor.tensorboard,
            resume_step=state.step,
            console=Console(plan.train_steps, quiet=quiet),
            recipe_text=as_yaml(recipe),
        )
        closing.callback(journal.close)
        with _errors_told(journal, state, target):
            for warning in data.warnings:
                journal.warning(warning)
            tiers = _tiers(recipe, roots, past, journal)
            if fetched is not None and recipe.checkpoint.upload is not None:
                journal.event("fetched", past.state.step, folder=fetched.name, source=recipe.checkpoint.upload.to)
            write_atomically(folder / "recipe.yaml", as_yaml(recipe))
            runner, optimizer = _runner_and_optimizer(recipe, target, past)
            timeout_seconds = recipe.checkpoint.timeout.seconds
            saver = Saver(optimizer.pieces(), device=target, ranks=ranks, timeout_seconds=timeout_seconds)
            closing.push(_finishing(saver))
            loader = Loader(
                data.train,
                micro_batch_size=recipe.batch.micro_batch_size,
                batch_size_at=plan.batch.global_batch_at,
                pin_memory=target.type != "cpu",
            )
            closing.callback(loader.close)
            loader.seek(state.consumed_samples)
            facts = _start_facts(recipe, target, past)
            journal.notice(_greeting(facts, plan, past))
            yield (
                Run(
                    recipe=recipe,
                    plan=plan,
                    folder=folder,
                    device=target,
                    runner=runner,
                    optimizer=optimizer,
                    loader=loader,
                    blend=data.blend,
                    source_keys=data.train.keys,
                    validation=data.validation,
                    validation_samples=_validation_samples(recipe, data.validation),
                    ranks=ranks,
                    saver=saver,
                    durable=tiers["durable"],
                    local=tiers.get("local"),
                    uploader=_uploader(recipe, tiers["durable"]),
                    recipe_text=as_yaml(recipe),
                    journal=journal,
                    meter=IntervalMeter(past.interval),
                    stop=_stop_rules(recipe, plan, folder, optimizer),
                    job=job,
                    peak_flops=peak_flops(device_name(target), recipe.precision),
                    start_facts=facts,
                ),
                state,
            )


@contextmanager
def _errors_told(journal: Journal, state: TrainState, device: torch.device) -> Iterator[None]:
    """Whatever ends the run early stands in the ledger; a device out of memory is told as a problem of the recipe."""
    try:
        yield
    except Exception as error:
        journal.event("error", state.step, text=str(error) or type(error).__name__)
        if isinstance(error, BloomeryError):
            try:
                journal.close()
            except StorageError as more:  # tell both: why it ended, and what could not be written
                error.problems += more.problems
        problem = out_of_memory_problem(error, device)
        if problem is not None:
            raise RecipeError(problem) from error
        raise


def _fetch(recipe: Recipe, roots: Mapping[str, Path], ranks: Ranks) -> Path | None:
    """Bring the newest checkpoint from where they are copied to, if it is newer than all that are here."""
    upload = recipe.checkpoint.upload
    if upload is None:
        return None
    newest = max((step_of(path) for root in roots.values() for path in complete_checkpoints(root)), default=-1)
    return fetch_newest(upload.to, roots["durable"], newer_than=ranks.broadcast(newest), ranks=ranks)


def _uploader(recipe: Recipe, tier: Tier) -> Uploader | None:
    upload = recipe.checkpoint.upload
    if upload is None:
        return None
    return Uploader(upload.to, every_steps=upload.every.count if upload.every else None, writer=tier.writer)


def _finishing(saver: Saver) -> Callable[..., None]:
    """Whatever ended the training, a save on its way is worth a moment; unless a user wants to leave at once."""

    def finish(kind: type[BaseException] | None, *_: object) -> None:
        if kind is None or issubclass(kind, Exception):
            saver.wait(at_most_seconds=_LAST_MOMENT_SECONDS)

    return finish


def _tiers(recipe: Recipe, roots: Mapping[str, Path], past: Past, journal: Journal) -> dict[str, Tier]:
    """Become the one that writes checkpoints, and put the places where they lie in order."""
    tiers = {}
    for name, root in roots.items():
        tiers[name] = Tier(name, root, take_over(root), kept_in(name, recipe.checkpoint))
        keep_debris = recipe.checkpoint.debris == "keep"
        done = tidy(root, step=past.state.step, damaged=past.damaged, keep_debris=keep_debris)
        if done.debris:
            journal.event("debris_removed", past.state.step, folders=done.debris, kept=keep_debris)
        if done.retired:
            journal.event("retired", past.state.step, folders=done.retired)
            journal.notice(f"later checkpoints belong to a branch that is left now; they are in {root / RETIRED}")
        if done.latest_said is not None and past.checkpoint is not None:
            journal.event("latest_mended", past.state.step, said=done.latest_said, place=str(root))
    for path, reasons in past.damaged.items():
        journal.event("damaged", past.state.step, folder=path.name, reasons=reasons, place=str(path.parent))
        used = past.checkpoint.name if past.checkpoint else "nothing"
        journal.warning(
            f"{path} is damaged ({'; '.join(reasons)}). It is called damaged-{path.name} now; {used} is used"
        )
    return tiers


def _runner_and_optimizer(recipe: Recipe, device: torch.device, past: Past) -> tuple[PlainRunner, Optimizer]:
    model = build_model(recipe.model)
    materialise(model, recipe.model, seed=recipe.seed, device=device, dtype=torch.float32)
    apply_recompute(model, recipe.parallel.recompute)
    optimizer = Optimizer(list(model.named_parameters()), recipe.optimizer, compute_dtype=_DTYPES[recipe.precision])
    if past.checkpoint is not None:
        load_pieces(past.checkpoint, optimizer.pieces())
        optimizer.restored()
    runner = PlainRunner(
        model,
        device=device,
        compile_model=device.type != "cpu" if recipe.train.compile == "auto" else recipe.train.compile,
        dropout_seed=recipe.seed if recipe.model.dropout > 0 else None,
    )
    return runner, optimizer


def _stop_rules(recipe: Recipe, plan: TrainingPlan, folder: Path, optimizer: Optimizer) -> StopRules:
    exit_after, evaluate = recipe.train.exit_after, recipe.train.evaluate
    is_deadline = isinstance(exit_after, Duration)
    return StopRules(
        plan,
        exit_after=exit_after,
        control=folder / "control",
        save_seconds_estimate=estimate_save_seconds(folder, optimizer.pieces()) if is_deadline else 0.0,
        evaluate_every=evaluate.every.count if evaluate else None,
    )


def refuse_what_one_process_cannot_do(recipe: Recipe) -> None:
    """RecipeError for everything in the recipe that this version of `train` would have to ignore."""
    problems = []
    ranks = recipe.parallel.tp * recipe.parallel.pp * recipe.parallel.cp
    if ranks > 1 or world_size(recipe) > 1:
        what = f"the recipe asks for {max(ranks, world_size(recipe))} ranks"
        remedy = "override parallel.tp=1 parallel.pp=1 parallel.cp=1 launch=null to try it on one device"
        problems.append(Problem(what, "this version trains on one process", remedy))
    if recipe.precision == "fp8":
        problems.append(
            Problem("precision is fp8", "this version computes in fp32, bf16 or fp16", "use precision=bf16")
        )
    if recipe.monitor.carbon is not None:
        problems.append(
            Problem("monitor.carbon is set", "this version does not measure emissions", "override monitor.carbon=null")
        )
    if recipe.data is None:
        problems.append(Problem("data is missing", "training needs shards", "add `data:` with `train:` to the recipe"))
    if problems:
        raise RecipeError(problems)


def _starts_so_far(folder: Path) -> int:
    events = folder / names.EVENTS_FILE
    return sum(event["kind"] == "start" for event in read_events(events)) if events.is_file() else 0


def _validation_samples(recipe: Recipe, validation: Mapping[str, Source]) -> dict[str, int]:
    evaluate, size = recipe.train.evaluate, recipe.batch.micro_batch_size
    wanted = evaluate.steps * recipe.batch.global_batch_size if evaluate else 0
    problems = []
    samples = {}
    for group, source in validation.items():
        samples[group] = min(wanted, source.num_samples) // size * size
        if samples[group] == 0:
            what = f"validation group {group} has {source.num_samples} samples"
            problems.append(Problem(what, f"one micro-batch takes {size}", "give it more text or a larger split"))
    if problems:
        raise DataError(problems)
    return samples


def _start_facts(recipe: Recipe, device: torch.device, past: Past) -> dict[str, Any]:
    return {
        "recipe": recipe.name,
        "fingerprint": fingerprint(recipe),
        "parameters": count_parameters(recipe.model, vocab_size=recipe.model.vocab_size).total,
        "device": device_name(device),
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
    size, where = format_count(facts["parameters"]), f"{facts['precision']} on {facts['device']}"
    return f"{facts['recipe']}: {size} parameters, {where}, {plan.train_steps:,} steps, {how}"
