"""The checkpoint's own format: any cutting loads into any other, bit by bit, and nothing less than a whole is saved."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from bloomery.base.errors import DataError, StorageError
from bloomery.base.ranks import ALONE, Piece
from bloomery.checkpoint import save as save_module
from bloomery.checkpoint.format import (
    DTYPES,
    Box,
    FileLayout,
    held_tensors,
    merge,
    raw_bytes,
    why_not_whole,
    write_file,
)
from bloomery.checkpoint.load import Checkpoint, load_pieces, read_checkpoint, read_index
from bloomery.checkpoint.save import save_checkpoint
from checkpoints import change_manifest, latest_checkpoint
from threads_as_ranks import together

WHOLE: dict[str, Tensor] = {
    "parts.matrix": torch.randn(37, 23),
    "parts.cube": torch.randn(5, 8, 6).to(torch.bfloat16),
    "parts.vector": torch.randn(1001),
    "optim.step": torch.tensor(17.0),
    "flags": torch.tensor([True, False, True]),
    "half": torch.randn(9, 3).to(torch.float16),
}


def cut(shape: tuple[int, ...], count: int, chance: random.Random) -> list[Box]:
    """The whole in at most `count` boxes, cut at random places."""
    boxes = [Box((0,) * len(shape), shape)]
    while len(boxes) < count:
        boxes.sort(key=lambda box: prod(box.size))
        box = boxes.pop()
        choices = [dimension for dimension, length in enumerate(box.size) if length > 1]
        if not choices:
            return [*boxes, box]
        along = chance.choice(choices)
        first = chance.randrange(1, box.size[along])
        for begin, length in ((0, first), (first, box.size[along] - first)):
            offset = tuple(o + begin * (d == along) for d, o in enumerate(box.offset))
            size = tuple(length if d == along else n for d, n in enumerate(box.size))
            boxes.append(Box(offset, size))
    return boxes


def cuttings(tensors: Mapping[str, Tensor], ranks: int, seed: int) -> list[dict[str, Piece]]:
    """What each rank holds: its box, a copy of another rank's that it does not own, or an empty one."""
    chance = random.Random(seed)
    held: list[dict[str, Piece]] = [{} for _ in range(ranks)]
    for name, whole in tensors.items():
        shape = tuple(whole.shape)
        boxes = cut(shape, chance.randint(1, ranks), chance)
        order = chance.sample(range(ranks), ranks)
        for place, rank in enumerate(order):
            if place < len(boxes) or chance.random() < 0.5:
                box = boxes[place % len(boxes)]
                part = whole[box.slices_of(Box((0,) * len(shape), shape))]
                held[rank][name] = Piece(part.clone(), shape, box.offset, owned=place < len(boxes))
            elif shape:
                held[rank][name] = Piece(whole.new_empty((0, *shape[1:])), shape, (0,) * len(shape), owned=True)
    return held


def save(root: Path, held: list[dict[str, Piece]], *, step: int = 3) -> list[Any]:
    return together(
        len(held),
        lambda ranks: save_checkpoint(
            root, step=step, pieces=held[ranks.rank], state={"step": step}, recipe_yaml="name: x\n", ranks=ranks
        ),
    )


def blank(held: list[dict[str, Piece]]) -> list[dict[str, Piece]]:
    """The same cutting, with other values."""
    return [{name: piece.with_tensor(torch.zeros_like(piece.tensor)) for name, piece in own.items()} for own in held]


def check(held: list[dict[str, Piece]], tensors: Mapping[str, Tensor] = WHOLE) -> None:
    for own in held:
        for name, piece in own.items():
            if not piece.tensor.numel():
                continue
            part = Box.of(piece).slices_of(Box((0,) * len(piece.shape), piece.shape))
            assert torch.equal(piece.tensor, tensors[name][part]), name


@pytest.mark.parametrize(("saved", "loaded"), [(1, 1), (1, 5), (4, 1), (3, 8), (8, 3), (12, 12)])
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_any_cutting_loads_into_any_other(tmp_path: Path, saved: int, loaded: int, seed: int) -> None:
    (folder, *others) = save(tmp_path, cuttings(WHOLE, saved, seed))
    assert set(others) <= {folder}
    read_checkpoint(folder)
    wanted = blank(cuttings(WHOLE, loaded, seed + 100))
    for own in wanted:
        load_pieces(read_checkpoint(folder, tensors=False), own)
    check(wanted)


