"""Every rule between fields, in one file. Each rule yields what it found, with the paths it looked at.

The rules stand on this floor, not in `config`, because several of them need the ramp and step arithmetic of `sizing`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from bloomery.base.errors import Problem, RecipeError
from bloomery.base.units import Duration
from bloomery.config.families import ONLY_FOR
from bloomery.config.load import Draft, read_recipe
from bloomery.config.recipe import Recipe
from bloomery.sizing.layout import data_parallel_size, world_size
from bloomery.sizing.plan import TrainingPlan
from bloomery.sizing.vocabulary import padded_vocab_size


@dataclass(frozen=True)
class Finding:
    """A broken rule. `paths` are the fields involved, the one to point at first."""

    paths: tuple[str, ...]
    what: str
    rule: str
    remedy: str
    is_warning: bool = False


@dataclass(frozen=True)
class CheckedRecipe:
    """A recipe that keeps every rule."""

    recipe: Recipe
    draft: Draft
    warnings: list[Problem]


def load_checked_recipe(name: str, overrides: Sequence[str] = ()) -> CheckedRecipe:
    """The recipe, or RecipeError with every problem: of the YAML, of the schema and of the rules."""
    draft = read_recipe(name, overrides)
    problems = list(draft.problems)
    warnings: list[Problem] = []
    if draft.recipe is not None:
        for finding in findings(draft):
            if draft.faulty.intersection(finding.paths):
                continue  # it judged a stand-in, not what the user wrote
            problem = Problem(finding.what, finding.rule, finding.remedy, draft.place(*finding.paths))
            (warnings if finding.is_warning else problems).append(problem)
    if problems:
        raise RecipeError(problems)
    assert draft.recipe is not None
    return CheckedRecipe(draft.recipe, draft, warnings)


def findings(draft: Draft) -> Iterator[Finding]:
    """Every broken rule of a typed recipe."""
    assert draft.recipe is not None
    for rule in RULES:
        yield from rule(draft.recipe, draft)


def _heads(recipe: Recipe, draft: Draft) -> Iterator[Finding]:
    model = recipe.model
    if model.hidden_size % model.num_heads:
        yield Finding(
            ("model.num_heads", "model.hidden_size"),
            f"model.num_heads is {model.num_heads} but model.hidden_size is {model.hidden_size}",
            "heads must divide the hidden size evenly",
            f"use {_nearby_divisors(model.hidden_size, model.num_heads)} heads",
        )
    elif model.family == "llama" and (model.hidden_size // model.num_heads) % 2:
        yield Finding(
            ("model.num_heads", "model.hidden_size"),
            f"a head is {model.hidden_size // model.num_heads} wide",
            "rotary positions turn pairs, so the width of a head must be even",
            "change model.num_heads or model.hidden_size",
        )
    if model.num_heads % model.num_kv_heads:
        yield Finding(
            ("model.num_kv_heads", "model.num_heads"),
            f"model.num_kv_heads is {model.num_kv_heads} but model.num_heads is {model.num_heads}",
            "every key/value head serves the same number of query heads",
            f"use {_nearby_divisors(model.num_heads, model.num_kv_heads)} key/value heads",
        )


def _fields_of_another_family(recipe: Recipe, draft: Draft) -> Iterator[Finding]:
    for name, families in ONLY_FOR.items():
        path = f"model.{name}"
        if draft.is_set(path) and recipe.model.family not in families:
            yield Finding(
                (path, "model.family"),
                f"{path} is set but model.family is {recipe.model.family}",
                f"only {' and '.join(families)} reads it, so it would be ignored",
                "remove it",
            )


def _tensor_parallel(recipe: Recipe, draft: Draft) -> Iterator[Finding]:
    model, tp = recipe.model, recipe.parallel.tp
    for path, size in (
        ("model.num_heads", model.num_heads),
        ("model.num_kv_heads", model.num_kv_heads),
        ("model.ffn_hidden_size", model.ffn_hidden_size),
        ("model.vocab_multiple", padded_vocab_size(model)),
    ):
        if size % tp:
            name = "the padded vocabulary" if path == "model.vocab_multiple" else path
            yield Finding(
                ("parallel.tp", path),
                f"parallel.tp is {tp} but {name} is {size}",
                "it must divide evenly across tensor-parallel ranks",
                f"use parallel.tp {_nearby_divisors(size, tp)}",
            )


def _layout(recipe: Recipe, draft: Draft) -> Iterator[Finding]:
    parallel, model = recipe.parallel, recipe.model
    if parallel.pp > model.num_layers:
        yield Finding(
            ("parallel.pp", "model.num_layers"),
            f"parallel.pp is {parallel.pp} but model.num_layers is {model.num_layers}",
            "every pipeline stage owns at least one layer",
            f"use at most {model.num_layers} stages",
        )
    if parallel.pp > 1 and parallel.zero >= 2:
        yield Finding(
            ("parallel.zero", "parallel.pp"),
            f"parallel.zero is {parallel.zero} with parallel.pp {parallel.pp}",
            "under a pipeline, gradients stay whole between micro-batches, so ZeRO 2 and 3 would act as ZeRO 1",
            "use parallel.zero=1",
        )
    if parallel.cp > 1 and model.seq_length % (2 * parallel.cp):
        yield Finding(
            ("parallel.cp", "model.seq_length"),
            f"parallel.cp is {parallel.cp} but model.seq_length is {model.seq_length}",
            "a sequence is cut into 2 * cp equal pieces",
            "use a sequence length that 2 * cp divides",
        )
    ranks = parallel.tp * parallel.pp * parallel.cp
    if recipe.launch and world_size(recipe) % ranks:
        yield Finding(
            ("launch.nodes", "launch.gpus_per_node", "parallel.tp", "parallel.pp", "parallel.cp"),
            f"launch asks for {world_size(recipe)} ranks",
            f"one replica takes tp * pp * cp = {ranks}, which must divide them",
            f"use a multiple of {ranks} ranks",
        )


def _launch(recipe: Recipe, draft: Draft) -> Iterator[Finding]:
    launch = recipe.launch
    if launch is None:
        return
    if launch.on == "local" and launch.nodes > 1:
        yield Finding(
            ("launch.nodes", "launch.on"),
            f"launch.nodes is {launch.nodes} but launch.on is local",
            "local means this one machine",
            "use launch.on hosts, slurm or azureml, or one node",
        )
    exit_after = recipe.train.exit_after
    if launch.time_limit and isinstance(exit_after, Duration) and exit_after.seconds >= launch.time_limit.seconds:
        yield Finding(
            ("train.exit_after", "launch.time_limit"),
            f"train.exit_after is {exit_after} but launch.time_limit is {launch.time_limit}",
            "the scheduler would kill the job before it saves",
            "leave train.exit_after some minutes below the limit",
        )


def _batch(recipe: Recipe, draft: Draft) -> Iterator[Finding]:
    batch = recipe.batch
    replicas = max(1, data_parallel_size(recipe))
    unit = batch.micro_batch_size * replicas
    involved = ("batch.micro_batch_size", "launch.nodes", "launch.gpus_per_node", "parallel.tp", "parallel.pp")
    rule = f"it must be a multiple of micro_batch_size {batch.micro_batch_size} times {replicas} data-parallel replicas"
    if batch.global_batch_size % unit:
        lower = max(unit, batch.global_batch_size // unit * unit)
        yield Finding(
            ("batch.global_batch_size", *involved),
            f"batch.global_batch_size is {batch.global_batch_size}",
            rule,
            f"use {lower} or {lower + unit}, or change micro_batch_size",
        )
    ramp = batch.rampup
    if ramp is None:
        return
    if ramp.start >= batch.global_batch_size:
        yield Finding(
            ("batch.rampup.start", "batch.global_batch_size"),
            f"batch.rampup.start is {ramp.start} but batch.global_batch_size is {batch.global_batch_size}",
            "a ramp starts below the full batch",
            "lower the start, or remove the ramp",
        )
        return
    if (batch.global_batch_size - ramp.start) % ramp.increment:
        yield Finding(
            ("batch.rampup.increment", "batch.rampup.start", "batch.global_batch_size"),
            f"batch.rampup.increment is {ramp.increment}",
            f"it must divide global_batch_size - start = {batch.global_batch_size - ramp.start}",
            f"use {_nearby_divisors(batch.global_batch_size - ramp.start, ramp.increment)}",
        )
        return
    levels = range(ramp.start, batch.global_batch_size, ramp.increment)
    bad = [level for level in levels if level % unit]
    if bad:
        shown = ", ".join(str(level) for level in bad[:6]) + (", ..." if len(bad) > 6 else "")
        yield Finding(
            ("batch.rampup.start", "batch.rampup.increment", *involved),
            f"{len(bad)} of {len(levels)} levels of the batch ramp do not fit: {shown}",
            rule.replace("it", "every level", 1),
            f"use a start and an increment that are multiples of {unit}, a smaller micro_batch_size, or fewer replicas",
        )


def _learning_rate(recipe: Recipe, draft: Draft) -> Iterator[Finding]:
    lr = recipe.lr
    if lr.min > lr.peak:
        yield Finding(
            ("lr.min", "lr.peak"),
            f"lr.min is {lr.min} but lr.peak is {lr.peak}",
            "the minimum lies below the peak",
            "lower lr.min",
        )
    if lr.schedule == "constant":
        for path in ("lr.decay", "lr.min"):
            if draft.is_set(path):
                yield Finding(
                    (path, "lr.schedule"),
                    f"{path} is set but lr.schedule is constant",
                    "a constant rate never decays, so it would be ignored",
                    f"remove {path}, or choose linear, cosine or wsd",
                )
    if lr.schedule == "wsd" and lr.cooldown is None:
        yield Finding(
            ("lr.cooldown", "lr.schedule"),
            "lr.cooldown is missing",
            "wsd needs the length of its final decay",
            "add for example `cooldown: 1000 steps`",
        )
    if lr.schedule != "wsd" and lr.cooldown is not None:
        yield Finding(
            ("lr.cooldown", "lr.schedule"),
            f"lr.cooldown is set but lr.schedule is {lr.schedule}",
            "only wsd has a cooldown, so it would be ignored",
            "remove it, or use schedule wsd",
        )


def _lengths(recipe: Recipe, draft: Draft) -> Iterator[Finding]:
    if any(True for _ in _batch(recipe, draft)):
        return  # the plan needs a sound ramp
    plan = TrainingPlan.of(recipe)
    if plan.train_steps < 1:
        yield Finding(
            ("train.for", "batch.global_batch_size"),
            f"train.for is {recipe.train.for_}, which makes {plan.train_steps} steps",
            f"one step takes {recipe.batch.global_batch_size} samples of {recipe.model.seq_length} tokens",
            "train for at least one global batch",
        )
        return
    warmup, decay = plan.lr.warmup_samples, plan.lr.decay_samples
    if recipe.lr.schedule != "constant" and warmup >= decay:
        yield Finding(
            ("lr.warmup", "lr.decay", "train.for"),
            f"lr.warmup is {recipe.lr.warmup} = {warmup:,} samples",
            f"it must be shorter than the decay, which ends at {decay:,} samples",
            "shorten the warm-up or lengthen lr.decay",
        )
    elif recipe.lr.schedule == "wsd" and plan.lr.cooldown_samples > decay - warmup:
        yield Finding(
            ("lr.cooldown", "lr.decay", "lr.warmup"),
            f"lr.cooldown is {recipe.lr.cooldown} = {plan.lr.cooldown_samples:,} samples",
            f"it must fit between the end of warm-up and {decay:,} samples",
            "shorten it",
        )
    ramp = recipe.batch.rampup
    if ramp and recipe.train.for_.unit != "steps" and plan.asked_samples <= ramp.samples:
        yield Finding(
            ("train.for", "batch.rampup.samples"),
            f"train.for ends inside the batch ramp: {plan.asked_samples:,} of {ramp.samples:,} samples",
            f"steps are counted as Megatron counts them, so the run takes {plan.train_steps:,} steps and "
            f"{plan.train_samples:,} samples",
            "give train.for in steps to say exactly where it ends",
            is_warning=True,
        )


def _skips(recipe: Recipe, draft: Draft) -> Iterator[Finding]:
    last_end = 0
    for i, text in enumerate(recipe.train.skip):
        first, last = (int(number) for number in text.removesuffix(" steps").split("-"))
        path = (f"train.skip.{i}", "train.skip")
        if first < 1 or last < first:
            yield Finding(path, f"train.skip has {text!r}", "a range runs from its first to its last step, from 1", "")
        elif first <= last_end:
            yield Finding(path, f"train.skip has {text!r}", "ranges ascend and do not overlap", "sort and join them")
        last_end = max(last_end, last)


def _data(recipe: Recipe, draft: Draft) -> Iterator[Finding]:
    data, evaluate = recipe.data, recipe.train.evaluate
    if recipe.prepare and recipe.tokenizer is None:
        yield Finding(
            ("prepare", "tokenizer"),
            "prepare is set but tokenizer is not",
            "text needs one",
            "add `tokenizer: {path: ...}`",
        )
    if data is None:
        return
    if data.split and data.validation:
        yield Finding(
            ("data.split", "data.validation"),
            "data.split and data.validation are both set",
            "validation comes either from a split of the training sources or from groups of its own",
            "remove one of them",
        )
    if evaluate and not (data.split or data.validation):
        yield Finding(
            ("train.evaluate",),
            "train.evaluate is set but there is nothing to evaluate",
            "it needs data.validation or data.split",
            "add one, or remove train.evaluate",
        )
    if not evaluate and data.validation:
        yield Finding(
            ("data.validation", "train.evaluate"),
            "data.validation is set but train.evaluate is not",
            "the groups would be ignored",
            "add for example `evaluate: {every: 1000 steps}` to `train`",
        )


def _precision(recipe: Recipe, draft: Draft) -> Iterator[Finding]:
    if recipe.precision != "fp16" and draft.is_set("loss_scale"):
        yield Finding(
            ("loss_scale", "precision"),
            f"loss_scale is set but precision is {recipe.precision}",
            "only fp16 scales its loss, so it would be ignored",
            "remove it",
        )
    scale = recipe.loss_scale
    if scale.min > scale.initial:
        yield Finding(
            ("loss_scale.initial", "loss_scale.min"),
            f"loss_scale.initial is {scale.initial} but loss_scale.min is {scale.min}",
            "the scale starts at or above its minimum",
            "raise the initial scale",
        )


def _phases(recipe: Recipe, draft: Draft) -> Iterator[Finding]:
    last_until = 0
    phases = recipe.checkpoint.phases
    for i, phase in enumerate(phases):
        path = (f"checkpoint.phases.{i}", "checkpoint.phases", "checkpoint")
        if phase.every.count < 1:
            yield Finding(
                path, "a checkpoint phase saves every 0 steps", "it needs at least 1", "use `every: 1000 steps`"
            )
        if i + 1 < len(phases) and phase.until is None:
            yield Finding(
                path,
                f"checkpoint.phases.{i} has no `until`",
                "only the last phase may go on for ever",
                "add `until: N steps`",
            )
        elif i + 1 == len(phases) and phase.until is not None:
            yield Finding(
                path,
                f"the last checkpoint phase ends at step {phase.until.count}",
                "training would go on unsaved after it",
                "remove its `until`, or add a phase",
            )
        elif phase.until is not None and phase.until.count <= last_until:
            yield Finding(path, f"checkpoint.phases.{i} ends at {phase.until}", "phases follow each other", "sort them")
        last_until = phase.until.count if phase.until else last_until


def _intervals(recipe: Recipe, draft: Draft) -> Iterator[Finding]:
    evaluate, keep = recipe.train.evaluate, recipe.checkpoint.keep
    intervals = {
        "monitor.log_every": recipe.monitor.log_every,
        "train.evaluate.every": evaluate.every if evaluate else None,
        "checkpoint.keep.every": keep.every if keep else None,
        "loss_scale.window": recipe.loss_scale.window,
    }
    for path, amount in intervals.items():
        if amount is not None and amount.count < 1:
            yield Finding((path,), f"{path} is {amount}", "it must be at least 1 step", "use for example `10 steps`")


RULES: list[Callable[[Recipe, Draft], Iterator[Finding]]] = [
    _heads,
    _fields_of_another_family,
    _tensor_parallel,
    _layout,
    _launch,
    _batch,
    _learning_rate,
    _lengths,
    _skips,
    _data,
    _precision,
    _phases,
    _intervals,
]


def _nearby_divisors(number: int, near: int) -> str:
    """The two divisors around a value that does not divide: '8 or 16'."""
    divisors = [d for d in range(1, number + 1) if number % d == 0] if number < 100_000 else [1]
    below = max((d for d in divisors if d < near), default=None)
    above = min((d for d in divisors if d > near), default=None)
    return " or ".join(str(d) for d in (below, above) if d is not None)
