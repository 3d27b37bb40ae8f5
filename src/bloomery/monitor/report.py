"""One self-contained HTML page about one run, made from its metrics.jsonl and events.jsonl. uPlot (uplot/, report.js)
draws the charts. Imports no torch."""

import hashlib
import math
import time
from base64 import b64encode
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np

from bloomery.base.errors import DataError, Problem, mask
from bloomery.base.storage import write_atomically
from bloomery.base.units import format_count, format_device_hours, format_joules, format_seconds
from bloomery.families.family import LM_LOSS
from bloomery.monitor import names
from bloomery.monitor.gather import Gathered, Points, is_number
from bloomery.monitor.record import perplexity_of, strict_json
from bloomery.monitor.sinks import iso_time

_STYLES, _SCRIPTS = ("uplot/uPlot.min.css", "report.css"), ("uplot/uPlot.iife.min.js", "report.js")
_LICENSE = "uplot/LICENSE"
_LOG_SCALE_FROM = 100.0
_HEAD = ("kind", "step", "iso_time", "time", "job")


def write_report(run_folder: Path, *, output: Path | None = None) -> Path:
    """Writes `output` (report.html in the run folder by default) and returns its path. DataError if it is no run."""
    metrics, events = run_folder / names.METRICS_FILE, run_folder / names.EVENTS_FILE
    recipe = run_folder / names.RECIPE_FILE
    if not any(path.is_file() for path in (metrics, events, recipe)):
        raise DataError(
            Problem(
                f"{run_folder} is not a run" if run_folder.is_dir() else f"{run_folder} does not exist",
                rule=f"a run folder holds {names.METRICS_FILE}, {names.EVENTS_FILE} or {names.RECIPE_FILE}",
                remedy="give the folder that `bloomery train` wrote, usually runs/<name>",
            )
        )
    found = Gathered()
    if metrics.is_file():
        found.read_metrics(metrics)
    if events.is_file():
        found.read_events(events)
    target = output or run_folder / names.REPORT_FILE
    write_atomically(target, _html(run_folder, found))
    return target


def _html(run_folder: Path, found: Gathered) -> str:
    name, last = str(found.facts.get(names.FACT_RECIPE) or run_folder.resolve().name), found.last_step
    definition = f"TFLOP/s: {escape(last.tflops_definition)}. " if last and last.tflops_definition else ""
    body = [
        f'<h1>{escape(name)}</h1><p class="lead">{escape(str(run_folder))} · {escape(_last_word(found))}</p>',
        f'<dl class="facts">{"".join(_facts(found))}</dl>',
        f'<div class="charts">{"".join(_charts(found))}</div>',
        _validation_table(found),
        _event_table(found),
        f"<footer>{definition}Written by Bloomery at {iso_time(time.time())}.</footer>",
    ]
    return page(mask(f"{name} · Bloomery"), mask("\n".join(body)))


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


def _charts(found: Gathered) -> list[str]:
    losses = dict.fromkeys([*found.losses, *(name for _, name in found.validation_losses)]) or {LM_LOSS: None}
    charts: list[str] = []
    for loss in losses:
        curves = {"training": found.losses[loss].points}
        for (group, name), curve in found.validation_losses.items():
            if name == loss:
                curves[f"validation: {group}"] = curve.points
        references = found.references if loss == LM_LOSS else None
        charts.append(chart_html(loss, curves, references=references, wide=not charts))
    if found.source_losses:
        by_source = {source: curve.points for source, curve in found.source_losses.items()}
        charts.append(chart_html("training loss by source", by_source))
    lr, speed, norm = (found.curve(name) for name in ("lr", "tokens_per_second", "grad_norm"))
    return [
        *charts,
        chart_html("learning rate", {"learning rate": lr}, from_zero=True),
        chart_html("throughput", {"tokens per second": speed}, unit="tokens per second", from_zero=True),
        chart_html("gradient norm", {"gradient norm": norm}, from_zero=True, may_be_logarithmic=True),
    ]


def _facts(found: Gathered) -> list[str]:
    facts = []
    parameters, last = found.facts.get(names.FACT_PARAMETERS), found.last_step
    if parameters is not None:
        facts.append(_fact("Parameters", format_count(parameters) if is_number(parameters) else str(parameters)))
    if ancestor := found.facts.get(names.FACT_ANCESTOR):
        facts.append(_fact("Began with", Path(str(ancestor)).name, str(ancestor)))
    if last is not None:
        facts.append(_fact("Steps", f"{last.step:,}", f"of {last.train_steps:,}"))
        facts.append(_fact("Tokens", format_count(last.consumed_tokens), f"{last.consumed_samples:,} samples"))
        facts += [_fact(f"Training {name}", _loss(loss), "last logged", loss) for name, loss in last.losses.items()]
    for (group, name), curve in found.validation_losses.items():
        loss = float(curve.points[-1, 1])
        if name == LM_LOSS:
            facts.append(_fact(f"Validation: {group}", _loss(loss), f"perplexity {number(perplexity_of(loss))}", loss))
    if last is not None:
        facts.append(_fact("Tokens per second", number(found.median("tokens_per_second")), "median"))
        mfu = found.median("mfu")
        note = "MFU n/a" if math.isnan(mfu) else f"MFU {mfu:.1%}"
        facts.append(_fact("TFLOP/s per device", number(found.median("tflops")), f"median · {note}"))
        nan = math.nan if found.nan_steps else 0.0
        facts.append(_fact("Skipped steps", f"{found.skipped_steps:,}", f"{found.nan_steps:,} NaN", nan))
    facts += _energy_fact(found)
    if found.last_time >= found.first_time:
        jobs = max(1, len(found.jobs))
        seconds = format_seconds(found.last_time - found.first_time)
        facts.append(_fact("Wall clock", seconds, f"{jobs} job{'s' * (jobs != 1)}"))
    return facts


