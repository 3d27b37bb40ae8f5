"""`bloomery inspect schedule RECIPE`: the whole plan of a training, before anything runs."""

from __future__ import annotations

import argparse
import json
from typing import Any

from bloomery.base import exit_codes
from bloomery.cli.data_argument import add_run_dir, past_of, refuse_numbers, whole_numbers
from bloomery.cli.recipe_argument import add_recipe_arguments, load
from bloomery.config.recipe import Recipe
from bloomery.sizing.plan import TrainingPlan

READS = ("name", "model", "batch", "lr", "train", "checkpoint", "parallel", "launch")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_recipe_arguments(parser)
    parser.add_argument(
        "--at-steps", metavar="A,B", type=whole_numbers, default=[], help="samples, batch and LR at steps"
    )
    parser.add_argument("--at-samples", metavar="A,B", type=whole_numbers, default=[], help="LR at sample counts")
    add_run_dir(parser)
    parser.add_argument("--json", action="store_true", help="print the answer as JSON")


def run(args: argparse.Namespace) -> int:
    recipe = load(args, reads=READS).recipe
    past = past_of(recipe, args, reads=READS)
    plan = past.plan if past else TrainingPlan.of(recipe)
    facts = schedule_facts(recipe, plan, at_steps=args.at_steps, at_samples=args.at_samples)
    print(json.dumps(facts, indent=2) if args.json else _schedule_text(facts))
    return exit_codes.OK


def schedule_facts(recipe: Recipe, plan: TrainingPlan, *, at_steps: list[int], at_samples: list[int]) -> dict[str, Any]:
    """The JSON of `inspect schedule`: a public contract. `consumed_samples` of a level is before its first step, of a
    step after it. A rate is defined beyond the last sample too, because the decay may end there."""
    refuse_numbers("--at-steps", [n for n in at_steps if not 1 <= n <= plan.train_steps], f"1 to {plan.train_steps:,}")
    refuse_numbers("--at-samples", [n for n in at_samples if n < 0], "0 or more")
    return {
        "name": recipe.name,
        "train_steps": plan.train_steps,
        "train_samples": plan.train_samples,
        "train_tokens": plan.train_tokens,
        "levels": [
            {
                "global_batch": level.global_batch,
                "first_step": level.first_step,
                "consumed_samples": level.consumed_samples,
            }
            for level in plan.batch.levels()
        ],
        "warmup_samples": plan.lr.warmup_samples,
        "warmup_ends_at_step": plan.warmup_ends_at_step,
        "decay_samples": None if recipe.lr.schedule == "constant" else plan.lr.decay_samples,
        "phases": [
            {
                "first_step": phase.first_step,
                "last_step": phase.last_step,
                "every_steps": phase.every_steps,
                "saves": phase.num_saves,
            }
            for phase in plan.phase_summaries()
        ],
        "at_steps": [
            {
                "step": step,
                "consumed_samples": plan.batch.consumed_after_step(step),
                "global_batch": plan.batch.global_batch_at_step(step),
                "lr": plan.lr_at_step(step),
            }
            for step in at_steps
        ],
        "at_samples": [{"samples": samples, "lr": plan.lr.at(samples)} for samples in at_samples],
    }


def _schedule_text(facts: dict[str, Any]) -> str:
    lines = [
        f"{facts['name']}: {facts['train_steps']:,} steps, {facts['train_samples']:,} samples, "
        f"{facts['train_tokens']:,} tokens",
        "",
        "global batch   first step   samples before it",
    ]
    levels = facts["levels"]
    shown = levels if len(levels) <= 16 else [*levels[:8], None, *levels[-4:]]
    for level in shown:
        if level is None:
            lines.append(f"{'...':>12}   ({len(levels) - 12} more levels, all with --json)")
        else:
            lines.append(
                f"{level['global_batch']:>12,}   {level['first_step']:>10,}   {level['consumed_samples']:>17,}"
            )
    lines += ["", f"warm-up: {facts['warmup_samples']:,} samples, really ends at step {facts['warmup_ends_at_step']:,}"]
    if facts["decay_samples"] is not None:
        lines.append(f"decay ends at {facts['decay_samples']:,} samples")
    lines += ["", "checkpoints:"]
    for phase in facts["phases"]:
        span = f"steps {phase['first_step']:,} to {phase['last_step']:,}"
        every = phase["every_steps"]
        how = f"every {every:,} steps, {phase['saves']:,} saves" if every else "as often as failures make it worth"
        lines.append(f"  {span}: {how}")
    if facts["at_steps"]:
        lines += ["", "        step        samples   global batch   learning rate"]
        lines += [
            f"{row['step']:>12,}   {row['consumed_samples']:>12,}   {row['global_batch']:>12,}   {row['lr']:>13.6e}"
            for row in facts["at_steps"]
        ]
    if facts["at_samples"]:
        lines += ["", "     samples   learning rate"]
        lines += [f"{row['samples']:>12,}   {row['lr']:>13.6e}" for row in facts["at_samples"]]
    return "\n".join(lines)
