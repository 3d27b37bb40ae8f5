"""What a run is doing, as anyone sees it who can read its folder: how far it is, what its job does, what is wrong; and
telling people, by e-mail, a webhook or a command, each tried for itself."""

from __future__ import annotations

import os
import re
import smtplib
import socket
import subprocess
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from email.message import EmailMessage
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any, Literal

import orjson

from bloomery.base.errors import DataError, RecipeError, first_line
from bloomery.base.storage import write_atomically
from bloomery.base.units import format_bytes, format_count, format_seconds
from bloomery.config.recipe import AlertsSection
from bloomery.launch import cron, slurm
from bloomery.monitor import names
from bloomery.monitor.gather import read_run
from bloomery.monitor.history import EVENT, readable_lines
from bloomery.monitor.record import StepRecord, from_json, strict_json

JOB_FILE = "launch/job.json"
_ALERT, _PULSE_FILE = "alert.", "launch/pulse"
"""Empty files in the launch folder: an alert that holds and was sent, and, by its time, the last pulse."""
_TAIL_BYTES = 2**18
_MOST_BYTES = 2**24
"""Of metrics that are read for goodput: a quarter of a second."""
_SILENT_INTERVALS = 10
_TIMEOUT_SECONDS = 30.0
_BARS = "▁▂▃▄▅▆▇█"


@dataclass(frozen=True)
class Job:
    """Of the scheduler, or of this machine."""

    state: Literal["running", "pending", "gone", "finished", "unknown"]
    text: str
    """After the run's name: `is running for 01:02:03 ...`."""
    since: float = 0.0
    """When it began; 0 where nobody knows."""


@dataclass(frozen=True)
class Status:
    name: str
    job: Job
    step: int = 0
    train_steps: int = 0
    losses: list[float] = field(default_factory=list)
    """The language-model loss of the newest records."""
    tokens_per_second: float = 0.0
    eta_seconds: float = 0.0
    silent_seconds: float | None = None
    """Since the newest record or event, or the start of the job; None before there is any."""
    last_save: str = ""
    goodput: dict[str, float] = field(default_factory=dict)
    """Seconds of each part of the run's life; empty for very long runs, whose report has it."""
    alerts: dict[str, str] = field(default_factory=dict)
    """What is wrong, by its kind."""

    def facts(self) -> dict[str, Any]:
        return dict(orjson.loads(strict_json(asdict(self))))  # a loss may be no number

    def lines(self) -> list[str]:
        """One screen."""
        whole = sum(self.goodput.values()) or 1.0
        shares = sorted(((seconds / whole, name) for name, seconds in self.goodput.items()), reverse=True)
        parts = [f"{name} {share:.1%}" for share, name in shares if share >= 0.001]
        loss = f"{self.losses[-1]:.4f}  {_sparkline(self.losses)}" if self.losses else "none yet"
        silent = "no sign yet" if self.silent_seconds is None else f"{format_seconds(self.silent_seconds)} ago"
        return [
            f"{self.name} {self.job.text}",
            f"step       {self.step:,} of {self.train_steps:,}, ETA {format_seconds(self.eta_seconds)}",
            f"loss       {loss}",
            f"speed      {format_count(self.tokens_per_second)} tokens/s",
            f"last save  {self.last_save or 'none yet'}",
            f"last sign  {silent}",
            *([f"goodput    {', '.join(parts)}"] if parts else []),
            *(f"ALERT      {text}" for text in self.alerts.values()),
        ]


def _goodput(folder: Path) -> dict[str, float]:
    """Empty where reading the run would take long, or where a line is damaged."""
    metrics = folder / names.METRICS_FILE
    with suppress(DataError):
        return read_run(folder).goodput() if metrics.is_file() and metrics.stat().st_size < _MOST_BYTES else {}
    return {}


def status_of(folder: Path, name: str, alerts: AlertsSection) -> Status:
    """`name`: of the run."""
    records = list(_tail(folder / names.METRICS_FILE))
    last = {event["kind"]: event for event in readable_lines(folder / names.EVENTS_FILE, **EVENT)}
    job = job_of(folder, is_finished=_is_finished(last))
    times = [record.time for record in records] + [_time(last, kind) for kind in last] + [job.since]
    newest = records[-1] if records else None
    save = last.get(names.Event.SAVE)
    status = Status(
        name,
        job,
        step=newest.step if newest else 0,
        train_steps=newest.train_steps if newest else 0,
        losses=[next(iter(record.losses.values()), float("nan")) for record in records[-60:]],
        tokens_per_second=newest.tokens_per_second if newest else 0.0,
        eta_seconds=newest.seconds_per_step * max(0, newest.train_steps - newest.step) if newest else 0.0,
        silent_seconds=max(0.0, time.time() - max(times)) if max(times) else None,
        goodput=_goodput(folder),
        last_save=f"step {save['step']:,} at {save.get('iso_time', '?')}" if save else "",
    )
    return replace(status, alerts=dict(_alerts(folder, status, records, last, alerts)))


