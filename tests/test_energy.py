"""Energy: counters as Linux shows them, sums over ranks and jobs, and no number where nothing was measured."""

from __future__ import annotations

import itertools
import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from bloomery.base.accelerator import Sensor, energy_sensor, nvml_sensor, pick_device
from bloomery.base.ranks import ALONE
from bloomery.base.units import Energy, format_device_hours, format_joules
from bloomery.checkpoint.load import read_checkpoint
from bloomery.interop.hf.card import model_card
from bloomery.monitor import meters as monitor
from bloomery.monitor.meters import EnergyMeter, start_meter
from bloomery.monitor.report import write_report
from bloomery.train import setup
from conftest import Workshop
from threads_as_ranks import together

Command = Callable[..., tuple[int, str, str]]


# ---------------------------------------------------------------- counters


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


def test_a_rank_without_a_sensor_is_seen_in_the_share(tmp_path: Path) -> None:
    sensors = ["no sensor that answers", Sensor("NVML", lambda: 0.0)]
    meters = together(2, lambda ranks: start_meter(sensors[ranks.rank], tmp_path / "m", [Energy()], ranks))
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


def test_a_run_without_a_sensor_states_its_device_hours_and_no_energy(workshop: Workshop) -> None:
    run = workshop.train("train.for=3 steps", "lr.decay=3 steps", "lr.warmup=1 steps")
    last = workshop.metrics(run)[-1]["energy"]
    assert (last["joules"], last["measured_seconds"]) == (0.0, 0.0)
    assert last["device_seconds"] > 0
    assert "Not measured: no sensor is known for cpu. Training took" in card_of(run)
    assert "<dt>Energy</dt><dd>not measured<small>no sensor is known for cpu · " in write_report(run).read_text()


def test_energy_is_summed_over_jobs_and_lost_steps_count(workshop: Workshop, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each reading of a counter finds a joule more."""
    readings = itertools.count()
    monkeypatch.setattr(setup, "energy_sensor", lambda device: Sensor("a counter", lambda: float(next(readings))))
    monkeypatch.setattr(monitor, "_FRESH_SECONDS", 0.0)
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
    assert start["energy_sensor"] == "a counter"
    assert stop["energy"]["joules"] >= first["joules"] + 4
    logged = [record["energy"]["joules"] for record in workshop.metrics(run)]
    assert logged == sorted(logged)
    card = card_of(run)
    assert re.search(r" J\) in .* device-hours, 100% of it measured by a counter\. ", card)
    assert "<dt>Energy</dt><dd>" in write_report(run).read_text()
    for name in ("metrics.jsonl", "events.jsonl"):  # another machine, which has the checkpoint alone
        (run / name).unlink()
    saved = read_checkpoint(run / "checkpoints" / "step-00000008", tensors=False).state["energy"]
    workshop.train("train.for=10 steps", "lr.decay=20 steps")
    assert workshop.events(run, "start")[-1]["energy"] == saved
