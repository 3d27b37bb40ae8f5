"""The flags of Megatron-LM and Megatron-DeepSpeed: how many values each takes, and why some mean nothing here.

What a flag that does mean something becomes stands in `recipe.py`. A flag in neither is unknown, and listed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

Kind = Literal["mapped", "default", "differs", "left out", "not needed", "not understood"]


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
rotary-base rotary-percent num-query-groups make-vocab-size-divisible-by pad-vocab-size-to vocab-size
tokenizer-type tokenizer-name-or-path tokenizer-model vocab-file merge-file
micro-batch-size global-batch-size train-samples train-iters exit-interval exit-duration-in-mins
optimizer adam-beta1 adam-beta2 adam-eps weight-decay clip-grad seed
lr min-lr lr-decay-style lr-decay-iters lr-decay-samples lr-decay-tokens
lr-warmup-iters lr-warmup-samples lr-warmup-fraction
lr-wsd-decay-style lr-wsd-decay-iters lr-wsd-decay-samples
loss-scale initial-loss-scale min-loss-scale loss-scale-window hysteresis fp8-format
tensor-model-parallel-size pipeline-model-parallel-size context-parallel-size zero-stage
num-layers-per-virtual-pipeline-stage recompute-granularity
split data-cache-path mask-prob short-seq-prob eval-interval eval-iters save-interval log-interval tensorboard-dir
deepspeed_config train-weighted-split-paths-path valid-weighted-split-paths-path remote-device
"""

_MANY = """
rampup-batch-size data-path train-data-path valid-data-path skip-train-iteration-range
train-weighted-split-paths valid-weighted-split-paths
"""

_NONE = """
fp16 bf16 deepspeed embed-layernorm swiglu group-query-attention use-rotary-position-embeddings disable-bias-linear
untie-embeddings-and-output-weights no-bias-gelu-fusion checkpoint-activations recompute-activations
deepspeed-activation-checkpointing use-distributed-optimizer reset-position-ids reset-attention-mask eod-mask-loss
bert-no-binary-head cpu-optimizer apply-residual-connection-post-layernorm squared-relu
"""

ARITY = {**dict.fromkeys(_ONE.split(), 1), **dict.fromkeys(_NONE.split(), 0), **dict.fromkeys(_MANY.split(), -1)}
"""Of the flags that `recipe.py` reads; -1: as many words as follow."""

_KERNEL = "a choice of kernels; ours are chosen by what is needed and tested to agree"
_RANKS = "how processes talk; PyTorch decides"
_RUN = "a run has one folder (--run-dir), and goes on from its newest checkpoint by itself"
_LOG = "always recorded in metrics.jsonl and TensorBoard"
_LOADER = "one thread reads ahead; nothing to set"
_SAVE = "how a checkpoint is written; ours has one form, for every layout"

