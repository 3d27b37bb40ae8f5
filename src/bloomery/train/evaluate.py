"""Loss and perplexity of every named validation group, always over the same samples."""

from __future__ import annotations

import time

from bloomery.data.batch import read_batch
from bloomery.model.loss import LM_LOSS
from bloomery.monitor.record import ValidationRecord, perplexity_of
from bloomery.train.run import Run
from bloomery.train.state import TrainState
from bloomery.train.step import settle


def evaluate(run: Run, state: TrainState) -> None:
    """Evaluate each group once and log it. Does nothing for a recipe without validation data."""
    settle(run, state)
    size = run.recipe.batch.micro_batch_size
    started = time.monotonic()
    main_losses: list[float] = []
    with run.meter.paused():
        for group, source in run.validation.items():
            sums: dict[str, float] = {}
            counts: dict[str, int] = {}
            batches = run.validation_samples[group] // size
            for i in range(batches):
                batch = read_batch(source, i * size, size, micro_batch_size=size)
                for name, total in run.runner.evaluate(batch).items():
                    sums[name] = sums.get(name, 0.0) + total.item()  # sync: evaluation is off the training path
                    counts[name] = counts.get(name, 0) + batch.counts[name]
            losses = {name: sums[name] / counts[name] for name in sums}
            main_losses.append(losses[LM_LOSS])
            run.journal.validation(
                ValidationRecord(
                    step=state.step,
                    consumed_samples=state.consumed_samples,
                    consumed_tokens=state.consumed_samples * run.plan.seq_length,
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
    run.stop.time_evaluation(time.monotonic() - started)
