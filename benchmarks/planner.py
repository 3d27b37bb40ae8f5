"""What the planner predicts for published runs, against what was measured.

    python benchmarks/planner.py --fit TRAIN.csv --test TEST.csv --json

A row is predicted from its configuration alone. From TRAIN only one scalar per software stack is fitted for throughput
and one for memory; a stack that TRAIN does not have gets that of the median stack.
"""

from __future__ import annotations

import argparse
import csv
import json
import re
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from bloomery.plan.constants import Constants, constants
from bloomery.plan.hardware import shipped
from bloomery.plan.memory import memory, stage_memory
from bloomery.plan.search import preference
from bloomery.plan.setup import ATTENTION, RECOMPUTE, Setup
from bloomery.plan.step_time import step_time

Row = dict[str, str]
_NUMBERS = ("layers", "hidden", "ffn", "seq", "n_gpus", "tp", "pp", "dp", "cp", "micro_batch", "global_batch")
_NEEDED = (*_NUMBERS, "gpu", "recompute")
_MEGATRON_VOCAB = 51_200
"""GPT-2's, padded for 8 tensor-parallel ranks: assumed where a table does not print one."""
_NETWORKS = (
    # What a row says of its network: (devices per node, GB/s out of a node, GB/s between two devices of it), one
    # direction; None: the device's own. Jean Zay has "NVLink 4 inter-gpu connects" between A100s (bigscience,
    # tr11-176B-ml/README.md), which we read as 4 of an A100's 12 links: layouts that were held out agree. In nodes of
    # 4 V100 each has 2 links to each other. A link has 25 GB/s.
    (r"V100: 4 GPU/node.*4x OmniPath 100", 4, 50, 50),
    (r"Jean Zay A100", 8, 50, 100),
    (r"4x100Gb", 8, 50, None),
    (r"800 Gbps/node", 8, 100, None),
    (r"1600 Gbps|8x200Gb|SuperPOD A100", 8, 200, None),
    (r"DGX H100|400Gb/s RDMA|EFA", 8, 400, None),
)
_CUT_LINKS = {"A800": 2 / 3, "H800": 4 / 9}
_DEFAULT_NIC = {"V100": 12.5, "A100": 200, "A800": 200, "H100": 400}
_GRADIENT_BYTES = {"megatron-deepspeed": 2, "deepspeed-kernels": 2, "hf-trainer": 2, "deepspeed-zero3-2021": 2}
_TEMPORARY_BYTES = {"internevo": 8}
"""Of an optimizer that is not fused, while it steps: two fp32 copies of what a rank owns."""
_DOUBT_ROWS, _DOUBT_STACKS = 2, 1
"""As if so many rows had said what the family does of a stack, and so many stacks what all do of a family."""
_FAMILY = ("group", "layers", "hidden", "seq", "n_gpus", "global_batch", "precision")
"""Rows that agree on these differ by their layout alone."""


def read_rows(path: Path) -> list[Row]:
    with path.open(newline="") as opened:
        return list(csv.DictReader(opened))


def is_complete(row: Row) -> bool:
    is_graded = row["quality"] in ("A", "B") and all(row.get(name) for name in _NEEDED)
    return is_graded and row["recompute"] in RECOMPUTE and device_of(row) in shipped().devices


def device_of(row: Row) -> str:
    """By our name; a device that we do not know keeps its own."""
    name = {"A800": "a100", "H800": "h100"}.get(row["gpu"], row["gpu"].lower())
    if name == "h100" and row["gpu_mem_gb"] == "96":
        return "h100-96g"
    size = {
        "v100": "16g" if row["gpu_mem_gb"] == "16" else "32g",
        "a100": "40g" if row["gpu_mem_gb"] == "40" else "80g",
    }.get(name)
    return f"{name}-{size}" if size else name


def _zero_stage(text: str) -> int:
    if text.startswith("fsdp"):
        return 2 if text == "fsdp-grad-op" else 3
    return int(text[0]) if text[:1].isdigit() else 0


