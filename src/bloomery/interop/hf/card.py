"""The model card: what a reader of the exported folder should know, from the recipe, the checkpoint and the run."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
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
from bloomery.monitor.history import event_of, scan, scan_metrics
from bloomery.monitor.record import Record, ValidationRecord
from bloomery.sizing.parameters import count_parameters

Event = dict[str, Any]
_SECTIONS = ("seed", "model", "data", "batch", "optimizer", "lr", "precision", "loss_scale", "parallel")


def model_card(checkpoint: Checkpoint, *, architecture: str, dtype: str, proof: str) -> str:
    """Markdown with the head that hubs read. Says only what was recorded."""
    recipe, state, folder = checkpoint.recipe, checkpoint.state, checkpoint.folder
    run, step = folder.parent.parent, int(state["step"])
    jobs = _jobs(run, step, checkpoint.manifest.get("time", math.inf))
    parameters = count_parameters(recipe.model).total
    pipeline = "fill-mask" if FAMILIES[recipe.model.family].encoder else "text-generation"
    sections, skipped = as_dict(recipe), state.get("skipped_updates", 0)
    parts = [
        f"---\nlibrary_name: transformers\npipeline_tag: {pipeline}\ntags: [bloomery, {recipe.model.family}]\n---",
        f"# {recipe.name}",
        f"`{architecture}` with {parameters:,} parameters, pretrained with Bloomery {bloomery.__version__} on "
        f"{checkpoint.consumed_tokens:,} tokens ({state['consumed_samples']:,} samples) in {step:,} steps, of "
        f"which {skipped:,} updated nothing. Weights in {dtype}.",
        f"## Recipe\n\n```yaml\n{dump_yaml({key: sections[key] for key in _SECTIONS})}```",
        "## Losses\n\n" + _losses(run, step),
        "## Energy\n\n" + _energy(Energy.from_json(state.get("energy")), jobs),
        "## Lineage\n\n" + _table(_lineage(checkpoint, jobs)),
        f"## Proof\n\n{proof[:1].upper()}{proof[1:]}. Details: `export-proof.json`.",
    ]
    return "\n\n".join(parts) + "\n"


def _table(rows: Mapping[str, Any]) -> str:
    return "| | |\n|---|---|\n" + "\n".join(f"| {name} | {value} |" for name, value in rows.items())


def _jobs(run: Path, step: int, saved_at: float) -> list[Event]:
    """The starts that came before this checkpoint, as the ledger has them; nothing if it is not there."""
    found: list[Event] = []

    def take(line: bytes) -> None:
        event = event_of(line)
        if event["kind"] == names.Event.START and event["step"] <= step and event["time"] <= saved_at:
            found.append(event)

    if (run / names.EVENTS_FILE).is_file():
        scan(run / names.EVENTS_FILE, take)
    return found


def _losses(run: Path, step: int) -> str:
    if not (run / names.METRICS_FILE).is_file():
        return "The run folder was not beside the checkpoint."
    newest: dict[str, Record] = {}

    def take(record: Record) -> None:
        what = f"validation {record.group}" if isinstance(record, ValidationRecord) else "training"
        if record.step <= step and (what not in newest or newest[what].step <= record.step):
            newest[what] = record

    scan_metrics(run / names.METRICS_FILE, take)
    lines = ["| | step | loss |", "|---|---|---|"]
    for what, record in sorted(newest.items()):  # training before validation
        lines += [f"| {what}, {name} | {record.step:,} | {x:.4f} |" for name, x in record.losses.items()]
    return "\n".join(lines) if len(lines) > 2 else "No step up to this checkpoint was logged."


def _energy(spent: Energy, jobs: list[Event]) -> str:
    if not spent.device_seconds:
        return "Not recorded."
    hours, joules = format_device_hours(spent.device_seconds), spent.measured_joules
    sensors = "; ".join(dict.fromkeys(job[names.FACT_ENERGY_SENSOR] for job in jobs if names.FACT_ENERGY_SENSOR in job))
    if joules is None:
        return f"Not measured: {sensors or NO_SENSOR}. Training took {hours}."
    rows = {
        "measured": f"{format_joules(joules)} ({joules:,.0f} J)",
        "device time": hours,
        "of which measured": f"{spent.coverage:.0%}",
    }
    rows |= {"sensor": sensors} if sensors else {}
    return (
        f"{_table(rows)}\n\nOf all jobs of the run up to this checkpoint, repeated steps included. Of the devices that "
        "trained, without the machines around them, network and cooling."
    )


def _lineage(checkpoint: Checkpoint, jobs: list[Event]) -> dict[str, Any]:
    saved, began = checkpoint.manifest, "random weights"
    content = read_small(checkpoint.folder / MANIFEST, LARGE_BYTES)
    if origin := checkpoint.state.get("imported_from"):
        hashes = ", ".join(f"{key} `{value}`" for key, value in origin.items() if key != "folder")
        began = f"the weights of `{origin['folder']}`, whose own training is not counted here ({hashes})"
    rows = {
        "run": f"`{checkpoint.recipe.name}`",
        "recipe fingerprint": f"`{fingerprint(checkpoint.recipe)}`",
        "checkpoint": f"`{checkpoint.folder.name}`",
        "sha256 of its manifest": f"`{hashlib.sha256(content).hexdigest()}`",
        "saved by": f"torch {saved.get('versions', {}).get('torch', 'unknown')}, {saved.get('ranks', 1)} rank(s)",
        "exported by": f"Bloomery {bloomery.__version__}, torch {torch.__version__}",
        "began with": began,
    }
    if jobs:
        rows["trained by"] = ", ".join(f"{name} {version}" for name, version in jobs[-1].get("versions", {}).items())
        rows["trained on"] = f"{jobs[-1].get('ranks', 1)} x {jobs[-1].get('device', 'unknown')}"
        rows["jobs"] = f"{len(jobs)}: " + ", ".join(
            f"from `{job['resumed_from']}`" if job.get("resumed_from") else "from the beginning" for job in jobs
        )
    return rows
