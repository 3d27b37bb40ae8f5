"""A manifest that was changed, cut or copied: the checkpoint is put aside with the reason, the one before is used."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from bloomery.base.errors import DataError, Problem
from bloomery.base.ranks import Piece
from bloomery.checkpoint import folder as folders
from bloomery.checkpoint.folder import MANIFEST, parse_manifest, take_over
from bloomery.checkpoint.inspect import describe_checkpoint, list_checkpoints
from bloomery.checkpoint.retention import apply_retention
from bloomery.checkpoint.save import save_checkpoint
from bloomery.checkpoint.select import newest_good
from bloomery.config.recipe import KeepSection
from bloomery.train import setup as start
from checkpoints import change_manifest, chosen, damage, flip_bit
from conftest import Workshop
from threads_as_ranks import together

Command = Callable[..., tuple[int, str, str]]
SAVES = ("checkpoint.phases=[{every: 2 steps}]",)


def save(root: Path, step: int) -> Path:
    pieces = {"w": Piece.whole(torch.ones(3))}
    facts = {"tokenizer": "ab" * 32, "time": 17.25, "validation": {"step": step, "loss": float("nan")}}
    return save_checkpoint(root, step=step, pieces=pieces, state={"step": step}, recipe_yaml="name: x\n", facts=facts)


def without_hash(folder: Path) -> None:
    """As earlier versions wrote it."""
    said = json.loads((folder / MANIFEST).read_text())
    del said["sha256"]
    (folder / MANIFEST).write_text(json.dumps(said, indent=1))


def test_every_flipped_bit_of_a_manifest_is_noticed_or_harmless(tmp_path: Path) -> None:
    older, newer = save(tmp_path, 1), save(tmp_path, 2)
    whole = (newer / MANIFEST).read_bytes()
    said = parse_manifest(whole)
    refused = []
    for bit in range(8 * len(whole)):
        content = bytearray(whole)
        content[bit // 8] ^= 1 << bit % 8
        try:
            now = parse_manifest(bytes(content))
            assert {key: now[key] for key in said if key != "sha256"} == {k: said[k] for k in said if k != "sha256"}
        except ValueError:
            refused.append(bit)
    for bit in random.Random(5).sample(refused, 10):  # what is chosen follows from that
        flip_bit(newer / MANIFEST, bit)
        choice = newest_good([tmp_path])
        assert choice.checkpoint.folder == older
        assert choice.damaged[newer]
        (newer / MANIFEST).write_bytes(whole)


def test_flipped_bits_of_a_manifest_without_hash_never_end_in_a_traceback(tmp_path: Path) -> None:
    older, newer = save(tmp_path, 1), save(tmp_path, 2)
    without_hash(newer)
    assert chosen([tmp_path]) == newer
    whole = (newer / MANIFEST).read_bytes()
    for bit in random.Random(5).sample(range(8 * len(whole)), 30):
        flip_bit(newer / MANIFEST, bit)
        assert chosen([tmp_path]) in (older, newer)
        apply_retention(take_over(tmp_path), KeepSection(last=2, best=1))
        list_checkpoints(tmp_path)
        (newer / MANIFEST).write_bytes(whole)


@pytest.mark.parametrize("name", ["sha256", "bytes", "format"])
def test_all_ranks_leave_a_flipped_manifest_aside(tmp_path: Path, name: str) -> None:
    older, newer = save(tmp_path, 1), save(tmp_path, 2)
    (newer / MANIFEST).write_text((newer / MANIFEST).read_text().replace(f'"{name}":', f'"{name}q":', 1))
    for choice in together(2, lambda ranks: newest_good([tmp_path], ranks=ranks)):
        assert choice.checkpoint.folder == older
        assert choice.damaged == {newer: ["manifest.json cannot be used: it has been changed since it was saved"]}


def test_all_that_a_checkpoint_needs_must_be_listed(tmp_path: Path) -> None:
    folder = save(tmp_path, 1)
    files = json.loads((folder / MANIFEST).read_text())["files"]
    for name in files:
        change_manifest(folder, files={other: facts for other, facts in files.items() if other != name})
        assert f"does not list {name}" in damage(folder)[0]
    change_manifest(folder, files={})
    assert "does not list index.json, recipe.yaml, state.json" in damage(folder)[0]
    change_manifest(folder, files=files)
    assert not damage(folder)


def test_a_start_puts_a_flipped_manifest_aside_and_tells_it(workshop: Workshop, command: Command) -> None:
    run = workshop.train("train.exit_after=4 steps", *SAVES)
    manifest = run / "checkpoints" / "step-00000004" / MANIFEST
    manifest.write_text(manifest.read_text().replace('"bytes"', '"bytms"', 1))
    looks = [["inspect", "checkpoint", str(run), "--verify"], ["inspect", "checkpoint", str(run)]]
    for words in (*looks, ["export", str(run), "hf"]):
        code, _, err = command(*words)
        assert code == 3
        assert "manifest.json cannot be used: it has been changed since it was saved" in err
    workshop.train("train.exit_after=6 steps", *SAVES)
    (event,) = workshop.events(run, "damaged")
    assert event["folder"] == "step-00000004"
    assert workshop.events(run, "start")[-1]["resumed_from"] == "step-00000002"
    assert (run / "checkpoints" / "damaged-step-00000004").is_dir()


def test_a_copy_under_the_name_of_another_step_is_damaged_and_nothing_good_moves(
    workshop: Workshop, command: Command
) -> None:
    run = workshop.train("train.exit_after=4 steps", *SAVES)
    root = run / "checkpoints"
    shutil.copytree(root / "step-00000002", root / "step-00000012")
    out = command("inspect", "checkpoint", str(run), "--list")[1]
    assert "damaged" in out.splitlines()[-1]
    assert "its manifest is of step 2" in out.splitlines()[-1]
    code, _, err = command("inspect", "checkpoint", str(run))
    assert code == 3
    assert "its manifest is of step 2" in err
    workshop.train("train.exit_after=6 steps", *SAVES)
    assert workshop.events(run, "start")[-1]["resumed_from"] == "step-00000004"
    assert not (root / "retired").exists()
    assert (root / "damaged-step-00000012").is_dir()


def test_a_start_that_cannot_load_leaves_every_checkpoint_where_it_was(
    workshop: Workshop, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = workshop.train("train.exit_after=4 steps", *SAVES)

    def fail(*_: object, **__: object) -> None:
        raise DataError(Problem("planted"))

    with monkeypatch.context() as planted:
        planted.setattr(start, "load_pieces", fail)
        workshop.train("train.exit_after=6 steps", *SAVES, start_from="2", code=3)
    assert workshop.events(run, "error")[-1]["text"].startswith("planted")
    assert [path.name for path in folders.complete_checkpoints(run / "checkpoints")] == [
        "step-00000002",
        "step-00000004",
    ]


@pytest.mark.parametrize("name", ["consumed_tokens", "time", "step"])
def test_no_number_of_a_manifest_is_below_zero(tmp_path: Path, name: str) -> None:
    folder = save(tmp_path, 1)
    change_manifest(folder, **{name: -1})
    assert damage(folder) == [f"manifest.json cannot be used: entries are missing or malformed: {name}"]


@pytest.mark.parametrize("content", [b"", b"[]", b"{}", b"\xff\xfe", b'{"format": 2, "files": [', b'{"format": "2"}'])
def test_looking_at_a_manifest_that_is_none_is_one_clear_message(tmp_path: Path, content: bytes) -> None:
    folder = save(tmp_path, 1)
    (folder / MANIFEST).write_bytes(content)
    with pytest.raises(DataError, match=r"manifest.json cannot be used"):
        describe_checkpoint(folder)
    assert [one.state for one in list_checkpoints(tmp_path)] == ["damaged"]
