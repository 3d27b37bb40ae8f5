"""One cell of the matrix: a small training in one layout, its undisturbed twin, and what became of it."""

from __future__ import annotations

import base64
import contextlib
import io
import os
import pickle
import shutil
import signal
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from subprocess import PIPE, STDOUT, Popen
from typing import Any

import yaml

from bloomery.base import exit_codes
from bloomery.checkpoint import folder as folders
from bloomery.cli.main import main
from bloomery.launch.local import run_local_ranks
from bloomery.monitor.history import read_events, read_metrics
from chaos.plant import Plant, planted
from checkpoints import damage, tensors_of
from conftest import SMALL, write_shard
from forked import alone

TESTS = Path(__file__).parents[1]
STEPS, HALF = 8, 5
"""Of a whole training, and of one that stops in the middle. Saves come at 2, 4, 6 and at every end."""
TWO = "launch={on: local, gpus_per_node: 2}"
LAYOUTS: Mapping[str, tuple[int, tuple[str, ...]]] = {
    "one rank": (1, ()),
    "tp2": (2, (TWO, "parallel.tp=2")),
    "pp2": (2, (TWO, "parallel.pp=2")),
    "dp2 zero1": (2, (TWO, "parallel.zero=1")),
    "dp2 zero3": (2, (TWO, "parallel.zero=3")),
    "dp2 zero0": (2, (TWO, "parallel.zero=0")),
}
RECIPE: dict[str, Any] = SMALL | {
    "name": "chaos",
    "batch": {"micro_batch_size": 2, "global_batch_size": 8},
    "train": {"for": f"{STEPS} steps", "evaluate": {"every": "4 steps", "steps": 1}},
    "checkpoint": {"phases": [{"every": "2 steps"}], "keep": {"last": 2}, "timeout": "20s"},
    "monitor": {"log_every": "1 steps", "tensorboard": False, "drift": {"every": "1 steps"}},
}
LIMIT_SECONDS = 90.0
"""A start that has not ended by then hangs, and its cell fails."""
CHANGING = ("seconds_per_step", "samples_per_second", "tokens_per_second", "tflops", "mfu", "job", "time")
CHANGING += ("memory_bytes", "peak_memory_bytes", "memory_share", "energy", "emissions", "timers", "rank_timers")
CHANGING += ("hardware_tflops", "megatron_tflops", "resources")
"""What two equal trainings may differ in."""


@dataclass(frozen=True)
class Ended:
    code: int
    said: str
    seconds: float | None
    """From the fault to the end; None if it never struck."""


