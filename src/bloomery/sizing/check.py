"""A recipe that keeps every rule between its fields, or all its problems. The rules are on this floor, not in `config`,
because several need the ramp and step arithmetic of `sizing`."""

import math
import os
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

from bloomery.base.errors import Problem, RecipeError, first_few
from bloomery.base.units import Duration, Epochs
from bloomery.config.fields import Section
from bloomery.config.load import LoadedRecipe, as_dict, leaves, load_recipe
from bloomery.config.recipe import LaunchSection, Recipe, SourceSection
from bloomery.config.schema import all_fields, by_place, shown
from bloomery.config.yaml_nodes import inline_yaml
from bloomery.families.registry import FAMILIES, READERS, family_defaults
from bloomery.sizing.layout import Layout, ranks_per_replica, world_size
from bloomery.sizing.parameters import padded_vocab_size
from bloomery.sizing.schedule import BatchPlan, TrainingPlan, skip_range

LAYOUT = ("launch.nodes", "launch.gpus_per_node", "parallel.tp", "parallel.pp", "parallel.cp")
_SEVERAL_STAGES = ("interleaved", "zero_bubble")
_MOST_LEVELS = 10_000
_SMALLEST_USUAL_RATE = 1e-8
_LARGEST_USUAL_RATE = 0.1
_MOST_STEPS = 100_000_000
_FP8_UNIT = 16
_SHORTEST_PAIR = 5
"""[CLS], a token, [SEP], a token, [SEP]."""


Done = Callable[[Recipe], int]
"""Samples that its run has consumed: the levels of its ramp that are behind it need not fit the layout any more."""


def load_checked_recipe(name: str, overrides: Sequence[str] = (), *, done: Done = lambda _: 0) -> LoadedRecipe:
    """The recipe, or RecipeError with every problem in the order of the file: of the schema, or else of the rules."""
    return check(load_recipe(name, overrides), done)


def check(loaded: LoadedRecipe, done: Done = lambda _: 0) -> LoadedRecipe:
    """The recipe with its warnings, or RecipeError with every broken rule."""
    values, problems, warnings = as_dict(loaded.recipe), list[Problem](), list[Problem]()
    for found in _findings(RULES, loaded.recipe, done):
        what = " but ".join(f"{path} is {shown(_at(values, path))}" for path in found.paths[:2])
        problem = Problem(what, found.rule, found.remedy, loaded.places.find(*found.paths))
        (warnings if found.is_warning else problems).append(problem)
    if problems:
        raise RecipeError(sorted(problems, key=by_place))
    return replace(loaded, warnings=warnings)


@dataclass(frozen=True)
class Finding:
    """A broken rule."""

    paths: tuple[str, ...]
    """The fields involved, the one to point at first; the values of the first two are shown."""
    rule: str
    remedy: str
    is_warning: bool = False


Findings = Iterator[Finding]


def _at(value: Any, path: str) -> Any:
    """A field of a recipe in plain YAML values; None where a section is not set."""
    for key in path.split("."):
        value = value[int(key)] if isinstance(value, list) else value.get(key) if isinstance(value, dict) else None
    return value


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
        remedy = f"use {nearby_divisors(model.hidden_size, model.num_heads)} heads"
        yield Finding(("model.num_heads", "model.hidden_size"), "heads must divide the hidden size evenly", remedy)
    elif FAMILIES[model.family].positions == "rotary" and model.head_size % 2:
        paths = ("model.num_heads", "model.hidden_size", "model.head_dim", "model.family")
        rule = f"a head is {model.head_size} wide, and rotary positions turn pairs, so its width must be even"
        yield Finding(paths, rule, f"change {' or '.join(paths[:3])}")
    if model.num_heads % model.num_kv_heads:
        remedy = f"use {nearby_divisors(model.num_heads, model.num_kv_heads)} key/value heads"
        rule = "every key/value head serves the same number of query heads"
        yield Finding(("model.num_kv_heads", "model.num_heads"), rule, remedy)


