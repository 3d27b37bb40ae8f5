"""What `bloomery tune` finds, against every configuration of a grid.

    python benchmarks/tune.py --models gpt-1.3b --work-dir tune
    python benchmarks/tune.py --models bert-large gpt2-124m gpt2-medium gpt2-large gpt2-xl --work-dir tune

The last five are the cases of DeepSpeed's autotuner. All trials are short real trainings on random tokens; a search or
grid that was interrupted continues. `--grid FIELD=V,V` says what the grid tries of a field.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
from pathlib import Path
from typing import Any

from throughput import random_data

from bloomery.cli.main import main as bloomery
from bloomery.sizing.check import load_checked_recipe

_BATCH = "batch={{micro_batch_size: {0}, global_batch_size: {1}}}"
CASES: dict[str, tuple[str, list[str]]] = {
    "gpt-1.3b": ("gpt-1.3b", []),
    "bert-large": ("bert-large", [_BATCH.format(8, 64)]),
    **{
        name: (
            "gpt-1.3b",
            [
                f"model.num_layers={layers}",
                f"model.hidden_size={hidden}",
                f"model.num_heads={heads}",
                "model.seq_length=1024",
                _BATCH.format(1, 64),
            ],
        )
        for name, layers, hidden, heads in (
            ("gpt2-124m", 12, 768, 12),
            ("gpt2-medium", 24, 1024, 16),
            ("gpt2-large", 36, 1280, 20),
            ("gpt2-xl", 48, 1600, 25),
        )
    },
}
_GRID = ["batch.micro_batch_size=8,16", "parallel.recompute=none,mlp,full", "train.compile=auto"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=CASES, default=["gpt-1.3b"])
    parser.add_argument("--work-dir", type=Path, required=True, help="for shards, journals and results")
    parser.add_argument("--trials", type=int, default=8)
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--grid", nargs="*", default=_GRID, metavar="FIELD=V,V", help=f"default: {' '.join(_GRID)}")
    parser.add_argument("--no-grid", action="store_true", help="tune alone")
    parser.add_argument("--grid-minutes", type=float, default=60.0, help="begin no trial of the grid after them")
    parser.add_argument("--override", action="append", default=[], help="of the recipes")
    parser.add_argument("--device")
    args = parser.parse_args()
    for name in args.models:
        print(json.dumps(compared(name, args)), flush=True)


def compared(name: str, args: argparse.Namespace) -> dict[str, Any]:
    recipe, words = CASES[name]
    words = [*words, *args.override]
    args.work_dir.mkdir(parents=True, exist_ok=True)
    shard = args.work_dir.resolve() / f"random-{name.replace('.', '-')}"
    words += random_data(shard, load_checked_recipe(recipe, words).recipe.model)
    words += [f"data={{train: [{{path: '{shard}'}}]}}", "train.evaluate=null", "launch=null", f"name={name}"]
    tuned = tune(recipe, words, args, "tuned", ["--trials", str(args.trials), "--minutes", str(args.minutes)])
    found = {"model": name, **{key: tuned[key] for key in ("best", "improvement", "seconds")}}
    found |= {"trials": len(tuned["trials"]), "tokens_per_second": best(tuned)}
    if args.no_grid:
        return found
    grid = ["--everything", "--trials", "1000", "--minutes", str(args.grid_minutes)]
    grid += [word for field in args.grid for word in ("--search", field)]
    all_of_it = tune(recipe, words, args, "grid", grid)
    most = max(best(all_of_it), best(tuned))
    rows = {"grid": len(all_of_it["trials"]), "grid_best": all_of_it["best"], "grid_tokens_per_second": best(all_of_it)}
    return found | rows | {"of_best": best(tuned) / most}


def tune(recipe: str, words: list[str], args: argparse.Namespace, folder: str, options: list[str]) -> dict[str, Any]:
    where = ["--output", str(args.work_dir / f"{folder}-{words[-1].partition('=')[2]}")]
    where += ["--device", args.device] if args.device else []
    answer = io.StringIO()
    with contextlib.redirect_stdout(answer):
        code = bloomery(["tune", recipe, *words, *options, *where, "--json"])
    if code:
        raise SystemExit(code)
    found: dict[str, Any] = json.loads(answer.getvalue())
    for trial in found["trials"]:
        print(f"  {folder}: {trial['tokens_per_second'] or 0:>9,.0f} tokens/s  {trial['outcome']:<14} {trial['trial']}")
    return found


def best(found: dict[str, Any]) -> float:
    return max(trial["tokens_per_second"] or 0.0 for trial in found["trials"] if trial["outcome"] == "ok")


if __name__ == "__main__":
    main()
