"""`bloomery launch --on slurm` on a real Slurm of three nodes, each with a network and a host name of its own."""

from __future__ import annotations

import gzip
import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from bloomery.base import exit_codes
from bloomery.cli.main import main
from bloomery.launch.slurm import exit_code
from conftest import Workshop

UP = Path(__file__).with_name("slurm_up.sh")
MISSING = [
    name
    for name in ("slurmctld", "slurmd", "munged")
    if shutil.which(name, path=f"{os.environ['PATH']}:/usr/sbin") is None
]
pytestmark = pytest.mark.skipif(
    os.geteuid() != 0 or bool(MISSING), reason=f"needs root, and {MISSING or 'nothing else'}"
)
STEPS = ("--step", "download", "--step", "extract", "--step", "prepare", "--step", "train", "--array", "3")
STAGES = {
    "download": {"arguments": ["files.json", "--output", "raw"]},
    "extract": {"arguments": ["raw", "--output", "chunks", "--chunks", "4"]},
}
TWO = ("batch.micro_batch_size=2", "lr.decay=null")


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., None]]:
    """Its faults: `cluster("kill-node", "n2")`."""
    folder = tmp_path_factory.mktemp("slurm") / "ci"
    os.environ |= {
        "SLURM_CONF": f"{folder}/slurm.conf",
        "SLURM_CI_SLURMD_TIMEOUT": "10",
        "SLURM_CI_KILLWAIT": "20",  # a slow machine may need that to save and to decide what comes next
        "SLURM_CI_TAG": f"b{os.getpid()}",
        "SLURM_CI_NET": f"10.{80 + os.getpid() // 250 % 100}.{os.getpid() % 250}",  # others may run these tests too
    }

    def act(*words: str) -> None:
        subprocess.run(["bash", str(UP), *words, "--dir", str(folder)], check=True)

    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that the daemons end in any case
    try:
        act("up", "--netns", "--no-install", "--gpus", "2")
        yield act
    finally:
        act("down")
        del os.environ["SLURM_CONF"]


@pytest.fixture
def submit(workshop: Workshop, cluster: object) -> Iterator[Callable[..., str]]:
    """`bloomery launch` of two nodes with a rank on each; the job's id. What still runs at the end is cancelled."""
    section = {"nodes": 2, "gpus_per_node": 1, "env": {"PYTHONPATH": os.environ.get("PYTHONPATH") or "."}}

    def start(*overrides: str, **more: Any) -> str:
        words = ["launch", str(workshop.recipe), f"launch={json.dumps({**section, **more})}", *TWO, *overrides]
        found = subprocess.run(
            [sys.executable, "-m", "bloomery", *words, "--on", "slurm"], capture_output=True, text=True
        )
        assert found.returncode == 0, found.stderr
        match = re.search(r"submitted Slurm job (\d+)", found.stdout)
        assert match is not None
        return match[1]

    yield start
    # Again and again: jobs that submit themselves may have just done so.
    until(lambda: slurm("scancel", "--user=root") or not slurm("squeue", "--noheader"), 60)


def slurm(*words: str) -> str:
    return subprocess.run(words, capture_output=True, text=True).stdout.strip()


def state(job: str) -> str:
    """Of a task of an array, or of a job."""
    return (re.findall(r"JobState=(\w+)", slurm("scontrol", "show", "job", job)) or ["GONE"])[0]


def until(holds: Callable[[], object], seconds: float = 300.0) -> None:
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline, slurm("scontrol", "show", "job")
        time.sleep(0.2)


def steps(run: Path) -> int:
    with suppress(FileNotFoundError):
        return (run / "metrics.jsonl").read_bytes().count(b'"kind": "step"')
    return 0


def reasons(workshop: Workshop, run: Path) -> list[str]:
    """Of the stops so far."""
    return [event["reason"] for event in workshop.events(run, "stop")] if (run / "events.jsonl").exists() else []


def attempts(run: Path) -> list[tuple[int, str]]:
    path = run / "launch" / "attempts.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    return [(each["code"], each["next"]) for each in map(json.loads, lines)]


def queued_again(job: str, restarts: int = 1) -> None:
    until(lambda: f"Restarts={restarts}" in slurm("scontrol", "show", "job", job) and state(job) == "PENDING")
    starts_soon(job)


