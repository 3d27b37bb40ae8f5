"""`bloomery plan tflops`, `plan days`, `plan memory` and `plan left`: sums without a recipe."""

import argparse
from pathlib import Path
from typing import Any

from bloomery.base.units import parse_amount
from bloomery.cli.arguments import add_json, as_text, positive, show, whole_number

_ANY = whole_number(1, 10**9)


def _count(text: str) -> float:
    """300B, 13e9 or 1_000."""
    try:
        return positive(text)
    except ValueError:
        return float(parse_amount(f"{text} tokens").count)


def _add_shape(parser: argparse.ArgumentParser, *, required: bool) -> None:
    for name in ("--layers", "--hidden", "--vocab", "--seq"):
        parser.add_argument(name, type=_ANY, required=required, help=f"{name[2:]} of a GPT")


def _add_recompute(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--recompute", choices=["none", "selective", "full"], default="none")


def add_arguments_tflops(parser: argparse.ArgumentParser) -> None:
    _add_shape(parser, required=True)
    parser.add_argument("--global-batch", type=_ANY, required=True, help="samples of a step")
    parser.add_argument("--gpus", type=_ANY, required=True)
    parser.add_argument("--step-seconds", type=positive, required=True)
    _add_recompute(parser)
    add_json(parser)


def run_tflops(args: argparse.Namespace) -> int:
    from bloomery.plan.calculators import Shape, tflops

    shape = Shape(args.layers, args.hidden, args.vocab, args.seq)
    measured = {"global_batch": args.global_batch, "gpus": args.gpus, "step_seconds": args.step_seconds}
    return show(args, {"tflops_per_gpu": tflops(shape, **measured, recompute=args.recompute)})


def add_arguments_days(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--tokens", type=_count, required=True, help="such as 300B")
    parser.add_argument("--params", type=_count, required=True, help="such as 13B")
    parser.add_argument("--gpus", type=_ANY, required=True)
    parser.add_argument("--tflops", type=positive, required=True, help="of one GPU, by the definition of the factor")
    parser.add_argument("--factor", type=positive, default=6.0, help="8 with full recomputation, else 6 (the default)")
    add_json(parser)


def run_days(args: argparse.Namespace) -> int:
    from bloomery.plan.calculators import days

    given = {name: getattr(args, name) for name in ("tokens", "params", "gpus", "tflops", "factor")}
    return show(args, {"days": days(**given)} | given)


def add_arguments_memory(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--params", type=_count, required=True, help="such as 13B")
    parser.add_argument("--gpus", type=_ANY, default=1, help="data-parallel ranks that ZeRO shards over")
    _add_shape(parser, required=False)
    for name in ("--heads", "--micro-batch", "--tp", "--pp", "--chunks"):
        parser.add_argument(name, type=_ANY, default=1, help="for activations")
    parser.add_argument("--sequence-parallel", action="store_true", help="tensor-parallel ranks share norms too")
    _add_recompute(parser)
    add_json(parser)


def run_memory(args: argparse.Namespace) -> int:
    from bloomery.plan.calculators import Shape, activation_bytes, state_bytes

    facts: dict[str, Any] = {}
    if args.layers and args.hidden and args.seq:
        facts["activation_bytes"] = round(
            activation_bytes(
                Shape(args.layers, args.hidden, args.vocab or 0, args.seq),
                **{name: getattr(args, name) for name in ("heads", "micro_batch", "tp", "pp", "chunks")},
                recompute=args.recompute,
                sequence_parallel=args.sequence_parallel,
            )
        )
    facts["schemes"] = state_bytes(args.params, args.gpus)
    return show(args, facts, as_text)


def add_arguments_left(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", metavar="RUN", type=Path, help="folder of a run")
    add_json(parser)


def run_left(args: argparse.Namespace) -> int:
    from bloomery.plan.calculators import left

    return show(args, left(args.run))
