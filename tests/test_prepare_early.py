"""What `bloomery prepare` begins before the recipe is checked: it changes no byte, no message, and leaves nothing."""

import builtins
import subprocess
import sys
import threading

import pytest

from bloomery.base.errors import DataError
from bloomery.data.tokenizer import Tokenizer
from bloomery.prepare import early, run
from bloomery.prepare.early import EarlyStart, early_start
from prepare_samples import make, make_texts, make_tokenizer, shard_bytes, write_jsonl

RECIPE = """
base: quickstart
name: early
tokenizer: {path: tokenizer}
seed: 1
prepare:
  - {output: x, sources: [corpus]}
  - {output: y, sources: [corpus], special_tokens: as_ids}
"""
VALUES = {"tokenizer": {"path": "tokenizer"}, "prepare": [{"output": "x", "sources": ["corpus"]}]}


@pytest.fixture
def tokenizer(tmp_path, monkeypatch) -> Tokenizer:
    monkeypatch.chdir(tmp_path)
    write_jsonl(tmp_path / "corpus" / "a.jsonl", make_texts(200))
    (tmp_path / "recipe.yaml").write_text(RECIPE)
    return make_tokenizer(tmp_path / "tokenizer")


@pytest.fixture
def started(monkeypatch) -> list[EarlyStart]:
    """Every early start of the test."""
    found = []

    class Seen(EarlyStart):
        def __init__(self, *args, **settings):
            super().__init__(*args, **settings)
            found.append(self)

    monkeypatch.setattr(early, "EarlyStart", Seen)
    return found


def is_over(start: EarlyStart) -> bool:
    start.wait()
    start.judge.child.process.join(30)
    return start.judge.child.process.exitcode is not None


def test_the_command_writes_what_it_would_write_without(tokenizer, command, started):
    pytest.importorskip("fastokens")
    code, out, err = command("prepare", "recipe.yaml", "--workers", "2")
    assert (code, out.count("written"), err.count("encoder: fastokens")) == (0, 2, 2)
    assert len(started) == 1
    assert is_over(started[0])
    make(tokenizer, output="plain")
    make(tokenizer, output="plain-ids", special_tokens="as_ids")
    assert shard_bytes("x") == shard_bytes("plain")
    assert shard_bytes("y") == shard_bytes("plain-ids")
    assert shard_bytes("x") != shard_bytes("y")


def test_nothing_is_begun_where_something_is_there(tokenizer, command, started):
    assert command("prepare", "recipe.yaml")[0] == 0
    assert command("prepare", "recipe.yaml")[1].count("is up to date") == 2
    assert command("prepare", "recipe.yaml", "--verify")[0] == 0
    assert len(started) == 1


@pytest.mark.parametrize(
    ("override", "code", "message"),
    [
        ("prepare.0.min_tokens=0", 2, "prepare.0.min_tokens is 0"),
        ("prepare.0.sources=[nowhere]", 3, "nowhere"),
        ("tokenizer.path=nowhere", 3, "nowhere/tokenizer.json: cannot be read"),
        ("--unit=٣/4", 2, "--unit is ٣/4"),
    ],
)
def test_errors_are_the_same_and_end_what_was_begun(tokenizer, command, started, override, code, message):
    found, _, err = command("prepare", "recipe.yaml", override)
    assert found == code
    assert message in err
    assert len(started) == (override != "tokenizer.path=nowhere")
    assert all(map(is_over, started))


@pytest.mark.parametrize(
    "values",
    [
        {},
        {**VALUES, "tokenizer": {"path": 7}},
        {**VALUES, "tokenizer": {"path": "no\0where"}},
        {**VALUES, "tokenizer": None},
        {**VALUES, "prepare": []},
        {**VALUES, "prepare": [{"sources": []}]},
        {**VALUES, "prepare": {"output": "x"}},
    ],
)
def test_values_that_nobody_has_checked_do_no_harm(tokenizer, values):
    assert early_start(values) == []


def test_a_library_that_is_absent_is_passed_over(tokenizer, monkeypatch):
    real = builtins.__import__

    def without(name, *args, **settings):
        if name in ("fastokens", "gigatoken"):
            raise ImportError(name)
        return real(name, *args, **settings)

    monkeypatch.setattr(builtins, "__import__", without)
    (start,) = early_start(VALUES)
    section = run.PrepareSection(output="x", sources=["corpus"])
    result = run.prepare(section, tokenizer=start.tokenizer, seed=1, early=start)
    start.close()
    assert result.manifest.encoder.startswith("tokenizers ")
    assert "not fastokens: it is not installed" in result.notes


def test_a_tokenizer_that_cannot_be_read_is_an_error_of_the_judge(tokenizer, tmp_path):
    (tmp_path / "tokenizer" / "tokenizer.json").write_text(
        '{"model": {"vocab": {}}, "added_tokens": [{"id": 0, "content": "</s>", "special": true}]}'
    )
    (start,) = early_start(VALUES)
    section = run.PrepareSection(output="x", sources=["corpus"])
    with pytest.raises(DataError, match="is not a tokenizer that"):
        run.prepare(section, tokenizer=start.tokenizer, seed=1, early=start)
    start.close()


def test_only_one_thread_is_left_when_processes_fork(tokenizer):
    before = threading.active_count()
    (start,) = early_start(VALUES)
    start.wait()
    assert threading.active_count() == before
    start.close()


def test_what_begins_early_imports_nothing_slow():
    slow = "('pydantic', 'numpy', 'tokenizers', 'torch', 'pyarrow', 'rich', 'zstandard')"
    code = f"import sys, bloomery.cli.prepare, bloomery.prepare.early; print([m for m in {slow} if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"
