"""Devices, networks and storage from their data sheets, and those of the user's own YAML file."""

from __future__ import annotations

import difflib
import os
import re
import socket
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

import yaml

from bloomery.base.bounded import read_text
from bloomery.base.errors import Problem, RecipeError, unreadable
from bloomery.sizing.flops import peak_flops


@dataclass(frozen=True)
class Device:
    """One accelerator, or the CPU of a machine."""

    torch_name: str
    """By which sizing/flops.py knows its peak."""
    memory_gib: float
    memory_gb_per_s: float
    link_gb_per_s: float
    """To the others of its node, one direction."""
    node: int
    """Devices of a usual machine."""
    cores: int
    """Processors that share the tiles of a matrix product (SMs, CUs)."""
    watts: float
    usd_per_hour: float
    """An assumption: about what clouds asked on demand in 2025."""
    network: str
    """Of a usual machine."""
    source: str
    tflops: float | None = None
    """16-bit peak, where sizing/flops.py has none."""
    clock: float = 1.0
    """Share of the data sheet's peak that a power limit leaves."""
    measured: dict[str, float] = field(default_factory=dict)
    """Constants of the planner, as `bloomery calibrate` has found them there."""

    def peak(self, precision: str) -> float:
        """FLOP/s; a precision that it lacks runs as the nearest wider one."""
        known = (peak_flops(self.torch_name, name) for name in (precision, "bf16", "fp16"))
        found = next((peak for peak in known if peak), (self.tflops or 1.0) * 1e12)
        return self.clock * found / (2 if precision == "fp32" else 1)  # TF32 has half the peak of 16 bit


@dataclass(frozen=True)
class Network:
    gb_per_s: float
    """Out of a node, one direction, all of its cards together."""
    source: str


@dataclass(frozen=True)
class Storage:
    gb_per_s: float
    source: str


_SHEET = "data sheet"
DEVICES = {
    "v100-16g": Device("NVIDIA V100-SXM2-16GB", 16, 900, 150, 8, 80, 300, 2.5, "infiniband-edr", _SHEET),
    "v100-32g": Device("NVIDIA V100-SXM2-32GB", 32, 900, 150, 8, 80, 300, 2.8, "infiniband-edr", _SHEET),
    "a100-40g": Device("NVIDIA A100-SXM4-40GB", 40, 1555, 300, 8, 108, 400, 3.4, "infiniband-hdr", _SHEET),
    "a100-80g": Device("NVIDIA A100-SXM4-80GB", 80, 2039, 300, 8, 108, 400, 4.1, "infiniband-hdr", _SHEET),
    "h100": Device("NVIDIA H100 80GB HBM3", 80, 3350, 450, 8, 132, 700, 6.5, "infiniband-ndr", _SHEET),
    "h100-96g": Device(
        *("NVIDIA H100 80GB HBM3", 96, 2400, 450, 8, 132, 500, 6.0, "infiniband-ndr", "arXiv 2410.06511"),
        clock=0.89,  # the cube root of 500 W over 700 W
    ),
    "h200": Device("NVIDIA H200", 141, 4800, 450, 8, 132, 700, 8.0, "infiniband-ndr", _SHEET),
    "b200": Device("NVIDIA B200", 180, 8000, 900, 8, 148, 1000, 12.0, "infiniband-ndr", _SHEET),
    "mi300x": Device("AMD Instinct MI300X", 192, 5300, 448, 8, 304, 750, 6.0, "infiniband-ndr", _SHEET),
    "gaudi2": Device("GAUDI2", 96, 2450, 262, 8, 24, 600, 3.0, "ethernet-24x100g", _SHEET),
    "cpu": Device("cpu", 64, 100, 20, 1, 64, 250, 0.5, "ethernet-25g", "a server of 2023, roughly", tflops=0.5),
}
_NODE_SHEET = "cards of a usual node times their rate"
NETWORKS = {
    "infiniband-edr": Network(12.5, f"{_NODE_SHEET}: 1 x 100 Gb/s"),
    "infiniband-hdr": Network(200, f"{_NODE_SHEET}: 8 x 200 Gb/s"),
    "infiniband-ndr": Network(400, f"{_NODE_SHEET}: 8 x 400 Gb/s"),
    "omnipath": Network(50, f"{_NODE_SHEET}: 4 x 100 Gb/s (Jean Zay)"),
    "roce-1600g": Network(200, f"{_NODE_SHEET}: 1600 Gb/s"),
    "efa": Network(400, f"{_NODE_SHEET}: 32 x 100 Gb/s"),
    "ethernet-24x100g": Network(300, f"{_NODE_SHEET}: 24 x 100 Gb/s"),
    "ethernet-100g": Network(12.5, f"{_NODE_SHEET}: 1 x 100 Gb/s"),
    "ethernet-25g": Network(3.125, f"{_NODE_SHEET}: 1 x 25 Gb/s"),
}


