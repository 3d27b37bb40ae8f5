"""What the flags become in a recipe. Defaults are Megatron's, written out where ours differ.

Data, launch and length: sections.py. Flags that are a field of their own: FIELDS of flags.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from bloomery.base.bounded import LARGE_BYTES, parse_json, read_text
from bloomery.interop.megatron.builder import Builder, steps
from bloomery.interop.megatron.ds_config import DsConfig
from bloomery.interop.megatron.flags import FIELDS, REQUIRED, is_known

_KINDS: dict[str, Callable[[str], Any]] = {"int": int, "float": float, "str": str, "lower": str.lower, "steps": steps}
_VOCABULARIES = {"GPT2BPETokenizer": 50257, "BertWordPieceLowerCase": 30522, "BertWordPieceCase": 28996}
_OTHER_PROGRAMS = {"t5", "ict", "realm", "vision", "vlm", "mamba", "hybrid", "retro", "prefix", "rl"}
_FAMILY = (
    "position-embedding-type", "use-rotary-position-embeddings", "use-alibi-position-embeddings", "embed-layernorm",
    "normalization", "swiglu", "disable-bias-linear",
)  # fmt: skip
_LOSS_SCALE = ("loss-scale", "initial-loss-scale", "loss-scale-window", "hysteresis", "min-loss-scale")
_SHARDING = {"no_shard": 0, "optim": 1, "optim_grads": 2, "optim_grads_params": 3}
BF16_SHARDS = "DeepSpeed's bf16 optimizer shards the optimizer state at stage 0"


def fill_fields(b: Builder) -> None:
    """The flags that are a field of their own."""
    for names, path, kind, default in FIELDS:
        flag = b.first(*names.split())
        if default is REQUIRED:
            default = 1
            if not b.has(flag):
                rule = "Megatron needs it, or takes a value that depends on the machines"
                b.problem(None, f"--{flag} is missing", rule, f"add --{flag} VALUE")
        elif default is None and not b.has(flag):
            continue
        if kind in ("true", "false"):
            b.put(path, kind == "true", flag)
        else:
            default = f"{default} steps" if kind == "steps" else default
            b.put(path, b.value(flag, _KINDS[kind], default), flag)


def fill_model(b: Builder) -> str:
    """What is left of `model` and `tokenizer`; the family."""
    family, model = _family(b), b.raw["model"]
    remark = ""
    if family == "bert" and not (b.has("no-bias-gelu-fusion") and not b.has("openai-gelu")):
        remark = "Megatron's fused GELU is the tanh form, bert's is exact"
    b.put("model.family", family, *_FAMILY, kind="differs" if remark else "mapped", remark=remark)
    exact = family in ("gpt2", "bloom") and not b.has("openai-gelu")
    remark = "Megatron then computes the exact GELU, ours is its tanh form" if exact else "a choice of kernels"
    b.note("differs" if exact else "not needed", "no-bias-gelu-fusion", remark)
    different = family in ("gpt2", "bert") and b.value("max-position-embeddings", int, 0) != model["seq_length"]
    remark = "positions are as many as the sequence has tokens"
    b.note("differs" if different else "not needed", "max-position-embeddings", remark, path="model.seq_length")
    if family == "llama" and not b.has("ffn-hidden-size"):
        width = 4 * model["hidden_size"] * 2 // 3 // 64 * 64
        b.put("model.ffn_hidden_size", width, remark="Megatron's default with --swiglu: 8/3 of the hidden size")
    channels = b.value("kv-channels", int, 0)
    if channels and channels * model["num_heads"] != model["hidden_size"]:
        b.refuse("kv-channels", f"--kv-channels is {channels}", "a head is hidden-size / num-attention-heads wide here")
    hidden, attention = b.value("hidden-dropout", float, 0.1), b.value("attention-dropout", float, 0.1)
    if hidden != attention:
        what = f"--hidden-dropout is {hidden} and --attention-dropout is {attention}"
        b.refuse(b.first("hidden-dropout"), what, "a recipe has one dropout for both", "make them equal")
    b.put("model.dropout", hidden, "hidden-dropout", "attention-dropout")
    if b.has("group-query-attention") and not b.has("num-key-value-heads"):
        groups = b.value("num-query-groups", int, 1)
        b.put("model.num_kv_heads", groups, "num-query-groups", "group-query-attention")
    untied = b.has("untie-embeddings-and-output-weights")
    if untied or family == "llama":
        b.put("model.tie_embeddings", not untied, "untie-embeddings-and-output-weights")
    if family == "llama":
        theta = b.first("rotary-base", "rotary-position-embeddings-theta")
        b.put("model.rope_theta", b.value(theta, float, 10000.0), theta)
    _tokenizer(b, family)
    return family


def _family(b: Builder) -> str:
    program = b.line.program.rpartition("/")[2]
    if _OTHER_PROGRAMS & set(program.removesuffix(".py").split("_")):
        rule = "the families here are gpt2, bloom, llama (pretrain_gpt.py) and bert (pretrain_bert.py)"
        b.problem(None, f"the program is {program}", rule, "import the script of one of these")
    positions = b.value("position-embedding-type", str, "absolute").lower()
    norm = b.value("normalization", str, "layernorm").lower()  # Microsoft's Megatron-DeepSpeed writes it in small letters
    rotary = b.has("use-rotary-position-embeddings") or positions in ("rope", "rotary")
    alibi = b.has("use-alibi-position-embeddings") or positions == "alibi"
    wanted = {
        "rotary positions": rotary, "--normalization RMSNorm": norm == "rmsnorm",
        "--swiglu": b.has("swiglu"), "--disable-bias-linear": b.has("disable-bias-linear"),
    }  # fmt: skip
    if "bert" in program:
        return "bert"
    if norm not in ("layernorm", "rmsnorm"):
        b.refuse("normalization", f"--normalization is {norm!r}", "it is LayerNorm or RMSNorm", "use one of them")
    elif any(wanted.values()) and not all(wanted.values()):
        has = ", ".join(name for name, is_set in wanted.items() if is_set)
        lacks = ", ".join(name for name, is_set in wanted.items() if not is_set)
        rule = "of the families here only llama has these, and it has all of them"
        b.refuse(b.first(*_FAMILY), f"{has} without {lacks}", rule, "add what is missing, if that is the model")
    elif alibi != b.has("embed-layernorm"):
        what = "alibi without --embed-layernorm" if alibi else "--embed-layernorm without alibi"
        rule = "bloom has both ALiBi and the norm after the embedding; no other family has either"
        b.refuse(b.first(*_FAMILY), what, rule, "add the other, or remove it")
    elif not rotary and positions not in ("absolute", "learned_absolute", "alibi"):
        what, rule = f"--position-embedding-type is {positions}", "it is absolute, rope or alibi here"
        b.refuse("position-embedding-type", what, rule, "use one of them")
    elif b.has("no-position-embedding") and not alibi and not rotary:
        rule = "every family here knows the places of its tokens"
        b.refuse("no-position-embedding", "--no-position-embedding is set", rule, "use rope or alibi")
    if b.value("rotary-percent", float, 1.0) != 1.0:
        b.refuse("rotary-percent", "--rotary-percent is not 1", "positions turn the whole head here")
    return "llama" if rotary or norm == "rmsnorm" else "bloom" if alibi else "gpt2"


def _tokenizer(b: Builder, family: str) -> None:
    kind = b.value("tokenizer-type", str, "BertWordPieceLowerCase" if family == "bert" else "GPT2BPETokenizer")
    padded, vocab = b.first("pad-vocab-size-to", "padded-vocab-size"), b.given("vocab-file")
    if b.has(padded):
        remark = "the row count that is pinned, whatever the layout"
        b.put("model.vocab_size", b.value(padded, int, 1), padded, remark=remark)
    elif b.has("vocab-size"):
        extra = int(kind == "NullTokenizer")
        remark = "NullTokenizer adds an end of document" if extra else ""
        b.put("model.vocab_size", b.value("vocab-size", int, 1) + extra, "vocab-size", remark=remark)
    else:
        counted = _count_vocabulary(vocab.text) if vocab else None
        size = counted or _VOCABULARIES.get(kind)
        if size is None:
            remedy = "add --vocab-size N (entries of the tokenizer) behind the command line"
            b.refuse("tokenizer-type", f"the vocabulary of {kind} is not on the command line", "", remedy)
        remark = "counted in --vocab-file" if counted else f"of every {kind}; check it if the vocabulary is your own"
        b.put("model.vocab_size", size or 1, remark=remark)
    path = b.first("tokenizer-name-or-path", "tokenizer-model")
    if (given := b.given(path)) is not None:
        is_file = given.text.endswith(".model")
        remark = "a SentencePiece file; a recipe has a folder with a tokenizer.json" if is_file else ""
        b.put("tokenizer.path", given.text, path, kind="left out" if is_file else "mapped", remark=remark)
    elif vocab and vocab.text:
        folder = vocab.text.rpartition("/")[0] or ("." if is_known(vocab.text) else vocab.text)
        remark = "a folder with a tokenizer.json, or with vocab.json and merges.txt"
        b.put("tokenizer.path", folder, "vocab-file", "merge-file", remark=remark)


def _count_vocabulary(path: str) -> int | None:
    try:
        text = read_text(path, LARGE_BYTES)
        return len(parse_json(text)) if path.endswith(".json") else len(text.splitlines())
    except (OSError, ValueError, TypeError):
        return None


def fill_optimizer(b: Builder, ds: DsConfig | None) -> None:
    name = b.value("optimizer", str, "adam")
    remark = "Megatron's adam decays weights the way AdamW does"
    b.put("optimizer.name", "adamw" if name in ("adam", "fusedadamw") else name, "optimizer", remark=remark)
    betas = [b.value("adam-beta1", float, 0.9), b.value("adam-beta2", float, 0.999)]
    b.put("optimizer.betas", betas, "adam-beta1", "adam-beta2")
    path, clip = "optimizer.clip_grad_norm", b.value("clip-grad", float, 1.0)
    if ds is not None and ds.get("gradient_clipping") is None:
        remark = "DeepSpeed clips where ds_config says gradient_clipping, and it does not: it would not clip at all"
        b.put(path, clip or None, "clip-grad", kind="differs" if clip else "mapped", remark=remark)
    elif ds is not None and not b.has("clip-grad"):
        remark = "ds_config gradient_clipping: DeepSpeed clips, not Megatron, whose default is 1.0"
        b.put(path, float(ds.get("gradient_clipping")) or None, kind="mapped", remark=remark)
    else:
        b.put(path, clip or None, "clip-grad")


def fill_precision(b: Builder, ds: DsConfig | None) -> None:
    if b.has("fp16") and b.has("bf16"):
        b.refuse("bf16", "--fp16 and --bf16 are both set", "there is one precision", "remove one")
    fp8 = [name for name in ("fp8-format", "fp8-hybrid", "fp8-e4m3", "fp8-e5m2") if b.has(name)]
    precision = "fp8" if fp8 else "bf16" if b.has("bf16") else "fp16" if b.has("fp16") else "fp32"
    b.put("precision", precision, *fp8, "fp16", "bf16")
    if precision != "fp16" or b.deepspeed:
        why = "DeepSpeed owns the loss scale: ds_config says it" if precision == "fp16" else ""
        for name in _LOSS_SCALE:
            b.note("not needed", name, why or f"{precision} does not scale its loss")
    if precision == "fp16" and b.deepspeed:
        remark = "ds_config fp16" if ds is not None else "of the ds_config, which is not here: check it"
        scale = {"initial": 65536.0, "window": "1000 steps", "hysteresis": 2, "min": 1.0}
        b.put("loss_scale", ds.loss_scale() if ds is not None else scale, kind="mapped", remark=remark)
        b.places["loss_scale"] = ds.place if ds is not None else "ds_config"
    elif precision == "fp16":
        if b.has("loss-scale"):
            b.refuse("loss-scale", "--loss-scale is a fixed scale", "the scale is dynamic here", "remove it")
        scale = {
            "initial": b.value("initial-loss-scale", float, 2.0**32),
            "window": b.value("loss-scale-window", steps, "1000 steps"),
            "hysteresis": b.value("hysteresis", int, 2),
            "min": b.value("min-loss-scale", float, 1.0),
        }
        b.put("loss_scale", scale, *_LOSS_SCALE[1:])


def fill_parallel(b: Builder, ds: DsConfig | None) -> None:
    _zero(b, ds)
    flag = b.first("num-layers-per-virtual-pipeline-stage", "num-virtual-stages-per-pipeline-rank")
    if count := b.value(flag, int, 0):
        per_rank = b.raw["model"]["num_layers"] // max(1, b.raw["parallel"]["pp"] * count)
        chunks = per_rank if flag.startswith("num-layers") else count
        b.put("parallel.chunks", chunks, flag)
        if chunks > 1:
            b.put("parallel.schedule", "interleaved", flag)
    granularity = b.first("recompute-activations", "recompute-granularity", "checkpoint-activations")
    recompute = {"recompute-activations": "selective", "checkpoint-activations": "full"}.get(granularity, "")
    recompute = recompute if b.has(granularity) else "none"
    remark = "without --checkpoint-activations nothing is recomputed" if recompute == "none" else ""
    recompute = recompute or b.value("recompute-granularity", str, "none")
    b.put("parallel.recompute", recompute, granularity, "deepspeed-activation-checkpointing", remark=remark)
    offload = b.first("cpu-optimizer", "optimizer-cpu-offload")
    if b.has(offload) or (ds is not None and ds.offload):
        b.put("parallel.offload", True, offload, kind="mapped", remark="" if b.has(offload) else "ds_config offload")
    b.note("differs", "remote-device", "weights stay on the device")


def _zero(b: Builder, ds: DsConfig | None) -> None:
    fsdp = b.first("use-torch-fsdp2", "use-megatron-fsdp", "use-custom-fsdp")
    if b.deepspeed:
        stage, remark = 1, "check it: of the ds_config, which is not here"
        if ds is not None:
            stage, remark = ds.get("zero_optimization.stage") or 0, "ds_config zero_optimization.stage"
            if ds.get("zero_optimization.stage") is None:
                remark = "DeepSpeed's default: ds_config does not say zero_optimization.stage"
            b.places["parallel.zero"] = ds.place
        if b.has("zero-stage"):
            stage, remark = b.value("zero-stage", int, 1), ""
        if stage == 0 and b.has("bf16"):
            stage, remark = 1, BF16_SHARDS
        b.put("parallel.zero", stage, "zero-stage", remark=remark)
    elif not b.has(fsdp):
        b.put("parallel.zero", int(b.has("use-distributed-optimizer")), "use-distributed-optimizer")
    elif fsdp == "use-torch-fsdp2":
        keeps = "torch-fsdp2-no-reshard-after-forward"
        b.put("parallel.zero", 2 if b.has(keeps) else 3, fsdp, keeps)
    else:
        flag = "data-parallel-sharding-strategy"
        name = b.value(flag, str, "no_shard")
        if name not in _SHARDING:
            b.refuse(flag, f"--{flag} is {name}", f"it is one of {', '.join(_SHARDING)}", "use one of them")
        b.put("parallel.zero", _SHARDING.get(name, 0), fsdp, flag)
