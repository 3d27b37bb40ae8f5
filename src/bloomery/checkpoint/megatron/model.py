"""Megatron's flags of the architecture and the tokenizer."""

from __future__ import annotations

from bloomery.base.bounded import LARGE_BYTES, parse_json, read_text
from bloomery.checkpoint.megatron.builder import Builder
from bloomery.checkpoint.megatron.shell_expand import is_known

_VOCABULARIES = {"GPT2BPETokenizer": 50257, "BertWordPieceLowerCase": 30522, "BertWordPieceCase": 28996}
_LLAMA = ("swiglu", "disable-bias-linear")
_ROTARY = ("use-rotary-position-embeddings", "position-embedding-type")
_OTHER_PROGRAMS = {"t5", "ict", "realm", "vision", "vlm", "mamba", "hybrid", "retro", "prefix", "rl"}


def fill_model(b: Builder) -> str:
    """The `model` section without its vocabulary; the family."""
    family = _family(b)
    b.put("model.family", family, *_family_flags(b))
    for flag, name in (
        (b.first("num-layers", "encoder-num-layers"), "num_layers"),
        ("hidden-size", "hidden_size"),
        ("num-attention-heads", "num_heads"),
        (b.first("seq-length", "encoder-seq-length"), "seq_length"),
    ):
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
    channels, width = b.given("kv-channels"), b.value("kv-channels", int, 0)
    if channels is not None and width * heads == hidden:
        b.tell("not needed", "kv-channels", "hidden-size / num-attention-heads already says it")
    elif channels is not None and width:
        rule = "a head is hidden-size / num-attention-heads wide here"
        b.problem(channels, f"--kv-channels is {width}", rule, "remove it, if that is the model")
    _dropout(b)
    _kv_heads(b)
    _embeddings(b, family)
    b.put("model.init_std", b.value("init-method-std", float, 0.02), "init-method-std")
    eps = b.first("norm-epsilon", "layernorm-epsilon")
    b.put("model.norm_eps", b.value(eps, float, 1e-5), eps)
    _gelu(b, family)
    return family


def _gelu(b: Builder, family: str) -> None:
    is_exact = b.has("no-bias-gelu-fusion") and not b.has("openai-gelu")
    if is_exact and family in ("gpt2", "bloom"):
        b.tell("differs", "no-bias-gelu-fusion", "Megatron then computes the exact GELU, ours is its tanh form")
    elif family == "bert" and not is_exact:
        b.put("model.family", family, kind="differs", remark="Megatron's fused GELU is the tanh form, bert's is exact")
    elif b.has("no-bias-gelu-fusion"):
        b.tell("not needed", "no-bias-gelu-fusion", "a choice of kernels")
    if b.has("openai-gelu") and family != "bert":
        b.tell("not needed", "openai-gelu", "that is the tanh form, which ours is")


def _family(b: Builder) -> str:
    program = b.line.program.rpartition("/")[2]
    if _OTHER_PROGRAMS & set(program.removesuffix(".py").split("_")):
        rule = "the families here are gpt2, bloom, llama (pretrain_gpt.py) and bert (pretrain_bert.py)"
        b.problem(None, f"the program is {program}", rule, "import the script of one of these")
    positions = b.value("position-embedding-type", str, "absolute").lower()
    rotary = b.has("use-rotary-position-embeddings") or positions in ("rope", "rotary")
    alibi, norm = b.has("use-alibi-position-embeddings") or positions == "alibi", b.has("embed-layernorm")
    given = b.given(b.first("position-embedding-type", "embed-layernorm", "use-alibi-position-embeddings"))
    if "bert" in program:
        return "bert"
    if rotary or _normalization(b) == "rmsnorm":
        _check_llama(b, rotary)
        return "llama"
    for flag in _LLAMA:
        if b.has(flag):
            b.problem(b.given(flag), f"--{flag} without rotary positions", "only llama has it", "remove it")
    if alibi != norm:
        has, lacks = ("alibi", "--embed-layernorm") if alibi else ("--embed-layernorm", "alibi")
        rule = "bloom has both ALiBi and the norm after the embedding; no other family has either"
        b.problem(given, f"{has} without {lacks}", rule, "add the other, or remove it")
    elif positions not in ("absolute", "learned_absolute", "alibi"):
        rule = "it is absolute, rope or alibi here"
        b.problem(given, f"--position-embedding-type is {positions}", rule, "use one of them")
    elif b.has("no-position-embedding") and not alibi:
        rule = "every family here knows the places of its tokens"
        b.problem(b.given("no-position-embedding"), "--no-position-embedding is set", rule, "use rope or alibi")
    return "bloom" if alibi else "gpt2"


def _normalization(b: Builder) -> str:
    """Megatron-LM writes LayerNorm and RMSNorm, Microsoft's Megatron-DeepSpeed layernorm and rmsnorm."""
    name = b.value("normalization", str, "layernorm")
    if name.lower() not in ("layernorm", "rmsnorm"):
        rule = "it is LayerNorm or RMSNorm"
        b.problem(b.given("normalization"), f"--normalization is {name!r}", rule, "use one of them")
    return name.lower()


