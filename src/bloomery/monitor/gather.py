"""What a run's metrics and events add up to: all that the report shows, its curves thinned to what a screen shows."""

from __future__ import annotations

import math
from array import array
from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import fields
from operator import attrgetter
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bloomery.base.units import Energy
from bloomery.monitor import names
from bloomery.monitor.goodput import Ledger
from bloomery.monitor.history import event_of, scan, scan_metrics
from bloomery.monitor.record import Record, StepRecord

Points = NDArray[np.float64]
"""(points, 2): step and value."""
_MOST_POINTS = 1200
"""Of a curve."""
_MOST_KEPT = 2**16
"""Points of a curve before it is thinned."""
_AT_ONCE = 64
"""Points whose mean stands for them when a curve is thinned."""
_MOST_EVENTS = 1000
_MOST_BRANCHES = 8
PREDICTED = ("step_seconds", "memory_bytes", "total_seconds")
"""What `bloomery plan` foretells of a run and its events keep."""
AXES = ("step", "consumed_tokens", "time", "consumed_gigaflops")
"""What curves may be drawn over."""
_NOT_DRAWN = {"train_steps", "consumed_samples", "job", *AXES}
COLUMNS = [
    each.name
    for each in fields(StepRecord)
    if each.type in (int, float, int | None, float | None) and each.name not in _NOT_DRAWN
]
"""Every field of a step that is one number."""
_OPTIONAL = {each.name for each in fields(StepRecord) if each.type in (int | None, float | None)}
GROUPS = [each.name for each in fields(StepRecord) if each.type in (dict[str, float], dict[str, int])]
"""Those that are several, by name."""
NESTED = [each.name for each in fields(StepRecord) if each.type == dict[str, dict[str, float]]]
"""Those that are several of several places, called `place/name`."""
_MEDIANS = ("seconds_per_step", "tokens_per_second", "tflops", "mfu")
_KEPT = (*COLUMNS, *AXES[1:])
_numbers, _axes = attrgetter(*_KEPT), attrgetter(*AXES)


