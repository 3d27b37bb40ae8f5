"""Why a step went wrong: the documents that it read, by their loss, and what the same step does when it is repeated."""

import math
from collections.abc import Iterator
from itertools import takewhile
from pathlib import Path
from statistics import median
from typing import Any

import torch
from safetensors.torch import load_file

from bloomery.base.errors import DataError, Problem
from bloomery.base.ranks import ALONE
from bloomery.checkpoint.folder import complete_checkpoints, step_of
from bloomery.checkpoint.load import read_checkpoint
from bloomery.data.inspect import read_samples
from bloomery.data.open import OpenData
from bloomery.families.registry import FAMILIES
from bloomery.model.loss import token_losses
from bloomery.model.transformer import Transformer
from bloomery.monitor import names
from bloomery.monitor.history import EVENT, read_metrics, readable_lines
from bloomery.monitor.names import Event
from bloomery.monitor.record import StepRecord
from bloomery.sizing.schedule import TrainingPlan
from bloomery.verify.compare import RUN, TRACE

_SHOWN_TOKENS = 200
_TROUBLE = (Event.SPIKE, Event.SKIPPED_UPDATE)
Numbers = dict[int, dict[str, float]]
"""Of steps, by name."""


def checkpoint_before(run: Path, step: int) -> Path | None:
    """The newest one of the steps before."""
    found = [path for path in complete_checkpoints(run / "checkpoints") if step_of(path) < step]
    return max(found, key=step_of, default=None)


def documents_read(
    data: OpenData, plan: TrainingPlan, first_step: int, last_step: int, model: Transformer | None
) -> Iterator[dict[str, Any]]:
    """Every stretch of a document that these steps read, with its mean loss under `model`."""
    first, end = plan.batch.consumed_after_step(first_step - 1), plan.batch.consumed_after_step(last_step)
    for sample in read_samples(data, first, end - 1):
        tokens, begin = sample["tokens"], 0
        losses, counted = _losses(data, model, sample["index"]) if model is not None else (None, None)
        for span in sample["documents"]:
            stop = begin + span["tokens"]
            labels = slice(max(0, begin - 1), stop - 1)  # the label of a token stands one before it
            known = 0 if counted is None else int(counted[labels].sum())
            loss = float(losses[labels].sum()) / known if losses is not None and known else None
            ids = tokens[begin:stop][:_SHOWN_TOKENS]
            yield {
                "step": plan.batch.first_step_reaching(sample["index"] + 1),
                "sample": sample["index"],
                "source": sample["source"],
                "shard": sample["shard"],
                **span,
                "loss": loss,
                "labels": known,
                "text": " ".join(map(str, ids)) if data.tokenizer is None else data.tokenizer.decode(ids),
            }
            begin = stop


