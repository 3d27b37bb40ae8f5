"""Trainings to compare: what is to be run, by how many ranks, and what came of each. Running them is cli's
(run_trials.py), because that takes the real training loop."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from bloomery.base import exit_codes
from bloomery.launch.local import run_local_ranks

TRAIN_PREFIX, RESUME_PREFIX = "train-", "resume-"
# In the folder of a trial:
RUN, TRACE = "run", "trace"
RESULT = "trial.json"
RELOADED = "reloaded"
"""The checkpoint of all that was loaded, each tensor under `<layout>/<name>`."""
RESHARDED = "resharded.json"
"""By layout, the tensors of its checkpoint that were not restored bit for bit."""
FOLLOWED = "followed.json"
"""By layout, (step, name, loss) of what was trained from its checkpoint."""
TRUTH = "truth.json"
"""What the reference is compared with (compare.py)."""
_PRELOAD = ["bloomery.verify.run_trials", "bloomery.train.loop", "bloomery.train.setup", "bloomery.parallel.ranks"]

RankCommand = Callable[[Sequence[str]], int]
"""What every rank runs: `run_trials(["plan.json"])`."""


@dataclass(frozen=True)
class Trial:
    """One training of one layout: from the beginning, or from another layout's checkpoint."""

    layout: str
    world: int
    folder: str
    recipe: str
    """File of its complete recipe."""
    gradient_steps: int
    sample_steps: int
    keep_step: int | None = None
    """Whose checkpoint remains for other layouts to load."""
    resume_from: str | None = None
    """Checkpoint to resume from."""
    reload: dict[str, str] = field(default_factory=dict)
    """Layout -> its checkpoint: each is loaded and saved again before anything is trained."""
    follow_steps: int = 0
    """So many steps are trained from each of them, aside."""

    @property
    def source(self) -> str:
        """The layout whose checkpoint it resumes from."""
        assert self.resume_from is not None
        return Path(self.resume_from).parents[2].name.removeprefix(TRAIN_PREFIX)

    def file(self, name: str) -> Path:
        """One of the files and folders above."""
        return Path(self.folder) / name

    def checkpoint(self, step: int) -> Path:
        return self.file(RUN) / "checkpoints" / f"step-{step:08d}"


@dataclass(frozen=True)
class Outcome:
    seconds: float
    error: str = ""
    """Why it did not come to its end; empty if it did."""
    details: str = ""
    """The traceback of the rank that failed first."""


@dataclass(frozen=True)
class TrialPlan:
    """What one set of processes runs, one after the other."""

    device: str
    trials: list[Trial]
    quiet: bool

    def write(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self)))

    @classmethod
    def read(cls, path: Path) -> TrialPlan:
        facts = json.loads(path.read_text())
        return cls(facts["device"], [Trial(**each) for each in facts["trials"]], facts["quiet"])


def run_all(
    trials: Sequence[Trial], command: RankCommand, work: Path, *, device: str, quiet: bool
) -> dict[str, Outcome]:
    """The outcome of each trial, by its folder. Trials of as many ranks share one set of processes; after a failure the
    rest continue in a new one."""
    outcomes: dict[str, Outcome] = {}
    for world in dict.fromkeys(trial.world for trial in trials):
        waiting = [trial for trial in trials if trial.world == world]
        while waiting:
            plan = work / "plan.json"
            TrialPlan(device, waiting, quiet).write(plan)
            code = run_local_ranks(world, command, [str(plan)], preload=_PRELOAD)
            if code == exit_codes.INTERRUPTED:
                raise KeyboardInterrupt
            while waiting:
                trial = waiting.pop(0)
                outcomes[trial.folder] = _outcome(trial, code)
                if outcomes[trial.folder].error:
                    break
    return outcomes


def _outcome(trial: Trial, code: int) -> Outcome:
    folder = Path(trial.folder)
    if (folder / RESULT).is_file():
        return Outcome(json.loads((folder / RESULT).read_text())["seconds"])
    errors = sorted(folder.glob("error-*.json"), key=lambda path: path.stat().st_mtime_ns)
    if not errors:
        return Outcome(0.0, f"its ranks ended with exit code {code} and left no word")
    first = json.loads(errors[0].read_text())  # the others lost this one
    return Outcome(0.0, f"rank {first['rank']}: {first['error']}", first["details"])


def start_folder(trial: Trial) -> None:
    """Make room for a trial, with the checkpoint that it resumes from. For one rank."""
    shutil.rmtree(trial.file(RUN), ignore_errors=True)
    if trial.resume_from is not None:
        source = Path(trial.resume_from)
        shutil.copytree(source, trial.file(RUN) / "checkpoints" / source.name)


def tidy_folder(trial: Trial) -> None:
    """Leave of a trial that has ended what others need. For one rank."""
    for path in (trial.file(RUN) / "checkpoints").iterdir():
        if path.is_dir() and (trial.keep_step is None or path != trial.checkpoint(trial.keep_step)):
            shutil.rmtree(path)
