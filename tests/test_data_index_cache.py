"""Index caches: whole or absent, found by content, mended when damaged, built once by many."""

from __future__ import annotations

import fcntl
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bloomery.base.errors import StorageError
from bloomery.data.megatron import IndexCache, MegatronSource
from megatron_referee import write_lengths

KEY = {"idx": "abc", "seed": 1}


class Builder:
    """Counts how often it is asked."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self) -> dict[str, np.ndarray]:
        self.calls += 1
        return {"a": np.arange(1000, dtype=np.int32), "empty": np.zeros((0, 2))}


def entry_of(folder: Path) -> Path:
    (entry,) = folder.glob("x-*")
    return entry


def test_arrays_are_built_once_per_key_and_mapped(tmp_path: Path) -> None:
    cache, build = IndexCache(tmp_path / "new" / "cache"), Builder()
    for _ in range(2):
        arrays = cache.arrays("x", KEY, build)
        assert isinstance(arrays["a"], np.memmap)
        assert arrays["a"].tolist() == list(range(1000))
        assert (arrays["a"].dtype, arrays["empty"].shape) == (np.int32, (0, 2))
    assert build.calls == 1
    cache.arrays("x", {**KEY, "seed": 2}, build)
    cache.arrays("y", KEY, build)
    assert build.calls == 3
    assert {path.name for path in cache.folder.iterdir() if path.name.startswith(".")} == {".lock"}


@pytest.mark.parametrize("damage", ["cut", "changed", "missing", "no entry", "torn entry", "empty entry", "other key"])
def test_a_damaged_entry_is_built_again(tmp_path: Path, damage: str) -> None:
    cache, build = IndexCache(tmp_path), Builder()
    before = cache.arrays("x", KEY, build)
    array, entry = entry_of(tmp_path) / "a.npy", entry_of(tmp_path) / "entry.json"
    content = array.read_bytes()
    if damage == "cut":
        array.unlink()
        array.write_bytes(content[:-1])
    elif damage == "changed":
        array.unlink()
        array.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    elif damage == "missing":
        array.unlink()
    elif damage == "no entry":
        entry.unlink()
    elif damage == "torn entry":
        entry.write_bytes(entry.read_bytes()[:-20])
    elif damage == "empty entry":
        entry.write_bytes(b"")
    else:
        entry.write_text(entry.read_text().replace("abc", "abd"))
    assert cache.arrays("x", KEY, build)["a"].tolist() == list(range(1000))
    assert build.calls == 2
    assert before["a"].tolist() == list(range(1000)), "whoever had mapped it keeps it"
    cache.arrays("x", KEY, build)
    assert build.calls == 2
    assert {path.name for path in tmp_path.iterdir()} == {".lock", entry_of(tmp_path).name}


def build_slowly(folder: str, calls: str) -> None:
    def build() -> dict[str, np.ndarray]:
        with open(calls, "a") as file:
            file.write("built\n")
        time.sleep(0.3)
        return {"a": np.arange(5)}

    assert IndexCache(folder).arrays("x", KEY, build)["a"].tolist() == [0, 1, 2, 3, 4]


def run_together(tmp_path: Path, count: int = 4) -> int:
    """How often `count` processes at once have built."""
    context, calls = multiprocessing.get_context("fork"), tmp_path / "calls"
    processes = [context.Process(target=build_slowly, args=(str(tmp_path / "c"), str(calls))) for _ in range(count)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(30)
    assert [process.exitcode for process in processes] == [0] * count
    assert len(list((tmp_path / "c").iterdir())) == 2
    return len(calls.read_text().splitlines())


def test_one_process_builds_and_the_others_wait(tmp_path: Path) -> None:
    assert run_together(tmp_path) == 1


def test_without_locks_all_build_and_none_is_harmed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_locks(*_: Any) -> None:
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr(fcntl, "flock", no_locks)
    assert run_together(tmp_path) > 1


def test_a_builder_killed_while_writing_leaves_nothing_that_counts(tmp_path: Path) -> None:
    code = """
import os, sys, time
import numpy as np
from bloomery.data.megatron import IndexCache
save = np.save
def slow(file, array, **more):
    save(file, array[: len(array) // 2], **more); print("half", flush=True); time.sleep(60)
np.save = slow
IndexCache(sys.argv[1]).arrays("x", {"idx": "abc", "seed": 1}, lambda: {"a": np.arange(1000, dtype=np.int32)})
"""
    process = subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stdout.readline() == b"half\n"
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    process.stdout.close()
    debris = [path.name for path in tmp_path.iterdir()]
    assert any(name.startswith(".x-") for name in debris)
    build = Builder()
    assert len(IndexCache(tmp_path).arrays("x", KEY, build)["a"]) == 1000
    assert build.calls == 1


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match=r"cannot keep index caches in .*file.*Choose a data.cache_dir"):
        IndexCache(tmp_path / "file" / "cache").arrays("x", KEY, Builder())


def test_a_full_disk_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(np, "save", full)
        with pytest.raises(StorageError, match="No space left on device"):
            IndexCache(tmp_path).arrays("x", KEY, Builder())
    assert [path.name for path in tmp_path.iterdir()] == [".lock"]


def test_a_finished_cache_needs_no_write_permission(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    build = Builder()
    IndexCache(tmp_path).arrays("x", KEY, build)

    def refused(*_: Any, **__: Any) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "mkdir", refused)
    assert len(IndexCache(tmp_path).arrays("x", KEY, build)["a"]) == 1000
    assert build.calls == 1


def test_an_order_is_found_by_the_content_of_its_shard_and_not_by_its_name(tmp_path: Path) -> None:
    def entries(name: str, lengths: list[int], **changed: Any) -> int:
        settings: dict[str, Any] = {"samples": 3, "seq_length": 4, "vocab_size": 65521, "seed": 1} | changed
        prefix = write_lengths(tmp_path / name, lengths)
        MegatronSource(prefix, flavour="megatron", cache=IndexCache(tmp_path / "c"), **settings).close()
        return len(list((tmp_path / "c").glob("samples-*")))

    assert entries("a", [9, 5, 8]) == 1
    assert entries("b", [9, 5, 8]) == 1, "the same content elsewhere"
    assert entries("a", [9, 5, 8], samples=4) == 1, "as many epochs, so the same order"
    assert entries("a", [9, 5, 8], seed=2) == 2
    assert entries("a", [9, 5, 8], seq_length=5) == 3
    assert entries("a", [9, 5, 8], samples=10) == 4, "more epochs"
    assert entries("a", [9, 8, 5]) == 5, "changed under its old name"
