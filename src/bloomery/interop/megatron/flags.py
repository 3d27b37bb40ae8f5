"""The table of Megatron-LM's and Megatron-DeepSpeed's flags, and a command line split into flags and values.

The name of a flag has no dashes; a key of a ds_config is a flag with the name `ds:KEY`. A flag becomes a recipe field
(FIELDS, or in recipe.py with others), is refused (REFUSED), or has no field (OTHERS). A flag in none of them is
`not understood`.
"""

import fnmatch
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

Kind = Literal["mapped", "default", "differs", "left out", "not needed", "not understood"]
REQUIRED = object()
"""Instead of a default: Megatron does not start without this flag."""

FIELDS: dict[str, tuple[tuple[str, str, str, Any], ...]] = {
    "": (
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
        ("untie-embeddings-and-output-weights", "model.tie_embeddings", "false", True),
        ("tokenizer-name-or-path tokenizer-model", "tokenizer.path", "folder", None),
        ("rampup-batch-size", "batch.rampup", "ramp", None),
        ("micro-batch-size ds:train_micro_batch_size_per_gpu", "batch.micro_batch_size", "int", REQUIRED),
        ("global-batch-size ds:train_batch_size", "batch.global_batch_size", "int", REQUIRED),
        ("optimizer", "optimizer.name", "optimizer", "adamw"),
        ("adam-eps", "optimizer.eps", "float", 1e-8),
        ("weight-decay", "optimizer.weight_decay", "float", 0.01),
        ("clip-grad ds:gradient_clipping", "optimizer.clip_grad_norm", "float", 1.0),
        ("lr", "lr.peak", "float", REQUIRED),
        ("lr-decay-style", "lr.schedule", "lower", "linear"),
        ("tensor-model-parallel-size", "parallel.tp", "int", 1),
        ("pipeline-model-parallel-size", "parallel.pp", "int", 1),
        ("context-parallel-size ds-sequence-parallel-size", "parallel.cp", "int", None),
        ("recompute-activations recompute-granularity checkpoint-activations", "parallel.recompute", "recompute",
         "none"),
        ("num-layers-per-virtual-pipeline-stage num-virtual-stages-per-pipeline-rank", "parallel.chunks", "chunks",
         None),
        ("cpu-optimizer optimizer-cpu-offload ds:zero_optimization.offload_optimizer.device "
         "ds:zero_optimization.cpu_offload", "parallel.offload", "offload", None),
        ("save-interval persistent-save-interval", "checkpoint.phases", "phases", None),
        ("ds:nebula.persistent_storage_path", "checkpoint.upload.to", "str", None),
        ("ds:nebula.persistent_time_interval", "checkpoint.upload.every", "seconds", None),
        ("ds:nebula.num_of_version_in_retention", "checkpoint.keep.last", "int", None),
        ("exit-duration-in-mins", "train.exit_after", "minutes", None),
        ("skip-train-iteration-range", "train.skip", "ranges", None),
        ("iterations-to-skip", "train.skip", "skips", None),
        ("log-interval", "monitor.log_every", "steps", "100 steps"),
        ("tensorboard-dir", "monitor.tensorboard", "true", False),
        ("wandb-project", "monitor.wandb", "str", None),
        ("reset-attention-mask", "data.mask_documents", "true", None),
        ("reset-position-ids", "data.reset_positions", "true", None),
        ("eod-mask-loss", "data.eod_loss", "false", None),
        ("data-cache-path", "data.cache_dir", "str", None),
    ),
    "decay": (("min-lr", "lr.min", "float", 0.0),),
    "wsd": (("lr-wsd-decay-iters lr-wsd-decay-samples", "lr.cooldown", "amount", None),),
    "rotary": (("rotary-base rotary-position-embeddings-theta", "model.rope_theta", "float", 10000.0),),
    "encoder": (
        ("mask-prob", "data.masking.probability", "float", 0.15),
        ("short-seq-prob", "data.masking.short_sequence_probability", "float", 0.1),
    ),
    "fp16": (
        ("initial-loss-scale", "loss_scale.initial", "float", 2.0**32),
        ("loss-scale-window", "loss_scale.window", "steps", "1000 steps"),
        ("hysteresis", "loss_scale.hysteresis", "int", 2),
        ("min-loss-scale", "loss_scale.min", "float", 1.0),
    ),
    "deepspeed": (("zero-stage ds:zero_optimization.stage", "parallel.zero", "stage", None),),
    "no deepspeed": (
        ("use-distributed-optimizer use-torch-fsdp2 use-megatron-fsdp use-custom-fsdp", "parallel.zero", "sharding", 0),
    ),
    "deepspeed fp16": (
        ("ds:fp16.initial_scale_power", "loss_scale.initial", "power", 2.0**16),
        ("ds:fp16.loss_scale_window", "loss_scale.window", "steps", "1000 steps"),
        ("ds:fp16.hysteresis", "loss_scale.hysteresis", "int", 2),
        ("ds:fp16.consecutive_hysteresis", "loss_scale.consecutive_hysteresis", "bool", False),
        ("ds:fp16.min_loss_scale", "loss_scale.min", "float", 1.0),
    ),
}  # fmt: skip
"""In which trainings -> (names of one meaning, which must agree where several are given; recipe field; converter of
recipe.py; the default there). Default None: the field is set only where a flag is given."""
MAPPED = " ".join(names for table in FIELDS.values() for names, *_ in table).split()

