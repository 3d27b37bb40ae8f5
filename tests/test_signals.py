"""Every stop signal in every phase: one documented exit code, one line, nobody left behind; and hangs that are said."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest

import rank_commands
import signal_points
from bloomery.base import exit_codes, signals
from bloomery.base.signals import STOPS, is_stopped
from bloomery.checkpoint import folder as folders
from bloomery.launch.local import run_local_ranks
from conftest import Workshop, start_training, wait_for_steps
from forked import Forked

TOKENIZER = ["tokenizer", "train", "texts", "--vocab-size", "300", "--output", "t"]
NAMES = [number.name for number in STOPS]


def children(process: int) -> list[int]:
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            fields = (path / "stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[1]) == process and fields[0] != "Z":
            found += [int(path.name), *children(int(path.name))]
    return found


def all_gone(processes: list[int], seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while any(os.path.exists(f"/proc/{process}/exe") for process in processes) and time.monotonic() < deadline:
        time.sleep(0.05)
    return not any(os.path.exists(f"/proc/{process}/exe") for process in processes)


def fork_server_of(process: subprocess.Popen[str]) -> int:
    def is_server(child: int) -> bool:
        return b"forkserver" in Path(f"/proc/{child}/cmdline").read_bytes()

    return next(child for child in children(process.pid) if is_server(child) and children(child))


def run_at(point: str, name: str, words: list[str], times: int = 1) -> tuple[int, str]:
    """(exit code, standard error) of `bloomery ...` that sends itself a signal when it first comes to this point. For a
    point within `train` it is forked from a process that has imported torch."""
    if words[0] == "train" and not point.startswith("import:"):
        process = Forked(words, Path("stderr.txt"), partial(signal_points.plant, point, name, times))
        return process.wait(120), process.communicate()[1]
    command = [sys.executable, signal_points.__file__, point, name, str(times), *words]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    return done.returncode, done.stderr


TRAINING = [
    ("import", "bloomery.config.load"),
    ("import", "torch"),
    ("call", "bloomery.train.setup:find_resume_point"),
    ("stuck", "bloomery.train.setup:find_resume_point"),
]


@pytest.mark.parametrize(("kind", "place"), TRAINING, ids=lambda value: value)
def test_a_signal_before_training_is_one_line_and_130(workshop: Workshop, kind: str, place: str) -> None:
    name = NAMES[TRAINING.index((kind, place)) % len(NAMES)]
    run = workshop.folder / "run"
    done = run_at(f"{kind}:{place}", name, ["train", str(workshop.recipe), "--run-dir", str(run), "--device", "cpu"], 2)
    assert done == (exit_codes.INTERRUPTED, f"bloomery: interrupted by {name}\n")
    assert not (run / "checkpoints" / "latest").exists()


@pytest.mark.parametrize(
    "place",
    ["bloomery.train.loop:train_step", "bloomery.monitor.journal:Journal.close"],
)
def test_a_signal_from_the_first_step_on_is_a_save_and_0(workshop: Workshop, place: str) -> None:
    run = workshop.folder / "run"
    words = ["train", str(workshop.recipe), "train.for=3 steps", "--run-dir", str(run), "--device", "cpu", "--quiet"]
    code, err = run_at(f"call:{place}", "SIGHUP", words, 2)
    assert code == exit_codes.OK, err
    assert "Traceback" not in err
    assert (run / "checkpoints" / "latest").is_file()
    assert workshop.events(run, "stop")


@pytest.mark.parametrize(
    ("place", "words"),
    [
        ("stuck:bloomery.prepare.train_tokenizer:train_tokenizer", TOKENIZER),
        ("call:bloomery.prepare.extract:make_chunk", ["extract", "texts", "--output", "chunks", "--chunks", "1"]),
        ("import:bloomery.monitor.report", ["report", "run"]),
    ],
)
def test_other_commands_answer_alike(workshop: Workshop, place: str, words: list[str]) -> None:
    (workshop.folder / "texts").mkdir()
    (workshop.folder / "texts" / "a.jsonl").write_text('{"text": "some words"}\n' * 50)
    assert run_at(place, "SIGTERM", words) == (exit_codes.INTERRUPTED, "bloomery: interrupted by SIGTERM\n")


def test_who_takes_signals_over_learns_of_one_that_was_swallowed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(signals, "asked", "SIGTERM")
    with pytest.raises(signals.Interrupted, match="SIGTERM"), signals.handled(lambda _: None):
        pass


def test_children_of_a_launcher_that_is_stopped_early_end_with_it(workshop: Workshop) -> None:
    process = start_training(workshop, workshop.folder / "run", "parallel.tp=2")
    deadline = time.monotonic() + 60
    while not (family := children(process.pid)):  # the fork server, which imports for seconds
        assert time.monotonic() < deadline
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (exit_codes.INTERRUPTED, "bloomery: interrupted by SIGTERM\n")
    assert all_gone(family, 5)


@pytest.mark.parametrize(("name", "code"), [("SIGHUP", exit_codes.OK), ("SIGKILL", exit_codes.LOST_RANK)])
def test_a_signal_to_the_fork_server_stops_the_ranks_with_a_save(workshop: Workshop, name: str, code: int) -> None:
    run = workshop.folder / "run"
    process = start_training(workshop, run, "parallel.tp=2")
    wait_for_steps(run, 2, process)
    family = children(process.pid)
    os.kill(fork_server_of(process), signal.Signals[name])
    _, err = process.communicate(timeout=60)
    assert process.returncode == code, err
    assert ("the process that started the ranks has exited" in err) == (name == "SIGKILL")
    (stop,) = workshop.events(run, "stop")
    assert folders.read_latest(run / "checkpoints") == folders.step_name(stop["step"])
    assert all_gone(family, 5)


def run_ranks(workshop: Workshop, command: object, *overrides: str) -> tuple[int, str]:
    words = ["train", str(workshop.recipe), "parallel.tp=2", "train.for=100000 steps", "lr.decay=null", *overrides]
    words += ["--run-dir", str(workshop.folder / "run"), "--device", "cpu", "--quiet"]
    log = workshop.folder / "said.txt"
    logged = partial(rank_commands.logged, command, str(log))  # type: ignore[arg-type]
    return run_local_ranks(2, logged, words), log.read_text()


def test_the_age_of_the_fork_server_is_no_hang(workshop: Workshop) -> None:
    assert run_ranks(workshop, rank_commands.takes_its_time) == (0, "")


@pytest.mark.parametrize("stopped", [0, 1])
def test_a_rank_that_stops_is_named_by_the_one_that_waits(
    workshop: Workshop, stopped: int, capfd: pytest.CaptureFixture[str]
) -> None:
    code, said = run_ranks(workshop, partial(rank_commands.stops_after_step_5, stopped))
    assert code == exit_codes.LOST_RANK
    assert said.count("has waited") == 1, said
    assert f"bloomery: rank {1 - stopped} has waited " in said
    assert f"s for rank {stopped}, which last reported step" in said
    assert "Traceback" not in said
    assert f"rank {stopped} did not answer and was killed" in capfd.readouterr().err
    run = workshop.folder / "run"
    (hang,) = workshop.events(run, "hang")
    assert f"rank {1 - stopped} has waited" in hang["text"]
    assert f"rank {stopped} does not answer" in hang["text"]
    assert "reason (stop.py:" in hang["text"], "who waits says in which call"
    assert hang["step"] >= 5  # where it hangs, not where the job began
    stacks = (run / "logs" / "stacks.txt").read_text()
    assert all(f"in {name}\n" in stacks for name in ("train", "reason"))
    assert [f"rank {rank}:\n" in stacks for rank in range(2)] == [rank != stopped for rank in range(2)]


def test_stacks_on_demand_and_a_single_rank_that_hangs(workshop: Workshop) -> None:
    run = workshop.folder / "run"
    process = start_training(workshop, run, "parallel.tp=2")
    wait_for_steps(run, 2, process)
    (run / "control" / "stacks-1").touch()
    while not (run / "logs" / "stacks.txt").exists():
        assert process.poll() is None
        time.sleep(0.1)
    os.kill(process.pid, signal.SIGTERM)
    process.communicate(timeout=60)
    assert process.returncode == 0
    assert "\nrank 1:\nthread MainThread" in (run / "logs" / "stacks.txt").read_text()
    assert "\nrank 0:\n" not in (run / "logs" / "stacks.txt").read_text()
    alone = Forked(["train", str(workshop.recipe), "--run-dir", "alone", "--device", "cpu"], workshop.folder / "err",
                   rank_commands.hangs_after_step_5)  # fmt: skip
    assert alone.wait(90) == exit_codes.LOST_RANK
    (hang,) = workshop.events(workshop.folder / "alone", "hang")
    assert re.search(r"nothing has happened for \d+ s, since step \d: in \w+, called by train", hang["text"])


def test_a_signal_during_a_hang_is_answered_within_seconds(workshop: Workshop) -> None:
    code, said = run_ranks(workshop, rank_commands.signal_during_a_hang)
    assert code == exit_codes.LOST_RANK
    assert "SIGTERM ends this run without a save: rank 0 has waited" in said
    answered = time.time() - float((workshop.folder / "signalled").read_text())
    assert answered < 15  # 3 seconds, and what a loaded machine adds; ten minutes without a guard


def test_a_trainer_that_is_stopped_keeps_nobody_out_and_writes_nothing_when_it_comes_back(workshop: Workshop) -> None:
    run = workshop.folder / "run"
    every = "checkpoint={phases: [{every: 2 steps}]}"
    process = start_training(workshop, run, every)
    wait_for_steps(run, 3, process)
    workshop.train("train.for=1000000 steps", "lr.decay=null", code=5)  # it is alive: no
    os.kill(process.pid, signal.SIGSTOP)
    deadline = time.monotonic() + 60
    while not is_stopped(process.pid):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    workshop.train("train.for=1000000 steps", "lr.decay=null", every, "train.exit_after=3 steps")
    (taken,) = workshop.events(run, "taken_over")
    assert f"process {process.pid} on " in taken["text"]
    files = [run / name for name in ("metrics.jsonl", "events.jsonl", "logs/main_log.txt")]
    before = [path.read_bytes() for path in files]
    os.kill(process.pid, signal.SIGCONT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == exit_codes.STORAGE
    assert "has taken over" in err
    assert [path.read_bytes() for path in files] == before
