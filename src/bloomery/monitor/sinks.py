"""Where records go: metrics.jsonl, events.jsonl, main_log.txt, the console and TensorBoard. The journal feeds them.

A new sink is a subclass of `Sink` that overrides what it wants to receive, and a line in `journal.open_journal`.
"""

import math
import sys
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TextIO

from bloomery.base.bounded import parse_json
from bloomery.base.storage import AppendFile, own_folder
from bloomery.base.units import format_count, format_seconds
from bloomery.monitor.record import Record, StepRecord, ValidationRecord, perplexity_of, strict_json, to_json


class Sink:
    """Receives records, events and text from the journal; it ignores what it does not override."""

    file: AppendFile | None = None
    """What the journal flushes, and watches for a full disk."""
    failure: str = ""
    """Why it cannot write any more: the journal then reports it and drops the sink."""

    def record(self, record: Record) -> None: ...

    def event(self, facts: dict[str, Any]) -> None: ...

    def notice(self, text: str) -> None: ...

    def warning(self, text: str) -> None: ...

    def close(self) -> None:
        """StorageError if something could not be written to the end."""
        if self.file is not None:
            self.file.close()


class MetricsFile(Sink):
    """metrics.jsonl: every other view is made from it."""

    def __init__(self, path: Path) -> None:
        self.file: AppendFile = AppendFile(path, is_whole=_is_json_object)

    def record(self, record: Record) -> None:
        self.file.append(to_json(record))


class EventFile(Sink):
    """events.jsonl: what happened to a run, and when."""

    def __init__(self, path: Path, *, job: int) -> None:
        self.file: AppendFile = AppendFile(path, is_whole=_is_json_object)
        self._job = job

    def event(self, facts: dict[str, Any]) -> None:
        """Facts stand beside kind, step, iso_time, time (unix seconds) and job, and may not use these names."""
        now = time.time()
        head = {"kind": facts.pop("kind"), "step": facts.pop("step"), "iso_time": iso_time(now), "time": now}
        head["job"] = self._job
        assert not head.keys() & facts.keys(), f"reserved fact names: {sorted(head.keys() & facts.keys())}"
        self.file.append(strict_json({**head, **facts}))


class TextLog(Sink):
    """logs/main_log.txt, for people and for parsers of Megatron-DeepSpeed logs (requirements 10.1)."""

    def __init__(self, path: Path) -> None:
        own_folder(path.parent)
        self.file: AppendFile = AppendFile(path)

    def record(self, record: Record) -> None:
        for line in [iteration_line(record)] if isinstance(record, StepRecord) else validation_box(record):
            self.file.append(line)

    def notice(self, text: str) -> None:
        for line in text.splitlines():
            self.file.append(f"[{iso_time(time.time())}] {line}")

    def warning(self, text: str) -> None:
        self.notice(f"warning: {text}")


def iteration_line(record: StepRecord) -> str:
    """One leading space; every field ends with ` |`."""
    fields = [
        f"iteration {record.step:8d}/{record.train_steps:8d}",
        f"consumed samples: {record.consumed_samples:12d}",
        f"consumed tokens: {record.consumed_tokens:12d}",
        f"elapsed time per iteration (s): {record.seconds_per_step:.2f}",
        f"learning rate: {record.lr:.3E}",
        f"global batch size: {record.global_batch:5d}",
    ]
    # The reference prints a loss only if it is > 0, so that a NaN vanishes from the log. Ours is always there.
    fields += [f"{name}: {value:.6E}" for name, value in record.losses.items()]
    if record.loss_scale is not None:
        fields.append(f"loss scale: {record.loss_scale:.1f}")
    fields.append(f"grad norm: {record.grad_norm:.3f}")
    if record.num_zeros is not None:
        fields.append(f"num zeros: {record.num_zeros:.1f}")
    if record.params_norm is not None:
        fields.append(f"params norm: {record.params_norm:.3f}")
    fields += [
        f"number of skipped iterations: {record.skipped_steps:3d}",
        f"number of nan iterations: {record.nan_steps:3d}",
        f"samples per second: {record.samples_per_second:.3f}",
        f"TFLOPs: {record.tflops if record.megatron_tflops is None else record.megatron_tflops:.2f}",
    ]
    return "".join(f" {field} |" for field in fields)


