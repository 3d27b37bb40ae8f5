"""Charts of the report: curves thinned to what a screen shows, as data that uPlot (uplot/, report.js) draws."""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterable, Mapping, Sequence
from html import escape

import numpy as np
from numpy.typing import NDArray

from bloomery.base.units import format_count
from bloomery.monitor.record import strict_json

_MOST_POINTS = 1200
_MOST_ON_PAGE = 40_000
"""Points of all curves of a chart."""
_LOG_SCALE_FROM = 100.0

Point = tuple[int, float]


def chart_html(
    title: str,
    curves: Mapping[str, Sequence[Point]],
    *,
    unit: str = "",
    from_zero: bool = False,
    may_be_logarithmic: bool = False,
    references: Mapping[str, float] | None = None,
    wide: bool = False,
) -> str:
    """A <figure> with its data in it. Every text is escaped, and the data is JSON without any `<`.

    `curves`: over steps, by name; values that are not finite are gaps with a red tick. `may_be_logarithmic`: log scale
    when the values span more than two decades. `references`: dashed horizontal lines, by name."""
    most = max(32, min(_MOST_POINTS, _MOST_ON_PAGE // (1 + len(curves))))
    shown = {name: thin(points, most) for name, points in curves.items() if points}
    size = ' class="wide"' if wide else ""
    head = f"<figure{size}><figcaption>{escape(title)}"
    if not shown:
        return f'{head}</figcaption><p class="empty">No values yet.</p></figure>'
    is_log = may_be_logarithmic and _spans_decades(shown.values())
    data = {
        "curves": {name: [(x, float(f"{y:.6g}")) for x, y in points] for name, points in shown.items()},
        "references": {name: value for name, value in (references or {}).items() if math.isfinite(value)},
        "from_zero": from_zero,
        "log": is_log,
    }
    note = f' <span class="unit">{escape(unit)}{" · log scale" * is_log}</span>' if unit or is_log else ""
    summary = "; ".join(f"{name} ends at {number(points[-1][1])}" for name, points in shown.items())
    json = strict_json(data).replace("<", "\\u003c")
    return (
        f'{head}{note}</figcaption><div class="plot" tabindex="0" role="img" '
        f'aria-label="{escape(f"{title}: {summary}")}"></div><script type="application/json">{json}</script></figure>'
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


def _spans_decades(curves: Iterable[Sequence[Point]]) -> bool:
    values = [value for points in curves for _, value in points if math.isfinite(value)]
    return bool(values) and min(values) > 0 and max(values) / min(values) > _LOG_SCALE_FROM
