"""Promises of the report: one page, no network, no torch, whatever the run went through."""

from __future__ import annotations

import base64
import csv
import hashlib
import json
import math
import os
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from bloomery.base.errors import DataError
from bloomery.cli.main import main
from bloomery.config.load import as_yaml, load_recipe
from bloomery.config.recipe import AlertsSection
from bloomery.launch.watch import status_of
from bloomery.monitor import gather
from bloomery.monitor.history import lines_of
from bloomery.monitor.record import StepRecord, ValidationRecord, to_json
from bloomery.monitor.report import read_runs, write_report
from monitor_samples import step_record, validation_record

VOID = {"meta", "link", "tr", "td", "th", "p"}


class Checker(HTMLParser):
    """Every opened element is closed in order; collects the visible text."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.text = ""
        self.tags: set[str] = set()

    def handle_starttag(self, tag: str, attrs: object) -> None:
        self.tags.add(tag)
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag not in VOID:
            assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if not self.open or self.open[-1] not in ("script", "style"):
            self.text += data + " "


def read_page(path: Path) -> tuple[str, Checker]:
    page = path.read_text(encoding="utf-8")
    checker = Checker()
    checker.feed(page)
    checker.close()
    assert checker.open == []
    return page, checker


def data_of(page: str) -> list[dict[str, Any]]:
    """What each figure draws, its curves by name."""
    found = [json.loads(text) for text in re.findall(r'application/json">(.*?)</script>', page)]
    return [{**each, "curves": {line["name"]: line["points"] for line in each["curves"]}} for each in found]


def make_run(folder: Path, *records: object, events: tuple[dict[str, object], ...] = ()) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "metrics.jsonl").write_text("".join(to_json(record) + "\n" for record in records))  # type: ignore[arg-type]
    head = {"step": 0, "job": 1, "time": 1_700_000_000.0, "iso_time": "2023-11-14T22:13:20Z"}
    (folder / "events.jsonl").write_text("".join(json.dumps({**head, **event}) + "\n" for event in events))
    return folder


def test_a_report_shows_the_whole_story_of_a_run(tmp_path: Path) -> None:
    run = make_run(
        tmp_path / "run",
        *(step_record(step, loss=4 - step / 10, mfu=0.4, grad_norm=10.0**-step) for step in range(1, 10)),
        step_record(
            10,
            loss=3.0,
            mfu=0.4,
            source_losses={"oscar-en": 3.0, "wiki <fr>": 2.0},
            source_samples={"oscar-en": 90, "wiki <fr>": 70},
        ),
        *(validation_record(step, group=group) for step in (5, 10) for group in ("web", "code")),
        events=(
            {"kind": "start", "recipe": "tiny-bloom", "parameters": 559_214_592},
            {"kind": "note", "reference_losses": {"unigram entropy": 7.41}},
            {"kind": "stop", "step": 10, "reason": "train.for reached"},
        ),
    )
    path = write_report(run)
    assert path == run / "report.html"
    page, checker = read_page(path)
    for words in ("tiny-bloom", "559.2M", "3.0000", "perplexity 7.389", "Validation: code"):
        assert words in checker.text
    for words in (
        "stopped at step 10: train.for reached",
        "MFU 40.0%",
        "TFLOP/s are counted as model_full",
        "2023-11-14 22:13:20",
    ):
        assert words in checker.text
    losses, *others = data_of(page)
    assert list(losses["curves"]) == ["training, raw", "training", "validation: web", "validation: code"]
    assert losses["curves"]["training, raw"][-1] == [10, 3.0]
    assert losses["curves"]["training"][4] == [5, 3.5], "the mean of steps 3 to 7"
    assert losses["references"] == {"unigram entropy": 7.41}
    assert [list(each["curves"]) for each in others] == [
        ["learning rate"],
        ["gradient norm"],
    ], "what never changes is not drawn"
    assert others[-1]["log"], "a wide range is drawn on a log scale"
    assert 'aria-label="lm loss: training ends at 3.1; validation: web ends at 2; validation: code ends at 2"' in page
    assert "color-scheme: light dark" in page
    assert 'name="viewport"' in page


def test_the_page_fetches_nothing_and_runs_no_script_but_its_own(tmp_path: Path) -> None:
    page, _ = read_page(write_report(make_run(tmp_path / "run", step_record(1))))
    outside = page.replace("/*! https://github.com/leeoniya/uPlot", "")  # its own heading, which is to stay
    assert not re.search(r"https?://|src=|@import|url\(", outside)
    assert "Permission is hereby granted, free of charge" in page
    (policy,) = re.findall(r'Content-Security-Policy" content="([^"]*)"', page)
    assert policy.startswith("default-src 'none'; ")
    (script,) = re.findall(r"<script>(.*?)</script>", page, re.S)
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert f"script-src 'sha256-{digest}'" in policy


def test_every_text_is_escaped(tmp_path: Path) -> None:
    nasty = "</script><img src=x onerror=alert(1)>&\"'"
    run = make_run(
        tmp_path / "run",
        step_record(1, tflops_definition=nasty),
        step_record(2, losses={nasty: 1.0}, tflops_definition=nasty),
        validation_record(2, group=nasty),
        events=(
            {"kind": nasty, "recipe": nasty, "job": nasty, "iso_time": nasty, nasty: nasty},
            {"kind": "stop", "reason": nasty, "reference_losses": {nasty: 2.0}, "parameters": nasty},
        ),
    )
    page, checker = read_page(write_report(run))
    assert "img" not in checker.tags
    assert "<img" not in page
    assert nasty in checker.text
    assert f"validation: {nasty}" in data_of(page)[0]["curves"]
    for text in re.findall(r'application/json"[^>]*>(.*?)</script>', page):
        assert "<" not in text


def test_nan_points_are_kept_for_their_ticks_and_marked_as_bad(tmp_path: Path) -> None:
    losses = {1: 3.0, 2: 2.9, 3: math.nan, 4: 2.8, 5: math.inf, 6: math.nan}
    run = make_run(tmp_path / "run", *(step_record(s, loss=loss, nan_steps=1) for s, loss in losses.items()))
    page, checker = read_page(write_report(run))
    drawn = data_of(page)[0]["curves"]["training"]
    assert drawn == [[1, 3.0], [2, 2.9], [3, "NaN"], [4, 2.8], [5, "Infinity"], [6, "NaN"]]
    assert 'class="bad">NaN' in page
    assert "6 NaN" in checker.text


@pytest.mark.parametrize("values", [[], [0.0], [math.nan], [1e-9, 1e9], [-1.0, 0.0]])
def test_any_values_can_be_drawn(tmp_path: Path, values: list[float]) -> None:
    records = [
        step_record(n, loss=value, grad_norm=value, lr=value, tokens_per_second=value) for n, value in enumerate(values)
    ]
    page, checker = read_page(write_report(make_run(tmp_path / "run", *records)))
    changing = len(values) > 1 or not all(map(math.isfinite, values))
    assert len(data_of(page)) == (4 if changing else 2 if values else 0), (
        "loss and rate always, the others if they change"
    )
    assert ("No values yet." in checker.text) == (not values)


def test_a_report_needs_only_one_of_the_files(tmp_path: Path) -> None:
    (tmp_path / "recipe.yaml").write_text("seed: 1\n")
    path = write_report(tmp_path, output=tmp_path / "elsewhere.html")
    assert path == tmp_path / "elsewhere.html"
    assert tmp_path.name in read_page(path)[1].text


def test_a_folder_that_is_no_run_is_a_clear_error(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"is not a run\. A run folder holds metrics.jsonl"):
        write_report(tmp_path)


def test_a_killed_run_is_reported_to_have_no_stop(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", events=({"kind": "stop", "reason": "old"}, {"kind": "start"}))
    assert "no stop in the ledger: it is running, or it was killed" in read_page(write_report(run))[1].text


def test_a_long_run_is_gathered_without_losing_spikes_or_sums(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gather, "_FOLDED", 500)
    losses = {step: 2.0 + step % 7 for step in range(1, 9_001)}
    losses |= {1_321: 99.0, 1_322: -5.0, 6_000: math.nan}
    job_of = {step: 1 + (step > 3_600) for step in losses}
    records = [
        step_record(step, loss=loss, job=job_of[step], tokens_per_second=float(step), skipped_steps=step % 2, mfu=0.5)
        for step, loss in losses.items()
    ]
    rolled_back = [step_record(step, loss=1e9, skipped_steps=50) for step in range(3_601, 3_700)]
    starts = ({"kind": "start"}, {"kind": "start", "job": 2, "step": 3_600})
    events = (*starts, *({"kind": "skip"},) * 1_200)
    run = make_run(tmp_path / "run", *records[:3_600], *rolled_back, *records[3_600:], events=events)
    found = gather.read_run(run)
    assert (len(found.events), found.num_events) == (1_000, 1_202)
    kept = [(int(step), loss) for step, loss in found.losses["lm loss"].points.tolist()]
    assert len(kept) < 1500
    assert [step for step, _ in kept] == sorted(step for step, _ in kept)
    assert {(1_321, 99.0), (1_322, -5.0)} < set(kept)
    assert [step for step, loss in kept if losses[step] != loss] == [6_000]  # the NaN, and nothing that is not so
    for low, high in ((1, 1024), (2048, 3072), (8_000, 9_001)):  # each stretch reaches from lowest to highest
        assert {loss for step, loss in kept if low <= step < high} >= {2.0, 8.0}
    assert found.skipped_steps == 4_500
    assert found.median("tokens_per_second") == 4_500.5
    assert found.last_step == records[-1]
    assert write_report(run).stat().st_size < 500_000


def test_a_process_that_trains_twice_has_all_its_seconds(tmp_path: Path) -> None:
    """As `bloomery quickstart` does; clocks differ by some tenths of a second."""
    jobs = [{"job": 1, "time": 1000.0, "setup_seconds": 10.0}, {"job": 2, "time": 1040.0, "setup_seconds": 50.1}]
    run = make_run(tmp_path / "run", *(step_record(10 * each["job"], job=each["job"], time=each["time"] + 30)
                   for each in jobs), events=tuple({"kind": "start", "step": 0, **each} for each in jobs))  # fmt: skip
    assert sum(read_runs([run])[0].goodput.values()) == pytest.approx(80)


def test_every_second_of_a_run_is_booked_once(tmp_path: Path) -> None:
    """Two jobs: the first is killed after a hang, the second goes back to step 40."""

    def at(second: float, step: int, **facts: Any) -> dict[str, Any]:
        return {"step": step, "time": 1_000.0 + second, "seconds_per_step": 1.0, **facts}

    def logged(second: float, step: int, **facts: Any) -> StepRecord:
        found = at(second, step, **facts)
        return step_record(found.pop("step"), **found)

    def validated(second: float, step: int) -> ValidationRecord:
        return replace(validation_record(step), time=1_000.0 + second)

    run = make_run(
        tmp_path / "run",
        logged(30, 20, seconds_per_step=1.5),  # ten seconds of them were spent compiling
        logged(50, 40),
        validated(55, 40),
        logged(77, 60),  # two seconds away: a save
        logged(400, 60, job=2),
        logged(420, 80, job=2),
        events=(
            {"kind": "start", **at(0, 0), "setup_seconds": 7.0},
            {"kind": "save", **at(56, 40), "blocking_seconds": 2.0},
            {"kind": "hang", **at(177, 61)},
            {"kind": "start", **at(380, 40), "job": 2, "setup_seconds": 3.0, "scheduler": "slurm"},
            {"kind": "stop", **at(421, 80), "job": 2, "reason": "finished"},
        ),
    )
    (found,) = read_runs([run])
    expected = {"training": 80, "lost work": 20, "compile": 10, "evaluation": 5, "exposed save": 2, "start-up": 10}
    assert found.goodput == {**expected, "queue": 200, "down": 0, "hung": 100, "other": 1}
    assert sum(found.goodput.values()) == 421 + 7
    status = status_of(run, "run", AlertsSection())
    assert status.goodput == found.goodput
    assert "goodput    queue 46.7%, hung 23.4%, training 18.7%, lost work 4.7%," in "\n".join(status.lines())
    page, checker = read_page(write_report(run))
    assert "Goodput 18.7% of 7m08s" in checker.text
    assert "left, job 1" in page


def test_a_comparison_shows_results_and_what_differs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, peak in (("a", 1e-4), ("b", 2e-4)):
        start = {"kind": "start", "recipe": "demo", "parameters": 1_000_000, "ranks": 8}
        run = make_run(tmp_path / name, step_record(10, replicas=4), validation_record(10), events=(start,))
        recipe = load_recipe("quickstart", [f"lr.peak={peak}", "lr.min=1e-5", "parallel.tp=2"]).recipe
        (run / "recipe.yaml").write_text(as_yaml(recipe))
    folders = [tmp_path / "a", tmp_path / "b"]
    text = read_page(write_report(*folders, output=tmp_path / "both.html"))[1].text
    assert re.search(r"a +1M +8 +2 +1 +4 +16 +1\.5 +64 +- +0\.25 +10 +2\.5", text)
    assert re.search(r"lr\.peak +0\.0001 +0\.0002", text)
    assert main(["report", *map(str, folders), "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["recipe_differences"] == {"lr.peak": [1e-4, 2e-4]}
    assert facts["runs"][1]["results"]["GPUs"] == 8
    assert main(["report", *map(str, folders), "--csv"]) == 0
    rows = list(csv.DictReader(capsys.readouterr().out.splitlines()))
    assert [(row["lr"], row["lm loss"], row["validation/web/lm loss"]) for row in rows] == [
        ("0.0001", "2.5", ""),
        ("", "", "2.0"),
    ] * 2


@pytest.mark.parametrize(
    "damage",
    [
        {"losses": [1]},
        {"skipped_steps": "Infinity"},
        {"lr": "high"},
        {"job": []},
        {"losses": {"lm loss": None}},
        {"mfu": {}},
        {"train_steps": "many"},
        {"step": 10**400},
    ],
)
def test_a_record_of_wrong_kinds_is_named_by_its_line(tmp_path: Path, damage: dict[str, object]) -> None:
    run = make_run(tmp_path / "run", step_record(1), step_record(2), step_record(3))
    lines = (run / "metrics.jsonl").read_text().splitlines()
    lines[1] = json.dumps({**json.loads(lines[1]), **damage})
    (run / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    with pytest.raises(DataError, match="line 2 is damaged"):
        write_report(run)


@pytest.mark.parametrize("opened", ["[", '{"a":'])
@pytest.mark.parametrize("levels", [100, 900])
def test_an_event_that_is_nested_deeply_is_named_by_its_line(tmp_path: Path, opened: str, levels: int) -> None:
    run = make_run(tmp_path / "run", step_record(1), events=({"kind": "start"},))
    deep = opened * levels + "1" + ("]" if opened == "[" else "}") * levels
    (run / "events.jsonl").open("a").write(f'{{"kind": "start", "what": {deep}}}\n')
    with pytest.raises(DataError, match="line 2 is damaged: it is nested more than 64 levels deep"):
        write_report(run)


@pytest.mark.parametrize("name", ["metrics.jsonl", "events.jsonl"])
def test_a_pipe_or_a_device_in_place_of_a_file_is_never_waited_for(tmp_path: Path, name: str) -> None:
    run = make_run(tmp_path / "run", step_record(1))
    for plant in (os.mkfifo, lambda path: path.symlink_to("/dev/zero")):
        (run / name).unlink(missing_ok=True)
        plant(run / name)
        with pytest.raises(DataError, match="it is no regular file"):
            list(lines_of(run / name, bytes))
