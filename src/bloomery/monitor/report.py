"""One self-contained HTML page about one run, made from its metrics.jsonl and events.jsonl. Imports no torch."""

from __future__ import annotations

import math
import re
import statistics
import time
from collections.abc import Callable
from html import escape
from pathlib import Path
from typing import Any

from bloomery.base.bounded import read_small
from bloomery.base.credentials import mask
from bloomery.base.energy import Energy, format_device_hours, format_joules
from bloomery.base.errors import DataError, Problem
from bloomery.base.storage import write_atomically
from bloomery.base.units import format_count, format_seconds
from bloomery.monitor import names
from bloomery.monitor.chart import Chart, Series, chart_html, number
from bloomery.monitor.energy import is_whole
from bloomery.monitor.history import read_events, read_metrics
from bloomery.monitor.record import Record, StepRecord, ValidationRecord, perplexity_of
from bloomery.monitor.report_page import page
from bloomery.monitor.sinks import iso_time

_MOST_EVENTS = 1000
_HEAD = ("kind", "step", "iso_time", "time", "job")


def write_report(run_folder: Path, *, output: Path | None = None) -> Path:
    """Writes `output` (report.html in the run folder by default) and returns its path. DataError if it is no run."""
    run_folder = Path(run_folder)
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
    records = read_metrics(metrics) if metrics.is_file() else []
    ledger = read_events(events) if events.is_file() else []
    target = Path(output) if output is not None else run_folder / names.REPORT_FILE
    write_atomically(target, mask(report_html(run_folder, records, ledger)))
    return target


def report_html(run_folder: Path, records: list[Record], events: list[dict[str, Any]]) -> str:
    """The page as text."""
    steps = [record for record in records if isinstance(record, StepRecord)]
    validations = [record for record in records if isinstance(record, ValidationRecord)]
    name = _name(run_folder, events)
    charts = [chart_html(chart) for chart in _charts(steps, validations, _reference_losses(events))]
    charts[0] = charts[0].replace("<figure>", '<figure class="wide">', 1)
    body = [
        f'<h1>{escape(name)}</h1><p class="lead">{escape(str(run_folder))} · {escape(_last_word(events))}</p>',
        f'<dl class="facts">{"".join(_facts(steps, validations, events))}</dl>',
        f'<div class="charts">{"".join(charts)}</div>',
        _validation_table(validations),
        _event_table(events),
        f"<footer>{_definition(steps)}Written by Bloomery at {iso_time(time.time())}.</footer>",
    ]
    return page(f"{name} · Bloomery", "\n".join(body))


def _charts(steps: list[StepRecord], validations: list[ValidationRecord], references: dict[str, float]) -> list[Chart]:
    records: list[Record] = [*steps, *validations]
    losses = list(dict.fromkeys(name for record in records for name in record.losses))
    groups = list(dict.fromkeys(record.group for record in validations))
    charts = []
    for loss in losses or [names.MAIN_LOSS]:
        training = [(record.step, record.losses[loss]) for record in steps if loss in record.losses]
        series = [Series("training", training)]
        for group in groups:
            points = [
                (each.step, each.losses[loss]) for each in validations if each.group == group and loss in each.losses
            ]
            series.append(Series(f"validation: {group}", points, dotted=True))
        charts.append(Chart(loss, series, references=references if loss == names.MAIN_LOSS else {}))
    sources = list(dict.fromkeys(source for record in steps for source in record.source_losses))
    by_source = [
        Series(source, [(each.step, each.source_losses[source]) for each in steps if source in each.source_losses])
        for source in sources
    ]
    if by_source:
        charts.append(Chart("training loss by source", by_source))
    return [
        *charts,
        Chart("learning rate", [_series("learning rate", steps, lambda record: record.lr)], from_zero=True),
        Chart(
            "throughput",
            [_series("tokens per second", steps, lambda record: record.tokens_per_second)],
            unit="tokens per second",
            from_zero=True,
        ),
        Chart(
            "gradient norm",
            [_series("gradient norm", steps, lambda record: record.grad_norm)],
            from_zero=True,
            may_be_logarithmic=True,
        ),
    ]


