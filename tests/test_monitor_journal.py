"""Promises of the journal and its sinks: every sink agrees, and trouble with one never stops the training."""

from __future__ import annotations

import io
import math
import os
import re
import time
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.context import RequestContext
from tensorboard.data import server_ingester
from tensorboard.util import grpc_util

from bloomery.base.units import format_seconds, parse_amount
from bloomery.monitor.history import read_events, read_metrics
from bloomery.monitor.journal import Journal, open_journal
from bloomery.monitor.sinks import Console, console_line
from bloomery.monitor.tensorboard import TensorBoard
from bloomery.train.stop import seconds_left
from monitor_samples import fill, mounted, step_record, strict_lines, validation_record


def journal(
    folder: Path, *, job: int = 1, resume_step: int = 0, tensorboard: bool = False
) -> tuple[Journal, io.StringIO]:
    screen = io.StringIO()
    console = Console(file=screen)
    return open_journal(folder, console=console, job=job, tensorboard=tensorboard, resume_step=resume_step), screen


def scalars(folder: Path) -> dict[str, list[tuple[int, float]]]:
    reader = EventAccumulator(str(folder), size_guidance={"scalars": 0}).Reload()
    return {tag: [(point.step, point.value) for point in reader.Scalars(tag)] for tag in reader.Tags()["scalars"]}


def test_a_nan_is_visible_in_every_sink(tmp_path: Path) -> None:
    book, screen = journal(tmp_path, tensorboard=True)
    book.record(step_record(10, loss=math.nan, nan_steps=2, skipped_steps=2))
    book.record(validation_record(10, loss=math.nan))
    book.event("spike", 10, loss=math.nan)
    book.close()
    step, validation = strict_lines(tmp_path / "metrics.jsonl")
    assert step["losses"] == {"lm loss": "NaN"}
    assert (validation["losses"], validation["perplexity"]) == ({"lm loss": "NaN"}, "NaN")
    assert strict_lines(tmp_path / "events.jsonl")[0]["loss"] == "NaN"
    text = (tmp_path / "logs/main_log.txt").read_text()
    assert "lm loss: NAN |" in text
    assert "number of nan iterations:   2" in text
    assert "lm loss value: NAN" in text
    assert screen.getvalue().count("NaN") == 4  # the loss, the counter, the validation loss and its perplexity
    assert math.isnan(scalars(tmp_path / "tensorboard")["lm-loss-training/lm loss"][0][1])


def test_events_and_notices_carry_their_times(tmp_path: Path) -> None:
    book, screen = journal(tmp_path, job=3)
    book.event("save", 7, path=tmp_path)
    book.notice("two\nlines")
    book.warning("slow disk of \x1b[31mred")
    book.close()
    book.close()
    (event,) = read_events(tmp_path / "events.jsonl")
    assert (event["kind"], event["step"], event["job"], event["path"]) == ("save", 7, 3, str(tmp_path))
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ", event["iso_time"])
    assert isinstance(event["time"], float)
    assert screen.getvalue() == "two\nlines\nwarning: slow disk of \\x1b[31mred\n"
    log = (tmp_path / "logs/main_log.txt").read_text()
    assert re.fullmatch(r"\[\S+Z\] two\n\[\S+Z\] lines\n\[\S+Z\] warning: slow disk of \\x1b\[31mred\n", log)


def test_a_full_disk_is_warned_of_once_and_loses_nothing(tmp_path: Path) -> None:
    with mounted(tmp_path / "small", "size=128k") as small:
        book, screen = journal(small)
        book.record(step_record(1))
        ballast = fill(small)
        for step in range(2, 40):
            book.record(step_record(step))
        assert screen.getvalue().count("warning:") == 1
        warning = next(line for line in screen.getvalue().splitlines() if "warning:" in line)
        assert re.search(
            r"cannot write \S+(metrics.jsonl|main_log.txt): No space left on device \(ENOSPC\). Training continues; "
            r"\d+ records are kept in memory and will be written when there is room\.",
            warning,
        )
        strict_lines(small / "metrics.jsonl")
        ballast.unlink()
        book.record(step_record(40))
        assert "writable again" in screen.getvalue()
        book.close()
        assert [record.step for record in read_metrics(small / "metrics.jsonl")] == list(range(1, 41))
        assert [event["kind"] for event in strict_lines(small / "events.jsonl")] == [
            "storage_trouble",
            "storage_recovered",
        ]
        assert (small / "logs/main_log.txt").read_text().count("samples per second") == 40


