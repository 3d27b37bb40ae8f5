"""A command line cut into flags with their values, and how many values the flags take that become fields of a recipe.

All other flags that are known stand in `other_flags.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from bloomery.checkpoint.megatron.other_flags import Kind, other_arity


@dataclass(frozen=True)
class Given:
    """A flag as it was written."""

    flag: str
    values: list[str]
    place: str

    @property
    def text(self) -> str:
        return " ".join(self.values)


@dataclass(frozen=True)
class Row:
    """What became of a flag."""

    kind: Kind
    flag: str
    value: str
    field: str = ""
    """Of the recipe."""
    result: str = ""
    remark: str = ""


@dataclass
class CommandLine:
    program: str = ""
    launcher: dict[str, Given] = field(default_factory=dict)
    """Flags before the program: of torchrun, deepspeed or srun."""
    flags: dict[str, Given] = field(default_factory=dict)
    repeated: list[tuple[Given, Given]] = field(default_factory=list)
    """Flags that stand twice with different values: (the one that is overruled, the one that counts)."""
    stray: list[str] = field(default_factory=list)
    """Words that belong to no flag."""


_ONE = """
num-layers hidden-size num-attention-heads ffn-hidden-size kv-channels seq-length max-position-embeddings
position-embedding-type normalization norm-epsilon layernorm-epsilon init-method-std hidden-dropout attention-dropout
rotary-base rotary-position-embeddings-theta rotary-percent num-query-groups num-key-value-heads
encoder-num-layers encoder-seq-length make-vocab-size-divisible-by pad-vocab-size-to padded-vocab-size vocab-size
tokenizer-type tokenizer-name-or-path tokenizer-model vocab-file merge-file
micro-batch-size global-batch-size train-samples train-iters train-tokens exit-interval exit-duration-in-mins
optimizer adam-beta1 adam-beta2 adam-eps weight-decay clip-grad seed
lr min-lr lr-decay-style lr-decay-iters lr-decay-samples lr-decay-tokens
lr-warmup-iters lr-warmup-samples lr-warmup-tokens lr-warmup-fraction
lr-wsd-decay-style lr-wsd-decay-iters lr-wsd-decay-samples
loss-scale initial-loss-scale min-loss-scale loss-scale-window hysteresis fp8-format
tensor-model-parallel-size pipeline-model-parallel-size context-parallel-size ds-sequence-parallel-size
zero-stage data-parallel-sharding-strategy num-layers-per-virtual-pipeline-stage num-virtual-stages-per-pipeline-rank
recompute-granularity split data-cache-path mask-prob short-seq-prob eval-interval eval-iters save-interval
persistent-save-interval log-interval tensorboard-dir
deepspeed_config train-weighted-split-paths-path valid-weighted-split-paths-path remote-device
"""

_MANY = """
rampup-batch-size data-path train-data-path valid-data-path skip-train-iteration-range iterations-to-skip
train-weighted-split-paths valid-weighted-split-paths
"""

_NONE = """
fp16 bf16 fp8-e4m3 fp8-e5m2 fp8-hybrid deepspeed embed-layernorm swiglu group-query-attention
use-rotary-position-embeddings use-alibi-position-embeddings no-position-embedding disable-bias-linear
untie-embeddings-and-output-weights no-bias-gelu-fusion openai-gelu checkpoint-activations recompute-activations
deepspeed-activation-checkpointing use-distributed-optimizer use-torch-fsdp2 torch-fsdp2-no-reshard-after-forward
use-megatron-fsdp use-custom-fsdp reset-position-ids reset-attention-mask eod-mask-loss bert-no-binary-head
cpu-optimizer optimizer-cpu-offload
"""

ARITY = {**dict.fromkeys(_ONE.split(), 1), **dict.fromkeys(_NONE.split(), 0), **dict.fromkeys(_MANY.split(), -1)}
"""Of the flags that become fields; -1: as many words as follow."""


def parse_command(words: Sequence[str], place: str) -> CommandLine:
    """A command line, its program and launcher told apart. Nothing is refused here."""
    program_at = next((i for i, word in enumerate(words) if word.endswith(".py")), None)
    line = CommandLine()
    if program_at is not None:
        line.program = words[program_at]
        line.launcher = {given.flag: given for given in _flags(words[:program_at], place, line, loose=True)}
        words = words[program_at + 1 :]
    for given in _flags(words, place, line):
        before = line.flags.get(given.flag)
        if before is not None and before.values != given.values:
            line.repeated.append((before, given))
        line.flags[given.flag] = given
    return line


def arity_of(name: str) -> int | None:
    """How many values a flag takes, -1 for any number; None if that is not known."""
    return ARITY[name] if name in ARITY else other_arity(name)


def _flags(words: Sequence[str], place: str, line: CommandLine, *, loose: bool = False) -> list[Given]:
    found: list[Given] = []
    at = 0
    while at < len(words):
        word = words[at]
        at += 1
        if not word.startswith("--") or word == "--":
            if not loose and word != "--":
                line.stray.append(word)
            continue
        name, equals, value = word[2:].partition("=")
        values = [value] if equals else []
        arity = None if loose else arity_of(name)
        many = 1 if loose else {None: len(words), -1: len(words)}.get(arity, arity or 0)
        while at < len(words) and len(values) < many and not words[at].startswith("--"):
            values.append(words[at])
            at += 1
        found.append(Given(f"--{name}", values, place))
    return found
