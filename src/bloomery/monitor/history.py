"""Reading a run back: the one reader of metrics.jsonl and events.jsonl, for reports, watchers and resumes."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from bloomery.base.errors import DataError, Problem
from bloomery.monitor import names
from bloomery.monitor.record import Record, ValidationRecord, from_json

T = TypeVar("T")


def read_metrics(path: Path) -> list[Record]:
    """The run as it counts, by step: what a newer job did again replaces what an older job had done.

    Where each job began is in the ledger beside it; without one, a job is taken to begin just before its first record.
    """
    ledger = path.with_name(names.EVENTS_FILE)
    events = read_events(ledger) if ledger.is_file() else []
    starts = {event["job"]: event["step"] for event in events if _is_start(event)}
    return surviving(_read_lines(path, from_json), starts)


def read_events(path: Path) -> list[dict[str, Any]]:
    """Every event of every job, in the order written."""
    return _read_lines(path, _event)


def surviving(records: list[Record], starts: Mapping[int, int] | None = None) -> list[Record]:
    """Drops the steps that a restart rolled back; of one step (and validation group) the newest job's stays."""
    first_step: dict[int, int] = {}
    for record in records:
        first_step[record.job] = min(record.step, first_step.get(record.job, record.step))
    began_after = {**first_step, **(starts or {})}
    # Up to which step a job's records count: where the earliest of all newer jobs began.
    last_valid: dict[int, float] = {}
    earliest = float("inf")
    for job in sorted(began_after, reverse=True):
        last_valid[job] = earliest
        earliest = min(earliest, began_after[job])
    newest: dict[tuple[int, bool, str], Record] = {}
    for record in records:
        is_validation = isinstance(record, ValidationRecord)
        key = (record.step, is_validation, record.group if isinstance(record, ValidationRecord) else "")
        known = newest.get(key)
        if record.step <= last_valid[record.job] and (known is None or known.job <= record.job):
            newest[key] = record
    return [newest[key] for key in sorted(newest)]


def _is_start(event: Mapping[str, Any]) -> bool:
    return event["kind"] == names.EVENT_START and type(event.get("job")) is type(event.get("step")) is int


def _event(line: bytes) -> dict[str, Any]:
    fields = json.loads(line)
    if not isinstance(fields, dict) or not isinstance(fields.get("kind"), str):
        raise ValueError("not an event: it has no kind")
    return fields


def _read_lines(path: Path, parse: Callable[[bytes], T]) -> list[T]:
    """A last line without newline is torn, or still being written by a live run: it is left out unless it is whole."""
    try:
        content = path.read_bytes()
    except OSError as error:
        raise DataError(
            Problem(f"cannot read {path}: {error.strerror}", remedy="give the folder of a run", place=str(path))
        ) from error
    parsed: list[T] = []
    lines = content.split(b"\n")
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            parsed.append(parse(line))
        except (ValueError, TypeError, AttributeError, RecursionError) as error:
            if number == len(lines):
                break
            raise DataError(
                Problem(
                    f"line {number} is damaged: {error}",
                    remedy=f"remove it, for example with `sed -i {number}d {path}`",
                    place=f"{path}:{number}",
                )
            ) from error
    return parsed
