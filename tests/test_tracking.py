"""MLflow and Weights & Biases get every record, and a run nothing of their troubles."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import pytest

from bloomery.cli.main import main
from bloomery.monitor import tracking
from conftest import Workshop


def wait_until_tracked(run: Path, records: int, kind: str) -> None:
    """The process ends behind the training."""
    deadline = time.monotonic() + 120
    while not any(f'"offset": {(run / "metrics.jsonl").stat().st_size}' in each.read_text() for each in places(run)):
        log = run / "tracking" / f"{kind}.log"
        assert time.monotonic() < deadline, log.read_text() if log.exists() else "no log"
        time.sleep(0.5)


def places(run: Path) -> list[Path]:
    return list((run / "tracking").glob("*.json"))


def test_mlflow_has_the_numbers_of_a_live_run_and_of_a_replayed_one(workshop: Workshop) -> None:
    pytest.importorskip("mlflow", reason="needs mlflow: pip install bloomery[mlflow]")
    pytest.importorskip("sqlalchemy", reason="needs sqlalchemy: pip install bloomery[mlflow]")
    from mlflow import MlflowClient

    live, later = (f"sqlite:///{workshop.folder}/{name}.db" for name in ("live", "later"))
    run = workshop.train(f"monitor.mlflow={live}")
    wait_until_tracked(run, 20, "mlflow")
    for _ in range(2):  # the second time there is nothing new
        assert main(["report", str(run), "--to", f"mlflow={later}"]) == 0
    for uri in (live, later):
        client = MlflowClient(tracking_uri=uri)
        (experiment,) = client.search_experiments(filter_string="name != 'Default'")
        (found,) = client.search_runs([experiment.experiment_id])
        history = client.get_metric_history(found.info.run_id, "lm loss")
        assert [(each.step, each.value) for each in sorted(history, key=lambda each: each.step)] == [
            (record["step"], record["losses"]["lm loss"]) for record in Workshop.metrics(run)
        ]
        assert found.data.params["lr.peak"] == "0.01"


def test_wandb_takes_a_run_offline(workshop: Workshop, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb", reason="needs wandb: pip install bloomery[wandb]")
    monkeypatch.setenv("WANDB_MODE", "offline")
    run = workshop.train("monitor.wandb=ours")
    wait_until_tracked(run, 20, "wandb")
    (file,) = (run / "tracking" / "wandb").glob("offline-run-*/run-*.wandb")
    content = file.read_bytes()
    assert b"tokens_per_second" in content
    assert b"lr" in content


def test_a_target_that_fails_changes_nothing_of_a_run(workshop: Workshop, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether the package is missing or the server is away."""
    alone = workshop.train(run="alone")
    monkeypatch.setattr(os, "environ", {**os.environ, "MLFLOW_HTTP_REQUEST_TIMEOUT": "1"})
    run = workshop.train("monitor.mlflow='http://127.0.0.1:9'", "monitor.wandb=ours")
    assert Workshop.losses(run) == Workshop.losses(alone)


def test_what_a_server_refuses_for_a_while_arrives_later(workshop: Workshop, monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[int] = []

    class Moody:
        calls = 0

        def __init__(self, target: str, folder: Path) -> None: ...

        def open(self, run_id: str | None, name: str, params: Any) -> str:
            return run_id or "first"

        def write(self, records: Any) -> None:
            Moody.calls += 1
            if Moody.calls % 2:
                raise ConnectionError("not now")
            taken.extend(each.step for each in records)

        def close(self) -> None: ...

    monkeypatch.setitem(tracking._WRITERS, "mlflow", Moody)
    monkeypatch.setattr(tracking, "_LOOK_SECONDS", 0.01)
    monkeypatch.setattr(tracking, "_MOST_LINES", 7)
    run = workshop.train("train.exit_after=11 steps")
    over = iter([False, False, False, *[True] * 20])
    assert tracking.feed(run, "mlflow", "x", is_over=lambda: next(over)) == 11
    workshop.train(run="run")
    assert tracking.feed(run, "mlflow", "x", is_over=lambda: True) == 9
    assert taken == list(range(1, 21))


def test_an_unknown_tracker_or_a_missing_package_is_a_clear_error(
    workshop: Workshop, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["report", str(workshop.folder), "--to", "comet=ours"]) == 2
    assert "'comet=ours' is neither mlflow=URI nor wandb=PROJECT" in capsys.readouterr().err
    monkeypatch.setitem(tracking.PACKAGES, "wandb", "wandb_that_nobody_has")
    assert main(["report", str(workshop.folder), "--to", "wandb=ours"]) == 2
    assert "install it with `pip install bloomery[wandb]`" in capsys.readouterr().err.replace("Install", "install")
