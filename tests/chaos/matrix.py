"""The table of faults. Each row says what strikes, in which layouts, and what must come of it."""

from __future__ import annotations

import re
import signal
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from bloomery.base import exit_codes
from chaos import damage, outside
from chaos.plant import (
    AfterStep,
    Before,
    Clock,
    Fails,
    FlipBit,
    Numbers,
    Plant,
    Signals,
    Storage,
    Waits,
    kill,
    kill_all,
    python_allocation,
    torch_allocation,
)
from chaos.scene import Ended, Scene

FIVE = ("one rank", "tp2", "pp2", "dp2 zero1", "dp2 zero3")
TWO_RANKS = FIVE[1:]
LOST = (-signal.SIGKILL, exit_codes.LOST_RANK)
"""What a killed process ends with when it is the only one, and what a job of several ranks ends with."""


@dataclass(frozen=True)
class Fault:
    group: str
    name: str
    code: int | tuple[int, int] | frozenset[int]
    """The exit code of the start that it strikes; (of one rank, of several); {any of these}."""
    then: Literal["resumes", "finishes", "stops", "refuses"]
    """resumes: the next start ends bit-equal to the undisturbed twin. finishes: this one does. stops: all checkpoints
    are whole. refuses: nothing was touched."""
    says: str = ""
    """A regular expression that stands in what the start says."""
    within_seconds: float = 30.0
    """From the fault to the end of the start, for one that ends it."""
    plant: Plant | None = None
    """Strikes in a training from the beginning, or with `half_way` in one that resumes."""
    damage: Callable[[Scene], None] | None = None
    """Done to the files of a run that has stopped half way, before it is started again."""
    act: Callable[[Scene], Ended] | None = None
    """For all others."""
    check: Callable[[Scene, Ended], None] | None = None
    overrides: tuple[str, ...] = ()
    half_way: bool = False
    layouts: tuple[str, ...] = FIVE
    fast: tuple[str, ...] = ()
    """The layouts in which `make test` runs it; `make chaos` runs all."""

    def codes_for(self, scene: Scene) -> frozenset[int]:
        if isinstance(self.code, frozenset):
            return self.code
        return frozenset({self.code if isinstance(self.code, int) else self.code[scene.size > 1]})


def play(fault: Fault, scene: Scene) -> Ended:
    """One cell: AssertionError if anything is not as the row says."""
    if fault.damage is not None or fault.half_way:
        scene.half_way()
    if fault.damage is not None:
        fault.damage(scene)
    ended = fault.act(scene) if fault.act else scene.start(plant=fault.plant)
    context = f"ended with {ended.code} after {ended.seconds} s and said:\n{ended.said}"
    assert ended.code in fault.codes_for(scene), context
    assert "Traceback" not in ended.said, context
    assert fault.plant is None or ended.seconds is not None, f"the fault did not strike; it {context}"
    assert fault.then == "finishes" or (ended.seconds or 0.0) < fault.within_seconds, context
    if fault.says:
        assert re.search(fault.says, ended.said), f"expected {fault.says!r}; it {context}"
    if fault.check is not None:
        fault.check(scene, ended)
    if fault.then == "finishes":
        scene.require_equal()
    elif fault.then != "refuses":
        scene.require_whole()
    if fault.then == "resumes":
        again = scene.start()
        assert again.code == exit_codes.OK, f"the next start ended with {again.code} and said:\n{again.said}"
        scene.require_equal()
    return ended


def in_save(step: int, file: str) -> str:
    return rf"\.step-{step:08d}-[^/]*/{file}"


SAVE_POINTS = {
    "before its staging dir exists": (Storage("mkdir", r"\.step-00000004-"), (0, 1)),
    "in the middle of a tensor file": (Storage("write", in_save(4, "tensors-")), (0, 1)),
    "before it waits for the others": (Before("bloomery.checkpoint.save:SaveJob.commit", 2), (0,)),
    "before it reports its part": (Before("bloomery.parallel.ranks:DistributedRanks.store_set", 2), (1,)),
    "before the index": (Storage("open", in_save(4, "index")), (0,)),
    "before the manifest": (Storage("rename", in_save(4, "manifest")), (0,)),
    "before it gets its name": (Storage("rename", r"/step-00000004$"), (0,)),
    "before `latest` names it": (Storage("rename", r"/latest$", 2), (0,)),
    "before an older one is deleted": (Storage("rename", r"\.step-0000000\d-[^/]*\.old$"), (0,)),
    "in the middle of a deletion": (Storage("remove", r"^index\.json$|\.old/"), (0,)),
}

