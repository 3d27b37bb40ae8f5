"""What every flag becomes in a recipe. Defaults are Megatron's, written out where ours differ.

The model: model.py. The learning rate and the length: schedule.py. Precision and ranks: layout.py.
"""

from __future__ import annotations

import re
from typing import Any

from bloomery.checkpoint.megatron.builder import Builder, say
from bloomery.checkpoint.megatron.ds_config import DsConfig
from bloomery.checkpoint.megatron.flags import Row
from bloomery.checkpoint.megatron.layout import fill_parallel, fill_precision
from bloomery.checkpoint.megatron.model import fill_model, fill_tokenizer
from bloomery.checkpoint.megatron.schedule import fill_lr, fill_train
from bloomery.checkpoint.megatron.shell_expand import shown
from bloomery.checkpoint.megatron.splits import fill_weighted_splits, split_flags


def fill(b: Builder, ds: DsConfig | None) -> None:
    """Every section but `launch`; problems and rows are in the builder."""
    b.put("seed", b.value("seed", int, 1234), "seed")
    family = fill_model(b)
    fill_tokenizer(b, family)
    _batch(b)
    _optimizer(b, ds)
    fill_lr(b)
    has_validation = _data(b, family)
    fill_train(b, has_validation)
    fill_precision(b, ds)
    fill_parallel(b, ds)
    saves = b.first("save-interval", "persistent-save-interval")
    if interval := b.value(saves, int, 0):
        b.put("checkpoint.phases", [{"every": f"{interval} steps"}], saves)
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
    if name not in ("adam", "adamw", "fusedadamw"):
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
    return b.deepspeed and not b.has("clip-grad")


def _clipping(b: Builder, ds: DsConfig | None) -> None:
    path, clip = "optimizer.clip_grad_norm", b.value("clip-grad", float, 1.0)
    if ds is None:
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
            what, rule = "--bert-no-binary-head is set", "bert has its order head here"
            b.problem(b.given("bert-no-binary-head"), what, rule, "remove it")
    if b.has("data-path") and b.has("train-data-path"):
        what = "--data-path and --train-data-path are both set"
        b.problem(b.given("train-data-path"), what, "Megatron takes one of them", "remove one")
    flag = b.first("data-path", "train-data-path")
    if b.has(flag) and (sources := _sources(b, flag)):
        blends_one = len(sources) == 1 and "weight" in sources[0]
        remark = "Megatron blends one source with a weight: data.order=megatron needs data.blend_one_source=true"
        b.put("data.train", sources, flag, remark=remark if blends_one else "")
    evaluates = fill_weighted_splits(b)
    if "train" not in b.raw.get("data", {}):
        return _no_data(b)
    if any(b.has(flag) for flag in split_flags("train")):
        return evaluates
    if b.given("valid-data-path") is not None:
        b.put("data.validation", {"valid": _sources(b, "valid-data-path")}, "valid-data-path")
        return True
    split = b.value("split", str, "969,30,1").strip("'\"")  # quotes that a shell left in an item of an array
    b.put("data.split", split, "split")
    shares = re.findall(r"[0-9]+(?:\.[0-9]+)?", split)
    return len(shares) > 1 and float(shares[1]) > 0


def _sources(b: Builder, flag: str) -> list[dict[str, Any]]:
    given = b.given(flag)
    assert given is not None
    if not given.values:
        b.problem(given, f"--{flag} has no value", "it is one path, or pairs of weight and path", "add them")
        return []
    if any(word.startswith("$(") for word in given.values):
        b.tell("left out", flag, "only a running shell knows these paths: add `data:` to the recipe")
        return []
    if len(given.values) == 1:
        return [{"path": shown(given.values[0])}]
    if not any(map(_is_number, given.values)):
        what = f"--{flag} names {len(given.values)} paths without weights"
        rule = "Megatron then blends by their lengths and ends when all is read once, which no recipe can say"
        b.problem(given, what, rule, f"give each path a weight, `--{flag} 0.7 A 0.3 B`")
        return []
    if len(given.values) % 2:
        b.problem(given, f"--{flag} has {len(given.values)} words", "it is one path, or pairs of weight and path")
        return []
    pairs = zip(given.values[::2], given.values[1::2], strict=True)
    return [{"path": shown(path), "weight": b.convert(given, weight, float, 1.0)} for weight, path in pairs]


def _is_number(word: str) -> bool:
    try:
        float(word)
    except ValueError:
        return False
    return True


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
