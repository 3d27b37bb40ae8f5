"""What two trainings of one recipe differ in: losses, gradient norms, gradients, samples, weights.

The verdict on that is one row of the certificate for each layout."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from bloomery.base.ranks import Piece
from bloomery.checkpoint.folder import complete_checkpoints
from bloomery.checkpoint.load import read_checkpoint
from bloomery.config.recipe import Recipe
from bloomery.data.batch import GlobalBatch
from bloomery.families.family import IGNORED_LABEL, LM_LOSS
from bloomery.model.transformer import build_model, materialise
from bloomery.monitor.history import read_metrics
from bloomery.monitor.record import StepRecord
from bloomery.parallel.gradients import Gradients
from bloomery.parallel.mesh import alone
from bloomery.parallel.weights import Weight
from bloomery.verify.trials import FOLLOWED, RESHARDED, RUN, TRACE, Outcome, Trial

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
        for record in read_metrics(trial.file(RUN) / "metrics.jsonl"):
            if isinstance(record, StepRecord):
                self.norms[record.step] = record.grad_norm
                of_sources = {f"{LM_LOSS} of {name}": loss for name, loss in record.source_losses.items()}
                found = record.losses | of_sources
            else:
                found = {f"{name} of validation group {record.group}": loss for name, loss in record.losses.items()}
            self.losses |= {(record.step, name): loss for name, loss in found.items()}
        self.samples: dict[int, dict[str, str]] = {}
        for line in (trial.file(TRACE) / "samples.jsonl").read_text().splitlines():
            facts = json.loads(line)
            self.samples[facts["step"]] = facts["samples"]
        self.gradients = {
            int(path.name.removeprefix("step-")): path for path in complete_checkpoints(trial.file(TRACE))
        }


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
    logged = json.loads(trial.file(FOLLOWED).read_text())
    return {
        source: [relative(name, step, loss, recorded.losses[step, name]) for step, name, loss in logged[source]]
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


def report_reloaded(trial: Trial, saved: Path) -> None:
    """Write down which tensors of which layout's checkpoint did not come back bit by bit in `saved`, and delete that.
    For one rank."""
    reloaded = whole_tensors(saved)
    wrong = {}
    for source, folder in trial.reload.items():
        original = {f"{source}/{name}": tensor for name, tensor in whole_tensors(Path(folder)).items()}
        mine = {name: tensor for name, tensor in reloaded.items() if name.startswith(f"{source}/")}
        names = sorted(name for name in {**original, **mine} if not _same_bits(mine.get(name), original.get(name)))
        wrong[source] = [name.removeprefix(f"{source}/") for name in names]
    trial.file(RESHARDED).write_text(json.dumps(wrong))
    shutil.rmtree(saved)


def whole_tensors(folder: Path) -> dict[str, Tensor]:
    """A checkpoint put together from its pieces, on purpose not by the loader that is verified here."""
    files = {path.name: load_file(path) for path in folder.glob("*.safetensors")}
    whole = {}
    for name, saved in read_checkpoint(folder, tensors=False).tensors.items():
        tensor = None
        for piece in saved.pieces:
            values = files[piece.file][piece.key]
            if tensor is None:
                tensor = torch.zeros(saved.shape, dtype=values.dtype)
            box = tuple(slice(a, a + n) for a, n in zip(piece.offset, piece.size, strict=True))
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


_MOST_NAMED = 3


@dataclass
class Row:
    """Of one layout. `reasons` is empty if and only if it passed."""

    layout: str
    ranks: int
    loss: Difference | None = None
    grad_norm: Difference | None = None
    gradient: Difference | None = None
    data_order: str = "not compared"
    continued_from: str | None = None
    continued_loss: Difference | None = None
    continued_grad_norm: Difference | None = None
    resharded_from: int = 0
    """Layouts whose checkpoints it loaded bit by bit."""
    resharded_of: int = 0
    followed_from: int = 0
    """Layouts from whose checkpoints it learns what they learn."""
    followed_of: int = 0
    followed_loss: Difference | None = None
    seconds: float = 0.0
    reasons: list[str] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)
    details: str = ""

    @property
    def verdict(self) -> str:
        return "fail" if self.reasons else "pass"

    def to_json(self) -> dict[str, Any]:
        facts = {"layout": self.layout, "ranks": self.ranks, "verdict": self.verdict, **asdict(self)}
        return {key: _finite(value) for key, value in facts.items()}


def check_training(row: Row, found: Recorded, expected: Recorded) -> None:
    """Compare a training from the beginning with the reference. What went wrong first is reported."""
    losses, norms = loss_differences(found, expected), norm_differences(found, expected)
    gradients = gradient_differences(found, expected)
    row.loss, row.grad_norm, row.gradient = map(worst, (losses, norms, gradients))
    other = first_other_sample(found, expected)
    row.data_order = "differs" if other else "equal"
    reasons = [(other[0], f"data order: {other[1]}")] if other else []
    wrong = [each for each in gradients if not each.difference <= GRADIENT_RELATIVE]
    if wrong:
        first = min(each.step for each in wrong)
        reasons.append((first, _gradients_text(first, wrong, gradients)))
    norm = _first_wrong_norm(norms)
    if norm is not None:
        text = _instead("global grad norm", norm)
        if norm.step <= max(each.step for each in gradients) and all(each.step > norm.step for each in wrong):
            text += ", though every gradient of that step agrees: some are counted twice or not at all"
        reasons.append((norm.step, text))
    reasons += _check_losses(row, losses, "")
    row.reasons += [text for _, text in sorted(reasons, key=lambda reason: reason[0])]


def check_reference(row: Row, found: Recorded, truth: Mapping[str, Any]) -> None:
    """Compare the reference with what plain torch finds (truth.py)."""
    losses = [relative(name, 1, found.losses[1, name], right) for name, right in truth["losses"].items()]
    row.loss, row.grad_norm = worst(losses), relative("norm of a large gradient", 1, *truth["norm"])
    row.reasons += [text for _, text in _check_losses(row, losses, "beside plain torch over the true vocabulary: ")]
    if _first_wrong_norm([row.grad_norm]):
        row.reasons.append(_instead(row.grad_norm.name, row.grad_norm))


def check_continuation(row: Row, found: Recorded, expected: Recorded, source: str, after: int) -> None:
    """Compare what came after the checkpoint of `source`, which was right itself, with the uninterrupted reference."""
    losses = loss_differences(found, expected, after)
    norms = norm_differences(found, expected, after)
    row.continued_from = source
    row.continued_loss, row.continued_grad_norm = worst(losses), worst(norms)
    where = f"continued from {source} at step {after}: "
    if row.reasons:
        return  # most likely the same mistake once more
    other = first_other_sample(found, expected, after)
    if other:
        row.data_order = "differs"
        row.reasons.append(f"{where}data order: {other[1]}")
    norm = _first_wrong_norm(norms)
    if norm is not None:
        row.reasons.append(_instead(f"{where}global grad norm", norm))
    row.reasons += [text for _, text in _check_losses(row, losses, where)]


def check_reshard(row: Row, resharded: Mapping[str, Sequence[str]]) -> None:
    """`resharded`: by layout, the tensors of its checkpoint that did not come back bit by bit."""
    row.resharded_of = len(resharded)
    for source, wrong in resharded.items():
        row.resharded_from += not wrong
        if wrong:
            names = _listed(wrong)
            row.reasons.append(f"reshard: {len(wrong)} tensors saved by {source} did not come back bit by bit: {names}")


def check_followed(row: Row, losses: Mapping[str, Sequence[Difference]], after: int) -> None:
    """`losses`: by layout, how the next losses from its checkpoint differ from those that it had itself."""
    row.followed_of = len(losses)
    for source, differences in losses.items():
        wrong = _check_losses(row, differences, f"next losses after {source}'s step {after}: ")
        row.followed_from += not wrong
        row.reasons += [text for _, text in wrong]
    compared = [each for differences in losses.values() for each in differences]
    row.followed_loss = worst(compared) if compared else None


def check_failure(row: Row, trial: Trial, outcome: Outcome) -> None:
    what = "the training" if trial.resume_from is None else "resuming from another layout's checkpoint"
    row.reasons.append(f"{what} failed on {outcome.error}")
    row.details = outcome.details


def _finite(value: Any) -> Any:
    """As JSON has it: what is no number is null."""
    if isinstance(value, dict):
        return {key: _finite(inner) for key, inner in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _first_wrong_norm(norms: Sequence[Difference]) -> Difference | None:
    return next((each for each in norms if not each.difference <= NORM_RELATIVE), None)


def _check_losses(row: Row, losses: Sequence[Difference], where: str) -> list[tuple[int, str]]:
    """(step, what is wrong), if something is; what is only just right becomes a remark."""
    beyond = [each for each in losses if not each.difference <= LOSS_RELATIVE]
    wrong = [each for each in beyond if not each.absolute <= LOSS_ABSOLUTE]
    if wrong:
        return [(wrong[0].step, _instead(f"{where}{wrong[0].name}", wrong[0]))]
    if beyond:
        at = worst(beyond)
        text = (
            f"{where}{at.name} of step {at.step} differs by {at.absolute:.1e}, within {LOSS_ABSOLUTE:g} "
            "absolute: sums in another order, amplified by the steps before"
        )
        row.remarks.append(text)
    return []


def _instead(name: str, at: Difference) -> str:
    return f"{name} of step {at.step} is {at.found:.7g} instead of {at.expected:.7g}"


def _gradients_text(first: int, wrong: Sequence[Difference], gradients: Sequence[Difference]) -> str:
    of_step = largest_first([each for each in wrong if each.step == first])
    names, at = [each.name for each in of_step], of_step[0]
    of = sum(each.step == first for each in gradients)
    size = f"{at.name} by {at.difference:.1e} of its norm"
    return f"gradients of step {first}: {len(names)} of {of} differ, {size}" + (
        f"; also {_listed(names[1:])}" if len(names) > 1 else ""
    )


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - _MOST_NAMED} more" if len(names) > _MOST_NAMED else ""
    return ", ".join(names[:_MOST_NAMED]) + more


_LARGE = 1 << 24
"""Elements: fp32 sums that are added one by one are visibly low."""


@torch.no_grad()
def plain_losses(recipe: Recipe, batch: GlobalBatch, device: torch.device) -> dict[str, float]:
    """The losses of a first batch with the initial weights, on purpose not by the losses that are verified here."""
    config, totals = recipe.model, dict.fromkeys(batch.counts, 0.0)
    model = build_model(config)
    materialise(model, config, seed=recipe.seed, device=device, dtype=torch.float32)
    for part in batch.micro_batches:
        outputs = model(**{name: tensor.to(device) for name, tensor in part.inputs.items()})
        heads = (outputs,) if isinstance(outputs, torch.Tensor) else outputs
        for (name, labels), logits in zip(part.targets.items(), heads, strict=True):
            if name == LM_LOSS and not config.softmax_over_padding:
                logits = logits[..., : config.vocab_size]
            valid = labels != IGNORED_LABEL
            chosen = logits.cpu().double().log_softmax(-1)[valid].gather(-1, labels[valid][:, None])
            totals[name] -= chosen.sum().item()
    return {name: total / max(1, batch.counts[name]) for name, total in totals.items()}


def large_norm(device: torch.device) -> tuple[float, float]:
    """(as training finds it, in fp64): the norm of a gradient as large as an embedding's."""
    values = torch.randn(_LARGE, generator=torch.Generator().manual_seed(0))
    large = nn.Parameter(values.to(device))
    large.grad = large.detach()
    weight = Weight("large", large, Piece.whole(large.data), is_shared=False, summed_over_tp=False, tied_over_pp=False)
    return Gradients([weight], alone()).norm().item(), values.double().norm().item()
