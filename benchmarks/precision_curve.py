"""Train one recipe in two precisions on the same data, and compare their loss curves.

    python benchmarks/precision_curve.py RECIPE --precisions bf16 fp8 --steps 2000 --picture curve.svg

Each run is `bloomery train` in a process of its own. Compared are means over the last tenth of the logged losses, where
single steps would mostly show the difference between batches.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

WIDTH, HEIGHT, MARGIN = 760, 360, 46
COLOURS = ["#1f77b4", "#d62728", "#2ca02c"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe")
    parser.add_argument("overrides", nargs="*")
    parser.add_argument("--precisions", nargs=2, default=["bf16", "fp8"])
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--output", type=Path, help="the losses, as JSON")
    parser.add_argument("--picture", type=Path, help="the curves, as SVG")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        curves = {each: losses(each, args, Path(folder) / each) for each in args.precisions}
    finals = {name: statistics.mean(loss for _, loss in curve[-len(curve) // 10 :]) for name, curve in curves.items()}
    first, second = args.precisions
    for name, final in finals.items():
        print(f"{name:>5}: loss {final:.4f}, mean of the last tenth of {args.steps:,} steps")
    print(f"{second} ends {finals[second] / finals[first] - 1:+.2%} from {first}")
    if args.output:
        args.output.write_text(json.dumps({"final": finals, "losses": curves}))
    if args.picture:
        args.picture.write_text(picture(curves))


def losses(precision: str, args: argparse.Namespace, folder: Path) -> list[tuple[int, float]]:
    """(step, loss) of a whole training."""
    command = [sys.executable, "-m", "bloomery", "train", args.recipe, *args.overrides, "--run-dir", str(folder)]
    command += [f"precision={precision}", f"train.for={args.steps} steps", "--quiet"]
    subprocess.run(command, check=True)
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [(each["step"], each["losses"]["lm loss"]) for each in records if each["kind"] == "step"]


def picture(curves: dict[str, list[tuple[int, float]]]) -> str:
    """Both curves over the steps; the axis of losses is cut above what the second twentieth of the steps reaches."""
    everything = [loss for curve in curves.values() for _, loss in curve[len(curve) // 20 :]]
    low, high = min(everything), max(everything)
    last = max(curve[-1][0] for curve in curves.values())

    def point(step: int, loss: float) -> str:
        x = MARGIN + step / last * (WIDTH - 2 * MARGIN)
        y = HEIGHT - MARGIN - (min(loss, high) - low) / (high - low) * (HEIGHT - 2 * MARGIN)
        return f"{x:.1f},{y:.1f}"

    parts = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif">']
    parts.append(f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>')
    for loss in (low, (low + high) / 2, high):
        x, y = point(0, loss).split(",")
        parts.append(f'<line x1="{x}" y1="{y}" x2="{WIDTH - MARGIN}" y2="{y}" stroke="#ddd"/>')
        parts.append(f'<text x="{MARGIN - 6}" y="{y}" font-size="12" text-anchor="end">{loss:.2f}</text>')
    for step in (0, last // 2, last):
        x = point(step, low).split(",")[0]
        parts.append(f'<text x="{x}" y="{HEIGHT - 24}" font-size="12" text-anchor="middle">{step:,}</text>')
    parts.append(f'<text x="{WIDTH / 2}" y="{HEIGHT - 6}" font-size="12" text-anchor="middle">step</text>')
    for i, ((name, curve), colour) in enumerate(zip(curves.items(), COLOURS, strict=False)):
        line = " ".join(point(*each) for each in curve)
        parts.append(
            f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="1.3" stroke-opacity="0.8"/>'
        )
        parts.append(f'<text x="{WIDTH - 110}" y="{30 + 18 * i}" font-size="14" fill="{colour}">{name}</text>')
    return "\n".join([*parts, "</svg>"])


if __name__ == "__main__":
    main()
