"""Adds up what a run spends in energy: over ranks, and over all its jobs."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import time
from pathlib import Path

from bloomery.base.energy import Energy, Sensor
from bloomery.base.errors import DataError
from bloomery.base.ranks import Ranks
from bloomery.base.storage import open_plain
from bloomery.monitor import names
from bloomery.monitor.history import read_ledger

_FRESH_SECONDS = 1.0
"""A reading that is younger is used again: sensors are not faster, and steps may be."""
_TAIL_BYTES = 2**20
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


class EnergyMeter:
    """What this rank has spent in this job. Asked at every step, and so before a counter comes round."""

    def __init__(self, sensor: Sensor | None = None, *, covers: int = 1) -> None:
        """`covers`: how many ranks the sensor counts for."""
        self.before = Energy()
        """What earlier jobs of the run have spent, on all ranks; set once that is known."""
        self._sensor, self._covers = sensor, covers
        self._started = self._read_at = time.monotonic()
        self._first = self._last = self._read()

    def own(self, *, fresh: bool = False) -> Energy:
        """This rank's part of this job so far. Cheap enough for every step: sensors are asked once a second."""
        now = time.monotonic()
        if fresh or now - self._read_at >= _FRESH_SECONDS:
            found = self._read()
            if found is not None:
                self._last, self._read_at = found, now
        device_seconds = now - self._started
        if self._first is None or self._last is None:
            return Energy(device_seconds=device_seconds)
        measured_seconds = self._covers * (self._read_at - self._started)
        return Energy(self._last - self._first, measured_seconds, device_seconds)

    def total(self, ranks: Ranks, *, fresh: bool = False) -> Energy:
        """What all ranks and jobs have spent so far. Collective."""
        return self.before + Energy(*ranks.sum(list(self.own(fresh=fresh).to_json().values())))

    def _read(self) -> float | None:
        """None where there is no sensor, or one that no longer answers: what it counted until then stays."""
        if self._sensor is None:
            return None
        try:
            return self._sensor.joules()
        except (OSError, ValueError):
            self._sensor = None
            return None


def start_meter(sensor: Sensor | str, ranks: Ranks) -> tuple[EnergyMeter, str]:
    """This rank's meter, and in words what measures the run. Of ranks that share a sensor the first one reads it.

    Collective. `sensor`: of this rank's device, or why it has none."""
    name, is_shared = (sensor, False) if isinstance(sensor, str) else (sensor.name, sensor.shared)
    found = ranks.gather((_machine(), name))
    here = [rank for rank, (machine, _) in enumerate(found) if machine == found[ranks.rank][0]]
    words = "; ".join(dict.fromkeys(name for _, name in found))
    if isinstance(sensor, str) or (is_shared and ranks.rank != here[0]):
        return EnergyMeter(), words
    return EnergyMeter(sensor, covers=len(here) if is_shared else 1), words


def spent_before(run_folder: Path, saved: Energy) -> Energy:
    """What earlier jobs of a run have spent: all sums only grow, so the largest one that was written down anywhere.
    `saved`: what its checkpoint says, which may have come from another machine."""
    found = [saved, *_logged(run_folder / names.METRICS_FILE)]
    with contextlib.suppress(DataError):
        found.append(read_ledger(run_folder / names.EVENTS_FILE).energy)
    return max(found, key=Energy.order)


def is_whole(energy: Energy) -> bool:
    """Whether all of the devices' time was measured. Readings lie up to a second apart, so the last moment may lack."""
    return energy.coverage > 0.99 or energy.device_seconds - energy.measured_seconds < _FRESH_SECONDS


def _logged(metrics: Path) -> list[Energy]:
    """Of the last records, whatever became of their steps."""
    try:
        with open(metrics, "rb", opener=open_plain) as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - _TAIL_BYTES))
            lines = file.read().split(b"\n")
    except OSError:
        return []
    found = []
    for line in lines:
        with contextlib.suppress(ValueError, KeyError, TypeError, AttributeError):  # torn, or without energy
            found.append(Energy.from_json(json.loads(line)[names.FACT_ENERGY]))
    return found


def _machine() -> str:
    """The same for all containers of a machine: they share its counters."""
    try:
        return _BOOT_ID.read_text().strip()
    except OSError:
        return socket.gethostname()
