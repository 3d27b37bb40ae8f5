"""Jobs of Slurm: `srun` starts one task for each rank, and the ranks themselves answer signals. (A signal kills the
agent of torchrun and leaves its workers behind.)"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from bloomery.base import exit_codes
from bloomery.base.errors import DataError, Problem, RecipeError
from bloomery.base.storage import own_folder
from bloomery.config.recipe import StageSection
from bloomery.launch.doctor import bad_nodes
from bloomery.launch.job import Job
from bloomery.launch.restart import Attempt

ENDED = (
    *("BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL"),
    *("OUT_OF_MEMORY", "PREEMPTED", "TIMEOUT"),
)
"""States of jobs that do not come back; all others are in the queue, or run."""
_NEVER_RAN = ("CANCELLED", "00:00:00")
_POLL_SECONDS = 1.0


def script(job: Job) -> str:
    """What `sbatch` gets, and a person reads."""
    section, is_chain = job.section, job.section.array > 1
    own = {
        "signal": f"TERM@{section.save_before.seconds:.0f}" if section.time_limit else None,
        "array": f"1-{section.array}%1" if is_chain else None,
        "output": log_file(job, f"{job.name}_{'%A_%a' if is_chain else '%j'}"),
    }
    return _script(
        job,
        "training",
        own,
        recipe=job.launch_folder / "recipe.yaml",
        check=shlex.join(["--ntasks-per-node=1", *_container(job), *job.check()]),
        srun=shlex.join(["srun", "--kill-on-bad-exit=1", "--wait=60", *_container(job)]),
        after=shlex.join([sys.executable, "-m", "bloomery", "launch", "--after", str(job.folder)]),
        interrupted=exit_codes.INTERRUPTED,
    )


def _script(job: Job, name: str, options: Mapping[str, object], **values: object) -> str:
    cores = "export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK  # srun does not take it from sbatch"
    more = [cores] if job.section.cpus_per_task else []
    return job.script(name, *more, directives="\n".join(directives(job, options)), **values)


def _container(job: Job) -> list[str]:
    image, mounts = job.section.image, job.section.mounts
    options = [f"--container-image={image}", f"--container-workdir={job.directory}"] if image else []
    return [*options, *([f"--container-mounts={','.join(mounts)}"] if mounts else [])]


def stage_job(job: Job, step: str, array: int | None) -> tuple[Job, int]:
    """(the job of one share of a step of the data, how many there are). `array`: instead of that of the recipe."""
    stage = job.section.stages.get(step, StageSection())  # type: ignore[call-overload]
    words = [step, str(job.launch_folder / "recipe.yaml")] if step == "prepare" else [step, *stage.arguments]
    if step != "prepare" and not stage.arguments:
        rule = f"`bloomery {step}` needs arguments"
        raise RecipeError(Problem(f"launch.stages.{step}.arguments is missing", rule, f"see `bloomery {step} --help`"))
    own = {name: value for name in ("partition", "time_limit", "mem") if (value := getattr(stage, name)) is not None}
    one = {"nodes": 1, "gpus_per_node": 1, "gres": None, "cpus_per_task": stage.cpus_per_task, "array": 1}
    section = job.section.model_copy(update={**one, **own})
    return replace(job, name=f"{job.name}-{step}", section=section, words=words), array or stage.array


def stage_scripts(job: Job, step: str, shares: int) -> list[str]:
    """That of the shares, if there are several, and that of the job that completes the step. A share that fails is
    retried alone: those that depend on it wait, or are cancelled when it fails for good."""
    complete: dict[str, object] = {"output": log_file(job, f"{step}/complete")}
    several: dict[str, object] = {"array": f"0-{shares - 1}", "output": log_file(job, f"{step}/%a")}
    texts = [(complete, "")] if shares == 1 else [(several, f' --unit "$SLURM_ARRAY_TASK_ID/{shares}"'), (complete, "")]
    values = {
        "srun": shlex.join(["srun", "--ntasks=1", *_container(job)]),
        "given_up": shlex.quote(f"see {job.folder}/logs/{step}; what depends on it is cancelled"),
        "restarts": job.section.restarts,
        "usage": exit_codes.USAGE,
    }
    return [_script(job, "share", options, share=share, **values) for options, share in texts]


def submit_stage(job: Job, step: str, shares: int, after: str) -> str:
    """The id of the job that completes the step. `after`: a job that must have ended well before it begins."""
    own_folder(job.folder / "logs" / step, parents=True, may_be_linked=True)
    texts = stage_scripts(job, step, shares)
    for name, text in zip((f"{step}-shares.sh", f"{step}.sh")[-len(texts) :], texts, strict=True):
        after = submit(job.write(name, text), job, *dependency(after))
    return after


def dependency(after: str) -> Sequence[str]:
    return [f"--dependency=afterok:{after}"] if after else []


def log_file(job: Job, pattern: str) -> str:
    """Of a job; `%` of the folder's own name is none of Slurm's."""
    return f"{str(job.folder).replace('%', '%%')}/logs/{pattern}.log"


def directives(job: Job, more: Mapping[str, object]) -> list[str]:
    """`#SBATCH` lines."""
    section = job.section
    options: dict[str, object] = {
        "job-name": job.name,
        "nodes": section.nodes,
        "ntasks-per-node": section.gpus_per_node,
        "gres": f"{section.gres}:{section.gpus_per_node}" if section.gres else None,
        "cpus-per-task": section.cpus_per_task,
        "mem": section.mem,
        "partition": section.partition,
        "account": section.account,
        "qos": section.qos,
        "constraint": section.constraint,
        "exclude": _excluded(job),
        "time": _clock(section.time_limit.seconds) if section.time_limit else None,
        **more,
        "open-mode": "append",
        "kill-on-invalid-dep": "yes",
    }
    lines = [f"#SBATCH --{name}={shlex.quote(str(value))}" for name, value in options.items() if value is not None]
    return [*lines, "#SBATCH --requeue", *section.extra_lines]


def _excluded(job: Job) -> str | None:
    """Nodes that it is not given."""
    return ",".join([*filter(None, [job.section.exclude]), *bad_nodes(job.folder)]) or None


def _clock(seconds: float) -> str:
    """`1-02:03:00`. Slurm counts whole minutes, and rounds up."""
    minutes = max(1, int(seconds // 60))
    days = f"{minutes // 1440}-" if minutes >= 1440 else ""
    return f"{days}{minutes // 60 % 24:02}:{minutes % 60:02}:00"


def submit(path: Path, job: Job, *options: str) -> str:
    """The job's id. RecipeError for what this cluster would refuse, or keep pending for ever."""
    _slurm("sbatch", "--test-only", *options, str(path))
    limit, most = job.section.time_limit, _longest_seconds(job.section.partition)
    if limit and most is not None and limit.seconds > most:
        rule = f"its partition runs jobs of at most {_clock(most)}, so that it would be pending for ever"
        raise RecipeError(Problem(f"launch.time_limit is {limit}", rule, "shorten it, or choose another partition"))
    return sbatch(path, *options)


