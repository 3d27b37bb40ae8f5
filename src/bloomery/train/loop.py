"""START HERE. The training loop: step, evaluate, save, stop.

`Run` (run.py) holds the parts and never changes; `TrainState` (state.py) is all that does. A step is in step.py, how
the parts are built in setup.py, why a run stops in stop.py.
"""

from bloomery.base.errors import BloomeryError, DataError
from bloomery.monitor.names import Event
from bloomery.train.drift import watch_drift
from bloomery.train.recover import rescue_staged_save, rewind_or_stop
from bloomery.train.run import Run
from bloomery.train.save import flush_staged_save, save_if_due, save_last
from bloomery.train.state import TrainState
from bloomery.train.step import evaluate, finish_pending_step, train_step
from bloomery.train.stop import StopReason


def train(run: Run, state: TrainState) -> StopReason:
    """Train until a rule says stop; all is saved and reported when this returns, or raises what went wrong."""
    first_step = state.step
    failure: BloomeryError | None = None
    run.journal.event(Event.START, first_step, **run.start_facts)
    with run.stop.listening():
        try:
            while (stop := rewind_or_stop(run, state)) is None:
                train_step(run, state)
                watch_drift(run, state)
                if run.evaluates_at(state.step):
                    evaluate(run, state)
                save_if_due(run, state)
        except DataError as error:  # before this step changed anything: what was learned so far is saved
            stop, failure = StopReason("error", str(error), None if state.step else error), error
        except Exception:
            rescue_staged_save(run, state)
            raise
        if stop.error is not None:  # nothing may be saved, or nothing was learned
            raise stop.error
        flush_staged_save(run, finish_pending_step(run, state))
        if stop.finished and state.step > first_step:
            if not run.evaluates_at(state.step):
                evaluate(run, state)
            evaluate(run, state, "test")
        save_last(run, state)
        run.count_energy(state, fresh=True)
        run.journal.event(Event.STOP, state.step, **stop.facts(), energy=state.energy.to_json())
        run.journal.notice(f"stopped at step {state.step:,}: {stop.text.rstrip('.')}. Saved in {run.folder}")
        if failure := failure or run.stop.failure(stop, state.step):
            raise failure
    return stop
