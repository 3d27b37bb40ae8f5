"""Scripts that run every hour or every day as a Slurm job that submits itself again, for clusters without cron.

The job lives in `launch/cron-hourly/` of the run, and runs every `*.sh` there, also those that people add. `watch` and
the end of each training job look whether it is still in the queue.
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from bloomery.base.bounded import read_text
from bloomery.base.errors import DataError, RecipeError
from bloomery.base.storage import own_folder, write_atomically
from bloomery.base.units import Duration
from bloomery.launch import slurm
from bloomery.launch.job import Job

_ID = "job.id"


def install(job: Job, name: str, every: Duration, sync_target: str | None) -> str:
    """Write the scripts and submit the first job; its id."""
    folder = own_folder(job.launch_folder / f"cron-{name}", parents=True, may_be_linked=True)
    own_folder(job.main_log.parent, parents=True, may_be_linked=True)
    run, bloomery = str(job.folder), [sys.executable, "-m", "bloomery"]
    write_atomically(folder / "watch.sh", shlex.join([*bloomery, "watch", run, "--pulse"]) + "\n")
    if sync_target:
        write_atomically(folder / "sync.sh", shlex.join([*bloomery, "sync", run, sync_target]) + "\n")
    write_atomically(folder / "job", _script(job, folder, name, every, bloomery))
    return _submit(folder)


def _script(job: Job, folder: Path, name: str, every: Duration, bloomery: list[str]) -> str:
    small = {"nodes": 1, "gpus_per_node": 1, "gres": None, "time_limit": None, "mem": None, "cpus_per_task": None}
    one = Job(f"{job.name}-{name}", job.folder, job.section.model_copy(update={**small, "extra_lines": []}), [])
    return one.script(
        "cron",
        directives="\n".join(slurm.directives(one, {"output": slurm.log_file(job, f"cron-{name}")})),
        here=shlex.quote(str(folder)),
        seconds=max(1, round(every.seconds)),
        id=_ID,
        watch=shlex.join([*bloomery, "watch", str(job.folder), "--json"]),
    )


def _submit(folder: Path) -> str:
    if (before := folder / _ID).exists():
        with suppress(DataError):  # of an earlier `watch install`, or gone
            slurm.cancel(read_text(before).strip())
    job_id = slurm.sbatch(folder / "job")
    write_atomically(folder / _ID, f"{job_id}\n")
    return job_id


def lost(run: Path) -> Iterator[tuple[str, Path]]:
    """Names and folders of those that are not in the queue any more."""
    for path in sorted((run / "launch").glob(f"cron-*/{_ID}")):
        job_id = read_text(path).strip()
        with suppress(DataError, RecipeError):  # nobody knows: Slurm cannot be asked from here, or now
            if all(facts["JobState"] in slurm.ENDED for facts in slurm.tasks(job_id).values()):
                yield path.parent.name, path.parent


def revive(run: Path) -> list[str]:
    """Submit them again; what was done."""
    return [f"{name} was not in the queue any more: submitted again as {_submit(folder)}" for name, folder in lost(run)]
