"""Export with its proof, import, and back: bit by bit, for every family; every refusal."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from bloomery.base.accelerator import available_host_bytes
from bloomery.base.errors import DataError
from bloomery.config.load import load_recipe
from bloomery.interop.hf import export as exporting
from bloomery.interop.hf.configs import hf_config, model_section
from bloomery.interop.hf.export import export_checkpoint
from bloomery.interop.hf.importer import read_model
from checkpoints import tensors_of
from conftest import Workshop
from export_samples import CASES, Command, checkpoint_of, logits_difference, small_tokenizer, weights_of
from model_samples import small_config

pytest.importorskip("transformers")


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_tokenizer(tmp_path_factory.mktemp("tokenizer"))


def test_the_proof_of_bert_knows_both_heads(tmp_path: Path, tokenizer: Path, command: Command) -> None:
    checkpoint = checkpoint_of(CASES["bert"], tmp_path / "run", tokenizer)
    assert command("export", str(checkpoint), str(tmp_path / "hf"))[0] == 0
    assert logits_difference(checkpoint, tmp_path / "hf") < 1e-4
    weights = load_file(tmp_path / "hf" / "model.safetensors")
    weights["cls.seq_relationship.bias"] += 1
    save_file(weights, tmp_path / "hf" / "model.safetensors", {"format": "pt"})
    assert logits_difference(checkpoint, tmp_path / "hf") == pytest.approx(1, abs=1e-4)


OPTIONS = {
    "gpt2-untied": ("--dtype", "fp32", "--shard-size", "40KB"),
    "llama-grouped": ("--dtype", "bf16"),
    "qwen3": ("--dtype", "bf16", "--shard-size", "40KB"),
    "bert": ("--dtype", "fp16", "--shard-size", "40KB"),
}
"""Of some exports: every dtype, in one file and in shards, with a padded vocabulary."""


@pytest.mark.parametrize("name", CASES)
def test_export_proves_itself_and_export_import_export_is_bit_equal(
    name: str, tmp_path: Path, tokenizer: Path, command: Command
) -> None:
    checkpoint, options = checkpoint_of(CASES[name], tmp_path / "run", tokenizer), OPTIONS.get(name, ())
    first, second = tmp_path / "first", tmp_path / "second"
    code, out, err = command("export", str(checkpoint), str(first), *options)
    assert code == 0, err
    compared = "likeliest tokens" if name == "bert" else "greedy continuations"
    assert f"{compared} equal for 5 of 5 prompts" in out
    proof = json.loads((first / "export-proof.json").read_text())
    assert proof["proven"]
    assert proof["max_logit_difference"] <= 1e-4
    is_rounded = "bf16" in options or "fp16" in options
    assert ("rounding changed them by" in out) == is_rounded
    dtype = json.loads((first / "config.json").read_text())["dtype"]
    assert {str(tensor.dtype) for tensor in weights_of(first).values()} == {f"torch.{dtype}"}
    assert (dtype != "float32") == is_rounded
    code, out, err = command("import", "hf", str(first), str(tmp_path / "back"))
    assert code == 0, err
    assert "step-00000000" in out
    assert command("export", str(tmp_path / "back"), str(second), *options, "--no-proof")[0] == 0
    files = sorted(path.name for path in first.iterdir())
    assert files == sorted(path.name for path in second.iterdir())
    for file in {*files} - {"README.md", "export-proof.json"}:
        assert (first / file).read_bytes() == (second / file).read_bytes(), file
    moments = {name: t for name, t in tensors_of(tmp_path / "back").items() if name.startswith("optim.")}
    assert len(moments) > 20
    assert all(not tensor.any() for tensor in moments.values())


def test_shards_hold_the_same_tensors_and_an_older_export_leaves_nothing(
    tmp_path: Path, tokenizer: Path, command: Command
) -> None:
    checkpoint = checkpoint_of(CASES["gpt2"], tmp_path / "run", tokenizer)
    command("export", str(checkpoint), str(tmp_path / "one"), "--no-proof")
    code, out, err = command("export", str(checkpoint), str(tmp_path / "many"), "--shard-size", "100KB")
    assert code == 0, err
    files = sorted(path.name for path in (tmp_path / "many").glob("*.safetensors"))
    assert len(files) > 2
    assert f"in {len(files)} files" in out
    index = json.loads((tmp_path / "many" / "model.safetensors.index.json").read_text())
    one, many = weights_of(tmp_path / "one"), weights_of(tmp_path / "many")
    assert one.keys() == many.keys() == index["weight_map"].keys()
    assert all(torch.equal(one[name], many[name]) for name in one)
    for path in (tmp_path / "many").glob("*.safetensors"):
        with safe_open(path, framework="pt") as file:
            assert file.metadata() == {"format": "pt"}
    command("import", "hf", str(tmp_path / "many"), str(tmp_path / "back"))
    command("export", str(tmp_path / "back"), str(tmp_path / "many"), "--no-proof")
    assert sorted(path.name for path in (tmp_path / "many").glob("model*")) == ["model.safetensors"]
    assert (tmp_path / "many" / "model.safetensors").read_bytes() == (
        tmp_path / "one" / "model.safetensors"
    ).read_bytes()


def test_an_export_holds_one_tensor_at_a_time(tmp_path: Path, tokenizer: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights that are alive while others are read would add up to a model."""
    import weakref

    alive: list[weakref.ref[torch.Tensor]] = []
    most = 0
    read = exporting.Checkpoint.read

    def watched(self: Any, name: str) -> torch.Tensor:
        nonlocal most
        most = max(most, sum(ref() is not None for ref in alive))
        tensor = read(self, name)
        alive.append(weakref.ref(tensor))
        return tensor

    monkeypatch.setattr(exporting.Checkpoint, "read", watched)
    checkpoint = checkpoint_of(CASES["llama-grouped"], tmp_path / "run", tokenizer)
    export_checkpoint(checkpoint, tmp_path / "hf", with_proof=False)
    assert len(alive) > 15
    assert most <= 1


