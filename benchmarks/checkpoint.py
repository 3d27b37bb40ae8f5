"""How long training stands still for a checkpoint: torch.save, DCP's async save, and ours through the real loop.

    python benchmarks/checkpoint.py --model gpt-1.3b --batch 16

All save fp32 weights and AdamW's two moments of the same model to the same disk. Ours is `bloomery train` on random
shards; its stall is what the `save` events say, and step times are the wall-clock between records, saving included.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from bloomery.base.accelerator import device_name, pick_device
from bloomery.base.units import format_bytes
from bloomery.data.shards import ShardWriter
from bloomery.model.transformer import build_model
from bloomery.sizing.check import load_checked_recipe


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default="gpt-1.3b")
    parser.add_argument("--batch", type=int, default=16, help="our micro-batch size")
    parser.add_argument("--steps", type=int, default=190)
    parser.add_argument("--every", type=int, default=60, help="steps between saves; long enough for the disk")
    parser.add_argument("--work-dir", type=Path, help="where everything is written; default: a temporary folder")
    parser.add_argument("--override", action="append", default=[], help="of the recipe")
    parser.add_argument("--output", type=Path, help="write the figures as JSON")
    parser.add_argument("--peers", type=Path, help="internal: measure the peers in this process, in that folder")
    args = parser.parse_args()
    if args.peers:
        print(json.dumps(measure_peers(args.model, args.override, args.peers)))
        return
    with tempfile.TemporaryDirectory(dir=args.work_dir) as name:
        folder = Path(name)
        command = [sys.executable, __file__, "--model", args.model, "--peers", str(folder)]
        command += [word for text in args.override for word in ("--override", text)]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
        found = json.loads(done.stdout.splitlines()[-1])
        found |= measure_ours(args, folder)
    print(describe(found))
    if args.output:
        args.output.write_text(json.dumps(found, indent=1))


def measure_peers(name: str, overrides: list[str], folder: Path) -> dict[str, Any]:
    """torch.save and DCP's async save of the tensors that our checkpoints hold, twice each; the second counts."""
    from torch.distributed.checkpoint import async_save

    device = pick_device()
    tensors: dict[str, Tensor] = {}
    for parameter, value in build_model(load_checked_recipe(name, overrides).recipe.model).named_parameters():
        for kind in ("model", "exp_avg", "exp_avg_sq"):
            tensors[f"{kind}.{parameter}"] = torch.rand(value.shape, device=device)
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
    plain, stall, whole = [], [], []
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    for i in range(2):
        started = time.monotonic()
        with (folder / "plain.pt").open("wb") as file:
            torch.save(tensors, file)
            os.fsync(file.fileno())
        plain.append(time.monotonic() - started)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            started = time.monotonic()
            future = async_save(tensors, checkpoint_id=str(folder / f"dcp-{i}"))
            if device.type != "cpu":
                torch.accelerator.synchronize(device)
            stall.append(time.monotonic() - started)
            future.result()
        whole.append(time.monotonic() - started)
        shutil.rmtree(folder / f"dcp-{i}")
    (folder / "plain.pt").unlink()
    dist.destroy_process_group()
    return {
        "device": device_name(device),
        "bytes": sum(tensor.nbytes for tensor in tensors.values()),
        "tensors": len(tensors),
        "torch_save_stall": plain[-1],
        "dcp_async_stall": stall[-1],
        "dcp_async_total": whole[-1],
    }


def measure_ours(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    model = load_checked_recipe(args.model, args.override).recipe.model
    shard, run = folder / "random", folder / "run"
    random = np.random.default_rng(0)
    with ShardWriter(str(shard), "uint16") as writer:
        for _ in range(2000):
            writer.append(random.integers(0, model.vocab_size, 4096))
    command = [sys.executable, "-m", "bloomery", "train", args.model, *args.override, "--run-dir", str(run), "--quiet"]
    command += ["tokenizer=null", f"data={{train: [{{path: '{shard}'}}]}}", "train.evaluate=null", "lr.decay=null"]
    command += [f"batch={{micro_batch_size: {args.batch}, global_batch_size: {args.batch}}}"]
    command += ["train.for=1000000 steps", f"train.exit_after={args.steps} steps"]
    command += ["monitor={log_every: 1 steps, tensorboard: false}"]
    command += [f"checkpoint={{phases: [{{every: {args.every} steps}}], keep: {{last: 1}}}}"]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    times = {}
    for record in map(json.loads, (run / "metrics.jsonl").read_text().splitlines()):
        times[record["step"]] = record["time"]
    events = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    saves = [event for event in events if event["kind"] == "save" and event["step"] < args.steps]
    warm = args.every // 2  # compiling and the first allocations
    walls = {step: times[step] - times[step - 1] for step in times if step - 1 in times and step > warm}
    near = {step for event in saves for step in (event["step"], event["step"] + 1, event["step"] + 2)}
    busy = {  # while the disk was written
        step
        for event in saves
        for step in walls
        if times[event["step"]] < times[step] <= times[event["step"]] + event["persist_seconds"]
    }
    calm = [seconds for step, seconds in walls.items() if step not in near | busy]
    return {
        "ours_stalls": [event["blocking_seconds"] for event in saves],
        "ours_persist": [event["persist_seconds"] for event in saves],
        "median_step": statistics.median(calm or list(walls.values())),
        "steps_around_saves": {step: walls[step] for step in sorted(near) if step in walls},
        "slowest_while_writing": max((walls[step] for step in busy), default=None),
    }


def describe(found: dict[str, Any]) -> str:
    plain, ours, median = found["torch_save_stall"], statistics.median(found["ours_stalls"]), found["median_step"]
    slowest = max(found["steps_around_saves"].values(), default=median)
    lines = [
        f"{found['device']}: {format_bytes(found['bytes'])} in {found['tensors']} tensors",
        f"torch.save + fsync   stall {plain:9.4f} s",
        f"DCP async_save       stall {found['dcp_async_stall']:9.4f} s, on disk after {found['dcp_async_total']:.1f} s",
        f"bloomery train       stall {ours:9.4f} s, on disk after {max(found['ours_persist']):.1f} s, "
        f"{plain / ours:,.0f} times shorter than torch.save",
        f"steps: median {median:.4f} s; slowest within two steps of a save {slowest:.4f} s "
        f"({100 * (slowest / median - 1):+.1f}%)",
    ]
    if max(found["ours_stalls"]) > 10 * ours:
        lines.append(
            f"a save waited {max(found['ours_stalls']):.4f} s for the one before: the disk needs a longer --every"
        )
    if found["slowest_while_writing"] is not None:
        lines.append(f"slowest while the disk was written {found['slowest_while_writing']:.4f} s")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
