"""What tests let ranks run instead of `bloomery`: the same, with something planted on one of them."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import count
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from bloomery.cli.main import main


def logged(command: Callable[[Sequence[str]], int], log: str, arguments: Sequence[str]) -> int:
    """The fork server keeps the standard output it was born with, which is another test's."""
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(file, 1)
    os.dup2(file, 2)
    return command(arguments)


def is_rank(number: int) -> bool:
    return int(os.environ["RANK"]) == number


def after_step(step: int, action: Any) -> None:
    """Call `action(run, state)` in this process when step `step` is done."""
    from bloomery.train import loop

    train_step = loop.train_step

    def then(run: Any, state: Any) -> None:
        train_step(run, state)
        if state.step == step:
            action(run, state)

    loop.train_step = then


def drift_on_rank_1(arguments: Sequence[str]) -> int:
    """One bit of one norm changes on rank 1, after step 3."""
    if is_rank(1):

        def flip(run: Any, state: Any) -> None:
            weight = run.optimizer.pieces()["model.layers.1.mlp_norm.weight"].tensor
            with torch.no_grad():
                weight.view(torch.int32)[5] ^= 1

        after_step(3, flip)
    return main(arguments)


def kill_rank_1(arguments: Sequence[str]) -> int:
    if is_rank(1):
        after_step(7, lambda run, state: os.kill(os.getpid(), signal.SIGKILL))
    return main(arguments)


def newer_start_seen_by(numbers: Sequence[int], arguments: Sequence[str]) -> int:
    """A newer start takes the checkpoints over during the save of step 4, and only these ranks find out by themselves:
    before they write their part, or, rank 0 alone, before it completes the save."""
    from bloomery.checkpoint.folder import Writer, take_over
    from bloomery.checkpoint.save import SaveJob

    where = "commit" if numbers == [0] else "_write_part"
    original = getattr(SaveJob, where)

    def taken_over(job: SaveJob, *rest: Any) -> Any:
        if job.plan.step == 4 and is_rank(numbers[0]):
            take_over(job.root)
        return original(job, *rest)

    setattr(SaveJob, where, taken_over)
    if not any(map(is_rank, numbers)):
        Writer.require = lambda self: None  # type: ignore[method-assign]
    return main(arguments)


def slow_data_on_rank_1(arguments: Sequence[str]) -> int:
    if is_rank(1):
        from bloomery.data.batch import Loader

        take = Loader.take

        def slowly(self: Any) -> Any:
            time.sleep(0.25)  # here, where no long step of a busy machine hides it
            return take(self)

        Loader.take = slowly  # type: ignore[method-assign]
    return main(arguments)


def broken_data_on_rank_1(use: str, arguments: Sequence[str]) -> int:
    """Rank 1 cannot read its fourth batch (`train`), or what it is to evaluate (`valid`)."""
    if is_rank(1):
        from bloomery.base.errors import DataError, Problem
        from bloomery.data import batch
        from bloomery.train import run

        reader: Any = batch if use == "train" else run
        read, calls = reader.read_batch, count(1)

        def fail(*args: Any, **kwargs: Any) -> Any:
            if next(calls) == (4 if use == "train" else 1):
                raise DataError(Problem(f"shard {use}.bin has gone"))
            return read(*args, **kwargs)

        reader.read_batch = fail
    return main(arguments)