def managed_lustre(tib: float, mb_per_s_per_tib: float) -> Storage:
    """Azure sells bandwidth by size: TiB times the tier."""
    return Storage(tib * mb_per_s_per_tib / 1000, f"{tib:g} TiB of Azure Managed Lustre, {mb_per_s_per_tib:g} MB/s/TiB")


STORAGE = {
    "amlfs-40": managed_lustre(480, 40),
    "amlfs-125": managed_lustre(512, 125),
    "amlfs-250": managed_lustre(512, 250),
    "amlfs-500": managed_lustre(512, 500),
}
GRAMS_PER_KWH = {
    # Of CO2 equivalents, of the electricity of 2023, rounded (Ember, Our World in Data). WORLD where none is given.
    **{"WORLD": 480, "AUS": 550, "BRA": 100, "CAN": 170, "CHE": 35, "CHN": 580, "DEU": 380, "ESP": 175, "FIN": 80},
    **{"FRA": 56, "GBR": 240, "IND": 710, "IRL": 285, "ITA": 330, "JPN": 485, "KOR": 430, "NLD": 270, "NOR": 30},
    **{"POL": 660, "SWE": 41, "USA": 370},
}


@dataclass(frozen=True)
class Catalogue:
    """All that is known by a name: ours, and the user's own."""

    devices: dict[str, Device] = field(default_factory=lambda: DEVICES)
    networks: dict[str, Network] = field(default_factory=lambda: NETWORKS)
    storage: dict[str, Storage] = field(default_factory=lambda: STORAGE)
    grams_per_kwh: dict[str, float] = field(default_factory=lambda: {k: float(v) for k, v in GRAMS_PER_KWH.items()})


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


def read_catalogue(path: Path | None) -> Catalogue:
    """With the entries of the user's file, and of that at `path`."""
    known = Catalogue()
    for file in ([own_file()] if own_file().is_file() else []) + ([path] if path else []):
        known = _extended(known, file)
    return known


def _extended(known: Catalogue, path: Path) -> Catalogue:
    """With the entries of a YAML file: of `devices`, `networks`, `storage` and `grams_per_kwh`. An entry that begins
    with `like: NAME` changes one that is known; so does one with a known name."""
    try:
        found = yaml.safe_load(read_text(path))
    except (OSError, ValueError) as error:
        raise unreadable(str(path), error) from None
    except yaml.YAMLError as error:
        raise RecipeError(Problem(f"this is no YAML: {str(error).splitlines()[0]}", place=str(path))) from None
    kinds: dict[str, dict[str, Any]] = {"devices": known.devices, "networks": known.networks, "storage": known.storage}
    rule = f"a hardware file has {', '.join(kinds)} or grams_per_kwh, each a mapping of names to entries"
    if not isinstance(found, dict) or not all(isinstance(part, dict) for part in found.values()):
        raise RecipeError(Problem("this is no hardware file", rule, "see docs/plan.md", str(path)))
    if unknown := sorted(set(found) - {*kinds, "grams_per_kwh"}):
        raise RecipeError(Problem(f"{unknown[0]} is not known here", rule, "remove it", str(path)))
    merged = {kind: entries | _own(entries, found.get(kind, {}), f"{path}: {kind}") for kind, entries in kinds.items()}
    return Catalogue(**merged, grams_per_kwh=known.grams_per_kwh | found.get("grams_per_kwh", {}))


def _own(known: dict[str, Any], entries: dict[str, Any], place: str) -> dict[str, Any]:
    own = {}
    for name, given in entries.items():
        kind = type(next(iter(known.values())))
        given = {"source": "user"} | (given if isinstance(given, dict) else {})
        like = given.pop("like", name if name in known else None)
        base = asdict(named(known, like, "entry")) if like else {}
        try:
            own[name] = kind(**base | given)
        except TypeError as error:
            remedy = f"begin with `like: {next(iter(known))}`, and change what differs"
            raise RecipeError(Problem(f"{name} is no whole entry: {error}", "", remedy, place)) from None
    return own


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
    network: Network
    node: int
    """Devices per node."""

    @classmethod
    def of(cls, catalogue: Catalogue, gpu: str, network: str | None, node: int) -> Machine:
        device = named(catalogue.devices, gpu, "device")
        name = network or device.network
        return cls(gpu, device, name, named(catalogue.networks, name, "network"), node)

    def on(self, name: str, network: Network) -> Machine:
        return replace(self, network_name=name, network=network)
