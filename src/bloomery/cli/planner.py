"""`bloomery plan tflops`, `plan days`, `plan memory` and `plan left`: sums without a recipe.
And `calibrate`: measure this machine, so that later plans are about it; `tune`: find its fastest configuration;
`scale`: what more nodes bring, as a table, JSON and a picture."""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bloomery.base import exit_codes, signals
from bloomery.base.bounded import read_json
from bloomery.base.errors import BloomeryError, DataError, LostRankError, Problem, RecipeError
from bloomery.base.storage import make_folder, write_atomically
from bloomery.base.units import counted, parse_amount
from bloomery.cli.arguments import (
    add_device,
    add_json,
    add_recipe_arguments,
    load,
    positive,
    show,
    warn,
    whole_number,
    whole_numbers,
)

if TYPE_CHECKING:
    from bloomery.config.recipe import Recipe

_ANY = whole_number(1, 10**9)
_LONG_STEP_SECONDS = 2.0
_RESULT, _PICTURE = "scale.json", "scale.html"
_OBJECTIVE = "most tokens/s (the default) or FLOP/s, shortest step, or least memory (fit)"


def _count(text: str) -> float:
    """300B, 13e9 or 1_000."""
    try:
        return positive(text)
    except argparse.ArgumentTypeError:
        return float(parse_amount(f"{text} tokens").count)


def _add_shape(parser: argparse.ArgumentParser, *, required: bool) -> None:
    for name in ("--layers", "--hidden", "--vocab", "--seq"):
        parser.add_argument(name, type=_ANY, required=required, help=f"{name[2:]} of a GPT")


