"""The table of faults. Each row says what strikes, in which layouts, and what must come of it."""

from __future__ import annotations

import signal
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

from bloomery.base import exit_codes
from chaos import damage
from chaos.plant import AfterStep, Before, Clock, Fails, FlipBit, Numbers, Plant, Signals, Storage, Waits, kill, kill_all
from chaos.scene import Ended, Scene

FIVE = ("one rank", "tp2", "pp2", "dp2 zero1", "dp2 zero3")
TWO_RANKS = FIVE[1:]
LOST = (-signal.SIGKILL, exit_codes.LOST_RANK)
"""What a killed process ends with when it is the only one, and what a job of several ranks ends with."""


@dataclass(frozen=True)
class Fault:
    group: str
    name: str
    code: int | tuple[int, int]
    """The exit code of the start that it strikes; (of one rank, of several)."""
    then: Literal["resumes", "finishes", "stops"]
    """resumes: the next start ends bit-equal to the undisturbed twin. finishes: this one does. stops: nothing is lost."""
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

    def code_for(self, scene: Scene) -> int:
        return self.code if isinstance(self.code, int) else self.code[scene.size > 1]


def play(fault: Fault, scene: Scene) -> Ended:
    """One cell: AssertionError if anything is not as the row says."""
    if fault.damage is not None or fault.half_way:
        scene.half_way()
    if fault.damage is not None:
        fault.damage(scene)
    ended = fault.act(scene) if fault.act else scene.start(plant=fault.plant)
    context = f"ended with {ended.code} after {ended.seconds} s and said:\n{ended.said}"
    assert ended.code == fault.code_for(scene), context
    assert "Traceback" not in ended.said, context
    assert fault.plant is None or ended.seconds is not None, f"the fault did not strike; it {context}"
    assert fault.then == "finishes" or (ended.seconds or 0.0) < fault.within_seconds, context
    if fault.says:
        import re

        assert re.search(fault.says, ended.said), f"expected {fault.says!r}; it {context}"
    if fault.check is not None:
        fault.check(scene, ended)
    if fault.then == "finishes":
        scene.require_equal()
    else:
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
    "before a rank reports its part": (Storage("open", in_save(4, r"\.rank-")), (0, 1)),
    "before the index": (Storage("open", in_save(4, "index")), (0,)),
    "before the manifest": (Storage("rename", in_save(4, "manifest")), (0,)),
    "before it gets its name": (Storage("rename", r"/step-00000004$"), (0,)),
    "before `latest` names it": (Storage("rename", r"/latest$", 2), (0,)),
    "before an older one is deleted": (Storage("rename", r"\.step-00000002-[^/]*\.old$"), (0,)),
    "in the middle of a deletion": (Storage("remove", r"^index\.json$|\.old/"), (0,)),
}

FAULTS: list[Fault] = []


def row(group: str, name: str, code: int | tuple[int, int], then: str, **rest: object) -> None:
    FAULTS.append(Fault(group, name, code, then, **rest))  # type: ignore[arg-type]


for _name, (_point, _victims) in SAVE_POINTS.items():
    for _victim in _victims:
        row(
            "kill -9", f"rank {_victim} in a save, {_name}", LOST, "resumes",
            plant=Plant(_point, kill, _victim), layouts=FIVE if _victim == 0 else TWO_RANKS,
            fast=("one rank",) if _victim == 0 else ("dp2 zero3",),
        )  # fmt: skip
row("kill -9", "rank 0 between saves", LOST, "resumes", plant=Plant(AfterStep(3), kill), fast=("pp2",))
row("kill -9", "rank 1 between saves", LOST, "resumes", plant=Plant(AfterStep(3), kill, 1), layouts=TWO_RANKS)
row("kill -9", "all ranks at once, in a save", LOST, "resumes",
    plant=Plant(Storage("write", in_save(4, "tensors-")), kill_all), layouts=TWO_RANKS, fast=("tp2",))  # fmt: skip
row("kill -9", "in an evaluation", LOST, "resumes", plant=Plant(Before("bloomery.train.loop:evaluate"), kill))
row("kill -9", "while a checkpoint is loaded", LOST, "resumes", half_way=True,
    plant=Plant(Before("bloomery.train.setup:load_on_all"), kill), fast=("tp2",))  # fmt: skip
row("kill -9", "while an old branch is put aside at a start", LOST, "resumes", half_way=True,
    plant=Plant(Before("bloomery.train.setup:put_in_order"), kill))  # fmt: skip
row("kill -9", "in the last save", LOST, "resumes", plant=Plant(Storage("write", in_save(8, "tensors-")), kill))

for _number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1):
    _one = Signals((_number,))
    row("signal", f"{_number.name} between two steps", 0, "resumes", plant=Plant(AfterStep(3), _one),
        fast=("one rank",))  # fmt: skip
    row("signal", f"{_number.name} to rank 1", 0, "resumes", plant=Plant(AfterStep(3), _one, 1), layouts=TWO_RANKS,
        fast=("dp2 zero1",) if _number == signal.SIGHUP else ())  # fmt: skip
    row("signal", f"{_number.name} in a save", 0, "resumes",
        plant=Plant(Before("bloomery.train.save:apply_saves" if False else "bloomery.checkpoint.saver:Saver.persist"), _one))  # fmt: skip
    row("signal", f"{_number.name} in an evaluation", 0, "resumes",
        plant=Plant(Before("bloomery.train.loop:evaluate"), _one))  # fmt: skip
    row("signal", f"{_number.name} before the first step", exit_codes.INTERRUPTED, "resumes",
        plant=Plant(Before("bloomery.train.setup:parallelise"), _one, None), fast=("one rank",))  # fmt: skip
row("signal", "SIGTERM twice", 0, "resumes", plant=Plant(AfterStep(3), Signals((signal.SIGTERM, signal.SIGTERM))))

row("numbers", "gradients that are not numbers, one step", 0, "stops", plant=Plant(AfterStep(3), Numbers(float("nan")), None),
    check=lambda scene, _: damage.require_event(scene, "skipped_update", 4))  # fmt: skip
row("numbers", "infinite gradients, one step", 0, "stops", plant=Plant(AfterStep(3), Numbers(float("inf")), None),
    check=lambda scene, _: damage.require_event(scene, "skipped_update", 4))  # fmt: skip
row("numbers", "gradients that stay infinite", exit_codes.DIVERGED, "stops", overrides=("train.stop_after_nan_steps=3",),
    plant=Plant(AfterStep(2), Numbers(float("inf"), 99), None), says="3 steps in a row", fast=("dp2 zero3",))  # fmt: skip

for _what, _tensor in {"a weight": r"model\..*norm.*weight", "a moment": r".*exp_avg\..*norm.*weight|optimizer.*norm.*"}.items():
    row("bit flip", f"in {_what} on rank 1", exit_codes.DIVERGED, "stops", plant=Plant(AfterStep(3), FlipBit(_tensor), 1),
        layouts=("tp2", "dp2 zero0"), says=r"rank 1", fast=("tp2",))  # fmt: skip

for _error in ("ENOSPC", "EIO", "EROFS", "EDQUOT"):
    _lasting = Plant(Storage("open|mkdir|rename", r"/checkpoints/", 1), Fails(_error), None, lasting=True)
