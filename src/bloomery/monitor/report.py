"""`bloomery report`: one page about one run, or about several side by side, made from their metrics and events."""

import csv
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from html import escape
from operator import itemgetter
from pathlib import Path
from typing import Any, TextIO

import numpy as np

from bloomery.base.errors import BloomeryError, DataError, Problem, mask
from bloomery.base.storage import write_atomically
from bloomery.base.units import format_bytes, format_count, format_device_hours, format_joules, format_seconds
from bloomery.config.load import as_dict, leaves, load_recipe, shipped_recipes
from bloomery.families.family import LM_LOSS
from bloomery.monitor import names
from bloomery.monitor.events import NOTABLE, TROUBLE, sentence
from bloomery.monitor.gather import AXES, NESTED, Curve, Gathered, is_number, numbers, read_run, thin
from bloomery.monitor.goodput import PARTS
from bloomery.monitor.history import readable_lines, valid_records
from bloomery.monitor.page import Line, chart_html, data_html, fact, number, page, table
from bloomery.monitor.record import perplexity_of
from bloomery.monitor.sinks import iso_time

_MOST_POINTS = 40_000
"""Of all curves of a page."""
_MOST_MARKS = 300
_CHARTS = {
    "learning rate": ("", ["lr"]),
    "throughput": ("tokens per second", ["tokens_per_second"]),
    "MFU": ("share of the device's peak", ["mfu"]),
    "gradient norm": ("", ["grad_norm"]),
    "weights": ("norm of all", ["params_norm"]),
    "memory": ("bytes", ["memory_bytes", "peak_memory_bytes"]),
    "global batch": ("samples", ["global_batch"]),
    "TFLOP/s": ("per device", ["tflops", "hardware_tflops", "megatron_tflops"]),
    "step": ("seconds", ["seconds_per_step"]),
}
"""Title: unit, and fields of the records. What is in none of them has a chart of its own, further down."""
_NOISY, _LONG = ("grad_norm", "tokens_per_second", "seconds_per_step"), 300
_FREE_SCALE = ("lr", "mfu")
_NEVER = ("skipped_steps", "nan_steps", "samples_per_second")
_AXIS_TITLES = dict(zip(AXES, ("steps", "tokens", "hours", "FLOPs"), strict=True))


@dataclass(frozen=True)
class RunOf:
    """One run, as the report sees it."""

    folder: Path
    found: Gathered
    name: str

    @cached_property
    def recipe(self) -> dict[str, Any]:
        """Every field by its path; empty where the run has none that can be read."""
        return _fields(str(self.folder / names.RECIPE_FILE), is_saved=True)

    @cached_property
    def goodput(self) -> dict[str, float]:
        return self.found.goodput()

    def results(self) -> dict[str, Any]:
        """The columns of the seeds' tables."""
        found, last, recipe = self.found, self.found.last_step, self.recipe
        ranks = found.facts.get("ranks")
        memory = found.series.get(("memory_share", ""))
        return {
            "model": found.facts.get(names.FACT_PARAMETERS),
            "GPUs": ranks,
            "TP": recipe.get("parallel.tp"),
            "PP": recipe.get("parallel.pp"),
            "DP": last.replicas if last else None,
            "micro-batch": recipe.get("batch.micro_batch_size"),
            "TFLOP/s": found.median("tflops"),
            "samples/s": last and last.global_batch / found.median("seconds_per_step"),
            "memory %": 100 * float(memory.points[:, 1].max()) if memory else None,
            "step s": found.median("seconds_per_step"),
            "steps": last and last.step,
            "loss": last and next(iter(last.losses.values()), None),
        }

    def facts(self) -> dict[str, Any]:
        """For `--json`."""
        found, last = self.found, self.found.last_step
        validation = [
            {"group": group, "loss": name, "step": int(curve.points[-1, 0]), "value": float(curve.points[-1, 1])}
            for (group, name), curve in found.validation_losses.items()
        ]
        return {
            "folder": str(self.folder),
            "name": self.name,
            "last_step": last and asdict(last),
            "validation": validation,
            "results": self.results(),
            "goodput": self.goodput,
            "energy": found.energy.to_json(),
            "jobs": len(found.jobs),
            "events": found.num_events,
            **{key: value for key, value in found.facts.items() if key != names.FACT_RECIPE},
        }


