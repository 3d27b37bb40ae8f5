"""The model card: what a reader of the exported folder should know, from the recipe, the checkpoint and the run."""

import hashlib
from pathlib import Path
from typing import Any

import torch

import bloomery
from bloomery.base.accelerator import NO_SENSOR
from bloomery.base.bounded import LARGE_BYTES, read_small
from bloomery.base.units import Energy, format_device_hours, format_joules
from bloomery.checkpoint.folder import MANIFEST
from bloomery.checkpoint.load import Checkpoint
from bloomery.config.load import as_dict, fingerprint
from bloomery.config.yaml_nodes import dump_yaml
from bloomery.families.registry import FAMILIES
from bloomery.monitor import names
from bloomery.monitor.history import event_of, lines_of, valid_records
from bloomery.monitor.record import Record, ValidationRecord
from bloomery.sizing.parameters import count_parameters

_SECTIONS = ("seed", "model", "data", "batch", "optimizer", "lr", "precision", "loss_scale", "parallel")


def model_card(checkpoint: Checkpoint, *, architecture: str, dtype: str, proof: str) -> str:
    """Markdown with the head that hubs read. Says only what was recorded."""
    recipe, state, run = checkpoint.recipe, checkpoint.state, checkpoint.folder.parent.parent
    sections, start = as_dict(recipe), _last_start(run, checkpoint)
    pipeline = "fill-mask" if FAMILIES[recipe.model.family].encoder else "text-generation"
    lineage = "\n".join(f"- {name}: {value}" for name, value in _lineage(checkpoint, start).items())
    parts = [
        f"---\nlibrary_name: transformers\npipeline_tag: {pipeline}\ntags: [bloomery, {recipe.model.family}]\n---",
        f"# {recipe.name}",
        f"`{architecture}` with {count_parameters(recipe.model).total:,} parameters, pretrained with Bloomery "
        f"{bloomery.__version__} on {checkpoint.consumed_tokens:,} tokens ({state['consumed_samples']:,} samples) in "
        f"{state['step']:,} steps, of which {state.get('skipped_updates', 0):,} updated nothing. Weights in {dtype}.",
        f"## Recipe\n\n```yaml\n{dump_yaml({key: sections[key] for key in _SECTIONS})}```",
        "## Losses\n\n" + _losses(run, state["step"]),
        "## Energy\n\n"
        + _energy(Energy.from_json(state.get("energy")), start.get(names.FACT_ENERGY_SENSOR, NO_SENSOR)),
        f"## Lineage\n\n{lineage}",
        f"## Proof\n\n{proof[:1].upper()}{proof[1:]}. Details: `export-proof.json`.",
    ]
    return "\n\n".join(parts) + "\n"


def _last_start(run: Path, checkpoint: Checkpoint) -> dict[str, Any]:
    """Of the job that saved this checkpoint, as the ledger has it; empty if it is not there."""
    step, saved_at = checkpoint.state["step"], checkpoint.manifest.get("time", float("inf"))
    found: dict[str, Any] = {}

    def parse(line: bytes) -> dict[str, Any] | None:
        event = event_of(line)
        is_before = event["kind"] == names.Event.START and event["step"] <= step and event["time"] <= saved_at
        return event if is_before else None

    for event in lines_of(run / names.EVENTS_FILE, parse) if (run / names.EVENTS_FILE).is_file() else ():
        found = event or found
    return found


def _losses(run: Path, step: int) -> str:
    if not (run / names.METRICS_FILE).is_file():
        return "The run folder was not beside the checkpoint."
    newest: dict[str, Record] = {}

    for record in valid_records(run / names.METRICS_FILE):
        what = f"validation {record.group}" if isinstance(record, ValidationRecord) else "training"
        if record.step <= step and (what not in newest or newest[what].step <= record.step):
            newest[what] = record
    lines = [
        f"- {what}, {name}: {loss:.4f} at step {record.step:,}"
        for what, record in sorted(newest.items())  # training before validation
        for name, loss in record.losses.items()
    ]
    return "\n".join(lines) or "No step up to this checkpoint was logged."


def _energy(spent: Energy, sensor: str) -> str:
    """Of all jobs of the run up to this checkpoint, repeated steps included."""
    if not spent.device_seconds:
        return "Not recorded."
    hours, joules = format_device_hours(spent.device_seconds), spent.measured_joules
    if joules is None:
        return f"Not measured: {sensor}. Training took {hours}."
    return (
        f"{format_joules(joules)} ({joules:,.0f} J) in {hours}, {spent.coverage:.0%} of it measured by {sensor}. "
        "Of the devices that trained, repeated steps included, without the machines around them, network and cooling."
    )


def _lineage(checkpoint: Checkpoint, start: dict[str, Any]) -> dict[str, str]:
    manifest, began = read_small(checkpoint.folder / MANIFEST, LARGE_BYTES), "random weights"
    if origin := checkpoint.state.get("imported_from"):
        hashes = ", ".join(f"{key} `{value}`" for key, value in origin.items() if key != "folder")
        began = f"the weights of `{origin['folder']}`, whose own training is not counted here ({hashes})"
    rows = {
        "run": f"`{checkpoint.recipe.name}`",
        "recipe fingerprint": f"`{fingerprint(checkpoint.recipe)}`",
        "checkpoint": f"`{checkpoint.folder.name}`",
        "sha256 of its manifest": f"`{hashlib.sha256(manifest).hexdigest()}`",
        "began with": began,
        "exported by": f"Bloomery {bloomery.__version__}, torch {torch.__version__}",
    }
    if start:
        rows["trained by"] = ", ".join(f"{name} {version}" for name, version in start.get("versions", {}).items())
        rows["trained on"] = f"{start.get('ranks', 1)} x {start.get('device', 'unknown')}"
    return rows
