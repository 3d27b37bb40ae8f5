"""control/kill: forbids a run to start. Asked before anything is built, so this file imports nothing."""

from __future__ import annotations

from pathlib import Path


def kill_switch(folder: Path) -> Path | None:
    """The file that forbids this run to start, if it is there."""
    path = folder / "control" / "kill"
    return path if path.exists() else None
