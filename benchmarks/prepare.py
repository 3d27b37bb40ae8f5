"""`bloomery prepare` against the route Megatron's tool takes, as ratios in one run; output compared byte for byte.

The reference: json.loads, Hugging Face's tokenizer one document at a time, a process pool with imap in chunks of 32
whose workers load the tokenizer themselves. Three of them, each kinder than Megatron's tool, which also imports the
whole of its training (11 s in all where it was seen):
- `megatron-core` loads and calls the tokenizer through transformers and writes with megatron-core's own builder, as
  that tool does. Only where the package is installed (docs/orders.md says how);
- `transformers` does without that package: one write a document;
- `tokenizers` also without torch and transformers.
Rounds are interleaved; the whole command of ours is short, so a round takes the median of five.
CPU seconds (of all processes, from the difference of a large and a small input, so without start-up) hardly depend on
what else the machine does; wall times do, so the load is printed.

    python benchmarks/prepare.py                                   # Python's own library, a tokenizer trained on it
    python benchmarks/prepare.py --corpus books.jsonl --tokenizer gpt2-folder --memory-mb 4000
"""

from __future__ import annotations

import argparse
import compileall
import contextlib
import ctypes
import filecmp
import json
import multiprocessing
import os
import resource
import statistics
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import zstandard

import bloomery
from bloomery.data.tokenizer import Tokenizer

RECIPE = """
base: quickstart
name: benchmark
tokenizer: {{path: {tokenizer}}}
model: {{vocab_size: 300000}}
prepare: [{{output: {output}, sources: [{source}], {settings}}}]
"""

LIBRARIES = ("megatron-core", "transformers", "tokenizers")
_PR_SET_CHILD_SUBREAPER = 36


