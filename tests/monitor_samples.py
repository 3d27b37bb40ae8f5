"""Records and small file systems for the tests of storage and monitor."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from bloomery.monitor.record import StepRecord, ValidationRecord, perplexity_of


def step_record(step: int, *, loss: float = 2.5, job: int = 1, **changes: Any) -> StepRecord:
    fields: dict[str, Any] = {
        "step": step,
        "train_steps": 100,
        "consumed_samples": step * 16,
        "consumed_tokens": step * 16 * 32,
        "consumed_gigaflops": step * 3,
        "global_batch": 16,
        "lr": 1e-4,
        "losses": {"lm loss": loss},
        "source_losses": {},
        "grad_norm": 0.5,
        "num_zeros": 0.0,
        "loss_scale": None,
        "skipped_steps": 0,
        "nan_steps": 0,
        "seconds_per_step": 0.25,
        "samples_per_second": 64.0,
        "tokens_per_second": 2048.0,
        "tflops": 1.5,
        "tflops_definition": "model_full",
        "mfu": None,
        "memory_bytes": None,
        "peak_memory_bytes": None,
        "job": job,
        "time": 1_700_000_000.0 + step,
    }
    return StepRecord(**{**fields, **changes})


def validation_record(step: int, *, group: str = "web", loss: float = 2.0, job: int = 1) -> ValidationRecord:
    return ValidationRecord(
        step=step,
        consumed_samples=step * 16,
        consumed_tokens=step * 512,
        consumed_gigaflops=step * 3,
        group=group,
        losses={"lm loss": loss},
        perplexity=perplexity_of(loss),
        batches=5,
        job=job,
        time=1_700_000_000.0 + step,
    )


@contextmanager
def mounted(folder: Path, options: str) -> Iterator[Path]:
    """A tmpfs at `folder`; the test is skipped where this process may not mount."""
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder)]
    try:
        done = subprocess.run(command, capture_output=True, text=True)
    except FileNotFoundError:
        pytest.skip("needs the `mount` command to make a small or read-only file system")
    if done.returncode:
        pytest.skip(f"needs the right to mount a tmpfs (root): {done.stderr.strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


def fill(folder: Path) -> Path:
    """Takes all space that is left; delete the returned file to give it back."""
    ballast = folder / "ballast"
    with ballast.open("wb", buffering=0) as file:
        try:
            while True:
                file.write(bytes(4096))
        except OSError:
            return ballast


def strict_lines(path: Path) -> list[dict[str, Any]]:
    """Parsed as a strict parser would: NaN and Infinity literals are refused."""

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    content = path.read_text()
    assert content == "" or content.endswith("\n")
    return [json.loads(line, parse_constant=refuse) for line in content.splitlines()]
