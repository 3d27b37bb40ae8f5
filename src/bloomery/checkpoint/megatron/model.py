"""Megatron's flags of the architecture and the tokenizer."""

from __future__ import annotations

import json

from bloomery.checkpoint.megatron.builder import Builder
from bloomery.checkpoint.megatron.shell_expand import is_known

_VOCABULARIES = {"GPT2BPETokenizer": 50257, "BertWordPieceLowerCase": 30522, "BertWordPieceCase": 28996}
_ROTARY = ("swiglu", "disable-bias-linear")


def fill_model(b: Builder) -> str:
    """The `model` section without its vocabulary; the family."""
    family = _family(b)
    b.put("model.family", family, *_family_flags(b))
    sizes = (("num-layers", "num_layers"), ("hidden-size", "hidden_size"), ("num-attention-heads", "num_heads"))
    for flag, name in (*sizes, ("seq-length", "seq_length")):
        if b.given(flag) is None:
            b.problem(None, f"--{flag} is missing", "Megatron requires it", f"add --{flag} N")
        b.put(f"model.{name}", b.value(flag, int, 1), flag)
    positions, length = b.value("max-position-embeddings", int, 0), b.raw["model"]["seq_length"]
    if positions:
        remark = "positions are as many as the sequence has tokens"
        different = positions != length and family in ("gpt2", "bert")
        b.tell("differs" if different else "not needed", "max-position-embeddings", remark, path="model.seq_length")
    if b.given("ffn-hidden-size") is not None:
        b.put("model.ffn_hidden_size", b.value("ffn-hidden-size", int, 1), "ffn-hidden-size")
    elif family == "llama":
        _llama_width(b)
    hidden, heads = b.raw["model"]["hidden_size"], b.raw["model"]["num_heads"]
    channels = b.given("kv-channels")
    if channels is not None and b.value("kv-channels", int, 0) * heads != hidden:
        b.problem(
            channels, f"--kv-channels is {channels.text}", "a head is hidden-size / num-attention-heads wide here"
        )
    elif channels is not None:
        b.tell("not needed", "kv-channels", "hidden-size / num-attention-heads already says it")
    _dropout(b)
    b.put("model.init_std", b.value("init-method-std", float, 0.02), "init-method-std")
    eps = "norm-epsilon" if b.has("norm-epsilon") else "layernorm-epsilon"
    b.put("model.norm_eps", b.value(eps, float, 1e-5), eps)
    if b.has("no-bias-gelu-fusion") and family in ("gpt2", "bloom"):
        b.tell("differs", "no-bias-gelu-fusion", "Megatron then computes the exact GELU, ours is its tanh form")
    elif family == "bert" and not b.has("no-bias-gelu-fusion"):
        b.put("model.family", family, kind="differs", remark="Megatron's fused GELU is the tanh form, bert's is exact")
    elif b.has("no-bias-gelu-fusion"):
        b.tell("not needed", "no-bias-gelu-fusion", "a choice of kernels")
    for flag in ("apply-residual-connection-post-layernorm", "squared-relu"):
        if b.has(flag):
            b.problem(b.given(flag), f"--{flag} is set", "no family here computes that", "remove it")
    return family


def _family(b: Builder) -> str:
    positions = b.value("position-embedding-type", str, "absolute")
    rotary = b.has("use-rotary-position-embeddings") or positions == "rope"
    alibi, norm = positions == "alibi", b.has("embed-layernorm")
    given = b.given("position-embedding-type") or b.given("embed-layernorm")
    if "bert" in b.line.program.rpartition("/")[2]:
        return "bert"
    if rotary or b.value("normalization", str, "LayerNorm") == "RMSNorm":
        lacking = [f"--{flag}" for flag in _ROTARY if not b.has(flag)]
        lacking += ["--normalization RMSNorm"] if b.value("normalization", str, "") != "RMSNorm" else []
        lacking += [] if rotary else ["--position-embedding-type rope"]
        if lacking:
            rule = "of the families here only llama has it, with gated SiLU, RMSNorm and no biases"
            b.problem(given, f"{', '.join(lacking)} missing for a model with rotary positions or RMSNorm", rule)
        if b.value("rotary-percent", float, 1.0) != 1.0:
            b.problem(b.given("rotary-percent"), "--rotary-percent is not 1", "positions turn the whole head here")
        return "llama"
    for flag in _ROTARY:
        if b.has(flag):
            b.problem(b.given(flag), f"--{flag} without rotary positions", "only llama has it", "remove it")
    if alibi != norm:
        has, lacks = ("alibi", "--embed-layernorm") if alibi else ("--embed-layernorm", "alibi")
        rule = "bloom has both ALiBi and the norm after the embedding; no other family has either"
        b.problem(given, f"{has} without {lacks}", rule, "add the other, or remove it")
    elif positions not in ("absolute", "learned_absolute", "alibi"):
        b.problem(given, f"--position-embedding-type is {positions}", "it is absolute, rope or alibi here")
    return "bloom" if alibi else "gpt2"


