"""Reading a run back: the one reader of metrics.jsonl and events.jsonl, for reports, watchers and resumes.

Both may have millions of lines: they are read one at a time, and nothing else is kept in memory.
"""

import contextlib
import math
import os
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, TypeVar

import orjson

from bloomery.base.bounded import SMALL_BYTES, check_depth, open_regular
from bloomery.base.errors import DataError, Problem, unreadable
from bloomery.base.storage import open_plain
from bloomery.base.units import Energy
from bloomery.monitor import names
from bloomery.monitor.record import Record, from_json

T = TypeVar("T")
DAMAGE = (ValueError, TypeError, LookupError, AttributeError, OverflowError)
"""What reading a line that is not as it should be may raise."""
EVENT: dict[str, type] = {"kind": str, "step": int, "time": float}
"""Types of the fields that every event has."""
_BLOCK_BYTES = 2**20
_STEP = re.compile(rb'"step": ?(\d+)')
_STARTS_AND_STOPS = re.compile(rb'"kind": ?"(start|stop)"')


class Start(NamedTuple):
    job: int
    step: int
    """That the job continued from."""
    token: str


class Ledger(NamedTuple):
    starts: list[Start]
    """Of all jobs so far, oldest first."""
    energy: Energy
    """The most that was recorded: sums only grow."""


def read_metrics(path: Path) -> list[Record]:
    """The run as it counts, by step: what a newer job did again replaces what an older job had done."""
    return sorted(valid_records(path), key=lambda record: record.step)


def valid_records(path: Path) -> Iterator[Record]:
    """Those that no later job rolled back, in the order written."""
    last_valid = last_valid_steps(path)
    return (record for record in lines_of(path, from_json) if record.step <= last_valid.get(record.job, math.inf))


def last_valid_steps(metrics: Path) -> dict[int, float]:
    """By job: up to which step its records count, which is where the earliest of all newer jobs began. That is in the
    ledger beside the metrics."""
    began_after = {start.job: start.step for start in read_ledger(metrics.with_name(names.EVENTS_FILE)).starts}
    last_valid: dict[int, float] = {}
    earliest = math.inf
    for job in sorted(began_after, reverse=True):
        last_valid[job] = earliest
        earliest = min(earliest, began_after[job])
    return last_valid


def set_abandoned_aside(run: Path, step: int) -> None:
    """Move the lines at the end of metrics.jsonl that are beyond `step`, where a start resumes, into a file beside it:
    who plots the one file sees the run as it counts. A crash in between leaves lines in both, which readers here know
    to pass over; storage that fails leaves them where they were."""
    path = run / names.METRICS_FILE
    with contextlib.suppress(OSError, ValueError, TypeError), open(path, "r+b", opener=open_plain) as file:
        cut = size = file.seek(0, os.SEEK_END)
        for place, line in _backwards(file):
            if int(_STEP.search(line)[1]) <= step:  # type: ignore[index]
                break
            cut = place
        if cut < size:
            with open(run / names.ABANDONED_METRICS_FILE, "ab", opener=open_plain) as other:
                file.seek(cut)
                shutil.copyfileobj(file, other)
                other.flush()
                os.fsync(other.fileno())
            file.truncate(cut)


def _backwards(file: BinaryIO) -> Iterator[tuple[int, bytes]]:
    """The lines of a file and where they begin, from the last one on. ValueError if one is too long."""
    place, rest = file.seek(0, os.SEEK_END), b""
    while place:
        size = min(place, _BLOCK_BYTES)
        start = file.seek(place - size)
        rest, *lines = (file.read(size) + rest).splitlines(keepends=True)
        if len(rest) > SMALL_BYTES:
            raise ValueError("it is too long")
        place = start
        begin = start + len(rest) + sum(map(len, lines))
        for line in reversed(lines):
            begin -= len(line)
            yield begin, line
    if rest:
        yield 0, rest


def read_events(path: Path) -> list[dict[str, Any]]:
    """Every event of every job, in the order written."""
    return list(lines_of(path, event_of))


def read_ledger(path: Path) -> Ledger:
    """What a start needs to know of all jobs before it; empty where there is no ledger. Only starts and stops have any
    of it: no other line is even parsed."""
    starts: list[Start] = []
    spent = Energy()

    def parse(line: bytes) -> tuple[dict[str, Any], Energy] | None:
        if not _STARTS_AND_STOPS.search(line):
            return None
        event = event_of(line)
        return event, Energy.from_json(event.get(names.FACT_ENERGY))

    for event, energy in filter(None, lines_of(path, parse) if path.exists() else ()):
        spent = max(spent, energy, key=Energy.order)
        if event["kind"] == names.Event.START and type(event.get("job")) is type(event.get("step")) is int:
            starts.append(Start(event["job"], event["step"], str(event.get("start", ""))))
    return Ledger(starts, spent)


def readable_lines(path: Path, **types: type) -> Iterator[dict[str, Any]]:
    """For who watches or restarts a run, whatever its files look like: lines that are damaged, or whose fields are not
    of these types, are passed over, and a file that is not there has none. DataError where it cannot be read."""
    try:
        with open(path, "rb", opener=open_regular) as file:
            while line := file.readline(SMALL_BYTES):
                with contextlib.suppress(ValueError):
                    fields = orjson.loads(line)
                    check_depth(fields)
                    if isinstance(fields, dict) and all(type(fields.get(name)) is each for name, each in types.items()):
                        yield fields
    except FileNotFoundError:
        return
    except OSError as error:
        raise unreadable(str(path), error) from error


def event_of(line: bytes) -> dict[str, Any]:
    """ValueError if the line is no event."""
    fields = orjson.loads(line)
    if not isinstance(fields, dict) or not isinstance(fields.get("kind"), str):
        raise ValueError("not an event: it has no kind")
    check_depth(fields)
    return fields


def lines_of(path: Path, parse: Callable[[bytes], T]) -> Iterator[T]:
    """What `parse` makes of every line, one at a time. DataError names the line that it refuses with a ValueError or
    the like. A last line without newline is torn, or still being written by a live run: it is skipped unless it is
    whole."""
    number = 0
    try:
        with open(path, "rb", opener=open_regular) as file:
            while line := file.readline(SMALL_BYTES):
                number += 1
                if len(line) == SMALL_BYTES:
                    raise ValueError("it is too long")
                if not line.isspace():
                    yield parse(line)
    except DAMAGE as error:
        if line.endswith(b"\n") or len(line) == SMALL_BYTES:
            remedy = f"remove it, for example with `sed -i {number}d {path}`"
            problem = Problem(f"line {number} is damaged: {error}", remedy=remedy, place=f"{path}:{number}")
            raise DataError(problem) from error
    except OSError as error:
        what = f"cannot read {path}: {error.strerror}"
        raise DataError(Problem(what, remedy="give the folder of a run", place=str(path))) from error
