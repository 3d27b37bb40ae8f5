"""An export that meets trouble: one clear message, and the folder is as it was."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from bloomery.checkpoint.load import CheckpointReader
from bloomery.interop.hf import export as exporting
from bloomery.interop.hf.export import export_checkpoint
from export_samples import CASES, Command, checkpoint_of, small_tokenizer, weights_of
from monitor_samples import mounted


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture
def checkpoint(tmp_path: Path, tokenizer: Path) -> Path:
    return checkpoint_of(CASES["gpt2"], tmp_path / "run", tokenizer)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def refused(command: Command, checkpoint: Path, output: Path, *options: str, code: int) -> str:
    before = {path: path.read_bytes() for path in output.rglob("*") if path.is_file()} if output.is_dir() else None
    ended, out, err = command("export", str(checkpoint), str(output), "--no-proof", *options)
    assert ended == code, out + err
    assert "Traceback" not in err
    assert len(err.splitlines()) <= 3, err
    after = {path: path.read_bytes() for path in output.rglob("*") if path.is_file()} if output.is_dir() else None
    assert after == before
    return err


def test_a_folder_that_is_somebodys_is_not_written_to(checkpoint: Path, tmp_path: Path, command: Command) -> None:
    project = tmp_path / "project"
    project.mkdir()
    (project / "README.md").write_text("mine")
    told = refused(command, checkpoint, project, code=5)
    assert f"{project} is not empty: it holds README.md. An export replaces an older export" in told
    assert "Name another folder, or empty this one." in told
    told = refused(command, checkpoint, checkpoint, code=5)
    assert "it holds index.json, manifest.json" in told
    (tmp_path / "file").write_text("x")
    assert "there is a file where a folder is needed" in refused(command, checkpoint, tmp_path / "file", code=5).lower()


def test_an_older_export_is_replaced_and_what_was_added_to_it_stays(
    checkpoint: Path, tmp_path: Path, command: Command
) -> None:
    command("export", str(checkpoint), str(tmp_path / "hf"), "--no-proof", "--shard-size", "10KB")
    (tmp_path / "hf" / "LICENSE").write_text("of the user")
    (tmp_path / "hf" / ".git").mkdir()
    (tmp_path / "hf" / ".draft-dead.tmp").mkdir()
    code, _, err = command("export", str(checkpoint), str(tmp_path / "hf"), "--no-proof")
    assert code == 0, err
    assert names(tmp_path / "hf") == [
        ".git", "LICENSE", "README.md", "config.json", "export-proof.json", "generation_config.json",
        "model.safetensors", "tokenizer.json", "tokenizer_config.json",
    ]  # fmt: skip


def test_a_full_disk_leaves_nothing_or_the_older_export(checkpoint: Path, tmp_path: Path, command: Command) -> None:
    with mounted(tmp_path / "small", "size=300k") as small:
        told = refused(command, checkpoint, small / "hf", code=5)
        assert "No space left on device (ENOSPC)" in told
        assert "or choose another folder" in told
        assert names(small) == []
        told = refused(command, checkpoint, small, code=5)
        assert names(small) == []
    with mounted(tmp_path / "larger", "size=700k") as small:
        assert command("export", str(checkpoint), str(small / "hf"), "--no-proof", "--dtype", "bf16")[0] == 0
        refused(command, checkpoint, small / "hf", "--dtype", "fp32", code=5)
        assert all(tensor.dtype == torch.bfloat16 for tensor in weights_of(small / "hf").values())


def test_a_damaged_checkpoint_is_refused_before_anything_is_written(
    checkpoint: Path, tmp_path: Path, command: Command
) -> None:
    tensors = checkpoint / "tensors-00000.safetensors"
    content = bytearray(tensors.read_bytes())
    content[-5] ^= 1
    tensors.write_bytes(content)
    told = refused(command, checkpoint, tmp_path / "hf", code=3)
    assert "tensors-00000.safetensors has been changed since it was saved" in told
    assert not (tmp_path / "hf").exists()
    tensors.write_bytes(content[:-100])
    assert "bytes instead of" in refused(command, checkpoint, tmp_path / "hf", code=3)
    (checkpoint / "index.json").unlink()
    assert "index.json is missing" in refused(command, checkpoint, tmp_path / "hf", code=3)
    shutil.rmtree(checkpoint)
    assert "there is no complete checkpoint at" in refused(command, checkpoint, tmp_path / "hf", code=3)


@pytest.mark.parametrize("error", [KeyboardInterrupt(), OSError(5, "I/O")])
def test_what_ends_an_export_half_way_leaves_the_folder_as_it_was(
    error: BaseException, checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read, count = CheckpointReader.read, 0

    def breaking(self: Any, name: str) -> torch.Tensor:
        nonlocal count
        count += 1
        if count == 10:
            raise error
        return read(self, name)

    monkeypatch.setattr(exporting.CheckpointReader, "read", breaking)
    with pytest.raises(BaseException):  # noqa: B017, PT011 - whichever it was
        export_checkpoint(checkpoint, tmp_path / "deep" / "hf", with_proof=False)
    assert count == 10
    assert not (tmp_path / "deep" / "hf").exists()


def test_transformers_that_fail_are_told_in_a_sentence(
    checkpoint: Path, tmp_path: Path, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(*_: object) -> None:
        raise RuntimeError("no such kernel")

    monkeypatch.setattr(exporting, "prove", failing)
    code, _, err = command("export", str(checkpoint), str(tmp_path / "hf"))
    assert code == 3
    assert "transformers cannot load or run the export: RuntimeError: no such kernel" in err
    assert not (tmp_path / "hf").exists()


@pytest.mark.parametrize("text", ["0.001KB", "1.5GiB"])
def test_any_size_above_nothing_is_one(text: str, checkpoint: Path, tmp_path: Path, command: Command) -> None:
    code, out, err = command("export", str(checkpoint), str(tmp_path / "hf"), "--no-proof", "--shard-size", text)
    assert code == 0, err
    assert len(weights_of(tmp_path / "hf")) == 28
    assert (" in 28 files" in out) == (text == "0.001KB")


@pytest.mark.parametrize("text", ["", "-1GB", "0.0001B", "1e9", "9" * 400, "inf", "5GBB"])
def test_a_size_that_is_none_is_refused(text: str, tmp_path: Path, command: Command) -> None:
    code, _, err = command("export", "a", str(tmp_path / "b"), f"--shard-size={text}")
    assert code == 2
    assert "is not a size: write for example 5GB" in err


def test_a_tokenizer_that_is_not_there_or_does_not_fit_is_named(
    checkpoint: Path, tmp_path: Path, command: Command
) -> None:
    told = refused(command, checkpoint, tmp_path / "hf", "--tokenizer", str(tmp_path / "nowhere"), code=3)
    assert str(tmp_path / "nowhere") in told
    assert not (tmp_path / "hf").exists()


def test_a_model_that_has_diverged_is_named_with_its_first_tensor(
    checkpoint: Path, tmp_path: Path, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = CheckpointReader.read

    def broken(self: CheckpointReader, name: str, *more: Any, **others: Any) -> torch.Tensor:
        tensor = read(self, name, *more, **others)
        return torch.full_like(tensor, torch.nan) if name.startswith("model.layers.1.mlp.") else tensor

    monkeypatch.setattr(CheckpointReader, "read", broken)
    code, _, err = command("export", str(checkpoint), str(tmp_path / "hf"))
    assert code == 3
    assert "the checkpoint holds values that are not finite" in err
    assert "in transformer.h.1.mlp.c_fc.weight" in err
    assert "Export an earlier checkpoint" in err
    assert "bug" not in err
    assert not (tmp_path / "hf").exists()


def test_finite_weights_with_logits_that_are_not_are_no_bug(
    tokenizer: Path, tmp_path: Path, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    from bloomery.interop.hf import proof

    checkpoint = checkpoint_of(CASES["gpt2"], tmp_path / "run", tokenizer)
    ours = proof._Both.ours
    monkeypatch.setattr(proof._Both, "ours", lambda *words: [logits * torch.inf for logits in ours(*words)])
    code, _, err = command("export", str(checkpoint), str(tmp_path / "hf"))
    assert code == 3
    assert "logits that are not finite, though its weights are" in err
    assert "bug" not in err
