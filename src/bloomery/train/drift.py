"""Every so many steps: do all ranks still hold the same?"""

from __future__ import annotations

from bloomery.monitor.names import Event
from bloomery.parallel.sentinel import find_drift
from bloomery.train.run import Run
from bloomery.train.state import TrainState
from bloomery.train.stop import StopReason


def watch_drift(run: Run, state: TrainState) -> None:
    """Compare, if it is time, and act as monitor.drift says: stop before the next step, or warn."""
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
