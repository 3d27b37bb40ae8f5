"""Amounts the way people say them: `216_320 samples`, `2000 steps`, `300B tokens`, `19h50m`, `1.25 kWh`."""

from __future__ import annotations

import re
from dataclasses import asdict, astuple, dataclass
from decimal import Decimal
from typing import Any, Literal

AmountUnit = Literal["steps", "samples", "tokens", "documents"]
_EXAMPLES = {
    "steps": "2000 steps",
    "samples": "216_320 samples",
    "tokens": "300B tokens",
    "documents": "10_000 documents",
}
_DURATION_RULE = "a duration is written like '19h50m', '90m', '2d' or '45s'"

_MULTIPLIERS = {"": 1, "k": 10**3, "K": 10**3, "M": 10**6, "B": 10**9, "G": 10**9, "T": 10**12}
_WHOLE = r"[0-9]{1,3}(?:,[0-9]{3})+|[0-9]+(?:_[0-9]+)*"
"""A comma stands only before three digits: `1,5M tokens` would be read as 15M by some and 1.5M by others."""
_AMOUNT = re.compile(
    rf"^((?:{_WHOLE})(?:\.[0-9]+)?(?:[eE][0-9]{{1,2}})?)\s*([kKMBGT]?)\s*(steps?|samples?|tokens?|documents?)$"
)
_DURATION = re.compile(r"^(?:([0-9]+)d)?\s*(?:([0-9]+)h)?\s*(?:([0-9]+)m)?\s*(?:([0-9]+(?:\.[0-9]+)?)s)?$")
_LARGEST_AMOUNT = 10**18
LONGEST_SECONDS = 10 * 365 * 86400


@dataclass(frozen=True)
class Amount:
    """A count: of training in steps, samples or tokens; of texts in documents."""

    count: int
    unit: AmountUnit

    def __str__(self) -> str:
        return f"{self.count} {self.unit}"


@dataclass(frozen=True)
class Epochs:
    """How often all samples of a source are to be seen."""

    count: int
    source: str | None
    """Its name; None: of the smallest."""

    def __str__(self) -> str:
        return f"{self.count} epochs" + (f" of {self.source}" if self.source else "")


@dataclass(frozen=True)
class Duration:
    """A length of wall-clock time."""

    seconds: float

    def __str__(self) -> str:
        whole = int(self.seconds)
        if whole != self.seconds:
            return f"{Decimal(repr(self.seconds)):f}s"  # never `1e-07s`, which would not be read back
        hours, minutes, seconds = whole // 3600, whole // 60 % 60, whole % 60
        parts = [f"{n}{unit}" for n, unit in ((hours, "h"), (minutes, "m"), (seconds, "s")) if n]
        return "".join(parts) or "0s"


def parse_amount(text: str, *, units: tuple[AmountUnit, ...] = ("steps", "samples", "tokens")) -> Amount:
    """`300B tokens` -> Amount(300_000_000_000, 'tokens'). ValueError names the rule."""
    wanted = " or ".join(f"'{_EXAMPLES[unit]}'" for unit in units)
    match = _AMOUNT.match(text.strip())
    if not match:
        rule = f"an amount is a number and a unit, such as {wanted}"
        if "%" in text:
            rule += "; percent is no unit"
        if "epoch" in text:
            rule += "; epochs are a length for train.for: `2 epochs`, `2 epochs of SOURCE`, whole ones only"
        raise ValueError(rule)
    number, multiplier, unit = match.groups()
    unit = unit.rstrip("s") + "s"
    if unit not in units:
        raise ValueError(f"must be counted in {' or '.join(units)}, such as {wanted}")
    plain = number.replace("_", "").replace(",", "")
    if len(plain) > 25 or (count := Decimal(plain) * _MULTIPLIERS[multiplier]) > _LARGEST_AMOUNT:
        raise ValueError(f"an amount is at most {_LARGEST_AMOUNT:,}")
    if count != int(count):
        raise ValueError(f"{text!r} is not a whole number of {unit}")
    return Amount(int(count), unit)


def parse_duration(text: str) -> Duration:
    """`19h50m` -> Duration(71400). ValueError names the rule."""
    match = _DURATION.match(text.strip())
    if not text.strip() or not match:
        raise ValueError(_DURATION_RULE)
    days, hours, minutes, seconds = (float(number or 0) for number in match.groups())
    total = days * 86400 + hours * 3600 + minutes * 60 + seconds
    if total > LONGEST_SECONDS:
        raise ValueError("a duration is at most ten years")
    return Duration(total)


def counted(count: int, noun: str) -> str:
    """`1 document`, `174,736 tokens`."""
    return f"{count:,} {noun}{'s' * (count != 1)}"


def format_count(count: float) -> str:
    """12_853_386_240 -> '12.85B': three or four significant digits, for people."""
    for size, suffix in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if abs(count) >= 0.99995 * size:  # which rounds to it
            return f"{count / size:.4g}{suffix}"
    return f"{count:.4g}"


def format_bytes(size: float) -> str:
    """Binary units, for people."""
    for unit_bytes, suffix in ((2**40, "TiB"), (2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if abs(size) >= unit_bytes:
            return f"{size / unit_bytes:.4g} {suffix}"
    return f"{size:.0f} B"


def format_seconds(seconds: float) -> str:
    """3725 -> '1h02m', 42.3 -> '42s': short, for an ETA."""
    whole = int(seconds)
    if whole >= 86400:
        return f"{whole // 86400}d{whole % 86400 // 3600:02d}h"
    if whole >= 3600:
        return f"{whole // 3600}h{whole % 3600 // 60:02d}m"
    if whole >= 60:
        return f"{whole // 60}m{whole % 60:02d}s"
    return f"{seconds:.0f}s"


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
        return Energy(*(a + b for a, b in zip(astuple(self), astuple(other), strict=True)))

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