@dataclass(frozen=True)
class Cost:
    wall: float
    cpu: float
    """Seconds of all processes."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--corpus", help=".jsonl, repeated to the sizes needed; default: python-stdlib")
    parser.add_argument("--tokenizer", help="folder; default: one trained on python-stdlib")
    parser.add_argument("--small-mb", type=int, default=40, help="the whole command is compared at this size")
    parser.add_argument("--large-mb", type=int, default=360, help="steady state of ours: from small to large")
    parser.add_argument("--reference-mb", type=int, default=20, help="steady state of the reference: from half of it")
    parser.add_argument("--memory-mb", type=int, default=0, help="also measure memory at this size")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--command-only", action="store_true", help="only the whole command, no steady state")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--reference", nargs=5, metavar="WORD", help="internal: library, source, tokenizer, output, N")
    args = parser.parse_args()
    if args.reference:
        reference(*args.reference[:4], workers=int(args.reference[4]))
        return
    compileall.compile_dir(bloomery.__path__[0], quiet=1)  # as every installed package is
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)  # so that `_run` counts what ours leaves to the system
    with tempfile.TemporaryDirectory(prefix="bloomery-prepare-") as folder:
        measure(args, Path(folder))


def measure(args: argparse.Namespace, folder: Path) -> None:
    bench = Bench(folder, args)
    small = bench.corpus(args.small_mb)
    for _ in range(args.rounds):
        ours = middle([bench.ours(small) for _ in range(5)])
        for library in LIBRARIES if find_spec("megatron") else LIBRARIES[1:]:
            theirs = bench.reference(small, library)
            bench.same_output()
            bench.note(
                f"whole command, {args.small_mb} MB, against {library}, wall", theirs.wall / ours.wall, (theirs, ours)
            )
            bench.note(
                f"whole command, {args.small_mb} MB, against {library}, CPU", theirs.cpu / ours.cpu, (theirs, ours)
            )
    if not args.command_only:
        measure_steady_state(args, bench, folder, small)
    bench.summary()
    if args.memory_mb:
        peak = bench.peak_memory(bench.corpus(args.memory_mb))
        print(f"memory: at most {peak / 2**20:.0f} MiB over all processes for {args.memory_mb} MB of input")


def measure_steady_state(args: argparse.Namespace, bench: Bench, folder: Path, small: Path) -> None:
    large = bench.corpus(args.large_mb)
    half, whole = bench.corpus(args.reference_mb // 2), bench.corpus(args.reference_mb)
    packed = folder / "large.jsonl.zst"
    with open(large, "rb") as source, open(packed, "wb") as target:
        zstandard.ZstdCompressor(level=3).copy_stream(source, target)
    packed_small = folder / "small.jsonl.zst"
    packed_small.write_bytes(zstandard.compress(small.read_bytes()))
    for _ in range(args.rounds):
        slow = bench.per_megabyte(bench.reference, half, whole)
        fast = bench.per_megabyte(bench.ours, small, large)
        zst = bench.per_megabyte(bench.ours, packed_small, packed, large.stat().st_size - small.stat().st_size)
        bench.note("steady state, CPU seconds (per core)", slow.cpu / fast.cpu, (slow, fast))
        bench.note("steady state, wall", slow.wall / fast.wall, (slow, fast))
        bench.note("speed from .zst / from plain, CPU seconds", fast.cpu / zst.cpu, (fast, zst))
        bench.note("speed from .zst / from plain, wall", fast.wall / zst.wall, (fast, zst))


def middle(costs: list[Cost]) -> Cost:
    return Cost(statistics.median(cost.wall for cost in costs), statistics.median(cost.cpu for cost in costs))


class Bench:
    def __init__(self, folder: Path, args: argparse.Namespace) -> None:
        self._folder, self._workers = folder, args.workers
        self._ratios: dict[str, list[float]] = {}
        self._base = self._base_corpus(args.corpus)
        self._tokenizer = os.path.abspath(args.tokenizer) if args.tokenizer else self._train()

    def corpus(self, megabytes: int) -> Path:
        """About this much of the base corpus, over and over, in whole lines."""
        path, wanted = self._folder / f"{megabytes}.jsonl", megabytes * 10**6
        with open(path, "wb") as file:
            while file.tell() < wanted:
                rest = wanted - file.tell()
                end = len(self._base) if rest >= len(self._base) else self._base.index(b"\n", rest - 1) + 1
                file.write(self._base[:end])
        return path

    def ours(self, source: Path) -> Cost:
        return _run(self._command(source))

    def _command(self, source: Path, settings: str = "shuffle: false") -> list[str]:
        recipe, output = self._folder / "r.yaml", self._folder / "ours"
        recipe.write_text(RECIPE.format(tokenizer=self._tokenizer, output=output, source=source, settings=settings))
        for leftover in self._folder.glob("ours.*"):
            leftover.unlink()
        return [sys.executable, "-m", "bloomery", "prepare", str(recipe), "--workers", str(self._workers)]

    def reference(self, source: Path, library: str = "tokenizers") -> Cost:
        words = [library, str(source), self._tokenizer, str(self._folder / "reference"), str(self._workers)]
        return _run([sys.executable, __file__, "--reference", *words])

    def same_output(self) -> None:
        for ending in (".bin", ".idx"):
            ours, theirs = (self._folder / f"{name}{ending}" for name in ("ours", "reference"))
            assert filecmp.cmp(ours, theirs, shallow=False), f"the outputs differ: {ending}"

    @staticmethod
    def per_megabyte(run: Callable[[Path], Cost], small: Path, large: Path, text_bytes: int | None = None) -> Cost:
        """Seconds for each megabyte of text beyond the small input."""
        costs = [run(small), run(large)]
        megabytes = (text_bytes or large.stat().st_size - small.stat().st_size) / 1e6
        return Cost((costs[1].wall - costs[0].wall) / megabytes, (costs[1].cpu - costs[0].cpu) / megabytes)

    def note(self, what: str, ratio: float, costs: tuple[Cost, Cost]) -> None:
        self._ratios.setdefault(what, []).append(ratio)
        shown = " and ".join(f"{cost.wall:.4g} s wall, {cost.cpu:.4g} s CPU" for cost in costs)
        print(f"{what}: {ratio:.2f} ({shown}; load {os.getloadavg()[0]:.1f})", flush=True)

    def summary(self) -> None:
        print(f"\nmedians of {len(next(iter(self._ratios.values())))} rounds; outputs byte-identical")
        for what, ratios in self._ratios.items():
            print(f"{what}: {statistics.median(ratios):.2f} ({min(ratios):.2f} .. {max(ratios):.2f})")

    def peak_memory(self, source: Path) -> int:
        """Over all processes, with documents shuffled and duplicates looked for, which needs most."""
        filters = "shuffle: true, deduplicate: true"
        process, peak = subprocess.Popen(self._command(source, filters), stdout=subprocess.DEVNULL), 0
        while process.poll() is None:
            peak = max(peak, sum(map(_proportional_bytes, _family(process.pid))))
            time.sleep(0.05)
        assert process.returncode == 0
        return peak

    def _base_corpus(self, path: str | None) -> bytes:
        if path:
            content = Path(path).read_bytes()
            return content if content.endswith(b"\n") else content + b"\n"
        from bloomery.prepare.sources import find_files

        texts = [Path(file.path).read_text() for file in find_files(["python-stdlib"])]
        return "".join(json.dumps({"text": text}) + "\n" for text in texts).encode()

    def _train(self) -> str:
        output = str(self._folder / "tokenizer")
        words = ["tokenizer", "train", "python-stdlib", "--vocab-size", "32000", "--output", output]
        subprocess.run([sys.executable, "-m", "bloomery", *words], check=True, stdout=subprocess.DEVNULL)
        return output


def _run(words: list[str]) -> Cost:
    before, started = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
    subprocess.run(words, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    wall = time.monotonic() - started
    with contextlib.suppress(ChildProcessError):
        while os.wait():
            pass
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return Cost(wall, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)


def _family(pid: int) -> Iterator[int]:
    yield pid
    try:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except OSError:
        return
    for child in children:
        yield from _family(int(child))


def _proportional_bytes(pid: int) -> int:
    """Pages that processes share are counted once."""
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:"))


def reference(library: str, source: str, folder: str, output: str, *, workers: int) -> None:
    """Megatron's preprocess_data.py --append-eod, without the start-up of Megatron."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    tokenizer = Tokenizer.load(folder)
    if library != "tokenizers":
        import torch  # noqa: F401 - the tool needs it for its index builder
        import transformers  # noqa: F401
    builder: Any = PlainBuilder(output, tokenizer.vocab_size)
    if library == "megatron-core":
        from megatron.core.datasets import indexed_dataset  # type: ignore[import-not-found,unused-ignore]

        dtype = indexed_dataset.DType.optimal_dtype(tokenizer.vocab_size)
        builder = indexed_dataset.IndexedDatasetBuilder(f"{output}.bin", dtype=dtype)
    eod = tokenizer.eod_id
    with multiprocessing.Pool(workers, _load, (library, folder)) as pool, open(source, encoding="utf-8") as lines:
        for ids in pool.imap(_encode, lines, 32):
            if ids:
                ids.append(eod)
                builder.add_document(ids, [len(ids)])
    builder.finalize(f"{output}.idx")


