"""What the planner predicts of trainings on this machine, against short real ones.

    bloomery calibrate
    python benchmarks/planner_gpu.py --output planner_gpu.json

Of eight configurations: seconds of a step and peak memory. And for gpt-1.3b without recomputation: the largest
micro-batch that is called safe, whether it runs, and the largest of the next ones that does.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

from bloomery.config.load import load_recipe
from bloomery.plan.candidates import setup_of
from bloomery.plan.constants import fitted
from bloomery.plan.hardware import Machine, known_as, read_catalogue
from bloomery.plan.memory import memory
from bloomery.plan.step_time import step_time
from bloomery.plan.trials import Bench, random_data, torch_name

_3B = ["model.num_layers=32", "model.hidden_size=2560", "model.num_heads=20"]
_350M = ["model.num_layers=24", "model.hidden_size=1024", "model.num_heads=16"]


def batch(micro: int, total: int | None = None) -> str:
    return f"batch={{micro_batch_size: {micro}, global_batch_size: {total or micro}}}"


CASES: dict[str, tuple[str, list[str]]] = {
    "gpt-1.3b, micro-batch 16": ("gpt-1.3b", [batch(16)]),
    "gpt-1.3b, 4 of 16": ("gpt-1.3b", [batch(4, 16)]),
    "gpt-1.3b, 16, full recomputation": ("gpt-1.3b", [batch(16), "parallel.recompute=full"]),
    "gpt-1.3b, 16, recompute mlp": ("gpt-1.3b", [batch(16), "parallel.recompute=mlp"]),
    "bloom-1.3b, 8": ("bloom-1.3b", [batch(8)]),
    "bloom-1.3b, 16, full recomputation": ("bloom-1.3b", [batch(16), "parallel.recompute=full"]),
    "350M, 32": ("gpt-1.3b", [*_350M, batch(32)]),
    "3B, 8": ("gpt-1.3b", [*_3B, batch(8)]),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", help="cpu, cuda, ...")
    parser.add_argument("--step", type=int, default=4, help="between the micro-batches of the safe bound; 0: leave it")
    parser.add_argument("--cases", type=int, default=len(CASES), help="only the first so many")
    parser.add_argument("--override", action="append", default=[], help="of all recipes")
    parser.add_argument("--output", type=Path, help="write all rows as JSON")
    args = parser.parse_args()
    catalogue, name = read_catalogue(None), torch_name(args.device)
    machine = Machine.of(catalogue, known_as(name, catalogue) or name, None, 1)
    constants = fitted().on(machine.device)
    print(f"{machine.gpu}: {machine.device.torch_name}, {machine.device.source}", flush=True)
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as temporary:
        data = [*random_data(Path(temporary) / "random"), *args.override]

        def predicted(name: str, words: list[str]) -> tuple[float, float, float]:
            setup = setup_of(load_recipe(name, [*data, *words]).recipe, machine)
            used = memory(setup, constants)
            seen = float(used.seen(machine.device.torch_name))
            return float(step_time(setup, constants).total), seen, float(used.expected) * constants.safe

        for case, (name, words) in list(CASES.items())[: args.cases]:
            trial = Bench(name, data, Path(temporary), args.device).run(words)
            step, peak, safe = predicted(name, words)
            row = {"case": case, **vars(trial), "predicted_step_seconds": step, "predicted_memory_bytes": peak}
            rows.append(row | {"safe_bytes": safe})
            print(line(rows[-1]), flush=True)
        facts: dict[str, Any] = {"machine": machine.gpu, "rows": rows, "median": medians(rows)}
        print(json.dumps(facts["median"]), flush=True)
        if args.step:
            facts["safe"] = safe_bound(
                args, data, Path(temporary), lambda words: predicted("gpt-1.3b", words)[2], machine
            )
            print(json.dumps(facts["safe"]), flush=True)
    if args.output:
        args.output.write_text(json.dumps(facts, indent=1))


def safe_bound(args: Any, data: list[str], folder: Path, safe_bytes: Any, machine: Machine) -> dict[str, Any]:
    """The largest micro-batch that is called safe, and whether it and the next two steps run."""
    have = machine.device.memory_gib * 2**30
    sizes = [n * args.step for n in range(1, 200)]
    largest = max((size for size in sizes if safe_bytes([batch(size)]) <= have), default=0)
    tried = {
        size: Bench("gpt-1.3b", data, folder, args.device, figures=1).run([batch(size)]).outcome
        for size in (largest, largest + args.step, largest + 2 * args.step)
        if size
    }
    return {"largest_safe": largest, "step": args.step, "outcomes": tried}


def medians(rows: list[dict[str, Any]]) -> dict[str, float]:
    if not (done := [row for row in rows if row["outcome"] == "ok"]):
        return {"rows": 0}
    return {
        "rows": len(done),
        "step": median(abs(row["predicted_step_seconds"] / row["step_seconds"] - 1) for row in done),
        "memory": median(abs(row["predicted_memory_bytes"] / row["peak_memory_bytes"] - 1) for row in done),
        "beyond_safe": sum(row["peak_memory_bytes"] > row["safe_bytes"] for row in done),
    }


def line(row: dict[str, Any]) -> str:
    if row["outcome"] != "ok":
        return f"{row['case']:<36} {row['outcome']}: {row['said'][:150]}"
    seconds = versus(row["predicted_step_seconds"], row["step_seconds"], "s")
    gigabytes = versus(row["predicted_memory_bytes"] / 1e9, row["peak_memory_bytes"] / 1e9, "GB")
    return f"{row['case']:<36} {seconds}; {gigabytes}; {row['wall_seconds']:.0f} s"


def versus(predicted: float, measured: float, unit: str) -> str:
    return f"{predicted:8.4g} {unit} predicted, {measured:8.4g} measured ({predicted / measured - 1:+6.1%})"


if __name__ == "__main__":
    main()
