"""Shards to verify with: short documents in which each token mostly decides the next, so that there is something to
learn; for bert with sentences and a small WordPiece tokenizer."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

import bloomery
from bloomery.data.manifest import ShardManifest
from bloomery.data.shards import ShardWriter, token_dtype
from bloomery.data.tokenizer import Tokenizer

_DOCUMENTS = 300
_SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]


def write_data(values: Mapping[str, Any], folder: Path) -> None:
    """Everything that the shrunk recipe `values` reads."""
    vocab = values["model"]["vocab_size"]
    sources = [source["path"] for source in values["data"]["train"]]
    sources += [source["path"] for group in values["data"]["validation"].values() for source in group]
    is_bert = values["model"]["family"] == "bert"
    tokenizer_hash = _write_tokenizer(folder / "tokenizer", vocab) if is_bert else ""
    for seed, prefix in enumerate(sources):
        _write_shard(prefix, seed=seed, vocab=vocab, sentences=is_bert, tokenizer_hash=tokenizer_hash)


def _write_shard(prefix: str, *, seed: int, vocab: int, sentences: bool, tokenizer_hash: str) -> None:
    """Token 0 ends a document, unless it consists of sentences; each source follows rules of its own."""
    random = np.random.default_rng(seed)
    first = len(_SPECIAL) if sentences else 1
    follower = random.permutation(np.arange(first, vocab))
    dtype = token_dtype(vocab)
    written = 0
    with ShardWriter(prefix, dtype) as writer:
        for _ in range(_DOCUMENTS):
            lengths = random.integers(3, 12, size=int(random.integers(2, 7)))
            tokens = _chain(random, int(lengths.sum()), follower, first)
            if sentences:
                writer.append_many(tokens.astype(dtype).data, lengths.astype("<i4"), np.array([len(lengths)], "<i4"))
            else:
                writer.append(np.append(tokens, 0))
        written, sequences = writer.num_tokens, writer.num_sequences
    ShardManifest(
        tokenizer_hash=tokenizer_hash,
        vocab_size=vocab,
        dtype=str(dtype),
        eod_id=None if sentences else 0,
        append_eod=not sentences,
        shuffle_seed=None,
        documents=_DOCUMENTS,
        sequences=sequences,
        tokens=written,
        sources=(),
        source_files=(),
        dropped={},
        settings={},
        encoder="synthetic",
        bloomery_version=bloomery.__version__,
    ).write(prefix)


def _chain(random: np.random.Generator, length: int, follower: np.ndarray, first: int) -> np.ndarray:
    vocab = len(follower)
    chance, others = random.random(length), random.integers(vocab, size=length)
    tokens = np.empty(length, np.int64)
    token = int(others[0])
    for i in range(length):
        token = int(follower[token]) - first if chance[i] < 0.8 else int(others[i])
        tokens[i] = token + first
    return tokens


def _write_tokenizer(folder: Path, vocab: int) -> str:
    """BERT's vocab.txt; every fourth token continues a word. Returns its hash."""
    folder.mkdir()
    words = [f"##{i}" if i % 4 == 0 else f"word{i}" for i in range(vocab - len(_SPECIAL))]
    (folder / "vocab.txt").write_text("\n".join([*_SPECIAL, *words]) + "\n")
    return Tokenizer.load(str(folder)).content_hash