SWITCHES = """
fp16 bf16 fp8-e4m3 fp8-e5m2 fp8-hybrid deepspeed embed-layernorm swiglu group-query-attention
use-rotary-position-embeddings use-alibi-position-embeddings no-position-embedding disable-bias-linear
no-bias-gelu-fusion openai-gelu checkpoint-activations recompute-activations deepspeed-activation-checkpointing
use-distributed-optimizer use-torch-fsdp2 torch-fsdp2-no-reshard-after-forward use-megatron-fsdp use-custom-fsdp
bert-no-binary-head reset-position-ids reset-attention-mask eod-mask-loss add-qkv-bias qk-layernorm
sequence-parallel untie-embeddings-and-output-weights
"""
"""Flags without a value."""

# Flags that change what is trained in a way that a recipe cannot express: an import ends here.
POST_NORM = "apply-residual-connection-post-layernorm"
"""What makes Megatron's BERT the one of its paper."""

# (why, names; `name=value` for a value that switches it off)
REFUSED: tuple[tuple[str, str], ...] = (
    ("no family here has experts",
     "num-experts=1 expert-model-parallel-size=1 moe-expert-parallel-size=1 num-experts-switch=1 moe-use-upcycling"),
    ("no family here has such an attention, such positions or such layers",
     """multi-latent-attention qk-l2-norm qk-clip attention-output-gate window-size window-attn-skip-freq
        experimental-attention-variant linear-attention-freq softmax-type=vanilla rotary-interleaved use-rope-scaling
        rotary-seq-len-interpolation-factor=1 no-rope-freq rope-type=rope mrope-section rotary-percent=1 squared-relu
        quick-geglu glu-activation activation-func-clamp-value glu-linear-offset=0 hybrid-attention-ratio=0
        apply-residual-connection-post-layernorm hybrid-mlp-ratio=0 hybrid-override-pattern hybrid-layer-pattern
        is-hybrid-model heterogeneous-layers-config-path heterogeneous-layers-config-encoded-json spec
        decoder-num-layers enable-hyper-connections perform-rl-step retro-add-retriever vision-pretraining kd mos
        fp4-format kitchen-config-file kitchen-recipe-number te-precision-config-file"""),
    ("a recipe has one model.init_std, one learning rate and one weight decay, for all weights but norms and biases",
     """init-method-xavier-uniform no-scaled-init data-parallel-random-init use-mup embedding-init-method-std
        start-weight-decay end-weight-decay weight-decay-incr-style=constant do-norm-bias-weight-decay
        no-decoupled-weight-decay apply-wd-to-qk-layernorm no-weight-decay-cond-type decoupled-lr decoupled-min-lr
        head-lr-mult lr-warmup-init=0"""),
    ("every sample is a stretch of the documents' stream, of full length, with a loss for every next token",
     """random-ltd data-efficiency-curriculum-learning loss-on-targets-only sft fim-data mtp-num-layers=0
        reweight-loss-based-on-position-frequency sample-rate=1 phase-transition-iterations"""),
    ("a recipe's batch grows in equal stages of samples: where these are equal, write --global-batch-size N "
     "--rampup-batch-size START INCREMENT SAMPLES", "step-batch-size-schedule"),
    ("a recipe has no such field, and it changes what is trained",
     """vocab-extra-ids=0 skip-train eval-only yaml-cfg batch-size model-parallel-size warmup ds:curriculum_learning
        ds:data_efficiency ds:progressive_layer_drop ds:compression_training ds:quantize_training ds:sparse_attention
        ds:amp"""),
    ("it would replace Megatron's schedule: use --lr-decay-style and --lr-warmup-*", "ds:scheduler.type"),
    ("the scale is dynamic here: 0", "ds:fp16.loss_scale=0"),
    ("weights stay on the device here; parallel.zero 3 shards them", "ds:zero_optimization.offload_param.device=none"),
)  # fmt: skip

