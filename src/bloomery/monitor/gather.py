"""What a run's metrics and events add up to: all that the report shows, its curves thinned to what a screen shows."""

import math
from array import array
from collections import defaultdict, deque
from operator import attrgetter
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bloomery.base.units import Energy
from bloomery.monitor import names
from bloomery.monitor.history import event_of, scan, scan_metrics
from bloomery.monitor.record import Record, StepRecord

Points = NDArray[np.float64]
"""(points, 2): step and value."""
_MOST_POINTS = 1200
"""Of a curve."""
_MOST_KEPT = 2**16
"""Points of a curve before it is thinned."""
_MOST_EVENTS = 1000
_COLUMNS = ("step", "time", "lr", "tokens_per_second", "grad_norm", "tflops", "mfu")
_numbers = attrgetter(*_COLUMNS[:-1])


class Gathered:
    def __init__(self) -> None:
        self.losses: dict[str, Curve] = defaultdict(Curve)
        self.source_losses: dict[str, Curve] = defaultdict(Curve)
        self.validation_losses: dict[tuple[str, str], Curve] = defaultdict(Curve)
        """By group and name."""
        self.last_step: StepRecord | None = None
        self.skipped_steps = self.nan_steps = 0
        self.first_time, self.last_time = math.inf, -math.inf
        self.jobs: set[str] = set()
        self.energy = Energy()
        """The most that was recorded: sums only grow."""
        self.num_events = 0
        self.events: deque[dict[str, Any]] = deque(maxlen=_MOST_EVENTS)
        """The newest."""
        self.facts: dict[str, Any] = {}
        """The newest of each that any event has."""
        self.references: dict[str, float] = {}
        self.last_word: dict[str, Any] = {}
        """The newest start or stop."""
        self._rows = array("d")
        """Of each record of a step its columns: 112 MB for two million."""

    def _column(self, name: str) -> Points:
        return np.frombuffer(self._rows).reshape(-1, len(_COLUMNS))[:, [0, _COLUMNS.index(name)]]

    def curve(self, column: str) -> Points:
        return _thin(self._column(column))

    def median(self, column: str) -> float:
        """Of the steps where it is a number; NaN if there are none."""
        values = self._column(column)[:, 1]
        finite = values[np.isfinite(values)]
        return float(np.median(finite)) if len(finite) else math.nan

    def read_metrics(self, path: Path) -> None:
        scan_metrics(path, self._add)
        if self.last_step is not None:
            self.energy = Energy.from_json(self.last_step.energy)
            times = self._column("time")[:, 1]
            self._at(float(times.min()), float(times.max()))

    def read_events(self, path: Path) -> None:
        scan(path, lambda line: self._add_event(event_of(line)))

    def _add(self, record: Record) -> None:
        self.jobs.add(str(record.job))
        if not isinstance(record, StepRecord):
            for name, loss in record.losses.items():
                self.validation_losses[record.group + " (test)" * (record.part == "test"), name].add(record.step, loss)
            return
        self.last_step = record
        for name, loss in record.losses.items():
            self.losses[name].add(record.step, loss)
        for source, loss in record.source_losses.items():
            self.source_losses[source].add(record.step, loss)
        self._rows.extend((*_numbers(record), math.nan if record.mfu is None else record.mfu))
        self.skipped_steps += record.skipped_steps
        self.nan_steps += record.nan_steps

    def _add_event(self, event: dict[str, Any]) -> None:
        self.num_events += 1
        self.events.append(event)
        self.jobs.add(str(event.get("job")))
        if is_number(event.get("time")):
            self._at(event["time"])
        self.energy = max(self.energy, Energy.from_json(event.get(names.FACT_ENERGY)), key=Energy.order)
        shown = (names.FACT_PARAMETERS, names.FACT_RECIPE, names.FACT_ANCESTOR, names.FACT_ENERGY_SENSOR)
        self.facts |= {name: event[name] for name in shown if event.get(name) is not None}
        losses = event.get(names.FACT_REFERENCE_LOSSES)
        if isinstance(losses, dict):
            self.references |= {name: float(value) for name, value in losses.items() if is_number(value)}
        if event["kind"] in (names.Event.START, names.Event.STOP):
            self.last_word = event

    def _at(self, *times: float) -> None:
        self.first_time, self.last_time = min(self.first_time, *times), max(self.last_time, *times)


def is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


class Curve:
    """The points of one series as they come; when there are many they are thinned."""

    def __init__(self) -> None:
        self._numbers = array("d")

    def add(self, step: int, value: float) -> None:
        self._numbers.extend((step, value))
        if len(self._numbers) > 2 * _MOST_KEPT:
            self._numbers = array("d", self.points.tobytes())

    @property
    def points(self) -> Points:
        return _thin(np.frombuffer(self._numbers).reshape(-1, 2))


def _thin(points: Points) -> Points:
    """In the order of steps; of two at one step the newer. Of many, those that are the lowest, the highest, not finite
    or the last of their stretch stay: no spike is lost, however often they are thinned."""
    points = points[::-1][np.unique(points[::-1, 0], return_index=True)[1]]
    if len(points) <= _MOST_POINTS:
        return points
    kept, edges = [], np.linspace(points[0, 0], points[-1, 0], _MOST_POINTS // 4, endpoint=False)[1:]
    for stretch in filter(len, np.split(points, np.searchsorted(points[:, 0], edges))):
        values = stretch[:, 1]
        finite = np.isfinite(values)
        lowest, highest = np.where(finite, values, np.inf).argmin(), np.where(finite, values, -np.inf).argmax()
        kept.append(stretch[np.unique([lowest, highest, finite.argmin(), len(values) - 1])])
    return np.concatenate(kept)
