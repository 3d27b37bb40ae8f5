"""What `bloomery prepare` and `extract` hold at a time does not grow with the input, however odd its shape."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bloomery.prepare.merge import Merge
from bloomery.prepare.ragged import gather
from prepare_samples import make, make_tokenizer, write_jsonl


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def peak_bytes(work: Callable[[], Any]) -> int:
    """The most that Python and numpy held for it at one time."""
    tracemalloc.start()
    try:
        work()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("longest", [1, 7, 300, 3000])
def test_rows_are_gathered_in_any_order(longest: int) -> None:
    random = np.random.default_rng(longest)
    lengths = random.integers(0, longest + 1, 10_000).astype(np.int32)
    lengths[5000:6000] = 1  # short and long ones, in turns
    values = random.integers(0, 60_000, int(lengths.sum())).astype(np.uint16)
    rows = np.split(values, np.cumsum(lengths)[:-1])
    for order in (random.permutation(10_000), np.arange(0), np.arange(3, 10_000, 7), np.array([9999])):
        expected = np.concatenate([np.empty(0, np.uint16), *(rows[row] for row in order)])
        assert np.array_equal(gather(values, lengths, order), expected)
    assert gather(np.empty(0, np.uint16), np.zeros(3, np.int32), np.arange(3)).size == 0


def test_gathering_short_rows_needs_no_object_for_each() -> None:
    lengths = np.full(200_000, 2, np.int32)
    values, order = np.zeros(400_000, np.uint16), np.arange(200_000)[::-1]
    assert peak_bytes(lambda: gather(values, lengths, order)) < 200_000 * 64


def test_short_documents_are_merged_in_buckets_that_count_them(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_jsonl(folder / "corpus" / "a.jsonl", [str(number) for number in range(60_000)])
    monkeypatch.setattr("bloomery.prepare.merge.BUCKET_BYTES", 1 << 18)
    peaks: list[int] = []
    write = Merge.write
    monkeypatch.setattr(
        Merge, "write", lambda *args, **kwargs: peaks.append(peak_bytes(lambda: write(*args, **kwargs)))
    )
    made = make(make_tokenizer(folder / "tokenizer"))
    assert made.manifest is not None and made.manifest.documents == 60_000
    assert peaks[0] < 60_000 * 8 + (1 << 20) + (1 << 20)  # the lengths that are kept, the file's buffer, buckets
