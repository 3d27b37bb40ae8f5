"""`limit`, `files`, `languages`, `near_duplicates`: what stays, with any workers and units. `--estimate`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bloomery.base.errors import DataError
from bloomery.base.units import Amount
from bloomery.config.recipe import PrepareSection
from bloomery.data.tokenizer import Tokenizer
from bloomery.prepare.filters import band_shape, bands_of
from bloomery.prepare.run import Preparation
from prepare_samples import make, make_texts, make_tokenizer, read_texts, shard_bytes, small_units, write_jsonl


@pytest.fixture
def tokenizer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Tokenizer:
    monkeypatch.chdir(tmp_path)
    small_units(monkeypatch)
    return make_tokenizer(tmp_path / "tokenizer")


@pytest.mark.parametrize("deduplicate", [False, True])
def test_a_limit_takes_the_first_of_the_shuffled_order(tokenizer: Tokenizer, deduplicate: bool) -> None:
    for part in range(2):
        write_jsonl(Path(f"corpus/{part}.jsonl"), make_texts(300, seed=part))
    make(tokenizer, output="all", deduplicate=deduplicate)
    done = make(tokenizer, output="some", limit="70 documents", deduplicate=deduplicate).manifest
    assert done is not None
    assert read_texts(tokenizer, "some") == read_texts(tokenizer, "all")[:70]
    assert sum(done.dropped.values()) + 70 == 600
    one = shard_bytes("some")
    make(tokenizer, output="same", limit="70 documents", deduplicate=deduplicate, workers=2)
    make(tokenizer, output="other", limit="70 documents", deduplicate=deduplicate, seed=2)
    assert shard_bytes("same") == one != shard_bytes("other")
    assert make(tokenizer, output="some", limit="70 documents", deduplicate=deduplicate).reused


def test_files_are_a_slice_in_natural_order(tokenizer: Tokenizer) -> None:
    for number in range(12):
        write_jsonl(Path(f"corpus/chunk{number}.jsonl"), [f"text {number}"])
    parts = {"train": ":-6", "test": "-6:-3", "valid": "-3:"}
    for name, files in parts.items():
        make(tokenizer, output=name, files=files, shuffle=False, append_eod=False)
    assert read_texts(tokenizer, "valid") == ["text 10", "text 11", "text 9"]  # the files of a shard: by name
    assert sorted(read_texts(tokenizer, "test")) == ["text 6", "text 7", "text 8"]
    assert len(read_texts(tokenizer, "train")) == 6
    with pytest.raises(DataError, match=r"prepare.files '20:' takes none of 12 files"):
        make(tokenizer, files="20:")


def test_near_duplicates_are_dropped_whatever_the_workers(tokenizer: Tokenizer) -> None:
    random = np.random.default_rng(0)
    words = [f"w{number}" for number in range(500)]
    texts = [" ".join(random.choice(words, 80)) for _ in range(60)]
    close = [f"{text} and an end" for text in texts[:20]]  # 76 of 79 runs are the same
    half = [" ".join(text.split()[:50] + list(random.choice(words, 30))) for text in texts[20:40]]
    write_jsonl(Path("corpus/a.jsonl"), texts + close)
    write_jsonl(Path("corpus/b.jsonl"), [*half, "", "short", "short"])
    keep: dict[str, Any] = {"near_duplicates": 0.8, "shuffle": False, "append_eod": False}
    for workers in (1, 2):
        output = f"x{workers}"
        done = make(tokenizer, output=output, workers=workers, **keep).manifest
        assert done is not None
        assert done.dropped["nearly duplicate"] == 21  # and one "short"
        assert read_texts(tokenizer, output) == [*texts, *half, "short"]
    assert shard_bytes("x1") == shard_bytes("x2")
    make(tokenizer, output="y", share=(0, 2), **keep)
    make(tokenizer, output="y", share=(1, 2), **keep)
    make(tokenizer, output="y", **keep)
    assert shard_bytes("y") == shard_bytes("x1")


def test_bands_meet_as_often_as_the_formula_says() -> None:
    bands, rows = band_shape(0.72)
    assert (bands, rows) == (14, 8)
    random = np.random.default_rng(1)
    met, many = 0, 300
    for _ in range(many):
        shared, own = random.integers(10**9, size=300), random.integers(10**9, size=(2, 50))  # similarity 0.75
        one, other = (" ".join(" ".join([f"n{n}"] * 5) for n in [*shared, *each]) for each in own)
        first, second = bands_of([one, other], 0.72)
        met += bool((first == second).any())
    expected = 1 - (1 - 0.75**8) ** 14
    assert abs(met / many - expected) < 0.12


def test_languages_keep_their_documents_and_unknown_ones_are_refused(tokenizer: Tokenizer) -> None:
    texts = {
        "en": "The quick brown fox jumps over the lazy dog, and then it goes to sleep in the garden of the house.",
        "de": "Der Fuchs sieht die Trauben und sagt, dass sie ihm zu sauer sind, weil er sie nicht erreichen kann.",
        "fr": "Le renard voit les raisins et dit qu'ils sont trop verts, parce qu'il ne peut pas les atteindre.",
    }
    write_jsonl(Path("corpus/a.jsonl"), [*texts.values(), ""])
    done = make(tokenizer, languages=["fr", "de"], shuffle=False, append_eod=False).manifest
    assert done is not None
    assert read_texts(tokenizer) == [texts["de"], texts["fr"]]
    assert (done.dropped["in other languages"], done.dropped["empty"]) == (1, 1)
    with pytest.raises(DataError, match="languages has xx"):
        make(tokenizer, languages=["xx"])


@pytest.mark.parametrize("ending", ["", ".zst", "-texts"])
def test_an_estimate_holds_within_its_bound(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch, ending: str, tmp_path: Path
) -> None:
    monkeypatch.setattr("bloomery.prepare.estimate._PLAIN_BYTES", 2000)
    monkeypatch.setattr("bloomery.prepare.estimate._PACKED_BYTES", 3000)
    monkeypatch.setattr("bloomery.prepare.estimate._SAMPLES", 30)
    for number in range(12):
        texts = make_texts(150, seed=number)
        if ending == "-texts":
            Path("corpus").mkdir(exist_ok=True)
            Path(f"corpus/{number}.txt").write_text("\n".join(texts))
        else:
            write_jsonl(Path(f"corpus/{number}.jsonl{ending}"), texts)
    section = PrepareSection(output="x", sources=["corpus"])
    found = Preparation(section, tokenizer=tokenizer, seed=1, workers=2).estimate()
    done = make(tokenizer).manifest
    assert done is not None
    assert not list(tmp_path.glob("x.*parts"))
    assert found.error is not None
    assert abs(found.tokens / done.tokens - 1) <= max(2 * found.error, 0.001)
    assert found.sampled_bytes < found.input_bytes or ending
    size = sum(Path(f"x{each}").stat().st_size for each in (".bin", ".idx"))
    assert abs(found.shard_bytes / size - 1) < 0.1
    few = Preparation(section.model_copy(update={"limit": Amount(10, "documents")}), tokenizer=tokenizer, seed=1)
    assert few.estimate().documents == 10