def test_the_card_tells_the_run(workshop: Workshop, tokenizer: Path, tmp_path: Path, command: Command) -> None:
    run = workshop.train(
        "train.for=4 steps", "lr.decay=4 steps", "lr.warmup=1 steps", "model.vocab_size=300",
        f"tokenizer.path={tokenizer}", "data.validation.held=[{path: valid}]",
        "train.evaluate={every: 2 steps, steps: 1}",
    )  # fmt: skip
    code, out, err = command("export", str(run), str(tmp_path / "hf"))
    assert code == 0, out + err
    card = (tmp_path / "hf" / "README.md").read_text()
    for text in ("# small", "512 tokens (32 samples) in 4 steps", "- training, lm loss: ",
                 "- validation held, lm loss: ", " at step 4\n", "  - path: train\n", "recipe fingerprint",
                 "sha256 of its manifest", "## Energy", "device-hours", "- began with: random weights",
                 "Proof: largest logit",
                 "  peak: 0.01\n", "tags: [bloomery, gpt2]", "- trained on: 1 x cpu"):  # fmt: skip
        assert text in card
    elsewhere = tmp_path / "alone" / "step-00000004"
    (run / "checkpoints" / "step-00000004").rename(tmp_path / "step-00000004")
    elsewhere.parent.mkdir()
    (tmp_path / "step-00000004").rename(elsewhere)
    command("export", str(elsewhere), str(tmp_path / "hf"), "--no-proof")
    assert "The run folder was not beside the checkpoint." in (tmp_path / "hf" / "README.md").read_text()


