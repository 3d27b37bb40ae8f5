"""Every so many steps: the loss of every validation group, always over the same samples; do all ranks hold the same?"""

from __future__ import annotations

import time

from torch import Tensor

from bloomery.base.losses import LM_LOSS
from bloomery.monitor.names import Event
from bloomery.monitor.record import ValidationRecord, perplexity_of
from bloomery.parallel.sentinel import find_drift
from bloomery.train.run import Run
from bloomery.train.save import flush_staged_save
from bloomery.train.state import TrainState
from bloomery.train.step import finish_pending_step
from bloomery.train.stop import StopReason


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


def watch_drift(run: Run, state: TrainState) -> None:
    """Compare the ranks, if it is time, and act as monitor.drift says: stop before the next step, or warn."""
    watch = run.recipe.monitor.drift
    if watch is None or run.ranks.size == 1 or state.step % watch.every.count:
        return
    facts = {
        "the step": state.step,
        "the position in the data": state.consumed_samples,
        "the learning rate's position": state.lr_samples,
        "the loss scale": state.loss_scale.scale if state.loss_scale else None,
        "the watch for spikes": state.spikes,
        "the seed": run.recipe.seed,
    }
    drifts = find_drift(run.ranks, run.optimizer.shared_pieces(), facts)
    if not drifts:
        return
    more = f", and {len(drifts) - 3} more" if len(drifts) > 3 else ""
    text = "ranks have drifted apart: " + "; ".join(map(str, drifts[:3])) + more
    names = [{"name": drift.name, "ranks": drift.ranks, "others": drift.others} for drift in drifts]
    run.journal.event(Event.DRIFT, state.step, action=watch.action, drifts=names)
    if watch.action == "stop":
        run.stop.request(StopReason("drift", text))
    else:
        run.journal.warning(f"at step {state.step:,} {text}. Training continues, as monitor.drift.action says.")
