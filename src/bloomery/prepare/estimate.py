"""`bloomery prepare --estimate`: tokens, bytes and time of a shard, from samples at even distances of the input."""

import io
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import IO, cast

import numpy as np

from bloomery.prepare.read import Span, Unit, UnitReader, next_line
from bloomery.prepare.sources import InputFile, open_input
from bloomery.prepare.tokenize import REASONS, UnitTokenizer

_SAMPLES = 128
_PLAIN_BYTES, _PACKED_BYTES = 1 << 17, 4 << 20
"""Of a sample, as they are stored. A packed file is read from its beginning, and its reader is up to 128 KB ahead."""
_TWO_SIDED_95 = 1.96
_INDEX_BYTES = 12, 8
"""Of each sequence and of each document."""


@dataclass(frozen=True)
class Estimate:
    tokens: float
    error: float | None
    """Relative, of the tokens, at 95% confidence; 0 where everything was read, None where one sample says nothing."""
    documents: float
    shard_bytes: float
    """`.bin` and `.idx`."""
    seconds: float
    """Of all workers together, without the merge."""
    workers: int
    tokens_per_gb: float
    bytes_per_token: float
    """Of the files as they are stored."""
    input_bytes: int
    sampled_bytes: int
    samples: int


def estimate(files: Sequence[InputFile], worker: UnitTokenizer, *, workers: int) -> Estimate:
    """Duplicates are not looked for."""
    rows, total, seconds = [], sum(file.size for file in files), 0.0
    for span, most in _spans(files, total):
        reader = UnitReader(
            Unit(0, (span,)),
            text_key=worker.settings.text_key,
            skip_bad=worker.settings.bad_records == "skip",
            block_bytes=_PLAIN_BYTES,
        )
        sums, begun = np.zeros(4), time.process_time()
        for block in reader.blocks():
            tokens, lengths, table = worker.encode_block(block, dict.fromkeys(REASONS, 0))
            sums[:3] += len(tokens), len(lengths), len(table)
            read = block.size if span.file.kind == "jsonl" and not span.file.compression else 0
            sums[3] = sums[3] + read if read else reader.input_bytes
            if sums[3] >= most:
                break
        seconds += time.process_time() - begun
        rows.append(sums)
    tokens, sequences, documents, sampled = np.sum(rows or [np.zeros(4)], axis=0).tolist()
    rate = tokens / max(sampled, 1)
    error = _relative_error(np.array(rows), part=min(sampled / max(total, 1), 1.0))
    scale, limit = total / max(sampled, 1), worker.settings.limit
    seconds *= scale / workers
    if limit is not None and documents * scale > limit:
        scale = limit / documents
    tokens, sequences, documents = (each * scale for each in (tokens, sequences, documents))
    shard = tokens * worker.folder.dtype.itemsize + sequences * _INDEX_BYTES[0] + documents * _INDEX_BYTES[1]
    return Estimate(
        tokens, error, documents, shard, seconds, workers, rate * 1e9, 1 / rate if rate else 0.0, total, int(sampled),
        len(rows),
    )  # fmt: skip


def _spans(files: Sequence[InputFile], total: int) -> Iterator[tuple[Span, int]]:
    """(what a sample begins with, how many stored bytes of it are read), at even distances. Within a plain .jsonl it
    begins at a line, in others at the beginning."""
    ends, number, distance = np.cumsum([file.size for file in files]), -1, max(total / _SAMPLES, _PLAIN_BYTES)
    for place in np.arange(0.0, total, distance):
        found = int(np.searchsorted(ends, place, side="right"))
        file, offset = files[found], int(place - (ends[found] - files[found].size))
        if file.kind == "jsonl" and not file.compression:
            with open_input(file) as raw:
                begin = next_line(cast(IO[bytes], io.BufferedReader(cast(io.RawIOBase, raw))), offset) if offset else 0
            if begin < file.size:
                yield Span(file, begin, file.size), min(_PLAIN_BYTES, file.size - begin)
        elif found != number:
            yield Span(file, 0, file.size), _PACKED_BYTES
        number = found


def _relative_error(rows: np.ndarray, *, part: float) -> float | None:
    """Of the ratio of tokens to bytes; `part`: the share of all bytes that were read."""
    if part == 1.0 or not rows.any():
        return 0.0
    tokens, sizes = rows[:, 0], rows[:, 3]
    if len(rows) == 1:
        return None
    ratio = tokens.sum() / sizes.sum()
    variance = (1 - part) * ((tokens - ratio * sizes) ** 2).sum() / (len(rows) * (len(rows) - 1))
    return float(_TWO_SIDED_95 * np.sqrt(variance) / tokens.mean())
