"""What the flags become in a recipe. Defaults are Megatron's, written out where ours differ.

Flags that are a field of their own: FIELDS of flags.py. Here are those that decide something together.
"""

from __future__ import annotations

import re
from typing import Any

from bloomery.base.bounded import LARGE_BYTES, parse_json, read_text
from bloomery.base.errors import Problem
from bloomery.base.units import LONGEST_SECONDS
from bloomery.families.family import Family
from bloomery.families.registry import FAMILIES
from bloomery.interop.megatron.builder import Builder, Row, steps
from bloomery.interop.megatron.data import fill_data
from bloomery.interop.megatron.ds_config import DsConfig
from bloomery.interop.megatron.flags import FIELDS, REQUIRED, Given, is_known
from bloomery.interop.megatron.run_script import Script

_KINDS: dict[str, Any] = {"int": int, "float": float, "str": str, "lower": str.lower, "steps": steps}
_VOCABULARIES = {"GPT2BPETokenizer": 50257, "BertWordPieceLowerCase": 30522, "BertWordPieceCase": 28996}
_OTHER_PROGRAMS = {"t5", "ict", "realm", "vision", "vlm", "mamba", "hybrid", "retro", "prefix", "rl"}
_FAMILY = (
    "position-embedding-type", "use-rotary-position-embeddings", "use-alibi-position-embeddings", "embed-layernorm",
    "normalization", "swiglu", "disable-bias-linear",
)  # fmt: skip
_FAMILIES = (
    "the families here are gpt2 (learned positions), bloom (ALiBi and --embed-layernorm), llama (rotary positions, "
    "--normalization RMSNorm, --swiglu and --disable-bias-linear), and bert (pretrain_bert.py)"
)
_BIGSCIENCE = ("tokenizer-name-or-path", "pad-vocab-size-to", "codecarbon-dir", "skip-train-iteration-range",
               "train-weighted-split-paths", "train-weighted-split-paths-path")  # fmt: skip
"""Flags that only BigScience's Megatron-DeepSpeed has."""
_LOSS_SCALE = ("initial-loss-scale", "loss-scale-window", "hysteresis", "min-loss-scale")
_SHARDING: dict[str, Any] = {"no_shard": 0, "optim": 1, "optim_grads": 2, "optim_grads_params": 3}
_MOST_NODES, _MOST_LEVELS = 10_000, 10_000


def fill(b: Builder, ds: DsConfig | None) -> None:
    """Every section but `launch`; problems and rows are in the builder."""
    _fields(b)
    family = _model(b)
    _optimizer(b, ds)
    _schedule(b)
    _train(b, fill_data(b, family))
    _precision(b, ds)
    _parallel(b, ds)


def _fields(b: Builder) -> None:
    """The flags that are a field of their own."""
    for names, path, kind, default in FIELDS:
        flag = b.first(*names.split())
        given = b.given(flag)
        if given is None and default is REQUIRED:
            rule = "Megatron needs it, or takes a value that depends on the machines"
            b.problem(None, f"--{flag} is missing", rule, f"add --{flag} VALUE")
        default = 1 if default is REQUIRED else default
        if given is None:
            value = f"{default} steps" if kind == "steps" else default
        elif kind in ("true", "false"):
            value = kind == "true"
        elif kind in ("ramp", "skips"):
            value = _ramp(b, given) if kind == "ramp" else _skips(b, given)
        elif kind == "phases":
            value = [{"every": f"{interval} steps"}] if (interval := b.value(flag, int, 0)) else None
        else:
            value = b.value(flag, _KINDS[kind], default if default is not None else 1)
        if value is not None:
            b.put(path, value, flag)


def _ramp(b: Builder, given: Given) -> dict[str, int] | None:
    if len(given.values) != 3:
        what = f"--rampup-batch-size has {len(given.values)} values"
        b.problem(given, what, "it takes START INCREMENT SAMPLES", "give three")
        return None
    start, increment, samples = (b.convert(given, text, int, 1) for text in given.values)
    return {"start": start, "increment": increment, "samples": samples}


def _skips(b: Builder, given: Given) -> list[str]:
    if given.flag == "--skip-train-iteration-range":
        return [f"{text} steps" for text in given.values]
    counts = sorted({b.convert(given, text, int, 0) + 1 for text in given.values})  # Megatron counts from 0, we from 1
    return [f"{step}-{step} steps" for step in counts]