class CollectiveCounter(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace in ("c10d", "_c10d_functional"):
            self.counts[func.__name__.split(".")[0]] += 1
        return func(*args, **(kwargs or {}))


def count_collectives(arguments: Sequence[str]) -> int:
    """Writes how many collectives the forward and backward passes of step 2 needed to counts.json beside the recipe."""
    from bloomery.parallel import runner

    train = runner.PlainExecution.train
    calls = Counter[str]()

    def counted(self: Any, *args: Any) -> Any:
        calls["steps"] += 1
        if calls["steps"] != 2:
            return train(self, *args)
        with CollectiveCounter() as counter:
            found = train(self, *args)
        if is_rank(0):
            Path(arguments[1]).with_name("counts.json").write_text(json.dumps(counter.counts))
        return found

    runner.PlainExecution.train = counted  # type: ignore[method-assign]
    return main(arguments)


def on_two_nodes(mount: str, disks: Sequence[str], arguments: Sequence[str]) -> int:
    """Each half of the ranks has a disk of its own at one path, `mount`: what the others write there it cannot see."""
    import ctypes

    system = ctypes.CDLL(None, use_errno=True)
    own_namespace, private, bind = 0x20000, 0x4000 | 0x40000, 0x1000
    half = int(os.environ["RANK"]) * 2 // int(os.environ["WORLD_SIZE"])
    assert system.unshare(own_namespace) == 0
    assert system.mount(b"none", b"/", None, private, None) == 0
    assert system.mount(disks[half].encode(), mount.encode(), None, bind, None) == 0
    return main(arguments)


def plant_spikes(steps: Sequence[int], factor: float, *, in_loss: bool = True) -> None:
    """Every gradient of these steps is multiplied in this process, and so are the losses."""
    from bloomery.parallel import runner

    forward_backward = runner.Runner.forward_backward

    def planted(self: Any, *args: Any, **kwargs: Any) -> Any:
        found = forward_backward(self, *args, **kwargs)
        if kwargs["step"] in steps:
            for tensor in self.gradients.tensors():
                tensor.mul_(factor)
            if in_loss:
                found.means.update({name: mean * factor for name, mean in found.means.items()})
        return found

    runner.Runner.forward_backward = planted  # type: ignore[method-assign]


def with_spikes(steps: Sequence[int], factor: float, arguments: Sequence[str]) -> int:
    plant_spikes(steps, factor)
    return main(arguments)


def flip_a_bit_on_rank_1(step: int, arguments: Sequence[str]) -> int:
    """One exponent bit of one of its gradients, at this step."""
    from bloomery.parallel.gradients import Gradients

    reduce, seen = Gradients.reduce_across_ranks, count(1)

    def planted(self: Gradients) -> None:
        if next(seen) == step and is_rank(1):
            self.tensors()[5].view(torch.int32).view(-1)[7] ^= 1 << 30
        reduce(self)

    Gradients.reduce_across_ranks = planted  # type: ignore[method-assign]
    return main(arguments)


def stops_after_step_5(rank: int, arguments: Sequence[str]) -> int:
    """This rank gets SIGSTOP, in what it may take long for; the ranks' patience is short. Rank 0, which keeps the notes
    of all, at once: what the other read last, its own note included, is then of the set-up."""
    from bloomery.base import signals

    def stop(run: Any, state: Any) -> None:
        with signals.PULSE.excuse(signals.FIRST_SECONDS):
            time.sleep(1.5 * rank)  # so that it notes that
            os.kill(os.getpid(), signal.SIGSTOP)

    signals.PATIENCE_SECONDS = 6.0
    if is_rank(rank):
        after_step(5, stop)
    return main(arguments)


def takes_its_time(arguments: Sequence[str]) -> int:
    """Forked from a server that imported everything long ago, this rank does something before its first agreement."""
    from bloomery.base import signals
    from bloomery.base.ranks import started_as
    from bloomery.parallel.ranks import joined

    signals.PULSE.since -= 2 * signals.FIRST_SECONDS
    started = started_as()
    assert started is not None
    with joined(started, torch.device("cpu")):
        time.sleep(1.5)
    return 0


def hangs_after_step_5() -> None:
    """Nothing moves any more; patience is short."""
    from bloomery.base import signals

    signals.PATIENCE_SECONDS = 6.0
    after_step(5, lambda run, state: threading.Event().wait())


def signal_during_a_hang(arguments: Sequence[str]) -> int:
    """Rank 1 stops for good; rank 0 gets SIGTERM when it has waited for a while, and notes when."""
    if is_rank(1):
        after_step(5, lambda run, state: os.kill(os.getpid(), signal.SIGSTOP))
        return main(arguments)

    def note_and_ask() -> None:
        Path(arguments[1]).with_name("signalled").write_text(str(time.time()))
        os.kill(os.getpid(), signal.SIGTERM)

    after_step(5, lambda run, state: threading.Timer(4.0, note_and_ask).start())
    return main(arguments)
