"""`bloomery export CKPT OUT`: a folder that transformers loads, with the proof that it computes the same.
`bloomery import hf DIR OUT`: a run folder that begins with the weights of a Hugging Face model.
`bloomery import megatron-checkpoint DIR OUT`: one that continues a training of Megatron."""

import argparse
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from bloomery.base.hub import local_folder
from bloomery.base.units import format_count
from bloomery.cli.arguments import add_json, add_overrides, show, warn
from bloomery.config.recipe import Recipe


def add_arguments_export(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("checkpoint", metavar="CKPT", type=Path, help="a checkpoint, or a run folder for its newest")
    parser.add_argument("output", metavar="OUT", type=Path, help="folder to write")
    parser.add_argument("--format", choices=("hf", "megatron"), default="hf", help="hf (default), or megatron-core's")
    parser.add_argument("--tokenizer", help="folder with tokenizer.json; default: the recipe's")
    parser.add_argument(
        "--dtype", choices=("fp32", "bf16", "fp16"), default="fp32", help="of the weights; default: fp32"
    )
    parser.add_argument("--shard-size", type=_size, default=5 * 10**9, help="largest file, such as 5GB (the default)")
    parser.add_argument("--no-proof", action="store_true", help="do not reload the folder with transformers")
    add_json(parser)


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
    from bloomery.interop.hf.export import DTYPES, export_checkpoint
    from bloomery.interop.megatron.export import export_megatron

    if args.format == "megatron":
        folder, count = export_megatron(args.checkpoint, args.output, DTYPES[args.dtype])
        text = f"{folder}: torch_dist of megatron-core, {count} tensors with masters and moments"
        return show(args, {"folder": str(folder), "tensors": count}, lambda _: text)
    done = export_checkpoint(
        args.checkpoint,
        args.output,
        tokenizer_path=args.tokenizer,
        dtype=args.dtype,
        shard_bytes=args.shard_size,
        with_proof=not args.no_proof,
    )
    files = f" in {done.files} files" if done.files > 1 else ""
    text = f"{args.output}: {done.architecture}, {done.tensors} tensors{files}, step {done.step:,}"
    if done.proof.proven or args.no_proof:
        text += f"\n{done.proof}"
    else:
        warn(done.proof)
    return show(args, {"folder": str(args.output), **asdict(done)}, lambda _: text)


def add_arguments_hf(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", metavar="DIR", type=Path, help="Hugging Face folder or hf://org/name")
    parser.add_argument("output", metavar="OUT", type=Path, help="run folder to make")
    add_overrides(parser, "fields of the recipe: data, batch, lr")
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
    model = read_model(folder)
    begins = {"from": str(args.output / CHECKPOINTS / step_name(0))}  # for who trains the recipe in another folder
    found = [f"model={json.dumps(model)}", f"init={json.dumps(begins)}"]
    if tokenizer_files(folder):
        found.append(f"tokenizer={json.dumps({'path': str(args.output / TOKENIZER)})}")
    checked = load_checked_recipe(args.recipe or str(START), [*found, *args.overrides])
    warn(*checked.warnings)
    done = import_weights(
        folder, args.output, checked.recipe, _untrained(folder, args.folder), with_proof=not args.no_proof
    )
    section = checked.recipe.model
    parameters = count_parameters(section).total
    tokenizer = "" if checked.recipe.tokenizer else ", no tokenizer"
    data = "" if checked.recipe.data else " 'data.train=[{path: SHARD}]'\nSHARD: what `bloomery prepare` has written"
    text = (
        f"{done.checkpoint}: {section.family}, {parameters:,} parameters, {done.tensors} tensors{tokenizer}\n"
        f"{done.proof}\nnext: bloomery train {args.output / 'recipe.yaml'} --run-dir {args.output}{data}"
    )
    facts = {"checkpoint": str(done.checkpoint), "parameters": parameters, "model": model, "tensors": done.tensors}
    return show(args, facts | {"proof": asdict(done.proof)}, lambda _: text)


def add_arguments_checkpoint(parser: argparse.ArgumentParser) -> None:
    folder_help = "checkpoint of Megatron-LM, megatron-core or Megatron-DeepSpeed: its folder, or that of a step"
    parser.add_argument("folder", metavar="DIR", type=Path, help=folder_help)
    parser.add_argument("output", metavar="OUT", type=Path, help="run folder to make")
    add_overrides(parser, "fields of the recipe: data, parallel")
    parser.add_argument("--recipe", help="take all but `model` from this recipe, not from the checkpoint's arguments")
    parser.add_argument("--weights-only", action="store_true", help="begin at step 0, without moments")
    parser.add_argument("--compare-hf", metavar="DIR", type=Path, help="prove it against this Hugging Face conversion")
    add_json(parser)


def run_checkpoint(args: argparse.Namespace) -> int:
    from bloomery.interop.megatron.checkpoint import read_checkpoint, reading
    from bloomery.interop.megatron.continued import continued, import_checkpoint, recipe_of
    from bloomery.sizing.parameters import count_parameters
    from bloomery.train.optimizer import LossScale
    from bloomery.train.state import TrainState

    found = read_checkpoint(args.folder)
    with reading(found.folder):
        recipe = recipe_of(found, args.recipe, args.overrides, weights_only=args.weights_only)
        done = continued(found, recipe, weights_only=args.weights_only)
    warn(*done.warnings)
    scale = LossScale.start(recipe.loss_scale) if recipe.precision == "fp16" else None
    if scale is not None and done.loss_scale:
        scale.scale = done.loss_scale
    state = TrainState(
        step=done.step,
        consumed_samples=done.consumed_samples,
        held_samples=done.held_samples,
        skipped_updates=done.skipped_updates,
        history=done.history,
        loss_scale=scale,
        imported_from={"folder": str(found.folder), "layout": found.layout},
    )
    facts = {**state.to_json(), "interval": None, "blend": done.blend}
    checkpoint, proof = import_checkpoint(found, args.output, done, facts, args.compare_hf)
    model = recipe.model
    text = (
        f"{checkpoint}: {model.family}, {format_count(count_parameters(model).total)} parameters, of {found.layout}\n"
        f"step {done.step:,}, {done.consumed_samples:,} samples, {'with' if done.has_moments else 'without'} moments\n"
        f"{proof}\nnext: bloomery train {args.output / 'recipe.yaml'} --run-dir {args.output}"
    )
    answer = {"checkpoint": str(checkpoint), "step": done.step, "consumed_samples": done.consumed_samples}
    return show(
        args, answer | {"layout": found.layout, "has_moments": done.has_moments, "proof": proof}, lambda _: text
    )
