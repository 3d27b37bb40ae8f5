"""The one door to the accelerator. Everything else says `device` and means a CPU, CUDA, ROCm, XPU or plug-in device.

The only file of the package that may ask a device for its name, its memory or its clock (a test enforces it).
"""

from __future__ import annotations

import os
import resource
from typing import Any

import torch

from bloomery.base.errors import Problem, RecipeError


def pick_device(wanted: str | None = None) -> torch.device:
    """The device asked for, else this machine's accelerator, else the CPU."""
    here = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if wanted is None:
        return here or torch.device("cpu")
    if wanted == "cpu" or (here is not None and wanted.split(":")[0] == here.type):
        return torch.device(wanted)
    have = f"cpu and {here.type}" if here else "cpu"
    problem = Problem(f"--device is {wanted}", f"this machine has: {have}", "leave --device out, or name one of these")
    raise RecipeError(problem)


def device_name(device: torch.device) -> str:
    """What the maker calls it: `NVIDIA H200`; `cpu` for a CPU."""
    if device.type == "cpu":
        return "cpu"
    return str(_backend(device).get_device_name(device))


def memory_bytes(device: torch.device) -> tuple[int, int]:
    """(now, peak) bytes held on the device; on a CPU, of this process."""
    if device.type == "cpu":
        with open("/proc/self/statm") as statm:
            now = int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
        return now, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return torch.accelerator.memory_allocated(device), torch.accelerator.max_memory_allocated(device)


def total_memory_bytes(device: torch.device) -> int | None:
    """What the device holds in all; None for a CPU."""
    if device.type == "cpu":
        return None
    return int(_backend(device).get_device_properties(device).total_memory)


def synchronize(device: torch.device) -> None:
    """Wait until the device is idle."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether the device (not the host) ran out of memory."""
    return isinstance(error, torch.OutOfMemoryError)


def _backend(device: torch.device) -> Any:
    return torch.get_device_module(device)
