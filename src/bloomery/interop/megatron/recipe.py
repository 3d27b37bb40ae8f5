"""What the flags become in a recipe. Defaults are Megatron's, written out where ours differ.

Flags that are a field of their own: FIELDS of flags.py. Here are those that decide something together.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from decimal import Decimal
from typing import Any, TypeVar

from bloomery.base.bounded import LARGE_BYTES, parse_json, read_text
from bloomery.base.errors import Problem
from bloomery.base.units import LONGEST_SECONDS, Duration
from bloomery.config.yaml_nodes import inline_yaml
from bloomery.families.family import Family
from bloomery.families.registry import FAMILIES
from bloomery.interop.megatron.flags import FIELDS, REQUIRED, CommandLine, Kind, Row

T = TypeVar("T", int, float, str)
_LARGEST = 10**18
"""Of every number: it keeps nonsense out of later arithmetic."""
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
"""Flags that only BigScience's Megatron-DeepSpeed has, which reads --train-tokens and never uses it."""
_EXCLUSIVE = (
    "fp16 bf16", "train-samples train-iters", "rampup-batch-size train-iters", "split train-weighted-split-paths",
    "lr-warmup-samples lr-warmup-iters lr-warmup-fraction", "split train-weighted-split-paths-path",
    "data-path train-data-path train-weighted-split-paths train-weighted-split-paths-path",
    "valid-data-path train-weighted-split-paths", "valid-data-path train-weighted-split-paths-path",
)  # fmt: skip
"""Flags of which Megatron takes one."""
_SHARDING: dict[str, Any] = {"no_shard": 0, "optim": 1, "optim_grads": 2, "optim_grads_params": 3}


@dataclass
class Builder:
    """Values out of flags and into recipe fields, with a row for each and every problem kept."""

    line: CommandLine
    unset: str | None = None
    """Why a variable of the script may have no value; None: there is no script."""
    find_file: Callable[[str], tuple[str, str] | None] = lambda path: None
    """(text, place) of a file that a flag names; None if it is not here."""
    deepspeed: bool = False
    """Whether DeepSpeed trains: --deepspeed, or a ds_config at hand."""
    ds: dict[str, Any] | None = None
    """The ds_config: values by dotted key."""
    raw: dict[str, Any] = field(default_factory=dict)
    """The recipe as plain values."""
    places: dict[str, str] = field(default_factory=dict)
    """Recipe field -> the flag it came from, for messages."""
    rows: list[Row] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)

    def has(self, *names: str) -> bool:
        return any(name in self.line.flags for name in names)

    def first(self, *names: str) -> str:
        """Of several names the one that is given, else the first."""
        return next((name for name in names if self.has(name)), names[0])

    def value(self, name: str, default: T) -> T:
        """The flag's value, of the type of `default`; `default`, and a problem, where it has none that can be used."""
        values = self.line.flags[name].values if self.has(name) else []
        if self.has(name) and len(values) != 1:
            self.refuse(name, f"--{name} has {len(values)} values", "it takes one", "write one; of a script: --set it")
        return self.convert(name, values[0], default) if len(values) == 1 else default

    def convert(self, name: str, text: str, default: T) -> T:
        if isinstance(default, str):
            return text
        kind = "number" if isinstance(default, float) else "whole number"
        what, rule, remedy = f"--{name} is {text[:60]!r}", f"it is a finite {kind} of at most {_LARGEST:,}", "write one"
        if "$" in text:
            names, remedy = unset_names(text), f"add --{name} VALUE after the script"
            what, rule = f"--{name} is {text}", (names and self.unset) or "it is known only at run time"
            remedy = f"give it with --set {names[0]}=VALUE, or {remedy}" if names else remedy
        with suppress(ArithmeticError):  # not a number, or one that no arithmetic can hold: 9e999999
            number = Decimal(text)  # also `3e9` and `1.0` for a whole number
            if number.is_finite() and abs(number) <= _LARGEST and (isinstance(default, float) or number == int(number)):
                return type(default)(number)
        self.refuse(name, what, rule, remedy)
        return default

    def put(self, path: str, value: Any, *flags: str, kind: Kind = "mapped", remark: str = "") -> None:
        """Set a field of the recipe. `flags` it came from; none of them given: Megatron's default."""
        holder = self.raw
        *sections, last = path.split(".")
        for section in sections:
            holder = holder.setdefault(section, {})
        holder[last] = value
        result = value if isinstance(value, str) else inline_yaml(value)
        found = [self.line.flags[name] for name in flags if self.has(name)]
        if found:
            self.places[path] = f"{found[0].place} {found[0].flag}"
            self.rows += [Row(kind, given.flag, given.text, path, result, remark) for given in found]
        else:
            kind = "default" if kind == "mapped" else kind
            self.rows.append(Row(kind, "", "", path, result, remark or "Megatron's default"))

    def note(self, kind: Kind, name: str, remark: str, value: str | None = None) -> None:
        """A row without a field, where the flag is given: it is not needed, or means something else here."""
        if given := self.line.flags.get(name):
            self.rows.append(Row(kind, given.flag, given.text if value is None else value, remark=remark))

    def refuse(self, name: str, what: str, rule: str, remedy: str = "remove it, if that is the training") -> None:
        given = self.line.flags.get(name) or next(iter(self.line.flags.values()), None)
        found = Problem(what, rule, remedy, given.place if given else "command line")
        if found not in self.problems:  # several fields may ask for one flag
            self.problems.append(found)


