"""A hardware entry of this machine: the planner's constants, fitted to what was measured there."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from bloomery.base.storage import make_folder, write_atomically
from bloomery.config.load import load_recipe
from bloomery.plan.candidates import setup_of
from bloomery.plan.constants import Constants, fitted
from bloomery.plan.hardware import Device, Machine, here, shipped
from bloomery.plan.memory import memory
from bloomery.plan.setup import Column, Setup
from bloomery.plan.step_time import attention_seconds, gemm_seconds, step_time
from bloomery.plan.trials import Trial

_TIME = (
    *("speed", "gemm", "small_dimension", "flash", "flash_limit", "flex", "norm_passes", "inner_passes", "loss_passes"),
    *("fp8", "cast_bytes", "again", "optimizer_passes", "micro_batch_s", "step_s", "launch_s", "launch_fused_s"),
)
_MEMORY = ("kept", "mlp_bytes", "workspace", "logit_bytes", "end_bytes")
_SPEED_PRIOR, _PRIOR, _KERNEL_ERROR, _STEP_ERROR = 2.0, 0.2, 0.1, 0.01
"""Standard deviations of logarithms: of `speed` and of another constant from what they are elsewhere, of a kernel's
time, of a step's."""
_SAFE = 1.06
"""Of memory, over what is expected, where the constants are the machine's own."""
SMALL, LARGE = (
    [f"model.hidden_size={hidden}", f"model.num_heads={heads}", f"model.seq_length={seq}", f"model.vocab_size={vocab}"]
    for hidden, heads, seq, vocab in ((128, 4, 128, 2048), (2048, 16, 2048, 50304))
)
"""Models of the trainings on a CPU and on an accelerator."""


