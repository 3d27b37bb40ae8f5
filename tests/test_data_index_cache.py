"""Index caches: whole or absent, found by content, mended when damaged, built once by many."""

from __future__ import annotations

import fcntl
import multiprocessing
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bloomery.base.errors import DataError, StorageError
from bloomery.data.megatron import IndexCache, MegatronSource
from bloomery.data.shards import ShardReader, file_checksum
from megatron_referee import write_lengths

BOUNDS = {"a": ((1000,), 0, 1000), "b": ((3, 2), 0, 1)}
KEY = {"idx": "abc", "seed": 1}


class Builder:
    """Counts how often it is asked."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self) -> dict[str, np.ndarray]:
        self.calls += 1
        return {"a": np.arange(1000, dtype=np.int32), "b": np.zeros((3, 2), np.int64)}


def test_arrays_are_built_once_per_key_and_mapped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache, build = IndexCache(tmp_path / "new" / "cache"), Builder()
    for _ in range(2):
        arrays = cache.arrays("x", BOUNDS, KEY, build)
        assert isinstance(arrays["a"], np.memmap)
        assert arrays["a"].tolist() == list(range(1000))
        assert (arrays["a"].dtype, arrays["b"].shape) == (np.int32, (3, 2))
    assert build.calls == 1
    cache.arrays("x", BOUNDS, {**KEY, "seed": 2}, build)
    cache.arrays("y", BOUNDS, KEY, build)
    assert build.calls == 3
    assert {path.name for path in cache.folder.iterdir() if path.name.startswith(".")} == {".lock"}

    def refused(*_: Any, **__: Any) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "mkdir", refused)
    assert len(cache.arrays("x", BOUNDS, KEY, build)["a"]) == 1000, "a hit needs no write permission"
    assert build.calls == 3


@pytest.mark.parametrize("damage", ["cut", "changed", "missing"])
def test_a_damaged_entry_is_built_again(tmp_path: Path, damage: str) -> None:
    cache, build = IndexCache(tmp_path), Builder()
    before = cache.arrays("x", BOUNDS, KEY, build)
    files = {path.name for path in tmp_path.iterdir()}
    (array,) = tmp_path.glob("x-*.a.*.npy")
    content = array.read_bytes()
    array.unlink()
    if damage != "missing":
        array.write_bytes(content[:-1] + (b"" if damage == "cut" else bytes([content[-1] ^ 1])))
    assert cache.arrays("x", BOUNDS, KEY, build)["a"].tolist() == list(range(1000))
    assert build.calls == 2
    assert before["a"].tolist() == list(range(1000)), "whoever had mapped it keeps it"
    cache.arrays("x", BOUNDS, KEY, build)
    assert build.calls == 2
    assert {path.name for path in tmp_path.iterdir()} == files


@pytest.mark.parametrize(
    "forged",
    [np.arange(999), np.arange(1000).reshape(10, 100), np.arange(1, 1001), np.arange(-1, 999), np.arange(1000.0)],
)
def test_an_entry_that_cannot_be_what_was_asked_for_is_built_again(tmp_path: Path, forged: np.ndarray) -> None:
    """It carries the right checksum of itself."""
    cache, build = IndexCache(tmp_path), Builder()
    cache.arrays("x", BOUNDS, KEY, build)
    forge(tmp_path, "x-*.a.*.npy", forged)
    assert cache.arrays("x", BOUNDS, KEY, build)["a"].tolist() == list(range(1000))
    assert build.calls == 2


def forge(folder: Path, pattern: str, array: np.ndarray) -> None:
    (path,) = folder.glob(pattern)
    path.unlink()
    np.save(path, array)
    stem, name, _, _ = path.name.split(".")
    path.rename(folder / f"{stem}.{name}.{file_checksum(path)}.npy")


@pytest.mark.parametrize("places", [[9, 0], [2, 8], [0, 7], [1, 0]], ids=["outside", "long", "short", "backwards"])
def test_an_order_that_was_changed_in_its_cache_is_no_traceback(tmp_path: Path, places: list[int]) -> None:
    settings: Any = {"samples": 3, "seq_length": 4, "vocab_size": 65521, "seed": 1, "flavour": "megatron"}
    shard, cache = ShardReader(write_lengths(tmp_path / "a", [9, 5, 8])), IndexCache(tmp_path / "c")
    whole = MegatronSource(shard, cache=cache, **settings)
    samples = np.array(whole.index["samples"])
    wrong = len(samples) - 2
    samples[wrong] = places
    forge(cache.folder, "samples-*.samples.*.npy", samples)
    changed = MegatronSource(shard, cache=cache, **settings)
    assert changed.stretches(0) == whole.stretches(0)
    with pytest.raises(DataError, match=rf"is no order of it: sample {wrong}.*Delete that folder"):
        changed.stretches(wrong)


def build_slowly(folder: str, calls: str) -> None:
    def build() -> dict[str, np.ndarray]:
        with open(calls, "a") as file:
            file.write("built\n")
        time.sleep(0.3)
        return {"a": np.arange(5)}

    assert IndexCache(folder).arrays("x", {"a": ((5,), 0, 5)}, KEY, build)["a"].tolist() == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("locks", [True, False])
def test_one_process_builds_and_without_locks_all_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, locks: bool
) -> None:
    def no_locks(*_: Any) -> None:
        raise OSError(95, "Operation not supported")

    if not locks:
        monkeypatch.setattr(fcntl, "flock", no_locks)
    context, calls = multiprocessing.get_context("fork"), tmp_path / "calls"
    processes = [context.Process(target=build_slowly, args=(str(tmp_path / "c"), str(calls))) for _ in range(4)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(30)
    assert [process.exitcode for process in processes] == [0] * 4
    assert len(list((tmp_path / "c").iterdir())) == 2
    built = len(calls.read_text().splitlines())
    assert built == 1 if locks else built > 1


def test_a_builder_killed_while_writing_leaves_nothing_that_counts(tmp_path: Path) -> None:
    code = """