def unset_names(text: str) -> list[str]:
    """The variables and arguments of a script in a text that have no value."""
    return re.findall(r"\$\{?([A-Za-z_][A-Za-z0-9_]*|[0-9])", text)


def _ramp(b: Builder, name: str) -> dict[str, int] | None:
    if len(values := b.line.flags[name].values) != 3:
        b.refuse(name, f"--{name} has {len(values)} values", "it takes START INCREMENT SAMPLES", "give three")
        return None
    return {key: b.convert(name, text, 1) for key, text in zip(("start", "increment", "samples"), values, strict=False)}


def _skipped_steps(b: Builder, name: str) -> list[str]:
    """Megatron counts from 0, we from 1."""
    steps = sorted({b.convert(name, text, 0) + 1 for text in b.line.flags[name].values})
    return [f"{step}-{step} steps" for step in steps]


_CONVERTERS: dict[str, Callable[[Builder, str], Any]] = {
    "int": lambda b, name: b.value(name, 1),
    "float": lambda b, name: b.value(name, 1.0),
    "str": lambda b, name: b.value(name, ""),
    "lower": lambda b, name: b.value(name, "").lower(),
    "steps": lambda b, name: f"{b.value(name, 1)} steps",
    "phases": lambda b, name: [{"every": f"{every} steps"}] if (every := b.value(name, 0)) else None,
    "true": lambda b, name: True,
    "false": lambda b, name: False,
    "ramp": _ramp,
    "ranges": lambda b, name: [f"{text} steps" for text in b.line.flags[name].values],
    "skips": _skipped_steps,
}


def fill(b: Builder) -> None:
    """Every section but `data` and `launch`; problems and rows are in the builder."""
    for names, path, kind, default in FIELDS:
        flag = b.first(*names.split())
        value = _CONVERTERS[kind](b, flag) if b.has(flag) else 1 if default is REQUIRED else default
        if not b.has(flag) and default is REQUIRED:
            rule = "Megatron needs it, or takes a value that depends on the machines"
            b.refuse(flag, f"--{flag} is missing", rule, f"add --{flag} VALUE")
        if value is not None:
            b.put(path, value, flag)
    for names in _EXCLUSIVE:
        found = [name for name in names.split() if b.has(name) and b.line.flags[name].text not in ("0", "0.0")]
        if len(found) > 1 and not ("warmup" in names and b.has("lr-warmup-tokens")):  # which overrules the others
            both = " and ".join(f"--{name}" for name in found)
            b.refuse(found[1], f"{both} are both set", "Megatron takes one of them", "remove one")
    _model(b)
    _tokenizer(b)
    _optimizer(b)
    _schedule(b)
    _length(b)
    _precision(b)
    _parallel(b)


