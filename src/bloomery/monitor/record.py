"""The record of one logged step or one validation, and its JSON: one strict line, NaN included."""

import dataclasses
import json
import math
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from pydantic import Field, TypeAdapter, ValidationError

from bloomery.base.bounded import wrong_fields


@dataclass(frozen=True, kw_only=True)
class StepRecord:
    """One logged interval of training, named by its last step."""

    kind: Literal["step"] = "step"
    step: int
    train_steps: int
    consumed_samples: int
    consumed_tokens: int
    consumed_gigaflops: int
    """6 * tokens * parameters without embeddings / 1e9, as the seeds count it."""
    global_batch: int
    lr: float
    losses: dict[str, float]
    """Mean over the interval, by name: {'lm loss': 2.46}. NaN is written as NaN, never left out."""
    grad_norm: float
    num_zeros: float | None
    """Gradient entries that are exactly zero, at the last step of the interval; None if not counted."""
    loss_scale: float | None
    """None unless fp16."""
    skipped_steps: int
    """Within the interval, as is nan_steps."""
    nan_steps: int
    seconds_per_step: float
    samples_per_second: float
    tokens_per_second: float
    tflops: float
    """Model TFLOP/s per device, by `tflops_definition`."""
    tflops_definition: str
    mfu: float | None
    """A fraction of the device's peak; None when that peak is not known."""
    memory_bytes: int | None
    peak_memory_bytes: int | None
    """Like memory_bytes of the rank that has most."""
    job: int
    """Which incarnation of the run wrote this; a restart has the next number."""
    time: float
    """Unix seconds."""
    replicas: int = 1
    """Data-parallel copies of the model."""
    world_size: int = 1
    """Ranks."""
    params_norm: float | None = None
    """L2 norm of all weights after the last step of the interval."""
    hardware_tflops: float | None = None
    """As `tflops`, with what recomputation adds."""
    hardware_tflops_definition: str = ""
    megatron_tflops: float | None = None
    """By the formula of Megatron-DeepSpeed's log line (sizing/flops.py)."""
    memory_share: float | None = None
    """Of the device, `peak_memory_bytes`; None on a CPU."""
    timers: dict[str, float] = field(default_factory=dict)
    """Seconds on rank 0, by phase: `data`, `forward`, `backward`, `optimizer`, `wait` (for other ranks) and `other` of
    a step in the mean, which sum to it; and of the whole interval `save`, `eval` and `profile`, which the step does not
    count."""
    rank_timers: dict[str, tuple[float, float, float, int]] = field(default_factory=dict)
    """Where there are several ranks, of each phase the least, the median, the most, and the rank that had it."""
    source_losses: dict[str, float] = field(default_factory=dict)
    """Of a blend: the mean language-model loss over the tokens of each source in the interval; else empty."""
    source_samples: dict[str, int] = field(default_factory=dict)
    """Of a blend: samples taken from each source so far."""
    energy: dict[str, float] = field(default_factory=dict)
    """What the run has spent until then, on all ranks and in all jobs: `joules`, and the device-seconds that they cover
    (`measured_seconds`) of all (`device_seconds`). Empty in records of older versions."""

    resources: dict[str, dict[str, float]] = field(default_factory=dict)
    """By host what it has and uses (monitor/resources.py): every ten seconds at most, else empty."""
    emissions: dict[str, float] = field(default_factory=dict)
    """CodeCarbon's newest reading of this job, summed over nodes: `kg_co2e`, `joules`, `nodes`; else empty."""


@dataclass(frozen=True, kw_only=True)
class ValidationRecord:
    """One validation group, evaluated after `step`."""

    kind: Literal["validation"] = "validation"
    step: int
    consumed_samples: int
    consumed_tokens: int
    consumed_gigaflops: int
    group: str
    part: Literal["validation", "test"] = "validation"
    """A test group is evaluated once, after the training."""
    losses: dict[str, float]
    perplexity: float
    """perplexity_of the lm loss."""
    batches: int
    job: int
    time: float


Record = StepRecord | ValidationRecord


def perplexity_of(loss: float) -> float:
    """exp(min(20, loss)), the reference's cap; a NaN loss stays NaN."""
    return math.nan if math.isnan(loss) else math.exp(min(20.0, loss))


def to_json(record: Record) -> str:
    """One line without newline; its `kind` selects the class that reads it back."""
    return strict_json(dataclasses.asdict(record))


def from_json(line: str | bytes) -> Record:
    """ValueError if the line is not a whole record. Fields of a newer version are ignored."""
    try:
        return _READER.validate_json(line)  # what `strict_json` writes for NaN and infinities becomes a float
    except ValidationError as error:
        raise ValueError(wrong_fields(error)) from None


_READER: TypeAdapter[Record] = TypeAdapter(Annotated[Record, Field(discriminator="kind")])


def strict_json(value: Any, *, indent: int | None = None) -> str:
    """JSON that every parser reads: NaN and infinities become the strings 'NaN', 'Infinity' and '-Infinity'; scalars of
    numpy and torch become numbers, and what JSON does not know becomes its text."""
    text = json.dumps(value, default=lambda each: each.item() if hasattr(each, "item") else str(each))
    return json.dumps(json.loads(text, parse_constant=str), ensure_ascii=False, indent=indent)
