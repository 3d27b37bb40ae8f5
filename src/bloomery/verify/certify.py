"""The certificate of a recipe: shrink it, train it in every layout, compare; and its table for people."""

from __future__ import annotations

import json
import platform
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import bloomery
from bloomery.config.load import as_yaml, fingerprint
from bloomery.config.recipe import Recipe
from bloomery.config.yaml_nodes import dump_yaml
from bloomery.families.family import LM_LOSS
from bloomery.sizing.check import load_checked_recipe
from bloomery.verify import compare
from bloomery.verify.compare import (
    GRADIENT_RELATIVE,
    LOSS_RELATIVE,
    TOLERANCES,
    Difference,
    Recorded,
    Row,
    followed_differences,
)
from bloomery.verify.shrink import CLIP, SINGLE, Shrunk, VerifiedLayout, micro_batch_of, middle, shrink, write_data
from bloomery.verify.trials import RESHARDED, RESUME_PREFIX, TRAIN_PREFIX, TRUTH, Outcome, RankCommand, Trial, run_all

FORMAT = 1
GRADIENT_STEPS = 2
PAIR_STEPS = 5
"""Trained by each layout from the checkpoint of each other one, where that is asked for."""


@dataclass(frozen=True)
class Certificate:
    recipe: Recipe
    shrunk: Shrunk
    steps: int
    clip: float
    device: str
    reference: Row
    rows: list[Row]
    left_out: dict[str, str]
    smallest_norm: float
    """Of the reference's steps; clipping binds where it is above `clip`."""
    first_loss: float
    last_loss: float
    seconds: float

    @property
    def clip_always_binds(self) -> bool:
        return self.smallest_norm > self.clip

    @property
    def reasons(self) -> list[str]:
        found = [f"{row.layout}: {reason}" for row in (self.reference, *self.rows) for reason in row.reasons]
        if not self.clip_always_binds:
            text = (
                f"clipping did not bind on every step: the smallest grad norm is {self.smallest_norm:.3g} and the clip "
                f"{self.clip:g}. A wrong norm would not have been seen"
            )
            found.append(text)
        return found

    @property
    def verdict(self) -> str:
        return "fail" if self.reasons else "pass"

    @property
    def not_verified(self) -> list[str]:
        """What the recipe uses and no layout promises to repeat."""
        dropout = self.recipe.model.dropout
        return [f"dropout {dropout}"] if dropout else []

    def to_json(self) -> dict[str, Any]:
        return {
            "verdict": self.verdict,
            "reasons": self.reasons,
            "recipe": self.recipe.name,
            "fingerprint": fingerprint(self.recipe),
            "made": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            "versions": {
                "bloomery": bloomery.__version__,
                "torch": torch.__version__,
                "python": platform.python_version(),
                "machine": f"{platform.system()} {platform.machine()}",
                "certificate": FORMAT,
            },
            "device": self.device,
            "steps": self.steps,
            "shrunk": {path: {"from": old, "to": new} for path, (old, new) in self.shrunk.changes.items()},
            "not_verified": self.not_verified,
            "remarks": self.shrunk.remarks,
            "tolerances": TOLERANCES,
            "clipping": {
                "clip_grad_norm": self.clip,
                "smallest_grad_norm": self.smallest_norm,
                "bound_on_every_step": self.clip_always_binds,
            },
            "learned": {"first_loss": self.first_loss, "last_loss": self.last_loss},
            "reference": self.reference.to_json(),
            "layouts": [row.to_json() for row in self.rows],
            "left_out": self.left_out,
            "seconds": self.seconds,
        }