def _model(b: Builder) -> Family:
    """What is left of `model` and `tokenizer`; the family."""
    family, model = _family(b), b.raw["model"]
    is_exact = b.has("no-bias-gelu-fusion") and not b.has("openai-gelu")
    differs = family.activation != "silu" and is_exact is not (family.activation == "gelu")
    remark = "Megatron's GELU is exact with --no-bias-gelu-fusion and else the tanh form; bert's is exact, others' tanh"
    b.put("model.family", family.name, *_FAMILY)
    if differs:
        flag = "--no-bias-gelu-fusion" if is_exact else ""
        b.rows.append(Row("differs", flag, "", "model.family", family.name, remark))
    if family.positions == "learned" and b.value("max-position-embeddings", int, 0) not in (0, model["seq_length"]):
        b.note("differs", "max-position-embeddings", "positions are as many as the sequence has tokens")
    if family.positions == "rotary":
        theta = b.first("rotary-base", "rotary-position-embeddings-theta")
        b.put("model.rope_theta", b.value(theta, float, 10000.0), theta)
        if "ffn_hidden_size" not in model:
            width = 4 * model["hidden_size"] * 2 // 3 // 64 * 64
            b.put("model.ffn_hidden_size", width, remark="Megatron's default with --swiglu: 8/3 of the hidden size")
        if "tie_embeddings" not in model:
            b.put("model.tie_embeddings", True)
    channels = b.value("kv-channels", int, 0)
    if channels and channels * model["num_heads"] != model["hidden_size"]:
        b.refuse("kv-channels", f"--kv-channels is {channels}", "a head is hidden-size / num-attention-heads wide here")
    hidden, attention = b.value("hidden-dropout", float, 0.1), b.value("attention-dropout", float, 0.1)
    if hidden != attention:
        what = f"--hidden-dropout is {hidden} and --attention-dropout is {attention}"
        b.refuse("hidden-dropout", what, "a recipe has one dropout for both", "make them equal")
    b.put("model.dropout", hidden, "hidden-dropout", "attention-dropout")
    if b.has("group-query-attention") and "num_kv_heads" not in model:
        b.put("model.num_kv_heads", b.value("num-query-groups", int, 1), "num-query-groups", "group-query-attention")
    _tokenizer(b, family)
    return family


def _family(b: Builder) -> Family:
    program = b.line.program.rpartition("/")[2]
    if _OTHER_PROGRAMS & set(program.removesuffix(".py").split("_")):
        b.problem(None, f"the program is {program}", _FAMILIES, "import the script of one of these")
    if "pretrain_bert" in program:
        return next(family for family in FAMILIES.values() if family.encoder)
    positions = b.value("position-embedding-type", str, "absolute").lower()
    norm = b.value("normalization", str, "LayerNorm").lower()
    rotary = b.has("use-rotary-position-embeddings") or positions in ("rope", "rotary")
    alibi = b.has("use-alibi-position-embeddings") or positions == "alibi"
    parts = {
        "rotary positions": rotary and b.value("rotary-percent", float, 1.0) == 1.0,
        "--normalization RMSNorm": norm == "rmsnorm",
        "--swiglu": b.has("swiglu"),
        "--disable-bias-linear": b.has("disable-bias-linear"),
        "ALiBi": alibi,
        "--embed-layernorm": b.has("embed-layernorm"),
        f"--position-embedding-type {positions}": positions
        not in ("absolute", "learned_absolute", "rope", "rotary", "alibi"),
        f"--normalization {norm}": norm not in ("layernorm", "rmsnorm"),
        "--rotary-percent": rotary and b.value("rotary-percent", float, 1.0) != 1.0,
        "--no-position-embedding alone": b.has("no-position-embedding") and not alibi and not rotary,
    }
    found = [name for name, is_set in parts.items() if is_set]
    if found not in ([], ["ALiBi", "--embed-layernorm"], list(parts)[:4]):
        what = f"the model has {', '.join(found)}"
        b.refuse(b.first(*_FAMILY), what, _FAMILIES, "add what is missing, or remove it, if that is the model")
    wanted = "rotary" if rotary or norm == "rmsnorm" else "alibi" if alibi else "learned"
    decoders = (family for family in FAMILIES.values() if not family.encoder and not family.qk_norm)
    return next(family for family in decoders if family.positions == wanted)


