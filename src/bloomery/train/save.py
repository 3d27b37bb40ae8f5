"""When to save, what belongs into a checkpoint, and the reports. How it reaches the disk: checkpoint/save.py."""

import time

from bloomery.base.doing import doing
from bloomery.base.signals import PULSE
from bloomery.base.units import format_seconds
from bloomery.checkpoint.folder import LATEST_TIME, SUSPICIOUS, FencedError
from bloomery.checkpoint.remote import Uploader, UploadOutcome
from bloomery.checkpoint.retention import Retention, Tier
from bloomery.checkpoint.save import SaveOutcome, SavePlan, raise_together
from bloomery.config.load import as_yaml
from bloomery.monitor import names
from bloomery.monitor.names import Event
from bloomery.sizing.schedule import Cadence, cadence, seconds_between_failures
from bloomery.train.run import Run
from bloomery.train.state import TrainState
from bloomery.train.stop import StopReason

_FIRST_AUTO_STEPS = 20
"""`every: auto` knows nothing before its first save."""


def save_if_due(run: Run, state: TrainState) -> None:
    """Called once after every step: report finished saves, and begin one if the plan or control/save requests it."""
    report_saves(run, state, run.saver.poll())
    if run.uploader is not None:
        report_uploads(run, run.uploader.poll())
    if state.spikes.rewind_due is not None:  # it saves after the rewind, or calls this again
        return
    if run.stop.take_request("save") or run.plan.is_save_step(state.step) or _auto_due(run, state):
        _choose_cadence(run, state)
        save(run, state)
    elif run.local is not None and _local_due(run, state) and not state.is_suspicious:
        _stage(run, state, run.local)


def save(run: Run, state: TrainState) -> None:
    """A checkpoint of this step, unless there is one; training continues while it is written. If it fails, that is an
    event and a warning, and training continues: the older checkpoints are untouched."""
    if state.step not in (state.saved_step, state.saving_step):
        _stage(run, state, run.durable)


def save_last(run: Run, state: TrainState) -> None:
    """The checkpoint that a job ends with is a promise: an asynchronous save and a wait, StorageError if it fails."""
    with doing("waiting for the checkpoint that is being written"):
        report_saves(run, state, run.saver.wait())
    state.saved_step = run.ranks.broadcast(state.saved_step)  # rank 0 knows the outcome
    if state.step not in (state.saved_step, state.saving_step):
        with doing(f"saving step {state.step:,}"):
            save(run, state)
            outcomes = run.saver.wait()
        report_saves(run, state, outcomes, last=True)
        raise_together(run.ranks, outcomes[-1].error)
    if run.uploader is not None:
        _wait_for_uploads(run, run.uploader)


def report_saves(run: Run, state: TrainState, outcomes: list[SaveOutcome], *, last: bool = False) -> None:
    """Events and warnings for saves that have ended. If a newer start has taken over, all ranks stop together."""
    for outcome in outcomes:
        durable = outcome.folder.parent == run.durable.root
        if state.saving_step == outcome.step:
            state.saving_step = None
        if outcome.error is not None:
            if isinstance(outcome.error, FencedError):  # the ledger is the newer start's
                run.stop.request(StopReason("error", str(outcome.error), outcome.error))
                continue
            run.journal.event(Event.SAVE_FAILED, outcome.step, reason=str(outcome.error), removed=list(outcome.removed))
            if not last:
                run.journal.warning(f"{outcome.error} Training continues.")
            continue
        seconds = outcome.blocking_seconds + outcome.persist_seconds
        if durable:
            state.saved_step = outcome.step
            state.save_seconds = max(seconds, state.save_seconds or 0.0)
            state.save_costs = (outcome.blocking_seconds, outcome.persist_seconds)
        if outcome.retention_trouble:
            run.journal.event(Event.RETENTION_FAILED, outcome.step, reason=outcome.retention_trouble)
            run.journal.warning(f"older checkpoints could not be deleted: {outcome.retention_trouble}")
        run.journal.event(
            Event.SAVE,
            outcome.step,
            folder=outcome.folder.name,
            tier="durable" if durable else "local",
            seconds=seconds,
            blocking_seconds=outcome.blocking_seconds,
            persist_seconds=outcome.persist_seconds,
            bytes=outcome.bytes,
            removed=list(outcome.removed),
        )


def _stage(run: Run, state: TrainState, tier: Tier) -> None:
    """Take the snapshot now, and begin to write it when the numbers of this step are known, which is while the device
    computes the next one. To wait for them here would leave the device idle, and more: on an H200 the main stream,
    once idle, did not start again before the copies beside it were done (0.29 s for 16 GB)."""
    with run.meter.paused("save"):
        run.saver.stage()
    if run.carbon is not None:
        run.carbon.flush()
    if tier is run.durable:
        state.saving_step = state.begun_step = state.step
    state.staged = tier
    if state.pending is None:
        flush_staged_save(run, plan_staged_save(run, state))


