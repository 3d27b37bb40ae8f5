"""`bloomery scale RECIPE --ranks 1,2,4,8`: how efficient more ranks are, by really training with each number."""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bloomery.base import exit_codes
from bloomery.base.errors import BloomeryError, Problem, RecipeError
from bloomery.base.storage import write_atomically
from bloomery.cli.recipe_argument import add_recipe_arguments
from bloomery.cli.scale_rank import measured_training
from bloomery.config.load import read_recipe
from bloomery.config.recipe import Recipe
from bloomery.launch.local import run_local_ranks
from bloomery.monitor.scaling import (
    Measurement,
    RankTimes,
    bubble_share,
    processor_share,
    scaling_json,
    scaling_page,
    scaling_rows,
    scaling_table,
)
from bloomery.sizing.check import load_checked_recipe
from bloomery.sizing.layout import data_parallel_size
from bloomery.sizing.plan import TrainingPlan

_CROWDED = 0.8
_WARM_UP_STEPS = 3
"""The first steps of a run allocate, connect and compile."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_recipe_arguments(parser)
    parser.add_argument("--ranks", default="1,2,4", metavar="N,N", help="numbers of ranks; default: 1,2,4")
    parser.add_argument("--steps", type=int, default=20, help="steps that are measured; default: 20")
    parser.add_argument("--weak", action="store_true", help="let the global batch grow with the ranks")
    parser.add_argument("--device", help="cpu, cuda, ...; default: this machine's accelerator")
    parser.add_argument("--output", type=Path, help="folder for scaling.json and scaling.html; default: scale/<name>")
    parser.add_argument("--json", action="store_true", help="print scaling.json")


def run(args: argparse.Namespace) -> int:
    counts = _counts(args)
    recipes = _recipes(args, counts)
    from bloomery.base.accelerator import device_name, pick_device

    device = pick_device(args.device)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    threads = max(1, cores // max(counts))
    measurements = []
    for count, (recipe, overrides) in recipes.items():
        if not args.json:
            print(f"{count} ranks: {args.steps} steps of {recipe.batch.global_batch_size} samples", flush=True)
        with tempfile.TemporaryDirectory(prefix="bloomery-scale-") as folder:
            words = ["train", args.recipe, *overrides, "--run-dir", f"{folder}/run", "--device", str(device), "--quiet"]
            ranks = [folder, str(threads), *words]
            if code := run_local_ranks(count, measured_training, ranks, preload=["bloomery.train.setup"]):
                return code
            times = [_times(Path(folder, f"rank-{rank}.json")) for rank in range(count)]
        measurements.append(_measurement(recipe, count, times, splits=device.type == "cpu"))
    rows = scaling_rows(measurements)
    kind = "weak" if args.weak else "strong"
    notes = _notes(measurements, device.type, cores, threads)
    name = next(iter(recipes.values()))[0].name
    output: Path = args.output or Path("scale") / name
    facts = {
        "recipe": name,
        "scaling": kind,
        "device": device_name(device),
        "cores": cores,
        "threads_per_rank": threads,
        "steps": args.steps,
        "rows": scaling_json(rows, measurements),
        "notes": notes,
    }
    output.mkdir(parents=True, exist_ok=True)
    write_atomically(output / "scaling.json", json.dumps(facts, indent=1) + "\n")
    lead = f"{kind} scaling on {device_name(device)}, {args.steps} steps each"
    write_atomically(output / "scaling.html", scaling_page(f"{name}: scaling", lead, notes, rows))
    if args.json:
        print(json.dumps(facts, indent=1))
    else:
        print(
            "\n".join(["", f"{name}: {lead}", scaling_table(rows), "", *notes, f"Picture: {output / 'scaling.html'}"])
        )
    return exit_codes.OK


def _counts(args: argparse.Namespace) -> list[int]:
    problems = []
    try:
        counts = sorted({int(word) for word in args.ranks.split(",")})
    except ValueError:
        counts = []
    if not counts or counts[0] < 1:
        rule = "numbers of ranks, with commas between them"
        problems.append(Problem(f"--ranks is {args.ranks!r}", rule, "use for example 1,2,4"))
    if args.steps < 1:
        problems.append(Problem(f"--steps is {args.steps}", "at least one step is measured", "use for example 20"))
    if problems:
        raise RecipeError(problems)
    return counts


def _recipes(args: argparse.Namespace, counts: Sequence[int]) -> dict[int, tuple[Recipe, list[str]]]:
    """The recipe for each number of ranks and the overrides that make it; every problem of every one of them."""
    draft = read_recipe(args.recipe, args.overrides).recipe
    recipes: dict[int, tuple[Recipe, list[str]]] = {}
    problems: list[Problem] = []
    for count in counts:
        overrides = [
            *args.overrides,
            *("launch.on=local", "launch.nodes=1", f"launch.gpus_per_node={count}", "batch.rampup=null"),
            *(f"train.exit_after={args.steps + _WARM_UP_STEPS} steps", "train.evaluate=null"),
            *("monitor.carbon=null", "monitor.tensorboard=false"),
        ]
        if draft is not None and draft.data is not None and draft.data.validation:
            overrides.append("data.validation={}")
        if args.weak and draft is not None:
            overrides.append(f"batch.global_batch_size={draft.batch.global_batch_size * count // counts[0]}")
        try:
            recipe = load_checked_recipe(args.recipe, overrides).recipe
        except BloomeryError as error:
            problems += [Problem(f"{count} ranks: {each.what}", each.rule, each.remedy) for each in error.problems]
            continue
        if TrainingPlan.of(recipe).train_steps < args.steps + _WARM_UP_STEPS:
            what = f"{count} ranks: the recipe ends after {TrainingPlan.of(recipe).train_steps} steps"
            rule = f"{args.steps} are measured after {_WARM_UP_STEPS} to warm up"
            problems.append(Problem(what, rule, "lengthen train.for, or use fewer --steps"))
        recipes[count] = (recipe, overrides)
    if problems:
        raise RecipeError(problems)
    return recipes


def _times(path: Path) -> RankTimes:
    """Averages of the steps after the warm-up: from the end of one step to the end of the next."""
    steps: list[Any] = json.loads(path.read_text())
    first, last, count = steps[_WARM_UP_STEPS - 1], steps[-1], len(steps) - _WARM_UP_STEPS
    return RankTimes(*((end - start) / count for start, end in zip(first, last, strict=True)))


def _measurement(recipe: Recipe, count: int, times: Sequence[RankTimes], *, splits: bool) -> Measurement:
    parallel, batch = recipe.parallel, recipe.batch
    return Measurement(
        ranks=count,
        tokens_per_step=batch.global_batch_size * recipe.model.seq_length,
        bubble_share=bubble_share(
            parallel.schedule,
            pp=parallel.pp,
            chunks=parallel.chunks,
            micro_batches=batch.global_batch_size // (batch.micro_batch_size * data_parallel_size(recipe)),
        ),
        times=times,
        splits=splits,
    )


def _notes(measurements: Sequence[Measurement], device_type: str, cores: int, threads: int) -> list[str]:
    if device_type != "cpu":
        return ["On an accelerator the host does not wait for communication, so a step is not split into its parts."]
    notes = [
        "Measured: the time of a step, and the time that each rank waits in collectives and between pipeline stages; "
        "computation is the rest. Derived: stragglers (slowest less average computation), bubble (the schedule's "
        "formula, at most what was waited between stages), communication (all other waiting).",
        f"Every rank computed with {threads} thread{'s' if threads > 1 else ''}.",
    ]
    most = max(each.ranks for each in measurements)
    if most > cores:
        notes.append(
            f"This machine has {cores} cores, fewer than {most} ranks: they take turns, so the efficiency is that of "
            "an oversubscribed machine, not of the layout."
        )
    shares = {each.ranks: processor_share(each) for each in measurements}
    if min(shares.values()) < _CROWDED:
        told = ", ".join(f"{100 * share:.0f}% with {ranks}" for ranks, share in shares.items())
        notes.append(
            f"Of the time that is counted as computation, ranks had a processor for {told} ranks: it was crowded."
        )
    return notes
