"""One description of a job for every target: what runs on how many machines, in which environment, and its files."""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from bloomery.base.hub import HUB
from bloomery.base.storage import own_folder, write_atomically
from bloomery.config.load import as_yaml
from bloomery.config.recipe import LaunchSection, Recipe

ENVIRONMENT = {
    "OMP_NUM_THREADS": ("1", "else every rank starts a thread for each core of the node"),
    "PYTHONUNBUFFERED": ("1", "the log has the last lines of a rank that is killed"),
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": ("1", "a rank that is lost ends the others' collectives"),
    "TORCH_CPP_LOG_LEVEL": ("ERROR", "a lost rank is reported once, not in pages of C++ frames"),
}
"""Of every rank, with the reason that stands beside it in scripts; `launch.env` comes on top."""


@dataclass(frozen=True)
class Job:
    name: str
    folder: Path
    """The run folder, absolute."""
    section: LaunchSection
    words: Sequence[str]
    """Arguments of `bloomery` on every rank."""
    directory: Path = field(default_factory=Path.cwd)
    """Where paths of the recipe begin."""

    @property
    def launch_folder(self) -> Path:
        """What was submitted, and what became of it."""
        return self.folder / "launch"

    @property
    def main_log(self) -> Path:
        return self.folder / "logs" / "main_log.txt"

    @property
    def program(self) -> list[str]:
        """This very `bloomery`, or that of the container."""
        return ["bloomery"] if self.section.image and self.section.on == "slurm" else [sys.executable, "-m", "bloomery"]

    def command(self) -> str:
        """What every rank does."""
        return shlex.join([*self.program, *self.words])

    def script(self, name: str, *more: str, **values: object) -> str:
        """A file of launch/scripts, with the value of each @name@ in it. `more`: lines of set-up besides the usual."""
        log = shlex.quote(str(self.main_log))
        known: dict[str, object] = {
            "directory": shlex.quote(str(self.directory)),
            "run": shlex.quote(str(self.folder)),
            "log": log,
            "setup": "\n".join([*self.exports(), *more, *self.section.setup]),
            "command": self.command(),
            # Behind a command: crashes and errors stand in the log of the run too, which has all the rest.
            "keep_errors": f"2> >(trap '' HUP INT TERM; exec tee -a {log} >&2)",
        }
        text = Path(__file__).with_name("scripts").joinpath(f"{name}.sh").read_text()
        return re.sub(r"@(\w+)@", lambda found: str({**known, **values}[found[1]]), text)

    def check(self, *options: str) -> list[str]:
        """What examines a node."""
        recipe = str(self.launch_folder / "recipe.yaml")
        return [*self.program, "doctor", "--node", *options, recipe, "--run-dir", str(self.folder)]

    def exports(self) -> list[str]:
        """Lines of bash; the reason of each variable stands behind it."""
        own = {name: (value, reason) for name, (value, reason) in ENVIRONMENT.items() if name not in self.section.env}
        theirs = {name: (value, "launch.env") for name, value in self.section.env.items()}
        lines = {f"export {name}={shlex.quote(value)}": reason for name, (value, reason) in (own | theirs).items()}
        width = max(map(len, lines))
        return [f"{line:<{width}}  # {reason}" for line, reason in lines.items()]

    def write(self, name: str, text: str) -> Path:
        """Into the launch folder; the path."""
        own_folder(self.launch_folder, parents=True, may_be_linked=True)
        path = self.launch_folder / name
        write_atomically(path, text)
        return path


def training_job(recipe: Recipe, folder: Path) -> Job:
    """Every start reads the recipe in the launch folder, so that it can be edited between two jobs of a chain."""
    folder = folder.absolute()
    words = ["train", str(folder / "launch" / "recipe.yaml"), "--run-dir", str(folder)]
    return Job(recipe.name, folder, recipe.launch or LaunchSection(), words)


def inputs(recipe: Recipe) -> Iterator[tuple[str, str]]:
    """(field, path) of what a training reads."""
    if recipe.tokenizer is not None and not recipe.tokenizer.path.startswith(HUB):
        yield "tokenizer.path", recipe.tokenizer.path
    for place, sources in recipe.data.groups.items() if recipe.data else ():
        yield from ((f"{place}.{i}.path", source.path) for i, source in enumerate(sources))


def write_recipe(job: Job, recipe: Recipe) -> None:
    job.write("recipe.yaml", as_yaml(recipe))
    own_folder(job.main_log.parent, parents=True, may_be_linked=True)


class LogTail:
    """What another process appends to a log from now on."""

    def __init__(self, path: Path) -> None:
        self._path, self._rest = path, b""
        self._offset = path.stat().st_size if path.exists() else 0

    def lines(self) -> list[str]:
        """Those that are complete since the last call."""
        if not self._path.exists():
            return []
        with open(self._path, "rb") as file:
            file.seek(self._offset)
            content = file.read()
        self._offset += len(content)
        *whole, self._rest = (self._rest + content).split(b"\n")
        return [line.decode(errors="replace") for line in whole]