def _add_recompute(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--recompute", choices=["none", "selective", "full"], default="none", help="of activations")


def add_arguments_tflops(parser: argparse.ArgumentParser) -> None:
    _add_shape(parser, required=True)
    parser.add_argument("--global-batch", type=_ANY, required=True, help="samples of a step")
    parser.add_argument("--gpus", type=_ANY, required=True, help="that take part")
    parser.add_argument("--step-seconds", type=positive, required=True, help="time of a step")
    _add_recompute(parser)
    add_json(parser)


def run_tflops(args: argparse.Namespace) -> int:
    from bloomery.plan.calculators import gpt, tflops

    shape = gpt(layers=args.layers, hidden=args.hidden, vocab=args.vocab, seq=args.seq)
    measured = {"global_batch": args.global_batch, "gpus": args.gpus, "step_seconds": args.step_seconds}
    return show(args, {"tflops_per_gpu": tflops(shape, **measured, recompute=args.recompute)})


def add_arguments_days(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--tokens", type=_count, required=True, help="such as 300B")
    parser.add_argument("--params", type=_count, required=True, help="such as 13B")
    parser.add_argument("--gpus", type=_ANY, required=True, help="that take part")
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
    from bloomery.plan.calculators import activation_bytes, gpt, state_bytes

    facts: dict[str, Any] = {}
    if args.layers and args.hidden and args.seq:
        shape = gpt(layers=args.layers, hidden=args.hidden, vocab=args.vocab or 1, seq=args.seq, heads=args.heads)
        names = ("micro_batch", "tp", "pp", "chunks", "recompute", "sequence_parallel")
        facts["activation_bytes"] = round(activation_bytes(shape, **{name: getattr(args, name) for name in names}))
    return show(args, facts | {"schemes": state_bytes(args.params, args.gpus)})


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
        code = run_local_ranks(device_count(device) or 1, measure_rank, words, preload=["bloomery.parallel.measure"])
        if code == exit_codes.INTERRUPTED:
            return code
        if code:
            raise LostRankError(Problem("the measurements failed", remedy="see what the processes said above"))
        measured = json.loads(file.read_text())
        data = random_data(folder / "random")
        steps = 2 if device.type == "cpu" else 3
        bench = Bench("gpt-1.3b", data, folder, args.device, log_every=steps, figures=steps)
        trials: list[Trial] = []
        disk, target, facts = write_speed(Path.cwd()), args.out or own_file(), dict[str, Any]()
        for training in trainings(measured):
            signals.say(f"training: {' '.join(training[-3:])} ...")
            trials.append(bench.run(training))
            if trials[-1].outcome != "ok":
                signals.say(f"{trials[-1].outcome}: {trials[-1].said}")
                continue
            found, explained = entry(measured, trials, data)
            name = store(found, disk, target)  # after each: a calibration that is interrupted leaves what it knows
            facts = {"name": name, "file": str(target), "disk_bytes_per_s": round(disk), **found}
            facts["trainings"] = explained
    if not facts:
        raise BloomeryError(Problem("no training could be measured", trials[0].said, "see `bloomery doctor`"))
    return show(args, facts)


def add_arguments_tune(parser: argparse.ArgumentParser) -> None:
    add_recipe_arguments(parser)
    parser.add_argument("--objective", choices=["tokens", "latency", "flops", "fit"], default="tokens", help=_OBJECTIVE)
    parser.add_argument("--trials", type=whole_number(1), default=8, help="at most; default: 8")
    parser.add_argument("--minutes", type=positive, default=10.0, help="begin no trial after them; default: 10")
    values = "try these values of a field, such as precision=bf16 or parallel.offload=true,false; repeatable"
    parser.add_argument("--search", action="append", default=[], metavar="FIELD=V,V", help=values)
    parser.add_argument("--everything", action="store_true", help="try all, however slow the planner thinks they are")
    parser.add_argument("--gpu", help="what the planner takes the device for; default: by its name")
    parser.add_argument("--output", type=Path, metavar="DIR", help="default: runs/<name>-tune")
    add_device(parser)
    add_json(parser)


def run_tune(args: argparse.Namespace) -> int:
    from bloomery.config.load import as_yaml
    from bloomery.plan.constants import fitted
    from bloomery.plan.hardware import Machine, known_as, read_catalogue
    from bloomery.plan.pictures import trial_page
    from bloomery.plan.trials import Bench, torch_name
    from bloomery.plan.tune import Search, candidates, tuned
    from bloomery.sizing.layout import ranks_per_node

    recipe = load(args).recipe
    on, catalogue = (recipe.launch.on if recipe.launch else "local"), read_catalogue(None)
    name = args.gpu or torch_name(args.device)
    machine = Machine.of(catalogue, known_as(name, catalogue) or name, None, ranks_per_node(recipe))
    constants, device = fitted().on(machine.device), machine.device
    fields = dict(_searched(recipe, device.torch_name == "cpu", device.peak("fp8") > device.peak("bf16")))
    fields |= {field: values.split(",") for field, _, values in (text.partition("=") for text in args.search)}
    output = args.output or Path("runs") / f"{recipe.name}-tune"
    found = list(candidates(args.recipe, args.overrides, fields, machine, constants))
    slow = next((each.tokens_per_second for each in found if not each.words), 1e9)
    tokens = recipe.batch.global_batch_size * recipe.model.seq_length
    log_every = 3 if tokens / slow < _LONG_STEP_SECONDS else 1
    bench = Bench(args.recipe, args.overrides, output, args.device, log_every=log_every, on=on)
    limits = (device.memory_gib * 2**30, args.trials, 60 * args.minutes)
    search = Search(bench, args.objective, found, *limits, text=as_yaml(recipe), everything=args.everything)
    search.run(signals.say)
    facts = {
        "recipe": recipe.name,
        "machine": machine.gpu,
        **tuned(search, args.recipe, args.overrides, output / "tuned.yaml"),
    }
    write_atomically(output / "tune.html", trial_page(recipe.name, facts))
    if "precision=fp8" in facts["best"]:
        warn("fp8 rounds otherwise: compare its loss with bf16's before a long training, or --search precision=bf16")
    return show(args, facts | {"picture": str(output / "tune.html")})


def _searched(recipe: Recipe, on_cpu: bool, has_fp8: bool) -> Iterator[tuple[str, list[str]]]:
    """Fields besides those of layouts."""
    yield "precision", [recipe.precision, *(["fp8"] if has_fp8 and recipe.precision == "bf16" else [])]
    compiles = str(recipe.train.compile).lower()
    yield "train.compile", [compiles, *(["false"] if not on_cpu and compiles != "false" else [])]


def add_arguments_scale(parser: argparse.ArgumentParser) -> None:
    add_recipe_arguments(parser)
    parser.add_argument(
        "--nodes", type=whole_numbers, metavar="N,N,...", help="numbers of nodes; here, of as many ranks"
    )
    parser.add_argument("--on", help="where; default: launch.on of the recipe")
    parser.add_argument("--steps", type=whole_number(2), default=30, help="of each training; default: 30")
    parser.add_argument("--strong", action="store_true", help="keep the global batch; default: that of each node")
    parser.add_argument("--output", type=Path, metavar="DIR", help="default: runs/<name>-scale")
    parser.add_argument("--compare", type=Path, nargs="+", default=[], metavar="JSON", help="draw these as well")
    add_json(parser)


def run_scale(args: argparse.Namespace) -> int:
    from bloomery.plan.trials import measure, picture, with_efficiency

    args.overrides += [f"launch.on={args.on}"] if args.on else []
    recipe = load(args).recipe
    if not args.nodes or 0 in args.nodes:
        raise RecipeError(
            Problem("--nodes is missing", "each is a training of its own", "give for example --nodes 1,2,4")
        )
    if recipe.launch and recipe.launch.on == "azureml":
        rule, remedy = "its runs lie in the workspace, where nothing measures them", "use another target"
        raise RecipeError(Problem("launch.on is azureml", rule, remedy))
    others = {str(path): _points(path) for path in args.compare}
    output = make_folder(args.output or Path("runs") / f"{recipe.name}-scale")
    points: list[dict[str, Any]] = []
    for nodes in sorted(set(args.nodes)):
        signals.say(f"{counted(nodes, 'node')} ...")
        points.append(measure(recipe, args.recipe, args.overrides, nodes, output, steps=args.steps, strong=args.strong))
    facts = {"recipe": recipe.name, "strong": args.strong, "points": with_efficiency(points)}
    write_atomically(output / _RESULT, json.dumps(facts, indent=1) + "\n")
    write_atomically(output / _PICTURE, picture({str(output): facts["points"]} | others))
    return show(args, {**facts, "picture": str(output / _PICTURE)})


def _points(path: Path) -> list[dict[str, Any]]:
    try:
        points = read_json(path)["points"]
        return [{name: float(point[name]) for name in ("nodes", "tokens_per_second", "efficiency")} for point in points]
    except (OSError, ValueError, TypeError, KeyError) as error:
        rule = f"`bloomery scale` writes {_RESULT}"
        raise DataError(
            Problem(f"{path} is no result of a scaling experiment: {error}", rule, "name another")
        ) from error