def _alerts(
    folder: Path, status: Status, records: list[StepRecord], last: dict[str, dict[str, Any]], limits: AlertsSection
) -> Iterator[tuple[str, str]]:
    pulse, began = folder / _PULSE_FILE, _time(last, names.Event.START)
    looked = pulse.stat().st_mtime if pulse.exists() else float("inf")  # what has ended since then is reported too
    hang = last[names.Event.HANG].get("text") if _time(last, names.Event.HANG) > min(began, looked) else ""
    if status.job.state == "gone":
        yield "gone", f"{status.name} is not RUNNING or SCHEDULED! {hang}".rstrip()
    elif hang:
        yield "silent", f"{status.name} hangs: {hang}"
    elif status.job.state in ("running", "unknown") and status.silent_seconds is not None and not _is_finished(last):
        gaps = [after.time - before.time for before, after in pairwise(records)]
        patience = max(limits.silent_after.seconds, _SILENT_INTERVALS * median(gaps) if gaps else 0)
        if status.silent_seconds > patience:
            yield "silent", f"{status.name} has said nothing for {format_seconds(status.silent_seconds)}: it hangs"
    if status.job.state != "finished":
        for name, _ in cron.lost(folder):
            yield name, f"the job {name} of {status.name} is not in the queue any more"
    over = max(began, _time(last, names.Event.SPIKE_OVER), _time(last, names.Event.REWIND))
    if _time(last, names.Event.SPIKE) > min(over, looked):
        step = last[names.Event.SPIKE].get("step")
        yield "spike", f"the loss or gradient norm of {status.name} spiked at step {step}"
    speeds = [record.tokens_per_second for record in records]
    if len(speeds) >= 20 and median(speeds[-5:]) < limits.slow_below * median(speeds):
        rate = f"{format_count(median(speeds[-5:]))} tokens/s instead of {format_count(median(speeds))}"
        yield "slow", f"{status.name} is slow: {rate}"
    room = os.statvfs(folder)
    if room.f_bavail < limits.disk_below * room.f_blocks:
        yield "disk", f"only {format_bytes(room.f_bavail * room.f_frsize)} are free at {folder}"
    if room.f_files and room.f_favail < limits.disk_below * room.f_files:
        yield "inodes", f"only {room.f_favail:,} file entries are free at {folder}"


def new_alerts(folder: Path, found: Collection[str]) -> list[str]:
    """Those that no call before this one has had, for as long as they hold. Marks are empty files: a full disk takes
    them too, and of several calls at once one makes the mark. Where none can be made, an alert is sent again and again
    rather than never."""
    launch = folder / "launch"
    with suppress(OSError):
        launch.mkdir(exist_ok=True)
    forget_alerts(folder, {mark.name.removeprefix(_ALERT) for mark in launch.glob(f"{_ALERT}*")} - {*found})
    new = []
    for kind in found:
        try:
            (launch / f"{_ALERT}{kind}").touch(exist_ok=False)
        except FileExistsError:
            continue
        except OSError:
            pass
        new.append(kind)
    with suppress(OSError):
        (folder / _PULSE_FILE).touch()
    return new


def forget_alerts(folder: Path, kinds: Collection[str]) -> None:
    """They are new again: over, or nobody was reached."""
    for kind in kinds:
        with suppress(OSError):
            (folder / "launch" / f"{_ALERT}{kind}").unlink()


def _time(last: dict[str, dict[str, Any]], kind: str) -> float:
    return float(last[kind]["time"]) if kind in last else 0.0


def pulse(status: Status) -> str:
    """BigScience's line for main_log.txt."""
    now = time.strftime("%Y-%m-%d %H:%M:%S")
    if status.job.state == "gone":
        return f"[{now}] ***ALERT: {status.alerts['gone']}***"
    return f"[{now}] PULSE: {status.name} {status.job.text}"


def remember_job(folder: Path, *, on: str, job_id: str = "", process: int = 0) -> None:
    """What was started last, for those who watch: the scheduler's id, or a process of this machine."""
    facts = {"on": on, "id": job_id, "process": process, "born": _born(process), "host": socket.gethostname()}
    write_atomically(folder / JOB_FILE, orjson.dumps(facts))