def _model(b: Builder) -> None:
    """What is left of `model`."""
    family, model = _family(b), b.raw["model"]
    b.put("model.family", family.name, *_FAMILY)
    is_exact = b.has("no-bias-gelu-fusion") and not b.has("openai-gelu")
    if family.activation != "silu" and is_exact is not (family.activation == "gelu"):
        flag = "--no-bias-gelu-fusion" if is_exact else ""
        remark = f"Megatron's GELU is exact with --no-bias-gelu-fusion, else the tanh form; here {family.activation}"
        b.rows.append(Row("differs", flag, "", "model.family", family.name, remark))
    if family.positions == "learned" and b.value("max-position-embeddings", 0) not in (0, model["seq_length"]):
        b.note("differs", "max-position-embeddings", "positions are as many as the sequence has tokens")
    if family.positions == "rotary":
        theta = b.first("rotary-base", "rotary-position-embeddings-theta")
        b.put("model.rope_theta", b.value(theta, 10000.0), theta)
        if "ffn_hidden_size" not in model:
            width = 4 * model["hidden_size"] * 2 // 3 // 64 * 64
            b.put("model.ffn_hidden_size", width, remark="Megatron's default with --swiglu: 8/3 of the hidden size")
        if "tie_embeddings" not in model:
            b.put("model.tie_embeddings", True)
    if (channels := b.value("kv-channels", 0)) and channels * model["num_heads"] != model["hidden_size"]:
        b.refuse("kv-channels", f"--kv-channels is {channels}", "a head is hidden-size / num-attention-heads wide here")
    hidden, attention = b.value("hidden-dropout", 0.1), b.value("attention-dropout", 0.1)
    if hidden != attention:
        what = f"--hidden-dropout is {hidden} and --attention-dropout is {attention}"
        b.refuse("hidden-dropout", what, "a recipe has one dropout for both", "make them equal")
    b.put("model.dropout", hidden, "hidden-dropout", "attention-dropout")
    if b.has("group-query-attention") and "num_kv_heads" not in model:
        b.put("model.num_kv_heads", b.value("num-query-groups", 1), "num-query-groups", "group-query-attention")


def _family(b: Builder) -> Family:
    program = b.line.program.rpartition("/")[2]
    if _OTHER_PROGRAMS & set(program.removesuffix(".py").split("_")):
        b.refuse("", f"the program is {program}", _FAMILIES, "import the script of one of these")
    if "pretrain_bert" in program:
        return next(family for family in FAMILIES.values() if family.encoder)
    positions = b.value("position-embedding-type", "absolute").lower()
    norm = b.value("normalization", "LayerNorm").lower()
    rotary = b.has("use-rotary-position-embeddings") or positions in ("rope", "rotary")
    alibi = b.has("use-alibi-position-embeddings") or positions == "alibi"
    known = ("absolute", "learned_absolute", "rope", "rotary", "alibi")
    parts = {
        "rotary positions": rotary,
        "--normalization RMSNorm": norm == "rmsnorm",
        "--swiglu": b.has("swiglu"),
        "--disable-bias-linear": b.has("disable-bias-linear"),
        "ALiBi": alibi,
        "--embed-layernorm": b.has("embed-layernorm"),
        f"--position-embedding-type {positions}": positions not in known,
        f"--normalization {norm}": norm not in ("layernorm", "rmsnorm"),
        "--rotary-percent": rotary and b.value("rotary-percent", 1.0) != 1.0,
        "--no-position-embedding alone": b.has("no-position-embedding") and not alibi and not rotary,
    }
    found = [name for name, is_set in parts.items() if is_set]
    if found not in ([], ["ALiBi", "--embed-layernorm"], list(parts)[:4]):
        what = f"the model has {', '.join(found)}"
        b.refuse(b.first(*_FAMILY), what, _FAMILIES, "add what is missing, or remove it, if that is the model")
    wanted = "rotary" if rotary or norm == "rmsnorm" else "alibi" if alibi else "learned"
    decoders = (family for family in FAMILIES.values() if not family.encoder and not family.qk_norm)
    return next(family for family in decoders if family.positions == wanted)


