"""Devices, networks and storage from their data sheets, and those of the user's own YAML file."""

from __future__ import annotations

import difflib
import os
import re
import socket
from dataclasses import asdict, dataclass, field, replace
from functools import cache, reduce
from pathlib import Path
from typing import Any, TypeVar

from bloomery.base.bounded import read_text
from bloomery.base.errors import Problem, RecipeError, unreadable
from bloomery.config.yaml_nodes import parse_yaml
from bloomery.sizing.flops import peak_flops


@dataclass(frozen=True)
class Device:
    """One accelerator, or the CPU of a machine: a record of hardware.yaml, which says what the fields are."""

    torch_name: str
    memory_gib: float
    memory_gb_per_s: float
    link_gb_per_s: float
    node: int
    cores: int
    watts: float
    usd_per_hour: float
    network: str
    source: str
    tflops: float | None = None
    clock: float = 1.0
    measured: dict[str, float] = field(default_factory=dict)

    def peak(self, precision: str) -> float:
        """FLOP/s; a precision that it lacks runs as the nearest wider one."""
        known = (peak_flops(self.torch_name, name) for name in (precision, "bf16", "fp16"))
        found = next((peak for peak in known if peak), (self.tflops or 1.0) * 1e12)
        return self.clock * found / (2 if precision == "fp32" else 1)  # TF32 has half the peak of 16 bit


@dataclass(frozen=True)
class Bandwidth:
    """Of a network out of a node, or of storage."""

    gb_per_s: float
    source: str


@dataclass(frozen=True)
class Catalogue:
    """All that is known by a name: ours, and the user's own."""

    devices: dict[str, Device]
    networks: dict[str, Bandwidth]
    storage: dict[str, Bandwidth]
    grams_per_kwh: dict[str, float]


Entry = TypeVar("Entry")


def named(entries: dict[str, Entry], name: str, kind: str) -> Entry:
    """RecipeError for one that nobody knows, with the nearest."""
    if name in entries:
        return entries[name]
    near = difflib.get_close_matches(name.lower(), entries, n=1, cutoff=0.3)
    remedy = f"did you mean {near[0]}? " if near else ""
    known = f"known are {', '.join(entries)}"
    raise RecipeError(Problem(f"no {kind} is called {name!r}", known, f"{remedy}`--hardware FILE` adds your own"))


def own_file() -> Path:
    """This user's hardware file, which `bloomery calibrate` writes."""
    return Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config") / "bloomery" / "hardware.yaml"


def here() -> str:
    """What an entry of this machine is called."""
    return re.sub(r"[^a-z0-9]+", "-", socket.gethostname().lower()).strip("-")


@cache
def shipped() -> Catalogue:
    return _extended(Catalogue({}, {}, {}, {}), Path(__file__).with_name("hardware.yaml"))


def read_catalogue(path: Path | None) -> Catalogue:
    """With the entries of the user's file, and of that at `path`."""
    return reduce(_extended, [*filter(Path.is_file, [own_file()]), *filter(None, [path])], shipped())


def _extended(known: Catalogue, path: Path) -> Catalogue:
    """With the entries of a YAML file: of `devices`, `networks`, `storage` and `grams_per_kwh`. An entry that begins
    with `like: NAME` changes one that is known; so does one with a known name."""
    try:
        found, _ = parse_yaml(read_text(path), lambda line: f"{path}:{line}")
    except (OSError, ValueError) as error:
        raise unreadable(str(path), error) from None
    kinds = vars(known)
    rule = f"a hardware file has {', '.join(kinds)}, each a mapping of names to entries"
    if not isinstance(found, dict) or not all(isinstance(part, dict) for part in found.values()):
        raise RecipeError(Problem("this is no hardware file", rule, "see docs/plan.md", str(path)))
    if unknown := sorted(set(found) - set(kinds)):
        raise RecipeError(Problem(f"{unknown[0]} is not known here", rule, "remove it", str(path)))
    own = {kind: _with_own(kind, entries, found.get(kind, {}), f"{path}: {kind}") for kind, entries in kinds.items()}
    return Catalogue(**own)


def _with_own(kind: str, known: dict[str, Any], entries: dict[str, Any], place: str) -> dict[str, Any]:
    known = dict(known)
    for name, given in entries.items():
        if kind == "grams_per_kwh":
            known[name] = given
            continue
        given = {"source": "user"} | (given if isinstance(given, dict) else {})
        like = given.pop("like", name if name in known else None)
        base = asdict(named(known, like, "entry")) if like else {}
        try:
            known[name] = (Device if kind == "devices" else Bandwidth)(**base | given)
        except TypeError as error:
            remedy = f"begin with `like: {next(iter(known))}`, and change what differs"
            raise RecipeError(Problem(f"{name} is no whole entry: {error}", "", remedy, place)) from None
    return known


def known_as(torch_name: str, catalogue: Catalogue) -> str | None:
    """A device's name in the tables: that of this machine's own entry, if it is one of these."""
    names = [name for name, device in catalogue.devices.items() if device.torch_name == torch_name]
    return here() if here() in names else names[0] if names else None


@dataclass(frozen=True)
class Machine:
    """What a plan assumes of the hardware."""

    gpu: str
    device: Device
    network_name: str
    network: Bandwidth
    node: int
    """Devices per node."""

    @classmethod
    def of(cls, catalogue: Catalogue, gpu: str, network: str | None, node: int) -> Machine:
        device = named(catalogue.devices, gpu, "device")
        name = network or device.network
        return cls(gpu, device, name, named(catalogue.networks, name, "network"), node)

    def on(self, name: str, network: Bandwidth) -> Machine:
        return replace(self, network_name=name, network=network)
