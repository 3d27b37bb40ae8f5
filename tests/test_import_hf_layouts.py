"""The folders that hubs really have: old names, bare models, buffers, a head that differs from the embedding."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from bloomery.config.load import load_recipe
from checkpoints import tensors_of
from export_samples import checkpoint_of, logits_difference, small_tokenizer
from hf_samples import Command, change, hf_folder, in_shards
from model_samples import small_config

pytest.importorskip("transformers")

FAMILIES = ["gpt2", "bloom", "llama", "bert"]
EMBEDDINGS = {
    "gpt2": "transformer.wte.weight",
    "bloom": "transformer.word_embeddings.weight",
    "llama": "model.embed_tokens.weight",
    "bert": "bert.embeddings.word_embeddings.weight",
}
PREFIXES = {"gpt2": "transformer.", "bloom": "transformer.", "llama": "model.", "bert": "bert."}


def head_of(family: str) -> str:
    return "cls.predictions.decoder.weight" if family == "bert" else "lm_head.weight"


def tied_folder(family: str, folder: Path) -> Path:
    return hf_folder(folder, small_config(family, vocab_size=300, tie_embeddings=True))  # type: ignore[arg-type]


def renamed(folder: Path, *pairs: tuple[str, str]) -> None:
    """Every name in the folder with each first text replaced by the second."""
    state = load_file(folder / "model.safetensors")
    for old, new in pairs:
        state = {name.replace(old, new): tensor for name, tensor in state.items()}
    save_file(state, folder / "model.safetensors")  # without the metadata of transformers


def imported(command: Command, folder: Path, output: Path) -> str:
    """What was said on stderr; here the model computes what transformers computes."""
    code, _, err = command("import", "hf", str(folder), str(output))
    assert code == 0, err
    assert logits_difference(output, folder) < 1e-4
    return err


def is_tied(run: Path) -> bool:
    recipe = load_recipe(str(run / "recipe.yaml")).recipe
    assert ("model.head.weight" in tensors_of(run)) != recipe.model.tie_embeddings
    return recipe.model.tie_embeddings


# ---------------------------------------------------------------- tied and not


@pytest.mark.parametrize(("family", "bare"), [("gpt2", True), ("bloom", False), ("llama", False), ("bert", True)])
def test_a_head_that_differs_from_the_embedding_is_never_dropped(
    family: str, bare: bool, tmp_path: Path, command: Command
) -> None:
    folder = tied_folder(family, tmp_path / "hf")
    embedding = load_file(folder / "model.safetensors")[EMBEDDINGS[family]]
    change(folder, **{head_of(family): embedding.clone()})
    imported(command, folder, tmp_path / "equal")
    assert is_tied(tmp_path / "equal")
    change(folder, **{head_of(family): embedding.flip(0).contiguous()})
    if bare:
        renamed(folder, (PREFIXES[family], ""))
    code, _, err = command("import", "hf", str(folder), str(tmp_path / "run"))
    assert code == 3
    assert f"{head_of(family)} differs from " in err
    assert not (tmp_path / "run").exists()
    if family != "bert":  # whose head then wants a bias of its own as well
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": False}))
        imported(command, folder, tmp_path / "run")
        assert not is_tied(tmp_path / "run")


def test_the_bias_that_bert_computes_with_is_taken(tmp_path: Path, command: Command) -> None:
    folder = hf_folder(tmp_path / "hf", small_config("bert", vocab_size=300, tie_embeddings=True))
    change(folder, cls__predictions__decoder__bias=torch.linspace(-3, 3, 300))
    imported(command, folder, tmp_path / "run")


def test_an_untied_bert_is_exported_with_both_biases(tmp_path: Path, command: Command) -> None:
    (tmp_path / "tokenizer").mkdir()
    config = small_config("bert", vocab_size=300, tie_embeddings=False)
    checkpoint = checkpoint_of(config, tmp_path / "run", small_tokenizer(tmp_path / "tokenizer"))
    code, out, err = command("export", str(checkpoint), str(tmp_path / "hf"))
    assert code == 0, err
    assert "likeliest tokens equal for 5 of 5 prompts" in out


# ---------------------------------------------------------------- names and buffers


@pytest.mark.parametrize("family", FAMILIES)
def test_a_bare_model_with_old_buffers_in_shards_is_imported(family: str, tmp_path: Path, command: Command) -> None:
    folder = tied_folder(family, tmp_path / "hf")
    buffers: dict[str, dict[str, Any]] = {
        "gpt2": {
            "transformer.h.0.attn.bias": torch.ones(1, 1, 32, 32).tril().byte(),
            "transformer.h.1.attn.bias": torch.ones(1, 1, 32, 32).tril(),
            "transformer.h.0.attn.masked_bias": torch.tensor(-1e4),
        },
        "bloom": {},
        "llama": {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)},
        "bert": {"bert.embeddings.position_ids": torch.arange(32)[None]},
    }
    change(folder, **buffers[family])
    renamed(folder, (PREFIXES[family], ""))
    assert not any(name.startswith(PREFIXES[family]) for name in load_file(folder / "model.safetensors"))
    imported(command, folder, tmp_path / "one")
    in_shards(folder, 3)  # with an index without metadata
    code, _, err = command("import", "hf", str(folder), str(tmp_path / "many"))
    assert code == 0, err
    imported(command, tied_folder(family, tmp_path / "named"), tmp_path / "plain")
    one, many, plain = (tensors_of(tmp_path / name) for name in ("one", "many", "plain"))
    assert one.keys() == many.keys() == plain.keys()
    assert all(torch.equal(one[name], plain[name]) and torch.equal(many[name], plain[name]) for name in plain)


def test_the_names_of_bert_base_uncased_are_read(tmp_path: Path, command: Command) -> None:
    folder = tied_folder("bert", tmp_path / "hf")
    renamed(folder, ("LayerNorm.weight", "LayerNorm.gamma"), ("LayerNorm.bias", "LayerNorm.beta"))
    renamed(folder, ("bert.", ""))
    assert "cls.predictions.transform.LayerNorm.gamma" in load_file(folder / "model.safetensors")
    imported(command, folder, tmp_path / "run")


def test_a_bare_bert_is_told_which_heads_it_lacks(tmp_path: Path, command: Command) -> None:
    from transformers import BertConfig, BertModel

    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64}
    BertModel(BertConfig(vocab_size=100, max_position_embeddings=16, **sizes)).save_pretrained(tmp_path / "hf")
    code, _, err = command("import", "hf", str(tmp_path / "hf"), str(tmp_path / "run"))
    assert code == 3
    assert "cls.predictions.transform.dense.weight" in err
    assert "cls.seq_relationship.weight" in err
    assert "BertForPreTraining.from_pretrained(DIR).save_pretrained(NEW)" in err


# ---------------------------------------------------------------- contents


def test_weights_that_are_not_finite_are_named(tmp_path: Path, command: Command) -> None:
    folder = tied_folder("llama", tmp_path / "hf")
    state = load_file(folder / "model.safetensors")
    for name, value in {"model.norm.weight": torch.nan, "model.layers.1.self_attn.k_proj.weight": -torch.inf}.items():
        state[name].view(-1)[-1] = value
    save_file({name: tensor.bfloat16() for name, tensor in state.items()}, folder / "model.safetensors")
    code, _, err = command("import", "hf", str(folder), str(tmp_path / "run"))
    assert code == 3
    assert (
        f"{folder}: 2 tensors hold values that are not finite: model.layers.1.self_attn.k_proj.weight, model.norm"
        in err
    )
    assert not (tmp_path / "run").exists()


def test_files_with_a_byte_order_mark_are_read(tmp_path: Path, command: Command) -> None:
    folder = tied_folder("gpt2", tmp_path / "hf")
    in_shards(folder, 2)
    for name in ("config.json", "model.safetensors.index.json"):
        content = json.loads((folder / name).read_text())
        (folder / name).write_text(json.dumps(content), encoding="utf-8-sig")
    code, _, err = command("import", "hf", str(folder), str(tmp_path / "run"))
    assert code == 0, err