def test_hundreds_of_pieces_load_like_one(tmp_path: Path) -> None:
    tensors = {"a": torch.randn(250, 3), "b": torch.randn(10, 50, 2)}
    held: list[dict[str, Piece]] = [{} for _ in range(250)]
    for rank in range(250):
        held[rank]["a"] = Piece(tensors["a"][rank : rank + 1], (250, 3), (rank, 0))
        row, column = rank // 25, 2 * (rank % 25)
        held[rank]["b"] = Piece(tensors["b"][row : row + 1, column : column + 2], (10, 50, 2), (row, column, 0))
    parts = []
    for rank, own in enumerate(held):
        name = f"tensors-{rank:05d}.safetensors"
        tensors_of_rank = {key: piece.tensor for key, piece in own.items()}
        layout = FileLayout.of(tensors_of_rank)
        write_file(tmp_path / name, layout, (raw_bytes(tensors_of_rank[key]) for key in layout.order))
        parts.append(held_tensors(own, name))
    for ranks in (1, 12):
        wanted = blank(cuttings(tensors, ranks, 5))
        for own in wanted:
            load_pieces(Checkpoint(tmp_path, {}, merge(parts)), own)
        check(wanted, tensors)


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES.keys())
def test_every_dtype_comes_back_bit_by_bit_and_safetensors_reads_the_file(tmp_path: Path, dtype: torch.dtype) -> None:
    values = torch.randint(0, 2, (6, 16), dtype=torch.uint8)
    values = values.to(torch.bool) if dtype == torch.bool else (values * 61).view(dtype)
    number = values[0, 0].clone()
    odd = torch.arange(3, dtype=torch.uint8)  # before the others in the mapping: alignment must not depend on order
    tensors = {"odd": odd, "t": values, "n": number}
    folder = save_checkpoint(
        tmp_path, step=1, pieces={name: Piece.whole(t) for name, t in tensors.items()}, state={}, recipe_yaml=""
    )
    theirs = load_file(folder / "tensors-00000.safetensors")
    ours = {name: torch.empty_like(tensor) for name, tensor in tensors.items()}
    load_pieces(read_checkpoint(folder, tensors=False), {name: Piece.whole(tensor) for name, tensor in ours.items()})
    for name, tensor in tensors.items():
        for found in (theirs[name], ours[name]):
            assert found.dtype == tensor.dtype
            assert torch.equal(found.reshape(-1).view(torch.uint8), tensor.reshape(-1).view(torch.uint8))


def test_a_view_is_saved_without_the_storage_behind_it(tmp_path: Path) -> None:
    base = torch.randn(1000, 1000)
    view = base.t()[3:5, 7:9]
    folder = save_checkpoint(tmp_path, step=1, pieces={"v": Piece.whole(view)}, state={}, recipe_yaml="")
    assert (folder / "tensors-00000.safetensors").stat().st_size < 200
    found = torch.zeros(2, 2)
    load_pieces(read_checkpoint(folder, tensors=False), {"v": Piece.whole(found)})
    assert torch.equal(found, view)


def test_loading_into_another_dtype_converts(tmp_path: Path) -> None:
    folder = save_checkpoint(tmp_path, step=1, pieces={"w": Piece.whole(torch.ones(4))}, state={}, recipe_yaml="")
    into = torch.zeros(4, dtype=torch.bfloat16)
    load_pieces(read_checkpoint(folder, tensors=False), {"w": Piece.whole(into)})
    assert into.tolist() == [1.0] * 4


def test_everything_that_does_not_fit_is_named_at_once(tmp_path: Path) -> None:
    folder = save_checkpoint(tmp_path, step=1, pieces={"w": Piece.whole(torch.ones(4))}, state={}, recipe_yaml="")
    wanted = {"w": torch.ones(5), "lost": torch.ones(2), "gone": torch.ones(2)}
    with pytest.raises(DataError) as caught:
        load_pieces(
            read_checkpoint(folder, tensors=False), {name: Piece.whole(tensor) for name, tensor in wanted.items()}
        )
    for part in ("w is (4,) in the checkpoint and (5,)", "lost is not in", "gone is not in"):
        assert part in str(caught.value)


@pytest.mark.parametrize(
    ("pieces", "expected"),
    [
        ([(4, (0,), True), (4, (4,), False)], "4 of 8 elements are missing"),
        ([(4, (0,), False), (4, (4,), False)], "8 of 8 elements are missing"),
        ([(5, (0,), True), (4, (4,), True)], "some elements are there twice"),
        ([(4, (0,), True), (4, (5,), True)], "[5:9] is outside of (8,)"),
    ],
)
def test_a_wrong_owner_is_caught_before_the_checkpoint_counts(
    tmp_path: Path, pieces: list[tuple[int, tuple[int], bool]], expected: str
) -> None:
    held = [{"w": Piece(torch.ones(size), (8,), offset, owned)} for size, offset, owned in pieces]
    raised = save(tmp_path, held)
    assert all(isinstance(error, StorageError) for error in raised)
    assert {expected in str(error) for error in raised} == {True}
    assert "exactly one rank must own" in str(raised[0]).lower()
    assert list(tmp_path.iterdir()) == []


def test_ranks_that_disagree_about_a_tensor_are_refused(tmp_path: Path) -> None:
    held = [{"w": Piece.whole(torch.ones(2))}, {"w": Piece(torch.ones(3), (3,), (0,), owned=False)}]
    raised = save(tmp_path, held)
    assert "w is ('F32', (3,)) on one rank and ('F32', (2,)) on another" in str(raised[0])


