"""The plan as one HTML page, in the frame of the report of a run: bars by part, and curves."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Mapping
from html import escape
from typing import Any

import numpy as np

from bloomery.base.units import format_bytes
from bloomery.config.recipe import Recipe
from bloomery.monitor.page import chart_html, page
from bloomery.plan.answer import Answer
from bloomery.plan.forecast import Forecast
from bloomery.plan.search import Ranking
from bloomery.plan.step_time import PARTS
from bloomery.sizing.schedule import TrainingPlan

_COLOURS = ("#3b6ea5", "#6a9f58", "#c9822b", "#a5483b", "#7b5ea7", "#4f9a94", "#8a8a8a", "#c2a83e")
_MEMORY = ("weights", "gradients", "optimizer", "activations", "logits", "buffers", "context")
_GIB = 2.0**30
_MOST_POINTS = 400


def picture_page(answer: Answer, recipe: Recipe) -> str:
    facts = answer.facts
    training, machine = facts["training"], facts["machine"]
    lead = (
        f"{facts['world']:,} x {machine['gpu']}, {machine['network']}: {training['days']:.3g} days, "
        f"{training['usd']:,.0f} USD, {training['energy_mwh']:.3g} MWh, {training['carbon_tonnes']:.3g} t CO2e"
    )
    ranking, order = answer.ranking, answer.ranking.order[:3]
    memory = {"this layout": {name: float(facts["memory_bytes"][name]) for name in _MEMORY}} | {
        ranking.name(row): {name: float(getattr(ranking.memory, name)[row]) for name in _MEMORY} for row in order
    }
    seconds = facts["step"]["step_seconds"]
    steps = {part: facts["step_share"][part] * seconds for part in PARTS}
    body = [
        f'<h1>{escape(recipe.name)}</h1><p class="lead">{escape(lead)}</p>',
        _bars("memory of the fullest rank", memory, format_bytes, limit=float(facts["memory_bytes"]["device_has"])),
        _bars("a step, from its start to its end", _waterfall(steps), lambda value: f"{value:.3g} s", limit=seconds),
        '<div class="charts">',
        _frontier(ranking),
        _timeline(answer.forecast, TrainingPlan.of(recipe)),
        _efficiency(facts["scaling"]),
        "</div>",
        *(f"<p>{escape(sentence)}</p>" for sentence in (*answer.warnings, *facts["largest_costs"], *facts["advice"])),
    ]
    return page(f"{recipe.name} · plan · Bloomery", "\n".join(body))


def trial_page(name: str, facts: Mapping[str, Any]) -> str:
    """Throughput and memory of each trial of `bloomery tune`."""
    done = [(f"{n}: {trial['trial']} ({trial['outcome']})", trial) for n, trial in enumerate(facts["trials"], start=1)]
    speed = {title: {"tokens/s": trial["tokens_per_second"] or 0.0} for title, trial in done}
    memory = {title: {"memory": float(trial["peak_memory_bytes"] or 0)} for title, trial in done}
    better = "" if facts["improvement"] is None else f", {facts['improvement']:+.1%} against the untuned recipe"
    body = [
        f"<h1>{escape(name)}, tuned</h1><p class='lead'>{escape(facts['best'])}{better}</p>",
        _bars(
            "tokens per second",
            speed,
            lambda value: f"{value:,.0f}",
            limit=max(size for each in speed.values() for size in each.values()),
        ),
        _bars(
            "peak memory", memory, format_bytes, limit=max(size for each in memory.values() for size in each.values())
        ),
        f"<p><code>{escape(facts['command'])}</code></p>",
    ]
    return page(f"{name} · tuned · Bloomery", "\n".join(body))


def _bars(title: str, rows: Mapping[str, Mapping[str, float]], text: Any, *, limit: float) -> str:
    """A stacked bar for each row; a part whose name begins with a space is a gap."""
    widest = max([limit, *(sum(parts.values()) for parts in rows.values())])
    names = [name for name in dict.fromkeys(name for parts in rows.values() for name in parts) if _is_shown(name)]
    colours = dict(zip(names, _COLOURS, strict=False))
    lines = [f"<figure class='wide'><figcaption>{escape(title)}, of {escape(text(limit))}</figcaption>"]
    for row, parts in rows.items():
        whole, pieces = sum(size for name, size in parts.items() if _is_shown(name)), ""
        for name, size in parts.items():
            title = escape(f"{name}: {text(size)}") if _is_shown(name) else ""
            style = f"width:{100 * (size / widest):.3f}%;background:{colours.get(name, 'transparent')}"
            pieces += f"<div title='{title}' style='{style}'></div>"
        lines.append(f"<div>{escape(row)}: {escape(text(whole))}</div>")
        lines.append(f"<div style='display:flex;height:1.6em;margin-bottom:.6em'>{pieces}</div>")
    swatch = "display:inline-block;width:.8em;height:.8em;margin:0 .3em 0 1em;background:"
    lines.append("".join(f"<span style='{swatch}{colours[name]}'></span>{escape(name)}" for name in names))
    return "\n".join([*lines, "</figure>"])


def _is_shown(name: str) -> bool:
    return not name.startswith(" ")


def _waterfall(steps: Mapping[str, float]) -> dict[str, dict[str, float]]:
    """Each part begins where the one before it ends."""
    begins = np.concatenate([[0.0], np.cumsum(list(steps.values()))])
    return {
        name: {" before": float(begin), name: spent}
        for (name, spent), begin in zip(steps.items(), begins, strict=False)
    }


def _frontier(ranking: Ranking) -> str:
    """Of all legal layouts, the fastest that fits in so much memory."""
    most = 2 * float(np.max(ranking.grid.setup.memory_bytes))
    near = np.flatnonzero(ranking.safe_bytes <= most)
    size, speed = ranking.safe_bytes[near] / _GIB, ranking.tokens_per_s[near]
    order = np.argsort(size)
    points = zip(size[order].tolist(), np.maximum.accumulate(speed[order]).tolist(), strict=True)
    return chart_html(
        "fastest layout that fits", {"tokens per second": _points(points)}, unit="tokens/s per GPU", x="GiB"
    )


def _timeline(found: Forecast, plan: TrainingPlan) -> str:
    """The global batch over the hours, and the checkpoints."""
    firsts = [level.first_step for level in found.levels]

    def hour(step: int) -> float:
        level = found.levels[bisect_right(firsts, step) - 1]
        return (level.begins_seconds + (step - level.first_step + 1) * level.step_seconds) / 3600

    ends = [(hour(level.first_step + level.steps - 1), level.global_batch) for level in found.levels]
    batch = _points(sorted([*((level.begins_seconds / 3600, level.global_batch) for level in found.levels), *ends]))
    saves = list(enumerate(plan.save_steps(), start=1))
    thin = saves[:: max(1, len(saves) // _MOST_POINTS)]
    curves = {"global batch": batch, "checkpoints written": _points((hour(step), n) for n, step in thin)}
    return chart_html("the training", curves, unit="samples; checkpoints", from_zero=True, x="hours")


def _points(pairs: Iterable[tuple[float, float]]) -> Any:
    """Whole numbers in ascending order, as the charts want them; of several the last."""
    newest = {int(x): y for x, y in pairs}
    return np.array(sorted(newest.items()), dtype=np.float64).reshape(-1, 2)


def _efficiency(rows: list[dict[str, Any]]) -> str:
    networks = [name for name in rows[0] if name not in ("nodes", "samples_per_gpu")] if rows else []
    curves = {name: np.array([(row["nodes"], row[name]) for row in rows]) for name in networks}
    return chart_html("efficiency against nodes", curves, from_zero=True, x="nodes")
