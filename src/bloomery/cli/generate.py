"""`bloomery generate CKPT --prompt TEXT`: continue a text."""

import argparse
import sys
from functools import partial
from pathlib import Path

from bloomery.base.doing import doing
from bloomery.base.errors import Problem, RecipeError
from bloomery.cli.arguments import add_device, add_json, number_to, show, whole_number


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("checkpoint", metavar="CKPT", type=Path, help="a checkpoint, or a run folder for its newest")
    parser.add_argument("--prompt", default="", help="text to continue; default: the beginning of a document")
    parser.add_argument("--samples", type=whole_number(1, 10_000), default=1, help="how many; default: 1")
    parser.add_argument("--max-new-tokens", type=whole_number(0), default=100, help="of each; default: 100")
    text = "0 always takes the likeliest token; default: 0.8"
    parser.add_argument("--temperature", type=number_to(sys.float_info.max), default=0.8, help=text)
    parser.add_argument(
        "--top-k", type=whole_number(0), default=40, help="choose among this many; 0 among all; default: 40"
    )
    text = "choose among the likeliest that together have this probability; default: 1, all"
    parser.add_argument("--top-p", type=number_to(1), default=1.0, help=text)
    parser.add_argument("--seed", type=int, default=0, help="of the draws; default: 0")
    parser.add_argument("--tokenizer", help="folder with tokenizer.json; default: the recipe's")
    add_device(parser)
    add_json(parser, "samples")


def run(args: argparse.Namespace) -> int:
    import torch

    from bloomery.base.accelerator import pick_device
    from bloomery.checkpoint.folder import find_checkpoint
    from bloomery.checkpoint.load import load_model, read_checkpoint, tokenizer_of
    from bloomery.families.registry import FAMILIES
    from bloomery.model.generate import generate

    if any("\ud800" <= letter <= "\udfff" for letter in args.prompt):
        raise RecipeError(Problem("--prompt is not UTF-8", remedy="write it in UTF-8", place="command line"))
    device = pick_device(args.device)
    checkpoint = read_checkpoint(find_checkpoint(args.checkpoint))
    recipe, model = checkpoint.recipe, load_model(checkpoint, device=device)
    if FAMILIES[recipe.model.family].encoder:
        raise RecipeError(Problem(f"this checkpoint is a {recipe.model.family}", "an encoder cannot continue a text"))
    tokenizer = tokenizer_of(checkpoint, args.tokenizer)
    ids = tokenizer.encode_batch([args.prompt])[0].tolist() or [tokenizer.eod_id]
    with doing(f"generating {args.samples * args.max_new_tokens:,} tokens") as work:
        tokens = generate(
            model,
            torch.tensor([ids] * args.samples, device=device),
            max_new_tokens=args.max_new_tokens,
            temperature=args.temperature,
            top_k=args.top_k or None,
            top_p=args.top_p,
            seed=args.seed,
            eod_id=tokenizer.eod_id,
            each=partial(work.over, total=args.max_new_tokens),
        )
    texts = [tokenizer.decode([token for token in row if token != tokenizer.eod_id]) for row in tokens.tolist()]
    return show(args, {"samples": texts}, lambda _: "\n---\n".join(texts))
