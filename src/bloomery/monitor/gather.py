"""What a run's metrics and events add up to: all that the report shows, in memory that does not grow with the run, with
curves thinned to what a screen shows."""

from __future__ import annotations

import math
from array import array
from collections import defaultdict, deque
from collections.abc import Sequence
from operator import itemgetter
from pathlib import Path
from struct import Struct
from struct import error as StructError
from typing import Any

import numpy as np
import orjson
from numpy.typing import NDArray

from bloomery.base.errors import DataError, Problem
from bloomery.base.units import Energy
from bloomery.monitor import names
from bloomery.monitor.history import event_of, last_valid_steps, scan
from bloomery.monitor.record import Record, StepRecord, ValidationRecord, from_json

MOST_POINTS = 1200
"""Of a curve."""
Point = tuple[int, float]

_COLUMNS = ("step", "lr", "tokens_per_second", "grad_norm", "tflops", "time", "mfu")
_numbers, _row = itemgetter(*_COLUMNS[:-1]), Struct(f"{len(_COLUMNS)}d")
_AT_ONCE = 4096
"""Records that are added up together, which is several times quicker than one by one."""
_MOST_SAMPLED = 2**16
"""Records that medians are taken of; of more than these every other, every fourth and so on."""
_MOST_EVENTS = 1000


class Gathered:
    def __init__(self) -> None:
        self.columns: dict[str, Curve] = {name: Curve() for name in ("lr", "tokens_per_second", "grad_norm")}
        self.losses: dict[str, Curve] = defaultdict(Curve)
        self.source_losses: dict[str, Curve] = defaultdict(Curve)
        self.validation_losses: dict[tuple[str, str], Curve] = defaultdict(Curve)
        """By group and name, as are (loss, step) of the last and of the lowest."""
        self.last_of: dict[tuple[str, str], tuple[float, int]] = {}
        self.lowest_of: dict[tuple[str, str], tuple[float, int]] = {}
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
        self._rows = bytearray()
        self._sample: NDArray[np.float64] = np.empty((0, len(_COLUMNS)))
        self._stride = 1

    def median(self, column: str) -> float:
        """Of the steps where it is a number; NaN if there are none."""
        values = self._sample[:, _COLUMNS.index(column)]
        finite = values[np.isfinite(values)]
        return float(np.median(finite)) if len(finite) else math.nan

    def read_metrics(self, path: Path) -> None:
        last_valid, last_line = last_valid_steps(path), b""
        self.jobs.update(map(str, last_valid))

        def take(line: bytes) -> None:
            nonlocal last_line
            fields = orjson.loads(line)
            step = fields["step"]
            if step > last_valid.get(fields["job"], math.inf):
                return
            if fields["kind"] != names.KIND_STEP:
                self._add_validation(from_json(line))
                return
            numbers = (*_numbers(fields), math.nan if fields["mfu"] is None else fields["mfu"])
            try:
                self._rows += _row.pack(*numbers)
            except StructError:  # NaN is a string
                self._rows += _row.pack(*map(float, numbers))
            for name, loss in fields["losses"].items():
                self.losses[name].add(step, loss)
            if sources := fields.get("source_losses"):
                for source, loss in sources.items():
                    self.source_losses[source].add(step, loss)
            self.skipped_steps += fields["skipped_steps"]
            self.nan_steps += fields["nan_steps"]
            last_line = line
            if len(self._rows) == _AT_ONCE * _row.size:
                self._add_rows()

        scan(path, take)
        if last_line:
            self._add_rows()
            try:
                record = from_json(last_line)
            except (ValueError, TypeError, AttributeError) as error:
                what = f"the last record of a step is damaged: {error}"
                raise DataError(Problem(what, remedy="remove its line", place=str(path))) from error
            assert isinstance(record, StepRecord)
            self.last_step, self.energy = record, Energy.from_json(record.energy)

    def read_events(self, path: Path) -> None:
        scan(path, lambda line: self._add_event(event_of(line)))

    def _add_rows(self) -> None:
        table = np.frombuffer(bytes(self._rows)).reshape(-1, len(_COLUMNS))
        self._rows.clear()
        for place, curve in enumerate(self.columns.values(), 1):
            curve.extend(table[:, [0, place]])
        self._at(*table[:, 5].tolist())
        self._sample = np.concatenate([self._sample, table[:: self._stride]])
        if len(self._sample) > _MOST_SAMPLED:
            self._sample, self._stride = self._sample[::2], 2 * self._stride

    def _add_validation(self, record: Record) -> None:
        assert isinstance(record, ValidationRecord)
        for name, loss in record.losses.items():
            key, found = (record.group, name), (loss, record.step)
            self.validation_losses[key].add(record.step, loss)
            if key not in self.last_of or self.last_of[key][1] <= record.step:
                self.last_of[key] = found
            if math.isfinite(loss):
                self.lowest_of[key] = min(self.lowest_of.get(key, found), found)

    def _add_event(self, event: dict[str, Any]) -> None:
        self.num_events += 1
        self.events.append(event)
        self.jobs.add(str(event.get("job")))
        if is_number(event.get("time")):
            self._at(event["time"])
        self.energy = max(self.energy, Energy.from_json(event.get(names.FACT_ENERGY)), key=Energy.order)
        shown = (names.FACT_PARAMETERS, names.FACT_RECIPE, names.FACT_ENERGY_SENSOR)
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
    """The points of one series as they come, thinned on the way: of each stretch of steps the lowest, the highest, one
    that is not finite, and the last of all. Few points are kept as they are; of two at one step the newer one stays."""

    def __init__(self) -> None:
        self._points: NDArray[np.float64] = np.empty((0, 2))
        self._new = array("d")

    def add(self, step: int, value: float | str) -> None:
        self._new.extend((step, float(value)))
        if len(self._new) > 8 * MOST_POINTS:
            self._fold()

    def extend(self, points: NDArray[np.float64]) -> None:
        self._points = np.concatenate([self._points, points])
        if len(self._points) > 4 * MOST_POINTS:
            self._points = _thin(self._points)

    def _fold(self) -> None:
        new, self._new = self._new, array("d")
        self.extend(np.frombuffer(new).reshape(-1, 2))

    @property
    def points(self) -> list[Point]:
        self._fold()
        return thin(self._points)


