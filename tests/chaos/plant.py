"""A fault inside a rank: at which point of its work it strikes, and what it does there."""

from __future__ import annotations

import contextlib
import errno
import importlib
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_CHANGES = os.O_WRONLY | os.O_RDWR | os.O_CREAT
Action = Callable[["Plant", Any], None]
"""Called with the plant and, at an `AfterStep`, with (run, state); in its place otherwise with None."""


@dataclass(frozen=True)
class Storage:
    """The `nth` storage operation (open to write, write, rename, mkdir, remove) on a path that matches."""

    operation: str
    path: str
    nth: int = 1


@dataclass(frozen=True)
class AfterStep:
    step: int


@dataclass(frozen=True)
class Before:
    """The `nth` call of a function: `bloomery.train.loop:evaluate`."""

    function: str
    nth: int = 1


@dataclass(frozen=True)
class Plant:
    at: Storage | AfterStep | Before | None
    """None: where it is planted, at once."""
    do: Action
    rank: int | None = 0
    """The victim; None: every rank."""
    lasting: bool = False
    """Whether it strikes at every later match too, as a disk that stays full does."""
    notes: str = ""
    """Folder in which it leaves the file `struck`, with the time."""

    def strike(self, subject: Any = None) -> None:
        if self.rank not in (None, int(os.environ.get("RANK", "0"))):
            return
        with contextlib.suppress(FileExistsError), open(os.path.join(self.notes, "struck"), "x") as file:
            file.write(str(time.time()))
        self.do(self, subject)


