"""The recipe: every field a user may write, its type, its range and its default. Inert: no file, network or device.

A new field is added in its class here and nowhere else: type, default, meaning (the text below it, shown in messages
and in docs/recipe.md) and, unless its section's holds, a mark for what a resumed run may do with it (`OnResume`).
Derived numbers live in `bloomery.sizing`, rules between fields in `sizing/check.py`, and defaults that depend on the
model family in `families/`.
"""

from typing import Annotated, Literal

from pydantic import Field

from bloomery.base.units import Amount, Duration
from bloomery.config.fields import (
    ARCHITECTURE,
    BATCH,
    BEGINNING,
    DURATION,
    FIXED,
    JOB_END,
    LAYOUT,
    LENGTH,
    MOST_LAYERS,
    NUMERICS,
    ORDER,
    RATE,
    REPORTING,
    ROTARY,
    SAMPLES,
    SKIPS,
    SOURCES,
    SPIKES,
    TOKENIZER,
    UPDATE,
    VALIDATION,
    AmountOrDuration,
    AnyAmount,
    Documents,
    Length,
    PathText,
    Section,
    Size,
    SplitText,
    Steps,
    StepsOrTime,
    StepsOrTimeOrAuto,
    WallClock,
)
from bloomery.families.registry import FAMILIES

Precision = Literal["auto", "fp32", "bf16", "fp16", "fp8"]
Recompute = Literal["none", "mlp", "selective", "full"]
Schedule = Literal["constant", "linear", "cosine", "wsd"]
PipelineSchedule = Literal["gpipe", "1f1b", "interleaved", "zero_bubble"]


class ModelSection(Section):
    """The architecture. Fields marked 'by family' have a default that depends on it."""

    family: Literal[tuple(FAMILIES)]  # type: ignore[valid-type]
    """gpt2 (learned positions), bloom (ALiBi), llama, qwen2, qwen3 (rotary, gated MLP) or bert (encoder)."""
    num_layers: Annotated[int, Field(gt=0, le=MOST_LAYERS)]
    """Transformer blocks."""
    hidden_size: Size
    """Width of the residual stream."""
    num_heads: int = Field(gt=0, le=65536)
    """Attention heads; must divide hidden_size, unless head_dim is set."""
    head_dim: Annotated[int, Field(gt=0, le=4096)] | None = None
    """Width of a head (families with rotary positions); default: hidden_size / num_heads."""
    num_kv_heads: Size
    """Key/value heads (families with rotary positions); by family: num_heads."""
    ffn_hidden_size: Size
    """Width inside the MLP; by family: 4 * hidden_size, or 8/3 of it rounded up to 256 where gated."""
    seq_length: Annotated[Size, LENGTH]
    """Tokens in a training sample."""
    vocab_size: Size
    """Entries of the tokenizer. The embedding is padded up to vocab_multiple, whatever the layout."""
    vocab_multiple: Size = 128
    """The embedding's rows are a multiple of this, so that every tensor-parallel degree divides them."""
    softmax_over_padding: Annotated[bool, NUMERICS] = False
    """Whether the softmax of the loss includes the padded rows, as in Megatron; false: they learn nothing."""
    dropout: Annotated[float, NUMERICS] = Field(ge=0, lt=1)
    """Probability of dropping an activation (embedding, attention, residual); by family: 0.1, or 0.0 with rotary."""
    init_std: float = Field(default=0.02, gt=0)
    """Standard deviation of initial weights; decoders scale output projections by 1/sqrt(2 * num_layers)."""
    norm_eps: float = Field(gt=0)
    """Epsilon of the norms; by family: 1e-5, qwen 1e-6, bert 1e-12."""
    rope_theta: Annotated[float, ROTARY] = Field(default=10000.0, gt=0)
    """Base of the rotary frequencies (families with rotary positions)."""
    tie_embeddings: bool
    """Whether the output head shares the token embedding; by family: true, or false with rotary."""

    second_head: Literal["sentence_order", "next_sentence", "none"] = "sentence_order"
    """What bert also predicts: whether two segments are exchanged, whether the second follows the first; or nothing."""

    @property
    def head_size(self) -> int:
        """head_dim, or its default."""
        return self.head_dim or self.hidden_size // self.num_heads


class TokenizerSection(Section):
    path: PathText
    """A tokenizer's folder or file, or `hf://org/name` of the Hub; docs/prepare.md lists the kinds."""


