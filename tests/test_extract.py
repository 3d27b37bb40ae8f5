"""`bloomery extract`: every line of every input, once, in order; damaged inputs are named."""

from __future__ import annotations

import gzip
import hashlib
import json
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import zstandard

from bloomery.base.errors import DataError, StorageError
from bloomery.prepare import extract as extract_module
from bloomery.prepare.extract import extract, plan_chunks

Command = Callable[..., tuple[int, str, str]]


def lines(name: str, count: int) -> list[bytes]:
    random_text = random.Random(name)
    return [
        json.dumps({"text": f"{name} {n} " + "ä" * random_text.randrange(300), "meta": {}}).encode()
        for n in range(count)
    ]


def zst(data: bytes, *, frames: int = 1, window_log: int = 17) -> bytes:
    parameters = zstandard.ZstdCompressionParameters.from_level(1, window_log=window_log)
    size = -(-len(data) // frames)
    parts = []
    for n in range(frames):
        compressor = zstandard.ZstdCompressor(compression_params=parameters).compressobj()
        parts.append(compressor.compress(data[n * size : (n + 1) * size]) + compressor.flush())
    skippable = b"\x50\x2a\x4d\x18" + (4).to_bytes(4, "little") + b"pzst"
    return (skippable if frames > 1 else b"").join(parts)


@pytest.fixture
def raw(tmp_path: Path) -> Path:
    """Twelve files of all kinds, s0 to s11, the ends of some without a newline."""
    folder = tmp_path / "raw"
    folder.mkdir()
    for n in range(12):
        data = b"\n".join(lines(f"s{n}", 20 + n)) + (b"" if n % 2 else b"\n")
        if n % 3 == 0:
            (folder / f"s{n}.jsonl").write_bytes(data)
        elif n % 3 == 1:
            (folder / f"s{n}.jsonl.gz").write_bytes(gzip.compress(data[:700]) + gzip.compress(data[700:]))
        else:
            (folder / f"s{n}.jsonl.zst").write_bytes(zst(data, frames=n, window_log=27 if n == 2 else 17))
    return folder


def expected(first: int, stop: int) -> bytes:
    return b"".join(line + b"\n" for n in range(first, stop) for line in lines(f"s{n}", 20 + n))


def outputs(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.glob("*")) if not path.name.startswith(".")}


def test_every_line_comes_out_once_and_in_natural_order(tmp_path: Path, raw: Path, command: Command) -> None:
    out = tmp_path / "out"
    code, text, err = command("extract", str(raw), "--output", str(out), "--chunks", "5")
    assert code == 0, err
    assert "5 written, 0 already there. 12 files in, 5 out; 306 documents in and out" in text
    bounds = [0, 2, 4, 7, 9, 12]
    for k in range(5):
        assert (out / f"chunk-0000{k}-of-00005.jsonl").read_bytes() == expected(bounds[k], bounds[k + 1])
    assert set(outputs(out)) == {*(f"chunk-0000{k}-of-00005.jsonl" for k in range(5)), "manifest.json"}


def test_the_manifest_has_hashes_of_inputs_and_outputs(tmp_path: Path, raw: Path, command: Command) -> None:
    out = tmp_path / "out"
    code, text, _ = command("extract", f"{raw}/s*.jsonl*", "--output", str(out), "--chunks", "3", "--json")
    assert code == 0
    answer, manifest = json.loads(text), json.loads((out / "manifest.json").read_text())
    assert answer["documents"] == manifest["documents"] == manifest["input_documents"] == 306
    assert answer["bytes"] == manifest["bytes"] == len(expected(0, 12))
    assert answer["input_files"] == manifest["input_files"] == 12
    for chunk in manifest["chunks"]:
        data = (out / chunk["file"]).read_bytes()
        assert chunk["sha256"] == hashlib.sha256(data).hexdigest()
        assert (chunk["bytes"], chunk["documents"]) == (len(data), data.count(b"\n"))
        assert chunk["documents"] == sum(count["documents"] for count in chunk["inputs"])
        for count in chunk["inputs"]:
            packed = Path(count["path"]).read_bytes()
            assert (count["bytes"], count["sha256"]) == (len(packed), hashlib.sha256(packed).hexdigest())