FAULTS: list[Fault] = []


def row(group: str, name: str, code: int | tuple[int, int] | frozenset[int], then: str, **rest: object) -> None:
    FAULTS.append(Fault(group, name, code, then, **rest))  # type: ignore[arg-type]


for _name, (_point, _victims) in SAVE_POINTS.items():
    for _victim in _victims:
        row(
            "kill -9",
            f"rank {_victim} in a save, {_name}",
            LOST,
            "resumes",
            plant=Plant(_point, kill, _victim),
            layouts=FIVE if _victim == 0 else TWO_RANKS,
            fast=("one rank",) if _victim == 0 else ("dp2 zero3",) if "part" in _name else (),
        )
row("kill -9", "rank 0 between saves", LOST, "resumes", plant=Plant(AfterStep(3), kill), fast=("pp2",))
row("kill -9", "rank 1 between saves", LOST, "resumes", plant=Plant(AfterStep(3), kill, 1), layouts=TWO_RANKS)
row(
    "kill -9",
    "rank 1 aborts between saves, as malloc does when the heap is damaged",
    LOST,
    "resumes",
    plant=Plant(AfterStep(3), Signals((signal.SIGABRT,)), 1),
    says="Fatal Python error: Aborted",
    layouts=("tp2",),
)
row(
    "kill -9",
    "all ranks at once, in a save",
    LOST,
    "resumes",
    plant=Plant(Storage("write", in_save(4, "tensors-")), kill_all),
    layouts=TWO_RANKS,
    fast=("tp2",),
)
row("kill -9", "in an evaluation", LOST, "resumes", plant=Plant(Before("bloomery.train.loop:evaluate"), kill))
row(
    "kill -9",
    "while a checkpoint is loaded",
    LOST,
    "resumes",
    half_way=True,
    plant=Plant(Before("bloomery.train.setup:load_pieces"), kill),
    fast=("tp2",),
)
row(
    "kill -9",
    "while an old branch is put aside at a start",
    LOST,
    "resumes",
    half_way=True,
    plant=Plant(Before("bloomery.train.setup:archive_stale"), kill),
)
row("kill -9", "in the last save", LOST, "resumes", plant=Plant(Storage("write", in_save(8, "tensors-")), kill))

for _number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1):
    _one = Signals((_number,))
    row(
        "signal", f"{_number.name} between two steps", 0, "resumes", plant=Plant(AfterStep(3), _one), fast=("one rank",)
    )
    row(
        "signal",
        f"{_number.name} to rank 1",
        0,
        "resumes",
        plant=Plant(AfterStep(3), _one, 1),
        check=damage.require_stop(f"received {_number.name} on rank 1"),
        layouts=TWO_RANKS,
        fast=("dp2 zero1",) if _number == signal.SIGHUP else (),
    )
    row(
        "signal",
        f"{_number.name} in a save",
        0,
        "resumes",
        plant=Plant(Before("bloomery.checkpoint.save:Saver.persist"), _one),
    )
    row(
        "signal",
        f"{_number.name} in an evaluation",
        0,
        "resumes",
        plant=Plant(Before("bloomery.train.loop:evaluate"), _one),
    )
    row(
        "signal",
        f"{_number.name} before the first step",
        exit_codes.INTERRUPTED,
        "resumes",
        plant=Plant(Before("bloomery.train.setup:parallelise"), _one, None),
        fast=("one rank",),
    )
row("signal", "SIGTERM twice", 0, "resumes", plant=Plant(AfterStep(3), Signals((signal.SIGTERM, signal.SIGTERM))))

