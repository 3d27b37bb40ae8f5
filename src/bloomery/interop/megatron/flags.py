"""The table of Megatron-LM's and Megatron-DeepSpeed's flags, and a command line split into flags and values."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

Kind = Literal["mapped", "default", "differs", "left out", "not needed", "not understood"]
REQUIRED = object()
"""Instead of a default: Megatron does not start without this flag."""

# (names of the flag, recipe field, type of its value, Megatron's default): the first name that is given counts.
# `steps`: a number of steps. Default None: the field is set only where the flag is given.
FIELDS: tuple[tuple[str, str, str, Any], ...] = (
    ("seed", "seed", "int", 1234),
    ("num-layers encoder-num-layers", "model.num_layers", "int", REQUIRED),
    ("hidden-size", "model.hidden_size", "int", REQUIRED),
    ("num-attention-heads", "model.num_heads", "int", REQUIRED),
    ("seq-length encoder-seq-length", "model.seq_length", "int", REQUIRED),
    ("ffn-hidden-size", "model.ffn_hidden_size", "int", None),
    ("num-key-value-heads", "model.num_kv_heads", "int", None),
    ("init-method-std", "model.init_std", "float", 0.02),
    ("norm-epsilon layernorm-epsilon", "model.norm_eps", "float", 1e-5),
    ("make-vocab-size-divisible-by", "model.vocab_multiple", "int", None),
    ("micro-batch-size", "batch.micro_batch_size", "int", REQUIRED),
    ("global-batch-size", "batch.global_batch_size", "int", REQUIRED),
    ("adam-eps", "optimizer.eps", "float", 1e-8),
    ("weight-decay", "optimizer.weight_decay", "float", 0.01),
    ("lr", "lr.peak", "float", REQUIRED),
    ("lr-decay-style", "lr.schedule", "lower", "linear"),
    ("tensor-model-parallel-size", "parallel.tp", "int", 1),
    ("pipeline-model-parallel-size", "parallel.pp", "int", 1),
    ("context-parallel-size ds-sequence-parallel-size", "parallel.cp", "int", None),
    ("log-interval", "monitor.log_every", "steps", 100),
    ("reset-attention-mask", "data.mask_documents", "true", None),
    ("reset-position-ids", "data.reset_positions", "true", None),
    ("eod-mask-loss", "data.eod_loss", "false", None),
    ("data-cache-path", "data.cache_dir", "str", None),
)

SPECIAL = """
kv-channels max-position-embeddings position-embedding-type normalization hidden-dropout attention-dropout rotary-base
rotary-position-embeddings-theta rotary-percent num-query-groups pad-vocab-size-to padded-vocab-size vocab-size
tokenizer-type tokenizer-name-or-path tokenizer-model vocab-file merge-file train-samples train-iters train-tokens
exit-interval exit-duration-in-mins optimizer adam-beta1 adam-beta2 clip-grad min-lr lr-decay-iters lr-decay-samples
lr-decay-tokens lr-warmup-iters lr-warmup-samples lr-warmup-tokens lr-warmup-fraction lr-wsd-decay-style
lr-wsd-decay-iters lr-wsd-decay-samples loss-scale initial-loss-scale min-loss-scale loss-scale-window hysteresis
fp8-format zero-stage data-parallel-sharding-strategy num-layers-per-virtual-pipeline-stage
num-virtual-stages-per-pipeline-rank recompute-granularity split mask-prob short-seq-prob eval-interval eval-iters
save-interval persistent-save-interval tensorboard-dir deepspeed_config train-weighted-split-paths-path
valid-weighted-split-paths-path remote-device rampup-batch-size data-path train-data-path valid-data-path
skip-train-iteration-range iterations-to-skip train-weighted-split-paths valid-weighted-split-paths
""".split()
"""Flags with values that `recipe.py` maps together with others."""

SWITCHES = """
fp16 bf16 fp8-e4m3 fp8-e5m2 fp8-hybrid deepspeed embed-layernorm swiglu group-query-attention
use-rotary-position-embeddings use-alibi-position-embeddings no-position-embedding disable-bias-linear
untie-embeddings-and-output-weights no-bias-gelu-fusion openai-gelu checkpoint-activations recompute-activations
deepspeed-activation-checkpointing use-distributed-optimizer use-torch-fsdp2 torch-fsdp2-no-reshard-after-forward
use-megatron-fsdp use-custom-fsdp bert-no-binary-head cpu-optimizer optimizer-cpu-offload
reset-position-ids reset-attention-mask eod-mask-loss
""".split()
"""Flags without a value that `recipe.py` maps."""

MAPPED = frozenset([*SPECIAL, *SWITCHES, *(name for names, *_ in FIELDS for name in names.split())])

_ACTIVATION = "of the families here llama has gated SiLU, bert the exact GELU and the others its tanh form"
_DECAY = "a recipe has one weight decay, for all weights but norms and biases"
_INIT = "weights begin normally distributed with one model.init_std, those before a residual scaled down"
_STREAM = "every sample is a stretch of the documents' stream, of full length, with a loss at every place"
_ALIKE = "the families here have fixed layers, all alike"
_ROTARY = "rotary positions turn the whole head at every layer, without scaling"
_ATTENTION = "no family here has such an attention"

# Flags that change what is trained in a way that a recipe cannot express: an import ends here.
# (why, names; `name=value` for the values that switch it off)
_REFUSED: tuple[tuple[str, str], ...] = (
    ("no family here has experts", """num-experts=1 expert-model-parallel-size=1 moe-expert-parallel-size=1
        num-experts-switch=1 moe-use-upcycling"""),
    (_ATTENTION, """multi-latent-attention qk-layernorm qk-l2-norm qk-clip add-qkv-bias attention-output-gate
        window-size window-attn-skip-freq experimental-attention-variant linear-attention-freq softmax-type=vanilla"""),
    (_ROTARY, """rotary-interleaved use-rope-scaling rotary-seq-len-interpolation-factor=1 no-rope-freq rope-type=rope
        mrope-section"""),
    (_ACTIVATION, """squared-relu quick-geglu glu-activation activation-func-clamp-value glu-linear-offset=0
        glu-linear-offset=0.0"""),
    (_INIT, """init-method-xavier-uniform no-scaled-init data-parallel-random-init use-mup embedding-init-method-std"""),
    (_DECAY, """start-weight-decay end-weight-decay weight-decay-incr-style=constant do-norm-bias-weight-decay
        no-decoupled-weight-decay apply-wd-to-qk-layernorm no-weight-decay-cond-type"""),
    ("a recipe has one learning rate for all weights", "decoupled-lr decoupled-min-lr head-lr-mult"),
    ("the warm-up begins at zero", "lr-warmup-init=0 lr-warmup-init=0.0"),
    ("the precisions here are fp32, bf16, fp16 and fp8", "fp4-format"),
    ("all layers have one precision", "kitchen-config-file kitchen-recipe-number te-precision-config-file"),
    ("the loss is that of the next token", "mtp-num-layers=0"),
    (_STREAM, """random-ltd data-efficiency-curriculum-learning loss-on-targets-only sft fim-data
        reweight-loss-based-on-position-frequency sample-rate=1 sample-rate=1.0"""),
    ("the sources of a recipe do not change on the way", "phase-transition-iterations"),
    ("a recipe's batch grows in equal stages of samples: where these are equal, write --global-batch-size N "
     "--rampup-batch-size START INCREMENT SAMPLES", "step-batch-size-schedule"),
    ("the vocabulary is that of the tokenizer", "vocab-extra-ids=0"),
    ("it ends without a training, and a recipe is one", "skip-train eval-only"),
    (_ALIKE, """apply-residual-connection-post-layernorm hybrid-attention-ratio=0 hybrid-attention-ratio=0.0
        hybrid-mlp-ratio=0 hybrid-mlp-ratio=0.0 hybrid-override-pattern hybrid-layer-pattern is-hybrid-model
        heterogeneous-layers-config-path heterogeneous-layers-config-encoded-json spec decoder-num-layers
        enable-hyper-connections"""),
    ("no family here does that", "perform-rl-step retro-add-retriever vision-pretraining kd mos"),
    ("Megatron then takes all of its arguments from that file, which is not read here", "yaml-cfg"),
    ("Megatron asks for --micro-batch-size instead", "batch-size"),
    ("Megatron asks for --tensor-model-parallel-size instead", "model-parallel-size"),
    ("Megatron asks for --lr-warmup-fraction instead", "warmup"),
)  # fmt: skip

_ORDER = "the order of samples is Bloomery's own: data.order"
_TOKENIZER = "the folder says which tokenizer it is"

# Flags that no field comes from: (what is said of them, why, names and patterns). Names before patterns.
_OTHERS: tuple[tuple[Kind, str, str], ...] = (
    ("left out", "begins with the weights of --load: see `bloomery import hf`", "finetune"),
    ("left out", "begins with those weights: see `bloomery import hf`", "pretrained-checkpoint bert-load"),
    ("left out", "the checkpoint's arguments would overrule these: check the model", "use-checkpoint-args"),
    ("left out", "`bloomery train --from` chooses a checkpoint", "ckpt-step"),
    ("left out", "a file of sources, which is not read: add `data:` to the recipe",
     "data-args-path per-split-data-args-path"),
    ("left out", "a folder before every path of --data-path: add it in `data:`", "aml-data-download-path"),
    ("left out", "invented tokens: add `data:` to the recipe", "mock-data"),
    ("left out", "add checkpoint.keep to the recipe: {last: 1, every: N steps}", "save-retain-interval"),
    ("left out", "add checkpoint.local to the recipe", "non-persistent-*"),
    ("left out", "add parallel.shard_size: replicas divided by it", "num-distributed-optimizer-instances"),
    ("left out", "a training ends by its length (train.for), or by hand", "eval-loss-exit-value"),
    ("differs", "the residual stream has the precision of the rest", "fp32-residual-connection"),
    ("differs", "all layers have one precision",
     "first-last-layers-bf16 num-layers-at-start-in-bf16 num-layers-at-end-in-bf16"),
    ("differs", "weights, gradients and moments are kept in fp32",
     "use-bnb-optimizer main-grads-dtype main-params-dtype exp-avg-dtype exp-avg-sq-dtype"),
    ("differs", "an evaluation has train.evaluate.steps batches for every group of data.validation",
     "full-validation multiple-validation-sets"),
    ("differs", "sources are repeated as often as train.for needs", "train-data-exact-num-epochs"),
    ("differs", _ORDER, "disable-doc-shuffling"),
    ("differs", "batch sizes never follow from the machines", "decrease-batch-size-if-needed"),
    ("not needed", "a choice of kernels; ours are chosen by what is needed and tested to agree",
     """abort-on-unmet-fused-kernel-constraints *-fusion *-fusion-impl use-flash-attn* use-fast-softmax use-fused-*
     no-persist-layer-norm disable-mem-efficient-ln no-async-tensor-model-parallel-allreduce use-te-activation-func
     attention-softmax-in-fp32 *query-key-layer-scaling use-mcore-models use-legacy-models deterministic-mode
     disable-bf16-reduced-precision-matmul te-rng-tracker *cuda-graph* enable-experimental mask-tensor-adding
     embedding-weights-in-fp32 fix-position-emb-redundant-alloc memory-centric-tiled-linear attention-backend
     transformer-impl use-torch-compile* compiled-autograd-fallback-mode onnx-safe tile-factor"""),
    ("not needed", "how processes talk; PyTorch decides",
     """distributed-backend distributed-timeout-* local_rank local-rank DDP-impl nccl-* lazy-mpu-init sharp-*
     use-sharp wgrad-deferral-limit pipeline-model-parallel-comm-backend train-sync-interval cp-comm-type use-nccl-ub
     microbatch-group-size-per-virtual-pipeline-stage suggested-communication-unit-size delay-* *overlap-* no-align-*
     hierarchical-context-parallel-sizes high-priority-stream-groups disable-symmetric-registration no-delay-grad-reduce
     no-scatter-gather-tensors-in-pipeline use-ring-exchange-p2p use-tp-pp-dp-mapping defer-embedding-wgrad-compute
     *contiguous-buffers-in-* disable-gloo-process-groups force-ds-sequence-parallel fsdp-double-buffer deepspeed_mpi
     init-model-with-meta-device keep-fp8-transpose-cache zero-reduce-* zero-contigious-gradients tp-comm-*
     zero-allgather-bucket-size disable-tp-comm-* ddp-*"""),
    ("not needed", "a run has one folder (--run-dir), and resumes from its newest checkpoint by itself",
     """save load load-tag override-lr-scheduler use-checkpoint-lr-scheduler override-opt?param-scheduler
     use-checkpoint-opt?param-scheduler universal-checkpoint no-load-* no-save-* reset-iteration no-initialization
     exit-on-missing-checkpoint use-mp-args-from-checkpoint-args load-main-params-from-ckpt verify-checkpoint*
     no-use-tokenizer-model-from-checkpoint-args no-strict-fsdp-dtensor-load"""),
    ("not needed", "touch control/kill in the run folder", "kill-switch-path"),
    ("not needed", "a signal always saves and ends a job", "exit-signal exit-signal-handler"),
    ("not needed", "energy is in metrics.jsonl where a sensor counts it; emissions are not estimated", "codecarbon-dir"),
    ("not needed", "always recorded in metrics.jsonl and TensorBoard",
     """timing-log-* logging-level config-logger-dir app-tag-run-* no-barrier-with-level-1-timing no-one-logger log-*
     no-log-* tensorboard-* wandb-* one-logger-* tensor-logger-*"""),
    ("not needed", "`bloomery train --trace` looks inside a step", "profile profile-* use-pytorch-profiler*"),
    ("not needed", "one thread prefetches; nothing to set",
     """num-workers valid-num-workers data-impl num-dataset-builder-threads object-storage-cache-path mmap-warmup
     no-mmap-bin-files no-create-attention-mask-in-dataloader repeated-dataloader return-data-index disable-msc
     mid-level-dataset-surplus eval-micro-batch-size"""),
    ("not needed", _ORDER, "dataloader-type train-*-path"),
    ("not needed", "a sample has one token more than the sequence, so that every place has a label",
     "no-seq-len-plus-one-tokens"),
    ("not needed", "how a checkpoint is written; ours has one form, for every layout",
     """async-strategy use-persistent-ckpt-worker async-save use-dist-ckpt auto-detect-ckpt-format replication*
     ckpt-* no-ckpt-* dist-ckpt-* distrib-optim-*"""),
    ("not needed", "layers are shared among pipeline stages by their cost",
     """pp-partition-method decoder-*-pipeline-num-layers pipeline-model-parallel-layout standalone-embedding-stage
     account-for-*-in-pipeline-split"""),
    ("not needed", "copies cannot drift: gradients are the same, and monitor.drift watches",
     "sync-tp-duplicated-parameters"),
    ("not needed", "tensor-parallel ranks always share the sequence between layers", "sequence-parallel"),
    ("not needed", "parallel.pp says it", "no-pipeline-parallel"),
    ("not needed", "recompute: full recomputes block by block, selective the attention",
     "checkpoint-num-layers recompute-method recompute-num-layers recompute-modules"),
    ("not needed", "how activations are stored; parallel.recompute is what there is to choose",
     """partition-activations contigious-checkpointing checkpoint-in-cpu synchronize-each-layer profile-backward
     use-pin-memory scattered-embeddings split-transformers distribute-*-activations cpu-offloading*
     pytorch-activation-checkpointing ds-sequence-parallel-fpdt* no-clone-scatter-output-in-embedding"""),
    ("not needed", "training does not read the test part", "test-data-path test-weighted-split-paths*"),
    ("not needed", "see --bert-no-binary-head", "no-binary-head"),
    ("not needed", "losses, norms and sums of gradients are always computed in fp32",
     "fp16-lm-cross-entropy accumulate-allreduce-grads-in-fp32 grad-reduce-in-bf16"),
    ("not needed", "the loss is always the mean over the tokens of the global batch", "calculate-per-token-loss"),
    ("not needed", "what is learned is the same", "apply-layernorm-1p"),
    ("not needed", "the allocator and the garbage collector are left alone",
     "empty-unused-memory-level manual-gc* no-manual-gc-eval memory-snapshot-path record-memory-history"),
    ("not needed", "a job watches itself: monitor.drift, NaN steps, lost ranks",
     """*check-for-nan-* check-for-* enable-ft-package calc-ft-timeouts inprocess-* run-workload-inspector-server
     disable-straggler-on-startup straggler-* adlr-* *check-tp-norm* check-weight-hash-* rerun-mode error-injection-*
     result-rejected-tracker-filename"""),
    ("not needed", "initial weights follow from the seed, whatever the device and the layout", "use-cpu-initialization"),
    ("not needed", "how the optimizer is computed",
     """cpu_torch_adam ds_fused_adam use-torch-optimizer-for-cpu-offload no-pin-cpu-* use-precision-aware-optimizer
     optimizer-offload-fraction dump-param-to-param-group-map"""),
    ("not needed", _TOKENIZER, "trust-remote-code legacy-tokenizer tokenizer-metadata tiktoken-*"),
    ("not needed", "how fp8 is scaled; ours has one way", "fp8-* no-fp8-*"),
    ("not needed", "only another kind of model or optimizer reads it",
     """num-classes img-* num-channels patch-dim decoder-seq-length retriever-seq-length topk mlp-type expert-interval
     expert-tensor-parallel-size max-tokens-to-oom ?-lora-rank kv-lora-rank qk-head-dim qk-pos-emb-head-dim v-head-dim
     rotary-scaling-factor mscale* mtp-loss-scaling-factor rope-scaling-factor relative-attention-* use-tutel
     create-moe-param-group disable-moe-* enable-expert-tensor-parallelism ds-inference inference inference-* moe-*
     rl-* grpo-* langrl-* retro-* mamba-* dino-* vision-* biencoder-* fim-* mup-* qk-clip-* kd-* sgd-momentum muon-*
     adaptive-muon-* soap-* lion-*"""),
)  # fmt: skip


def _refused() -> dict[str, tuple[str, set[str]]]:
    found: dict[str, tuple[str, set[str]]] = {}
    for why, names in _REFUSED:
        for name, _, off in (word.partition("=") for word in names.split()):
            found.setdefault(name, (why, set()))[1].update([off] if off else [])
    return found


REFUSED = _refused()
"""Name -> why a recipe cannot express it, and the values with which it does nothing."""


def other_flag(name: str) -> tuple[Kind, str] | None:
    """What to report of a flag that no field comes from; None if it is not known."""
    for exact in (True, False):
        for kind, why, names in _OTHERS:
            words = names.split()
            if name in words if exact else any(fnmatch.fnmatchcase(name, word) for word in words):
                return kind, why
    return None


def known_names() -> Iterable[str]:
    return [*MAPPED, *REFUSED, *(name for *_, names in _OTHERS for name in names.split() if "*" not in name)]


@dataclass(frozen=True)
class Given:
    """A flag as it was written."""

    flag: str
    values: list[str]
    place: str

    @property
    def text(self) -> str:
        return " ".join(self.values)


@dataclass
class CommandLine:
    program: str = ""
    launcher: dict[str, Given] = field(default_factory=dict)
    """Flags before the program: of torchrun, deepspeed or srun."""
    flags: dict[str, Given] = field(default_factory=dict)
    repeated: list[tuple[Given, Given]] = field(default_factory=list)
    """Flags that are given twice with different values: (the one that is overruled, the one that counts)."""
    stray: list[str] = field(default_factory=list)
    """Words that belong to no flag."""


def parse_command(words: Sequence[str], place: str) -> CommandLine:
    """A command line, its program and launcher separated. Nothing is refused here."""
    program_at = next((i for i, word in enumerate(words) if word.endswith(".py")), -1)
    line = CommandLine(program=words[program_at] if program_at >= 0 else "")
    for given in _flags(words[: max(0, program_at)], place):
        line.launcher[given.flag] = Given(given.flag, given.values[:1], place)
    for given in _flags(words[program_at + 1 :], place):
        before = line.flags.get(given.flag)
        if before is not None and before.values != given.values:
            line.repeated.append((before, given))
        if not given.flag or given.flag.removeprefix("--") in SWITCHES:
            line.stray += given.values
        if given.flag:
            line.flags[given.flag] = given
    return line


def _flags(words: Sequence[str], place: str) -> Iterable[Given]:
    """Every flag with the words up to the next one; words before the first flag have the flag ''."""
    given = Given("", [], place)
    for word in words:
        if word == "--":
            continue
        if not word.startswith("--"):
            given.values.append(word)
            continue
        yield given
        name, equals, value = word.partition("=")
        given = Given(name, [value] if equals else [], place)
    yield given


_UNSET = re.compile(r"\$\{?([A-Za-z_][A-Za-z0-9_]*|[0-9])")


def is_known(text: str) -> bool:
    """Whether no variable without a value, and no output of a program, is in it: these stay as they are written."""
    return "$" not in text


def unset_names(text: str) -> list[str]:
    """The variables and arguments of a script in a text that have no value."""
    return list(dict.fromkeys(_UNSET.findall(text)))