class SourceSection(Section):
    path: PathText
    """Shard prefix: `<path>.bin` and `<path>.idx`, relative to the working directory."""
    name: str | None = None
    """Stable name in the order of samples, so that shards may move; default: the path."""
    weight: float = Field(default=1.0, gt=0, le=1e100)
    """Share of samples drawn from this source, relative to the others."""


class MaskingSection(Section):
    """Masked language modelling, as BERT and Megatron do it."""

    probability: float = Field(default=0.15, gt=0, lt=1)
    """Share of tokens to predict."""
    short_sequence_probability: float = Field(default=0.1, ge=0, le=1)
    """Share of samples that are made shorter than the sequence, so that the model sees short ones too."""


class DataSection(Section):
    order: Annotated[Literal["timeless", "megatron", "bigscience"], ORDER] = "timeless"
    """How samples are ordered; the latter two repeat another system's order, to continue its runs."""
    blend_one_source: Annotated[bool, ORDER] = False
    """In these two, treat one source like a blend: Megatron does so where it has a weight, `--data-path 1.0 PATH`."""
    train: Annotated[list[SourceSection], SOURCES] = Field(min_length=1)
    """What is trained on."""
    validation: Annotated[dict[str, Annotated[list[SourceSection], Field(min_length=1)]], VALIDATION] = {}
    """Named groups, each evaluated and logged on its own."""
    test: Annotated[dict[str, Annotated[list[SourceSection], Field(min_length=1)]], VALIDATION] = {}
    """The same, but evaluated once, when the training is finished."""
    split: Annotated[SplitText | None, ORDER] = None
    """Train, valid and test parts of each source of `train`: one to three numbers, '949,50,1'; missing ones are 0."""
    split_by: Annotated[Literal["documents", "tokens"], ORDER] = "documents"
    """What the parts are counted in; tokens cut also a text that is one document (timeless order, not bert)."""
    mask_documents: bool = False
    """Attention does not cross from one document of a packed sample into the next."""
    reset_positions: bool = False
    """Positions start again at 0 with every document of a packed sample."""
    eod_loss: bool = True
    """Whether the loss includes what follows an end of document; false masks those labels."""
    masking: MaskingSection | None = None
    """How samples are masked (bert only)."""
    cache_dir: Annotated[PathText, REPORTING] = "cache"
    """Where index caches go; the data folder itself may be read-only."""

    @property
    def groups(self) -> dict[str, list[SourceSection]]:
        """All sources, by their dotted path."""
        named = {"validation": self.validation, "test": self.test}
        evaluated = {f"data.{part}.{name}": group for part, groups in named.items() for name, group in groups.items()}
        return {"data.train": self.train, **evaluated}


class RampupSection(Section):
    start: Size
    """Global batch size of the first step."""
    increment: Size
    """How much each level adds."""
    samples: Size
    """Samples over which the batch grows to its full size."""


class BatchSection(Section):
    micro_batch_size: Annotated[Size, LAYOUT]
    """Samples in one forward pass of one replica."""
    global_batch_size: Size
    """Samples in one optimizer step, over all replicas."""
    rampup: RampupSection | None = None
    """Grow the global batch in equal stages of samples."""


class OptimizerSection(Section):
    name: Annotated[Literal["adamw"], FIXED] = "adamw"
    """The optimizer."""
    betas: list[Annotated[float, Field(ge=0, lt=1)]] = Field(default=[0.9, 0.95], min_length=2, max_length=2)
    """Decay rates of the two moments."""
    eps: float = Field(default=1e-8, gt=0)
    """Added to the denominator."""
    weight_decay: float = Field(default=0.1, ge=0)
    """Decoupled decay; norms and biases are exempt."""
    clip_grad_norm: float | None = Field(default=1.0, gt=0)
    """Clip the global gradient norm to this; null turns clipping off."""


class LrSection(Section):
    peak: float = Field(gt=0)
    """The highest learning rate."""
    min: float = Field(default=0.0, ge=0)
    """The learning rate after the decay."""
    schedule: Schedule = "cosine"
    """constant, linear, cosine, or wsd (warm-up, stable, decay)."""
    warmup: AnyAmount = Amount(0, "samples")
    """Linear rise from zero to the peak."""
    decay: AnyAmount | None = None
    """Where the decay has ended, counted from the start of training; default: the end of training."""
    cooldown: AnyAmount | None = None
    """Length of the final linear decay (wsd only), ending at `decay`."""


class EvaluateSection(Section):
    every: Steps
    """Steps between evaluations."""
    steps: Size = 5
    """Global batches evaluated per group; always the same ones, so that values compare."""


