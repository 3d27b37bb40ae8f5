"""`bloomery check RECIPE`: every problem at once, or one line with its parameters, steps and tokens.
`bloomery recipes [NAME]`: those that come with Bloomery.
`bloomery inspect model RECIPE`: parameters by group and FLOPs per token.
`bloomery inspect flops RECIPE`: parameters, FLOPs and time of every module, as torch counts them.
`bloomery inspect schedule RECIPE`: the whole plan of a training, before anything runs."""

import argparse
import json
from collections import Counter, defaultdict
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from bloomery.base import exit_codes
from bloomery.base.errors import RecipeError
from bloomery.base.storage import write_atomically
from bloomery.base.units import Epochs, format_count
from bloomery.cli import arguments
from bloomery.cli.arguments import (
    add_json,
    add_recipe_arguments,
    add_run_dir,
    columns,
    load,
    past_of,
    show,
    warn,
    whole_numbers,
)
from bloomery.config.load import explain, fingerprint, shipped_recipes, shipped_text
from bloomery.config.recipe import Recipe
from bloomery.families.bloom import alibi_slopes
from bloomery.families.registry import FAMILIES
from bloomery.sizing.check import train_refusals
from bloomery.sizing.flops import FlopCount, flops_per_token
from bloomery.sizing.parameters import count_parameters, padded_vocab_size
from bloomery.sizing.schedule import TrainingPlan

_SCHEDULE_READS = ("name", "model", "batch", "lr", "train", "checkpoint", "parallel", "launch")


def add_arguments_check(parser: argparse.ArgumentParser) -> None:
    add_recipe_arguments(parser)
    parser.add_argument("--explain", action="store_true", help="print every resolved value with where it came from")
    parser.add_argument("--run-dir", type=Path, help="its run: what is behind it need not fit; default: runs/<name>")
    add_json(parser)


def run_check(args: argparse.Namespace) -> int:
    try:
        checked = load(args)
    except RecipeError as error:
        if args.json:
            print(json.dumps({"ok": False, "problems": [asdict(problem) for problem in error.problems]}, indent=2))
        raise
    refusals = [
        str(replace(each, what=f"`bloomery train` would refuse it: {each.what}"))
        for each in train_refusals(checked.recipe)
    ]
    warn(*refusals)
    facts = {
        "ok": True,
        "name": checked.recipe.name,
        "fingerprint": fingerprint(checked.recipe),
        "warnings": [*map(str, checked.warnings), *refusals],
        "values": explain(checked),
    }
    return show(args, facts, lambda facts: _check_text(facts, checked.recipe, every_value=args.explain))


def _check_text(facts: dict[str, Any], recipe: Recipe, *, every_value: bool) -> str:
    rows = []
    for path, found in facts["values"].items() if every_value else ():
        value = found["value"]
        rows.append((path, value if isinstance(value, str) and value else json.dumps(value), found["origin"]))
    size = f"{format_count(count_parameters(recipe.model).total)} parameters, {_length(recipe)}"
    return columns(rows) + "\n" * bool(rows) + f"{recipe.name}: ok. {size}, fingerprint {facts['fingerprint']}"


def _length(recipe: Recipe) -> str:
    if isinstance(recipe.train.for_, Epochs):
        return str(recipe.train.for_)
    plan = TrainingPlan.of(recipe)
    return f"{plan.train_steps:,} steps, {format_count(plan.train_tokens)} tokens"


