"""Metric and event names, in one place. They are a public contract: dashboards and parsers rely on them."""

from enum import StrEnum

METRICS_FILE = "metrics.jsonl"
ABANDONED_METRICS_FILE = "metrics-abandoned.jsonl"
EVENTS_FILE = "events.jsonl"
TEXT_LOG_FILE = "logs/main_log.txt"
STACKS_FILE = "logs/stacks.txt"
TENSORBOARD_FOLDER = "tensorboard"
REPORT_FILE = "report.html"
SAMPLES_FILE = "samples.jsonl"
RECIPE_FILE = "recipe.yaml"


class Event(StrEnum):
    """Kinds of events.jsonl (docs/run-folder.md). `journal.event` takes no other, so that none is spelled twice."""

    CADENCE = "cadence"
    CARBON = "carbon"
    CARBON_OFF = "carbon_off"
    CHANGED = "changed"
    DAMAGED = "damaged"
    DEBRIS_REMOVED = "debris_removed"
    DRIFT = "drift"
    ERROR = "error"
    FETCHED = "fetched"
    HANG = "hang"
    LATEST_MENDED = "latest_mended"
    NOTE = "note"
    PLAN = "plan"
    PROFILE = "profile"
    REPAIRED = "file_repaired"
    RETENTION_FAILED = "retention_failed"
    RETIRED = "retired"
    REWIND = "rewind"
    SAVE = "save"
    SAVE_FAILED = "save_failed"
    SKIP = "skip"
    SKIPPED_UPDATE = "skipped_update"
    SLOW_RANK = "slow_rank"
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
FACT_ANCESTOR = "ancestor"
FACT_REASON = "reason"
FACT_ENERGY = "energy"
FACT_ENERGY_SENSOR = "energy_sensor"
FACT_REFERENCE_LOSSES = "reference_losses"
FACT_SETUP_SECONDS = "setup_seconds"
FACT_SCHEDULER = "scheduler"
SHOWN_FACTS = (
    FACT_RECIPE,
    FACT_PARAMETERS,
    FACT_ANCESTOR,
    FACT_ENERGY_SENSOR,
    *("device", "ranks", "precision", "fingerprint", "versions", "host", "command", "commit"),
)
