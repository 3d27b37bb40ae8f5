"""`bloomery prepare` beside other runs, and where its output or its processes fail: nothing wrong is written, and the
message says what is so."""

# ruff: noqa: E501  (tables of cases, one a line)

import contextlib
import ctypes
import errno
import gzip
import json
import os
import re
import struct
import subprocess
import sys
import traceback
from pathlib import Path

import numpy as np
import pytest
import yaml
import zstandard

from bloomery.base.errors import DataError, StorageError
from bloomery.cli.main import main
from bloomery.config.recipe import PrepareSection
from bloomery.data.tokenizer import Tokenizer
from bloomery.prepare.parts import PartsFolder
from prepare_samples import make, make_texts, make_tokenizer, prepare, shard_bytes, small_units, write_jsonl


@pytest.fixture
def tokenizer(tmp_path, monkeypatch) -> Tokenizer:
    """And a corpus and a recipe, in the working directory."""
    monkeypatch.chdir(tmp_path)
    small_units(monkeypatch)
    write_jsonl(tmp_path / "corpus" / "a.jsonl", make_texts(300))
    write_jsonl(tmp_path / "corpus" / "b.jsonl", make_texts(50, seed=1))
    recipe = {
        "base": "quickstart",
        "tokenizer": {"path": "tokenizer"},
        "model": {"vocab_size": 300},
        "prepare": [{"output": "x", "sources": ["corpus"]}],
    }
    Path("r.yaml").write_text(yaml.safe_dump(recipe))
    return make_tokenizer(tmp_path / "tokenizer")


def failing(number: int):
    def fail(*_, **__):
        raise OSError(number, os.strerror(number))

    return fail


@pytest.mark.parametrize(
    ("first", "second", "fits"),
    [(None, (0, 1), False), ((0, 2), None, False), ((0, 2), (1, 2), True)],
)
def test_only_shares_work_beside_each_other(tokenizer, monkeypatch, first, second, fits):
    monkeypatch.setattr("bloomery.prepare.parts._LOCK_TIMEOUT_SECONDS", 0.0)
    make(tokenizer, output="right")
    refused = []

    def disturb(_):
        if refused:
            return
        refused.append("no")
        try:
            make(tokenizer, share=second, seed=7)
        except DataError as error:
            refused[0] = str(error)

    section = PrepareSection(output="x", sources=["corpus"])
    prepare(section, tokenizer=tokenizer, seed=1, share=first, progress=disturb)
    rule = r"x.parts: another run is at work on this.*--unit k/n"
    assert refused == ["no"] if fits else re.search(rule, refused[0])
    if first is None:
        assert shard_bytes() == shard_bytes("right")
        assert not Path("x.parts").exists()


@pytest.mark.parametrize("share", [None, (0, 1)])
def test_a_run_that_waited_for_one_that_tidied_up_begins_again(tokenizer, monkeypatch, share):
    folder = PartsFolder("x", np.dtype(np.uint16))
    waited = []
    with contextlib.ExitStack() as stack:
        lock = stack.enter_context(folder.locked(shared=False))

        def end_the_other(_seconds):
            waited.append(1)
            folder.remove(lock)
            stack.close()

        monkeypatch.setattr("bloomery.prepare.parts.time.sleep", end_the_other)
        make(tokenizer, share=share)
    assert waited
    assert Path("x.parts/000000.done").exists() == (share is not None)


def test_a_share_of_a_finished_shard_removes_the_folder_unless_others_are_in_it(tokenizer):
    """`locked` has made the folder, although the shard was finished while it waited."""
    one, two = (PartsFolder("x", np.dtype(np.uint16)) for _ in range(2))
    with one.locked(shared=True) as lock:
        with two.locked(shared=True) as other:
            two.remove(other)
        assert one.path.exists()
        one.remove(lock)
        assert not one.path.exists()


def in_a_process(stderr: int, *words: str, mighty: bool = True) -> int:
    """The exit code of the command."""
    pid = os.fork()
    if not pid:
        code = 99
        try:
            os.dup2(stderr, 2)
            sys.stderr = os.fdopen(2, "w", buffering=1)
            if not mighty:  # root may do everything only by its capabilities
                version, none = struct.pack("Ii", 0x20080522, 0), bytes(24)
                assert not ctypes.CDLL(None).capset(version, none)
            code = main(words)
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def said_to_a_user(*words: str) -> tuple[int, str]:
    """(exit code, standard error) of the command, run by somebody for whom permissions count."""
    with open("said", "w") as file:
        code = in_a_process(file.fileno(), *words, mighty=False)
    return code, Path("said").read_text()