NOT_NEEDED: dict[str, tuple[int, str]] = {
    **dict.fromkeys(
        ("abort-on-unmet-fused-kernel-constraints", "no-masked-softmax-fusion", "masked-softmax-fusion",
         "no-bias-dropout-fusion", "use-flash-attn", "no-persist-layer-norm", "no-gradient-accumulation-fusion",
         "no-async-tensor-model-parallel-allreduce", "no-rope-fusion", "attention-softmax-in-fp32",
         "no-query-key-layer-scaling", "apply-query-key-layer-scaling", "use-mcore-models",
         "use-legacy-models", "accumulate-allreduce-grads-in-fp32", "cross-entropy-loss-fusion"),
        (0, _KERNEL),
    ),
    **dict.fromkeys(("attention-backend", "transformer-impl", "cross-entropy-fusion-impl"), (1, _KERNEL)),
    **dict.fromkeys(("distributed-backend", "distributed-timeout-minutes", "local_rank", "local-rank", "DDP-impl",
                     "nccl-communicator-config-path"), (1, _RANKS)),
    **dict.fromkeys(("use-sharp", "no-delay-grad-reduce", "overlap-grad-reduce", "overlap-param-gather",
                     "no-scatter-gather-tensors-in-pipeline", "use-tp-pp-dp-mapping"), (0, _RANKS)),
    **dict.fromkeys(("save", "load"), (1, _RUN)),
    "kill-switch-path": (1, "touch control/kill in the run folder"),
    "codecarbon-dir": (1, "energy is in metrics.jsonl where a sensor counts it; emissions are not estimated"),
    **dict.fromkeys(("override-lr-scheduler", "use-checkpoint-lr-scheduler", "override-opt_param-scheduler",
                     "use-checkpoint-opt_param-scheduler", "universal-checkpoint", "no-load-optim", "no-load-rng",
                     "no-save-optim", "no-save-rng", "finetune", "exit-on-missing-checkpoint"), (0, _RUN)),
    **dict.fromkeys(("log-timers-to-tensorboard", "log-batch-size-to-tensorboard", "log-validation-ppl-to-tensorboard",
                     "log-learning-rate-to-tensorboard", "log-loss-scale-to-tensorboard", "log-memory-to-tensorboard",
                     "log-params-norm", "log-num-zeros-in-grad", "log-throughput",
                     "log-optimizer-states-to-tensorboard", "log-world-size-to-tensorboard"), (0, _LOG)),
    **dict.fromkeys(("tensorboard-queue-size", "tensorboard-log-interval", "timing-log-level", "log-level",
                     "log-level-replica", "log-path", "wandb-project", "wandb-exp-name",
                     "wandb-save-dir"), (1, _LOG)),
    **dict.fromkeys(("num-workers", "valid-num-workers", "data-impl", "dataloader-type"), (1, _LOADER)),
    **dict.fromkeys(("mmap-warmup", "no-mmap-bin-files"), (0, _LOADER)),
    **dict.fromkeys(("ckpt-format", "async-strategy"), (1, _SAVE)),
    **dict.fromkeys(("ckpt-fully-parallel-load", "ckpt-fully-parallel-save", "use-persistent-ckpt-worker",
                     "ckpt-assume-constant-structure", "async-save", "use-dist-ckpt", "auto-detect-ckpt-format",
                     "no-ckpt-fully-parallel-save"), (0, _SAVE)),
    "pp-partition-method": (1, "layers are shared among pipeline stages by their cost"),
    "sync-tp-duplicated-parameters": (0, "copies cannot drift: gradients are the same, and monitor.drift watches"),
    "sequence-parallel": (0, "tensor-parallel ranks always share the sequence between layers"),
    "no-pipeline-parallel": (0, "parallel.pp says it"),
    "ds-inference": (0, "no training"),
    "train-tokens": (1, "Megatron-DeepSpeed reads it and never uses it"),
    "checkpoint-num-layers": (1, "recompute: full recomputes block by block"),
    "recompute-method": (1, "recompute: full recomputes block by block"),
    "recompute-num-layers": (1, "recompute: full recomputes block by block"),
    **dict.fromkeys(("partition-activations", "contigious-checkpointing", "checkpoint-in-cpu", "synchronize-each-layer",
                     "profile-backward", "use-pin-memory", "scattered-embeddings", "split-transformers"),
                    (0, "how DeepSpeed stores activations")),
    "test-data-path": (-1, "training does not read the test part"),
    "test-weighted-split-paths": (-1, "training does not read the test part"),
    "test-weighted-split-paths-path": (1, "training does not read the test part"),
    "no-binary-head": (0, "see --bert-no-binary-head"),
    "fp16-lm-cross-entropy": (0, "the loss is always computed in fp32"),
    "empty-unused-memory-level": (1, "PyTorch's allocator is left alone"),
    "lazy-mpu-init": (1, _RANKS),
    "inference-batch-times-seqlen-threshold": (1, "no training"),
}  # fmt: skip


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
    """How many values a flag takes; None if it is not known."""
    return ARITY[name] if name in ARITY else NOT_NEEDED[name][0] if name in NOT_NEEDED else None


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
