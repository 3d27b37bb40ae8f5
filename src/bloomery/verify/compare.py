"""What two trainings of one recipe differ in: losses, gradient norms, gradients, samples, weights.

The verdict on that is one row of the certificate for each layout."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, cast

import torch
from pydantic_core import to_jsonable_python
from safetensors.torch import load_file
from torch import Tensor, nn

from bloomery.base.errors import first_few
from bloomery.base.ranks import Piece
from bloomery.checkpoint.folder import complete_checkpoints, step_of
from bloomery.checkpoint.load import read_checkpoint
from bloomery.config.recipe import Recipe
from bloomery.data.batch import GlobalBatch
from bloomery.families.family import IGNORED_LABEL, LM_LOSS
from bloomery.model.init import initialise
from bloomery.model.transformer import build_model, materialise
from bloomery.monitor.history import read_metrics
from bloomery.monitor.record import StepRecord
from bloomery.parallel.gradients import Gradients, Weight
from bloomery.parallel.mesh import Mesh

# In the folder of a trial (trials.py):
RUN, TRACE = "run", "trace"
TRUTH = "truth.json"
"""What plain torch finds."""

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
_LARGE = 1 << 24
"""Elements: fp32 sums that are added one by one are visibly low."""

Numbers = dict[tuple[int, str], float]
"""By step and name."""


@dataclass(frozen=True)
class Difference:
    """Between a number of a layout and the reference's."""

    difference: float
    """Relative; infinite where one of them is NaN or missing."""
    name: str
    step: int
    found: float
    expected: float


class Recorded:
    """What a trial wrote into its folder."""

    def __init__(self, folder: Path) -> None:
        self.losses: Numbers = {}
        self.norms: Numbers = {}
        for record in read_metrics(folder / RUN / "metrics.jsonl"):
            if isinstance(record, StepRecord):
                self.norms[record.step, "global grad norm"] = record.grad_norm
                of_sources = {f"{LM_LOSS} of {name}": loss for name, loss in record.source_losses.items()}
                found = record.losses | of_sources
            else:
                found = {f"{name} of validation group {record.group}": loss for name, loss in record.losses.items()}
            self.losses |= {(record.step, name): loss for name, loss in found.items()}
        lines = (folder / TRACE / "samples.jsonl").read_text().splitlines()
        self.samples: dict[int, dict[str, str]] = {each["step"]: each["samples"] for each in map(json.loads, lines)}
        self.gradients = {step_of(path): path for path in complete_checkpoints(folder / TRACE)}


def relative(name: str, step: int, found: float, expected: float) -> Difference:
    difference = abs(found - expected) / max(abs(expected), 1e-12)
    return Difference(math.inf if math.isnan(difference) else difference, name, step, found, expected)


def differences(found: Numbers, expected: Numbers, after: int = 0) -> list[Difference]:
    """Of all steps beyond `after`, in their order."""
    return [
        relative(name, step, found.get((step, name), math.nan), right)
        for (step, name), right in sorted(expected.items())
        if step > after
    ]


def first_other_sample(found: Recorded, expected: Recorded, after: int = 0) -> tuple[int, str] | None:
    """(step, description) of where the samples of two runs part; None if nowhere."""
    for step, samples in expected.samples.items():
        mine = found.samples.get(step, {})
        if step > after and mine != samples:
            place = next(place for place in {**samples, **mine} if mine.get(place) != samples.get(place))
            seen, right = mine.get(place, "not read"), samples.get(place, "none")
            return step, f"data order: step {step}, sample {place}: {seen} instead of {right}"
    return None


def gradient_differences(found: Recorded, expected: Recorded) -> list[Difference]:
    """Of every gradient of every traced step, relative to its norm."""
    different = []
    for step, folder in expected.gradients.items():
        right = whole_tensors(folder)
        mine = whole_tensors(found.gradients[step]) if step in found.gradients else {}
        total = torch.stack([each.norm() for each in right.values()]).norm().item()
        for name, each in right.items():
            size = max(each.norm().item(), GRADIENT_FLOOR * total)
            other = mine.get(name, torch.full((), math.nan))
            by = (other - each).norm().item() / size if other.shape == each.shape else math.nan
            by = math.inf if math.isnan(by) else by
            found_norm, norm = other.norm().item(), each.norm().item()
            different.append(Difference(by, name.removeprefix("grad."), step, found_norm, norm))
    return different


def whole_tensors(folder: Path) -> dict[str, Tensor]:
    """A checkpoint put together from its pieces, on purpose not by the loader that is verified here."""
    files = {path.name: load_file(path) for path in folder.glob("*.safetensors")}
    whole = {}
    for name, saved in read_checkpoint(folder, tensors=False).tensors.items():
        whole[name] = torch.zeros(saved.shape, dtype=files[saved.pieces[0].file][saved.pieces[0].key].dtype)
        for piece in saved.pieces:
            box = tuple(slice(a, a + n) for a, n in zip(piece.offset, piece.size, strict=True))
            whole[name][box] = files[piece.file][piece.key]
    return whole


def _same_bits(a: Tensor | None, b: Tensor | None) -> bool:
    if a is None or b is None or a.shape != b.shape or a.dtype != b.dtype:
        return False
    return torch.equal(a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8))


def worst(found: Sequence[Difference]) -> Difference:
    return max(found, key=lambda each: each.difference)


@dataclass
class Row:
    """Of one layout. `reasons` is empty if and only if it passed."""

    layout: str
    ranks: int
    verdict: str = "pass"
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
    """Layouts from whose checkpoints it learns what one rank learns."""
    followed_of: int = 0
    followed_loss: Difference | None = None
    seconds: float = 0.0
    reasons: list[str] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)
    details: str = ""

    def to_json(self) -> dict[str, Any]:
        """What is no number is null."""
        facts = asdict(self) | {"verdict": "fail" if self.reasons else "pass"}
        return cast(dict[str, Any], to_jsonable_python(facts, inf_nan_mode="null"))