def read_runs(folders: Sequence[Path]) -> list[RunOf]:
    """DataError if one is no run. Runs of one recipe are called by their folders."""
    found = {folder: _gathered(folder) for folder in folders}
    titles = [str(each.facts.get(names.FACT_RECIPE) or folder.resolve().name) for folder, each in found.items()]
    alike = len({*titles}) < len(titles)
    return [
        RunOf(folder, each, folder.resolve().name if alike else title)
        for (folder, each), title in zip(found.items(), titles, strict=True)
    ]


def _gathered(folder: Path) -> Gathered:
    known = (names.METRICS_FILE, names.EVENTS_FILE, names.RECIPE_FILE)
    if not any((folder / name).is_file() for name in known):
        raise DataError(
            Problem(
                f"{folder} is not a run" if folder.is_dir() else f"{folder} does not exist",
                rule=f"a run folder holds {known[0]}, {known[1]} or {known[2]}",
                remedy="give the folder that `bloomery train` wrote, usually runs/<name>",
            )
        )
    return read_run(folder)


def write_report(*folders: Path, output: Path | None = None) -> Path:
    """Writes `output` (by default report.html in the run folder, or here if there are several runs) and returns its
    path. DataError if one is no run."""
    runs = read_runs(folders)
    target = output or (folders[0] / names.REPORT_FILE if len(folders) == 1 else Path(names.REPORT_FILE))
    write_atomically(target, report_html(runs))
    return target


def report_html(runs: Sequence[RunOf]) -> str:
    title = " · ".join(run.name for run in runs)
    return page(mask(f"{title:.80} · Bloomery"), mask(_body(runs)))


def write_csv(folders: Sequence[Path], file: TextIO) -> None:
    """A row for each record that counts, with all its numbers."""
    files = [(str(run.folder), run.folder / names.METRICS_FILE) for run in read_runs(folders)]
    found = [(folder, metrics) for folder, metrics in files if metrics.is_file()]
    columns = dict.fromkeys(
        name for _, metrics in found for each in valid_records(metrics) for name, _ in numbers(each)
    )
    writer = csv.DictWriter(file, ["run", "job", *AXES, *(name for name in columns if name not in AXES)])
    writer.writeheader()
    for folder, metrics in found:
        for each in valid_records(metrics):
            axes = {name: getattr(each, name) for name in ("job", *AXES)}
            writer.writerow({"run": folder, **axes, **dict(numbers(each))})


def recipe_differences(runs: Sequence[RunOf]) -> dict[str, list[Any]]:
    """Fields that are not the same in all runs, with the value in each."""
    recipes = [run.recipe for run in runs]
    fields = dict.fromkeys(path for recipe in recipes for path in recipe)
    values = {path: [recipe.get(path) for recipe in recipes] for path in fields}
    return {path: each for path, each in values.items() if any(value != each[0] for value in each)}


def _body(runs: Sequence[RunOf]) -> str:
    main, more = _charts(runs)
    head = _head_of_one(runs[0]) if len(runs) == 1 else _head_of_several(runs)
    axes = "".join(f'<button data-x="{name}">{title}</button>' for name, title in _AXIS_TITLES.items())
    bar = (
        f'<div class="bar"><span>{axes}</span><span><button data-do="log">log</button>'
        '<button data-do="raw">raw</button><button data-do="reset">all</button>'
        '<button data-do="theme">light/dark</button></span></div>'
    )
    rest = f'<details><summary>More curves ({len(more)})</summary><div class="charts">{"".join(more)}</div></details>'
    body = [
        *head,
        bar,
        f'<div class="charts">{"".join(main)}</div>{rest if more else ""}',
        *(_tables_of_one(runs[0]) if len(runs) == 1 else _tables_of_several(runs)),
        data_html({"axes": dict(_axes(runs)), "marks": _marks(runs)}, "run"),
        f"<footer>{_definition(runs)}Written by Bloomery at {iso_time(time.time())}.</footer>",
    ]
    return "\n".join(body)