def by_excess(documents: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Those first that add most to the loss beyond what so many tokens usually do: few odd tokens do not."""
    losses = [each["loss"] for each in documents if each["loss"] is not None]
    usual = median(losses) if losses else 0.0
    return sorted(documents, key=lambda each: -((each["loss"] or usual) - usual) * each["labels"])


@torch.no_grad()
def _losses(data: OpenData, model: Transformer, position: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Of every label of a sample, and which of them count."""
    batch, device = data.train.batch(position, 1), next(model.parameters()).device
    found = model(**{name: tensor.to(device) for name, tensor in batch.inputs.items()})
    logits = found[0] if FAMILIES[model.config.family].encoder else found
    labels = next(iter(batch.targets.values()))
    return token_losses(logits, labels.to(device))[0].float().cpu(), labels[0] >= 0


def recorded(run: Path) -> Numbers:
    """What a run says about its steps, in which nothing is rounded: the norm of each logged step, the mean losses since
    the one before, and of steps in trouble their own loss."""
    found: Numbers = {}
    if (metrics := run / names.METRICS_FILE).is_file():
        for record in read_metrics(metrics):
            if isinstance(record, StepRecord):
                logged = {"grad norm": record.grad_norm, **{f"{key}, logged": x for key, x in record.losses.items()}}
                found.setdefault(record.step, {}).update(logged)
    for event in readable_lines(run / names.EVENTS_FILE, **EVENT):
        if event["kind"] in _TROUBLE:
            losses = {"lm loss": event["loss"]} if "loss" in event else event.get("losses", {})
            numbers_of = {**losses, "grad norm": event.get("grad_norm")}
            numbers = {name: float(value) for name, value in numbers_of.items() if value is not None}
            found.setdefault(event["step"], {}).update(numbers)
    return found


def to_skip(run: Path, step: int) -> str:
    """The stretch of spikes around a step, as `train.skip` wants it."""
    wrong = {event["step"] for event in readable_lines(run / names.EVENTS_FILE, **EVENT) if event["kind"] in _TROUBLE}
    before = sum(1 for _ in takewhile(wrong.__contains__, range(step - 1, 0, -1)))
    after = sum(1 for _ in takewhile(wrong.__contains__, range(step + 1, step + 1000)))
    return f"{step - before}-{step + after} steps"


def compare(run: Path, replay: Path, after: int, step: int, *, exactly: bool) -> tuple[bool, list[str]]:
    """Whether they are the same, and that in words: what the run recorded from its checkpoint `after` on, beside what
    the replay did. `exactly`: nothing was changed, so every bit has to be the same."""
    right, mine = recorded(run), recorded(replay / RUN)
    last = max(mine, default=step)
    rows = [
        (at, name, value, mine.get(at, {}).get(name, math.nan))
        for at in sorted(right)
        if after < at <= last
        for name, value in right[at].items()
    ]
    if not rows:
        problem = Problem(
            f"{run} has recorded nothing from step {after + 1} to {last}",
            remedy="choose another --step",
        )
        raise DataError(problem)
    limit = 0.0 if exactly else 0.02
    wrong = [row for row in rows if not _same(row[2], row[3], limit)]
    logged = min((row[0] for row in rows if row[0] >= step), default=0)  # every tenth step, perhaps
    shown = [row for row in rows if row[0] == logged] or rows[-1:]
    lines = [f"step {at}: {name} {found!r} in the replay, {value!r} in the run" for at, name, value, found in shown]
    if wrong and exactly:
        text = "The same data, code and layout gave other numbers: look at the hardware that the run used"
        lines.append(f"DIFFERENT from step {wrong[0][0]} on ({wrong[0][1]}). {text}, not at the data.")
    elif wrong:
        lines.append(f"DIFFERENT by more than {limit:.0%} from step {wrong[0][0]} on: what was changed matters.")
    else:
        bits = "bit for bit" if exactly else f"within {limit:.0%}"
        lines.append(f"THE SAME {bits}: it is the data or the recipe, not the hardware. `bloomery explain` shows it.")
    return not wrong, lines


def _same(a: float, b: float, limit: float) -> bool:
    return (math.isnan(a) and math.isnan(b)) or a == b or abs(a - b) <= limit * abs(a)


def gradient_norms(replay: Path, step: int) -> list[dict[str, Any]]:
    """Of each weight, the largest first, and not-a-numbers before: norm, and the rank whose part of it is largest."""
    folder = next(path for path in complete_checkpoints(replay / TRACE) if step_of(path) == step)
    files = {path.name: load_file(path) for path in sorted(folder.glob("*.safetensors"))}
    rows = []
    for name, saved in read_checkpoint(folder, ranks=ALONE, tensors=False).tensors.items():
        parts = {piece.file: files[piece.file][piece.key].double().norm().item() for piece in saved.pieces}
        fullest = max(parts, key=lambda file: (math.isnan(parts[file]), parts[file]))
        rank = int("".join(filter(str.isdigit, fullest.partition(".")[0])) or 0)
        total = math.sqrt(sum(norm**2 for norm in parts.values()))
        rows.append({"weight": name.removeprefix("grad."), "norm": total, "rank": rank})
    return sorted(rows, key=lambda row: (not math.isnan(row["norm"]), -row["norm"]))