def test_a_run_starts_from_an_imported_model(
    workshop: Workshop, tokenizer: Path, tmp_path: Path, command: Command
) -> None:
    config = small_config("gpt2", vocab_size=300, seq_length=16)
    export_checkpoint(checkpoint_of(config, tmp_path / "old", tokenizer), tmp_path / "hf", with_proof=False)
    code, out, err = command(
        "import", "hf", str(tmp_path / "hf"), str(tmp_path / "new"), "--recipe", str(workshop.recipe), "seed=3"
    )
    assert code == 0, err
    assert f"next: bloomery train {tmp_path / 'new' / 'recipe.yaml'} --run-dir {tmp_path / 'new'}" in out
    before = tensors_of(tmp_path / "new")
    words = ["train", str(tmp_path / "new" / "recipe.yaml"), "--run-dir", str(tmp_path / "new"), "--quiet"]
    code, out, err = command(*words, "--device", "cpu", "train.for=2 steps", "lr.decay=null", "lr.warmup=0 steps")
    assert code == 0, err
    after = tensors_of(tmp_path / "new")
    assert after["optim.step"] == 2
    moved = (after["model.layers.0.mlp.up.weight"] - before["model.layers.0.mlp.up.weight"]).abs().max()
    assert 0 < moved < 0.05
    assert [record["step"] for record in Workshop.metrics(tmp_path / "new")] == [1, 2]
    code, _, err = command("export", str(tmp_path / "new"), str(tmp_path / "again"), "--no-proof")
    assert code == 0, err
    card = (tmp_path / "again" / "README.md").read_text()
    assert f"- began with: the weights of `{tmp_path / 'hf'}`, whose own training is not counted here" in card


def test_an_imported_model_is_never_lost_in_silence(
    workshop: Workshop, tokenizer: Path, tmp_path: Path, command: Command
) -> None:
    """With the run folder, without it, with the Hugging Face folder named in the recipe: the same first steps."""
    config = small_config("gpt2", vocab_size=300, seq_length=16)
    export_checkpoint(checkpoint_of(config, tmp_path / "old", tokenizer), tmp_path / "hf", with_proof=False)
    assert command("import", "hf", str(tmp_path / "hf"), "new", "--recipe", str(workshop.recipe))[0] == 0
    short = ("--device", "cpu", "train.for=3 steps", "lr.decay=null", "lr.warmup=0 steps", "--quiet")
    (tmp_path / "gone").mkdir()
    runs = {"new": [], "other": [], "direct": [f"init.from={tmp_path / 'hf'}"], "again": ["init.from=direct"]}
    for name, more in runs.items():
        assert command("train", "new/recipe.yaml", *more, "--run-dir", name, *short)[0] == 0
    losses = {name: Workshop.losses(Path(name)) for name in runs}
    assert losses["new"] == losses["other"] == losses["direct"]
    assert losses["again"][0] < losses["new"][0], "it begins with what the other has learned"
    assert Workshop.events(Path("other"), "start")[0]["step"] == 0
    longer = ("train", "direct/recipe.yaml", "train.for=5 steps", "lr.decay=24 samples", "--run-dir", "direct")
    code, _, err = command(*longer, "--device", "cpu", "--quiet")
    assert code == 0, err
    for step in (2, 4):
        code, out, err = command("replay", "direct", "--step", str(step), "--device", "cpu")
        assert (code, "THE SAME bit for bit" in out) == (0, True), err
    code, _, err = command("train", "new/recipe.yaml", "init.from=gone", "--run-dir", "x", *short)
    assert (code, "there is no complete checkpoint at gone" in err) == (3, True), err
    other = ("model.num_layers=1", "model.norm_eps=1e-3")
    for begins, said in (("hf", "model.num_layers is 1 but"), ("new", "model.num_layers is 1 but the checkpoint has")):
        words = ("train", "new/recipe.yaml", f"init.from={tmp_path / begins}", *other, "--run-dir", "x", *short)
        code, _, err = command(*words)
        assert (code, said in err, "model.norm_eps" in err, "Traceback" in err) == (3, True, True, False), err
    assert not [*Path("x").glob("**/step-*")]
    code, _, err = command("train", "new/recipe.yaml", "--run-dir", "again", *short)
    assert (code, "began with direct. Only a new run" in err) == (3, True), err
    assert command("train", "new/recipe.yaml", "init=null", "--run-dir", "again", *short)[0] == 0
    assert command("verify", "new/recipe.yaml", "--layouts", "zero1-dp2", "--steps", "2")[0] == 0


