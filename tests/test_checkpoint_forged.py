"""Checkpoints whose hashes fit and whose content cannot be: refused before anything is built from them."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from bloomery.checkpoint.folder import MANIFEST
from bloomery.checkpoint.format import Box, why_not_whole
from bloomery.checkpoint.select import newest_good
from checkpoints import change_manifest, damage
from conftest import Workshop

Command = Callable[..., tuple[int, str, str]]
Index = dict[str, dict[str, Any]]
W, B = "model.layers.1.mlp.up.weight", "model.layers.1.mlp.up.bias"
MOMENT = f"optim.{W.removeprefix('model.')}.exp_avg"


def rehash(folder: Path) -> None:
    """Let the manifest say what the files are now, as a forger would."""
    names = json.loads((folder / MANIFEST).read_text())["files"]
    found = {name: (folder / name).read_bytes() for name in names if (folder / name).is_file()}
    facts = {name: {"bytes": len(c), "sha256": hashlib.sha256(c).hexdigest()} for name, c in found.items()}
    change_manifest(folder, files={**names, **facts})


@contextmanager
def forged_index(folder: Path) -> Iterator[Index]:
    """Its tensors, to change."""
    path = folder / "index.json"
    content = json.loads(path.read_text())
    yield content["tensors"]
    path.write_text(json.dumps(content))
    rehash(folder)


def forge_header(folder: Path, change: Callable[[dict[str, Any]], None]) -> None:
    path = folder / "tensors-00000.safetensors"
    content = path.read_bytes()
    end = 8 + int.from_bytes(content[:8], "little")
    header = json.loads(content[8:end])
    change(header)
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + content[end:])
    rehash(folder)


def shifted(tensor: dict[str, Any], by: int) -> None:
    tensor["pieces"][0]["offset"][0] += by


def cut(tensor: dict[str, Any], first: int, second_from: int, second: int) -> None:
    """Two pieces along the first dimension instead of one."""
    (piece,) = tensor["pieces"]
    rest = piece["size"][1:]
    tensor["pieces"] = [
        {**piece, "offset": [0] * len(piece["size"]), "size": [first, *rest]},
        {**piece, "offset": [second_from, *[0] * len(rest)], "size": [second, *rest]},
    ]


def swap_shapes(index: Index) -> None:
    index[W]["shape"].reverse()
    index[W]["pieces"][0]["size"].reverse()


def swap_pieces(index: Index, one: str, other: str) -> None:
    index[one]["pieces"], index[other]["pieces"] = index[other]["pieces"], index[one]["pieces"]


INDEX_FORGERIES: dict[str, Callable[[Index], object]] = {
    "no pieces": lambda index: index[W].update(pieces=[]),
    "no pieces of a number": lambda index: index["optim.step"].update(pieces=[]),
    "no pieces of four": lambda index: [index[name].update(pieces=[]) for name in list(index)[:4]],
    "a piece twice": lambda index: index[W]["pieces"].append(index[W]["pieces"][0]),
    "a number twice": lambda index: index["optim.step"]["pieces"].append(index["optim.step"]["pieces"][0]),
    "a negative offset": lambda index: shifted(index[W], -1),
    "an offset beyond the end": lambda index: shifted(index[W], 1),
    "a negative size": lambda index: index[W]["pieces"][0].update(size=[-n for n in index[W]["shape"]]),
    "an overlap": lambda index: cut(index[W], 80, 64, 64),
    "a gap": lambda index: cut(index[W], 60, 64, 64),
    "two pieces in one place": lambda index: cut(index[W], 64, 64, 64),
    "another dtype of one width": lambda index: index[W].update(dtype="I32"),
    "another dtype": lambda index: index[W].update(dtype="BF16"),
    "an unknown dtype": lambda index: index[W].update(dtype="F31"),
    "another shape of as many": swap_shapes,
    "another number of dimensions": lambda index: index[B].update(shape=[1, *index[B]["shape"]]),
    "a huge shape": lambda index: index[W].update(
        shape=[10**15, 10**15], pieces=[{**index[W]["pieces"][0], "size": [10**15, 10**15]}]
    ),
    "a broken number": lambda index: index[W]["pieces"][0].update(offset=[0.0, 0.0]),
    "a thousand dimensions": lambda index: index[W].update(shape=[1] * 1000),
    "a missing weight": lambda index: index.pop(W),
    "a missing moment": lambda index: index.pop(MOMENT),
    "all moments missing": lambda index: [index.pop(name) for name in list(index) if name.startswith("optim.")],
    "all weights missing": lambda index: [index.pop(name) for name in list(index) if name.startswith("model.")],
    "an unknown tensor": lambda index: index.update({"model.extra": index.pop(W)}),
    "one more tensor": lambda index: index.update({"model.extra": index[W]}),
    "a file above": lambda index: index[W]["pieces"][0].update(file="../step-00000002/tensors-00000.safetensors"),
    "a file anywhere": lambda index: index[W]["pieces"][0].update(file="/etc/passwd"),
    "a file of another kind": lambda index: index[W]["pieces"][0].update(file="state.json"),
    "a file that is not there": lambda index: index[W]["pieces"][0].update(file="tensors-00001.safetensors"),
    "another key": lambda index: index[W]["pieces"][0].update(key=MOMENT),
    "two tensors of one shape swapped": lambda index: swap_pieces(index, W, MOMENT),
}


def header_entry(**changes: Any) -> Callable[[dict[str, Any]], None]:
    return lambda header: header[W].update(changes)


HEADER_FORGERIES: dict[str, Callable[[dict[str, Any]], None]] = {
    "bytes of another tensor": lambda header: header[W].update(data_offsets=header[MOMENT]["data_offsets"]),
    "negative bytes": header_entry(data_offsets=[-16384, 0]),
    "bytes beyond the end": header_entry(data_offsets=[10**12, 10**12 + 16384]),
    "another dtype in the file": header_entry(dtype="I32"),
    "another shape in the file": lambda header: header[W]["shape"].reverse(),
    "a stranger in the file": lambda header: header.update(x={"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}),
}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("forged"))
        workshop = Workshop(Path.cwd())
        return workshop.train("train.exit_after=4 steps", "checkpoint.phases=[{every: 2 steps}]").absolute()


@pytest.fixture
def newer(trained: Path, tmp_path: Path) -> Path:
    """The newer one of two checkpoints."""
    return Path(shutil.copytree(trained / "checkpoints", tmp_path / "run/checkpoints")) / "step-00000004"


@pytest.mark.parametrize("kind", INDEX_FORGERIES)
def test_a_forged_index_is_damage_and_the_checkpoint_before_is_used(newer: Path, kind: str) -> None:
    with forged_index(newer) as index:
        INDEX_FORGERIES[kind](index)
    choice = newest_good([newer.parent])
    if kind != "all weights missing":  # then it is no checkpoint of a model: whoever needs one says what it lacks
        assert choice.checkpoint.folder == newer.with_name("step-00000002")
        assert list(choice.damaged) == [newer]


@pytest.mark.parametrize("kind", HEADER_FORGERIES)
def test_a_forged_header_is_damage(newer: Path, kind: str) -> None:
    forge_header(newer, HEADER_FORGERIES[kind])
    assert damage(newer)
    assert newest_good([newer.parent]).checkpoint.folder == newer.with_name("step-00000002")


def test_values_that_stand_for_two_parts_of_a_tensor_are_damage(newer: Path) -> None:
    path = newer / "tensors-00000.safetensors"
    tensors = load_file(path)
    tensors[W] = tensors[W][:64].clone()
    save_file(tensors, path)
    with forged_index(newer) as index:
        cut(index[W], 64, 64, 64)
    assert "two pieces overlap" in damage(newer)[0]


def test_new_hashes_alone_are_no_damage(newer: Path) -> None:
    rehash(newer)
    assert not damage(newer)


MANIFEST_FORGERIES: dict[str, Callable[[Path], dict[str, Any]]] = {
    "a pipe": lambda folder: os.mkfifo(folder / "extra") or listed(folder, "extra"),
    "a link to a device": lambda folder: (folder / "extra").symlink_to("/dev/zero") or listed(folder, "extra"),
    "a name with NUL": lambda folder: listed(folder, "a\0b"),
    "half a surrogate pair": lambda folder: listed(folder, "a\ud800"),
    "a name that is too long": lambda folder: listed(folder, "a" * 5000),
    "a time that is no number": lambda folder: {"time": float("nan")},
    "a time beyond all calendars": lambda folder: {"time": 1e308},
}


def listed(folder: Path, name: str) -> dict[str, Any]:
    """The manifest's files, and an empty one of this name."""
    files = json.loads((folder / MANIFEST).read_text())["files"]
    return {"files": {**files, name: {"bytes": 0, "sha256": hashlib.sha256().hexdigest()}}}


