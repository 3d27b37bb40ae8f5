"""`bloomery export CKPT OUT`: a folder that transformers loads, with the proof that it computes the same.
`bloomery import hf DIR OUT`: a run folder that begins with the weights of a Hugging Face model."""

import argparse
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from bloomery.base import exit_codes
from bloomery.base.hub import local_folder
from bloomery.cli.arguments import add_json, show, warn
from bloomery.config.recipe import Recipe


def add_arguments_export(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("checkpoint", metavar="CKPT", type=Path, help="a checkpoint, or a run folder for its newest")
    parser.add_argument("output", metavar="OUT", type=Path, help="folder to write")
    parser.add_argument("--tokenizer", help="folder with tokenizer.json; default: the recipe's")
    parser.add_argument(
        "--dtype", choices=("fp32", "bf16", "fp16"), default="fp32", help="of the weights; default: fp32"
    )
    parser.add_argument("--shard-size", type=_size, default=5 * 10**9, help="largest file, such as 5GB (the default)")
    parser.add_argument("--no-proof", action="store_true", help="do not reload the folder with transformers")


def _size(text: str) -> int:
    from pydantic import ByteSize, TypeAdapter

    try:
        found = int(TypeAdapter(ByteSize).validate_python(text))
    except (ValueError, OverflowError):
        found = 0
    if not 1 <= found < 10**30:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size: write for example 5GB or 500MB")
    return found


def run_export(args: argparse.Namespace) -> int:
    from bloomery.interop.hf.export import export_checkpoint

    done = export_checkpoint(
        args.checkpoint,
        args.output,
        tokenizer_path=args.tokenizer,
        dtype=args.dtype,
        shard_bytes=args.shard_size,
        with_proof=not args.no_proof,
    )
    files = f" in {done.files} files" if done.files > 1 else ""
    print(f"{args.output}: {done.architecture}, {done.tensors} tensors{files}, step {done.step:,}")
    if done.proof.proven or args.no_proof:
        print(done.proof)
    else:
        warn(done.proof)
    return exit_codes.OK


def add_arguments_hf(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", metavar="DIR", type=Path, help="Hugging Face folder or hf://org/name")
    parser.add_argument("output", metavar="OUT", type=Path, help="run folder to make")
    parser.add_argument(
        "overrides", metavar="section.field=value", nargs="*", default=[], help="fields of the recipe: data, batch, lr"
    )
    parser.add_argument("--recipe", help="take all but `model` and `tokenizer` from this recipe")
    parser.add_argument("--no-proof", action="store_true", help="do not compare with transformers")
    add_json(parser)


def _untrained(folder: Path, name: object) -> dict[str, Any]:
    from bloomery.interop.hf.importer import origin_of
    from bloomery.train.state import TrainState

    return {**TrainState(imported_from=origin_of(folder, str(name))).to_json(), "interval": None, "blend": None}


def import_for(run: Path, recipe: Recipe) -> None:
    """The first checkpoint of a run that begins with a Hugging Face model, if it does."""
    assert recipe.init is not None
    folder = Path(local_folder(recipe.init.from_, weights=True))
    if (folder / "config.json").is_file():
        from bloomery.interop.hf.importer import import_into

        import_into(folder, run, recipe, _untrained(folder, recipe.init.from_))


def run_hf(args: argparse.Namespace) -> int:
    from bloomery.checkpoint.folder import CHECKPOINTS, step_name
    from bloomery.interop.hf.importer import START, TOKENIZER, import_weights, read_model, tokenizer_files
    from bloomery.sizing.check import load_checked_recipe
    from bloomery.sizing.parameters import count_parameters

    folder = Path(local_folder(args.folder, weights=True))
    model, warnings = read_model(folder)
    begins = {
        "from": str(args.output / CHECKPOINTS / step_name(0))
    }  # also where the recipe is trained in another folder
    found = [f"model={json.dumps(model)}", f"init={json.dumps(begins)}"]
    if tokenizer_files(folder):
        found.append(f"tokenizer={json.dumps({'path': str(args.output / TOKENIZER)})}")
    checked = load_checked_recipe(args.recipe or str(START), [*found, *args.overrides])
    warn(*warnings, *checked.warnings)
    done = import_weights(
        folder, args.output, checked.recipe, _untrained(folder, args.folder), with_proof=not args.no_proof
    )
    section = checked.recipe.model
    parameters = count_parameters(section).total
    tokenizer = "" if checked.recipe.tokenizer else ", no tokenizer"
    data = "" if checked.recipe.data else " 'data.train=[{path: SHARD}]' with a shard of `bloomery prepare`"
    text = (
        f"{done.checkpoint}: {section.family}, {parameters:,} parameters, {done.tensors} tensors{tokenizer}\n"
        f"{done.proof}\nnext: bloomery train {args.output / 'recipe.yaml'} --run-dir {args.output}{data}"
    )
    facts = {"checkpoint": str(done.checkpoint), "parameters": parameters, "model": model, "tensors": done.tensors}
    return show(args, facts | {"proof": asdict(done.proof)}, lambda _: text)
