"""Import from Hugging Face: tensor by tensor, every refusal in one message, and nothing left behind by one."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from bloomery.interop.hf.configs import hf_config
from bloomery.model.transformer import build_model
from checkpoints import tensors_of
from export_samples import small_tokenizer
from hf_samples import Command, change, hf_folder, in_shards, their_state, write_index
from model_samples import small_config, small_model
from monitor_samples import mounted

# ---------------------------------------------------------------- one tensor at a time


def peak_bytes() -> int:
    """Of this process since the last call."""
    status = Path("/proc/self/status").read_text()
    Path("/proc/self/clear_refs").write_text("5")
    return int(status.split("VmHWM:")[1].split()[0]) * 1024


def test_an_import_holds_a_few_tensors_and_not_the_model(tmp_path: Path, command: Command) -> None:
    """Weights of 59 MB as fp32 need little more than weights of 8 MB, apart from the mapped file of half that size."""
    peaks = {}
    for layers in (2, 14):
        config = small_config("llama", num_layers=layers, hidden_size=256, num_heads=4, ffn_hidden_size=1024)
        folder = tmp_path / f"hf-{layers}"
        folder.mkdir()
        shapes = {
            name: tensor.shape
            for name, tensor in their_state(dict(build_model(config).named_parameters()), config).items()
        }
        places = {name: f"model-{i // 50 + 1:05d}-of-00009.safetensors" for i, name in enumerate(shapes)}
        for file in set(places.values()):
            names = [name for name in shapes if places[name] == file]
            save_file({name: torch.full(shapes[name], 0.5, dtype=torch.bfloat16) for name in names}, folder / file)
        write_index(folder, places)
        (folder / "config.json").write_text(json.dumps(hf_config(config)))
        peak_bytes()
        before = peak_bytes()
        assert command("import", "hf", str(folder), str(tmp_path / f"run-{layers}"), "--no-proof")[0] == 0
        peaks[layers] = peak_bytes() - before
    model_bytes = 4 * sum(shape.numel() for shape in shapes.values())
    assert model_bytes > 55e6
    assert peaks[14] - peaks[2] < model_bytes * 2 / 3, peaks
    made = tensors_of(tmp_path / "run-14")
    assert all(bool((tensor == 0.5).all()) for name, tensor in made.items() if name.startswith("model.layers."))


@pytest.mark.parametrize("family", ["gpt2", "bert"])
def test_shards_and_one_file_give_the_same_checkpoint(family: str, tmp_path: Path, command: Command) -> None:
    config = small_config(family, vocab_size=300)  # type: ignore[arg-type]
    hf_folder(tmp_path / "one", config)
    hf_folder(tmp_path / "many", config)
    in_shards(tmp_path / "many", 5)
    for name in ("one", "many"):
        code, _, err = command("import", "hf", str(tmp_path / name), str(tmp_path / f"run-{name}"), "--no-proof")
        assert code == 0, err
    one, many = (next((tmp_path / f"run-{name}").rglob("tensors-*")) for name in ("one", "many"))
    assert one.read_bytes() == many.read_bytes()
    weights = tensors_of(tmp_path / "run-one")
    for name, parameter in small_model(config).named_parameters():
        if "tokens" not in name and "head" not in name:  # those have padded rows
            assert torch.equal(weights[f"model.{name}"], parameter.detach()), name


def test_an_import_says_where_it_came_from(tmp_path: Path, command: Command) -> None:
    folder = hf_folder(tmp_path / "hf")
    command("import", "hf", str(folder), str(tmp_path / "run"))
    origin = json.loads((tmp_path / "run/checkpoints/step-00000000/state.json").read_text())["imported_from"]
    assert origin["folder"] == str(folder)
    assert len(origin["sha256 of its config.json"]) == 64


# ---------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("family", "changes", "message"),
    [
        ("llama", {"auto_map": {"AutoModel": "x.Y"}}, "auto_map is {'AutoModel': 'x.Y'}"),
        ("llama", {"architectures": ["LlamaForSequenceClassification"]}, "A llama model here is one of"),
        ("llama", {"attention_dropout": 0.1}, "attention_dropout is 0.1"),
        (
            "llama",
            {"num_hidden_layers": 10**7},
            "num_hidden_layers is 10000000. It must be less than or equal to 10000",
        ),
        ("llama", {"rope_scaling": "linear"}, "rope_scaling is 'linear'"),
        ("llama", {"rope_scaling": {"type": "yarn"}}, "rope_scaling is of the type 'yarn'"),
        ("llama", {"rope_parameters": {"rope_theta": "x"}}, "rope_theta is 'x'"),
        ("llama", {"num_key_value_heads": 3}, "model.num_kv_heads is 3"),
        ("llama", {"tie_word_embeddings": "no"}, "tie_word_embeddings is 'no'"),
        ("gpt2", {"n_embd": None}, "n_embd is missing"),
        ("gpt2", {"n_layer": "two"}, "n_layer is 'two'"),
        ("gpt2", {"n_head": 5}, "model.hidden_size is 64"),
        ("gpt2", {"model_type": ["gpt2"]}, "model_type is ['gpt2']. There are maps for gpt2, bloom, llama, qwen2"),
        ("gpt2", {"resid_pdrop": 3}, "dropouts differ"),
        ("bloom", {"slow_but_exact": True}, "slow_but_exact is True. Sums are not sliced; set it to false"),
    ],
)
def test_what_would_compute_something_else_is_refused(
    family: Any, changes: dict[str, Any], message: str, tmp_path: Path, command: Command
) -> None:
    folder = hf_folder(tmp_path / "hf", small_config(family, vocab_size=300), **changes)
    code, _, err = command("import", "hf", str(folder), str(tmp_path / "run"))
    assert code in (2, 3)
    assert message in err
    assert "Traceback" not in err
    assert not (tmp_path / "run").exists()


def test_a_bloom_that_was_sliced_for_its_training_is_imported(tmp_path: Path, command: Command) -> None:
    changes = {"slow_but_exact": False, "pretraining_tp": 4}
    folder = hf_folder(tmp_path / "hf", small_config("bloom", vocab_size=300), **changes)
    assert command("import", "hf", str(folder), str(tmp_path / "run"))[0] == 0


def refused(command: Command, folder: Path, output: Path) -> str:
    """The message; nothing was made."""
    code, out, err = command("import", "hf", str(folder), str(output))
    assert code == 3, out + err
    assert "Traceback" not in err
    assert not output.exists(), list(output.rglob("*"))
    return err


CHANGES: dict[str, tuple[dict[str, torch.Tensor | None], str]] = {
    "missing": ({"transformer__wpe__weight": None}, "lacks 1 of 28 tensors: transformer.wpe.weight"),
    "shape": ({"transformer__wpe__weight": torch.zeros(3, 4)}, "transformer.wpe.weight is (3, 4) instead of (32, 64)"),
    "extra": (
        {"transformer__h__0__attn__q__bias": torch.zeros(4)},
        "1 tensors have no place in a gpt2 model: transformer.h.0.attn.q.bias",
    ),
    "whole": (
        {"transformer__wpe__weight": torch.zeros(32, 64).int()},
        "1 tensors are of another kind: transformer.wpe.weight is I32",
    ),
    "fp8": ({"transformer__wpe__weight": torch.zeros(32, 64).to(torch.float8_e4m3fn)}, "is F8_E4M3"),
}


@pytest.mark.parametrize(("tensors", "message"), CHANGES.values(), ids=CHANGES.keys())
def test_weights_that_do_not_fit_are_named_before_anything_is_written(
    tensors: dict[str, torch.Tensor | None], message: str, tmp_path: Path, command: Command
) -> None:
    folder = hf_folder(tmp_path / "hf")
    change(folder, **tensors)
    assert message in refused(command, folder, tmp_path / "run")


def test_constants_and_tied_copies_are_passed_over(tmp_path: Path, command: Command) -> None:
    folder = hf_folder(tmp_path / "hf")
    copies = {"lm_head__weight": load_file(folder / "model.safetensors")["transformer.wte.weight"].clone()}
    mask = {f"transformer__h__{n}__attn__bias": torch.ones(1, 1, 64, 64, dtype=torch.bool) for n in (0, 1)}
    change(folder, **copies, **mask)
    assert command("import", "hf", str(folder), str(tmp_path / "run"))[0] == 0


@pytest.mark.parametrize(
    ("places", "message"),
    [
        ({}, "its weight_map is empty"),
        ({"a": "../../etc/passwd"}, "'../../etc/passwd' is no name of a file in this folder"),
        ({"a": 3}, "3 is no name of a file"),
        ({"a": "model-9.safetensors"}, "model-9.safetensors cannot be read"),
    ],
)
def test_an_index_that_cannot_be_is_refused(places: Any, message: str, tmp_path: Path, command: Command) -> None:
    folder = hf_folder(tmp_path / "hf")
    write_index(folder, places)
    assert message in refused(command, folder, tmp_path / "run")


def test_shards_that_do_not_agree_with_the_index_are_refused(tmp_path: Path, command: Command) -> None:
    folder = hf_folder(tmp_path / "hf")
    places = in_shards(folder, 2)
    first, second = sorted(set(places.values()))
    write_index(
        folder, {**places, "transformer.wpe.weight": {first: second, second: first}[places["transformer.wpe.weight"]]}
    )
    assert "1 tensors are not in the file that model.safetensors.index.json names" in refused(
        command, folder, tmp_path / "run"
    )
    write_index(folder, places)
    (folder / second).write_bytes((folder / first).read_bytes())
    assert f"is in {first} and in {second}" in refused(command, folder, tmp_path / "run")
    content = (folder / first).read_bytes()
    (folder / second).write_bytes(content[:-7])
    assert f"{second} cannot be read" in refused(command, folder, tmp_path / "run")


@pytest.mark.parametrize(
    "header",
    [
        b"{",
        b'{"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}}',
        b'{"a": {"dtype": "F32", "shape": [-1], "data_offsets": [0, 4]}}',
        b'{"a": {"dtype": "F32", "shape": [1], "data_offsets": [9, 13]}}',
        b'{"a": {"shape": [1], "data_offsets": [0, 4]}}',
    ],
)
def test_a_header_that_cannot_be_is_refused(header: bytes, tmp_path: Path, command: Command) -> None:
    folder = hf_folder(tmp_path / "hf")
    (folder / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(4))
    told = refused(command, folder, tmp_path / "run")
    assert "model.safetensors cannot be read" in told
    assert "Copy the folder again" in told


def test_a_folder_has_transformers_read_its_model_and_nothing_else(
    tmp_path: Path, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not the code of an implementation, a table of millions of labels, or a generation_config.json."""
    transformers = pytest.importorskip("transformers")
    folder = hf_folder(tmp_path / "hf", _attn_implementation="someone/kernel", num_labels=10**7)
    begun = time.monotonic()
    (folder / "generation_config.json").write_text('{"_attn_implementation": "someone/kernel"}')
    monkeypatch.setattr(transformers.GenerationConfig, "from_pretrained", lambda *_, **__: pytest.fail("it was read"))
    code, out, _ = command("import", "hf", str(folder), str(tmp_path / "run"))
    assert code == 0
    assert "proof: training loss" in out
    assert time.monotonic() - begun < 30


