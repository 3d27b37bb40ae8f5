"""`bloomery prepare` that is killed, shared, starved of disk or disturbed: the result is the same, or nothing."""

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

from bloomery.base.errors import DataError, StorageError
from bloomery.data.tokenizer import Tokenizer
from bloomery.prepare.tokenize import UnitTokenizer
from prepare_samples import make, make_texts, make_tokenizer, shard_bytes, small_units, write_jsonl


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory) -> Tokenizer:
    return make_tokenizer(tmp_path_factory.mktemp("t"))


@pytest.fixture
def corpus(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    small_units(monkeypatch)
    write_jsonl(tmp_path / "corpus" / "a.jsonl", make_texts(600))
    write_jsonl(tmp_path / "corpus" / "b.jsonl.zst", make_texts(200, seed=1))
    return tmp_path


FIELDS = {"deduplicate": True, "workers": 2}


def in_a_process(work, *, kill_after=None):
    """Run it in a process of its own group and kill that with SIGKILL; True if it had ended by itself."""
    pid = os.fork()
    if not pid:
        os.setpgid(0, 0)
        with contextlib.suppress(BaseException):
            work()
            os._exit(0)
        os._exit(1)
    if kill_after is not None:
        time.sleep(kill_after)
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)  # the process alone: its workers must notice by themselves
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def test_killed_at_random_moments_the_result_is_the_same(corpus, tokenizer):
    started = time.monotonic()
    make(tokenizer, output="right", **FIELDS)
    seconds = time.monotonic() - started
    right = shard_bytes("right", manifest=True)
    moments = random.Random(7)
    finished = [f"x{ending}" for ending in (".bin", ".idx", ".manifest.json")]
    for _ in range(8):
        in_a_process(lambda: make(tokenizer, **FIELDS), kill_after=moments.uniform(0, seconds))
        there = sorted(path.name for path in corpus.glob("x.*") if path.is_file())
        assert finished[2] not in there or there == finished, "a manifest stands for a whole shard"
        if there == finished:
            Path("x.manifest.json").unlink()
    make(tokenizer, **FIELDS)
    assert shard_bytes(manifest=True) == right
    assert sorted(path.name for path in corpus.glob("x.*")) == finished, "nothing else is left"


def write_recipe(tokenizer):
    recipe = {
        "base": "quickstart",
        "tokenizer": {"path": os.path.dirname(tokenizer.path)},
        "model": {"vocab_size": 300},
        "prepare": [{"output": "x", "sources": ["corpus"]}],
    }
    Path("r.yaml").write_text(yaml.safe_dump(recipe))


def test_the_command_itself_survives_kill(corpus, tokenizer, monkeypatch):
    write_recipe(tokenizer)
    words = [sys.executable, "-m", "bloomery", "prepare", "r.yaml", "--workers", "2"]
    process = subprocess.Popen(words, stderr=subprocess.DEVNULL, start_new_session=True)
    while not list(corpus.glob("x.parts/*")) and process.poll() is None:
        time.sleep(0.01)
    process.kill()
    process.wait()
    assert not Path("x.idx").exists()
    ended = subprocess.run([*words, "--json"], capture_output=True, text=True, check=True)
    assert json.loads(ended.stdout)["x"]["documents"] > 700
    make(tokenizer, output="y", seed=42)
    assert shard_bytes() == shard_bytes("y")
    assert subprocess.run([*words, "--verify"], check=False).returncode == 0
    Path("x.bin").write_bytes(b"\0" * Path("x.bin").stat().st_size)
    broken = subprocess.run([*words, "--verify"], capture_output=True, text=True, check=False)
    assert broken.returncode == 3
    assert "x.bin is missing, or is not what the sources give" in broken.stderr


def count_made(monkeypatch, tmp_path):
    """A function that says which units were made since it was last asked."""
    log = tmp_path / "made.log"
    real = UnitTokenizer.make_part

    def logged(self, number):
        with open(log, "a") as file:
            file.write(f"{number}\n")
        return real(self, number)

    def made():
        numbers = sorted(map(int, log.read_text().split())) if log.exists() else []
        log.unlink(missing_ok=True)
        return numbers

    monkeypatch.setattr(UnitTokenizer, "make_part", logged)
    return made


def test_only_what_is_missing_or_damaged_is_made_again(corpus, tokenizer, monkeypatch):
    made = count_made(monkeypatch, corpus)
    make(tokenizer, output="right")
    all_units = made()
    assert all_units == list(range(len(all_units)))
    for k in (0, 1):
        make(tokenizer, share=(k, 2))
    assert made() == all_units
    for k in (0, 1):
        make(tokenizer, share=(k, 2))
    assert made() == [], "shares that are done are not done again"
    parts = corpus / "x.parts"
    (parts / "000001.part").write_bytes((parts / "000001.part").read_bytes()[:-1])
    (parts / "000002.part").unlink()
    (parts / "000003.done").write_text("{")
    marker = json.loads((parts / "000004.done").read_text())
    (parts / "000004.done").write_text(json.dumps({**marker, "key": "of other settings"}))
    (parts / "000005.tmp-123-abc").write_bytes(b"half")
    os.utime(corpus / "corpus" / "a.jsonl")
    make(tokenizer)
    assert made() == [1, 2, 3, 4]
    assert shard_bytes() == shard_bytes("right")
    assert not parts.exists()


