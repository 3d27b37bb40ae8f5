"""DeepSpeed's ds_config.json: what it says about the training, and where it contradicts the command line."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from bloomery.base.bounded import parse_json
from bloomery.base.errors import Problem, RecipeError
from bloomery.checkpoint.megatron.builder import LARGEST
from bloomery.checkpoint.megatron.flags import Row

_NO_MATTER = (
    "steps_per_print", "wall_clock_breakdown", "dump_state", "zero_allow_untested_optimizer", "prescale_gradients",
    "communication_data_type", "gradient_predivide_factor", "sparse_gradients", "memory_breakdown", "disable_allgather",
    "activation_checkpointing", "flops_profiler", "comms_logger", "tensorboard", "wandb", "csv_monitor", "aio",
    "zero_force_ds_cpu_optimizer", "seq_parallel_communication_data_type", "checkpoint", "data_types", "autotuning",
)  # fmt: skip
_SAMPLES = "every sample has its full length, and a loss at every place"
_OTHER_TRAININGS = {
    "curriculum_learning": _SAMPLES,
    "data_efficiency": _SAMPLES,
    "progressive_layer_drop": "every layer is trained with every sample",
    "compression_training": "weights are neither quantized nor pruned",
    "quantize_training": "weights are neither quantized nor pruned",
    "sparse_attention": "no family here has such an attention",
    "amp": "precision is that of --fp16 or --bf16",
}
"""Sections that change what is trained, and why a recipe cannot say so."""
_NUMBER = (int, float)
_JSON_NAMES = {(dict,): "an object: {...}", (list,): "a list: [...]", (int,): "a whole number", _NUMBER: "a number",
               (bool,): "true or false", (str,): "a text"}  # fmt: skip
_HIGHEST_POWER = 127
_OPTIMIZERS = ("adam", "adamw", "fusedadam", "deepspeedcpuadam")
_NOT_READ = "Megatron passes DeepSpeed its own optimizer, so this section is not read"
_LOSS_SCALE = {"initial_scale_power": "initial", "loss_scale_window": "window", "hysteresis": "hysteresis",
               "consecutive_hysteresis": "consecutive_hysteresis", "min_loss_scale": "min"}  # fmt: skip
_SECTIONS = ("zero_optimization", "fp16", "bf16", "bfloat16", "optimizer")
_ZERO_NO_MATTER = (
    "contiguous_gradients", "overlap_comm", "reduce_scatter", "reduce_bucket_size", "allgather_partitions",
    "allgather_bucket_size", "round_robin_gradients", "sub_group_size", "stage3_max_live_parameters",
    "stage3_max_reuse_distance", "stage3_prefetch_bucket_size", "stage3_param_persistence_threshold",
    "stage3_gather_16bit_weights_on_model_save", "ignore_unused_parameters", "elastic_checkpoint",
)  # fmt: skip


@dataclass
class DsConfig:
    """None where the file says nothing, or `auto`."""

    place: str
    zero_stage: int | None = None
    train_batch_size: int | None = None
    micro_batch_size: int | None = None
    accumulation_steps: int | None = None
    fp16: bool | None = None
    bf16: bool | None = None
    gradient_clipping: float | None = None
    static_loss_scale: float = 0.0
    loss_scale: dict[str, Any] = field(default_factory=dict)
    """Fields of the recipe's section."""
    optimizer: dict[str, Any] = field(default_factory=dict)
    """`lr`, `betas`, `eps`, `weight_decay`."""
    offload: bool = False
    content: dict[str, Any] = field(default_factory=dict)
    """The whole file."""


@dataclass(frozen=True)
class Said:
    """What the command line says, or Megatron's default, of something that a ds_config can say too."""

    value: Any
    written: str
    """The flag with its value, to read."""
    flag: str = ""
    """How to write another value, with `{}` for it; empty where the flag is there."""
    place: str = ""
    field: str = ""
    """Of the recipe."""
    became: str = ""
    """What the recipe has, where that is not the value."""
    note: str = ""
    """Why."""


