"""`bloomery launch`: what it writes for each target, what it starts here, and when it starts again."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import yaml

from bloomery.base import exit_codes
from bloomery.base.errors import RecipeError
from bloomery.base.ranks import Started, started_as
from bloomery.cli.main import main
from bloomery.config.load import load_recipe, shipped_recipes
from bloomery.launch import hosts, slurm
from bloomery.launch.job import training_job
from bloomery.launch.restart import judge
from bloomery.launch.watch import remember_job
from bloomery.monitor.sinks import EventFile
from conftest import Workshop

GOLDEN = Path(__file__).parent / "golden"
SDK = Path(__file__).parents[1] / ".venv" / "azureml"
AZURE = {"compute": "gpus", "environment": "azureml:bloomery@latest", "outputs": "azureml://datastores/d/paths/runs",
         "inputs": {"shards": "azureml://datastores/d/paths/shards"}}  # fmt: skip
SHARDS = "data.train=[{path: shards/train}]"


def dry_run(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """What would be submitted, without what belongs to this machine."""
    assert main(["launch", *words, "--dry-run", "--run-dir", "runs/x"]) == exit_codes.OK
    text = capsys.readouterr().out
    return text.replace(sys.executable, "PYTHON").replace(os.getcwd(), "DIR")


def golden(name: str, text: str) -> None:
    """Equal to the file; `BLOOMERY_GOLDEN=write` writes it, to be read before it is committed."""
    path = GOLDEN / name
    if os.environ.get("BLOOMERY_GOLDEN") == "write":
        path.write_text(text)
    assert text == path.read_text(), f"{path} differs: read the change, and write it with BLOOMERY_GOLDEN=write"


# ---------------------------------------------------------------- what is written


def test_the_script_of_a_chain_on_slurm(capsys: pytest.CaptureFixture[str]) -> None:
    golden("tr1-13b.sh", dry_run(capsys, "tr1-13b"))


def test_every_field_of_slurm_is_in_the_script(workshop: Workshop, capsys: pytest.CaptureFixture[str]) -> None:
    fields = {
        "partition": "gpu", "account": "abc@v100", "qos": "long", "constraint": "v100-32g", "exclude": "n[3-4]",
        "gres": "gpu:v100", "cpus_per_task": 10, "mem": "0", "image": "/images/x.sqsh", "mounts": ["/data:/data"],
        "extra_lines": ["#SBATCH --hint=nomultithread"], "setup": ["module load cuda"],
        "env": {"NCCL_DEBUG": "INFO it"}, "nodes": 2, "gpus_per_node": 4, "time_limit": "100h",
    }  # fmt: skip
    one = "batch.micro_batch_size=1"
    text = dry_run(capsys, "small.yaml", f"launch={json.dumps(fields)}", one, "--on", "slurm")
    golden("every-field.sh", text)
    assert subprocess.run(["bash", "-n"], input=text, text=True).returncode == 0
    assert not list(workshop.folder.glob("runs")), "a dry run writes nothing"


def test_the_steps_of_the_data_are_arrays_before_the_training(
    workshop: Workshop, capsys: pytest.CaptureFixture[str]
) -> None:
    stages = {
        "download": {"arguments": ["files.jsonl", "--output", "raw"], "array": 8, "partition": "io"},
        "extract": {"arguments": ["raw", "--output", "chunks", "--chunks", "32"]},
        "prepare": {"array": 32, "cpus_per_task": 16, "mem": "100G", "time_limit": "4h"},
    }
    words = ["small.yaml", f"launch={json.dumps({'gpus_per_node': 1, 'partition': 'gpu', 'stages': stages})}"]
    steps = [word for step in (*stages, "train") for word in ("--step", step)]
    text = dry_run(capsys, *words, "--on", "slurm", *steps)
    golden("stages.sh", text)
    assert subprocess.run(["bash", "-n"], input=text, text=True).returncode == 0
    assert "#SBATCH --array=0-3\n" in dry_run(capsys, *words, "--on", "slurm", "--step", "prepare", "--array", "4")
    assert main(["launch", *words, "--on", "local", "--step", "prepare"]) == exit_codes.USAGE
    assert "--step submits arrays to Slurm" in capsys.readouterr().err
    assert main(["launch", "small.yaml", "--on", "slurm", "--step", "extract", "--dry-run"]) == exit_codes.USAGE
    assert "launch.stages.extract.arguments is missing" in capsys.readouterr().err


def test_any_folder_and_any_value_stay_one_word(workshop: Workshop, capsys: pytest.CaptureFixture[str]) -> None:
    """In `#SBATCH` lines, where Slurm reads quotes as bash does, and `%` is its own."""
    folder, value = 'a b/it\'s %j "$(touch pwned)"', 'it\'s "$(touch pwned)" `touch pwned`'
    section = {"env": {"A": value}, "constraint": "a b", "time_limit": "1h"}
    words = ["launch", "small.yaml", f"launch={json.dumps(section)}", "--dry-run", "--run-dir", folder, "--on"]
    for target in ("local", "slurm"):
        assert main([*words, target]) == exit_codes.OK
        text = capsys.readouterr().out
        exports = "\n".join(line for line in text.splitlines() if line.startswith("export"))
        said = subprocess.run(["bash", "-c", f'{exports}\nprintf %s "$A"'], capture_output=True, text=True)
        assert said.stdout == value
        assert subprocess.run(["bash", "-n"], input=text, text=True).returncode == 0
    options = [word for line in text.splitlines() if line.startswith("#SBATCH") for word in shlex.split(line)[1:]]
    assert "--constraint=a b" in options
    assert f"--output={workshop.folder}/{folder.replace('%', '%%')}/logs/small_%j.log" in options


def test_the_longest_limit_of_several_partitions_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """`launch.partition: a,b`, of which `scontrol` shows none when it is asked for both."""
    shown = "\n".join(
        f"PartitionName={name} Default={default} MaxTime={limit}"
        for name, default, limit in [("a", "YES", "01:00:00"), ("b", "NO", "1-00:00:00"), ("c", "NO", "UNLIMITED")]
    )
    monkeypatch.setattr(slurm, "_slurm", lambda *words: shown)
    limits = [slurm._longest_seconds(names) for names in (None, "a", "a,b", "a,c")]
    assert limits == [3600, 3600, 86400, None]


def test_a_share_that_slurm_ends_is_named_and_not_retried(
    workshop: Workshop, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """By `scancel`, or at its time limit: its shell gets SIGTERM too, and has some seconds left."""
    run = workshop.folder / "runs" / "x"
    (run / "logs").mkdir(parents=True)
    for name, does in (("srun", 'kill -TERM "$PPID"; exit 143'), ("scontrol", f"touch {run}/retried")):
        (workshop.folder / name).write_text(f"#!/bin/sh\n{does}\n")
        (workshop.folder / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(workshop.folder), prepend=os.pathsep)
    assert main(["launch", "small.yaml", "--on", "slurm", "--step", "prepare", "--run-dir", str(run), "--dry-run"]) == 0
    done = subprocess.run(["bash"], input=capsys.readouterr().out, text=True, capture_output=True)
    assert done.returncode == 143, done.stderr
    assert "failed with exit code 143" in (run / "logs" / "main_log.txt").read_text()
    assert not (run / "retried").exists()


def test_the_job_of_azureml(workshop: Workshop, capsys: pytest.CaptureFixture[str]) -> None:
    azure = {**AZURE, "services": ["jupyter_lab", "tensor_board", "vs_code"], "sku": "Standard_NC24s_v3"}
    section = {"nodes": 2, "gpus_per_node": 8, "time_limit": "2h", "azureml": azure}
    more = (SHARDS, "batch={micro_batch_size: 1, global_batch_size: 16}", f"launch={json.dumps(section)}")
    assert main(["launch", "small.yaml", *more, "--on", "azureml", "--dry-run"]) == exit_codes.OK
    said = capsys.readouterr()
    golden("azureml.yaml", said.out)
    assert "Standard_NC24s_v3 has no InfiniBand. 2 nodes exchange gradients over Ethernet" in said.err
    assert main(["launch", "small.yaml", *more, "launch.azureml.sku=Standard_ND96asr_v4", "--on", "azureml",
                 "--dry-run"]) == exit_codes.OK  # fmt: skip
    assert "InfiniBand" not in capsys.readouterr().err


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"shm_size": "16gigs"},
            "shm_size is '16gigs'. Size of /dev/shm in the container: `64g`, or a number with b, k or m",
        ),
        ({"services": ["jupyter"]}, "launch.azureml.services.0 is 'jupyter'"),
        ({"outputs": "/tmp/outputs"}, "launch.azureml.outputs is '/tmp/outputs'"),
        ({"inputs": {"shards": "/mnt/shards"}}, "launch.azureml.inputs.shards is '/mnt/shards'"),
        ({"inputs": {}}, "data.train.0.path is 'shards/train'. Nodes see only the folders of launch.azureml.inputs"),
        (
            {"inputs": {"a-b": "azureml://d"}},
            "launch.azureml.inputs.a-b is 'a-b'. Folders (`azureml://...`) that are mounted",
        ),
        ({"compute": None}, "launch.azureml.compute"),
        ({"environment": None}, "launch.azureml.environment"),
        ({"instances": 2}, "launch.azureml.instances"),
        ({"environment": ""}, "launch.azureml.environment is ''"),
        ({"compute": "azureml:gpus"}, "launch.azureml.compute is 'azureml:gpus'"),
        ({"inputs": {"other": "azureml://d"}}, "data.train.0.path is 'shards/train'. Nodes see only the folders"),
        (None, "launch.azureml is missing"),
    ],
)
def test_a_job_that_azureml_would_take_and_lose_is_refused(
    workshop: Workshop, capsys: pytest.CaptureFixture[str], changes: dict[str, Any] | None, message: str
) -> None:
    azure = (
        None if changes is None else {key: value for key, value in {**AZURE, **changes}.items() if value is not None}
    )
    words = ["launch", "small.yaml", SHARDS, f"launch={json.dumps({'azureml': azure})}", "--on", "azureml", "--dry-run"]
    assert main(words) == exit_codes.USAGE
    assert message in capsys.readouterr().err


def test_microsofts_own_sdk_takes_the_job_of_every_shipped_recipe(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """And refuses broken ones, so that its yes means something. Without a network."""
    if not (SDK / ".installed").exists():
        pytest.skip("azure-ai-ml is not installed in .venv/azureml (`make test` does it where there are its packages)")
    (tmp_path / "recipe.yaml").touch()
    names = [name for name in shipped_recipes() if (launch := load_recipe(name).recipe.launch) and launch.azureml]
    assert {"bloom-azure-20b", "bloom-azure-25b"} <= {*names}
    jobs = {name: dry_run(capsys, name) for name in names} | {"golden": (GOLDEN / "azureml.yaml").read_text()}
    broken = {
        "distribution.type": jobs["golden"].replace("type: pytorch", "type: torch"),
        "resources.instance_count": jobs["golden"].replace("instance_count: 2", "instance_count: two"),
        "instances": f"{jobs['golden']}instances: 2\n",
        "command": jobs["golden"].replace("command:", "commands:"),
        "code": jobs["golden"].replace("code: .", "code: nowhere"),
    }
    for name, text in {**jobs, **broken}.items():
        (tmp_path / f"{name}.yaml").write_text(text)
    files = {name: str(tmp_path / f"{name}.yaml") for name in (*jobs, *broken)}
    judge = [str(SDK / "bin" / "python"), str(Path(__file__).with_name("azureml_sdk.py")), *files.values()]
    done = subprocess.run(judge, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": ""}, timeout=300)
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    assert {name: said[files[name]] for name in jobs} == dict.fromkeys(jobs, "")
    assert [name for name in broken if name.rpartition(".")[2] not in said[files[name]]] == []


def test_hosts_and_their_file(workshop: Workshop, capsys: pytest.CaptureFixture[str]) -> None:
    (workshop.folder / "hostfile").write_text(
        "# the cage\n10.10.100.101 slots=8\nuser@10.10.100.102 slots=8\n\nspare\n"
    )
    section = "launch={hostfile: hostfile, nodes: 2, gpus_per_node: 8, env: {A: b c}}"
    batch = "batch={micro_batch_size: 1, global_batch_size: 16}"
    golden("hosts.sh", dry_run(capsys, "small.yaml", section, batch, "--on", "hosts"))
    path = workshop.folder / "hostfile"
    path.write_text("a slots=4\na slots=8\n-oProxyCommand=x\nb slots=x\n")
    with pytest.raises(RecipeError) as caught:
        hosts.read_hostfile(path, nodes=3, ranks_per_node=8)
    for message in (
        ":1: a slots=4 has too few",
        ":2: 'a slots=8'",
        ":3: '-oProxyCommand=x' is no host",
        ":4:",
        "has 1 hosts",
    ):
        assert message in str(caught.value)
    assert main(["launch", "small.yaml", "--on", "hosts"]) == exit_codes.USAGE
    assert "launch.hostfile is missing" in capsys.readouterr().err


def test_a_host_that_the_doctor_has_named_is_not_used(workshop: Workshop) -> None:
    path = workshop.folder / "hostfile"
    path.write_text("a\nb\nspare\n")
    found = hosts.read_hostfile(path, nodes=2, ranks_per_node=8, bad=["b", "elsewhere"])
    assert found == ["a", "spare"]
    with pytest.raises(RecipeError, match=r"has 2 hosts without b of launch/bad_nodes.txt. launch.nodes is 3"):
        hosts.read_hostfile(path, nodes=3, ranks_per_node=8, bad=["b"])


def test_a_host_that_was_lost_is_the_last_to_be_used_again(
    workshop: Workshop, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """A stand-in for ssh: `b` is never reached, and the others end as if somebody had asked the run to stop."""
    (workshop.folder / "hostfile").write_text("a\nb\nspare\n")
    shim, asked = workshop.folder / "ssh", workshop.folder / "asked"
    shim.write_text(f'#!/bin/sh\nfor host; do case $host in a|b|spare) break;; esac; done\n'
                    f'echo $host >> {asked}\n[ $host != b ] || exit 255\n')  # fmt: skip
    shim.chmod(0o755)
    monkeypatch.setenv("PATH", str(workshop.folder), prepend=os.pathsep)
    section = "launch={hostfile: hostfile, nodes: 2, restarts: 1}"
    assert main(["launch", "small.yaml", section, "--on", "hosts"]) == exit_codes.OK
    assert "b cannot be reached any more" in capfd.readouterr().err
    said = (workshop.folder / "runs" / "small" / "logs" / "main_log.txt").read_text()
    assert "b cannot be reached any more" in said
    assert "] exit code 6; it resumes from the newest checkpoint\n" in said
    names = asked.read_text().split()
    assert [sorted(names[:2]), sorted(names[2:])] == [["a", "b"], ["a", "spare"]]
    (workshop.folder / "hostfile").write_text("a\nb\n")
    found = hosts.read_hostfile(workshop.folder / "hostfile", nodes=2, ranks_per_node=1, lost=["a"])
    assert found == ["b", "a"]


def test_a_second_job_of_a_run_is_refused(workshop: Workshop, capsys: pytest.CaptureFixture[str]) -> None:
    run = workshop.folder / "runs" / "small"
    (run / "launch").mkdir(parents=True)
    with subprocess.Popen(["sleep", "1000"]) as first:
        remember_job(run, on="local", process=first.pid)
        assert main(["launch", "small.yaml"]) == exit_codes.STORAGE
        first.kill()
    said = capsys.readouterr().err
    assert f"runs/small is running as process {first.pid}. Two trainings of one run" in said
    assert not (run / "launch" / "recipe.yaml").exists()


def test_the_log_of_a_job_of_azureml_is_followed(
    workshop: Workshop, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A stand-in for the SDK: no workspace can be reached from here."""
    sdk, identity, streamed = types.ModuleType("azure.ai.ml"), types.ModuleType("azure.identity"), list[str]()
    job = types.SimpleNamespace(name="gentle_toe", studio_url="https://ml.azure.com/runs/gentle_toe")
    jobs = types.SimpleNamespace(create_or_update=lambda loaded: job, stream=streamed.append)
    sdk.MLClient = types.SimpleNamespace(from_config=lambda credential: types.SimpleNamespace(jobs=jobs))  # type: ignore[attr-defined]
    sdk.load_job = Path.read_text  # type: ignore[attr-defined]
    identity.DefaultAzureCredential = object  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "azure.ai.ml", sdk)
    monkeypatch.setitem(sys.modules, "azure.identity", identity)
    words = ["launch", "small.yaml", SHARDS, f"launch={json.dumps({'azureml': AZURE})}", "--on", "azureml"]
    assert main(words) == exit_codes.OK
    assert (capsys.readouterr().out, streamed) == ("submitted: https://ml.azure.com/runs/gentle_toe\n", [])
    assert main([*words, "--follow"]) == exit_codes.OK
    assert streamed == ["gentle_toe"]


