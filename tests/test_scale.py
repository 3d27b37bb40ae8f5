"""`bloomery scale`: short trainings on more and more nodes, as a table, JSON and a picture."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bloomery.base.storage import remove_tree
from bloomery.cli.main import main
from conftest import Workshop


def test_two_nodes_against_one_and_two_results_in_one_picture(
    workshop: Workshop, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    starts = list[int]()

    def note_and_remove(run: Path) -> None:
        starts.extend(start["ranks"] for start in (workshop.events(run, "start") if run.exists() else ()))
        remove_tree(run)

    monkeypatch.setattr("bloomery.plan.trials.remove_tree", note_and_remove)
    other = {"points": [{"nodes": 1, "tokens_per_second": 5.0, "efficiency": 1.0}]}
    (workshop.folder / "ethernet.json").write_text(json.dumps(other))
    words = ["scale", str(workshop.recipe), "--steps", "4", "--json"]
    assert main([*words, "--nodes", "1,2", "--compare", "ethernet.json"]) == 0
    facts = json.loads(capfd.readouterr().out)
    (one, two), folder = facts["points"], workshop.folder / "runs" / "small-scale"
    assert (one["nodes"], one["efficiency"], one["global_batch"]) == (1, 1.0, 8)
    assert (two["nodes"], two["global_batch"]) == (2, 16)
    assert two["efficiency"] == two["tokens_per_second"] / 2 / one["tokens_per_second"]
    assert starts == [1, 2]
    assert not (folder / "trial").exists()
    assert json.loads((folder / "scale.json").read_text())["points"] == facts["points"]
    drawn = (folder / "scale.html").read_text()
    assert '"name": "ethernet.json", "points": [[1' in drawn
    assert '"name": "runs/small-scale", "points": [[1' in drawn
    assert main([*words, "--nodes", "2", "--strong", "--output", "strong"]) == 0
    assert json.loads(capfd.readouterr().out)["points"][0]["global_batch"] == 8


def test_a_result_that_is_none(workshop: Workshop, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["scale", str(workshop.recipe)]) == 2
    assert "--nodes is missing" in capfd.readouterr().err
    assert main(["scale", str(workshop.recipe), "--nodes", "1", "--on", "azureml"]) == 2
    assert "Its runs lie in the workspace" in capfd.readouterr().err
    (workshop.folder / "other.json").write_text("{}")
    assert main(["scale", str(workshop.recipe), "--nodes", "1", "--steps", "2", "--compare", "other.json"]) == 3
    assert "other.json is no result of a scaling experiment" in capfd.readouterr().err
    assert not (workshop.folder / "runs").exists(), "found out before anything is trained"
    assert main(["scale", str(workshop.recipe), "data.train=[{path: nothing}]", "--nodes", "1"]) == 3
    assert "--nodes 1: its training has no steps to measure" in capfd.readouterr().err
