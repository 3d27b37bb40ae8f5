"""`bloomery generate CKPT --prompt TEXT`: continue a text."""

import argparse
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

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
    from bloomery.base.accelerator import pick_device
    from bloomery.checkpoint.folder import find_checkpoint

    if any("\ud800" <= letter <= "\udfff" for letter in args.prompt):
        raise RecipeError(Problem("--prompt is not UTF-8", remedy="write it in UTF-8", place="command line"))
    found = find_checkpoint(args.checkpoint)
    options = {"temperature": args.temperature, "top_k": args.top_k or None, "top_p": args.top_p, "seed": args.seed}
    prompts, device = [args.prompt] * args.samples, pick_device(args.device)
    texts = continued(found, prompts, args.max_new_tokens, device, tokenizer_path=args.tokenizer, **options)
    return show(args, {"samples": texts}, lambda _: "\n---\n".join(texts))


def continued(
    folder: Path, prompts: Sequence[str], tokens: int, device: Any, *, tokenizer_path: str | None = None, **options: Any
) -> list[str]:
    """Each prompt and what the checkpoint adds; equal prompts are continued together. `options`: of `generate`."""
    import torch

    from bloomery.checkpoint.load import load_model, read_checkpoint, tokenizer_of
    from bloomery.families.registry import FAMILIES
    from bloomery.model.generate import generate

    checkpoint = read_checkpoint(folder)
    recipe, model = checkpoint.recipe, load_model(checkpoint, device=device)
    if FAMILIES[recipe.model.family].encoder:
        raise RecipeError(Problem(f"this checkpoint is a {recipe.model.family}", "an encoder cannot continue a text"))
    tokenizer, texts = tokenizer_of(checkpoint, tokenizer_path), list[str]()
    with doing(f"generating {len(prompts) * tokens:,} tokens") as work:
        step = partial(work.over, total=tokens)
        for prompt in dict.fromkeys(prompts):
            ids = tokenizer.encode_batch([prompt])[0].tolist() or [tokenizer.eod_id]
            rows = torch.tensor([ids] * prompts.count(prompt), device=device)
            made = generate(model, rows, max_new_tokens=tokens, eod_id=tokenizer.eod_id, each=step, **options)
            texts += [tokenizer.decode([token for token in row if token != tokenizer.eod_id]) for row in made.tolist()]
    return texts