def setup_of(row: Row) -> dict[str, Any]:
    """The configuration of a row: no measured column is read."""
    number = {name: float(row[name]) for name in _NUMBERS}
    device = shipped().devices[device_of(row)]
    heads = float(row["heads"] or number["hidden"] / 128)
    head_dim = number["hidden"] / heads
    node, nic, link = next(
        (found for pattern, *found in _NETWORKS if re.search(pattern, row["interconnect"])),
        (8, _DEFAULT_NIC.get(row["gpu"], 100), None),
    )
    zero = row["zero"]
    stage = _zero_stage(zero)
    ranks = number["dp"] * number["cp"]
    gradients = 4.0 if stage < 3 else 2.0
    if stage in (0, 1) and row["precision"] == "fp16":
        gradients = _GRADIENT_BYTES.get(row["stack"], 4.0)
    extra = 2.0 if zero == "1+fp32grad" or row["stack"] in ("nanotron", "internevo") else 0.0
    whole = (2 + gradients + extra) if stage < 2 else 2.0 if stage == 2 else 0.0
    return {
        **{name: number[name] for name in ("layers", "hidden", "ffn", "seq", "tp", "pp", "dp", "cp")},
        "micro_batch": number["micro_batch"],
        "global_batch": number["global_batch"],
        "heads": heads,
        "kv_heads": float(row["kv_heads"] or heads),
        "head_dim": head_dim,
        "gated": row["arch"] == "llama",
        "vocab": -(-float(row["vocab"] or _MEGATRON_VOCAB) // (128 * number["tp"])) * 128 * number["tp"],
        "tied": row["arch"] != "llama",
        "chunks": float(row["vpp"] or 1),
        "zero": stage,
        "shard": 1 if stage == 0 else min(ranks, 8) if "hybrid8" in zero else ranks,
        "recompute": RECOMPUTE.index(row["recompute"]),
        "per_operator": row["stack"].startswith("torchtitan"),
        "attention": ATTENTION.index(row["attn"] if row["attn"] in ATTENTION else "flash"),
        "sequence_parallel": row["seq_parallel"] == "1",
        "compiled": row["attn"] == "flash" and "eager" not in row["stack"],
        "whole_bytes": whole,
        "late_gradients": 0,
        "shared_bytes": 12 + 4.0 * (stage >= 2) + _TEMPORARY_BYTES.get(row["stack"], 0),
        "peak_flops": device.peak(row["precision"]),
        "bf16_flops": device.peak("bf16"),
        "cores": device.cores,
        "memory_bytes": float(row["gpu_mem_gb"] or device.memory_gib) * 2**30,
        "memory_bytes_per_s": device.memory_gb_per_s * 1e9,
        "link_bytes_per_s": (link or device.link_gb_per_s) * 1e9 * _CUT_LINKS.get(row["gpu"], 1),
        "nic_bytes_per_s": nic * 1e9,
        "node": node,
    }


def setups(rows: Sequence[Row]) -> Setup:
    return _setups(tuple(tuple(row.items()) for row in rows))


@lru_cache(maxsize=8)
def _setups(rows: tuple[tuple[tuple[str, str], ...], ...]) -> Setup:
    """A fit asks for the same ones thousands of times."""
    found = [setup_of(dict(row)) for row in rows]
    return Setup.of(**{name: [one[name] for one in found] for name in found[0]})


def with_throughput(rows: Sequence[Row]) -> list[Row]:
    return [row for row in rows if is_complete(row) and row["tgs_derived"]]


def with_memory(rows: Sequence[Row]) -> list[Row]:
    return [row for row in rows if is_complete(row) and row["mem_gb_per_gpu_reported"]]


def tokens_per_s(rows: Sequence[Row], of: Constants) -> np.ndarray:
    found = setups(rows)
    return found.global_batch * found.seq / step_time(found, of).total / found.devices


def memory_gb(rows: Sequence[Row], of: Constants) -> np.ndarray:
    """As the row's tool counts: torch does not see the context, and a tool that does not say `max` sees rank 0."""
    found = setups(rows)
    first, fullest = stage_memory(found, of, is_last=False), memory(found, of)
    looked = [row["mem_definition"] for row in rows]
    of_fullest = np.array([bool(re.search("max|Azure", text)) for text in looked])
    by_torch = np.array([not re.match("nvidia|Azure|GPU", text) for text in looked])
    return (np.where(of_fullest, fullest.expected, first.expected) - by_torch * first.context) / 1e9


Scalars = Callable[[str], float]


def stack_scalars(rows: Sequence[Row], log_ratios: Sequence[float]) -> Scalars:
    """Log of measured over predicted, by stack. Versions of one system are a family: their names agree up to a dash."""
    by_stack: dict[str, list[float]] = defaultdict(list)
    for row, ratio in zip(rows, log_ratios, strict=True):
        by_stack[row["stack"]].append(ratio)
    medians = {stack: float(np.median(ratios)) for stack, ratios in by_stack.items()}
    families: dict[str, list[float]] = defaultdict(list)
    for stack, median in medians.items():
        families[stack.split("-")[0]].append(median)
    overall = float(np.median([np.mean(found) for found in families.values()])) if families else 0.0

    def scalar(stack: str) -> float:
        siblings = families.get(stack.split("-")[0], [])
        family = (sum(siblings) + overall * _DOUBT_STACKS) / (len(siblings) + _DOUBT_STACKS)
        size = len(by_stack.get(stack, []))
        return (medians.get(stack, 0.0) * size + family * _DOUBT_ROWS) / (size + _DOUBT_ROWS)

    return scalar


def log_errors(rows: Sequence[Row], predicted: np.ndarray, column: str) -> np.ndarray:
    return np.log(predicted) - np.log([float(row[column]) for row in rows])


def errors_of(train: Sequence[Row], test: Sequence[Row], predict: Any, column: str) -> tuple[np.ndarray, Scalars]:
    """Predicted over measured, minus 1, of every row of `test`."""
    if not test:
        return np.array([]), lambda _: 0.0
    known = list(-log_errors(train, predict(train), column)) if train else []
    scalar = stack_scalars(train, known)
    ratios = log_errors(test, predict(test), column) + [scalar(row["stack"]) for row in test]
    return np.expm1(ratios), scalar


def summary(errors: np.ndarray) -> dict[str, Any]:
    sizes = np.abs(errors)
    if not len(sizes):
        return {"rows": 0, "median": None, "p90": None}
    return {"rows": len(sizes), "median": float(np.median(sizes)), "p90": float(np.quantile(sizes, 0.9))}


def regrets(rows: Sequence[Row], predicted: np.ndarray) -> dict[str, float]:
    """By how much the layout that is chosen falls short of the fastest, where three or more were measured."""
    families: dict[str, list[tuple[float, float]]] = defaultdict(list)
    sizes = np.array([float(row["micro_batch"]) for row in rows])
    for row, speed in zip(rows, preference(predicted, sizes), strict=True):
        families["/".join(row[name] for name in _FAMILY)].append((speed, float(row["tgs_derived"])))
    compared = {name: found for name, found in families.items() if len(found) >= 3}
    return {name: 1 - max(found)[1] / max(measured for _, measured in found) for name, found in compared.items()}


def evaluate(train: Sequence[Row], test: Sequence[Row], of: Constants) -> dict[str, Any]:
    def speed(rows: Sequence[Row]) -> np.ndarray:
        return tokens_per_s(rows, of)

    def space(rows: Sequence[Row]) -> np.ndarray:
        return memory_gb(rows, of)

    timed, measured = with_throughput(test), with_memory(test)
    fast, of_speed = errors_of(with_throughput(train), timed, speed, "tgs_derived")
    full, of_space = errors_of(with_memory(train), measured, space, "mem_gb_per_gpu_reported")
    lost = regrets(timed, speed(timed)) if timed else {}
    parts = {
        f"by_{key}": {
            name: summary(np.array([error for row, error in zip(timed, fast, strict=True) if row[key] == name]))
            for name in sorted({row[key] for row in timed})
        }
        for key in ("gpu", "source")
    }
    return {
        "throughput": summary(fast) | parts,
        "memory": summary(full),
        "regret": {
            "families": len(lost),
            "median": float(np.median(list(lost.values()))) if lost else None,
            "worst": max(lost.values(), default=None),
            "by_family": lost,
        },
        "scalars": {
            "throughput": {stack: float(np.exp(of_speed(stack))) for stack in sorted({row["stack"] for row in timed})},
            "memory": {stack: float(np.exp(of_space(stack))) for stack in sorted({row["stack"] for row in measured})},
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fit", type=Path, required=True, help="rows that the scalars of stacks are fitted on")
    parser.add_argument("--test", type=Path, required=True, help="rows that are predicted")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    found = evaluate(read_rows(args.fit), read_rows(args.test), constants("fitted"))
    print(json.dumps(found, indent=2) if args.json else as_table(found))


def as_table(found: dict[str, Any]) -> str:
    def line(name: str, part: dict[str, Any]) -> str:
        return f"{name:<42} {part['rows']:>5} rows  median {part['median']:7.2%}  p90 {part['p90']:7.2%}"

    lines = [line(name, found[name]) for name in ("throughput", "memory") if found[name]["rows"]]
    for key in ("by_gpu", "by_source"):
        lines += [line(f"  {name}", part) for name, part in found["throughput"][key].items()]
    regret = found["regret"]
    if regret["families"]:
        lines.append(
            f"regret: {regret['families']} families, median {regret['median']:.2%}, worst {regret['worst']:.2%}"
        )
        lines += [f"  {name:<80} {lost:7.2%}" for name, lost in regret["by_family"].items()]
    scalars = found["scalars"]
    lines += [f"scalar of {stack}, {kind}: {scalar:.3f}" for kind in scalars for stack, scalar in scalars[kind].items()]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
