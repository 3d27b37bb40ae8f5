"""MLflow and Weights & Biases, fed from metrics.jsonl by a process of its own, which can neither slow nor end a run: it
reads behind the training, keeps its place in tracking/, and tries again what a server does not take.

Run as `python -m bloomery.monitor.tracking RUN KIND TARGET`, this file is that process; it ends after its stdin."""

import importlib.util
import json
import math
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from hashlib import blake2b
from pathlib import Path
from typing import Any, Protocol

from bloomery.base.errors import BloomeryError, DataError, Problem, mask
from bloomery.base.storage import own_folder, write_atomically
from bloomery.config.load import as_dict, leaves, load_recipe
from bloomery.monitor import names
from bloomery.monitor.gather import numbers
from bloomery.monitor.record import Record, from_json

FOLDER = "tracking"
PACKAGES = {"mlflow": "mlflow", "wandb": "wandb"}
"""Kind: package."""
_MOST_LINES = 200
"""At once."""
_LOOK_SECONDS, _LONGEST_WAIT = 2.0, 60.0
_PATIENCE_SECONDS = 20.0
"""After the training, for a server that does not answer."""


class Writer(Protocol):
    def open(self, run_id: str | None, name: str, params: Mapping[str, Any]) -> str:
        """The id of a new run, or of the one to resume."""
        ...

    def write(self, records: Sequence[Record]) -> None: ...

    def close(self) -> None: ...


class MLflow:
    """`target`: a tracking URI, or `auto` for MLFLOW_TRACKING_URI, as AzureML sets it."""

    def __init__(self, target: str, folder: Path) -> None:
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "1")  # this file has its own
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
        from mlflow import MlflowClient

        self._client = MlflowClient(tracking_uri=None if target == "auto" else target)
        self._run = ""

    def open(self, run_id: str | None, name: str, params: Mapping[str, Any]) -> str:
        from mlflow.entities import Param

        if run_id := run_id or os.environ.get("MLFLOW_RUN_ID"):
            self._run = run_id
            return run_id
        experiment = os.environ.get("MLFLOW_EXPERIMENT_ID")
        if experiment is None:
            title = os.environ.get("MLFLOW_EXPERIMENT_NAME", name)
            known = self._client.get_experiment_by_name(title)
            experiment = known.experiment_id if known else self._client.create_experiment(title)
        self._run = str(self._client.create_run(experiment, run_name=name).info.run_id)
        found = [Param(_plain(key), str(value)[:500]) for key, value in params.items()]
        for first in range(0, len(found), 100):
            self._client.log_batch(self._run, params=found[first : first + 100])
        return self._run

    def write(self, records: Sequence[Record]) -> None:
        from mlflow.entities import Metric

        found = [
            Metric(_plain(name), value, int(each.time * 1000), each.step)
            for each in records
            for name, value in numbers(each)
        ]
        for first in range(0, len(found), 1000):
            self._client.log_batch(self._run, metrics=found[first : first + 1000])

    def close(self) -> None:
        self._client.set_terminated(self._run)


class WandB:
    """`target`: a project. WANDB_MODE=offline writes into tracking/wandb, for `wandb sync`."""

    def __init__(self, target: str, folder: Path) -> None:
        self._project, self._folder = target, folder
        self._run: Any = None

    def open(self, run_id: str | None, name: str, params: Mapping[str, Any]) -> str:
        import wandb

        settings = wandb.Settings(console="off", disable_git=True, x_disable_stats=True)
        about = {"project": self._project, "name": name, "config": dict(params), "dir": str(self._folder)}
        self._run = wandb.init(id=run_id, resume="allow", settings=settings, **about)
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")
        return str(self._run.id)

    def write(self, records: Sequence[Record]) -> None:
        for each in records:
            self._run.log({**dict(numbers(each)), "step": each.step})

    def close(self) -> None:
        self._run.finish()


_WRITERS: dict[str, Callable[[str, Path], Writer]] = {"mlflow": MLflow, "wandb": WandB}


def start(kind: str, target: str, run_folder: Path) -> tuple[subprocess.Popen[bytes] | None, str]:
    """The process, which ends some time after its stdin is closed, or why there is none."""
    if importlib.util.find_spec(PACKAGES[kind]) is None:
        return None, f"the package {PACKAGES[kind]} is missing: `pip install bloomery[{kind}]`"
    try:
        own_folder(run_folder / FOLDER)
        with open(run_folder / FOLDER / f"{kind}.log", "ab") as log:
            command = [sys.executable, "-m", __name__, str(run_folder), kind, target]
            process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=log, stderr=log, start_new_session=True
            )  # fmt: skip
    except (OSError, BloomeryError) as error:
        return None, str(error)
    return process, ""


def feed(run: Path, kind: str, target: str, *, is_over: Callable[[], bool]) -> int:
    """Give all records to the target, in the order written, until the training `is_over`; those of steps that a later
    job did again included. Returns how many. DataError if the target took nothing for a while after that."""
    place = run / FOLDER / f"{kind}-{blake2b(target.encode(), digest_size=4).hexdigest()}.json"
    own_folder(place.parent)
    state: dict[str, Any] = json.loads(place.read_text()) if place.is_file() else {"run": None, "offset": 0}
    writer: Writer | None = None
    written, wait, ended = 0, _LOOK_SECONDS, math.inf
    while True:
        over = is_over()
        ended = min(ended, time.monotonic()) if over else math.inf
        try:
            if writer is None:
                recipe = load_recipe(str(run / names.RECIPE_FILE), is_saved=True).recipe
                opening = _WRITERS[kind](target, place.parent)
                params = {key: value for key, value in leaves(as_dict(recipe)) if value is not None}
                state["run"] = opening.open(state["run"], recipe.name, params)
                writer = opening
            records, offset = _next_records(run / names.METRICS_FILE, state["offset"])
            if records:
                writer.write(records)
            state["offset"], wait = offset, _LOOK_SECONDS
            written += len(records)
            write_atomically(place, json.dumps(state))
            if over and not records:
                writer.close()
                return written
            if records:
                continue
        except Exception as error:  # whatever a library raises when its server is away
            if time.monotonic() - ended > _PATIENCE_SECONDS:
                remedy = f"run `bloomery report {run} --to {kind}={target}` when it answers"
                raise DataError(Problem(f"{kind} at {target} does not take records: {error}", remedy=remedy)) from error
            print(mask(f"{kind}: {error}; trying again in {wait:.0f} s"), file=sys.stderr, flush=True)
            wait = min(2 * wait, _LONGEST_WAIT)
        time.sleep(min(wait, _LOOK_SECONDS) if over else wait)


def _next_records(metrics: Path, offset: int) -> tuple[list[Record], int]:
    """Whole lines from there on, and where they end."""
    if not metrics.is_file():
        return [], offset
    records: list[Record] = []
    with open(metrics, "rb") as file:
        file.seek(offset)
        while len(records) < _MOST_LINES and (line := file.readline()).endswith(b"\n"):
            records.append(from_json(line))
            offset += len(line)
    return records, offset


def _plain(name: str) -> str:
    """As MLflow wants it."""
    return re.sub(r"[^\w\-. /:]|\.\.|^/|//", "_", name)[:250]


def main(run: str, kind: str, target: str) -> int:
    over = threading.Event()

    def wait() -> None:
        sys.stdin.read()
        over.set()

    threading.Thread(target=wait, daemon=True).start()
    try:
        feed(Path(run), kind, target, is_over=over.is_set)
    except BloomeryError as error:
        print(f"{kind}: {error}", file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