RECORDED = {
    "log-learning-rate-to-tensorboard": "learning-rate/learning-rate",
    "log-batch-size-to-tensorboard": "batch-size/batch-size",
    "log-loss-scale-to-tensorboard": "loss-scale/loss-scale",
    "log-num-zeros-in-grad": "num-zeros/num-zeros",
    "log-params-norm": "params-norm/params-norm",
    "log-timers-to-tensorboard": "time/forward-time",
    "log-throughput": "iteration-time/TFLOPs per gpu (estimated)",
    "log-memory-to-tensorboard": "memory/allocated bytes",
    "log-validation-ppl-to-tensorboard": "lm-loss-validation/valid/lm loss validation ppl",
    "log-energy": "energy/joules",
}
"""Flag -> the curve of TensorBoard, and the value of metrics.jsonl, that every run has."""

# Flags that no field comes from: (what is reported of them, why, names and patterns). The first counts.
OTHERS: tuple[tuple[Kind, str, str], ...] = (
    ("not needed", "this training does not read it, or decides it with other flags",
     f"""{SWITCHES} {" ".join(MAPPED)}
        kv-channels max-position-embeddings position-embedding-type normalization hidden-dropout attention-dropout
        num-query-groups pad-vocab-size-to padded-vocab-size vocab-size tokenizer-type vocab-file
        merge-file train-samples train-iters train-tokens adam-beta1 adam-beta2 lr-decay-iters lr-decay-samples
        lr-decay-tokens lr-warmup-iters lr-warmup-samples lr-warmup-tokens lr-warmup-fraction lr-wsd-decay-style
        loss-scale *fp8-* profile profile-* *pytorch-profiler*
        data-parallel-sharding-strategy split deepspeed_config data-path train-data-path
        valid-data-path train-weighted-split-paths train-weighted-split-paths-path"""),
    ("left out", "name groups of whole shards in data.validation; data.split already validates on what training leaves",
     "valid-weighted-split-paths valid-weighted-split-paths-path"),
    ("left out", "there is nothing to evaluate", "eval-interval eval-iters"),
    ("left out", "`bloomery train --from` chooses a checkpoint", "ckpt-step ds:nebula.load_path"),
    ("left out", "`init.from` begins with the weights of a checkpoint, and with nothing else of it",
     "finetune pretrained-checkpoint bert-load no-load-optim no-load-rng reset-iteration"),
    ("left out", "a resumed run keeps its schedule, unless `bloomery train --change lr` is given",
     "override-opt*-param-scheduler use-checkpoint-opt*-param-scheduler override-opt_param-scheduler"),
    ("left out", "name the country of the grid in monitor.carbon", "codecarbon-dir"),
    ("left out", "W&B reads WANDB_ENTITY and its like; the name there is that of the run", "wandb-*"),
    ("left out", "a run writes metrics.jsonl and, with monitor.tensorboard, event files", "one-logger-*"),
    ("left out", "a recipe has training and validation data: name groups in data.validation", "test-*"),
    ("left out", "no run records it", "timing-log-* log-optimizer-states-*"),
    ("not needed", "every run records it, where it can be measured", " ".join(RECORDED)),
    ("left out", "the checkpoint's arguments would overrule these: check the model", "use-checkpoint-args"),
    ("left out", "add `data:` to the recipe",
     "data-args-path per-split-data-args-path aml-data-download-path mock-data"),
    ("left out", "the recipe has fields of its own for it: checkpoint, parallel.shard_size, train.exit_after",
     "save-retain-interval non-persistent-* num-distributed-optimizer-instances exit-interval eval-loss-exit-value"),
    ("differs", "all layers have one precision; weights, gradients and moments are kept in fp32, on the device",
     """fp16-lm-cross-entropy grad-reduce-in-bf16 fp32-residual-connection first-last-layers-bf16
        num-layers-at-*-in-bf16 use-bnb-optimizer main-grads-dtype main-params-dtype exp-avg-dtype exp-avg-sq-dtype
        remote-device ds:data_types ds:communication_data_type ds:seq_parallel_communication_data_type"""),
    ("differs", "evaluations and the order of samples are the recipe's own; batches never follow from the machines",
     """full-validation multiple-validation-sets train-data-exact-num-epochs disable-doc-shuffling
        decrease-batch-size-if-needed"""),
    ("differs", "a resumed run repeats its steps to the bit on CPUs; kernels of GPUs are not forced to",
     "deterministic-mode"),
    ("not needed", "it is off, DeepSpeed's own bookkeeping, follows from the batch, or Megatron decides it",
     """ds:off:* ds:optimizer ds:gradient_accumulation_steps ds:nebula.enabled ds:nebula.enable_nebula_load
        ds:steps_per_print ds:wall_clock_breakdown ds:dump_state ds:zero_allow_untested_optimizer ds:prescale_gradients
        ds:memory_breakdown ds:gradient_predivide_factor ds:sparse_gradients
        ds:disable_allgather ds:activation_checkpointing ds:flops_profiler ds:comms_logger ds:tensorboard ds:wandb
        ds:csv_monitor ds:aio ds:checkpoint ds:zero_force_ds_cpu_optimizer ds:autotuning ds:scheduler.*
        ds:*contiguous_gradients ds:*overlap_comm
        ds:*reduce_scatter ds:*_bucket_size ds:*allgather_partitions ds:*round_robin_gradients ds:*sub_group_size
        ds:*ignore_unused_parameters ds:*elastic_checkpoint ds:*.stage3_* ds:zero_optimization.offload_*.*"""),
    ("not needed", "kernels, communication, processes, logging and paths of a run: PyTorch and other fields decide",
     """*-fusion *-fusion-impl *flash-attn* *fused-* use-fast-softmax no-persist-layer-norm disable-mem-efficient-ln
        te-* use-te-* *-in-fp32 *query-key-layer-scaling use-mcore-models use-legacy-models disable-bf16-reduced-*
        *cuda-graph* enable-experimental mask-tensor-adding attention-backend transformer-impl onnx-safe *torch-compile*
        tile-factor apply-layernorm-1p calculate-per-token-loss use-cpu-initialization sequence-parallel recompute-*
        checkpoint-num-layers *-activations distributed-* local?rank DDP-impl *nccl-* lazy-mpu-init *sharp* wgrad-*
        *-comm-* ddp-* *delay-* *overlap-* no-align-* *-sizes *-allreduce use-ring-exchange-p2p no-scatter-gather-*
        use-tp-pp-dp-mapping defer-embedding-* microbatch-group-size-* *contiguous-buffers-in-* *gloo-process-groups
        force-ds-sequence-parallel fsdp-* deepspeed_mpi init-model-with-meta-device zero-*
        sync-tp-duplicated-parameters no-pipeline-parallel pp-partition-method decoder-*-pipeline-num-layers
        pipeline-model-parallel-layout standalone-embedding-stage account-for-* checkpoint-in-cpu
        contigious-checkpointing scattered-embeddings *pin-* no-clone-* synchronize-* split-transformers
        cpu-offloading* pytorch-activation-checkpointing ds-sequence-parallel-fpdt* *_adam use-torch-optimizer-*
        use-precision-aware-optimizer optimizer-offload-fraction *manual-gc* empty-unused-* save load load-tag
        universal-checkpoint no-save-* no-initialization exit-*
        use-mp-args-* load-main-params-* verify-checkpoint* *ckpt* no-use-tokenizer-model-from-* no-strict-fsdp-*
        async-* replication* distrib-optim-* kill-switch-path *log-* logging-level *-logger-* app-tag-*
        no-barrier-with-level-1-timing no-one-logger tensorboard-* *memory-* *check-* *-ft-* inprocess-* *straggler*
        adlr-* rerun-mode error-injection-*
        *num-workers data-impl num-dataset-* *-cache-path *mmap-* no-create-attention-mask-* repeated-*
        dataloader-type eval-micro-batch-size train-*-path trust-remote-code legacy-tokenizer
        tokenizer-metadata tiktoken-*"""),
    ("not needed", "only another kind of model or optimizer reads it",
     """moe-* *-moe-* topk mlp-type expert-interval expert-tensor-parallel-size use-tutel inference fim-* mup-*
        qk-clip-* muon-* sgd-momentum decoder-seq-length mtp-loss-scaling-factor num-channels patch-dim"""),
)  # fmt: skip


