"""`bloomery prepare RECIPE`: the shards that the recipe's `prepare:` section describes."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict

from bloomery.base import exit_codes
from bloomery.base.errors import Problem, RecipeError
from bloomery.base.units import format_bytes, format_count
from bloomery.cli.recipe_argument import add_recipe_arguments, load


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_recipe_arguments(parser)
    parser.add_argument("--json", action="store_true", help="print the manifests as JSON")


def run(args: argparse.Namespace) -> int:
    recipe = load(args, reads=("name", "seed", "tokenizer", "prepare")).recipe
    if not recipe.prepare:
        remedy = "add `prepare:` with an `output` and its `sources`"
        raise RecipeError(Problem("the recipe has nothing to prepare", remedy=remedy, place=args.recipe))
    from bloomery.data.tokenizer import Tokenizer
    from bloomery.prepare.run import prepare

    assert recipe.tokenizer is not None  # a rule of sizing/check.py
    tokenizer = Tokenizer.load(recipe.tokenizer.path)
    manifests = {}
    for section in recipe.prepare:
        result = prepare(section, tokenizer=tokenizer, seed=recipe.seed)
        manifest = result.manifest
        manifests[section.output] = asdict(manifest)
        if not args.json:
            size = format_bytes(sum(source.bytes for source in manifest.sources))
            how = "is up to date" if result.reused else "written"
            print(
                f"{section.output}: {how}. {manifest.documents:,} documents, {size}, "
                f"{format_count(manifest.tokens)} tokens ({result.empty_documents} empty and "
                f"{result.undecodable_documents} unreadable documents left out)"
            )
    if args.json:
        print(json.dumps(manifests, indent=2))
    return exit_codes.OK
