"""`bloomery inspect model RECIPE`: parameters by group and FLOPs per token.
`bloomery inspect schedule RECIPE`: the whole plan of a training, before anything runs."""

from __future__ import annotations

import argparse
from typing import Any

from bloomery.cli.arguments import (
    add_json,
    add_recipe_arguments,
    add_run_dir,
    load,
    past_of,
    refuse_numbers,
    show,
    whole_numbers,
)
from bloomery.config.recipe import Recipe
from bloomery.families.bloom import alibi_slopes
from bloomery.families.registry import FAMILIES
from bloomery.sizing.flops import FlopCount, flops_per_token
from bloomery.sizing.parameters import count_parameters, padded_vocab_size
from bloomery.sizing.schedule import TrainingPlan

_SCHEDULE_READS = ("name", "model", "batch", "lr", "train", "checkpoint", "parallel", "launch")


def add_arguments_model(parser: argparse.ArgumentParser) -> None:
    add_recipe_arguments(parser)
    add_json(parser)


def run_model(args: argparse.Namespace) -> int:
    facts = model_facts(load(args, reads=("name", "model", "parallel", "launch")).recipe)
    return show(args, facts, _model_text)


def model_facts(recipe: Recipe) -> dict[str, Any]:
    """The JSON of `inspect model`: a public contract. `parameters` counts the recipe's own vocabulary."""
    model = recipe.model
    count = count_parameters(model, vocab_size=model.vocab_size)
    padded = padded_vocab_size(model)
    facts: dict[str, Any] = {
        "name": recipe.name,
        "family": model.family,
        "parameters": count.total,
        "parameters_without_embeddings": count.without_embeddings,
        "groups": count.groups,
        "vocab_size": model.vocab_size,
        "padded_vocab_size": padded,
        "padded_parameters": count_parameters(model, vocab_size=padded).total,
        "flops_per_token": {definition.value: flops_per_token(model, definition) for definition in FlopCount},
    }
    if FAMILIES[model.family].positions == "alibi":
        facts["alibi_slopes"] = alibi_slopes(model.num_heads)
    return facts


def _model_text(facts: dict[str, Any]) -> str:
    lines = [f"{facts['name']} ({facts['family']}): {facts['parameters']:,} parameters", ""]
    lines += [f"  {group:<22}{number:>18,}" for group, number in facts["groups"].items()]
    lines += [
        "",
        f"vocabulary {facts['vocab_size']:,}, padded to {facts['padded_vocab_size']:,}: "
        f"{facts['padded_parameters']:,} parameters in memory",
        "",
        "FLOPs per token, by definition:",
    ]
    lines += [f"  {FlopCount(name).description}: {number:,}" for name, number in facts["flops_per_token"].items()]
    if slopes := facts.get("alibi_slopes"):
        lines += ["", f"ALiBi slopes: {', '.join(f'{slope:.4g}' for slope in slopes)}"]
    return "\n".join(lines)


def add_arguments_schedule(parser: argparse.ArgumentParser) -> None:
    add_recipe_arguments(parser)
    parser.add_argument(
        "--at-steps", metavar="A,B", type=whole_numbers, default=[], help="samples, batch and LR at steps"
    )
    parser.add_argument("--at-samples", metavar="A,B", type=whole_numbers, default=[], help="LR at sample counts")
    add_run_dir(parser)
    add_json(parser)


def run_schedule(args: argparse.Namespace) -> int:
    recipe = load(args, reads=_SCHEDULE_READS).recipe
    past = past_of(recipe, args, reads=_SCHEDULE_READS)
    plan = past.plan if past else TrainingPlan.of(recipe)
    facts = schedule_facts(recipe, plan, at_steps=args.at_steps, at_samples=args.at_samples)
    return show(args, facts, _schedule_text)


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
            {name: getattr(level, name) for name in ("global_batch", "first_step", "consumed_samples")}
            for level in plan.batch.levels
        ],
        "warmup_samples": plan.lr.warmup_samples,
        "warmup_ends_at_step": plan.warmup_ends_at_step,
        "decay_samples": None if recipe.lr.schedule == "constant" else plan.lr.decay_samples,
        "phases": [
            {
                "first_step": phase.first_step,
                "last_step": min(plan.train_steps, phase.last_step or plan.train_steps),
                "every_steps": phase.every_steps,
                "saves": len(phase.steps(train_steps=plan.train_steps)),
            }
            for phase in plan.save_phases
            if phase.first_step <= plan.train_steps
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
    lines += ["", f"warm-up: {facts['warmup_samples']:,} samples, ends at step {facts['warmup_ends_at_step']:,}"]
    if facts["decay_samples"] is not None:
        lines.append(f"decay ends at {facts['decay_samples']:,} samples")
    lines += ["", "checkpoints:"]
    for phase in facts["phases"]:
        span = f"steps {phase['first_step']:,} to {phase['last_step']:,}"
        every = phase["every_steps"]
        how = f"every {every:,} steps, {phase['saves']:,} saves" if every else "chosen from the failure rate"
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
