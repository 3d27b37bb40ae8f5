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

_SECTIONS = ("zero_optimization", "fp16", "bf16", "optimizer", "optimizer.params", "nebula")
_TYPES: dict[str, tuple[str, tuple[type, ...]]] = {
    "count": ("a whole number of at least 1", (int,)), "int": ("a whole number", (int,)),
    "number": ("a number", (int, float)), "bool": ("true or false", (bool,)), "text": ("a text", (str,)),
    "pair": ("a list of two numbers: [...]", (int, float)),
}  # fmt: skip
_NOT_READ = "Megatron passes DeepSpeed its own optimizer, so this section is not read"

# Key -> (type, recipe field, flags of the same meaning): where a flag is given, or has a default, the two must agree.
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
    "optimizer.params.betas": ("pair", "optimizer.betas", "adam-beta1 adam-beta2"),
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
_REFUSED = {
    "curriculum_learning": "every sample has its full length, and a loss at every place",
    "data_efficiency": "every sample has its full length, and a loss at every place",
    "progressive_layer_drop": "every layer is trained with every sample",
    "compression_training": "weights are neither quantized nor pruned",
    "quantize_training": "weights are neither quantized nor pruned",
    "sparse_attention": "no family here has such an attention",
    "amp": "precision is that of --fp16 or --bf16",
}
"""Sections that change what is trained, and why a recipe cannot express it."""
_REMARKS: dict[str, tuple[Any, str]] = {
    "gradient_accumulation_steps": ("not needed", "follows from the batch, the micro batch and the replicas"),
    "zero_optimization.offload_optimizer": ("mapped", ""),
    "zero_optimization.cpu_offload": ("mapped", ""),
    "zero_optimization.offload_param": ("differs", "moments are offloaded; weights stay on the device here"),
    "nebula.enabled": ("not needed", "every save is asynchronous, from a pinned-memory snapshot"),
    "nebula.persistent_time_interval": ("left out", "copies follow every save; checkpoint.upload.every counts steps"),
    "nebula.enable_nebula_load": ("not needed", "a start resumes from the newest checkpoint of both places"),
    "nebula.load_path": ("left out", "`bloomery train --from` chooses a checkpoint"),
}
_BOOKKEEPING = """
steps_per_print wall_clock_breakdown dump_state zero_allow_untested_optimizer prescale_gradients memory_breakdown
communication_data_type gradient_predivide_factor sparse_gradients disable_allgather activation_checkpointing
flops_profiler comms_logger tensorboard wandb csv_monitor aio checkpoint data_types zero_force_ds_cpu_optimizer
seq_parallel_communication_data_type autotuning scheduler contiguous_gradients overlap_comm reduce_scatter
reduce_bucket_size allgather_partitions allgather_bucket_size round_robin_gradients sub_group_size
ignore_unused_parameters elastic_checkpoint
"""
"""Keys that change nothing of what is trained, of the file and of zero_optimization."""


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
    found, content = DsConfig(place, {}), _content(text, place)
    content["bf16"] = content.pop("bfloat16", content.get("bf16"))
    found.leaves = dict(_leaves(content, "", found))
    for path, (kind, *_) in _KEYS.items():
        if (value := found.get(path)) is not None and not _is_a(kind, value):
            found.wrong(f"{path} is {_short(value)}", f"it is {_TYPES[kind][0]}, and at most {LARGEST:,}")
    power, kind = found.get("fp16.initial_scale_power"), found.get("optimizer.type")
    if isinstance(power, int) and not 0 <= power <= 127:
        rule = "the first scale is 2 to that power, which is 0 to 127"
        found.wrong(f"fp16.initial_scale_power is {power}", rule, "use for example 16")
    if isinstance(kind, str) and kind.lower().replace("_", "") not in (
        "adam",
        "adamw",
        "fusedadam",
        "deepspeedcpuadam",
    ):
        what = f"optimizer.type is {json.dumps(kind)}, but Megatron's optimizer is adam, and a recipe has adamw"
        found.wrong(what, _NOT_READ, "remove `optimizer` from it")
    for key, rule in _REFUSED.items():
        if _is_on(content.get(key)):
            found.wrong(f"{key} is enabled", rule, "remove it, if the training may go without")
    scheduler = content.get("scheduler")
    if isinstance(scheduler, dict) and not is_auto(scheduler.get("type")):
        what = f"scheduler.type is {_short(scheduler['type'])}, and the flags give Megatron's schedule"
        rule = "DeepSpeed would take its own instead of Megatron's, and a recipe has only Megatron's"
        found.wrong(what, rule, "use --lr-decay-style and --lr-warmup-*, and remove it")
    if found.problems:
        raise RecipeError(found.problems)
    return found


def _is_a(kind: str, value: Any) -> bool:
    if kind == "pair":
        return isinstance(value, list) and len(value) == 2 and all(is_auto(v) or _is_a("number", v) for v in value)
    types = _TYPES[kind][1]
    is_right = isinstance(value, types) and (bool in types or not isinstance(value, bool))
    is_number = is_right and isinstance(value, int | float)
    return is_right and not (is_number and abs(value) > LARGEST) and not (kind == "count" and value < 1)


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


