"""What a run's metrics and events add up to: all that the report shows, its curves thinned to what a screen shows."""

from __future__ import annotations

import gc
import math
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields
from functools import cached_property
from itertools import chain, groupby, islice
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np
import orjson
from numpy.typing import NDArray

from bloomery.base.errors import DataError
from bloomery.base.units import Energy
from bloomery.config.load import leaves
from bloomery.monitor import names
from bloomery.monitor.goodput import Flags, Ledger, Values
from bloomery.monitor.history import DAMAGE, event_of, last_valid_steps, lines_of
from bloomery.monitor.record import Record, StepRecord, ValidationRecord, from_json, strict_json

Points = NDArray[np.float64]
"""(points, 2): step and value."""
_MOST_POINTS = 1200
"""Of a curve."""
_MOST_KEPT = 2**16
"""Points of a curve before it is thinned."""
_FOLDED = 2**14
"""New points of a curve before they are folded."""
_AT_ONCE = 64
"""Points whose mean stands for them when a curve is folded."""
_LINES = 256
"""That are taken together: many, but what they hold fits into a processor's cache."""
_MOST_EVENTS = 1000
_MOST_BRANCHES = 8
PREDICTED = ("step_seconds", "memory_bytes", "total_seconds")
"""What `bloomery plan` foretells of a run and its events keep."""
AXES = ("step", "consumed_tokens", "time", "consumed_gigaflops")
"""What curves may be drawn over."""
_NOT_DRAWN = ("train_steps", "consumed_samples", "job", *AXES)
_NUMBERS = [each.name for each in fields(StepRecord) if each.type in (int, float)]
_OPTIONAL = [each.name for each in fields(StepRecord) if each.type in (int | None, float | None)]
COLUMNS = [name for name in (*_NUMBERS, *_OPTIONAL) if name not in _NOT_DRAWN]
"""Every field of a step that is one number."""
GROUPS = [each.name for each in fields(StepRecord) if each.type in (dict[str, float], dict[str, int])]
"""Those that are several, by name."""
NESTED = [each.name for each in fields(StepRecord) if each.type == dict[str, dict[str, float]]]
"""Those that are several of several places, called `place/name`."""
_MEDIANS = ("seconds_per_step", "tokens_per_second", "tflops", "mfu")
_numbers, _optional = itemgetter(*_NUMBERS), itemgetter(*_OPTIONAL)
Fields = Mapping[str, Any]
"""Of a record, as JSON has them: what is not finite may be a number or its name."""


