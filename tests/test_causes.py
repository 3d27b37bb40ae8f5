"""`bloomery explain` and `replay`: bad documents are found, and a bit that flipped is distinguished from them."""

from __future__ import annotations

import json
import socket
import subprocess
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import rank_commands
from bloomery.cli.main import main
from bloomery.data.shards import ShardWriter
from bloomery.launch.local import run_local_ranks
from bloomery.train.origin import origin
from conftest import VOCAB, Workshop

Command = Callable[..., tuple[int, str, str]]
POISONED = (7, 23)
FLIPPED = 13


@pytest.fixture(scope="module")
def poisoned(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A run over documents that count upwards, but for two that jump about. Nothing changes it."""
    workshop = Workshop(tmp_path_factory.mktemp("poisoned"))
    random = np.random.default_rng(0)
    with ShardWriter(str(workshop.folder / "train"), "uint16") as writer:
        for document in range(60):
            upwards = (np.arange(60) + random.integers(VOCAB)) % VOCAB
            writer.append(random.integers(VOCAB, size=60) if document in POISONED else upwards)
    with pytest.MonkeyPatch.context() as here:
        here.chdir(workshop.folder)
        yield workshop.train("checkpoint.phases=[{every: 5 steps}]", "lr.peak=3e-2")


def answer(command: Command, *words: object) -> dict[str, Any]:
    code, out, err = command(*map(str, words), "--json")
    assert code == 0, err
    return dict(json.loads(out))


def test_the_documents_that_made_a_loss_jump_are_named_with_their_text(poisoned: Path, command: Command) -> None:
    found = answer(command, "explain", poisoned, "--step", 19, "--before", 6, "--device", "cpu")
    assert found["losses_by"] == "step-00000015"
    bad = [each for each in found["documents"] if each["document"] in POISONED and each["tokens"] > 2]
    assert bad, "these steps read none: choose others"
    first = found["documents"][: len(bad)]
    assert {each["document"] for each in first} == {each["document"] for each in bad}, found["documents"][:5]
    shard = np.fromfile(f"{first[0]['shard']}.bin", np.uint16)
    words = shard[60 * first[0]["document"] + first[0]["start"] :][: first[0]["tokens"]].tolist()
    assert first[0]["text"] == " ".join(map(str, words))
    assert list(found["recorded"]) == [str(step) for step in range(13, 20)]
    code, text, _ = command("explain", str(poisoned), "--step", "19", "--no-model")
    assert code == 0
    assert "skip: [19-19 steps]" in text


def test_a_replay_equals_the_record_and_another_precision_is_compared_loosely(poisoned: Path, command: Command) -> None:
    before = sorted(path.name for path in poisoned.rglob("*"))
    same = answer(command, "replay", poisoned, "--step", 13, "--device", "cpu")
    assert same["same"], same
    assert same["from"] == "step-00000010"
    assert "THE SAME bit for bit" in same["verdict"][-1]
    norm = Workshop.metrics(poisoned)[12]["grad_norm"]
    assert sum(each["norm"] ** 2 for each in same["gradients"]) ** 0.5 == pytest.approx(norm, rel=1e-5)
    other = answer(
        command, "replay", poisoned, "--step", 13, "precision=bf16", "--device", "cpu",
    )  # fmt: skip
    assert "within 2%" in other["verdict"][-1] or "DIFFERENT by more than 2%" in other["verdict"][-1]
    assert before == sorted(path.name for path in poisoned.rglob("*")), "the run is as it was"


def test_a_bit_that_flipped_on_one_rank_is_distinguished_from_bad_data(workshop: Workshop, command: Command) -> None:
    arguments = ["train", str(workshop.recipe), "--run-dir", "run", "--device", "cpu", "--quiet"]
    words = [*arguments, "checkpoint.phases=[{every: 5 steps}]", "train.exit_after=15 steps"]
    log = str(workshop.folder / "log")
    planted = partial(rank_commands.logged, partial(rank_commands.flip_a_bit_on_rank_1, FLIPPED), log)
    assert run_local_ranks(2, planted, words) == 0, Path(log).read_text()
    found = answer(command, "replay", "run", "--step", FLIPPED, "--device", "cpu")
    assert not found["same"]
    assert f"DIFFERENT from step {FLIPPED} on" in found["verdict"][-1]


def test_a_step_that_was_not_is_a_clear_error(poisoned: Path, command: Command) -> None:
    code, _, err = command("explain", str(poisoned), "--step", "99")
    assert code == 2
    assert "there is no step 99. For this training the range is 1 to 20" in err
    code, _, err = command("replay", str(poisoned.parent), "--step", "9")
    assert code == 3
    assert "is not a run" in err
    assert main(["replay", str(poisoned), "--step", "0"]) == 2


def test_a_start_says_where_it_was_made_without_secrets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    git = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@b"]
    (tmp_path / "r.yaml").write_text("name: r\n")
    url = "http://somebody:secret@tracker"
    monkeypatch.setattr("sys.argv", ["/venv/bin/bloomery", "train", str(tmp_path / "r.yaml"), f"monitor.mlflow={url}"])
    assert origin()["commit"] is None
    for words in (["init", "-q"], ["add", "."], ["commit", "-qm", "one"]):
        subprocess.run([*git, *words], check=True)
    commit = subprocess.run([*git, "rev-parse", "HEAD"], capture_output=True, text=True, check=True).stdout.strip()
    assert origin()["commit"] == commit
    (tmp_path / "r.yaml").write_text("name: s\n")
    found = origin()
    assert found["commit"] == f"{commit}-dirty"
    assert found["host"] == socket.gethostname()
    assert found["command"].startswith(f"bloomery train {tmp_path}/r.yaml")
    assert "secret" not in found["command"]
