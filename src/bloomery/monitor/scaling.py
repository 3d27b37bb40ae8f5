"""What more ranks bring: efficiency, and where the rest of the time goes.

Measured, per rank: the seconds of a step, and those in which it waited for others, in collectives and between pipeline
stages apart. What is not waiting counts as computation. Derived from that: stragglers are the difference between the
slowest and the average rank's computation, for so long do the others wait at least; the bubble is what the schedule's
formula says, but no more than was waited between stages; all other waiting is exposed communication. The four add up
to the step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from html import escape
from statistics import fmean
from typing import Any

from bloomery.base.units import format_count
from bloomery.config.recipe import PipelineSchedule
from bloomery.monitor.chart import Chart, Series, chart_html
from bloomery.monitor.report_page import page

PARTS = ("computation", "communication", "bubble", "stragglers")


@dataclass(frozen=True)
class RankTimes:
    """Seconds per step of one rank."""

    step: float
    collective_wait: float
    pipeline_wait: float
    processor: float
    """Processor time of all its threads: less than what it computes for if it has to share its core."""


@dataclass(frozen=True)
class Measurement:
    """One training with one number of ranks."""

    ranks: int
    tokens_per_step: int
    bubble_share: float
    """Of a step, by the formula of the pipeline's schedule; 0 without one."""
    times: Sequence[RankTimes]
    splits: bool = True
    """Whether waits were seen at all: on an accelerator the host does not wait."""


@dataclass(frozen=True)
class ScalingRow:
    ranks: int
    seconds_per_step: float
    tokens_per_second: float
    efficiency: float
    """Tokens per second and rank, compared with the smallest number of ranks."""
    parts: dict[str, float] | None
    """Seconds of a step by PARTS, averaged over ranks; None if waits were not seen."""
    computation_growth: float | None
    """Rank-seconds of computation per token, compared with the smallest number of ranks: more than 1 is time lost to
    smaller pieces, repeated work or cores that have to be shared."""


def bubble_share(schedule: PipelineSchedule, *, pp: int, chunks: int, micro_batches: int) -> float:
    """The share of a step in which a rank waits for the pipeline to fill and to drain, if all passes take as long.
    Zero bubble fills two thirds of it."""
    idle = (pp - 1) / (3 if schedule == "zero_bubble" else 1)
    return idle / (micro_batches * chunks + idle)


def scaling_rows(measurements: Sequence[Measurement]) -> list[ScalingRow]:
    """In the order given; the first is what the others are compared with."""
    first = measurements[0]
    base_speed = _tokens_per_second(first) / first.ranks
    base_parts = _parts(first)
    rows = []
    for each in measurements:
        parts = _parts(each)
        growth = None
        if parts is not None and base_parts is not None:
            growth = _cost(each, parts) / _cost(first, base_parts)
        rows.append(
            ScalingRow(
                ranks=each.ranks,
                seconds_per_step=_seconds(each),
                tokens_per_second=_tokens_per_second(each),
                efficiency=_tokens_per_second(each) / each.ranks / base_speed,
                parts=parts,
                computation_growth=growth,
            )
        )
    return rows


def processor_share(measurement: Measurement) -> float:
    """Of the time in which ranks do not wait, the share in which they had a core, at most 1."""
    computed = sum(each.step - each.collective_wait - each.pipeline_wait for each in measurement.times)
    return min(1.0, sum(each.processor for each in measurement.times) / computed)


def scaling_table(rows: Sequence[ScalingRow]) -> str:
    head = f"{'ranks':>5}  {'s/step':>8}  {'tokens/s':>9}  {'efficiency':>10}" + "".join(f"  {p:>13}" for p in PARTS)
    lines = [head]
    for row in rows:
        shares = [f"{100 * row.parts[part] / row.seconds_per_step:.1f}%" if row.parts else "-" for part in PARTS]
        lines.append(
            f"{row.ranks:>5}  {row.seconds_per_step:>8.4f}  {format_count(row.tokens_per_second):>9}  "
            f"{100 * row.efficiency:>9.1f}%" + "".join(f"  {share:>13}" for share in shares)
        )
    return "\n".join(lines)


def scaling_json(rows: Sequence[ScalingRow], measurements: Sequence[Measurement]) -> list[dict[str, Any]]:
    """Seconds are per step; `times` holds what each rank measured."""
    return [
        asdict(row) | {"bubble_share": each.bubble_share, "times": [asdict(times) for times in each.times]}
        for row, each in zip(rows, measurements, strict=True)
    ]


def scaling_page(title: str, lead: str, notes: Sequence[str], rows: Sequence[ScalingRow]) -> str:
    """One self-contained page."""
    efficiency = Chart(
        "Efficiency",
        [Series("efficiency", [(row.ranks, row.efficiency) for row in rows], dotted=True)],
        unit="tokens per second and rank, compared with the fewest ranks",
        from_zero=True,
        references={"ideal": 1.0},
        x_name="ranks",
    )
    speed = Chart(
        "Speed",
        [
            Series("measured", [(row.ranks, row.tokens_per_second) for row in rows], dotted=True),
            Series("ideal", [(row.ranks, rows[0].tokens_per_second * row.ranks / rows[0].ranks) for row in rows]),
        ],
        unit="tokens per second",
        from_zero=True,
        x_name="ranks",
    )
    bars = "".join(_bar(row) for row in rows if row.parts is not None)
    legend = "".join(f'<span><i class="c{i}"></i>{part}</span>' for i, part in enumerate(PARTS))
    split = (
        f'<h2>Where a step goes</h2><figure class="wide"><div class="legend">{legend}</div>'
        f'<div class="bars">{bars}</div></figure>'
    )
    remarks = "".join(f"<p>{escape(note)}</p>" for note in notes)
    charts = f'<div class="charts">{chart_html(efficiency)}{chart_html(speed)}</div>'
    body = f'<h1>{escape(title)}</h1><p class="lead">{escape(lead)}</p>{charts}{split if bars else ""}{remarks}'
    return page(title, body)


def _bar(row: ScalingRow) -> str:
    assert row.parts is not None
    pieces = "".join(
        f'<i class="c{i}" style="width:{100 * row.parts[part] / row.seconds_per_step:.2f}%" '
        f'title="{part} {row.parts[part]:.4f} s"></i>'
        for i, part in enumerate(PARTS)
    )
    return f'<span>{row.ranks} ranks</span><div class="bar">{pieces}</div><span>{row.seconds_per_step:.4f} s</span>'


def _parts(measurement: Measurement) -> dict[str, float] | None:
    """Seconds of a step; they add up to it."""
    if not measurement.splits:
        return None
    times = measurement.times
    computed = [each.step - each.collective_wait - each.pipeline_wait for each in times]
    between_stages = fmean(each.pipeline_wait for each in times)
    bubble = min(between_stages, measurement.bubble_share * _seconds(measurement))
    waited = fmean(each.collective_wait for each in times) + between_stages - bubble
    stragglers = min(waited, max(computed) - fmean(computed))
    return {
        "computation": fmean(computed),
        "communication": waited - stragglers,
        "bubble": bubble,
        "stragglers": stragglers,
    }


def _seconds(measurement: Measurement) -> float:
    return fmean(each.step for each in measurement.times)


def _tokens_per_second(measurement: Measurement) -> float:
    return measurement.tokens_per_step / _seconds(measurement)


def _cost(measurement: Measurement, parts: dict[str, float]) -> float:
    return measurement.ranks * parts["computation"] / measurement.tokens_per_step