class Gathered:
    def __init__(self) -> None:
        self.series: dict[tuple[str, str], Curve] = defaultdict(Curve)
        """By field of the records and, where it has several numbers, their name."""
        self.validation_losses: dict[tuple[str, str], Curve] = defaultdict(Curve)
        """By group, as in `test: web`, and name."""
        self.abandoned: dict[int, list[Curve]] = defaultdict(lambda: [Curve() for _ in AXES])
        """By job, of steps that a later job rolled back: the loss, and where they are on each axis but the first."""
        self.skipped_steps = self.nan_steps = 0
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
        self._all: dict[str, list[Points]] = {name: [] for name in _MEDIANS}
        self._newest: Fields | None = None

    @cached_property
    def last_step(self) -> StepRecord | None:
        record = None if self._newest is None else from_json(strict_json(self._newest))
        return record if isinstance(record, StepRecord) else None

    def goodput(self) -> dict[str, float]:
        """Seconds of each part of the run's life."""
        return self.ledger.parts(self.median("seconds_per_step"))

    @property
    def losses(self) -> dict[str, Curve]:
        return {name: curve for (field, name), curve in self.series.items() if field == "losses"}

    def axes(self, curves: Sequence[Curve] = ()) -> dict[str, list[float]]:
        """What the steps are on each axis, between which lines are straight: of this run, or of a branch."""
        if not (found := [thin(curve.points, 400) for curve in curves or self._axes.values()])[0].size:
            return {}
        steps = np.unique(np.concatenate([points[:, 0] for points in found]))
        known = [np.maximum.accumulate(np.interp(steps, points[:, 0], points[:, 1])) for points in found]
        return {name: values.tolist() for name, values in zip(AXES, [steps, *known], strict=True)}

    def median(self, column: str) -> float:
        """Of the steps where it is a number; NaN if there are none."""
        values = np.concatenate(self._all[column] or [np.empty(0)])
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

    def take(self, rows: Sequence[Fields]) -> None:
        """Records that count, of one job, in the order written."""
        steps = [row for row in rows if row["kind"] == "step"]
        if len(steps) < len(rows):
            self._book(rows)
            for row in rows:
                if row["kind"] != "step":
                    self._add_validation(row)
        if not steps:
            return
        columns = dict(zip(_NUMBERS, _array(list(map(_numbers, steps)), 2).T, strict=True))
        columns |= zip(_OPTIONAL, _array(list(map(_optional, steps)), 2, may_lack=True).T, strict=True)
        at = columns["step"]
        if len(steps) == len(rows):
            self._book(rows, at, columns["time"], columns["seconds_per_step"])
        for name, curve in self._axes.items():
            curve.extend(at, columns[name])
        for name in COLUMNS:
            self._add(name, "", at, columns[name], np.isfinite(columns[name]) if name in _OPTIONAL else None)
        for name, found in self._all.items():
            found.append(columns[name].astype(np.float32))
        for field in GROUPS:
            self._add_named(field, "", at, [row[field] for row in steps])
        for field in NESTED:
            places = [row[field] for row in steps]
            for place in dict.fromkeys(chain.from_iterable(places)):
                self._add_named(field, f"{place}/", at, [each.get(place, {}) for each in places])
        self.skipped_steps += int(columns["skipped_steps"].sum())
        self.nan_steps += int(columns["nan_steps"].sum())
        self._newest = steps[-1]

    def abandon(self, rows: Sequence[Fields]) -> None:
        """Records of one job that a later one rolled back."""
        self._book(rows, abandoned=True)
        if not (steps := [row for row in rows if row["kind"] == "step" and row["losses"]]):
            return
        at = _array([row["step"] for row in steps])
        values = [next(iter(row["losses"].values())) for row in steps]
        others = [[row[axis] for row in steps] for axis in AXES[1:]]
        for curve, each in zip(self.abandoned[steps[0]["job"]], [values, *others], strict=True):
            curve.extend(at, _array(each))
        if len(self.abandoned) > _MOST_BRANCHES:
            del self.abandoned[min(self.abandoned)]

    def _book(self, rows: Sequence[Fields], *known: Values, abandoned: bool = False) -> None:
        """`known`: the step, the time and the seconds of each, where all are steps."""
        if not rows:
            return
        names = ("step", "time", "seconds_per_step")
        steps, times, seconds = known or (_array([row.get(name) for row in rows], may_lack=True) for name in names)
        is_step = np.ones(len(rows), bool) if known else np.array([row["kind"] == "step" for row in rows])
        self.ledger.records(rows[0]["job"], steps, times, seconds, is_step, abandoned=abandoned)
        if not abandoned:
            self.jobs.add(str(rows[0]["job"]))
            self._at(float(times.min()))
            self._at(float(times.max()))

    def _add(self, field: str, name: str, at: Values, values: Values, known: Flags | None = None) -> None:
        """`known`: where the values stand; everywhere if None."""
        if known is not None and not known.all():
            at, values = at[known], values[known]
        if len(values):
            self.series[field, name].extend(at, values)

    def _add_named(self, field: str, place: str, at: Values, groups: list[dict[str, Any]]) -> None:
        if not any(groups):
            return
        names = list(groups[0])
        alike = all(map(names.__eq__, map(list, groups)))
        for name in names if alike else dict.fromkeys(chain.from_iterable(groups)):
            having = groups if alike else [each for each in groups if name in each]
            steps = at if alike else at[[name in each for each in groups]]
            self.series[field, place + name].extend(steps, _array(list(map(itemgetter(name), having))))

    def _add_validation(self, row: Fields) -> None:
        record = from_json(strict_json(row))
        if isinstance(record, ValidationRecord):
            for name, loss in record.losses.items():
                curve = self.validation_losses[f"{record.part}: {record.group}", name]
                curve.extend(np.array([record.step]), np.array([loss]))

    def add_event(self, event: dict[str, Any]) -> None:
        self.num_events += 1
        self.events.append(event)
        self.jobs.add(str(event.get("job")))
        if is_number(event.get("time")):
            self._at(event["time"])
        self.ledger.event(event)
        energy = event.get(names.FACT_ENERGY)
        if isinstance(energy, dict) and all(map(is_number, energy.values())):
            self.energy = max(self.energy, Energy.from_json(energy), key=Energy.order)
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


def read_run(folder: Path) -> Gathered:
    """What there is of metrics and events. DataError names a line that is damaged."""
    collects = gc.isenabled()
    gc.disable()  # millions of small dictionaries, none of them in a cycle: a third of the time
    try:
        return _read(folder, orjson.loads)
    except (DataError, *DAMAGE):  # the strict reader names the line, or adds what an older version left out
        return _read(folder, _strict)
    finally:
        if collects:
            gc.enable()


def _strict(line: bytes) -> Fields:
    orjson.loads(line)  # refuses numbers that no float holds
    return vars(from_json(line))


def _read(folder: Path, parse: Callable[[bytes], Fields]) -> Gathered:
    found = Gathered()
    metrics, events = folder / names.METRICS_FILE, folder / names.EVENTS_FILE
    for event in lines_of(events, event_of) if events.is_file() else ():
        found.add_event(event)
    if not metrics.is_file():
        return found
    last_valid, aside = last_valid_steps(metrics), folder / names.ABANDONED_METRICS_FILE
    for path in (metrics, aside) if aside.is_file() else (metrics,):
        lines = lines_of(path, parse)
        while batch := list(islice(lines, _LINES)):
            for job, group in groupby(batch, itemgetter("job")):
                rows, last = list(group), -math.inf if path == aside else last_valid.get(job, math.inf)
                found.take([row for row in rows if row["step"] <= last])
                found.abandon([row for row in rows if row["step"] > last])
    if found.last_step is not None:
        found.energy = max(found.energy, Energy.from_json(found.last_step.energy), key=Energy.order)
    return found


