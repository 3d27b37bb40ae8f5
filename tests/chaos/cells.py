"""The cells of the matrix, played by one of several worker processes."""

from __future__ import annotations

import os
from pathlib import Path

from chaos.matrix import FAULTS, play
from chaos.scene import Stage
from forked import start_server

Cell = tuple[int, str]
"""The number of a fault in the table, and a layout."""
_stage: Stage


def set_stage(folder: str) -> None:
    global _stage
    place = Path(folder, str(os.getpid()))
    place.mkdir()
    start_server()
    _stage = Stage(place)


def played(cell: Cell) -> tuple[str, str]:
    """(what stands in the cell, what is wrong with it)."""
    fault, layout = FAULTS[cell[0]], cell[1]
    scene = _stage.scene(layout, *fault.overrides)
    try:
        seconds = play(fault, scene).seconds
    except Exception as error:  # whatever it is, the other cells are still worth knowing
        hung = scene.run / "logs" / "stacks.txt"
        return "FAILED", f"{type(error).__name__}: {error}\n{hung.read_text() if hung.is_file() else ''}"
    return "ok" if seconds is None else f"{seconds:.1f} s", ""