def test_natural_order(tmp_path: Path) -> None:
    names = ["1", "9", "10", "a", "a1", "a02", "a2", "a10", "b"]
    for name in names:
        (tmp_path / f"{name}.jsonl").write_text("{}\n")
    (chunk,) = plan_chunks([str(tmp_path)], tmp_path / "out", chunks=1)
    assert [Path(file.path).stem for file in chunk.inputs] == ["1", "9", "10", "a1", "a02", "a2", "a10", "a", "b"]


def test_a_file_in_two_sources_is_named(tmp_path: Path, raw: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    plan = plan_chunks(["raw"], tmp_path / "out", chunks=4)
    assert [len(chunk.inputs) for chunk in plan] == [3, 3, 3, 3]
    with pytest.raises(DataError, match=r"s3.jsonl: is in the source 'raw/s3.jsonl' and in 'raw'"):
        plan_chunks(["raw", "raw/s3.jsonl"], tmp_path / "out", chunks=4)


# ---------------------------------------------------------------- units, jobs, running it again


def test_the_same_bytes_however_many_jobs(tmp_path: Path, raw: Path) -> None:
    for jobs in (1, 2):
        extract([str(raw)], tmp_path / str(jobs), chunks=5, jobs=jobs)
    assert outputs(tmp_path / "1") == outputs(tmp_path / "2")


def test_shares_and_a_last_run_give_the_bytes_of_one_run(tmp_path: Path, raw: Path, command: Command) -> None:
    extract([str(raw)], tmp_path / "whole", chunks=5)
    out = tmp_path / "out"
    words = ["extract", str(raw), "--output", str(out), "--chunks", "5"]
    good = (raw / "s8.jsonl.zst").read_bytes()
    damaged(raw, "s8.jsonl.zst", lambda data: data[:-5])
    processes = [
        subprocess.Popen([sys.executable, "-m", "bloomery", *words, "--unit", f"{k}/3"], stderr=subprocess.PIPE)
        for k in range(3)
    ]
    said = [process.communicate()[1].decode() for process in processes]
    assert ["s8.jsonl.zst" in each for each in said] == [True, False, False], said
    (raw / "s8.jsonl.zst").write_bytes(good)
    code, text, err = command(*words, "--unit", "0/3")
    assert code == 0, err
    assert text.startswith(f"{out}: share 0/3: 1 written, 1 already there. 4 files in, 2 out; ")
    assert "manifest" not in text
    assert {*outputs(out)} == {*outputs(tmp_path / "whole")} - {"manifest.json"}
    (out / "chunk-00001-of-00005.jsonl").unlink()
    code, text, _ = command(*words, "--json")
    assert code == 0
    assert (json.loads(text)["written"], json.loads(text)["already_there"]) == (1, 4)
    assert outputs(out) == outputs(tmp_path / "whole")


def test_only_what_is_missing_or_changed_is_made_again(
    tmp_path: Path, raw: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    extract([str(raw)], out, chunks=6)
    good = outputs(out)
    made: list[str] = []
    original = extract_module.make_chunk
    monkeypatch.setattr(extract_module, "make_chunk", lambda *args: made.append(args[0].path.name) or original(*args))

    def again() -> list[str]:
        made.clear()
        extract([str(raw)], out, chunks=6)
        assert outputs(out) == good
        return [name[10:11] for name in made]

    assert again() == []
    (out / "chunk-00001-of-00006.jsonl").unlink()
    (out / ".chunk-00002-of-00006.json").unlink()
    (out / "chunk-00003-of-00006.jsonl").write_bytes(b"short")
    flipped = bytearray(good["chunk-00004-of-00006.jsonl"])
    flipped[5] ^= 1
    (out / "chunk-00004-of-00006.jsonl").write_bytes(flipped)
    assert again() == ["1", "2", "3", "4"]


def test_a_changed_input_is_noticed(tmp_path: Path, raw: Path) -> None:
    extract([str(raw)], tmp_path / "out", chunks=6)
    before = outputs(tmp_path / "out")
    (raw / "s6.jsonl").write_bytes(expected(7, 8))
    result = extract([str(raw)], tmp_path / "out", chunks=6)
    assert (result.written, result.already_there) == (1, 5)
    after = outputs(tmp_path / "out")
    assert {name for name in before if before[name] != after[name]} == {"chunk-00003-of-00006.jsonl", "manifest.json"}


@pytest.mark.parametrize("facts", [{}, [["a", 1]], {"documents": "x", "bytes": 1, "inputs": []}])
def test_a_record_that_is_none_makes_its_chunk_again(tmp_path: Path, raw: Path, facts: Any) -> None:
    extract([str(raw)], tmp_path / "out", chunks=6)
    record = tmp_path / "out" / ".chunk-00003-of-00006.json"
    record.write_text(json.dumps({**json.loads(record.read_text()), "facts": facts}))
    assert extract([str(raw)], tmp_path / "out", chunks=6).written == 1


def test_a_record_of_very_many_inputs_is_read(tmp_path: Path, raw: Path) -> None:
    extract([str(raw)], tmp_path / "out", chunks=1)
    (record,) = (tmp_path / "out").glob(".chunk-*.json")
    record.write_text(record.read_text() + " " * (17 << 20))
    assert extract([str(raw)], tmp_path / "out", chunks=1).written == 0


KILLED = """
import os, sys, threading, time
from pathlib import Path
from bloomery.prepare.extract import extract
threading.Timer(float(sys.argv[3]), lambda: os.kill(os.getpid(), 9)).start()
extract([sys.argv[1]], Path(sys.argv[2]), chunks=6)
time.sleep(60)
"""


def test_kill_9_at_any_moment_then_again(tmp_path: Path, raw: Path) -> None:
    extract([str(raw)], tmp_path / "whole", chunks=6)
    good = outputs(tmp_path / "whole")
    for number in range(3):
        words = [sys.executable, "-c", KILLED, str(raw), str(tmp_path / "out"), str(0.004 + 0.008 * number)]
        assert subprocess.run(words).returncode == -9
        for name, data in outputs(tmp_path / "out").items():
            assert data == good[name]
    extract([str(raw)], tmp_path / "out", chunks=6)
    assert outputs(tmp_path / "out") == good
    assert not list((tmp_path / "out").glob(".*partial*"))


# ---------------------------------------------------------------- bad input


def damaged(raw: Path, name: str, change: Callable[[bytes], bytes]) -> None:
    path = raw / name
    path.write_bytes(change(path.read_bytes()))


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("s2.jsonl.zst", lambda data: data[:-5], "is truncated or damaged"),
        ("s2.jsonl.zst", lambda data: data[:2], "is truncated or damaged"),
        ("s2.jsonl.zst", lambda data: data + b"garbage", "damaged"),
        ("s2.jsonl.zst", lambda data: b"not zst at all", "damaged"),
        ("s1.jsonl.gz", lambda data: data[:-5], "is truncated or damaged"),
        ("s1.jsonl.gz", lambda data: data[:40] + b"\xff" * 40 + data[80:], "is truncated or damaged"),
        ("s1.jsonl.gz", lambda data: b"plain text", "is truncated or damaged"),
        ("s0.jsonl", lambda data: data[:-9], "s0.jsonl: is truncated or damaged: its last line"),
        ("s0.jsonl", lambda data: data + b"\0" * 100, "s0.jsonl: is truncated or damaged: its last line"),
    ],
)
def test_a_damaged_input_is_named_and_nothing_is_half_written(
    tmp_path: Path, raw: Path, command: Command, name: str, change: Callable[[bytes], bytes], message: str
) -> None:
    damaged(raw, name, change)
    out = tmp_path / "out"
    code, _, err = command("extract", str(raw), "--output", str(out), "--chunks", "6", "--jobs", "1")
    assert code == 3
    assert name in err
    assert message in err
    assert "Traceback" not in err
    broken = {"s0.jsonl": 0, "s1.jsonl.gz": 0, "s2.jsonl.zst": 1}[name]
    assert set(outputs(out)) == {f"chunk-0000{k}-of-00006.jsonl" for k in range(6) if k != broken}
    assert not list(out.glob(".*partial*"))


