"""One unit: read its documents, encode them, filter them, write its part. Runs in a worker process."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from bloomery.base.errors import DataError, Problem
from bloomery.base.splitmix import splitmix64
from bloomery.data.tokenizer import in_time
from bloomery.prepare.encoder import RECHECK_BYTES, RECHECK_EVERY, Chosen, in_short
from bloomery.prepare.parts import BAD, DUPLICATE, EMPTY, LONG, SHORT, Part, PartFolder, PartWriter
from bloomery.prepare.pool import Report
from bloomery.prepare.ragged import gather, sums
from bloomery.prepare.read import Block, UnitReader, hash_piece, place_of
from bloomery.prepare.units import Unit

_FORMAT = 3
"""Of parts; another number makes older ones worthless."""


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
        inputs = [
            (piece.file.number, piece.file.size, piece.start, piece.end, piece.file.name) for piece in unit.pieces
        ]
        text = json.dumps([_FORMAT, asdict(self), inputs])
        return hashlib.sha256(text.encode(errors="surrogateescape")).hexdigest()


@dataclass
class Recheck:
    """Documents whose ids somebody else should look at."""

    texts: list[str] = field(default_factory=list)
    ids: list[NDArray[np.uint32]] = field(default_factory=list)


@dataclass(frozen=True)
class BlockDone:
    """Told after every block."""

    input_bytes: int
    text_bytes: int
    documents: int
    tokens: int


class FailedEncoderError(Exception):
    """An encoder gave other ids than the judge, or raised, in the middle of the work."""


def reusable(unit: Unit, settings: Settings, folder: PartFolder) -> Part | None:
    """The part of an earlier run, if it is what this one would write."""
    part = folder.read(unit.number)
    if part is None or part.key != settings.key(unit) or part.encoder.split()[0] in folder.liars():
        return None
    for piece, (content_hash, stamp) in zip(unit.pieces, part.inputs, strict=True):
        if not (piece.file.stamp and piece.file.stamp == stamp) and hash_piece(piece) != content_hash:
            return None
    return folder.proven(part)


def make_part(
    unit: Unit, settings: Settings, chosen: Chosen, folder: PartFolder, report: Report
) -> tuple[Part, Recheck]:
    """The part is under its name, but counts only once it is marked. FailedEncoderError if the encoder, which is not
    the reference, raises."""
    reader = UnitReader(unit, text_key=settings.text_key, skip_bad=settings.bad_records == "skip")
    work = _Work(unit, settings, chosen)
    writer = PartWriter(folder, unit)
    try:
        for block in reader.blocks():
            before = work.text_bytes
            tokens, columns, documents = work.encode(block)
            if documents:
                writer.append(tokens, columns, documents=documents)
            report(BlockDone(block.input_bytes, work.text_bytes - before, documents, len(tokens)))
            del block, tokens, columns  # before the next block is read
        inputs = [(digest, piece.file.stamp) for digest, piece in zip(reader.hashes, unit.pieces, strict=True)]
        dropped = {**work.dropped, BAD: reader.bad + work.dropped[BAD]}
        key = settings.key(unit)
        part = writer.finish(key=key, encoder=chosen.name, inputs=inputs, text_bytes=work.text_bytes, dropped=dropped)
        return part, work.recheck
    finally:
        writer.abort()


class _Work:
    def __init__(self, unit: Unit, settings: Settings, chosen: Chosen) -> None:
        self._unit, self._settings, self._chosen = unit, settings, chosen
        self._forbidden = np.array(sorted(chosen.forgeable), np.uint32)
        self._seen = 0
        self.dropped = {EMPTY: 0, SHORT: 0, LONG: 0, DUPLICATE: 0, BAD: 0}
        self.text_bytes = 0
        self.recheck = Recheck()

    def encode(self, block: Block) -> tuple[NDArray[Any], dict[str, NDArray[Any]], int]:
        """(tokens, columns, number of documents)."""
        settings, texts = self._settings, block.texts
        sequences, sequence_texts = self._sequences(texts)
        ids, lengths = self._ids(sequence_texts)
        self._keep_for_recheck(sequence_texts, ids, lengths)
        if sequences is not None:
            sequences = sums((lengths > 0).astype(np.int64), sequences)  # a sentence may be nothing but white space
            lengths = lengths[lengths > 0]
        document_tokens = lengths if sequences is None else sums(lengths, sequences)
        hashes = _hashes(texts) if settings.deduplicate else None
        forged = self._forged(block, ids, document_tokens)
        keep = self._judge(document_tokens, hashes, forged)
        sizes = np.fromiter((len(t) if t.isascii() else len(t.encode()) for t in texts), np.int64, len(texts))
        places = np.concatenate(block.places or [np.empty((0, 2), np.uint64)])
        keys = shuffle_keys(settings.shuffle_seed, places) if len(places) else None
        order = np.flatnonzero(keep)
        if settings.shuffle_seed is not None and keys is not None:
            order = order[np.argsort(keys[order], kind="stable")]
        tokens = ids.astype(settings.dtype)
        if len(order) < len(texts) or settings.shuffle_seed is not None:
            tokens = gather(tokens, document_tokens, order)
            lengths = lengths[order] if sequences is None else gather(lengths, sequences, order)
        sequences = None if sequences is None else sequences[order]
        if settings.eod_id is not None:
            last = np.arange(len(order)) if sequences is None else np.cumsum(sequences) - 1
            tokens = np.insert(tokens, np.cumsum(lengths)[last], settings.eod_id)
            lengths = lengths.copy()
            lengths[last] += 1
        self.text_bytes += int(sizes[order].sum())
        columns = {
            "lengths": lengths,
            "sequences": sequences,
            "keys": None if settings.shuffle_seed is None or keys is None else keys[order],
            "hashes": None if hashes is None else hashes[order],
            "text_bytes": None if hashes is None else sizes[order],
            "files": places[order, 0],
        }
        return tokens, {name: values for name, values in columns.items() if values is not None}, len(order)

    def _ids(self, texts: list[str]) -> tuple[NDArray[np.uint32], NDArray[np.int64]]:
        try:
            if self._chosen.is_reference:  # which looks at the clock itself
                return self._chosen.encoder.encode(texts)
            return in_time(partial(self._chosen.encoder.encode, texts), sum(map(len, texts)), self._chosen.name)
        except BaseException as error:  # a panic of Rust is no Exception
            if self._chosen.is_reference:
                raise
            raise FailedEncoderError(f"it fails: {in_short(error.__cause__ or error, 0)}") from error

    def _sequences(self, texts: list[str]) -> tuple[NDArray[np.int64] | None, list[str]]:
        """(sentences of each document or None, the texts to encode)."""
        if not self._settings.split_sentences:
            return None, texts
        from bloomery.prepare.sentences import split_sentences

        split = [split_sentences(text) for text in texts]
        return np.fromiter(map(len, split), np.int64, len(split)), [sentence for text in split for sentence in text]

    def _forged(self, block: Block, ids: NDArray[np.uint32], document_tokens: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Which documents have a special token that no text may give, such as an end of document in their middle."""
        forged = np.zeros(len(document_tokens), bool)
        if not len(self._forbidden) or not len(places := np.flatnonzero(np.isin(ids, self._forbidden))):
            return forged
        forged[np.searchsorted(np.cumsum(document_tokens), places, side="right")] = True
        if self._settings.bad_records != "skip":
            first = int(np.argmax(forged))
            number, offset = map(int, np.concatenate(block.places)[first])
            file = next(piece.file for piece in self._unit.pieces if piece.file.number == number)
            what = f"has a text that gives the special token {ids[places[0]]}; it begins {block.texts[first]!r:.60}"
            rule = "this tokenizer's model takes the text of a special token for it, so documents could forge an end"
            remedy = (
                "leave them out with `bad_records: skip`, allow it with `special_tokens: as_ids`, or use another one"
            )
            raise DataError(Problem(what, rule, remedy, place_of(file, offset)))
        return forged

    def _judge(
        self, document_tokens: NDArray[np.int64], hashes: NDArray[np.uint64] | None, forged: NDArray[np.bool_]
    ) -> NDArray[np.bool_]:
        """Which documents stay. Lengths are those of the text, without an end-of-document token."""
        empty = document_tokens == 0
        short = ~empty & ~forged & (document_tokens < self._settings.min_tokens)
        long = ~forged & (document_tokens > (self._settings.max_tokens or np.iinfo(np.int64).max))
        keep: NDArray[np.bool_] = ~(empty | short | long | forged)
        if hashes is not None:
            first = np.zeros(len(keep), bool)
            first[np.unique(hashes, axis=0, return_index=True)[1]] = True
            self.dropped[DUPLICATE] += int((keep & ~first).sum())
            keep &= first
        for reason, which in ((EMPTY, empty), (SHORT, short), (LONG, long), (BAD, forged)):
            self.dropped[reason] += int(which.sum())
        return keep

    def _keep_for_recheck(self, texts: list[str], ids: NDArray[np.uint32], lengths: NDArray[np.int64]) -> None:
        ends = np.cumsum(lengths)
        for index in range(-self._seen % RECHECK_EVERY, len(texts), RECHECK_EVERY):
            if len(texts[index]) <= RECHECK_BYTES:
                self.recheck.texts.append(texts[index])
                self.recheck.ids.append(ids[ends[index] - lengths[index] : ends[index]].copy())
        self._seen += len(texts)


def shuffle_keys(seed: int | None, places: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """A random number for each document, from the seed and the place alone; documents are sorted by it."""
    file_keys = splitmix64(places[:, 0] + splitmix64(np.array([seed or 0], np.uint64)))
    return splitmix64(file_keys + places[:, 1])


def _hashes(texts: list[str]) -> NDArray[np.uint64]:
    return np.frombuffer(b"".join(xxhash.xxh3_128_digest(text.encode()) for text in texts), "<u8").reshape(-1, 2)