def starts_soon(job: str) -> None:
    """A requeued job waits two minutes for its nodes to be clean; here some seconds, because nodes refuse what starts
    in the second in which they were told to forget it."""
    found = re.search(r"JobState=PENDING.* StartTime=(\d\S+)", slurm("scontrol", "show", "job", job), re.S)
    if found and datetime.fromisoformat(found[1]) > datetime.now() + timedelta(seconds=10):
        slurm("scontrol", "update", f"JobId={job}", "StartTime=now+4")


def ranks(run: Path) -> list[str]:
    """Their processes, on any node; not srun's, which have the same words."""
    return slurm("pgrep", "-f", f"^{sys.executable} -m bloomery train {run}/launch").split()


def newest(workshop: Workshop, run: Path) -> dict[int, float]:
    """The loss of each step, as the last start that came to it has logged it."""
    return {record["step"]: record["losses"]["lm loss"] for record in workshop.metrics(run)}


def log(run: Path) -> str:
    return (run / "logs" / "main_log.txt").read_text()


def test_a_chain_goes_on_after_the_time_limit_as_if_there_were_none(
    workshop: Workshop, submit: Callable[..., str]
) -> None:
    """The shortest limit that Slurm knows. It looks at limits every 30 s, and sends the signal rather early."""
    run, long = workshop.folder / "runs" / "small", "train.for=100000 steps"
    job = submit(long, time_limit="1m", save_before="5s", array=9)
    until(lambda: in_time(f"{job}_1") and steps(run) > 3)
    until(lambda: reasons(workshop, run) == ["signal"])
    before = steps(run)
    until(lambda: in_time(f"{job}_2") and steps(run) > before + 5)
    assert main(["stop", str(run)]) == 0
    until(lambda: not slurm("squeue", "--noheader"))  # the rest of the chain is cancelled
    assert attempts(run) == [(0, "again"), (0, "stop")]
    assert state(f"{job}_1") in ("COMPLETED", "TIMEOUT")  # that where its last words come later than the limit
    assert reasons(workshop, run) == ["signal", "control"]
    assert re.search(r"2 nodes reach each other with [\d.]+ \w+/s", log(run))
    exactly = f"train.exit_after={steps(run)} steps"
    whole = workshop.train(long, exactly, "launch={gpus_per_node: 2}", *TWO, run="whole")
    assert workshop.losses(run) == workshop.losses(whole)


def in_time(job: str) -> bool:
    """Where a slow machine has not begun to train in a third of a minute, it gets another one."""
    ran = re.search(r"RunTime=00:(\d+):(\d+)", slurm("scontrol", "show", "job", job))
    if ran and int(ran[2]) > 20:
        slurm("scontrol", "update", f"JobId={job}", f"TimeLimit={int(ran[1]) + 2}")
    return True


def test_a_cancelled_job_saves_and_is_not_started_again(workshop: Workshop, submit: Callable[..., str]) -> None:
    run = workshop.folder / "runs" / "small"
    job = submit("train.for=100000 steps")
    until(lambda: steps(run) > 3)
    slurm("scancel", job)
    until(lambda: state(job) == "CANCELLED" and attempts(run))
    assert (run / "checkpoints" / "latest").exists()
    (job_log,) = run.glob(f"logs/*{job}.log")
    until(lambda: "somebody has cancelled the job" in job_log.read_text())
    assert "Restarts=0" in slurm("scontrol", "show", "job", job)


def test_a_preempted_job_goes_on_by_itself(workshop: Workshop, submit: Callable[..., str]) -> None:
    run = workshop.folder / "runs" / "small"
    job = submit("train.for=300 steps")
    until(lambda: steps(run) > 3)
    urgent = slurm(
        "sbatch", "--parsable", "--partition=urgent", "--nodes=3", "--exclusive", "--output=/dev/null", "--wrap=sleep 5"
    )
    queued_again(job)
    until(lambda: state(urgent) == "COMPLETED")
    until(lambda: state(job) == "COMPLETED")
    assert attempts(run) == [(0, "again"), (0, "finished")]
    starts = workshop.events(run, "start")
    assert starts[1]["step"] == workshop.events(run, "stop")[0]["step"] > 0


