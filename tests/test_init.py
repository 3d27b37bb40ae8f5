"""From a text to a generated sample in three commands, without writing YAML."""

from __future__ import annotations

import html
import json
from collections.abc import Callable
from pathlib import Path

import pytest

from bloomery.cli import init
from bloomery.cli.init import _fitting
from bloomery.config.load import shipped_recipes
from bloomery.sizing.check import load_checked_recipe
from export_samples import CASES, checkpoint_of, small_tokenizer
from prepare_samples import make_texts

Command = Callable[..., tuple[int, str, str]]


@pytest.fixture
def text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    path = Path("my text.txt")
    path.write_text("\n".join(make_texts(200)))
    return path


def test_three_commands_from_a_text_to_a_sample(text: Path, command: Command) -> None:
    code, out, err = command("init", "--from", str(text), "--device", "cpu")
    assert code == 0, err
    assert "next: bloomery train my-text.yaml\nthen: bloomery generate runs/my-text --prompt 'Once'" in out
    assert command("check", "my-text.yaml")[0] == 0
    samples = "monitor.samples={prompts: [Once, <b>], tokens: 4}"
    short = (
        samples,
        "train.for=2 steps",
        "train.evaluate.every=2 steps",
        "lr.warmup=1 steps",
        "--device",
        "cpu",
        "--quiet",
    )
    assert command("train", "my-text.yaml", *short)[0] == 0
    code, out, _ = command("generate", "runs/my-text", "--prompt", "Once", "--max-new-tokens", "5", "--device", "cpu")
    assert (code, out.startswith("Once")) == (0, True)
    words = ("--samples", "3", "--top-p", "0.9", "--max-new-tokens", "8", "--temperature", "2", "--device", "cpu")
    code, out, _ = command("generate", "runs/my-text", *words)
    assert (code, len({*out.split("\n---\n")})) == (0, 3)
    for _ in range(2):  # what was continued once is known
        assert command("report", "runs/my-text")[0] == 0
        rows = [json.loads(line) for line in Path("runs/my-text/samples.jsonl").read_text().splitlines()]
        assert [(each["step"], each["prompt"], each["text"][:3]) for each in rows] == [
            (2, "Once", "Onc"),
            (2, "<b>", "<b>"),
        ]
    page = Path("runs/my-text/report.html").read_text()
    assert "<h2>Samples</h2>" in page
    assert html.escape(rows[1]["text"]) in page
    code, _, err = command("init", "--from", str(text))
    assert (code, "my-text.yaml is there. Init replaces nothing" in err) == (5, True)


def test_a_shard_and_a_model_may_be_begun_from(text: Path, tmp_path: Path, command: Command) -> None:
    assert command("init", "--from", str(text), "--device", "cpu")[0] == 0
    code, out, _ = command("init", "--from", "my-text-data/shard", "--name", "again", "--device", "cpu")
    assert (code, out.endswith("generate runs/again --prompt 'Once' --tokenizer FOLDER\n")) == (0, True)
    first, again = (load_checked_recipe(name).recipe for name in ("my-text.yaml", "again.yaml"))
    assert (again.model, again.data.train[0].path) == (first.model, first.data.train[0].path)
    (tmp_path / "tok").mkdir()
    checkpoint = checkpoint_of(CASES["gpt2"], tmp_path / "run", small_tokenizer(tmp_path / "tok"))
    assert command("export", str(checkpoint), "hf", "--no-proof")[0] == 0
    assert command("init", "--from", "hf", "--name", "tuned")[0] == 0
    tuned = load_checked_recipe("tuned.yaml").recipe
    model = tuned.model.model_copy(update={"vocab_multiple": CASES["gpt2"].vocab_multiple})
    assert (tuned.init.from_, model, tuned.tokenizer.path) == ("hf", CASES["gpt2"], "hf")


@pytest.mark.parametrize("words", [[], ["--characters"]])
@pytest.mark.parametrize(
    ("text", "validates"),
    [("It was here.\n" * 14_000, True), (make_texts(200)[0][:20] * 240, True), ("A few. " * 43, False)],
)
def test_what_next_names_trains_also_a_small_text(
    text: str, validates: bool, words: list[str], tmp_path: Path, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("a.txt").write_text(text)
    code, out, err = command("init", "--from", "a.txt", "--device", "cpu", *words)
    assert (code, "no validation: the text is too short" in out) == (0, not validates), err
    assert command("train", "a.yaml", "train.exit_after=1 steps", "--device", "cpu", "--quiet")[0] == 0
    assert len(load_checked_recipe("a.yaml").recipe.data.split or "") == 4 * validates


@pytest.mark.parametrize(
    ("tokens", "gigabytes", "hidden"),
    [(1e5, 80, 128), (2e7, 80, 384), (1e9, 80, 1024), (1e9, 4, 768), (1e11, 80, 2048)],
)
def test_the_model_fits_the_text_and_the_device(
    tokens: float, gigabytes: float, hidden: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch

    from bloomery.base import accelerator

    assert _fitting(tokens, "cpu") == init._ON_CPU
    monkeypatch.setattr(accelerator, "pick_device", lambda _: torch.device("cuda"))
    monkeypatch.setattr(accelerator, "device_total_bytes", lambda _: gigabytes * 1e9)
    assert _fitting(tokens, None).hidden == hidden


def test_what_init_cannot_read_leaves_nothing(
    tmp_path: Path, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    code, _, err = command("init", "--from", "nothing.txt", "--name", "a/b")
    assert (code, "--name is 'a/b'. Letters, digits" in err) == (2, True)
    code, _, err = command("init", "--from", "nothing.txt")
    assert (code, "matches no file" in err) == (3, True)
    assert not [*tmp_path.iterdir()]
    Path("it's.jsonl").write_text('{"text": "one line"}\n{"broken')
    for _ in range(2):  # after the mistake is seen, the same command works
        code, _, err = command("init", "--from", "it's.jsonl", "--name", "a", "--vocab-size", "260", "--device", "cpu")
        assert (code, "it's.jsonl:2" in err) == (3, True), err
    assert [path.name for path in tmp_path.iterdir()] == ["it's.jsonl"]


def test_the_shipped_recipes_are_listed_and_printed(command: Command) -> None:
    code, out, _ = command("recipes")
    assert (code, [line.split()[0] for line in out.splitlines()]) == (0, shipped_recipes())
    assert command("recipes", "tr1-13b")[1].startswith("# ")
    code, _, err = command("recipes", "tr1")
    assert (code, "Shipped recipes: bert-large" in err) == (2, True)
