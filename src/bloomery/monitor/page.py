"""A self-contained HTML page with charts, which uPlot (uplot/, report.js) draws. Imports no torch."""

import hashlib
import math
from base64 import b64encode
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from bloomery.base.units import format_count
from bloomery.monitor.gather import Points
from bloomery.monitor.record import strict_json

_STYLES, _SCRIPTS = ("uplot/uPlot.min.css", "report.css"), ("uplot/uPlot.iife.min.js", "report.js")
_LICENSE = "uplot/LICENSE"
_LOG_SCALE_FROM = 100.0


class Line(NamedTuple):
    """A curve of a chart whose x axis can be chosen."""

    name: str
    points: Points
    axis: str
    """Whose steps these are: a key of `axes` in the page's data."""
    color: int
    style: str = ""
    """`raw`: pale, beside its smooth curve. `gone`: grey, of a branch that was left."""


def page(title: str, body: str) -> str:
    """`body` is HTML; `title` is text. Nothing is fetched, and the page's policy lets no other script run than ours."""
    here = Path(__file__).parent
    text = {name: (here / name).read_text() for name in (*_STYLES, *_SCRIPTS, _LICENSE)}
    script = "\n".join([f"/* {text[_LICENSE]} */", *(text[name] for name in _SCRIPTS)])
    digest = b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = f"default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src 'sha256-{digest}'"
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f'<title>{escape(title)}</title><link rel="icon" href="data:,">'
        f"<style>{''.join(text[name] for name in _STYLES)}</style></head>\n"
        f"<body><main>{body}</main><script>{script}</script></body></html>\n"
    )


def chart_html(
    title: str,
    curves: Mapping[str, Points] | Sequence[Line],
    *,
    unit: str = "",
    from_zero: bool = False,
    may_be_logarithmic: bool = False,
    references: Mapping[str, float] | None = None,
    wide: bool = False,
    x: str = "step",
) -> str:
    """A <figure> with its data in it. Every text is escaped, and the data is JSON without any `<`.

    `curves`: over `x`, by name, or lines over the axis that the page's reader has chosen; values that are not finite
    are gaps with a red tick. `may_be_logarithmic`: log scale when the values span more than two decades. `references`:
    dashed horizontal lines, by name. `wide`: also shows what happened in the run."""
    if isinstance(curves, Mapping):
        curves = [Line(name, points, "", i) for i, (name, points) in enumerate(curves.items())]
    shown = [line for line in curves if len(line.points)]
    size = ' class="wide"' if wide else ""
    head = f"<figure{size}><figcaption>{escape(title)}"
    if not shown:
        return f'{head}</figcaption><p class="empty">No values yet.</p></figure>'
    is_log = may_be_logarithmic and _spans_decades(line.points for line in shown)
    data = {
        "curves": [
            {**line._asdict(), "points": [(int(x), float(f"{y:.5g}")) for x, y in line.points]} for line in shown
        ],
        "references": {name: value for name, value in (references or {}).items() if math.isfinite(value)},
        "from_zero": from_zero,
        "log": is_log,
        "x": x,
    }
    note = f' <span class="unit">{escape(unit)}</span>' if unit else ""
    summary = "; ".join(f"{line.name} ends at {number(line.points[-1][1])}" for line in shown if line.style != "raw")
    return (
        f'{head}{note}</figcaption><div class="plot" tabindex="0" role="img" '
        f'aria-label="{escape(f"{title}: {summary}")}"></div>{data_html(data)}</figure>'
    )


def data_html(data: Any, name: str = "") -> str:
    """For report.js, which no text in it can end."""
    json = strict_json(data).replace("<", "\\u003c")
    return f'<script type="application/json"{f" id={name}" * bool(name)}>{json}</script>'


def table(head: Mapping[str, str], rows: Iterable[Sequence[str]]) -> str:
    """`head`: titles of the columns and their styles."""
    lines = ["".join(f'<th class="{style}">{escape(title)}</th>' for title, style in head.items())]
    for row in rows:
        cells = zip(row, head.values(), strict=True)
        lines.append("".join(f'<td class="{style}">{escape(cell)}</td>' for cell, style in cells))
    return f'<div class="table"><table>{"".join(f"<tr>{line}</tr>" for line in lines)}</table></div>'


def fact(name: str, value: str, note: str = "", alarm: float = 0.0) -> str:
    """Red when `alarm` is not finite."""
    mark = "" if math.isfinite(alarm) else ' class="bad"'
    small = f"<small>{escape(note)}</small>" if note else ""
    return f"<div><dt>{escape(name)}</dt><dd{mark}>{escape(value)}{small}</dd></div>"


def number(value: float) -> str:
    """Short, for people: 12.5k, 0.0003, NaN."""
    if not math.isfinite(value):
        return "NaN" if math.isnan(value) else "∞" if value > 0 else "-∞"
    return format_count(value) if value == 0 or abs(value) >= 1e-3 else f"{value:.3g}"


def _spans_decades(curves: Iterable[Points]) -> bool:
    values = np.concatenate([points[:, 1] for points in curves])
    values = values[np.isfinite(values)]
    return len(values) > 0 and values.min() > 0 and bool(values.max() / values.min() > _LOG_SCALE_FROM)