@dataclass
class _Taker:
    """Takes values out of the file, and keeps what is wrong with them."""

    place: str
    problems: list[Problem] = field(default_factory=list)

    def wrong(self, what: str, rule: str, remedy: str = "mend it") -> None:
        self.problems.append(Problem(what, rule, remedy, self.place))

    def take(self, holder: Mapping[str, Any], path: str, *kinds: type) -> Any:
        """The value at the last part of the path; None where there is none, or `auto`."""
        value = holder.get(path.rpartition(".")[2])
        if value is None or value == "auto":
            return None
        if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
            self.wrong(f"{path} is {_short(value)}", f"it is {_JSON_NAMES[kinds]}")
            return None
        if isinstance(value, int | float) and abs(value) > LARGEST:
            self.wrong(f"{path} is {_short(value)}", f"it is at most {LARGEST:,}")
            return None
        return value

    def count(self, holder: Mapping[str, Any], path: str) -> int | None:
        value: int | None = self.take(holder, path, int)
        if value is not None and value < 1:
            self.wrong(f"{path} is {value}", "must be at least 1")
        return value


def read_ds_config(text: str, place: str) -> DsConfig:
    """RecipeError with all that is wrong with it."""
    content = _content(text, place)
    found, taker = DsConfig(place, content=content), _Taker(place)
    take, count = taker.take, taker.count
    zero, fp16 = take(content, "zero_optimization", dict) or {}, take(content, "fp16", dict) or {}
    bf16 = take(content, "bf16", dict) or take(content, "bfloat16", dict) or {}
    found.zero_stage = take(zero, "zero_optimization.stage", int)
    found.offload = bool(zero.get("cpu_offload")) or any(
        isinstance(part, dict) and part.get("device", "none") != "none"
        for part in (zero.get("offload_optimizer"), zero.get("offload_param"))
    )
    found.train_batch_size = count(content, "train_batch_size")
    found.micro_batch_size = count(content, "train_micro_batch_size_per_gpu")
    found.accumulation_steps = count(content, "gradient_accumulation_steps")
    found.gradient_clipping = take(content, "gradient_clipping", *_NUMBER)
    found.fp16 = take(fp16, "fp16.enabled", bool)
    found.bf16 = take(bf16, "bf16.enabled", bool)
    _loss_scale(found, taker, fp16)
    _optimizer(found, taker, take(content, "optimizer", dict) or {})
    for key, rule in _OTHER_TRAININGS.items():
        if _is_on(content.get(key)):
            taker.wrong(f"{key} is enabled", rule, "leave it out, if the training may go without")
    scheduler = take(take(content, "scheduler", dict) or {}, "scheduler.type", str)
    if scheduler is not None:
        what = f"scheduler.type is {json.dumps(scheduler)}, and the flags give Megatron's schedule"
        rule = "DeepSpeed would take its own instead of Megatron's, and a recipe has only Megatron's"
        taker.wrong(what, rule, "say it with --lr-decay-style and --lr-warmup-*, and remove it")
    if taker.problems:
        raise RecipeError(taker.problems)
    return found


def _loss_scale(found: DsConfig, taker: _Taker, fp16: Mapping[str, Any]) -> None:
    found.static_loss_scale = taker.take(fp16, "fp16.loss_scale", *_NUMBER) or 0.0
    power = taker.take(fp16, "fp16.initial_scale_power", int)
    if power is not None and not 0 <= power <= _HIGHEST_POWER:
        rule = f"the first scale is 2 to that power, which is 0 to {_HIGHEST_POWER}"
        taker.wrong(f"fp16.initial_scale_power is {power}", rule, "use for example 16")
        power = None
    found.loss_scale = {
        "initial": 2.0 ** (16 if power is None else power),
        "window": f"{taker.count(fp16, 'fp16.loss_scale_window') or 1000} steps",
        "hysteresis": taker.count(fp16, "fp16.hysteresis") or 2,
        "consecutive_hysteresis": taker.take(fp16, "fp16.consecutive_hysteresis", bool) or False,
        "min": float(taker.take(fp16, "fp16.min_loss_scale", *_NUMBER) or 1.0),
    }


