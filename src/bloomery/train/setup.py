"""Put a run together, in the order in which things can fail: recipe, folder, data, then weights, then the past."""

from __future__ import annotations

import platform
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import bloomery
from bloomery.base.accelerator import device_name, out_of_memory_problem, pick_device
from bloomery.base.errors import BloomeryError, DataError, Problem, RecipeError, StorageError
from bloomery.base.storage import make_run_folder, write_atomically
from bloomery.base.units import Duration, format_count
from bloomery.checkpoint.folder import latest_checkpoint, verify
from bloomery.checkpoint.load import load_tensors, read_recipe_of, read_state
from bloomery.checkpoint.save import estimate_save_seconds
from bloomery.config.describe import as_dict, as_yaml, fingerprint
from bloomery.config.recipe import Recipe
from bloomery.data.batch import Source
from bloomery.data.blend import BlendState
from bloomery.data.loader import Loader
from bloomery.data.open import open_data
from bloomery.model.build import build_model, materialise
from bloomery.model.recompute import apply_recompute
from bloomery.monitor import names
from bloomery.monitor.console import Console
from bloomery.monitor.history import read_events
from bloomery.monitor.journal import Journal
from bloomery.monitor.meters import IntervalMeter
from bloomery.parallel.runner import PlainRunner
from bloomery.sizing.hardware import peak_flops
from bloomery.sizing.layout import world_size
from bloomery.sizing.parameters import count_parameters
from bloomery.sizing.plan import TrainingPlan
from bloomery.train.loss_scale import LossScale
from bloomery.train.optimizer import Optimizer
from bloomery.train.run import Run
from bloomery.train.state import TrainState
from bloomery.train.stop import StopRules

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_FIXED_FOR_A_RUN = ("model", "seed", "tokenizer", "data.order", "data.split", "optimizer.name")
"""Fields that a resumed run may not change: they would make it another training."""


@contextmanager
def prepared_run(
    recipe: Recipe, folder: Path, *, device: str | None = None, quiet: bool = False
) -> Iterator[tuple[Run, TrainState]]:
    """A run ready for `train`, resumed from its newest checkpoint if it has one; closed at the end, come what may."""
    refuse_what_one_process_cannot_do(recipe)
    plan = TrainingPlan.of(recipe)
    target = pick_device(device)
    make_run_folder(folder)
    (folder / "control").mkdir(exist_ok=True)
    past = _past_of(recipe, folder)
    consumed = past.state.consumed_samples
    with open_data(recipe, blend_state=past.blend, consumed_samples=consumed, before=past.recipe) as data:
        job = 1 + _starts_so_far(folder)
        journal = Journal(
            folder,
            job=job,
            train_steps=plan.train_steps,
            tensorboard=recipe.monitor.tensorboard,
            resume_step=past.state.step,
            console=Console(plan.train_steps, quiet=quiet),
        )
        loader: Loader | None = None
        try:
            for warning in data.warnings:
                journal.warning(warning)
            write_atomically(folder / "recipe.yaml", as_yaml(recipe))
            model = build_model(recipe.model)
            materialise(model, recipe.model, seed=recipe.seed, device=target, dtype=torch.float32)
            apply_recompute(model, recipe.parallel.recompute)
            optimizer = Optimizer(
                list(model.named_parameters()), recipe.optimizer, compute_dtype=_DTYPES[recipe.precision]
            )
            if past.checkpoint is not None:
                load_tensors(past.checkpoint, optimizer.tensors())
                optimizer.restored()
            runner = PlainRunner(
                model,
                device=target,
                compile_model=target.type != "cpu" if recipe.train.compile == "auto" else recipe.train.compile,
                dropout_seed=recipe.seed if recipe.model.dropout > 0 else None,
            )
            loader = Loader(
                data.train,
                micro_batch_size=recipe.batch.micro_batch_size,
                batch_size_at=plan.batch.global_batch_at,
                pin_memory=target.type != "cpu",
            )
            loader.seek(past.state.consumed_samples)
            estimate = 0.0
            if isinstance(recipe.train.exit_after, Duration):
                estimate = estimate_save_seconds(folder, optimizer.tensors())
            facts = _start_facts(recipe, target, past)
            journal.notice(_greeting(facts, plan, past))
            run = Run(
                recipe=recipe,
                plan=plan,
                folder=folder,
                device=target,
                runner=runner,
                optimizer=optimizer,
                loader=loader,
                blend=data.blend,
                source_keys=data.train.keys,
                validation=data.validation,
                validation_samples=_validation_samples(recipe, data.validation),
                journal=journal,
                meter=IntervalMeter(past.interval),
                stop=StopRules(
                    plan,
                    exit_after=recipe.train.exit_after,
                    control=folder / "control",
                    save_seconds_estimate=estimate,
                ),
                job=job,
                peak_flops=peak_flops(device_name(target), recipe.precision),
                start_facts=facts,
            )
            yield run, past.state
        except Exception as error:
            journal.event("error", past.state.step, text=str(error) or type(error).__name__)
            if isinstance(error, BloomeryError):
                try:
                    journal.close()
                except StorageError as more:  # tell both: why it ended, and what could not be written
                    error.problems += more.problems
            problem = out_of_memory_problem(error, target)
            if problem is not None:
                raise RecipeError(problem) from error
            raise
        finally:
            if loader is not None:
                loader.close()
            journal.close()