ONE_STEP = damage.require_event("skipped_update", 4)
row(
    "numbers",
    "gradients that are not numbers, one step",
    0,
    "stops",
    check=ONE_STEP,
    plant=Plant(AfterStep(3), Numbers(float("nan")), None),
    fast=("pp2",),
)
for _name, _allocation, _place in (
    ("torch, in a step", torch_allocation, AfterStep(5)),
    ("Python, in a step", python_allocation, AfterStep(5)),
    ("torch, when the model is built", torch_allocation, Before("bloomery.train.setup:parallelise")),
):
    row(
        "out of memory",
        f"the host refuses memory to {_name}",
        exit_codes.USAGE,
        "resumes",
        says="out of host memory",
        plant=Plant(_place, _allocation),
        fast=("one rank",) if _allocation is python_allocation else (),
    )
row(
    "numbers",
    "infinite gradients, one step",
    0,
    "stops",
    check=ONE_STEP,
    plant=Plant(AfterStep(3), Numbers(float("inf")), None),
)
row(
    "numbers",
    "gradients that stay infinite",
    exit_codes.DIVERGED,
    "stops",
    says="3 steps in a row",
    plant=Plant(AfterStep(2), Numbers(float("inf"), 99), None),
    overrides=("train.stop_after_nan_steps=3",),
    fast=("dp2 zero3",),
)
row(
    "numbers",
    "an fp16 storm: overflows for two steps",
    0,
    "stops",
    check=ONE_STEP,
    plant=Plant(AfterStep(3), Numbers(float("inf"), 2), None),
    overrides=("precision=fp16",),
)

row(
    "numbers",
    "a rate far too high: the loss grows and stays finite",
    exit_codes.DIVERGED,
    "stops",
    overrides=("lr={peak: 30, schedule: constant}", "train.stop_after_spike_steps=3"),
    says="spike|far above",
    fast=("one rank",),
)

FLIPS = {
    "a weight": FlipBit(r"model\..*norm.*weight"),
    "a moment": FlipBit(r"optim\..*norm.*exp_avg"),
    "the gradients": Numbers(1.0000002),
}
for _what, _action in FLIPS.items():
    row(
        "bit flip",
        f"in {_what} of rank 1",
        exit_codes.DIVERGED,
        "stops",
        plant=Plant(AfterStep(3), _action, 1),
        layouts=("tp2", "dp2 zero0"),
        says=r"on rank 1 differs from rank 0",
        fast=("tp2",),
    )

DAMAGED = damage.require_event("damaged")
WAYS = {
    "bit flip in": damage.flipped,
    "truncated": damage.truncated,
    "missing": damage.missing,
    "older one's": damage.swapped,
}
for _file in damage.FILES:
    for _what, _how in WAYS.items():
        if _what == "older one's" and _file in ("index.json", "recipe.yaml"):
            continue  # the same bytes
        row(
            "checkpoint file",
            f"{_what} {_file}",
            0,
            "finishes",
            damage=_how(_file),
            check=DAMAGED,
            fast=("one rank",) if _what == "bit flip in" else ("dp2 zero1",) if _file == "state.json" else (),
        )
row("checkpoint file", "a copy under another step's name", 0, "finishes", damage=damage.copied_under_another_step)
row("checkpoint file", "the newest folder is empty", 0, "finishes", damage=damage.emptied)
row(
    "checkpoint file",
    "every checkpoint is damaged",
    exit_codes.DATA,
    "refuses",
    damage=damage.all_damaged,
    says="no checkpoint of this run can be used",
)
row("checkpoint file", "`latest` is garbage", 0, "finishes", damage=damage.latest_says("\0\0rubbish"))
row("checkpoint file", "`latest` is missing", 0, "finishes", damage=damage.latest_says(None))
row("run folder", "metrics.jsonl ends in a torn line", 0, "finishes", damage=damage.torn("metrics.jsonl"))
row("run folder", "events.jsonl ends in a torn line", 0, "finishes", damage=damage.torn("events.jsonl"))

IN_SAVE = r"/\.step-\d+-"
for _error in ("ENOSPC", "EIO", "EROFS"):
    for _victim in (0, 1):
        row(
            "storage",
            f"{_error} in every save on rank {_victim}",
            exit_codes.STORAGE,
            "resumes",
            within_seconds=10,
            plant=Plant(Storage("open|mkdir|write", IN_SAVE), Fails(_error), _victim, lasting=True),
            says="could not be written",
            layouts=FIVE if _victim == 0 else TWO_RANKS,
            fast=(("tp2",) if _victim else ("one rank",)) if _error == "EROFS" else (),
        )