def certify(
    recipe: Recipe,
    layouts: Sequence[VerifiedLayout],
    work: Path,
    command: RankCommand,
    *,
    steps: int = 20,
    clip: float = CLIP,
    device: str = "cpu",
    pair_steps: int = 0,
    left_out: dict[str, str] | None = None,
    quiet: bool = True,
) -> Certificate:
    """Everything happens below `work`, an empty folder. Every rank runs `command`: verify.run_trials.run_trials.
    `pair_steps`: so many are trained by each layout from the checkpoint of each other one."""
    started = time.monotonic()
    shrunk = shrink(recipe, layouts, work, steps=steps, clip=clip)
    write_data(shrunk.values, work)
    trainings = _trainings(shrunk, layouts, work, steps)
    options: dict[str, Any] = {"device": device, "quiet": quiet}
    outcomes = run_all(trainings, command, work, **options)
    whole = [trial for trial in trainings if not outcomes[trial.folder].error]
    resumptions = _resumptions(whole, work, steps, pair_steps)
    outcomes |= run_all(resumptions, command, work, **options)
    rows = _rows(trainings, resumptions, outcomes, steps)
    reference, trained = rows[0], not outcomes[trainings[0].folder].error
    recorded = Recorded(trainings[0]) if trained else None
    losses = [loss for (_, name), loss in recorded.losses.items() if name == LM_LOSS] if recorded else [float("nan")]
    return Certificate(
        recipe=recipe,
        shrunk=shrunk,
        steps=steps,
        clip=clip,
        device=device,
        reference=reference,
        rows=rows[1:],
        left_out=left_out or {},
        smallest_norm=min(recorded.norms.values()) if recorded else float("nan"),
        first_loss=losses[0],
        last_loss=losses[-1],
        seconds=time.monotonic() - started,
    )


def _trainings(shrunk: Shrunk, layouts: Sequence[VerifiedLayout], work: Path, steps: int) -> list[Trial]:
    """The reference first, then by the number of ranks."""
    small = work / "small.yaml"
    small.write_text(dump_yaml(shrunk.values))
    chosen = [(SINGLE, 1, ["parallel.recompute=none", "parallel.offload=false"])]
    for layout in layouts:
        cut = f"batch.micro_batch_size={micro_batch_of(layout, shrunk)}"
        chosen.append((layout.name, layout.world, [*layout.overrides, cut]))
    trials = []
    for name, world, overrides in sorted(chosen, key=lambda each: each[1]):
        folder = work / f"{TRAIN_PREFIX}{name}"
        folder.mkdir()
        file = folder / "recipe.yaml"
        file.write_text(as_yaml(load_checked_recipe(str(small), overrides).recipe))
        trials.append(Trial(name, world, str(folder), str(file), GRADIENT_STEPS, steps, middle(steps)))
    return trials


def _resumptions(whole: Sequence[Trial], work: Path, steps: int, pair_steps: int) -> list[Trial]:
    """Each layout loads the checkpoints of all others and resumes from its neighbour's; the largest world first, whose
    checkpoint the single rank resumes from."""
    at = middle(steps)
    trials = []
    for i, trial in enumerate(whole):
        others = [other for other in whole if other is not trial]
        if not others:
            continue
        folder = work / f"{RESUME_PREFIX}{trial.layout}"
        folder.mkdir()
        trials.append(
            Trial(
                layout=trial.layout,
                world=trial.world,
                folder=str(folder),
                recipe=trial.recipe,
                gradient_steps=0,
                sample_steps=steps,
                resume_from=str(whole[i - 1].checkpoint(at)),
                reload={other.layout: str(other.checkpoint(at)) for other in others},
                follow_steps=pair_steps,
            )
        )
    return trials[::-1]


def _rows(
    trainings: Sequence[Trial], resumptions: Sequence[Trial], outcomes: dict[str, Outcome], steps: int
) -> list[Row]:
    at = middle(steps)
    resumed = {trial.layout: trial for trial in resumptions}
    reference = trainings[0]
    expected = Recorded(reference) if not outcomes[reference.folder].error else None
    trials = {trial.layout: trial for trial in trainings}
    rows = {trial.layout: Row(trial.layout, trial.world) for trial in trainings}
    for trial in trainings:
        row, outcome = rows[trial.layout], outcomes[trial.folder]
        row.seconds = outcome.seconds
        if outcome.error:
            compare.check_failure(row, trial, outcome)
        elif expected is None:
            row.reasons.append("there is no reference to compare with")
        elif trial is reference:
            compare.check_reference(row, expected, json.loads(trial.file(TRUTH).read_text()))
        else:
            compare.check_training(row, Recorded(trial), expected)
    wrong = {row.layout for row in rows.values() if row.reasons}
    for trial in trainings:
        row, again = rows[trial.layout], resumed.get(trial.layout)
        if outcomes[trial.folder].error or expected is None:
            continue
        if again is None:
            row.reasons.append("no other layout left a checkpoint to continue from")
            continue
        row.seconds += outcomes[again.folder].seconds
        if outcomes[again.folder].error:
            compare.check_failure(row, again, outcomes[again.folder])
            continue
        compare.check_reshard(row, json.loads(again.file(RESHARDED).read_text()))
        if again.source in wrong and not row.reasons:
            row.remarks.append(f"continued from {again.source}: not judged, because {again.source} differs itself")
        else:
            compare.check_continuation(row, Recorded(again), expected, again.source, at)
        if again.follow_steps and not row.reasons:
            right = {name: Recorded(trials[name]) for name in again.reload if name not in wrong}
            compare.check_followed(row, followed_differences(again, right), at)
    return list(rows.values())