def _born(process: int) -> str:
    """When a process began, so that it is not taken for a later one of its number; empty if there is none."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[19]
    except OSError:
        return ""


def job_of(folder: Path, *, is_finished: bool = False) -> Job:
    """What was launched last, as far as this machine can know."""
    path = folder / JOB_FILE
    known = next(readable_lines(path, on=str, id=str, process=int, born=str, host=str), {})
    if known.get("on") == "slurm":
        job = _slurm_job(known["id"])
    elif known.get("on") in ("local", "hosts") and known.get("host") == socket.gethostname():
        alive, since = known["born"] and _born(known["process"]) == known["born"], path.stat().st_mtime
        text = f"is running as process {known['process']}"
        job = Job("running", text, since) if alive else Job("gone", "is not running")
    else:
        job = Job("unknown", "was not launched from here")
    return Job("finished", "is complete") if is_finished and job.state != "running" else job


def _slurm_job(job_id: str) -> Job:
    try:
        tasks = slurm.tasks(job_id).values()
    except (DataError, RecipeError):
        return Job("unknown", f"is Slurm job {job_id}, for which Slurm cannot be asked from here, or now")
    for facts in tasks:
        if facts["JobState"] == "RUNNING":
            began = f"for {facts['RunTime']} since {facts['StartTime'].replace('T', ' ')}"
            where = f"({facts['JobId']} on '{facts['Partition']}' partition ({facts['NodeList']}))"
            return Job("running", f"is running {began} {where}", _seconds(facts["StartTime"]))
    for facts in tasks:
        if facts["JobState"] not in slurm.ENDED:
            start, why = facts.get("StartTime", "Unknown"), facts.get("Reason", "None")
            if facts["JobState"] != "PENDING":
                return Job("pending", f"is {facts['JobState']} ({facts['JobId']})")
            if why in ("JobArrayTaskLimit", "Dependency"):
                return Job("pending", f"is waiting for the job before it ({facts['JobId']}, {why})")
            if re.match(r"\d{4}-", start):
                seconds = max(0.0, _seconds(start) - time.time())
                return Job(
                    "pending", f"is scheduled to start in {format_seconds(seconds)} (at {start.replace('T', ' ')})"
                )
            return Job("pending", f"is waiting to be scheduled ({facts['JobId']}, {why})")
    return Job("gone", f"has no job {job_id} any more")


def _seconds(clock: str) -> float:
    """Of `2026-11-19T10:20:30`, in the time zone of this machine."""
    return time.mktime(time.strptime(clock, "%Y-%m-%dT%H:%M:%S"))


def _is_finished(last: dict[str, dict[str, Any]]) -> bool:
    stop, start = last.get(names.Event.STOP, {}), last.get(names.Event.START, {})
    return stop.get(names.FACT_REASON) == "finished" and stop.get("time", 0) >= start.get("time", 0)


def _tail(path: Path) -> Iterator[StepRecord]:
    """The newest records of steps; lines that are torn or damaged are passed over."""
    if not path.exists():
        return
    with open(path, "rb") as file:
        file.seek(max(0, os.fstat(file.fileno()).st_size - _TAIL_BYTES))
        lines = file.read().split(b"\n")
    for line in lines:
        try:
            record = from_json(line)
        except ValueError:
            continue
        if isinstance(record, StepRecord):
            yield record


def _sparkline(values: list[float]) -> str:
    finite = [value for value in values if value == value and abs(value) != float("inf")]
    low, high = min(finite, default=0.0), max(finite, default=0.0)
    scale = (len(_BARS) - 1) / (high - low) if high > low else 0.0
    return "".join(_BARS[int((value - low) * scale)] if value in finite else "!" for value in values)


def notify(texts: Sequence[str], subject: str, section: AlertsSection) -> tuple[bool, list[str]]:
    """(whether nobody of those who should be was reached, what could not be sent and why)."""
    ways: dict[str, Callable[[], None]] = {}
    body = "\n".join(texts)
    if section.email:
        ways["e-mail"] = partial(_mail, body, subject, section)
    if section.webhook_variable:
        ways["webhook"] = partial(_post, body, section.webhook_variable)
    if section.command:
        ways["command"] = partial(_run, body, section.command)
    failed = []
    for name, send in ways.items() if texts else ():
        try:
            send()
        except Exception as error:  # whatever is wrong with one way, the others are tried
            failed.append(f"{name}: {first_line(error)}")
    return 0 < len(ways) == len(failed), failed


def _mail(body: str, subject: str, section: AlertsSection) -> None:
    message = EmailMessage()
    message["Subject"], message["From"], message["To"] = subject, section.sender, ", ".join(section.email)
    message.set_content(body)
    host, _, port = section.smtp.partition(":")
    with smtplib.SMTP(host, int(port or 25), timeout=_TIMEOUT_SECONDS) as server:
        server.send_message(message)


def _post(body: str, variable: str) -> None:
    """`{"text": ...}`, which Slack and others take. The address is a secret: it stays in the environment."""
    import requests

    if not (address := os.environ.get(variable)):
        raise OSError(f"the environment variable {variable} is not set")
    try:
        requests.post(address, json={"text": body}, timeout=_TIMEOUT_SECONDS).raise_for_status()
    except requests.RequestException as error:  # its text has the address
        said = f"it answers {error.response.status_code}" if error.response is not None else type(error).__name__
        raise OSError(f"{said} (the address is that of {variable})") from None


def _run(body: str, command: str) -> None:
    subprocess.run(["bash", "-c", command], input=body, text=True, check=True, timeout=_TIMEOUT_SECONDS, stdout=2)