row(
    "storage",
    "EROFS in every save on all ranks",
    exit_codes.STORAGE,
    "resumes",
    within_seconds=10,
    plant=Plant(Storage("open|mkdir|write|rename", IN_SAVE), Fails("EROFS"), None, lasting=True),
    layouts=TWO_RANKS,
    fast=("dp2 zero3",),
)
row(
    "storage",
    "one save fails (EIO)",
    0,
    "finishes",
    says="could not be written",
    plant=Plant(Storage("write", in_save(4, "tensors-")), Fails("EIO")),
)
row(
    "storage",
    "slow",
    0,
    "finishes",
    plant=Plant(Storage("open|mkdir|rename|write", IN_SAVE), Waits(0.02), None, lasting=True),
)
row(
    "storage",
    "a write of rank 0 hangs",
    exit_codes.STORAGE,
    "resumes",
    overrides=("checkpoint.timeout=3s",),
    plant=Plant(Storage("write", in_save(4, "tensors-")), Waits()),
)
row(
    "storage",
    "a write of rank 1 hangs",
    exit_codes.STORAGE,
    "resumes",
    overrides=("checkpoint.timeout=3s",),
    plant=Plant(Storage("write", in_save(4, "tensors-")), Waits(), 1),
    layouts=TWO_RANKS,
)
row(
    "clock",
    "a day ahead",
    0,
    "finishes",
    overrides=("train.exit_after=1h",),
    plant=Plant(AfterStep(2), Clock(86400), None),
)
row(
    "clock",
    "a day back",
    0,
    "finishes",
    overrides=("train.exit_after=1h",),
    plant=Plant(AfterStep(2), Clock(-86400), None),
)

FORGED = {
    "an index without pieces": damage.forged(lambda tensors: [t.update(pieces=[]) for t in list(tensors.values())[:4]]),
    "an index with a piece twice": damage.forged(
        lambda tensors: [t["pieces"].append(t["pieces"][0]) for t in tensors.values()]
    ),
    "an index with a negative offset": damage.forged(
        lambda tensors: [t["pieces"][0].update(offset=[-1] * len(t["shape"])) for t in tensors.values() if t["shape"]]
    ),
    "a state.json of {}": damage.forged_file("state.json", "{}"),
    "a state.json with nonsense": damage.forged_file("state.json", '{"step": -3, "consumed_samples": "many"}'),
    "a deeply nested state.json": damage.forged_file("state.json", '{"x": ' + "[" * 700 + "]" * 700 + "}"),
    "a deeply nested index": damage.forged_file("index.json", "[" * 100_000),
}
for _what, _how in FORGED.items():
    row("forged", _what, 0, "finishes", damage=_how, check=DAMAGED, fast=("one rank",))

for _number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1):
    row(
        "signal",
        f"{_number.name} to the launcher",
        0,
        "resumes",
        act=outside.to_launcher(_number),
        layouts=("one rank", "tp2"),
    )
    row("signal", f"{_number.name} to every process", 0, "resumes", act=outside.to_everybody(_number), layouts=("pp2",))
    row(
        "signal",
        f"{_number.name} while torch is imported",
        exit_codes.INTERRUPTED,
        "resumes",
        act=outside.while_importing("torch", _number),
        layouts=("one rank",),
    )
    row(
        "signal",
        f"{_number.name} while ranks are started",
        exit_codes.INTERRUPTED,
        "resumes",
        act=outside.while_importing("multiprocessing.popen_forkserver", _number),
        layouts=("tp2",),
    )
row(
    "signal",
    "SIGTERM to the fork server",
    0,
    "resumes",
    act=outside.to_fork_server(signal.SIGTERM),
    layouts=("tp2",),
)
row("kill -9", "the launcher", -signal.SIGKILL, "resumes", act=outside.to_launcher(signal.SIGKILL), layouts=FIVE)
row(
    "kill -9",
    "the fork server",
    exit_codes.LOST_RANK,
    "resumes",
    act=outside.to_fork_server(signal.SIGKILL),
    layouts=("tp2", "dp2 zero1"),
)
row("hang", "a rank stands still for two seconds (SIGSTOP, SIGCONT)", 0, "finishes", act=outside.stopped_for_a_while)
row("two starts", "a start that was given up comes back", exit_codes.STORAGE, "stops", act=outside.zombie)
row("two starts", "a second start while one trains", exit_codes.STORAGE, "finishes", act=outside.second_start)