def test_a_full_disk_turns_tensorboard_off_with_one_warning(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "run").mkdir()
    with mounted(tmp_path / "run/tensorboard", "size=64k") as small:
        book, screen = journal(tmp_path / "run", tensorboard=True)
        book.record(step_record(1))
        fill(small)
        for step in range(2, 20):
            book.record(step_record(step))
        book.close()
        assert screen.getvalue().count("TensorBoard is off for the rest of this job") == 1
        assert capfd.readouterr().err == ""  # no traceback of the writer's thread
        (event,) = read_events(tmp_path / "run/events.jsonl")
        assert event["kind"] == "tensorboard_off"
        assert "ENOSPC" in event["reason"]
        assert len(strict_lines(tmp_path / "run/metrics.jsonl")) == 19
        (small / "ballast").unlink()
        steps = [step for step, _ in scalars(small)["lm-loss-training/lm loss"]]
        assert steps == list(range(1, len(steps) + 1))  # what is there is whole
        later, _ = journal(tmp_path / "run", job=2, resume_step=19, tensorboard=True)
        later.record(step_record(20, job=2))
        later.close()
        assert scalars(small)["lm-loss-training/lm loss"][-1] == (20, 2.5)


def test_tensorboard_has_the_tags_of_the_reference(tmp_path: Path) -> None:
    sink = TensorBoard(tmp_path / "tensorboard", world_size=8, recipe_text="name: x")
    assert not (tmp_path / "tensorboard").exists()  # started by the first record
    sink.record(step_record(9))
    assert not [tag for tag in scalars(tmp_path / "tensorboard") if "loss-scale" in tag or "memory" in tag]
    measured = {"memory_bytes": 5, "peak_memory_bytes": 6, "memory_share": 0.5, "timers": {"forward": 0.1}}
    flops = {"megatron_tflops": 3.0, "hardware_tflops": 2.0, "hardware_tflops_definition": "hardware_selective"}
    sink.record(step_record(10, loss_scale=1024.0, mfu=0.5, replicas=4, params_norm=9.0, **measured, **flops))
    sink.record(validation_record(10))
    sink.close()
    found = scalars(tmp_path / "tensorboard")
    over_all = [
        "lm-loss-training/lm loss",
        "learning-rate/learning-rate",
        "grad-norm/grad-norm",
        "num-zeros/num-zeros",
        "loss-scale/loss-scale",
        "params-norm/params-norm",
        "iteration-time/iteration-time",
        "lm-loss-validation/web/lm loss validation",
        "lm-loss-validation/web/lm loss validation ppl",
    ]
    expected = {tag + axis: x for tag in over_all for axis, x in (("", 10), (" vs samples", 160), (" vs tokens", 5120))}
    flops = " vs gigaflos (without embeddings)"
    expected |= {tag + flops: 30 for tag in over_all if "loss-training" in tag or "loss-validation" in tag}
    expected |= {"iteration-time/world_size": 0}
    expected |= {f"iteration-time/{name} per second per replica": 10 for name in ("samples", "tokens")}
    expected |= {"batch-size/batch-size": 10, "batch-size/batch-size vs samples": 160}
    expected |= {f"iteration-time/{name}": 10 for name in ("samples per second", "tokens per second", "MFU")}
    counts = ("TFLOPs per gpu (estimated)", "model TFLOPs per gpu (model_full)")
    expected |= {f"iteration-time/{name}": 10 for name in (*counts, "hardware TFLOPs per gpu (hardware_selective)")}
    shares = ("memory/allocated bytes", "memory/peak allocated bytes", "memory/peak percent of the device")
    expected |= dict.fromkeys((*shares, "time/forward-time"), 10)
    expected |= {"steps-vs-samples/y=steps,x=samples": 160, "steps-vs-samples/y=samples,x=steps": 10}
    expected |= {"steps-vs-tokens/y=steps,x=tokens": 5120, "steps-vs-tokens/y=tokens,x=steps": 10}
    assert {tag: points[-1][0] for tag, points in found.items()} == expected
    assert found["steps-vs-samples/y=steps,x=samples"][-1] == (160, 10.0)
    assert found["lm-loss-training/lm loss vs tokens"][-1] == (5120, 2.5)
    assert found["iteration-time/TFLOPs per gpu (estimated)"][-1] == (10, 3.0)
    assert found["iteration-time/world_size"] == [(0, 8.0)]
    assert found["iteration-time/tokens per second per replica"][-1] == (10, 512.0)


