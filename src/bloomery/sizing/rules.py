"""Every rule between fields, except those of `data_rules.py`. Each yields what it found, with the paths that it read.
The rules are on this floor, not in `config`, because several need the ramp and step arithmetic of `sizing`."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from bloomery.base.units import Duration
from bloomery.config.recipe import Recipe, Section
from bloomery.config.schema import all_fields
from bloomery.config.yaml_nodes import inline_yaml
from bloomery.families.registry import FAMILIES, READERS, family_defaults
from bloomery.sizing.layout import data_parallel_size, ranks_per_replica, world_size
from bloomery.sizing.parameters import padded_vocab_size
from bloomery.sizing.schedule import TrainingPlan


@dataclass(frozen=True)
class Finding:
    """A broken rule. `paths` are the fields involved, the one to point at first."""

    paths: tuple[str, ...]
    what: str
    rule: str
    remedy: str
    is_warning: bool = False


def nearby_divisors(number: int, near: int) -> str:
    """The two divisors around a value that does not divide: '8 or 16'."""
    small = [d for d in range(1, min(math.isqrt(number), 10**6) + 1) if number % d == 0]
    divisors = {*small, *(number // d for d in small)}
    below = max((d for d in divisors if d < near), default=None)
    above = min((d for d in divisors if d > near), default=None)
    return " or ".join(str(d) for d in (below, above) if d is not None)


_MOST_LEVELS = 10_000
_MOST_STEPS = 100_000_000


def heads(recipe: Recipe) -> Iterator[Finding]:
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


def ignored(recipe: Recipe) -> Iterator[Finding]:
    """A field that nothing reads because of another one, unless it has its default value: with that a recipe takes back
    what its base had set, and the resolved recipe of a run writes out every field."""
    model, parallel, lr, data = recipe.model, recipe.parallel, recipe.lr, recipe.data
    family, schedule = ("model.family", model.family), ("lr.schedule", lr.schedule)
    unread: dict[tuple[str, Any], tuple[str, ...]] = {
        family: tuple(f"model.{name}" for name, families in READERS.items() if model.family not in families),
        ("parallel.pp", parallel.pp): ("parallel.schedule", "parallel.chunks") if parallel.pp == 1 else (),
        ("parallel.zero", parallel.zero): ("parallel.shard_size",) if parallel.zero == 0 else (),
        schedule: {"constant": ("lr.decay", "lr.min", "lr.cooldown"), "wsd": ()}.get(lr.schedule, ("lr.cooldown",)),
        ("precision", recipe.precision): ("loss_scale",) if recipe.precision != "fp16" else (),
    }
    if data is not None:
        encoder, alibi = FAMILIES[model.family].encoder, FAMILIES[model.family].positions == "alibi"
        unread[family] += ("data.mask_documents", "data.eod_loss") if encoder else ("data.masking",)
        unread[family] += ("data.reset_positions",) if encoder or alibi else ()  # ALiBi has distances only
        unread["data.order", data.order] = ("data.blend_one_source",) if data.order == "timeless" else ()
        unread["train.evaluate", "not set"] = ("data.validation",) if recipe.train.evaluate is None else ()
    by_family = family_defaults(
        {"family": model.family, "hidden_size": model.hidden_size, "num_heads": model.num_heads}
    )
    for (other, value), paths in unread.items():
        for path in paths:
            section, _, name = path.rpartition(".")
            field = all_fields()[path]
            default = by_family.get(name, field.info.get_default(call_default_factory=True))
            if getattr(getattr(recipe, section) if section else recipe, name) != default:
                back = inline_yaml({} if isinstance(default, Section) else default)
                what, remedy = f"{path} is set but {other} is {value}", f"set it back to {back}, or change {other}"
                yield Finding((path, other, "model.num_heads"), what, "it would be ignored", remedy)


def batch(recipe: Recipe) -> Iterator[Finding]:
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


def ramp(recipe: Recipe) -> Iterator[Finding]:
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


def learning_rate(recipe: Recipe) -> Iterator[Finding]:
    lr = recipe.lr
    if lr.min > lr.peak:
        yield Finding(
            ("lr.min", "lr.peak"),
            f"lr.min is {lr.min} but lr.peak is {lr.peak}",
            "the minimum lies below the peak",
            "lower lr.min",
        )
    if lr.schedule == "wsd" and lr.cooldown is None:
        yield Finding(
            ("lr.cooldown", "lr.schedule"),
            "lr.cooldown is missing",
            "wsd needs the length of its final decay",
            "add for example `cooldown: 1000 steps`",
        )


def lengths(recipe: Recipe) -> Iterator[Finding]:
    rampup, full = recipe.batch.rampup, recipe.batch.global_batch_size
    if rampup and len(range(rampup.start, full, rampup.increment)) > _MOST_LEVELS:
        return  # the plan would take forever
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
            "give train.for in steps to set the exact end",
            is_warning=True,
        )


def skips(recipe: Recipe) -> Iterator[Finding]:
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


def loss_scale(recipe: Recipe) -> Iterator[Finding]:
    scale = recipe.loss_scale
    if scale.min > scale.initial:
        yield Finding(
            ("loss_scale.initial", "loss_scale.min"),
            f"loss_scale.initial is {scale.initial} but loss_scale.min is {scale.min}",
            "the scale starts at or above its minimum",
            "raise the initial scale",
        )


def phases(recipe: Recipe) -> Iterator[Finding]:
    last_until = 0
    for i, phase in enumerate(recipe.checkpoint.phases):
        name = f"checkpoint.phases.{i}"
        is_last = i + 1 == len(recipe.checkpoint.phases)
        if phase.until is None:
            if not is_last:
                rule = "only the last phase has no end"
                yield Finding((name,), f"{name} has no `until`", rule, "add `until: N steps`")
            continue
        if is_last:
            rule = "nothing would be saved after it"
            yield Finding(
                (name,), f"{name}, the last, ends at {phase.until}", rule, "remove its `until`, or add a phase"
            )
        if phase.until.count <= last_until:
            rule = f"the phases before it end at {last_until} steps, so it would never begin"
            yield Finding((name,), f"{name} ends at {phase.until}", rule, "sort the phases by `until`")
        last_until = max(last_until, phase.until.count)


def _replicas(recipe: Recipe) -> int:
    return max(1, data_parallel_size(recipe))


LAYOUT = ("launch.nodes", "launch.gpus_per_node", "parallel.tp", "parallel.pp", "parallel.cp")
_SEVERAL_STAGES = ("interleaved", "zero_bubble")


def tensor_parallel(recipe: Recipe) -> Iterator[Finding]:
    model, tp, cp = recipe.model, recipe.parallel.tp, recipe.parallel.cp
    tokens = model.seq_length // cp
    sizes = {
        ("model.num_heads",): ("model.num_heads", model.num_heads),
        ("model.num_kv_heads",): ("model.num_kv_heads", model.num_kv_heads),
        ("model.ffn_hidden_size",): ("model.ffn_hidden_size", model.ffn_hidden_size),
        ("model.vocab_multiple", "model.vocab_size"): ("the padded vocabulary", padded_vocab_size(model)),
        ("model.seq_length", "parallel.cp"): ("the number of tokens of a sequence", tokens),
    }
    legal = nearby_divisors(math.gcd(*(size for _, size in sizes.values())), tp)
    for paths, (name, size) in sizes.items():
        is_reported = name == "model.num_kv_heads" and size == model.num_heads
        if size % tp and not is_reported:
            yield Finding(
                ("parallel.tp", *paths),
                f"parallel.tp is {tp} but {name} is {size}",
                "it must divide evenly across tensor-parallel ranks",
                f"use parallel.tp {legal}",
            )


def context(recipe: Recipe) -> Iterator[Finding]:
    cp, length = recipe.parallel.cp, recipe.model.seq_length
    if cp == 1:
        return
    if FAMILIES[recipe.model.family].encoder:
        yield Finding(
            ("parallel.cp", "model.family"),
            f"parallel.cp is {cp} but model.family is {recipe.model.family}",
            "its heads read the first token of a whole sequence, so sequences are not split between ranks",
            "use parallel.cp=1",
        )
    elif length % (2 * cp):
        lower = length // (2 * cp) * 2 * cp
        yield Finding(
            ("parallel.cp", "model.seq_length"),
            f"parallel.cp is {cp} but model.seq_length is {length}",
            "a sequence is split into 2 * cp equal pieces",
            f"use parallel.cp {nearby_divisors(max(1, length // 2), cp)}, or a sequence of {lower or 2 * cp} tokens",
        )


def pipeline(recipe: Recipe) -> Iterator[Finding]:
    parallel, layers = recipe.parallel, recipe.model.num_layers
    pp, chunks, schedule = parallel.pp, parallel.chunks, parallel.schedule
    if pp == 1:
        return
    if pp * chunks > layers:
        yield Finding(
            ("parallel.pp", "parallel.chunks", "model.num_layers"),
            f"parallel.pp * parallel.chunks is {pp * chunks} but model.num_layers is {layers}",
            "every pipeline stage owns at least one layer",
            f"use at most {layers} stages",
        )
    if (schedule in _SEVERAL_STAGES) != (chunks > 1):
        few = schedule in _SEVERAL_STAGES
        yield Finding(
            ("parallel.chunks", "parallel.schedule"),
            f"parallel.schedule is {schedule} with parallel.chunks {chunks}",
            f"{schedule} runs {'at least two stages' if few else 'one stage'} per rank",
            "use parallel.chunks=2" if few else "use parallel.chunks=1, or the schedule interleaved",
        )
    elif schedule in _SEVERAL_STAGES:
        yield from _rounds(recipe)
    if schedule == "zero_bubble":
        yield from _zero_bubble(recipe)
    if parallel.zero >= 2:
        yield Finding(
            ("parallel.zero", "parallel.pp"),
            f"parallel.zero is {parallel.zero} with parallel.pp {pp}",
            "under a pipeline, gradients stay whole between micro-batches, so ZeRO 2 and 3 would act as ZeRO 1",
            "use parallel.zero=1",
        )


def _rounds(recipe: Recipe) -> Iterator[Finding]:
    """Several stages per rank work through micro-batches in rounds of pp."""
    pp, unit = recipe.parallel.pp, recipe.batch.micro_batch_size * max(1, data_parallel_size(recipe))
    full, ramp = recipe.batch.global_batch_size, recipe.batch.rampup
    sizes = [*(range(ramp.start, full, ramp.increment)[:10_000] if ramp else ()), full]
    odd = [size for size in sizes if size % unit == 0 and size // unit % pp]
    if odd:
        yield Finding(
            ("parallel.schedule", "parallel.pp", "batch.global_batch_size", "batch.micro_batch_size", *LAYOUT),
            f"a batch of {odd[0]} samples makes {odd[0] // unit} micro-batches for parallel.pp {pp}",
            f"{recipe.parallel.schedule} takes micro-batches in rounds of pp",
            f"use batches that are multiples of {unit * pp} samples, or the schedule 1f1b",
        )


def _zero_bubble(recipe: Recipe) -> Iterator[Finding]:
    if recipe.train.compile is True:
        yield Finding(
            ("parallel.schedule", "train.compile"),
            "parallel.schedule is zero_bubble with train.compile",
            "torch cannot split the backward pass of compiled blocks",
            "use train.compile=false, or the schedule interleaved",
        )
    ranks = data_parallel_size(recipe) * recipe.parallel.cp
    if ranks > 1 and recipe.precision != "fp32":
        yield Finding(
            ("parallel.schedule", "precision", *LAYOUT),
            f"parallel.schedule is zero_bubble with precision {recipe.precision} and {ranks} data-parallel ranks",
            "torch then adds the gradients of micro-batches in 16 bits",
            "use the schedule interleaved",
        )


def data_parallel(recipe: Recipe) -> Iterator[Finding]:
    parallel = recipe.parallel
    ranks = ranks_per_replica(recipe)
    if recipe.launch and world_size(recipe) % ranks:
        world = world_size(recipe)
        near = " or ".join(str(n) for n in (world // ranks * ranks, (world // ranks + 1) * ranks) if n)
        yield Finding(
            LAYOUT,
            f"launch starts {world} ranks",
            f"one replica takes tp * pp * cp = {ranks}, which must divide them",
            f"use a multiple of {ranks} ranks, such as {near}",
        )
        return
    size, copies = parallel.shard_size, max(1, data_parallel_size(recipe)) * parallel.cp
    if size is not None and parallel.zero and copies % size:
        yield Finding(
            ("parallel.shard_size", *LAYOUT),
            f"parallel.shard_size is {size} but there are {copies} data- and context-parallel ranks",
            "it must divide them",
            f"use {nearby_divisors(copies, size)}, or null for all of them",
        )


def launch(recipe: Recipe) -> Iterator[Finding]:
    if recipe.launch is None:
        return
    on, nodes, limit = recipe.launch.on, recipe.launch.nodes, recipe.launch.time_limit
    if on == "local" and nodes > 1:
        yield Finding(
            ("launch.nodes", "launch.on"),
            f"launch.nodes is {nodes} but launch.on is local",
            "local means this one machine",
            "use launch.on hosts, slurm or azureml, or one node",
        )
    exit_after = recipe.train.exit_after
    if limit and isinstance(exit_after, Duration) and exit_after.seconds >= limit.seconds:
        yield Finding(
            ("train.exit_after", "launch.time_limit"),
            f"train.exit_after is {exit_after} but launch.time_limit is {limit}",
            "the scheduler would kill the job before it saves",
            "leave train.exit_after some minutes below the limit",
        )
