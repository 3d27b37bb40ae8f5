"""Start a run, in the order in which things can fail: folder, resume point, data, journal; then model and saver."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from bloomery.base.accelerator import (
    device_name,
    energy_sensor,
    is_fast_in_bf16,
    lacks_fp8,
    matmul_flops,
    out_of_memory_problem,
)
from bloomery.base.doing import doing
from bloomery.base.errors import BloomeryError, LostRankError, Problem, RecipeError, StorageError
from bloomery.base.ranks import ALONE, Ranks, agreed, first_rank_does
from bloomery.base.storage import locked, make_folder, own_folder, write_atomically
from bloomery.base.units import format_count
from bloomery.checkpoint.folder import CHECKPOINTS, LOCAL_CHECKPOINTS, FencedError, step_folders, take_over
from bloomery.checkpoint.load import load_pieces
from bloomery.checkpoint.remote import Uploader
from bloomery.checkpoint.retention import Tier
from bloomery.checkpoint.save import Saver
from bloomery.checkpoint.select import refuse_later
from bloomery.config.load import as_yaml
from bloomery.config.recipe import Recipe
from bloomery.data.epochs import counted
from bloomery.data.open import open_data
from bloomery.model.linear import _Product
from bloomery.monitor import names, tracking
from bloomery.monitor.carbon import Carbon
from bloomery.monitor.history import Ledger, read_ledger
from bloomery.monitor.journal import Journal, open_journal
from bloomery.monitor.meters import IntervalMeter, start_meter
from bloomery.monitor.names import Event
from bloomery.monitor.profile import Profiler
from bloomery.monitor.resources import Nodes, ResourceMeter
from bloomery.monitor.sinks import Console
from bloomery.monitor.timers import SlowRanks, StepTimers
from bloomery.parallel.apply import make_runner, parallelise
from bloomery.parallel.feed import Feed
from bloomery.parallel.mesh import Mesh, make_mesh
from bloomery.parallel.runner import DTYPES, Mark, Runner
from bloomery.sizing.check import layout_problems, train_refusals
from bloomery.sizing.layout import Layout
from bloomery.sizing.parameters import labels_per_sample
from bloomery.train.hang import watched, write_hang
from bloomery.train.optimizer import Optimizer
from bloomery.train.resume import ResumePoint, archive_stale, checked_shards, find_resume_point
from bloomery.train.run import Opened, Run
from bloomery.train.state import TrainState
from bloomery.train.stop import StopRules, seconds_left
from bloomery.train.trace import Tracer

_SLOW_PRECISION = 1.2
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
    import_weights: Callable[[Path, Recipe], None] | None = None,
    profile_at: int | None = None,
) -> Iterator[tuple[Run, TrainState]]:
    """A run ready for `train`, resumed from its newest checkpoint, or from the one named `start_from`; closed at the
    end in any case. `changes`: the fields that may differ from the checkpoint's, by --change. `import_weights` makes
    the first checkpoint of a run folder if the recipe begins with a Hugging Face model.

    One training at a time may hold a run folder; its rank 0 holds it and reports. All ranks take the same steps."""
    with ExitStack() as closing:
        _refuse_unsupported(recipe, device, ranks)
        if recipe.precision == "auto":
            recipe = recipe.model_copy(update={"precision": "bf16" if is_fast_in_bf16(device) else "fp32"})
        with agreed(ranks):
            recipe = counted(recipe)
        ledger, taken_over = first_rank_does(ranks, partial(_claim_folder, folder, closing))
        roots = [folder / CHECKPOINTS, folder / LOCAL_CHECKPOINTS]
        if import_weights and recipe.init and not start_from:
            first_rank_does(ranks, lambda: any(map(step_folders, roots)) or import_weights(folder, recipe))
        past = find_resume_point(recipe, roots, ledger.starts, wanted=start_from, changes=changes, ranks=ranks)
        if wrong := layout_problems(recipe, lambda _: past.state.consumed_samples):
            raise RecipeError(
                Problem(wrong[0], f"at step {past.state.step:,}, where this start resumes")
            ).reported_once(ranks.rank)
        spent = (past.state.energy, ledger.energy)
        energy = start_meter(energy_sensor(device), folder / names.METRICS_FILE, spent, ranks)
        past.state.energy = energy.before
        with agreed(ranks):
            data = closing.enter_context(open_data(recipe, plan=past.plan, cursor=past.before))
            shards = checked_shards(past, data, ranks)
        job = 1 + len(ledger.starts)
        untracked = list(_tracked(recipe, folder, closing)) if ranks.rank == 0 else []
        journal = _journal(recipe, folder, job, past, ranks, quiet=quiet)
        closing.callback(journal.close)
        meters = _meters(recipe, folder, job, device, ranks, closing)
        opened = Opened(recipe, folder, device, ranks, past, data, shards, journal, job, energy, **meters)
        with _errors_reported(opened):
            if taken_over:
                journal.event(Event.TAKEN_OVER, past.state.step, text=taken_over)
            slow = _slow_precision(recipe, device) if ranks.rank == 0 else ""
            for warning in filter(None, [taken_over, slow, *untracked, *data.warnings]):
                journal.warning(warning)
            run = _build(opened, roots, closing, is_newest=start_from is None, trace=trace, profile_at=profile_at)
            _report_start(run)
            yield run, past.state


def _refuse_unsupported(recipe: Recipe, device: torch.device, ranks: Ranks) -> None:
    """RecipeError for everything in the recipe that `train` would have to ignore here."""
    problems = train_refusals(recipe)
    if recipe.precision == "fp8" and (why := lacks_fp8(device)):
        problems.append(Problem(f"precision is fp8 on {device_name(device)}", why, "use precision=bf16"))
    if problems:
        raise RecipeError(problems).reported_once(ranks.rank)


def _journal(recipe: Recipe, folder: Path, job: int, past: ResumePoint, ranks: Ranks, *, quiet: bool) -> Journal:
    step, samples = past.state.step, past.state.consumed_samples
    first = step, samples, past.plan.tokens_at(samples)
    with agreed(ranks):
        if ranks.rank == 0:
            return open_journal(
                folder,
                console=Console(quiet, seconds_left=partial(seconds_left, recipe.train.exit_after, first)),
                job=job,
                tensorboard=recipe.monitor.tensorboard,
                resume_step=step,
                recipe_text=as_yaml(recipe),
                world_size=ranks.size,
            )
    return Journal()


def _meters(
    recipe: Recipe, folder: Path, job: int, device: torch.device, ranks: Ranks, closing: ExitStack
) -> dict[str, Any]:
    """What measures the nodes, on the first rank of each; and who judges the ranks."""
    nodes, section = Nodes.of(ranks), recipe.monitor.carbon
    resources, carbon = ResourceMeter(folder, device, nodes), None
    closing.callback(resources.close)
    if section is not None and nodes.leads:
        node = f"-{nodes.own:03d}" if nodes.own else ""
        carbon = Carbon(section.country, folder, f"emissions-{job:03d}{node}.csv")
        closing.callback(carbon.close)
    return {"nodes": nodes, "resources": resources, "carbon": carbon, "slow_ranks": SlowRanks()}


def _tracked(recipe: Recipe, folder: Path, closing: ExitStack) -> Iterator[str]:
    """Begin to feed MLflow and Weights & Biases; why not. They end behind the journal, which is closed before."""
    wanted = {"mlflow": recipe.monitor.mlflow, "wandb": recipe.monitor.wandb}
    for kind, target in wanted.items():
        if target is not None:
            process, why = tracking.start(kind, target, folder)
            if process is None:
                yield f"{kind} gets no records: {why}. Training continues; `bloomery report --to` gives them later"
            elif process.stdin is not None:
                closing.callback(process.stdin.close)


def _slow_precision(recipe: Recipe, device: torch.device) -> str:
    """A warning if this device was not made for it."""
    precision, is_fp8 = recipe.precision, recipe.precision == "fp8"
    if precision == "fp32" or (device.type != "cpu" and precision in ("fp8", "fp16")):
        return ""
    if not is_fp8 and is_fast_in_bf16(device):
        return ""
    of_fp32 = matmul_flops(device, 0.05, torch.float32)
    speed = matmul_flops(device, 0.05, DTYPES[precision], _Product.apply if is_fp8 else torch.matmul)
    if (factor := of_fp32 / speed) < _SLOW_PRECISION:
        return ""
    auto = "bf16" if is_fast_in_bf16(device) else "fp32"
    return f"matrix products in {precision} take {factor:.1f} times as long as in fp32 here; precision=auto is {auto}"


def _claim_folder(folder: Path, closing: ExitStack) -> tuple[Ledger, str]:
    """Lock the run folder. What earlier starts have left in its ledger, and from whom the folder was taken over, if it
    was."""
    make_folder(folder)
    own_folder(folder / "control")
    for root in filter(Path.is_symlink, (folder / CHECKPOINTS, folder / LOCAL_CHECKPOINTS)):
        own_folder(root, may_be_linked=True)
    taken_over = closing.enter_context(locked(folder))
    return read_ledger(folder / names.EVENTS_FILE), taken_over


@contextmanager
def _errors_reported(opened: Opened) -> Iterator[None]:
    """Whatever ends the run early is an event; out of memory is reported as a problem of the recipe, a broken
    collective by the rank that was lost."""
    journal, state, ranks = opened.journal, opened.past.state, opened.ranks

    def report(text: str, found: Mapping[int, str]) -> None:
        if not journal.is_taken_over():
            write_hang(opened.folder, opened.job, text, found)

    ranks.report_hang(report)
    try:
        with watched(opened.folder, ranks, report):
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
        problem = out_of_memory_problem(error, opened.device)
        if problem is not None:
            raise RecipeError(problem) from found
        if error is found:
            raise
        raise error from found


def _build(
    opened: Opened,
    roots: list[Path],
    closing: ExitStack,
    *,
    is_newest: bool,
    trace: Tracer | None,
    profile_at: int | None,
) -> Run:
    """Take over the checkpoints, and build what trains and what saves. `is_newest`: see _take_over."""
    recipe, past, device, ranks = opened.recipe, opened.past, opened.device, opened.ranks
    durable, *local = first_rank_does(ranks, partial(_take_over, opened, roots, is_newest=is_newest))
    opened.journal.silent_when(lambda: durable.writer.fenced() is not None)
    mesh = make_mesh(Layout.of(recipe), device)
    timers = StepTimers(device)
    with doing("initialising the model"):
        optimizer, runner = _build_model(opened, mesh, timers.mark)
    first_rank_does(ranks, partial(archive_stale, recipe, roots, past, opened.journal))  # the resume point is loaded
    with agreed(ranks):
        for tier in local:
            tier.prepare_node_dir()
    saver = Saver(optimizer.pieces(), device=device, ranks=ranks, timeout_seconds=recipe.checkpoint.timeout.seconds)
    closing.push(partial(_finish_saves, saver))
    feed = _feed(opened, mesh, timers.mark)
    closing.callback(feed.close)
    meter = IntervalMeter(past.interval, timers)
    return Run(
        **vars(opened),
        mesh=mesh,
        runner=runner,
        optimizer=optimizer,
        feed=feed,
        saver=saver,
        durable=durable,
        local=local[0] if local else None,
        uploader=_uploader(opened, durable) if ranks.rank == 0 else None,
        meter=meter,
        stop=StopRules(
            past.plan,
            recipe.train,
            meter,
            control=opened.folder / "control",
            save_seconds_estimate=saver.host_bytes / _SLOW_STORAGE_BYTES_PER_SECOND,
            ranks=ranks,
            writer=durable.writer,
        ),
        profiler=_profiler(opened, meter, profile_at, closing),
        trace=replace(trace, recipe_yaml=as_yaml(recipe), ranks=ranks) if trace else None,
    )


def _feed(opened: Opened, mesh: Mesh, mark: Mark) -> Feed:
    feed = Feed(
        opened.data.train,
        mesh,
        opened.ranks,
        batch_size_at=opened.plan.batch.global_batch_at,
        micro_batch_size=opened.recipe.batch.micro_batch_size,
        pin_memory=opened.device.type != "cpu",
        labels_per_sample=labels_per_sample(opened.recipe),
        mark=mark,
    )
    feed.seek(opened.past.state.consumed_samples)
    return feed


def _profiler(opened: Opened, meter: IntervalMeter, at: int | None, closing: ExitStack) -> Profiler:
    state = opened.past.state
    profiler = Profiler(
        opened.recipe.monitor.profile,
        opened.folder,
        rank=opened.ranks.rank,
        device=opened.device,
        first=state.step + 1,
        at=at,
        journal=opened.journal,
        meter=meter,
    )
    closing.callback(lambda: profiler.finish(state.step + 1))
    return profiler


def _take_over(opened: Opened, roots: list[Path], *, is_newest: bool) -> list[Tier]:
    """Take the write lease of all folders of checkpoints: the durable tier, and the node-local one if the recipe has
    it or once had. `is_newest`: this start must still resume from the newest checkpoint."""
    recipe, folder, past = opened.recipe, opened.folder, opened.past
    tiers = [Tier(take_over(roots[0]), recipe.checkpoint.keep)]
    if recipe.checkpoint.local is not None:
        tiers.append(Tier.node_local(recipe.checkpoint.local, folder, take_over(roots[1])))
    elif roots[1].is_dir():
        take_over(roots[1])
    if is_newest:
        refuse_later(roots, step=past.state.step, damaged=past.choice.damaged)
    write_atomically(folder / names.RECIPE_FILE, as_yaml(recipe))
    return tiers


def _build_model(opened: Opened, mesh: Mesh, mark: Mark) -> tuple[Optimizer, Runner]:
    """The part of the model on this rank, at the resume point."""
    recipe, device, ranks, checkpoint = opened.recipe, opened.device, opened.ranks, opened.past.checkpoint
    compile_model, source = opened.compiles, checkpoint or opened.past.weights
    parts = parallelise(recipe, mesh, device=device, compile_model=compile_model, has_values=source is not None)
    optimizer = Optimizer(
        parts.weights,
        recipe.optimizer,
        compute_dtype=DTYPES[recipe.precision],
        offload=recipe.parallel.offload,
        counts_steps=ranks.rank == 0,
    )
    if source is not None:
        pieces = {name: each for name, each in optimizer.pieces().items() if checkpoint or name.startswith("model.")}
        load_pieces(source, pieces, ranks=ranks)
        optimizer.follow_masters()
    parts = replace(parts, weights=optimizer.weights)
    num_sources = len(opened.data.train.keys)
    return optimizer, make_runner(
        recipe, parts, device=device, compile_model=compile_model, num_sources=num_sources, mark=mark
    )


def _finish_saves(saver: Saver, kind: type[BaseException] | None, *_: object) -> None:
    """Whatever ended the training, a save in flight is worth a moment; unless a user wants to leave at once, or a rank
    is lost, whose part will never come."""
    if kind is None or (issubclass(kind, Exception) and not issubclass(kind, LostRankError)):
        saver.wait(at_most_seconds=_LAST_MOMENT_SECONDS)


def _uploader(opened: Opened, durable: Tier) -> Uploader | None:
    upload = opened.recipe.checkpoint.upload
    if upload is None:
        return None
    uploader = Uploader(upload.to, durable.writer, every=upload.every)
    uploader.offer_newest(durable.root, train_steps=opened.plan.train_steps)
    return uploader


def _report_start(run: Run) -> None:
    """What starts, on the console, and what differs from the checkpoint."""
    facts, past, journal = run.start_facts, run.past, run.journal
    source = f" with {run.ancestor}" if run.ancestor else ""
    how = f"resumed at step {past.state.step:,}{source}" if past.checkpoint else f"from the beginning{source}"
    many = f"{facts['ranks']} x " if facts["ranks"] > 1 else ""
    size, where = format_count(facts["parameters"]), f"{facts['precision']} on {many}{facts['device']}"
    journal.notice(f"{facts['recipe']}: {size} parameters, {where}, {past.plan.train_steps:,} steps, {how}")
    if run.recipe.precision == "fp8":
        journal.notice("fp8: the matrices of attention and MLPs; bf16: embeddings, norms, attention scores, the head")
    for change in past.changes:
        journal.event(Event.CHANGED, past.state.step, field=change.field, old=change.old, new=change.new)
    if past.changes:
        journal.notice(f"changed from step {past.state.step + 1:,} on: {', '.join(map(str, past.changes))}")
    for notice in run.data.notices:
        journal.notice(notice)
