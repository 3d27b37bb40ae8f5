"""An event of the ledger in a sentence."""

import re
from collections.abc import Mapping
from typing import Any

from bloomery.base.units import format_bytes, format_seconds
from bloomery.monitor.names import Event

_HEAD = ("kind", "step", "iso_time", "time", "job")
_HIDDEN = ("start", "shards", "tokenizer", "fingerprint", "energy", "versions", "save_host_bytes", "recipe")
_SENTENCES = {
    Event.START: "{ranks} x {device}, {precision}; from {resumed_from}",
    Event.PLAN: "{step_seconds} for a step, {memory_bytes}, {total_seconds} in all, on {machine} ({machine_source})",
    Event.STOP: "{reason}: {text}",
    Event.SAVE: "{bytes} in {seconds}; training stood still for {blocking_seconds}",
    Event.SPIKE: "loss {loss} (limit {loss_limit}), gradient norm {grad_norm} (limit {grad_norm_limit}): {action}",
    Event.REWIND: "back to {to}; the data of steps {passed_over} is passed over",
    Event.CHANGED: "{field}: {old} → {new}",
    Event.ERROR: "{text}",
    Event.HANG: "{text}",
    Event.SKIP: "{reason}, from sample {first_sample}",
    Event.UPLOAD: "to {to} in {seconds}",
    Event.SPIKE_OVER: "normal again",
}
"""Of an event that has all these facts."""
TROUBLE = {
    Event.SPIKE, Event.SKIPPED_UPDATE, Event.HANG, Event.ERROR, Event.DAMAGED, Event.DRIFT, Event.REWIND,
    Event.SAVE_FAILED, Event.SLOW_RANK, Event.STORAGE_TROUBLE, Event.UPLOAD_FAILED, Event.RETENTION_FAILED,
}  # fmt: skip
NOTABLE = TROUBLE | {Event.START, Event.STOP, Event.CHANGED, Event.SKIP, Event.TAKEN_OVER, Event.FETCHED, Event.RETIRED}
"""What a chart marks."""


def sentence(event: Mapping[str, Any]) -> str:
    facts = {key: _shown(key, value) for key, value in event.items() if key not in _HEAD}
    try:
        return _SENTENCES[event["kind"]].format_map(facts)
    except KeyError:  # one of another version, or somebody's own
        return " · ".join(f"{_name(key)}: {text}" for key, text in facts.items() if text and key not in _HIDDEN)


def _name(key: str) -> str:
    return key.replace("_", " ")


def _shown(key: str, value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{_name(name)} {text}" for name, each in value.items() if (text := _shown(name, each)))
    if isinstance(value, list):
        return ", ".join(_shown(key, each) for each in value)
    if isinstance(value, int | float) and not isinstance(value, bool):
        if key.endswith("seconds"):
            return format_seconds(value) if value >= 10 else f"{value:.2g} s"
        return (
            format_bytes(value) if key.endswith("bytes") else f"{value:,}" if isinstance(value, int) else f"{value:.5g}"
        )
    if value is None:
        return "nothing" if key == "resumed_from" else ""
    return re.sub(r"\b([0-9a-f]{8})[0-9a-f]{8,}\b", r"\1…", str(value))
