"""What a very long run costs to look at and to resume: report, start, list and delete, against the limits we promise.

    python benchmarks/load.py --work-dir /fast/disk

A real run of a few steps is made, then its files are multiplied: 2M lines of metrics, 300k events, 1,000 checkpoints.
Each command is a process of its own; a start is compared with the same start before its files were multiplied.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

from bloomery.checkpoint.folder import MANIFEST, FileFacts, read_manifest, step_name, write_manifest
from bloomery.data.shards import ShardWriter

_MODEL = "{family: gpt2, num_layers: 4, hidden_size: 32, num_heads: 2, seq_length: 16, vocab_size: 64}"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--metrics", type=int, default=2_000_000, help="lines of metrics.jsonl")
    parser.add_argument("--events", type=int, default=300_000, help="lines of events.jsonl")
    parser.add_argument("--checkpoints", type=int, default=1000)
    parser.add_argument("--work-dir", type=Path, help="where everything is written; default: a temporary folder")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=args.work_dir) as name:
        run = Path(name) / "run"
        train(run, args.checkpoints)
        ordinary, _ = train(run, 1)
        kept = (run / "metrics.jsonl").read_bytes()
        many_metrics(run / "metrics.jsonl", args.metrics)
        show("report", *bloomery("report", run), limit_seconds=20, limit_megabytes=500)
        (run / "metrics.jsonl").write_bytes(kept)  # of steps that no checkpoint has: a start would set them aside
        many_events(run / "events.jsonl", args.events)
        started, megabytes = train(run, 1)
        show("start, beyond an ordinary one", started - ordinary, megabytes, limit_seconds=5)
        many_checkpoints(run / "checkpoints", args.checkpoints)
        show("list", *bloomery("inspect", "checkpoint", run, "--list"), limit_seconds=3)
        seconds, megabytes = train(run, 1, "checkpoint={keep: {last: 1}}")
        assert len(list((run / "checkpoints").glob("step-*"))) <= 3  # the newest, one proven good, the next to be
        show("delete, beyond that start", seconds - started, megabytes, limit_seconds=10)


def show(what: str, seconds: float, megabytes: float, *, limit_seconds: float, limit_megabytes: float = 1000) -> None:
    verdict = "" if seconds < limit_seconds and megabytes < limit_megabytes else "  TOO MUCH"
    print(f"{what:<45} {seconds:7.1f} s of {limit_seconds:g}  {megabytes:6.0f} MB at most{verdict}", flush=True)


_MEASURED = """
import resource, subprocess, sys, time
started = time.monotonic()
subprocess.run([sys.executable, "-m", "bloomery", *sys.argv[1:]], stdout=subprocess.DEVNULL, check=True)
print(time.monotonic() - started, resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1024)
"""


def bloomery(*words: object) -> tuple[float, float]:
    """Seconds, and the most megabytes that were resident: by a small process, whose own would count otherwise."""
    command = [sys.executable, "-c", _MEASURED, *map(str, words)]
    seconds, megabytes = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout.split()
    return float(seconds), float(megabytes)


def train(run: Path, steps: int, *overrides: str) -> tuple[float, float]:
    """So many steps more."""
    shard = run.parent / "random"
    if not shard.with_suffix(".bin").exists():
        random = np.random.default_rng(0)
        with ShardWriter(str(shard), "uint16") as writer:
            for _ in range(100):
                writer.append(random.integers(0, 64, 200))
    recipe = run.parent / "small.yaml"
    recipe.write_text(
        f"name: small\nmodel: {_MODEL}\ndata: {{train: [{{path: {shard}}}]}}\nprecision: fp32\n"
        "batch: {micro_batch_size: 1, global_batch_size: 1}\nlr: {peak: 1.0e-3, schedule: constant}\n"
        "train: {for: 1000000 steps}\nmonitor: {log_every: 1 steps, tensorboard: true}\n"
    )
    where = ("--run-dir", run, "--device", "cpu", "--quiet")
    return bloomery("train", recipe, f"train.exit_after={steps} steps", *overrides, *where)


def many_metrics(path: Path, count: int) -> None:
    """The newest job's record again and again, with steps from 1 on and losses that differ."""
    newest = json.loads(path.read_text().splitlines()[-1])
    text = json.dumps({**newest, "step": "STEP", "losses": {"lm loss": "LOSS"}}) + "\n"
    losses = np.random.default_rng(0).normal(3.0, 0.1, count)
    with path.open("w") as file:
        for step, loss in enumerate(losses.tolist(), 1):
            file.write(text.replace('"STEP"', str(step)).replace('"LOSS"', repr(loss)))


def many_events(path: Path, count: int) -> None:
    """More notes and skips between the first start and the rest."""
    first, *others = path.read_text().splitlines(keepends=True)
    note = json.loads(first) | {"kind": "skipped_update", "reason": "the gradient is not finite"}
    with path.open("w") as file:
        file.write(first)
        file.writelines(json.dumps({**note, "step": 1 + n // 1000, "n": n}) + "\n" for n in range(count))
        file.writelines(others)


def many_checkpoints(root: Path, count: int) -> None:
    """The oldest one again and again, at earlier steps."""
    first = min(root.glob("step-*"))
    said = read_manifest(first)
    files = {name: FileFacts(**facts) for name, facts in said.pop("files").items()}
    said.pop("sha256")
    for step in range(1, count + 1 - len(list(root.glob("step-*")))):
        shutil.copytree(first, root / step_name(step), ignore=shutil.ignore_patterns(MANIFEST))
        write_manifest(root / step_name(step), {**said, "step": step}, files)


if __name__ == "__main__":
    main()
