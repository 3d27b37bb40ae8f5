"""Every rule between fields; those about data stand in `data_rules.py`. Each yields what it found, with all the paths
that it looked at.

The rules stand on this floor, not in `config`, because several of them need the ramp and step arithmetic of `sizing`.
A field that would be ignored is an error unless it has its default value: that is how a recipe takes back what its
base had set, and the resolved recipe of a run writes out every field.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from bloomery.base.units import Amount, Duration
from bloomery.config.draft import Draft
from bloomery.config.recipe import LossScaleSection, LrSection, ModelSection, Recipe
from bloomery.families.registry import FAMILIES, READERS, family_defaults
from bloomery.sizing.data_rules import data, samples
from bloomery.sizing.finding import Finding, nearby_divisors
from bloomery.sizing.layout import data_parallel_size
from bloomery.sizing.layout_rules import LAYOUT, context, data_parallel, launch, pipeline, tensor_parallel
from bloomery.sizing.plan import TrainingPlan

_MOST_LEVELS = 10_000
_MOST_STEPS = 100_000_000


def heads(recipe: Recipe, draft: Draft) -> Iterator[Finding]:
    model = recipe.model
    if model.head_dim is None and model.hidden_size % model.num_heads:
        yield Finding(
            ("model.num_heads", "model.hidden_size"),
            f"model.num_heads is {model.num_heads} but model.hidden_size is {model.hidden_size}",
            "heads must divide the hidden size evenly",
            f"use {nearby_divisors(model.hidden_size, model.num_heads)} heads",
        )
    elif FAMILIES[model.family].positions == "rotary" and model.head_size % 2:
        yield Finding(
            ("model.head_dim", "model.num_heads", "model.hidden_size", "model.family"),
            f"a head is {model.head_size} wide",
            "rotary positions turn pairs, so the width of a head must be even",
            "change model.num_heads, model.hidden_size or model.head_dim",
        )
    if model.num_heads % model.num_kv_heads:
        yield Finding(
            ("model.num_kv_heads", "model.num_heads"),
            f"model.num_kv_heads is {model.num_kv_heads} but model.num_heads is {model.num_heads}",
            "every key/value head serves the same number of query heads",
            f"use {nearby_divisors(model.num_heads, model.num_kv_heads)} key/value heads",
        )


def fields_of_another_family(recipe: Recipe, draft: Draft) -> Iterator[Finding]:
    model = recipe.model
    derived = family_defaults({"family": model.family, "hidden_size": model.hidden_size, "num_heads": model.num_heads})
    for name, families in READERS.items():
        path, default = f"model.{name}", derived.get(name, ModelSection.model_fields[name].default)
        if draft.is_set(path) and model.family not in families and getattr(model, name) != default:
            yield Finding(
                (path, "model.family", "model.num_heads"),
                f"{path} is set but model.family is {model.family}",
                f"only {', '.join(families)} reads it, so it would be ignored",
                f"remove it, or set it back to {default}",
            )


def batch(recipe: Recipe, draft: Draft) -> Iterator[Finding]:
    full, micro, replicas = recipe.batch.global_batch_size, recipe.batch.micro_batch_size, _replicas(recipe)
    unit = micro * replicas
    if full % unit:
        lower = full // unit * unit
        yield Finding(
            ("batch.global_batch_size", "batch.micro_batch_size", *LAYOUT),
            f"batch.global_batch_size is {full}",
            f"it must be a multiple of micro_batch_size {micro} times {replicas} data-parallel replicas",
            f"use {f'{lower} or ' if lower else ''}{lower + unit}, or change micro_batch_size",
        )


def ramp(recipe: Recipe, draft: Draft) -> Iterator[Finding]:
    """Every level of the ramp must be fed too: the reference finds out days later, when it reaches the level."""
    rampup, full = recipe.batch.rampup, recipe.batch.global_batch_size
    if rampup is None:
        return
    unit = recipe.batch.micro_batch_size * _replicas(recipe)
    levels = range(rampup.start, full, rampup.increment)
    paths = ("batch.rampup.increment", "batch.rampup.start", "batch.global_batch_size")
    if rampup.start >= full:
        yield Finding(
            ("batch.rampup.start", "batch.global_batch_size"),
            f"batch.rampup.start is {rampup.start} but batch.global_batch_size is {full}",
            "a ramp starts below the full batch",
            "lower the start, or remove the ramp",
        )
    elif (full - rampup.start) % rampup.increment:
        yield Finding(
            paths,
            f"batch.rampup.increment is {rampup.increment}",
            f"it must divide global_batch_size - start = {full - rampup.start}",
            f"use {nearby_divisors(full - rampup.start, rampup.increment)}",
        )
    elif len(levels) > _MOST_LEVELS:
        what, rule = f"the batch ramp has {len(levels):,} levels", f"it has at most {_MOST_LEVELS:,}"
        yield Finding(paths, what, rule, "use a larger increment")
    elif misfits := [level for level in levels if level % unit]:
        more = f" and {len(misfits) - 6} more" if len(misfits) > 6 else ""
        yield Finding(
            ("batch.rampup.start", "batch.rampup.increment", "batch.micro_batch_size", *LAYOUT),
            f"{len(misfits)} of {len(levels)} levels of the batch ramp do not fit: "
            f"{', '.join(str(level) for level in misfits[:6])}{more}",
            f"every level must be a multiple of micro_batch_size {recipe.batch.micro_batch_size} times "
            f"{_replicas(recipe)} data-parallel replicas",
            f"use a start and an increment that are multiples of {unit}, a smaller micro_batch_size, or fewer replicas",
        )


def learning_rate(recipe: Recipe, draft: Draft) -> Iterator[Finding]:
    lr = recipe.lr
    if lr.min > lr.peak:
        yield Finding(
            ("lr.min", "lr.peak"),
            f"lr.min is {lr.min} but lr.peak is {lr.peak}",
            "the minimum lies below the peak",
            "lower lr.min",
        )
    unread = {"constant": ("decay", "min", "cooldown"), "linear": ("cooldown",), "cosine": ("cooldown",)}
    for name in unread.get(lr.schedule, ()):
        default = LrSection.model_fields[name].default
        if getattr(lr, name) != default:
            yield Finding(
                (f"lr.{name}", "lr.schedule"),
                f"lr.{name} is set but lr.schedule is {lr.schedule}",
                f"a {lr.schedule} rate does not read it, so it would be ignored",
                f"set it back to {'null' if default is None else default}, or choose a schedule that uses it",
            )
    if lr.schedule == "wsd" and lr.cooldown is None:
        yield Finding(
            ("lr.cooldown", "lr.schedule"),
            "lr.cooldown is missing",
            "wsd needs the length of its final decay",
            "add for example `cooldown: 1000 steps`",
        )


def lengths(recipe: Recipe, draft: Draft) -> Iterator[Finding]:
    rampup, full = recipe.batch.rampup, recipe.batch.global_batch_size
    if rampup and len(range(rampup.start, full, rampup.increment)) > _MOST_LEVELS:
        return  # the plan would take for ever
    plan = TrainingPlan.of(recipe)
    paths = ("train.for", "batch.global_batch_size", "batch.rampup", "model.seq_length")
    if not 1 <= plan.train_steps <= _MOST_STEPS:
        yield Finding(
            paths,
            f"train.for is {recipe.train.for_}, which makes {plan.train_steps:,} steps",
            f"one step takes {full} samples of {recipe.model.seq_length} tokens, and a training has 1 to "
            f"{_MOST_STEPS:,} steps",
            "train for at least one global batch" if plan.train_steps < 1 else "train for less",
        )
        return
    warmup, decay = plan.lr.warmup_samples, plan.lr.decay_samples
    if recipe.lr.schedule != "constant" and warmup >= decay:
        yield Finding(
            ("lr.warmup", "lr.decay", *paths),
            f"lr.warmup is {recipe.lr.warmup} = {warmup:,} samples",
            f"it must be shorter than the decay, which ends at {decay:,} samples",
            "shorten the warm-up or lengthen lr.decay",
        )
    elif recipe.lr.schedule == "wsd" and plan.lr.cooldown_samples > decay - warmup:
        yield Finding(
            ("lr.cooldown", "lr.decay", "lr.warmup", *paths),
            f"lr.cooldown is {recipe.lr.cooldown} = {plan.lr.cooldown_samples:,} samples",
            f"it must fit between the end of warm-up and {decay:,} samples",
            "shorten it",
        )
    if rampup and recipe.train.for_.unit != "steps" and plan.asked_samples <= rampup.samples:
        yield Finding(
            paths,
            f"train.for ends inside the batch ramp: {plan.asked_samples:,} of {rampup.samples:,} samples",
            f"steps are counted as Megatron counts them, so the run takes {plan.train_steps:,} steps and "
            f"{plan.train_samples:,} samples",
            "give train.for in steps to say exactly where it ends",
            is_warning=True,
        )


def skips(recipe: Recipe, draft: Draft) -> Iterator[Finding]:
    last_end = 0
    for i, text in enumerate(recipe.train.skip):
        first, last = (int(number) for number in text.removesuffix(" steps").split("-"))
        path, what = (f"train.skip.{i}",), f"train.skip has '{text}'"
        if first < 1 or last < first:
            low, high = sorted((max(first, 1), max(last, 1)))
            yield Finding(
                path, what, "a range runs from its first step, at least 1, to its last", f"use '{low}-{high} steps'"
            )
        elif first <= last_end:
            yield Finding(path, what, "ranges ascend and do not overlap", "sort and join them")
        last_end = max(last_end, last)


def loss_scale(recipe: Recipe, draft: Draft) -> Iterator[Finding]:
    scale = recipe.loss_scale
    if recipe.precision != "fp16" and draft.is_set("loss_scale") and scale != LossScaleSection():
        yield Finding(
            ("loss_scale", "precision"),
            f"loss_scale is set but precision is {recipe.precision}",
            "only fp16 scales its loss, so it would be ignored",
            "remove it, or take it back with loss_scale={}",
        )
    if scale.min > scale.initial:
        yield Finding(
            ("loss_scale.initial", "loss_scale.min"),
            f"loss_scale.initial is {scale.initial} but loss_scale.min is {scale.min}",
            "the scale starts at or above its minimum",
            "raise the initial scale",
        )


def phases(recipe: Recipe, draft: Draft) -> Iterator[Finding]:
    last_until = 0
    for i, phase in enumerate(recipe.checkpoint.phases):
        name = f"checkpoint.phases.{i}"
        is_last = i + 1 == len(recipe.checkpoint.phases)
        if phase.until is None:
            if not is_last:
                rule = "only the last phase may go on for ever"
                yield Finding((name,), f"{name} has no `until`", rule, "add `until: N steps`")
            continue
        if is_last:
            rule = "training would go on unsaved after it"
            yield Finding(
                (name,), f"{name}, the last, ends at {phase.until}", rule, "remove its `until`, or add a phase"
            )
        if phase.until.count <= last_until:
            rule = f"the phases before it end at {last_until} steps, so it would never begin"
            yield Finding((name,), f"{name} ends at {phase.until}", rule, "sort the phases by `until`")
        last_until = max(last_until, phase.until.count)


def intervals(recipe: Recipe, draft: Draft) -> Iterator[Finding]:
    evaluate, keep = recipe.train.evaluate, recipe.checkpoint.keep
    amounts: dict[str, Amount | Duration | None] = {
        "monitor.log_every": recipe.monitor.log_every,
        "monitor.drift.every": recipe.monitor.drift.every if recipe.monitor.drift else None,
        "train.evaluate.every": evaluate.every if evaluate else None,
        "train.exit_after": recipe.train.exit_after,
        "checkpoint.keep.every": keep.every if keep else None,
        "loss_scale.window": recipe.loss_scale.window,
        "launch.time_limit": recipe.launch.time_limit if recipe.launch else None,
    }
    checkpoint = recipe.checkpoint
    phases = {f"checkpoint.phases.{i}.every": phase.every for i, phase in enumerate(checkpoint.phases)}
    amounts |= {path: every for path, every in phases.items() if every != "auto"}
    amounts |= {"checkpoint.failure_every": checkpoint.failure_every, "checkpoint.timeout": checkpoint.timeout}
    amounts |= {"checkpoint.local.every": checkpoint.local.every if checkpoint.local else None}
    amounts |= {"checkpoint.upload.every": checkpoint.upload.every if checkpoint.upload else None}
    for path, amount in amounts.items():
        size = amount.seconds if isinstance(amount, Duration) else amount.count if amount else 1
        if size <= 0:
            example = "1h" if isinstance(amount, Duration) and path != "train.exit_after" else "10 steps"
            yield Finding(
                (path,), f"{path} is {amount}", "it must be more than nothing", f"use for example `{example}`"
            )


RULES: list[Callable[[Recipe, Draft], Iterator[Finding]]] = [
    heads,
    fields_of_another_family,
    tensor_parallel,
    context,
    pipeline,
    data_parallel,
    launch,
    batch,
    ramp,
    learning_rate,
    lengths,
    skips,
    data,
    samples,
    loss_scale,
    phases,
    intervals,
]


def _replicas(recipe: Recipe) -> int:
    return max(1, data_parallel_size(recipe))
