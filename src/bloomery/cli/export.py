"""`bloomery export CKPT OUT`: a folder that transformers loads."""

from __future__ import annotations

import argparse
from pathlib import Path

from bloomery.base import exit_codes


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("checkpoint", metavar="CKPT", type=Path, help="a checkpoint, or a run folder for its newest")
    parser.add_argument("output", metavar="OUT", type=Path, help="folder to write")
    parser.add_argument("--tokenizer", help="folder with tokenizer.json; default: the recipe's")


def run(args: argparse.Namespace) -> int:
    from bloomery.checkpoint.export import export_checkpoint

    done = export_checkpoint(args.checkpoint, args.output, tokenizer_path=args.tokenizer)
    print(f"{args.output}: {done.architecture}, {done.tensors} tensors, step {done.step:,}")
    return exit_codes.OK
