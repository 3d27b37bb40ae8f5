"""When to save, what belongs into a checkpoint, and what to say of it. How it reaches the disk is checkpoint/'s."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import islice
from pathlib import Path

from bloomery.base.pulse import PULSE
from bloomery.base.units import format_seconds
from bloomery.checkpoint.fence import FencedError
from bloomery.checkpoint.folder import complete_checkpoints, step_name, step_of
from bloomery.checkpoint.manifest import SUSPICIOUS
from bloomery.checkpoint.remote import Uploader, UploadOutcome
from bloomery.checkpoint.retention import apply_retention, is_suspicious
from bloomery.checkpoint.save import agreed
from bloomery.checkpoint.saver import SaveOutcome
from bloomery.checkpoint.tiers import Tier
from bloomery.config.recipe import KeepSection
from bloomery.monitor import names
from bloomery.monitor.names import Event
from bloomery.sizing.cadence import Cadence, cadence, seconds_between_failures
from bloomery.train.run import Run
from bloomery.train.spikes import PROOF_STEPS, SpikeWatch
from bloomery.train.state import TrainState
from bloomery.train.step import settle
from bloomery.train.stop import StopReason

_FIRST_AUTO_STEPS = 20
"""`every: auto` knows nothing before its first save."""


def save_if_due(run: Run, state: TrainState) -> None:
    """Asked once after every step: tell what came of saves, and begin one if the plan or a user wants it."""
    hear_of_saves(run, state, run.saver.poll())
    if run.uploader is not None:
        hear_of_uploads(run, run.uploader.poll())
    asked = run.stop.take_save_request()
    if state.spikes.rewind_due is not None:  # it saves when it has gone back
        return
    if asked or run.plan.is_save_step(state.step) or _auto_due(run, state):
        save(run, state)
    elif run.local is not None and _local_due(run, state) and not state.is_suspicious:
        _begin(run, state, run.local)


def save(run: Run, state: TrainState, *, last: bool = False, keep_all: bool = False) -> None:
    """A checkpoint of this step, unless there is one; training goes on while it is written.

    A save that fails is an event and a warning, and training goes on: the older checkpoints are untouched. The `last`
    one of a job is a promise, so it is waited for, and there StorageError is raised. `keep_all`: delete nothing,
    because this state may be worse than the older ones.
    """
    if last:
        hear_of_saves(run, state, run.saver.wait())
        state.saved_step = run.ranks.broadcast(state.saved_step)  # the first one knows what came of it
    if state.step not in (state.saved_step, state.saving_step):
        _begin(run, state, run.durable, keep_all=keep_all)
        if last:
            settle(run, state)
            _wait_for_last_save(run, state)
    if last and run.uploader is not None:
        _wait_for_uploads(run, run.uploader)


def _wait_for_last_save(run: Run, state: TrainState) -> None:
    outcomes = run.saver.wait()
    error = agreed(run.ranks, outcomes[-1].error)
    hear_of_saves(run, state, outcomes, last=True)
    if error is not None:
        raise error.told_once(run.ranks.rank)


def hear_of_saves(run: Run, state: TrainState, outcomes: list[SaveOutcome], *, last: bool = False) -> None:
    """Events and warnings for saves that have come to an end. If this process has lost its run, all stop together."""
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
                run.journal.warning(f"{outcome.error} Training goes on.")
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


def write_picture(run: Run, state: TrainState) -> None:
    """After an error in a step: begin to write the picture of the step before, if one was taken. Not with several
    ranks, of which one may be lost."""
    if run.ranks.size == 1:
        with suppress(Exception):  # the error that ends the run is the one to tell
            settle(run, state)


def _begin(run: Run, state: TrainState, tier: Tier, *, keep_all: bool = False) -> None:
    """Take the picture now, and begin to write it when the numbers of this step are known, which is while the device
    computes the next one. To wait for them here would leave the device idle, and more: on an H200 the main stream,
    once idle, did not start again before the copies beside it were done (0.29 s for 16 GB)."""
    with run.meter.paused():
        run.saver.stage()
    if tier is run.durable:
        state.saving_step = state.begun_step = state.step
    persist = partial(_persist, run, state, tier, keep_all=keep_all)
    if state.pending is None:
        persist()
    else:
        state.pending = replace(state.pending, then=persist)


def _persist(run: Run, state: TrainState, tier: Tier, *, keep_all: bool) -> None:
    if tier is run.durable:
        _choose_cadence(run, state)
    blend = run.blend.state.to_json() if run.blend else None
    suspicious = keep_all or state.is_suspicious
    state.saved_at = max(time.time(), state.saved_at + 1e-3)
    with run.meter.paused():
        run.saver.persist(
            tier.root,
            step=state.step,
            state={**state.to_json(), "interval": run.meter.partial(), "blend": blend},
            recipe_yaml=run.recipe_text,
            writer=tier.writer,
            facts={
                "consumed_samples": state.consumed_samples,
                "consumed_tokens": run.plan.tokens_at(state.consumed_samples),
                "run": run.recipe.name,
                "start": run.start_facts["start"],
                "fingerprint": run.start_facts["fingerprint"],
                "tokenizer": run.start_facts["tokenizer"],
                "shards": run.start_facts["shards"],
                "layout": {"ranks": run.ranks.size, **run.recipe.parallel.model_dump()},
                "time": state.saved_at,
                "validation": state.validation,
                SUSPICIOUS: suspicious,
            },
            parts_root=tier.parts_root,
            after=[run.folder / names.METRICS_FILE, run.folder / names.EVENTS_FILE],
            then=partial(_after_save, run, tier, state.step, spikes=replace(state.spikes), suspicious=suspicious),
            make_room=_room_maker(run, state, tier, suspicious=suspicious),
        )


def _room_maker(run: Run, state: TrainState, tier: Tier, *, suspicious: bool) -> Callable[[], list[str]] | None:
    """What retention would delete after this save, less what this job has loaded or saved: for a save without room for
    it, which otherwise would fail again and again. None where no checkpoint of the place is known to be good. A fast
    place without room for all that it should keep keeps the newest."""
    if tier is not run.durable:
        return partial(apply_retention, tier.root, KeepSection(last=1), writer=tier.writer)
    if suspicious or state.saved_step is None:
        return None
    known = state.saved_step
    uploader, step, spikes = run.uploader, state.step, replace(state.spikes)

    def make_room() -> list[str]:
        protected = uploader.protected() if uploader else ()
        return tier.retain(spare={known, *protected, *islice(good_steps(tier.root, spikes, step), 1)})

    return make_room


def _after_save(run: Run, tier: Tier, step: int, *, spikes: SpikeWatch, suspicious: bool) -> list[str]:
    """In the thread, when a checkpoint is complete: send it away, and delete what need not be kept. The newest one that
    is proven to be good stays, because this one is not yet."""
    uploader = run.uploader if tier is run.durable else None
    if uploader is not None:
        uploader.offer(tier.root / step_name(step), keep_all=suspicious, final=step >= run.plan.train_steps)
    if suspicious:
        return []
    good = islice(good_steps(tier.root, spikes, step), 1 if tier is run.durable else 0)
    return tier.retain(spare={*good, *(uploader.protected() if uploader else ())})


def good_steps(root: Path, spikes: SpikeWatch, step: int) -> Iterator[int]:
    """Complete checkpoints that are proven to be good, the newest first: normal steps followed them, and no rewind gave
    them up. `step`: how far the run is."""
    last = (spikes.since or step + 1) - 1 - PROOF_STEPS
    given_up = range(spikes.rewound[0] + 1, spikes.rewound[1]) if spikes.rewound else range(0)
    found = [path for path in complete_checkpoints(root) if step_of(path) <= last and step_of(path) not in given_up]
    return (step_of(path) for path in reversed(found) if not is_suspicious(path))


def _wait_for_uploads(run: Run, uploader: Uploader) -> None:
    """At the end of a job, for as long as it may last; what is not there by then is told."""
    seconds = min(run.recipe.checkpoint.timeout.seconds, run.stop.seconds_left())
    with PULSE.excuse(seconds):
        outcomes = uploader.wait(seconds)
    hear_of_uploads(run, outcomes)
    for step in sorted(uploader.protected()):
        reason = f"the job ended before it was done, after a wait of {format_seconds(seconds)}"
        run.journal.event(Event.UPLOAD_FAILED, step, reason=reason, to=uploader.to, seconds=seconds)
        run.journal.warning(f"step {step:,} was not copied to {uploader.to}: {reason}. The next start tries the newest")


def hear_of_uploads(run: Run, outcomes: list[UploadOutcome]) -> None:
    for outcome in outcomes:
        if outcome.was_there and not outcome.retention_trouble:
            continue
        facts = {"to": outcome.to, "seconds": outcome.seconds}
        if outcome.error:
            run.journal.event(Event.UPLOAD_FAILED, outcome.step, reason=outcome.error, **facts)
            run.journal.warning(f"step {outcome.step:,} could not be copied to {outcome.to}: {outcome.error}")
        else:
            run.journal.event(Event.UPLOAD, outcome.step, removed=list(outcome.removed), **facts)
        if outcome.retention_trouble:
            run.journal.event(Event.RETENTION_FAILED, outcome.step, reason=outcome.retention_trouble, place=outcome.to)
            run.journal.warning(f"older copies could not be deleted: {outcome.retention_trouble}")


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
    chosen = run.ranks.broadcast(_cadence_as_measured(run, state))
    if chosen is not None and chosen.every_steps != state.auto_every_steps:
        state.auto_every_steps = chosen.every_steps
        run.journal.event(Event.CADENCE, state.step, every_steps=chosen.every_steps, reasoning=chosen.reasoning)
        run.journal.notice(f"checkpoints every {chosen.every_steps:,} steps: {chosen.reasoning}")


def _cadence_as_measured(run: Run, state: TrainState) -> Cadence | None:
    if state.save_costs is None or not run.stop.step_seconds:
        return None
    blocking, persist = state.save_costs
    return cadence(
        blocking_seconds=blocking,
        persist_seconds=persist,
        step_seconds=run.stop.step_seconds,
        failure_seconds=seconds_between_failures(run.recipe.checkpoint.failure_every, num_devices=run.ranks.size),
    )