def plan_staged_save(run: Run, state: TrainState) -> SavePlan | None:
    """The checkpoint that is staged, now that the numbers of its step are counted; None if there is none."""
    tier, state.staged = state.staged, None
    if tier is None:
        return None
    is_durable = tier is run.durable
    run.count_energy(state)
    suspicious = state.is_suspicious or run.stop.is_failing
    state.saved_at = min(max(time.time(), state.saved_at + 1e-3), LATEST_TIME)
    blend = run.data.blend.state.to_json() if run.data.blend else None
    return SavePlan(
        tier=tier,
        step=state.step,
        state={**state.to_json(), "interval": run.meter.partial(), "blend": blend},
        recipe_yaml=as_yaml(run.recipe),
        facts={
            "consumed_samples": state.consumed_samples,
            "consumed_tokens": run.plan.tokens_at(state.consumed_samples),
            "run": run.recipe.name,
            **{name: run.start_facts[name] for name in ("start", "fingerprint", "tokenizer", "shards")},
            "layout": {"ranks": run.ranks.size, **run.recipe.parallel.model_dump()},
            "time": state.saved_at,
            "validation": state.validation,
            SUSPICIOUS: suspicious,
        },
        after=[run.folder / names.METRICS_FILE, run.folder / names.EVENTS_FILE],
        retention=Retention(
            tier,
            uploader=run.uploader if is_durable else None,
            known=state.saved_step,
            is_good=state.spikes.good_at(state.step - state.nan_steps_in_a_row) if is_durable else None,
            is_suspicious=suspicious,
            is_final=state.step >= run.plan.train_steps,
        ),
    )


def flush_staged_save(run: Run, plan: SavePlan | None) -> None:
    """Begin to write a checkpoint that is due, if one is."""
    if plan is not None:
        with run.meter.paused("save"):
            run.saver.persist(plan)


def _wait_for_uploads(run: Run, uploader: Uploader) -> None:
    """At the end of a job, for as long as it may last; what is not copied by then is reported."""
    seconds = min(run.recipe.checkpoint.timeout.seconds, run.stop.seconds_left())
    with PULSE.excuse(seconds), doing(f"copying checkpoints to {uploader.to}"):
        outcomes = uploader.wait(seconds)
    report_uploads(run, outcomes)
    for step in sorted(uploader.protected()):
        reason = f"the job ended before it was done, after a wait of {format_seconds(seconds)}"
        run.journal.event(Event.UPLOAD_FAILED, step, reason=reason, to=uploader.to, seconds=seconds)
        run.journal.warning(f"step {step:,} was not copied to {uploader.to}: {reason}. The next start tries the newest")


def report_uploads(run: Run, outcomes: list[UploadOutcome]) -> None:
    for outcome in outcomes:
        if outcome.was_there:
            continue
        facts = {"to": outcome.to, "seconds": outcome.seconds}
        if outcome.error:
            run.journal.event(Event.UPLOAD_FAILED, outcome.step, reason=outcome.error, **facts)
            run.journal.warning(f"step {outcome.step:,} could not be copied to {outcome.to}: {outcome.error}")
        else:
            run.journal.event(Event.UPLOAD, outcome.step, **facts)


def _local_due(run: Run, state: TrainState) -> bool:
    local = run.recipe.checkpoint.local
    return local is not None and state.step % local.every.count == 0 and state.step != state.saved_step


def _auto_due(run: Run, state: TrainState) -> bool:
    every = state.auto_every_steps or _FIRST_AUTO_STEPS
    return run.plan.decides_saves_at(state.step) and state.step - state.begun_step >= every


def _choose_cadence(run: Run, state: TrainState) -> None:
    """Decide, at a save of `every: auto`, when the next one will be, from what the saves before have cost."""
    if not run.plan.decides_saves_at(state.step):
        return
    chosen: Cadence | None = None
    if state.save_costs is not None and run.meter.step_seconds:
        failure_seconds = seconds_between_failures(run.recipe.checkpoint.failure_every, num_devices=run.ranks.size)
        blocking, persist = state.save_costs
        chosen = cadence(
            blocking_seconds=blocking,
            persist_seconds=persist,
            step_seconds=run.meter.step_seconds,
            failure_seconds=failure_seconds,
        )
    chosen = run.ranks.broadcast(chosen)
    if chosen is not None and chosen.every_steps != state.auto_every_steps:
        state.auto_every_steps = chosen.every_steps
        run.journal.event(Event.CADENCE, state.step, every_steps=chosen.every_steps, reasoning=chosen.reasoning)
        run.journal.notice(f"checkpoints every {chosen.every_steps:,} steps: {chosen.reasoning}")