def compare(b: Builder, ds: DsConfig) -> None:
    """Nebula's fields, problems where the file contradicts the flags, and a row for every key of it."""
    folder = ds.get("nebula.persistent_storage_path")
    if ds.get("nebula.enabled") and folder:  # the run folder is the fast tier; a copy of every checkpoint persists
        b.raw.setdefault("checkpoint", {})["upload"] = {"to": folder}
        b.raw["checkpoint"]["keep"] = {"last": ds.get("nebula.num_of_version_in_retention") or 2}
        b.places |= {"checkpoint.upload.to": ds.place, "checkpoint.keep.last": ds.place}
    for path, value in ds.leaves.items():
        _, field_, names = _KEYS.get(path, ("", "", ""))
        ours = _ours(b, path, field_, names.split()[0]) if names and not is_auto(value) else None
        if isinstance(ours, list):  # `auto` inside it: the flag's
            value = [mine if is_auto(each) else each for each, mine in zip(value, ours, strict=True)]
        if ours is not None and value != ours:
            _contradiction(b, ds, path, value, ours, names.split())
        b.rows.append(_row(b, ds, path, value, field_))
    _batch(b, ds)


def _ours(b: Builder, path: str, field_: str, flag: str) -> Any:
    """What the flags, or Megatron's defaults, have for a key; None: nothing."""
    if path in ("zero_optimization.stage", "gradient_clipping"):
        return b.value(flag, float, 0.0) if b.has(flag) else None
    section, _, name = field_.partition(".")
    return b.has(flag) if section == "precision" else b.raw[section][name]


def _contradiction(b: Builder, ds: DsConfig, path: str, value: Any, ours: Any, flags: list[str]) -> None:
    given = [each for name in flags if (each := b.given(name)) is not None]
    names = " ".join(f"--{name}" for name in flags)
    what = f"the command line says {' '.join(f'{each.flag} {each.text}'.strip() for each in given) or f'no {names}'}"
    rule, remedy = "DeepSpeed asserts that the two agree, or silently takes one of them", "make them equal"
    if not given and not path.endswith(".enabled"):
        what = f"Megatron takes {ours} without {names}"
        rule = _NOT_READ if path.startswith("optimizer") else rule
        written = zip(flags, value if isinstance(value, list) else [value], strict=True)
        remedy = f"write {' '.join(f'--{name} {each}' for name, each in written)}, or remove it from {ds.place}"
    what = f"{path} is {json.dumps(value)} in {ds.place} but {what}"
    b.problem(given[0] if given else None, what, rule, remedy)


def _row(b: Builder, ds: DsConfig, path: str, value: Any, field_: str) -> Row:
    flag, (section, _, key), text = f"ds_config {path}", path.partition("."), _short(value)
    if is_auto(value):
        return Row("not needed", flag, text, remark="Hugging Face's Trainer fills it in; here it says nothing")
    if path in _REMARKS:
        kind, remark = _REMARKS[path]
        became = ("parallel.offload", str(ds.offload).lower()) if "offload" in path else ("", "")
        return Row(kind, flag, text, *became, remark)
    if section in ("fp16", "nebula") and field_ and key != "enabled" and not ds.get(f"{section}.enabled"):
        return Row("not needed", flag, text, remark=f"{section} is off")
    if field_:
        result: Any = b.raw
        for name in field_.split("."):
            result = result.get(name) if isinstance(result, dict) else None
        return Row("mapped", flag, text, field_, as_text(result), _NOT_READ if section == "optimizer" else "")
    if section == "optimizer":
        return Row("left out", flag, text, remark=_NOT_READ)
    if path in _REFUSED or (key or path) in _BOOKKEEPING.split() or key.startswith("stage3_"):
        return Row("not needed", flag, text, remark="it is off, or DeepSpeed's own bookkeeping")
    return Row("not understood", flag, text, remark="nothing here reads it")


def _batch(b: Builder, ds: DsConfig) -> None:
    """train_batch_size = micro batch x accumulation x replicas."""
    count, batch, parallel, launch = (
        ds.get("gradient_accumulation_steps"),
        *map(b.raw.get, ("batch", "parallel", "launch")),
    )
    if count is None or batch is None or parallel is None or "rampup" in batch:
        return
    ranks = max(1, parallel["tp"] * parallel["pp"] * parallel.get("cp", 1))
    replicas = launch["nodes"] * launch["gpus_per_node"] // ranks if launch else 0
    whole, unit = batch["global_batch_size"], batch["micro_batch_size"] * count * (replicas or 1)
    if unit > 0 and (whole != unit if replicas else whole % unit):
        what = f"a batch of {whole} samples is no {replicas or 'whole number of'} replicas times "
        what += f"{batch['micro_batch_size']} samples (micro batch) times {count} (gradient_accumulation_steps)"
        rule = "train_batch_size = train_micro_batch_size_per_gpu x gradient_accumulation_steps x replicas"
        remedy = "remove gradient_accumulation_steps: it follows from the other numbers"
        b.problems.append(Problem(what, rule, remedy, ds.place))


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 40 else f"{text[:36]} ..."
