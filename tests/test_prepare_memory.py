"""What `bloomery prepare` and `extract` hold at a time does not grow with the input, however odd its shape."""

from __future__ import annotations

import gzip
import tracemalloc
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xxhash
import zstandard

from bloomery.base.errors import DataError
from bloomery.prepare.extract import _lines
from bloomery.prepare.merge import Merge, gather
from bloomery.prepare.read import Block, Span, UnitReader, content, open_span, plan_units
from bloomery.prepare.sources import find_files
from prepare_samples import jsonl, make, make_tokenizer, write_jsonl


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
        Merge, "write", lambda *args, **kwargs: peaks.append(peak_bytes(lambda: deque(write(*args, **kwargs), 0))) or []
    )
    made = make(make_tokenizer(folder / "tokenizer"))
    assert made.manifest is not None
    assert made.manifest.documents == 60_000
    assert peaks[0] < 60_000 * 8 + (1 << 20) + (1 << 20)  # the lengths that are kept, the file's buffer, buckets


# ---------------------------------------------------------------- files that unpack to a hundred times their size


def blocks_of(name: str) -> Iterator[Block]:
    (unit,) = plan_units(find_files([name]))
    return UnitReader(unit, text_key="text", skip_bad=False).blocks()


@pytest.mark.parametrize("ending", ["zst", "gz"])
def test_lines_that_repeat_are_unpacked_a_little_at_a_time(folder: Path, ending: str) -> None:
    lines = jsonl(["the same line again and again " * 100] * 100)
    packer = zstandard.ZstdCompressor(level=3) if ending == "zst" else gzip
    name = f"a.jsonl.{ending}"
    (folder / name).write_bytes(packer.compress(lines * 200))  # type: ignore[attr-defined]
    assert (folder / name).stat().st_size * 100 < 200 * len(lines)
    counts: list[dict[str, Any]] = []
    (file,) = find_files([name])
    assert peak_bytes(lambda: sum(map(len, _lines(file, counts)))) < 12 << 20
    assert counts[0]["documents"] == 20_000
    documents = 0

    def read() -> None:
        nonlocal documents
        for block in blocks_of(name):
            documents += len(block.texts)
            del block

    assert peak_bytes(read) < 56 << 20  # 8 MB of lines: joined, cut and as texts; 8 MB and a block ahead of them
    assert documents == 20_000


def test_every_kind_of_frame_is_unpacked_and_no_cut_goes_unnoticed(folder: Path) -> None:
    random = np.random.default_rng(0).bytes(3000)
    skippable = [b"\x5f\x2a\x4d\x18" + size.to_bytes(4, "little") + bytes(size) for size in (0, 3, 2000)]
    contents = [b"", b"x", random, bytes(20 << 20), jsonl(["some text"] * 500), b""]
    flags = [(True, True), (True, False), (False, True), (False, False)]
    frames = [
        zstandard.ZstdCompressor(write_checksum=checksum, write_content_size=size).compress(each)
        for each in contents
        for checksum, size in flags
    ]
    frames[3:3], frames[9:9] = skippable, skippable
    data, hashes = b"".join(frames), []

    def unpacked(data: bytes) -> Iterator[bytes]:
        (folder / "a.zst").write_bytes(data)
        (file,) = find_files(["a.zst"])
        with open_span(Span(file, 0, file.size)) as stored:
            yield from content(stored, "zst")
            hashes.append(stored.hasher.digest())

    pieces = list(unpacked(data))
    assert b"".join(pieces) == b"".join(each for each in contents for _ in flags)
    assert max(map(len, pieces)) <= (1 << 20) + 1024
    assert hashes == [xxhash.xxh3_128_digest(data)]
    small = b"".join(frame for frame in frames if len(frame) < 400)
    ends = {sum(len(frame) for frame in frames[:count] if len(frame) < 400) for count in range(len(frames) + 1)}
    for cut in {*range(1, len(small))} - ends:
        with pytest.raises(DataError, match="truncated or damaged"):
            list(unpacked(small[:cut]))


# ---------------------------------------------------------------- .parquet


@pytest.mark.parametrize("long_rows", ["all", "the last"])
def test_long_rows_of_one_row_group_come_a_few_at_a_time(folder: Path, long_rows: str) -> None:
    arrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    texts = [f"{number} " * 20_000 for number in range(100, 500)]
    texts = texts if long_rows == "all" else ["short"] * 100_000 + texts
    settings = {"use_dictionary": False, "write_batch_size": 8, "compression": "none"}
    parquet.write_table(arrow.table({"text": texts}), "a.parquet", **settings)
    held = arrow.default_memory_pool()
    counted = arrow.proxy_memory_pool(held)
    (unit,) = plan_units(find_files(["a.parquet"]))
    found: list[str] = []

    def read(block_bytes: int, most: int) -> None:
        reader = UnitReader(unit, text_key="text", skip_bad=False, block_bytes=block_bytes)
        for block in reader.blocks():
            assert block.size < 3 * max(block_bytes, 80_000)
            found.extend(text[:4] for text in block.texts)
            del block
            if len(found) >= most:
                return

    arrow.set_memory_pool(counted)
    try:
        first = peak_bytes(lambda: read(1 << 16, 1))
        sample_bytes, found = counted.max_memory(), []
        python = peak_bytes(lambda: read(1 << 20, len(texts)))
    finally:
        arrow.set_memory_pool(held)
    assert found == [text[:4] for text in texts]
    limit = 4 << 20 if long_rows == "all" else 48 << 20  # of 256 rows
    assert (first < 4 << 20, sample_bytes < 4 << 20) == (True, True)
    assert (python < 16 << 20, counted.max_memory() < limit) == (True, True)


def test_one_long_value_of_many_rows_expands_a_few_rows_at_a_time(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    parquet.write_table(arrow.table({"text": ["a" * (1 << 20)] * 64}), "a.parquet", compression="zstd")
    assert Path("a.parquet").stat().st_size < 4096
    monkeypatch.setattr("bloomery.prepare.read.MOST_DOCUMENT_BYTES", 8 << 20)
    (unit,) = plan_units(find_files(["a.parquet"]))
    held = arrow.default_memory_pool()
    counted = arrow.proxy_memory_pool(held)
    arrow.set_memory_pool(counted)
    try:
        blocks = UnitReader(unit, text_key="text", skip_bad=False).blocks()
        assert sum(len(text) == 1 << 20 for block in blocks for text in block.texts) == 64
    finally:
        arrow.set_memory_pool(held)
    assert counted.max_memory() < 32 << 20


def test_short_rows_make_no_block_of_a_million(folder: Path) -> None:
    arrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    parquet.write_table(arrow.table({"text": ["a"] * 50_000}), "a.parquet")
    (unit,) = plan_units(find_files(["a.parquet"]))
    reader = UnitReader(unit, text_key="text", skip_bad=False, block_bytes=1 << 17)
    rows = [len(block.texts) for block in reader.blocks()]
    assert (sum(rows), max(rows) < 8192) == (50_000, True)