def test_a_folder_that_may_not_be_searched_is_called_that(tokenizer, tmp_path):
    make(tokenizer, output="locked/x", seed=42)
    (tmp_path / "locked").chmod(0)
    try:
        for words, code, message in [
            (("prepare", "r.yaml", "prepare.0.output=locked/x"), 5, "cannot create the folder locked/x.parts"),
            (
                ("prepare", "r.yaml", "prepare.0.output=locked/x", "--verify"),
                3,
                "locked/x.manifest.json: cannot be read",
            ),
            (("inspect", "data", "locked/x"), 3, "locked/x.idx: cannot be read"),
        ]:
            found, said = said_to_a_user(*words)
            assert f"{message}: Permission denied" in said
            assert found == code
            assert "ermissions" in said
            assert "JSON" not in said
            assert "no such file" not in said
            assert "no recipe" not in said
    finally:
        (tmp_path / "locked").chmod(0o755)


def test_a_name_that_is_too_long_is_reported(tokenizer, command):
    name, unread = "x" * 300, "cannot be read: File name too long. Check its path"
    prepare = ("prepare", "r.yaml", f"prepare.0.output={name}")
    code, _, err = command(*prepare)
    assert (code, f"cannot create the folder {name}.parts: File name too long (ENAMETOOLONG). " in err) == (5, True), (
        err
    )
    assert "choose another place for prepare.output" in err
    for words in ((*prepare, "--verify"), ("inspect", "data", name)):
        code, _, err = command(*words)
        assert (code, unread in err) == (3, True), err


def test_processes_that_cannot_be_started_are_not_a_full_disk(tokenizer, command, monkeypatch):
    monkeypatch.setattr(os, "fork", failing(errno.EMFILE))
    code, _, err = command("prepare", "r.yaml")
    assert code == 3
    assert "cannot start a worker process: Too many open files (EMFILE)." in err
    assert "fewer --workers" in err
    assert "disk" not in err


@pytest.mark.parametrize("function", ["parts.np.fromfile", "merge.Merge._take"])
def test_parts_that_cannot_be_read_are_named(tokenizer, monkeypatch, function):
    monkeypatch.setattr(f"bloomery.prepare.{function}", failing(errno.EIO))
    with pytest.raises(StorageError, match=r"^cannot (read|write) x.parts.*: Input/output error \(EIO\).*dmesg"):
        make(tokenizer)


def test_the_work_continues_where_nobody_reads_the_progress(tokenizer):
    recipe = yaml.safe_load(Path("r.yaml").read_text())
    recipe["prepare"].append({"output": "y", "sources": ["corpus"]})
    Path("r.yaml").write_text(yaml.safe_dump(recipe))
    ours, theirs = os.pipe()
    os.close(ours)
    words = [sys.executable, "-m", "bloomery", "prepare", "r.yaml"]
    assert subprocess.run(words, stderr=theirs, env={**os.environ, "BLOOMERY_SAY_AFTER": "0"}).returncode == 0
    os.close(theirs)
    assert Path("y.idx").exists()


@pytest.mark.parametrize("closed", ["2>&-", "<&- 2>&-"])
def test_without_standard_error_the_work_is_done_and_the_answer_stays_clean(tokenizer, closed):
    words = ["sh", "-c", f'exec "$@" {closed}', "sh", sys.executable, "-m", "bloomery"]
    done = subprocess.run([*words, "prepare", "r.yaml", "--json"], stdout=subprocess.PIPE, text=True)
    assert done.returncode == 0
    assert json.loads(done.stdout)["x"]["documents"]
    done = subprocess.run([*words, "prepare", "r.yaml", "prepare.0.sources=[nowhere]"], stdout=subprocess.PIPE)
    assert (done.returncode, done.stdout) == (3, b"")