def cancel(job_id: str) -> None:
    _slurm("scancel", job_id)


def sbatch(path: Path, *options: str) -> str:
    """The id of the job."""
    return _slurm("sbatch", "--parsable", *options, str(path)).strip().partition(";")[0]


def _longest_seconds(partitions: str | None) -> float | None:
    """In any of them, `a,b`, or the default; None without a limit."""
    lines = _slurm("scontrol", "--oneliner", "--all", "show", "partition").splitlines()
    found = [dict(re.findall(r"(\w+)=(\S*)", line)) for line in lines]
    wanted = [
        each
        for each in found
        if (each["PartitionName"] in partitions.split(",") if partitions else each["Default"] == "YES")
    ]
    limits = [_seconds(each["MaxTime"]) for each in wanted]
    return max((limit for limit in limits if limit is not None), default=None) if None not in limits else None


def _seconds(clock: str) -> float | None:
    """Of `1-02:03:04`; None of `UNLIMITED`."""
    found = re.fullmatch(r"(?:(\d+)-)?(\d+):(\d+):(\d+)", clock)
    if not found:
        return None
    days, hours, minutes, seconds = (int(part or 0) for part in found.groups())
    return ((days * 24 + hours) * 60 + minutes) * 60 + seconds


def tasks(job_id: str) -> dict[str, dict[str, str]]:
    """Facts of the job, or of every task of its array, by id; empty once Slurm has forgotten it. DataError where Slurm
    does not answer, RecipeError where it is not installed."""
    try:
        shown = _slurm("scontrol", "--oneliner", "show", "job", job_id)
    except DataError as error:
        if "Invalid job id" in str(error):
            return {}
        raise
    found = (
        dict(re.findall(r"(?:^| )(\w+(?:/\w+)?)=(.*?)(?= \w+(?:[/:]\w+)*=|$)", line)) for line in shown.splitlines()
    )
    return {facts["JobId"]: facts for facts in found if "JobId" in facts}


