"""What every flag becomes in a recipe (the model: model.py). Defaults are Megatron's, written out where ours differ."""

from __future__ import annotations

import re
from typing import Any

from bloomery.checkpoint.megatron.builder import Builder, say
from bloomery.checkpoint.megatron.ds_config import DsConfig
from bloomery.checkpoint.megatron.flags import Row
from bloomery.checkpoint.megatron.model import fill_model, fill_tokenizer
from bloomery.checkpoint.megatron.shell_expand import shown
from bloomery.checkpoint.megatron.splits import fill_weighted_splits, split_flags


def fill(b: Builder, ds: DsConfig | None) -> None:
    """Every section but `launch`; problems and rows are in the builder."""
    b.put("seed", b.value("seed", int, 1234), "seed")
    family = fill_model(b)
    fill_tokenizer(b, family)
    _batch(b)
    _optimizer(b, ds)
    _lr(b)
    has_validation = _data(b, family)
    _train(b, has_validation)
    _precision(b, ds)
    _parallel(b, ds)
    interval = b.value("save-interval", int, 0)
    if interval:
        b.put("checkpoint.phases", [{"every": f"{interval} steps"}], "save-interval")
    b.put("monitor.log_every", f"{b.value('log-interval', int, 100)} steps", "log-interval")
    b.put("monitor.tensorboard", b.has("tensorboard-dir"), "tensorboard-dir")


def _batch(b: Builder) -> None:
    b.put("batch.micro_batch_size", b.value("micro-batch-size", int, 1), "micro-batch-size")
    if b.given("micro-batch-size") is None:
        b.problem(None, "--micro-batch-size is missing", "Megatron requires it", "add --micro-batch-size N")
    if b.given("global-batch-size") is None:
        rule = "Megatron then takes micro-batch-size times the number of replicas, which a recipe does not depend on"
        b.problem(None, "--global-batch-size is missing", rule, "add --global-batch-size N")
    b.put("batch.global_batch_size", b.value("global-batch-size", int, 1), "global-batch-size")
    ramp = b.given("rampup-batch-size")
    if ramp is None:
        return
    if len(ramp.values) != 3:
        rule = "it takes START INCREMENT SAMPLES"
        b.problem(ramp, f"--rampup-batch-size has {len(ramp.values)} values", rule, "give three")
        return
    numbers = [b.convert(ramp, text, int, 1) for text in ramp.values]
    b.put("batch.rampup", dict(zip(("start", "increment", "samples"), numbers, strict=True)), "rampup-batch-size")


def _optimizer(b: Builder, ds: DsConfig | None) -> None:
    name = b.value("optimizer", str, "adam")
    if name not in ("adam", "adamw"):
        b.problem(b.given("optimizer"), f"--optimizer is {name}", "a recipe has adamw", "use --optimizer adam")
    b.put("optimizer.name", "adamw", "optimizer", remark="Megatron's adam decays weights the way AdamW does")
    betas = [b.value("adam-beta1", float, 0.9), b.value("adam-beta2", float, 0.999)]
    b.put("optimizer.betas", betas, "adam-beta1", "adam-beta2")
    b.put("optimizer.eps", b.value("adam-eps", float, 1e-8), "adam-eps")
    b.put("optimizer.weight_decay", b.value("weight-decay", float, 0.01), "weight-decay")
    _clipping(b, ds)


def clips_as_ds_config(b: Builder) -> bool:
    """Whether only a ds_config says where gradients are clipped: DeepSpeed's engine clips, and never at a default of
    Megatron's."""
    return b.has("deepspeed") and not b.has("clip-grad")


def _clipping(b: Builder, ds: DsConfig | None) -> None:
    path, clip = "optimizer.clip_grad_norm", b.value("clip-grad", float, 1.0)
    if ds is None or not b.has("deepspeed"):
        b.put(path, clip or None, "clip-grad")
        return
    if ds.gradient_clipping is None:
        remark = "DeepSpeed clips where ds_config says gradient_clipping, and it does not: it would not clip at all"
        b.put(path, clip or None, "clip-grad", kind="differs" if clip else "mapped", remark=remark)
    elif clips_as_ds_config(b):
        remark = "DeepSpeed clips, not Megatron, whose default is 1.0"
        b.put(path, float(ds.gradient_clipping) or None)
        value = f"{ds.gradient_clipping:g}"
        b.rows[-1] = Row(
            "mapped", "ds_config gradient_clipping", value, path, say(b.raw["optimizer"]["clip_grad_norm"]), remark
        )
    else:
        b.put(path, clip or None, "clip-grad")


