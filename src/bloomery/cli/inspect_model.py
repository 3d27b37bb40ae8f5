"""`bloomery inspect model RECIPE`: parameters by group and FLOPs per token."""

from __future__ import annotations

import argparse
import json
from typing import Any

from bloomery.base import exit_codes
from bloomery.cli.recipe_argument import add_recipe_arguments, load
from bloomery.config.recipe import Recipe
from bloomery.sizing.alibi import alibi_slopes
from bloomery.sizing.flops import FlopCount, flops_per_token
from bloomery.sizing.parameters import count_parameters
from bloomery.sizing.vocabulary import padded_vocab_size


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_recipe_arguments(parser)
    parser.add_argument("--json", action="store_true", help="print the answer as JSON")


def run(args: argparse.Namespace) -> int:
    facts = model_facts(load(args, reads=("name", "model", "parallel", "launch")).recipe)
    print(json.dumps(facts, indent=2) if args.json else _model_text(facts))
    return exit_codes.OK


def model_facts(recipe: Recipe) -> dict[str, Any]:
    """The JSON of `inspect model`: a public contract. `parameters` counts the recipe's own vocabulary."""
    model = recipe.model
    count = count_parameters(model, vocab_size=model.vocab_size)
    padded = padded_vocab_size(model)
    facts: dict[str, Any] = {
        "name": recipe.name,
        "family": model.family,
        "parameters": count.total,
        "parameters_without_embeddings": count.without_embeddings,
        "groups": count.groups,
        "vocab_size": model.vocab_size,
        "padded_vocab_size": padded,
        "padded_parameters": count_parameters(model, vocab_size=padded).total,
        "flops_per_token": {definition.value: flops_per_token(model, definition) for definition in FlopCount},
    }
    if model.family == "bloom":
        facts["alibi_slopes"] = alibi_slopes(model.num_heads)
    return facts


def _model_text(facts: dict[str, Any]) -> str:
    lines = [f"{facts['name']} ({facts['family']}): {facts['parameters']:,} parameters", ""]
    lines += [f"  {group:<22}{number:>18,}" for group, number in facts["groups"].items()]
    lines += [
        "",
        f"vocabulary {facts['vocab_size']:,}, padded to {facts['padded_vocab_size']:,}: "
        f"{facts['padded_parameters']:,} parameters in memory",
        "",
        "FLOPs per token, by definition:",
    ]
    lines += [f"  {FlopCount(name).description}: {number:,}" for name, number in facts["flops_per_token"].items()]
    if slopes := facts.get("alibi_slopes"):
        lines += ["", f"ALiBi slopes: {', '.join(f'{slope:.4g}' for slope in slopes)}"]
    return "\n".join(lines)
