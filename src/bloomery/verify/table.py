"""The certificate for people: one line a layout, then whatever is wrong."""

from __future__ import annotations

from bloomery.config.describe import fingerprint
from bloomery.verify.certify import Certificate
from bloomery.verify.compare import GRADIENT_RELATIVE, LOSS_RELATIVE, Difference
from bloomery.verify.judge import Row

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
        reshard += f", {row.followed_from} of {row.followed_of} go on"
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
