"""The nodes of a run, and what each of them has and uses, at a low rate."""

import contextlib
import math
import os
import shutil
import socket
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import torch

from bloomery.base.accelerator import read_boards
from bloomery.base.ranks import Ranks
from bloomery.monitor.meters import machine

EVERY_SECONDS = 10.0
_PROC, _INFINIBAND = Path("/proc"), Path("/sys/class/infiniband")
RESOURCES = (
    "cpu busy", "host memory bytes", "host memory share", "shm bytes", "disk share", "network bytes per second",
    "infiniband bytes per second", "device busy", "device memory bytes", "device watts", "device celsius",
)  # fmt: skip
"""Shares are of 1. Of several devices: the mean of `busy`, the sum of bytes and watts, the hottest."""


@dataclass(frozen=True)
class Nodes:
    """Those of the run, as one of its ranks sees them."""

    own: int
    members: list[list[int]]
    """The ranks of each."""
    hosts: list[str]
    """By rank."""
    leads: bool
    """Whether it is the first rank of its node, which measures it."""

    @classmethod
    def of(cls, ranks: Ranks) -> Self:
        """Collective."""
        found = ranks.gather((machine(), socket.gethostname()))
        machines = [name for name, _ in found]
        members = [[rank for rank, name in enumerate(machines) if name == each] for each in dict.fromkeys(machines)]
        own = next(i for i, each in enumerate(members) if ranks.rank in each)
        return cls(own, members, [name for _, name in found], members[own][0] == ranks.rank)


class ResourceMeter:
    """A thread on the first rank of each node reads it now and then; rank 0 asks for a table when it logs."""

    def __init__(self, folder: Path, device: torch.device, nodes: Nodes) -> None:
        self._folder, self._device, self._nodes = folder, device, nodes
        self._newest = [math.nan] * len(RESOURCES)
        self._before: dict[str, float] = {}
        self._shown_at = -math.inf
        self._ended = threading.Event()
        if nodes.leads:
            threading.Thread(target=self._run, name="bloomery-resources", daemon=True).start()

    def close(self) -> None:
        self._ended.set()

    def row(self) -> list[float]:
        return self._newest

    def due(self, rows: Sequence[Sequence[float]]) -> dict[str, dict[str, float]]:
        """By host what was read, if it was not shown lately; `rows`: those of all ranks."""
        now = time.monotonic()
        if now - self._shown_at < EVERY_SECONDS:
            return {}
        first = [members[0] for members in self._nodes.members]
        found = {self._nodes.hosts[rank]: _known(zip(RESOURCES, rows[rank], strict=True)) for rank in first}
        found = {host: values for host, values in found.items() if values}
        self._shown_at = now if found else self._shown_at
        return found

    def _run(self) -> None:
        while True:
            with contextlib.suppress(Exception):  # a view of the machine: nothing of it may end a training
                values = self.read()
                self._newest = [values.get(name, math.nan) for name in RESOURCES]
            if self._ended.wait(EVERY_SECONDS):
                return

    def read(self) -> dict[str, float]:
        disk, shm = shutil.disk_usage(self._folder), os.statvfs("/dev/shm")
        memory = dict(line.split(":") for line in (_PROC / "meminfo").read_text().splitlines())
        total, free = (int(memory[name].split()[0]) * 1024 for name in ("MemTotal", "MemAvailable"))
        ticks = [int(each) for each in (_PROC / "stat").read_text().split(None, 9)[1:9]]
        idle = ticks[3] + ticks[4]
        found = {
            "host memory bytes": total - free,
            "host memory share": 1 - free / total,
            "shm bytes": (shm.f_blocks - shm.f_bfree) * shm.f_frsize,
            "disk share": disk.used / disk.total,
        }
        counters = {"seconds": time.monotonic(), "busy": sum(ticks) - idle, "ticks": sum(ticks)}
        counters |= {"network": _network_bytes(), "infiniband": _infiniband_bytes()}
        past, self._before = self._before, counters
        if past:
            gone = {name: value - past[name] for name, value in counters.items()}
            found["cpu busy"] = gone["busy"] / max(1, gone["ticks"])
            for name in ("network", "infiniband"):
                found[f"{name} bytes per second"] = gone[name] / gone["seconds"]
        if boards := read_boards(self._device):
            busy, used, watts, celsius = zip(*boards, strict=True)
            found |= {"device busy": sum(busy) / len(busy), "device memory bytes": sum(used)}
            found |= {"device watts": sum(watts), "device celsius": max(celsius)}
        return found


def _known(pairs: Any) -> dict[str, float]:
    return {name: value for name, value in pairs if not math.isnan(value)}


def _network_bytes() -> float:
    """Received and sent by all interfaces but the loopback."""
    lines = (line.split(":") for line in (_PROC / "net/dev").read_text().splitlines() if ":" in line)
    return sum(int(rest.split()[0]) + int(rest.split()[8]) for name, rest in lines if name.strip() != "lo")


def _infiniband_bytes() -> float:
    """NaN where there is none. The counters are in words of four bytes."""
    files = [
        *_INFINIBAND.glob("*/ports/*/counters/port_rcv_data"),
        *_INFINIBAND.glob("*/ports/*/counters/port_xmit_data"),
    ]
    return 4.0 * sum(int(file.read_text()) for file in files) if files else math.nan
