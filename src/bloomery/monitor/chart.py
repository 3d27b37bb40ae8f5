"""One chart of the report: inline SVG for the curves, HTML for the words, so that a phone does not shrink the text."""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from html import escape

import numpy as np
from numpy.typing import NDArray

from bloomery.base.units import format_count
from bloomery.monitor.record import strict_json

_MOST_POINTS = 1200
_MOST_ON_PAGE = 40_000
"""Points of all curves of a chart."""
_COLOURS = 6
_LOG_SCALE_FROM = 100.0

Point = tuple[int, float]


@dataclass(frozen=True)
class Series:
    """One curve over steps. Values that are not finite are gaps with a red tick."""

    name: str
    points: Sequence[Point]
    dotted: bool = False
    """Mark every point: for curves with few of them."""


@dataclass(frozen=True)
class Chart:
    title: str
    series: Sequence[Series]
    unit: str = ""
    from_zero: bool = False
    may_be_logarithmic: bool = False
    """Log scale when the values span more than two decades."""
    references: dict[str, float] = field(default_factory=dict)
    """Dashed horizontal lines, by name."""
    x_name: str = "step"


@dataclass(frozen=True)
class _Scale:
    low: float
    high: float
    logarithmic: bool = False

    def at(self, value: float) -> float:
        """Position from 0 (low) to 1 (high)."""
        if self.logarithmic:
            return math.log(value / self.low) / math.log(self.high / self.low) if value > 0 else 0.0
        return (value - self.low) / (self.high - self.low)