@pytest.mark.parametrize("kind", MANIFEST_FORGERIES)
def test_a_forged_manifest_is_damage_and_nothing_waits_for_it(newer: Path, kind: str, command: Command) -> None:
    change_manifest(newer, **MANIFEST_FORGERIES[kind](newer))
    assert newest_good([newer.parent]).checkpoint.folder == newer.with_name("step-00000002")
    code, _, err = command("inspect", "checkpoint", str(newer), "--verify")
    assert (code, "Traceback" in err) == (3, False)


def test_escapes_in_a_manifest_do_not_reach_the_terminal(newer: Path, command: Command) -> None:
    change_manifest(newer, versions={"bloomery": "\x1b[31m"}, tokenizer="\x1b]0;x\x07")
    code, out, _ = command("inspect", "checkpoint", str(newer))
    assert (code, "\x1b" in out, "\\x1b[31m" in out) == (0, False, True)


def test_a_recipe_that_asks_for_a_billion_layers_is_damage_and_costs_nothing(newer: Path) -> None:
    recipe = newer / "recipe.yaml"
    recipe.write_text(recipe.read_text().replace("num_layers: 2", "num_layers: 1000000000"))
    rehash(newer)
    started = time.monotonic()
    assert "recipe.yaml cannot be used: model.num_layers is 1000000000" in damage(newer)[0]
    assert time.monotonic() - started < 20


