"""What a run measures about itself, on a device, against other readings; and what that costs. About four minutes:

    PYTHONPATH=src python benchmarks/monitor_overhead.py --output result.json

One training in one process. Blocks of ten steps with and without timers, norm of the weights and profiler hooks in turn
say what these cost; the timers of a block must sum to its wall clock; a profile must say what its trace holds; what
NVML says must be what nvidia-smi says.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bloomery.base.accelerator import pick_device
from bloomery.data.shards import ShardWriter
from bloomery.monitor.profile import _KINDS, Profiler, _kind
from bloomery.monitor.timers import AWAY, StepTimers
from bloomery.parallel.gradients import Gradients
from bloomery.sizing.check import load_checked_recipe
from bloomery.train.run import Run
from bloomery.train.setup import prepared_run
from bloomery.train.state import TrainState
from bloomery.train.step import finish_pending_step, train_step

BLOCK = 10


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default="gpt-1.3b")
    parser.add_argument("--micro-batch", type=int, default=8)
    parser.add_argument("--blocks", type=int, default=24, help="of ten steps; half of them without")
    parser.add_argument("--override", action="append", default=[])
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    failed: list[str] = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        recipe = load_checked_recipe(args.model, overrides(folder, args)).recipe
        with prepared_run(recipe, folder / "run", device=pick_device(), quiet=True) as (run, state):
            steps(run, state, 2 * BLOCK)  # compiles
            result: dict[str, Any] = {"device": str(run.start_facts["device"]), "torch": torch.__version__}
            result["cost"] = cost(run, state, args.blocks, failed)
            result["boards"] = boards(run, state, failed)
            result["profile"] = profile(run, state, failed)
            result["memory"] = memory(run, failed)
        if args.output:
            for file in (folder / "run/profiles").glob("*.txt"):
                shutil.copy(file, args.output.with_suffix(".txt"))
    result["failed"] = failed
    print(json.dumps(result, indent=1))
    if args.output:
        args.output.write_text(json.dumps(result, indent=1))
    sys.exit(1 if failed else 0)


def overrides(folder: Path, args: argparse.Namespace) -> list[str]:
    random = np.random.default_rng(0)
    with ShardWriter(str(folder / "random"), "uint16") as writer:
        for _ in range(1000):
            writer.append(random.integers(0, 50000, 4096))
    batch = f"batch={{micro_batch_size: {args.micro_batch}, global_batch_size: {2 * args.micro_batch}}}"
    profiling = "{wait: 999999999, warmup: 1, active: 3, repeat: 1, memory: true}"
    return [
        *(
            "tokenizer=null",
            "prepare=[]",
            "train.evaluate=null",
            "launch=null",
            "train.for=1000000 steps",
            "lr.decay=null",
            batch,
        ),
        "data={train: [{path: '" + str(folder / "random") + "'}]}",
        f"monitor={{log_every: {BLOCK} steps, tensorboard: false, profile: {profiling}}}",
        "checkpoint.phases=[{every: 10000000 steps}]",
        *args.override,
    ]


def steps(run: Run, state: TrainState, count: int) -> float:
    """Seconds of a step, from an idle device to an idle one."""
    began = time.perf_counter()
    for _ in range(count):
        run.stop.reason(state)
        train_step(run, state)
    finish_pending_step(run, state)
    if run.device.type != "cpu":
        torch.accelerator.synchronize()
    return (time.perf_counter() - began) / count


def records(run: Run) -> list[dict[str, Any]]:
    run.journal.flush()
    return [json.loads(line) for line in (run.folder / "metrics.jsonl").read_text().splitlines()]


def cost(run: Run, state: TrainState, blocks: int, failed: list[str]) -> dict[str, Any]:
    """In turn with and without; the timers of each block with them against its wall clock."""
    kept = {(StepTimers, "mark"), (StepTimers, "finish_step"), (Profiler, "begin")}
    methods = {(kind, name): getattr(kind, name) for kind, name in kept}
    norm_of = Gradients.norm_of
    weights = run.optimizer._on_device

    def not_of_weights(self: Gradients, tensors: Any) -> torch.Tensor:
        return torch.zeros((), device=tensors[0].device) if tensors is weights else norm_of(self, tensors)

    found: dict[bool, list[float]] = {True: [], False: []}
    errors = []
    for block in range(blocks):
        measures = block % 2 == 0
        for (kind, name), method in methods.items():
            setattr(kind, name, method if measures else lambda *_, **__: None)
        mark = run.meter.timers.mark  # the others have it bound
        for holder, name in ((run.feed, "_mark"), (run.runner, "mark"), (run.runner.execution, "_mark")):
            object.__setattr__(holder, name, mark)
        Gradients.norm_of = norm_of if measures else not_of_weights  # type: ignore[method-assign]
        run.meter.timers._marks.clear()
        run.meter.timers._last = None
        run.meter.drop()
        if measures:
            run.meter.timers.mark("other")
        found[measures].append(steps(run, state, BLOCK))
        if measures:
            timers = records(run)[-1]["timers"]
            summed = sum(seconds for phase, seconds in timers.items() if phase not in AWAY)
            errors.append(summed / found[True][-1] - 1)
    for (kind, name), method in methods.items():
        setattr(kind, name, method)
    Gradients.norm_of = norm_of  # type: ignore[method-assign]
    run.meter.timers._marks.clear()
    run.meter.timers._last = None
    differences = [a / b - 1 for a, b in zip(found[True], found[False], strict=False)]
    more = statistics.median(differences)
    if more > 0.002:
        failed.append(f"measuring costs {more:.3%} of a step, more than 0.2%")
    if max(map(abs, errors)) > 0.03:
        failed.append(f"timers are up to {max(map(abs, errors)):.1%} off the wall clock, more than 3%")
    return {
        "seconds_per_step": {name: statistics.median(found[on]) for name, on in (("with", True), ("without", False))},
        "median_cost": more,
        "standard_error": statistics.stdev(differences) / len(differences) ** 0.5,
        "timers_off_by": errors,
        "timers": timers,
    }


def boards(run: Run, state: TrainState, failed: list[str]) -> dict[str, Any]:
    """Readings of nvidia-smi and ours, one after the other while the device works."""
    found: list[tuple[dict[str, float], dict[str, float]]] = []
    query = "memory.used,power.draw,utilization.gpu,temperature.gpu"

    def look() -> None:
        time.sleep(2)
        for _ in range(5):
            try:
                command = ["nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader,nounits"]
                theirs = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()[0]
            except (OSError, subprocess.CalledProcessError, IndexError):
                return
            names = ("device memory bytes", "device watts", "device busy", "device celsius")
            numbers = [float(each) for each in theirs.split(",")]
            numbers[0] *= 2**20
            numbers[2] /= 100
            found.append((dict(zip(names, numbers, strict=True)), run.resources.read()))

    looking = threading.Thread(target=look)
    looking.start()
    while looking.is_alive():
        steps(run, state, 4)
    looking.join()
    if not found or "device watts" not in found[0][1]:
        return {"skipped": "needs nvidia-smi and the package nvidia-ml-py", "found": found}
    for name, within in (("device memory bytes", 0.02), ("device watts", 0.1), ("device celsius", 0.05)):
        theirs, ours = (statistics.median(each[which][name] for each in found) for which in (0, 1))
        if abs(ours / theirs - 1) > within:
            failed.append(f"{name}: {ours} here, {theirs} by nvidia-smi")
    return {"found": [{name: (a[name], b[name]) for name in a} for a, b in found]}


def profile(run: Run, state: TrainState, failed: list[str]) -> dict[str, Any]:
    time.sleep(0.3)  # control files are looked for five times a second
    (run.folder / "control/profile").touch()
    began = time.perf_counter()
    steps(run, state, 8)
    run.journal.flush()
    seconds = time.perf_counter() - began
    files = sorted((run.folder / "profiles").glob("*.json"))
    if not files:
        failed.append("control/profile made no profile")
        return {}
    found = json.loads(files[-1].read_text())
    events = json.loads(Path(found["trace"]).read_text())["traceEvents"]
    counted = shares(events, ("kernel", "gpu_memcpy", "gpu_memset") if run.device.type == "cuda" else ("cpu_op",))
    for kind in counted.keys() | found["shares"].keys():
        if abs(counted.get(kind, 0.0) - found["shares"].get(kind, 0.0)) > 0.01:
            failed.append(f"profile: {kind} is {found['shares'].get(kind)}, the trace has {counted.get(kind)}")
    snapshots = [file.stat().st_size for file in (run.folder / "profiles").glob("*.pickle")]
    if run.device.type == "cuda" and not snapshots:
        failed.append("no memory snapshot was written")
    return {**found, "counted": counted, "snapshot_bytes": snapshots, "seconds_of_8_steps": seconds}


def shares(events: list[dict[str, Any]], categories: tuple[str, ...]) -> dict[str, float]:
    """By looking at every tenth of a microsecond."""
    chosen = [each for each in events if each.get("cat") in categories and each.get("dur")]
    first = min(each["ts"] for each in chosen)
    running = np.zeros(round((max(each["ts"] + each["dur"] for each in chosen) - first) * 10), np.int8)
    kinds = list(reversed(_KINDS))
    for number, kind in enumerate(kinds, 1):
        for each in chosen:
            if _kind(each["name"]) == kind:
                start = round((each["ts"] - first) * 10)
                running[start : start + round(each["dur"] * 10)] = number
    found = np.bincount(running, minlength=len(kinds) + 1) / len(running)
    return dict(zip(["idle", *kinds], found.tolist(), strict=True))


def memory(run: Run, failed: list[str]) -> dict[str, Any]:
    """The record's peak against the allocator's own."""
    record = records(run)[-1]
    if run.device.type != "cuda":
        return {"peak_memory_bytes": record["peak_memory_bytes"]}
    peak, total = torch.cuda.max_memory_allocated(), torch.cuda.get_device_properties(run.device).total_memory
    if not 0.9 < record["peak_memory_bytes"] / peak <= 1.0 or abs(record["memory_share"] * total / peak - 1) > 0.1:
        failed.append(f"peak memory: {record['peak_memory_bytes']} in the record, {peak} by the allocator")
    keys = ("peak_memory_bytes", "memory_share", "tflops", "hardware_tflops", "megatron_tflops", "mfu", "params_norm")
    return {key: record[key] for key in keys} | {"allocator_peak": peak, "resources": record["resources"]}


if __name__ == "__main__":
    main()