def chart_html(chart: Chart) -> str:
    """A <figure>. Every text in it is escaped."""
    most = max(32, min(_MOST_POINTS, _MOST_ON_PAGE // (1 + len(chart.series))))
    series = [Series(each.name, thin(each.points, most), each.dotted) for each in chart.series if each.points]
    if not series:
        return f'<figure><figcaption>{escape(chart.title)}</figcaption><p class="empty">No values yet.</p></figure>'
    x_scale, y_scale = _x_scale(series), _y_scale(chart, series)
    grid = [(y_scale.at(tick), number(tick)) for tick in _ticks(y_scale)]
    shapes = [f'<path class="grid" d="M0 {_y(position)}H1000"/>' for position, _ in grid]
    shapes += [
        f'<path class="reference" d="M0 {_y(y_scale.at(value))}H1000"/>' for value in _finite(chart.references.values())
    ]
    shapes += [_curve(each, index % _COLOURS, x_scale, y_scale) for index, each in enumerate(series)]
    labels = [f'<span style="top:{100 - 100 * position:.2f}%">{text}</span>' for position, text in grid]
    steps = [
        f'<span style="left:{100 * x_scale.at(tick):.2f}%">{number(tick)}</span>'
        for tick in _ticks(x_scale, wanted=4)
        if tick == int(tick)
    ]
    scale_note = " · log scale" if y_scale.logarithmic else ""
    unit = f' <span class="unit">{escape(chart.unit)}{scale_note}</span>' if chart.unit or scale_note else ""
    return (
        f"<figure><figcaption>{escape(chart.title)}{unit}</figcaption>{_legend(series)}"
        f'<div class="frame"><div class="y-labels">{"".join(labels)}</div>'
        f'<div class="plot" tabindex="0" aria-label="{escape(chart.title)}: {escape(_summary(series))}">'
        f'<svg viewBox="0 0 1000 1000" preserveAspectRatio="none" aria-hidden="true">{"".join(shapes)}</svg>'
        f'{_reference_labels(chart.references, y_scale)}<div class="cursor"></div><div class="tip"></div></div>'
        f'<div class="x-name">{escape(chart.x_name)}</div><div class="x-labels">{"".join(steps)}</div></div>'
        f'<script type="application/json">{_hover_data(chart, series, x_scale)}</script></figure>'
    )


def number(value: float) -> str:
    """Short, for people: 12.5k, 0.0003, NaN."""
    if not math.isfinite(value):
        return "NaN" if math.isnan(value) else "∞" if value > 0 else "-∞"
    return format_count(value) if value == 0 or abs(value) >= 1e-3 else f"{value:.3g}"


class Curve:
    """The points of one series as they come, thinned on the way: of each stretch of steps the lowest, the highest, one
    that is not finite, and the last of all. Few points are kept as they are; of two at one step the newer one stays."""

    def __init__(self) -> None:
        self._points: NDArray[np.float64] = np.empty((0, 2))
        self._new = array("d")

    def add(self, step: int, value: float | str) -> None:
        self._new.extend((step, float(value)))
        if len(self._new) > 8 * _MOST_POINTS:
            self._fold()

    def extend(self, points: NDArray[np.float64]) -> None:
        self._points = np.concatenate([self._points, points])
        if len(self._points) > 4 * _MOST_POINTS:
            self._points = _thin(self._points)

    def _fold(self) -> None:
        new, self._new = self._new, array("d")
        self.extend(np.frombuffer(new).reshape(-1, 2))

    @property
    def points(self) -> list[Point]:
        self._fold()
        return thin(self._points)


def thin(points: Sequence[Point] | NDArray[np.float64], most: int = _MOST_POINTS) -> list[Point]:
    """About `most` at the most, in the order of steps."""
    few = _thin(np.reshape(np.asarray(points, float), (-1, 2)), most)
    return [(int(step), value) for step, value in few.tolist()]


def _thin(points: NDArray[np.float64], most: int = _MOST_POINTS) -> NDArray[np.float64]:
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


def _curve(series: Series, colour: int, x_scale: _Scale, y_scale: _Scale) -> str:
    """Positions run to 1000; strokes keep their width however the drawing is stretched, so `h0` draws a round dot."""
    path, dots, ticks = "", "", ""
    pen = "M"
    finite = [False, *(math.isfinite(value) for _, value in series.points), False]
    for index, (step, value) in enumerate(series.points):
        x = f"{1000 * x_scale.at(step):.1f}"
        if not math.isfinite(value):
            ticks += f"M{x} 1000v-60"
            pen = "M"
            continue
        y = _y(y_scale.at(value))
        path += f"{pen}{x} {y}"
        alone = not finite[index] and not finite[index + 2]
        dots += f"M{x} {y}h0" if series.dotted or alone else ""
        pen = "L"
    shapes = f'<path class="line c{colour}" d="{path}"/><path class="dots c{colour}" d="{dots}"/>' if path else ""
    return shapes + (f'<path class="nan" d="{ticks}"/>' if ticks else "")


def _x_scale(series: Sequence[Series]) -> _Scale:
    steps = [step for each in series for step, _ in each.points]
    low, high = min(steps), max(steps)
    return _Scale(low, high) if high > low else _Scale(low - 1, high + 1)


def _y_scale(chart: Chart, series: Sequence[Series]) -> _Scale:
    values = _finite([value for each in series for _, value in each.points])
    low, high = (min(values), max(values)) if values else (0.0, 1.0)
    if chart.may_be_logarithmic and low > 0 and high / low > _LOG_SCALE_FROM:
        return _Scale(low / 1.2, high * 1.2, logarithmic=True)
    values += _finite(chart.references.values())
    low, high = min([low, *values]), max([high, *values])
    if chart.from_zero and low >= 0:
        return _Scale(0.0, high * 1.08 or 1.0)
    margin = (high - low) * 0.06 or abs(high) * 0.1 or 1.0
    return _Scale(low - margin, high + margin)


def _ticks(scale: _Scale, wanted: int = 5) -> list[float]:
    """Round numbers inside the scale."""
    if scale.logarithmic:
        powers = range(math.floor(math.log10(scale.low)), math.ceil(math.log10(scale.high)) + 1)
        every = -(-len(powers) // wanted)
        return [10.0**power for power in powers if power % every == 0 and scale.low <= 10.0**power <= scale.high]
    rough = (scale.high - scale.low) / wanted
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough)
    first, last = math.ceil(scale.low / step), math.floor(scale.high / step)
    return [float(f"{index * step:.10g}") for index in range(first, last + 1)]


def _legend(series: Sequence[Series]) -> str:
    if len(series) == 1:
        return ""
    items = (
        f'<span><i class="c{index % _COLOURS}"></i>{escape(each.name)}</span>' for index, each in enumerate(series)
    )
    return f'<div class="legend">{"".join(items)}</div>'


def _reference_labels(references: dict[str, float], y_scale: _Scale) -> str:
    return "".join(
        f'<span class="reference-label" style="top:{100 - 100 * y_scale.at(value):.2f}%">'
        f"{escape(name)} {number(value)}</span>"
        for name, value in references.items()
        if math.isfinite(value)
    )


def _summary(series: Sequence[Series]) -> str:
    """What the picture says, for a screen reader."""
    return "; ".join(f"{each.name} ends at {number(each.points[-1][1])}" for each in series)


def _hover_data(chart: Chart, series: Sequence[Series], x_scale: _Scale) -> str:
    shown = [{"name": each.name, "points": [(x, _rounded(y)) for x, y in each.points]} for each in series]
    facts = {"x": chart.x_name, "low": x_scale.low, "high": x_scale.high, "series": shown}
    return strict_json(facts).replace("<", "\\u003c")


def _rounded(value: float) -> float:
    return float(f"{value:.6g}")


def _finite(values: Iterable[float]) -> list[float]:
    return [value for value in values if math.isfinite(value)]


def _y(position: float) -> str:
    return f"{1000 - 1000 * position:.1f}"
