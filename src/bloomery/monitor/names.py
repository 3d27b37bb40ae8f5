"""Metric and event names, in one place. They are a public contract: dashboards and parsers rely on them."""

from __future__ import annotations

from enum import StrEnum

METRICS_FILE = "metrics.jsonl"
EVENTS_FILE = "events.jsonl"
TEXT_LOG_FILE = "logs/main_log.txt"
TENSORBOARD_FOLDER = "tensorboard"
REPORT_FILE = "report.html"
RECIPE_FILE = "recipe.yaml"

KIND_STEP = "step"
KIND_VALIDATION = "validation"


class Event(StrEnum):
    """Kinds of events.jsonl (docs/run-folder.md). `journal.event` takes no other, so that none is spelled twice."""

    CADENCE = "cadence"
    CHANGED = "changed"
    DAMAGED = "damaged"
    DEBRIS_REMOVED = "debris_removed"
    DRIFT = "drift"
    ERROR = "error"
    FETCHED = "fetched"
    LATEST_MENDED = "latest_mended"
    NOTE = "note"
    REPAIRED = "file_repaired"
    RETENTION_FAILED = "retention_failed"
    RETIRED = "retired"
    REWIND = "rewind"
    SAVE = "save"
    SAVE_FAILED = "save_failed"
    SKIP = "skip"
    SKIPPED_UPDATE = "skipped_update"
    SPIKE = "spike"
    SPIKE_OVER = "spike_over"
    START = "start"
    STOP = "stop"
    STORAGE_RECOVERED = "storage_recovered"
    STORAGE_TROUBLE = "storage_trouble"
    TAKEN_OVER = "taken_over"
    TENSORBOARD_OFF = "tensorboard_off"
    UPLOAD = "upload"
    UPLOAD_FAILED = "upload_failed"


# Facts of events that the report shows in a place of their own.
FACT_RECIPE = "recipe"
FACT_PARAMETERS = "parameters"
FACT_REASON = "reason"
FACT_ENERGY = "energy"
FACT_ENERGY_SENSOR = "energy_sensor"
FACT_REFERENCE_LOSSES = "reference_losses"

# TensorBoard: requirements 10.2. A tag with a suffix has that count as its x axis instead of steps.
VS_STEPS = ""
VS_SAMPLES = " vs samples"
VS_TOKENS = " vs tokens"
VS_GIGAFLOPS = " vs gigaflos (without embeddings)"

TAG_LEARNING_RATE = "learning-rate/learning-rate"
TAG_BATCH_SIZE = "batch-size/batch-size"
TAG_GRAD_NORM = "grad-norm/grad-norm"
TAG_NUM_ZEROS = "num-zeros/num-zeros"
TAG_LOSS_SCALE = "loss-scale/loss-scale"
TAG_ITERATION_TIME = "iteration-time/iteration-time"
TAG_SAMPLES_PER_SECOND = "iteration-time/samples per second"
TAG_TOKENS_PER_SECOND = "iteration-time/tokens per second"
TAG_SAMPLES_PER_REPLICA = "iteration-time/samples per second per replica"
TAG_TOKENS_PER_REPLICA = "iteration-time/tokens per second per replica"
TAG_WORLD_SIZE = "iteration-time/world_size"
TAG_RECIPE = "recipe/text_summary"
TAG_TFLOPS = "iteration-time/TFLOPs per gpu (estimated)"
TAG_MFU = "iteration-time/MFU"
TAG_MEMORY = "memory/allocated bytes"
TAG_PEAK_MEMORY = "memory/peak allocated bytes"
TAG_ENERGY = "energy/joules"
TAG_STEPS_BY_SAMPLES = "steps-vs-samples/y=steps,x=samples"
TAG_SAMPLES_BY_STEPS = "steps-vs-samples/y=samples,x=steps"
TAG_STEPS_BY_TOKENS = "steps-vs-tokens/y=steps,x=tokens"
TAG_TOKENS_BY_STEPS = "steps-vs-tokens/y=tokens,x=steps"


def training_loss_tag(loss: str) -> str:
    """`lm-loss-training/lm loss`."""
    return f"lm-loss-training/{loss}"


def source_loss_tag(source: str) -> str:
    """`lm-loss-training/source/shards/oscar-en`."""
    return f"lm-loss-training/source/{source}"


def validation_loss_tag(group: str, loss: str) -> str:
    """`lm-loss-validation/{group}/lm loss validation`; its perplexity adds ` ppl`."""
    return f"lm-loss-validation/{group}/{loss} validation"