def _energy_fact(found: Gathered) -> list[str]:
    """What all jobs have spent; nothing for runs that did not count it."""
    spent = found.energy
    if not spent.device_seconds:
        return []
    hours = format_device_hours(spent.device_seconds)
    if spent.measured_joules is None:
        return [_fact("Energy", "not measured", f"{found.facts.get(names.FACT_ENERGY_SENSOR)} · {hours}")]
    part = "" if spent.coverage > 0.99 else f" · measured {spent.coverage:.0%}"
    return [_fact("Energy", format_joules(spent.measured_joules), f"{hours}{part}")]


def _fact(name: str, value: str, note: str = "", alarm: float = 0.0) -> str:
    """Red when `alarm` is not finite."""
    mark = "" if math.isfinite(alarm) else ' class="bad"'
    small = f"<small>{escape(note)}</small>" if note else ""
    return f"<div><dt>{escape(name)}</dt><dd{mark}>{escape(value)}{small}</dd></div>"


def _last_word(found: Gathered) -> str:
    """How the newest job ended, as far as the ledger knows."""
    event = found.last_word
    if event.get("kind") == names.Event.STOP:
        return f"stopped at step {event.get('step', '?')}: {event.get(names.FACT_REASON, 'no reason given')}"
    running = "no stop in the ledger: it is running, or it was killed"
    return running if event else "no ledger of starts and stops"


def _validation_table(found: Gathered) -> str:
    if not found.validation_losses:
        return ""
    rows = []
    for (group, name), curve in found.validation_losses.items():
        points: list[tuple[float, float]] = curve.points.tolist()
        step, loss = points[-1]
        low_step, low = min((each for each in points if math.isfinite(each[1])), key=itemgetter(1), default=points[-1])
        lowest = f"{_loss(low)} at step {low_step:,.0f}"
        rows.append([group, name, _loss(loss), number(perplexity_of(loss)), f"{step:,.0f}", lowest])
    head = {"group": "", "loss": "", "last": "number", "perplexity": "number", "step": "number", "lowest": "number"}
    return f"<h2>Validation</h2>{_table(head, rows)}"


def _event_table(found: Gathered) -> str:
    if not found.events:
        return '<h2>Events</h2><p class="lead">None recorded.</p>'
    rows = []
    for event in found.events:
        facts = " · ".join(f"{key}: {_words(value)}" for key, value in event.items() if key not in _HEAD)
        when = str(event.get("iso_time", "")).replace("T", " ").removesuffix("Z")
        rows.append([when, str(event.get("job", "")), str(event.get("step", "")), event["kind"], facts])
    shown, all_events = len(rows), found.num_events
    cut = f" (the newest {shown:,} of {all_events:,})" if shown < all_events else ""
    head = {"time (UTC)": "when", "job": "number", "step": "number", "event": "", "facts": "facts-cell"}
    return f"<h2>Events{cut}</h2>{_table(head, rows)}"


def _table(head: Mapping[str, str], rows: Iterable[Sequence[str]]) -> str:
    """`head`: titles of the columns and their styles."""
    lines = ["".join(f'<th class="{style}">{title}</th>' for title, style in head.items())]
    for row in rows:
        cells = zip(row, head.values(), strict=True)
        lines.append("".join(f'<td class="{style}">{escape(cell)}</td>' for cell, style in cells))
    return f'<div class="table"><table>{"".join(f"<tr>{line}</tr>" for line in lines)}</table></div>'


def _words(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{key} {_words(item)}" for key, item in value.items())
    if isinstance(value, list):
        return ", ".join(_words(item) for item in value)
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def _loss(loss: float) -> str:
    return f"{loss:.4f}" if math.isfinite(loss) else number(loss)


def chart_html(
    title: str,
    curves: Mapping[str, Points],
    *,
    unit: str = "",
    from_zero: bool = False,
    may_be_logarithmic: bool = False,
    references: Mapping[str, float] | None = None,
    wide: bool = False,
    x: str = "step",
) -> str:
    """A <figure> with its data in it. Every text is escaped, and the data is JSON without any `<`.

    `curves`: over `x`, by name; values that are not finite are gaps with a red tick. `may_be_logarithmic`: log scale
    when the values span more than two decades. `references`: dashed horizontal lines, by name."""
    shown = {name: points for name, points in curves.items() if len(points)}
    size = ' class="wide"' if wide else ""
    head = f"<figure{size}><figcaption>{escape(title)}"
    if not shown:
        return f'{head}</figcaption><p class="empty">No values yet.</p></figure>'
    is_log = may_be_logarithmic and _spans_decades(shown.values())
    data = {
        "curves": {name: [(int(x), float(f"{y:.6g}")) for x, y in points] for name, points in shown.items()},
        "references": {name: value for name, value in (references or {}).items() if math.isfinite(value)},
        "from_zero": from_zero,
        "log": is_log,
        "x": x,
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


def _spans_decades(curves: Iterable[Points]) -> bool:
    values = np.concatenate([points[:, 1] for points in curves])
    values = values[np.isfinite(values)]
    return len(values) > 0 and values.min() > 0 and bool(values.max() / values.min() > _LOG_SCALE_FROM)
