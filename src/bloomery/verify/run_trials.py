"""What every rank of `bloomery verify` runs: trials (verify/trials.py), one after the other, with the real training."""

from __future__ import annotations

import json
import sys
import time
import traceback
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

from bloomery.base import exit_codes
from bloomery.base.accelerator import device_of_rank, pick_device
from bloomery.base.errors import BloomeryError
from bloomery.base.ranks import ALONE, Piece, Ranks, first_rank_does, started_as
from bloomery.checkpoint.load import load_pieces, read_state
from bloomery.checkpoint.save import save_checkpoint
from bloomery.config.load import load_recipe
from bloomery.monitor.journal import Journal
from bloomery.monitor.meters import IntervalMeter
from bloomery.monitor.record import StepRecord
from bloomery.parallel.ranks import joined
from bloomery.train.loop import train
from bloomery.train.run import Run
from bloomery.train.setup import prepared_run
from bloomery.train.state import TrainState
from bloomery.train.step import finish_pending_step, train_step
from bloomery.train.trace import Tracer
from bloomery.verify.compare import large_norm, plain_losses, report_reloaded
from bloomery.verify.shrink import SINGLE
from bloomery.verify.trials import (
    FOLLOWED,
    RELOADED,
    RESULT,
    RUN,
    TRACE,
    TRUTH,
    Trial,
    TrialPlan,
    start_folder,
    tidy_folder,
)


def run_trials(arguments: Sequence[str]) -> int:
    """Exit code of a rank: OK when all its trials ended. A trial that fails leaves a file, and ends the process."""
    plan = TrialPlan.read(Path(arguments[0]))
    started = started_as()
    assert started is not None
    device = device_of_rank(pick_device(plan.device), started.local_rank, started.local_size)
    try:
        if started.size == 1:  # the reference has no process group at all
            return _run_each(plan, device, ALONE)
        with joined(started, device) as ranks:
            return _run_each(plan, device, ranks)
    except BloomeryError as error:
        return error.exit_code
    except KeyboardInterrupt:
        return exit_codes.INTERRUPTED
    except Exception:
        return exit_codes.BUG


def _run_each(plan: TrialPlan, device: torch.device, ranks: Ranks) -> int:
    for trial in plan.trials:
        started = time.monotonic()
        try:
            finished = _run(trial, device, ranks)
        except Exception as error:
            _tell(trial, error, ranks)
            raise
        if not finished:
            return exit_codes.INTERRUPTED
        seconds = time.monotonic() - started
        if ranks.rank == 0:
            (Path(trial.folder) / RESULT).write_text(json.dumps({"seconds": seconds}))
            if not plan.quiet:
                what = f"continues from {trial.source}" if trial.resume_from else "trains"
                print(f"{trial.layout} {what}: {seconds:.1f} s", file=sys.stderr)
    return exit_codes.OK


def _run(trial: Trial, device: torch.device, ranks: Ranks) -> bool:
    """Whether it came to its end; if not, somebody interrupted it."""
    recipe = load_recipe(trial.recipe).recipe
    first_rank_does(ranks, lambda: start_folder(trial))
    trace = Tracer(trial.file(TRACE), trial.gradient_steps, trial.sample_steps)
    with prepared_run(recipe, trial.file(RUN), device=device, ranks=ranks, quiet=True, trace=trace) as (run, state):
        if trial.reload:
            _reload(trial, run, state)
        elif trial.layout == SINGLE:
            truth = {"losses": plain_losses(recipe, run.feed.take(), device), "norm": large_norm(device)}
            trial.file(TRUTH).write_text(json.dumps(truth))
            run.feed.seek(state.consumed_samples)
        finished = train(run, state).finished
    first_rank_does(ranks, lambda: tidy_folder(trial))
    return finished


def _reload(trial: Trial, run: Run, state: TrainState) -> None:
    """Load every checkpoint into this layout's own tensors and save what they then hold, all of it in one folder; if
    asked for, also train a few steps from each."""
    pieces = run.optimizer.pieces()
    before = {name: piece.tensor.clone() for name, piece in pieces.items()}
    found: dict[str, Piece] = {}
    followed: dict[str, list[tuple[int, str, float]]] = {}
    for source, folder in trial.reload.items():
        for piece in pieces.values():
            piece.tensor.fill_(float("nan"))  # nothing may remain of what was there
        load_pieces(Path(folder), pieces)
        found |= {f"{source}/{name}": piece.with_tensor(piece.tensor.clone()) for name, piece in pieces.items()}
        if trial.follow_steps:
            followed[source] = _losses_after(Path(folder), run, trial.follow_steps)
    saved = save_checkpoint(trial.file(RELOADED), step=0, pieces=found, state={}, recipe_yaml="", ranks=run.ranks)
    first_rank_does(run.ranks, lambda: report_reloaded(trial, saved))
    first_rank_does(run.ranks, lambda: trial.file(FOLLOWED).write_text(json.dumps(followed)))
    for name, piece in pieces.items():
        piece.tensor.copy_(before[name])
    run.optimizer.restored()
    run.feed.seek(state.consumed_samples)


def _losses_after(checkpoint: Path, run: Run, steps: int) -> list[tuple[int, str, float]]:
    """(step, name, loss) of the steps that follow a checkpoint, whose tensors are loaded. The run's own records know
    nothing of them."""
    run.optimizer.restored()
    state, losses = TrainState.from_json(read_state(checkpoint)), _Losses()
    aside = replace(run, journal=losses, meter=IntervalMeter(), trace=None)
    run.feed.seek(state.consumed_samples)
    for _ in range(steps):
        train_step(aside, state)
        finish_pending_step(aside, state)
    return losses.found


class _Losses(Journal):
    """Keeps what a training would log."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[int, str, float]] = []

    def step(self, record: StepRecord) -> None:
        self.found += [(record.step, name, loss) for name, loss in record.losses.items()]


def _tell(trial: Trial, error: Exception, ranks: Ranks) -> None:
    report = {"rank": ranks.rank, "error": _first_line(error), "details": traceback.format_exc()}
    (Path(trial.folder) / f"error-{ranks.rank}.json").write_text(json.dumps(report))


def _first_line(error: Exception) -> str:
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0]}" if text else type(error).__name__