def _head_of_one(run: RunOf) -> list[str]:
    lead = f"{run.folder} · {_last_word(run.found)}"
    return [
        f'<h1>{escape(run.name)}</h1><p class="lead">{escape(lead)}</p>',
        f'<dl class="facts">{"".join(_facts(run))}</dl>',
        goodput_bar(run.goodput),
    ]


def _head_of_several(runs: Sequence[RunOf]) -> list[str]:
    rows = [[run.name, *(_short(value) for value in run.results().values())] for run in runs]
    head = {"run": "", **dict.fromkeys(runs[0].results(), "number")}
    return [f'<h1>{len(runs)} runs</h1><p class="lead">Values of steps are medians.</p>', table(head, rows)]


def _tables_of_one(run: RunOf) -> Iterator[str]:
    found = run.found
    yield _validation_table(found)
    yield _mix_table(run)
    if found.last_step and (spread := found.last_step.rank_timers):
        head = {"of a step, at the end": "", **dict.fromkeys(("least", "median", "most", "rank that had it"), "number")}
        rows = [[phase, *(f"{seconds:.4g} s" for seconds in each[:3]), str(each[3])] for phase, each in spread.items()]
        yield "<h2>Ranks</h2>" + table(head, rows)
    if found.saves:
        rows = []
        for name, event in found.saves.items():
            kept = any((run.folder / root / name).is_dir() for root in ("checkpoints", "checkpoints-local"))
            rows.append([_when(event), name, sentence(event), "kept" if kept else "deleted or put aside"])
        yield "<h2>Checkpoints</h2>" + table({"time (UTC)": "when", "checkpoint": "", "": "words", "now": ""}, rows)
    samples = list(readable_lines(run.folder / names.SAMPLES_FILE, step=int, prompt=str, text=str))
    if samples:
        rows = [[each["prompt"], f"{each['step']:,}", each["text"]] for each in samples]
        head = {"prompt": "words", "step": "number", "continued by the checkpoint of that step": "words"}
        yield "<h2>Samples</h2>" + table(head, sorted(rows, key=itemgetter(0)))
    yield _event_table(found)
    facts = [(key, found.facts.get(key)) for key in ("host", "command", "commit", "device", "fingerprint", "versions")]
    rows = [[key, _words(value)] for key, value in facts if value]
    if rows:
        yield "<h2>Where it ran</h2>" + table({"fact": "", "of the newest job": "words"}, rows)
    yield _recipe_table(run)


def _tables_of_several(runs: Sequence[RunOf]) -> Iterator[str]:
    for run in runs:
        yield f"<h2>{escape(run.name)}</h2>{goodput_bar(run.goodput)}"
    rows = [[path, *(_words(value) for value in values)] for path, values in recipe_differences(runs).items()]
    head = {"field": ""} | {f"{i}. {run.name}": "words" for i, run in enumerate(runs, 1)}
    yield "<h2>Recipes: what differs</h2>" + (table(head, rows) if rows else '<p class="lead">Nothing.</p>')