def ignored(recipe: Recipe) -> Findings:
    """A field that nothing reads because of another one, unless it has its default value: with that a recipe takes back
    what its base had set, and the resolved recipe of a run writes out every field."""
    model, parallel, lr, data, values = recipe.model, recipe.parallel, recipe.lr, recipe.data, as_dict(recipe)
    encoder, alibi = FAMILIES[model.family].encoder, FAMILIES[model.family].positions == "alibi"
    unread = {
        "model.family": [f"model.{name}" for name, families in READERS.items() if model.family not in families],
        "parallel.pp": ["parallel.schedule", "parallel.chunks"] * (parallel.pp == 1),
        "parallel.zero": ["parallel.shard_size"] * (parallel.zero == 0),
        "lr.schedule": {"constant": ["lr.decay", "lr.min", "lr.cooldown"], "wsd": []}.get(lr.schedule, ["lr.cooldown"]),
        "precision": ["loss_scale"] * (recipe.precision != "fp16"),
    }
    if data is not None:
        unread["model.family"] += ["data.mask_documents", "data.eod_loss"] if encoder else ["data.masking"]
        unread["model.family"] += ["data.reset_positions"] * (encoder or alibi)  # ALiBi has distances only
        unread["data.split"] = ["data.split_by"] * (data.split is None)
        unread["data.order"] = ["data.blend_one_source"] * (data.order == "timeless")
        unread["train.evaluate"] = ["data.validation", "data.test"] * (recipe.train.evaluate is None)
    by_family = family_defaults({name: getattr(model, name) for name in ("family", "hidden_size", "num_heads")})
    for other, paths in unread.items():
        for path in paths:
            default = all_fields()[path].info.get_default(call_default_factory=True)
            default = by_family.get(path.rpartition(".")[2], default)
            default = default.model_dump(mode="json") if isinstance(default, Section) else default
            if _at(values, path) != default:
                yield Finding(
                    (path, other), "it would be ignored", f"set it back to {inline_yaml(default)}, or change {other}"
                )


def own_model(recipe: Recipe) -> Findings:
    parallel = recipe.parallel
    cuts = {"parallel.tp": parallel.tp > 1, "parallel.pp": parallel.pp > 1, "parallel.cp": parallel.cp > 1}
    cuts |= {"parallel.recompute": parallel.recompute != "none", "precision": recipe.precision == "fp8"}
    if FAMILIES[recipe.model.family].build and any(cuts.values()):
        rule = "a model of a package's own is not cut, recomputed or rounded from outside: data-parallel ranks share it"
        yield Finding((*(name for name, is_set in cuts.items() if is_set), "model.family"), rule, "use parallel.zero")
    data = recipe.data
    if data is not None and FAMILIES[recipe.model.family].dataset and (data.split or data.order != "timeless"):
        rule = "a dataset of a package's own is read whole, in timeless order"
        yield Finding(("data.split", "data.order", "model.family"), rule, "name its parts in data.train and validation")


def tensor_parallel(recipe: Recipe) -> Findings:
    yield from own_model(recipe)
    model, tp = recipe.model, recipe.parallel.tp
    sizes = {
        "model.num_heads": model.num_heads,
        "model.num_kv_heads": model.num_kv_heads,
        "model.ffn_hidden_size": model.ffn_hidden_size,
        "model.vocab_size": padded_vocab_size(model),
        "model.seq_length": model.seq_length // recipe.parallel.cp,
    }
    if uneven := [path for path, size in sizes.items() if size % tp]:
        parts = ", ".join(f"{sizes[path]} for {path}" for path in uneven)
        rule = f"it must divide heads, MLP, the padded vocabulary and each rank's tokens, here {parts}"
        remedy = f"use parallel.tp {nearby_divisors(math.gcd(*sizes.values()), tp)}"
        yield Finding(("parallel.tp", *uneven, "parallel.cp", "model.vocab_multiple"), rule, remedy)