def _optimizer(found: DsConfig, taker: _Taker, optimizer: Mapping[str, Any]) -> None:
    kind = taker.take(optimizer, "optimizer.type", str)
    if kind is not None and kind.lower().replace("_", "") not in _OPTIMIZERS:
        what = f"optimizer.type is {json.dumps(kind)}, but Megatron's optimizer is adam, and a recipe has adamw"
        taker.wrong(what, _NOT_READ, "remove `optimizer` from it")
    params = taker.take(optimizer, "optimizer.params", dict) or {}
    for name in ("lr", "eps", "weight_decay"):
        found.optimizer[name] = taker.take(params, f"optimizer.params.{name}", *_NUMBER)
    betas = taker.take(params, "optimizer.params.betas", list)
    if betas is None or _is_auto(betas):
        return
    if len(betas) != 2:
        taker.wrong(f"optimizer.params.betas is {_short(betas)}", "there are two of them")
    each = {str(i): beta for i, beta in enumerate(betas)}
    found.optimizer["betas"] = [taker.take(each, f"optimizer.params.betas.{i}", *_NUMBER) for i in each]


def _is_auto(value: Any) -> bool:
    """Whether it says nothing: Hugging Face's Trainer fills `auto` in, also inside a list."""
    return value in (None, "auto") or (isinstance(value, list) and bool(value) and all(map(_is_auto, value)))


def _is_on(value: Any) -> bool:
    if not isinstance(value, dict):
        return False
    return bool(value["enabled"]) if "enabled" in value else any(_is_on(each) for each in value.values())


def _content(text: str, place: str) -> dict[str, Any]:
    """The file as plain values. DeepSpeed refuses a key that stands twice, too."""

    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        keys = [key for key, _ in pairs]
        if twice := [key for key, count in Counter(keys).items() if count > 1]:
            raise ValueError(f"{json.dumps(twice[0])} stands twice in one object")
        return dict(pairs)

    def refuse(name: str) -> Any:
        raise ValueError(f"{name} is no number")

    rule = "ds_config is JSON: numbers have no underscores, and nothing is computed in it"
    try:
        content = parse_json(text, object_pairs_hook=once, parse_constant=refuse)
    except json.JSONDecodeError as error:
        where = f"line {error.lineno} of the file, column {error.colno}"
        raise RecipeError(Problem(f"not valid JSON: {error.msg} ({where})", rule, "mend it", place)) from error
    except ValueError as error:
        raise RecipeError(Problem(f"not valid JSON: {error}", rule, "mend it", place)) from error
    if not isinstance(content, dict):
        what, rule = f"it holds {type(content).__name__}", "a ds_config is a JSON object: {...}"
        raise RecipeError(Problem(what, rule, "name the right file", place))
    return content


def compare(config: DsConfig, flags: Mapping[str, Said]) -> tuple[list[Problem], list[Row]]:
    """Where the two say different things, and a row for every key of the file. `flags`: by path in the file."""
    values = {
        "zero_optimization.stage": config.zero_stage,
        "train_batch_size": config.train_batch_size,
        "train_micro_batch_size_per_gpu": config.micro_batch_size,
        "gradient_accumulation_steps": config.accumulation_steps,
        "gradient_clipping": config.gradient_clipping,
        "fp16.enabled": config.fp16,
        "bf16.enabled": config.bf16,
        **{f"optimizer.params.{name}": value for name, value in config.optimizer.items()},
    }
    problems = []
    for path, value in values.items():
        said = flags.get(path)
        if value is None or said is None:
            continue
        if isinstance(value, list):  # `auto` inside it: the flag's
            value = [mine if each is None else each for each, mine in zip(value, said.value, strict=True)]
        if value == said.value:
            continue
        what = f"{path} is {json.dumps(value)} in {config.place} but the command line says {said.written}"
        rule, remedy = "DeepSpeed asserts that the two agree, or silently takes one of them", "make them equal"
        if said.flag:
            what = f"{path} is {json.dumps(value)} in {config.place} but {said.written}"
            rule = _NOT_READ if path.startswith("optimizer") else rule
            written = " ".join(map(str, value)) if isinstance(value, list) else str(value)
            remedy = f"write {said.flag.format(*written.split())}, or remove it from {config.place}"
        problems.append(Problem(what, rule, remedy, said.place))
    return [*problems, *_batch_problems(config, flags)], list(_rows(config, flags))