def _tokenizer(b: Builder) -> None:
    is_encoder = FAMILIES[b.raw["model"]["family"]].encoder
    kind = b.value("tokenizer-type", "BertWordPieceLowerCase" if is_encoder else "GPT2BPETokenizer")
    flag, file = b.first("pad-vocab-size-to", "padded-vocab-size", "vocab-size"), b.value("vocab-file", "")
    size, remark = _count_vocabulary(file), "counted in --vocab-file"
    if b.has(flag):
        is_null = flag == "vocab-size" and kind == "NullTokenizer"
        size, remark = b.value(flag, 1) + is_null, "NullTokenizer adds an end of document" if is_null else ""
    elif not size:
        size, remark = _VOCABULARIES.get(kind), f"of every {kind}; check it if the vocabulary is your own"
    if size is None:
        remedy = "add --vocab-size N (entries of the tokenizer) to the command line"
        b.refuse("tokenizer-type", f"the vocabulary of {kind} is not on the command line", "", remedy)
    b.put("model.vocab_size", size or 1, flag, remark=remark)
    if "tokenizer" not in b.raw and file:
        folder = file.rpartition("/")[0] or (file if "$" in file else ".")
        remark = "a folder with a tokenizer.json, or with vocab.json and merges.txt"
        b.put("tokenizer.path", folder, "vocab-file", "merge-file", remark=remark)
    if b.raw.get("tokenizer", {}).get("path", "").endswith(".model"):
        remark = "a SentencePiece file; a recipe has a folder with a tokenizer.json"
        b.rows.append(Row("left out", "", "", "tokenizer.path", remark=remark))


def _count_vocabulary(path: str) -> int | None:
    try:
        text = read_text(path, LARGE_BYTES)
        return len(parse_json(text)) if path.endswith(".json") else len(text.splitlines())
    except (OSError, ValueError, TypeError):
        return None


def _optimizer(b: Builder) -> None:
    name = b.value("optimizer", "adam")
    b.put("optimizer.name", "adamw" if name in ("adam", "fusedadamw") else name, "optimizer")
    betas = [b.value("adam-beta1", 0.9), b.value("adam-beta2", 0.999)]
    b.put("optimizer.betas", betas, "adam-beta1", "adam-beta2")
    clip, kind, remark = b.value("clip-grad", 1.0), "mapped", ""
    if b.ds is not None and "gradient_clipping" not in b.ds and clip:
        kind, remark = "differs", "DeepSpeed clips by the gradient_clipping of ds_config: without, it would not clip"
    elif b.ds is not None and not b.has("clip-grad"):
        clip, remark = float(b.ds["gradient_clipping"]), "ds_config gradient_clipping: DeepSpeed clips, not Megatron"
    b.put("optimizer.clip_grad_norm", clip or None, "clip-grad", kind=kind, remark=remark)  # type: ignore[arg-type]