def thin(points: Sequence[Point] | NDArray[np.float64], most: int = MOST_POINTS) -> list[Point]:
    """About `most` at the most, in the order of steps."""
    few = _thin(np.reshape(np.asarray(points, float), (-1, 2)), most)
    return [(int(step), value) for step, value in few.tolist()]


def _thin(points: NDArray[np.float64], most: int = MOST_POINTS) -> NDArray[np.float64]:
    if not (np.diff(points[:, 0]) > 0).all():
        points = points[::-1][np.unique(points[::-1, 0], return_index=True)[1]]
    if len(points) <= most:
        return points
    # Widths are powers of two, so that thinning again joins whole stretches: no lowest or highest is ever lost.
    width = 2.0 ** math.ceil(math.log2((points[-1, 0] - points[0, 0]) / (most / 3)))
    stretch, values, finite = np.floor(points[:, 0] / width), points[:, 1], np.isfinite(points[:, 1])
    begins = np.flatnonzero(np.diff(stretch, prepend=-math.inf))
    ends: list[NDArray[np.bool_]] = [~finite]
    for extreme, unless in ((np.minimum, math.inf), (np.maximum, -math.inf)):
        found = extreme.reduceat(np.where(finite, values, unless), begins)
        ends.append(values == np.repeat(found, np.diff(begins, append=len(points))))
    kept = [len(points) - 1]
    for chosen in map(np.flatnonzero, ends):
        kept += chosen[np.diff(stretch[chosen], prepend=-math.inf) > 0].tolist()  # the first of each stretch
    return points[sorted(set(kept))]