LINKS = (
    "checkpoints/.left-x/",
    "checkpoints/.writer-x/",
    "checkpoints/.step-00000009-x.tmp/",
    "checkpoints/retired/",
    "checkpoints/step-00000009/",
    "logs/",
    "metrics.jsonl",
    "events.jsonl",
    ".lock",
    "recipe.yaml",
    "checkpoints/latest",
    "checkpoints/.writer",
    "control/stop",
    "control/save",
)
for _link in LINKS:
    row(
        "planted link",
        f"{_link} leads out of the run folder",
        frozenset({0, exit_codes.STORAGE}),
        "stops",
        damage=damage.linked(_link),
        check=damage.require_untouched,
        layouts=("one rank", "tp2"),
        fast=("one rank",) if _link in ("checkpoints/.left-x/", "metrics.jsonl", ".lock") else (),
    )

LOCAL = ("checkpoint.local={path: '{cell}/nvme', every: 1 steps, keep: 2}",)
row("local tier", "its disk is empty after a kill", 0, "finishes", act=damage.local_tier_wiped, overrides=LOCAL)
row(
    "local tier",
    "ENOSPC",
    0,
    "finishes",
    overrides=LOCAL,
    plant=Plant(Storage("open|write", r"/nvme/.*tensors-"), Fails("ENOSPC"), None, lasting=True),
)
row("local tier", "bit flip in its newest checkpoint", 0, "finishes", act=damage.local_tier_flipped, overrides=LOCAL)
REMOTE = ("checkpoint.upload={to: '{cell}/remote'}",)
row(
    "remote",
    "the run folder's checkpoints are gone: fetched from there",
    0,
    "finishes",
    act=damage.fetched,
    overrides=REMOTE,
)
row("remote", "and the newest there is damaged", 0, "finishes", act=damage.fetched_damaged, overrides=REMOTE)
row(
    "remote",
    "every write fails (EIO)",
    0,
    "finishes",
    overrides=REMOTE,
    says="could not be copied",
    plant=Plant(Storage("open|mkdir", r"/remote"), Fails("EIO"), 0, lasting=True),
)
row(
    "run folder",
    "vanishes under a live run",
    exit_codes.STORAGE,
    "resumes",
    plant=Plant(AfterStep(3), damage.vanish),
    check=damage.bring_back,
)

for _what, _how in damage.SHARDS.items():
    row(
        "shard",
        _what,
        frozenset({0, exit_codes.DATA}) if "idx" in _what else exit_codes.DATA,
        "refuses",
        act=damage.damaged_shard(_how),
        check=damage.require_equal_if_ok,
        layouts=("one rank", "dp2 zero1"),
        fast=("one rank",) if "idx" in _what else (),
    )

HUNG = r"rank 0 has waited \d+ s for rank 1, which last reported step [23]"
row(
    "hang",
    "a rank stands still for good (SIGSTOP)",
    exit_codes.LOST_RANK,
    "resumes",
    act=outside.stopped_for_good,
    layouts=TWO_RANKS,
    says=HUNG,
)
for _name, _code, _to_rank, _plant in (
    ("SIGTERM to the launcher while a rank stands still: it wakes", 0, False, outside.PAUSE),
    ("SIGTERM to a rank that waits for one that stands still", exit_codes.LOST_RANK, True, outside.PAUSE),
    ("the same in the first evaluation", exit_codes.LOST_RANK, True, outside.EVALUATION),
):
    row(
        "hang",
        _name,
        _code,
        "resumes",
        act=outside.signal_in_a_hang(to_rank=_to_rank, plant=_plant),
        layouts=("tp2", "dp2 zero1"),
        within_seconds=6,
    )
row(
    "network",
    "the cable between two hosts is cut",
    exit_codes.LOST_RANK,
    "resumes",
    layouts=TWO_RANKS,
    act=outside.cable_cut(node_lost=False),
    says="rank 1",
)
row(
    "network",
    "a host is lost without a word",
    exit_codes.LOST_RANK,
    "resumes",
    layouts=TWO_RANKS,
    act=outside.cable_cut(node_lost=True),
    says="rank 1",
)
