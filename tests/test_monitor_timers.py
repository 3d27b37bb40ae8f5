"""What a run measures about itself, against readings of our own."""

from __future__ import annotations

import dataclasses
import re
import shutil
import socket
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from bloomery.config.recipe import ModelSection
from bloomery.families.registry import family_defaults
from bloomery.monitor.resources import Nodes, ResourceMeter
from bloomery.monitor.sinks import iteration_line
from bloomery.monitor.timers import AWAY, SlowRanks
from bloomery.sizing.flops import FlopCount, flops_per_token, megatron_flops_per_token
from conftest import Workshop
from monitor_samples import step_record


def test_the_log_line_has_the_flops_of_tr11() -> None:
    fields = {"family": "bloom", "num_layers": 70, "hidden_size": 14336, "num_heads": 112, "seq_length": 2048}
    fields |= {"vocab_size": 250880}
    model = ModelSection.model_validate(fields | family_defaults(fields))
    flops = megatron_flops_per_token(model, "full")
    assert flops == pytest.approx(flops_per_token(model, FlopCount.HARDWARE_FULL_RECOMPUTE), rel=1e-12)
    record = dataclasses.replace(step_record(1), megatron_tflops=flops * 2048 * 2048 / 105.22 / 384 / 1e12)
    assert iteration_line(record).endswith(" TFLOPs: 149.02 |")
    assert megatron_flops_per_token(model, "none") == pytest.approx(flops * 3 / 4)


def test_timers_sum_to_the_step_and_the_norm_is_that_of_the_weights(workshop: Workshop) -> None:
    settings = ("train.for=12 steps", "monitor.log_every=4 steps", "data.validation={v: [{path: valid}]}")
    settings += ("train.evaluate={every: 4 steps}", "model.hidden_size=192", "checkpoint.phases=[{every: 6 steps}]")
    run = workshop.train(*settings)
    records = workshop.metrics(run)
    for record in records:
        timers = record["timers"]
        assert {"data", "forward", "backward", "optimizer", "wait", "other"} <= timers.keys()
        assert not record["rank_timers"]  # of one rank
    summed = [sum(each for name, each in record["timers"].items() if name not in AWAY) for record in records]
    assert sum(summed) == pytest.approx(sum(record["seconds_per_step"] for record in records), rel=0.03)
    assert "eval" not in records[0]["timers"]
    assert records[1]["timers"]["eval"] > 0 < records[1]["timers"]["save"]
    tensors = load_file(run / "checkpoints/step-00000012/tensors-00000.safetensors")
    squares = sum(tensor.double().square().sum() for name, tensor in tensors.items() if name.startswith("model."))
    assert records[-1]["params_norm"] == pytest.approx(float(torch.as_tensor(squares).sqrt()), rel=1e-6)
    assert re.search(r"params norm: [0-9]+\.[0-9]{3} \|", (run / "logs/main_log.txt").read_text())


def test_test_groups_are_evaluated_once_after_the_training(workshop: Workshop) -> None:
    groups = ("data.split='60,20,20'", "data.test={far: [{path: valid}]}", "train.evaluate={every: 2 steps, steps: 2}")
    for _ in range(2):  # the second start finds it finished
        run = workshop.train("train.for=4 steps", *groups)
        rows = workshop.metrics(run, "validation")
        found = [(row["step"], row["part"], row["group"]) for row in rows]
        assert found[:2] == [(2, "validation", "valid"), (4, "validation", "valid")]
        assert found[2:] == [(4, "test", "test"), (4, "test", "far")]
        assert len({row["losses"]["lm loss"] for row in rows}) == 4
    run = workshop.train("train.for=2 steps", "data.split='900,99,1'", groups[-1], run="none")
    assert {row["part"] for row in workshop.metrics(run, "validation")} == {"validation"}
    assert "nothing is tested after the training: " in (run / "logs/main_log.txt").read_text()


def ranks(*seconds: float) -> list[dict[str, float]]:
    """Timers of ranks whose forward passes take so long."""
    return [{"data": 0.1, "forward": each, "backward": 2.0, "optimizer": 0.1, "wait": 0.0} for each in seconds]


def test_a_slow_rank_is_named_once_and_other_work_is_not_slowness() -> None:
    watch, stages = SlowRanks(), [0, 0, 0, 1]
    assert [watch.follow(ranks(1.0, 1.1, 0.9, 3.0), stages) for _ in range(5)] == [None] * 5  # another stage
    assert watch.follow(ranks(1.0, 1.0, 2.0, 3.0), stages) is None
    assert watch.follow(ranks(2.0, 1.0, 1.0, 3.0), stages) is None  # now and then anybody is
    verdicts = [watch.follow(ranks(1.0, 1.1, 2.0, 3.0), stages) for _ in range(5)]
    assert verdicts[:2] == verdicts[3:] == [None, None]
    expected = {"rank": 2, "seconds": 2.2, "usual_seconds": 1.3, "phase_seconds": 2.0, "usual_phase_seconds": 1.1}
    assert verdicts[2] is not None
    assert verdicts[2].pop("phase") == "forward"
    assert verdicts[2] == pytest.approx(expected)


def test_resources_of_the_node_are_those_of_the_system(workshop: Workshop) -> None:
    run = workshop.train("train.for=3 steps")
    (values,) = [values for record in workshop.metrics(run) for values in record["resources"].values()]
    memory = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    total, free = (int(memory[name].split()[0]) * 1024 for name in ("MemTotal", "MemAvailable"))
    assert values["host memory bytes"] == pytest.approx(total - free, abs=0.2 * total)
    assert values["host memory share"] == pytest.approx(values["host memory bytes"] / total)
    disk = shutil.disk_usage(run)
    assert values["disk share"] == pytest.approx(disk.used / disk.total, abs=0.02)
    assert list(workshop.metrics(run)[0]["resources"]) == [socket.gethostname()]
    meter = ResourceMeter(run, torch.device("cpu"), Nodes(0, [[0]], ["here"], leads=False))
    meter.read()
    later = meter.read()
    assert 0 <= later["cpu busy"] <= 1
    assert later["network bytes per second"] >= 0
