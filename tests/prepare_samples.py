"""Shared by the tests of `bloomery prepare`: a tokenizer, a corpus of many small documents, and what a shard says."""

from __future__ import annotations

import gzip
import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zstandard

from bloomery.config.recipe import PrepareSection
from bloomery.data.manifest import ShardManifest
from bloomery.data.shards import ShardReader
from bloomery.data.tokenizer import Tokenizer
from bloomery.prepare.run import Preparation, PrepareResult
from bloomery.prepare.train_tokenizer import train_tokenizer
from bloomery.prepare.verify import verify

WORDS = ["the", "a", "of", "some", "text", "more", "to", "learn", "from", "and", "it's", "not", "17", "żółć", "漢字"]
WORDS += ["🙂", "<|endoftext|>", "def", "self(x):", "\n", "\t", "", "  "]


def make_tokenizer(folder: Path) -> Tokenizer:
    return train_tokenizer([" ".join(WORDS)] * 3, vocab_size=300, output=str(folder))


def make_texts(count: int, *, seed: int = 0) -> list[str]:
    """Every eleventh is a copy of an earlier one, every seventeenth is empty."""
    random = np.random.default_rng(seed)
    texts: list[str] = []
    for number in range(count):
        if number % 17 == 16:
            texts.append("")
        elif number % 11 == 10:
            texts.append(texts[int(random.integers(number))])
        else:
            texts.append(f"{number} " + " ".join(random.choice(WORDS, int(random.integers(1, 60)))))
    return texts


def jsonl(texts: list[str], key: str = "text") -> bytes:
    return b"".join(json.dumps({"id": n, key: text}).encode() + b"\n" for n, text in enumerate(texts))


def write_jsonl(path: Path, texts: list[str]) -> None:
    """Plain, or compressed if the name says so."""
    path.parent.mkdir(parents=True, exist_ok=True)
    content = jsonl(texts)
    if path.suffix == ".zst":
        half = len(content) // 2  # two frames, as tools that append write them
        content = b"".join(zstandard.compress(part) for part in (content[:half], content[half:]))
    elif path.suffix == ".gz":
        content = gzip.compress(content)
    path.write_bytes(content)


def small_units(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many units, blocks and buckets from little text."""
    monkeypatch.setattr("bloomery.prepare.read._SMALLEST_UNIT_BYTES", 6000)
    monkeypatch.setattr("bloomery.prepare.read._UNITS", 1000)
    monkeypatch.setattr("bloomery.prepare.read.BLOCK_BYTES", 2000)
    monkeypatch.setattr("bloomery.prepare.merge.BUCKET_BYTES", 3000)


def prepare(section: PrepareSection, *, share: Any = None, progress: Any = id, **fields: Any) -> PrepareResult:
    return Preparation(section, **fields).run(share, progress)


def verified(section: PrepareSection, **fields: Any) -> ShardManifest:
    return verify(Preparation(section, **fields))


def make(tokenizer: Tokenizer, *, seed: int = 1, workers: int = 1, share: Any = None, **fields: Any) -> PrepareResult:
    section = PrepareSection(**{"output": "x", "sources": ["corpus"], **fields})
    return prepare(section, tokenizer=tokenizer, seed=seed, workers=workers, share=share)


def shard_bytes(prefix: str = "x", *, manifest: bool = False) -> dict[str, bytes]:
    endings = (".bin", ".idx", ".manifest.json") if manifest else (".bin", ".idx")
    return {ending: Path(prefix + ending).read_bytes() for ending in endings}


def read_texts(tokenizer: Tokenizer, prefix: str = "x") -> list[str]:
    with ShardReader(prefix) as shard:
        starts = shard.document_starts()
        return [tokenizer.decode(shard.read(int(a), int(b - a))) for a, b in pairwise(starts)]
