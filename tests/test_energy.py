"""Energy: counters as Linux shows them, sums over ranks and jobs, and no number where nothing was measured."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from bloomery.base import accelerator as counters
from bloomery.base.accelerator import Sensor, energy_sensor, find_rapl, nvml_sensor, pick_device
from bloomery.base.ranks import ALONE
from bloomery.base.units import Energy, format_device_hours, format_joules
from bloomery.checkpoint.load import read_checkpoint
from bloomery.interop.hf.card import model_card
from bloomery.monitor import meters as monitor
from bloomery.monitor.meters import EnergyMeter, start_meter
from bloomery.monitor.report import write_report
from conftest import Workshop
from threads_as_ranks import together

RANGE_UJ = 1_000_000_000
Command = Callable[..., tuple[int, str, str]]


def zone(root: Path, folder: str, name: str, energy_uj: int = 0) -> Path:
    place = root / folder
    place.mkdir(parents=True)
    (place / "name").write_text(f"{name}\n")
    (place / "max_energy_range_uj").write_text(f"{RANGE_UJ}\n")
    count(place, energy_uj)
    return place


def count(place: Path, energy_uj: int) -> None:
    (place / "energy_uj").write_text(f"{energy_uj}\n")


@pytest.fixture
def powercap(tmp_path: Path) -> Path:
    """A machine with one package and its memory, and what else the kernel shows, which would count them twice."""
    root = tmp_path / "powercap"
    zone(root, "intel-rapl:0", "package-0", 5_000_000)
    zone(root, "intel-rapl:0:0", "core", 3_000_000)
    zone(root, "intel-rapl:0:1", "dram", 7_000_000)
    zone(root, "intel-rapl:1", "psys", 9_000_000)
    zone(root, "intel-rapl-mmio:0", "package-0", 5_000_000)
    return root


# ---------------------------------------------------------------- counters


def test_packages_and_memory_are_added_up_and_nothing_twice(powercap: Path) -> None:
    rapl = find_rapl(powercap)
    assert isinstance(rapl, Sensor)
    assert rapl.name == "RAPL (dram, package-0)"
    for folder in ("intel-rapl:0", "intel-rapl:0:0", "intel-rapl:0:1", "intel-rapl:1", "intel-rapl-mmio:0"):
        count(powercap / folder, 10_000_000)
    assert rapl.joules() == pytest.approx(5.0 + 3.0)


def test_a_counter_that_comes_round_goes_on(powercap: Path) -> None:
    rapl = find_rapl(powercap)
    assert isinstance(rapl, Sensor)
    count(powercap / "intel-rapl:0", RANGE_UJ - 1_000_000)
    assert rapl.joules() == pytest.approx(994.0)
    count(powercap / "intel-rapl:0", 2_000_000)
    assert rapl.joules() == pytest.approx(997.0)
    assert rapl.joules() == pytest.approx(997.0)


def test_an_unreadable_counter_is_named_and_not_a_number(powercap: Path) -> None:
    assert find_rapl(powercap / "nowhere") == "no sensor"
    unreadable = powercap / "intel-rapl:0" / "energy_uj"  # the kernel lets only root read it since CVE-2020-8694
    unreadable.chmod(0)
    if os.geteuid() == 0:  # root reads everything: a folder in its place cannot be read either
        unreadable.unlink()
        unreadable.mkdir()
    told = find_rapl(powercap)
    assert isinstance(told, str)
    assert str(unreadable) in told
    assert "Permission denied" in told or "Is a directory" in told


def test_nvml_counts_in_millijoules_and_an_error_of_it_ends_the_measurement() -> None:
    class Nvml:
        NVMLError = RuntimeError
        millijoules = 2_000

        def nvmlDeviceGetTotalEnergyConsumption(self, handle: str) -> int:  # noqa: N802
            if self.millijoules < 0:
                raise RuntimeError("GPU is lost")
            return self.millijoules

    nvml = Nvml()
    meter = EnergyMeter(nvml_sensor(nvml, "a board"))
    nvml.millijoules = 9_500
    assert meter.own(fresh=True).joules == pytest.approx(7.5)
    nvml.millijoules = -1
    assert meter.own(fresh=True).joules == pytest.approx(7.5)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.accelerator.is_available(), reason="needs an NVIDIA board; this machine has none")
def test_an_nvidia_board_counts_what_it_spends() -> None:
    pytest.importorskip("pynvml", reason="needs the package nvidia-ml-py")
    device = pick_device()
    sensor = energy_sensor(device)
    assert not isinstance(sensor, str), sensor
    meter = EnergyMeter(sensor)
    a = torch.randn(4096, 4096, device=device)
    while meter.own(fresh=True).measured_seconds < 2:
        (a @ a).sum().item()
    spent = meter.own(fresh=True)
    assert 10 < spent.joules / spent.measured_seconds < 2000, "watts"


# ---------------------------------------------------------------- sums


def test_ranks_of_one_machine_read_a_shared_sensor_once(powercap: Path) -> None:
    sensor = find_rapl(powercap)
    assert isinstance(sensor, Sensor)
    meters = together(3, lambda ranks: start_meter(sensor, powercap, [Energy()], ranks))
    assert {meter.counted_by for meter in meters} == {"RAPL (dram, package-0)"}
    count(powercap / "intel-rapl:0", 65_000_000)
    for meter in meters:
        meter._started, meter._read_at = meter._started - 100, meter._read_at - 100
    spent = [meter.own(fresh=True) for meter in meters]
    total = spent[0] + spent[1] + spent[2]
    assert [each.joules for each in spent] == [pytest.approx(60.0), 0, 0]
    assert total.coverage == pytest.approx(1.0, abs=0.01)


def test_a_rank_without_a_sensor_is_seen_in_the_share(powercap: Path) -> None:
    class Own:
        name, shared = "NVML", False

        def joules(self) -> float:
            return 0.0

    sensors = ["no sensor that answers", Own()]
    meters = together(2, lambda ranks: start_meter(sensors[ranks.rank], powercap, [Energy()], ranks))
    assert {meter.counted_by for meter in meters} == {"no sensor that answers; NVML"}
    total = Energy()
    for meter in meters:
        meter._started, meter._read_at = meter._started - 100, meter._read_at - 100
        total += meter.own(fresh=True)
    assert 0.4 < total.coverage < 0.6


def test_the_largest_sum_that_was_written_anywhere_counts(tmp_path: Path) -> None:
    def before(*known: Energy) -> Energy:
        return start_meter("no sensor", tmp_path / "metrics.jsonl", known, ALONE).before

    assert before(Energy(1.0, 10.0, 10.0), Energy(2.0, 20.0, 20.0)).joules == 2.0
    records = [{"kind": "step", "energy": Energy(n, 10.0 * n, 10.0 * n).to_json()} for n in (3.0, 4.0)]
    lines = [json.dumps(record) for record in records]
    (tmp_path / "metrics.jsonl").write_text(
        "\n".join([*lines, '{"kind": "step"}', "[1]", '{"energy":' + "[" * 100_000, '{"torn'])
    )
    assert before(Energy(1.0, 10.0, 10.0)).joules == 4.0


def test_energy_is_said_in_units_that_people_pay_for() -> None:
    assert [format_joules(joules) for joules in (812.4, 7200.0, 4.5e6)] == ["812 J", "2.00 Wh", "1.25 kWh"]
    assert format_device_hours(3_680_504_000.0) == "1,022,362 device-hours"


# ---------------------------------------------------------------- a run


def card_of(run: Path) -> str:
    checkpoint = max((run / "checkpoints").glob("step-*"))
    facts: dict[str, Any] = {"architecture": "A", "dtype": "fp32", "proof": "none"}
    return model_card(read_checkpoint(checkpoint), **facts)


def test_a_run_without_a_sensor_states_its_device_hours_and_no_energy(
    workshop: Workshop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(counters, "POWERCAP", tmp_path / "nowhere")
    run = workshop.train("train.for=3 steps", "lr.decay=3 steps", "lr.warmup=1 steps")
    last = workshop.metrics(run)[-1]["energy"]
    assert (last["joules"], last["measured_seconds"]) == (0.0, 0.0)
    assert last["device_seconds"] > 0
    assert "Not measured: no sensor. Training took" in card_of(run)
    assert "<dt>Energy</dt><dd>not measured<small>no sensor · " in write_report(run).read_text()


def test_energy_is_summed_over_jobs_and_lost_steps_count(
    workshop: Workshop, powercap: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each reading of the counter finds a joule more, and comes round now and then."""
    package, read = powercap / "intel-rapl:0", counters._counter

    def spending(place: Path) -> int:
        if place == package:
            count(package, (read(package) + 1_000_000) % RANGE_UJ)
        return read(place)

    monkeypatch.setattr(counters, "POWERCAP", powercap)
    monkeypatch.setattr(counters, "_counter", spending)
    monkeypatch.setattr(monitor, "_FRESH_SECONDS", 0.0)
    count(package, RANGE_UJ - 3_000_000)
    settings = ("train.for=8 steps", "checkpoint.phases=[{every: 2 steps}]")
    run = workshop.train(*settings, "train.exit_after=5 steps")
    first = workshop.events(run, "stop")[-1]["energy"]
    assert first["joules"] >= 5
    assert first["measured_seconds"] == pytest.approx(first["device_seconds"], rel=0.01)
    assert (
        read_checkpoint(run / "checkpoints" / "step-00000004", tensors=False).state["energy"]["joules"]
        < first["joules"]
    )
    shutil.rmtree(run / "checkpoints" / "step-00000005")  # a step that must be done again
    workshop.train(*settings)
    start, stop = workshop.events(run, "start")[-1], workshop.events(run, "stop")[-1]
    assert start["resumed_from"] == "step-00000004"
    assert start["energy"] == first
    assert start["energy_sensor"] == "RAPL (dram, package-0)"
    assert stop["energy"]["joules"] >= first["joules"] + 4
    logged = [record["energy"]["joules"] for record in workshop.metrics(run)]
    assert logged == sorted(logged)
    card = card_of(run)
    assert re.search(r" J\) in .* device-hours, 100% of it measured by RAPL \(dram, package-0\)\. ", card)
    assert "<dt>Energy</dt><dd>" in write_report(run).read_text()
    for name in ("metrics.jsonl", "events.jsonl"):  # another machine, which has the checkpoint alone
        (run / name).unlink()
    saved = read_checkpoint(run / "checkpoints" / "step-00000008", tensors=False).state["energy"]
    workshop.train("train.for=10 steps", "lr.decay=20 steps")
    assert workshop.events(run, "start")[-1]["energy"] == saved
