"""`bloomery plan tflops`, `plan days`, `plan memory` and `plan left`: sums without a recipe.
And `calibrate`: measure this machine, so that later plans are about it."""

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

from bloomery.base import signals
from bloomery.base.errors import BloomeryError, LostRankError, Problem
from bloomery.base.units import parse_amount
from bloomery.cli.arguments import add_device, add_json, as_text, positive, show, whole_number

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


def add_arguments_calibrate(parser: argparse.ArgumentParser) -> None:
    add_device(parser)
    parser.add_argument("--out", type=Path, metavar="FILE", help="default: bloomery/hardware.yaml in ~/.config")
    add_json(parser)


def run_calibrate(args: argparse.Namespace) -> int:
    from bloomery.base.accelerator import device_count, pick_device
    from bloomery.launch.doctor import write_speed
    from bloomery.launch.local import run_local_ranks
    from bloomery.parallel.measure import measure_rank
    from bloomery.plan.calibrate import entry, store, trainings
    from bloomery.plan.hardware import own_file
    from bloomery.plan.trials import Bench, Trial, random_data

    device = pick_device(args.device)
    with tempfile.TemporaryDirectory(prefix="bloomery-calibrate-") as temporary:
        folder = Path(temporary)
        file = folder / "measured.json"
        signals.say("products, attention, copies and links ...")
        words = [str(file), *([args.device] if args.device else [])]
        if run_local_ranks(device_count(device) or 1, measure_rank, words, preload=["bloomery.parallel.measure"]):
            raise LostRankError(Problem("the measurements failed", remedy="see what the processes said above"))
        measured = json.loads(file.read_text())
        data = random_data(folder / "random")
        steps = 2 if device.type == "cpu" else 3
        bench = Bench("gpt-1.3b", data, folder, args.device, log_every=steps, figures=steps)
        trials: list[Trial] = []
        for training in trainings(measured):
            signals.say(f"training: {' '.join(training[-3:])} ...")
            trials.append(bench.run(training))
            if trials[-1].outcome != "ok":
                signals.say(f"{trials[-1].outcome}: {trials[-1].said}")
        if all(trial.outcome != "ok" for trial in trials):
            raise BloomeryError(Problem("no training could be measured", trials[0].said, "see `bloomery doctor`"))
        found, explained = entry(measured, trials, data)
        disk = write_speed(Path.cwd())
    name = store(found, disk, args.out or own_file())
    facts = {"name": name, "file": str(args.out or own_file()), "disk_bytes_per_s": round(disk), **found}
    return show(args, facts | {"trainings": explained})
