"""What a machine has, which features need more and the command that installs it, and whether it can train a recipe."""

from __future__ import annotations

import importlib.util
import os
import platform
import secrets
import shutil
import socket
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median_high
from typing import Any

from bloomery import __version__
from bloomery.base.bounded import read_text
from bloomery.base.errors import Problem
from bloomery.base.units import format_bytes
from bloomery.config.recipe import Recipe
from bloomery.launch.job import inputs
from bloomery.sizing.layout import Layout, ranks_per_node
from bloomery.sizing.memory import checkpoint_bytes, stage_facts

FEATURES = {
    "torch.compile on a CPU": ("g++", "apt-get install g++"),
    "launch --on hosts": ("ssh", "apt-get install openssh-client"),
    "launch --on slurm": ("sbatch", "use a login node of the cluster"),
    "launch --on azureml": ("azure.ai.ml", "pip install azure-ai-ml azure-identity"),
    "fast tokenization": ("fastokens", "pip install 'bloomery[fast]'"),
    "text in parquet files": ("pyarrow", "pip install 'bloomery[parquet]'"),
    "s3:// URLs": ("s3fs", "pip install 'bloomery[s3]'"),
    "gs:// URLs": ("gcsfs", "pip install 'bloomery[gs]'"),
    "abfs:// URLs": ("adlfs", "pip install 'bloomery[abfs]'"),
    "hf:// URLs": ("huggingface_hub", "pip install 'bloomery[hf]'"),
    "proof of an export": ("transformers", "pip install transformers"),
    "energy and clocks of NVIDIA devices": ("pynvml", "pip install 'bloomery[energy]'"),
}
"""Feature -> the command or module it needs, and what installs it."""
_PROBE_BYTES = 2**26
_SLOW_BYTES_PER_SECOND = 50e6
BAD_NODES_FILE = "launch/bad_nodes.txt"
"""Hosts that the next job of the run is not given, until somebody removes them there."""
_LEAST_SHARED_MEMORY_BYTES = 2**30
_SLOW_DEVICE = 0.8
"""Of the median: devices of one kind differ by a few percent."""


def machine_facts(place: Path) -> dict[str, Any]:
    """`place`: where runs would be written."""
    import torch

    from bloomery.base.accelerator import (
        available_host_bytes,
        device_count,
        device_name,
        device_total_bytes,
        devices_here,
        library_versions,
        pick_device,
    )

    device = pick_device()
    total = device_total_bytes(device)
    return {
        "host": socket.gethostname(),
        "bloomery": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        **library_versions(),
        "system": platform.platform(),
        "device": device_name(device),
        "devices": device_count(device) or 0,
        "device_memory_bytes": total,
        "cores": len(os.sched_getaffinity(0)),
        "available_memory_bytes": available_host_bytes(),
        "shared_memory_bytes": shutil.disk_usage("/dev/shm").free if Path("/dev/shm").is_dir() else 0,
        "free_disk_bytes": shutil.disk_usage(place).free,
        "write_bytes_per_second": round(write_speed(place)),
        "measured": [_measured(each) for each in devices_here(device)],
    }


def _measured(device: Any) -> dict[str, Any]:
    """How fast a device is, with the clocks that it has under load."""
    from bloomery.base.accelerator import clocks_mhz, matmul_flops

    tflops, error = 0.0, ""
    try:
        tflops = round(matmul_flops(device) / 1e12, 3)
    except RuntimeError as failed:  # it is broken, or its memory is taken
        error = str(failed).partition("\n")[0]
    now, highest = clocks_mhz(device) or (None, None)
    return {"device": str(device), "tflops": tflops, "clock_mhz": now, "highest_clock_mhz": highest, "error": error}


def feature_facts() -> list[dict[str, str]]:
    """Each feature, and what to do where it is missing."""
    return [
        {"feature": feature, "state": "ok" if _has(need) else "missing", "remedy": "" if _has(need) else remedy}
        for feature, (need, remedy) in FEATURES.items()
    ]


