"""DeepSpeed's ds_config.json: the table of its keys, what they become, and where they contradict the command line."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from bloomery.base.bounded import parse_json
from bloomery.base.errors import Problem, RecipeError
from bloomery.interop.megatron.builder import LARGEST, Builder, Row, as_text
from bloomery.interop.megatron.flags import Kind

_SECTIONS = ("zero_optimization", "fp16", "bf16", "optimizer", "optimizer.params", "nebula")
_NOT_READ = "Megatron passes DeepSpeed its own optimizer, so this section is not read"
_TYPES = {"count": (int,), "int": (int,), "number": (int, float), "bool": (bool,), "text": (str,), "list": (list,)}
_TYPE_NAMES = {"count": "a whole number of at least 1", "int": "a whole number", "number": "a number",
               "bool": "true or false", "text": "a text", "list": "a list of two numbers: [...]"}  # fmt: skip

# Key -> (type, recipe field, flags that say the same): where a flag is given, or has a default, the two must agree.
_KEYS: dict[str, tuple[str, str, str]] = {
    "train_batch_size": ("count", "batch.global_batch_size", "global-batch-size"),
    "train_micro_batch_size_per_gpu": ("count", "batch.micro_batch_size", "micro-batch-size"),
    "gradient_accumulation_steps": ("count", "", ""),
    "gradient_clipping": ("number", "optimizer.clip_grad_norm", "clip-grad"),
    "fp16.enabled": ("bool", "precision", "fp16"),
    "bf16.enabled": ("bool", "precision", "bf16"),
    "zero_optimization.stage": ("int", "parallel.zero", "zero-stage"),
    "optimizer.type": ("text", "optimizer.name", ""),
    "optimizer.params.lr": ("number", "lr.peak", "lr"),
    "optimizer.params.betas": ("list", "optimizer.betas", "adam-beta1 adam-beta2"),
    "optimizer.params.eps": ("number", "optimizer.eps", "adam-eps"),
    "optimizer.params.weight_decay": ("number", "optimizer.weight_decay", "weight-decay"),
    "fp16.loss_scale": ("number", "loss_scale", ""),
    "fp16.initial_scale_power": ("int", "loss_scale.initial", ""),
    "fp16.loss_scale_window": ("count", "loss_scale.window", ""),
    "fp16.hysteresis": ("count", "loss_scale.hysteresis", ""),
    "fp16.consecutive_hysteresis": ("bool", "loss_scale.consecutive_hysteresis", ""),
    "fp16.min_loss_scale": ("number", "loss_scale.min", ""),
    "nebula.enabled": ("bool", "", ""),
    "nebula.persistent_storage_path": ("text", "checkpoint.upload.to", ""),
    "nebula.num_of_version_in_retention": ("count", "checkpoint.keep.last", ""),
    "nebula.persistent_time_interval": ("number", "", ""),
    "nebula.enable_nebula_load": ("bool", "", ""),
    "nebula.load_path": ("text", "", ""),
}
_SAMPLES = "every sample has its full length, and a loss at every place"
_REFUSED = {
    "curriculum_learning": _SAMPLES,
    "data_efficiency": _SAMPLES,
    "progressive_layer_drop": "every layer is trained with every sample",
    "compression_training": "weights are neither quantized nor pruned",
    "quantize_training": "weights are neither quantized nor pruned",
    "sparse_attention": "no family here has such an attention",
    "amp": "precision is that of --fp16 or --bf16",
}
"""Sections that change what is trained, and why a recipe cannot express it."""
_OTHERS: dict[str, tuple[Kind, str]] = {
    **dict.fromkeys(["steps_per_print", "wall_clock_breakdown", "dump_state", "zero_allow_untested_optimizer", "prescale_gradients", "communication_data_type", "gradient_predivide_factor", "sparse_gradients", "memory_breakdown", "disable_allgather", "activation_checkpointing", "flops_profiler", "comms_logger", "tensorboard", "wandb", "csv_monitor", "aio", "checkpoint", "data_types", "zero_force_ds_cpu_optimizer", "seq_parallel_communication_data_type", "autotuning", "scheduler"],
        ("not needed", "DeepSpeed's own bookkeeping")),
    **dict.fromkeys(_REFUSED, ("not needed", "it is off")),
    "gradient_accumulation_steps": ("not needed", "follows from the batch, the micro batch and the replicas"),
    "zero_optimization.offload_optimizer": ("mapped", "parallel.offload"),
    "zero_optimization.cpu_offload": ("mapped", "parallel.offload"),
    "zero_optimization.offload_param": ("differs", "moments are offloaded; weights stay on the device here"),
    "nebula.enabled": ("not needed", "every save is asynchronous, from a pinned-memory snapshot"),
    "nebula.persistent_time_interval": ("left out", "copies follow every save; checkpoint.upload.every counts steps"),
    "nebula.enable_nebula_load": ("not needed", "a start resumes from the newest checkpoint of both places"),
    "nebula.load_path": ("left out", "`bloomery train --from` chooses a checkpoint"),
}  # fmt: skip
_ZERO_OTHERS = ("contiguous_gradients", "overlap_comm", "reduce_scatter", "reduce_bucket_size", "allgather_partitions",
                "allgather_bucket_size", "round_robin_gradients", "sub_group_size", "ignore_unused_parameters",
                "elastic_checkpoint")  # fmt: skip


@dataclass
class DsConfig:
    place: str
    leaves: dict[str, Any]
    """Dotted key -> value, inside the sections that have rows of their own."""
    problems: list[Problem] = field(default_factory=list)

    def get(self, path: str) -> Any:
        """None where the file says nothing, or `auto`."""
        return None if is_auto(self.leaves.get(path)) else self.leaves[path]

    @property
    def offload(self) -> bool:
        parts = [self.leaves.get(f"zero_optimization.{name}") for name in ("offload_optimizer", "offload_param")]
        devices = [part.get("device", "none") for part in parts if isinstance(part, dict)]
        return bool(self.leaves.get("zero_optimization.cpu_offload")) or any(device != "none" for device in devices)

    def loss_scale(self) -> dict[str, Any]:
        """Fields of the recipe's section."""
        power = self.get("fp16.initial_scale_power")
        return {
            "initial": 2.0 ** (16 if power is None else power),
            "window": f"{self.get('fp16.loss_scale_window') or 1000} steps",
            "hysteresis": self.get("fp16.hysteresis") or 2,
            "consecutive_hysteresis": self.get("fp16.consecutive_hysteresis") or False,
            "min": float(self.get("fp16.min_loss_scale") or 1.0),
        }

    def wrong(self, what: str, rule: str, remedy: str = "correct it") -> None:
        self.problems.append(Problem(what, rule, remedy, self.place))


