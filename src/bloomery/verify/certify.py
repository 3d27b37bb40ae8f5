"""The certificate of a recipe: shrink it, train it in every layout, compare; and its table for people."""

import json
import math
import platform
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

import bloomery
from bloomery.config.load import fingerprint
from bloomery.config.recipe import Recipe
from bloomery.config.yaml_nodes import dump_yaml
from bloomery.families.family import LM_LOSS
from bloomery.verify import compare
from bloomery.verify.compare import GRADIENT_RELATIVE, LOSS_RELATIVE, TOLERANCES, TRUTH, Recorded, Row
from bloomery.verify.shrink import Shrunk, VerifiedLayout, shrink, write_data
from bloomery.verify.trials import SINGLE, Outcome, RankCommand, Trial, middle, run_all

FORMAT = 1


def certify(
    recipe: Recipe,
    layouts: Sequence[VerifiedLayout],
    work: Path,
    command: RankCommand,
    *,
    steps: int = 20,
    device: str = "cpu",
    pairs: bool = False,
    left_out: Mapping[str, str] | None = None,
    quiet: bool = True,
) -> dict[str, Any]:
    """The certificate, as its JSON has it: a public contract. Everything happens below `work`, an empty folder. Every
    rank runs `command`: verify.trials.run_trial. `pairs`: each layout resumes from every other one's checkpoint."""
    started = time.monotonic()
    shrunk = shrink(recipe, layouts, work, steps=steps)
    write_data(shrunk.values, work)
    trainings = _trainings(shrunk, layouts, work, steps)
    outcomes = run_all(trainings, command, device=device, quiet=quiet)
    single = outcomes[trainings[0].folder]
    if single.error:
        raise RuntimeError(f"one rank, with which layouts are compared, failed on {single.error}\n{single.details}")
    resumptions = _resumptions([trial for trial in trainings if not outcomes[trial.folder].error], work, pairs=pairs)
    outcomes |= run_all(resumptions, command, device=device, quiet=quiet)
    reference = Recorded(trainings[0].folder)
    rows = [row.to_json() for row in _rows(trainings, resumptions, outcomes, reference)]
    clip, smallest = shrunk.values["optimizer"]["clip_grad_norm"], min(reference.norms.values())
    losses = [loss for (_, name), loss in reference.losses.items() if name == LM_LOSS]
    reasons = [f"{row['layout']}: {reason}" for row in rows for reason in row["reasons"]]
    if not smallest > clip:
        found = f"the smallest grad norm is {smallest:.3g} and the clip {clip:g}"
        reasons.append(f"clipping did not bind on every step: {found}. A wrong norm would not have been seen")
    return {
        "verdict": "fail" if reasons else "pass",
        "reasons": reasons,
        "recipe": recipe.name,
        "fingerprint": fingerprint(recipe),
        "made": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "versions": {
            "bloomery": bloomery.__version__,
            "torch": torch.__version__,
            "python": platform.python_version(),
            "machine": f"{platform.system()} {platform.machine()}",
            "certificate": FORMAT,
        },
        "device": device,
        "steps": steps,
        "model": shrunk.values["model"],
        "shrunk": shrunk.changes,
        "not_verified": [f"dropout {recipe.model.dropout}"] if recipe.model.dropout else [],
        "remarks": shrunk.remarks,
        "tolerances": TOLERANCES,
        "clipping": {"clip_grad_norm": clip, "smallest_grad_norm": smallest, "bound_on_every_step": smallest > clip},
        "learned": {"first_loss": losses[0], "last_loss": losses[-1]},
        "reference": rows[0],
        "layouts": rows[1:],
        "left_out": dict(left_out or {}),
        "seconds": time.monotonic() - started,
    }


def _trainings(shrunk: Shrunk, layouts: Sequence[VerifiedLayout], work: Path, steps: int) -> list[Trial]:
    """The reference first."""
    small = work / "small.yaml"
    small.write_text(dump_yaml(shrunk.values))
    trials = [Trial(SINGLE, 1, work / "single", small, ("parallel.recompute=none", "parallel.offload=false"), steps)]
    for each in layouts:
        overrides = (*each.overrides, f"batch.micro_batch_size={shrunk.batch // each.micro_batches}")
        trials.append(Trial(each.name, each.layout.world, work / each.name, small, overrides, steps))
    return trials


def _resumptions(whole: Sequence[Trial], work: Path, *, pairs: bool) -> list[Trial]:
    """Each layout loads the checkpoints of all others and resumes from its neighbour's, or from each of them."""
    trials = []
    for i, trial in enumerate(whole):
        others = [*whole[:i][::-1], *whole[i + 1 :][::-1]]  # the neighbour first
        for source in others if pairs else others[:1]:
            folder = work / f"{trial.layout}-from-{source.layout}"
            trials.append(replace(trial, folder=folder, source=source, reload=others if source is others[0] else ()))
    return trials