def refuse_what_one_process_cannot_do(recipe: Recipe) -> None:
    """RecipeError for everything in the recipe that this version of `train` would have to ignore."""
    problems = []
    ranks = recipe.parallel.tp * recipe.parallel.pp * recipe.parallel.cp
    if ranks > 1 or world_size(recipe) > 1:
        what = f"the recipe asks for {max(ranks, world_size(recipe))} ranks"
        remedy = "override parallel.tp=1 parallel.pp=1 parallel.cp=1 launch=null to try it on one device"
        problems.append(Problem(what, "this version trains on one process", remedy))
    if recipe.precision == "fp8":
        problems.append(
            Problem("precision is fp8", "this version computes in fp32, bf16 or fp16", "use precision=bf16")
        )
    if recipe.monitor.carbon is not None:
        problems.append(
            Problem("monitor.carbon is set", "this version does not measure emissions", "override monitor.carbon=null")
        )
    if recipe.data is None:
        problems.append(Problem("data is missing", "training needs shards", "add `data:` with `train:` to the recipe"))
    if problems:
        raise RecipeError(problems)


@dataclass(frozen=True)
class _Past:
    state: TrainState
    checkpoint: Path | None
    interval: Mapping[str, Any] | None
    blend: BlendState | None
    recipe: Recipe | None


def _past_of(recipe: Recipe, folder: Path) -> _Past:
    checkpoint = latest_checkpoint(folder / "checkpoints")
    if checkpoint is None:
        scale = LossScale.start(recipe.loss_scale) if recipe.precision == "fp16" else None
        return _Past(TrainState(loss_scale=scale), None, None, None, None)
    verify(checkpoint)
    saved = read_recipe_of(checkpoint)
    _check_same_training(recipe, saved, checkpoint)
    facts = read_state(checkpoint)
    state = TrainState.from_json(facts)
    if recipe.precision == "fp16" and state.loss_scale is None:
        state.loss_scale = LossScale.start(recipe.loss_scale)
    elif recipe.precision != "fp16":
        state.loss_scale = None
    blend = BlendState.from_json(facts["blend"]) if facts["blend"] else None
    return _Past(state, checkpoint, facts["interval"], blend, saved)


def _check_same_training(recipe: Recipe, saved: Recipe, checkpoint: Path) -> None:
    now, then = as_dict(recipe), as_dict(saved)
    problems = []
    for path in _FIXED_FOR_A_RUN:
        old, new = _at(then, path), _at(now, path)
        if isinstance(old, dict) and isinstance(new, dict):
            pairs = [(f"{path}.{key}", old.get(key), new.get(key)) for key in new]
        else:
            pairs = [(path, old, new)]
        rule = "it would make this another training"
        problems += [Problem(f"{name} is {b} but the checkpoint has {a}", rule) for name, a, b in pairs if a != b]
    if problems:
        remedy = "set these back, or start afresh under another name or --run-dir"
        raise DataError([*problems, Problem(f"cannot resume from {checkpoint}", remedy=remedy)])


def _at(tree: Any, path: str) -> Any:
    for key in path.split("."):
        tree = tree.get(key) if isinstance(tree, dict) else None
    return tree


def _starts_so_far(folder: Path) -> int:
    events = folder / names.EVENTS_FILE
    return sum(event["kind"] == "start" for event in read_events(events)) if events.is_file() else 0


def _validation_samples(recipe: Recipe, validation: Mapping[str, Source]) -> dict[str, int]:
    evaluate, size = recipe.train.evaluate, recipe.batch.micro_batch_size
    wanted = evaluate.steps * recipe.batch.global_batch_size if evaluate else 0
    problems = []
    samples = {}
    for group, source in validation.items():
        samples[group] = min(wanted, source.num_samples) // size * size
        if samples[group] == 0:
            what = f"validation group {group} has {source.num_samples} samples"
            problems.append(Problem(what, f"one micro-batch takes {size}", "give it more text or a larger split"))
    if problems:
        raise DataError(problems)
    return samples


def _start_facts(recipe: Recipe, device: torch.device, past: _Past) -> dict[str, Any]:
    return {
        "recipe": recipe.name,
        "fingerprint": fingerprint(recipe),
        "parameters": count_parameters(recipe.model, vocab_size=recipe.model.vocab_size).total,
        "device": device_name(device),
        "precision": recipe.precision,
        "resumed_from": past.checkpoint.name if past.checkpoint else None,
        "versions": {
            "bloomery": bloomery.__version__,
            "torch": torch.__version__,
            "python": platform.python_version(),
        },
    }


def _greeting(facts: Mapping[str, Any], plan: TrainingPlan, past: _Past) -> str:
    how = f"resumed at step {past.state.step:,}" if past.checkpoint else "from the beginning"
    size, where = format_count(facts["parameters"]), f"{facts['precision']} on {facts['device']}"
    return f"{facts['recipe']}: {size} parameters, {where}, {plan.train_steps:,} steps, {how}"
