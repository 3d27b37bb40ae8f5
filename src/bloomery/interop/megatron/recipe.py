"""What the flags become in a recipe. Defaults are Megatron's, written out where ours differ.

Flags that are a field of their own: FIELDS of flags.py. Here are those that decide something together.
"""

import math
import re
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from decimal import Decimal
from typing import Any, TypeVar

from bloomery.base.bounded import parse_json
from bloomery.base.errors import Problem, RecipeError
from bloomery.base.units import LONGEST_SECONDS, Duration
from bloomery.config.yaml_nodes import inline_yaml
from bloomery.families.family import Family
from bloomery.families.registry import FAMILIES
from bloomery.interop.megatron.flags import FIELDS, POST_NORM, REQUIRED, CommandLine, Given, Kind, Row

T = TypeVar("T", int, float, str)
UNSET = "it has no value where the script was run, or it is known only at run time"
_LARGEST = 10**18
"""Of every number: it keeps nonsense out of later arithmetic."""
_VOCABULARIES = {"GPT2BPETokenizer": 50257, "BertWordPieceLowerCase": 30522, "BertWordPieceCase": 28996}
_OTHER_PROGRAMS = {"t5", "ict", "realm", "vision", "vlm", "mamba", "hybrid", "retro", "prefix", "rl"}
_FAMILY = (
    "position-embedding-type", "use-rotary-position-embeddings", "use-alibi-position-embeddings", "embed-layernorm",
    "normalization", "swiglu", "disable-bias-linear", "add-qkv-bias", "qk-layernorm", "no-position-embedding",
)  # fmt: skip
_FAMILIES = f"the families here are {', '.join(FAMILIES)}, as docs/models.md describes them"
_BIGSCIENCE = (
    "tokenizer-name-or-path", "pad-vocab-size-to", "codecarbon-dir", "skip-train-iteration-range",
    "train-weighted-split-paths", "train-weighted-split-paths-path",
)  # fmt: skip
"""Flags that only BigScience's Megatron-DeepSpeed has, which reads --train-tokens and never uses it."""
_FP8 = "e4m3 forwards and e5m2 for gradients (hybrid), with one scale of each tensor itself, not of its history"
_SHARDING: dict[str, Any] = {"no_shard": 0, "optim": 1, "optim_grads": 2, "optim_grads_params": 3}