@pytest.mark.parametrize(
    "lie",
    [
        {"unit": 3},
        {"inputs": []},
        {"runs": []},
        {"runs": [[10**30, 1, 1]]},
        {"runs": [[1, 2, 3]]},
        {"dropped": {}},
        {"dropped": dict.fromkeys(["empty", "short", "long", "duplicate", "bad"], -1)},
    ],
)
def test_a_marker_that_its_part_contradicts_does_not_count(corpus, tokenizer, monkeypatch, lie):
    made = count_made(monkeypatch, corpus)
    make(tokenizer, share=(0, 1))
    right, marker = made(), corpus / "x.parts" / "000001.done"
    assert len(right) > 3
    marker.write_text(json.dumps({**json.loads(marker.read_text()), **lie}))
    make(tokenizer)
    assert made() == [1]


def test_a_changed_input_or_setting_makes_parts_worthless(corpus, tokenizer, monkeypatch):
    made = count_made(monkeypatch, corpus)
    make(tokenizer, share=(0, 1))
    units = made()
    make(tokenizer, share=(0, 1), min_tokens=3)
    assert made() == units
    path = corpus / "corpus" / "a.jsonl"
    path.write_bytes(path.read_bytes().replace(b"text", b"TEXT").replace(b"TEXT", b"text").replace(b"the", b"eht", 1))
    make(tokenizer, share=(0, 1), min_tokens=3)
    assert made() == [0], "the ranges of the file that are as they were"


def test_merging_makes_the_units_that_are_missing(corpus, tokenizer, monkeypatch):
    made = count_made(monkeypatch, corpus)
    make(tokenizer, output="right")
    units = made()
    make(tokenizer, share=(1, 3))
    assert made() == units[1::3]
    make(tokenizer)
    assert made() == sorted({*units} - {*units[1::3]})
    assert shard_bytes() == shard_bytes("right")


def test_a_broken_line_leaves_no_marker_and_the_rest_is_kept(corpus, tokenizer, monkeypatch):
    path = corpus / "corpus" / "a.jsonl"
    good = path.read_bytes()
    position = good.index(b'{"id": 200,')
    path.write_bytes(good[:position] + b'["id"]      ' + good[position + 12 :])
    with pytest.raises(DataError, match=r"corpus/a.jsonl:201: is not JSON"):
        make(tokenizer)
    markers = {marker.stem for marker in corpus.glob("x.parts/*.done")}
    assert markers
    assert not Path("x.bin").exists()
    assert make(tokenizer, bad_records="skip").manifest.dropped["bad"] == 1
    path.write_bytes(good)
    make(tokenizer)
    make(tokenizer, output="right")
    assert shard_bytes() == shard_bytes("right")


def test_a_worker_that_is_killed_is_an_error_not_a_hang(corpus, tokenizer, monkeypatch):
    def die(*_):
        os.kill(os.getpid(), signal.SIGKILL)

    monkeypatch.setattr(UnitTokenizer, "make_part", die)
    with pytest.raises(DataError, match=r"a worker process was killed.*fewer --workers"):
        make(tokenizer, workers=2)


SLOW = """
import sys, time
from bloomery.base import signals
signals.listen()
from bloomery.cli.main import main
from bloomery.prepare.tokenize import UnitTokenizer

def make_part(self, number):
    open("begun", "a").close()
    time.sleep(60)

UnitTokenizer.make_part = make_part
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("whole_group", [True, False], ids=["group", "process"])
def test_a_signal_ends_the_command_and_its_workers_with_130(corpus, tokenizer, number, whole_group):
    write_recipe(tokenizer)
    words = [sys.executable, "-c", SLOW, "prepare", "r.yaml", "--workers", "2"]
    process = subprocess.Popen(words, stderr=subprocess.PIPE, text=True, start_new_session=True)
    while not Path("begun").exists() and process.poll() is None:
        time.sleep(0.01)
    started = time.monotonic()
    os.killpg(process.pid, number) if whole_group else process.send_signal(number)
    _, err = process.communicate(timeout=30)  # which waits for the workers too: they have its standard error
    assert (process.returncode, err) == (130, f"bloomery: interrupted by {number.name}\n")
    assert time.monotonic() - started < 10


def test_an_interrupt_leaves_the_old_shard_whole(corpus, tokenizer, monkeypatch):
    make(tokenizer)
    before = shard_bytes(manifest=True)

    def interrupt(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr("bloomery.prepare.merge.Merge.write", interrupt)
    with pytest.raises(KeyboardInterrupt):
        make(tokenizer, seed=2)
    assert shard_bytes(manifest=True) == before


@contextlib.contextmanager
def file_system(folder, options):
    """A small file system of its own, in memory."""
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder)]
    if os.geteuid() or subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("needs the right to mount a small file system")
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


def test_an_unwritable_folder_is_named(corpus, tokenizer):
    with (
        file_system(corpus / "locked", "ro"),
        pytest.raises(StorageError, match=r"cannot create the folder locked/x.parts: Read-only.*prepare.output"),
    ):
        make(tokenizer, output="locked/x")


@pytest.mark.parametrize("kilobytes", [4, 48, 120])
def test_a_full_disk_is_named_and_nothing_half_written_has_a_name(corpus, tokenizer, kilobytes):
    """The sizes fill the disk while parts are made, and while they are merged."""
    small = corpus / "small"
    with file_system(small, f"size={kilobytes}k"):
        with pytest.raises(StorageError, match=r"No space left.*prepare.output.*run the command again") as caught:
            make(tokenizer, output="small/x", workers=2)
        assert "--run-dir" not in str(caught.value)
        assert sorted(path.name for path in small.iterdir()) == [".x.lock", "x.parts"]
        subprocess.run(["mount", "-o", "remount,size=4m", str(small)], check=True)
        make(tokenizer, output="small/x")
        make(tokenizer, output="right")
        assert shard_bytes("small/x") == shard_bytes("right")
