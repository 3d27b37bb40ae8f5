"""`bloomery export CKPT OUT`: a folder that transformers loads, with the proof that it computes the same."""

from __future__ import annotations

import argparse
import re
import sys
from fractions import Fraction
from pathlib import Path

from bloomery.base import exit_codes

_UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("checkpoint", metavar="CKPT", type=Path, help="a checkpoint, or a run folder for its newest")
    parser.add_argument("output", metavar="OUT", type=Path, help="folder to write")
    parser.add_argument("--tokenizer", help="folder with tokenizer.json; default: the recipe's")
    parser.add_argument(
        "--dtype", choices=("fp32", "bf16", "fp16"), default="fp32", help="of the weights; default: fp32"
    )
    parser.add_argument("--shard-size", type=size, default=5 * 10**9, help="largest file, such as 5GB (the default)")
    parser.add_argument("--no-proof", action="store_true", help="do not reload the folder with transformers")


def size(text: str) -> int:
    match = re.fullmatch(r"([0-9]{1,30}(?:\.[0-9]{1,30})?)\s*([A-Za-z]*)", text)
    if match is None or (unit := _UNITS.get(match[2].upper())) is None or (found := int(Fraction(match[1]) * unit)) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size: write for example 5GB or 500MB")
    return found


def run(args: argparse.Namespace) -> int:
    from bloomery.checkpoint.export import export_checkpoint

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
        print(f"bloomery: warning: {done.proof}", file=sys.stderr)
    return exit_codes.OK