def node_problems(recipe: Recipe, facts: dict[str, Any]) -> Iterator[Problem]:
    """What is wrong with this machine as a node of the training: another one may do."""
    host, ranks, launch = facts["host"], ranks_per_node(recipe), recipe.launch
    wants = "cuda" in facts and launch is not None and launch.on == "slurm" and launch.gres  # else a CPU will do
    if (0 if wants else 1) <= facts["devices"] < ranks:
        rule = f"launch.gpus_per_node starts {ranks} ranks on each node"
        yield Problem(f"{host} has {facts['devices']} devices", rule, "exclude it, or start fewer ranks")
    for each in facts["measured"]:
        if each["error"]:
            what = f"{each['device']} of {host} does not compute: {each['error']}"
            yield Problem(what, "every rank needs its device", "exclude the host, or end what occupies it")
    needed = max(stage["memory_bytes"]["device"] for stage in stage_facts(recipe, Layout.of(recipe)))
    if 0 < facts["device_memory_bytes"] < needed:
        has, rule = format_bytes(facts["device_memory_bytes"]), "without activations, the fullest rank"
        yield Problem(f"a device of {host} has {has}", f"{rule} needs {format_bytes(needed)}", "see `bloomery plan`")
    if facts["shared_memory_bytes"] < _LEAST_SHARED_MEMORY_BYTES and ranks > 1:
        has, rule = format_bytes(facts["shared_memory_bytes"]), "NCCL's ranks of a node talk through it"
        yield Problem(f"/dev/shm of {host} has {has} free", rule, "start the container with --shm-size=8g")


def run_problems(recipe: Recipe, facts: dict[str, Any]) -> Iterator[Problem]:
    """What is wrong wherever the training starts."""
    saved = checkpoint_bytes(recipe.model)
    if facts["free_disk_bytes"] < saved:
        has = format_bytes(facts["free_disk_bytes"])
        yield Problem(f"{has} are free for the run", f"one checkpoint takes {format_bytes(saved)}", "make room")
    for field, path in inputs(recipe):
        file = path if field == "tokenizer.path" else f"{path}.bin"
        if not os.access(file, os.R_OK):
            what = f"{facts['host']} cannot read {file}"
            yield Problem(what, f"{field} needs it", "mount it there, or correct the path")


def slowness(facts: dict[str, Any], nodes: Sequence[tuple[str, list[dict[str, Any]]]]) -> Iterator[str]:
    """Warnings. `nodes`: the host and what was `measured` on each."""
    if (speed := facts["write_bytes_per_second"]) < _SLOW_BYTES_PER_SECOND:
        yield f"{facts['host']} writes only {format_bytes(speed)}/s to the run folder"
    usual = median_high(each["tflops"] for _, measured in nodes for each in measured)
    for host, measured in nodes:
        for each in measured:
            if each["tflops"] < _SLOW_DEVICE * usual:
                yield f"{each['device']} of {host} computes only {each['tflops']:.4g} TFLOP/s, others {usual:.4g}"


def bad_nodes(run: Path) -> list[str]:
    path = run / BAD_NODES_FILE
    return sorted(set(read_text(path).split())) if path.exists() else []


def _has(need: str) -> bool:
    try:
        return shutil.which(need) is not None or importlib.util.find_spec(need) is not None
    except ModuleNotFoundError:  # of a package around it
        return False


def write_speed(place: Path) -> float:
    """Bytes per second to the disk, of a file that is gone afterwards."""
    path, block = place / f".bloomery-doctor-{secrets.token_hex(4)}", os.urandom(2**20)
    began = time.monotonic()
    try:
        with open(path, "xb") as file:
            for _ in range(_PROBE_BYTES // len(block)):
                file.write(block)
            file.flush()
            os.fsync(file.fileno())
    finally:
        path.unlink(missing_ok=True)
    return _PROBE_BYTES / (time.monotonic() - began)