def test_all_damaged_inputs_are_named(tmp_path: Path, raw: Path) -> None:
    damaged(raw, "s2.jsonl.zst", lambda data: data[:-5])
    damaged(raw, "s10.jsonl.gz", lambda data: data[:-5])
    with pytest.raises(DataError) as caught:
        extract([str(raw)], tmp_path / "out", chunks=6, jobs=2)
    assert {Path(problem.place).name for problem in caught.value.problems} == {"s2.jsonl.zst", "s10.jsonl.gz"}


def test_blank_lines_are_left_out(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(b'\n{"text": "one"}\r\n  \n\n{"text": "two"}\n\t')
    (tmp_path / "b.jsonl").write_bytes(b"\xef\xbb\xbf\n\n")
    (tmp_path / "c.jsonl").write_bytes(b"\xef\xbb\xbf{}")
    extract([str(tmp_path / "*.jsonl")], tmp_path / "out", chunks=1)
    assert outputs(tmp_path / "out")["chunk-00000-of-00001.jsonl"] == b'{"text": "one"}\r\n{"text": "two"}\n{}\n'
    (chunk,) = json.loads((tmp_path / "out" / "manifest.json").read_text())["chunks"]
    assert [count["documents"] for count in chunk["inputs"]] == [2, 0, 1]


def test_lines_longer_than_any_buffer(tmp_path: Path) -> None:
    long = json.dumps({"text": "x" * 5_000_000}).encode()
    (tmp_path / "a.jsonl.zst").write_bytes(zst(b"\n".join([b"{}", long, b"{}", long])))
    extract([str(tmp_path / "a.jsonl.zst")], tmp_path / "out", chunks=1)
    data = outputs(tmp_path / "out")["chunk-00000-of-00001.jsonl"]
    assert data == b"\n".join([b"{}", long, b"{}", long, b""])


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (["nowhere"], 3, "the source 'nowhere' matches no file"),
        (["note.txt"], 3, "0 input files cannot fill 3 chunks"),
        (["raw", "--chunks", "13"], 3, "12 input files cannot fill 13 chunks"),
        (["raw", "--chunks", "0"], 2, "is not an integer"),
        (["raw", "--chunks", "²"], 2, "invalid number value"),
        (["raw", "--output", "other"], 3, "holds chunk-00000-of-00002.jsonl, which is not of this extraction"),
        (["raw", "--output", "strange"], 3, "holds manifest.json, which is not of this extraction"),
        (["raw", "--output", "note.txt"], 5, "cannot create the folder note.txt"),
    ],
)
def test_what_cannot_be_done_is_refused(
    tmp_path: Path,
    raw: Path,
    monkeypatch: pytest.MonkeyPatch,
    command: Command,
    words: list[str],
    code: int,
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("note.txt").write_text("hello")
    for folder, name in (("other", "chunk-00000-of-00002.jsonl"), ("strange", "manifest.json")):
        Path(folder).mkdir()
        Path(folder, name).write_text("[]")
    defaults = [] if "--output" in words else ["--output", "out"]
    defaults += [] if "--chunks" in words else ["--chunks", "3"]
    ended, _, err = command("extract", *words, *defaults)
    assert ended == code, err
    assert message in err


@pytest.mark.parametrize(("source", "output"), [("raw", "raw"), ("raw", "link/new"), ("raw/**/*.jsonl", "raw/x")])
def test_chunks_are_never_made_of_chunks(
    tmp_path: Path, raw: Path, monkeypatch: pytest.MonkeyPatch, source: str, output: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("link").symlink_to("raw")
    counts = []
    for written in (2, 0):
        result = extract([source], Path(output), chunks=2)
        counts.append(result.input_files)
        assert result.written == written
    assert counts[0] == counts[1]


def test_a_full_disk_is_reported_and_gives_its_space_back(
    tmp_path: Path, raw: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(extract_module, "publish", full)
        with pytest.raises(StorageError, match=r"chunk-00000-of-00003.jsonl: No space left on device.*--output"):
            extract([str(raw)], tmp_path / "out", chunks=3)
    assert not outputs(tmp_path / "out")
    assert not list((tmp_path / "out").glob(".*partial*"))
    assert extract([str(raw)], tmp_path / "out", chunks=3).written == 3
