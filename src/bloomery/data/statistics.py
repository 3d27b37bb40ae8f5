"""What can be said of a shard by counting."""

from __future__ import annotations

import numpy as np

from bloomery.data.shards import ShardReader


def unigram_entropy(shard: ShardReader, *, vocab_size: int) -> float:
    """Nats per token of a model that knows only how often each token occurs: the loss to beat."""
    counts = np.zeros(vocab_size, dtype=np.int64)
    for tokens in shard.blocks():
        counts += np.bincount(tokens, minlength=vocab_size)[:vocab_size]
    shares = counts[counts > 0] / counts.sum()
    return float(-(shares * np.log(shares)).sum())
