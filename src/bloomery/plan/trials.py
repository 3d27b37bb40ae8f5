"""Short real trainings: each is a `bloomery train` in processes of its own, which end when it is measured. Those of
`bloomery scale`, one for each number of nodes, are of the same kind."""

from __future__ import annotations

import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from bloomery.base import exit_codes, signals
from bloomery.base.errors import DataError, Problem
from bloomery.base.storage import make_folder, remove_tree
from bloomery.config.recipe import Recipe
from bloomery.data.shards import ShardWriter
from bloomery.monitor import names
from bloomery.monitor.history import readable_lines
from bloomery.monitor.page import chart_html, page

_POLL_SECONDS = 0.05
_OUT_OF_MEMORY = "ran out of"


@dataclass(frozen=True)
class Trial:
    """What one short training measured. A device that runs out of memory is a result."""

    words: list[str]
    """Overrides of the recipe that make it differ from the untuned one."""
    outcome: str
    """ok, out of memory, stopped early (a loser), or failed."""
    step_seconds: float | None = None
    tokens_per_second: float | None = None
    tflops: float | None = None
    """Of one device."""
    peak_memory_bytes: int | None = None
    wall_seconds: float = 0.0
    said: str = ""
    """The last line on standard error of one that failed."""


@dataclass(frozen=True)
class Bench:
    """Where trials run, and how long."""

    recipe: str
    words: Sequence[str]
    """Overrides that all trials share."""
    folder: Path
    device: str | None = None
    log_every: int = 3
    """Steps: the first of these are warm-up (compilation, autotuning of kernels), then each gives a figure."""
    figures: int = 3
    on: str = "local"
    """Another one: trials are jobs of `bloomery launch`, and train to their end."""
    limit_seconds: float = 900.0

    @property
    def output(self) -> Path:
        """What the newest trial printed."""
        return self.folder / "stderr.txt"

    def run(self, words: Sequence[str], slower_than: float = 0.0) -> Trial:
        """`slower_than`: tokens per second; one is ended as soon as it is seen to be slower."""
        run = self.folder / "trial"
        remove_tree(run)
        make_folder(self.folder)
        steps = self.log_every * (self.figures + 1)
        short = [*short_training(10_000 if self.on == "local" else steps), f"monitor.log_every={self.log_every} steps"]
        start = ["train", "--quiet"] if self.on == "local" else ["launch", "--follow"]
        device = ["--device", self.device] if self.device and self.on == "local" else []
        command = [*start, self.recipe, *self.words, *words, *short, "--run-dir", str(run), *device]
        began = time.monotonic()
        with open(self.output, "w+") as said:
            job = subprocess.Popen(
                [sys.executable, "-m", "bloomery", *command],
                stdout=said,
                stderr=said,
                start_new_session=True,
                preexec_fn=partial(signals.end_with_parent, signal.SIGKILL),
            )
            try:
                outcome = self._watch(job, run, slower_than)
            finally:
                _end_session(job)
            said.seek(0)
            text = said.read()
        measured = _figures(run)
        if outcome == "failed" and _OUT_OF_MEMORY in text:
            outcome = "out of memory"
        found = Trial(list(words), outcome, wall_seconds=time.monotonic() - began)
        remove_tree(run)
        if outcome in ("ok", "stopped early") and measured:
            steady = {
                name: median(each[name] for each in measured)
                for name in ("seconds_per_step", "tokens_per_second", "tflops")
            }
            steady["step_seconds"] = steady.pop("seconds_per_step")
            return replace(found, **steady, peak_memory_bytes=measured[-1].get("peak_memory_bytes"))
        lines = [line for line in text.splitlines() if line.strip()]
        return replace(found, outcome=outcome if outcome != "ok" else "failed", said=(lines or [""])[-1])

    def _watch(self, job: subprocess.Popen[bytes], run: Path, slower_than: float) -> str:
        deadline = time.monotonic() + self.limit_seconds
        while job.poll() is None and time.monotonic() < deadline:
            if self.on == "local":
                found = _figures(run)
                if len(found) >= self.figures:
                    return "ok"
                if found and max(each["tokens_per_second"] for each in found) < slower_than:
                    return "stopped early"
            time.sleep(_POLL_SECONDS)
        if (code := job.poll()) == -signal.SIGKILL:  # by the kernel: the host's memory was full
            return "out of memory"
        return "ok" if code == exit_codes.OK else "failed"


