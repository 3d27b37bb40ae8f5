"""How long the first batch of a resumed run takes: sample 10^9 of a blend of 30 sources with 10^9 samples in all.

Ours: open the 30 shards, build the blend and the orders, read the batch; each round from nothing, in a process that has
imported the modules and done nothing else ("new"), and again in one that has done it before. The shards are files
with holes (4 TB that take no space), so tokens are zeros and nothing waits for a disk. How many documents they have
does not matter: only the ends of an `.idx` are read.
The peer: the indices that megatron-core builds before its first batch (documents and samples of every source, shuffled
with numpy as there; our own code, bit-identical to it), at --peer-samples. Its greedy blend is left out, because
megatron-core has it in C++ and we do not, so the peer is better off here than it is. What is said of 10^9 samples is
the measured time times the ratio of the sizes.

    python benchmarks/order.py
"""

from __future__ import annotations

import argparse
import gc
import os
import statistics
import subprocess
import sys
import tempfile
import time
import tracemalloc
from pathlib import Path

import numpy as np

from bloomery.data.batch import Stream
from bloomery.data.blend import TimelessBlend
from bloomery.data.causal import CausalSource
from bloomery.data.megatron_order import OrderShape, build_index
from bloomery.data.order import TimelessOrder
from bloomery.data.shards import HEADER, MAGIC, VERSION, ShardReader

SOURCES, SAMPLES, SEQ_LENGTH = 30, 10**9, 2048


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--batch", type=int, default=16, help="samples read at once: a micro-batch of gpt-1.3b")
    parser.add_argument("--peer-samples", type=int, default=10**7)
    parser.add_argument("--documents", type=int, default=10**5, help="of each shard")
    parser.add_argument("--only", nargs="+", metavar="PREFIX", help="internal: one first batch, printed in seconds")
    args = parser.parse_args()
    if args.only:
        print(timed(lambda: first_batch(args.only, args.batch)))
        return
    with tempfile.TemporaryDirectory(prefix="bloomery-order-") as folder:
        prefixes = [f"{folder}/{number}" for number in range(SOURCES)]
        per_source = SAMPLES // SOURCES * SEQ_LENGTH + 1
        for prefix in prefixes:
            write_holes(prefix, per_source, args.documents)
        new = [in_a_new_process(prefixes, args.batch) for _ in range(args.rounds)]
        first_batch(prefixes, args.batch)  # caches of the libraries
        seconds = [timed(lambda: first_batch(prefixes, args.batch)) for _ in range(args.rounds)]
        order_only = [timed(lambda: first_places(args.batch)) for _ in range(args.rounds)]
        tracemalloc.start()
        first_batch(prefixes, args.batch)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        what = f"the first batch ({args.batch} x {SEQ_LENGTH}) at sample {SAMPLES:,} of {SOURCES} sources"
        print(f"{what}: new {spread(new)}, at most {peak / 1e6:.1f} MB (load {os.getloadavg()[0]:.1f})")
        print(f"again: {spread(seconds)}")
        print(f"of that, to know which samples they are: {spread(order_only)}")
        peer, memory = indices(args.peer_samples)
        scale = SAMPLES / args.peer_samples
        print(
            f"Megatron's indices for {args.peer_samples:,} samples: {peer:.3g} s, {memory / 1e6:.0f} MB; "
            f"in proportion {peer * scale:.3g} s and {memory * scale / 1e9:.3g} GB for {SAMPLES:,}"
        )
        print(f"ratio at the peer's size: {peer / statistics.median(new):.0f}")


def first_batch(prefixes: list[str], size: int) -> None:
    sources = [
        CausalSource(ShardReader(prefix), seq_length=SEQ_LENGTH, vocab_size=50257, seed=42) for prefix in prefixes
    ]
    stream = Stream(sources, TimelessBlend.start(weights([source.key for source in sources])))
    batch = stream.batch(SAMPLES, size)
    assert batch.inputs["tokens"].shape == (size, SEQ_LENGTH)


def first_places(size: int) -> None:
    names = [f"source {number}" for number in range(SOURCES)]
    orders = [TimelessOrder(42, name, SAMPLES // SOURCES) for name in names]
    owners, ordinals = TimelessBlend.start(weights(names)).locate(np.arange(SAMPLES, SAMPLES + size))
    for owner in np.unique(owners):
        orders[owner].locate(ordinals[owners == owner])


def weights(names: list[str]) -> dict[str, float]:
    return {name: 1.0 + number for number, name in enumerate(names)}


def indices(samples: int) -> tuple[float, int]:
    """(seconds, bytes) of what megatron-core builds for every source; documents of 1,000 tokens."""
    per_source = samples // SOURCES
    starts = np.arange(per_source * SEQ_LENGTH // 1000 + 2) * 1000
    shape = OrderShape.of("megatron", tokens_per_epoch=int(starts[-1]), seq_length=SEQ_LENGTH, samples=per_source)
    began, size = time.perf_counter(), 0
    for number in range(SOURCES):
        built = build_index(starts, first=0, last=len(starts) - 1, shape=shape, seed=number)
        size += sum(array.nbytes for array in built.values())
    return time.perf_counter() - began, size


def write_holes(prefix: str, tokens: int, documents: int) -> None:
    """A shard of zeros in documents of about equal length, whose .bin takes no space."""
    counts = np.diff(np.arange(documents + 1) * tokens // documents)
    ends = np.cumsum(counts)
    Path(f"{prefix}.bin").touch()
    os.truncate(f"{prefix}.bin", int(ends[-1]) * 2)
    with open(f"{prefix}.idx", "wb") as idx:
        idx.write(HEADER.pack(MAGIC, VERSION, 8, len(counts), len(counts) + 1))
        idx.write(counts.astype("<i4").tobytes() + ((ends - counts) * 2).tobytes())
        idx.write(np.arange(len(counts) + 1).tobytes())


def in_a_new_process(prefixes: list[str], size: int) -> float:
    words = [sys.executable, __file__, "--batch", str(size), "--only", *prefixes]
    return float(subprocess.run(words, check=True, capture_output=True, text=True).stdout)


def timed(work: object) -> float:
    assert callable(work)
    gc.collect()
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def spread(seconds: list[float]) -> str:
    low, middle, high = min(seconds), statistics.median(seconds), max(seconds)
    return f"{middle * 1e3:.1f} ms ({low * 1e3:.1f} .. {high * 1e3:.1f}, {len(seconds)} rounds)"


if __name__ == "__main__":
    main()
