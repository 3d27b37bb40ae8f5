"""One optimizer step, and evaluation. Only `finish_pending_step` waits for the device, and that for the step before."""

import itertools
import math
import time
from contextlib import nullcontext
from typing import Any, Literal

import torch
from torch import Tensor

from bloomery.base.doing import doing
from bloomery.base.errors import DivergedError
from bloomery.checkpoint.save import SavePlan
from bloomery.families.family import LM_LOSS
from bloomery.monitor.names import Event
from bloomery.monitor.record import ValidationRecord, perplexity_of
from bloomery.monitor.timers import OPTIMIZER
from bloomery.parallel.runner import StepLosses
from bloomery.train.optimizer import UpdateNumbers
from bloomery.train.run import Run
from bloomery.train.save import flush_staged_save, plan_staged_save
from bloomery.train.spikes import RECOVERY_STEPS, Limits
from bloomery.train.state import PendingStep, TrainState
from bloomery.train.stop import StopReason


def train_step(run: Run, state: TrainState) -> None:
    """Forward, backward and update over one global batch; its numbers are read by the next `finish_pending_step`. While
    the device computes, a checkpoint of the step before begins to be written, if one is due."""
    step, size = state.step + 1, run.plan.batch.global_batch_at(state.consumed_samples)
    if run.plan.is_skipped(step):
        skip_step(run, state)
        return
    if state.loss_scale is not None:  # fp16 needs to know whether the last step overflowed before it scales this one
        flush_staged_save(run, finish_pending_step(run, state))
    scale = state.loss_scale.scale if state.loss_scale else 1.0
    run.profiler.begin(step, requested=run.stop.take_request("profile"))
    run.meter.timers.mark("other")
    batch = run.feed.take()
    assert (batch.first_sample, batch.size) == (state.consumed_samples, size), "loader and loop disagree"
    is_first = not run.meter.slowest_step_seconds
    how = f"{'compiling the model, in' if run.compiles else 'computing'} the first step of this job"
    with doing(how) if is_first else nullcontext():
        losses = run.runner.forward_backward(batch, loss_scale=scale, step=step)
    if run.trace is not None:
        run.trace.step(step, batch, run.runner.gradients, loss_scale=scale)
    flush_staged_save(run, finish_pending_step(run, state))
    lr = run.plan.lr.at(state.lr_samples + size)
    run.saver.wait_staged()  # what a save copies must not change under it
    most = run.limits(state) if run.recipe.train.on_spike == "skip_update" else Limits()
    numbers = run.optimizer.update(
        run.runner.gradients,
        lr=lr,
        loss_scale=scale,
        logs=run.logs_at(step),
        most_norm=most.grad_norm,
        unless=losses.means[LM_LOSS] > most.loss,
    )
    run.meter.timers.mark(OPTIMIZER)
    state.step, state.consumed_samples = step, state.consumed_samples + size
    state.pending = PendingStep(
        step=step,
        consumed_samples=state.consumed_samples,
        global_batch=size,
        lr=lr,
        loss_scale=scale,
        loss_names=list(losses.means),
        sources=run.data.train.keys if losses.by_source is not None else (),
        **_on_its_way_to_the_host(losses, numbers),
    )


def skip_step(run: Run, state: TrainState) -> None:
    """A step of train.skip: its data counts as consumed, nothing is learned from it."""
    flush_staged_save(run, finish_pending_step(run, state))
    if not run.plan.is_skipped(state.step):
        run.journal.event(Event.SKIP, state.step + 1, reason="train.skip", first_sample=state.consumed_samples)
        last = next(step for step in itertools.count(state.step + 1) if not run.plan.is_skipped(step + 1))
        steps = f"step {last:,} is" if last == state.step + 1 else f"steps {state.step + 1:,} to {last:,} are"
        run.journal.notice(f"{steps} skipped, as train.skip says: nothing is learned from their data")
    state.consumed_samples += run.plan.batch.global_batch_at(state.consumed_samples)
    state.step += 1
    run.feed.seek(state.consumed_samples)


