"""Promises of the console: calm, plain where it is not a terminal, and never a reason to stop."""

from __future__ import annotations

import io
import math
import os
from pathlib import Path

import pytest

from bloomery.monitor.sinks import Console
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
        console = Console(file=file)
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
    console = Console(quiet=True, file=screen)
    console.step(step_record(1))
    console.validation(validation_record(1))
    console.notice("hello")
    console.warning("disk full")
    console.close()
    assert screen.getvalue() == "warning: disk full\n"


def test_a_closed_pipe_silences_the_console_instead_of_ending_the_training() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    file = os.fdopen(writer, "w")
    console = Console(file=file)
    console.step(step_record(1))
    console.step(step_record(2))
    console.warning("nobody hears this")
    console.close()
    with pytest.raises(BrokenPipeError):
        file.close()


def test_characters_that_the_terminal_cannot_show_are_replaced() -> None:
    raw = io.BytesIO()
    console = Console(file=io.TextIOWrapper(raw, encoding="ascii"))
    console.notice("größer")
    assert raw.getvalue() == b"gr??er\n"