def _schedule(b: Builder) -> None:
    """`lr`, but its peak and schedule."""
    style = b.raw["lr"]["schedule"]
    length = b.first("train-samples", "train-iters", "train-tokens")
    flag = b.first("lr-decay-samples", "lr-decay-iters", length)
    decay, unit = b.value(flag, 1), _unit(flag)
    if style != "constant":
        b.put("lr.min", b.value("min-lr", 0.0), "min-lr")
        if b.has("lr-decay-tokens"):
            b.put("lr.decay", f"{b.value('lr-decay-tokens', 1)} tokens", "lr-decay-tokens")
        else:
            remark = "Megatron's default: the length of the training" if flag == length else ""
            b.put("lr.decay", f"{decay} {unit}", *([] if flag == length else [flag]), remark=remark)
    _warmup(b, style, decay, unit)
    if style == "wsd":
        if (shape := b.value("lr-wsd-decay-style", "exponential")) != "linear":
            what, remedy = f"--lr-wsd-decay-style is {shape}", "use --lr-wsd-decay-style linear"
            b.refuse("lr-wsd-decay-style", what, "it is linear here", remedy)
        flag = b.first("lr-wsd-decay-iters", "lr-wsd-decay-samples")
        b.put("lr.cooldown", f"{b.value(flag, 0)} {_unit(flag)}", flag)


def _unit(flag: str) -> str:
    return {"samples": "samples", "tokens": "tokens"}.get(flag.rpartition("-")[2], "steps")


def _warmup(b: Builder, style: str, decay: int, unit: str) -> None:
    names = ("lr-warmup-tokens", "lr-warmup-samples", "lr-warmup-iters", "lr-warmup-fraction")
    flags = [name for name in names if b.value(name, 0.0) != 0]
    flag, kind, remark = (flags[0] if flags else b.first(*names)), "mapped", ""
    if flag == "lr-warmup-fraction":
        fraction = b.value(flag, 0.0)
        count, remark = round(fraction * decay, 6), f"{fraction:g} of the decay"
        if count != int(count):  # Megatron counts samples, so a fraction of a step is exact in samples
            count, unit = count * (b.raw["batch"]["global_batch_size"] if unit == "steps" else 1), "samples"
    else:
        count, unit = b.value(flag, 0), _unit(flag) if b.has(flag) else "samples"
    if flag == "lr-warmup-tokens" and b.has(flag) and style != "constant" and not b.has("lr-decay-tokens"):
        kind = "differs"
        remark = "the decay begins with its end; in Megatron, without --lr-decay-tokens, as if there were no warm-up"
    b.put("lr.warmup", f"{int(count)} {unit}", flag, kind=kind, remark=remark)  # type: ignore[arg-type]


def _length(b: Builder) -> None:
    """`train`, but its evaluation."""
    samples, iters, tokens = (b.has(name) for name in ("train-samples", "train-iters", "train-tokens"))
    if not samples and not iters and not tokens:
        b.refuse("", "--train-samples is missing", "a training has a length", "add --train-samples or --train-iters")
    flag = "train-samples" if samples else "train-iters"
    count, most = b.value(flag, 1), b.value("train-tokens", 1)
    total = count * (1 if samples else b.raw["batch"]["global_batch_size"]) * b.raw["model"]["seq_length"]
    if tokens and not ((samples or iters) and (b.has(*_BIGSCIENCE) or most >= total)):
        b.put("train.for", f"{most} tokens", "train-tokens", remark="it ends with whichever limit comes first")
    else:
        b.put("train.for", f"{count} {_unit(flag)}", flag)
        remark = f"--{flag} ends the training first, or BigScience's Megatron-DeepSpeed never uses it"
        b.note("not needed", "train-tokens", remark)
    minutes, interval = b.value("exit-duration-in-mins", 0), b.value("exit-interval", 0)
    if minutes and minutes * 60 <= LONGEST_SECONDS:
        after = str(Duration(minutes * 60)) if minutes > 0 else f"{minutes}m"
        b.put("train.exit_after", after, "exit-duration-in-mins")
        b.note("left out", "exit-interval", "a job ends by one rule: the wall clock")
    elif interval:
        remark = "Megatron ends a job at every multiple of it, ours after that many steps of the job"
        b.put("train.exit_after", f"{interval} steps", "exit-interval", kind="differs", remark=remark)