def finish_pending_step(run: Run, state: TrainState) -> SavePlan | None:
    """Read the numbers of the step before, count them, judge them, log them. Returns the checkpoint that was staged
    after that step, which is due now. Does nothing when nothing is pending."""
    pending, state.pending = state.pending, None
    if pending is None:
        return None
    values = pending.read()
    losses = dict(zip(pending.loss_names, values, strict=False))
    grad_norm, skipped_flag, num_zeros, params_norm, *by_source = values[len(losses) :]
    skipped = skipped_flag != 0.0
    overflow = not math.isfinite(grad_norm)
    is_nan = not all(math.isfinite(value) for value in losses.values()) or (overflow and state.loss_scale is None)
    state.held_samples += pending.global_batch if skipped else 0
    state.skipped_updates += skipped
    state.nan_steps += is_nan
    state.nan_steps_in_a_row = state.nan_steps_in_a_row + 1 if is_nan else 0
    run.meter.add(
        losses,
        grad_norm=grad_norm,
        num_zeros=None if math.isnan(num_zeros) else num_zeros,
        params_norm=None if math.isnan(params_norm) else params_norm,
        samples=pending.global_batch,
        skipped=skipped,
        nan=is_nan,
        source_losses=pending.source_losses(by_source),
    )
    if skipped:
        run.journal.event(
            Event.SKIPPED_UPDATE,
            pending.step,
            losses=losses,
            grad_norm=grad_norm,
            loss_scale=pending.loss_scale,
            samples=_samples_of(run, pending.step),
        )
    watch_spikes(run, state, pending.step, losses[LM_LOSS], grad_norm)
    if state.nan_steps_in_a_row >= run.recipe.train.stop_after_nan_steps:
        text = f"{state.nan_steps_in_a_row} steps in a row had a loss or gradient that is not a number"
        run.stop.request(StopReason("diverged", text))
    if state.loss_scale is not None:
        try:
            state.loss_scale.update(run.recipe.loss_scale, overflow=overflow)
        except DivergedError as error:
            run.stop.request(StopReason("diverged", str(error)))
    run.log_if_due(pending, state, force=is_nan)
    return plan_staged_save(run, state)


def watch_spikes(run: Run, state: TrainState, step: int, loss: float, grad_norm: float) -> None:
    """Judge a step by those before it, and report what changes."""
    watch, limits, section = state.spikes, run.limits(state), run.recipe.train
    is_first, chance = watch.since is None, math.log(run.recipe.model.vocab_size)
    if watch.follow(step, loss, grad_norm, limits, factor=section.spike_factor, chance=chance):
        facts = {"loss": loss, "loss_limit": limits.loss, "grad_norm": grad_norm, "grad_norm_limit": limits.grad_norm}
        run.journal.event(Event.SPIKE, step, **facts, action=section.on_spike, samples=_samples_of(run, step))
        if section.on_spike == "rewind" and step < run.plan.train_steps:
            watch.rewind_due = watch.rewind_due or step + 1
        if is_first:
            run.journal.warning(
                f"step {step:,} is a spike: loss {loss:.4g} (limit {limits.loss:.4g}), gradient norm {grad_norm:.4g} "
                f"(limit {limits.grad_norm:.4g}). No checkpoint is deleted until {RECOVERY_STEPS} normal steps follow"
            )
    elif not is_first and watch.since is None:
        run.journal.event(Event.SPIKE_OVER, step)
        run.journal.notice(f"step {step:,}: loss and gradient norm are normal again")


def _samples_of(run: Run, step: int) -> list[int]:
    """The first and the last, for `bloomery explain` and `inspect sample`."""
    return [run.plan.batch.consumed_after_step(step - 1), run.plan.batch.consumed_after_step(step) - 1]


def evaluate(run: Run, state: TrainState, part: Literal["validation", "test"] = "validation") -> None:
    """Evaluate each group once and log it. Does nothing for a recipe without such data."""
    flush_staged_save(run, finish_pending_step(run, state))
    main_losses: list[float] = []
    with run.meter.evaluating(), doing("evaluating") as work:
        for group, stream in (run.data.validation if part == "validation" else run.data.test).items():
            total: Tensor | None = None
            names: list[str] = []
            batches = 0
            work.what, work.share = f"evaluating {group}", None
            for batch in run.evaluation_batches(stream, work):
                found = run.runner.evaluate(batch)
                total = found.double() if total is None else total + found
                names, batches = list(batch.counts), batches + 1
            assert total is not None, "set-up refuses empty groups"
            sums, counts = total.tolist()  # sync: evaluation is off the training path
            losses = {name: sums[i] / counts[i] for i, name in enumerate(names)}
            main_losses.append(losses[LM_LOSS])
            run.journal.record(
                ValidationRecord(
                    step=state.step,
                    consumed_samples=state.consumed_samples,
                    consumed_tokens=run.plan.tokens_at(state.consumed_samples),
                    consumed_gigaflops=run.gigaflops_at(state.consumed_samples),
                    group=group,
                    part=part,
                    losses=losses,
                    perplexity=perplexity_of(losses[LM_LOSS]),
                    batches=batches,
                    job=run.job,
                    time=time.time(),
                )
            )
    if main_losses and part == "validation":
        state.validation = {"step": state.step, "loss": sum(main_losses) / len(main_losses)}


def _on_its_way_to_the_host(losses: StepLosses, numbers: UpdateNumbers) -> dict[str, Any]:
    """The step's numbers as one small copy that nobody waits for, and the event that says when it has arrived."""
    scalars = [*losses.means.values(), numbers.grad_norm, numbers.skipped, numbers.num_zeros, numbers.params_norm]
    values = torch.stack([scalar.to(torch.float32) for scalar in scalars])
    if losses.by_source is not None:
        values = torch.cat([values, losses.by_source.flatten()])
    if values.device.type == "cpu":
        return {"values": values, "ready": None}
    ready = torch.Event(values.device)
    values = values.to("cpu", non_blocking=True)
    ready.record()
    return {"values": values, "ready": ready}
