"""Loss and perplexity of every named validation group, always over the same samples."""

from __future__ import annotations

import time

from torch import Tensor

from bloomery.base.losses import LM_LOSS
from bloomery.monitor.record import ValidationRecord, perplexity_of
from bloomery.train.run import Run
from bloomery.train.save import flush_staged_save
from bloomery.train.state import TrainState
from bloomery.train.step import finish_pending_step


def evaluate(run: Run, state: TrainState) -> None:
    """Evaluate each group once and log it. Does nothing for a recipe without validation data."""
    flush_staged_save(run, finish_pending_step(run, state))
    main_losses: list[float] = []
    with run.meter.evaluating():
        for group in run.data.validation:
            total: Tensor | None = None
            names: list[str] = []
            batches = 0
            for batch in run.validation_batches(group):
                found = run.runner.evaluate(batch)
                total = found.double() if total is None else total + found
                names, batches = list(batch.counts), batches + 1
            assert total is not None, "set-up refuses empty groups"
            sums, counts = total.tolist()  # sync: evaluation is off the training path
            losses = {name: sums[i] / counts[i] for i, name in enumerate(names)}
            main_losses.append(losses[LM_LOSS])
            run.journal.validation(
                ValidationRecord(
                    step=state.step,
                    consumed_samples=state.consumed_samples,
                    consumed_tokens=run.plan.tokens_at(state.consumed_samples),
                    consumed_gigaflops=run.gigaflops_at(state.consumed_samples),
                    group=group,
                    losses=losses,
                    perplexity=perplexity_of(losses[LM_LOSS]),
                    batches=batches,
                    job=run.job,
                    time=time.time(),
                )
            )
    if main_losses:
        state.validation = {"step": state.step, "loss": sum(main_losses) / len(main_losses)}
