"""`bloomery report RUN...`: one self-contained HTML page, about one run or several side by side.
`bloomery explain RUN --step N`: what a step read, and which documents stand out.
`bloomery replay RUN --step N`: the same step again, to distinguish bad data from bad hardware."""

from __future__ import annotations

import argparse
import contextlib
import sys
import tempfile
from contextlib import ExitStack
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from bloomery.base import exit_codes
from bloomery.base.doing import doing
from bloomery.base.errors import BloomeryError, Problem, RecipeError
from bloomery.base.storage import append_line
from bloomery.cli.arguments import (
    add_device,
    add_json,
    add_overrides,
    check_range,
    columns,
    recipe_of_run,
    show,
    whole_number,
)
from bloomery.config.load import load_recipe
from bloomery.config.schema import all_fields
from bloomery.monitor import names
from bloomery.monitor.history import EVENT, readable_lines
from bloomery.monitor.record import strict_json
from bloomery.monitor.report import read_runs, recipe_differences, write_csv, write_report
from bloomery.monitor.tracking import PACKAGES, feed
from bloomery.sizing.layout import world_size


def add_arguments_report(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("runs", metavar="RUN", type=Path, nargs="+", help="folder of a run; several are compared")
    where = "where to write; default: report.html in the run folder, or here for several runs"
    parser.add_argument("--output", type=Path, help=where)
    text = "give the records to mlflow=URI or wandb=PROJECT, instead; a second time only what is new"
    parser.add_argument("--to", type=_tracker, metavar="KIND=TARGET", help=text)
    parser.add_argument("--csv", action="store_true", help="print every record as a row, instead")
    add_json(parser, "facts")


def _tracker(text: str) -> tuple[str, str]:
    kind, _, target = text.partition("=")
    if kind not in PACKAGES or not target:
        raise argparse.ArgumentTypeError(f"{text!r} is neither mlflow=URI nor wandb=PROJECT")
    return kind, target


def run_report(args: argparse.Namespace) -> int:
    if args.to:
        kind, target = args.to
        if find_spec(PACKAGES[kind]) is None:
            what = f"the package {PACKAGES[kind]} is missing"
            raise RecipeError(Problem(what, remedy=f"install it with `pip install bloomery[{kind}]`"))
        for folder in args.runs:
            with doing(f"giving {folder} to {kind}"):
                print(f"{folder}: {feed(folder, kind, target, is_over=lambda: True):,} records")
        return exit_codes.OK
    with doing(f"reading {', '.join(map(str, args.runs))}"):
        if args.csv:
            write_csv(args.runs, sys.stdout)
        elif args.json:
            runs = read_runs(args.runs)
            facts = {"runs": [each.facts() for each in runs], "recipe_differences": recipe_differences(runs)}
            print(strict_json(facts, indent=2))
        else:
            for folder in args.runs:
                _continue_samples(folder)
            print(write_report(*args.runs, output=args.output))
    return exit_codes.OK


def _continue_samples(run: Path) -> None:
    """With each checkpoint that is there and has not done so, the prompts of the recipe."""
    recipe_file, done = run / names.RECIPE_FILE, run / names.SAMPLES_FILE
    wanted = load_recipe(str(recipe_file), is_saved=True).recipe.monitor.samples if recipe_file.is_file() else None
    if wanted is None:
        return
    from bloomery.base.accelerator import pick_device
    from bloomery.checkpoint.folder import CHECKPOINTS, step_folders, step_of
    from bloomery.cli.generate import continued

    known = {(each["step"], each["prompt"]) for each in readable_lines(done, step=int, prompt=str)}
    for folder in step_folders(run / CHECKPOINTS):
        step = step_of(folder)
        if prompts := [each for each in wanted.prompts if (step, each) not in known]:
            try:
                texts = continued(folder, prompts, wanted.tokens, pick_device(), temperature=0.0)
            except BloomeryError as error:  # a report is worth having without them
                print(f"bloomery: warning: no samples of {folder.name}: {error}", file=sys.stderr)
                continue
            for prompt, text in zip(prompts, texts, strict=True):
                append_line(done, strict_json({"step": step, "prompt": prompt, "text": text}))


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", metavar="RUN", type=Path, help="folder of a run")
    parser.add_argument("--step", type=whole_number(1, 10**12), required=True, metavar="N", help="the step in question")
    add_device(parser)


def add_arguments_explain(parser: argparse.ArgumentParser) -> None:
    _add_arguments(parser)
    parser.add_argument("--before", type=whole_number(0), default=2, help="steps before it to look at; default: 2")
    parser.add_argument("--documents", type=whole_number(1), default=5, help="how many to show; default: 5")
    text = "do not load the checkpoint before the step, which gives each document its loss"
    parser.add_argument("--no-model", action="store_true", help=text)
    add_json(parser)


def run_explain(args: argparse.Namespace) -> int:
    from bloomery.base.accelerator import pick_device
    from bloomery.checkpoint.load import load_model, read_checkpoint
    from bloomery.cli.inspect import opened_run
    from bloomery.data.inspect import first_position
    from bloomery.verify import causes

    words = argparse.Namespace(recipe=recipe_of_run(args.run), overrides=[], run_dir=args.run)
    with opened_run(words) as (_, plan, data):
        check_range("there is no step", [args.step], 1, plan.train_steps)
        known = plan.batch.first_step_reaching(first_position(data.train) + 1)
        check_range("the run has changed its data since step", [args.step], known, plan.train_steps)
        first, folder = max(known, args.step - args.before), causes.checkpoint_before(args.run, args.step)
        with_model = folder is not None and not args.no_model
        model = load_model(read_checkpoint(folder), device=pick_device(args.device)) if folder and with_model else None
        documents = list(causes.documents_read(data, plan, first, args.step, model))
    order = causes.by_excess(documents)
    numbers = causes.recorded(args.run)
    facts = {
        "run": str(args.run),
        "step": args.step,
        "recorded": {str(step): numbers[step] for step in range(first, args.step + 1) if step in numbers},
        "losses_by": folder.name if folder and with_model else None,
        "documents": order if args.json else order[: args.documents],
        "documents_read": len(documents),
        "skip": [causes.to_skip(args.run, args.step)],
    }
    return show(args, facts, _explanation)


def _explanation(facts: dict[str, Any]) -> str:
    lines = [f"step {facts['step']:,} of {facts['run']}, and the steps before it"]
    for step, numbers in facts["recorded"].items():
        lines.append(
            f"  recorded at step {step}: {', '.join(f'{name} {value:.5g}' for name, value in numbers.items())}"
        )
    by = f", by what they add to the loss with the weights of {facts['losses_by']}" if facts["losses_by"] else ""
    lines.append(f"{len(facts['documents'])} of the {facts['documents_read']:,} documents that they read{by}:")
    for each in facts["documents"]:
        loss = "" if each["loss"] is None else f"loss {each['loss']:.3f}, "
        span = f"tokens {each['start']:,} to {each['start'] + each['tokens'] - 1:,}"
        where = f"document {each['document']:,} of {each['shard']}, {span}"
        lines.append(f"  {loss}{where}; step {each['step']:,}, sample {each['sample']:,}")
        lines += [f"    | {line}" for line in each["text"].splitlines()[:6]]
    skip = facts["skip"][0]
    lines.append(f"to resume without that data, from a checkpoint before it:\ntrain:\n  skip: [{skip}]")
    lines.append(
        f"the same step again, with the gradient of each weight: bloomery replay {facts['run']} --step {facts['step']}"
    )
    return "\n".join(lines)


def add_arguments_replay(parser: argparse.ArgumentParser) -> None:
    _add_arguments(parser)
    add_overrides(parser, "override fields, such as precision=fp32 or parallel.tp=2")
    parser.add_argument("--output", type=Path, help="keep the replay here; default: a temporary folder")
    add_json(parser)


def run_replay(args: argparse.Namespace) -> int:
    from bloomery.checkpoint.folder import step_of
    from bloomery.cli.main import main
    from bloomery.verify import causes
    from bloomery.verify.compare import RUN, TRACE

    recipe, folder = recipe_of_run(args.run), causes.checkpoint_before(args.run, args.step)
    after = step_of(folder) if folder else 0
    last = min((step for step in causes.recorded(args.run) if step >= args.step), default=args.step)
    with ExitStack() as closing:
        output = args.output or Path(closing.enter_context(tempfile.TemporaryDirectory(prefix="bloomery-replay-")))
        words = ["train", recipe, *_as_many_ranks(args), *args.overrides, f"train.exit_after={last - after} steps"]
        words += ["monitor.tensorboard=false", "--quiet", "--run-dir", str(output / RUN)]
        words += ["--trace", str(output / TRACE), "--trace-steps", "1", "--trace-from", str(args.step)]
        words += ["--from", f"{args.run}@{after}"] if folder else []
        words += ["--device", args.device] if args.device else []
        words += [part for name in _to_change(args.overrides) for part in ("--change", name)]
        with contextlib.redirect_stdout(sys.stderr):
            code = main(words)
        if code:
            return code
        is_same, verdict = causes.compare(args.run, output, after, args.step, exactly=not args.overrides)
        gradients = causes.gradient_norms(output, args.step)
    facts = {
        "step": args.step,
        "from": folder.name if folder else None,
        "same": is_same,
        "verdict": verdict,
        "gradients": gradients,
    }
    if args.json:
        print(strict_json(facts, indent=2))
        return exit_codes.OK
    shown = [("weight", "gradient norm", "largest on rank")]
    shown += [(each["weight"], f"{each['norm']:.5g}", str(each["rank"])) for each in gradients[:10]]
    print(f"step {args.step:,} again, from {facts['from'] or 'the beginning'}\n{columns(shown)}")
    print("\n".join(verdict))
    return exit_codes.OK


def _as_many_ranks(args: argparse.Namespace) -> list[str]:
    """As the run had, where whoever started it chose that and not the recipe."""
    ranks = [event.get("ranks") for event in readable_lines(args.run / names.EVENTS_FILE, **EVENT)
             if event["kind"] == names.Event.START and event["step"] < args.step]  # fmt: skip
    recipe = load_recipe(recipe_of_run(args.run), args.overrides, is_saved=True).recipe
    if args.overrides or not ranks or ranks[-1] in (None, world_size(recipe)):
        return []
    return [f"launch={{on: local, nodes: 1, gpus_per_node: {ranks[-1]}}}"]


def _to_change(overrides: list[str]) -> list[str]:
    """Fields whose change a resume asks to be named."""
    rules = {path: spec.on_resume.kind for path, spec in all_fields().items()}
    fields = [text.partition("=")[0].strip() for text in overrides]
    return [field for field in fields if rules.get(field) not in (None, "free", "fixed")]
