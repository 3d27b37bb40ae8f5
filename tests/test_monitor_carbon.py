"""CodeCarbon beside a run: what it says is recorded, and nothing that happens to it touches the training."""

from __future__ import annotations

import csv
import importlib.util
import sys
from pathlib import Path

import pytest

from conftest import Workshop

CARBON = "monitor.carbon={country: FRA}"
FAULTS = {
    "crashes": ("raise OSError('no sensors at all')", "no sensors at all"),
    "talks": ("print('{not json'); print('[1]'); raise SystemExit(3)", "[1]"),
    "hangs": ("import time; time.sleep(60)", "it does not answer"),
}


@pytest.mark.parametrize("fault", [*FAULTS, "is missing"])
def test_whatever_happens_to_codecarbon_the_training_is_the_same(
    fault: str, workshop: Workshop, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    code, reason = FAULTS.get(fault, ("", "pip install bloomery[carbon]"))
    monkeypatch.setattr("bloomery.monitor.carbon._LAST_READING_SECONDS", 1.0 if fault == "hangs" else 30.0)
    if fault == "is missing":
        if importlib.util.find_spec("codecarbon") is not None:
            pytest.skip("needs an environment without codecarbon")
    else:
        (tmp_path / "planted").mkdir()
        (tmp_path / "planted" / "codecarbon.py").write_text(code)
        monkeypatch.syspath_prepend(tmp_path / "planted")
        monkeypatch.setenv("PYTHONPATH", ":".join(filter(None, sys.path)))
    run = workshop.train("train.for=3 steps", CARBON)
    assert workshop.losses(run) == workshop.losses(workshop.train("train.for=3 steps", run="plain"))
    assert not workshop.events(run, "carbon")
    assert all(record["emissions"] == {} for record in workshop.metrics(run))
    (event,) = workshop.events(run, "carbon_off")
    assert reason in event["reason"]


def test_energy_and_emissions_are_in_the_ledger_and_in_a_file_per_job(
    workshop: Workshop, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("codecarbon", reason="needs `pip install bloomery[carbon]`")
    monkeypatch.setenv("PYTHONPATH", ":".join(filter(None, sys.path)))
    monkeypatch.setattr("bloomery.monitor.carbon._LAST_READING_SECONDS", 60.0)
    for job, steps in ((1, 2), (2, 4)):
        run = workshop.train(f"train.for={steps} steps", CARBON)
        event = workshop.events(run, "carbon")[-1]
        (row,) = csv.DictReader((run / f"codecarbon/emissions-{job:03d}.csv").open())
        assert (event["job"], event["nodes"], event["country"]) == (job, 1, "FRA")
        assert event["joules"] == pytest.approx(float(row["energy_consumed"]) * 3.6e6, rel=1e-6)
        assert event["kg_co2e"] == pytest.approx(float(row["emissions"]), rel=1e-6)
        assert min(event["joules"], event["kg_co2e"]) > 0
        assert row["country_iso_code"] == "FRA"
        assert "RAM" in event["estimated"]