def _precision(b: Builder) -> None:
    fp8 = [name for name in ("fp8-format", "fp8-hybrid", "fp8-e4m3", "fp8-e5m2") if b.has(name)]
    precision = "fp8" if fp8 else "bf16" if b.has("bf16") else "fp16" if b.has("fp16") else "fp32"
    b.put("precision", precision, *fp8, "fp16", "bf16")
    if precision == "fp16" and b.deepspeed:
        get = (b.ds or {}).get
        scale: dict[str, Any] = {
            "initial": 2.0 ** get("fp16.initial_scale_power", 16),
            "window": f"{get('fp16.loss_scale_window', 1000)} steps",
            "hysteresis": get("fp16.hysteresis", 2),
            "consecutive_hysteresis": get("fp16.consecutive_hysteresis", False),
            "min": float(get("fp16.min_loss_scale", 1.0)),
        }
        remark = "ds_config fp16" if b.ds is not None else "of the ds_config, which is not here: check it"
        b.put("loss_scale", scale, remark=remark)
    elif precision == "fp16":
        if b.has("loss-scale"):
            b.refuse("loss-scale", "--loss-scale is a fixed scale", "the scale is dynamic here", "remove it")
        flags = ("initial-loss-scale", "loss-scale-window", "hysteresis", "min-loss-scale")
        scale = {"initial": b.value(flags[0], 2.0**32), "window": f"{b.value(flags[1], 1000)} steps"}
        b.put("loss_scale", scale | {"hysteresis": b.value(flags[2], 2), "min": b.value(flags[3], 1.0)}, *flags)


def _parallel(b: Builder) -> None:
    _zero(b)
    flag = b.first("num-layers-per-virtual-pipeline-stage", "num-virtual-stages-per-pipeline-rank")
    if count := b.value(flag, 0):
        per_rank = b.raw["model"]["num_layers"] // max(1, b.raw["parallel"]["pp"] * count)
        chunks = per_rank if flag.startswith("num-layers") else count
        b.put("parallel.chunks", chunks, flag)
        if chunks > 1:
            b.put("parallel.schedule", "interleaved", flag)
    flag = b.first("recompute-activations", "recompute-granularity", "checkpoint-activations")
    recompute = {"recompute-activations": "selective", "checkpoint-activations": "full"}.get(flag, "")
    b.put("parallel.recompute", (recompute or b.value(flag, "none")) if b.has(flag) else "none", flag)
    parts = [(b.ds or {}).get(f"zero_optimization.{name}") for name in ("offload_optimizer", "offload_param")]
    is_offloaded = any(isinstance(part, dict) and part.get("device", "none") != "none" for part in parts)
    if is_offloaded or (b.ds or {}).get("zero_optimization.cpu_offload"):
        b.put("parallel.offload", True, remark="ds_config offload")


def _zero(b: Builder) -> None:
    flag, remark = "use-distributed-optimizer", ""
    stage: Any = int(b.has(flag))
    if b.deepspeed:
        flag, stage, remark = "zero-stage", 1, "check it: of the ds_config, which is not here"
        if b.ds is not None:
            stage, remark = b.ds.get("zero_optimization.stage", 0), "ds_config zero_optimization.stage, or its default"
        if b.has(flag):
            stage, remark = b.value(flag, 1), ""
        if stage == 0 and b.has("bf16"):
            stage, remark = 1, "DeepSpeed's bf16 optimizer shards the optimizer state at stage 0"
    elif b.has("use-torch-fsdp2"):
        flag, stage = "use-torch-fsdp2", 2 if b.has("torch-fsdp2-no-reshard-after-forward") else 3
    elif b.has("use-megatron-fsdp", "use-custom-fsdp"):
        flag = "data-parallel-sharding-strategy"
        stage = _SHARDING.get(b.value(flag, "no_shard"), b.value(flag, ""))  # the recipe's rules refuse another name
    b.put("parallel.zero", stage, flag, remark=remark)