@dataclass
class Builder:
    """Values out of flags and into recipe fields, with a row for each and every problem kept."""

    line: CommandLine
    find_file: Callable[[str], tuple[str, str] | None] = lambda path: None
    """(text, place) of a file that a flag names; None if it is not here."""
    deepspeed: bool = False
    """Whether DeepSpeed trains: --deepspeed, or a ds_config at hand."""
    has_ds_config: bool = False
    """Whether it is at hand. Its keys are among the flags."""
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

    def one_of(self, *names: str) -> str:
        """`first`, of names of which Megatron takes one: one of the script may contradict one behind `--`."""
        found = [name for name in names if self.has(name) and self.line.flags[name].text not in ("0", "0.0")]
        if len(found) > 1:
            both = " and ".join(f"--{name}" for name in found)
            self.refuse(found[1], f"{both} are both set", "Megatron takes one of them", "remove one")
        return self.first(*found, *names)

    def value(self, name: str, default: T) -> T:
        """The flag's value, of the type of `default`; `default`, and a problem, where it has none that can be used."""
        given = self.line.flags.get(name)
        if given is None or len(given.values) == 1:
            return default if given is None else self.convert(given, given.values[0], default)
        self.refuse(name, f"{given.flag} has {len(given.values)} values", "it takes one", "write one, or --set it")
        return default

    def convert(self, given: Given, text: str, default: T) -> T:
        if isinstance(default, str):
            return text
        kind = "number" if isinstance(default, float) else "whole number"
        rule, remedy = f"it is a finite {kind} of at most {_LARGEST:,}", "write one"
        if "$" in text:
            names = [f"give it with --set {name}=VALUE, or " for name in unset_names(text)]
            rule, remedy = UNSET, f"{names[0] if names else ''}add {given.flag} VALUE after the script"
        with suppress(ArithmeticError):  # not a number, or one that no arithmetic can hold: 9e999999
            number = Decimal(text)  # also `3e9` and `1.0` for a whole number
            if number.is_finite() and abs(number) <= _LARGEST and (isinstance(default, float) or number == int(number)):
                return type(default)(number)
        self.problems.append(Problem(f"{given.flag} is {text[:60]}", rule, remedy, given.place))
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
        if "$" in result:
            kind, remark = "left out", f"complete it by hand, or --set {', '.join(unset_names(result))}: {UNSET}"
        if found:
            self.places[path] = f"{found[0].place} {found[0].flag}"
            self.rows += [Row(kind, given.flag, given.text, path, result, remark) for given in found]
        else:
            kind = "default" if kind == "mapped" else kind
            self.rows.append(Row(kind, "", "", path, result, remark or "Megatron's default"))

    def fill(self, which: str, otherwise: Any = None) -> None:
        """Set the fields of one of the tables. `otherwise`: a default that the table lacks."""
        for names, path, kind, *rest in FIELDS[which]:
            default = rest[0] if rest else None
            made = [(name, _CONVERTERS[kind](self, name)) for name in names.split() if self.has(name)]
            found = [(name, value) for name, value in made if value is not None]
            for name, value in found[1:]:
                if value != found[0][1]:
                    one, other = self.line.flags[name], self.line.flags[found[0][0]]
                    what = f"{one.flag} is {one.text} but {other.flag} is {other.text}"
                    self.refuse(name, what, "they mean the same, so they must agree", "make them equal")
            if not found and default == REQUIRED:
                flag, rule = names.split()[0], "Megatron needs it, or takes a value that depends on the machines"
                self.refuse("", f"--{flag} is missing", rule, f"add --{flag} VALUE")
            without = 1 if default == REQUIRED else otherwise if default is None else default
            value = found[0][1] if found else without
            if value is not None:
                self.put(path, value, *(name for name, _ in found))

    def note(self, kind: Kind, name: str, remark: str, value: str | None = None) -> None:
        """A row without a field, where the flag is given: it is not needed, or means something else here."""
        if given := self.line.flags.get(name):
            self.rows.append(Row(kind, given.flag, given.text if value is None else value, remark=remark))

    def refuse(self, name: str, what: str, rule: str, remedy: str = "remove it, if that is the training") -> None:
        given = self.line.flags.get(name) or next(iter(self.line.flags.values()), None)
        self.problems.append(Problem(what, rule, remedy, given.place if given else "command line"))


def unset_names(text: str) -> list[str]:
    """The variables and arguments of a script in a text that have no value."""
    return re.findall(r"\$\{?([A-Za-z_][A-Za-z0-9_]*|[0-9])", text)


def _ramp(b: Builder, name: str) -> dict[str, int] | None:
    given = b.line.flags[name]
    if len(given.values) != 3:
        b.refuse(name, f"--{name} has {len(given.values)} values", "it takes START INCREMENT SAMPLES", "give three")
        return None
    start, increment, samples = (b.convert(given, text, 1) for text in given.values)
    return {"start": start, "increment": increment, "samples": samples}


def _skipped_steps(b: Builder, name: str) -> list[str]:
    """Megatron counts from 0, we from 1."""
    given = b.line.flags[name]
    steps = sorted({b.convert(given, text, 0) + 1 for text in given.values})
    return [f"{step}-{step} steps" for step in steps]


def _exit_after(b: Builder, name: str) -> str | None:
    minutes = b.value(name, 0)
    return str(Duration(minutes * 60)) if minutes and minutes * 60 <= LONGEST_SECONDS else None


def _chunks(b: Builder, name: str) -> int | None:
    count = b.value(name, 0)
    if count and name.startswith("num-layers"):
        count = b.raw["model"]["num_layers"] // max(1, b.raw["parallel"]["pp"] * count)
    return count or None


def _offload(b: Builder, name: str) -> bool:
    given = b.line.flags[name]
    if given.text == "nvme":
        b.refuse(name, f"{given.flag} is nvme", "optimizer state leaves the device for host memory only", 'use "cpu"')
    return given.text not in ("none", "false")


def _sharding(b: Builder, _: str) -> Any:
    """The ZeRO stage without DeepSpeed."""
    if b.has("use-torch-fsdp2"):
        return 2 if b.has("torch-fsdp2-no-reshard-after-forward") else 3
    if b.has("use-megatron-fsdp", "use-custom-fsdp"):
        name = b.value("data-parallel-sharding-strategy", "no_shard")
        return _SHARDING.get(name, name)  # the recipe's rules refuse another
    return 1


