"""`bloomery ...` that gets a signal at a stated point: `python signal_points.py POINT SIGNAL TIMES bloomery's words`.

POINT is `import:MODULE`, when that module begins to load, `call:MODULE:FUNCTION`, when it is called for the first time,
or `stuck:...`, the same in a call that does not return to Python.
"""

from __future__ import annotations

import ctypes
import importlib.abc
import importlib.util
import os
import signal
import sys
import threading
from collections.abc import Callable
from typing import Any


def get_signal(name: str, times: int) -> None:
    for _ in range(times):
        os.kill(os.getpid(), signal.Signals[name])


def be_stuck(name: str, times: int) -> None:
    """In C: no Python handler runs before it returns, in ten minutes."""
    threading.Timer(0.2, get_signal, (name, times)).start()
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.Signals[name]])  # other threads get it, so this is not woken
    ctypes.CDLL(None).poll(None, 0, 600_000)


class Finder(importlib.abc.MetaPathFinder):
    """Calls `act` when a module is asked for, and changes it by `change` when it has loaded."""

    def __init__(self, module: str, act: Callable[[], None] | None, change: Callable[[Any], None] | None) -> None:
        self.module, self.act, self.change = module, act, change

    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        if name != self.module:
            return None
        sys.meta_path.remove(self)
        if self.act is not None:
            self.act()
            return None
        spec = importlib.util.find_spec(name)
        assert spec is not None
        assert spec.loader is not None
        load = spec.loader.exec_module

        def exec_module(module: Any) -> None:
            load(module)
            assert self.change is not None
            self.change(module)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def plant(point: str, name: str, times: int) -> None:
    kind, module, *rest = point.split(":")
    if kind == "import":
        sys.meta_path.insert(0, Finder(module, lambda: get_signal(name, times), None))
        return
    act = be_stuck if kind == "stuck" else get_signal

    def change(loaded: Any) -> None:
        *owners, function = rest[0].split(".")
        owner = getattr(loaded, owners[0]) if owners else loaded
        original, seen = getattr(owner, function), []

        def planted(*args: Any, **kwargs: Any) -> Any:
            if not seen:
                seen.append(True)
                act(name, times)
            return original(*args, **kwargs)

        setattr(owner, function, planted)

    if module in sys.modules:
        change(sys.modules[module])
    else:
        sys.meta_path.insert(0, Finder(module, None, change))


if __name__ == "__main__":
    point, name, times, *words = sys.argv[1:]
    sys.argv = ["bloomery", *words]
    plant(point, name, int(times))
    from bloomery.__main__ import command

    command()
