"""`bloomery train RECIPE`: train, or resume where the run stopped."""

import argparse
import os
import sys
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

from bloomery.base import doing, exit_codes
from bloomery.base.errors import Problem, RecipeError
from bloomery.base.ranks import Started, started_as
from bloomery.base.signals import Interrupted, job_seconds
from bloomery.cli.arguments import add_device, add_recipe_arguments, done_samples, load, run_folder
from bloomery.cli.hf import import_for
from bloomery.config.recipe import Recipe
from bloomery.launch.local import Node, run_local_ranks
from bloomery.monitor.names import Event
from bloomery.sizing.check import fit
from bloomery.sizing.layout import ranks_per_node, world_size


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_recipe_arguments(parser)
    parser.add_argument("--run-dir", type=Path, help="folder of the run; default: runs/<name>")
    parser.add_argument(
        "--from", dest="start_from", metavar="CKPT", help="resume from this checkpoint: 100, or RUN@100 of another run"
    )
    change = "this field or section may differ from the checkpoint; repeatable"
    parser.add_argument("--change", dest="changes", metavar="FIELD", action="append", default=[], help=change)
    add_device(parser)
    parser.add_argument("--trace", type=Path, metavar="DIR", help="write the first steps' gradients and samples here")
    parser.add_argument("--trace-steps", type=int, default=2, metavar="N", help="how many steps; default: 2")
    parser.add_argument("--profile-at", type=int, metavar="STEP", help="profile steps from here on (monitor.profile)")
    parser.add_argument(
        "--trace-from", type=int, default=1, metavar="STEP", help="the first of them; default: the first"
    )
    parser.add_argument("--quiet", action="store_true", help="print warnings and errors only")


def run(args: argparse.Namespace) -> int:
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # a lost rank is reported once, not in pages of C++ frames
    from bloomery.train.contract import check_change_names

    doing.is_quiet = args.quiet
    started = started_as()
    try:
        check_change_names(args.changes)
        recipe, started = _recipe(args, started)
    except RecipeError as error:
        raise error.reported_once(started.rank if started else 0) from None
    folder = run_folder(args, recipe)
    if (switch := folder / "control" / "kill").exists():
        print(f"Detected kill switch at {switch}. Exiting; remove the file to train again.")
        return exit_codes.OK
    if started is None and world_size(recipe) > 1:
        return _run_here(recipe, args)
    from bloomery.base.accelerator import device_name, device_of_rank, pick_device
    from bloomery.train.loop import train
    from bloomery.train.setup import prepared_run
    from bloomery.train.trace import Tracer

    device = pick_device(args.device)
    trace = Tracer(args.trace, args.trace_steps, args.trace_steps, args.trace_from) if args.trace else None
    options = {"quiet": args.quiet, "start_from": args.start_from, "changes": args.changes, "trace": trace}
    options |= {"import_weights": import_for, "profile_at": args.profile_at}
    stopped = None
    with ExitStack() as closing:
        closing.push(lambda kind, *_: stopped is not None and kind is Interrupted)  # everything is saved by then
        starting = closing.enter_context(ExitStack())
        if started is not None:
            from bloomery.parallel.ranks import joined

            work = starting.enter_context(doing.doing(f"preparing {started.size} ranks"))
            work.due -= job_seconds()  # the launcher has waited before
            device = device_of_rank(device, started.local_rank, started.local_size)
            options["ranks"] = closing.enter_context(joined(started, device))
        prepared, state = closing.enter_context(prepared_run(recipe, folder, device=device, **options))
        starting.close()
        if prepared.ranks.rank == 0 and (plan := _plan(prepared.recipe, device_name(device))):
            prepared.journal.event(Event.PLAN, state.step, **plan)
        stopped = train(prepared, state)
    return exit_codes.OK


def _plan(recipe: Recipe, device: str) -> dict[str, Any]:
    """What is foretold of this run, for its report and `plan --score`."""
    from bloomery.plan.answer import stored_plan

    try:
        return stored_plan(recipe, device)
    except Exception:  # a training never fails for a forecast
        return {}


def _recipe(args: argparse.Namespace, started: Started | None) -> tuple[Recipe, Started | None]:
    """The recipe, for the ranks that were really started."""
    warns = started is None or started.rank == 0
    checked = load(args, reads=set(Recipe.model_fields) - {"prepare"}, warns=warns)
    recipe = checked.recipe
    started = started_as(ranks_per_node=recipe.launch.gpus_per_node if recipe.launch else 0)
    if started is None or started.size == world_size(recipe):
        return recipe, started
    nodes = started.size // started.local_size if started.size % started.local_size == 0 else 1  # uneven: all as one
    fitted = fit(recipe, nodes=nodes, ranks_per_node=started.size // nodes, done=partial(done_samples, args))
    if fitted is None:
        what = f"{started.size} ranks were started, and no layout of them can train this recipe"
        rule = f"they must divide the global batch, which stays at {recipe.batch.global_batch_size} samples"
        raise RecipeError(Problem(what, rule, "start another number of ranks"))
    recipe, reasons = fitted
    if reasons and started.rank == 0:
        print(f"bloomery: another layout, the same training: {'; '.join(reasons)}", file=sys.stderr)
    return recipe, started


def _run_here(recipe: Recipe, args: argparse.Namespace) -> int:
    """Be the launcher of a recipe that wants several ranks and was started as one process."""
    size = world_size(recipe)
    node = Node.of(os.environ, ranks_per_node(recipe))
    if node is None and recipe.launch is not None and recipe.launch.on != "local":
        what = f"the recipe needs {size} ranks on {recipe.launch.on}, and this is one process"
        remedy = (
            f"start it with `bloomery launch`, srun or torchrun, or override launch.on=local launch.nodes=1 to start "
            f"{size} ranks here"
        )
        raise RecipeError(Problem(what, "launch.on is what starts the ranks", remedy))
    from bloomery.cli.main import main

    preload = ["bloomery.train.loop", "bloomery.train.setup", "torch.distributed.fsdp"]
    preload += ["bloomery.parallel.pipeline"] if recipe.parallel.pp > 1 else []
    return run_local_ranks(ranks_per_node(recipe), main, args.command_line, preload=preload, node=node)
