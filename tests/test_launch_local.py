"""The last resorts of the launcher: ranks that do not answer are ended, and none outlives its launcher for long."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from multiprocessing import forkserver
from pathlib import Path

import pytest

import stubborn_ranks
from bloomery.base import exit_codes, signals
from bloomery.launch import local
from bloomery.launch.local import run_local_ranks


def wait_for(folder: Path, *names: str) -> None:
    deadline = time.monotonic() + 60
    while not all((folder / name).exists() for name in names):
        assert time.monotonic() < deadline, f"{names} did not come"
        time.sleep(0.01)


def fork_server() -> int:
    return int(forkserver._forkserver._forkserver_pid)  # type: ignore[attr-defined]


@pytest.mark.parametrize("stopped", [False, True], ids=["", "fork server stopped"])
def test_ranks_that_do_not_answer_leave_by_themselves(tmp_path: Path, stopped: bool) -> None:
    """They note the signal and continue: each rank's guard ends it, and a stopped fork server wakes to report it."""

    def ask() -> None:
        wait_for(tmp_path, "here-0", "here-1")
        if stopped:
            os.kill(fork_server(), signal.SIGSTOP)
        os.kill(os.getpid(), signal.SIGTERM)

    asking = threading.Thread(target=ask)
    asking.start()
    code = run_local_ranks(2, stubborn_ranks.wait_for_ever, [str(tmp_path)])
    asking.join()
    assert code == exit_codes.INTERRUPTED
    assert not signals.is_stopped(fork_server()), "the launcher would wait for it at its end"
    assert (tmp_path / "asked-0").exists()
    assert (tmp_path / "asked-1").exists()


def test_a_rank_that_does_not_notice_the_loss_of_another_is_ended(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local, "LOST_SECONDS", 0.1)
    code = run_local_ranks(2, stubborn_ranks.rank_1_dies, [str(tmp_path)])
    assert code == exit_codes.LOST_RANK
    assert "rank 1 was killed by SIGKILL, so the others stopped" in capfd.readouterr().err
    assert run_local_ranks(1, stubborn_ranks.is_interrupted, [str(tmp_path)]) == exit_codes.INTERRUPTED
    assert (tmp_path / "said").read_text() == "bloomery: interrupted by SIGINT\n"


def test_ranks_that_do_not_answer_end_soon_after_their_launcher(tmp_path: Path) -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    words = [sys.executable, stubborn_ranks.__file__, str(tmp_path)]
    launcher = subprocess.Popen(words, env=environment, stdout=subprocess.PIPE)
    wait_for(tmp_path, "here-0", "here-1")
    launcher.kill()
    launcher.communicate(timeout=60)  # all of them hold its standard output: it ends with the last one
    assert (tmp_path / "asked-0").exists()
    assert (tmp_path / "asked-1").exists()