def is_auto(value: Any) -> bool:
    """Whether it says nothing: Hugging Face's Trainer fills `auto` in, also inside a list."""
    return value in (None, "auto") or (isinstance(value, list) and bool(value) and all(map(is_auto, value)))


def read_ds_config(text: str, place: str) -> DsConfig:
    """RecipeError with all that is wrong with it."""
    found = DsConfig(place, {})
    content = _content(text, place)
    content["bf16"] = content.pop("bfloat16", content.get("bf16"))
    found.leaves = dict(_leaves(content, "", found))
    for path, (kind, *_) in _KEYS.items():
        values = found.get(path)
        values = values if isinstance(values, list) and kind == "list" else [values]
        for value in values if len(values) == (2 if kind == "list" and values != [None] else 1) else [values]:
            types = _TYPES["number" if kind == "list" else kind]
            is_right = value is None or value == "auto" or (
                isinstance(value, types) and (bool in types or not isinstance(value, bool))
            )  # fmt: skip
            if not is_right or (kind == "count" and value is not None and value != "auto" and value < 1):
                found.wrong(f"{path} is {_short(found.get(path))}", f"it is {_TYPE_NAMES[kind]}")
            elif isinstance(value, int | float) and abs(value) > LARGEST:
                found.wrong(f"{path} is {_short(value)}", f"it is at most {LARGEST:,}")
    power = found.get("fp16.initial_scale_power")
    if isinstance(power, int) and not 0 <= power <= 127:
        rule = "the first scale is 2 to that power, which is 0 to 127"
        found.wrong(f"fp16.initial_scale_power is {power}", rule, "use for example 16")
    for key, rule in _REFUSED.items():
        if _is_on(content.get(key)):
            found.wrong(f"{key} is enabled", rule, "remove it, if the training may go without")
    kind = found.get("optimizer.type")
    if isinstance(kind, str) and kind.lower().replace("_", "") not in (
        "adam",
        "adamw",
        "fusedadam",
        "deepspeedcpuadam",
    ):
        what = f"optimizer.type is {json.dumps(kind)}, but Megatron's optimizer is adam, and a recipe has adamw"
        found.wrong(what, _NOT_READ, "remove `optimizer` from it")
    scheduler = content.get("scheduler")
    if isinstance(scheduler, dict) and not is_auto(scheduler.get("type")):
        what = f"scheduler.type is {_short(scheduler['type'])}, and the flags give Megatron's schedule"
        rule = "DeepSpeed would take its own instead of Megatron's, and a recipe has only Megatron's"
        found.wrong(what, rule, "use --lr-decay-style and --lr-warmup-*, and remove it")
    if found.problems:
        raise RecipeError(found.problems)
    return found


