"""Promises of the report: one page, no network, no torch, whatever the run went through."""

from __future__ import annotations

import base64
import hashlib
import json
import math
import os
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from bloomery.base.errors import DataError
from bloomery.monitor import gather
from bloomery.monitor.history import scan
from bloomery.monitor.record import to_json
from bloomery.monitor.report import write_report
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
    """What each figure draws."""
    return [json.loads(text) for text in re.findall(r'application/json">(.*?)</script>', page)]


def make_run(folder: Path, *records: object, events: tuple[dict[str, object], ...] = ()) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "metrics.jsonl").write_text("".join(to_json(record) + "\n" for record in records))  # type: ignore[arg-type]
    head = {"step": 0, "job": 1, "time": 1_700_000_000.0, "iso_time": "2023-11-14T22:13:20Z"}
    (folder / "events.jsonl").write_text("".join(json.dumps({**head, **event}) + "\n" for event in events))
    return folder


def test_a_report_tells_the_whole_story_of_a_run(tmp_path: Path) -> None:
    run = make_run(
        tmp_path / "run",
        *(step_record(step, loss=4 - step / 10, mfu=0.4, grad_norm=10.0**-step) for step in range(1, 10)),
        step_record(10, loss=3.0, mfu=0.4, source_losses={"oscar-en": 3.0, "wiki <fr>": 2.0}),
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
        "model FLOPs, per device",
        "2023-11-14 22:13:20",
    ):
        assert words in checker.text
    losses, *others = data_of(page)
    assert list(losses["curves"]) == ["training", "validation: web", "validation: code"]
    assert losses["curves"]["training"][-1] == [10, 3.0]
    assert losses["references"] == {"unigram entropy": 7.41}
    assert [list(each["curves"]) for each in others] == [
        ["oscar-en", "wiki <fr>"],
        ["learning rate"],
        ["tokens per second"],
        ["gradient norm"],
    ]
    assert others[-1]["log"], "a wide range is drawn on a log scale"
    assert 'aria-label="lm loss: training ends at 3; validation: web ends at 2; validation: code ends at 2"' in page
    assert "prefers-color-scheme: dark" in page
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
    for text in re.findall(r'application/json">(.*?)</script>', page):
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
    assert len(data_of(page)) == (4 if values else 0)
    assert ("No values yet." in checker.text) == (not values)


def test_a_report_needs_only_one_of_the_files(tmp_path: Path) -> None:
    (tmp_path / "recipe.yaml").write_text("seed: 1\n")
    path = write_report(tmp_path, output=tmp_path / "elsewhere.html")
    assert path == tmp_path / "elsewhere.html"
    assert tmp_path.name in read_page(path)[1].text


def test_a_folder_that_is_no_run_is_a_clear_error(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"is not a run\. A run folder holds metrics.jsonl"):
        write_report(tmp_path)


def test_a_killed_run_is_said_to_have_no_stop(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", events=({"kind": "stop", "reason": "old"}, {"kind": "start"}))
    assert "no stop in the ledger: it is running, or it was killed" in read_page(write_report(run))[1].text


def test_a_long_run_is_gathered_without_losing_spikes_or_sums(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gather, "_MOST_KEPT", 2000)
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
    found = gather.Gathered()
    found.read_metrics(run / "metrics.jsonl")
    found.read_events(run / "events.jsonl")
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
            scan(run / name, id)