def short_training(steps: int) -> list[str]:
    """Overrides for a training of so many steps whose only checkpoint is its last."""
    return [
        *("init=null", "launch.array=1", "batch.rampup=null", f"train.for={steps} steps", "train.exit_after=null"),
        *("train.evaluate=null", "data.validation={}", "data.test={}"),
        *("lr.schedule=constant", "lr.warmup=0 steps", "lr.decay=null", "lr.min=0", "lr.cooldown=null"),
        *(f"checkpoint={{phases: [{{every: {10 * steps} steps}}]}}", "monitor.tensorboard=false"),
    ]


def torch_name(device: str | None) -> str:
    """What torch calls this machine's device, asked in a process of its own: it takes memory of the device."""
    if device == "cpu":
        return device
    code = "import sys; from bloomery.base.accelerator import device_name, pick_device"
    code += "; print(device_name(pick_device(sys.argv[1] if sys.argv[1:] else None)))"
    command = [sys.executable, "-c", code, *([device] if device else [])]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def random_data(prefix: Path) -> list[str]:
    """Write a shard of random tokens; the overrides with which a recipe of a decoder trains on it, on one rank."""
    random = np.random.default_rng(0)
    with ShardWriter(str(prefix), "uint16") as writer:
        for _ in range(500):
            writer.append(random.integers(2000, size=4096))
    return ["tokenizer=null", "prepare=[]", f"data={{train: [{{path: '{prefix}'}}]}}", "launch=null"]


def _figures(run: Path) -> list[dict[str, Any]]:
    """Of the steps after the warm-up."""
    numbers = {"seconds_per_step": float, "tokens_per_second": float, "tflops": float}
    return list(readable_lines(run / names.METRICS_FILE, **numbers))[1:]


def _end_session(job: subprocess.Popen[bytes]) -> None:
    """Kill all that it has started, without a save: ranks have process groups of their own, the session is one."""
    for entry in Path("/proc").glob("[0-9]*"):
        with suppress(ProcessLookupError, PermissionError):
            if os.getsid(int(entry.name)) == job.pid:
                os.kill(int(entry.name), signal.SIGKILL)
    job.wait()


def measure(
    recipe: Recipe, source: str, words: Sequence[str], nodes: int, folder: Path, *, steps: int, strong: bool
) -> dict[str, Any]:
    """From the second half of the steps. `strong`: the global batch stays; else that of each replica does."""
    section = recipe.launch
    ranks, on = (section.gpus_per_node, section.on) if section else (1, "local")
    size = (nodes, ranks) if on != "local" else (1, nodes * ranks)  # here, a node is as many ranks of this machine
    batch = recipe.batch.global_batch_size * (1 if strong else nodes)
    more = [f"launch.nodes={size[0]}", f"launch.gpus_per_node={size[1]}", f"batch.global_batch_size={batch}"]
    bench = Bench(source, words, folder, log_every=steps // 2, figures=1, on=on, limit_seconds=math.inf)
    trial = bench.run(more)
    if trial.outcome != "ok":
        remedy = f"read {bench.output}"
        raise DataError(Problem(f"--nodes {nodes}: its training has no steps to measure", trial.said, remedy))
    return {
        "nodes": nodes,
        "global_batch": batch,
        "tokens_per_second": trial.tokens_per_second,
        "seconds_per_step": trial.step_seconds,
        "tflops_per_device": trial.tflops,
    }


def with_efficiency(points: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Tokens per second and node, against those of the fewest nodes."""
    first = min(points, key=lambda point: point["nodes"])
    base = first["tokens_per_second"] / first["nodes"]
    return [{**point, "efficiency": point["tokens_per_second"] / point["nodes"] / base} for point in points]


def picture(results: Mapping[str, Sequence[Mapping[str, Any]]]) -> str:
    """A page with the curves of all results, by name."""
    charts = ""
    for what in ("tokens_per_second", "efficiency"):
        curves = {
            name: np.array([(point["nodes"], point[what]) for point in points], dtype=np.float64)
            for name, points in results.items()
        }
        charts += chart_html(what.replace("_", " "), curves, x="nodes", from_zero=True, wide=True)
    return page("Scaling · Bloomery", f"<h1>Scaling</h1><div class='charts'>{charts}</div>")