class Stage:
    """A folder with shards and the undisturbed runs of each layout, made when they are first needed."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._made = 0
        write_shard(folder / "train")
        write_shard(folder / "valid", seed=1, documents=20)
        data = {"train": [{"path": str(folder / "train")}], "validation": {"v": [{"path": str(folder / "valid")}]}}
        (folder / "chaos.yaml").write_text(yaml.safe_dump(RECIPE | {"data": data}))

    def scene(self, layout: str, *overrides: str) -> Scene:
        self._made += 1
        place = self.folder / f"cell-{self._made}"
        place.mkdir()
        return Scene(self, place, layout, overrides)

    def twin(self, layout: str, overrides: tuple[str, ...], steps: int) -> Path:
        """The run folder of an undisturbed training that has done so many steps."""
        name = f"{layout}-{steps}-{'-'.join(overrides)}"
        place = self.folder / "".join(each for each in name if each.isalnum() or each == "-")
        if not place.exists():
            place.mkdir()
            scene = Scene(self, place, layout, overrides)
            ended = scene.start(f"train.exit_after={steps} steps")
            assert ended.code == exit_codes.OK, ended
        return place / "run"


class Scene:
    def __init__(self, stage: Stage, folder: Path, layout: str, overrides: tuple[str, ...]) -> None:
        self._stage, self._layout, self._overrides = stage, layout, overrides
        self.folder, self.run, self.notes = folder, folder / "run", folder / "notes"
        self.size, self._layout_overrides = LAYOUTS[layout]

    def words(self, *more: str) -> list[str]:
        own = [override.replace("{cell}", str(self.folder)) for override in self._overrides]
        recipe = ["train", str(self._stage.folder / "chaos.yaml"), *self._layout_overrides, *own, *more]
        return [*recipe, "--run-dir", str(self.run), "--device", "cpu", "--quiet"]

    def half_way(self) -> Path:
        """Become a run that has stopped after HALF steps."""
        shutil.copytree(self._stage.twin(self._layout, self._overrides, HALF), self.run, symlinks=True)
        return self.run

    def start(self, *more: str, plant: Plant | None = None, limit_seconds: float = LIMIT_SECONDS) -> Ended:
        """`bloomery train` as so many ranks, forked from a server that has imported torch, with a fault in them."""
        notes = self.notes
        shutil.rmtree(notes, ignore_errors=True)
        notes.mkdir()
        fault = None if plant is None else replace(plant, notes=str(notes))
        command = partial(planted, str(notes), fault, main)
        said = io.StringIO()
        with _ended_after(limit_seconds, notes) as hung, contextlib.redirect_stderr(said):
            if self.size == 1:
                code = alone(command, self.words(*more))
            else:
                code = run_local_ranks(self.size, command, self.words(*more))
        struck, ended = notes / "struck", time.time()
        seconds = ended - float(struck.read_text()) if struck.exists() else None
        text = (notes / "said").read_text(errors="replace") + said.getvalue()
        assert not hung, f"it hangs after {limit_seconds} s:\n{text}"
        return Ended(code, text, seconds)

    def as_user(
        self, plant: Plant | None = None, module: str = "bloomery.train.setup", before: Sequence[str] = (), **more: str
    ) -> Popen[str]:
        """The real command line, for faults that come from outside; `plant` begins when `module` is imported. `before`:
        words that run it somewhere else, and `more` environment variables."""
        self.notes.mkdir(exist_ok=True)
        variables = {**os.environ, "OMP_NUM_THREADS": "1", **more}
        if plant is not None:
            fault = base64.b64encode(pickle.dumps(replace(plant, notes=str(self.notes)))).decode()
            paths = [str(TESTS / "chaos" / "site"), str(TESTS), *filter(None, [os.environ.get("PYTHONPATH")])]
            variables |= {"CHAOS_PLANT": fault, "CHAOS_MODULE": module, "PYTHONPATH": os.pathsep.join(paths)}
        words = [*before, sys.executable, "-m", "bloomery", *self.words()]
        return Popen(words, env=variables, cwd=self._stage.folder, stdout=PIPE, stderr=STDOUT, text=True)

    def require_whole(self) -> None:
        """At the instant of a crash: `latest` names a complete checkpoint, and all that are complete are whole."""
        root = self.run / "checkpoints"
        whole = folders.complete_checkpoints(root)
        said = folders.read_latest(root)
        assert said is None or root / said in whole, f"latest names {said}"
        damaged = {path.name: found for path in whole if (found := damage(path))}
        assert not damaged, damaged

    def require_equal(self) -> None:
        """The run ends as its undisturbed twin did: every tensor and every record of a step, to the bit."""
        twin = self._stage.twin(self._layout, self._overrides, STEPS)
        ours, theirs = tensors_of(self.run), tensors_of(twin)
        assert ours.keys() == theirs.keys() != set()
        different = [name for name in ours if not ours[name].equal(theirs[name])]
        assert not different, f"{len(different)} of {len(ours)} tensors differ: {different[:3]}"
        ours_said, theirs_said = records(self.run), records(twin)
        assert len(ours_said) == len(theirs_said)
        other = {key for one, two in zip(ours_said, theirs_said, strict=True) for key in one if one[key] != two[key]}
        assert not other, f"records differ in {sorted(other)}"

    def events(self, kind: str) -> list[dict[str, Any]]:
        return [event for event in read_events(self.run / "events.jsonl") if event["kind"] == kind]


def records(run: Path) -> list[dict[str, Any]]:
    return [
        {key: value for key, value in asdict(record).items() if key not in CHANGING}
        for record in read_metrics(run / "metrics.jsonl")
    ]


@contextlib.contextmanager
def _ended_after(seconds: float, notes: Path) -> Iterator[list[int]]:
    """Kill the ranks that are still there by then, when they have said where they are; their process ids are in the
    list."""
    hung: list[int] = []

    def end() -> None:
        with contextlib.suppress(OSError):
            (notes.parent / "run" / "control" / "stacks").touch()
            time.sleep(5.0)  # they go to logs/stacks.txt, unless Python itself hangs
        for path in notes.glob("pid-*"):
            hung.append(int(path.read_text()))
            with contextlib.suppress(ProcessLookupError):
                os.kill(hung[-1], signal.SIGKILL)

    timer = threading.Timer(seconds, end)
    timer.start()
    try:
        yield hung
    finally:
        timer.cancel()