def add_arguments_recipes(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", metavar="NAME", nargs="?", help="print this one, to be saved as a file of your own")
    add_json(parser)


def run_recipes(args: argparse.Namespace) -> int:
    texts = {name: shipped_text(name) for name in ([args.name] if args.name else shipped_recipes())}
    if args.name and not args.json:
        print(texts[args.name], end="")
        return exit_codes.OK
    facts = {"recipes": [{"name": name, "text": text} for name, text in texts.items()]}
    rows = [[name, text.partition("\n")[0].lstrip("# ")] for name, text in texts.items()]
    return show(args, facts, lambda _: columns(rows))


def add_arguments_model(parser: argparse.ArgumentParser) -> None:
    add_recipe_arguments(parser)
    add_json(parser)


def run_model(args: argparse.Namespace) -> int:
    return show(args, model_facts(load(args, reads=("name", "model", "parallel", "launch")).recipe))


def add_arguments_flops(parser: argparse.ArgumentParser) -> None:
    add_recipe_arguments(parser)
    parser.add_argument("--device", metavar="DEVICE", help="really compute on it (cpu, cuda): times too")
    parser.add_argument("--depth", type=int, default=-1, metavar="N", help="how deep to go into modules; default: all")
    parser.add_argument("--top", type=int, default=1, metavar="N", help="modules named at each depth; default: 1")
    parser.add_argument("--output", type=Path, metavar="FILE", help="write it there")
    add_json(parser)


def run_flops(args: argparse.Namespace) -> int:
    import torch

    from bloomery.base.accelerator import out_of_memory_problem, pick_device
    from bloomery.model.flops import module_costs

    recipe = load(args, reads=("name", "model", "batch", "precision")).recipe
    device = pick_device(args.device) if args.device else None
    fast = device is not None and device.type != "cpu" and recipe.precision != "fp32"
    dtype = (torch.float16 if recipe.precision == "fp16" else torch.bfloat16) if fast else torch.float32
    rows = recipe.batch.micro_batch_size
    try:
        costs = module_costs(recipe.model, micro_batch_size=rows, device=device, dtype=dtype)
    except Exception as error:
        if device is None or (problem := out_of_memory_problem(error, device)) is None:
            raise
        raise RecipeError(problem) from error
    facts = {"name": recipe.name, "micro_batch_size": rows, "seq_length": recipe.model.seq_length}
    facts |= {"device": args.device, "modules": [{**asdict(each), "macs": each.macs} for each in costs]}
    text = json.dumps(facts, indent=2) if args.json else _flops_text(facts, depth=args.depth, top=args.top)
    if args.output is None:
        print(text)
    else:
        write_atomically(args.output, text + "\n")
    return exit_codes.OK


def _flops_text(facts: dict[str, Any], *, depth: int, top: int) -> str:
    modules: list[dict[str, Any]] = facts["modules"]
    whole = modules[0]
    shown = [name for name in ("parameters", "macs", "seconds") if whole[name] is not None]

    def cell(name: str, value: float | None) -> str:
        if value is None:
            return "-"
        text = f"{value * 1e3:.3f} ms" if name == "seconds" else format_count(value)
        return f"{text} {value / whole[name]:.1%}" if whole[name] else text

    sums: dict[tuple[int, str], Counter[str]] = defaultdict(Counter)
    for each in modules:
        for name in shown:
            sums[each["depth"], name][each["kind"]] += each[name] or 0
    levels = [["depth", *shown]]
    for level in sorted({each["depth"] for each in modules}):
        most = {name: sums[level, name].most_common(top) for name in shown}
        levels.append([str(level), *(", ".join(f"{kind} {cell(n, v)}" for kind, v in most[n]) for n in shown)])
    rows = [["module", "", *shown, "forward FLOPs", "TFLOP/s"]]
    for each in (each for each in modules if depth < 0 or each["depth"] <= depth):
        speed = f"{each['forward_flops'] / each['seconds'] / 1e12:.3g}" if each["seconds"] else "-"
        cells = [*(cell(name, each[name]) for name in shown), format_count(each["forward_flops"]), speed]
        rows.append([each["name"] or facts["name"], each["kind"], *cells])
    head = f"one micro-batch of {facts['micro_batch_size']} x {facts['seq_length']:,} tokens, without recomputation: "
    counts = " and ".join(f"{format_count(whole[f'{way}_flops'])} FLOPs {way}" for way in ("forward", "backward"))
    return f"{head}{counts}\n\n{columns(levels)}\n\n{columns(rows)}"


def model_facts(recipe: Recipe) -> dict[str, Any]:
    """The JSON of `inspect model`: a public contract. `parameters` counts the recipe's own vocabulary."""
    model = recipe.model
    count = count_parameters(model)
    facts: dict[str, Any] = {
        "name": recipe.name,
        "family": model.family,
        "parameters": count.total,
        "parameters_without_embeddings": count.without_embeddings,
        "groups": count.groups,
        "vocab_size": model.vocab_size,
        "padded_vocab_size": padded_vocab_size(model),
        "padded_parameters": count_parameters(model, padded=True).total,
        "flops_per_token": {definition.value: flops_per_token(model, definition) for definition in FlopCount},
    }
    if FAMILIES[model.family].positions == "alibi":
        facts["alibi_slopes"] = alibi_slopes(model.num_heads)
    return facts


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
    if isinstance(recipe.train.for_, Epochs):
        from bloomery.data.epochs import counted

        recipe = counted(recipe)
    past = past_of(recipe, args, reads=_SCHEDULE_READS)
    plan = past.plan if past else TrainingPlan.of(recipe)
    return show(args, schedule_facts(recipe, plan, at_steps=args.at_steps, at_samples=args.at_samples))


def schedule_facts(recipe: Recipe, plan: TrainingPlan, *, at_steps: list[int], at_samples: list[int]) -> dict[str, Any]:
    """The JSON of `inspect schedule`: a public contract. `consumed_samples` of a level is before its first step, of a
    step after it. A rate is defined beyond the last sample too, because the decay may end there."""
    arguments.check_range("--at-steps is", at_steps, 1, plan.train_steps)
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
                "every_seconds": phase.every_seconds,
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