def _check_llama(b: Builder, rotary: bool) -> None:
    lacking = [f"--{flag}" for flag in _LLAMA if not b.has(flag)]
    lacking += ["--normalization RMSNorm"] if _normalization(b) != "rmsnorm" else []
    lacking += [] if rotary else ["--position-embedding-type rope"]
    if lacking:
        rule = "of the families here only llama has it, with gated SiLU, RMSNorm and no biases"
        what = f"{', '.join(lacking)} missing for a model with rotary positions or RMSNorm"
        b.problem(b.given(b.first(*_ROTARY, "normalization")), what, rule, "add what is missing, if that is the model")
    if b.value("rotary-percent", float, 1.0) != 1.0:
        what, rule = "--rotary-percent is not 1", "positions turn the whole head here"
        b.problem(b.given("rotary-percent"), what, rule, "remove it, if that is the model")
    if b.has("no-position-embedding"):
        b.tell("not needed", "no-position-embedding", "rotary positions have none")


def _family_flags(b: Builder) -> list[str]:
    names = (*_ROTARY, "use-alibi-position-embeddings", "embed-layernorm", "normalization", *_LLAMA)
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


def _kv_heads(b: Builder) -> None:
    """Megatron-LM counts groups of queries, Microsoft's Megatron-DeepSpeed heads of keys and values: the same."""
    grouped, groups = b.has("group-query-attention"), b.value("num-query-groups", int, 1)
    if b.given("num-key-value-heads") is not None:
        b.put("model.num_kv_heads", b.value("num-key-value-heads", int, 1), "num-key-value-heads")
    elif grouped:
        b.put("model.num_kv_heads", groups, "num-query-groups", "group-query-attention")
    elif b.has("num-query-groups"):
        b.tell("not needed", "num-query-groups", "Megatron reads it with --group-query-attention only")


def _embeddings(b: Builder, family: str) -> None:
    untied = b.has("untie-embeddings-and-output-weights")
    if family == "llama":
        b.put("model.tie_embeddings", not untied, "untie-embeddings-and-output-weights")
        theta = b.first("rotary-base", "rotary-position-embeddings-theta")
        b.put("model.rope_theta", b.value(theta, float, 10000.0), theta)
    elif untied:
        b.put("model.tie_embeddings", False, "untie-embeddings-and-output-weights")


def fill_tokenizer(b: Builder, family: str) -> None:
    multiple = b.value("make-vocab-size-divisible-by", int, 128)
    if multiple != 128:
        b.put("model.vocab_multiple", multiple, "make-vocab-size-divisible-by")
    elif b.has("make-vocab-size-divisible-by"):
        b.tell("not needed", "make-vocab-size-divisible-by", "model.vocab_multiple is 128 anyway")
    default = "BertWordPieceLowerCase" if family == "bert" else "GPT2BPETokenizer"
    kind = b.value("tokenizer-type", str, default)
    _vocabulary(b, kind)
    path, vocab = b.first("tokenizer-name-or-path", "tokenizer-model"), b.text("vocab-file")
    if b.has(path):
        is_file = str(b.text(path)).endswith(".model")
        remark = "a SentencePiece file; a recipe has a folder with a tokenizer.json" if is_file else ""
        b.put("tokenizer.path", b.text(path), path, kind="left out" if is_file else "mapped", remark=remark)
    elif vocab:
        folder = vocab.rpartition("/")[0] or ("." if is_known(vocab) else vocab)
        remark = "a folder with a tokenizer.json, or with vocab.json and merges.txt"
        b.put("tokenizer.path", folder, "vocab-file", "merge-file", remark=remark)
    if b.has("tokenizer-type"):
        b.tell("not needed", "tokenizer-type", "the folder says which tokenizer it is", path="tokenizer.path")
    b.has("merge-file")


def _vocabulary(b: Builder, kind: str) -> None:
    path, padded = "model.vocab_size", b.first("pad-vocab-size-to", "padded-vocab-size")
    if b.given(padded) is not None:
        remark = "the row count that is pinned, whatever the layout"
        b.put(path, b.value(padded, int, 1), padded, remark=remark)
    elif b.given("vocab-size") is not None:
        extra = int(kind == "NullTokenizer")
        remark = "NullTokenizer adds an end of document" if extra else ""
        b.put(path, b.value("vocab-size", int, 1) + extra, "vocab-size", remark=remark)
    else:
        counted = _count_vocabulary(b.text("vocab-file"))
        size = counted or _VOCABULARIES.get(kind)
        if size is None:
            remedy = "add --vocab-size N (entries of the tokenizer) behind the command line"
            b.problem(b.given("tokenizer-type"), f"the vocabulary of {kind} is not on the command line", "", remedy)
        remark = "counted in --vocab-file" if counted else f"of every {kind}; check it if the vocabulary is your own"
        b.put(path, size or 1, remark=remark)


def _count_vocabulary(path: str | None) -> int | None:
    if path is None or not is_known(path):
        return None
    try:
        text = read_text(path, LARGE_BYTES)
        return len(parse_json(text)) if path.endswith(".json") else len(text.splitlines())
    except (OSError, ValueError, TypeError):
        return None
