"""`bloomery watch`: what a run is doing, and each thing that is wrong told once, to a real mail server and webhook."""

from __future__ import annotations

import asyncio
import errno
import http.server
import json
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from bloomery.cli.main import main
from bloomery.config.recipe import AlertsSection
from bloomery.launch.watch import new_alerts, remember_job, status_of
from bloomery.monitor.record import to_json
from bloomery.monitor.sinks import EventFile
from conftest import SMALL, Workshop, start_training, wait_for_steps
from monitor_samples import fill, step_record
from object_stores import free_port


def run_folder(folder: Path, *, ago: float = 0.0, speeds: tuple[float, ...] = (1000.0,) * 30, **alerts: Any) -> Path:
    """A run whose newest record is `ago` seconds old, one record each second."""
    now = time.time() - ago
    records = [
        step_record(
            step=i + 1,
            train_steps=100,
            time=now - len(speeds) + i + 1,
            tokens_per_second=speed,
            losses={"lm loss": 5.0 - i / 10},
        )
        for i, speed in enumerate(speeds)
    ]
    for name in ("logs", "launch"):
        (folder / name).mkdir(parents=True, exist_ok=True)
    (folder / "metrics.jsonl").write_text("".join(f"{to_json(record)}\n" for record in records))
    (folder / "recipe.yaml").write_text(yaml.safe_dump({**SMALL, "monitor": {"alerts": alerts}}))
    event(folder, "start", 0, at=now - len(speeds))
    return folder