def test_a_dead_rank_is_a_new_start_and_a_wrong_recipe_is_not(workshop: Workshop, submit: Callable[..., str]) -> None:
    run = workshop.folder / "runs" / "small"
    job = submit("train.for=300 steps", "checkpoint.phases=[{every: 5 steps}]")
    until(lambda: steps(run) > 7)
    subprocess.run(["kill", "-9", ranks(run)[-1]], check=True)
    queued_again(job)
    until(lambda: state(job) == "COMPLETED")
    assert [verdict for _, verdict in attempts(run)] == ["again", "finished"]
    assert workshop.events(run, "start")[1]["step"] >= 5
    wrong = submit("data.train=[{path: nothing}]", "name=wrong", array=3)
    until(lambda: state(f"{wrong}_1") == "FAILED")
    until(lambda: state(f"{wrong}_3") in ("CANCELLED", "GONE"))
    assert "ExitCode=3:0" in slurm("scontrol", "show", "job", f"{wrong}_1")
    assert "nothing" in log(workshop.folder / "runs" / "wrong")


def test_a_node_that_dies_is_replaced(
    workshop: Workshop, submit: Callable[..., str], cluster: Callable[..., None]
) -> None:
    run = workshop.folder / "runs" / "small"
    job = submit("train.for=300 steps", "checkpoint.phases=[{every: 5 steps}]")
    until(lambda: steps(run) > 7)
    cluster("kill-node", "n2")
    try:
        queued_again(job)
        until(lambda: state(job) == "COMPLETED", 300)
        assert "NodeList=n[1,3]" in slurm("scontrol", "show", "job", job)
    finally:
        cluster("revive-node", "n2")


def test_a_node_that_is_cut_off_is_replaced_and_changes_nothing_any_more(
    workshop: Workshop, submit: Callable[..., str], cluster: Callable[..., None]
) -> None:
    """It is the one of rank 0, which writes, and of the job's script. Both live on there."""
    run, long = workshop.folder / "runs" / "small", "train.for=300 steps"
    job = submit(long, "checkpoint.phases=[{every: 5 steps}]")
    until(lambda: steps(run) > 7)
    zombies = {*ranks(run)}
    cluster("cut-node", "n1")
    try:
        queued_again(job)  # it may still find the folder in use, and queue again
        until(lambda: starts_soon(job) or resumed(workshop, run))
        assert "NodeList=n[2-3]" in slurm("scontrol", "show", "job", job)
        until(lambda: not zombies & {*ranks(run)}, 120)
    finally:
        cluster("heal-node", "n1")
    # The old srun may now end the new start's step, which has the same number: that saves, and queues again.
    until(lambda: starts_soon(job) or state(job) == "COMPLETED")
    assert attempts(run) in ([(0, "finished")], [(0, "again"), (0, "finished")]), "none by the first start, of code 6"
    whole = workshop.train(long, "launch={gpus_per_node: 2}", *TWO, run="whole")
    assert newest(workshop, run) == newest(workshop, whole)


def resumed(workshop: Workshop, run: Path) -> bool:
    return len(workshop.events(run, "start")) == 2


def test_after_the_ramp_the_next_job_has_more_nodes(workshop: Workshop, submit: Callable[..., str]) -> None:
    run = workshop.folder / "runs" / "small"
    batch = "batch={micro_batch_size: 2, global_batch_size: 4, rampup: {start: 2, increment: 2, samples: 40}}"
    submit("train.for=60 steps", "train.exit_after=30 steps", batch, nodes=1, nodes_after_ramp=2, array=3)
    until(lambda: attempts(run)[-1:] == [(0, "finished")])
    assert [start["ranks"] for start in workshop.events(run, "start")] == [1, 2]
    until(lambda: not slurm("squeue", "--noheader"), 60)