class Gathered:
    def __init__(self) -> None:
        self._series: dict[tuple[str, str], Curve] = defaultdict(Curve)
        self.validation_losses: dict[tuple[str, str], Curve] = defaultdict(Curve)
        """By group, as in `test: web`, and name."""
        self.abandoned: dict[int, list[Curve]] = defaultdict(lambda: [Curve() for _ in AXES])
        """By job, of steps that a later job rolled back: the loss, and where they are on each axis but the first."""
        self.last_step: StepRecord | None = None
        self.steps = self.skipped_steps = self.nan_steps = 0
        """Records, and steps."""
        self.first_time, self.last_time = math.inf, -math.inf
        self.jobs: set[str] = set()
        self.energy = Energy()
        """The most that was recorded: sums only grow."""
        self.num_events = 0
        self.events: deque[dict[str, Any]] = deque(maxlen=_MOST_EVENTS)
        """The newest."""
        self.saves: dict[str, dict[str, Any]] = {}
        """The newest event of each checkpoint."""
        self.carbon: dict[str, dict[str, Any]] = {}
        """Of each job what it emitted."""
        self.facts: dict[str, Any] = {}
        """The newest of each that any event has."""
        self.references: dict[str, float] = {}
        self.plan: dict[str, Any] = {}
        """What was foretold at the newest start."""
        self.last_word: dict[str, Any] = {}
        """The newest start or stop."""
        self.ledger = Ledger()
        self._axes = {name: Curve() for name in AXES[1:]}
        self._all: dict[str, list[NDArray[np.float32]]] = {name: [] for name in _MEDIANS}
        self._rows = array("d")
        """The newest records: step and columns of each."""

    @property
    def series(self) -> dict[tuple[str, str], Curve]:
        """By field of the records and, where it has several numbers, their name."""
        self._fold()
        return self._series

    def _fold(self) -> None:
        rows, self._rows = np.frombuffer(self._rows).reshape(-1, 1 + len(_KEPT)), array("d")
        for i, name in enumerate(_KEPT if len(rows) else (), 1):
            if name in AXES:
                self._axes[name].extend(rows[:, [0, i]])
                continue
            if name in self._all:
                self._all[name].append(rows[:, i].astype(np.float32))
            known = rows[np.isfinite(rows[:, i])] if name in _OPTIONAL else rows
            if len(known):
                self._series[name, ""].extend(known[:, [0, i]])

    @property
    def losses(self) -> dict[str, Curve]:
        return {name: curve for (field, name), curve in self.series.items() if field == "losses"}

    def axes(self, curves: Sequence[Curve] = ()) -> dict[str, list[float]]:
        """What the steps are on each axis, between which lines are straight: of this run, or of a branch."""
        self._fold()
        if not (found := [thin(curve.points, 400) for curve in curves or self._axes.values()])[0].size:
            return {}
        steps = np.unique(np.concatenate([points[:, 0] for points in found]))
        known = [np.maximum.accumulate(np.interp(steps, points[:, 0], points[:, 1])) for points in found]
        return {name: values.tolist() for name, values in zip(AXES, [steps, *known], strict=True)}

    def curve(self, column: str) -> Points:
        return self.series[column, ""].points

    def median(self, column: str) -> float:
        """Of the steps where it is a number; NaN if there are none."""
        self._fold()
        values = np.concatenate(self._all[column] or [np.empty(0, np.float32)])
        finite = values[np.isfinite(values)]
        return float(np.median(finite)) if len(finite) else math.nan

    def scores(self) -> dict[str, tuple[float, float]]:
        """(predicted, measured) of PREDICTED, as far as both are known: of steps with the full batch. The measured
        total of a run that is not finished adds what remains at its median speed."""
        last, plan, speed = self.last_step, self.plan, self.median("tokens_per_second")
        if last is None or last.global_batch != plan.get("global_batch") or not speed > 0:
            return {}
        if not all(is_number(plan.get(name)) for name in (*PREDICTED, "tokens_per_second")):
            return {}
        step = plan["step_seconds"] * plan["tokens_per_second"] / speed
        total = self.last_time - self.first_time + (last.train_steps - last.step) * step
        measured = {"step_seconds": step, "memory_bytes": last.peak_memory_bytes, "total_seconds": total}
        return {name: (float(plan[name]), float(value)) for name, value in measured.items() if value}

    def read(self, folder: Path) -> None:
        """What there is of metrics and events."""
        metrics, events = folder / names.METRICS_FILE, folder / names.EVENTS_FILE
        if events.is_file():
            scan(events, lambda line: self._add_event(event_of(line)))
        if metrics.is_file():
            scan_metrics(metrics, self.add, self._abandon)
            if self.last_step is not None:
                self.energy = max(self.energy, Energy.from_json(self.last_step.energy), key=Energy.order)

    def add(self, record: Record) -> None:
        self.jobs.add(str(record.job))
        self.ledger.record(record)
        self._at(record.time)
        step = record.step
        if not isinstance(record, StepRecord):
            for name, loss in record.losses.items():
                self.validation_losses[f"{record.part}: {record.group}", name].add(step, loss)
            return
        self.last_step = record
        self._rows.extend([step, *(math.nan if value is None else value for value in _numbers(record))])
        if len(self._rows) > _MOST_KEPT * (1 + len(_KEPT)):
            self._fold()
        for group in GROUPS:
            for name, value in getattr(record, group).items():
                self._series[group, name].add(step, value)
        for group in NESTED:
            for place, values in getattr(record, group).items():
                for name, value in values.items():
                    self._series[group, f"{place}/{name}"].add(step, value)
        self.steps += 1
        self.skipped_steps += record.skipped_steps
        self.nan_steps += record.nan_steps

    def _abandon(self, record: Record) -> None:
        self.ledger.record(record, abandoned=True)
        if isinstance(record, StepRecord) and record.losses:
            values = next(iter(record.losses.values())), *_axes(record)[1:]
            for curve, value in zip(self.abandoned[record.job], values, strict=True):
                curve.add(record.step, value)
            if len(self.abandoned) > _MOST_BRANCHES:
                del self.abandoned[min(self.abandoned)]

    def _add_event(self, event: dict[str, Any]) -> None:
        self.num_events += 1
        self.events.append(event)
        self.jobs.add(str(event.get("job")))
        if is_number(event.get("time")):
            self._at(event["time"])
        self.ledger.event(event)
        self.energy = max(self.energy, Energy.from_json(event.get(names.FACT_ENERGY)), key=Energy.order)
        self.facts |= {name: event[name] for name in names.SHOWN_FACTS if event.get(name) is not None}
        losses = event.get(names.FACT_REFERENCE_LOSSES)
        if isinstance(losses, dict):
            self.references |= {name: float(value) for name, value in losses.items() if is_number(value)}
        if event["kind"] == names.Event.PLAN:
            self.plan = event
        if event["kind"] in (names.Event.START, names.Event.STOP):
            self.last_word = event
        elif event["kind"] == names.Event.CARBON:
            self.carbon[str(event.get("job"))] = event
        elif event["kind"] == names.Event.SAVE:
            self.saves[str(event.get("folder"))] = event

    def _at(self, time: float) -> None:
        self.first_time, self.last_time = min(self.first_time, time), max(self.last_time, time)