# ---------------------------------------------------------------- refusals


def test_a_failed_proof_is_an_error_and_stays_to_be_looked_at(
    tmp_path: Path, tokenizer: Path, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exporting, "hf_config", lambda config: {**hf_config(config), "activation_function": "relu"})
    checkpoint = checkpoint_of(CASES["gpt2"], tmp_path / "run", tokenizer)
    code, _, err = command("export", str(checkpoint), str(tmp_path / "hf"))
    assert code == 3
    assert "transformers computes something else" in err
    assert not json.loads((tmp_path / "hf" / "export-proof.json").read_text())["proven"]


def test_no_proof_is_said_by_name_and_a_missing_one_is_a_warning(
    tmp_path: Path, tokenizer: Path, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = checkpoint_of(CASES["gpt2"], tmp_path / "run", tokenizer)
    code, out, _ = command("export", str(checkpoint), str(tmp_path / "hf"), "--no-proof")
    assert code == 0
    assert "not verified: --no-proof" in out
    assert json.loads((tmp_path / "hf" / "export-proof.json").read_text())["reason"] == "--no-proof"
    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "transformers" else real(name))
    code, out, err = command("export", str(checkpoint), str(tmp_path / "hf"))
    assert code == 0
    assert "warning: not verified: transformers is not installed here" in err
    monkeypatch.setattr(importlib.util, "find_spec", real)
    monkeypatch.setattr("bloomery.interop.hf.proof._BYTES_TO_PROVE", 10**12)
    _, _, err = command("export", str(checkpoint), str(tmp_path / "hf"))
    assert "warning: not verified: it needs about" in err


def test_memory_that_only_caches_files_counts_as_free(tmp_path: Path) -> None:
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal: 9000 kB\nMemFree: 10 kB\nMemAvailable:   8000 kB\n")
    assert available_host_bytes(str(meminfo)) == 8000 * 1024


def test_values_that_fp16_cannot_hold_are_refused(tmp_path: Path, tokenizer: Path, command: Command) -> None:
    export_checkpoint(checkpoint_of(CASES["gpt2"], tmp_path / "run", tokenizer), tmp_path / "hf", with_proof=False)
    state = load_file(tmp_path / "hf" / "model.safetensors")
    state["transformer.wpe.weight"][0, 0] = 1e6
    save_file(state, tmp_path / "hf" / "model.safetensors")
    command("import", "hf", str(tmp_path / "hf"), str(tmp_path / "run2"))
    code, _, err = command("export", str(tmp_path / "run2"), str(tmp_path / "half"), "--dtype", "fp16")
    assert code == 3
    assert "transformer.wpe.weight has a value of 1e+06. Fp16 holds at most 65504. Use --dtype bf16 or fp32." in err


def config_of(family: str, **changes: Any) -> dict[str, Any]:
    return {**hf_config(CASES[{"llama": "llama-grouped"}.get(family, family)]), **changes}


@pytest.mark.parametrize("name", CASES)
def test_a_config_becomes_the_model_it_came_from(name: str) -> None:
    section = model_section(hf_config(CASES[name]), "config.json")
    made = CASES[name].model_dump()
    assert section == {key: made[key] for key in section}


