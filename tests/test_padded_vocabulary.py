"""Padded rows of the vocabulary take no part in a softmax. Models of transformers whose logits lie far below zero,
where a row of zeros would win, are trained beside a plain loop of transformers and torch."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import rank_commands
from bloomery.checkpoint.folder import MANIFEST
from bloomery.cli.main import main
from bloomery.data.open import open_data
from bloomery.launch.local import run_local_ranks
from bloomery.sizing.check import load_checked_recipe
from bloomery.sizing.layout import layout_overrides
from bloomery.verify.shrink import write_data
from checkpoints import change_manifest, tensors_of
from conftest import Workshop
from hf_samples import Command
from model_samples import FAMILIES

transformers: Any = pytest.importorskip("transformers")

WORDS, STEPS, CLIP, LR, DECAY, EPS = 290, 4, 0.5, 1e-3, 0.1, 1e-5
SHARED = {"vocab_size": WORDS, "hidden_size": 32, "tie_word_embeddings": True}
HEADS = {"num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64, "max_position_embeddings": 32}


@torch.no_grad()
def low_model(family: str) -> Any:
    """A model of transformers whose logits all lie about 15 below zero."""
    torch.manual_seed(1)
    if family == "gpt2":
        config = transformers.GPT2Config(vocab_size=WORDS, n_embd=32, n_layer=2, n_head=4, n_positions=32)
        model = transformers.GPT2LMHeadModel(config)
        words, last = model.transformer.wte, model.transformer.ln_f
    elif family == "bloom":
        model = transformers.BloomForCausalLM(transformers.BloomConfig(n_layer=2, n_head=4, **SHARED))
        words, last = model.transformer.word_embeddings, model.transformer.ln_f
    elif family != "bert":
        grouped = {"num_key_value_heads": 2, "tie_word_embeddings": False}
        wide = {"head_dim": 16} if family == "qwen3" else {}
        config = transformers.AutoConfig.for_model(family, **SHARED | HEADS | grouped | wide)
        model = transformers.AutoModelForCausalLM.from_config(config)
        for name, parameter in model.named_parameters():
            if name.endswith(("q_norm.weight", "k_norm.weight", "_proj.bias")):  # which start as ones and zeros
                parameter += 0.3 * torch.randn_like(parameter)
        model.model.embed_tokens.weight[:, 0] = 1.0  # so that the norm leaves nearly sqrt(32) there
        model.lm_head.weight[:, 0] = -15 / 32**0.5
        return model
    else:
        model = transformers.BertForPreTraining(transformers.BertConfig(**SHARED | HEADS))
        model.cls.predictions.bias -= 15
        return model
    words.weight[:, 0] = 0.5
    last.bias[0] = -30
    return model


def without_dropout(model: Any) -> Any:
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    return model


def imported(family: str, folder: Path, command: Command, *overrides: str) -> tuple[Any, Path]:
    """The model and the run folder made of it, with shards to train on."""
    model = without_dropout(low_model(family))
    model.save_pretrained(folder / "hf")
    sources: dict[str, Any] = {"train": [{"path": str(folder / "a")}, {"path": str(folder / "b")}], "validation": {}}
    write_data({"model": {"vocab_size": WORDS, "family": family}, "data": sources}, folder)
    words = [f"data={json.dumps({'train': sources['train'], 'cache_dir': str(folder / 'cache')})}", "model.dropout=0"]
    words += [
        "model.seq_length=32",
        "precision=fp32",
        f"lr={{peak: {LR}, schedule: constant}}",
        "monitor.log_every=1 steps",
    ]
    words += [f"optimizer={{clip_grad_norm: {CLIP}, weight_decay: {DECAY}, eps: {EPS}}}", f"train.for={STEPS} steps"]
    words += ["batch={micro_batch_size: 2, global_batch_size: 8}"]
    words += [f"tokenizer.path={folder / 'tokenizer'}"] if family == "bert" else []
    code, out, err = command("import", "hf", str(folder / "hf"), str(folder / "run"), *words, *overrides)
    assert code == 0, err
    assert "proof: training loss " in out
    return model, folder / "run"


def plain_losses(model: Any, run: Path) -> list[dict[str, float]]:
    """The losses of each step of a plain loop with torch's AdamW, over the batches of the run."""
    recipe = load_checked_recipe(str(run / "recipe.yaml")).recipe
    parameters = list(model.parameters())
    groups = [
        {"params": [each for each in parameters if each.ndim > 1], "weight_decay": DECAY},
        {"params": [each for each in parameters if each.ndim < 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=LR, betas=tuple(recipe.optimizer.betas), eps=EPS)
    found = []
    with open_data(recipe) as data:
        for step in range(STEPS):
            batch = data.train.batch(step * 8, 8)
            losses = their_losses(model, batch.inputs, batch.targets)
            optimizer.zero_grad()
            torch.stack(list(losses.values())).sum().backward()
            nn.utils.clip_grad_norm_(parameters, CLIP)
            optimizer.step()
            found.append({name: loss.item() for name, loss in losses.items()})
    return found


def their_losses(model: Any, inputs: dict[str, Tensor], targets: dict[str, Tensor]) -> dict[str, Tensor]:
    if "sop loss" not in targets:
        logits = {"lm loss": model(inputs["tokens"]).logits}
    else:
        words = {"token_type_ids": inputs["token_types"], "attention_mask": inputs["attention_mask"]}
        made = model(inputs["tokens"], **words)
        logits = {"lm loss": made.prediction_logits, "sop loss": made.seq_relationship_logits}
    assert logits["lm loss"].max().item() < -8, "far below the logits of a row of zeros"
    return {name: F.cross_entropy(logits[name].flatten(0, -2), targets[name].flatten()) for name in targets}


def trained(run: Path, folder: Path, layout: str) -> list[dict[str, float]]:
    """The losses of each step of `bloomery train` in a layout, from the imported checkpoint."""
    factors = [] if layout == "single" else layout_overrides(layout)
    ranks = 1 if layout == "single" else int(factors[-1].rpartition("=")[2])
    shutil.copytree(run, folder / layout)
    words = [
        "train",
        str(run / "recipe.yaml"),
        *factors,
        "--run-dir",
        str(folder / layout),
        "--device",
        "cpu",
        "--quiet",
    ]
    if ranks == 1:
        assert main(words) == 0
    else:
        logged = partial(rank_commands.logged, rank_commands.main, str(folder / "said.txt"))
        assert run_local_ranks(ranks, logged, words) == 0, (folder / "said.txt").read_text()
    return [record["losses"] for record in Workshop.metrics(folder / layout)]


LAYOUTS = {"gpt2": "pp2", "bloom": "zero3-dp2", "llama": "cp2", "qwen2": "single"}
"""The others in tp2; `verify` plants padding in every layout."""


@pytest.mark.parametrize("family", FAMILIES)
def test_an_imported_model_learns_what_transformers_learns_in_every_layout(
    family: str, tmp_path: Path, command: Command
) -> None:
    model, run = imported(family, tmp_path, command)
    right, layout = plain_losses(model, run), LAYOUTS.get(family, "tp2")
    found = trained(run, tmp_path, layout)
    assert len(found) == STEPS
    for ours, theirs in zip(found, right, strict=True):
        assert ours == pytest.approx(theirs, abs=1e-5), f"{layout}: {found} instead of {right}"
    rows = {name: each[WORDS:] for name, each in tensors_of(tmp_path / layout).items() if each.shape[:1] == (384,)}
    assert {name for name in rows if "exp_avg" in name}
    assert not any(bool(each.any()) for each in rows.values()), "padding never moves"


def test_padding_takes_part_where_the_recipe_says_so(tmp_path: Path, command: Command) -> None:
    """As in Megatron. Zero rows then drown logits of -15; a run changes it only by name."""
    _, run = imported("gpt2", tmp_path, command)
    words = ["train", str(run / "recipe.yaml"), "--run-dir", str(run), "--device", "cpu", "--quiet"]
    assert main([*words, "model.softmax_over_padding=true"]) == 0
    assert Workshop.losses(run)[0] > 15
    code, _, err = command(*words, "train.for=5 steps", "model.softmax_over_padding=false")
    assert code == 3
    assert "--change model.softmax_over_padding" in err
    changed = ["model.softmax_over_padding=false", "--change", "model.softmax_over_padding"]
    assert main([*words, "train.for=5 steps", *changed]) == 0
    assert Workshop.losses(run)[-1] < 10


def test_an_import_whose_training_loss_would_be_another_is_refused(tmp_path: Path, command: Command) -> None:
    low_model("gpt2").save_pretrained(tmp_path / "hf")
    words = ("import", "hf", str(tmp_path / "hf"), str(tmp_path / "run"), "model.softmax_over_padding=true")
    code, _, err = command(*words)
    assert code == 3
    assert re.search(
        r"transformers computes something else: proof: training loss 1\d.\d+, transformers' 5\.\d+;", err
    ), err
    assert "--no-proof" in err
    assert not (tmp_path / "run").exists()
    code, out, _ = command(*words, "--no-proof")
    assert code == 0
    assert "not verified: --no-proof" in out


def test_a_checkpoint_of_an_earlier_version_resumes(workshop: Workshop) -> None:
    """Its recipe does not know the field: it resumes without padding, and nothing has to be asked for."""
    settings = ("lr={peak: 1e-2, schedule: constant}", "train.for=3 steps")
    run = workshop.train(*settings, "model.softmax_over_padding=true")
    checkpoint = run / "checkpoints" / "step-00000003"
    for folder in (run, checkpoint):
        lines = (folder / "recipe.yaml").read_text().splitlines(keepends=True)
        (folder / "recipe.yaml").write_text("".join(line for line in lines if "softmax_over_padding" not in line))
    content, files = (checkpoint / "recipe.yaml").read_bytes(), json.loads((checkpoint / MANIFEST).read_text())["files"]
    files["recipe.yaml"] = {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    change_manifest(checkpoint, files=files)
    workshop.train(settings[0], "train.for=5 steps")
    before, after = Workshop.losses(run)[2:4]
    assert len(Workshop.losses(run)) == 5
    assert after < before, "64 of 128 rows were padding, which had learned to be unlikely"
