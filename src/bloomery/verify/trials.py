"""Trainings to compare, of one layout each: starting their ranks, and what every rank runs: the real training loop."""

from __future__ import annotations

import json
import shutil
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from bloomery.base import doing, exit_codes
from bloomery.base.accelerator import device_of_rank, pick_device
from bloomery.base.errors import BloomeryError
from bloomery.base.ranks import ALONE, Piece, Ranks, agreed, started_as
from bloomery.checkpoint.load import load_pieces, read_checkpoint
from bloomery.checkpoint.save import save_checkpoint
from bloomery.launch.local import run_local_ranks
from bloomery.parallel.ranks import joined
from bloomery.sizing.check import load_checked_recipe
from bloomery.train.loop import train
from bloomery.train.run import Run
from bloomery.train.setup import prepared_run
from bloomery.train.trace import Tracer
from bloomery.verify.compare import RUN, TRACE, TRUTH, large_norm, plain_losses

SINGLE = "single"
"""The reference: one rank, one micro-batch, no process group."""
GRADIENT_STEPS = 2


@dataclass(frozen=True)
class Trial:
    """One training of one layout: from the beginning, or from another layout's checkpoint."""

    layout: str
    world: int
    folder: Path
    recipe: Path
    overrides: Sequence[str]
    steps: int
    source: Trial | None = None
    """From whose checkpoint it resumes."""
    reload: Sequence[Trial] = ()
    """The checkpoint of each is loaded and saved again after the training."""

    @property
    def reloaded(self) -> Path:
        return self.folder / "reloaded" / "step-00000000"

    @property
    def checkpoint(self) -> Path:
        """The one in the middle, for other layouts to load."""
        return self.folder / RUN / "checkpoints" / f"step-{middle(self.steps):08d}"


def middle(steps: int) -> int:
    """The step whose checkpoint is resharded and continued from."""
    return max(1, steps // 2)


@dataclass(frozen=True)
class Outcome:
    seconds: float
    error: str = ""
    """Why it did not come to its end; empty if it did."""
    details: str = ""
    """The traceback of the rank that failed first."""


RankCommand = Callable[[Trial, str, Sequence[str]], int]
"""What every rank runs: `run_trial`."""


def run_all(trials: Sequence[Trial], command: RankCommand, *, device: str, quiet: bool) -> dict[Path, Outcome]:
    """The outcome of each trial, by its folder."""
    outcomes: dict[Path, Outcome] = {}
    for trial in trials:
        trial.folder.mkdir()
        began = time.monotonic()
        preload = ["bloomery.verify.trials", "bloomery.parallel.pipeline", "torch.distributed.fsdp"]
        with doing.doing(f"{trial.layout} trains, {len(outcomes) + 1} of {len(trials)}"):
            code = run_local_ranks(trial.world, partial(command, trial, device), [], preload=preload)
        if code == exit_codes.INTERRUPTED:
            raise KeyboardInterrupt
        seconds = time.monotonic() - began
        outcomes[trial.folder] = Outcome(seconds, *_failure(trial, code))
        if not quiet:
            what = f"continues from {trial.source.layout}" if trial.source else "trains"
            print(f"{trial.layout} {what}: {seconds:.1f} s", file=sys.stderr)
    return outcomes


def _failure(trial: Trial, code: int) -> tuple[str, str]:
    """Error and traceback of the rank that failed first: the others lost this one."""
    errors = sorted(trial.folder.glob("error-*.json"), key=lambda path: path.stat().st_mtime_ns)
    if errors:
        error, details = json.loads(errors[0].read_text())
        return error, details
    return ("" if code == exit_codes.OK else f"its ranks ended with exit code {code} and left no word", "")


def run_trial(trial: Trial, device_name: str, arguments: Sequence[str] = ()) -> int:
    """Exit code of a rank. One that fails leaves a file."""
    doing.is_quiet = True  # the command reports each training
    started = started_as()
    assert started is not None
    device = device_of_rank(pick_device(device_name), started.local_rank, started.local_size)
    try:
        # The reference has no process group at all.
        with joined(started, device) if started.size > 1 else nullcontext(ALONE) as ranks:
            return exit_codes.OK if _train(trial, device, ranks) else exit_codes.INTERRUPTED
    except Exception as error:
        text = next(iter(str(error).strip().splitlines()), "")
        report = (f"rank {started.rank}: {type(error).__name__}: {text}".removesuffix(": "), traceback.format_exc())
        (trial.folder / f"error-{started.rank}.json").write_text(json.dumps(report))
        return error.exit_code if isinstance(error, BloomeryError) else exit_codes.BUG


def _train(trial: Trial, device: torch.device, ranks: Ranks) -> bool:
    """Whether it came to its end; if not, somebody interrupted it."""
    recipe, run_folder = load_checked_recipe(str(trial.recipe), trial.overrides).recipe, trial.folder / RUN
    if trial.source is not None:
        with agreed(ranks):
            if ranks.rank == 0:
                checkpoint = trial.source.checkpoint
                shutil.copytree(checkpoint, run_folder / "checkpoints" / checkpoint.name)
    trace = Tracer(trial.folder / TRACE, 0 if trial.source else GRADIENT_STEPS, trial.steps)
    with prepared_run(recipe, run_folder, device=device, ranks=ranks, quiet=True, trace=trace) as (run, state):
        if trial.layout == SINGLE and not trial.source:
            truth = {"losses": plain_losses(recipe, run.feed.take(), device), "norm": large_norm(device)}
            (trial.folder / TRUTH).write_text(json.dumps(truth))
            run.feed.seek(state.consumed_samples)
        finished = train(run, state).finished
        if finished and trial.reload:
            _reload(trial, run)
        return finished


def _reload(trial: Trial, run: Run) -> None:
    """Load every checkpoint into this layout's own tensors, and save what they then hold, all in one checkpoint."""
    pieces = run.optimizer.pieces()
    found: dict[str, Piece] = {}
    for source in trial.reload:
        for piece in pieces.values():
            piece.tensor.fill_(float("nan"))  # nothing may remain of what was there
        load_pieces(read_checkpoint(source.checkpoint, tensors=False), pieces)
        found |= {f"{source.layout}/{name}": each.with_tensor(each.tensor.clone()) for name, each in pieces.items()}
    save_checkpoint(trial.reloaded.parent, step=0, pieces=found, state={}, recipe_yaml="", ranks=run.ranks)
