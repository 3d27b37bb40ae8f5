"""A recipe that keeps every rule between its fields, or all its problems. The rules are on this floor, not in `config`,
because several need the ramp and step arithmetic of `sizing`."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from itertools import product
from typing import Any

from bloomery.base.errors import Problem, RecipeError, first_few
from bloomery.base.units import Duration
from bloomery.config.load import LoadedRecipe, load_recipe
from bloomery.config.recipe import LaunchSection, Recipe, Section, SourceSection
from bloomery.config.schema import all_fields, by_place
from bloomery.config.yaml_nodes import inline_yaml
from bloomery.families.registry import FAMILIES, READERS, family_defaults
from bloomery.sizing.layout import data_parallel_size, ranks_per_replica, world_size
from bloomery.sizing.parameters import padded_vocab_size
from bloomery.sizing.schedule import TrainingPlan, skip_range

LAYOUT = ("launch.nodes", "launch.gpus_per_node", "parallel.tp", "parallel.pp", "parallel.cp")
_SEVERAL_STAGES = ("interleaved", "zero_bubble")
_MOST_LEVELS = 10_000
_MOST_STEPS = 100_000_000
_SHORTEST_PAIR = 5
"""[CLS], a token, [SEP], a token, [SEP]."""


def load_checked_recipe(name: str, overrides: Sequence[str] = ()) -> LoadedRecipe:
    """The recipe, or RecipeError with every problem in the order of the file: of the schema, or else of the rules."""
    return check(load_recipe(name, overrides))


def check(loaded: LoadedRecipe) -> LoadedRecipe:
    """The recipe with its warnings, or RecipeError with every broken rule."""
    problems, warnings = list[Problem](), list[Problem]()
    for found in [found for rule in RULES for found in rule(loaded.recipe)]:
        problem = Problem(found.what, found.rule, found.remedy, loaded.places.find(*found.paths))
        (warnings if found.is_warning else problems).append(problem)
    if problems:
        raise RecipeError(sorted(problems, key=by_place))
    return replace(loaded, warnings=warnings)


@dataclass(frozen=True)
class Finding:
    """A broken rule. `paths` are the fields involved, the one to point at first."""

    paths: tuple[str, ...]
    what: str
    rule: str
    remedy: str
    is_warning: bool = False


Findings = Iterator[Finding]


def _clash(recipe: Recipe, path: str, other: str, *others: str, rule: str, remedy: str) -> Finding:
    """Of two fields that do not go together, with their values."""
    what = f"{path} is {_value(recipe, path)} but {other} is {_value(recipe, other)}"
    return Finding((path, other, *others), what, rule, remedy)


def _value(recipe: Recipe, path: str) -> Any:
    return reduce(getattr, path.split("."), recipe)


def nearby_divisors(number: int, near: int) -> str:
    """The two divisors around a value that does not divide: '8 or 16'."""
    small = [d for d in range(1, min(math.isqrt(number), 10**6) + 1) if number % d == 0]
    divisors = {*small, *(number // d for d in small)}
    below = max((d for d in divisors if d < near), default=None)
    above = min((d for d in divisors if d > near), default=None)
    return " or ".join(str(d) for d in (below, above) if d is not None)


def heads(recipe: Recipe) -> Findings:
    model = recipe.model
    if model.head_dim is None and model.hidden_size % model.num_heads:
        rule = "heads must divide the hidden size evenly"
        remedy = f"use {nearby_divisors(model.hidden_size, model.num_heads)} heads"
        yield _clash(recipe, "model.num_heads", "model.hidden_size", rule=rule, remedy=remedy)
    elif FAMILIES[model.family].positions == "rotary" and model.head_size % 2:
        paths = ("model.head_dim", "model.num_heads", "model.hidden_size", "model.family")
        rule = "rotary positions turn pairs, so the width of a head must be even"
        yield Finding(paths, f"a head is {model.head_size} wide", rule, f"change {' or '.join(paths[:3])}")
    if model.num_heads % model.num_kv_heads:
        rule = "every key/value head serves the same number of query heads"
        remedy = f"use {nearby_divisors(model.num_heads, model.num_kv_heads)} key/value heads"
        yield _clash(recipe, "model.num_kv_heads", "model.num_heads", rule=rule, remedy=remedy)


def ignored(recipe: Recipe) -> Findings:
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
            default = all_fields()[path].info.get_default(call_default_factory=True)
            default = by_family.get(path.rpartition(".")[2], default)
            if _value(recipe, path) != default:
                back = inline_yaml({} if isinstance(default, Section) else default)
                what, remedy = f"{path} is set but {other} is {value}", f"set it back to {back}, or change {other}"
                yield Finding((path, other, "model.num_heads"), what, "it would be ignored", remedy)


def tensor_parallel(recipe: Recipe) -> Findings:
    model, tp, cp = recipe.model, recipe.parallel.tp, recipe.parallel.cp
    sizes = {
        ("model.num_heads",): ("model.num_heads", model.num_heads),
        ("model.num_kv_heads",): ("model.num_kv_heads", model.num_kv_heads),
        ("model.ffn_hidden_size",): ("model.ffn_hidden_size", model.ffn_hidden_size),
        ("model.vocab_multiple", "model.vocab_size"): ("the padded vocabulary", padded_vocab_size(model)),
        ("model.seq_length", "parallel.cp"): ("the number of tokens of a sequence", model.seq_length // cp),
    }
    legal = nearby_divisors(math.gcd(*(size for _, size in sizes.values())), tp)
    for paths, (name, size) in sizes.items():
        is_reported = name == "model.num_kv_heads" and size == model.num_heads
        if size % tp and not is_reported:
            what, rule = (
                f"parallel.tp is {tp} but {name} is {size}",
                "it must divide evenly across tensor-parallel ranks",
            )
            yield Finding(("parallel.tp", *paths), what, rule, f"use parallel.tp {legal}")


def context(recipe: Recipe) -> Findings:
    cp, length = recipe.parallel.cp, recipe.model.seq_length
    if cp == 1:
        return
    if FAMILIES[recipe.model.family].encoder:
        rule = "its heads read the first token of a whole sequence, so sequences are not split between ranks"
        yield _clash(recipe, "parallel.cp", "model.family", rule=rule, remedy="use parallel.cp=1")
    elif length % (2 * cp):
        near, tokens = nearby_divisors(max(1, length // 2), cp), length // (2 * cp) * 2 * cp or 2 * cp
        rule, remedy = "a sequence is split into 2 * cp equal pieces", f"use parallel.cp {near}, or {tokens} tokens"
        yield _clash(recipe, "parallel.cp", "model.seq_length", rule=rule, remedy=remedy)


def pipeline(recipe: Recipe) -> Findings:
    parallel, layers = recipe.parallel, recipe.model.num_layers
    pp, chunks, schedule = parallel.pp, parallel.chunks, parallel.schedule
    if pp == 1:
        return
    if pp * chunks > layers:
        what = f"parallel.pp * parallel.chunks is {pp * chunks} but model.num_layers is {layers}"
        rule, remedy = "every pipeline stage owns at least one layer", f"use at most {layers} stages"
        yield Finding(("parallel.pp", "parallel.chunks", "model.num_layers"), what, rule, remedy)
    if (schedule in _SEVERAL_STAGES) != (chunks > 1):
        rule = "interleaved and zero_bubble run at least two stages per rank, the others one"
        remedy = "use parallel.chunks=2" if chunks == 1 else "use parallel.chunks=1, or the schedule interleaved"
        yield _clash(recipe, "parallel.chunks", "parallel.schedule", rule=rule, remedy=remedy)
    elif schedule in _SEVERAL_STAGES:
        yield from _rounds(recipe)
    if schedule == "zero_bubble":
        yield from _zero_bubble(recipe)
    if parallel.zero >= 2:
        what = f"parallel.zero is {parallel.zero} with parallel.pp {pp}"
        rule = "under a pipeline, gradients stay whole between micro-batches, so ZeRO 2 and 3 would act as ZeRO 1"
        yield Finding(("parallel.zero", "parallel.pp"), what, rule, "use parallel.zero=1")


def _rounds(recipe: Recipe) -> Findings:
    """Several stages per rank work through micro-batches in rounds of pp."""
    pp, unit, levels = recipe.parallel.pp, _samples_at_once(recipe), _ramp_levels(recipe)[:_MOST_LEVELS]
    odd = [size for size in (*levels, recipe.batch.global_batch_size) if size % unit == 0 and size // unit % pp]
    if odd:
        paths = ("parallel.schedule", "parallel.pp", "batch.global_batch_size", "batch.micro_batch_size", *LAYOUT)
        what = f"a batch of {odd[0]} samples makes {odd[0] // unit} micro-batches for parallel.pp {pp}"
        remedy = f"use batches that are multiples of {unit * pp} samples, or the schedule 1f1b"
        yield Finding(paths, what, f"{recipe.parallel.schedule} takes micro-batches in rounds of pp", remedy)


def _zero_bubble(recipe: Recipe) -> Findings:
    if recipe.train.compile is True:
        rule = "torch cannot split the backward pass of compiled blocks"
        remedy = "use train.compile=false, or the schedule interleaved"
        yield _clash(recipe, "parallel.schedule", "train.compile", rule=rule, remedy=remedy)
    ranks = data_parallel_size(recipe) * recipe.parallel.cp
    if ranks > 1 and recipe.precision != "fp32":
        what = f"parallel.schedule is zero_bubble with precision {recipe.precision} and {ranks} data-parallel ranks"
        rule = "torch then adds the gradients of micro-batches in 16 bits"
        yield Finding(("parallel.schedule", "precision", *LAYOUT), what, rule, "use the schedule interleaved")


def data_parallel(recipe: Recipe) -> Findings:
    parallel, ranks, world = recipe.parallel, ranks_per_replica(recipe), world_size(recipe)
    if world % ranks:
        near = " or ".join(str(n) for n in (world // ranks * ranks, (world // ranks + 1) * ranks) if n)
        rule = f"one replica takes tp * pp * cp = {ranks}, which must divide them"
        yield Finding(LAYOUT, f"launch starts {world} ranks", rule, f"use a multiple of {ranks} ranks, such as {near}")
        return
    size, copies = parallel.shard_size, data_parallel_size(recipe) * parallel.cp
    if size is not None and parallel.zero and copies % size:
        what = f"parallel.shard_size is {size} but there are {copies} data- and context-parallel ranks"
        remedy = f"use {nearby_divisors(copies, size)}, or null for all of them"
        yield Finding(("parallel.shard_size", *LAYOUT), what, "it must divide them", remedy)


def batch(recipe: Recipe) -> Findings:
    full, unit = recipe.batch.global_batch_size, _samples_at_once(recipe)
    if full % unit:
        lower = full // unit * unit
        remedy = f"use {f'{lower} or ' if lower else ''}{lower + unit}, or change micro_batch_size"
        paths = ("batch.global_batch_size", "batch.micro_batch_size", *LAYOUT)
        yield Finding(paths, f"batch.global_batch_size is {full}", f"it must be {_multiple(recipe)}", remedy)


def ramp(recipe: Recipe) -> Findings:
    """Every level of the ramp must be fed too: the reference finds out days later, when it reaches the level."""
    rampup, full = recipe.batch.rampup, recipe.batch.global_batch_size
    if rampup is None:
        return
    unit, levels = _samples_at_once(recipe), _ramp_levels(recipe)
    paths = ("batch.rampup.increment", "batch.rampup.start", "batch.global_batch_size")
    if rampup.start >= full:
        rule, remedy = "a ramp starts below the full batch", "lower the start, or remove the ramp"
        yield _clash(recipe, *paths[1:], rule=rule, remedy=remedy)
    elif (gap := full - rampup.start) % rampup.increment:
        rule, remedy = (
            f"it must divide global_batch_size - start = {gap}",
            f"use {nearby_divisors(gap, rampup.increment)}",
        )
        yield Finding(paths, f"batch.rampup.increment is {rampup.increment}", rule, remedy)
    elif len(levels) > _MOST_LEVELS:
        what, rule = f"the batch ramp has {len(levels):,} levels", f"it has at most {_MOST_LEVELS:,}"
        yield Finding(paths, what, rule, "use a larger increment")
    elif misfits := [str(level) for level in levels if level % unit]:
        what = f"{len(misfits)} of {len(levels)} levels of the batch ramp do not fit: {first_few(misfits, 6)}"
        remedy = (
            f"use a start and an increment that are multiples of {unit}, a smaller micro_batch_size, or fewer replicas"
        )
        fields = ("batch.rampup.start", "batch.rampup.increment", "batch.micro_batch_size", *LAYOUT)
        yield Finding(fields, what, f"every level must be {_multiple(recipe)}", remedy)


def _samples_at_once(recipe: Recipe) -> int:
    return recipe.batch.micro_batch_size * max(1, data_parallel_size(recipe))


def _multiple(recipe: Recipe) -> str:
    replicas = max(1, data_parallel_size(recipe))
    return f"a multiple of micro_batch_size {recipe.batch.micro_batch_size} times {replicas} data-parallel replicas"


def _ramp_levels(recipe: Recipe) -> range:
    """Batch sizes below the full one."""
    rampup = recipe.batch.rampup
    return range(rampup.start, recipe.batch.global_batch_size, rampup.increment) if rampup else range(0)


def learning_rate(recipe: Recipe) -> Findings:
    lr = recipe.lr
    if lr.min > lr.peak:
        yield _clash(recipe, "lr.min", "lr.peak", rule="the minimum lies below the peak", remedy="lower lr.min")
    if lr.schedule == "wsd" and lr.cooldown is None:
        rule, remedy = "wsd needs the length of its final decay", "add for example `cooldown: 1000 steps`"
        yield Finding(("lr.cooldown", "lr.schedule"), "lr.cooldown is missing", rule, remedy)


def lengths(recipe: Recipe) -> Findings:
    if len(_ramp_levels(recipe)) > _MOST_LEVELS:
        return  # the plan would take forever
    plan, lr, rampup = TrainingPlan.of(recipe), recipe.lr, recipe.batch.rampup
    paths = ("train.for", "batch.global_batch_size", "batch.rampup", "model.seq_length")
    if not 1 <= plan.train_steps <= _MOST_STEPS:
        what = f"train.for is {recipe.train.for_}, which makes {plan.train_steps:,} steps"
        one = f"one step takes {recipe.batch.global_batch_size} samples of {recipe.model.seq_length} tokens"
        remedy = "train for at least one global batch" if plan.train_steps < 1 else "train for less"
        yield Finding(paths, what, f"{one}, and a training has 1 to {_MOST_STEPS:,} steps", remedy)
        return
    warmup, decay, cooldown = plan.lr.warmup_samples, plan.lr.decay_samples, plan.lr.cooldown_samples
    if lr.schedule != "constant" and warmup >= decay:
        what = f"lr.warmup is {lr.warmup} = {warmup:,} samples"
        rule = f"it must be shorter than the decay, which ends at {decay:,} samples"
        yield Finding(("lr.warmup", "lr.decay", *paths), what, rule, "shorten the warm-up or lengthen lr.decay")
    elif lr.schedule == "wsd" and cooldown > decay - warmup:
        what = f"lr.cooldown is {lr.cooldown} = {cooldown:,} samples"
        rule = f"it must fit between the end of warm-up and {decay:,} samples"
        yield Finding(("lr.cooldown", "lr.decay", "lr.warmup", *paths), what, rule, "shorten it")
    if rampup and recipe.train.for_.unit != "steps" and plan.asked_samples <= rampup.samples:
        what = f"train.for ends inside the batch ramp: {plan.asked_samples:,} of {rampup.samples:,} samples"
        counted = f"the run takes {plan.train_steps:,} steps and {plan.train_samples:,} samples"
        rule = f"steps are counted as Megatron counts them, so {counted}"
        yield Finding(paths, what, rule, "give train.for in steps to set the exact end", is_warning=True)


def skips(recipe: Recipe) -> Findings:
    last_end = 0
    for i, text in enumerate(recipe.train.skip):
        first, last = skip_range(text)
        if not last_end < first <= last:
            rule = "a range runs from its first step, at least 1, to its last, and ranges ascend and do not overlap"
            yield Finding((f"train.skip.{i}",), f"train.skip has '{text}'", rule, "sort and join them")
        last_end = max(last_end, last)


def loss_scale(recipe: Recipe) -> Findings:
    if recipe.loss_scale.min > recipe.loss_scale.initial:
        rule, remedy = "the scale starts at or above its minimum", "raise the initial scale"
        yield _clash(recipe, "loss_scale.initial", "loss_scale.min", rule=rule, remedy=remedy)


def phases(recipe: Recipe) -> Findings:
    ends = [phase.until.count if phase.until else math.inf for phase in recipe.checkpoint.phases]
    for i, end in enumerate(ends):
        name, is_last = f"checkpoint.phases.{i}", i + 1 == len(ends)
        if (end == math.inf) != is_last or end <= max(ends[:i], default=0):
            what = f"{name} ends at {recipe.checkpoint.phases[i].until}" if end < math.inf else f"{name} has no `until`"
            rule = "each phase but the last has an `until`, later than those before it; the last has none"
            yield Finding((name,), what, rule, "sort the phases by `until`, and save to the end in the last")


def launch(recipe: Recipe) -> Findings:
    if recipe.launch is None:
        return
    if recipe.launch.on == "local" and recipe.launch.nodes > 1:
        rule, remedy = "local means this one machine", "use launch.on hosts, slurm or azureml, or one node"
        yield _clash(recipe, "launch.nodes", "launch.on", rule=rule, remedy=remedy)
    limit, exit_after = recipe.launch.time_limit, recipe.train.exit_after
    if limit and isinstance(exit_after, Duration) and exit_after.seconds >= limit.seconds:
        rule = "the scheduler would kill the job before it saves"
        remedy = "leave train.exit_after some minutes below the limit"
        yield _clash(recipe, "train.exit_after", "launch.time_limit", rule=rule, remedy=remedy)


def prepare(recipe: Recipe) -> Findings:
    if recipe.prepare and recipe.tokenizer is None:
        what, remedy = "prepare is set but tokenizer is not", "add `tokenizer: {path: ...}`"
        yield Finding(("prepare", "tokenizer"), what, "text needs one", remedy)
    first: dict[str, int] = {}
    for i, section in enumerate(recipe.prepare):
        if (before := first.setdefault(os.path.normpath(section.output), i)) != i:
            what = f"prepare.{i} and prepare.{before} both write {section.output}"
            rule = "the later one would replace the shard of the earlier one"
            yield Finding((f"prepare.{i}.output", f"prepare.{i}"), what, rule, "give each an output of its own")
        if section.max_tokens is not None and section.min_tokens > section.max_tokens:
            what = f"prepare.{i}.min_tokens is {section.min_tokens} and max_tokens is {section.max_tokens}"
            rule, paths = "no document has that many and that few tokens", (f"prepare.{i}.min_tokens", f"prepare.{i}")
            yield Finding(paths, what, rule, "swap them, or remove one")


def data(recipe: Recipe) -> Findings:
    if recipe.data is None:
        return
    split, validation, evaluate = recipe.data.split, recipe.data.validation, recipe.train.evaluate
    yield from _sources("data.train", recipe.data.train, recipe.data.order)
    trained = {os.path.normpath(section.path) for section in recipe.data.train}
    for group, sections in validation.items():
        yield from _sources(f"data.validation.{group}", sections, recipe.data.order)
        if known := [section.path for section in sections if os.path.normpath(section.path) in trained]:
            what = f"data.validation.{group} evaluates on {first_few(known)}, which data.train trains on"
            rule = "its loss will not measure the model on new text"
            remedy = "give it its own shard, or split the training sources with data.split"
            yield Finding((f"data.validation.{group}", "data.train"), what, rule, remedy, is_warning=True)
    paths = ("data.validation", "data.split", "train.evaluate")
    if split and validation:
        rule = "validation comes either from a split of the training sources or from groups of its own"
        yield Finding(paths, "data.split and data.validation are both set", rule, "remove one of them")
    if evaluate and not (split or validation):
        what = "train.evaluate is set but there is nothing to evaluate"
        rule, remedy = "it needs data.validation or data.split", "add one, or remove train.evaluate"
        yield Finding(("train.evaluate", *paths), what, rule, remedy)
    train, valid, _ = split_shares(split) if split else (1.0, 1.0, 1.0)
    if not (train > 0 and (valid > 0 or evaluate is None)):
        what = f"data.split is '{split}', which leaves nothing for {'validation' if train > 0 else 'training'}"
        rule = "the parts are train, valid and test, in this order"
        yield Finding(("data.split", "train.evaluate"), what, rule, "use for example '949,50,1'")


def source_key(section: SourceSection) -> str:
    """What names a source in orders, checkpoints and metrics."""
    return section.name or os.path.normpath(section.path)


def split_shares(split: str) -> list[float]:
    """The numbers of data.split: train, valid, test; missing ones are 0."""
    shares = [float(share) for share in re.split(r"[,/]", split)]
    return shares + [0.0] * (3 - len(shares))


def _sources(place: str, sections: Sequence[SourceSection], order: str) -> Findings:
    names: dict[str, int] = {}
    shards: dict[str, int] = {}
    for number, section in enumerate(sections):
        paths = (f"{place}.{number}.name", f"{place}.{number}.path", f"{place}.{number}")
        namesake = names.setdefault(source_key(section), number)
        same = shards.setdefault(os.path.normpath(section.path), number)
        if namesake != number:
            what = f"{place}.{number} and {place}.{namesake} are both called '{source_key(section)}'"
            rule = "orders, checkpoints and metrics distinguish sources by `name`, by default the path"
            yield Finding(paths, what, rule, "give each a `name`, or add up their weights in one of them")
        elif same != number:
            what = f"{place}.{number} and {place}.{same} are the same shard, {section.path}"
            rule = "each name has its own order of it, so text repeats within an epoch"
            remedy = f"remove one of them and give the other the weight {section.weight + sections[same].weight:g}"
            # A run of another system that did so must be reproduced.
            yield Finding((paths[1], *paths), what, rule, remedy, is_warning=order != "timeless")


def samples(recipe: Recipe) -> Findings:
    """That the masked samples of an encoder can be made."""
    data, family = recipe.data, recipe.model.family
    if data is None or not FAMILIES[family].encoder:
        return
    if data.order != "timeless":
        rule = "the orders of other systems are those of their GPT datasets"
        yield _clash(recipe, "data.order", "model.family", rule=rule, remedy="use data.order=timeless")
    if recipe.tokenizer is None:
        what = f"model.family is {family} but tokenizer is not set"
        rule = "masking needs the ids of [CLS], [SEP], [MASK] and [PAD], and which tokens continue a word"
        yield Finding(("tokenizer", "model.family"), what, rule, "add `tokenizer: {path: ...}`")
    if recipe.model.seq_length < _SHORTEST_PAIR:
        rule = "a sample is [CLS] A [SEP] B [SEP] with at least one token in A and in B"
        yield _clash(recipe, "model.seq_length", "model.family", rule=rule, remedy=f"use at least {_SHORTEST_PAIR}")
    read = {source.path for sources in (data.train, *data.validation.values()) for source in sources}
    for i, section in enumerate(recipe.prepare):
        if section.output in read and not section.split_sentences:
            what = f"prepare.{i} makes {section.output} without split_sentences but model.family is {family}"
            rule = "its samples are pairs of sentences, so the shard must keep them apart"
            paths = (f"prepare.{i}.split_sentences", f"prepare.{i}", "model.family")
            yield Finding(paths, what, rule, f"add `split_sentences: true` to prepare.{i}")


Rule = Callable[[Recipe], Findings]
_LAYOUT_RULES: tuple[Rule, ...] = (tensor_parallel, context, pipeline, data_parallel, batch, ramp)
"""What another number of ranks may break."""
RULES: tuple[Rule, ...] = (
    *(
        heads,
        ignored,
        *_LAYOUT_RULES,
        launch,
        learning_rate,
        lengths,
        skips,
        loss_scale,
        phases,
        prepare,
        data,
        samples,
    ),
)


def fit(recipe: Recipe, *, nodes: int, ranks_per_node: int) -> tuple[Recipe, list[str]] | None:
    """(the recipe for another number of ranks, what had to change and why); None if nothing fits.

    As little is changed as possible. Tried in this order: as it is, smaller micro-batches, other pipeline sizes, other
    tensor-parallel sizes, no context parallelism. HSDP groups that no longer divide become one group.
    """
    section = recipe.launch or LaunchSection()
    on = "hosts" if section.on == "local" and nodes > 1 else section.on
    section = section.model_copy(update={"on": on, "nodes": nodes, "gpus_per_node": ranks_per_node})
    here = recipe.model_copy(update={"launch": section})
    wrong = _layout_problems(here)
    if not wrong:
        return here, []
    why = f"{world_size(here)} ranks instead of {world_size(recipe)}: {wrong[0]}"
    return next(
        ((found, [why, *_changes(here, found)]) for found in _layouts(here) if not _layout_problems(found)), None
    )


def _layouts(recipe: Recipe) -> Iterator[Recipe]:
    """By how much they change."""
    world, parallel, size = world_size(recipe), recipe.parallel, recipe.batch.micro_batch_size
    micro_sizes = [n for n in range(size, 0, -1) if size % n == 0]
    divisors = [n for n in range(1, world + 1) if world % n == 0]
    stages = sorted(divisors, key=lambda n: abs(n - parallel.pp))
    tensors = sorted(divisors, key=lambda n: abs(n - parallel.tp))
    for cp, tp, pp, micro in product(dict.fromkeys((parallel.cp, 1)), tensors, stages, micro_sizes):
        changed: dict[str, Any] = {"tp": tp, "pp": pp, "cp": cp}
        if pp == 1:
            changed |= {"schedule": "1f1b", "chunks": 1}
        elif parallel.zero > 1:
            changed["zero"] = 1
        if parallel.shard_size is not None and world // (tp * pp) % parallel.shard_size:
            changed["shard_size"] = None
        batch = recipe.batch.model_copy(update={"micro_batch_size": micro})
        if world % (tp * pp * cp) == 0:
            yield recipe.model_copy(update={"parallel": parallel.model_copy(update=changed), "batch": batch})


def _layout_problems(recipe: Recipe) -> list[str]:
    return [finding.what for rule in _LAYOUT_RULES for finding in rule(recipe) if not finding.is_warning]


def _changes(before: Recipe, after: Recipe) -> list[str]:
    paths = [*(f"parallel.{name}" for name in type(before.parallel).model_fields), "batch.micro_batch_size"]
    values = [(path, _value(before, path), _value(after, path)) for path in paths]
    return [f"{path} {new} instead of {old}" for path, old, new in values if old != new]