def _charts(runs: Sequence[RunOf]) -> tuple[list[str], list[str]]:
    """The charts at the top, and those below."""
    several, palette = len(runs) > 1, dict[str, int]()
    curves = sum(len(run.found.series) + len(run.found.validation_losses) for run in runs)
    most = max(120, min(1200, _MOST_POINTS // max(1, curves)))
    main: list[str] = []

    def lines(wanted: Mapping[str, tuple[str, str]], *, smooth: bool = False) -> Iterator[Line]:
        for i, run in enumerate(runs):
            for label, key in wanted.items():
                if (curve := run.found.series.get(key)) is None:
                    continue
                name = f"{run.name} · {label}" * several or label
                color = i if several and len(wanted) == 1 else palette.setdefault(name, len(palette))
                noisy = key[0] in _NOISY and len(curve.points) > _LONG
                even = curve.smooth if smooth or noisy else None
                if even is not None and len(even):
                    yield Line(f"{name}, raw", thin(curve.points, most), str(i), color, "raw")
                    yield Line(name, thin(even, most), str(i), color)
                else:
                    yield Line(name, thin(curve.points, most), str(i), color)

    for loss in _loss_names(runs):
        palette.clear()
        found = [*lines({"training": ("losses", loss)}, smooth=True), *_other_losses(runs, loss, most)]
        references = runs[0].found.references if loss == LM_LOSS and not several else None
        main.append(chart_html(loss, found, references=references, wide=not main))
    used = {("losses", loss) for loss in _loss_names(runs)}
    for title, (unit, columns) in _CHARTS.items():
        used |= {(column, "") for column in columns}
        known = [column for column in columns if any((column, "") in run.found.series for run in runs)]
        wanted = {(title if len(known) == 1 else _title(column)): (column, "") for column in known}
        palette.clear()
        if known == ["lr"] or any(_changes(run.found.series.get(key)) for run in runs for key in wanted.values()):
            chart = chart_html(
                title,
                [*lines(wanted)],
                unit=unit,
                from_zero=columns[0] not in _FREE_SCALE,
                may_be_logarithmic=columns[0] == "grad_norm",
            )
            main.append(chart)
    groups: dict[str, dict[str, tuple[str, str]]] = {}
    for run in runs:
        for (field, name), curve in run.found.series.items():
            if (field, name) not in used and field not in _NEVER and _changes(curve):
                groups.setdefault(_chart_of(field, name), {})[name or _title(field)] = (field, name)
    more: list[str] = []
    for title, wanted in groups.items():
        palette.clear()
        is_loss = title.startswith("training loss")
        chart = chart_html(title, [*lines(wanted, smooth=is_loss)], from_zero=not is_loss)
        (main if is_loss or title == "timers" else more).append(chart)
    return main, more


def _chart_of(field: str, name: str) -> str:
    """Numbers of one kind share a chart, such as those of several nodes: `node-1/power watts`."""
    if field == "source_losses":
        return "training loss by source"
    return f"{_title(field)}: {name.rpartition('/')[2]}" if field in NESTED else _title(field)


def _other_losses(runs: Sequence[RunOf], loss: str, most: int) -> Iterator[Line]:
    """Of the validation groups, and of branches that were left."""
    several, color = len(runs) > 1, len(runs)
    for i, run in enumerate(runs):
        for (group, name), curve in run.found.validation_losses.items():
            if name == loss:
                yield Line(f"{run.name} · {group}" * several or group, thin(curve.points, most), str(i), color)
                color += 1
        if loss == next(iter(run.found.losses), loss):
            for job, branch in run.found.abandoned.items():
                yield Line(f"left, job {job}", thin(branch[0].points, most), f"{i}/{job}", 0, "gone")


def _loss_names(runs: Sequence[RunOf]) -> list[str]:
    trained = dict.fromkeys(name for run in runs for name in run.found.losses)
    return [*(trained | dict.fromkeys(name for run in runs for _, name in run.found.validation_losses))] or [LM_LOSS]


def _axes(runs: Sequence[RunOf]) -> Iterator[tuple[str, dict[str, list[float]]]]:
    for i, run in enumerate(runs):
        yield str(i), run.found.axes()
        for job, branch in run.found.abandoned.items():
            yield f"{i}/{job}", run.found.axes(branch[1:])


def _marks(runs: Sequence[RunOf]) -> list[dict[str, Any]]:
    """What happened, for the time axis of one run: not every save."""
    marks = [
        {"step": each["step"], "time": each["time"], "text": f"{each['kind']}: {sentence(each)}"[:200],
         "bad": each["kind"] in TROUBLE}
        for each in (runs[0].found.events if len(runs) == 1 else ())
        if each["kind"] in NOTABLE and is_number(each.get("step")) and is_number(each.get("time"))
    ]  # fmt: skip
    return marks[-_MOST_MARKS:]


def goodput_bar(parts: Mapping[str, float]) -> str:
    total = sum(parts.values())
    if not total > 0:
        return ""
    shown = [(i, name, seconds) for i, (name, seconds) in enumerate(parts.items()) if seconds >= total * 0.0005]
    pieces = "".join(
        f'<i class="p{i}" style="flex-grow:{seconds / total:.4f}" title="{name}"></i>' for i, name, seconds in shown
    )
    words = "".join(
        f'<li title="{escape(PARTS[name])}"><i class="p{i}"></i>{name} <b>{seconds / total:.1%}</b> '
        f"{_duration(seconds)}</li>"
        for i, name, seconds in shown
    )
    title = f"Goodput {parts['training'] / total:.1%} of {_duration(total)}"
    return f'<div class="goodput"><b>{title}</b><div class="parts">{pieces}</div><ul>{words}</ul></div>'


_FORETOLD: dict[str, tuple[str, Callable[[Any], str]]] = {
    "step_seconds": ("Step", lambda seconds: f"{seconds:.3g} s"),
    "memory_bytes": ("Peak memory", format_bytes),
    "total_seconds": ("Whole training", format_seconds),
}


def _facts(run: RunOf) -> Iterator[str]:
    found, last = run.found, run.found.last_step
    parameters = found.facts.get(names.FACT_PARAMETERS)
    if parameters is not None:
        yield fact("Parameters", format_count(parameters) if is_number(parameters) else str(parameters))
    if ancestor := found.facts.get(names.FACT_ANCESTOR):
        yield fact("Began with", Path(str(ancestor)).name, str(ancestor))
    if last is not None:
        yield fact("Steps", f"{last.step:,}", f"of {last.train_steps:,}")
        yield fact("Tokens", format_count(last.consumed_tokens), f"{last.consumed_samples:,} samples")
        for name, loss in last.losses.items():
            yield fact(f"Training {name}", _loss(loss), "last logged", loss)
    for (group, name), curve in found.validation_losses.items():
        loss = float(curve.points[-1, 1])
        if name == LM_LOSS:
            yield fact(group.capitalize(), _loss(loss), f"perplexity {number(perplexity_of(loss))}", loss)
    if last is not None:
        yield fact("Tokens per second", number(found.median("tokens_per_second")), "median")
        mfu = found.median("mfu")
        note = "MFU n/a" if math.isnan(mfu) else f"MFU {mfu:.1%}"
        yield fact("TFLOP/s per device", number(found.median("tflops")), f"median · {note}")
        if last.peak_memory_bytes and not found.scores():
            yield fact("Peak memory", format_bytes(last.peak_memory_bytes), "of a device")
        nan = math.nan if found.nan_steps else 0.0
        yield fact("Skipped steps", f"{found.skipped_steps:,}", f"{found.nan_steps:,} NaN", nan)
    for name, (predicted, measured) in found.scores().items():
        title, text = _FORETOLD[name]
        yield fact(title, text(measured), f"{text(predicted)} predicted ({predicted / measured - 1:+.1%})")
    yield from _energy_fact(found)
    if found.carbon:
        kilograms = sum(each.get("kg_co2e") or 0.0 for each in found.carbon.values())
        estimated = {part for each in found.carbon.values() for part in each.get("estimated") or ()}
        note = f"estimated: {', '.join(sorted(estimated))}" if estimated else "CodeCarbon"
        yield fact("Emissions", f"{number(kilograms)} kg CO2e", note)
    if seconds := sum(run.goodput.values()):
        jobs = max(1, len(found.jobs))
        yield fact("Wall clock", _duration(seconds), f"{jobs} job{'s' * (jobs != 1)}")


def _energy_fact(found: Gathered) -> Iterator[str]:
    """What all jobs have spent; nothing for runs that did not count it."""
    spent = found.energy
    if not spent.device_seconds:
        return
    hours = format_device_hours(spent.device_seconds)
    if spent.measured_joules is None:
        yield fact("Energy", "not measured", f"{found.facts.get(names.FACT_ENERGY_SENSOR)} · {hours}")
    else:
        part = "" if spent.coverage > 0.99 else f" · measured {spent.coverage:.0%}"
        yield fact("Energy", format_joules(spent.measured_joules), f"{hours}{part}")


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
    return f"<h2>Validation</h2>{table(head, rows)}"


def _mix_table(run: RunOf) -> str:
    """What was really taken from each source, beside what the recipe asked for."""
    last, recipe = run.found.last_step, run.recipe
    if last is None or not last.source_samples:
        return ""
    total = sum(last.source_samples.values()) or 1
    weights = {recipe.get(f"data.train.{i}.path"): recipe.get(f"data.train.{i}.weight") for i in range(len(recipe))}
    asked = sum(float(weight or 0) for weight in weights.values())
    rows = []
    for source, samples in last.source_samples.items():
        weight, loss = weights.get(source), last.source_losses.get(source, math.nan)
        wanted = f"{weight / asked:.2%}" if weight else ""
        rows.append([source, f"{samples:,}", f"{samples / total:.2%}", wanted, _loss(loss)])
    head = {"source": "", "samples": "number", "share": "number", "weight now": "number", "loss": "number"}
    return f"<h2>Data consumed</h2>{table(head, rows)}"


def _event_table(found: Gathered) -> str:
    if not found.events:
        return '<h2>Events</h2><p class="lead">None recorded.</p>'
    rows = [
        [_when(event), str(event.get("job", "")), str(event.get("step", "")), event["kind"], sentence(event)]
        for event in found.events
    ]
    cut = f" (the newest {len(rows):,} of {found.num_events:,})" if len(rows) < found.num_events else ""
    head = {"time (UTC)": "when", "job": "number", "step": "number", "event": "", "facts": "words"}
    return f"<h2>Events{cut}</h2>{table(head, rows)}"


def _recipe_table(run: RunOf) -> str:
    """Every field, and beside it the shipped recipe of the same name, where that says something else."""
    if not run.recipe:
        return ""
    shipped = _fields(str(run.recipe.get("name"))) if run.recipe.get("name") in shipped_recipes() else {}
    rows = []
    for path, value in run.recipe.items():
        differs = bool(shipped) and shipped.get(path) != value
        rows.append([path, _words(value), _words(shipped.get(path, "none")) if differs else ""])
    differing = [row for row in rows if row[2]]
    head = {"field": "", "value": "words"}
    both = {**head, "shipped recipe": "words"}
    changed = f"<h2>Differs from the shipped recipe</h2>{table(both, differing)}" if differing else ""
    everything = table(head, [row[:2] for row in rows])
    return f"{changed}<details><summary>Recipe ({len(rows)} fields)</summary>{everything}</details>"


def _fields(name: str, *, is_saved: bool = False) -> dict[str, Any]:
    try:
        return dict(leaves(as_dict(load_recipe(name, is_saved=is_saved).recipe)))
    except (BloomeryError, OSError):  # of another version: the report goes without it
        return {}


def _definition(runs: Sequence[RunOf]) -> str:
    if (last := runs[0].found.last_step) is None:
        return ""
    hardware = f", hardware TFLOP/s as {last.hardware_tflops_definition}" * bool(last.hardware_tflops_definition)
    return f"TFLOP/s are counted as {escape(last.tflops_definition + hardware)}. "


def _changes(curve: Curve | None) -> bool:
    return curve is not None and bool(np.ptp(curve.points[:, 1]) != 0)


def _title(field: str) -> str:
    return field.replace("_", " ")


def _when(event: Mapping[str, Any]) -> str:
    return str(event.get("iso_time", "")).replace("T", " ").removesuffix("Z")


def _duration(seconds: float) -> str:
    return format_seconds(seconds) if seconds >= 10 else f"{seconds:.2g}s"


def _words(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{key} {_words(item)}" for key, item in value.items())
    if isinstance(value, list):
        return ", ".join(_words(item) for item in value)
    return "-" if value is None else str(value)


def _short(value: Any) -> str:
    return number(value) if is_number(value) and not math.isnan(value) else "-"


def _loss(loss: float) -> str:
    return f"{loss:.4f}" if math.isfinite(loss) else number(loss)