RUN_NAME = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,99}$"
StepRange = Annotated[str, Field(pattern=r"^[0-9]{1,12}-[0-9]{1,12} steps$")]


class TrainSection(Section):
    for_: Length = Field(alias="for")
    """Length of the training: steps, samples, tokens, `2 epochs` (of the smallest source) or `2 epochs of NAME`."""
    exit_after: Annotated[AmountOrDuration | None, JOB_END] = None
    """End this job (not the training) after a wall-clock time or an amount; it saves and can be resumed."""
    evaluate: Annotated[EvaluateSection | None, REPORTING] = None
    """When to evaluate the validation groups; omitted: never."""
    skip: Annotated[list[StepRange], SKIPS] = Field(default_factory=list)
    """Ranges of steps whose data is skipped, with their unit, such as '1000-1010 steps'; it counts as consumed."""
    stop_after_nan_steps: Size = 3
    """A step with a NaN loss or gradient is skipped; this many in a row stop the training."""
    on_spike: Annotated[Literal["warn", "skip_update", "rewind"], SPIKES] = "warn"
    """What a loss or gradient norm far above recent ones does: warn, also skip the update, or also rewind."""
    spike_factor: Annotated[float, SPIKES] = Field(default=6.0, ge=1)
    """Threshold of a spike: times the distance of the 90th percentile of recent steps from their median."""
    stop_after_spike_steps: Annotated[Size, SPIKES] = 50
    """This many such steps, before 10 normal ones in a row, stop the training."""
    compile: Annotated[Literal[True, False, "auto"], LAYOUT] = "auto"
    """torch.compile the model; auto: on an accelerator, not on a CPU."""


class LossScaleSection(Section):
    """Dynamic loss scaling, fp16 only."""

    initial: float = Field(default=4096.0, gt=0)
    """Scale of the first step."""
    window: Steps = Amount(500, "steps")
    """Clean steps before the scale doubles."""
    hysteresis: Size = 2
    """Overflows tolerated before the scale halves; refilled when it grows."""
    consecutive_hysteresis: bool = False
    """Refill after every clean step: only overflows in a row use it up. DeepSpeed's option of the same name."""
    min: float = Field(default=1.0, gt=0)
    """An overflow at this scale stops the training."""


class ParallelSection(Section):
    """How ranks share the work; data-parallel replicas are what remains of the world."""

    tp: Size = 1
    """Tensor-parallel ranks: they share every layer, and between layers the sequence."""
    pp: Size = 1
    """Pipeline-parallel ranks: each owns some of the layers."""
    cp: Size = 1
    """Context-parallel ranks: they share the tokens of every sample."""
    zero: Literal[0, 1, 2, 3] = 1
    """What data-parallel ranks shard: nothing, optimizer state, + gradients, + weights."""
    shard_size: Size | None = None
    """Ranks that share one sharded copy; fewer than all data- and context-parallel ranks makes copies of it (HSDP)."""
    schedule: PipelineSchedule = "1f1b"
    """Order of forward and backward passes in a pipeline."""
    chunks: Size = 1
    """Pipeline stages per rank: at least 2 for interleaved and zero_bubble, 1 for the others."""
    recompute: Recompute = "none"
    """Recompute activations in the backward pass: nothing, what lies between the matrices of each MLP,
    attention only, or whole blocks."""
    offload: bool = False
    """Keep master weights and optimizer moments in host memory, and update them there."""


class PhaseSection(Section):
    until: Steps | None = None
    """Last step of this phase (always saved); the last phase has none."""
    every: StepsOrTimeOrAuto
    """Save at every multiple of so many steps; or when so much time, such as `10m`, has passed since the last save or
    the start of the job; `auto`: chosen from the failure rate (`checkpoint.failure_every`)."""


class KeepSection(Section):
    last: Size = 3
    """Newest checkpoints to keep."""
    every: Steps | None = None
    """Also keep every checkpoint at a multiple of this, for good."""
    steps: list[Size] = []
    """Also keep the checkpoints of these steps, for good: `[1000, 5000]`."""
    best: int = Field(default=0, ge=0)
    """Also keep this many with the lowest validation loss, of those evaluated at their step."""


class LocalTierSection(Section):
    path: PathText
    """Folder on the fast storage of every node, such as NVMe or /dev/shm; nodes need not share it."""
    every: Steps
    """Save there at every multiple of this, unless the step is also saved in the run folder."""
    keep: Size = 1
    """Newest checkpoints to keep there."""