def _tokenizer(b: Builder, family: Family) -> None:
    kind = b.value("tokenizer-type", str, "BertWordPieceLowerCase" if family.encoder else "GPT2BPETokenizer")
    flag, vocab = b.first("pad-vocab-size-to", "padded-vocab-size", "vocab-size"), b.given("vocab-file")
    counted = _count_vocabulary(vocab.text) if vocab else None
    size = counted or _VOCABULARIES.get(kind)
    remark = "counted in --vocab-file" if counted else f"of every {kind}; check it if the vocabulary is your own"
    if b.has(flag):
        is_null = flag == "vocab-size" and kind == "NullTokenizer"
        size = b.value(flag, int, 1) + is_null
        remark = "NullTokenizer adds an end of document" if is_null else ""
    elif size is None:
        remedy = "add --vocab-size N (entries of the tokenizer) behind the command line"
        b.refuse("tokenizer-type", f"the vocabulary of {kind} is not on the command line", "", remedy)
    b.put("model.vocab_size", size or 1, flag, remark=remark)
    if str(b.raw.get("tokenizer", {}).get("path")).endswith(".model"):
        remark = "a SentencePiece file; a recipe has a folder with a tokenizer.json"
        b.rows.append(Row("left out", "", "", "tokenizer.path", remark=remark))
    if "tokenizer" not in b.raw and vocab and vocab.text:
        folder = vocab.text.rpartition("/")[0] or ("." if is_known(vocab.text) else vocab.text)
        remark = "a folder with a tokenizer.json, or with vocab.json and merges.txt"
        b.put("tokenizer.path", folder, "vocab-file", "merge-file", remark=remark)


def _count_vocabulary(path: str) -> int | None:
    try:
        text = read_text(path, LARGE_BYTES)
        return len(parse_json(text)) if path.endswith(".json") else len(text.splitlines())
    except (OSError, ValueError, TypeError):
        return None


def _optimizer(b: Builder, ds: DsConfig | None) -> None:
    name = b.value("optimizer", str, "adam")
    b.put("optimizer.name", "adamw" if name in ("adam", "fusedadamw") else name, "optimizer")
    betas = [b.value("adam-beta1", float, 0.9), b.value("adam-beta2", float, 0.999)]
    b.put("optimizer.betas", betas, "adam-beta1", "adam-beta2")
    path, clip = "optimizer.clip_grad_norm", b.value("clip-grad", float, 1.0)
    if ds is not None and ds.get("gradient_clipping") is None:
        remark = "DeepSpeed clips where ds_config says gradient_clipping, and it does not: it would not clip at all"
        b.put(path, clip or None, "clip-grad", kind="differs" if clip else "mapped", remark=remark)
    elif ds is not None and not b.has("clip-grad"):
        remark = "ds_config gradient_clipping: DeepSpeed clips, not Megatron, whose default is 1.0"
        b.put(path, float(ds.get("gradient_clipping")) or None, remark=remark)
    else:
        b.put(path, clip or None, "clip-grad")


def _schedule(b: Builder) -> None:
    """`lr`, but its peak and schedule."""
    style = b.raw["lr"]["schedule"]
    length = b.first("train-samples", "train-iters", "train-tokens")
    flag = b.first("lr-decay-samples", "lr-decay-iters", length)
    decay, unit = b.value(flag, int, 1), _unit(flag)
    if style != "constant":
        b.put("lr.min", b.value("min-lr", float, 0.0), "min-lr")
        remark = "Megatron's default: the length of the training"
        if b.has("lr-decay-tokens"):
            b.put("lr.decay", f"{b.value('lr-decay-tokens', int, 1)} tokens", "lr-decay-tokens")
        elif flag != length:
            b.put("lr.decay", f"{decay} {unit}", flag)
        else:
            b.put("lr.decay", f"{decay} {unit}", remark=remark)
    _warmup(b, style, decay, unit)
    if style == "wsd":
        if (shape := b.value("lr-wsd-decay-style", str, "exponential")) != "linear":
            what, remedy = f"--lr-wsd-decay-style is {shape}", "use --lr-wsd-decay-style linear"
            b.refuse("lr-wsd-decay-style", what, "it is linear here", remedy)
        flag = b.first("lr-wsd-decay-iters", "lr-wsd-decay-samples")
        b.put("lr.cooldown", f"{b.value(flag, int, 0)} {_unit(flag)}", flag)


