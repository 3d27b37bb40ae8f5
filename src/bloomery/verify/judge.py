"""One row of the certificate: what a layout was compared in, by how much it differs, and what that means."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from bloomery.verify import compare
from bloomery.verify.compare import Difference, Recorded
from bloomery.verify.trials import Outcome, Trial

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


def judge_training(row: Row, found: Recorded, expected: Recorded) -> None:
    """Compare a training from the beginning with the reference. What went wrong first is told."""
    losses, norms = compare.loss_differences(found, expected), compare.norm_differences(found, expected)
    gradients = compare.gradient_differences(found, expected)
    row.loss, row.grad_norm, row.gradient = map(compare.worst, (losses, norms, gradients))
    other = compare.first_other_sample(found, expected)
    row.data_order = "differs" if other else "equal"
    reasons = [(other[0], f"data order: {other[1]}")] if other else []
    wrong = [each for each in gradients if not each.difference <= compare.GRADIENT_RELATIVE]
    if wrong:
        first = min(each.step for each in wrong)
        reasons.append((first, _gradients_text(first, wrong, gradients)))
    norm = _first_wrong_norm(norms)
    if norm is not None:
        text = _instead("global grad norm", norm)
        if norm.step <= max(each.step for each in gradients) and all(each.step > norm.step for each in wrong):
            text += ", though every gradient of that step agrees: some are counted twice or not at all"
        reasons.append((norm.step, text))
    reasons += _judge_losses(row, losses, "")
    row.reasons += [text for _, text in sorted(reasons, key=lambda reason: reason[0])]


def judge_reference(row: Row, found: Recorded, truth: Mapping[str, Any]) -> None:
    """Compare the reference with what plain torch finds (truth.py)."""
    losses = [compare.relative(name, 1, found.losses[1, name], right) for name, right in truth["losses"].items()]
    row.loss, row.grad_norm = compare.worst(losses), compare.relative("norm of a large gradient", 1, *truth["norm"])
    row.reasons += [text for _, text in _judge_losses(row, losses, "beside plain torch over the true vocabulary: ")]
    if _first_wrong_norm([row.grad_norm]):
        row.reasons.append(_instead(row.grad_norm.name, row.grad_norm))


def judge_continuation(row: Row, found: Recorded, expected: Recorded, source: str, after: int) -> None:
    """Compare what came after the checkpoint of `source`, which was right itself, with the uninterrupted reference."""
    losses = compare.loss_differences(found, expected, after)
    norms = compare.norm_differences(found, expected, after)
    row.continued_from = source
    row.continued_loss, row.continued_grad_norm = compare.worst(losses), compare.worst(norms)
    where = f"continued from {source} at step {after}: "
    if row.reasons:
        return  # most likely the same mistake once more
    other = compare.first_other_sample(found, expected, after)
    if other:
        row.data_order = "differs"
        row.reasons.append(f"{where}data order: {other[1]}")
    norm = _first_wrong_norm(norms)
    if norm is not None:
        row.reasons.append(_instead(f"{where}global grad norm", norm))
    row.reasons += [text for _, text in _judge_losses(row, losses, where)]


def judge_reshard(row: Row, resharded: Mapping[str, Sequence[str]]) -> None:
    """`resharded`: by layout, the tensors of its checkpoint that did not come back bit by bit."""
    row.resharded_of = len(resharded)
    for source, wrong in resharded.items():
        row.resharded_from += not wrong
        if wrong:
            names = _listed(wrong)
            row.reasons.append(f"reshard: {len(wrong)} tensors saved by {source} did not come back bit by bit: {names}")


def judge_followed(row: Row, losses: Mapping[str, Sequence[Difference]], after: int) -> None:
    """`losses`: by layout, how the next losses from its checkpoint differ from those that it had itself."""
    row.followed_of = len(losses)
    for source, differences in losses.items():
        wrong = _judge_losses(row, differences, f"next losses after {source}'s step {after}: ")
        row.followed_from += not wrong
        row.reasons += [text for _, text in wrong]
    compared = [each for differences in losses.values() for each in differences]
    row.followed_loss = compare.worst(compared) if compared else None


def judge_failure(row: Row, trial: Trial, outcome: Outcome) -> None:
    what = "the training" if trial.resume_from is None else "going on from another layout's checkpoint"
    row.reasons.append(f"{what} failed on {outcome.error}")
    row.details = outcome.details


def _finite(value: Any) -> Any:
    """As JSON has it: what is no number is null."""
    if isinstance(value, dict):
        return {key: _finite(inner) for key, inner in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _first_wrong_norm(norms: Sequence[Difference]) -> Difference | None:
    return next((each for each in norms if not each.difference <= compare.NORM_RELATIVE), None)


def _judge_losses(row: Row, losses: Sequence[Difference], where: str) -> list[tuple[int, str]]:
    """(step, what is wrong), if something is; what is only just right becomes a remark."""
    beyond = [each for each in losses if not each.difference <= compare.LOSS_RELATIVE]
    wrong = [each for each in beyond if not each.absolute <= compare.LOSS_ABSOLUTE]
    if wrong:
        return [(wrong[0].step, _instead(f"{where}{wrong[0].name}", wrong[0]))]
    if beyond:
        at = compare.worst(beyond)
        text = (
            f"{where}{at.name} of step {at.step} differs by {at.absolute:.1e}, within {compare.LOSS_ABSOLUTE:g} "
            "absolute: sums in another order, amplified by the steps before"
        )
        row.remarks.append(text)
    return []


def _instead(name: str, at: Difference) -> str:
    return f"{name} of step {at.step} is {at.found:.7g} instead of {at.expected:.7g}"


def _gradients_text(first: int, wrong: Sequence[Difference], gradients: Sequence[Difference]) -> str:
    of_step = compare.largest_first([each for each in wrong if each.step == first])
    names, at = [each.name for each in of_step], of_step[0]
    of = sum(each.step == first for each in gradients)
    size = f"{at.name} by {at.difference:.1e} of its norm"
    return f"gradients of step {first}: {len(names)} of {of} differ, {size}" + (
        f"; also {_listed(names[1:])}" if len(names) > 1 else ""
    )


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - _MOST_NAMED} more" if len(names) > _MOST_NAMED else ""
    return ", ".join(names[:_MOST_NAMED]) + more