def kill(plant: Plant, _: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def kill_all(plant: Plant, _: Any) -> None:
    """Every rank of the job, itself last."""
    pids = [int(path.read_text()) for path in Path(plant.notes).glob("pid-*")]
    for pid in sorted(pids, key=lambda pid: pid == os.getpid()):
        os.kill(pid, signal.SIGKILL)


@dataclass(frozen=True)
class Signals:
    """To itself, one after the other."""

    numbers: tuple[signal.Signals, ...]

    def __call__(self, plant: Plant, _: Any) -> None:
        for number in self.numbers:
            os.kill(os.getpid(), number)


@dataclass(frozen=True)
class Fails:
    """A storage operation that fails."""

    name: str

    def __call__(self, plant: Plant, _: Any) -> None:
        number = getattr(errno, self.name)
        raise OSError(number, os.strerror(number))


@dataclass(frozen=True)
class Waits:
    seconds: float = 10**6

    def __call__(self, plant: Plant, _: Any) -> None:
        time.sleep(self.seconds)


@dataclass(frozen=True)
class HangPatience:
    """Ranks wait for each other only so long, instead of a minute or more."""

    seconds: float

    def __call__(self, plant: Plant, _: Any) -> None:
        from bloomery.base import signals

        signals.PATIENCE_STEPS, signals.PATIENCE_SECONDS, signals.FIRST_SECONDS = 0.0, self.seconds, self.seconds
        signals.PULSE.learn(0.0)


@dataclass(frozen=True)
class Both:
    first: Action
    second: Action

    def __call__(self, plant: Plant, subject: Any) -> None:
        self.first(plant, subject)
        self.second(plant, subject)


@dataclass(frozen=True)
class FlipBit:
    """One bit of a tensor that this rank holds: model.*, or a moment of the optimizer."""

    tensor: str

    def __call__(self, plant: Plant, subject: Any) -> None:
        import torch

        run, _ = subject
        name = next(name for name in run.optimizer.pieces() if re.fullmatch(self.tensor, name))
        with torch.no_grad():
            run.optimizer.pieces()[name].tensor.view(torch.int32).view(-1)[3] ^= 1


@dataclass(frozen=True)
class Clock:
    """The wall clock jumps, and goes on from there."""

    seconds: float

    def __call__(self, plant: Plant, _: Any) -> None:
        real = time.time
        time.time = lambda: real() + self.seconds


def torch_allocation(plant: Plant, _: Any) -> None:
    import torch

    torch.empty(2**60, dtype=torch.uint8)


def python_allocation(plant: Plant, _: Any) -> None:
    bytearray(2**60)


@dataclass(frozen=True)
class Numbers:
    """The gradients of the next steps are multiplied by this."""

    factor: float
    steps: int = 1

    def __call__(self, plant: Plant, subject: Any) -> None:
        left, update = [self.steps], type(subject[0].optimizer).update

        def changed(optimizer: Any, gradients: Any, **rest: Any) -> Any:
            if left[0] > 0:
                left[0] -= 1
                for gradient in gradients.tensors():
                    gradient.mul_(self.factor)
            return update(optimizer, gradients, **rest)

        type(subject[0].optimizer).update = changed


def planted(notes: str, plant: Plant | None, command: Callable[[Sequence[str]], int], arguments: Sequence[str]) -> int:
    """What a rank runs instead of `command`: the same, with a fault in it. What it says goes to `said` in `notes`."""
    said = os.open(os.path.join(notes, "said"), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(said, 1)
    os.dup2(said, 2)
    rank = int(os.environ.get("RANK", "0"))
    Path(notes, f"pid-{rank}").write_text(str(os.getpid()))
    if plant is not None and plant.rank in (None, rank):
        install(plant)
    return command(arguments)


def install(plant: Plant) -> None:
    at = plant.at
    if isinstance(at, AfterStep):
        _wrap("bloomery.train.loop", "train_step", lambda args: args[1].step == at.step, plant, after=True)
    elif isinstance(at, Before):
        module, _, name = at.function.partition(":")
        calls = _Countdown(at.nth, plant.lasting)
        _wrap(module, name, lambda args: calls.hit(), plant)
    else:
        _watch_storage(plant, at)


class _Countdown:
    def __init__(self, nth: int, lasting: bool) -> None:
        self._left, self._lasting, self._lock = nth, lasting, threading.Lock()

    def hit(self) -> bool:
        with self._lock:
            self._left -= 1
            return self._left == 0 or (self._lasting and self._left < 0)


def _wrap(module: str, name: str, hits: Callable[[Any], bool], plant: Plant, *, after: bool = False) -> None:
    owner = importlib.import_module(module)
    *path, name = name.split(".")
    for part in path:
        owner = getattr(owner, part)
    original = getattr(owner, name)

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        if after:
            result = original(*args, **kwargs)
            if hits(args):
                plant.strike(args)
            return result
        if hits(args):
            plant.strike(args)
        return original(*args, **kwargs)

    setattr(owner, name, wrapped)


def _watch_storage(plant: Plant, at: Storage) -> None:
    """Audit events come before every operation of os, io and pathlib, and may refuse it; os.write has none."""
    pattern, countdown, inside = re.compile(at.path), _Countdown(at.nth, plant.lasting), threading.local()

    def matches(operation: str, path: object) -> bool:
        if getattr(inside, "striking", False) or operation not in at.operation.split("|"):
            return False
        return bool(pattern.search(os.fsdecode(path) if isinstance(path, str | bytes) else "")) and countdown.hit()

    def strike() -> None:
        inside.striking = True
        try:
            plant.strike()
        finally:
            inside.striking = False

    def hook(event: str, args: tuple[Any, ...]) -> None:
        if event == "open" and isinstance(args[2], int) and args[2] & _CHANGES:
            found = matches("open", args[0])
        elif event == "os.rename":
            found = matches("rename", args[1])
        elif event in ("os.mkdir", "os.remove", "os.rmdir"):
            found = matches(event[3:], args[0])
        else:
            return
        if found:
            strike()

    write = os.write

    def written(descriptor: int, data: Any) -> int:
        if descriptor > 2 and not getattr(inside, "striking", False):
            path = os.readlink(f"/proc/self/fd/{descriptor}")
            if matches("write", path):
                if not isinstance(plant.do, Waits):
                    write(descriptor, bytes(data)[: len(data) // 2])  # half of it arrives
                strike()
        return write(descriptor, data)

    os.write = written
    sys.addaudithook(hook)
