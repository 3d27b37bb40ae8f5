"""Mistakes around finished runs: each is told once, without a traceback, with its exit code."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from bloomery.prepare.train_tokenizer import train_tokenizer
from checkpoints import change_manifest
from conftest import Workshop

Command = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(workshop: Workshop) -> Path:
    train_tokenizer(["a b c " * 50, "the cat sat " * 50], vocab_size=257, output=str(workshop.folder / "large"))
    return workshop.train("train.for=5 steps")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["generate", "run", "--prompt", "x", "--temperature", "hot"], "'hot' must be a number of at least 0"),
        (["generate", "run", "--prompt", "x", "--temperature", "nan"], "'nan' must be a number of at least 0"),
        (["generate", "run", "--top-p", "1.5"], "'1.5' must be a number of at least 0 and at most 1"),
        (["prepare", "r.yaml", "--unit", "2/2"], "2/2 is not K/N: share K of N"),
        (["prepare", "r.yaml", "--unit", "0/2/3"], "0/2/3 is not K/N: share K of N"),
    ],
)
def test_an_argument_that_cannot_be_says_what_it_must_be(command: Command, words: list[str], said: str) -> None:
    code, _, err = command(*words)
    assert (code, said in err) == (2, True), err


@pytest.mark.parametrize("verb", ["export", "generate"])
def test_a_tokenizer_larger_than_the_model_is_refused(run: Path, command: Command, verb: str) -> None:
    rest = ("out",) if verb == "export" else ("--prompt", "a")
    code, _, err = command(verb, str(run), *rest, "--tokenizer", "large")
    assert code == 3
    assert "the tokenizer has 257 entries" in err


def test_a_prompt_that_is_not_utf8_is_refused(run: Path, command: Command) -> None:
    code, _, err = command("generate", str(run), "--prompt", "caf\udce9")
    assert code == 2
    assert "--prompt is not UTF-8" in err


def test_a_checkpoint_of_another_format_is_refused(
    run: Path, workshop: Workshop, capsys: pytest.CaptureFixture[str]
) -> None:
    change_manifest(run / "checkpoints" / "step-00000005", format=99)
    workshop.train("train.for=6 steps", code=3)
    assert "has format 99" in capsys.readouterr().err


def test_a_full_standard_output_is_told(workshop: Workshop) -> None:
    if not os.path.exists("/dev/full"):
        pytest.skip("needs /dev/full")
    with open("/dev/full", "w") as full:
        words = [sys.executable, "-m", "bloomery", "check", "tr1-13b"]
        done = subprocess.run(words, stdout=full, stderr=subprocess.PIPE, text=True)
    assert done.returncode == 5
    assert "could not be written to standard output" in done.stderr
    assert "Traceback" not in done.stderr


def test_what_people_write_elsewhere_is_understood(command: Command, tmp_path: Path) -> None:
    for option, remedy in (
        ("--lr.peak=1e-3", "lr.peak"),
        ("--steps", "did you mean train.for"),
        ("--zero", "parallel.zero"),
    ):
        code, _, err = command("check", "quickstart", option, "3")
        how = f"has no option {option.partition('=')[0]}; fields are given as section.field=value, without dashes: "
        assert (code, how in err, remedy in err) == (2, True, True)
    assert "its fields: every, steps" in command("check", "quickstart", "train.evaluate=10 steps")[2].lower()
    assert "must be a list, such as [a.txt]" in command("check", "quickstart", "prepare.0.sources=a.txt")[2].lower()
    assert "did you mean `bloomery train`?" in command("resume", "runs/x")[2]
    (tmp_path / "run").mkdir()
    for name, meant in (("run/recipe.yaml", "run"), ("mine.yaml", "mine"), ("mine.yaml", "mina.yaml")):
        (tmp_path / name).write_text("base: quickstart")
        assert f"did you mean {tmp_path / name}?" in command("check", str(tmp_path / meant))[2].lower()
    (tmp_path / "tab.yaml").write_text("name: x\n\tmodel: 1\n")
    assert "Indent with spaces: YAML has no tabs" in command("check", str(tmp_path / "tab.yaml"))[2]
    assert "look at its exponent" in command("check", "quickstart", "lr.peak=1e3")[2].lower()
