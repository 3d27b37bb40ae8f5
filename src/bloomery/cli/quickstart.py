"""`bloomery quickstart`: everything once, each part by the command a user would type."""

import argparse
from pathlib import Path

from bloomery.base import exit_codes, signals
from bloomery.base.units import format_seconds
from bloomery.cli.arguments import add_device, add_overrides, load
from bloomery.config.recipe import Recipe
from bloomery.sizing.schedule import TrainingPlan

PROMPT = "def read(self, "


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_overrides(parser)
    parser.add_argument("--run-dir", type=Path, default=Path("runs/quickstart"), help="folder of the run")
    add_device(parser)


def run(args: argparse.Namespace) -> int:
    args.recipe = "quickstart"
    recipe = load(args).recipe
    chapters = _chapters(recipe, args)
    from bloomery.cli.main import main

    for number, (title, commands) in enumerate(chapters.items(), 1):
        print(f"\n[{number}/{len(chapters) + 1}] {title}", flush=True)
        for command in commands:
            if code := main(command):
                return code
            if signals.requested:  # training has saved and returned
                print("quickstart ends here, because training was stopped. Run it again to resume.")
                return exit_codes.INTERRUPTED
    print(f"\n[{len(chapters) + 1}/{len(chapters) + 1}] Results\n{_results(recipe, args.run_dir)}")
    return exit_codes.OK


def _chapters(recipe: Recipe, args: argparse.Namespace) -> dict[str, list[list[str]]]:
    """The commands of each title."""
    assert recipe.tokenizer is not None
    tokenizer, run_dir, device = recipe.tokenizer.path, str(args.run_dir), ["--device", args.device] * bool(args.device)
    make = ["tokenizer", "train", "python-stdlib", "--vocab-size", str(recipe.model.vocab_size), "--output", tokenizer]
    for_data = [text for text in args.overrides if text.split("=")[0].split(".")[0] in ("seed", "tokenizer", "prepare")]
    train = ["train", "quickstart", *args.overrides, "--run-dir", run_dir, *device]
    half = f"train.exit_after={TrainingPlan.of(recipe).train_steps // 2} steps"
    is_new = not (args.run_dir / "checkpoints" / "latest").is_file()
    return {
        "Tokenizer: byte-level BPE from this Python's own source files": (
            [] if (Path(tokenizer) / "tokenizer.json").is_file() else [make]
        ),
        "Shards": [["prepare", "quickstart", *for_data]],
        "Training: stopped half way, then resumed": [[*train, half], train] if is_new else [train],
        "Export: a Hugging Face folder": [["export", run_dir, str(args.run_dir / "hf")]],
        "A sample": [["generate", run_dir, "--prompt", PROMPT, "--max-new-tokens", "80", *device]],
    }


def _results(recipe: Recipe, folder: Path) -> str:
    """Compare the run with a model that knows only frequencies, note that in the ledger, and write the report."""
    from bloomery.data.inspect import unigram_entropy
    from bloomery.data.shards import ShardReader
    from bloomery.families.family import LM_LOSS
    from bloomery.monitor import names
    from bloomery.monitor.history import read_metrics
    from bloomery.monitor.record import StepRecord
    from bloomery.monitor.report import write_report
    from bloomery.monitor.sinks import EventFile

    assert recipe.data is not None
    with ShardReader(recipe.data.train[0].path) as shard:
        entropy = unigram_entropy(shard)
    records = read_metrics(folder / names.METRICS_FILE)
    last = next((each for each in reversed(records) if not isinstance(each, StepRecord)), records[-1])
    kind = "training" if isinstance(last, StepRecord) else "validation"
    ledger = EventFile(folder / names.EVENTS_FILE, job=last.job)
    ledger.event({"kind": names.Event.NOTE, "step": last.step, "reference_losses": {"unigram entropy": entropy}})
    ledger.close()
    loss = (
        f"{kind} loss {last.losses[LM_LOSS]:.3f} nats per token; the frequency of each token alone gives {entropy:.3f}"
    )
    return (
        f"{loss}\nreport: {write_report(folder)}\ndone in {format_seconds(signals.job_seconds())}; next: docs/tour.md"
    )
