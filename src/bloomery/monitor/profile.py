"""Profiles of a few steps: a Chrome trace, and what it says in words. A step that is not profiled pays nothing."""

import heapq
import json
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from operator import itemgetter
from pathlib import Path
from typing import Any

import orjson
import torch

from bloomery.base.accelerator import record_memory, write_memory
from bloomery.base.signals import PULSE
from bloomery.base.storage import own_folder, write_atomically
from bloomery.config.recipe import ProfileSection
from bloomery.monitor import names
from bloomery.monitor.journal import Journal
from bloomery.monitor.meters import IntervalMeter

FOLDER = "profiles"
_KINDS = {
    "attention": r"attention|flash|fmha|sdpa|flex",
    "matrix products": r"gemm|gemv|mm|nvjet|cutlass|cublas|wgmma|xmma|matmul|linear",
    "optimizer": r"adam|multi_tensor|foreach|lpnorm",
    "copies": r"memcpy|memset|copy_|::to\b|_to_copy",
    "elementwise and others": r"",
    "communication": r"nccl|gloo|c10d|all_?reduce|all_?gather|reduce_?scatter|record_param_comms",
}
"""By their names, the first that fits, but communication before all. Where several run at once the time is that of the
first here: so communication is what is exposed."""
_COMMUNICATION = "communication"
_ON_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
_HOST_BOUND = 0.1
_MOST_KERNELS = 10
_SUMMARY_SECONDS = 600.0
"""That a large trace may take."""


class Profiler:
    """Asked before every step."""

    def __init__(
        self,
        section: ProfileSection | None,
        folder: Path,
        *,
        rank: int,
        device: torch.device,
        first: int,
        at: int | None,
        journal: Journal,
        meter: IntervalMeter,
    ) -> None:
        """`first`: the job's first step. `at`: a step to be profiled, asked for on the command line."""
        self._section, self._folder, self._rank, self._device = section or ProfileSection(), folder, rank, device
        each = self._section
        self._journal, self._meter = journal, meter
        cycle = each.wait + each.warmup + each.active
        self._starts = {first + i * cycle + each.wait for i in range(each.repeat)} if section else set[int]()
        if at is not None:
            self._starts.add(max(first, at - each.warmup))
        self._profile: Any = None
        self._from = self._until = 0

    def begin(self, step: int, *, requested: bool = False) -> None:
        """`requested`: profile from this step on."""
        if self._profile is not None and step < self._until:
            self._profile.step()
            return
        if self._profile is not None:
            self.finish(step)
        if (requested or step in self._starts) and self._rank in self._section.ranks:
            with self._meter.paused("profile"):
                self._start(step)

    def _start(self, step: int) -> None:
        each = self._section
        self._from, self._until = step + each.warmup, step + each.warmup + each.active
        if each.memory:
            record_memory(self._device)
        known: set[Any] = torch.profiler.supported_activities()  # type: ignore[no-untyped-call]
        self._profile = torch.profiler.profile(
            activities=known if self._device.type != "cpu" else {torch.profiler.ProfilerActivity.CPU},
            schedule=torch.profiler.schedule(wait=0, warmup=each.warmup, active=each.active, repeat=1),
            record_shapes=each.shapes,
            with_stack=each.stacks,
            profile_memory=each.memory,
        )
        self._profile.start()

    def finish(self, step: int) -> None:
        """Write what was recorded of the steps before `step`, if anything was."""
        profile, self._profile = self._profile, None
        if profile is None:
            return
        with self._meter.paused("profile"), PULSE.excuse(_SUMMARY_SECONDS):
            profile.stop()
            if step > self._from:
                self._write(profile, step)

    def _write(self, profile: Any, step: int) -> None:
        own_folder(self._folder / FOLDER)
        own_folder(self._folder / names.TENSORBOARD_FOLDER)
        name = f"step-{self._from:08d}-rank{self._rank}"
        trace = self._folder / names.TENSORBOARD_FOLDER / f"rank{self._rank}.{self._from}.pt.trace.json"
        profile.export_chrome_trace(str(trace))
        found = {"step": self._from, "steps": step - self._from, "rank": self._rank, "trace": str(trace)}
        found |= summary(orjson.loads(trace.read_bytes())["traceEvents"])
        write_atomically(self._folder / FOLDER / f"{name}.json", json.dumps(found, indent=1))
        text = words(found)
        write_atomically(self._folder / FOLDER / f"{name}.txt", text)
        if self._section.memory:
            write_memory(self._device, self._folder / FOLDER / f"{name}.memory.pickle")
        facts = {key: found[key] for key in ("steps", "shares", "hidden", "host_bound") if key in found}
        self._journal.event(names.Event.PROFILE, self._from, **facts, file=f"{FOLDER}/{name}.txt")
        self._journal.notice(text)