def test_a_full_disk_leaves_no_run(tmp_path: Path, command: Command) -> None:
    folder = hf_folder(tmp_path / "hf")
    small_tokenizer(folder)
    with mounted(tmp_path / "small", "size=600k") as small:
        code, _, err = command("import", "hf", str(folder), str(small / "run"))
        assert code == 5
        assert "disk full" in err
        assert "or name another OUT" in err
        assert list(small.iterdir()) == []


def contents(folder: Path) -> dict[str, bytes | None]:
    return {str(path): path.read_bytes() if path.is_file() else None for path in folder.rglob("*")}


@pytest.mark.parametrize("name", ["tokenizer/tokenizer.json", "notes.txt"])
def test_an_output_that_holds_something_is_left_alone(name: str, tmp_path: Path, command: Command) -> None:
    folder = small_tokenizer(hf_folder(tmp_path / "hf"))
    mine = tmp_path / "run" / name
    mine.parent.mkdir(parents=True)
    mine.write_text("mine")
    before = contents(tmp_path / "run")
    code, _, err = command("import", "hf", str(folder), str(tmp_path / "run"))
    assert code == 5
    assert f"{tmp_path / 'run'} is not empty: it holds {name.split('/')[0]}. An import is the beginning of a run" in err
    assert "Name another folder, or empty this one." in err
    assert contents(tmp_path / "run") == before


