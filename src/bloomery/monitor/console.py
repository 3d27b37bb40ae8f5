"""What a person sees of a live run: a bar on a terminal, plain lines elsewhere, never more than one a logged step."""

from __future__ import annotations

import math
import os
import sys
import time
from typing import Any, TextIO

from rich.console import Console as RichConsole
from rich.progress import BarColumn, Progress, TextColumn
from rich.table import Column
from rich.text import Text

from bloomery.base.losses import LM_LOSS
from bloomery.base.units import format_count, format_seconds
from bloomery.monitor.record import StepRecord, ValidationRecord
from bloomery.monitor.sinks import Sink


class Console(Sink):
    """Writes to `file` (standard output by default). `quiet` leaves warnings only."""

    def __init__(self, train_steps: int, quiet: bool = False, *, file: TextIO | None = None) -> None:
        self.train_steps = train_steps
        self.quiet = quiet
        self._file: TextIO | None = file or sys.stdout
        self._started = time.monotonic()
        self._rich: RichConsole | None = None
        self._progress: Progress | None = None
        is_terminal = self._file is not None and self._file.isatty()
        if is_terminal and os.environ.get("TERM", "dumb") != "dumb":
            self._rich = RichConsole(file=self._file, force_terminal=True, highlight=False)

    def step(self, record: StepRecord) -> None:
        if self.quiet:
            return
        self._print(_step_line(record))
        self._move_bar(record)

    def validation(self, record: ValidationRecord) -> None:
        if self.quiet:
            return
        losses = ", ".join(f"{name} {_loss(loss)}" for name, loss in record.losses.items())
        line = f"validation {record.group} at step {record.step}: {losses}, perplexity {_number(record.perplexity)}"
        self._print(line, style="cyan")

    def notice(self, text: str) -> None:
        if not self.quiet:
            self._print(text)

    def warning(self, text: str) -> None:
        self._print(f"warning: {text}", style="yellow")

    def close(self) -> None:
        """Leaves the bar as it is; the cursor is on a fresh line."""
        if self._progress is not None:
            try:
                self._progress.stop()
            except OSError:
                self._file = None
            self._progress = None

    def _print(self, text: str, style: str = "") -> None:
        """A closed pipe or a full disk behind standard output silences the console; it does not end the training."""
        if self._file is None:
            return
        encoding = getattr(self._file, "encoding", None) or "utf-8"
        text = text.encode(encoding, "replace").decode(encoding)
        try:
            if self._rich is not None:
                self._rich.print(Text(text, style=style), soft_wrap=True)
            else:
                print(text, file=self._file, flush=True)
        except (OSError, ValueError):  # ValueError: the file was closed
            self._file = None

    def _move_bar(self, record: StepRecord) -> None:
        if self._rich is None or self._file is None:
            return
        elapsed = format_seconds(time.monotonic() - self._started)
        fields: dict[str, Any] = {"completed": record.step, "status": f"{_status(record)} · {elapsed} elapsed"}
        done = f"{record.step}/{self.train_steps}"
        try:
            if self._progress is None:
                # No refresh thread: the bar moves when a step is logged, and a calm terminal can be copied from.
                self._progress = Progress(
                    TextColumn("{task.description}", markup=False, table_column=Column(no_wrap=True)),
                    BarColumn(16 if self._rich.width >= 120 else 8),
                    TextColumn("{task.fields[status]}", markup=False, table_column=Column(ratio=1, no_wrap=True)),
                    console=self._rich,
                    auto_refresh=False,
                    expand=True,
                )
                self._progress.add_task(done, total=self.train_steps, **fields)
                self._progress.start()
            self._progress.update(self._progress.task_ids[0], description=done, **fields)
            self._progress.refresh()
        except (OSError, ValueError):
            self._file = None


def _step_line(record: StepRecord) -> str:
    losses = " | ".join(f"{name} {_loss(loss)}" for name, loss in record.losses.items())
    trouble = f" | skipped {record.skipped_steps}" if record.skipped_steps else ""
    trouble += f" | NaN {record.nan_steps}" if record.nan_steps else ""
    return (
        f"step {record.step}/{record.train_steps} | {losses} | lr {record.lr:.3g}"
        f" | grad norm {_number(record.grad_norm)} | {format_count(record.tokens_per_second)} tokens/s"
        f" | {_number(record.tflops)} TFLOP/s | MFU {_mfu(record)} | ETA {_eta(record)}{trouble}"
    )


def _status(record: StepRecord) -> str:
    """The most important first: a narrow terminal cuts the end."""
    main = record.losses.get(LM_LOSS, next(iter(record.losses.values()), math.nan))
    return (
        f"ETA {_eta(record)} · loss {_loss(main)} · {format_count(record.tokens_per_second)} tok/s"
        f" · MFU {_mfu(record)} · {_number(record.tflops)} TFLOP/s · lr {record.lr:.3g}"
    )


def _eta(record: StepRecord) -> str:
    seconds = record.seconds_per_step * max(0, record.train_steps - record.step)
    return format_seconds(seconds) if math.isfinite(seconds) else "n/a"


def _mfu(record: StepRecord) -> str:
    return "n/a" if record.mfu is None else f"{record.mfu:.1%}"


def _loss(loss: float) -> str:
    return f"{loss:.4f}" if math.isfinite(loss) else _number(loss)


def _number(value: float) -> str:
    if math.isnan(value):
        return "NaN"
    return f"{value:.4g}"