def is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _array(values: Sequence[Any], dimensions: int = 1, *, may_lack: bool = False) -> Values:
    """ValueError or TypeError if these are no numbers; None is one only if they `may_lack` some."""
    found = np.array(values, dtype=np.float64)
    if found.ndim != dimensions or (
        not may_lack and np.isnan(found).any() and None in (values if dimensions == 1 else chain.from_iterable(values))
    ):
        raise ValueError("a number is missing")
    return found


def numbers(record: Record) -> Iterator[tuple[str, float]]:
    """Every number of a record by a name of its own."""
    if not isinstance(record, StepRecord):
        yield from ((f"{record.part}/{record.group}/{name}", loss) for name, loss in record.losses.items())
        return
    yield from record.losses.items()
    for name in (*COLUMNS, "consumed_samples", "consumed_tokens"):
        if is_number(value := getattr(record, name)):
            yield name, value
    for group in (name for name in (*GROUPS, *NESTED) if name != "losses"):
        for path, value in leaves(getattr(record, group)):
            if is_number(value):
                yield f"{group}/{path}", value


class Curve:
    """The points of one series as they come. When there are many, stretches of them are folded: into their extremes,
    and into their means."""

    def __init__(self) -> None:
        self._steps: list[Values] = [np.empty(0)]
        self._values: list[Values] = [np.empty(0)]
        self._num_fresh = 0
        self._kept = self._means = np.empty((0, 2))

    def extend(self, steps: Values, values: Values) -> None:
        self._steps.append(steps)
        self._values.append(values)
        self._num_fresh += len(steps)
        if self._num_fresh < _FOLDED:
            return
        points = self._fresh()
        whole = len(points) // _AT_ONCE * _AT_ONCE
        self._steps, self._values = [points[whole:, 0]], [points[whole:, 1]]
        self._num_fresh -= whole
        self._means = np.concatenate([self._means, _means(points)])
        self._kept = np.concatenate([self._kept, _extremes(points[:whole].reshape(-1, _AT_ONCE, 2))])
        if len(self._kept) > _MOST_KEPT:
            self._kept = thin(self._kept)

    def _fresh(self) -> Points:
        return np.column_stack((np.concatenate(self._steps), np.concatenate(self._values)))

    @cached_property
    def points(self) -> Points:
        return thin(np.concatenate([self._kept, self._fresh()]))

    @cached_property
    def smooth(self) -> Points:
        """The mean of the stretch around each point, of all values: a fiftieth of the run, and at least five."""
        fresh = self._fresh()
        points = np.concatenate([self._means, _means(fresh) if len(self._means) else fresh])
        points = points[np.isfinite(points[:, 1])]
        if len(points) < 5:
            return np.empty((0, 2))
        reach = max(2, len(points) // 100)
        sums = np.concatenate([[0.0], np.cumsum(points[:, 1])])
        at = np.arange(len(points))
        low, high = np.maximum(at - reach, 0), np.minimum(at + reach + 1, len(points))
        smooth: Points = np.column_stack([points[:, 0], (sums[high] - sums[low]) / (high - low)])
        return smooth[:: max(1, len(smooth) // (_MOST_POINTS // 4))]


def thin(points: Points, most: int = _MOST_POINTS) -> Points:
    """In the order of steps; of two at one step the newer. Of many, the extremes of each stretch stay: no spike is
    lost, however often they are thinned."""
    points = points[::-1][np.unique(points[::-1, 0], return_index=True)[1]]
    if len(points) <= most:
        return points
    size = -(-len(points) // (most // 4))
    padded = np.pad(points, ((0, -len(points) % size), (0, 0)), mode="edge")
    extremes = _extremes(padded.reshape(-1, size, 2))
    return extremes[np.diff(extremes[:, 0], prepend=-np.inf) > 0]


def _means(points: Points) -> Points:
    """Of every _AT_ONCE points the last step and the mean."""
    blocks = points[: len(points) // _AT_ONCE * _AT_ONCE].reshape(-1, _AT_ONCE, 2)
    return np.column_stack((blocks[:, -1, 0], blocks[..., 1].mean(1)))


def _extremes(blocks: Points) -> Points:
    """Of each block of points, in their order: the lowest, the highest, the first that is not finite, and the last."""
    values, last = blocks[..., 1], np.full(len(blocks), blocks.shape[1] - 1)
    finite = np.isfinite(values)
    low, high = np.where(finite, values, np.inf).argmin(1), np.where(finite, values, -np.inf).argmax(1)
    chosen = np.sort([low, high, finite.argmin(1), last], axis=0).T
    return np.take_along_axis(blocks, chosen[..., None], axis=1).reshape(-1, 2)
