"""`bloomery prepare RECIPE`: the shards that the recipe's `prepare:` section describes."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, Self

from bloomery.base import exit_codes
from bloomery.base.errors import Problem, RecipeError
from bloomery.base.units import format_bytes, format_count, format_seconds
from bloomery.cli.arguments import add_json, add_recipe_arguments, load

if TYPE_CHECKING:
    from bloomery.data.manifest import ShardManifest
    from bloomery.prepare.run import Progress, Share

_PLAIN_EVERY_SECONDS, _TERMINAL_EVERY_SECONDS = 10.0, 0.2
_CLEAR_LINE = "\r\x1b[K"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_recipe_arguments(parser)
    parser.add_argument("--workers", type=int, metavar="N", help="processes; default: one for each processor")
    parser.add_argument(
        "--unit",
        metavar="K/N",
        help="do only the K-th of N shares of the work (K from 0); afterwards run once without it, to merge",
    )
    parser.add_argument("--verify", action="store_true", help="read the sources again and compare them with the shards")
    add_json(parser, "manifests")


def run(args: argparse.Namespace) -> int:
    recipe = load(args, reads=("name", "seed", "tokenizer", "prepare")).recipe
    if not recipe.prepare:
        remedy = "add `prepare:` with an `output` and its `sources`"
        raise RecipeError(Problem("the recipe has nothing to prepare", remedy=remedy, place=args.recipe))
    share, workers = _share(args), _workers(args)
    from bloomery.data.tokenizer import Tokenizer
    from bloomery.prepare.run import plan_all
    from bloomery.prepare.verify import verify

    assert recipe.tokenizer is not None  # a rule of sizing/check.py
    tokenizer = Tokenizer.load(recipe.tokenizer.path)
    manifests: dict[str, Any] = {}
    manifest: ShardManifest | None
    settings: Any = {"tokenizer": tokenizer, "seed": recipe.seed, "workers": workers}
    preparations = [] if args.verify else plan_all(recipe.prepare, **settings)
    for number, section in enumerate(recipe.prepare):
        with _Display(section.output) as display:
            if args.verify:
                outputs = [section.output for section in recipe.prepare]
                manifest = verify(section, progress=display.show, outputs=outputs, **settings)
                how, notes = "agrees with its sources", []
            else:
                result = preparations[number].run(share, display.show)
                manifest, notes = result.manifest, result.notes
                how = "is up to date" if result.reused else "written"
        for note in notes:
            _print_error(f"{section.output}: {note}")
        manifests[section.output] = manifest and asdict(manifest)
        if not args.json:
            print(
                f"{section.output}: share {args.unit} is done"
                if manifest is None
                else _line(section.output, how, manifest)
            )
    if args.json:
        print(json.dumps(manifests, indent=2))
    return exit_codes.OK


def _print_error(text: str, end: str = "\n") -> None:
    """On standard error. The work continues where that is closed."""
    try:
        print(text, end=end, file=sys.stderr, flush=True)
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stderr.fileno())


def _line(output: str, how: str, manifest: ShardManifest) -> str:
    size = format_bytes(sum(source.bytes for source in manifest.sources))
    counts = {**manifest.dropped}
    usual = f"{counts.pop('empty')} empty and {counts.pop('bad')} unreadable documents left out"
    others = "".join(f", {count:,} {reason}" for reason, count in counts.items() if count)
    return (
        f"{output}: {how}. {manifest.documents:,} documents, {size}, {format_count(manifest.tokens)} tokens "
        f"({usual}{others})"
    )


def _workers(args: argparse.Namespace) -> int:
    if args.workers is not None and args.workers < 1:
        raise RecipeError(Problem(f"--workers is {args.workers}", "it counts processes", "use 1 or more"))
    return int(args.workers or len(os.sched_getaffinity(0)))


def _share(args: argparse.Namespace) -> Share | None:
    if args.unit is None:
        return None
    from bloomery.prepare.run import Share

    k, _, n = args.unit.partition("/")
    if args.verify or not (args.unit.isascii() and k.isdecimal() and n.isdecimal() and int(k) < int(n)):
        rule = "it is K/N: share K of N, the first is 0 and the last N-1; --verify takes no share"
        raise RecipeError(Problem(f"--unit is {args.unit}", rule, "use for example --unit 0/4"))
    return Share(int(k), int(n))


class _Display:
    """Progress on standard error: one line that is rewritten on a terminal, else a line now and then."""

    def __init__(self, output: str) -> None:
        self._output = output
        self._is_terminal = sys.stderr.isatty()
        self._started = self._shown = time.monotonic()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._is_terminal:
            _print_error(_CLEAR_LINE, end="")

    def show(self, progress: Progress) -> None:
        now = time.monotonic()
        if now - self._shown < (_TERMINAL_EVERY_SECONDS if self._is_terminal else _PLAIN_EVERY_SECONDS):
            return
        self._shown, seconds = now, max(now - self._started, 1e-3)
        done = progress.input_bytes + progress.reused_bytes
        rate = progress.input_bytes / seconds
        left = format_seconds((progress.total_input_bytes - done) / rate) if rate else "?"
        speed = f"{progress.text_bytes / seconds / 1e6:.1f} MB/s, {format_count(progress.tokens / seconds)} tokens/s"
        what = f"merging {progress.merged:.0%}" if progress.merged else f"{speed}, {left} left"
        text = f"{self._output}: {min(done / max(progress.total_input_bytes, 1), 1.0):.1%}, {what}"
        _print_error(*((_CLEAR_LINE + text, "") if self._is_terminal else (text,)))
