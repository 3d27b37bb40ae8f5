"""Promises of the console: calm, plain where it is not a terminal, and never a reason to stop."""

from __future__ import annotations

import io
import math
import os
import pty
import re
from pathlib import Path

import pytest

from bloomery.monitor.console import Console
from monitor_samples import step_record, validation_record


def read_all(master: int) -> str:
    """What was written to a terminal whose other end is closed; one read may return a part of it only."""
    content = b""
    while True:
        try:
            part = os.read(master, 65536)
        except OSError:  # EIO: Linux's end of a terminal
            part = b""
        if not part:
            os.close(master)
            return content.decode()
        content += part


def test_a_file_gets_one_plain_line_per_record(tmp_path: Path) -> None:
    with (tmp_path / "out").open("w") as file:
        console = Console(100, file=file)
        console.step(step_record(10, mfu=0.417))
        console.step(step_record(20, loss=math.nan, nan_steps=1, skipped_steps=1))
        console.validation(validation_record(20))
        console.close()
    assert (tmp_path / "out").read_text().splitlines() == [
        "step 10/100 | lm loss 2.5000 | lr 0.0001 | grad norm 0.5 | 2.048k tokens/s | 1.5 TFLOP/s | MFU 41.7%"
        " | ETA 22s",
        "step 20/100 | lm loss NaN | lr 0.0001 | grad norm 0.5 | 2.048k tokens/s | 1.5 TFLOP/s | MFU n/a | ETA 20s"
        " | skipped 1 | NaN 1",
        "validation web at step 20: lm loss 2.0000, perplexity 7.389",
    ]


def test_quiet_leaves_warnings_only() -> None:
    screen = io.StringIO()
    console = Console(100, quiet=True, file=screen)
    console.step(step_record(1))
    console.validation(validation_record(1))
    console.notice("hello")
    console.warning("disk full")
    console.close()
    assert screen.getvalue() == "warning: disk full\n"


def test_a_terminal_gets_a_bar_with_lines_above_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "150")
    master, slave = pty.openpty()
    with os.fdopen(slave, "w") as terminal:
        console = Console(100, file=terminal)
        console.notice("[bold]not markup[/bold]")
        console.step(step_record(50, mfu=0.417))
        console.step(step_record(60))
        console.warning("slow disk")
        console.close()
        console.close()
    shown = read_all(master)
    assert "[bold]not markup[/bold]" in shown
    assert "\x1b[" in shown
    for part in ("60/100", "━", "loss 2.5000", "tok/s", "TFLOP/s", "MFU 41.7%", "MFU n/a", "ETA 10s", "elapsed"):
        assert part in shown
    assert shown.count("step 50/100 |") == 1
    assert "warning: slow disk" in shown


def test_a_dumb_terminal_gets_no_control_codes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "dumb")
    master, slave = pty.openpty()
    with os.fdopen(slave, "w") as terminal:
        console = Console(100, file=terminal)
        console.step(step_record(50))
        console.close()
    shown = read_all(master)
    assert "\x1b" not in shown
    assert shown.startswith("step 50/100 |")


def test_a_closed_pipe_silences_the_console_instead_of_ending_the_training() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    file = os.fdopen(writer, "w")
    console = Console(100, file=file)
    console.step(step_record(1))
    console.step(step_record(2))
    console.warning("nobody hears this")
    console.close()
    with pytest.raises(BrokenPipeError):
        file.close()


def test_characters_that_the_terminal_cannot_show_are_replaced() -> None:
    raw = io.BytesIO()
    console = Console(100, file=io.TextIOWrapper(raw, encoding="ascii"))
    console.notice("größer")
    assert raw.getvalue() == b"gr??er\n"


def test_a_narrow_terminal_keeps_the_step_the_bar_and_the_eta(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "60")
    master, slave = pty.openpty()
    with os.fdopen(slave, "w") as terminal:
        console = Console(2000, file=terminal)
        console.step(step_record(1000, train_steps=2000))
        console.close()
    last = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", read_all(master)).replace("\r", "\n").split("\n")
    bar = next(line for line in last if "━" in line)
    assert re.match(r"1000/2000 ━+[╸╺]?━* ETA 4m10s · loss 2\.5000 · .*…", bar)
    assert len(bar) <= 60
