"""What training costs in energy, where a sensor counts it. Where none does, the time of the devices and no number.

The sensors of accelerators are in accelerator.py; here are those of processors (Linux powercap, RAPL). How a run adds
up what they say is in monitor/meters.py.
"""

from __future__ import annotations

import contextlib
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

from bloomery.base.storage import reason

POWERCAP = Path("/sys/class/powercap")
NO_SENSOR = "no sensor"


@dataclass(frozen=True)
class Energy:
    """What a run has spent, over all its jobs, steps that were done again included."""

    joules: float = 0.0
    """As measured: of the devices that train, not of hosts around them, network or cooling."""
    measured_seconds: float = 0.0
    """Device-seconds that `joules` covers."""
    device_seconds: float = 0.0
    """Ranks times wall clock."""

    def __add__(self, other: Energy) -> Energy:
        return Energy(
            self.joules + other.joules,
            self.measured_seconds + other.measured_seconds,
            self.device_seconds + other.device_seconds,
        )

    @property
    def measured_joules(self) -> float | None:
        """None where no sensor measured anything."""
        return self.joules if self.measured_seconds > 0 else None

    @property
    def coverage(self) -> float:
        """The share of the devices' time that was measured, from 0 to 1."""
        return min(1.0, self.measured_seconds / self.device_seconds) if self.device_seconds else 0.0

    def order(self) -> float:
        """Sums only grow, so of two the later one is the one with more time of devices."""
        return self.device_seconds

    def to_json(self) -> dict[str, float]:
        return asdict(self)

    @classmethod
    def from_json(cls, facts: Any) -> Energy:
        """Zero where nothing was recorded."""
        if not isinstance(facts, dict):
            return cls()
        return cls(*(float(facts.get(key, 0.0)) for key in ("joules", "measured_seconds", "device_seconds")))


def format_joules(joules: float) -> str:
    """`1.25 kWh`, and below a watt-hour `812 J`."""
    if joules < 3600:
        return f"{joules:.3g} J"
    scale, unit = next(((s, u) for s, u in ((3.6e9, "MWh"), (3.6e6, "kWh")) if joules >= s), (3600.0, "Wh"))
    return f"{joules / scale:,.2f} {unit}"


def format_device_hours(seconds: float) -> str:
    return f"{seconds / 3600:,.3g} device-hours" if seconds < 3.6e6 else f"{seconds / 3600:,.0f} device-hours"


class Sensor(Protocol):
    name: str
    """What it is and what it counts, for people."""
    shared: bool
    """Whether it counts for all ranks of this machine at once."""

    def joules(self) -> float:
        """Counted since some beginning; never falls. OSError if it cannot be read."""
        ...


class Rapl:
    """Processor packages and their memory, of the whole machine, whoever uses it."""

    shared = True

    def __init__(self, zones: list[Path]) -> None:
        """OSError or ValueError if a zone cannot be read."""
        names = ", ".join(sorted((zone / "name").read_text().strip() for zone in zones))
        self.name = f"RAPL ({names})"
        self._ranges = {zone: int((zone / "max_energy_range_uj").read_text()) for zone in zones}
        self._last = {zone: _counter(zone) for zone in zones}
        self._total_uj = 0

    def joules(self) -> float:
        for zone, before in self._last.items():
            now = _counter(zone)
            # A counter that has come round begins at zero again.
            self._total_uj += now - before if now >= before else now - before + self._ranges[zone]
            self._last[zone] = now
        return self._total_uj / 1e6


def find_rapl(root: Path | None = None) -> Rapl | str:
    """The counters of this machine's processors, or why there are none to read."""
    folder = root or POWERCAP
    # Zones of zones hold cores and graphics, which the package counts already, and dram, which it does not. A zone
    # `psys` and the driver intel-rapl-mmio count what the packages count, once more.
    zones = []
    for zone in sorted(folder.glob("intel-rapl:*")):
        with contextlib.suppress(OSError):
            name = (zone / "name").read_text().strip()
            if name == "dram" or name.startswith("package"):
                zones.append(zone)
    if not zones:
        return NO_SENSOR
    try:
        return Rapl(zones)
    except (OSError, ValueError) as error:
        why = reason(error) if isinstance(error, OSError) else str(error)
        return f"{NO_SENSOR} that may be read: {getattr(error, 'filename', None) or folder}: {why}"


def _counter(zone: Path) -> int:
    return int((zone / "energy_uj").read_text())
