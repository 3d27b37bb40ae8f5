"""Promises of records, the Megatron line and the history reader."""

from __future__ import annotations

import dataclasses
import json
import math
import os
from pathlib import Path

import numpy as np
import pytest

from bloomery.base.errors import DataError
from bloomery.base.units import Energy
from bloomery.monitor.history import read_events, read_ledger, read_metrics
from bloomery.monitor.record import StepRecord, from_json, perplexity_of, strict_json, to_json
from bloomery.monitor.sinks import iteration_line, validation_box
from monitor_samples import step_record, strict_lines, validation_record

TR11_LINE = (
    " iteration    12695/  115311 | consumed samples:      9841584 | consumed tokens:  20155564032 |"
    " elapsed time per iteration (s): 105.22 | learning rate: 5.969E-05 | global batch size:  2048 |"
    " lm loss: 2.463556E+00 | grad norm: 0.174 | num zeros: 0.0 | number of skipped iterations:   0 |"
    " number of nan iterations:   0 | samples per second: 19.463 | TFLOPs: 149.02 |"
)


def tr11_record() -> StepRecord:
    return dataclasses.replace(
        step_record(12695, loss=2.463556),
        train_steps=115311,
        consumed_samples=9841584,
        consumed_tokens=20155564032,
        global_batch=2048,
        lr=5.969e-05,
        grad_norm=0.174,
        seconds_per_step=105.22,
        samples_per_second=19.463,
        tflops=149.02,
    )


def test_the_iteration_line_is_the_line_of_tr11() -> None:
    assert iteration_line(tr11_record()) == TR11_LINE


def test_loss_scale_counters_and_a_nan_stand_in_the_iteration_line() -> None:
    line = iteration_line(dataclasses.replace(tr11_record(), loss_scale=65536.0, skipped_steps=2, nan_steps=1))
    assert "lm loss: 2.463556E+00 | loss scale: 65536.0 | grad norm: 0.174 |" in line
    assert "number of skipped iterations:   2 | number of nan iterations:   1 |" in line
    assert " lm loss: NAN | grad norm: inf |" in iteration_line(step_record(1, loss=math.nan, grad_norm=math.inf))


def test_the_validation_box_is_ruled_by_dashes() -> None:
    top, line, bottom = validation_box(validation_record(100, loss=2.0))
    assert line == " web loss at iteration 100 | lm loss value: 2.000000E+00 | lm loss PPL: 7.389056E+00 | "
    assert top == bottom == "-" * (len(line) + 1)
    assert "lm loss value: NAN | lm loss PPL: NAN |" in validation_box(validation_record(1, loss=math.nan))[1]


def test_perplexity_is_capped_and_a_nan_is_not_hidden_by_the_cap() -> None:
    assert perplexity_of(30.0) == math.exp(20)
    assert perplexity_of(math.inf) == math.exp(20)
    assert math.isnan(perplexity_of(math.nan))


@pytest.mark.parametrize("value", [math.nan, -math.inf])
def test_every_float_survives_strict_json(tmp_path: Path, value: float) -> None:
    step = step_record(1, loss=value, grad_norm=value, mfu=value, loss_scale=1024.0, memory_bytes=2**40)
    validation = validation_record(1, loss=value)
    path = tmp_path / "metrics.jsonl"
    path.write_text(to_json(step) + "\n" + to_json(validation) + "\n")
    assert [line["kind"] for line in strict_lines(path)] == ["step", "validation"]
    again = [from_json(line) for line in path.read_text().splitlines()]
    assert repr(again) == repr([step, validation])  # repr: a NaN does not equal itself


def test_fields_of_a_newer_version_are_ignored_and_missing_ones_named() -> None:
    fields = json.loads(to_json(step_record(1)))
    assert from_json(json.dumps({**fields, "carbon_grams": 3})) == step_record(1)
    del fields["lr"]
    with pytest.raises(ValueError, match=r"no step\.lr"):
        from_json(json.dumps(fields))