_CONVERTERS: dict[str, Callable[[Builder, str], Any]] = {
    "int": lambda b, name: b.value(name, 1),
    "float": lambda b, name: b.value(name, 1.0),
    "stage": lambda b, name: max(b.value(name, 0), int(b.has("bf16"))),
    "str": lambda b, name: b.value(name, ""),
    "folder": lambda b, name: None if (path := b.value(name, "")).endswith(".model") else path,
    "lower": lambda b, name: b.value(name, "").lower(),
    "amount": lambda b, name: _amount(b, name),
    "steps": lambda b, name: f"{b.value(name, 1)} steps",
    "seconds": lambda b, name: f"{b.value(name, 1)}s",
    "phases": lambda b, name: [{"every": f"{every} steps"}] if (every := b.value(name, 0)) else None,
    "set": lambda b, name: True,
    "unset": lambda b, name: False,
    "bool": lambda b, name: {"true": True, "false": False}.get(text := b.line.flags[name].text, text),
    "optimizer": lambda b, name: {"adam": "adamw", "fusedadamw": "adamw"}.get(found := b.value(name, ""), found),
    "recompute": lambda b, name: (
        {"recompute-activations": "selective", "checkpoint-activations": "full"}.get(name) or b.value(name, "")
    ),
    "chunks": _chunks,
    "offload": _offload,
    "power": lambda b, name: 2.0**power if abs(power := b.value(name, 0)) < 1000 else math.inf,
    "sharding": _sharding,
    "ramp": _ramp,
    "ranges": lambda b, name: [f"{text} steps" for text in b.line.flags[name].values],
    "skips": _skipped_steps,
    "minutes": _exit_after,
}


def fill(b: Builder) -> None:
    """Every section but `data`; problems and rows are in the builder."""
    b.fill("always")
    _model(b)
    _tokenizer(b)
    _optimizer(b)
    _schedule(b)
    _length(b)
    _precision(b)
    if b.raw["parallel"].get("chunks", 1) > 1:
        b.put("parallel.schedule", "interleaved", "num-layers-per-virtual-pipeline-stage")
    if b.deepspeed:  # its bf16 optimizer shards the optimizer state at stage 0
        b.fill("deepspeed", int(b.has("bf16")) if b.has_ds_config else 1)
        stages = [b.line.flags[name].text for name in ("zero-stage", "ds:zero_optimization.stage") if b.has(name)]
        if b.has("bf16") and {*stages} == {"0", "1"}:
            what = f"--zero-stage is {stages[0]} but that of the ds_config is {stages[1]}"
            b.refuse("zero-stage", what, "they mean the same, so they must agree", "make them equal")
    else:
        b.fill("no deepspeed")