class PlainBuilder:
    """What megatron-core's does, with less."""

    def __init__(self, output: str, vocab_size: int) -> None:
        import numpy as np

        self._array, self._dtype = np.array, np.dtype(np.uint16 if vocab_size < 65500 else np.int32)
        self._bin = open(f"{output}.bin", "wb")  # noqa: SIM115 - closed by finalize
        self._lengths: list[int] = []

    def add_document(self, ids: list[int], lengths: list[int]) -> None:
        self._bin.write(self._array(ids, dtype=self._dtype).tobytes(order="C"))
        self._lengths += lengths

    def finalize(self, path: str) -> None:
        self._bin.close()
        count, pointers, at = len(self._lengths), [], 0
        for length in self._lengths:
            pointers.append(at)
            at += length * self._dtype.itemsize
        with open(path, "wb") as idx:
            code = 8 if self._dtype.itemsize == 2 else 4
            idx.write(b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, code, count, count + 1))
            for values, dtype in ((self._lengths, "<i4"), (pointers, "<i8"), (range(count + 1), "<i8")):
                idx.write(self._array(values, dtype=dtype).tobytes())


def _load(library: str, folder: str) -> None:
    """In every worker, as that tool does."""
    global _ids_of
    plain = Tokenizer.load(folder)._tokenizer
    if library != "tokenizers":
        from transformers import PreTrainedTokenizerFast

        through: Any = PreTrainedTokenizerFast(tokenizer_object=plain)  # type: ignore[no-untyped-call]
        _ids_of = lambda text: through(text, add_special_tokens=False).input_ids  # noqa: E731
    else:
        _ids_of = lambda text: plain.encode(text, add_special_tokens=False).ids  # noqa: E731


def _encode(line: str) -> list[int]:
    return list(_ids_of(json.loads(line)["text"]))


_ids_of: Callable[[str], list[int]]

if __name__ == "__main__":
    main()
