"""`import megatron-checkpoint`: every layout is continued as if the training had never been cut, or refused."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from bloomery.config.recipe import ModelSection
from bloomery.families.registry import family_defaults
from checkpoints import tensors_of
from conftest import VOCAB, Workshop
from hf_samples import change, hf_folder
from megatron_checkpoints import made_of, write_deepspeed, write_legacy
from model_samples import small_config

Command = Callable[..., tuple[int, str, str]]
TRAINED: dict[tuple[str, str], Any] = {}
UNCUT = (
    "train={for: 160 samples}", "lr={peak: 0.01, min: 0.001, schedule: cosine, warmup: 32 samples, decay: 160 samples}",
    "optimizer={clip_grad_norm: 0.5, weight_decay: 0.01, betas: [0.9, 0.999]}", "model.vocab_multiple=32",
)  # fmt: skip


def trained(workshop: Workshop, family: str, order: str) -> tuple[ModelSection, dict[str, Tensor], list[float]]:
    """Model, the tensors after step 3, which is in `step3`, and the losses of all 6 steps. Trained once."""
    if (family, order) not in TRAINED:
        TRAINED[family, order] = workshop.folder, *_trained(workshop, family, order)
    folder, *found = TRAINED[family, order]
    if folder != workshop.folder:
        shutil.copytree(folder / "step3", workshop.folder / "step3")
    return tuple(found)


def _trained(workshop: Workshop, family: str, order: str) -> tuple[ModelSection, dict[str, Tensor], list[float]]:
    fields = {"family": family, "num_layers": 2, "hidden_size": 32, "num_heads": 4, "seq_length": 16,
              "vocab_size": VOCAB, "vocab_multiple": 32, "dropout": 0.0}  # fmt: skip
    fields |= {"num_kv_heads": 2, "norm_eps": 1e-6} if family in ("llama", "qwen3") else {}
    data = f"data={{train: [{{path: train}}], split: '80,20,0', order: {order}}}"
    words = [f"model={json.dumps(fields)}", data, *UNCUT[:-1], "checkpoint.phases=[{every: 3 steps}]"]
    run = workshop.train(*words, "train.exit_after=6 steps", run="uncut")
    step3 = workshop.folder / "step3"
    (step3 / "checkpoints").mkdir(parents=True)
    (run / "checkpoints/step-00000003").rename(step3 / "checkpoints/step-00000003")
    return ModelSection(**fields, **family_defaults(fields)), tensors_of(step3), workshop.losses(run)


def go_on(workshop: Workshop, command: Command, source: Path, *words: str) -> tuple[Path, list[float]]:
    """Import and three more steps, on one rank."""
    out = workshop.folder / "continued"
    layout = ("parallel.tp=1", "parallel.pp=1")
    code, text, err = command("import", "megatron-checkpoint", str(source), str(out), *layout, *words)
    assert code == 0, err
    assert "step 3, 24 samples, with moments" in text
    code, _, err = command("train", str(out / "recipe.yaml"), "--run-dir", str(out), "train.exit_after=3 steps")
    assert code == 0, err
    return out, workshop.losses(out)


WRITERS: dict[str, tuple[str, Callable[..., Path]]] = {
    "megatron-lm": ("gpt2", lambda *a: write_legacy(*a, tp=2, pp=2)),
    "virtual-stages-bf16": ("gpt2", lambda *a: write_legacy(*a, tp=2, pp=1, chunks=2, bf16=True)),
    "core-names": ("llama", lambda *a: write_legacy(*a, tp=1, pp=2, bf16=True, core=True)),
    "megatron-lm-1.0": ("gpt2", lambda *a: write_legacy(*a, tp=2, pp=1, version=1.0)),
    "megatron-lm-llama": ("llama", lambda *a: write_legacy(*a, tp=2, pp=2)),
    "bigscience": ("bloom", lambda *a: write_deepspeed(*a, tp=2, pp=2, dp=3)),
    "universal": ("bloom", lambda *a: write_deepspeed(*a, tp=1, pp=2, dp=1, universal=True)),
}


@pytest.mark.parametrize("kind", WRITERS)
def test_a_training_of_megatron_goes_on_as_if_it_were_never_cut(
    kind: str, workshop: Workshop, command: Command
) -> None:
    family, write = WRITERS[kind]
    order = "bigscience" if family == "bloom" else "megatron"
    config, tensors, losses = trained(workshop, family, order)
    source = write(workshop.folder / "theirs", tensors, config)
    assert go_on(workshop, command, source)[1] == losses[3:]


@pytest.mark.parametrize("family", ["gpt2", "llama", "qwen3"])
def test_an_export_for_megatron_comes_back_bit_by_bit(family: str, workshop: Workshop, command: Command) -> None:
    losses = trained(workshop, family, "megatron")[2]
    code, out, err = command("export", "step3", "theirs", "--format", "megatron")
    assert code == 0, err
    assert "theirs/iter_0000003: torch_dist of megatron-core" in out
    data = "data={train: [{path: train}], split: '80,20,0', order: megatron}"
    assert go_on(workshop, command, Path("theirs"), data, "monitor.log_every=1 steps")[1] == losses[3:]
    code, _, err = command("export", "step3", "theirs", "--format", "megatron")
    assert "theirs is not empty" in err


def test_a_model_that_megatron_core_does_not_have_is_not_exported(workshop: Workshop, command: Command) -> None:
    trained(workshop, "bloom", "timeless")
    assert "the model is a bloom" in command("export", "step3", "theirs", "--format", "megatron")[2]


@pytest.mark.parametrize("family", ["gpt2", "llama", "bert"])
def test_an_import_is_proven_against_the_hugging_face_conversion(family: str, tmp_path: Path, command: Command) -> None:
    config = small_config(family, vocab_size=160, norm_eps=1e-5)
    source = made_of(tmp_path / "theirs", config, tp=2, pp=2, version=3.0 if family == "llama" else 0.0)
    folder = hf_folder(tmp_path / "hf", config)
    words = ("import", "megatron-checkpoint", str(source), "--weights-only", "--compare-hf", str(folder), "seed=7")
    code, out, err = command(*words[:3], str(tmp_path / "run"), *words[3:])
    assert code == 0, err
    assert "proof: training loss" in out
    state = json.loads((tmp_path / "run/checkpoints/step-00000000/state.json").read_text())
    assert state["imported_from"]["layout"] == "Megatron-LM"
    change(folder, **{f"{next(iter(load_file(folder / 'model.safetensors'))).replace('.', '__')}": None})
    code, _, err = command(*words[:3], str(tmp_path / "other"), *words[3:])
    assert (code, "Traceback" in err, (tmp_path / "other").exists()) == (3, False, False)


class Payload:
    def __reduce__(self) -> tuple[Any, ...]:
        return (Path.touch, (Path("executed"),))


def wrong(folder: Path, kind: str) -> None:
    """Spoil a checkpoint of gpt2 in one way."""
    path = next(folder.rglob("mp_rank_00/*.pt"))
    saved = torch.load(path, weights_only=False)
    args, encoder = saved["args"], saved["model"]["language_model"]["encoder"]
    match kind:
        case "no checkpoint":
            path.unlink()
        case "cut off":
            path.write_bytes(path.read_bytes()[:1000])
        case "code":
            args.extra = Payload()
        case "a class of nobody":
            args.extra = Workshop
        case "experts":
            args.num_experts = 8
        case "no arguments":
            del saved["args"]
        case "a missing tensor":
            del encoder["layers.1.mlp.dense_h_to_4h.bias"]
        case "another tensor":
            encoder["layers.1.router.weight"] = torch.ones(2)
        case "another shape":
            args.ffn_hidden_size = 64
        case "NaN":
            encoder["final_layernorm.bias"][0] = torch.nan
        case "a swapped state":
            state = saved["optimizer"]["state"]
            state[0], state[2] = state[2], state[0]
        case "no data":
            args.data_path = None
        case "distributed":
            del saved["optimizer"]
            (path.parent / "distrib_optim.pt").touch()
    if path.exists() and kind != "cut off":
        torch.save(saved, path)


WRONG = {
    "no checkpoint": "is no checkpoint of Megatron",
    "cut off": "cannot be read",
    "code": "which no Megatron saves",
    "a class of nobody": "it holds an object of conftest.Workshop",
    "experts": "--num-experts 8. No family here has experts",
    "no arguments": "has no arguments of its training",
    "a missing tensor": "1 tensors are missing: layers.1.mlp.linear_fc1.bias (ours: layers.1.mlp.up.bias)",
    "another tensor": "1 tensors have no place in a gpt2: layers.1.router.weight",
    "another shape": "has another shape",
    "NaN": "is not finite",
    "a swapped state": "do not follow the weights: state 0 is not that of word_embeddings.weight",
    "no data": "the recipe has no data. A training continues in its data",
    "distributed": "moments are in the buckets of distrib_optim.pt",
}


@pytest.mark.parametrize("kind", WRONG)
def test_what_cannot_be_continued_is_refused(kind: str, tmp_path: Path, command: Command) -> None:
    source = made_of(tmp_path / "theirs", small_config("gpt2", vocab_size=160), tp=1, pp=1)
    wrong(source, kind)
    words = ["--weights-only"] if kind in ("a missing tensor", "another tensor", "another shape", "NaN") else []
    code, out, err = command("import", "megatron-checkpoint", str(source), str(tmp_path / "run"), *words)
    assert code in (2, 3), out
    assert WRONG[kind] in err
    assert "Traceback" not in err
    assert not (tmp_path / "run").exists()
    assert not Path("executed").exists()


def test_batches_of_the_past_are_counted_as_they_were(workshop: Workshop, command: Command) -> None:
    config = small_config("gpt2", vocab_size=160)
    source = made_of(workshop.folder / "theirs", config, tp=1, pp=1)
    words = ("import", "megatron-checkpoint", str(source), str(workshop.folder / "run"), "batch.global_batch_size=4")
    code, _, err = command(*words)
    assert code == 0, err
    assert "24 samples in 3 steps, where the recipe has 12" in err
    again = ("train", str(workshop.folder / "run/recipe.yaml"), "--run-dir", str(workshop.folder / "run"))
    code, _, err = command(*again, "train.exit_after=1 steps")
    assert code == 0, err
    assert workshop.metrics(workshop.folder / "run")[0]["consumed_samples"] == 28
