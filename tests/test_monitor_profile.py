"""Profiles: what the summary says is what the trace holds, counted here in another way."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bloomery.monitor.profile import summary
from conftest import Workshop


def counted(trace: Path) -> dict[str, float]:
    """Shares of a trace of a CPU, by looking at every microsecond of it."""
    kinds = {  # of what runs at the same time, the later one counts
        "communication": "nccl|gloo|c10d|reduce_",
        "elementwise and others": "",
        "copies": "copy_|::to$",
        "optimizer": "adam|foreach|lpnorm",
        "matrix products": "mm|linear|matmul",
        "attention": "attention|flash",
    }
    events = [each for each in json.loads(trace.read_text())["traceEvents"] if each.get("cat") == "cpu_op"]
    first = min(each["ts"] for each in events)
    scale = 10  # per microsecond
    length = round((max(each["ts"] + each["dur"] for each in events) - first) * scale)
    running = np.zeros(length, np.int64)
    for number, pattern in enumerate(kinds.values(), 1):
        for each in events:
            found = next(
                k for k in ("nccl|gloo|c10d|reduce_", *reversed(kinds.values())) if re.search(k, each["name"], re.I)
            )
            if found == pattern:
                start = round((each["ts"] - first) * scale)
                running[start : start + round(each["dur"] * scale)] = number
    counts = np.bincount(running, minlength=len(kinds) + 1) / length
    return dict(zip(["idle", *kinds], counts.tolist(), strict=True))


def test_a_summary_says_what_the_trace_holds(workshop: Workshop) -> None:
    plan = "monitor.profile={wait: 1, warmup: 1, active: 2, repeat: 2, shapes: true}"
    run = workshop.train("train.for=9 steps", plan)
    assert workshop.losses(run) == workshop.losses(workshop.train("train.for=9 steps", run="plain"))
    events = workshop.events(run, "profile")
    assert [(event["step"], event["steps"]) for event in events] == [(3, 2), (7, 2)]
    for event in events:
        trace = run / f"tensorboard/rank0.{event['step']}.pt.trace.json"
        expected = counted(trace)
        for kind in expected.keys() | event["shares"].keys():
            assert event["shares"].get(kind, 0.0) == pytest.approx(expected.get(kind, 0.0), abs=0.01), kind
        assert event["shares"]["matrix products"] > 0 < event["shares"]["optimizer"]
        text = (run / event["file"]).read_text()
        assert "aten::" in text
        assert f"{event['shares']['matrix products']:.1%}  matrix products" in text
        steps = [
            e for e in json.loads(trace.read_text())["traceEvents"] if e.get("name", "").startswith("ProfilerStep#")
        ]
        assert len(steps) == 2


def test_a_live_run_is_profiled_when_asked(workshop: Workshop) -> None:
    (workshop.folder / "run/control").mkdir(parents=True)
    (workshop.folder / "run/control/profile").touch()
    run = workshop.train("train.for=8 steps", "monitor.profile={wait: 100, active: 1}")
    assert [event["step"] for event in workshop.events(run, "profile")] == [2]
    assert not (run / "control/profile").exists()


def kernel(name: str, start: float, seconds: float, kind: str = "kernel", **args: Any) -> dict[str, Any]:
    return {"ph": "X", "cat": kind, "name": name, "ts": start, "dur": seconds, **args}


def test_of_a_device_communication_is_exposed_or_hidden_and_idle_is_the_host_or_not() -> None:
    work = [
        kernel("sm90_xmma_gemm_bf16", 0, 40),
        kernel("ncclDevKernel_AllReduce_Sum", 30, 30),  # 10 hidden, 20 exposed
        kernel("void pytorch_flash::flash_fwd_kernel", 60, 10),
        kernel("triton_poi_fused_add", 80, 20),  # 10 idle before it
        kernel("aten::mm", 0, 500, "cpu_op"),
    ]
    found = summary(work)
    shares = {
        "matrix products": 0.4,
        "attention": 0.1,
        "elementwise and others": 0.2,
        "communication": 0.2,
        "idle": 0.1,
    }
    assert found["shares"] == pytest.approx(shares)
    assert found["hidden"] == pytest.approx(0.1)
    assert found["kernels"][0]["name"] == "sm90_xmma_gemm_bf16"
    later = [{**each, "ts": each["ts"] + 20} if each["ts"] >= 60 else each for each in work]
    assert summary(later)["host_bound"] is True
    assert summary([*later, kernel("cudaStreamSynchronize", 60, 50, "cuda_runtime")])["host_bound"] is False
