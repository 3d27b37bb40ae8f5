"""Threads that fetch and unpack; processes that encode, forked because a vocabulary is too large to be sent."""

import contextlib
import multiprocessing
import os
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from threading import Event
from typing import Any

from bloomery.base import signals
from bloomery.base.errors import DataError, Problem
from bloomery.base.storage import reason

_work: Callable[..., Any]
"""In a worker: what it does."""


@contextlib.contextmanager
def thread_pool(threads: int) -> Iterator[tuple[ThreadPoolExecutor, Event]]:
    """Any error inside sets the event, for work in progress to end early; what waits does not begin."""
    with ThreadPoolExecutor(threads) as executor:
        stop = Event()
        try:
            yield executor, stop
        except BaseException:
            stop.set()
            executor.shutdown(cancel_futures=True)
            raise


@contextlib.contextmanager
def worker_pool(work: Callable[..., Any], workers: int) -> Iterator[Callable[..., Future[Any]]]:
    """Yields `submit(*arguments)`, which calls `work` in a process. DataError if a process cannot start or dies; any
    error inside ends all processes at once."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # here too: a fork does not copy threads
    others = set(multiprocessing.active_children())
    context = multiprocessing.get_context("fork")
    executor = ProcessPoolExecutor(workers, context, initializer=_start, initargs=(work, os.getpid()))
    try:
        try:
            executor.submit(os.getpid)  # forks all of them
        except OSError as error:
            rule, remedy = "each needs a process, open files and memory", "use fewer --workers, or raise the limits"
            what = f"cannot start a worker process: {reason(error)}"
            raise DataError(Problem(what, rule, f"{remedy} (`ulimit -n`, `ulimit -u`)")) from error
        yield lambda *arguments: executor.submit(_call, *arguments)
    except BaseException as error:
        for process in set(multiprocessing.active_children()) - others:
            process.kill()
        if not isinstance(error, BrokenProcessPool):
            raise
        rule = "nothing was written for what it was working on"
        remedy = "run the command again; with fewer --workers if memory was short (see `dmesg`)"
        raise DataError(Problem("a worker process was killed", rule, remedy)) from error
    finally:
        executor.shutdown(cancel_futures=True)


def _start(work: Callable[..., Any], parent: int) -> None:
    global _work
    signals.ignore()  # they may reach the whole group; the parent ends its workers
    signals.end_with_parent(signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)
    os.environ["RAYON_NUM_THREADS"] = "1"  # fastokens would start a thread for every processor
    _work = work


def _call(*arguments: Any) -> Any:
    return _work(*arguments)