def _lr(b: Builder) -> None:
    if b.given("lr") is None:
        b.problem(None, "--lr is missing", "a training needs a learning rate", "add --lr 1e-4")
    b.put("lr.peak", b.value("lr", float, 1.0), "lr")
    style = b.value("lr-decay-style", str, "linear").lower()
    if style not in ("constant", "linear", "cosine", "wsd"):
        rule = "a recipe has constant, linear, cosine or wsd"
        b.problem(b.given("lr-decay-style"), f"--lr-decay-style is {style}", rule, "use one of them")
        style = "linear"
    b.put("lr.schedule", style, "lr-decay-style")
    decay, unit, decay_flag = _decay(b)
    if style == "constant":
        for flag in ("min-lr", "lr-decay-samples", "lr-decay-iters"):
            if b.has(flag):
                b.tell("not needed", flag, "a constant rate does not read it")
    else:
        b.put("lr.min", b.value("min-lr", float, 0.0), "min-lr")
        remark = "" if decay_flag else "Megatron's default: the length of the training"
        b.put("lr.decay", f"{decay} {unit}", *([decay_flag] if decay_flag else []), remark=remark)
    _warmup(b, decay, unit)
    if style == "wsd":
        shape = b.value("lr-wsd-decay-style", str, "exponential")
        if shape != "linear":
            b.problem(b.given("lr-wsd-decay-style"), f"--lr-wsd-decay-style is {shape}", "it is linear here")
        flag = next((name for name in ("lr-wsd-decay-iters", "lr-wsd-decay-samples") if b.has(name)), "")
        count = b.value(flag, int, 0) if flag else 0
        b.put("lr.cooldown", f"{count} {'steps' if flag.endswith('iters') else 'samples'}", flag)
    if b.given("lr-decay-tokens") is not None:
        b.problem(b.given("lr-decay-tokens"), "--lr-decay-tokens overrides the decay", "", "use --lr-decay-samples")


def _decay(b: Builder) -> tuple[int, str, str]:
    """(amount, unit, flag): what the flags say, else the length of the training."""
    for flag, unit in (("lr-decay-samples", "samples"), ("lr-decay-iters", "steps")):
        if b.given(flag) is not None:
            return b.value(flag, int, 1), unit, flag
    for flag, unit in (("train-samples", "samples"), ("train-iters", "steps")):
        if b.given(flag) is not None:
            return b.value(flag, int, 1), unit, ""
    return 1, "steps", ""


def _warmup(b: Builder, decay: int, unit: str) -> None:
    flags = [name for name in ("lr-warmup-samples", "lr-warmup-iters", "lr-warmup-fraction") if b.has(name)]
    flags = [name for name in flags if b.value(name, float, 0.0) != 0] or flags[:1]
    if len(flags) > 1:
        names = " and ".join(f"--{name}" for name in flags)
        b.problem(b.given(flags[1]), f"{names} are both set", "there is one warm-up", "remove one")
    if not flags:
        b.put("lr.warmup", "0 samples")
    elif flags[0] == "lr-warmup-fraction":
        share = b.value("lr-warmup-fraction", float, 0.0)
        count = round(share * decay, 6)
        if count != int(count):  # Megatron counts samples, so a fraction of a step is exact in samples
            count, unit = count * (b.raw["batch"]["global_batch_size"] if unit == "steps" else 1), "samples"
        remark = f"{share:g} of the decay"
        b.put("lr.warmup", f"{int(count)} {unit}", "lr-warmup-fraction", remark=remark)
    else:
        kind = "samples" if flags[0].endswith("samples") else "steps"
        b.put("lr.warmup", f"{b.value(flags[0], int, 0)} {kind}", flags[0])


