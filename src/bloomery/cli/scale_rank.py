"""What every rank of `bloomery scale` runs: `bloomery train`, with a clock for its steps and for its waiting."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any


def measured_training(arguments: Sequence[str]) -> int:
    """`arguments`: folder for the times, threads of a rank, then what `bloomery` is to be called with."""
    import torch

    from bloomery.cli.main import main
    from bloomery.parallel.waits import waits_counted
    from bloomery.train import loop

    folder, threads, *words = arguments
    torch.set_num_threads(int(threads))
    steps: list[tuple[float, ...]] = []
    the_loop: Any = loop
    train_step = the_loop.train_step
    with waits_counted() as waits:

        def clocked(run: Any, state: Any) -> None:
            train_step(run, state)
            steps.append((time.perf_counter(), waits.collective, waits.pipeline, time.process_time()))

        the_loop.train_step = clocked
        try:
            code = main(words)
        finally:
            the_loop.train_step = train_step
    if code == 0:
        Path(folder, f"rank-{os.environ['RANK']}.json").write_text(json.dumps(steps))
    return code
