"""Forked processes that answer calls one after the other, and end with the process that started them."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import traceback
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection, wait
from types import TracebackType
from typing import Any, Self

from bloomery.base import signals
from bloomery.base.errors import BloomeryError, DataError, Problem

Report = Callable[[Any], None]
Task = Callable[[Any, Report], Any]
"""(argument, report) -> result; what is reported on the way arrives before the result."""
free_cpus: set[int] = set()
"""In a child that is bound to one processor: all that the parent may use. Empty in the parent."""


class Child:
    """One forked process that runs `task`. It sees everything the parent had loaded."""

    def __init__(
        self,
        task: Task,
        *,
        cpu: int | None = None,
        strangers: Sequence[Connection] = (),
        first: Callable[[], object] | None = None,
    ) -> None:
        """`strangers`: the parent's ends of other children, which this one must not keep open. `first`: what the child
        does before it is asked; an error in it is left to the task."""
        context = multiprocessing.get_context("fork")
        try:
            self.connection, theirs = context.Pipe()
            self.process = context.Process(
                target=_serve, args=(task, theirs, [self.connection, *strangers], cpu, os.getpid(), first), daemon=True
            )
            self.process.start()
        except OSError as error:
            from bloomery.base.storage import reason  # only here: this module is among the first that are imported

            rule = "each needs a process, open files and memory"
            remedy = "use fewer --workers, or raise the limits (`ulimit -n`, `ulimit -u`)"
            raise DataError(Problem(f"cannot start a worker process: {reason(error)}", rule, remedy)) from error
        theirs.close()
        self.argument: Any = None

    def ask(self, argument: Any) -> None:
        self.argument = argument
        try:
            self.connection.send(argument)
        except OSError as error:
            raise self._ended() from error

    def answer(self, *, patience_seconds: float | None = None) -> Any:
        """The result; an error of the child is raised here, and TimeoutError if it says nothing for so long."""
        if not self.connection.poll(patience_seconds):
            raise TimeoutError(f"it has not answered for {patience_seconds} seconds")
        return self.receive()[1]

    def receive(self) -> tuple[str, Any]:
        """('report' or 'result', content)."""
        try:
            kind, content = self.connection.recv()
        except (EOFError, OSError) as error:
            raise self._ended() from error
        if kind == "problem":
            raise content[0](content[1])
        if kind == "bug":
            raise RuntimeError(f"in a worker process:\n{content}")
        return kind, content

    def _ended(self) -> DataError:
        self.process.join(1)
        code = self.process.exitcode or 0
        how = signal.Signals(-code).name if code < 0 else f"exit code {code}"
        rule = "nothing was written for what it was working on"
        remedy = "run the command again; with fewer --workers if memory was short (see `dmesg`)"
        return DataError(Problem(f"a worker process ended unexpectedly ({how})", rule, remedy))

    def leave(self) -> None:
        """End it without waiting for that: for a child that writes nothing."""
        self.connection.close()
        self.process.kill()

    def close(self) -> None:
        self.leave()
        self.process.join()
        self.process.close()


class Pool:
    """Several children with one task. `run` gives each the next argument as soon as it is free."""

    def __init__(self, task: Task, *, workers: int, strangers: Sequence[Connection] = ()) -> None:
        cpus = sorted(os.sched_getaffinity(0))
        self._children: list[Child] = []
        try:
            for number in range(workers):
                others = [*strangers, *(child.connection for child in self._children)]
                self._children.append(Child(task, cpu=cpus[number % len(cpus)], strangers=others))
        except BaseException:
            self.close()
            raise

    def __len__(self) -> int:
        return len(self._children)

    def ask_each(self, arguments: Sequence[Any], *, patience_seconds: float) -> list[Any]:
        """What they answer at the same time, to an argument each. After an error the pool is of no use."""
        for child, argument in zip(self._children, arguments, strict=True):
            child.ask(argument)
        return [child.answer(patience_seconds=patience_seconds) for child in self._children]

    def run(self, arguments: Sequence[Any], report: Report) -> Iterator[tuple[Any, Any]]:
        """(argument, result), in the order in which they are done."""
        waiting = list(reversed(arguments))
        busy: dict[Any, Child] = {}
        for child in self._children[: len(waiting)]:
            child.ask(waiting.pop())
            busy[child.connection] = child
        while busy:
            for connection in wait(list(busy)):
                child = busy[connection]
                kind, content = child.receive()
                if kind == "report":
                    report(content)
                    continue
                argument = child.argument
                if waiting:
                    child.ask(waiting.pop())
                else:
                    del busy[connection]
                yield argument, content

    def close(self) -> None:
        for child in self._children:
            child.process.kill()
        for child in self._children:
            child.close()
        self._children = []

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _serve(
    task: Task,
    connection: Connection,
    not_mine: Sequence[Connection],
    cpu: int | None,
    parent: int,
    first: Callable[[], object] | None,
) -> None:
    signals.ignore()  # they may reach the whole group; the parent ends its children
    signals.end_with_parent(signal.SIGKILL)
    if os.getppid() != parent:
        return
    for stranger in not_mine:
        stranger.close()
    if cpu is not None:
        free_cpus.update(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {cpu})  # fastokens starts a thread for every processor it may use
        os.environ["TOKENIZERS_PARALLELISM"] = "false"
    if first is not None:
        with contextlib.suppress(Exception):
            first()
    try:
        while True:
            argument = connection.recv()
            try:
                connection.send(("result", task(argument, lambda content: connection.send(("report", content)))))
            except BloomeryError as error:
                connection.send(("problem", (type(error), error.problems)))
            except Exception:
                connection.send(("bug", traceback.format_exc()))
    except (EOFError, BrokenPipeError, ConnectionResetError):
        return  # the parent is gone or done
