"""Megatron's flags of precision and of how ranks share the work. Where DeepSpeed trains, its ds_config decides."""

from __future__ import annotations

from bloomery.checkpoint.megatron.builder import Builder
from bloomery.checkpoint.megatron.ds_config import DsConfig

_LOSS_SCALE = ("loss-scale", "initial-loss-scale", "loss-scale-window", "hysteresis", "min-loss-scale")
_FP8 = ("fp8-format", "fp8-hybrid", "fp8-e4m3", "fp8-e5m2")
_SHARDING = {"no_shard": 0, "optim": 1, "optim_grads": 2, "optim_grads_params": 3}
BF16_SHARDS = "DeepSpeed's bf16 optimizer shards the optimizer state at stage 0"


def fill_precision(b: Builder, ds: DsConfig | None) -> None:
    fp16, bf16 = b.has("fp16"), b.has("bf16")
    if fp16 and bf16:
        b.problem(b.given("bf16"), "--fp16 and --bf16 are both set", "there is one precision", "remove one")
    fp8 = [name for name in _FP8 if b.has(name)]
    precision = "fp8" if fp8 else "bf16" if bf16 else "fp16" if fp16 else "fp32"
    b.put("precision", precision, *fp8, "fp16", "bf16")
    given = [name for name in _LOSS_SCALE if b.has(name)]
    if precision != "fp16":
        for name in given:
            b.tell("not needed", name, f"{precision} does not scale its loss")
    elif b.deepspeed:
        for name in given:
            b.tell("not needed", name, "DeepSpeed owns the loss scale: ds_config says it")
        _loss_scale_of(b, ds)
    else:
        if b.has("loss-scale"):
            b.problem(b.given("loss-scale"), "--loss-scale is a fixed scale", "the scale is dynamic here", "remove it")
        scale = {
            "initial": b.value("initial-loss-scale", float, 2.0**32),
            "window": f"{b.value('loss-scale-window', int, 1000)} steps",
            "hysteresis": b.value("hysteresis", int, 2),
            "min": b.value("min-loss-scale", float, 1.0),
        }
        b.put("loss_scale", scale, *_LOSS_SCALE[1:])


def _loss_scale_of(b: Builder, ds: DsConfig | None) -> None:
    if ds is None:
        remark = "of the ds_config, which is not here: check it"
        b.put("loss_scale", {"initial": 65536.0, "window": "1000 steps", "hysteresis": 2, "min": 1.0}, remark=remark)
        return
    b.put("loss_scale", ds.loss_scale, remark="ds_config fp16")
    b.places["loss_scale"] = ds.place
    if ds.static_loss_scale:
        what = f"fp16.loss_scale is {ds.static_loss_scale}"
        b.problem(b.given("fp16"), what, "the scale is dynamic here", "use 0")


def fill_parallel(b: Builder, ds: DsConfig | None) -> None:
    b.put("parallel.tp", b.value("tensor-model-parallel-size", int, 1), "tensor-model-parallel-size")
    pp = b.value("pipeline-model-parallel-size", int, 1)
    b.put("parallel.pp", pp, "pipeline-model-parallel-size")
    sequence = b.first("context-parallel-size", "ds-sequence-parallel-size")
    if b.has(sequence):
        remark = "" if sequence.startswith("context") else "ranks share the tokens of every sample"
        b.put("parallel.cp", b.value(sequence, int, 1), sequence, remark=remark)
    _zero(b, ds)
    _chunks(b, pp)
    _recompute(b)
    offload = b.first("cpu-optimizer", "optimizer-cpu-offload")
    if b.has(offload) or (ds is not None and ds.offload):
        b.put("parallel.offload", True, offload, remark="" if b.has(offload) else "ds_config offload")
    if b.has("remote-device"):
        away = b.value("remote-device", str, "none") != "none"
        b.tell("differs" if away else "not needed", "remote-device", "weights stay on the device")


def _chunks(b: Builder, pp: int) -> None:
    flag = b.first("num-layers-per-virtual-pipeline-stage", "num-virtual-stages-per-pipeline-rank")
    if not (count := b.value(flag, int, 0)):
        return
    by_layers = flag.startswith("num-layers")
    chunks = b.raw["model"]["num_layers"] // max(1, pp * count) if by_layers else count
    b.put("parallel.chunks", chunks, flag)
    if chunks > 1:
        b.put("parallel.schedule", "interleaved", flag)


def _recompute(b: Builder) -> None:
    full = [name for name in ("checkpoint-activations", "deepspeed-activation-checkpointing") if b.has(name)]
    granularity = b.value("recompute-granularity", str, "")
    if b.has("recompute-activations"):
        b.put("parallel.recompute", "selective", "recompute-activations")
    elif granularity:
        b.put("parallel.recompute", granularity, "recompute-granularity")
    elif "checkpoint-activations" in full:
        b.put("parallel.recompute", "full", *full)
    else:
        b.put("parallel.recompute", "none", *full, remark="without --checkpoint-activations nothing is recomputed")


def _zero(b: Builder, ds: DsConfig | None) -> None:
    if not b.deepspeed:
        _sharding(b)
        if b.has("zero-stage"):
            b.tell("not needed", "zero-stage", "Megatron reads it with --deepspeed only")
        return
    stage, remark = 1, "" if ds is None else "DeepSpeed's default: ds_config does not say zero_optimization.stage"
    if ds is not None:
        stage = ds.zero_stage or 0
        remark = remark if ds.zero_stage is None else "ds_config zero_optimization.stage"
        b.places["parallel.zero"] = ds.place
    if b.has("zero-stage"):
        stage, remark = b.value("zero-stage", int, 1), ""
    if stage == 0 and b.has("bf16"):
        stage, remark = 1, BF16_SHARDS
    b.put("parallel.zero", stage, "zero-stage", remark=remark)
    if b.has("use-distributed-optimizer"):
        b.tell("not needed", "use-distributed-optimizer", "with DeepSpeed the ZeRO stage decides")


def _sharding(b: Builder) -> None:
    fsdp = b.first("use-torch-fsdp2", "use-megatron-fsdp", "use-custom-fsdp")
    if not b.has(fsdp):
        b.put("parallel.zero", int(b.has("use-distributed-optimizer")), "use-distributed-optimizer")
    elif fsdp == "use-torch-fsdp2":
        flags = [fsdp, "torch-fsdp2-no-reshard-after-forward"]
        b.put("parallel.zero", 2 if b.has(flags[1]) else 3, *flags)
    else:
        flag = "data-parallel-sharding-strategy"
        name = b.value(flag, str, "no_shard")
        if name not in _SHARDING:
            b.problem(b.given(flag), f"--{flag} is {name}", f"it is one of {', '.join(_SHARDING)}", "use one of them")
        b.put("parallel.zero", _SHARDING.get(name, 0), fsdp, flag)