class UploadSection(Section):
    to: PathText
    """Folder or fsspec URL for the checkpoints of this run alone, such as `s3://bucket/run`."""
    every: StepsOrTime | None = None
    """Only checkpoints at a multiple of so many steps, or so much time after the one copied before; omitted: all of the
    run folder."""


class CheckpointSection(Section):
    phases: list[PhaseSection] = Field(default=[PhaseSection(every=Amount(1000, "steps"))], min_length=1)
    """When to save. A run also saves when it stops."""
    keep: KeepSection | None = None
    """What to keep; omitted: everything."""
    local: LocalTierSection | None = None
    """Faster storage, saved to more often; a restart resumes from the newest complete checkpoint of both."""
    upload: UploadSection | None = None
    """Copy complete checkpoints to remote storage; a start fetches the newest from there if it is newer."""
    failure_every: WallClock | None = None
    """Mean time between failures of the whole job, for `every: auto`; omitted: 50,000 hours divided by the devices."""
    timeout: WallClock = Duration(1800.0)
    """A save that takes longer is reported as a failure; training continues."""
    debris: Literal["remove", "keep"] = "remove"
    """What a start does with the remains of killed saves: delete them, or keep them in `debris/`."""


class CarbonSection(Section):
    country: str = Field(pattern=r"^[A-Z]{3}$")
    """ISO code of the country whose grid feeds the machine: three capitals, such as FRA."""


class DriftSection(Section):
    """Compares hashes of what ranks hold in common: replicated weights and moments, and the training state."""

    every: Steps = Amount(100, "steps")
    """Steps between two comparisons."""
    action: Literal["stop", "warn"] = "stop"
    """What a difference does."""


class AlertsSection(Section):
    """What `bloomery watch --pulse` reports, and to whom."""

    email: list[PathText] = []
    """Addresses."""
    sender: PathText = "bloomery@localhost"
    """Of the e-mails."""
    smtp: PathText = "localhost:25"
    """Mail server, without a password."""
    webhook_variable: Annotated[str, Field(pattern=r"^[A-Za-z_]\w*$")] | None = None
    """Environment variable with the address of a webhook, which gets `{"text": ...}`."""
    command: PathText | None = None
    """Line of bash that reads the alert from its standard input."""
    silent_after: WallClock = Duration(900.0)
    """A run that logs nothing for so long hangs; ten times its usual interval, if that is longer."""
    slow_below: float = Field(default=0.5, ge=0, lt=1)
    """Share of the usual tokens/s below which a run is slow."""
    disk_below: float = Field(default=0.05, ge=0, lt=1)
    """Share of the file system's bytes or file entries below which they run short."""


class ProfileSection(Section):
    """Which steps of a job are profiled: cycles of some left alone, some to warm up, some recorded."""

    wait: int = Field(default=2, ge=0)
    """Steps left alone, in each cycle."""
    warmup: int = Field(default=1, ge=0)
    """Steps that only warm the profiler up."""
    active: Size = 3
    """Steps recorded."""
    repeat: Size = 2
    """Cycles, each with a trace of its own."""
    shapes: bool = False
    """Record the shapes of tensors."""
    stacks: bool = False
    """Record where in the source."""
    memory: bool = False
    """Record allocations; on CUDA also a snapshot of its memory."""
    ranks: list[Annotated[int, Field(ge=0)]] = [0]
    """Who records."""


class SamplesSection(Section):
    """Texts that the report shows as each checkpoint continues them, the likeliest token always."""

    prompts: Annotated[list[str], Field(min_length=1)]
    """Their beginnings: `[Once upon a time]`."""
    tokens: Size = 60
    """How many are added to each."""


class MonitorSection(Section):
    log_every: Steps = Amount(10, "steps")
    """Steps between log lines and metric records."""
    tensorboard: bool = True
    """Write TensorBoard event files."""
    drift: DriftSection | None = DriftSection()
    """Watch for ranks that drift apart; null: never."""
    carbon: CarbonSection | None = None
    """Measure and estimate emissions with CodeCarbon, `pip install bloomery[carbon]`."""
    mlflow: PathText | None = None
    """Where MLflow tracks: `sqlite:///mlflow.db`, the URL of a server, or `auto`: MLFLOW_TRACKING_URI."""
    wandb: PathText | None = None
    """Project of Weights & Biases; WANDB_MODE=offline needs no network."""
    profile: ProfileSection | None = None
    """Profile some steps of every job; omitted: only those asked for on a live run."""
    samples: SamplesSection | None = None
    """Continue texts with every checkpoint that is there when `bloomery report` is called."""
    alerts: AlertsSection | None = None
    """Whom to alert of what; omitted: nobody."""


