"""Everything that must survive a restart and is not a tensor, in one small record."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from functools import cache
from typing import Annotated, Any, get_type_hints

from pydantic import Field, TypeAdapter
from torch import Tensor

from bloomery.base.units import Energy
from bloomery.checkpoint.retention import Tier
from bloomery.sizing.schedule import NO_HISTORY, History
from bloomery.train.optimizer import LossScale
from bloomery.train.spikes import SpikeWatch

_adapter = cache(TypeAdapter)
_NOT_SAVED = ("pending", "staged", "saved_at", "saved_step", "saving_step", "begun_step")


@dataclass(frozen=True)
class PendingStep:
    """A step whose numbers the device is still computing. finish_pending_step reads them while the next one runs."""

    step: int
    consumed_samples: int
    """After this step."""
    global_batch: int
    lr: float
    loss_scale: float
    loss_names: list[str]
    values: Tensor
    """Losses by loss_names, the gradient norm, 1.0 if the update was skipped, the zeros among the gradients, the norm
    of the weights, and of a blend the sum of the loss of each source and the tokens of each; on its way to the host."""
    sources: Sequence[str]
    """The names of those sources; empty without a blend."""
    ready: Any
    """Event that says when `values` has arrived; None on a CPU."""

    def read(self) -> list[float]:
        if self.ready is not None:
            self.ready.synchronize()  # sync: with a step that ended while the next one was computing
        values: list[float] = self.values.tolist()
        return values

    def source_losses(self, values: Sequence[float]) -> dict[str, tuple[float, int]]:
        """(sum of the loss, valid tokens) of each source that took part."""
        totals, tokens = values[: len(self.sources)], values[len(self.sources) :]
        found = zip(self.sources, totals, tokens, strict=True)
        return {source: (total, int(count)) for source, total, count in found if count}


@dataclass
class TrainState:
    """The only thing the loop changes."""

    step: int = 0
    """Steps done, skipped ones included."""
    consumed_samples: int = 0
    """Samples taken from the data, skipped ones included: the position in the order."""
    held_samples: int = 0
    """Samples of updates that were skipped for their numbers: they do not advance the learning rate."""
    skipped_updates: int = 0
    nan_steps: int = 0
    nan_steps_in_a_row: int = 0
    loss_scale: LossScale | None = None
    spikes: SpikeWatch = field(default_factory=SpikeWatch)
    history: History = NO_HISTORY
    """Of a run that has changed its batch or its sequence length; changes only when a job starts."""
    save_seconds: Annotated[float, Field(ge=0, le=1e6)] | None = None
    """The longest save so far, for the deadline; None before the first."""
    energy: Energy = field(default_factory=Energy)
    """What the run has spent so far, on all ranks and in all jobs."""
    imported_from: dict[str, str] | None = None
    """The model that the run began with; None if it began with random weights."""
    pending: PendingStep | None = field(default=None, repr=False)
    staged: Tier | None = field(default=None, repr=False)
    """Where the snapshot goes that was taken after the pending step: it is written when the numbers of that step are
    known. Not saved itself."""
    validation: dict[str, int | float] | None = None
    """The newest validation: `step`, and `loss`, the mean over its groups."""
    auto_every_steps: int | None = None
    """Of `every: auto`, as decided last."""
    save_costs: tuple[float, float] | None = None
    """(blocking seconds, persist seconds) of the newest save."""
    saved_at: float = 0.0
    """Unix time of the newest checkpoint, as in its manifest. Never goes back, so that the newest branch of a run is
    the one saved last; not saved itself."""
    saved_step: int | None = None
    """The step of the newest checkpoint; not saved itself."""
    saving_step: int | None = None
    """The step whose checkpoint is being written; not saved itself."""
    begun_step: int = 0
    """The step of the newest checkpoint that was begun, also if it failed; not saved itself."""

    @property
    def is_suspicious(self) -> bool:
        """Whether it may be worse than that of older checkpoints."""
        return self.nan_steps_in_a_row > 0 or self.spikes.since is not None

    @property
    def lr_samples(self) -> int:
        return self.consumed_samples - self.held_samples

    def to_json(self) -> dict[str, Any]:
        assert self.pending is None, "finish the pending step before saving"
        facts = asdict(self)
        return {name: value for name, value in facts.items() if name not in _NOT_SAVED}

    @classmethod
    def from_json(cls, facts: dict[str, Any]) -> TrainState:
        """ValueError where a value is not of its type, LookupError for one that is not known."""
        kinds = {
            name: kind for name, kind in get_type_hints(cls, include_extras=True).items() if name not in _NOT_SAVED
        }
        own = {name: value for name, value in facts.items() if name not in ("interval", "blend")}
        own |= {name: own.get(name) or {} for name in ("history", "energy", "spikes")}  # earlier versions have none
        state = cls(**{name: _adapter(kinds[name]).validate_python(value) for name, value in own.items()})
        if state.loss_scale is not None and not 0 < state.loss_scale.scale < math.inf:
            raise ValueError(f"the loss scale is {state.loss_scale.scale}")
        state.saved_step = state.begun_step = state.step
        return state
