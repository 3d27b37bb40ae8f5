"""The model card: what a reader of the exported folder should know, from the recipe, the checkpoint and the run."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

import bloomery
from bloomery.base.bounded import LARGE_BYTES, parse_json, read_json, read_small
from bloomery.base.energy import NO_SENSOR, Energy, format_device_hours, format_joules
from bloomery.checkpoint.format import MANIFEST
from bloomery.checkpoint.load import consumed_tokens
from bloomery.config.describe import fingerprint
from bloomery.config.recipe import Recipe
from bloomery.families.registry import FAMILIES
from bloomery.monitor import names
from bloomery.monitor.history import event_of, scan, scan_metrics
from bloomery.monitor.meters import is_whole
from bloomery.monitor.record import Record, ValidationRecord
from bloomery.sizing.parameters import count_parameters


def model_card(
    recipe: Recipe, checkpoint: Path, state: Mapping[str, Any], *, architecture: str, dtype: str, proof: str
) -> str:
    """Markdown with the head that hubs read. Says only what was recorded."""
    run = checkpoint.parent.parent
    jobs = _jobs(run, checkpoint, int(state["step"]))
    parameters = count_parameters(recipe.model, vocab_size=recipe.model.vocab_size).total
    tokens = consumed_tokens(recipe, state)
    pipeline = "fill-mask" if FAMILIES[recipe.model.family].encoder else "text-generation"
    sections = [
        f"---\nlibrary_name: transformers\npipeline_tag: {pipeline}\ntags: [bloomery, {recipe.model.family}]\n---",
        f"# {recipe.name}",
        f"`{architecture}` with {parameters:,} parameters, pretrained with Bloomery "
        f"{bloomery.__version__} on {tokens:,} tokens in {state['step']:,} steps. Weights in {dtype}.",
        "## Model\n\n" + _table(_model_rows(recipe)),
        "## Data\n\n" + _data(recipe),
        "## Training\n\n" + _table(_training_rows(recipe, state)) + _changes(run, checkpoint, int(state["step"])),
        "## Losses\n\n" + _losses(run, int(state["step"])),
        "## Energy\n\n" + _energy(Energy.from_json(state.get("energy")), jobs),
        "## Lineage\n\n" + _table(_lineage(recipe, checkpoint, state, jobs)),
        f"## Proof\n\n{proof[:1].upper()}{proof[1:]}. Details: `export-proof.json`.",
    ]
    return "\n\n".join(sections) + "\n"


def _table(rows: Mapping[str, Any]) -> str:
    return "| | |\n|---|---|\n" + "\n".join(f"| {name} | {value} |" for name, value in rows.items())


def _model_rows(recipe: Recipe) -> dict[str, Any]:
    model = recipe.model
    rows: dict[str, Any] = {
        "family": model.family,
        "layers": model.num_layers,
        "hidden size": model.hidden_size,
        "heads": model.num_heads,
        "key/value heads": model.num_kv_heads,
        "MLP width": model.ffn_hidden_size,
        "sequence length": model.seq_length,
        "vocabulary": model.vocab_size,
        "embedding and head": "tied" if model.tie_embeddings else "untied",
    }
    return rows


def _data(recipe: Recipe) -> str:
    if recipe.data is None:
        return "Not recorded."
    lines = ["| source | weight |", "|---|---|"]
    lines += [f"| `{source.name or source.path}` | {source.weight:g} |" for source in recipe.data.train]
    return "\n".join([*lines, "", f"Order `{recipe.data.order}`, seed {recipe.seed}."])


def _training_rows(recipe: Recipe, state: Mapping[str, Any]) -> dict[str, Any]:
    optimizer, lr, ramp = recipe.optimizer, recipe.lr, recipe.batch.rampup
    batch = f"{recipe.batch.global_batch_size} samples"
    if ramp is not None:
        batch += f", from {ramp.start} in steps of {ramp.increment} over {ramp.samples:,} samples"
    clip = optimizer.clip_grad_norm
    clipping = f"gradient norm clipped to {clip:g}" if clip else "gradients not clipped"
    decay = f"decay {lr.decay}" if lr.decay else "no decay" if lr.schedule == "constant" else "decay to the end"
    return {
        "steps": f"{state['step']:,}",
        "samples": f"{state['consumed_samples']:,}",
        "tokens": f"{consumed_tokens(recipe, state):,}",
        "updates skipped": state.get("skipped_updates", 0),
        "global batch": batch,
        "optimizer": f"{optimizer.name}, betas {optimizer.betas}, eps {optimizer.eps:g}, "
        f"weight decay {optimizer.weight_decay:g}, {clipping}",
        "learning rate": f"{lr.schedule}, peak {lr.peak:g}, min {lr.min:g}, warm-up {lr.warmup}, {decay}",
        "dropout": recipe.model.dropout,
        "precision": recipe.precision,
        "layout": f"tp {recipe.parallel.tp}, pp {recipe.parallel.pp}, cp {recipe.parallel.cp}, "
        f"ZeRO {recipe.parallel.zero}",
    }


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


def _jobs(run: Path, checkpoint: Path, step: int) -> list[dict[str, Any]]:
    """Starts of the run that came before this checkpoint."""
    return _events(run, checkpoint, step, names.Event.START)


def _events(run: Path, checkpoint: Path, step: int, kind: str) -> list[dict[str, Any]]:
    """What came before this checkpoint, as the ledger has it; nothing if it is not there."""
    ledger = run / names.EVENTS_FILE
    if not ledger.is_file():
        return []
    saved_at = read_json(checkpoint / MANIFEST, LARGE_BYTES).get("time", math.inf)
    found: list[dict[str, Any]] = []

    def take(line: bytes) -> None:
        event = event_of(line)
        if event["kind"] == kind and event["step"] <= step and event["time"] <= saved_at:
            found.append(event)

    scan(ledger, take)
    return found


def _changes(run: Path, checkpoint: Path, step: int) -> str:
    """What `--change` changed on the way here, without what a later job went back before."""
    starts = _jobs(run, checkpoint, step)
    rows = {}
    for event in _events(run, checkpoint, step, names.Event.CHANGED):
        if not any(start["time"] > event["time"] and start["step"] < event["step"] for start in starts):
            line = f"| {event['step'] + 1:,} | `{event['field']}` | {event['old']} | {event['new']} |"
            rows[(event["step"], event["field"])] = line
    if not rows:
        return ""
    head = "Changed on the way, and shown above as it was at the end:\n\n| from step | field | before | then |"
    return "\n\n" + "\n".join([head, "|---|---|---|---|", *(rows[key] for key in sorted(rows))])


def _energy(spent: Energy, jobs: list[dict[str, Any]]) -> str:
    if not spent.device_seconds:
        return "Not recorded."
    hours, joules = format_device_hours(spent.device_seconds), spent.measured_joules
    sensors = list(dict.fromkeys(job[names.FACT_ENERGY_SENSOR] for job in jobs if names.FACT_ENERGY_SENSOR in job))
    if joules is None:
        return f"Not measured: {'; '.join(sensors) or NO_SENSOR}. Training took {hours}."
    rows = {
        "measured": f"{format_joules(joules)} ({joules:,.0f} J)",
        "device time": hours,
        "of which measured": f"{1 if is_whole(spent) else spent.coverage:.0%}",
    }
    rows |= {"sensor": "; ".join(sensors)} if sensors else {}
    remark = (
        "Of all jobs of the run up to this checkpoint, steps that were done again included. "
        "Of the devices that trained, without the machines around them, network and cooling."
    )
    return f"{_table(rows)}\n\n{remark}"


def _lineage(recipe: Recipe, checkpoint: Path, state: Mapping[str, Any], jobs: list[dict[str, Any]]) -> dict[str, Any]:
    content = read_small(checkpoint / MANIFEST, LARGE_BYTES)
    saved = parse_json(content)
    rows = {
        "run": f"`{recipe.name}`",
        "recipe fingerprint": f"`{fingerprint(recipe)}`",
        "checkpoint": f"`{checkpoint.name}`",
        "sha256 of its manifest": f"`{hashlib.sha256(content).hexdigest()}`",
        "saved by": f"torch {saved.get('versions', {}).get('torch', 'unknown')}, {saved.get('ranks', 1)} rank(s)",
        "exported by": f"Bloomery {bloomery.__version__}, torch {torch.__version__}",
    }
    origin = state.get("imported_from")
    rows["began with"] = "random weights"
    if origin:
        told = ", ".join(f"{key} `{value}`" for key, value in origin.items() if key != "folder")
        rows["began with"] = f"the weights of `{origin['folder']}`, whose own training is not counted here ({told})"
    if jobs:
        rows["trained by"] = ", ".join(f"{name} {version}" for name, version in jobs[-1].get("versions", {}).items())
        rows["trained on"] = f"{jobs[-1].get('ranks', 1)} x {jobs[-1].get('device', 'unknown')}"
        rows["jobs"] = f"{len(jobs)}: " + ", ".join(
            f"from `{job['resumed_from']}`" if job.get("resumed_from") else "from the beginning" for job in jobs
        )
    return rows