def _family_flags(b: Builder) -> list[str]:
    names = ("position-embedding-type", "embed-layernorm", "use-rotary-position-embeddings", "normalization", *_ROTARY)
    return [name for name in names if f"--{name}" in b.line.flags]


def _llama_width(b: Builder) -> None:
    width = 4 * b.raw["model"]["hidden_size"]
    width = width * 2 // 3 // 64 * 64
    b.put("model.ffn_hidden_size", width, remark="Megatron's default with --swiglu: 8/3 of the hidden size")


def _dropout(b: Builder) -> None:
    hidden, attention = b.value("hidden-dropout", float, 0.1), b.value("attention-dropout", float, 0.1)
    if hidden != attention:
        given = b.given("hidden-dropout") or b.given("attention-dropout")
        what = f"--hidden-dropout is {hidden} and --attention-dropout is {attention}"
        b.problem(given, what, "a recipe has one dropout for both", "make them equal")
    b.put("model.dropout", hidden, "hidden-dropout", "attention-dropout")
    grouped, groups = b.has("group-query-attention"), b.value("num-query-groups", int, 1)
    if grouped:
        b.put("model.num_kv_heads", groups, "num-query-groups", "group-query-attention")
    if b.raw["model"]["family"] == "llama":
        untied = b.has("untie-embeddings-and-output-weights")
        b.put("model.tie_embeddings", not untied, "untie-embeddings-and-output-weights")
        b.put("model.rope_theta", b.value("rotary-base", float, 10000.0), "rotary-base")
    elif b.has("untie-embeddings-and-output-weights"):
        b.put("model.tie_embeddings", False, "untie-embeddings-and-output-weights")


def fill_tokenizer(b: Builder, family: str) -> None:
    multiple = b.value("make-vocab-size-divisible-by", int, 128)
    if multiple != 128:
        b.put("model.vocab_multiple", multiple, "make-vocab-size-divisible-by")
    elif b.has("make-vocab-size-divisible-by"):
        b.tell("not needed", "make-vocab-size-divisible-by", "model.vocab_multiple is 128 anyway")
    default = "BertWordPieceLowerCase" if family == "bert" else "GPT2BPETokenizer"
    kind = b.value("tokenizer-type", str, default)
    for flag in ("pad-vocab-size-to", "vocab-size"):
        if b.given(flag) is not None:
            remark = "the row count that is pinned, whatever the layout" if flag.startswith("pad") else ""
            b.put("model.vocab_size", b.value(flag, int, 1), flag, remark=remark)
            break
    else:
        counted = _count_vocabulary(b.text("vocab-file"))
        size = counted or _VOCABULARIES.get(kind)
        if size is None:
            remedy = "add --vocab-size N (entries of the tokenizer) behind the command line"
            b.problem(b.given("tokenizer-type"), f"the vocabulary of {kind} is not on the command line", "", remedy)
        remark = "counted in --vocab-file" if counted else f"of every {kind}; check it if the vocabulary is your own"
        b.put("model.vocab_size", size or 1, remark=remark)
    path, vocab = b.text("tokenizer-name-or-path") or b.text("tokenizer-model"), b.text("vocab-file")
    if path:
        b.put("tokenizer.path", path, "tokenizer-name-or-path", "tokenizer-model")
    elif vocab:
        folder = vocab.rpartition("/")[0] or "."
        remark = "a folder with a tokenizer.json, or with vocab.json and merges.txt"
        b.put("tokenizer.path", folder, "vocab-file", "merge-file", remark=remark)
    if b.has("tokenizer-type"):
        b.tell("not needed", "tokenizer-type", "the folder says which tokenizer it is", path="tokenizer.path")
    b.has("merge-file")


def _count_vocabulary(path: str | None) -> int | None:
    if path is None or not is_known(path):
        return None
    try:
        with open(path, encoding="utf-8") as file:
            text = file.read()
        return len(json.loads(text)) if path.endswith(".json") else len(text.splitlines())
    except (OSError, ValueError):
        return None