class AzuremlSection(Section):
    """What a command job of Azure Machine Learning needs besides its nodes."""

    compute: Annotated[str, Field(pattern=r"^[A-Za-z][\w-]*$")]
    """Name of the compute cluster, without `azureml:`."""
    sku: PathText | None = None
    """Size of its machines, to warn of missing InfiniBand: `Standard_ND96asr_v4`."""
    environment: PathText
    """A registered environment such as `azureml:bloomery@latest`, or an image: `docker.io/org/image:tag`."""
    outputs: Annotated[str, Field(pattern="^azureml://")]
    """Durable place of the run folder, `azureml://datastores/NAME/paths/FOLDER`: a replaced node resumes from it."""
    inputs: dict[Annotated[str, Field(pattern=r"^[A-Za-z_]\w*$")], Annotated[str, Field(pattern="^azureml://")]] = {}
    """Folders (`azureml://...`) that are mounted read-only and appear in the working directory under their names, which
    are letters, digits and `_`: `{shards: URI}`."""
    shm_size: Annotated[str, Field(pattern="^[1-9][0-9]*[bkmg]$")] = "64g"
    """Size of /dev/shm in the container: `64g`, or a number with b, k or m."""
    services: list[Literal["jupyter_lab", "tensor_board", "vs_code"]] = []
    """Interactive services of the job; tensor_board shows those of the run."""
    experiment: PathText | None = None
    """Where the studio lists the job; default: the name of the run."""


Line = Annotated[str, Field(pattern=r"^[^\n\r]+$")]


class StageSection(Section):
    """A step of the data on Slurm: an array of jobs, each with a share of the work, then one that completes it."""

    arguments: list[Line] = []
    """Of `bloomery download` or `bloomery extract`: `[files.jsonl, --output, raw]`. `prepare` reads the recipe."""
    array: Size = 1
    """How many shares."""
    partition: Line | None = None
    """Instead of that of `launch`."""
    time_limit: WallClock | None = None
    """Instead of that of `launch`."""
    mem: Line | None = None
    """Instead of that of `launch`."""
    cpus_per_task: Size | None = None
    """Cores of each share."""


class LaunchSection(Section):
    on: Literal["local", "hosts", "slurm", "azureml"] = "local"
    """Where the job runs."""
    nodes: Size = 1
    """Machines."""
    nodes_after_ramp: Size | None = None
    """Machines of the jobs that start when the batch ramp is over (hosts, slurm)."""
    gpus_per_node: Size = 1
    """Ranks per machine."""
    time_limit: WallClock | None = None
    """The scheduler's limit for one job."""
    save_before: WallClock = Duration(300.0)
    """How long before the time limit the ranks are asked to save and stop (slurm)."""
    array: Size = 1
    """Jobs in a chain, one after the other. With a time limit and no chain, a job puts itself into the queue again."""
    restarts: int = Field(default=3, ge=0, le=1000)
    """Failures in a row, without any progress between them, after which the job is not started again."""
    env: dict[Annotated[str, Field(pattern=r"^[A-Za-z_]\w*$")], Line] = {}
    """Environment variables of every rank. No secrets: the job's script shows them."""
    setup: list[Line] = []
    """Lines of bash before the training, on every node: `module load cuda`, `source env/bin/activate`."""
    hostfile: PathText | None = None
    """Lines such as `10.10.100.101 slots=8`; the first host has rank 0 (hosts)."""
    partition: Line | None = None
    """Queue of the job (this and all below: slurm)."""
    account: Line | None = None
    """Whom the hours are charged to."""
    qos: Line | None = None
    """Quality of service: limits and priority that the cluster has a name for."""
    constraint: Line | None = None
    """Features that nodes must have."""
    exclude: Line | None = None
    """Nodes not to use: `gpu[017-020],gpu031`."""
    gres: Line | None = "gpu"
    """What is asked for, gpus_per_node of it on every node: `gpu`, `gpu:a100`; null: nothing."""
    cpus_per_task: Size | None = None
    """Cores of each rank."""
    mem: Line | None = None
    """Memory of a node: `0` (all of it) or `480G`."""
    image: Line | None = None
    """Container of the job, by pyxis: a squash file or `docker://...`."""
    mounts: list[Line] = []
    """What the container sees of the node: `/data:/data`."""
    extra_lines: list[Annotated[str, Field(pattern=r"^#SBATCH -[^\n\r]*$")]] = []
    """More `#SBATCH` lines, as they are."""
    stages: dict[Literal["download", "extract", "prepare"], StageSection] = {}
    """What `bloomery launch --step` does before the training (slurm)."""
    azureml: AzuremlSection | None = None