def _series(name: str, steps: list[StepRecord], value: Callable[[StepRecord], float]) -> Series:
    return Series(name, [(record.step, value(record)) for record in steps])


def _facts(steps: list[StepRecord], validations: list[ValidationRecord], events: list[dict[str, Any]]) -> list[str]:
    facts = []
    parameters = _newest_fact(events, names.FACT_PARAMETERS)
    if parameters is not None:
        facts.append(_fact("Parameters", format_count(parameters) if _is_number(parameters) else str(parameters)))
    if steps:
        last = steps[-1]
        facts.append(_fact("Steps", f"{last.step:,}", f"of {last.train_steps:,}"))
        facts.append(_fact("Tokens", format_count(last.consumed_tokens), f"{last.consumed_samples:,} samples"))
        facts += [_fact(f"Training {name}", _loss(loss), "last logged", loss) for name, loss in last.losses.items()]
    for record in {record.group: record for record in validations}.values():
        loss = record.losses.get(names.MAIN_LOSS, math.nan)
        facts.append(
            _fact(f"Validation: {record.group}", _loss(loss), f"perplexity {number(perplexity_of(loss))}", loss)
        )
    if steps:
        facts.append(
            _fact("Tokens per second", number(_median([record.tokens_per_second for record in steps])), "median")
        )
        mfu = _median([record.mfu for record in steps if record.mfu is not None])
        note = "MFU n/a" if math.isnan(mfu) else f"MFU {mfu:.1%}"
        facts.append(
            _fact("TFLOP/s per device", number(_median([record.tflops for record in steps])), f"median · {note}")
        )
        skipped, nan = sum(record.skipped_steps for record in steps), sum(record.nan_steps for record in steps)
        facts.append(_fact("Skipped steps", f"{skipped:,}", f"{nan:,} NaN", math.nan if nan else 0.0))
    facts += _energy_fact(steps, events)
    times = [event["time"] for event in events if _is_number(event.get("time"))] + [record.time for record in steps]
    if times:
        jobs = len({event.get("job") for event in events} | {record.job for record in steps})
        facts.append(_fact("Wall clock", format_seconds(max(times) - min(times)), f"{jobs} job{'s' * (jobs != 1)}"))
    return facts


def _energy_fact(steps: list[StepRecord], events: list[dict[str, Any]]) -> list[str]:
    """What all jobs have spent, as the newest record or event says; nothing for runs that did not count it."""
    told = [event.get(names.FACT_ENERGY) for event in events] + [record.energy for record in steps]
    spent = max((Energy.from_json(each) for each in told), key=lambda each: each.device_seconds, default=Energy())
    if not spent.device_seconds:
        return []
    hours = format_device_hours(spent.device_seconds)
    if spent.measured_joules is None:
        return [_fact("Energy", "not measured", f"{_newest_fact(events, names.FACT_ENERGY_SENSOR)} · {hours}")]
    part = "" if is_whole(spent) else f" · measured {spent.coverage:.0%}"
    return [_fact("Energy", format_joules(spent.measured_joules), f"{hours}{part}")]


def _fact(name: str, value: str, note: str = "", alarm: float = 0.0) -> str:
    """Red when `alarm` is not finite."""
    mark = "" if math.isfinite(alarm) else ' class="bad"'
    small = f"<small>{escape(note)}</small>" if note else ""
    return f"<div><dt>{escape(name)}</dt><dd{mark}>{escape(value)}{small}</dd></div>"


def _last_word(events: list[dict[str, Any]]) -> str:
    """How the newest job ended, as far as the ledger knows."""
    for event in reversed(events):
        if event["kind"] == names.EVENT_STOP:
            return f"stopped at step {event.get('step', '?')}: {event.get(names.FACT_REASON, 'no reason given')}"
        if event["kind"] == names.EVENT_START:
            return "no stop in the ledger: it is running, or it was killed"
    return "no ledger of starts and stops"