def _data(b: Builder, family: str) -> bool:
    """Whether there is something to evaluate."""
    for flag, name, value in (
        ("reset-attention-mask", "mask_documents", True),
        ("reset-position-ids", "reset_positions", True),
        ("eod-mask-loss", "eod_loss", False),
    ):
        if b.has(flag):
            b.put(f"data.{name}", value, flag)
    if b.has("data-cache-path"):
        b.put("data.cache_dir", b.text("data-cache-path") or "cache", "data-cache-path")
    if family == "bert":
        b.put("data.masking.probability", b.value("mask-prob", float, 0.15), "mask-prob")
        b.put("data.masking.short_sequence_probability", b.value("short-seq-prob", float, 0.1), "short-seq-prob")
        if b.has("bert-no-binary-head"):
            b.problem(b.given("bert-no-binary-head"), "--bert-no-binary-head is set", "bert has its order head here")
    for flag in ("data-path", "train-data-path"):
        given = b.given(flag)
        if given is not None and (sources := _sources(b, flag)):
            b.put("data.train", sources, flag)
    evaluates = fill_weighted_splits(b)
    if "train" not in b.raw.get("data", {}):
        return _no_data(b)
    if any(b.has(flag) for flag in split_flags("train")):
        return evaluates
    if b.given("valid-data-path") is not None:
        b.put("data.validation", {"valid": _sources(b, "valid-data-path")}, "valid-data-path")
        return True
    split = b.value("split", str, "969,30,1")
    b.put("data.split", split, "split")
    shares = [float(share) for share in re.findall(r"[0-9.]+", split)]
    return len(shares) > 1 and shares[1] > 0


def _sources(b: Builder, flag: str) -> list[dict[str, Any]]:
    given = b.given(flag)
    assert given is not None
    if any(word.startswith("$(") for word in given.values):
        b.tell("left out", flag, "only a running shell knows these paths: add `data:` to the recipe")
        return []
    if len(given.values) == 1:
        return [{"path": shown(given.values[0])}]
    if len(given.values) % 2:
        b.problem(given, f"--{flag} has {len(given.values)} words", "it is one path, or pairs of weight and path")
        return []
    pairs = zip(given.values[::2], given.values[1::2], strict=True)
    return [{"path": shown(path), "weight": b.convert(given, weight, float, 1.0)} for weight, path in pairs]


def _no_data(b: Builder) -> bool:
    """Without sources there is no `data` section, so whatever belongs to it is left out, and told."""
    told = {row.flag for row in b.rows if row.kind == "left out"}
    for name in (*split_flags("train"), *split_flags("valid"), "valid-data-path", "split"):
        if b.has(name) and f"--{name}" not in told:
            b.tell("left out", name, "add `data:` with train and validation to the recipe")
    for number, row in enumerate(b.rows):
        if row.field.startswith("data.") and row.flag:
            remark = f"add it to `data:` as {row.field.removeprefix('data.')}: {row.result}"
            b.rows[number] = Row("left out", row.flag, row.value, remark=remark)
    b.rows = [row for row in b.rows if not row.field.startswith("data.")]
    b.places = {path: place for path, place in b.places.items() if not path.startswith("data.")}
    b.raw.pop("data", None)
    return False


def _train(b: Builder, has_validation: bool) -> None:
    samples, iters = b.given("train-samples"), b.given("train-iters")
    if samples and iters:
        what = f"--train-samples is {samples.text} and --train-iters is {iters.text}"
        b.problem(iters, what, "Megatron takes one of them", "remove one")
    elif not samples and not iters:
        b.problem(None, "--train-samples is missing", "a training has a length", "add --train-samples or --train-iters")
    flag, unit = ("train-samples", "samples") if samples else ("train-iters", "steps")
    if iters and b.given("rampup-batch-size"):
        b.problem(iters, "--train-iters with --rampup-batch-size", "Megatron forbids it", "use --train-samples")
    b.put("train.for", f"{b.value(flag, int, 1)} {unit}", flag)
    minutes, interval = b.value("exit-duration-in-mins", int, 0), b.value("exit-interval", int, 0)
    if minutes:
        hours, rest = divmod(minutes, 60)
        text = (f"{hours}h" if hours else "") + (f"{rest}m" if rest or not hours else "")
        b.put("train.exit_after", text, "exit-duration-in-mins")
        if interval:
            b.tell("left out", "exit-interval", "a job ends by one rule: the wall clock")
    elif interval:
        remark = "Megatron ends a job at every multiple of it, ours after that many steps of the job"
        b.put("train.exit_after", f"{interval} steps", "exit-interval", kind="differs", remark=remark)
    elif b.has("exit-interval"):
        b.tell("not needed", "exit-interval", "0 turns it off")
    skips = b.given("skip-train-iteration-range")
    if skips:
        b.put("train.skip", [f"{text} steps" for text in skips.values], "skip-train-iteration-range")
    every, steps = b.value("eval-interval", int, 1000), b.value("eval-iters", int, 100)
    if steps and has_validation:
        b.put("train.evaluate", {"every": f"{every} steps", "steps": steps}, "eval-interval", "eval-iters")
    else:
        for name in ("eval-interval", "eval-iters"):
            if b.has(name):
                b.tell("left out", name, "there is nothing to evaluate" if steps else "0 turns it off")


