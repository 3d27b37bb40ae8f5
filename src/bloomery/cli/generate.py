"""`bloomery generate CKPT --prompt TEXT`: let a checkpoint go on."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from pathlib import Path

from bloomery.base import exit_codes
from bloomery.base.errors import Problem, RecipeError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("checkpoint", metavar="CKPT", type=Path, help="a checkpoint, or a run folder for its newest")
    parser.add_argument("--prompt", required=True, help="text to continue")
    parser.add_argument("--max-new-tokens", type=_at_least_zero(int), default=100)
    parser.add_argument(
        "--temperature", type=_at_least_zero(float), default=0.8, help="0 always takes the likeliest token"
    )
    parser.add_argument("--top-k", type=_at_least_zero(int), default=40, help="choose among this many; 0 among all")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--tokenizer", help="folder with tokenizer.json; default: the recipe's")
    parser.add_argument("--device", help="cpu, cuda, ...; default: this machine's accelerator")


def _at_least_zero(kind: type[int] | type[float]) -> Callable[[str], float]:
    def parse(text: str) -> float:
        value = kind(text)
        if not 0 <= value < math.inf:
            raise argparse.ArgumentTypeError(f"{text} is not a number from 0 on")
        return value

    parse.__name__ = "number"  # what argparse calls it when `kind` cannot read the text
    return parse


def run(args: argparse.Namespace) -> int:
    print(continue_text(args))
    return exit_codes.OK


def continue_text(args: argparse.Namespace) -> str:
    """The prompt and what the model adds to it."""
    import torch

    from bloomery.base.accelerator import pick_device
    from bloomery.checkpoint.folder import find_checkpoint
    from bloomery.checkpoint.load import load_model, tokenizer_of
    from bloomery.families.registry import FAMILIES
    from bloomery.model.generate import generate

    if any("\ud800" <= letter <= "\udfff" for letter in args.prompt):
        raise RecipeError(Problem("--prompt is not UTF-8", remedy="write it in UTF-8", place="command line"))
    device = pick_device(args.device)
    folder = find_checkpoint(args.checkpoint)
    recipe, model = load_model(folder, device=device)
    if FAMILIES[recipe.model.family].encoder:
        raise RecipeError(Problem(f"this checkpoint is a {recipe.model.family}", "an encoder cannot continue a text"))
    tokenizer = tokenizer_of(folder, recipe, args.tokenizer)
    ids = tokenizer.encode_batch([args.prompt])[0].tolist() or [tokenizer.eod_id]
    tokens = generate(
        model,
        torch.tensor([ids], device=device),
        max_new_tokens=args.max_new_tokens,
        vocab_size=recipe.model.vocab_size,
        seq_length=recipe.model.seq_length,
        temperature=args.temperature,
        top_k=args.top_k or None,
        seed=args.seed,
        eod_id=tokenizer.eod_id,
    )
    return tokenizer.decode([token for token in tokens[0].tolist() if token != tokenizer.eod_id])