def follow(job_id: str) -> Iterator[str]:
    """A line whenever the state of the job or of a task changes, until all have ended; empty while nothing does."""
    states: dict[str, str] = {}
    while True:
        try:
            now = tasks(job_id)
        except DataError:  # its controller is restarted, for instance
            yield ""
            time.sleep(_POLL_SECONDS)
            continue
        for name, facts in now.items():
            reason = f" ({facts['Reason']})" if facts.get("Reason", "None") != "None" else ""
            where = f" on {facts['NodeList']}" if facts.get("NodeList", "(null)") not in ("", "(null)") else ""
            if states.get(name) != (state := f"{facts['JobState']}{reason}{where}"):
                states[name] = state
                yield f"Slurm job {name}: {state}"
        if all(facts["JobState"] in ENDED for facts in now.values()):
            return
        yield ""
        time.sleep(_POLL_SECONDS)


def exit_code(job_id: str) -> int:
    """Of the job, or the last task of its chain that ran; that for interrupts where it was cancelled."""
    ran = [facts for facts in tasks(job_id).values() if (facts["JobState"], facts["RunTime"]) != _NEVER_RAN]
    last = max(ran, key=lambda facts: int(facts.get("ArrayTaskId", 0)), default={"JobState": "CANCELLED"})
    if last["JobState"] == "CANCELLED":
        return exit_codes.INTERRUPTED
    code, number = map(int, last["ExitCode"].split(":"))
    return code or (exit_codes.LOST_RANK if number else exit_codes.OK)


def is_newest_start(environment: Mapping[str, str] = os.environ) -> bool:
    """Whether Slurm knows of no later start of this job. A node that was cut off from the network may come back when
    its job has long been running elsewhere, under the same id: the old one must decide nothing."""
    own = environment["SLURM_JOB_ID"]
    return tasks(own).get(own, {}).get("Restarts") == environment.get("SLURM_RESTART_COUNT", "0")


def act(attempt: Attempt, job: Job, *, ended: bool, environment: Mapping[str, str] = os.environ) -> tuple[str, str]:
    """Within a job at its end: put it into the queue again, or call off the rest of its chain. (What was done, the id
    of a new chain.)

    `job`: as it should be from now on. `ended`: Slurm has ended the job itself: at its time limit, or because somebody
    has cancelled it."""
    own, array = environment["SLURM_JOB_ID"], environment.get("SLURM_ARRAY_JOB_ID")
    if attempt.next != "again":
        if array:
            _slurm("scancel", "--state=PENDING", array)
        return ("the rest of the chain is cancelled" if array else "nothing is started again"), ""
    nodes, has = job.section.nodes, int(environment["SLURM_JOB_NUM_NODES"])
    excluded = _excluded(job)
    without = [f"ExcNodeList={excluded}"] if excluded else []
    if array:
        left = int(environment["SLURM_ARRAY_TASK_MAX"]) - int(environment["SLURM_ARRAY_TASK_ID"])
        if not left:
            return "this was the last job of the chain: launch again", ""
        if nodes != has:  # Slurm does not resize arrays
            _slurm("scancel", "--state=PENDING", array)
            size = [f"--nodes={nodes}", f"--array=1-{left}%1", *([f"--exclude={excluded}"] if excluded else [])]
            new = submit(job.launch_folder / "job.sh", job, *size, f"--dependency=afterany:{own}")
            return f"the chain continues with {nodes} nodes", new
        if without:
            _slurm("scontrol", "update", f"JobId={array}", *without)
        return "the next job of the chain continues", ""
    facts = tasks(own).get(own, {})
    ran, limit = (_seconds(facts.get(name, "")) for name in ("RunTime", "TimeLimit"))
    if ended and (ran is None or limit is None or ran < limit):
        return "somebody has cancelled the job, so it is not started again", ""
    _slurm("scontrol", "requeue", own)
    changes = [f"NumNodes={nodes}", f"NumTasks={nodes * job.section.gpus_per_node}"] if nodes != has else []
    if changes or without:
        _slurm("scontrol", "update", f"JobId={own}", *changes, *without)
    return "the job is in the queue again", ""


def _slurm(*words: str) -> str:
    """What a command of Slurm prints. DataError with what it says when it fails."""
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=120)
    except FileNotFoundError:
        rule = "launch.on=slurm needs Slurm's commands, on a login node of the cluster"
        raise RecipeError(Problem(f"there is no {words[0]} here", rule, "or see the script with --dry-run")) from None
    except subprocess.TimeoutExpired:
        raise DataError(Problem(f"`{words[0]}` does not answer", "its controller may be down", "try again")) from None
    if done.returncode:
        said = " ".join(done.stderr.split()) or f"exit code {done.returncode}"
        raise DataError(Problem(f"`{words[0]}` refuses: {said}", remedy="correct `launch:` in the recipe"))
    return done.stdout