def shown(folder: Path) -> dict[str, list[int]]:
    """The x of every point that TensorBoard draws: by its data server, which `tensorboard` starts by default."""
    binary = server_ingester.get_server_binary()
    ingester = server_ingester.SubprocessServerDataIngester(
        binary, str(folder), reload_interval=0, channel_creds_type=grpc_util.ChannelCredsType.LOCAL
    )
    ingester.start()
    provider, context = ingester.data_provider, RequestContext()
    query = {"experiment_id": "", "plugin_name": "scalars"}
    deadline = time.monotonic() + 30
    while not (found := provider.read_scalars(context, **query, downsample=1000)) and time.monotonic() < deadline:
        time.sleep(0.02)
    return {tag: [point.step for point in points] for run in found.values() for tag, points in run.items()}


def test_a_resume_hides_rolled_back_steps_in_tensorboard_and_keeps_the_past_on_every_axis(tmp_path: Path) -> None:
    first, _ = journal(tmp_path, tensorboard=True)
    for step in range(1, 9):
        first.record(step_record(step))
    first.record(validation_record(4))
    first.close()
    (written,) = (tmp_path / "tensorboard").iterdir()  # event files are read by their names, which hold whole seconds
    written.rename(written.with_name(re.sub(r"tfevents\.\d+", "tfevents.1000000000", written.name)))
    second, _ = journal(tmp_path, job=2, resume_step=5, tensorboard=True)
    second.record(step_record(6, job=2))
    second.close()
    found = shown(tmp_path / "tensorboard")
    assert found["lm-loss-training/lm loss"] == list(range(1, 7))
    assert found["lm-loss-training/lm loss vs samples"] == list(range(16, 97, 16))
    assert found["lm-loss-training/lm loss vs tokens"] == list(range(512, 3073, 512))
    assert found["lm-loss-validation/web/lm loss validation vs samples"] == [64]


def test_a_torn_metrics_file_is_repaired_and_the_ledger_says_so(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"kind": "st')
    book, screen = journal(tmp_path)
    book.record(step_record(1))
    book.close()
    assert "removed a torn last line" in screen.getvalue()
    assert read_events(tmp_path / "events.jsonl")[0]["kind"] == "file_repaired"
    assert len(strict_lines(tmp_path / "metrics.jsonl")) == 1


def test_a_file_gets_one_plain_line_per_record(tmp_path: Path) -> None:
    with (tmp_path / "out").open("w") as file:
        console = Console(file=file)
        console.record(step_record(10, mfu=0.417))
        console.record(step_record(20, loss=math.nan, nan_steps=1, skipped_steps=1))
        console.record(validation_record(20))
        quiet = Console(quiet=True, file=file)
        quiet.record(step_record(30))
        quiet.notice("hello")
        quiet.warning("disk full")
    assert (tmp_path / "out").read_text().splitlines() == [
        "step 10/100  lm loss 2.5000  lr 0.0001  norm 0.5  2.048k tok/s  MFU 42%  ETA 22s",
        "step 20/100  lm loss NaN  skipped 1  NaN 1  lr 0.0001  2.048k tok/s  ETA 20s",
        "validation web at step 20: lm loss 2.0000, perplexity 7.389",
        "warning: disk full",
    ]


def test_the_eta_is_that_of_the_job_where_that_ends_first() -> None:
    record, first = step_record(10, seconds_per_step=2.0, samples_per_second=4.0), (0, 0, 0)
    for limit, eta in (("15 steps", 10), (f"{record.consumed_samples + 8} samples", 2), ("900 steps", 180)):
        left = seconds_left(parse_amount(limit), first, record)
        assert console_line(record, left).endswith(f"ETA {format_seconds(eta)}")


def test_a_closed_pipe_silences_the_console_instead_of_ending_the_training() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    file = os.fdopen(writer, "w")
    console = Console(file=file)
    console.record(step_record(1))
    console.record(step_record(2))
    console.warning("nobody hears this")
    with pytest.raises(BrokenPipeError):
        file.close()
