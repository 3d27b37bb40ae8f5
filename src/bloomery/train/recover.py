"""After a spike: back to the last good checkpoint, and on behind its data. After an error: save what can be saved."""

from contextlib import suppress
from dataclasses import replace

from bloomery.base.errors import DataError
from bloomery.base.signals import FIRST_SECONDS, PULSE
from bloomery.checkpoint.folder import step_name
from bloomery.checkpoint.load import Checkpoint, load_pieces, read_checkpoint
from bloomery.checkpoint.retention import good_steps
from bloomery.monitor.names import Event
from bloomery.train.run import Run
from bloomery.train.save import flush_staged_save, report_saves, save, save_if_due
from bloomery.train.state import TrainState
from bloomery.train.step import finish_pending_step
from bloomery.train.stop import StopReason

_MOST = 10
"""Rewinds in a row, each no more than train.stop_after_spike_steps after the one before: the data is not the reason."""


def rewind_or_stop(run: Run, state: TrainState) -> StopReason | None:
    """Asked before every step: go back if that is due, and say why to stop, or None. All ranks call it."""
    if state.spikes.rewind_due is not None:
        rewind(run, state)
    reason = run.stop.reason(state)
    if reason is None or reason.kind != "diverged":
        return reason
    good = _last_good(run, state, tensors=False)  # for people: its tensors are not read
    return replace(reason, last_good=None if good is None else good.folder.name)


def rewind(run: Run, state: TrainState) -> None:
    """Do what train.skip does to the steps since the last good checkpoint: their data counts as consumed, and nothing
    was learned from it. Saves, so that a later start resumes from here. All ranks call it."""
    flush_staged_save(run, finish_pending_step(run, state))
    report_saves(run, state, run.saver.wait())
    watch, target = state.spikes, max(state.step, state.spikes.rewind_due or 0)
    soon = watch.rewound is not None and target - watch.rewound[1] <= run.recipe.train.stop_after_spike_steps
    rewinds = watch.rewinds + 1 if soon else 1
    good = _last_good(run, state)
    if good is None:
        watch.rewind_due = None
        if watch.since == target - 1:  # once for each stretch
            run.journal.warning("there is no good checkpoint to go back to: training continues as it is")
        save_if_due(run, state)
        return
    if rewinds > _MOST:
        text = f"{_MOST} rewinds in a row did not help: step {watch.since} was again far above the recent ones"
        run.stop.request(StopReason("diverged", text))
        return
    step = good.manifest["step"]
    with PULSE.excuse(FIRST_SECONDS):
        load_pieces(good, run.optimizer.pieces(), ranks=run.ranks)
    run.optimizer.follow_masters()
    then = TrainState.from_json(good.state)
    for name in ("held_samples", "skipped_updates", "nan_steps", "nan_steps_in_a_row", "spikes"):
        setattr(state, name, getattr(then, name))
    if state.loss_scale is not None and then.loss_scale is not None:
        state.loss_scale = then.loss_scale
    state.spikes.rewinds, state.spikes.rewound = rewinds, (step, target)
    state.step, state.consumed_samples = target, run.plan.batch.consumed_after_step(target)
    run.feed.seek(state.consumed_samples)
    run.meter.drop()
    run.journal.event(Event.REWIND, target, to=good.folder.name, passed_over=[step + 1, target])
    run.journal.warning(f"back to {good.folder.name}: the data of steps {step + 1:,} to {target:,} is passed over")
    save(run, state)


@PULSE.excuse(FIRST_SECONDS)
def _last_good(run: Run, state: TrainState, *, tensors: bool = True) -> Checkpoint | None:
    found = good_steps(run.durable.root, state.spikes.good_at(state.step - state.nan_steps_in_a_row))
    for step in run.ranks.broadcast(list(found) if run.ranks.rank == 0 else []):
        folder = run.durable.root / step_name(step)
        try:
            return read_checkpoint(folder, ranks=run.ranks, tensors=tensors)
        except DataError as error:
            reasons = [problem.what for problem in error.problems]
            run.journal.event(Event.DAMAGED, state.step, folder=folder.name, reasons=reasons, place=str(folder.parent))
            run.journal.warning(f"{folder} is damaged ({'; '.join(reasons)}). It is not used")
    return None


def rescue_staged_save(run: Run, state: TrainState) -> None:
    """After an error in a step: begin to write the snapshot of the step before, if one was taken. Not with several
    ranks, of which one may be lost."""
    if run.ranks.size == 1:
        with suppress(Exception):  # the error that ends the run is the one to report
            flush_staged_save(run, finish_pending_step(run, state))