def _model(b: Builder) -> None:
    """What is left of `model`."""
    family, model = _family(b), b.raw["model"]
    b.put("model.family", family.name, *_FAMILY)
    is_exact = b.has("no-bias-gelu-fusion") and not b.has("openai-gelu")
    if family.activation != "silu" and is_exact is not (family.activation == "gelu"):
        flag = "--no-bias-gelu-fusion" if is_exact else ""
        remark = f"Megatron's GELU is exact with --no-bias-gelu-fusion, else the tanh form; here {family.activation}"
        b.rows.append(Row("differs", flag, "", "model.family", family.name, remark))
    if family.encoder and b.has(POST_NORM):
        b.note("mapped", POST_NORM, "bert normalises after each layer")
    elif family.encoder:
        remark = f"Megatron's BERT normalises before each layer without --{POST_NORM}; here it does after it"
        b.rows.append(Row("differs", "", "", "model.family", family.name, remark))
    if family.positions == "rotary":
        b.fill("rotary")
    if family.gated and "ffn_hidden_size" not in model:
        b.put("model.ffn_hidden_size", 4 * model["hidden_size"] * 2 // 3 // 64 * 64)
    if (channels := b.value("kv-channels", 0)) and channels * model["num_heads"] != model["hidden_size"]:
        b.put("model.head_dim", channels, "kv-channels")
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
    kind = b.value("position-embedding-type", "absolute").lower().removeprefix("learned_")
    norm = b.value("normalization", "LayerNorm").lower()
    asked = {
        "rotary": b.has("use-rotary-position-embeddings") or kind in ("rope", "rotary"),
        "alibi": b.has("use-alibi-position-embeddings") or kind == "alibi",
    }
    positions = [name for name, is_set in asked.items() if is_set] or ["no" * b.has("no-position-embedding") or kind]
    is_encoder = any(family.encoder and name in program for name, family in FAMILIES.items())
    facts = {
        "encoder": is_encoder,
        "positions": "learned" if positions == ["absolute"] else " and ".join(positions),
        "norm": {"layernorm": "layer", "rmsnorm": "rms"}.get(norm, norm),
        "gated": b.has("swiglu"),
        "bias": not b.has("disable-bias-linear"),
        "qkv_bias": b.has("add-qkv-bias") or not b.has("disable-bias-linear"),
        "qk_norm": b.has("qk-layernorm"),
        "embedding_norm": is_encoder or b.has("embed-layernorm"),
    }
    found = [family for family in FAMILIES.values() if all(getattr(family, fact) == facts[fact] for fact in facts)]
    if not found:
        shown = ", ".join(f"{name}: {value}" for name, value in facts.items())
        b.refuse(b.first(*_FAMILY), f"the model has {shown}", _FAMILIES, "add what is missing, or remove it")
    return (found or [*FAMILIES.values()])[0]


def _tokenizer(b: Builder) -> None:
    is_encoder = FAMILIES[b.raw["model"]["family"]].encoder
    kind = b.value("tokenizer-type", "BertWordPieceLowerCase" if is_encoder else "GPT2BPETokenizer")
    flag, file = b.first("pad-vocab-size-to", "padded-vocab-size", "vocab-size"), b.value("vocab-file", "")
    size, remark = _VOCABULARIES.get(kind), f"of every {kind}; check it if the vocabulary is your own"
    if b.has(flag):
        is_null = flag == "vocab-size" and kind == "NullTokenizer"
        size, remark = b.value(flag, 1) + is_null, "NullTokenizer adds an end of document" if is_null else ""
    else:
        with suppress(ValueError, TypeError, RecipeError):  # it is no vocabulary, or cannot be read
            if found := b.find_file(file):
                size = len(parse_json(found[0]) if file.endswith(".json") else found[0].splitlines())
                remark = "counted in --vocab-file"
    if size is None:
        remedy = "add --vocab-size N (entries of the tokenizer) to the command line"
        b.refuse("tokenizer-type", f"the vocabulary of {kind} is not on the command line", "", remedy)
    b.put("model.vocab_size", size or 1, flag, remark=remark)
    elsewhere = "a SentencePiece file; a recipe has a folder with a tokenizer.json"
    b.note("left out", "tokenizer-model" if "tokenizer" not in b.raw else "", elsewhere)
    if "tokenizer" not in b.raw and file:
        folder = file.rpartition("/")[0] or (file if "$" in file else ".")
        remark = "a folder with a tokenizer.json, or with vocab.json and merges.txt"
        b.put("tokenizer.path", folder, "vocab-file", "merge-file", remark=remark)


def _optimizer(b: Builder) -> None:
    betas = [b.value("adam-beta1", 0.9), b.value("adam-beta2", 0.999)]
    b.put("optimizer.betas", betas, "adam-beta1", "adam-beta2")
    clip = b.raw["optimizer"]["clip_grad_norm"] = b.raw["optimizer"]["clip_grad_norm"] or None
    if clip and b.has_ds_config and not b.has("ds:gradient_clipping"):
        remark = "DeepSpeed clips by the gradient_clipping of ds_config: without, it would not clip"
        b.rows.append(Row("differs", "ds_config", "", "optimizer.clip_grad_norm", str(clip), remark))


def _schedule(b: Builder) -> None:
    """`lr`, but its peak and schedule."""
    style = b.raw["lr"]["schedule"]
    length = b.first("train-samples", "train-iters", "train-tokens")
    flag = b.first("lr-decay-tokens", "lr-decay-samples", "lr-decay-iters", length)
    if style != "constant":
        b.fill("decay")
        b.put("lr.decay", _amount(b, flag if b.has(flag) else length), *([] if flag == length else [flag]))
    _warmup(b, style, b.first("lr-decay-samples", "lr-decay-iters", length))
    if style == "wsd":
        b.fill("wsd")
        if (shape := b.value("lr-wsd-decay-style", "exponential")) != "linear":
            what, remedy = f"--lr-wsd-decay-style is {shape}", "use --lr-wsd-decay-style linear"
            b.refuse("lr-wsd-decay-style", what, "it is linear here", remedy)


def _amount(b: Builder, flag: str) -> str:
    return f"{b.value(flag, 0)} {_unit(flag)}"


def _unit(flag: str) -> str:
    return {"samples": "samples", "tokens": "tokens"}.get(flag.rpartition("-")[2], "steps")


def _warmup(b: Builder, style: str, decay: str) -> None:
    """`decay`: the flag of the length that a fraction is of."""
    flag, kind, remark = "lr-warmup-tokens", "mapped", ""  # which overrules the others
    if not b.value(flag, 0):
        flag = b.one_of("lr-warmup-samples", "lr-warmup-iters", "lr-warmup-fraction")
    if flag == "lr-warmup-fraction":  # Megatron counts samples, and so a fraction of a step is exact
        fraction, unit, total = b.value(flag, 0.0), _unit(decay), b.value(decay, 1)
        unit, total = ("samples", total * b.raw["batch"]["global_batch_size"]) if unit == "steps" else (unit, total)
        amount, remark = f"{int(round(fraction * total, 6))} {unit}", f"{fraction:g} of the decay"
    else:
        amount = _amount(b, flag)
    if flag == "lr-warmup-tokens" and style != "constant" and not b.has("lr-decay-tokens"):
        kind = "differs"
        remark = "the decay begins with its end; in Megatron, without --lr-decay-tokens, as if there were no warm-up"
    b.put("lr.warmup", amount, flag, kind=kind, remark=remark)  # type: ignore[arg-type]


def _length(b: Builder) -> None:
    """`train.for`."""
    flag = b.first(b.one_of("train-samples", "train-iters"), "train-tokens")
    if not b.has(flag):
        b.refuse("", "--train-samples is missing", "a training has a length", "add --train-samples or --train-iters")
    count, batch = b.value(flag, 1), b.raw["batch"]["global_batch_size"] if flag == "train-iters" else 1
    total = count * batch * b.raw["model"]["seq_length"]
    if flag != "train-tokens" and b.has("train-tokens") and not b.has(*_BIGSCIENCE):
        flag = "train-tokens" if b.value("train-tokens", 1) < total else flag
    b.put("train.for", f"{b.value(flag, 1)} {_unit(flag)}", flag)
    if flag != "train-tokens":
        remark = f"--{flag} ends the training first, or BigScience's Megatron-DeepSpeed never uses it"
        b.note("not needed", "train-tokens", remark)


def _precision(b: Builder) -> None:
    b.one_of("fp16", "bf16")
    for name in ("fp16", "bf16"):
        key = f"ds:{name}.enabled"
        if b.has(key) and b.line.flags[key].text != str(b.has(name)).lower():
            flag = f"--{name}" if b.has(name) else f"no --{name}"
            what = f"ds_config {name}.enabled is {b.line.flags[key].text} but the command line has {flag}"
            b.refuse(key, what, "DeepSpeed asserts that the two agree, or takes one of them", "make them equal")
    fp8 = [name for name in ("fp8-format", "fp8-hybrid", "fp8-e4m3", "fp8-e5m2") if b.has(name)]
    precision = "fp8" if fp8 else "bf16" if b.has("bf16") else "fp16" if b.has("fp16") else "fp32"
    is_hybrid = not b.has("fp8-e4m3", "fp8-e5m2") and b.value("fp8-format", "hybrid") == "hybrid"
    names = (*fp8, "fp16", "bf16", "ds:fp16.enabled", "ds:bf16.enabled")
    b.put("precision", precision, *names, kind="mapped" if is_hybrid else "differs", remark="" if is_hybrid else _FP8)
    for name in (name for name in b.line.flags if fp8 and "fp8-" in name and name not in fp8):
        b.note("differs", name, _FP8)
    if precision == "fp16":
        b.fill("deepspeed fp16" if b.deepspeed else "fp16")
        if b.has("loss-scale") and not b.deepspeed:
            b.refuse("loss-scale", "--loss-scale is a fixed scale", "the scale is dynamic here", "remove it")