def check_training(row: Row, found: Recorded, expected: Recorded) -> None:
    """Compare a training from the beginning with the reference. What went wrong first is reported first."""
    losses, norms = differences(found.losses, expected.losses), differences(found.norms, expected.norms)
    gradients = gradient_differences(found, expected)
    row.loss, row.grad_norm, row.gradient = map(worst, (losses, norms, gradients))
    other = first_other_sample(found, expected)
    row.data_order = "differs" if other else "equal"
    reasons = [other] if other else []
    wrong = [each for each in gradients if each.difference > GRADIENT_RELATIVE]
    if wrong:
        first = min(each.step for each in wrong)
        reasons.append((first, _gradients_text(first, wrong, gradients)))
    for step, text in _check_norms(norms):
        if step <= max(each.step for each in gradients) and all(each.step > step for each in wrong):
            text += ", though every gradient of that step agrees: some are counted twice or not at all"
        reasons.append((step, text))
    reasons += _check_losses(row, losses)
    row.reasons += [text for _, text in sorted(reasons, key=lambda reason: reason[0])]


def check_reference(row: Row, found: Recorded, truth: Mapping[str, Any]) -> None:
    """Compare the reference with what plain torch finds."""
    losses = [relative(name, 1, found.losses[1, name], right) for name, right in truth["losses"].items()]
    norm = relative("norm of a large gradient", 1, *truth["norm"])
    row.loss, row.grad_norm = worst(losses), norm
    row.reasons += [f"beside plain torch over the true vocabulary: {text}" for _, text in _check_losses(row, losses)]
    row.reasons += [text for _, text in _check_norms([norm])]


def check_continuation(row: Row, found: Recorded, expected: Recorded, source: str, after: int) -> None:
    """Compare what came after the checkpoint of `source`, which was right itself, with the uninterrupted reference."""
    losses = differences(found.losses, expected.losses, after)
    norms = differences(found.norms, expected.norms, after)
    if row.continued_from is None:
        row.continued_from, row.continued_loss, row.continued_grad_norm = source, worst(losses), worst(norms)
    other = first_other_sample(found, expected, after)
    if other:
        row.data_order = "differs"
    wrong = [*([other] if other else []), *_check_norms(norms), *_check_losses(row, losses)]
    row.followed_of += 1
    row.followed_from += not wrong
    row.followed_loss = worst([*losses, *filter(None, [row.followed_loss])])
    row.reasons += [f"continued from {source} at step {after}: {text}" for _, text in wrong]


def check_reshard(row: Row, saved: Path, originals: Mapping[str, Path]) -> None:
    """`saved`: what the layout held after it had loaded the checkpoints in `originals`, each by the layout it is from;
    there a tensor is called `<layout>/<name>`."""
    reloaded = whole_tensors(saved)
    row.resharded_of = len(originals)
    for layout, folder in originals.items():
        mine = {name.partition("/")[2]: each for name, each in reloaded.items() if name.startswith(f"{layout}/")}
        right = whole_tensors(folder)
        wrong = sorted(name for name in mine | right if not _same_bits(mine.get(name), right.get(name)))
        row.resharded_from += not wrong
        if wrong:
            what = f"{len(wrong)} tensors saved by {layout} were not restored bit for bit"
            row.reasons.append(f"reshard: {what}: {first_few(wrong)}")


def _check_norms(norms: Sequence[Difference]) -> list[tuple[int, str]]:
    """(step, what is wrong) of the first that is."""
    wrong = [each for each in norms if each.difference > NORM_RELATIVE]
    return [(each.step, _instead(each)) for each in wrong[:1]]


def _check_losses(row: Row, losses: Sequence[Difference]) -> list[tuple[int, str]]:
    """(step, what is wrong) of the first that is; what is only just right becomes a remark."""
    beyond = [each for each in losses if each.difference > LOSS_RELATIVE]
    wrong = [each for each in beyond if not abs(each.found - each.expected) <= LOSS_ABSOLUTE]
    if beyond and not wrong:
        at = worst(beyond)
        row.remarks.append(
            f"{at.name} of step {at.step} differs by {abs(at.found - at.expected):.1e}, within {LOSS_ABSOLUTE:g} "
            "absolute: sums in another order, amplified by the steps before"
        )
    return [(each.step, _instead(each)) for each in wrong[:1]]


def _instead(at: Difference) -> str:
    return f"{at.name} of step {at.step} is {at.found:.7g} instead of {at.expected:.7g}"


def _gradients_text(step: int, wrong: Sequence[Difference], gradients: Sequence[Difference]) -> str:
    largest_first = sorted((each for each in wrong if each.step == step), key=lambda each: -each.difference)
    of = sum(each.step == step for each in gradients)
    names = first_few([f"{each.name} by {each.difference:.1e} of its norm" for each in largest_first])
    return f"gradients of step {step}: {len(largest_first)} of {of} differ, {names}"


@torch.no_grad()
def plain_losses(recipe: Recipe, batch: GlobalBatch, device: torch.device) -> dict[str, float]:
    """The losses of a first batch with the initial weights, on purpose not by the losses that are verified here."""
    config, totals = recipe.model, dict.fromkeys(batch.counts, 0.0)
    model = build_model(config)
    materialise(model, device)
    initialise(((name, Piece.whole(each.data)) for name, each in model.named_parameters()), config, recipe.seed)
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
    return Gradients([weight], Mesh()).norm().item(), values.double().norm().item()
