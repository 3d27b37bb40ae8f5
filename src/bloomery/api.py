"""Bloomery from Python: `import bloomery` offers what stands in `__all__` here, and loads it when it is first used.

run = bloomery.train("recipe.yaml", "train.for=100 steps")
run.metrics["lm loss"], run.checkpoints, bloomery.load_model(run.folder)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from bloomery.base.errors import DataError, Problem, RecipeError
from bloomery.config.recipe import Recipe
from bloomery.sizing.check import load_checked_recipe

if TYPE_CHECKING:  # torch takes a second
    from bloomery.data.manifest import ShardManifest
    from bloomery.data.samples import Samples
    from bloomery.data.tokenizer import Tokenizer
    from bloomery.model.transformer import Transformer

__all__ = [
    "Recipe",
    "RunFolder",
    "load_model",
    "load_recipe",
    "load_tokenizer",
    "open_run",
    "prepare",
    "samples",
    "train",
]
AnyPath = str | Path


def load_recipe(recipe: AnyPath, *overrides: str) -> Recipe:
    """A recipe file or the name of a shipped one, with overrides (`"lr.peak=1e-3"`), checked. RecipeError has every
    problem."""
    return load_checked_recipe(str(recipe), overrides).recipe


def prepare(recipe: Recipe | AnyPath, *, workers: int = 1) -> dict[str, ShardManifest]:
    """The shards of the recipe's `prepare:` section, by output: made, or found up to date."""
    from bloomery.data.tokenizer import Tokenizer
    from bloomery.prepare.run import plan_all

    recipe = _recipe(recipe)
    if recipe.tokenizer is None:
        return {}
    tokenizer = Tokenizer.load(recipe.tokenizer.path)
    plans = plan_all(recipe.prepare, tokenizer=tokenizer, seed=recipe.seed, workers=workers)
    return {plan.output: manifest for plan in plans if (manifest := plan.run(None, lambda _: None).manifest)}


def samples(recipe: Recipe | AnyPath, *overrides: str, first: int = 0, group: str | None = None) -> Samples:
    """The samples of a recipe in the order of a run, behind the `first` ones, as a dataset for your own
    loop; or those of a validation group."""
    from bloomery.data.samples import Samples

    return Samples(_recipe(recipe, *overrides), first=first, group=group)


def train(
    recipe: Recipe | AnyPath,
    *overrides: str,
    run_dir: AnyPath | None = None,
    device: str | None = None,
    start_from: AnyPath | None = None,
    changes: Sequence[str] = (),
    quiet: bool = True,
) -> RunFolder:
    """Train in this process, or resume, as `bloomery train` does; the run. RecipeError for a recipe of several ranks,
    which `bloomery train` starts."""
    from bloomery.base.accelerator import pick_device
    from bloomery.cli.hf import import_for
    from bloomery.sizing.layout import world_size
    from bloomery.train import loop
    from bloomery.train.setup import prepared_run

    recipe = _recipe(recipe, *overrides)
    if (ranks := world_size(recipe)) > 1:
        raise RecipeError(Problem(f"the recipe needs {ranks} ranks", "this process is one", "use `bloomery train`"))
    folder = Path(run_dir) if run_dir else Path("runs") / recipe.name
    options: dict[str, Any] = {
        "start_from": str(start_from) if start_from else None,
        "changes": changes,
        "import_weights": import_for,
    }
    with prepared_run(recipe, folder, device=pick_device(device), quiet=quiet, **options) as (run, state):
        loop.train(run, state)
    return RunFolder(folder)


def open_run(folder: AnyPath) -> RunFolder:
    """What a run has left, also while it trains. DataError if it is no run folder."""
    from bloomery.monitor import names

    if not (Path(folder) / names.RECIPE_FILE).is_file():
        raise DataError(Problem(f"{folder} is no run folder", "a run has a recipe.yaml", "name another folder"))
    return RunFolder(Path(folder))


def load_model(path: AnyPath, step: int | None = None, *, device: str = "cpu") -> Transformer:
    """The model of a checkpoint, or of the newest one of a run, or that of `step`: `model(tokens)` gives logits."""
    from bloomery.base.accelerator import pick_device
    from bloomery.checkpoint import load
    from bloomery.checkpoint.folder import CHECKPOINTS, checkpoint_named, find_checkpoint

    folder = find_checkpoint(Path(path)) if step is None else checkpoint_named([Path(path) / CHECKPOINTS], str(step))
    return load.load_model(load.read_checkpoint(folder), device=pick_device(device))


def load_tokenizer(path: AnyPath) -> Tokenizer:
    """From its folder or file, the Hub (`hf://org/name`), or of a run or a checkpoint."""
    from bloomery.checkpoint.folder import find_checkpoint
    from bloomery.checkpoint.load import read_checkpoint, tokenizer_of
    from bloomery.data.tokenizer import Tokenizer

    try:
        folder = find_checkpoint(Path(path))
    except DataError:
        return Tokenizer.load(str(path))
    return tokenizer_of(read_checkpoint(folder, tensors=False))


def _recipe(recipe: Recipe | AnyPath, *overrides: str) -> Recipe:
    if not isinstance(recipe, Recipe):
        return load_recipe(recipe, *overrides)
    if overrides:
        raise RecipeError(Problem("overrides belong to a recipe's file or name", remedy="pass them to load_recipe"))
    return recipe


@dataclass(frozen=True)
class RunFolder:
    """A run on the disk. What it has is read when it is first asked for: open it again to see more of a live one."""

    folder: Path

    @cached_property
    def recipe(self) -> Recipe:
        return load_recipe(self.folder / "recipe.yaml")

    @cached_property
    def metrics(self) -> dict[str, NDArray[Any]]:
        """Columns over the logged steps, each loss by its name: `plot(run.metrics["step"], run.metrics["lm loss"])`."""
        return _columns([{**each, **each.pop("losses")} for each in self._records("step")])

    @cached_property
    def validation(self) -> dict[str, dict[str, NDArray[Any]]]:
        """The same for every group."""
        records = [{**each, **each.pop("losses")} for each in self._records("validation") if each.get("part") != "test"]
        groups = dict.fromkeys(each["group"] for each in records)
        return {group: _columns([each for each in records if each["group"] == group]) for group in groups}

    @cached_property
    def events(self) -> list[dict[str, Any]]:
        from bloomery.monitor.history import read_events

        return read_events(self.folder / "events.jsonl")

    @property
    def checkpoints(self) -> dict[int, Path]:
        """Complete ones by step."""
        from bloomery.checkpoint.folder import CHECKPOINTS, complete_checkpoints, step_of

        return {step_of(path): path for path in complete_checkpoints(self.folder / CHECKPOINTS)}

    def _records(self, kind: str) -> list[dict[str, Any]]:
        from bloomery.monitor.history import read_metrics

        path = self.folder / "metrics.jsonl"
        return [asdict(each) for each in read_metrics(path) if each.kind == kind] if path.exists() else []


def _columns(records: Sequence[dict[str, Any]]) -> dict[str, NDArray[Any]]:
    """Of all fields that are one value."""
    names = [name for name, value in records[0].items() if not isinstance(value, dict)] if records else []
    return {name: np.array([each.get(name) for each in records]) for name in names}