def _validation_table(validations: list[ValidationRecord]) -> str:
    best: dict[tuple[str, str], tuple[float, int]] = {}
    last: dict[tuple[str, str], tuple[float, int]] = {}
    for record in validations:
        for name, loss in record.losses.items():
            last[record.group, name] = (loss, record.step)
            if math.isfinite(loss):
                best[record.group, name] = min(best.get((record.group, name), (loss, record.step)), (loss, record.step))
    if not last:
        return ""
    rows = ""
    for (group, name), (loss, step) in last.items():
        lowest = best.get((group, name), (math.nan, step))
        cells = [_loss(loss), number(perplexity_of(loss)), f"{step:,}", f"{_loss(lowest[0])} at step {lowest[1]:,}"]
        rows += f"<tr><td>{escape(group)}</td><td>{escape(name)}</td>"
        rows += "".join(f'<td class="number">{cell}</td>' for cell in cells) + "</tr>"
    head = "<th>group<th>loss" + "".join(f'<th class="number">{it}' for it in ("last", "perplexity", "step", "lowest"))
    return f'<h2>Validation</h2><div class="table"><table><tr>{head}</tr>{rows}</table></div>'


def _event_table(events: list[dict[str, Any]]) -> str:
    if not events:
        return '<h2>Events</h2><p class="lead">None recorded.</p>'
    shown = events[-_MOST_EVENTS:]
    rows = ""
    for event in shown:
        facts = " · ".join(f"{key}: {_words(value)}" for key, value in event.items() if key not in _HEAD)
        when = str(event.get("iso_time", "")).replace("T", " ").removesuffix("Z")
        rows += f'<tr><td class="when">{escape(when)}</td><td class="number">{escape(str(event.get("job", "")))}</td>'
        rows += f'<td class="number">{escape(str(event.get("step", "")))}</td><td>{escape(event["kind"])}</td>'
        rows += f'<td class="facts-cell">{escape(facts)}</td></tr>'
    cut = f" (the newest {len(shown):,} of {len(events):,})" if len(shown) < len(events) else ""
    head = '<th>time (UTC)<th class="number">job<th class="number">step<th>event<th>facts'
    return f'<h2>Events{cut}</h2><div class="table"><table><tr>{head}</tr>{rows}</table></div>'


def _name(run_folder: Path, events: list[dict[str, Any]]) -> str:
    recipe = run_folder / names.RECIPE_FILE
    text = read_small(recipe).decode(errors="replace") if recipe.is_file() else ""
    named = re.search(r"^name:(.*\S)", text, re.M)
    from_file = named[1].strip().strip("'\"") if named else run_folder.resolve().name
    return str(_newest_fact(events, names.FACT_RECIPE) or from_file)


def _reference_losses(events: list[dict[str, Any]]) -> dict[str, float]:
    found: dict[str, float] = {}
    for event in events:
        losses = event.get(names.FACT_REFERENCE_LOSSES)
        if isinstance(losses, dict):
            found |= {str(name): float(value) for name, value in losses.items() if _is_number(value)}
    return found


def _newest_fact(events: list[dict[str, Any]], fact: str) -> Any:
    return next((event[fact] for event in reversed(events) if event.get(fact) is not None), None)


def _definition(steps: list[StepRecord]) -> str:
    return f"TFLOP/s: {escape(steps[-1].tflops_definition)}. " if steps and steps[-1].tflops_definition else ""


def _words(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{key} {_words(item)}" for key, item in value.items())
    if isinstance(value, list):
        return ", ".join(_words(item) for item in value)
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def _median(values: list[float]) -> float:
    finite = [value for value in values if math.isfinite(value)]
    return statistics.median(finite) if finite else math.nan


def _loss(loss: float) -> str:
    return f"{loss:.4f}" if math.isfinite(loss) else number(loss)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
