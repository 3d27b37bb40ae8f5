"""Where this process is: the stacks of its threads, and the call its main thread is in. From any thread, also while the
main one waits in a collective that never ends."""

from __future__ import annotations

import sys
import threading
import traceback
from pathlib import Path

_PACKAGE = str(Path(__file__).parents[1])
_NOT_SAID = (__file__, f"{_PACKAGE}/parallel/ranks.py")
"""Where every rank is that waits for others."""
_WRAPPERS = ("wrapper", "wrapped", "_fn")


def stacks() -> str:
    """Of all threads, the main one first, the innermost call last."""
    main, names = threading.main_thread().ident, {thread.ident: thread.name for thread in threading.enumerate()}
    found = sorted(sys._current_frames().items(), key=lambda item: item[0] != main)
    return "".join(
        f"thread {names.get(ident, ident)}:\n{''.join(traceback.format_stack(frame))}" for ident, frame in found
    )


def call() -> str:
    """`all_reduce, called by reduce_across_ranks (gradients.py:88)`: our innermost call of the main thread, and what it
    called of others."""
    frame, others = sys._current_frames().get(threading.main_thread().ident or 0), list[str]()
    while frame is not None and (
        frame.f_code.co_filename in _NOT_SAID or not frame.f_code.co_filename.startswith(_PACKAGE)
    ):
        others += [frame.f_code.co_name] if frame.f_code.co_name not in _WRAPPERS else []
        frame = frame.f_back
    if frame is None:
        return others[0] if others else "nothing"
    own = f"{frame.f_code.co_name} ({Path(frame.f_code.co_filename).name}:{frame.f_lineno})"
    return f"{others[-1]}, called by {own}" if others else own