@pytest.mark.parametrize("failing", ["save_checkpoint", "write_atomically", "move_all"])
def test_an_import_that_fails_removes_what_it_wrote_and_nothing_else(
    failing: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: Command
) -> None:
    from bloomery.base.errors import Problem, StorageError
    from bloomery.interop.hf import importer

    real = getattr(importer, failing)

    def broken(place: Path, *words: Any, **others: Any) -> None:
        """The tokenizer is copied, but neither checkpoint nor recipe can be written."""
        if failing == "write_atomically" and place.name != "recipe.yaml":
            return real(place, *words, **others)
        raise StorageError(Problem("the disk is gone"))

    monkeypatch.setattr(importer, failing, broken)
    folder = small_tokenizer(hf_folder(tmp_path / "hf"))
    (tmp_path / "run" / ".git").mkdir(parents=True)
    before = contents(tmp_path / "run")
    for output in ("run", "new"):
        code, _, err = command("import", "hf", str(folder), str(tmp_path / output))
        assert code == 5
        assert "the disk is gone" in err
    assert contents(tmp_path / "run") == before
    assert not (tmp_path / "new").exists()


def test_what_appears_in_the_output_meanwhile_is_not_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: Command
) -> None:
    from bloomery.interop.hf import importer

    real = importer.save_checkpoint

    def slow(*words: Any, **others: Any) -> Path:
        (tmp_path / "run" / "recipe.yaml").write_text("mine")
        return real(*words, **others)

    monkeypatch.setattr(importer, "save_checkpoint", slow)
    code, _, err = command("import", "hf", str(hf_folder(tmp_path / "hf")), str(tmp_path / "run"))
    assert code == 5
    assert "it holds recipe.yaml" in err
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["recipe.yaml"]
    assert (tmp_path / "run" / "recipe.yaml").read_text() == "mine"


def test_a_tokenizer_that_cannot_be_used_is_refused(tmp_path: Path, command: Command) -> None:
    folder = hf_folder(tmp_path / "hf")
    (folder / "tokenizer.json").write_text("{}")
    told = refused(command, folder, tmp_path / "run")
    assert "the tokenizer of" in told
    assert "or import a copy of the folder without it" in told
    folder = hf_folder(tmp_path / "few", small_config("gpt2", vocab_size=200))
    small_tokenizer(folder)
    assert "entries but model.vocab_size is 200. Every token needs a row" in refused(command, folder, tmp_path / "run")


def test_an_output_that_is_a_file_is_told(tmp_path: Path, command: Command) -> None:
    (tmp_path / "file").write_text("")
    code, _, err = command("import", "hf", str(hf_folder(tmp_path / "hf")), str(tmp_path / "file"))
    assert code == 5
    assert "move it away, or choose another OUT" in err
