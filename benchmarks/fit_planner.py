"""Fit the planner's constants to published runs, and say how well they predict runs that were held out.

    python benchmarks/fit_planner.py TRAIN.csv --write
    python benchmarks/fit_planner.py TRAIN.csv --hold-out group

The fit begins where `start` of constants.json says and is drawn towards that, by a factor of e^0.5 per standard
deviation; every software stack has a scalar besides, which is drawn towards 1. Outliers pull no harder than an error of
10%. `--hold-out` fits again without the rows of each group, source or stack, of each third of the groups, or of random
eighths, and predicts those.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from planner import (
    Row,
    errors_of,
    log_errors,
    memory_gb,
    read_rows,
    summary,
    tokens_per_s,
    with_memory,
    with_throughput,
)

from bloomery.plan.constants import FILE, Constants, constants

_PRIOR, _STACK_PRIOR, _ERROR, _OUTLIER = 0.5, 0.08, 0.05, 0.10
_HELD = (
    *("speed", "memory", "flex", "fp8", "cast_bytes", "again", "sum_bytes"),
    *("safe", "kept", "mlp_bytes", "workspace", "end_bytes"),
)
"""Not fitted: bandwidth and passes are one product, no row says what was too much, and the rest is of our training."""
_FOLDS = 8


@dataclass
class Fit:
    """Of the constants of one model to rows, by damped Gauss-Newton on the logarithms of both."""

    part: str
    """Of constants.json."""
    rows: Sequence[Row]
    predict: Callable[[Sequence[Row], Constants], np.ndarray]
    column: str

    def run(self, rounds: int = 60) -> Constants:
        start = constants("start")
        names = [name for name in json.loads(FILE.read_text())[self.part] if name not in _HELD]
        first = np.log([getattr(start, name) for name in names])
        stacks = sorted({row["stack"] for row in self.rows})
        of_stack = np.array([[row["stack"] == stack for stack in stacks] for row in self.rows], dtype=float)
        groups = Counter(row["group"] for row in self.rows)
        weights = np.array([groups[row["group"]] ** -0.25 for row in self.rows]) / _ERROR**2
        pull = np.concatenate([np.full(len(names), _PRIOR**-2.0), np.full(len(stacks), _STACK_PRIOR**-2.0)])
        centre = np.concatenate([first, np.zeros(len(stacks))])

        def at(x: np.ndarray) -> Constants:
            return start.but(dict(zip(names, np.exp(x[: len(names)]).tolist(), strict=True)))

        def errors(x: np.ndarray) -> np.ndarray:
            predicted = self.predict(self.rows, at(x))
            return log_errors(self.rows, predicted, self.column) + of_stack @ x[len(names) :]

        def cost(x: np.ndarray) -> float:
            size = np.abs(errors(x))
            loss = np.where(size < _OUTLIER, size**2 / 2, _OUTLIER * (size - _OUTLIER / 2))
            return float(weights @ loss + pull @ (x - centre) ** 2 / 2)

        x, damping, last, slow = centre.copy(), 1e-2, np.inf, 0
        for _ in range(rounds):
            now = errors(x)
            steps = np.eye(len(x))[: len(names)] * 1e-3
            jacobian = np.hstack([np.stack([(errors(x + step) - now) / 1e-3 for step in steps], axis=1), of_stack])
            robust = weights * np.minimum(1, _OUTLIER / np.maximum(np.abs(now), 1e-9))
            slope = jacobian.T @ (robust * now) + pull * (x - centre)
            bend = jacobian.T @ (robust[:, None] * jacobian) + np.diag(pull)
            before = cost(x)
            slow, last = slow + (before > last * (1 - 2e-4)), before
            if slow >= 4:
                break
            for _ in range(8):
                move = np.clip(-np.linalg.solve(bend + damping * np.diag(np.diag(bend)), slope), -0.5, 0.5)
                if cost(x + move) < before:
                    break
                damping *= 4
            else:
                break
            x, damping = x + move, max(damping / 5, 1e-6)
        return at(x)


def speed_fit(rows: Sequence[Row]) -> Fit:
    return Fit("time", with_throughput(rows), tokens_per_s, "tgs_derived")


def memory_fit(rows: Sequence[Row]) -> Fit:
    return Fit("memory", with_memory(rows), memory_gb, "mem_gb_per_gpu_reported")


def folds_of(rows: Sequence[Row], by: str) -> list[str]:
    draw = np.random.default_rng(0)
    if by == "rows":
        return [str(draw.integers(_FOLDS)) for _ in rows]
    if by == "third":
        third = {group: str(draw.integers(3)) for group in sorted({row["group"] for row in rows})}
        return [third[row["group"]] for row in rows]
    return [row[by] for row in rows]


def held_out(make: Callable[[Sequence[Row]], Fit], rows: Sequence[Row], by: str, *, refit: bool) -> np.ndarray:
    """Errors of rows that took no part: neither in their stack's scalar nor, with `refit`, in the constants."""
    whole = make(rows)
    folds, shipped = folds_of(whole.rows, by), None if refit else whole.run()
    found = []
    for fold in sorted(set(folds)):
        train = [row for row, name in zip(whole.rows, folds, strict=True) if name != fold]
        test = [row for row, name in zip(whole.rows, folds, strict=True) if name == fold]
        predict = partial(_swapped, whole.predict, shipped or make(train).run())
        found.append(errors_of(train, test, predict, whole.column)[0])
    return np.concatenate(found)


def _swapped(predict: Callable[[Sequence[Row], Any], np.ndarray], constants: Any, rows: Sequence[Row]) -> np.ndarray:
    return predict(rows, constants)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("train", type=Path)
    parser.add_argument("--write", action="store_true", help=f"write {FILE.name}")
    parser.add_argument("--hold-out", choices=["rows", "third", "group", "source", "stack"])
    args = parser.parse_args()
    rows = read_rows(args.train)
    if args.hold_out:
        for name, make in (("throughput", speed_fit), ("memory", memory_fit)):
            for refit in (True, False):
                found = summary(held_out(make, rows, args.hold_out, refit=refit))
                what = "constants and scalars" if refit else "scalars alone"
                print(f"{name}, {what} fitted without it: median {found['median']:.2%}, p90 {found['p90']:.2%}")
        return
    table = json.loads(FILE.read_text())
    for fit in (speed_fit(rows), memory_fit(rows)):
        found = vars(fit.run())
        for name, row in table[fit.part].items():
            row["fitted"] = float(f"{found[name]:.3g}")
    parts = []
    for part, rows_of_part in table.items():
        lines = ",\n".join(f"  {json.dumps(name)}: {json.dumps(row)}" for name, row in rows_of_part.items())
        parts.append(f" {json.dumps(part)}: {{\n{lines}\n }}")
    text = "{\n" + ",\n".join(parts) + "\n}\n"
    if args.write:
        FILE.write_text(text)
    print(text, end="")


if __name__ == "__main__":
    main()
