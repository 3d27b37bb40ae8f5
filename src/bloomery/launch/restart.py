"""From how a job ended, and how those before it did, to what happens next: start again, or stop and say why."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any, Literal

import orjson

from bloomery.base import exit_codes
from bloomery.base.storage import AppendFile, append_line
from bloomery.monitor import names
from bloomery.monitor.history import EVENT, readable_lines

ATTEMPTS_FILE = "launch/attempts.jsonl"
_HOPELESS = {
    exit_codes.USAGE: "the recipe or the command line is wrong",
    exit_codes.DATA: "an input is missing or damaged",
    exit_codes.DIVERGED: "the training stopped itself",
}
"""Exit codes after which the same start ends the same way."""
_PAUSES = ("signal", "exit_after", "deadline")
"""Reasons of a stop that concern the job, not the training."""


@dataclass(frozen=True)
class Attempt:
    """One job of a run, when it has ended."""

    iso_time: str
    job: str
    """The scheduler's name for it."""
    code: int
    started_at: int
    """The step it resumed from."""
    step: int
    """The last one it reported."""
    next: Literal["finished", "again", "stop"]
    why: str


def judge(folder: Path, code: int, *, restarts: int, job: str = "") -> Attempt:
    """Decide, and keep the decision for the next one."""
    last = _last_start(folder / names.EVENTS_FILE)
    if (folder / "control" / "kill").exists():  # this start had no event: that of an earlier one does not count
        last |= {"reason": "", "text": ""}
    before = list(readable_lines(path := folder / ATTEMPTS_FILE, code=int, started_at=int))
    began, step = last.get("began", 0), last.get("step", 0)
    what, why = _decide(code, last, began, before, restarts)
    attempt = Attempt(time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()), job, code, began, step, what, why)
    file = AppendFile(path)
    file.append(orjson.dumps(asdict(attempt)).decode())
    file.close()
    with suppress(OSError):  # its folder may not be there, or full: the decision counts
        append_line(folder / names.TEXT_LOG_FILE, f"[{attempt.iso_time}] {why}")
    return attempt


def _decide(
    code: int, last: Mapping[str, Any], began: int, before: Sequence[Mapping[str, Any]], restarts: int
) -> tuple[Literal["finished", "again", "stop"], str]:
    reason = str(last.get("reason", ""))
    if code in _HOPELESS:
        return "stop", f"exit code {code}: {_HOPELESS[code]}, so that starting again would not help"
    if reason == "finished":
        return "finished", "the training is complete"
    if code == exit_codes.OK:
        if reason in _PAUSES:
            return "again", f"this job is over ({last.get('text') or reason}), the training is not"
        return "stop", f"it was stopped on request ({last.get('text') or 'kill switch'})"
    alike = list(takewhile(lambda each: each.get("code") and each.get("started_at") == began, reversed(before)))
    if len(alike) >= restarts:
        error = last.get("error", "")
        times = f"{len(alike) + 1} times" if alike else "once"
        return "stop", f"it failed {times} from step {began:,} on, now with exit code {code}{error and ': '}{error}"
    return "again", f"exit code {code}; it resumes from the newest checkpoint"


def _last_start(events: Path) -> dict[str, Any]:
    """Of the newest start: where it `began`, its last `step`, and the reason or error it ended with."""
    found: dict[str, Any] = {}

    for event in readable_lines(events, **EVENT):
        kind, step = event["kind"], event["step"]
        if kind == names.Event.START:
            found.clear()
            found["began"] = step
        found["step"] = step
        if kind == names.Event.STOP:
            found.update(reason=event.get(names.FACT_REASON), text=event.get("text"))
        elif kind == names.Event.ERROR:
            found["error"] = event.get("text", "")
    return found