def event(folder: Path, kind: str, step: int, *, at: float | None = None, **facts: Any) -> None:
    file = EventFile(folder / "events.jsonl", job=1)
    file.event({"kind": kind, "step": step, **facts})
    file.close()
    if at is not None:
        lines = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
        lines[-1]["time"] = at
        (folder / "events.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))


def alerts_of(folder: Path, **limits: Any) -> dict[str, str]:
    return status_of(folder, "small", AlertsSection(disk_below=0.0, **limits)).alerts


def test_a_live_run_is_shown_without_alerts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = run_folder(tmp_path / "run", disk_below=0.0)
    event(run, "save", 20)
    remember_job(run, on="local", process=os.getpid())
    assert main(["watch", str(run), "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert (facts["step"], facts["train_steps"], facts["alerts"], facts["job"]["state"]) == (30, 100, {}, "running")
    assert main(["watch", str(run)]) == 0
    said = capsys.readouterr().out
    assert "step       30 of 100" in said
    assert "loss       2.1000  █" in said
    assert "last save  step 20 at 20" in said


def test_what_is_wrong_is_found_and_only_that(tmp_path: Path) -> None:
    assert alerts_of(run_folder(tmp_path / "fine")) == {}
    assert list(alerts_of(run_folder(tmp_path / "silent", ago=1000.0))) == ["silent"]
    assert alerts_of(run_folder(tmp_path / "patient", ago=100.0)) == {}
    slow = (1000.0,) * 25 + (300.0,) * 5
    assert alerts_of(run_folder(tmp_path / "slow", speeds=slow))["slow"] == "small is slow: 300 tokens/s instead of 1k"
    spiked = run_folder(tmp_path / "spiked")
    event(spiked, "spike", 31)
    assert list(alerts_of(spiked)) == ["spike"]
    event(spiked, "spike_over", 40)
    assert alerts_of(spiked) == {}
    full = status_of(run_folder(tmp_path / "full"), "small", AlertsSection(disk_below=0.999999)).alerts
    assert "disk" in full
    gone = run_folder(tmp_path / "gone")
    remember_job(gone, on="local", process=2**22 + 1)
    assert alerts_of(gone) == {"gone": "small is not RUNNING or SCHEDULED!"}
    event(gone, "stop", 100, reason="finished")
    assert alerts_of(gone) == {}


def test_json_is_json_whatever_the_loss_is_and_a_command_prints(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    run = run_folder(tmp_path / "run", ago=2000.0, command="cat", disk_below=0.0)
    with open(run / "metrics.jsonl", "a") as file:
        file.write(f"{to_json(step_record(step=31, losses={'lm loss': float('nan')}))}\n")
    assert main(["watch", str(run), "--json", "--pulse"]) == 0
    said = capfd.readouterr()
    assert json.loads(said.out, parse_constant=pytest.fail)["losses"][-1] == "NaN"
    assert "it hangs" in said.err


def test_each_alert_is_sent_once_for_as_long_as_it_holds(tmp_path: Path) -> None:
    sent = [new_alerts(tmp_path, found) for found in (["a"], ["a"], ["a", "b"], [], ["a"])]
    assert sent == [["a"], [], ["b"], [], ["a"]]


class Receiver:
    """A mail server and a webhook on this machine."""

    def __init__(self) -> None:
        self.mails: list[str] = []
        self.posts: list[Any] = []
        self._loop = asyncio.new_event_loop()
        self._smtp = self._loop.run_until_complete(asyncio.start_server(self._mail, "127.0.0.1", 0))
        self.smtp_port = self._smtp.sockets[0].getsockname()[1]
        threading.Thread(target=self._loop.run_forever, daemon=True).start()
        posts = self.posts

        class Webhook(http.server.BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                posts.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
                self.send_response(200)
                self.end_headers()

            def log_message(self, *_: Any) -> None: ...

        self._http = http.server.HTTPServer(("127.0.0.1", 0), Webhook)
        self.url = f"http://127.0.0.1:{self._http.server_port}/hook"
        threading.Thread(target=self._http.serve_forever, daemon=True).start()

    async def _mail(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"220 here\r\n")
        while line := await reader.readline():
            if line.upper().startswith(b"DATA"):
                writer.write(b"354 go on\r\n")
                self.mails.append((await reader.readuntil(b"\r\n.\r\n")).decode())
            writer.write(b"221 bye\r\n" if line.upper().startswith(b"QUIT") else b"250 ok\r\n")
            await writer.drain()
            if line.upper().startswith(b"QUIT"):
                break
        writer.close()

    def close(self) -> None:
        self._http.shutdown()
        self._loop.call_soon_threadsafe(self._loop.stop)


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    receiver = Receiver()
    yield receiver
    receiver.close()


def test_a_pulse_writes_its_line_and_alerts_people_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, receiver: Receiver, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HOOK", receiver.url)
    told = tmp_path / "told.txt"
    run = run_folder(
        tmp_path / "run", email=["oncall@example.org"], smtp=f"127.0.0.1:{receiver.smtp_port}", webhook_variable="HOOK",
        command=f"cat >> {told}", disk_below=0.0,
    )  # fmt: skip
    remember_job(run, on="local", process=2**22 + 1)
    for _ in range(2):
        assert main(["watch", str(run), "--pulse"]) == 0
    alert = "small is not RUNNING or SCHEDULED!"
    lines = (run / "logs" / "main_log.txt").read_text().splitlines()
    assert [line.partition("] ")[2] for line in lines] == [f"***ALERT: {alert}***"] * 2
    assert [alert in mail and "oncall@example.org" in mail for mail in receiver.mails] == [True]
    assert receiver.posts == [{"text": alert}]
    assert told.read_text() == alert
    assert receiver.url not in capsys.readouterr().err


def pulses(run: Path, count: int = 3) -> None:
    for _ in range(count):
        assert main(["watch", str(run), "--pulse"]) == 0


@pytest.fixture
def told(receiver: Receiver, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Fields of `monitor.alerts` that lead to the receiver."""
    monkeypatch.setenv("HOOK", receiver.url)
    return {"email": ["oncall@example.org"], "smtp": f"127.0.0.1:{receiver.smtp_port}", "webhook_variable": "HOOK"}


def one_alert(receiver: Receiver) -> str:
    """Its text, which came by both ways."""
    ((mail,), (post,)) = receiver.mails, receiver.posts
    assert post["text"].splitlines()[0][:60] in mail.replace("=\r\n", "").replace("\r\n", "\n")
    return str(post["text"])


def test_a_training_that_is_stopped_is_one_alert(workshop: Workshop, receiver: Receiver, told: dict[str, Any]) -> None:
    """SIGSTOP, while whoever started it says that it is running."""
    run, alerts = workshop.folder / "run", {**told, "silent_after": "3s", "disk_below": 0.0, "slow_below": 0.0}
    process = start_training(workshop, run, f"monitor.alerts={json.dumps(alerts)}")
    wait_for_steps(run, 20, process)
    (run / "launch").mkdir()
    remember_job(run, on="local", process=process.pid)
    os.kill(process.pid, signal.SIGSTOP)
    pulses(run)
    assert receiver.posts == [], "it may only be slow"
    time.sleep(3.5)
    pulses(run)
    assert "small has said nothing for" in one_alert(receiver)
    os.kill(process.pid, signal.SIGCONT)
    os.kill(process.pid, signal.SIGTERM)
    assert process.wait(60) == 0
    process.communicate()
    pulses(run)
    assert [post["text"] for post in receiver.posts[1:]] == ["small is not RUNNING or SCHEDULED!"]


def test_a_hang_that_the_ranks_have_explained_is_told_in_their_words(
    tmp_path: Path, receiver: Receiver, told: dict[str, Any]
) -> None:
    """Once, also if the next job runs already."""
    run = run_folder(tmp_path / "run", disk_below=0.0, **told)
    remember_job(run, on="local", process=os.getpid())
    pulses(run, 1)
    event(run, "hang", 30, text="rank 0 has waited 61 s for rank 1, which last reported step 30")
    event(run, "start", 20)
    pulses(run)
    assert one_alert(receiver) == "small hangs: rank 0 has waited 61 s for rank 1, which last reported step 30"
    assert alerts_of(run) == {}
    event(run, "hang", 31, text="rank 0 has waited 61 s for rank 1, which last reported step 31")
    remember_job(run, on="local", process=2**22 + 1)
    assert alerts_of(run)["gone"].startswith("small is not RUNNING or SCHEDULED! rank 0 has waited 61 s")
    event(run, "start", 20)
    pulses(run, 1)
    assert alerts_of(run)["gone"] == "small is not RUNNING or SCHEDULED!"


def test_a_spike_between_two_pulses_is_one_alert(tmp_path: Path, receiver: Receiver, told: dict[str, Any]) -> None:
    run = run_folder(tmp_path / "run", disk_below=0.0, **told)
    pulses(run)
    event(run, "spike", 31)
    event(run, "spike", 32)
    event(run, "spike_over", 42)
    pulses(run)
    assert one_alert(receiver) == "the loss or gradient norm of small spiked at step 32"


@pytest.mark.parametrize("ends", ["rewind", "start"])
def test_a_spike_that_the_run_went_back_from_is_over(tmp_path: Path, ends: str) -> None:
    run = run_folder(tmp_path / "run")
    event(run, "spike", 31)
    event(run, ends, 20)
    assert alerts_of(run) == {}


def test_a_full_disk_is_one_alert(small_disk: Path, receiver: Receiver, told: dict[str, Any]) -> None:
    """Really full: nothing can be written any more, not even that the alert was sent."""
    run = run_folder(small_disk / "run", **told)
    pulses(run, 1)
    fill(small_disk)
    with pytest.raises(OSError, match="No space"):
        (run / "more").write_bytes(bytes(4096))
    pulses(run)
    assert one_alert(receiver).startswith("only 0 B are free at")


def test_a_job_that_has_just_begun_does_not_hang(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its ranks load what the job before it has left hours ago. A stand-in for Slurm's command."""
    run = run_folder(tmp_path / "run", ago=20_000.0, disk_below=0.0)
    scontrol = tmp_path / "scontrol"
    remember_job(run, on="slurm", job_id="7")
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)

    def began(seconds_ago: float) -> None:
        clock = time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(time.time() - seconds_ago))
        facts = f"JobId=7 JobState=RUNNING Reason=None RunTime=00:01:00 StartTime={clock} Partition=gpu NodeList=n1"
        scontrol.write_text(f"#!/bin/sh\necho {facts}\n")
        scontrol.chmod(0o755)

    began(60)
    assert alerts_of(run) == {}
    began(1000)
    assert list(alerts_of(run)) == ["silent"]
    assert main(["watch", str(run)]) == 0
    assert "small is running for 00:01:00 since 20" in capsys.readouterr().out


def test_a_suspended_job_is_not_gone_and_a_preempted_one_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = run_folder(tmp_path / "run")
    remember_job(run, on="slurm", job_id="7")
    found = {"7": {"JobId": "7", "JobState": "SUSPENDED", "Reason": "None", "StartTime": "2026-11-19T10:20:30"}}
    monkeypatch.setattr("bloomery.launch.slurm.tasks", lambda _: found)
    assert status_of(run, "small", AlertsSection(disk_below=0.0)).job.text == "is SUSPENDED (7)"
    found["7"]["JobState"] = "PREEMPTED"
    assert list(alerts_of(run)) == ["gone"]


def test_a_second_install_takes_the_place_of_the_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, asked = run_folder(tmp_path / "run"), list[tuple[str, ...]]()
    monkeypatch.setattr("bloomery.launch.slurm._slurm", lambda *words: asked.append(words) or f"{len(asked)}\n")
    assert main(["watch", "install", str(run), "--daily"]) == 0
    assert main(["watch", "install", str(run), "--daily", "--sync", "there"]) == 0
    assert [words[:2] for words in asked] == [("sbatch", "--parsable"), ("scancel", "1"), ("sbatch", "--parsable")]


@pytest.mark.parametrize("answer", ["", "echo 'slurm_load_jobs error: Unable to contact slurm controller' >&2; exit 1"])
def test_a_scheduler_that_cannot_be_asked_is_no_vanished_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, answer: str
) -> None:
    run = run_folder(tmp_path / "run")
    remember_job(run, on="slurm", job_id="7")
    monkeypatch.setenv("PATH", str(tmp_path))
    if answer:
        (tmp_path / "scontrol").write_text(f"#!/bin/sh\n{answer}\n")
        (tmp_path / "scontrol").chmod(0o755)
    assert alerts_of(run) == {}
    (tmp_path / "scontrol").write_text(
        "#!/bin/sh\necho 'slurm_load_jobs error: Invalid job id specified' >&2; exit 1\n"
    )
    (tmp_path / "scontrol").chmod(0o755)
    assert list(alerts_of(run)) == ["gone"]


def test_a_damaged_line_does_not_end_the_watch(tmp_path: Path) -> None:
    run = run_folder(tmp_path / "run")
    with open(run / "events.jsonl", "a") as file:
        file.write('{"kind": "spi\n[]\n{"time": 1}\n{"kind": "save"}\n{"kind": "save", "step": "x"}\n')
    event(run, "spike", 31)
    for damaged in ("", "x", "[]", '{"on": "slurm"}', '{"on": "local"}'):
        (run / "launch" / "job.json").write_text(damaged)
        assert list(alerts_of(run)) == ["spike"]


def test_a_run_that_may_not_be_read_is_said_in_a_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refused(path: Path, **_: Any) -> None:
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    for command in ("watch", "stop"):
        with monkeypatch.context() as patched:
            patched.setattr(Path, "stat", refused)
            assert main([command, str(tmp_path)]) == 3
        assert "cannot be read: Permission denied. Check its path, permissions" in capsys.readouterr().err


def test_a_colleague_may_have_asked_already(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file is hers, and nobody else may write to it; the folder is everybody's."""
    (tmp_path / "control" / "stop").parent.mkdir()
    (tmp_path / "control" / "stop").touch(mode=0o444)
    real = os.open

    def guarded(path: Any, flags: int, *rest: Any, **more: Any) -> int:
        if str(path).endswith("control/stop") and not flags & os.O_EXCL:
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return real(path, flags, *rest, **more)

    monkeypatch.setattr(os, "open", guarded)
    assert main(["stop", str(tmp_path)]) == 0


def test_an_alert_that_reached_nobody_is_sent_again_and_its_secret_address_stays_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, receiver: Receiver, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HOOK", f"http://127.0.0.1:{free_port()}/very-secret")
    run = run_folder(tmp_path / "run", ago=2000.0, webhook_variable="HOOK", disk_below=0.0)
    pulses(run, 2)
    said = capfd.readouterr().err
    assert said.count("an alert could not be sent by webhook: ConnectionError (the address is that of HOOK)") == 2
    assert "secret" not in said
    monkeypatch.setenv("HOOK", receiver.url)
    pulses(run)
    assert len(receiver.posts) == 1


def test_a_way_that_fails_is_reported_and_the_others_are_tried(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("NO_HOOK", raising=False)
    run = run_folder(tmp_path / "run", ago=2000.0, webhook_variable="NO_HOOK", command="exit 3", disk_below=0.0)
    assert main(["watch", str(run), "--pulse"]) == 0
    said = capfd.readouterr().err
    assert "an alert could not be sent by webhook: the environment variable NO_HOOK is not set" in said
    assert "an alert could not be sent by command" in said


def test_what_is_no_run_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["watch", str(tmp_path)]) == 3
    assert "is not a run" in capsys.readouterr().err


def test_a_training_that_was_launched_here_is_seen(workshop: Workshop, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["launch", "small.yaml"]) == 0
    capsys.readouterr()
    assert main(["watch", "runs/small", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert (facts["job"]["state"] in ("finished", "running"), facts["step"]) == (True, 20)