def _content(text: str, place: str) -> dict[str, Any]:
    """The file as plain values. DeepSpeed refuses a key that occurs twice, too."""

    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        if twice := [key for key, count in Counter(key for key, _ in pairs).items() if count > 1]:
            raise ValueError(f"{json.dumps(twice[0])} occurs twice in one object")
        return dict(pairs)

    def refuse(name: str) -> Any:
        raise ValueError(f"{name} is no number")

    rule = "ds_config is JSON: numbers have no underscores, and nothing is computed in it"
    try:
        content = parse_json(text, object_pairs_hook=once, parse_constant=refuse)
    except ValueError as error:
        raise RecipeError(Problem(f"not valid JSON: {error}", rule, "correct it", place)) from error
    if not isinstance(content, dict):
        what, rule = f"it holds {type(content).__name__}", "a ds_config is a JSON object: {...}"
        raise RecipeError(Problem(what, rule, "name the right file", place))
    return content


def _leaves(content: dict[str, Any], prefix: str, found: DsConfig) -> Iterator[tuple[str, Any]]:
    for key, value in content.items():
        path = f"{prefix}{key}"
        if path not in _SECTIONS:
            yield path, value
        elif isinstance(value, dict):
            yield from _leaves(value, f"{path}.", found)
        elif not is_auto(value):
            found.wrong(f"{path} is {_short(value)}", "it is an object: {...}")


def _is_on(value: Any) -> bool:
    if not isinstance(value, dict):
        return False
    return bool(value["enabled"]) if "enabled" in value else any(_is_on(each) for each in value.values())


def fill_nebula(b: Builder, ds: DsConfig) -> None:
    """Nebula's tiers: the run folder is the fast one, which keeps some; a copy of every checkpoint persists."""
    if not ds.get("nebula.enabled"):
        return
    if folder := ds.get("nebula.persistent_storage_path"):
        b.put("checkpoint.upload.to", folder, kind="mapped", remark="ds_config nebula.persistent_storage_path")
        remark = "ds_config nebula.num_of_version_in_retention: the run folder's; the copies stay"
        last = ds.get("nebula.num_of_version_in_retention") or 2
        b.put("checkpoint.keep.last", last, kind="mapped", remark=remark)
        b.places |= {"checkpoint.upload.to": ds.place, "checkpoint.keep.last": ds.place}
        b.rows = b.rows[:-2]  # the rows of the file's own keys report both


def compare(b: Builder, ds: DsConfig) -> None:
    """Problems where the file contradicts the flags, and a row for every key of it."""
    for path, value in ds.leaves.items():
        kind, field_, names = _KEYS.get(path, ("", "", ""))
        flags = names.split()
        if is_auto(value):
            remark = "Hugging Face's Trainer fills it in; here it says nothing"
            b.rows.append(Row("not needed", f"ds_config {path}", _short(value), remark=remark))
            continue
        if flags:
            ours = _ours(b, path, field_, flags[0])
            if isinstance(value, list):  # `auto` inside it: the flag's
                value = [mine if is_auto(each) else each for each, mine in zip(value, ours, strict=True)]
            if ours is not None and value != ours:
                _contradiction(b, ds, path, value, ours, flags)
        b.rows.append(_row(b, ds, path, value, field_))
    _batch(b, ds)