def test_a_folder_in_the_place_of_a_file_is_named_and_the_work_is_kept(tokenizer, command):
    Path("x.bin").mkdir()
    code, _, err = command("prepare", "r.yaml")
    assert (code, "cannot write x.bin: Is a directory" in err) == (5, True), err
    Path("x.bin").rmdir()
    Path("x.bin").symlink_to("corpus")
    assert command("prepare", "r.yaml")[0] == 0, "a link is replaced"
    assert Path("corpus").is_dir()


def test_what_is_missing_for_any_shard_is_reported_before_the_first(tokenizer, command):
    recipe = yaml.safe_load(Path("r.yaml").read_text())
    for name, source in [("y", "nowhere"), ("z", "corpus"), ("v", "elsewhere"), ("w", "nowhere")]:
        recipe["prepare"].append({"output": name, "sources": [source]})
    Path("r.yaml").write_text(yaml.safe_dump(recipe))
    code, out, err = command("prepare", "r.yaml", "--json")
    assert (code, out) == (3, "")
    assert err.count("the source 'nowhere' matches no file") == 1
    assert err.count("the source 'elsewhere' matches no file") == 1
    assert not list(Path().glob("x*"))


def test_temporary_files_are_removed_when_the_merge_fails(tokenizer, monkeypatch):
    def full(self, part):
        raise StorageError([])

    monkeypatch.setattr(PartsFolder, "index", full)
    with pytest.raises(StorageError):
        make(tokenizer)
    assert {path.suffix for path in Path("x.parts").iterdir()} == {".part", ".done"}


BOMBS = {
    "a long line": ("a.jsonl.zst", b'{"text": "short"}\n{"text": "' + b"a" * 4_000_000 + b'"}\n', "a.jsonl.zst:2: is too long"),
    "a long line in a plain file": ("a.jsonl", b"\n" * 5 + b"0" * 4_000_000, "a.jsonl:6: is too long"),
    "a long line of white space": ("a.jsonl.gz", b" " * 4_000_000, "a.jsonl.gz:1: is too long"),
    "blank lines without end": ("a.jsonl.zst", b'{"text": "short"}\n' + b" \r\n" * 1_000_000, "follows blank lines without end"),
    "a long text": ("a.txt.zst", b"a" * 4_000_000, "a.txt.zst: is too long"),
}  # fmt: skip


@pytest.mark.parametrize("bomb", BOMBS)
def test_a_document_or_blank_lines_without_end_end_with_a_sentence(tokenizer, command, monkeypatch, bomb):
    monkeypatch.setattr("bloomery.prepare.read.MOST_DOCUMENT_BYTES", 100_000)
    monkeypatch.setattr("bloomery.prepare.read.MOST_BLANK_BYTES", 1_500_000)
    name, content, message = BOMBS[bomb]
    pack = {".zst": zstandard.compress, ".gz": gzip.compress}.get(Path(name).suffix, bytes)
    Path("bomb").mkdir()
    Path("bomb", name).write_bytes(pack(content))
    runs = [("prepare", "r.yaml", "prepare.0.sources=[bomb]"), ("extract", "bomb", "--output", "out", "--chunks", "1")]
    for words in runs if ".jsonl" in name else runs[:1]:
        code, _, err = command(*words)
        assert (code, message in err) == (3, True), err
        assert "Traceback" not in err
    assert not Path("x.idx").exists()


@pytest.mark.parametrize("others", [1, 10_000])
def test_a_row_that_is_too_long_is_named(tokenizer, command, monkeypatch, others):
    parquet = pytest.importorskip("pyarrow.parquet")
    import pyarrow

    monkeypatch.setattr("bloomery.prepare.read.MOST_DOCUMENT_BYTES", 100_000)
    Path("bomb").mkdir()
    parquet.write_table(pyarrow.table({"text": [*["short"] * others, "a" * 200_000]}), "bomb/a.parquet")
    code, _, err = command("prepare", "r.yaml", "prepare.0.sources=[bomb]")
    assert (code, f"bomb/a.parquet:row {others + 1}: is too long" in err) == (3, True), err


@pytest.mark.parametrize("words", ["4/4", "-1/2", "1", "x/y", "0/2 --verify"])
def test_a_share_that_is_none_is_refused(tokenizer, command, words):
    code, _, err = command("prepare", "r.yaml", "--unit", *words.split())
    assert (code, "--unit" in err) == (2, True)