class PrepareSection(Section):
    output: PathText = Field(pattern="[^/]$")
    """Shard prefix to write: `<output>.bin`, `.idx` and `.manifest.json`."""
    sources: list[PathText] = Field(min_length=1)
    """Files, folders, globs or URLs of text; `python-stdlib` is this machine's own Python standard library."""
    text_key: PathText = "text"
    """Where a .jsonl record or a parquet row keeps its document."""
    shuffle: bool = True
    """Put documents into a seeded random order."""
    append_eod: bool = True
    """End every document with the end-of-document token."""
    special_tokens: Literal["as_text", "as_ids"] = "as_text"
    """What `<|endoftext|>` written inside a document becomes: plain text, or (as Megatron does) the special token."""
    split_sentences: bool = False
    """Store each sentence as a sequence of its own, as bert needs."""
    min_tokens: int = Field(default=1, ge=1)
    """Shorter documents are dropped."""
    max_tokens: int | None = Field(default=None, ge=1)
    """Longer documents are dropped."""
    deduplicate: bool = False
    """Keep only the first of documents with exactly the same text."""
    near_duplicates: Annotated[float, Field(ge=0.1, le=0.95)] | None = None
    """Drop documents whose runs of five words agree about so much (Jaccard similarity, by MinHash) with an earlier
    document's: `0.8`. Needs `bloomery[filters]`."""
    languages: list[Annotated[str, Field(pattern="^[a-z]{2,3}$")]] = []
    """Drop documents that are in no language of these, as py3langid recognises it: `[en, de]`. Needs
    `bloomery[filters]`."""
    files: Annotated[str, Field(pattern=r"^(-?[0-9]{1,9})?:(-?[0-9]{1,9})?$")] | None = None
    """Which of their files, in natural order (`a9` before `a10`), as Python writes a slice: `:-30` all but the last 30,
    `-30:-15` the 15 before the last 15, `'-15:'` the last 15."""
    limit: Documents | None = None
    """Draw so many documents at random, by the seed, of those that all filters leave: `10_000 documents`."""
    bad_records: Literal["stop", "skip"] = "stop"
    """What to do with a broken line, invalid UTF-8, a missing text or a forged end: fail, or skip the record."""


class InitSection(Section):
    """Weights to begin with, instead of random ones, where the run has no checkpoint yet."""

    from_: PathText = Field(alias="from")
    """A checkpoint, a run folder (its newest one), a Hugging Face folder or `hf://org/name`: only weights are taken."""


class Recipe(Section):
    """One training, from raw text to checkpoints."""

    name: Annotated[str, REPORTING] = Field(pattern=RUN_NAME)
    """Name of the run and of its folder runs/<name>: letters, digits, `.`, `_` and `-`, at first a letter or digit."""
    seed: Annotated[int, ORDER] = Field(default=42, ge=0, lt=2**63)
    """Initial weights, data order and dropout follow from it."""
    model: Annotated[ModelSection, ARCHITECTURE]
    init: Annotated[InitSection | None, BEGINNING] = None
    tokenizer: Annotated[TokenizerSection | None, TOKENIZER] = None
    prepare: Annotated[list[PrepareSection], REPORTING] = Field(default_factory=list)
    data: Annotated[DataSection | None, SAMPLES] = None
    batch: Annotated[BatchSection, BATCH]
    optimizer: Annotated[OptimizerSection, UPDATE] = OptimizerSection()
    lr: Annotated[LrSection, RATE]
    train: Annotated[TrainSection, DURATION]
    precision: Annotated[Precision, NUMERICS] = "auto"
    """Arithmetic of forward and backward; weights and optimizer keep fp32 copies. auto: bf16 where the device is fast
    in it, else fp32."""
    loss_scale: Annotated[LossScaleSection, NUMERICS] = LossScaleSection()
    parallel: Annotated[ParallelSection, LAYOUT] = ParallelSection()
    checkpoint: Annotated[CheckpointSection, REPORTING] = CheckpointSection()
    monitor: Annotated[MonitorSection, REPORTING] = MonitorSection()
    launch: Annotated[LaunchSection | None, LAYOUT] = None
