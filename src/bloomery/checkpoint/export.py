"""A checkpoint as a Hugging Face folder: safetensors, config and tokenizer. Needs neither transformers nor a GPU."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from bloomery.base.errors import Problem, StorageError
from bloomery.base.storage import make_run_folder, write_atomically
from bloomery.checkpoint.folder import find_checkpoint
from bloomery.checkpoint.hf.maps import hf_config, to_hf
from bloomery.checkpoint.load import load_model, read_state, tokenizer_of


@dataclass(frozen=True)
class Exported:
    architecture: str
    tensors: int
    step: int


def export_checkpoint(checkpoint: Path, output: Path, *, tokenizer_path: str | None = None) -> Exported:
    """Write `output`, fp32, with the recipe's own vocabulary. config.json comes last: without it nothing loads."""
    folder = find_checkpoint(checkpoint)
    recipe, model = load_model(folder, device=torch.device("cpu"))
    tokenizer = tokenizer_of(recipe, tokenizer_path)
    tensors = to_hf(dict(model.named_parameters()), recipe.model)
    make_run_folder(output)
    (output / "config.json").unlink(missing_ok=True)  # an older export must not lend its config to new weights
    try:
        save_file(
            {name: tensor.detach().contiguous() for name, tensor in tensors.items()}, output / "model.safetensors"
        )
    except (OSError, SafetensorError) as error:
        raise StorageError(
            Problem(f"cannot write {output / 'model.safetensors'}: {error}", place=str(output))
        ) from error
    tokenizer.save_hf_files(str(output), model_max_length=recipe.model.seq_length)
    config = hf_config(recipe.model)
    ids = {"bos_token_id": tokenizer.eod_id, "eos_token_id": tokenizer.eod_id}
    config |= {**ids, "dtype": "float32"}
    write_atomically(output / "generation_config.json", json.dumps(ids, indent=2) + "\n")
    write_atomically(output / "config.json", json.dumps(config, indent=2) + "\n")
    return Exported(config["architectures"][0], len(tensors), int(read_state(folder)["step"]))


def logits_difference(checkpoint: Path, exported: Path) -> float:
    """Largest absolute difference between our logits and transformers', on one full sequence of random tokens."""
    from transformers import AutoModelForCausalLM, BertForPreTraining  # the heavy extra, only for this
    from transformers.utils import logging

    logging.disable_progress_bar()  # type: ignore[no-untyped-call]

    recipe, model = load_model(find_checkpoint(checkpoint), device=torch.device("cpu"))
    kind: Any = BertForPreTraining if recipe.model.family == "bert" else AutoModelForCausalLM
    theirs = kind.from_pretrained(exported).eval()
    random = torch.Generator().manual_seed(0)
    tokens = torch.randint(recipe.model.vocab_size, (1, recipe.model.seq_length), generator=random)
    with torch.no_grad():
        ours, other = model(tokens), theirs(tokens)
    if recipe.model.family == "bert":
        ours, other = ours[0], other.prediction_logits
    else:
        other = other.logits
    return float((ours[..., : recipe.model.vocab_size] - other).abs().max())
