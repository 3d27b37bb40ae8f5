"""`bloomery doctor`: what is here, what is missing, and what a node lacks."""

from __future__ import annotations

import json
import sys
import time
import types
from pathlib import Path
from typing import Any

import pytest
import torch

from bloomery.base import accelerator
from bloomery.cli.main import main
from bloomery.config.load import load_recipe
from bloomery.launch import doctor
from bloomery.parallel.links import slow_links
from conftest import Workshop


def test_what_this_machine_has_and_what_installs_the_rest(
    workshop: Workshop, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", str(workshop.folder))
    assert main(["doctor", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["cores"] > 0
    assert [each["tflops"] > 0 and not each["error"] for each in facts["measured"]] == [True] * max(1, facts["devices"])
    assert facts["write_bytes_per_second"] > 0
    features = {each["feature"]: (each["state"], each["remedy"]) for each in facts["features"]}
    assert features["launch --on slurm"] == ("missing", "use a login node of the cluster")
    assert features["fast tokenization"][0] == "ok"
    assert not list(workshop.folder.glob(".bloomery-doctor*"))


def test_a_recipe_that_can_be_trained_here_and_one_that_cannot(
    workshop: Workshop, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["doctor", "small.yaml", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["problems"] == []
    assert main(["doctor", "small.yaml", "data.train=[{path: nothing}]"]) == 3
    assert "cannot read nothing.bin. data.train.0.path needs it" in capsys.readouterr().err


def test_what_a_node_lacks(workshop: Workshop) -> None:
    recipe = load_recipe("tr1-13b").recipe
    facts = {
        "host": "n7", "devices": 3, "device_memory_bytes": 2**30, "shared_memory_bytes": 2**20,
        "free_disk_bytes": 2**40, "write_bytes_per_second": 1e6,
        "measured": [measured(700.0), measured(0.0, error="CUDA out of memory")],
    }  # fmt: skip
    said = [str(problem) for problem in doctor.node_problems(recipe, facts)]
    assert said[0].startswith("n7 has 3 devices. launch.gpus_per_node starts 4 ranks")
    assert said[1].startswith("cuda:0 of n7 does not compute: CUDA out of memory. Every rank needs its device")
    assert said[2].startswith("a device of n7 has 1 GiB. Without activations, the fullest rank needs")
    assert said[3].startswith("/dev/shm of n7 has 1 MiB free")
    enough = {**facts, "devices": 4, "device_memory_bytes": 2**37, "shared_memory_bytes": 2**34, "measured": []}
    assert not list(doctor.node_problems(recipe, enough))
    assert not list(doctor.node_problems(recipe, {**enough, "devices": 0, "device_memory_bytes": 0})), "a CPU is shared"
    blind = {**enough, "devices": 0, "device_memory_bytes": 0, "cuda": "12.8"}  # its driver has failed
    assert [str(each).partition(".")[0] for each in doctor.node_problems(recipe, blind)] == ["n7 has 0 devices"]
    assert "n7 writes only 976.6 KiB/s" in next(doctor.slowness(facts, []))
    assert str(next(iter(doctor.run_problems(recipe, {**facts, "free_disk_bytes": 1})))).startswith("1 B are free")


FAST = {"write_bytes_per_second": 1e9}


def measured(tflops: float, *, device: str = "cuda:0", error: str = "") -> dict[str, Any]:
    return {"device": device, "tflops": tflops, "error": error}


def test_a_slow_device_is_told_from_those_of_all_nodes() -> None:
    nodes = [(f"n{node}", [measured(700.0 + node, device=f"cuda:{i}") for i in range(4)]) for node in range(3)]
    assert not list(doctor.slowness(FAST, nodes))
    nodes[1][1][2]["tflops"] = 412.25
    assert list(doctor.slowness(FAST, nodes)) == ["cuda:2 of n1 computes only 412.2 TFLOP/s, others 701"]
    assert list(doctor.slowness(FAST, [("n0", [measured(700.0)]), ("n1", [measured(300.0, device="cuda:7")])])) == [
        "cuda:7 of n1 computes only 300 TFLOP/s, others 700"
    ]


def test_a_device_that_fails_is_named_and_does_not_end_the_report(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(device: torch.device) -> float:
        raise RuntimeError("CUDA error: uncorrectable ECC error encountered\nmore of it")

    monkeypatch.setattr(accelerator, "matmul_flops", broken)
    facts = doctor._measured(torch.device("cpu"))
    assert (facts["tflops"], facts["error"]) == (0.0, "CUDA error: uncorrectable ECC error encountered")


def test_the_floating_point_speed_is_measured_in_a_moment() -> None:
    began = time.monotonic()
    assert accelerator.matmul_flops(torch.device("cpu"), seconds=0.05) > 1e8
    assert time.monotonic() - began < 1


def test_versions_and_clocks_of_an_nvidia_machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A stand-in for the board: what CI has none of."""
    driver = tmp_path / "version"
    driver.write_text("NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.124.06  Release Build  (dvs)\n")
    nvml = types.SimpleNamespace(
        NVMLError=ValueError, NVML_CLOCK_SM=1, nvmlInit=lambda: None, nvmlDeviceGetHandleByUUID=lambda uuid: uuid,
        nvmlDeviceGetClockInfo=lambda board, kind: 1755, nvmlDeviceGetMaxClockInfo=lambda board, kind: 1980,
    )  # fmt: skip
    board = types.SimpleNamespace(get_device_properties=lambda device: types.SimpleNamespace(uuid="12"))
    monkeypatch.setattr(accelerator, "_DRIVER", driver)
    monkeypatch.setattr(accelerator, "_backend", lambda device: board)
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: True)
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 27, 3))
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    assert accelerator.library_versions() == {"driver": "570.124.06", "cuda": "12.8", "nccl": "2.27.3"}
    assert accelerator.clocks_mhz(torch.device("cuda", 0)) == (1755, 1980)
    driver.unlink()
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert accelerator.library_versions()["driver"] == "not loaded"
    assert accelerator.clocks_mhz(torch.device("cuda", 0)) is None


def test_a_node_with_slow_links_is_told_from_its_neighbours() -> None:
    assert slow_links([10.0, 10.0, 1.0, 1.0, 10.0]) == {2: 1.0}, "what rank 2 receives, and what rank 3 receives of it"
    assert slow_links([10.0, 9.0, 4.0, 10.0]) == {}, "one link, so nobody knows which end of it"
    assert slow_links([1.0, 1.0]) == {}


def test_a_bad_node_is_remembered(workshop: Workshop, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    run = workshop.folder / "run"
    (run / "launch").mkdir(parents=True)
    real = doctor.machine_facts
    monkeypatch.setattr("bloomery.cli.doctor.machine_facts", lambda place: {**real(place), "host": "n7", "devices": 1})
    words = ["doctor", "small.yaml", "launch={gpus_per_node: 2}", "batch.micro_batch_size=2", "--run-dir", str(run)]
    assert main([*words, "--node"]) == 6
    monkeypatch.setenv("SLURMD_NODENAME", "gpu7")  # its host name may have a domain
    assert main([*words, "--node"]) == 6
    assert doctor.bad_nodes(run) == ["gpu7", "n7"]
