"""The steps of the data on Slurm: each an array whose tasks do a share of it, then one job that completes it."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import replace

from bloomery.base import exit_codes
from bloomery.base.errors import Problem, RecipeError
from bloomery.base.storage import own_folder
from bloomery.config.recipe import StageSection
from bloomery.launch import slurm
from bloomery.launch.job import Job


def stage_job(job: Job, step: str, array: int | None) -> tuple[Job, int]:
    """(the job of one share, how many there are). `array`: instead of that of the recipe."""
    stage = job.section.stages.get(step, StageSection())  # type: ignore[call-overload]
    words = [step, str(job.launch_folder / "recipe.yaml")] if step == "prepare" else [step, *stage.arguments]
    if step != "prepare" and not stage.arguments:
        rule = f"`bloomery {step}` needs arguments"
        raise RecipeError(Problem(f"launch.stages.{step}.arguments is missing", rule, f"see `bloomery {step} --help`"))
    own = {name: value for name in ("partition", "time_limit", "mem") if (value := getattr(stage, name)) is not None}
    one = {"nodes": 1, "gpus_per_node": 1, "gres": None, "cpus_per_task": stage.cpus_per_task, "array": 1}
    section = job.section.model_copy(update={**one, **own})
    return replace(job, name=f"{job.name}-{step}", section=section, words=words), array or stage.array


def scripts(job: Job, step: str, shares: int) -> list[str]:
    """That of the shares, if there are several, and that of the job that completes the step."""
    array = {"array": f"0-{shares - 1}", "output": slurm.log_file(job, f"{step}/%a")}
    several = [_script(job, array, f'--unit "$SLURM_ARRAY_TASK_ID/{shares}"')] if shares > 1 else []
    return [*several, _script(job, {"output": slurm.log_file(job, f"{step}/complete")}, "")]


def _script(job: Job, options: Mapping[str, object], share: str) -> str:
    """A share that fails is retried alone: those that depend on it wait, or are cancelled when it fails for good."""
    container = [f"--container-image={job.section.image}"] if job.section.image else []
    container += [f"--container-mounts={','.join(job.section.mounts)}"] if job.section.mounts else []
    start = shlex.join(["srun", "--ntasks=1", *container])
    given_up = shlex.quote(f"see {job.folder}/logs/{job.words[0]}; what depends on it is cancelled")
    return "\n".join(
        [
            "#!/bin/bash",
            *slurm.directives(job, options),
            f"cd {shlex.quote(str(job.directory))} || exit {exit_codes.USAGE}",
            *slurm.exports(job),
            *job.section.setup,
            "trap 'ended=1' TERM  # scancel, or the time limit: the last lines say why what depends on it is cancelled",
            f"{start} {job.command()} {share}".rstrip(),
            "code=$?",
            '[ "$code" = 0 ] && exit',
            "sleep 1  # what has ended srun may come here as well",
            f'[ "$code" = {exit_codes.USAGE} ] || [ "${{ended:-}}" ] || '
            f'[ "${{SLURM_RESTART_COUNT:-0}}" -ge {job.section.restarts} ] || '
            '{ scontrol requeue "$SLURM_JOB_ID" && exit "$code"; }',
            f'echo "[$(date -u +%FT%TZ)] $SLURM_JOB_NAME ${{SLURM_ARRAY_TASK_ID:-}} failed with exit code $code:" '
            f"{given_up} | tee -a {shlex.quote(str(job.main_log))}",
            "exit $code",
            "",
        ]
    )


def submit(job: Job, step: str, shares: int, after: str) -> str:
    """The id of the job that completes the step. `after`: a job that must have ended well before it begins."""
    own_folder(job.folder / "logs" / step, parents=True, may_be_linked=True)
    texts = scripts(job, step, shares)
    for name, text in zip((f"{step}-shares.sh", f"{step}.sh")[-len(texts) :], texts, strict=True):
        after = slurm.submit(job.write(name, text), job, *dependency(after))
    return after


def dependency(after: str) -> Sequence[str]:
    return [f"--dependency=afterok:{after}"] if after else []
