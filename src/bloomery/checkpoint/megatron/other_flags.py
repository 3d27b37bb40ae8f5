"""The flags of Megatron-LM and of the two Megatron-DeepSpeed that no field of a recipe comes from, and why.

Some need nothing here. Others change what is trained in a way that a recipe cannot say, so they are refused. A flag
that is neither here nor in `flags.py` is unknown, and listed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Kind = Literal["mapped", "default", "differs", "left out", "not needed", "not understood"]

_KERNEL = "a choice of kernels; ours are chosen by what is needed and tested to agree"
_RANKS = "how processes talk; PyTorch decides"
_RUN = "a run has one folder (--run-dir), and goes on from its newest checkpoint by itself"
_LOG = "always recorded in metrics.jsonl and TensorBoard"
_LOADER = "one thread reads ahead; nothing to set"
_SAVE = "how a checkpoint is written; ours has one form, for every layout"
_STAGES = "layers are shared among pipeline stages by their cost"
_ACTIVATIONS = "how activations are stored; parallel.recompute is what there is to choose"
_FP32 = "gradients are always summed in fp32"
_MEMORY = "the allocator and the garbage collector are left alone"
_WATCH = "a job watches itself: monitor.drift, NaN steps, lost ranks"
_OTHER_MODEL = "only another kind of model reads it"


def _all(names: str, arity: int, why: str) -> dict[str, tuple[int, str]]:
    return dict.fromkeys(names.split(), (arity, why))


NOT_NEEDED: dict[str, tuple[int, str]] = {
    **_all("""abort-on-unmet-fused-kernel-constraints no-masked-softmax-fusion masked-softmax-fusion
        no-bias-dropout-fusion no-bias-swiglu-fusion use-flash-attn use-flash-attn-v1 use-flash-attn-v2
        use-flash-attn-triton use-flash-attn-builder use-fast-softmax no-persist-layer-norm disable-mem-efficient-ln
        no-gradient-accumulation-fusion no-async-tensor-model-parallel-allreduce no-rope-fusion use-te-activation-func
        attention-softmax-in-fp32 no-query-key-layer-scaling apply-query-key-layer-scaling use-mcore-models
        use-legacy-models cross-entropy-loss-fusion disable-bf16-reduced-precision-matmul deterministic-mode
        te-rng-tracker enable-cuda-graph external-cuda-graph enable-experimental mask-tensor-adding
        embedding-weights-in-fp32 fix-position-emb-redundant-alloc memory-centric-tiled-linear""", 0, _KERNEL),
    **_all("""attention-backend transformer-impl cross-entropy-fusion-impl use-fused-rmsnorm use-fused-sdpa
        use-fused-sdpa-with-recompute use-torch-compile use-torch-compiled-autograd compiled-autograd-fallback-mode
        onnx-safe tile-factor""", 1, _KERNEL),
    **_all("""distributed-backend distributed-timeout-minutes distributed-timeout-seconds-after-init local_rank
        local-rank DDP-impl nccl-communicator-config-path lazy-mpu-init sharp-enabled-group wgrad-deferral-limit
        pipeline-model-parallel-comm-backend microbatch-group-size-per-virtual-pipeline-stage train-sync-interval
        suggested-communication-unit-size""", 1, _RANKS),
    **_all("cp-comm-type hierarchical-context-parallel-sizes high-priority-stream-groups", -1, _RANKS),
    **_all("""use-sharp use-nccl-ub disable-symmetric-registration no-delay-grad-reduce delay-grad-reduce
        overlap-grad-reduce no-align-grad-reduce overlap-param-gather overlap-param-gather-with-optimizer-step
        delay-param-gather no-align-param-gather no-scatter-gather-tensors-in-pipeline use-ring-exchange-p2p
        overlap-p2p-communication no-overlap-p2p-communication overlap-p2p-communication-warmup-flush
        use-tp-pp-dp-mapping defer-embedding-wgrad-compute delay-wgrad-compute use-contiguous-buffers-in-ddp
        no-contiguous-buffers-in-local-ddp no-gradient-reduce-div-fusion disable-gloo-process-groups
        force-ds-sequence-parallel fsdp-double-buffer init-model-with-meta-device keep-fp8-transpose-cache
        zero-reduce-scatter zero-contigious-gradients deepspeed_mpi""", 0, _RANKS),
    **_all("zero-reduce-bucket-size zero-allgather-bucket-size", 1, _RANKS),
    **_all("save load load-tag", 1, _RUN),
    "kill-switch-path": (1, "touch control/kill in the run folder"),
    "exit-signal-handler": (0, "a signal always saves and ends a job"),
    "exit-signal": (1, "a signal always saves and ends a job"),
    "codecarbon-dir": (1, "energy is in metrics.jsonl where a sensor counts it; emissions are not estimated"),
    **_all("""override-lr-scheduler use-checkpoint-lr-scheduler override-opt_param-scheduler
        override-opt-param-scheduler use-checkpoint-opt_param-scheduler use-checkpoint-opt-param-scheduler
        universal-checkpoint no-load-optim no-load-rng no-load-lr-state no-save-optim no-save-rng reset-iteration
        no-initialization exit-on-missing-checkpoint use-mp-args-from-checkpoint-args load-main-params-from-ckpt
        no-use-tokenizer-model-from-checkpoint-args no-strict-fsdp-dtensor-load verify-checkpoint""", 0, _RUN),
    "verify-checkpoint-model-type": (1, _RUN),
    **_all("timing-log-level timing-log-option logging-level config-logger-dir app-tag-run-name app-tag-run-version",
           1, _LOG),
    **_all("no-barrier-with-level-1-timing no-one-logger", 0, _LOG),
    "profile": (-1, "`bloomery train --trace` looks inside a step"),
    **_all("num-workers valid-num-workers data-impl num-dataset-builder-threads object-storage-cache-path", 1, _LOADER),
    **_all("""mmap-warmup no-mmap-bin-files no-create-attention-mask-in-dataloader repeated-dataloader
        return-data-index disable-msc""", 0, _LOADER),
    **_all("mid-level-dataset-surplus eval-micro-batch-size", 1, _LOADER),
    "dataloader-type": (1, "the order of samples is Bloomery's own: data.order"),
    **_all("train-idx-path train-desc-path train-doc-idx-path train-sample-idx-path train-shuffle-idx-path", 1,
           "the order of samples is Bloomery's own: data.order"),
    "no-seq-len-plus-one-tokens": (0, "a sample has one token more than the sequence, so that every place has a label"),
    "async-strategy": (1, _SAVE),
    **_all("use-persistent-ckpt-worker async-save use-dist-ckpt auto-detect-ckpt-format replication", 0, _SAVE),
    **_all("replication-jump replication-factor", 1, _SAVE),
    **_all("""pp-partition-method decoder-first-pipeline-num-layers decoder-last-pipeline-num-layers
        pipeline-model-parallel-layout""", 1, _STAGES),
    **_all("""standalone-embedding-stage account-for-embedding-in-pipeline-split
        account-for-loss-in-pipeline-split""", 0, _STAGES),
    "sync-tp-duplicated-parameters": (0, "copies cannot drift: gradients are the same, and monitor.drift watches"),
    "sequence-parallel": (0, "tensor-parallel ranks always share the sequence between layers"),
    "no-pipeline-parallel": (0, "parallel.pp says it"),
    **_all("checkpoint-num-layers recompute-method recompute-num-layers", 1,
           "recompute: full recomputes block by block"),
    **_all("""partition-activations contigious-checkpointing checkpoint-in-cpu synchronize-each-layer profile-backward
        use-pin-memory scattered-embeddings split-transformers distribute-saved-activations
        distribute-checkpointed-activations pytorch-activation-checkpointing ds-sequence-parallel-fpdt
        ds-sequence-parallel-fpdt-offloading no-clone-scatter-output-in-embedding cpu-offloading
        cpu-offloading-activations cpu-offloading-weights""", 0, _ACTIVATIONS),
    **_all("recompute-modules", -1, "recompute: selective recomputes attention"),
    **_all("ds-sequence-parallel-fpdt-chunk-size cpu-offloading-num-layers", 1, _ACTIVATIONS),
    **_all("test-data-path test-weighted-split-paths", -1, "training does not read the test part"),
    "test-weighted-split-paths-path": (1, "training does not read the test part"),
    "no-binary-head": (0, "see --bert-no-binary-head"),
    "fp16-lm-cross-entropy": (0, "the loss is always computed in fp32"),
    **_all("accumulate-allreduce-grads-in-fp32 grad-reduce-in-bf16", 0, _FP32),
    "calculate-per-token-loss": (0, "the loss is always the mean over the tokens of the global batch"),
    "apply-layernorm-1p": (0, "the norm's weight is kept as one more than a number; what is learned is the same"),
    **_all("empty-unused-memory-level manual-gc-interval memory-snapshot-path", 1, _MEMORY),
    **_all("manual-gc no-manual-gc-eval record-memory-history", 0, _MEMORY),
    **_all("""no-check-for-nan-in-loss-and-grad check-for-nan-in-loss-and-grad check-for-spiky-loss
        check-for-large-grads enable-ft-package calc-ft-timeouts inprocess-restart run-workload-inspector-server
        disable-straggler-on-startup adlr-autoresume check-tp-norm""", 0, _WATCH),
    **_all("""check-weight-hash-across-dp-replicas-interval rerun-mode error-injection-rate error-injection-type
        result-rejected-tracker-filename adlr-autoresume-interval start-check-tp-norm-iter end-check-tp-norm-iter
        check-tp-norm-type""", 1, _WATCH),
    **_all("use-cpu-initialization", 0, "initial weights follow from the seed, whatever the device and the layout"),
    "sgd-momentum": (1, "only --optimizer sgd reads it"),
    **_all("cpu_torch_adam ds_fused_adam use-torch-optimizer-for-cpu-offload overlap-cpu-optimizer-d2h-h2d "
           "no-pin-cpu-grads no-pin-cpu-params use-precision-aware-optimizer", 0, "how the optimizer is computed"),
    **_all("optimizer-offload-fraction dump-param-to-param-group-map", 1, "how the optimizer is computed"),
    **_all("trust-remote-code legacy-tokenizer", 0, "the folder says which tokenizer it is"),
    **_all("tokenizer-metadata tiktoken-pattern tiktoken-num-special-tokens", 1,
           "the folder says which tokenizer it is"),
    "tiktoken-special-tokens": (-1, "the folder says which tokenizer it is"),
    **_all("num-classes img-h img-w img-dim num-channels patch-dim decoder-seq-length retriever-seq-length topk "
           "mlp-type expert-interval expert-tensor-parallel-size max-tokens-to-oom kv-lora-rank q-lora-rank "
           "qk-head-dim qk-pos-emb-head-dim v-head-dim rotary-scaling-factor mscale mscale-all-dim "
           "mtp-loss-scaling-factor rope-scaling-factor relative-attention-num-buckets "
           "relative-attention-max-distance", 1, _OTHER_MODEL),
    **_all("create-moe-param-group use-tutel disable-moe-token-dropping enable-expert-tensor-parallelism "
           "disable-moe-top2-2nd-expert-sampling ds-inference inference", 0, _OTHER_MODEL),
}  # fmt: skip

_BY_PREFIX = {
    "log-": _LOG, "no-log-": _LOG, "tensorboard-": _LOG, "wandb-": _LOG, "one-logger-": _LOG, "tensor-logger-": _LOG,
    "profile-": "`bloomery train --trace` looks inside a step",
    "use-pytorch-profiler": "`bloomery train --trace` looks inside a step",
    "ckpt-": _SAVE, "no-ckpt-": _SAVE, "dist-ckpt-": _SAVE, "distrib-optim-": _SAVE,
    "tp-comm-": _RANKS, "disable-tp-comm-": _RANKS, "ddp-": _RANKS, "cuda-graph-": _KERNEL,
    "straggler-": _WATCH, "inprocess-": _WATCH,
    "fp8-": "how fp8 is scaled; ours has one way", "no-fp8-": "how fp8 is scaled; ours has one way",
    "moe-": "only a model of experts reads it (--num-experts)",
    **dict.fromkeys(("muon-", "adaptive-muon-", "soap-", "lion-"), "only an --optimizer of that name reads it"),
    "fim-": "only --fim-data reads it", "mup-": "only --use-mup reads it", "qk-clip-": "only --qk-clip reads it",
    "kd-": "only a distillation reads it (--kd)",
    "rl-": _OTHER_MODEL, "grpo-": _OTHER_MODEL, "langrl-": _OTHER_MODEL, "retro-": _OTHER_MODEL, "mamba-": _OTHER_MODEL,
    "inference-": _OTHER_MODEL, "dino-": _OTHER_MODEL, "vision-": _OTHER_MODEL, "biencoder-": _OTHER_MODEL,
}  # fmt: skip


@dataclass(frozen=True)
class Refused:
    arity: int
    rule: str
    off: tuple[str, ...] = ()
    """Values with which it does nothing."""


def _none(names: str, arity: int, rule: str, *off: str) -> dict[str, Refused]:
    return dict.fromkeys(names.split(), Refused(arity, rule, off))


_ACTIVATION = "of the families here llama has gated SiLU, bert the exact GELU and the others its tanh form"
_INIT = "weights begin normally distributed with one model.init_std, those before a residual scaled down"
_DECAY = "a recipe has one weight decay, for all weights but norms and biases"
_ONE_LR = "a recipe has one learning rate for all weights"
_STREAM = "every sample is a stretch of the documents' stream, of full length, with a loss at every place"
_NO_TRAINING = "it ends without a training, and a recipe is one"
_EXPERTS = "no family here has experts"
_ATTENTION = "no family here has such an attention"
_ROTARY = "rotary positions turn the whole head at every layer, without scaling"

REFUSED: dict[str, Refused] = {
    **_none("num-experts expert-model-parallel-size moe-expert-parallel-size num-experts-switch", -1, _EXPERTS, "1"),
    **_none("moe-use-upcycling", 0, _EXPERTS),
    **_none("multi-latent-attention qk-layernorm qk-l2-norm qk-clip add-qkv-bias attention-output-gate", 0, _ATTENTION),
    **_none("window-size window-attn-skip-freq experimental-attention-variant linear-attention-freq", -1, _ATTENTION),
    **_none("softmax-type", 1, _ATTENTION, "vanilla"),
    **_none("rotary-interleaved use-rope-scaling", 0, _ROTARY),
    **_none("rotary-seq-len-interpolation-factor", 1, _ROTARY, "1"),
    **_none("no-rope-freq", 1, _ROTARY),
    **_none("rope-type", 1, _ROTARY, "rope"),
    **_none("mrope-section", -1, _ROTARY),
    **_none("squared-relu quick-geglu", 0, _ACTIVATION),
    **_none("glu-activation activation-func-clamp-value", 1, _ACTIVATION),
    **_none("glu-linear-offset", 1, _ACTIVATION, "0", "0.0"),
    **_none("apply-residual-connection-post-layernorm", 0, "no family here computes that"),
    **_none("init-method-xavier-uniform no-scaled-init data-parallel-random-init use-mup", 0, _INIT),
    **_none("embedding-init-method-std", 1, _INIT),
    **_none("start-weight-decay end-weight-decay", 1, _DECAY),
    **_none("weight-decay-incr-style", 1, _DECAY, "constant"),
    **_none("do-norm-bias-weight-decay no-decoupled-weight-decay apply-wd-to-qk-layernorm", 0, _DECAY),
    **_none("no-weight-decay-cond-type", 1, _DECAY),
    **_none("decoupled-lr decoupled-min-lr head-lr-mult", 1, _ONE_LR),
    **_none("lr-warmup-init", 1, "the warm-up begins at zero", "0", "0.0"),
    **_none("fp4-format", 1, "the precisions here are fp32, bf16, fp16 and fp8"),
    **_none("mtp-num-layers", 1, "the loss is that of the next token", "0"),
    **_none("random-ltd data-efficiency-curriculum-learning loss-on-targets-only "
            "reweight-loss-based-on-position-frequency sft fim-data", 0, _STREAM),
    **_none("phase-transition-iterations", -1, "the sources of a recipe do not change on the way"),
    **_none("step-batch-size-schedule", -1, "a recipe's batch grows in equal stages of samples: where these are equal, "
            "write --global-batch-size N --rampup-batch-size START INCREMENT SAMPLES"),
    **_none("sample-rate", 1, _STREAM, "1", "1.0"),
    **_none("vocab-extra-ids", 1, "the vocabulary is that of the tokenizer", "0"),
    **_none("kd mos", 0, "no model here learns from another"),
    **_none("skip-train", 0, _NO_TRAINING),
    **_none("eval-only", 1, _NO_TRAINING),
    **_none("hybrid-attention-ratio hybrid-mlp-ratio", 1, "all layers are alike", "0", "0.0"),
    **_none("hybrid-override-pattern hybrid-layer-pattern", 1, "all layers are alike"),
    **_none("perform-rl-step retro-add-retriever vision-pretraining is-hybrid-model enable-hyper-connections", 0,
            "no family here does that"),
    **_none("heterogeneous-layers-config-path heterogeneous-layers-config-encoded-json", 1, "all layers are alike"),
    **_none("spec", -1, "the families here have fixed layers"),
    **_none("decoder-num-layers", 1, "the families here have no decoder behind an encoder"),
    **_none("kitchen-config-file kitchen-recipe-number te-precision-config-file", 1, "all layers have one precision"),
    **_none("yaml-cfg", 1, "Megatron then takes all of its arguments from that file, which is not read here"),
    **_none("batch-size", 1, "Megatron asks for --micro-batch-size instead"),
    **_none("model-parallel-size", 1, "Megatron asks for --tensor-model-parallel-size instead"),
    **_none("warmup", 1, "Megatron asks for --lr-warmup-fraction instead"),
}  # fmt: skip


def _told(kind: Kind, names: str, arity: int, why: str) -> dict[str, tuple[int, Kind, str]]:
    return dict.fromkeys(names.split(), (arity, kind, why))


TOLD: dict[str, tuple[int, Kind, str]] = {
    **_told("left out", "finetune", 0, "begins with the weights of --load: see `bloomery import hf`"),
    **_told("left out", "pretrained-checkpoint bert-load", 1, "begins with those weights: see `bloomery import hf`"),
    **_told("left out", "use-checkpoint-args", 0, "the checkpoint's arguments would overrule these: check the model"),
    **_told("left out", "ckpt-step", 1, "`bloomery train --from` chooses a checkpoint"),
    **_told("left out", "data-args-path per-split-data-args-path", 1,
            "a file of sources, which is not read: add `data:` to the recipe"),
    **_told("left out", "aml-data-download-path", 1, "a folder before every path of --data-path: add it in `data:`"),
    **_told("left out", "mock-data", 0, "invented tokens: add `data:` to the recipe"),
    **_told("left out", "save-retain-interval", 1, "add checkpoint.keep to the recipe: {last: 1, every: N steps}"),
    **_told("left out", """non-persistent-save-interval non-persistent-ckpt-type non-persistent-global-ckpt-dir
        non-persistent-local-ckpt-dir non-persistent-local-ckpt-algo""", 1, "add checkpoint.local to the recipe"),
    **_told("left out", "num-distributed-optimizer-instances", 1, "add parallel.shard_size: replicas divided by it"),
    **_told("left out", "eval-loss-exit-value", 1, "a training ends by its length (train.for), or by hand"),
    **_told("differs", "fp32-residual-connection", 0, "the residual stream has the precision of the rest"),
    **_told("differs", "first-last-layers-bf16", 0, "all layers have one precision"),
    **_told("differs", "num-layers-at-start-in-bf16 num-layers-at-end-in-bf16", 1, "all layers have one precision"),
    **_told("differs", "use-bnb-optimizer", 0, "moments are kept in fp32"),
    **_told("differs", "main-grads-dtype main-params-dtype exp-avg-dtype exp-avg-sq-dtype", 1,
            "weights, gradients and moments are kept in fp32"),
    **_told("differs", "full-validation multiple-validation-sets", 0,
            "an evaluation has train.evaluate.steps batches for every group of data.validation"),
    **_told("differs", "train-data-exact-num-epochs", 1, "sources are repeated as often as train.for needs"),
    **_told("differs", "disable-doc-shuffling", 0, "the order of samples is Bloomery's own: data.order"),
    **_told("differs", "decrease-batch-size-if-needed", 0, "batch sizes never follow from the machines"),
}  # fmt: skip
"""What a recipe does otherwise, or can have, but not from these flags alone."""


def not_needed(name: str) -> str:
    """Why this flag needs nothing; empty if it is none of them."""
    if name in NOT_NEEDED:
        return NOT_NEEDED[name][1]
    return next((why for prefix, why in _BY_PREFIX.items() if name.startswith(prefix)), "")


def other_arity(name: str) -> int | None:
    """How many values a flag of this file takes, -1 for any number; None if that is not known."""
    if name in REFUSED:
        return REFUSED[name].arity
    return NOT_NEEDED[name][0] if name in NOT_NEEDED else TOLD[name][0] if name in TOLD else None
