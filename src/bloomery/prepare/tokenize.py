"""One unit: read its documents, encode them, filter them, write its part; and the pool of processes that do so."""

from __future__ import annotations

import contextlib
import hashlib
import json
import multiprocessing
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from bloomery.base import signals
from bloomery.base.errors import DataError, Problem
from bloomery.base.splitmix import splitmix64
from bloomery.base.storage import reason
from bloomery.data.tokenizer import Tokenizer, in_time
from bloomery.prepare.encoders import Encoder, Ids, forbidden_ids
from bloomery.prepare.merge import gather, sums
from bloomery.prepare.parts import DOCUMENT, PartsFolder, PartWriter, ShardPart
from bloomery.prepare.read import Block, Unit, UnitReader, hash_span, place_of

_FORMAT = 4
"""Of parts; another number makes older ones worthless."""
EMPTY, SHORT, LONG, DUPLICATE, BAD = REASONS = ("empty", "short", "long", "duplicate", "bad")
"""Why documents are dropped."""


@dataclass(frozen=True)
class Settings:
    """Everything that decides the ids of a document and which documents there are."""

    tokenizer_hash: str
    dtype: str
    eod_id: int | None
    shuffle_seed: int | None
    text_key: str
    special_tokens: str
    split_sentences: bool
    min_tokens: int
    max_tokens: int | None
    deduplicate: bool
    bad_records: str

    def key(self, unit: Unit) -> str:
        inputs = [(span.file.number, span.file.size, span.start, span.end, span.file.name) for span in unit.spans]
        text = json.dumps([_FORMAT, asdict(self), inputs])
        return hashlib.sha256(text.encode(errors="surrogateescape")).hexdigest()


def reusable(unit: Unit, settings: Settings, folder: PartsFolder) -> ShardPart | None:
    """The part of an earlier run, if it is what this one would write."""
    part = folder.verified(unit.number, settings.key(unit))
    for span, (content_hash, stamp) in zip(unit.spans, part.inputs if part else [], strict=part is not None):
        if not (span.file.stamp and span.file.stamp == stamp) and hash_span(span) != content_hash:
            return None
    return part