@pytest.mark.parametrize(
    ("config", "messages"),
    [
        (config_of("llama", rope_scaling={"rope_type": "llama3", "factor": 8}, sliding_window=64, attention_bias=True,
                   hidden_act="gelu", mlp_bias=True, rope_parameters={"partial_rotary_factor": 0.5}),
         ["'llama3'", "sliding_window is 64", "attention_bias", "hidden_act is 'gelu'", "mlp_bias",
          "partial_rotary_factor is 0.5"]),
        (config_of("gpt2", activation_function="gelu", scale_attn_weights=False, n_layer=0, attn_pdrop=0.5,
                   add_cross_attention=True, scale_attn_by_inverse_layer_idx=True, layer_norm_epsilon="x"),
         ["activation_function is 'gelu'", "scale_attn_weights", "n_layer is 0", "dropouts differ",
          "add_cross_attention", "scale_attn_by_inverse_layer_idx", "layer_norm_epsilon is 'x'"]),
        (config_of("bloom", apply_residual_connection_post_layernorm=True, vocab_size=None,
                   quantization_config={"a": 1}),
         ["apply_residual_connection_post_layernorm is True", "vocab_size is missing", "quantization_config"]),
        (config_of("bert", position_embedding_type="relative_key", type_vocab_size=1, is_decoder=True,
                   hidden_act="relu"),
         ["position_embedding_type", "type_vocab_size is 1", "is_decoder", "hidden_act is 'relu'"]),
        (config_of("qwen3", use_sliding_window=True, rope_scaling={"rope_type": "yarn", "factor": 4}, hidden_act="gelu",
                   attention_bias=True, layer_types=["full_attention", "sliding_attention"], head_dim=0),
         ["use_sliding_window is True", "'yarn'", "hidden_act", "attention_bias", "'sliding_attention'",
          "head_dim is 0"]),
        ({"model_type": "mamba"}, ["model_type is 'mamba'. There are maps for gpt2, bloom, llama, qwen2, qwen3, bert"]),
        ({"model_type": "qwen3_moe"}, ["model_type is 'qwen3_moe'. There are maps for"]),
    ],
    ids=["llama", "gpt2", "bloom", "bert", "qwen3", "other", "experts"],
)  # fmt: skip
def test_everything_unsupported_is_told_at_once(config: dict[str, Any], messages: list[str]) -> None:
    with pytest.raises(DataError) as caught:
        model_section(config, "config.json")
    assert len(caught.value.problems) == len(messages)
    for message in messages:
        assert message in str(caught.value)


def test_folders_that_hold_no_model_are_refused(tmp_path: Path, tokenizer: Path, command: Command) -> None:
    assert "config.json cannot be read" in command("import", "hf", str(tmp_path), str(tmp_path / "x"))[2]
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(DataError, match="no JSON object"):
        read_model(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(hf_config(CASES["gpt2"])))
    (tmp_path / "pytorch_model.bin").write_bytes(b"x")
    code, _, err = command("import", "hf", str(tmp_path), str(tmp_path / "x"))
    assert code == 3
    assert "pickled files can run code and are never loaded" in err
    (tmp_path / "model.safetensors").write_bytes(b"short")
    assert "model.safetensors cannot be read" in command("import", "hf", str(tmp_path), str(tmp_path / "x"))[2]
    save_file({"transformer.wte.weight": torch.zeros(300, 64)}, tmp_path / "model.safetensors")
    assert "lacks 27 of 28 tensors" in command("import", "hf", str(tmp_path), str(tmp_path / "x"))[2]
    (tmp_path / "model.safetensors.index.json").write_text("{}")
    assert "index.json cannot be read" in command("import", "hf", str(tmp_path), str(tmp_path / "x"))[2]


def test_the_json_and_a_model_without_a_tokenizer(tmp_path: Path, tokenizer: Path, command: Command) -> None:
    export_checkpoint(checkpoint_of(CASES["gpt2"], tmp_path / "run", tokenizer), tmp_path / "hf", with_proof=False)
    (tmp_path / "hf" / "tokenizer.json").unlink()
    code, out, err = command("import", "hf", str(tmp_path / "hf"), str(tmp_path / "new"), "--json")
    assert code == 0, err
    assert json.loads(out)["model"]["num_layers"] == 2
    assert load_recipe(str(tmp_path / "new" / "recipe.yaml")).recipe is not None
    code, out, _ = command("import", "hf", str(tmp_path / "hf"), str(tmp_path / "newer"))
    assert "no tokenizer" in out
