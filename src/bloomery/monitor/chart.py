"""One chart of the report: inline SVG for the curves, HTML for the words, so that a phone does not shrink the text."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from html import escape

from bloomery.base.units import format_count
from bloomery.monitor.record import strict_json

_MOST_POINTS = 1200
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
    series = [Series(each.name, thin(each.points), each.dotted) for each in chart.series if each.points]
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


def thin(points: Sequence[Point]) -> list[Point]:
    """At most about _MOST_POINTS: of each stretch its lowest, its highest and its first not finite point."""
    if len(points) <= _MOST_POINTS:
        return list(points)
    stretch = -(-len(points) // (_MOST_POINTS // 3))
    kept: list[Point] = []
    for start in range(0, len(points), stretch):
        part = points[start : start + stretch]
        good = [point for point in part if math.isfinite(point[1])]
        bad = [point for point in part if not math.isfinite(point[1])]
        ends = [min(good, key=lambda point: point[1]), max(good, key=lambda point: point[1])] if good else []
        kept += sorted({point[0]: point for point in ends + bad[:1]}.values())
    return kept if kept[-1][0] == points[-1][0] else [*kept, points[-1]]


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