def _precision(b: Builder, ds: DsConfig | None) -> None:
    fp16, bf16 = b.has("fp16"), b.has("bf16")
    if fp16 and bf16:
        b.problem(b.given("bf16"), "--fp16 and --bf16 are both set", "there is one precision", "remove one")
    precision = "fp8" if b.has("fp8-format") else "bf16" if bf16 else "fp16" if fp16 else "fp32"
    b.put("precision", precision, "fp8-format", "fp16", "bf16")
    names = ("loss-scale", "initial-loss-scale", "loss-scale-window", "hysteresis", "min-loss-scale")
    if precision != "fp16":
        for name in names:
            if b.has(name):
                b.tell("not needed", name, f"{precision} does not scale its loss")
        return
    if b.has("deepspeed"):
        for name in names:
            if b.has(name):
                b.tell("not needed", name, "DeepSpeed owns the loss scale: ds_config says it")
        if ds is None:
            remark = "of the ds_config, which is not here: check it"
            b.put(
                "loss_scale", {"initial": 65536.0, "window": "1000 steps", "hysteresis": 2, "min": 1.0}, remark=remark
            )
            return
        b.put("loss_scale", ds.loss_scale, remark="ds_config fp16")
        if ds.static_loss_scale:
            b.problem(
                b.given("fp16"), f"fp16.loss_scale is {ds.static_loss_scale}", "the scale is dynamic here", "use 0"
            )
        return
    if b.has("loss-scale"):
        b.problem(b.given("loss-scale"), "--loss-scale is a fixed scale", "the scale is dynamic here", "remove it")
    scale = {
        "initial": b.value("initial-loss-scale", float, 2.0**32),
        "window": f"{b.value('loss-scale-window', int, 1000)} steps",
        "hysteresis": b.value("hysteresis", int, 2),
        "min": b.value("min-loss-scale", float, 1.0),
    }
    b.put("loss_scale", scale, *names[1:])


def _parallel(b: Builder, ds: DsConfig | None) -> None:
    b.put("parallel.tp", b.value("tensor-model-parallel-size", int, 1), "tensor-model-parallel-size")
    pp = b.value("pipeline-model-parallel-size", int, 1)
    b.put("parallel.pp", pp, "pipeline-model-parallel-size")
    if b.has("context-parallel-size"):
        b.put("parallel.cp", b.value("context-parallel-size", int, 1), "context-parallel-size")
    _zero(b, ds)
    layers = b.value("num-layers-per-virtual-pipeline-stage", int, 0)
    if layers:
        chunks = b.raw["model"]["num_layers"] // max(1, pp * layers)
        b.put("parallel.chunks", chunks, "num-layers-per-virtual-pipeline-stage")
        b.put("parallel.schedule", "interleaved", "num-layers-per-virtual-pipeline-stage")
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
    if b.has("cpu-optimizer") or (ds is not None and ds.offload):
        b.put("parallel.offload", True, "cpu-optimizer", remark="" if b.has("cpu-optimizer") else "ds_config offload")


def _zero(b: Builder, ds: DsConfig | None) -> None:
    if not b.has("deepspeed"):
        distributed = b.has("use-distributed-optimizer")
        b.put("parallel.zero", int(distributed), "use-distributed-optimizer")
        return
    stage, remark = 1, "" if ds is None else "DeepSpeed's default: ds_config does not say zero_optimization.stage"
    if ds is not None:
        stage = ds.zero_stage or 0
        remark = remark if ds.zero_stage is None else "ds_config zero_optimization.stage"
    if b.has("zero-stage"):
        stage, remark = int(b.value("zero-stage", float, 1.0)), ""
    if stage == 0 and b.has("bf16"):
        remark = "DeepSpeed's bf16 optimizer shards the optimizer state at stage 0"
        stage = 1
    b.put("parallel.zero", stage, "zero-stage", remark=remark)