def _unit(flag: str) -> str:
    return {"samples": "samples", "tokens": "tokens"}.get(flag.rpartition("-")[2], "steps")


def _warmup(b: Builder, style: str, decay: int, unit: str) -> None:
    names = ("lr-warmup-tokens", "lr-warmup-samples", "lr-warmup-iters", "lr-warmup-fraction")
    flags = [name for name in names if b.has(name) and b.value(name, float, 0.0) != 0]
    flag = flags[0] if flags else b.first(*names)
    count: float = b.value(flag, float, 0.0) if b.has(flag) else 0
    remark, kind = "", "mapped"
    if len(flags) > 1 and flag != "lr-warmup-tokens":  # which overrules the others
        both = " and ".join(f"--{name}" for name in flags)
        b.refuse(flags[1], f"{both} are both set", "there is one warm-up", "remove one")
    if flag == "lr-warmup-fraction":
        count, remark = round(count * decay, 6), f"{count:g} of the decay"
        if count != int(count):  # Megatron counts samples, so a fraction of a step is exact in samples
            count, unit = count * (b.raw["batch"]["global_batch_size"] if unit == "steps" else 1), "samples"
    else:
        count, unit = b.value(flag, int, 0), _unit(flag) if b.has(flag) else "samples"
    if flag == "lr-warmup-tokens" and b.has(flag) and style != "constant" and not b.has("lr-decay-tokens"):
        kind = "differs"
        remark = "the decay begins with its end; in Megatron, without --lr-decay-tokens, as if there were no warm-up"
    b.put("lr.warmup", f"{int(count)} {unit}", flag, kind=kind, remark=remark)  # type: ignore[arg-type]


def _train(b: Builder, has_validation: bool) -> None:
    _length(b)
    minutes, interval = b.value("exit-duration-in-mins", int, 0), b.value("exit-interval", int, 0)
    if minutes and minutes * 60 <= LONGEST_SECONDS:
        b.put("train.exit_after", _duration(minutes * 60) if minutes > 0 else f"{minutes}m", "exit-duration-in-mins")
        b.note("left out", "exit-interval", "a job ends by one rule: the wall clock")
    elif interval:
        remark = "Megatron ends a job at every multiple of it, ours after that many steps of the job"
        b.put("train.exit_after", f"{interval} steps", "exit-interval", kind="differs", remark=remark)
    every, each = b.value("eval-interval", int, 1000), b.value("eval-iters", int, 100)
    if each and has_validation:
        b.put("train.evaluate", {"every": f"{every} steps", "steps": each}, "eval-interval", "eval-iters")
    else:
        for name in ("eval-interval", "eval-iters"):
            b.note("left out", name, "there is nothing to evaluate")


def _length(b: Builder) -> None:
    samples, iters, tokens = (b.given(name) for name in ("train-samples", "train-iters", "train-tokens"))
    if samples and iters:
        what = f"--train-samples is {samples.text} and --train-iters is {iters.text}"
        b.problem(iters, what, "Megatron takes one of them", "remove one")
    elif not samples and not iters and not tokens:
        b.problem(None, "--train-samples is missing", "a training has a length", "add --train-samples or --train-iters")
    elif iters and b.has("rampup-batch-size"):
        b.problem(iters, "--train-iters with --rampup-batch-size", "Megatron forbids it", "use --train-samples")
    flag = "train-samples" if samples else "train-iters"
    count, most = b.value(flag, int, 1), b.value("train-tokens", int, 1)
    total = count * (1 if samples else b.raw["batch"]["global_batch_size"]) * b.raw["model"]["seq_length"]
    mark = next((name for name in _BIGSCIENCE if b.has(name)), "")
    remark = "it ends with whichever comes first"
    if tokens and not ((samples or iters) and (mark or most >= total)):
        b.put("train.for", f"{most} tokens", "train-tokens", remark=f"{remark}; the step that would pass is not taken")
        return
    b.put("train.for", f"{count} {_unit(flag)}", flag)
    why = f"BigScience's Megatron-DeepSpeed, which has --{mark}, reads it and never uses it"
    b.note("not needed", "train-tokens", why if mark else f"{remark}, which is --{flag}")


