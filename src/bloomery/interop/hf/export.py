"""A checkpoint as a Hugging Face folder: safetensors, config, tokenizer, card and proof. Holds one tensor at a time."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bloomery.base.accelerator import available_host_bytes
from bloomery.base.credentials import mask
from bloomery.base.errors import DataError, Problem
from bloomery.base.storage import write_atomically, writing, written_to
from bloomery.base.units import format_bytes
from bloomery.checkpoint.folder import find_checkpoint
from bloomery.checkpoint.load import CheckpointReader, read_recipe_of, read_state, tokenizer_of
from bloomery.checkpoint.verify import verify
from bloomery.config.recipe import Recipe
from bloomery.data.tokenizer import Tokenizer
from bloomery.families.registry import FAMILIES
from bloomery.interop.hf.card import model_card
from bloomery.interop.hf.configs import hf_config
from bloomery.interop.hf.draft import drafted, replace_export, require_own
from bloomery.interop.hf.maps import entries_of, their_shapes
from bloomery.interop.hf.proof import PROOF_FILE, Proof, has_transformers, prove
from bloomery.interop.hf.shards import plan_shards, write_shards
from bloomery.interop.hf.tokenizer import write_tokenizer
from bloomery.sizing.parameters import count_parameters

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_NAMES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
SHARD_BYTES = 5 * 10**9
_BYTES_TO_PROVE = 10
"""A parameter: both models in fp32, and some room for logits."""


@dataclass(frozen=True)
class Exported:
    architecture: str
    tensors: int
    files: int
    step: int
    proof: Proof


def export_checkpoint(
    checkpoint: Path,
    output: Path,
    *,
    tokenizer_path: str | None = None,
    dtype: str = "fp32",
    shard_bytes: int = SHARD_BYTES,
    with_proof: bool = True,
) -> Exported:
    """Write `output` with the recipe's own vocabulary, a new folder, an empty one or an older export. Files get their
    names when all are written and proven, config.json last: without it nothing loads.

    DataError if the proof fails; the folder then holds it, to look at. After any other error it is as it was.
    """
    require_own(output)
    folder = find_checkpoint(checkpoint)
    verify(folder)
    recipe, state = read_recipe_of(folder), read_state(folder)
    tokenizer = tokenizer_of(folder, recipe, tokenizer_path)
    shapes = their_shapes(recipe.model)
    shards = plan_shards(shapes, DTYPES[dtype], shard_bytes=shard_bytes)
    with written_to("folder"), drafted(output, replace_export) as draft:
        with writing(output):
            write_shards(draft, shards, DTYPES[dtype], _their_tensors(recipe, CheckpointReader(folder)))
        config = _write_configs(draft, recipe, tokenizer, dtype)
        proof = _proof(folder, draft, recipe, tokenizer, dtype) if with_proof else Proof(False, "--no-proof")
        write_atomically(draft / PROOF_FILE, json.dumps(proof.to_json(), indent=2) + "\n")
        card = model_card(recipe, folder, state, architecture=config["architectures"][0], dtype=dtype, proof=str(proof))
        write_atomically(draft / "README.md", mask(card))
    if not proof.proven and proof.max_logit_difference is not None:
        rule = f"the limit is {proof.limit:.1e}, and every prompt is continued alike"
        remedy = f"this is a bug: report it with {output / PROOF_FILE}"
        raise DataError(Problem(f"transformers computes something else: {proof}", rule, remedy, str(output)))
    return Exported(config["architectures"][0], len(shapes), len(shards), int(state["step"]), proof)


def _their_tensors(recipe: Recipe, reader: CheckpointReader) -> Iterator[tuple[str, Tensor]]:
    for entry in entries_of(recipe.model):
        made = entry.export(reader.read(f"model.{entry.ours}"))
        yield from zip(entry.theirs, made, strict=True)


def _write_configs(output: Path, recipe: Recipe, tokenizer: Tokenizer, dtype: str) -> dict[str, Any]:
    is_encoder = FAMILIES[recipe.model.family].encoder
    ids = write_tokenizer(tokenizer, output, model_max_length=recipe.model.seq_length, pairs=is_encoder)
    if not is_encoder:
        # What ended documents in training ends a text, also where the tokenizer's folder names another end (of a turn).
        ends = list(dict.fromkeys((ids["eos_token_id"], tokenizer.eod_id)))
        generation = {**ids, "eos_token_id": ends if len(ends) > 1 else ends[0]}
        write_atomically(output / "generation_config.json", json.dumps(generation, indent=2) + "\n")
    config = {**hf_config(recipe.model), **ids, "dtype": _NAMES[dtype]}
    write_atomically(output / "config.json", json.dumps(config, indent=2) + "\n")
    return config


def _proof(folder: Path, output: Path, recipe: Recipe, tokenizer: Tokenizer, dtype: str) -> Proof:
    if reason := why_unproven(recipe):
        return Proof(False, reason)
    try:
        return prove(folder, output, tokenizer, DTYPES[dtype])
    except DataError:
        raise
    except Exception as error:  # whatever transformers may raise
        what = f"transformers cannot load or run the export: {type(error).__name__}: {error}"
        remedy = "report it as a bug; --no-proof exports without asking transformers"
        raise DataError(Problem(what, "an export is proven by running it", remedy)) from error


def why_unproven(recipe: Recipe) -> str:
    """Why nothing can be compared with transformers here; empty if it can."""
    if not has_transformers():
        return "transformers is not installed here"
    needed = _BYTES_TO_PROVE * count_parameters(recipe.model, vocab_size=recipe.model.vocab_size).total
    free = available_host_bytes()
    lacking = f"it needs about {format_bytes(needed)} of memory, and {format_bytes(free)} are available"
    return lacking if needed > free else ""