def _batch_problems(config: DsConfig, flags: Mapping[str, Said]) -> Iterator[Problem]:
    """train_batch_size = micro batch x accumulation x replicas; the flags speak where the file does not."""
    steps = config.accumulation_steps
    if steps is None:
        return
    whole = config.train_batch_size or flags["train_batch_size"].value
    micro = config.micro_batch_size or flags["train_micro_batch_size_per_gpu"].value
    if micro > 0 and whole % (micro * steps):
        what = (
            f"a batch of {whole} samples is no whole number of replicas times {micro} samples "
            f"(micro batch) times {steps} (gradient_accumulation_steps)"
        )
        rule = "train_batch_size = train_micro_batch_size_per_gpu x gradient_accumulation_steps x replicas"
        remedy = "remove gradient_accumulation_steps: it follows from the other numbers"
        yield Problem(what, rule, remedy, config.place)


def _rows(config: DsConfig, flags: Mapping[str, Said]) -> Iterator[Row]:
    for path, value in _leaves(config.content):
        section, _, key = path.rpartition(".")
        flag, said = f"ds_config {path}", flags.get(path.replace("bfloat16", "bf16"))
        if _is_auto(value):
            remark = "Hugging Face's Trainer fills it in; here it says nothing"
            yield Row("not needed", flag, _short(value), remark=remark)
        elif said is not None:
            result = said.became or _short(said.value)
            yield Row("mapped", flag, _short(value), said.field, result, f"agrees: {said.written}{said.note}")
        elif path == "gradient_accumulation_steps":
            remark = "follows from the batch, the micro batch and the replicas; checked with those that are known"
            yield Row("not needed", flag, _short(value), remark=remark)
        elif section == "fp16" and (key in _LOSS_SCALE or key == "loss_scale"):
            yield from _loss_scale_row(config, flag, key, value)
        elif path in ("zero_optimization.cpu_offload", "zero_optimization.offload_optimizer"):
            yield Row("mapped", flag, _short(value), "parallel.offload", str(config.offload).lower())
        elif path == "zero_optimization.offload_param":
            remark = "with weights go the optimizer's moments; weights stay on the device here"
            yield Row("differs", flag, _short(value), "parallel.offload", str(config.offload).lower(), remark)
        elif path == "optimizer.type":
            yield Row("mapped", flag, _short(value), "optimizer.name", "adamw", f"checked only: {_NOT_READ}")
        elif section.startswith("optimizer"):
            yield Row("left out", flag, _short(value), remark=_NOT_READ)
        elif path in _OTHER_TRAININGS:
            yield Row("not needed", flag, _short(value), remark="it is off")
        elif path in _NO_MATTER:
            yield Row("not needed", flag, _short(value), remark="DeepSpeed's own bookkeeping")
        elif section == "zero_optimization" and key in _ZERO_NO_MATTER:
            yield Row("not needed", flag, _short(value), remark="how DeepSpeed moves what it shards")
        else:
            yield Row("not understood", flag, _short(value), remark="nothing here reads it")


def _loss_scale_row(config: DsConfig, flag: str, key: str, value: Any) -> Iterator[Row]:
    if not config.fp16:
        yield Row("not needed", flag, _short(value), remark="fp16 is off")
    elif key == "loss_scale":
        yield Row("mapped", flag, _short(value), "loss_scale", "dynamic", "0 is a dynamic scale")
    else:
        field_name = _LOSS_SCALE[key]
        yield Row("mapped", flag, _short(value), f"loss_scale.{field_name}", str(config.loss_scale[field_name]))


def _leaves(content: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """(path, value) of all that can be told of one by one."""
    for key, value in content.items():
        if key not in _SECTIONS or not isinstance(value, dict):
            yield key, value
            continue
        for inner, each in value.items():
            if (key, inner) == ("optimizer", "params") and isinstance(each, dict):
                yield from ((f"optimizer.params.{name}", leaf) for name, leaf in each.items())
            else:
                yield f"{key}.{inner}", each


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 40 else f"{text[:36]} ..."