def _rows(
    trainings: Sequence[Trial], resumptions: Sequence[Trial], outcomes: Mapping[Path, Outcome], expected: Recorded
) -> list[Row]:
    rows = {trial.layout: Row(trial.layout, trial.world) for trial in trainings}
    for trial in trainings:
        row, outcome = rows[trial.layout], outcomes[trial.folder]
        row.seconds = outcome.seconds
        if outcome.error:
            row.reasons.append(f"the training failed on {outcome.error}")
            row.details = outcome.details
        elif trial.layout == SINGLE:
            compare.check_reference(row, expected, json.loads((trial.folder / TRUTH).read_text()))
        else:
            compare.check_training(row, Recorded(trial.folder), expected)
    wrong = {row.layout for row in rows.values() if row.reasons}
    for trial in resumptions:
        _check_resumption(rows[trial.layout], trial, outcomes[trial.folder], expected, wrong)
    return list(rows.values())


def _check_resumption(row: Row, trial: Trial, outcome: Outcome, expected: Recorded, wrong: set[str]) -> None:
    """`wrong`: layouts that already differ in what they trained from the beginning."""
    assert trial.source is not None
    source = trial.source.layout
    row.seconds += outcome.seconds
    if outcome.error:
        row.reasons.append(f"resuming from the checkpoint of {source} failed on {outcome.error}")
        row.details = outcome.details
        return
    if trial.reload:
        compare.check_reshard(row, trial.reloaded, {each.layout: each.checkpoint for each in trial.reload})
    if row.layout in wrong:
        return  # it would most likely be the same mistake once more
    if source in wrong:
        row.remarks.append(f"continued from {source}: not judged, because {source} differs itself")
    else:
        compare.check_continuation(row, Recorded(trial.folder), expected, source, middle(trial.steps))


def table(facts: Mapping[str, Any]) -> str:
    """A certificate, for people."""
    rows, model, losses = [facts["reference"], *facts["layouts"]], facts["model"], facts["learned"]
    head = ("layout", "ranks", "loss", "grad norm", "worst gradient", "data order", "reshard", "verdict", "seconds")
    cells = [head, *map(_cells, rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = [
        f"{facts['recipe']} ({model['family']}, fingerprint {facts['fingerprint']}), shrunk to {model['num_layers']} "
        f"layers, hidden {model['hidden_size']}: {facts['steps']} steps in fp32 on {facts['device']}, loss "
        f"{losses['first_loss']:.3f} to {losses['last_loss']:.3f}; differences from one rank:",
        "",
    ]
    for line in cells:
        padded = [f"{cell:{'>' if i in (1, 8) else '<'}{widths[i]}}" for i, cell in enumerate(line)]
        lines.append("  ".join(padded).rstrip())
    lines += ["", *(f"FAIL: {reason}" for reason in facts["reasons"])]
    lines += [f"note: {row['layout']}: {remark}" for row in rows for remark in row["remarks"]]
    lines += [f"note: {remark}" for remark in facts["remarks"]]
    lines += [f"left out: {name}: {why}" for name, why in facts["left_out"].items()]
    bounds = f"loss {LOSS_RELATIVE:g}, gradients {GRADIENT_RELATIVE:g}, samples equal, weights bit-exact"
    passed = sum(row["verdict"] == "pass" for row in facts["layouts"])
    lines.append(
        f"{facts['verdict']}: {passed} of {len(facts['layouts'])} layouts equal one rank ({bounds}) in "
        f"{facts['seconds']:.0f} s" + "".join(f"; not verified: {each}" for each in facts["not_verified"])
    )
    return "\n".join(lines)


def _cells(row: Mapping[str, Any]) -> list[str]:
    exact, continues = (f"{row[f'{what}_from']} of {row[f'{what}_of']}" for what in ("resharded", "followed"))
    is_reference, gradient = row["layout"] == SINGLE, row["gradient"]
    return [
        f"{row['layout']} (reference)" if is_reference else row["layout"],
        str(row["ranks"]),
        _largest(row["loss"], row["continued_loss"], row["followed_loss"]),
        _largest(row["grad_norm"], row["continued_grad_norm"]),
        f"{_largest(gradient)} {gradient['name']}" if gradient else "-",
        "-" if is_reference else row["data_order"],
        f"{exact} exact, {continues} continue",
        "pass" if row["verdict"] == "pass" else "FAIL",
        f"{row['seconds']:.1f}",
    ]


def _largest(*found: Mapping[str, Any] | None) -> str:
    sizes = [math.inf if each["difference"] is None else each["difference"] for each in found if each is not None]
    return f"{max(sizes):.0e}" if sizes else "-"