def context(recipe: Recipe) -> Findings:
    cp, length = recipe.parallel.cp, recipe.model.seq_length
    if cp > 1 and FAMILIES[recipe.model.family].encoder:
        rule = "its heads read the first token of a whole sequence, so sequences are not split between ranks"
        yield Finding(("parallel.cp", "model.family"), rule, "use parallel.cp=1")
    elif cp > 1 and length % (2 * cp):
        near, tokens = nearby_divisors(max(1, length // 2), cp), length // (2 * cp) * 2 * cp or 2 * cp
        rule, remedy = "a sequence is split into 2 * cp equal pieces", f"use parallel.cp {near}, or {tokens} tokens"
        yield Finding(("parallel.cp", "model.seq_length"), rule, remedy)


def pipeline(recipe: Recipe) -> Findings:
    parallel, layers = recipe.parallel, recipe.model.num_layers
    if parallel.pp == 1:
        return
    if parallel.pp * parallel.chunks > layers:
        rule = f"each of pp * chunks = {parallel.pp * parallel.chunks} pipeline stages owns at least one layer"
        yield Finding(("parallel.pp", "model.num_layers", "parallel.chunks"), rule, f"use at most {layers} stages")
    if (parallel.schedule in _SEVERAL_STAGES) != (parallel.chunks > 1):
        rule = "interleaved and zero_bubble run at least two stages per rank, the others one"
        remedy = "use parallel.chunks=2 with these, parallel.chunks=1 with the others"
        yield Finding(("parallel.chunks", "parallel.schedule"), rule, remedy)
    if parallel.schedule == "zero_bubble" and recipe.train.compile is True:
        remedy = "use train.compile=false, or the schedule interleaved"
        yield Finding(("parallel.schedule", "train.compile"), "torch cannot split compiled backward passes", remedy)
    data_ranks = Layout.of(recipe).dp * parallel.cp
    if parallel.schedule == "zero_bubble" and data_ranks > 1 and recipe.precision != "fp32":
        rule = f"across {data_ranks} data-parallel ranks, torch then adds the gradients of micro-batches in 16 bits"
        yield Finding(("parallel.schedule", "precision", *LAYOUT), rule, "use the schedule interleaved")
    if parallel.zero >= 2:
        rule = "under a pipeline, gradients stay whole between micro-batches, so ZeRO 2 and 3 would act as ZeRO 1"
        yield Finding(("parallel.zero", "parallel.pp"), rule, "use parallel.zero=1")


def fp8(recipe: Recipe) -> Findings:
    """What 8-bit matrix units ask for."""
    model, parallel = recipe.model, recipe.parallel
    if recipe.precision != "fp8":
        return
    if parallel.schedule == "zero_bubble":
        rule = "its products give the gradients of inputs and of weights at once, which zero_bubble computes apart"
        yield Finding(("parallel.schedule", "precision"), rule, "use the schedule interleaved")
    tokens = recipe.batch.micro_batch_size * model.seq_length // parallel.cp
    sizes = {
        "model.hidden_size": model.hidden_size,
        "model.ffn_hidden_size": model.ffn_hidden_size // parallel.tp,
        "model.num_heads": model.num_heads * model.head_size // parallel.tp,
        "model.num_kv_heads": (model.num_heads + 2 * model.num_kv_heads) * model.head_size // parallel.tp,
        "batch.micro_batch_size": tokens,
    }
    for path, size in sizes.items():
        if size % _FP8_UNIT:
            rule = f"8-bit products need multiples of {_FP8_UNIT} on each rank, and this makes {size}"
            yield Finding((path, "precision"), rule, "change it, or use precision=bf16")


def data_parallel(recipe: Recipe) -> Findings:
    parallel, ranks, world = recipe.parallel, ranks_per_replica(recipe), world_size(recipe)
    size, copies = parallel.shard_size, Layout.of(recipe).dp * parallel.cp
    if world % ranks:
        rule = f"one replica takes tp * pp * cp = {ranks} of the {world} ranks that are launched, and must divide them"
        yield Finding(LAYOUT, rule, f"use {_multiples(world, ranks)} ranks")
    elif size is not None and parallel.zero and copies % size:
        rule, remedy = f"it must divide the {copies} data- and context-parallel ranks", nearby_divisors(copies, size)
        yield Finding(("parallel.shard_size", *LAYOUT), rule, f"use {remedy}, or null for all of them")


def _multiples(number: int, unit: int) -> str:
    """The two around a number that is none: '4 or 8'."""
    return " or ".join(str(n) for n in (number // unit * unit, (number // unit + 1) * unit) if n)


def batch(recipe: Recipe, done: Done = lambda _: 0) -> Findings:
    """Every level of the ramp must be fed too: the reference finds out days later, when it reaches the level."""
    full, ramp, parallel = recipe.batch.global_batch_size, recipe.batch.rampup, recipe.parallel
    replicas, levels = max(1, Layout.of(recipe).dp), _ramp_levels(recipe)
    unit = recipe.batch.micro_batch_size * replicas
    if len(levels) <= _MOST_LEVELS and any(size % unit for size in levels) and (samples := done(recipe)):
        levels = range(BatchPlan.of(recipe.batch).global_batch_at(samples), full, levels.step)
    ramp_paths = ("batch.rampup.start", "batch.rampup.increment") if ramp else ()
    paths = (*ramp_paths, "batch.global_batch_size", "batch.micro_batch_size", *LAYOUT)
    if ramp and not 1 <= len(_ramp_levels(recipe)) <= _MOST_LEVELS:
        many = f"{len(_ramp_levels(recipe)):,} levels below the full batch"
        rule = f"this ramp has {many}, and 1 to {_MOST_LEVELS:,} are possible"
        yield Finding(
            ("batch.rampup.start", "batch.global_batch_size", *paths),
            rule,
            "change its start and increment, or remove it",
        )
    elif ramp and (full - ramp.start) % ramp.increment:
        rule = f"the increment must divide the full batch less the start, {full - ramp.start}"
        remedy = f"use {nearby_divisors(full - ramp.start, ramp.increment)}"
        yield Finding(("batch.rampup.increment", "batch.global_batch_size", *paths), rule, remedy)
    elif misfits := [str(size) for size in (*levels, full) if size % unit]:
        factors = f"micro_batch_size {recipe.batch.micro_batch_size} times {replicas} data-parallel replicas"
        rule = f"it must be a multiple of {factors}"
        rule = f"every level of the ramp must be a multiple of {factors}, not {first_few(misfits, 6)}" if ramp else rule
        remedy = f"use {f'multiples of {unit}' if ramp else _multiples(full, unit)}, or change micro_batch_size"
        if ramp and recipe.launch and recipe.launch.nodes > 1 and full % unit == 0:
            remedy += ", or begin with fewer nodes: launch.nodes_after_ramp is the number of those after the ramp"
        yield Finding(paths, rule, remedy)
    elif parallel.schedule in _SEVERAL_STAGES and any(size // unit % parallel.pp for size in (*levels, full)):
        rule = f"it takes the micro-batches of a batch, {unit} samples at once, in rounds of pp"
        remedy = f"use batches that are multiples of {unit * parallel.pp} samples, or the schedule 1f1b"
        yield Finding(("parallel.schedule", "parallel.pp", *paths), rule, remedy)


def _ramp_levels(recipe: Recipe) -> range:
    """Batch sizes below the full one."""
    rampup = recipe.batch.rampup
    return range(rampup.start, recipe.batch.global_batch_size, rampup.increment) if rampup else range(0)


def lengths(recipe: Recipe) -> Findings:
    if len(_ramp_levels(recipe)) > _MOST_LEVELS:
        return  # the plan would take forever
    if isinstance(length := recipe.train.for_, Epochs):  # counted when the data is opened
        if recipe.data and recipe.data.order != "timeless":
            rule = "the order of these follows from the length"
            yield Finding(("train.for", "data.order"), rule, "give it in samples, as that run had it")
        elif recipe.data and length.source and length.source not in map(source_key, recipe.data.train):
            names = first_few([*map(source_key, recipe.data.train)])
            yield Finding(("train.for", "data.train"), f"the sources of data.train are {names}", "name one of them")
        return
    plan, lr, rampup = TrainingPlan.of(recipe), recipe.lr, recipe.batch.rampup
    warmup, decay, cooldown = plan.lr.warmup_samples, plan.lr.decay_samples, plan.lr.cooldown_samples
    paths = ("train.for", "batch.global_batch_size", "batch.rampup", "model.seq_length")
    if not 1 <= plan.train_steps <= _MOST_STEPS:
        rule = f"that makes {plan.train_steps:,} steps, and a training has 1 to {_MOST_STEPS:,}"
        yield Finding(paths, rule, "train for at least one global batch, and not for so much more")
    elif lr.schedule != "constant" and warmup >= decay:
        rule = f"a warm-up of {warmup:,} samples must be shorter than the decay, which ends at {decay:,}"
        yield Finding(("lr.warmup", "lr.decay", *paths), rule, "shorten the warm-up or lengthen lr.decay")
    elif lr.schedule == "wsd" and (lr.cooldown is None or cooldown > decay - warmup):
        rule = f"wsd needs a final decay that fits between {warmup:,} samples, the warm-up, and {decay:,} samples"
        yield Finding(("lr.cooldown", "lr.schedule", *paths), rule, "give for example `cooldown: 1000 steps`")
    elif rampup and length.unit != "steps" and plan.asked_samples <= rampup.samples:
        counted = f"{plan.train_steps:,} steps and {plan.train_samples:,} samples"
        rule = f"training ends inside the batch ramp; as Megatron counts steps, it takes {counted}"
        yield Finding(paths, rule, "give train.for in steps to set the exact end", is_warning=True)
    if lr.peak > _LARGEST_USUAL_RATE:
        rule = f"AdamW diverges: small models learn with at most {_LARGEST_USUAL_RATE}, large ones with far less"
        yield Finding(("lr.peak",), rule, "look at its exponent", is_warning=True)
    if lr.schedule == "constant" and warmup >= plan.train_samples > 0:
        rule = f"the rate never reaches lr.peak: its warm-up ends at {warmup:,} of {plan.train_samples:,} samples"
        yield Finding(("lr.warmup", "train.for"), rule, "shorten the warm-up or train for longer", is_warning=True)
    if lr.peak < _SMALLEST_USUAL_RATE:
        yield Finding(("lr.peak",), "a model learns nothing with so little", "look at its exponent", is_warning=True)
    if recipe.optimizer.weight_decay >= 1:
        rule = "it is multiplied with the rate, and so large it outweighs what is learned: 0.1 is usual"
        yield Finding(("optimizer.weight_decay",), rule, "look at its decimal point", is_warning=True)
    if lr.min > lr.peak:
        yield Finding(("lr.min", "lr.peak"), "the minimum lies below the peak", "lower lr.min")


def steps(recipe: Recipe) -> Findings:
    """Ranges of steps to skip, and the phases of saving."""
    for i, text in enumerate(recipe.train.skip):
        first, last = skip_range(text)
        if not 1 <= first <= last:
            rule = "a range runs from its first step, at least 1, to its last"
            yield Finding((f"train.skip.{i}",), rule, "swap them, or remove it")
    ends = [phase.until.count if phase.until else math.inf for phase in recipe.checkpoint.phases]
    if ends != sorted(set(ends)) or ends[-1] < math.inf:
        rule = "each phase but the last has an `until`, later than those before it; the last has none"
        remedy = "sort the phases by `until`, and save to the end in the last"
        yield Finding(("checkpoint.phases",), rule, remedy)


def launch(recipe: Recipe) -> Findings:
    if recipe.launch is None:
        return
    if recipe.launch.on == "local" and recipe.launch.nodes > 1:
        remedy = "use launch.on hosts, slurm or azureml, or one node"
        yield Finding(("launch.nodes", "launch.on"), "local means this one machine", remedy)
    if more := recipe.launch.nodes_after_ramp:
        section = recipe.launch.model_copy(update={"nodes": more, "nodes_after_ramp": None})
        later, ramp = recipe.model_copy(update={"launch": section}), recipe.batch.rampup
        wrong = layout_problems(later, lambda _: ramp.samples + 1 if ramp else 0)
        if wrong := wrong if ramp else ["there is no batch ramp"]:
            yield Finding(("launch.nodes_after_ramp", "launch.nodes"), wrong[0], "change or remove it")
    limit, exit_after = recipe.launch.time_limit, recipe.train.exit_after
    if limit and recipe.launch.save_before.seconds >= limit.seconds:
        rule, remedy = (
            "the ranks would be asked to save and stop as soon as they start",
            "leave time to train between them",
        )
        yield Finding(("launch.save_before", "launch.time_limit"), rule, remedy)
    if limit and isinstance(exit_after, Duration) and exit_after.seconds >= limit.seconds:
        rule, remedy = "the scheduler would kill the job before it saves", "leave some minutes between them"
        yield Finding(("train.exit_after", "launch.time_limit"), rule, remedy)


def prepare(recipe: Recipe) -> Findings:
    if recipe.prepare and recipe.tokenizer is None:
        yield Finding(("prepare", "tokenizer"), "text needs a tokenizer", "add `tokenizer: {path: ...}`")
    for number, section in enumerate(recipe.prepare):
        if section.limit and not section.shuffle:
            rule, remedy = "documents that are drawn at random come in a random order", "remove one of the two"
            yield Finding((f"prepare.{number}.limit", f"prepare.{number}.shuffle"), rule, remedy)
    outputs = Counter(os.path.normpath(section.output) for section in recipe.prepare)
    if twice := [output for output, count in outputs.items() if count > 1]:
        rule = f"a later section would replace the shard of an earlier one: {first_few(twice)}"
        yield Finding(("prepare",), rule, "give each section an output of its own")


def data(recipe: Recipe) -> Findings:
    if recipe.data is None:
        return
    data, evaluate, family = recipe.data, recipe.train.evaluate, recipe.model.family
    trained = {os.path.normpath(source.path) for source in data.train}
    for place, sources in data.groups.items():
        if twice := [key for key, count in Counter(map(source_key, sources)).items() if count > 1]:
            rule = f"sources are distinguished by `name`, by default the path, and some share it: {first_few(twice)}"
            remedy = "give each a `name`, or add up their weights in one of them"
            yield Finding((place,), rule, remedy)
        known = [source.path for source in sources if os.path.normpath(source.path) in trained]
        if known and sources is not data.train:
            rule = f"data.train trains on {first_few(known)}, so this loss will not measure the model on new text"
            remedy = "give it its own shard, or split the training sources with data.split"
            yield Finding((place, "data.train"), rule, remedy, is_warning=True)
    for name, groups in (("valid", data.validation), ("test", data.test)):
        if data.split and name in groups:
            rule = f"`{name}` is the name of the part which the split makes of the training sources"
            place = "data.validation" if name == "valid" else "data.test"
            yield Finding((place, "data.split"), rule, "give that group another name")
    if data.split_by == "tokens" and (data.order != "timeless" or FAMILIES[family].encoder):
        rule = "only samples of the timeless order may end within a document, and never those of bert"
        yield Finding(("data.split_by", "data.order", "model.family"), rule, "use data.split_by=documents")
    if evaluate and not (data.split or data.validation or data.test):
        rule, remedy = "evaluation needs data.validation or data.split", "add one, or remove train.evaluate"
        yield Finding(("train.evaluate", "data.validation", "data.split"), rule, remedy)
    train, valid, _ = split_shares(data.split) if data.split else (1.0, 1.0, 1.0)
    if not (train > 0 and (valid > 0 or evaluate is None)):
        rule = f"of train, valid and test, in this order, nothing is left for {'valid' if train > 0 else 'train'}"
        yield Finding(("data.split", "train.evaluate"), rule, "use for example '949,50,1'")
    if data.order != "timeless" and recipe.seed >= 2**32:
        yield Finding(("seed", "data.order"), "it is below 2**32 there", "use the seed of the run to be continued")
    if FAMILIES[family].encoder and data.order != "timeless":
        rule = "the orders of other systems are those of their GPT datasets"
        yield Finding(("data.order", "model.family"), rule, "use data.order=timeless")
    if FAMILIES[family].encoder and recipe.model.seq_length < _SHORTEST_PAIR:
        rule = "a sample is [CLS] A [SEP] B [SEP] with at least one token in A and in B"
        yield Finding(("model.seq_length", "model.family"), rule, f"use at least {_SHORTEST_PAIR}")


def train_refusals(recipe: Recipe) -> list[Problem]:
    """What `train` needs and other commands do without: `check` warns of it."""
    found = []
    if recipe.data is None:
        found.append(Problem("data is missing", "training needs shards", "add `data:` with `train:` to the recipe"))
    if recipe.tokenizer is None and FAMILIES[recipe.model.family].encoder:
        rule = "masking needs the ids of [CLS], [SEP], [MASK] and [PAD]"
        found.append(Problem("tokenizer is missing", rule, "add `tokenizer: {path: ...}`"))
    return found


def source_key(section: SourceSection) -> str:
    """What names a source in orders, checkpoints and metrics."""
    return section.name or os.path.normpath(section.path)


def split_shares(split: str) -> list[float]:
    """The numbers of data.split: train, valid, test; missing ones are 0."""
    shares = [float(share) for share in re.split(r"[,/]", split)]
    return shares + [0.0] * (3 - len(shares))


Rule = Callable[[Recipe], Findings]
_LAYOUT_RULES: tuple[Rule, ...] = (tensor_parallel, context, pipeline, fp8, data_parallel, batch)
"""What another number of ranks may break."""
RULES: tuple[Rule, ...] = (heads, ignored, *_LAYOUT_RULES, launch, lengths, steps, prepare, data)


def _findings(rules: Sequence[Rule], recipe: Recipe, done: Done) -> list[Finding]:
    return [found for rule in rules for found in (batch(recipe, done) if rule is batch else rule(recipe))]


def fit(
    recipe: Recipe, *, nodes: int, ranks_per_node: int, done: Done = lambda _: 0
) -> tuple[Recipe, list[str]] | None:
    """(the recipe for another number of ranks, what had to change and why); None if nothing fits.

    As little is changed as possible. Tried in this order: as it is, smaller micro-batches, other pipeline sizes, other
    tensor-parallel sizes, no context parallelism. HSDP groups that no longer divide become one group.
    """
    section = recipe.launch or LaunchSection()
    on = "hosts" if section.on == "local" and nodes > 1 else section.on
    section = section.model_copy(update={"on": on, "nodes": nodes, "gpus_per_node": ranks_per_node})
    here = recipe.model_copy(update={"launch": section})
    wrong = layout_problems(here, done)
    if not wrong:
        return here, []
    found = next((other for other in _layouts(here) if not layout_problems(other, done)), None)
    if found is None:
        return None
    old, new = dict(leaves(as_dict(here))), dict(leaves(as_dict(found)))
    changes = [f"{path} {value} instead of {old[path]}" for path, value in new.items() if value != old[path]]
    return found, [f"{world_size(here)} ranks instead of {world_size(recipe)}: {wrong[0]}", *changes]


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


def layout_problems(recipe: Recipe, done: Done = lambda _: 0) -> list[str]:
    return [found.rule for found in _findings(_LAYOUT_RULES, recipe, done) if not found.is_warning]


def length_problems(recipe: Recipe) -> list[str]:
    return [f"{found.rule}: {found.remedy}" for found in lengths(recipe) if not found.is_warning]
