"""Checkpoints of small models, and a tokenizer for them, for the tests of export and import."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import load_file

from bloomery.base.ranks import Piece
from bloomery.checkpoint.folder import find_checkpoint
from bloomery.checkpoint.load import read_checkpoint
from bloomery.checkpoint.save import save_checkpoint
from bloomery.config.recipe import ModelSection
from bloomery.config.yaml_nodes import dump_yaml
from bloomery.families.registry import FAMILIES, READERS
from bloomery.interop.hf.proof import prove_import
from bloomery.train.state import TrainState
from model_samples import small_config, small_model

Command = Callable[..., tuple[int, str, str]]
CASES: dict[str, ModelSection] = {
    "gpt2": small_config("gpt2", vocab_size=300),
    "gpt2-untied": small_config("gpt2", vocab_size=300, tie_embeddings=False, ffn_hidden_size=96),
    "bloom": small_config("bloom", vocab_size=300),
    "llama-grouped": small_config("llama", vocab_size=300),
    "llama-tied": small_config("llama", vocab_size=300, tie_embeddings=True, num_kv_heads=1, rope_theta=500.0),
    "qwen2-tied": small_config("qwen2", vocab_size=300, tie_embeddings=True),
    "qwen3": small_config("qwen3", vocab_size=300, norm_eps=1e-6),
    "bert": small_config("bert", vocab_size=300),
}


def small_tokenizer(folder: Path, *, vocab_size: int = 290) -> Path:
    """A byte-level BPE with the special tokens of all families."""
    import tokenizers

    made = tokenizers.Tokenizer(tokenizers.models.BPE())
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    special = ["<|endoftext|>", "[CLS]", "[SEP]", "[MASK]", "[PAD]"]
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    made.train_from_iterator(["once upon a time there was a word and the word was main"] * 5, trainer)
    made.save(str(folder / "tokenizer.json"))
    return folder


def checkpoint_of(config: ModelSection, folder: Path, tokenizer: Path) -> Path:
    """A checkpoint of a perturbed model at step 7."""
    unread = READERS.keys() - {*FAMILIES[config.family].reads}
    model = {key: value for key, value in config.model_dump().items() if key not in unread}
    recipe = {
        "name": "small",
        "model": model,
        "tokenizer": {"path": str(tokenizer)},
        "batch": {"micro_batch_size": 1, "global_batch_size": 8},
        "lr": {"peak": 1e-3},
        "train": {"for": "20 steps"},
    }
    parameters = {name: p.detach() for name, p in small_model(config).named_parameters()}
    weights = {f"model.{name}": Piece.whole(values) for name, values in parameters.items()}
    for name, values in parameters.items():
        for moment in ("exp_avg", "exp_avg_sq"):
            weights[f"optim.{name}.{moment}"] = Piece.whole(torch.zeros_like(values))
    weights["optim.step"] = Piece.whole(torch.zeros(()))
    state = {**TrainState(step=7, consumed_samples=56).to_json(), "interval": None, "blend": None}
    return save_checkpoint(folder / "checkpoints", step=7, pieces=weights, state=state, recipe_yaml=dump_yaml(recipe))


def weights_of(folder: Path) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    for path in sorted(folder.glob("*.safetensors")):
        found |= load_file(path)
    return found


def logits_difference(checkpoint: Path, exported: Path) -> float:
    """Largest absolute difference between our logits and transformers'."""
    found = prove_import(read_checkpoint(find_checkpoint(checkpoint)), exported).max_logit_difference
    assert found is not None
    return found
