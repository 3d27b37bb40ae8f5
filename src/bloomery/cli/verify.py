"""`bloomery verify RECIPE`: the certificate that the layout changes nothing but speed.
With --simulate-world N: one rank of a world that is larger than the machine."""

import argparse
import json
import tempfile
from pathlib import Path

from bloomery.base import exit_codes
from bloomery.base.errors import Problem, RecipeError
from bloomery.base.storage import write_atomically
from bloomery.cli.arguments import add_json, add_recipe_arguments, load, show, whole_number
from bloomery.sizing.layout import world_size


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_recipe_arguments(parser)
    parser.add_argument("--layouts", metavar="A,B", help="layouts such as tp2,zero3-dp2; default: the standard matrix")
    parser.add_argument("--steps", type=whole_number(2), default=20, help="steps of every training; default: 20")
    parser.add_argument("--pairs", action="store_true", help="each layout also resumes from every other's checkpoint")
    parser.add_argument("--output", type=Path, default=Path("certificate.json"), help="default: certificate.json")
    parser.add_argument("--device", default="cpu", help="cpu (default), cuda, ...: one device for each rank")
    parser.add_argument(
        "--simulate-world", type=int, metavar="N", help="build ranks of a world of N without its devices"
    )
    parser.add_argument("--rank", type=int, metavar="R", help="simulate this one; default: first, middle, last stage")
    add_json(parser, "certificate")


def run(args: argparse.Namespace) -> int:
    if args.simulate_world is not None or args.rank is not None:
        return _simulate(args)
    recipe = load(args).recipe
    from bloomery.base.accelerator import device_count, pick_device
    from bloomery.verify.certify import certify, table
    from bloomery.verify.shrink import choose_layouts
    from bloomery.verify.trials import run_trial

    names = [name.strip() for name in args.layouts.split(",")] if args.layouts is not None else None
    device = pick_device(args.device)
    layouts, left_out = choose_layouts(args.recipe, args.overrides, recipe, names, most_ranks=device_count(device))
    with tempfile.TemporaryDirectory(prefix="bloomery-verify-") as folder:
        facts = certify(
            recipe,
            layouts,
            Path(folder),
            run_trial,
            steps=args.steps,
            device=args.device,
            pairs=args.pairs,
            left_out=left_out,
            quiet=args.json,
        )
    write_atomically(args.output, json.dumps(facts, indent=1) + "\n")
    print(json.dumps(facts, indent=1) if args.json else f"{table(facts)}. Certificate: {args.output}")
    return exit_codes.OK if facts["verdict"] == "pass" else exit_codes.FAILED_CERTIFICATE


def _simulate(args: argparse.Namespace) -> int:
    """Instead of everything else that `verify` does: the recipe need only be legal in the simulated world."""
    if args.simulate_world is not None:
        args.overrides += ["launch.nodes=1", f"launch.gpus_per_node={args.simulate_world}"]
    recipe = load(args).recipe
    world = world_size(recipe)
    if args.rank is not None and args.rank not in range(world):
        rule = f"ranks of this world are 0 to {world - 1}"
        raise RecipeError(Problem(f"--rank is {args.rank}", rule, "use one of them"))
    from bloomery.verify.simulate import simulate_world

    return show(args, simulate_world(recipe, args.rank))
