"""How the process of a command ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

PATCHED = """
import atexit, sys, threading
from bloomery.cli import main as cli
sys.argv = ["bloomery", *{arguments!r}]
atexit.register(lambda: print("tidied up"))
{before}
cli.command()
"""


def run(*arguments: str, before: str = "") -> tuple[int, str]:
    code = PATCHED.format(arguments=list(arguments), before=before)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    return done.returncode, done.stdout


def test_all_is_said_with_the_right_code_and_nothing_is_tidied_up() -> None:
    code, said = run("check", "quickstart")
    assert code == 0
    assert said.startswith("quickstart: ok")
    assert "tidied up" not in said
    assert run("check", "no-such-recipe")[0] == 2


def test_threads_and_processes_are_waited_for() -> None:
    slow = "threading.Thread(target=lambda: (threading.Event().wait(0.2), print('the thread is done'))).start()"
    code, said = run("--version", before=slow)
    assert code == 0
    assert said.endswith("the thread is done\ntidied up\n")
    child = (
        "import multiprocessing as m; m.get_context('fork').Process(target=threading.Event().wait, args=(1,)).start()"
    )
    code, said = run("--version", before=child)
    assert code == 0
    assert said.endswith("tidied up\n")


def test_a_process_that_a_library_aborts_says_where() -> None:
    code = "import os; from bloomery.base import signals; signals.listen(); os.abort()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == -signal.SIGABRT
    assert "Fatal Python error: Aborted" in done.stderr
    assert 'File "<string>", line 1 in <module>' in done.stderr


def test_a_signal_that_a_library_swallows_is_answered_and_the_recipe_is_not_blamed() -> None:
    swallow = """
import contextlib, os, signal
from bloomery.base import errors
from bloomery.cli import recipe
def run(args):
    with contextlib.suppress(KeyboardInterrupt):
        os.kill(os.getpid(), signal.SIGINT)
    raise errors.RecipeError(errors.Problem("it cannot be read"))
recipe.run_check = run
"""
    assert run("check", "quickstart", before=swallow) == (130, "")


@pytest.mark.parametrize(("command", "right"), [(["check", "no-such-recipe"], 2), (["no-such-command"], 2)])
def test_an_error_that_nobody_can_read_keeps_its_code(command: list[str], right: int) -> None:
    reader, gone = os.pipe()
    os.close(reader)
    with open(gone, "wb") as pipe, open("/dev/full", "wb") as full:
        for stream in (pipe, full):
            assert subprocess.run([sys.executable, "-m", "bloomery", *command], stderr=stream).returncode == right