def kind_of(name: str, values: Sequence[str]) -> tuple[Kind | Literal["refused"], str]:
    """What to report of a flag that no field came from, and why."""
    for why, names in REFUSED:
        if found := [word for word in names.split() if word.partition("=")[0] == name]:
            is_off = bool(values) and all(f"{name}={value.removesuffix('.0')}" in found for value in values)
            return ("not needed", "that turns it off") if is_off else ("refused", why)
    for kind, why, names in OTHERS:
        if any(fnmatch.fnmatchcase(name, word) for word in names.split()):
            return kind, why
    return "not understood", "check whether it changes what is trained"


@dataclass(frozen=True)
class Row:
    """What became of a flag, or of a key of a ds_config."""

    kind: Kind
    flag: str
    value: str
    field: str = ""
    """Of the recipe."""
    result: str = ""
    remark: str = ""


@dataclass(frozen=True)
class Given:
    """A flag as it was written, with its dashes."""

    flag: str
    values: list[str]
    place: str

    @property
    def text(self) -> str:
        return " ".join(self.values)


@dataclass
class CommandLine:
    program: str = ""
    flags: dict[str, Given] = field(default_factory=dict)
    """By name. Of a flag that is given twice the last one counts, as in argparse."""
    stray: list[str] = field(default_factory=list)
    """Words that belong to no flag."""


def parse_command(words: Sequence[str], place: str) -> CommandLine:
    """The program and its flags, each with the words up to the next one. Nothing is refused here."""
    at = next((i for i, word in enumerate(words) if word.endswith(".py")), -1)
    line = CommandLine(words[at] if at >= 0 else "")
    last = line.stray
    for word in words[at + 1 :]:
        flag, equals, value = word.partition("=")
        name = flag.removeprefix("--")
        if not word.startswith("--"):
            last.append(word)
        elif name:
            last = [value] if equals else []
            line.flags[name] = Given(flag, last, place)
            last = line.stray if name in SWITCHES.split() or re.match("(no-(?!rope)|use-|disable-)", name) else last
    return line
