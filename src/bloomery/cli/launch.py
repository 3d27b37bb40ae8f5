"""`bloomery launch RECIPE --on TARGET`: write a job a person can read, start or submit it, follow it."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

from bloomery.base import exit_codes, signals
from bloomery.base.errors import Problem, RecipeError, StorageError
from bloomery.cli.arguments import add_recipe_arguments, done_samples, load, run_folder, whole_number
from bloomery.config.recipe import Recipe
from bloomery.launch import azureml, cron, here, hosts, slurm
from bloomery.launch.job import Job, LogTail, training_job, write_recipe
from bloomery.launch.restart import judge
from bloomery.launch.watch import job_of, remember_job

_TARGETS = ("local", "hosts", "slurm", "azureml")
_STEPS = ("download", "extract", "prepare", "train")
_PAUSE_SECONDS = 2.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_recipe_arguments(parser)
    parser.add_argument("--on", choices=_TARGETS, help="where; default: launch.on of the recipe")
    parser.add_argument("--run-dir", type=Path, help="folder of the run; default: runs/<name>")
    parser.add_argument("--dry-run", action="store_true", help="print what would be submitted; write and start nothing")
    parser.add_argument(
        "--follow", action="store_true", help="show the job's states and log until it ends (slurm, azureml)"
    )
    step = "first this step of the data, as an array of jobs (slurm); repeatable, in order; `train` may be the last"
    parser.add_argument("--step", dest="steps", action="append", choices=_STEPS, help=step)
    parser.add_argument("--array", type=whole_number(1), metavar="N", help="shares of each step; default: the recipe's")
    parser.add_argument("--after", type=Path, metavar="RUN", help=argparse.SUPPRESS)
    parser.add_argument("--code", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--ended", action="store_true", help=argparse.SUPPRESS)


def parse(parser: argparse.ArgumentParser, arguments: list[str]) -> argparse.Namespace:
    """At the end of a job its script asks what comes next, by the folder of the run."""
    after = arguments[arguments.index("--after") + 1] if "--after" in arguments[:-1] else None
    recipe = [f"{after}/launch/recipe.yaml"] if after else []
    return parser.parse_intermixed_args([*recipe, *arguments])


def run(args: argparse.Namespace) -> int:
    args.run_dir = args.after or args.run_dir
    args.overrides += [f"launch.on={args.on}"] if args.on else []
    recipe = load(args, warns=args.after is None).recipe
    recipe = _grown(recipe, args)
    job = training_job(recipe, run_folder(args, recipe))
    if args.after is not None:
        return _after(job, args.code, ended=args.ended)
    if args.steps and job.section.on != "slurm":
        remedy = "run `bloomery download`, `extract` and `prepare` themselves, with --unit K/N for a share"
        raise RecipeError(Problem(f"launch.on is {job.section.on}", "--step submits arrays to Slurm", remedy))
    if args.array and not args.steps:
        rule, remedy = "it is the number of shares of each --step", f"a chain of jobs is launch.array={args.array}"
        raise RecipeError(Problem(f"--array is {args.array}, without --step", rule, remedy, "command line"))
    target: Callable[[Recipe, Job, argparse.Namespace], int] = globals()[f"_on_{job.section.on}"]
    return target(recipe, job, args)


def _grown(recipe: Recipe, args: argparse.Namespace) -> Recipe:
    """With as many nodes as the next job gets."""
    launch, ramp = recipe.launch, recipe.batch.rampup
    if launch is None or ramp is None or not launch.nodes_after_ramp or done_samples(args, recipe) <= ramp.samples:
        return recipe
    return recipe.model_copy(update={"launch": launch.model_copy(update={"nodes": launch.nodes_after_ramp})})


def _after(job: Job, code: int, *, ended: bool) -> int:
    if not slurm.is_newest_start():
        signals.say("Slurm has started this job again, or cannot be reached: this start decides nothing")
        return exit_codes.OK
    attempt = judge(job.folder, code, restarts=job.section.restarts, job=os.environ["SLURM_JOB_ID"])
    done, job_id = slurm.act(attempt, job, ended=ended)
    if job_id:
        remember_job(job.folder, on="slurm", job_id=job_id)
    for text in [f"{attempt.why}: {done}", *(cron.revive(job.folder) if attempt.next == "again" else [])]:
        signals.say(text)
    return exit_codes.OK


def _on_local(recipe: Recipe, job: Job, args: argparse.Namespace) -> int:
    if args.dry_run:
        return _print("\n".join([*job.exports(), *job.section.setup, job.command()]))
    return _restarted(recipe, args, here.run)


def _on_hosts(recipe: Recipe, job: Job, args: argparse.Namespace) -> int:
    found = hosts.of(job)
    if args.dry_run:
        first = found[0].rpartition("@")[2]
        return _print(
            "\n\n".join(f"# {host}\n{hosts.script(job, host, i, first, 29500)}" for i, host in enumerate(found))
        )
    lost = set[str]()
    return _restarted(recipe, args, lambda job: hosts.run(job, hosts.of(job, lost), lost))


def _on_slurm(recipe: Recipe, job: Job, args: argparse.Namespace) -> int:
    steps = args.steps or ["train"]
    planned = [(step, *slurm.stage_job(job, step, args.array)) for step in steps if step != "train"]
    if args.dry_run:
        texts = [text for step, each, shares in planned for text in slurm.stage_scripts(each, step, shares)]
        return _print("\n".join([*texts, slurm.script(job)] if "train" in steps else texts))
    _refuse_second(job)
    write_recipe(job, recipe)
    job_id = ""
    for step, each, shares in planned:
        job_id = slurm.submit_stage(each, step, shares, job_id)
        print(f"submitted Slurm job {job_id}, which completes {step}; logs are in {job.folder}/logs/{step}", flush=True)
    if "train" in steps:
        job_id = slurm.submit(job.write("job.sh", slurm.script(job)), job, *slurm.dependency(job_id))
        remember_job(job.folder, on="slurm", job_id=job_id)
        print(f"submitted Slurm job {job_id}; logs are in {job.folder}/logs", flush=True)
    return _follow(job, job_id) if args.follow else exit_codes.OK


def _on_azureml(recipe: Recipe, job: Job, args: argparse.Namespace) -> int:
    from bloomery.config.yaml_nodes import dump_yaml

    document = dump_yaml(azureml.document(job, azureml.settings(recipe)))
    for warning in azureml.warnings(recipe):
        print(f"bloomery: warning: {warning}", file=sys.stderr)
    if args.dry_run:
        return _print(document)
    write_recipe(job, recipe)
    azureml.submit(job.write("job.yaml", document), follow=args.follow)
    return exit_codes.OK


def _refuse_second(job: Job) -> None:
    """While the one that was launched before is in the queue or runs, as far as this machine knows."""
    found = job_of(job.folder)
    if found.state in ("running", "pending") and str(os.getpid()) not in found.text.split():
        rule = "two trainings of one run would wait for each other, or undo each other's work"
        raise StorageError(Problem(f"{job.folder} {found.text}", rule, "end it first, or give another --run-dir"))


def _print(text: str) -> int:
    print(text)
    return exit_codes.OK


def _restarted(recipe: Recipe, args: argparse.Namespace, start: Callable[[Job], int]) -> int:
    """Start again for as long as that helps; the exit code of the last time."""
    folder = run_folder(args, recipe)
    job = training_job(recipe, folder)
    _refuse_second(job)
    write_recipe(job, recipe)
    remember_job(folder, on=job.section.on, process=os.getpid())
    while True:
        code = start(job)
        attempt = judge(folder, code, restarts=job.section.restarts)
        if attempt.next != "again" or signals.requested:
            signals.say(attempt.why)
            return code
        signals.say(f"{attempt.why}: starting again")
        time.sleep(_PAUSE_SECONDS)
        job = training_job(_grown(recipe, args), folder)


def _follow(job: Job, job_id: str) -> int:
    """The log of the run as it grows, between the states of the job."""
    tail = LogTail(job.main_log)
    for state in slurm.follow(job_id):
        for line in [*tail.lines(), *([state] if state else [])]:
            print(line, flush=True)
    for line in tail.lines():
        print(line, flush=True)
    return slurm.exit_code(job_id)
