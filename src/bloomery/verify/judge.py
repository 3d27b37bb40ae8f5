"""One row of the certificate: what a layout was compared in, by how much it differs, and what that means."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from torch import Tensor

from bloomery.verify import compare
from bloomery.verify.compare import Recorded, Worst
from bloomery.verify.trials import Outcome, Trial

_MOST_NAMED = 3


@dataclass
class Row:
    """Of one layout. `reasons` is empty if and only if it passed."""

    layout: str
    ranks: int
    loss: Worst | None = None
    grad_norm: Worst | None = None
    gradient: Worst | None = None
    data_order: str = "not compared"
    continued_from: str | None = None
    continued_loss: Worst | None = None
    continued_grad_norm: Worst | None = None
    resharded_from: int = 0
    """Layouts whose checkpoints it loaded bit by bit."""
    resharded_of: int = 0
    seconds: float = 0.0
    reasons: list[str] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)
    details: str = ""

    @property
    def verdict(self) -> str:
        return "fail" if self.reasons else "pass"

    def to_json(self) -> dict[str, Any]:
        return {"layout": self.layout, "ranks": self.ranks, "verdict": self.verdict, **asdict(self)}


def judge_training(row: Row, found: Recorded, expected: Recorded) -> None:
    """Compare a training from the beginning with the reference."""
    row.loss, row.grad_norm = compare.worst_loss(found, expected), compare.worst_norm(found, expected)
    gradients = compare.gradient_differences(found, expected)
    row.gradient = gradients[0]
    wrong = [each for each in gradients if not each.difference <= compare.GRADIENT_RELATIVE]
    norm_is_wrong = not row.grad_norm.difference <= compare.NORM_RELATIVE
    other = compare.first_other_sample(found, expected)
    row.data_order = "differs" if other else "equal"
    if other:
        row.reasons.append(f"data order: {other}")
    if wrong:
        row.reasons.append(_gradients_text(wrong, gradients))
    if norm_is_wrong:
        at = row.grad_norm
        text = f"global grad norm of step {at.step} is {at.found:.7g} instead of {at.expected:.7g}"
        if not wrong and at.step <= gradients[0].step:
            text += ", though every gradient agrees: some are counted twice or not at all"
        row.reasons.append(text)
    _judge_loss(row, row.loss, "")


def judge_continuation(row: Row, found: Recorded, expected: Recorded, source: str, after: int) -> None:
    """Compare what came after another layout's checkpoint with the uninterrupted reference."""
    row.continued_from = source
    row.continued_loss = compare.worst_loss(found, expected, after)
    row.continued_grad_norm = compare.worst_norm(found, expected, after)
    where = f"continued from {source} at step {after}: "
    other = compare.first_other_sample(found, expected, after)
    if other:
        row.data_order = "differs"
        row.reasons.append(f"{where}data order: {other}")
    at = row.continued_grad_norm
    if not at.difference <= compare.NORM_RELATIVE:
        row.reasons.append(f"{where}global grad norm of step {at.step} is {at.found:.7g} instead of {at.expected:.7g}")
    _judge_loss(row, row.continued_loss, where)


def judge_reshard(row: Row, reloaded: Mapping[str, Tensor], originals: Mapping[str, Mapping[str, Tensor]]) -> None:
    row.resharded_of = len(originals)
    for source, original in originals.items():
        wrong = compare.reshard_differences(reloaded, source, original)
        row.resharded_from += not wrong
        if wrong:
            names = _listed(wrong)
            row.reasons.append(f"reshard: {len(wrong)} tensors saved by {source} did not come back bit by bit: {names}")


def judge_failure(row: Row, trial: Trial, outcome: Outcome) -> None:
    what = "the training" if trial.resume_from is None else "going on from another layout's checkpoint"
    row.reasons.append(f"{what} failed on {outcome.error}")
    row.details = outcome.details


def _judge_loss(row: Row, worst: Worst, where: str) -> None:
    if worst.difference <= compare.LOSS_RELATIVE:
        return
    if worst.absolute <= compare.LOSS_ABSOLUTE:
        text = (
            f"{where}{worst.name} of step {worst.step} differs by {worst.absolute:.1e}, within {compare.LOSS_ABSOLUTE} "
            "absolute: sums in another order, amplified by the steps before"
        )
        row.remarks.append(text)
        return
    text = f"{where}{worst.name} of step {worst.step} is {worst.found:.7g} instead of {worst.expected:.7g}"
    row.reasons.append(text)


def _gradients_text(wrong: Sequence[Worst], gradients: Sequence[Worst]) -> str:
    first = min(each.step for each in wrong)
    names = [each.name for each in wrong if each.step == first]
    of = sum(each.step == first for each in gradients)
    at = next(each for each in wrong if each.step == first)
    size = f"{at.name} by {at.difference:.1e} of its norm"
    return f"gradients of step {first}: {len(names)} of {of} differ, {size}" + (
        f"; also {_listed(names[1:])}" if len(names) > 1 else ""
    )


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - _MOST_NAMED} more" if len(names) > _MOST_NAMED else ""
    return ", ".join(names[:_MOST_NAMED]) + more