class UnitTokenizer:
    """What every worker has a copy of."""

    def __init__(
        self,
        units: Sequence[Unit],
        settings: Settings,
        folder: PartsFolder,
        encoder: Encoder,
        tokenizer: Tokenizer,
        *,
        reference: Encoder,
        progress: NDArray[np.int64],
    ) -> None:
        """`reference`: for texts at which the encoder fails. `progress`: for every unit, in memory that all processes
        share, bytes of input, bytes of text, documents and tokens."""
        self._units, self._settings, self._folder, self._encoder = units, settings, folder, encoder
        self._reference, self._progress = reference, progress
        as_ids = settings.special_tokens == "as_ids"
        self._forbidden = np.array([] if as_ids else forbidden_ids(tokenizer), np.uint32)

    def encode(self, texts: list[str]) -> Ids:
        """DataError if the library fails or takes too long."""
        return in_time(partial(self._encoder.encode, texts), sum(map(len, texts)), self._encoder.name)

    def make_part(self, number: int) -> ShardPart:
        """The part is under its name, but counts only once it is marked."""
        unit, settings, progress = self._units[number], self._settings, self._progress[number]
        reader = UnitReader(unit, text_key=settings.text_key, skip_bad=settings.bad_records == "skip")
        dropped = dict.fromkeys(REASONS, 0)
        progress[:] = 0
        with PartWriter(self._folder, number) as writer:
            for block in reader.blocks():
                tokens, lengths, table = self._encode_block(block, dropped)
                if len(table):
                    writer.append(tokens, lengths, table)
                progress += (block.input_bytes, table["text_bytes"].sum(), len(table), len(tokens))
                del block, tokens, lengths, table  # before the next block is read
            dropped[BAD] += reader.bad
            return writer.finish(
                key=settings.key(unit),
                encoder=self._encoder.name,
                inputs=[(digest, span.file.stamp) for digest, span in zip(reader.hashes, unit.spans, strict=True)],
                text_bytes=int(progress[1]),
                dropped=dropped,
            )

    def _encode_block(self, block: Block, dropped: dict[str, int]) -> tuple[NDArray[Any], NDArray[Any], NDArray[Any]]:
        """(tokens, lengths of sequences, DOCUMENT of each document); `dropped` counts the others."""
        settings, texts = self._settings, block.texts
        table = np.zeros(len(texts), DOCUMENT)
        places = np.concatenate(block.places or [np.empty((0, 2), np.uint64)])
        table["file"] = places[:, 0]
        table["text_bytes"] = np.fromiter((len(t) if t.isascii() else len(t.encode()) for t in texts), np.int64)
        if settings.shuffle_seed is not None:
            table["key"] = shuffle_keys(settings.shuffle_seed, places)
        if settings.deduplicate:
            table["hash"] = _hashes(texts)
        sequences, sequence_texts = self._split(texts)
        ids, lengths = self._ids(sequence_texts)
        table["sequences"] = sums(lengths > 0, sequences)  # a sentence may be nothing but white space
        lengths = lengths[lengths > 0]
        document_tokens = sums(lengths, table["sequences"])
        forged = self._forged(block, ids, document_tokens)
        order = np.flatnonzero(self._keep(document_tokens, table["hash"], forged, dropped))
        if settings.shuffle_seed is not None:
            order = order[np.argsort(table["key"][order], kind="stable")]
        tokens = ids.astype(settings.dtype)
        if len(order) < len(texts) or settings.shuffle_seed is not None:
            tokens, lengths = gather(tokens, document_tokens, order), gather(lengths, table["sequences"], order)
            table = table[order]
        if settings.eod_id is not None:
            last = np.cumsum(table["sequences"]) - 1
            tokens = np.insert(tokens, np.cumsum(lengths)[last], settings.eod_id)
            lengths[last] += 1
        return tokens, lengths, table

    def _ids(self, texts: list[str]) -> Ids:
        try:
            return self.encode(texts)
        except DataError:
            if self._encoder is self._reference:
                raise
            return self._reference.encode(texts)

    def _split(self, texts: list[str]) -> tuple[NDArray[np.int64], list[str]]:
        """(sequences of each document, the text of each sequence)."""
        if not self._settings.split_sentences:
            return np.ones(len(texts), np.int64), texts
        from bloomery.prepare.sentences import split_sentences

        split = [split_sentences(text) for text in texts]
        return np.fromiter(map(len, split), np.int64), [sentence for text in split for sentence in text]

    def _forged(self, block: Block, ids: NDArray[np.uint32], document_tokens: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Which documents have a special token that no text may give, such as an end of document in their middle."""
        forged, forbidden = np.zeros(len(document_tokens), bool), self._forbidden
        if not len(forbidden) or not len(places := np.flatnonzero((ids >= forbidden[0]) & (ids <= forbidden[-1]))):
            return forged
        places = places[np.isin(ids[places], forbidden)]
        forged[np.searchsorted(np.cumsum(document_tokens), places, side="right")] = True
        if len(places) and self._settings.bad_records != "skip":
            first = int(np.argmax(forged))
            number, offset = map(int, np.concatenate(block.places)[first])
            file = next(span.file for unit in self._units for span in unit.spans if span.file.number == number)
            what = f"has a text that gives the special token {ids[places[0]]}; it begins {block.texts[first]!r:.60}"
            rule = "this tokenizer's model takes the text of a special token for it, so documents could forge an end"
            remedy = (
                "leave them out with `bad_records: skip`, allow it with `special_tokens: as_ids`, or use another one"
            )
            raise DataError(Problem(what, rule, remedy, place_of(file, offset)))
        return forged

    def _keep(
        self,
        document_tokens: NDArray[np.int64],
        hashes: NDArray[np.uint64],
        forged: NDArray[np.bool_],
        dropped: dict[str, int],
    ) -> NDArray[np.bool_]:
        """Lengths are those of the text, without an end-of-document token."""
        empty = document_tokens == 0
        short = ~empty & ~forged & (document_tokens < self._settings.min_tokens)
        long = ~forged & (document_tokens > (self._settings.max_tokens or np.iinfo(np.int64).max))
        keep: NDArray[np.bool_] = ~(empty | short | long | forged)
        duplicate = np.zeros(len(keep), bool)
        if self._settings.deduplicate:
            duplicate[keep] = True
            duplicate[np.unique(hashes, axis=0, return_index=True)[1]] = False
        for why, which in ((EMPTY, empty), (SHORT, short), (LONG, long), (BAD, forged), (DUPLICATE, duplicate)):
            dropped[why] += int(which.sum())
        return keep & ~duplicate


def shuffle_keys(seed: int, places: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """A random number for each document, from the seed and the place alone; documents are sorted by it."""
    file_keys = splitmix64(places[:, 0] + splitmix64(np.array([seed], np.uint64)))
    return splitmix64(file_keys + places[:, 1])


def _hashes(texts: list[str]) -> NDArray[np.uint64]:
    return np.frombuffer(b"".join(xxhash.xxh3_128_digest(text.encode()) for text in texts), "<u8").reshape(-1, 2)


_worker: Any = None
"""In a worker: the object whose methods it calls."""


@contextlib.contextmanager
def worker_pool(worker: Any, *, workers: int) -> Iterator[Callable[..., Future[Any]]]:
    """Yields `submit(method, *arguments)`, which calls a method of the `worker` that every process has a copy of: they
    are forked, because a vocabulary is too large to be sent. DataError if a process cannot start or dies; any error
    inside ends all processes at once."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # here too: a fork does not copy threads
    others = set(multiprocessing.active_children())
    context = multiprocessing.get_context("fork")
    executor = ProcessPoolExecutor(workers, context, initializer=_start, initargs=(worker, os.getpid()))
    try:
        try:
            executor.submit(os.getpid)  # forks all of them
        except OSError as error:
            rule, remedy = "each needs a process, open files and memory", "use fewer --workers, or raise the limits"
            what = f"cannot start a worker process: {reason(error)}"
            raise DataError(Problem(what, rule, f"{remedy} (`ulimit -n`, `ulimit -u`)")) from error
        yield lambda *call: executor.submit(_call, *call)
    except BaseException as error:
        for process in set(multiprocessing.active_children()) - others:
            process.kill()
        if not isinstance(error, BrokenProcessPool):
            raise
        rule = "nothing was written for what it was working on"
        remedy = "run the command again; with fewer --workers if memory was short (see `dmesg`)"
        raise DataError(Problem("a worker process was killed", rule, remedy)) from error
    finally:
        executor.shutdown(cancel_futures=True)


def _start(worker: Any, parent: int) -> None:
    global _worker
    signals.ignore()  # they may reach the whole group; the parent ends its workers
    signals.end_with_parent(signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)
    os.environ["RAYON_NUM_THREADS"] = "1"  # fastokens would start a thread for every processor
    _worker = worker


def _call(method: str, *arguments: Any) -> Any:
    return getattr(_worker, method)(*arguments)