def test_facts_of_any_kind_become_strict_json() -> None:
    facts = {"path": Path("/a"), "steps": (1, 2), "loss": {"x": math.nan}, "low": -math.inf, "scalar": np.float32(0.5)}
    plain = {"path": "/a", "steps": [1, 2], "loss": {"x": "NaN"}, "low": "-Infinity", "scalar": 0.5}
    assert json.loads(strict_json(facts)) == plain


def write_records(path: Path, *records: object, starts: tuple[int, ...] = ()) -> Path:
    """`starts`: the steps from which the jobs continued."""
    path.write_text("".join(to_json(record) + "\n" for record in records))  # type: ignore[arg-type]
    ledger = [{"kind": "start", "job": job, "step": step} for job, step in enumerate(starts, 1)]
    path.with_name("events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in ledger))
    return path


def test_a_restart_replaces_what_it_did_again_and_drops_what_was_rolled_back(tmp_path: Path) -> None:
    starts = [{"kind": "start", "job": job, "step": step} for job, step in ((1, 0), (2, 20), (3, 30))]
    (tmp_path / "events.jsonl").write_text("".join(json.dumps(start) + "\n" for start in starts))
    path = write_records(
        tmp_path / "metrics.jsonl",
        *(step_record(step, job=1) for step in (10, 20, 30, 40, 50)),
        validation_record(40, job=1),
        validation_record(20, job=1),
        *(step_record(step, job=2, loss=9.0) for step in (30, 40)),
        validation_record(40, job=2, loss=8.0),
        *(step_record(step, job=3, loss=7.0) for step in (35, 45)),
        starts=(0, 20, 30),
    )
    found = [(type(record).__name__[0], record.step, record.job) for record in read_metrics(path)]
    assert found == [("S", 10, 1), ("S", 20, 1), ("V", 20, 1), ("S", 30, 2), ("S", 35, 3), ("S", 45, 3)]


def test_a_torn_last_line_is_left_out_and_a_damaged_one_inside_is_named(tmp_path: Path) -> None:
    path = write_records(tmp_path / "metrics.jsonl", step_record(10), step_record(20))
    whole = path.read_text()
    path.write_text(whole + to_json(step_record(30))[:50])
    assert [record.step for record in read_metrics(path)] == [10, 20]
    path.write_text(whole + to_json(step_record(30)))
    assert [record.step for record in read_metrics(path)] == [10, 20, 30]
    path.write_text("{broken\n" + whole)
    with pytest.raises(DataError, match=r"metrics.jsonl:1: line 1 is damaged.*sed -i 1d"):
        read_metrics(path)


def test_an_event_that_is_nested_too_deeply_is_named(tmp_path: Path) -> None:
    (path := tmp_path / "events.jsonl").write_text('{"kind": "note", "x": ' + "[" * 900 + "]" * 900 + "}\n")
    with pytest.raises(DataError, match="line 1 is damaged: it is nested more than 64 levels deep"):
        read_events(path)


def test_a_ledger_that_ends_in_a_line_without_end_is_not_read_to_it(tmp_path: Path) -> None:
    (path := tmp_path / "events.jsonl").write_text('{"kind": "note"}\n')
    os.truncate(path, 1 << 40)
    with pytest.raises(DataError, match="line 2 is damaged: it is too long"):
        read_ledger(path)


def test_starts_and_energy_are_found_without_parsing_other_lines(tmp_path: Path) -> None:
    ledger = tmp_path / "events.jsonl"
    assert read_ledger(ledger) == ([], Energy())
    start = {"kind": "start", "job": 2, "step": 7, "start": "ab", "energy": {"joules": 3.0, "device_seconds": 1.0}}
    ledger.write_text('{"kind": "note", damaged}\n{"kind":"note","of":"start"}\n' + json.dumps(start) + "\n")
    assert read_ledger(ledger) == ([(2, 7, "ab")], Energy(3.0, 0.0, 1.0))
    ledger.write_text('{"kind": "start", "job": 2}\n')
    assert read_ledger(ledger).starts == []