@pytest.mark.parametrize(("name", "why"), [("extra", "would have"), ("tensors-00001.safetensors", "has not the size")])
def test_a_file_that_no_tensor_needs_is_refused_before_it_is_read(newer: Path, name: str, why: str) -> None:
    (newer / name).touch()
    os.truncate(newer / name, 1 << 33)
    files = listed(newer, name)["files"]
    change_manifest(newer, files={**files, name: {**files[name], "bytes": 1 << 33}})
    assert why in damage(newer)[0]


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"step": 10**12, "consumed_samples": 8 * 10**12}, "ValueError: it is of step 1000000000000"),  # as if finished
        ({"spikes": {"losses": "x"}}, 'losses "x" (should be a valid list)'),
    ],
)
def test_a_state_that_cannot_be_is_one_sentence_and_the_checkpoint_before_is_used(
    workshop: Workshop, trained: Path, changes: dict[str, Any], why: str, capsys: pytest.CaptureFixture[str]
) -> None:
    run = Path(shutil.copytree(trained, workshop.folder / "run"))
    path = run / "checkpoints/step-00000004/state.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    rehash(path.parent)
    workshop.train("train.exit_after=1 steps")
    assert workshop.events(run, "start")[-1]["resumed_from"] == "step-00000002"
    (warning,) = [line for line in capsys.readouterr().out.splitlines() if "step-00000004 is damaged" in line]
    assert f"state.json cannot be used: {why}" in warning
    assert "step-00000002 is used" in warning


def test_a_checkpoint_from_the_end_of_time_does_not_spoil_those_that_follow(workshop: Workshop, trained: Path) -> None:
    run = Path(shutil.copytree(trained, workshop.folder / "run"))
    change_manifest(run / "checkpoints/step-00000004", time=1e11)
    for _ in range(2):
        workshop.train("train.exit_after=1 steps")
    assert [each["resumed_from"] for each in workshop.events(run, "start")][1:] == ["step-00000004", "step-00000005"]


def test_a_box_has_few_corners(newer: Path) -> None:
    with forged_index(newer) as index:
        index[W].update(shape=[1] * 8, pieces=[{**index[W]["pieces"][0], "offset": [0] * 8, "size": [1] * 8}])
    assert "should have at most 3 items" in damage(newer)[0]


def test_boxes_that_somebody_chose_to_be_slow_are_judged_soon() -> None:
    """Each column is cut at another height: any sweep over one dimension meets all of them at once."""
    n = 5_000
    columns = [Box((a, i), (b - a, 1)) for i in range(1, n) for a, b in ((0, i), (i, n))]
    started = time.process_time()
    assert why_not_whole((n, n), [Box((0, 0), (n, 1)), *columns]) == ""
    assert why_not_whole((n, n), columns) == f"{n:,} of {n * n:,} elements are missing"
    assert why_not_whole((n, n), [columns[5], *columns])
    assert time.process_time() - started < 10


@pytest.mark.parametrize("kind", ["no pieces of four", "a negative offset", "another key", "an unknown tensor"])
def test_commands_refuse_a_forged_checkpoint_and_training_falls_back(
    workshop: Workshop, command: Command, trained: Path, kind: str
) -> None:
    run = workshop.folder / "run"
    shutil.copytree(trained, run)
    with forged_index(run / "checkpoints/step-00000004") as index:
        INDEX_FORGERIES[kind](index)
    for words in (
        ["inspect", "checkpoint", str(run), "--verify"],
        ["generate", str(run), "--prompt", "x"],
        ["export", str(run), str(workshop.folder / "hf")],
    ):
        code, _, err = command(*words)
        assert code == 3, (words, err)
        assert "step-00000004: " in err
        assert "Traceback" not in err
    workshop.train("train.exit_after=1 steps", start_from="4", code=3)
    workshop.train("train.exit_after=1 steps")
    assert workshop.events(run, "start")[-1]["resumed_from"] == "step-00000002"
    assert (run / "checkpoints/damaged-step-00000004").is_dir()
