"""`bloomery inspect checkpoint`: contents, hashes, and the state of every checkpoint of a run."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from bloomery.base.errors import DataError
from bloomery.base.ranks import Piece
from bloomery.checkpoint.folder import find_checkpoint
from bloomery.checkpoint.inspect import list_checkpoints
from bloomery.checkpoint.load import read_checkpoint
from bloomery.checkpoint.save import save_checkpoint
from checkpoints import change_manifest, flip_bit, tensors_of
from conftest import Workshop
from threads_as_ranks import together

Command = Callable[..., tuple[int, str, str]]
SHORT = ("lr.decay=null", "lr.warmup=1 steps", "checkpoint.phases=[{every: 2 steps}]")


@pytest.fixture
def run(workshop: Workshop) -> Path:
    return workshop.train("train.for=4 steps", *SHORT)


def test_the_contents_are_told(run: Path, command: Command) -> None:
    code, out, err = command("inspect", "checkpoint", str(run), "--verify")
    assert code == 0, err
    lines = [" ".join(line.split()) for line in out.splitlines()]
    assert lines[0] == f"folder {run}/checkpoints/step-00000004"
    for shown in ("step 4", "consumed_samples 32", "consumed_tokens 512", "ranks 1", "layout.zero 1", "verified True"):
        assert shown in lines
    assert "groups.model.tensors 28" in lines
    assert any(line.startswith("state.json ") for line in lines)
    facts = json.loads(command("inspect", "checkpoint", str(run), "--json")[1])
    assert facts["groups"]["optimizer"]["elements"] == 2 * facts["groups"]["model"]["elements"] + 1
    names = list(facts["tensors"])
    assert names[0].startswith("model.embed")
    assert names.index("model.layers.1.mlp.up.weight") < names.index("model.final_norm.weight") < len(names) / 2


def test_a_flipped_bit_is_found_only_by_its_hash(run: Path, command: Command) -> None:
    file = next((run / "checkpoints" / "step-00000002").glob("tensors-*.safetensors"))
    content = bytearray(file.read_bytes())
    content[-3] ^= 1
    file.write_bytes(content)
    checkpoint = str(file.parent)
    assert command("inspect", "checkpoint", checkpoint)[0] == 0
    code, _, err = command("inspect", "checkpoint", checkpoint, "--verify")
    assert code == 3
    assert f"{file.name} has been changed since it was saved" in err
    assert [one.state for one in list_checkpoints(run)] == ["complete", "complete"]
    assert [one.state for one in list_checkpoints(run, check_hashes=True)] == ["damaged", "complete"]


def test_the_list_says_the_state_of_each(run: Path, command: Command) -> None:
    root = run / "checkpoints"
    for number in (6, 8, 10, 12, 14):
        shutil.copytree(root / "step-00000004", root / f"step-{number:08d}")
        change_manifest(root / f"step-{number:08d}", step=number)
    (root / "step-00000006" / "manifest.json").unlink()
    (root / "step-00000008" / "state.json").unlink()
    (root / "step-00000010" / "state.json").write_text("{}")
    (root / "retired").mkdir()
    (root / "step-00000012").rename(root / "retired" / "step-00000012")
    (root / "step-00000014").rename(root / "damaged-step-00000014")
    shutil.copytree(root / "step-00000004", root / ".step-00000016.tmp")
    shutil.copytree(root / "step-00000004", root / "step-00000018")
    (root / "step-00000018" / "manifest.json").write_text("{}")
    code, out, err = command("inspect", "checkpoint", str(run), "--list")
    assert code == 0, err
    rows = {line.split()[0]: line for line in out.splitlines()[1:]}
    assert {name: row.split()[1] for name, row in rows.items()} == {
        "step-00000002": "complete",
        "step-00000004": "complete",
        "step-00000006": "damaged",
        "step-00000008": "damaged",
        "step-00000010": "damaged",
        "retired/step-00000012": "retired",
        "damaged-step-00000014": "damaged",
        ".step-00000016.tmp": "debris",
        "step-00000018": "damaged",
    }
    assert rows["step-00000004"].endswith("latest")
    assert "state.json is missing" in rows["step-00000008"]
    assert "bytes instead of" in rows["step-00000010"]
    assert len(json.loads(command("inspect", "checkpoint", str(run), "--list", "--json")[1])) == 9
    assert list_checkpoints(root / "step-00000004") == list_checkpoints(root) == list_checkpoints(run)


def saved(root: Path, **tensors: torch.Tensor) -> Path:
    recipe = (
        "name: x\nmodel: {family: gpt2, num_layers: 1, hidden_size: 8, num_heads: 1, seq_length: 8, vocab_size: 8}\n"
    )
    recipe += "batch: {micro_batch_size: 1, global_batch_size: 1}\nlr: {peak: 1.0}\ntrain: {for: 1 steps}\n"
    pieces = {f"model.{name}": Piece.whole(tensor) for name, tensor in tensors.items()}
    return save_checkpoint(root, step=1, pieces=pieces, state={"step": 1, "consumed_samples": 1}, recipe_yaml=recipe)


def test_a_checkpoint_of_many_ranks_is_read_whole(tmp_path: Path) -> None:
    whole = torch.arange(24.0).reshape(4, 6)

    def save(ranks: object) -> Path:
        rank = ranks.rank  # type: ignore[attr-defined]
        piece = Piece(whole[:, rank * 2 : rank * 2 + 2], (4, 6), (0, rank * 2))
        count = Piece(torch.tensor(5.0), (), (), owned=rank == 0)
        text = (one / "recipe.yaml").read_text()
        state = {"step": 1, "consumed_samples": 1}
        pieces = {"model.w": piece, "model.n": count}
        return save_checkpoint(tmp_path / "many", step=1, pieces=pieces, state=state, recipe_yaml=text, ranks=ranks)  # type: ignore[arg-type]

    one = saved(tmp_path / "one", w=whole, n=torch.tensor(5.0))
    many = together(3, save)[0]
    reader = read_checkpoint(many, tensors=False)
    assert torch.equal(reader.read("model.w"), whole)
    with pytest.raises(DataError, match=r"model\.x is not in the checkpoint"):
        reader.read("model.x")
    assert torch.equal(tensors_of(many)["model.w"], whole)


def test_where_there_is_no_checkpoint(tmp_path: Path, command: Command) -> None:
    code, _, err = command("inspect", "checkpoint", str(tmp_path), "--list")
    assert code == 3
    assert "there are no checkpoints at" in err
    assert command("inspect", "checkpoint", str(tmp_path))[0] == 3


def test_facts_of_a_checkpoint_have_lines_of_their_own(run: Path, command: Command) -> None:
    change_manifest(run / "checkpoints" / "step-00000004", validation={"step": 4, "loss": 2.5}, tokenizer="abcd")
    lines = [" ".join(line.split()) for line in command("inspect", "checkpoint", str(run))[1].splitlines()]
    for shown in ("format 2", "validation.loss 2.5", "validation.step 4", "tokenizer abcd"):
        assert shown in lines
    facts = json.loads(command("inspect", "checkpoint", str(run), "--json")[1])
    assert set(facts["versions"]) == {"bloomery", "torch"}
    assert facts["validation"] == {"step": 4, "loss": 2.5}


def test_every_flipped_bit_of_a_header_is_one_clear_message(tmp_path: Path) -> None:
    folder = saved(tmp_path, w=torch.ones(2))
    file = folder / "tensors-00000.safetensors"
    whole = file.read_bytes()
    refused = 0
    for bit in range(0, 8 * (len(whole) - 8), 3):
        flip_bit(file, bit)
        try:
            read_checkpoint(folder, tensors=False).read("model.w")
        except DataError:
            refused += 1
        file.write_bytes(whole)
    assert refused > 1.3 * len(whole)


@pytest.mark.parametrize("name", ["state.json", "index.json", "recipe.yaml"])
def test_looking_never_trusts_a_small_file_that_was_changed(run: Path, command: Command, name: str) -> None:
    flip_bit(run / "checkpoints" / "step-00000004" / name, 99)
    code, _, err = command("inspect", "checkpoint", str(run))
    assert code == 3
    assert f"{name} has been changed since it was saved" in err
    assert list_checkpoints(run)[1].reason == f"{name} has been changed since it was saved"


def test_the_fast_place_of_a_run_is_known_where_its_files_are_here(
    workshop: Workshop, command: Command, tmp_path: Path
) -> None:
    fast = tmp_path / "fast"
    run = workshop.train("train.exit_after=5 steps", f"checkpoint.local={{path: {fast}, every: 1 steps, keep: 2}}")
    shutil.rmtree(run / "checkpoints" / "step-00000005")
    assert find_checkpoint(run) == run / "checkpoints-local" / "step-00000005"
    assert f" {run}/checkpoints-local/step-0000000" in command("inspect", "checkpoint", str(run), "--verify")[1]
    listed = {one.name: one for one in list_checkpoints(run, check_hashes=True)}
    assert listed["checkpoints-local/step-00000005"].state == "complete"
    assert listed["checkpoints-local/step-00000005"].is_latest
    save_checkpoint(run / "checkpoints", step=5, pieces={}, state={}, recipe_yaml="")
    assert find_checkpoint(run) == run / "checkpoints" / "step-00000005"  # of one step, the durable one
    shutil.rmtree(run / "checkpoints" / "step-00000005")
    fast.rename(tmp_path / "of-another-node")
    with pytest.raises(DataError, match="there is no complete checkpoint"):
        find_checkpoint(run)
    (*_, newest) = list_checkpoints(run, check_hashes=True)
    assert (newest.state, newest.reason) == ("complete", "1 of its files are on other nodes and were not checked")