def is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


class Curve:
    """The points of one series as they come; when there are many they are thinned."""

    def __init__(self) -> None:
        self._fresh = array("d")
        self._kept = self._means = np.empty((0, 2))

    def add(self, step: int, value: float) -> None:
        self._fresh.extend((step, value))
        if len(self._fresh) > 2 * _MOST_KEPT:
            points, self._fresh = np.frombuffer(self._fresh).reshape(-1, 2), array("d")
            self.extend(points)

    def extend(self, points: Points) -> None:
        self._means = np.concatenate([self._means, _means(points)])
        self._kept = np.concatenate([self._kept, points])
        if len(self._kept) > _MOST_KEPT:
            self._kept = thin(self._kept)

    @property
    def points(self) -> Points:
        return thin(np.concatenate([self._kept, np.frombuffer(self._fresh).reshape(-1, 2)]))

    @property
    def smooth(self) -> Points:
        """The mean of the stretch around each point, of all values: a fiftieth of the run, and at least five."""
        rest = np.frombuffer(self._fresh).reshape(-1, 2)
        points: Points = np.concatenate([self._means, _means(rest) if len(self._means) else rest])
        points = points[np.isfinite(points[:, 1])]
        if len(points) < 5:
            return np.empty((0, 2))
        reach = max(2, len(points) // 100)
        sums = np.concatenate([[0.0], np.cumsum(points[:, 1])])
        at = np.arange(len(points))
        low, high = np.maximum(at - reach, 0), np.minimum(at + reach + 1, len(points))
        smooth: Points = np.column_stack([points[:, 0], (sums[high] - sums[low]) / (high - low)])
        return smooth[:: max(1, len(smooth) // (_MOST_POINTS // 4))]


def _means(points: Points) -> Points:
    """Of every _AT_ONCE points the last step and the mean."""
    whole = len(points) // _AT_ONCE * _AT_ONCE
    found: NDArray[np.float64] = points[:whole].reshape(-1, _AT_ONCE, 2)
    means: Points = np.stack([found[:, -1, 0], np.mean(found[..., 1], axis=1)], axis=1)
    return means


def thin(points: Points, most: int = _MOST_POINTS) -> Points:
    """In the order of steps; of two at one step the newer. Of many, those that are the lowest, the highest, not finite
    or the last of their stretch stay: no spike is lost, however often they are thinned."""
    points = points[::-1][np.unique(points[::-1, 0], return_index=True)[1]]
    if len(points) <= most:
        return points
    kept, edges = [], np.linspace(points[0, 0], points[-1, 0], most // 4, endpoint=False)[1:]
    for stretch in filter(len, np.split(points, np.searchsorted(points[:, 0], edges))):
        values = stretch[:, 1]
        finite = np.isfinite(values)
        lowest, highest = np.where(finite, values, np.inf).argmin(), np.where(finite, values, -np.inf).argmax()
        kept.append(stretch[np.unique([lowest, highest, finite.argmin(), len(values) - 1])])
    return np.concatenate(kept)