def summary(events: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Of a Chrome trace: shares of the time from the first to the last kernel (without a device: operation), that of
    nothing included; communication that is hidden behind others; and what cost most."""
    timed = [event for event in events if event.get("ph") == "X" and event.get("dur")]
    chosen = [event for event in timed if event.get("cat") in _ON_DEVICE]
    on_device = bool(chosen)
    chosen = chosen or [event for event in timed if event.get("cat") == "cpu_op"]
    if not chosen:
        return {}
    spans = [(float(each["ts"]), float(each["ts"]) + float(each["dur"]), _kind(each["name"])) for each in chosen]
    total = max(end for _, end, _ in spans) - min(start for start, _, _ in spans)
    exclusive = _exclusive(spans)
    communication = _exclusive([span for span in spans if span[2] == _COMMUNICATION])[_COMMUNICATION]
    shares = {kind: exclusive[kind] / total for kind in _KINDS if exclusive[kind]}
    shares["idle"] = 1.0 - sum(shares.values())
    costs = defaultdict[str, float](float)
    calls = Counter(str(each["name"]) for each in chosen)
    for each in chosen:
        costs[str(each["name"])] += float(each["dur"])
    waits = sum(float(each["dur"]) for each in timed if "Synchronize" in str(each["name"]) and not _is_op(each)) / total
    return {
        "seconds": total / 1e6,
        "shares": shares,
        "hidden": (communication - exclusive[_COMMUNICATION]) / total,
        "host_waits": waits,
        "host_bound": shares["idle"] > _HOST_BOUND and waits < shares["idle"] if on_device else None,
        "kernels": [
            {"name": name, "calls": calls[name], "seconds": cost / 1e6, "share": cost / total}
            for name, cost in heapq.nlargest(_MOST_KERNELS, costs.items(), key=itemgetter(1))
        ],
    }


def words(found: Mapping[str, Any]) -> str:
    """A summary for people."""
    lines = [f"profile of {found['steps']} steps from step {found['step']} on, rank {found['rank']}: {found['trace']}"]
    if "shares" not in found:
        return f"{lines[0]}\nnothing was computed\n"
    lines.append(f"{found['seconds'] / found['steps']:.4f} s a step, of which")
    lines += [f"{share:8.1%}  {kind}" for kind, share in sorted(found["shares"].items(), key=lambda item: -item[1])]
    if _COMMUNICATION in found["shares"] or found["hidden"]:
        lines.append(f"{found['hidden']:8.1%}  communication hidden behind others, beside the exposed above")
    if found["host_bound"] is not None:
        verdict = (
            "The device waits for the host, which is too slow" if found["host_bound"] else "The host is fast enough"
        )
        lines.append(f"{verdict} (it waited for the device {found['host_waits']:.1%} of the time).")
    lines += ["", f"{'share':>8}  {'seconds':>9}  {'calls':>7}  kernel"]
    lines += [f"{k['share']:8.1%}  {k['seconds']:9.4f}  {k['calls']:7d}  {k['name'][:90]}" for k in found["kernels"]]
    return "\n".join(lines) + "\n"


def _is_op(event: Mapping[str, Any]) -> bool:
    return event.get("cat") in ("cpu_op", *_ON_DEVICE)


def _kind(name: str) -> str:
    order = (_COMMUNICATION, *_KINDS)
    return next(kind for kind in order if re.search(_KINDS[kind], name, re.IGNORECASE))


def _exclusive(spans: Iterable[tuple[float, float, str]]) -> dict[str, float]:
    """Time of each kind; of several at once, that of the first in _KINDS."""
    changes: list[tuple[float, int, str]] = []
    for start, end, kind in spans:
        changes += [(start, 1, kind), (end, -1, kind)]
    running, before, found = Counter[str](), 0.0, defaultdict[str, float](float)
    for now, change, kind in sorted(changes):
        first = next((each for each in _KINDS if running[each]), None)
        if first is not None:
            found[first] += now - before
        running[kind] += change
        before = now
    return found