def test_a_job_of_slurm_is_given_neither_excluded_nor_bad_nodes(
    workshop: Workshop, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Neither one that is launched again nor the next one of a chain."""
    asked = list[tuple[str, ...]]()
    monkeypatch.setattr(slurm, "_slurm", lambda *words: asked.append(words) or "")
    run = workshop.folder / "runs" / "x"
    (run / "launch").mkdir(parents=True)
    (run / "launch" / "bad_nodes.txt").write_text("n7\nn5\nn7\n")
    assert "#SBATCH --exclude='n[1-2],n5,n7'\n" in dry_run(
        capsys, "small.yaml", "launch.exclude=n[1-2]", "--on", "slurm"
    )
    place = {"SLURM_JOB_ID": "9", "SLURM_ARRAY_JOB_ID": "8", "SLURM_JOB_NUM_NODES": "1", "SLURM_ARRAY_TASK_MAX": "3",
             "SLURM_ARRAY_TASK_ID": "1"}  # fmt: skip
    job = training_job(load_recipe(str(workshop.recipe), ["launch.exclude=n[1-2]"]).recipe, run)
    slurm.act(judge(folder_with(run, began=0, step=5), 6, restarts=3), job, ended=False, environment=place)
    assert asked == [("scontrol", "update", "JobId=8", "ExcNodeList=n[1-2],n5,n7")]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--on", "slurm"], "there is no sbatch here"),
        (["--on", "hosts", "launch={hostfile: hostfile}"], "there is no ssh here"),
        (
            ["--array", "3"],
            "--array is 3, without --step. It is the number of shares of each --step. A chain of jobs is",
        ),
    ],
)
def test_what_is_missing_or_means_nothing_is_said_in_a_sentence(
    workshop: Workshop,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    words: list[str],
    message: str,
) -> None:
    (workshop.folder / "hostfile").write_text("a\n")
    monkeypatch.setenv("PATH", str(workshop.folder))
    assert main(["launch", "small.yaml", *words]) == exit_codes.USAGE
    assert message in capsys.readouterr().err


def test_a_start_that_slurm_has_replaced_decides_nothing(
    workshop: Workshop, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Its node was cut off from the network, and is back."""
    run, asked = folder_with(workshop.folder, began=0, step=5), workshop.folder / "asked"
    (run / "launch" / "recipe.yaml").write_text(workshop.recipe.read_text())
    shim = workshop.folder / "scontrol"
    shim.write_text(f'#!/bin/sh\necho "$@" >> {asked}\necho "JobId=7 JobState=RUNNING Restarts=1 ExitCode=0:0"\n')
    shim.chmod(0o755)
    monkeypatch.setenv("PATH", str(workshop.folder))
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setenv("SLURM_JOB_NUM_NODES", "1")
    words = ["launch", "--after", str(run), "--code", "6"]
    assert main(words) == exit_codes.OK
    assert "this start decides nothing" in capfd.readouterr().err
    assert not (run / "launch" / "attempts.jsonl").exists()
    assert "requeue" not in asked.read_text()
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    assert main(words) == exit_codes.OK
    assert "exit code 6; it resumes from the newest checkpoint" in capfd.readouterr().err
    assert "requeue 7\n" in asked.read_text()


def test_a_job_that_was_cancelled_before_it_ran_did_not_go_well(monkeypatch: pytest.MonkeyPatch) -> None:
    found = {"7": {"JobState": "CANCELLED", "ExitCode": "0:0", "RunTime": "00:00:00", "ArrayTaskId": "3-9%1"}}
    monkeypatch.setattr(slurm, "tasks", lambda _: found)
    assert slurm.exit_code("7") == exit_codes.INTERRUPTED
    found["8"] = {"JobState": "FAILED", "ExitCode": "6:0", "RunTime": "00:10:00", "ArrayTaskId": "1"}
    assert slurm.exit_code("7") == exit_codes.LOST_RANK
    found["9"] = {"JobState": "COMPLETED", "ExitCode": "0:0", "RunTime": "00:10:00", "ArrayTaskId": "2"}
    assert slurm.exit_code("7") == exit_codes.OK, "the last job that ran has completed the training"
    found["9"] |= {"JobState": "CANCELLED", "ExitCode": "0:15"}
    assert slurm.exit_code("7") == exit_codes.INTERRUPTED


# ---------------------------------------------------------------- what is started here


def test_a_job_here_is_started_again_until_it_is_done(workshop: Workshop, capfd: pytest.CaptureFixture[str]) -> None:
    """Every job trains ten steps. The recipe in the launch folder counts, and the log has errors as well.
    (docs/launch.md starts several ranks again.)"""
    assert main(["launch", "small.yaml", "train.exit_after=10 steps"]) == exit_codes.OK
    run = workshop.folder / "runs" / "small"
    attempts = [json.loads(line) for line in (run / "launch" / "attempts.jsonl").read_text().splitlines()]
    assert [(each["code"], each["step"], each["next"]) for each in attempts] == [
        (0, 10, "again"),
        (0, 20, "finished"),
    ]
    whole = workshop.train(run="whole")
    assert workshop.losses(run) == workshop.losses(whole)
    recipe = yaml.safe_load((run / "launch" / "recipe.yaml").read_text())
    recipe["data"]["train"] = [{"path": "nothing"}]
    (run / "launch" / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    capfd.readouterr()
    assert main(["launch", "small.yaml", "data.train=[{path: nothing}]", "--run-dir", "other"]) == exit_codes.DATA
    assert (
        "exit code 3: an input is missing or damaged, so that starting again would not help" in capfd.readouterr().err
    )
    assert "nothing" in (workshop.folder / "other" / "logs" / "main_log.txt").read_text()


# ---------------------------------------------------------------- when it is started again


@pytest.mark.parametrize(
    ("code", "stop", "verdict"),
    [
        (0, "finished", "finished"),
        (0, "signal", "again"),
        (0, "exit_after", "again"),
        (0, "deadline", "again"),
        (0, "control", "stop"),
        (0, None, "stop"),
        (exit_codes.BUG, None, "again"),
        (exit_codes.USAGE, None, "stop"),
        (exit_codes.DATA, None, "stop"),
        (exit_codes.DIVERGED, "diverged", "stop"),
        (exit_codes.STORAGE, None, "again"),
        (exit_codes.LOST_RANK, None, "again"),
        (exit_codes.INTERRUPTED, None, "again"),
        (137, None, "again"),
    ],
)
def test_what_follows_from_how_a_job_ended(tmp_path: Path, code: int, stop: str | None, verdict: str) -> None:
    run = folder_with(tmp_path, began=0, step=5, stop=stop)
    assert judge(run, code, restarts=3).next == verdict


def test_jobs_that_are_interrupted_before_their_first_step_are_a_loop(tmp_path: Path) -> None:
    """Their time limit is shorter than their start, for instance."""
    run, codes = folder_with(tmp_path, began=0, step=5, stop="signal"), (0, *[exit_codes.INTERRUPTED] * 3)
    assert [judge(run, code, restarts=2).next for code in codes] == ["again", "again", "again", "stop"]


def test_a_complete_run_whose_next_start_is_refused_is_not_called_complete(tmp_path: Path) -> None:
    """Its recipe was changed to train longer, and has a mistake."""
    attempt = judge(folder_with(tmp_path, began=0, step=5, stop="finished"), exit_codes.USAGE, restarts=3)
    assert (attempt.next, "the recipe or the command line is wrong" in attempt.why) == ("stop", True)


def test_a_kill_switch_is_not_the_end_of_an_earlier_training(tmp_path: Path) -> None:
    run = folder_with(tmp_path, began=0, step=5, stop="finished")
    assert judge(run, 0, restarts=3).next == "finished"
    (run / "control").mkdir()
    (run / "control" / "kill").touch()
    assert judge(run, 0, restarts=3).why == "it was stopped on request (kill switch)"


def test_damaged_lines_do_not_keep_a_run_from_being_restarted(tmp_path: Path) -> None:
    run = folder_with(tmp_path, began=0, step=5, stop="exit_after")
    for name in ("events.jsonl", "launch/attempts.jsonl"):
        with open(run / name, "a") as file:
            file.write('{"kind": "sto\n\0\0\0\n{"kind": "save", "step": "x"}\n')
    assert judge(run, 0, restarts=3).next == "again"
    assert judge(run, 1, restarts=3).next == "again"


def test_a_crash_loop_is_recognised_and_progress_is_not_one(tmp_path: Path) -> None:
    def after(began: int, step: int) -> str:
        return judge(folder_with(tmp_path, began=began, step=step), 1, restarts=2).next

    assert [after(0, 5), after(0, 7), after(5, 9), after(5, 9)] == ["again"] * 4
    last = judge(folder_with(tmp_path, began=5, step=9, error="boom"), 1, restarts=2)
    assert (last.next, last.why) == ("stop", "it failed 3 times from step 5 on, now with exit code 1: boom")


def folder_with(folder: Path, *, began: int, step: int, stop: str | None = None, error: str = "") -> Path:
    (folder / "launch").mkdir(exist_ok=True)
    ledger = EventFile(folder / "events.jsonl", job=1)
    ledger.event({"kind": "start", "step": began})
    ledger.event({"kind": "save", "step": step})
    if error:
        ledger.event({"kind": "error", "step": step, "text": error})
    if stop:
        ledger.event({"kind": "stop", "step": step, "reason": stop, "text": stop})
    ledger.close()
    return folder


# ---------------------------------------------------------------- AzureML's environment


@pytest.mark.parametrize("rank", range(16))
def test_ranks_under_azureml_know_their_node(rank: int) -> None:
    place = {"RANK": str(rank), "LOCAL_RANK": str(rank % 8), "NODE_RANK": str(rank // 8), "WORLD_SIZE": "16",
             "MASTER_ADDR": "10.0.0.4", "MASTER_PORT": "6105"}  # fmt: skip
    expected = Started(rank, 16, rank % 8, 8, "10.0.0.4", 6105)
    assert started_as(place, ranks_per_node=8) == expected
    assert started_as({**place, "AZUREML_NODE_COUNT": "2"}) == expected
    if rank >= 8:
        assert started_as(place) == expected


def test_a_time_limit_as_slurm_writes_it() -> None:
    assert [slurm._clock(seconds) for seconds in (30, 3600, 72_000, 360_000)] == [
        "00:01:00", "01:00:00", "20:00:00", "4-04:00:00"
    ]  # fmt: skip