def _ours(b: Builder, path: str, field_: str, flag: str) -> Any:
    """What the flags, or Megatron's defaults, say of a key; None: nothing."""
    if path in ("fp16.enabled", "bf16.enabled"):
        return b.has(flag)
    if path == "zero_optimization.stage":
        return b.value(flag, int, 0) if b.has(flag) else None
    if path == "gradient_clipping":
        return b.value(flag, float, 1.0) if b.has(flag) else None
    section, _, name = field_.partition(".")
    return b.raw[section][name]


def _contradiction(b: Builder, ds: DsConfig, path: str, value: Any, ours: Any, flags: list[str]) -> None:
    given = [each for name in flags if (each := b.given(name)) is not None]
    what = f"{path} is {json.dumps(value)} in {ds.place} but "
    rule, remedy = "DeepSpeed asserts that the two agree, or silently takes one of them", "make them equal"
    names = " ".join(f"--{name}" for name in flags)
    if given:
        what += "the command line says " + " ".join(f"{each.flag} {each.text}".strip() for each in given)
    elif path.endswith(".enabled"):
        what += f"the command line says no {names}"
    else:
        what += f"Megatron takes {ours} without {names}"
        rule = _NOT_READ if path.startswith("optimizer") else rule
        written = zip(flags, value if isinstance(value, list) else [value], strict=True)
        remedy = f"write {' '.join(f'--{name} {each}' for name, each in written)}, or remove it from {ds.place}"
    b.problem(given[0] if given else None, what, rule, remedy)


def _row(b: Builder, ds: DsConfig, path: str, value: Any, field_: str) -> Row:
    flag, section = f"ds_config {path}", path.partition(".")[0]
    if path in _OTHERS:
        kind, remark = _OTHERS[path]
        offload = str(ds.offload).lower() if "offload" in path else ""
        return Row(kind, flag, _short(value), "parallel.offload" if offload else "", offload, remark)
    if section in ("fp16", "nebula") and path in _KEYS and not ds.get(f"{section}.enabled") and value is not False:
        return Row("not needed", flag, _short(value), remark=f"{section} is off")
    if field_:
        result: Any = b.raw
        for name in field_.split("."):
            result = result.get(name) if isinstance(result, dict) else None
        remark = f"checked only: {_NOT_READ}" if section == "optimizer" else ""
        return Row("mapped", flag, _short(value), field_, as_text(result), remark)
    if section == "optimizer":
        return Row("left out", flag, _short(value), remark=_NOT_READ)
    if section == "zero_optimization" and path.partition(".")[2].startswith(("stage3_", *_ZERO_OTHERS)):
        return Row("not needed", flag, _short(value), remark="how DeepSpeed moves what it shards")
    return Row("not understood", flag, _short(value), remark="nothing here reads it")


def _batch(b: Builder, ds: DsConfig) -> None:
    """train_batch_size = micro batch x accumulation x replicas."""
    count, batch, parallel, launch = (
        ds.get("gradient_accumulation_steps"),
        *map(b.raw.get, ("batch", "parallel", "launch")),
    )
    if count is None or batch is None or parallel is None or "rampup" in batch:
        return
    replicas = "whole number of replicas"
    unit = batch["micro_batch_size"] * count
    if launch:
        ranks = max(1, parallel["tp"] * parallel["pp"] * parallel.get("cp", 1))
        unit *= launch["nodes"] * launch["gpus_per_node"] // ranks
        replicas = f"{launch['nodes'] * launch['gpus_per_node'] // ranks} replicas"
    whole = batch["global_batch_size"]
    if unit > 0 and (whole % unit or (launch and whole != unit)):
        what = f"a batch of {whole} samples is no {replicas} times {batch['micro_batch_size']} samples (micro batch) times "
        rule = "train_batch_size = train_micro_batch_size_per_gpu x gradient_accumulation_steps x replicas"
        remedy = "remove gradient_accumulation_steps: it follows from the other numbers"
        ds_problem = Problem(f"{what}{count} (gradient_accumulation_steps)", rule, remedy, ds.place)
        b.problems.append(ds_problem)


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 40 else f"{text[:36]} ..."
