"""`bloomery verify RECIPE`: the certificate that the layout changes nothing but speed."""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path

from bloomery.base import exit_codes
from bloomery.base.errors import Problem, RecipeError
from bloomery.base.storage import write_atomically
from bloomery.cli.recipe_argument import add_recipe_arguments, load
from bloomery.cli.verify_simulate import add_simulate_arguments, run_simulation


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_recipe_arguments(parser)
    parser.add_argument("--layouts", metavar="A,B", help="layouts such as tp2,zero3-dp2; default: the standard matrix")
    parser.add_argument("--steps", type=int, default=20, help="steps of every training; default: 20")
    parser.add_argument("--pairs", action="store_true", help="each layout also trains on from each other's checkpoint")
    parser.add_argument("--output", type=Path, default=Path("certificate.json"), help="default: certificate.json")
    parser.add_argument("--device", default="cpu", help="cpu (default), cuda, ...: one device for each rank")
    add_simulate_arguments(parser)
    parser.add_argument("--json", action="store_true", help="print the certificate as JSON")


def run(args: argparse.Namespace) -> int:
    if args.simulate_world is not None or args.rank is not None:
        return run_simulation(args)
    if args.steps < 2:
        rule = "one part is trained before a checkpoint is resharded and one after it"
        raise RecipeError(Problem(f"--steps is {args.steps}", rule, "use at least 2"))
    recipe = load(args).recipe
    pair_steps = _pair_steps(args)
    from bloomery.base.accelerator import device_count, pick_device
    from bloomery.cli.verify_trials import run_trials
    from bloomery.verify.certify import certify
    from bloomery.verify.layouts import choose_layouts
    from bloomery.verify.table import table

    names = [name.strip() for name in args.layouts.split(",")] if args.layouts is not None else None
    device = pick_device(args.device)
    layouts, left_out = choose_layouts(args.recipe, args.overrides, recipe, names, most_ranks=device_count(device))
    with tempfile.TemporaryDirectory(prefix="bloomery-verify-") as folder:
        certificate = certify(
            recipe,
            layouts,
            Path(folder),
            run_trials,
            steps=args.steps,
            device=args.device,
            pair_steps=pair_steps,
            left_out=left_out,
            quiet=args.json,
        )
    facts = certificate.to_json()
    write_atomically(args.output, json.dumps(facts, indent=1) + "\n")
    print(json.dumps(facts, indent=1) if args.json else f"{table(certificate)}. Certificate: {args.output}")
    return exit_codes.OK if certificate.verdict == "pass" else exit_codes.FAILED_CERTIFICATE


def _pair_steps(args: argparse.Namespace) -> int:
    """How many steps each layout trains from the checkpoint of each other one."""
    if not args.pairs:
        return 0
    from bloomery.verify.certify import PAIR_STEPS
    from bloomery.verify.shrink import middle

    if args.steps - middle(args.steps) < PAIR_STEPS:
        rule = f"with --pairs, {PAIR_STEPS} steps must follow the checkpoint in the middle"
        raise RecipeError(Problem(f"--steps is {args.steps}", rule, f"use at least {2 * PAIR_STEPS - 1}"))
    return PAIR_STEPS