@pytest.mark.parametrize("failing", [0, 2, 3])
def test_trouble_on_one_rank_is_the_same_error_on_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing: int
) -> None:
    original = save_module.write_file

    def fails(path: Path, *rest: Any) -> Any:
        if path.name == f"tensors-{failing:05d}.safetensors":
            path.write_bytes(b"half")
            raise OSError(28, "No space left on device")
        return original(path, *rest)

    held = [{"w": Piece(torch.ones(2), (8,), (2 * rank,))} for rank in range(4)]
    (first, *_) = save(tmp_path, held, step=1)
    monkeypatch.setattr(save_module, "write_file", fails)
    raised = save(tmp_path, held, step=2)
    texts = {str(error).split("KiB")[0] for error in raised}
    assert all(isinstance(error, StorageError) for error in raised)
    assert len(texts) == 1
    assert f"on rank {failing}: No space left on device (ENOSPC)" in texts.pop()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "step-00000001"]
    assert latest_checkpoint(tmp_path) == first


def test_a_save_of_the_same_step_replaces_the_older_one(tmp_path: Path) -> None:
    for value in (1.0, 2.0):
        tensor = torch.full((3,), value)
        folder = save_checkpoint(tmp_path, step=1, pieces={"w": Piece.whole(tensor)}, state={}, recipe_yaml="")
    found = torch.zeros(3)
    load_pieces(read_checkpoint(folder, tensors=False), {"w": Piece.whole(found)})
    assert found.tolist() == [2.0] * 3
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "step-00000001"]


def test_no_code_is_in_a_checkpoint(tmp_path: Path) -> None:
    (folder, *_) = save(tmp_path, cuttings(WHOLE, 4, 1))
    names = {path.name for path in folder.iterdir()}
    assert names == {f"tensors-0000{rank}.safetensors" for rank in range(4)} | {
        "index.json", "state.json", "recipe.yaml", "manifest.json"
    }  # fmt: skip
    manifest = json.loads((folder / "manifest.json").read_text())
    assert set(manifest["files"]) == names - {"manifest.json"}
    assert set(read_checkpoint(folder, tensors=False).tensors) == set(WHOLE)


@pytest.mark.parametrize("text", ["", "{}", '{"tensors": {"w": {"shape": [2], "dtype": "F7", "pieces": []}}}', "[]"])
def test_a_broken_index_is_named(tmp_path: Path, text: str) -> None:
    (tmp_path / "index.json").write_text(text)
    with pytest.raises(DataError, match=r"index.json cannot be read"):
        read_index(tmp_path)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (None, "No such file"),
        (b"", "header too small"),
        (b"\xff" * 16, "header too large"),
        ((100).to_bytes(8, "little") + b"{}", "invalid header length"),
        ((2).to_bytes(8, "little") + b"{]", "invalid JSON in header"),
        ((2).to_bytes(8, "little") + b"{}", "does not contain tensor w"),
    ],
)
def test_a_broken_tensor_file_is_named(tmp_path: Path, content: bytes | None, said: str) -> None:
    folder = save_checkpoint(tmp_path, step=1, pieces={"w": Piece.whole(torch.ones(2))}, state={}, recipe_yaml="")
    checkpoint, file = read_checkpoint(folder), folder / "tensors-00000.safetensors"
    file.unlink()
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(DataError, match=r"tensors-00000.safetensors cannot be read") as caught:
        load_pieces(checkpoint, {"w": Piece.whole(torch.ones(2))})
    assert said in str(caught.value)


def test_all_ranks_hear_of_a_damaged_file_and_each_reads_its_share(tmp_path: Path) -> None:
    (folder, *_) = save(tmp_path, cuttings(WHOLE, 4, 1))
    (folder / "tensors-00002.safetensors").unlink()
    raised = together(3, lambda ranks: read_checkpoint(folder, ranks=ranks))
    assert all(isinstance(error, DataError) for error in raised)
    assert len({str(error) for error in raised}) == 1
    assert "tensors-00002.safetensors is missing" in str(raised[0])


def test_a_file_that_cannot_be_read_is_damage(tmp_path: Path) -> None:
    folder = save_checkpoint(tmp_path, step=1, pieces={"w": Piece.whole(torch.ones(2))}, state={}, recipe_yaml="")
    size = (folder / "state.json").stat().st_size
    (folder / "state.json").unlink()
    (folder / "state.json").mkdir()
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["files"]["state.json"]["bytes"] = (folder / "state.json").stat().st_size
    change_manifest(folder, files=manifest["files"])
    with pytest.raises(DataError, match=r"state.json cannot be read: Is a directory"):
        read_checkpoint(folder, ranks=ALONE)
    assert size == 2


def test_boxes_of_numbers() -> None:
    assert why_not_whole((), [Box((), ())]) == ""
    assert "twice" in why_not_whole((), [Box((), ()), Box((), ())])
    assert "1 of 1" in why_not_whole((), [])