def _duration(seconds: int) -> str:
    """As a recipe writes it; empty for none."""
    parts = ((seconds // 3600, "h"), (seconds // 60 % 60, "m"), (seconds % 60, "s"))
    return "".join(f"{count}{unit}" for count, unit in parts if count > 0)


def _precision(b: Builder, ds: DsConfig | None) -> None:
    if b.has("fp16") and b.has("bf16"):
        b.refuse("bf16", "--fp16 and --bf16 are both set", "there is one precision", "remove one")
    fp8 = [name for name in ("fp8-format", "fp8-hybrid", "fp8-e4m3", "fp8-e5m2") if b.has(name)]
    precision = "fp8" if fp8 else "bf16" if b.has("bf16") else "fp16" if b.has("fp16") else "fp32"
    b.put("precision", precision, *fp8, "fp16", "bf16")
    if precision != "fp16":
        return
    if b.deepspeed:
        remark = "ds_config fp16" if ds is not None else "of the ds_config, which is not here: check it"
        scale = {"initial": 65536.0, "window": "1000 steps", "hysteresis": 2, "min": 1.0}
        b.put("loss_scale", ds.loss_scale() if ds is not None else scale, remark=remark)
        if ds is not None and ds.get("fp16.loss_scale"):
            what = f"fp16.loss_scale is {ds.get('fp16.loss_scale')} in {ds.place}"
            b.refuse("fp16", what, "the scale is dynamic here", "use 0")
        return
    if b.has("loss-scale"):
        b.refuse("loss-scale", "--loss-scale is a fixed scale", "the scale is dynamic here", "remove it")
    scale = {
        "initial": b.value("initial-loss-scale", float, 2.0**32),
        "window": b.value("loss-scale-window", steps, "1000 steps"),
        "hysteresis": b.value("hysteresis", int, 2),
        "min": b.value("min-loss-scale", float, 1.0),
    }
    b.put("loss_scale", scale, *_LOSS_SCALE)


def _parallel(b: Builder, ds: DsConfig | None) -> None:
    _zero(b, ds)
    flag = b.first("num-layers-per-virtual-pipeline-stage", "num-virtual-stages-per-pipeline-rank")
    if count := b.value(flag, int, 0):
        per_rank = b.raw["model"]["num_layers"] // max(1, b.raw["parallel"]["pp"] * count)
        chunks = per_rank if flag.startswith("num-layers") else count
        b.put("parallel.chunks", chunks, flag)
        if chunks > 1:
            b.put("parallel.schedule", "interleaved", flag)
    flag = b.first("recompute-activations", "recompute-granularity", "checkpoint-activations")
    recompute = {"recompute-activations": "selective", "checkpoint-activations": "full"}.get(flag, "")
    recompute = (recompute or b.value(flag, str, "none")) if b.has(flag) else "none"
    b.put("parallel.recompute", recompute, flag)
    if ds is not None and ds.offload:
        b.put("parallel.offload", True, remark="ds_config offload")
    b.note("differs", "remote-device", "weights stay on the device")


def _zero(b: Builder, ds: DsConfig | None) -> None:
    fsdp = b.first("use-torch-fsdp2", "use-megatron-fsdp", "use-custom-fsdp")
    flag, stage, remark = "use-distributed-optimizer", int(b.has("use-distributed-optimizer")), ""
    if b.deepspeed:
        flag, stage, remark = "zero-stage", 1, "check it: of the ds_config, which is not here"
        if ds is not None:
            stage = ds.get("zero_optimization.stage") or 0
            remark = (
                "ds_config zero_optimization.stage" if "zero_optimization.stage" in ds.leaves else "DeepSpeed's default"
            )
        if b.has(flag):
            stage, remark = b.value(flag, int, 1), ""
        if stage == 0 and b.has("bf16"):
            stage, remark = 1, "DeepSpeed's bf16 optimizer shards the optimizer state at stage 0"
    elif fsdp == "use-torch-fsdp2" and b.has(fsdp):
        flag, stage = fsdp, 2 if b.has("torch-fsdp2-no-reshard-after-forward") else 3
    elif b.has(fsdp):
        flag = "data-parallel-sharding-strategy"
        name = b.value(flag, str, "no_shard")
        stage = _SHARDING.get(name, name)  # the recipe's own rules refuse another name
    b.put("parallel.zero", stage, flag, remark=remark)


def fill_launch(b: Builder, script: Script | None, file: str) -> None:
    """The recipe's `launch` section, where #SBATCH lines or the launcher's flags say anything about it."""
    sbatch = {name: value for name, (value, _) in script.sbatch.items()} if script is not None else {}
    launcher = {given.flag.replace("_", "-"): given.text for given in b.line.launcher.values()}
    nodes = _number(launcher.get("--nnodes", launcher.get("--num-nodes", "")))
    gpus = _number(launcher.get("--nproc-per-node", launcher.get("--num-gpus", "")))
    asked = _number(sbatch.get("nodes", ""))
    gpus = gpus or _number(sbatch.get("gpus-per-node", "")) or _number(sbatch.get("gres", ""))
    if nodes is not None and asked is not None and nodes != asked and script is not None:
        what, rule = f"#SBATCH --nodes is {asked} but the launcher starts {nodes}", "it would wait, or leave nodes idle"
        place = f"{file}:{script.sbatch['nodes'][1]}"
        b.problems.append(Problem(what, rule, "make them equal: NNODES=$SLURM_NNODES", place))
    count, source = nodes or asked, "#SBATCH lines" if sbatch else "the launcher's flags"
    if count is None and gpus is None:
        return
    count, gpus = count or 1, gpus or 1
    b.put("launch.on", "slurm" if sbatch else "hosts" if count > 1 else "local", remark=source)
    fitting = _fitting_nodes(b, count, gpus)
    b.put("launch.nodes", fitting, remark=source)
    if fitting != count:
        remark = "so many nodes make more replicas than every level of the batch ramp can feed"
        b.rows[-1] = Row("differs", "nodes", str(count), "launch.nodes", str(fitting), remark)
    b.put("launch.gpus_per_node", gpus, remark=source)
    if limit := _time_limit(sbatch.get("time", "")):
        b.put("launch.time_limit", limit, remark=f"#SBATCH --time {sbatch['time']}")
    if match := re.fullmatch(r"(\d{1,6})-(\d{1,6})%1", sbatch.get("array", "")):
        b.put("launch.array", int(match[2]) - int(match[1]) + 1, remark=f"#SBATCH --array {match[0]}")


def _fitting_nodes(b: Builder, nodes: int, gpus: int) -> int:
    """The most nodes, up to those asked for, with which every level of a ramp divides among the replicas."""
    batch, parallel = b.raw["batch"], b.raw["parallel"]
    ramp, replica = batch.get("rampup"), parallel["tp"] * parallel["pp"] * parallel.get("cp", 1)
    if ramp is None or ramp["increment"] < 1 or replica < 1 or nodes > _MOST_NODES:
        return nodes
    rising = range(ramp["start"], batch["global_batch_size"], ramp["increment"])
    for count in range(nodes if len(rising) <= _MOST_LEVELS else 0, 0, -1):
        unit = count * gpus // replica * batch["micro_batch_size"]
        levels = (*rising, batch["global_batch_size"])
        if count * gpus % replica == 0 and unit and all(level % unit == 0 for level in levels):
            return count
    return nodes


def _number(text: str) -> int | None:
    """The last number of `4`, `gpu:4` or `gpu:a100:4`."""
    match = re.fullmatch(r"(?:.*:)?([0-9]{1,9})", text)
    return int(match[1]) if match else None


def _time_limit(text: str) -> str:
    """Slurm's `20:00:00`, `1-00:00:00` or `90` (minutes) as a recipe writes it; empty for no limit."""
    number = "([0-9]{1,9})"
    match = re.fullmatch(f"(?:{number}-)?{number}(?::{number})?(?::{number})?", text)
    if match is None:
        return ""
    days, first, second, third = (int(part or 0) for part in match.groups())
    is_hours = match[1] is not None or match[4] is not None  # else minutes and seconds
    seconds = days * 86400 + (first * 3600 + second * 60 + third if is_hours else first * 60 + second)
    return _duration(seconds) if seconds <= LONGEST_SECONDS else ""
