"""`bloomery tune`: short real trainings, in the order that the planner and they themselves suggest."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from bloomery.config.load import load_recipe
from bloomery.plan.constants import fitted
from bloomery.plan.hardware import Machine, shipped
from bloomery.plan.trials import Bench, Trial
from bloomery.plan.tune import Candidate, Search, candidates
from conftest import Workshop

Command = Callable[..., tuple[int, str, str]]


def test_tune_finds_a_configuration_by_real_trials_and_continues_where_it_was(
    workshop: Workshop, command: Command, tmp_path: Path
) -> None:
    words = ("tune", str(workshop.recipe), "--device", "cpu", "--search", "parallel.recompute=none,full", "--json")
    code, out, err = command(*words, "--trials", "1", "--everything")
    assert code == 0, err
    found = json.loads(out)
    (untuned,) = found["trials"]
    assert (untuned["trial"], untuned["outcome"]) == ("the recipe as it is", "ok")
    assert untuned["tokens_per_second"] > 0
    code, out, err = command(*words, "--trials", "2", "--everything")
    assert code == 0, err
    again = json.loads(out)
    assert again["trials"][0] == untuned, "it was read from the journal"
    speeds = [trial["tokens_per_second"] for trial in again["trials"]]
    assert again["improvement"] == pytest.approx(max(speeds) / speeds[0] - 1)
    assert command("check", again["tuned_recipe"])[0] == 0
    tuned = yaml.safe_load(Path(again["tuned_recipe"]).read_text())
    best = again["best"].removeprefix("the recipe as it is")
    assert load_recipe(str(workshop.recipe), best.split()).recipe == load_recipe(again["tuned_recipe"]).recipe
    assert tuned["name"] == "small"
    page = (tmp_path / again["picture"]).read_text()
    assert "tokens per second" in page
    assert "peak memory" in page
    assert not list((tmp_path / "runs").glob("*/trial")), "what a trial leaves is removed"


def test_a_recipe_that_cannot_train_is_explained(workshop: Workshop, command: Command) -> None:
    words = ("tune", str(workshop.recipe), "data.train=[{path: nothing}]", "--device", "cpu", "--trials", "1")
    code, out, err = command(*words)
    assert (code, out) == (2, "")
    assert "none of 1 trials could train: failed" in err
    assert "nothing" in err


def test_candidates_are_legal_and_differ_from_the_recipe_only_in_their_words() -> None:
    machine = Machine.of(shipped(), "h200", None, 1)
    fields = {"precision": ["bf16", "fp8"], "batch.micro_batch_size": ["8", "16"]}
    found = {each.words: each for each in candidates("gpt-1.3b", [], fields, machine, fitted())}
    assert len(found) == 2 * 2 * 4
    assert () in found
    fast = max(found.values(), key=lambda each: each.tokens_per_second)
    assert fast.words == ("precision=fp8",)
    for words in found:
        load_recipe("gpt-1.3b", list(words))


def search(trials: list[Trial], **options: object) -> Search:
    known = [Candidate((name,), (name[0],), speed, memory) for name, speed, memory in (
        ("a1", 100.0, 10.0), ("a2", 90.0, 20.0), ("b1", 80.0, 30.0), ("b2", 40.0, 40.0),
    )]  # fmt: skip
    bench = Bench("gpt-1.3b", [], Path())
    found = Search(bench, "tokens", known, device_bytes=100.0, most_trials=4, seconds=1e9, text="", **options)  # type: ignore[arg-type]
    found.trials = trials
    return found


def trial(name: str, speed: float | None) -> Trial:
    return Trial([name], "out of memory" if speed is None else "ok", 1.0 if speed else None, speed, 1.0, 1)


def next_of(*trials: Trial) -> str | None:
    found = search(list(trials)).next()
    return found and found.words[0]


def test_the_next_trial_follows_from_predictions_and_what_was_measured() -> None:
    assert next_of() == "a1"
    assert next_of(trial("a1", 100.0)) is None, "nothing is predicted to come near it"
    assert next_of(trial("a1", 50.0)) is None
    assert next_of(trial("a1", 50.0), trial("b1", 80.0)) is None, "a2 is as much slower than predicted as a1"
    assert next_of(trial("b2", 40.0)) == "a1"
    assert next_of(trial("a1", None)) is None, "the others need more memory"
    assert next_of(trial("b2", None)) == "a1"
    assert search([trial("a1", 100.0)], everything=True).next() is not None
    assert search([trial("a1", 100.0)] * 4, everything=True).next() is None


def test_out_of_memory_is_a_result(workshop: Workshop, tmp_path: Path) -> None:
    bench = Bench(
        str(workshop.recipe), ["model.hidden_size=1000000", "model.ffn_hidden_size=1000000"], tmp_path / "tune", "cpu"
    )
    found = bench.run([])
    assert (found.outcome, found.step_seconds) == ("out of memory", None), found.said
