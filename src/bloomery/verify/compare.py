"""What two trainings of one recipe differ in: losses, gradient norms, gradients, samples, weights."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

from bloomery.base.losses import LM_LOSS
from bloomery.checkpoint.folder import complete_checkpoints
from bloomery.checkpoint.index import read_index
from bloomery.monitor.history import read_metrics
from bloomery.monitor.record import StepRecord
from bloomery.verify.trials import Trial

LOSS_RELATIVE = 1e-6
LOSS_ABSOLUTE = 1e-5
NORM_RELATIVE = 1e-5
GRADIENT_RELATIVE = 1e-5
GRADIENT_FLOOR = 1e-3
"""Share of the global norm below which a gradient's own norm is no measure: key biases have a gradient of zero, and
what is computed of it is rounding."""

TOLERANCES = {
    "loss_relative": LOSS_RELATIVE,
    "loss_absolute_at_worst": LOSS_ABSOLUTE,
    "grad_norm_relative": NORM_RELATIVE,
    "gradient_relative_to_its_norm": GRADIENT_RELATIVE,
    "gradient_floor_as_share_of_global_norm": GRADIENT_FLOOR,
    "weights_after_reshard": "bit-exact",
    "data_order": "equal",
}


@dataclass(frozen=True)
class Difference:
    """Between a number of a layout and the reference's. NaN where the layout has none."""

    difference: float
    name: str
    step: int
    found: float
    expected: float

    @property
    def absolute(self) -> float:
        return abs(self.found - self.expected)


class Recorded:
    """What a trial wrote down."""

    def __init__(self, trial: Trial) -> None:
        self.losses: dict[tuple[int, str], float] = {}
        self.norms: dict[int, float] = {}
        for record in read_metrics(trial.run / "metrics.jsonl"):
            if isinstance(record, StepRecord):
                self.norms[record.step] = record.grad_norm
                of_sources = {f"{LM_LOSS} of {name}": loss for name, loss in record.source_losses.items()}
                found = record.losses | of_sources
            else:
                found = {f"{name} of validation group {record.group}": loss for name, loss in record.losses.items()}
            self.losses |= {(record.step, name): loss for name, loss in found.items()}
        self.samples: dict[int, dict[str, str]] = {}
        for line in (trial.trace / "samples.jsonl").read_text().splitlines():
            facts = json.loads(line)
            self.samples[facts["step"]] = facts["samples"]
        self.gradients = {int(path.name.removeprefix("step-")): path for path in complete_checkpoints(trial.trace)}


def relative(name: str, step: int, found: float, expected: float) -> Difference:
    return Difference(abs(found - expected) / max(abs(expected), 1e-12), name, step, found, expected)


def loss_differences(found: Recorded, expected: Recorded, after: int = 0) -> list[Difference]:
    """Of all losses of all steps beyond `after`, in their order: relative."""
    return [
        relative(key[1], key[0], found.losses.get(key, float("nan")), right)
        for key, right in sorted(expected.losses.items())
        if key[0] > after
    ]


def followed_differences(trial: Trial, sources: Mapping[str, Recorded]) -> dict[str, list[Difference]]:
    """Of each loss that `trial` found after the checkpoint of each of these layouts: relative to that layout's own."""
    told = json.loads(trial.followed.read_text())
    return {
        source: [relative(name, step, loss, recorded.losses[step, name]) for step, name, loss in told[source]]
        for source, recorded in sources.items()
    }


def norm_differences(found: Recorded, expected: Recorded, after: int = 0) -> list[Difference]:
    """Of the global gradient norm of all steps beyond `after`, in their order: relative."""
    return [
        relative("grad norm", step, found.norms.get(step, float("nan")), right)
        for step, right in sorted(expected.norms.items())
        if step > after
    ]


def first_other_sample(found: Recorded, expected: Recorded, after: int = 0) -> tuple[int, str] | None:
    """(step, description) of where the samples of two runs part; None if nowhere."""
    for step, samples in expected.samples.items():
        if step <= after:
            continue
        mine = found.samples.get(step, {})
        if mine != samples:
            place = next(place for place in {**samples, **mine} if mine.get(place) != samples.get(place))
            seen, right = mine.get(place, "not read"), samples.get(place, "none")
            return step, f"step {step}, sample {place}: {seen} instead of {right}"
    return None


def gradient_differences(found: Recorded, expected: Recorded) -> list[Difference]:
    """Of every gradient of every traced step, relative to its norm."""
    differences = []
    for step, folder in expected.gradients.items():
        right = whole_tensors(folder)
        mine = whole_tensors(found.gradients[step]) if step in found.gradients else {}
        total = torch.stack([each.norm() for each in right.values()]).norm().item()
        for name, each in right.items():
            size = max(each.norm().item(), GRADIENT_FLOOR * total)
            other = mine.get(name)
            same_shape = other is not None and other.shape == each.shape
            difference = ((other - each).norm().item() / size) if same_shape and other is not None else float("inf")
            norm = other.norm().item() if other is not None else 0.0
            differences.append(Difference(difference, name.removeprefix("grad."), step, norm, each.norm().item()))
    return differences


def judge_reloaded(trial: Trial, saved: Path) -> None:
    """Write down which tensors of which layout's checkpoint did not come back bit by bit in `saved`, and delete that.
    For one rank."""
    reloaded = whole_tensors(saved)
    wrong = {}
    for source, folder in trial.reload.items():
        original = {f"{source}/{name}": tensor for name, tensor in whole_tensors(Path(folder)).items()}
        mine = {name: tensor for name, tensor in reloaded.items() if name.startswith(f"{source}/")}
        names = sorted(name for name in {**original, **mine} if not _same_bits(mine.get(name), original.get(name)))
        wrong[source] = [name.removeprefix(f"{source}/") for name in names]
    trial.resharded.write_text(json.dumps(wrong))
    shutil.rmtree(saved)


def whole_tensors(folder: Path) -> dict[str, Tensor]:
    """A checkpoint put together from its pieces, on purpose not by the loader that is verified here."""
    files = {path.name: load_file(path) for path in folder.glob("*.safetensors")}
    whole = {}
    for name, saved in read_index(folder).items():
        tensor = None
        for piece in saved.pieces:
            values = files[piece.file][piece.key]
            if tensor is None:
                tensor = torch.zeros(saved.shape, dtype=values.dtype)
            box = tuple(slice(a, a + n) for a, n in zip(piece.box.offset, piece.box.size, strict=True))
            tensor[box] = values
        assert tensor is not None
        whole[name] = tensor
    return whole


def _same_bits(a: Tensor | None, b: Tensor | None) -> bool:
    if a is None or b is None or a.shape != b.shape or a.dtype != b.dtype:
        return False
    return torch.equal(a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8))


def worst(differences: Sequence[Difference]) -> Difference:
    """The largest; what is no number is larger than any."""
    return max(differences, key=_size)


def largest_first(differences: Sequence[Difference]) -> list[Difference]:
    return sorted(differences, key=_size, reverse=True)


def _size(each: Difference) -> float:
    return float("inf") if math.isnan(each.difference) else each.difference