def trainings(measured: Mapping[str, Any]) -> list[list[str]]:
    """Overrides of the recipe gpt-1.3b: a few layers, each way that costs otherwise."""
    on_cpu, precision = measured["device"] == "cpu", measured["precision"]
    size = 4 if on_cpu or measured["memory_bytes"] < 40 * 2**30 else 16

    def words(layers: int, *more: str, micro: int = size, count: int = 1) -> list[str]:
        batch = f"batch={{micro_batch_size: {micro}, global_batch_size: {micro * count}}}"
        return [*(SMALL if on_cpu else LARGE), f"precision={precision}", f"model.num_layers={layers}", batch, *more]

    found = [words(4), words(2), words(4, micro=max(1, size // 8), count=4)]
    if on_cpu:
        return found
    found += [words(4, "parallel.recompute=full"), words(4, "model.family=bloom")]
    found.append(words(4, "model.hidden_size=1024"))
    return [*found, words(4, "precision=fp8")] if any(each["fp8"] for each in measured["gemm"]) else found


def entry(
    measured: Mapping[str, Any], trials: Sequence[Trial], shared: Sequence[str]
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Of a hardware file: the device as it was measured; and how well its constants explain each training."""
    device = _unfitted(measured)
    machine = Machine("here", device, device.network, shipped().networks[device.network], device.node)
    start = fitted().on(device)
    done = [(trial, trial.step_seconds, trial.peak_memory_bytes) for trial in trials]
    steps = [
        (trial, seconds, peak, setup_of(load_recipe("gpt-1.3b", [*shared, *trial.words]).recipe, machine))
        for trial, seconds, peak in done
        if seconds and peak
    ]
    kernels = list(_kernels(measured, machine))

    def of_time(values: Mapping[str, float]) -> Column:
        now = start.but(values)
        whole = [np.log(step_time(setup, now).total / seconds) / _STEP_ERROR for _, seconds, _, setup in steps]
        parts = [np.log(predict(now) / now.speed / seconds) / _KERNEL_ERROR for predict, seconds in kernels]
        return np.array([*whole, *parts], dtype=np.float64)

    def of_memory(values: Mapping[str, float]) -> Column:
        used = [(memory(setup, start.but(values)), peak) for *_, peak, setup in steps]
        return np.array([np.log(each.seen(device.torch_name) / peak) / _STEP_ERROR for each, peak in used])

    known = vars(start)
    on_memory = (*_MEMORY, "context_gib") if device.torch_name == "cpu" else _MEMORY
    found = fit({name: known[name] for name in _TIME}, of_time)
    found |= fit({name: known[name] for name in on_memory}, of_memory)
    rounded = {name: float(f"{value:.4g}") for name, value in found.items()}
    constants = start.but(rounded)
    explained = [
        {
            "training": " ".join(word for word in trial.words if word not in (*SMALL, *LARGE)),
            "step_seconds": seconds,
            "explained_step_seconds": float(step_time(setup, constants).total),
            "peak_memory_bytes": peak,
            "explained_memory_bytes": int(memory(setup, constants).seen(device.torch_name)),
        }
        for trial, seconds, peak, setup in steps
    ]
    return asdict(replace(device, measured=device.measured | rounded | {"safe": _SAFE})), explained


def _kernels(measured: Mapping[str, Any], machine: Machine) -> Iterator[tuple[Callable[[Constants], Column], float]]:
    """What predicts the seconds of each, and what they were."""
    usual = setup_of(load_recipe("gpt-1.3b", ["precision=" + measured["precision"]]).recipe, machine)
    in_fp8 = replace(usual, peak_flops=np.asarray(machine.device.peak("fp8")))
    for each in measured["gemm"]:
        sides = [np.asarray(float(each[name])) for name in "mnk"]
        yield (
            partial(gemm_seconds, in_fp8 if each["fp8"] else usual, m=sides[0], n=sides[1], k=sides[2]),
            each["seconds"],
        )
    for each in measured["attention"]:
        shape = {"micro_batch": each["samples"], "heads": each["heads"], "seq": each["seq"], "head_dim": each["width"]}
        setup = replace(usual, **{name: np.asarray(float(value)) for name, value in shape.items()})
        yield partial(_attention, setup), each["seconds"]


def _attention(setup: Setup, constants: Constants) -> Column:
    forward, backward = attention_seconds(setup, constants)
    return forward + backward


def _unfitted(measured: Mapping[str, Any]) -> Device:
    """As its data sheet says, or, of a device that no table has, as it was measured."""
    name, copied, gemm = measured["device"], measured["copy_bytes_per_s"] / 1e9, measured["gemm"]
    found = next((each for each in shipped().devices.values() if each.torch_name == name), None)
    own: dict[str, Any] = {
        "source": f"measured {time.strftime('%Y-%m-%d')}, torch {measured['torch']}",
        "node": measured["devices"],
    }
    if found is None or name == "cpu":
        best = max(2 * each["m"] * each["n"] * each["k"] / each["seconds"] for each in gemm if not each["fp8"]) / 1e12
        own |= {"torch_name": name, "memory_gb_per_s": copied, "cores": measured["cores"]}
        own |= {"tflops": best * (2 if measured["precision"] == "fp32" else 1)}
    if measured["memory_bytes"]:
        own["memory_gib"] = round(measured["memory_bytes"] / 2**30, 2)
    if measured["link_bytes_per_s"]:
        own["link_gb_per_s"] = round(measured["link_bytes_per_s"] / 1e9, 1)
    device = replace(found or shipped().devices["cpu"], **own)
    return replace(device, measured={"memory": copied / device.memory_gb_per_s})


def fit(
    start: Mapping[str, float], errors: Callable[[Mapping[str, float]], Column], rounds: int = 40
) -> dict[str, float]:
    """The constants for which errors are least, drawn towards where they start: damped Gauss-Newton on logarithms."""
    first = np.log(list(start.values()))
    prior = np.array([_SPEED_PRIOR if name in ("speed", "context_gib") else _PRIOR for name in start])

    def at(x: Column) -> Column:
        return np.concatenate([errors(dict(zip(start, np.exp(x).tolist(), strict=True))), (x - first) / prior])

    x, damping = first.copy(), 1e-2
    for _ in range(rounds):
        now = at(x)
        jacobian = np.stack([(at(x + step) - now) / 1e-4 for step in np.eye(len(x)) * 1e-4], axis=1)
        bend, slope = jacobian.T @ jacobian, jacobian.T @ now
        move = np.clip(-np.linalg.solve(bend + damping * np.diag(np.diag(bend)), slope), -0.5, 0.5)
        better = float(np.sum(at(x + move) ** 2)) < float(np.sum(now**2))
        x, damping = (x + move, max(damping / 5, 1e-6)) if better else (x, damping * 4)
    return dict(zip(start, np.exp(x).tolist(), strict=True))


def store(found: dict[str, Any], disk_bytes_per_s: float, file: Path) -> str:
    """Add this machine to a hardware file; its name there."""
    known = yaml.safe_load(file.read_text()) if file.is_file() else {}
    name = here()
    known.setdefault("devices", {})[name] = found
    storage = {"gb_per_s": round(disk_bytes_per_s / 1e9, 3), "source": found["source"]}
    known.setdefault("storage", {})[f"{name}-disk"] = storage
    make_folder(file.parent)
    write_atomically(file, yaml.safe_dump(known, sort_keys=False))
    return name