def test_the_data_is_prepared_by_an_array_and_a_share_that_fails_is_retried_alone(
    workshop: Workshop, submit: Callable[..., str]
) -> None:
    run, once = workshop.folder / "runs" / "small", workshop.folder / "once"
    texts = workshop.folder / "texts"
    texts.mkdir()
    for i in range(12):
        lines = [json.dumps({"text": f"the {i} and {k}. " * 40}) for k in range(30)]
        (texts / f"{i}.jsonl.gz").write_bytes(gzip.compress("\n".join(lines).encode()))
    assert main(["tokenizer", "train", "texts", "--vocab-size", "280", "--output", "tokenizer"]) == 0
    files = [{"url": str(path), "md5": hashlib.md5(path.read_bytes()).hexdigest()} for path in texts.iterdir()]
    (workshop.folder / "files.json").write_text(json.dumps(files))
    data = ["prepare=[{output: shard, sources: ['chunks/*.jsonl']}]", "data.train=[{path: shard}]"]
    data += ["tokenizer={path: tokenizer}", "model.vocab_size=280"]
    fails = f'[ "$SLURM_JOB_NAME-$SLURM_ARRAY_TASK_ID" != small-extract-1 ] || [ -e {once} ] || '
    fails += f"{{ touch {once}; srun() {{ return 7; }}; }}"
    last = submit(*STEPS, *data, "train.for=5 steps", nodes=1, setup=[fails], stages=STAGES)
    until(once.exists)
    (share,) = re.findall(
        r"\d+_1\b", slurm("squeue", "--noheader", "--array", "--name=small-extract", "--format=%F_%K")
    )
    queued_again(share)
    until(lambda: (run / "events.jsonl").exists() and workshop.events(run, "stop"))
    assert state(last) == "COMPLETED"
    for step, said in (
        ("download", "raw: 12 files, "),
        ("extract", "chunks: 0 written, 4 already there. 12 files in, 4 out; 360 documents"),
        ("prepare", "360 documents"),
    ):
        logs = {path.name: path.read_text() for path in (run / "logs" / step).iterdir()}
        assert logs.keys() == {"0.log", "1.log", "2.log", "complete.log"}
        assert said in logs["complete.log"]
        assert all(f"share {k}/3" in logs[f"{k}.log"] for k in range(3)), logs
    assert workshop.events(run, "stop")[0]["reason"] == "finished"


def test_data_that_cannot_be_made_cancels_the_training(
    workshop: Workshop, submit: Callable[..., str], capsys: pytest.CaptureFixture[str]
) -> None:
    (workshop.folder / "files.json").write_text(json.dumps([{"url": f"{i}.jsonl"} for i in range(3)]))
    (workshop.folder / "0.jsonl").write_text('{"text": "the only one"}\n')
    last = submit(*STEPS, nodes=1, restarts=0, stages=STAGES)
    until(lambda: not slurm("squeue", "--noheader"), 90)
    assert state(last) == "CANCELLED"
    failed = re.findall(r"small-download (\d) failed with exit code 3", log(workshop.folder / "runs" / "small"))
    assert sorted(failed) == ["1", "2"]
    assert exit_code(last) == exit_codes.INTERRUPTED


def test_a_job_that_submits_itself_again_pulses_and_is_watched(
    workshop: Workshop, submit: Callable[..., str], capsys: pytest.CaptureFixture[str]
) -> None:
    run = workshop.folder / "runs" / "small"
    submit("train.for=100000 steps")
    assert main(["watch", "install", str(run), "--every", "5s", "--sync", str(workshop.folder / "away")]) == 0
    mark = run / "launch" / "cron-5s" / "own.sh"
    mark.write_text(f"echo again >> {workshop.folder}/own.txt\n")
    until(lambda: (workshop.folder / "own.txt").exists() and len((workshop.folder / "own.txt").read_text()) > 6)
    until(lambda: log(run).count("] PULSE: small is running for") >= 2)
    until(lambda: (workshop.folder / "away" / "metrics.jsonl").exists())
    slurm("scancel", "--name=small-5s")
    until(lambda: not slurm("squeue", "--noheader", "--name=small-5s"))
    capsys.readouterr()
    assert main(["watch", str(run), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["alerts"]["cron-5s"].endswith("is not in the queue any more")


def test_what_would_be_pending_for_ever_is_refused(
    workshop: Workshop, submit: Callable[..., str], capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["launch", str(workshop.recipe), *TWO, "--on", "slurm"]
    assert main([*words, "launch={nodes: 2, gpus_per_node: 1, time_limit: 48h}"]) == 2
    assert "Its partition runs jobs of at most 1-00:00:00" in capsys.readouterr().err
    assert main([*words, "launch={nodes: 4, gpus_per_node: 1}", "batch.micro_batch_size=2"]) == 3
    assert "`sbatch` refuses" in capsys.readouterr().err
