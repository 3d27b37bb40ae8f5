"""`bloomery import hf DIR OUT`: a run folder that begins with the weights of a Hugging Face model."""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bloomery.base import exit_codes

if TYPE_CHECKING:
    from bloomery.sizing.check import CheckedRecipe


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", metavar="DIR", type=Path, help="Hugging Face folder: config.json and *.safetensors")
    parser.add_argument("output", metavar="OUT", type=Path, help="run folder to make")
    parser.add_argument(
        "overrides", metavar="section.field=value", nargs="*", default=[], help="fields of the recipe: data, batch, lr"
    )
    parser.add_argument("--recipe", help="take all but `model` and `tokenizer` from this recipe")
    parser.add_argument("--no-proof", action="store_true", help="do not compare with transformers")
    parser.add_argument("--json", action="store_true", help="print the answer as JSON")


def run(args: argparse.Namespace) -> int:
    from bloomery.checkpoint.import_hf import TOKENIZER, import_weights, origin_of, read_model, tokenizer_files
    from bloomery.sizing.parameters import count_parameters
    from bloomery.train.state import TrainState

    model = read_model(args.folder)
    checked = _recipe(args, model.section, args.output / TOKENIZER if tokenizer_files(args.folder) else None)
    for warning in (*model.warnings, *checked.warnings):
        print(f"bloomery: warning: {warning}", file=sys.stderr)
    state = {**TrainState(imported_from=origin_of(args.folder)).to_json(), "interval": None, "blend": None}
    done = import_weights(args.folder, args.output, checked.recipe, state, with_proof=not args.no_proof)
    section = done.recipe.model
    parameters = count_parameters(section, vocab_size=section.vocab_size).total
    if args.json:
        facts = {
            "checkpoint": str(done.checkpoint),
            "parameters": parameters,
            "model": model.section,
            "tensors": done.tensors,
            "proof": done.proof.to_json(),
        }
        print(json.dumps(facts, indent=2))
        return exit_codes.OK
    tokenizer = "" if done.has_tokenizer else ", no tokenizer"
    print(f"{done.checkpoint}: {section.family}, {parameters:,} parameters, {done.tensors} tensors{tokenizer}")
    print(done.proof)
    print(f"next: bloomery train {args.output / 'recipe.yaml'} --run-dir {args.output}")
    return exit_codes.OK


def _recipe(args: argparse.Namespace, model: dict[str, Any], tokenizer: Path | None) -> CheckedRecipe:
    from bloomery.checkpoint.import_hf import START
    from bloomery.config.yaml_nodes import dump_yaml
    from bloomery.sizing.check import load_checked_recipe

    found = [f"model={json.dumps(model)}"]
    found += [f"tokenizer={json.dumps({'path': str(tokenizer)})}"] if tokenizer else []
    overrides = [*found, *args.overrides]
    if args.recipe is not None:
        return load_checked_recipe(args.recipe, overrides)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "imported.yaml"
        path.write_text(dump_yaml({**START, "model": model}))
        return load_checked_recipe(str(path), overrides)