import os, signal, sys
import numpy as np
from bloomery.data.megatron import IndexCache
save = np.save
def dies(file, array, **more):
    save(file, array[: len(array) // 2], **more); file.flush(); os.kill(os.getpid(), signal.SIGKILL)
np.save = dies
bounds = {"a": ((1000,), 0, 1000)}
IndexCache(sys.argv[1]).arrays("x", bounds, {"idx": "abc", "seed": 1}, lambda: {"a": np.arange(1000)})
"""
    assert subprocess.run([sys.executable, "-c", code, str(tmp_path)]).returncode == -9
    assert any(path.name.startswith(".x-") for path in tmp_path.iterdir())
    build = Builder()
    assert len(IndexCache(tmp_path).arrays("x", BOUNDS, KEY, build)["a"]) == 1000
    assert build.calls == 1
    assert not list(tmp_path.glob(".x-*")), "what the killed one had written"


def test_a_folder_that_cannot_be_written_is_named_and_nothing_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match=r"cannot keep index caches in .*file.*or choose another data.cache_dir"):
        IndexCache(tmp_path / "file" / "cache").arrays("x", BOUNDS, KEY, Builder())

    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(IndexCache, "_load", lambda *_: {})
        with pytest.raises(StorageError, match="what was just written there reads back otherwise"):
            IndexCache(tmp_path / "b").arrays("x", BOUNDS, KEY, Builder())
    monkeypatch.setattr(np, "save", full)
    with pytest.raises(StorageError, match="No space left on device"):
        IndexCache(tmp_path / "c").arrays("x", BOUNDS, KEY, Builder())
    assert [path.name for path in (tmp_path / "c").iterdir()] == [".lock"]


def test_an_order_is_found_by_the_content_of_its_shard_and_not_by_its_name(tmp_path: Path) -> None:
    def entries(name: str, lengths: list[int], **changed: Any) -> int:
        settings: dict[str, Any] = {"samples": 3, "seq_length": 4, "vocab_size": 65521, "seed": 1} | changed
        prefix = write_lengths(tmp_path / name, lengths)
        MegatronSource(ShardReader(prefix), flavour="megatron", cache=IndexCache(tmp_path / "c"), **settings)
        return len({path.name.split(".")[0] for path in (tmp_path / "c").glob("samples-*")})

    assert entries("a", [9, 5, 8]) == 1
    assert entries("b", [9, 5, 8]) == 1, "the same content elsewhere"
    assert entries("a", [9, 5, 8], samples=4) == 1, "as many epochs, so the same order"
    assert entries("a", [9, 5, 8], seed=2) == 2
    assert entries("a", [9, 5, 8], seq_length=5) == 3
    assert entries("a", [9, 5, 8], samples=10) == 4, "more epochs"
    assert entries("a", [9, 8, 5]) == 5, "changed under its old name"