def validation_box(record: ValidationRecord) -> list[str]:
    """The result between two rules of dashes, one longer than it, as in the reference."""
    line = f" {'test ' * (record.part == 'test')}{record.group} loss at iteration {record.step} | "
    for name, loss in record.losses.items():
        line += f"{name} value: {loss:.6E} | {name} PPL: {perplexity_of(loss):.6E} | "
    rule = "-" * (len(line) + 1)
    return [rule, line, rule]


_CONSOLE_COLUMNS = 80
_LESS_IMPORTANT = ("norm", "lr", "MFU")
"""On the console, where there is no room."""


class Console(Sink):
    """Writes to `file` (standard output by default). `quiet`: warnings only. `seconds_left`: until this job ends."""

    def __init__(
        self,
        quiet: bool = False,
        *,
        file: TextIO | None = None,
        seconds_left: Callable[[StepRecord], float] = lambda _: math.inf,
    ) -> None:
        self.quiet, self.seconds_left = quiet, seconds_left
        self._file: TextIO | None = file or sys.stdout

    def record(self, record: Record) -> None:
        if isinstance(record, StepRecord):
            self.notice(console_line(record, self.seconds_left(record)))
            return
        losses = ", ".join(f"{name} {_loss(loss)}" for name, loss in record.losses.items())
        perplexity = _number(record.perplexity)
        self.notice(f"{record.part} {record.group} at step {record.step}: {losses}, perplexity {perplexity}")

    def notice(self, text: str) -> None:
        if not self.quiet:
            self._print(text)

    def warning(self, text: str) -> None:
        self._print(f"warning: {text}")

    def _print(self, text: str) -> None:
        """A closed pipe or a full disk behind standard output silences the console; it does not end the training."""
        if self._file is None:
            return
        encoding = getattr(self._file, "encoding", None) or "utf-8"
        try:
            print(text.encode(encoding, "replace").decode(encoding), file=self._file, flush=True)
        except (OSError, ValueError):  # ValueError: the file was closed
            self._file = None


def console_line(record: StepRecord, seconds_left: float = math.inf) -> str:
    """What fits on a line of a terminal; the files have all of it."""
    seconds = min(record.seconds_per_step * max(0, record.train_steps - record.step), seconds_left)
    fields = {
        "step": f"{record.step}/{record.train_steps}",
        **{name: _loss(loss) for name, loss in record.losses.items()},
        "skipped": record.skipped_steps or None,
        "NaN": record.nan_steps or None,
        "lr": f"{record.lr:.3g}",
        "norm": _number(record.grad_norm),
        "": f"{format_count(record.tokens_per_second)} tok/s",
        "MFU": None if record.mfu is None else f"{record.mfu:.0%}",
        "ETA": format_seconds(seconds) if math.isfinite(seconds) else "n/a",
    }
    parts = {name: f"{name} {value}".strip() for name, value in fields.items() if value is not None}
    for name in _LESS_IMPORTANT:
        if len("  ".join(parts.values())) > _CONSOLE_COLUMNS:
            parts.pop(name, None)
    return "  ".join(parts.values())


def _loss(loss: float) -> str:
    return f"{loss:.4f}" if math.isfinite(loss) else _number(loss)


def _number(value: float) -> str:
    return "NaN" if math.isnan(value) else f"{value:.4g}"


def iso_time(unix_seconds: float) -> str:
    """UTC, to the second: `2025-01-31T12:00:00Z`."""
    return datetime.fromtimestamp(unix_seconds, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def _is_json_object(line: bytes) -> bool:
    try:
        return isinstance(parse_json(line), dict)
    except ValueError:
        return False