_HEADINGS = ("layout", "ranks", "loss", "grad norm", "worst gradient", "data order", "reshard", "verdict", "seconds")


def table(certificate: Certificate) -> str:
    rows = [_HEADINGS, *(_cells(row) for row in (certificate.reference, *certificate.rows))]
    widths = [max(len(row[column]) for row in rows) for column in range(len(_HEADINGS))]
    right = {1, 8}
    lines = [
        "  ".join(
            cell.rjust(width) if column in right else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
    return "\n".join([*_head(certificate), "", *lines, "", *_foot(certificate)])


def _head(certificate: Certificate) -> list[str]:
    recipe, model = certificate.recipe, certificate.shrunk.values["model"]
    size = (
        f"{model['num_layers']} layers, hidden {model['hidden_size']}, {model['num_heads']} heads, vocabulary "
        f"{model['vocab_size']}, sequence {model['seq_length']}"
    )
    return [
        f"{recipe.name} ({recipe.model.family}, fingerprint {fingerprint(recipe)}), shrunk to {size}",
        f"{certificate.steps} steps in fp32 on {certificate.device}, loss {certificate.first_loss:.3f} to "
        f"{certificate.last_loss:.3f}; differences from one rank:",
    ]


def _cells(row: Row) -> tuple[str, ...]:
    reshard = f"{row.resharded_from} of {row.resharded_of} exact" if row.resharded_of else "-"
    if row.followed_of:
        reshard += f", {row.followed_from} of {row.followed_of} continue"
    is_reference = row.layout == "single"
    return (
        f"{row.layout} (reference)" if is_reference else row.layout,
        str(row.ranks),
        _largest(row.loss, row.continued_loss, row.followed_loss),
        _largest(row.grad_norm, row.continued_grad_norm),
        f"{row.gradient.difference:.0e} {row.gradient.name}" if row.gradient else "-",
        "-" if is_reference else row.data_order,
        reshard,
        row.verdict.upper() if row.reasons else "pass",
        f"{row.seconds:.1f}",
    )


def _largest(*found: Difference | None) -> str:
    differences = [each.difference for each in found if each is not None]
    return f"{max(differences):.0e}" if differences else "-"


def _foot(certificate: Certificate) -> list[str]:
    rows = (certificate.reference, *certificate.rows)
    lines = [f"{certificate.verdict.upper()}: {reason}" for reason in certificate.reasons]
    lines += [f"note: {row.layout}: {remark}" for row in rows for remark in row.remarks]
    lines += [f"note: {remark}" for remark in certificate.shrunk.remarks]
    lines += [f"left out: {name}: {why}" for name, why in certificate.left_out.items()]
    if certificate.clip_always_binds:
        lines.append(
            f"clipping at {certificate.clip:g} bound on every step (smallest grad norm {certificate.smallest_norm:.2g})"
        )
    bounds = f"loss {LOSS_RELATIVE:g}, gradients {GRADIENT_RELATIVE:g}, samples equal, weights bit-exact"
    passed = sum(not row.reasons for row in certificate.rows)
    lines.append(
        f"{certificate.verdict}: {passed} of {len(certificate.rows)} layouts equal one rank ({bounds}) in "
        f"{certificate.seconds:.0f} s" + "".join(f"; not verified: {each}" for each in certificate.not_verified)
    )
    return lines
