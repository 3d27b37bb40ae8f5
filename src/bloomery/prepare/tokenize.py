"""One unit: read its documents, encode them, filter them, write its part."""

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from bloomery.base.errors import DataError, Problem
from bloomery.base.splitmix import splitmix64
from bloomery.data.tokenizer import Tokenizer
from bloomery.prepare.encoders import Encoder, forbidden_ids
from bloomery.prepare.filters import bands_of, language_of
from bloomery.prepare.merge import gather
from bloomery.prepare.parts import PartsFolder, ShardPart, write_part
from bloomery.prepare.read import Block, Unit, UnitReader, hash_span, place_of

_FORMAT = 6
"""Of parts; another number makes older ones worthless."""
EMPTY, SHORT, LONG, DUPLICATE, BAD = ALWAYS = ("empty", "short", "long", "duplicate", "bad")
SIMILAR, LANGUAGE, NOT_DRAWN = ("nearly duplicate", "in other languages", "not drawn")
REASONS = (*ALWAYS, SIMILAR, LANGUAGE, NOT_DRAWN)
"""Why documents are dropped. The last three are named only where a filter has dropped some."""


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
    limit: int | None
    languages: list[str]
    near_duplicates: float | None

    def key(self, unit: Unit) -> str:
        inputs = [(span.file.number, span.file.size, span.start, span.end, span.file.name) for span in unit.spans]
        text = json.dumps([_FORMAT, asdict(self), inputs])
        return hashlib.sha256(text.encode(errors="surrogateescape")).hexdigest()


def reusable(unit: Unit, settings: Settings, folder: PartsFolder) -> ShardPart | None:
    """The part of an earlier run, if it is what this one would write."""
    part = folder.verified(unit.number, settings.key(unit))
    if part is None or len(part.inputs) != len(unit.spans) or part.dropped.keys() != {*REASONS}:
        return None
    inputs = zip(unit.spans, part.inputs, strict=True)
    same = ((stamp and span.file.stamp == stamp) or hash_span(span) == digest for span, (digest, stamp) in inputs)
    return part if all(same) else None


@dataclass(frozen=True)
class UnitTokenizer:
    """What every worker has a copy of."""

    units: Sequence[Unit]
    settings: Settings
    folder: PartsFolder
    encoder: Encoder
    tokenizer: Tokenizer
    read_bytes: NDArray[np.int64]
    """Of the input of every unit, in memory that all processes share."""

    def make_part(self, number: int) -> ShardPart:
        """The part is under its name, but counts only once it is marked."""
        unit, settings = self.units[number], self.settings
        reader = UnitReader(unit, text_key=settings.text_key, skip_bad=settings.bad_records == "skip")
        dropped = dict.fromkeys(REASONS, 0)
        part_hash, runs = write_part(self.folder, number, self._encoded(reader, dropped))
        dropped[BAD] += reader.bad
        self.read_bytes[number] = reader.input_bytes
        inputs = [(digest, span.file.stamp) for digest, span in zip(reader.hashes, unit.spans, strict=True)]
        return ShardPart(number, settings.key(unit), self.encoder.name, inputs, part_hash, runs, dropped)

    def _encoded(self, reader: UnitReader, dropped: dict[str, int]) -> Iterator[tuple[NDArray[Any], ...]]:
        keys = np.empty(0, np.uint64)
        for block in reader.blocks():
            tokens, lengths, table = self.encode_block(self._filtered(block, keys, dropped), dropped)
            if self.draws_early:
                keys = np.sort(np.concatenate((keys, table["key"])))[: self.settings.limit]
            self.read_bytes[reader.unit.number] = reader.input_bytes
            del block
            if len(table):
                yield tokens, lengths, table
            del tokens, lengths, table  # before the next block is read

    @property
    def draws_early(self) -> bool:
        """Whether a unit need not encode documents of which it has enough with smaller keys: which of them are
        duplicates is known only when all units are there."""
        settings = self.settings
        return settings.limit is not None and not settings.deduplicate and settings.near_duplicates is None

    def _filtered(self, block: Block, keys: NDArray[np.uint64], dropped: dict[str, int]) -> Block:
        """What is worth encoding. `keys`: the smallest of the documents of this unit so far."""
        settings, keep = self.settings, np.ones(len(block.texts), bool)
        if settings.languages:
            languages = [language_of(text) if text else "" for text in block.texts]
            keep = np.array([not language or language in settings.languages for language in languages], bool)
            dropped[LANGUAGE] += len(keep) - int(keep.sum())
        if self.draws_early and len(keys) == settings.limit and settings.shuffle_seed is not None:
            late = keep & (shuffle_keys(settings.shuffle_seed, np.concatenate(block.places)) > keys[-1])
            dropped[NOT_DRAWN] += int(late.sum())
            keep &= ~late
        if keep.all():
            return block
        texts = [text for text, wanted in zip(block.texts, keep, strict=True) if wanted]
        return Block(texts, [np.concatenate(block.places)[keep]], block.size)

    def encode_block(self, block: Block, dropped: dict[str, int]) -> tuple[NDArray[Any], NDArray[Any], NDArray[Any]]:
        """(tokens, lengths of sequences, DOCUMENT of each document); `dropped` counts the others."""
        settings, texts = self.settings, block.texts
        table = np.zeros(len(texts), self.folder.document)
        places = np.concatenate(block.places or [np.empty((0, 2), np.uint64)])
        table["file"] = places[:, 0]
        table["text_bytes"] = np.fromiter((len(t) if t.isascii() else len(t.encode()) for t in texts), np.int64)
        if settings.shuffle_seed is not None:
            table["key"] = shuffle_keys(settings.shuffle_seed, places)
        if settings.deduplicate:
            hashes = b"".join(xxhash.xxh3_128_digest(text.encode()) for text in texts)
            table["hash"] = np.frombuffer(hashes, "<u8").reshape(-1, 2)
        if settings.near_duplicates is not None:
            table["bands"] = bands_of(texts, settings.near_duplicates)
        sequences, sequence_texts = self._split(texts)
        ids, lengths = self.encoder.encode(sequence_texts)
        table["sequences"] = _sums(lengths > 0, sequences)  # a sentence may be nothing but white space
        lengths = lengths[lengths > 0]
        table["tokens"] = _sums(lengths, table["sequences"])
        order = np.flatnonzero(self._keep(table, self._forged(block, ids, table["tokens"]), dropped))
        if settings.shuffle_seed is not None:
            order = order[np.argsort(table["key"][order], kind="stable")]
        tokens = ids.astype(settings.dtype)
        if len(order) < len(texts) or settings.shuffle_seed is not None:
            tokens, lengths = gather(tokens, table["tokens"], order), gather(lengths, table["sequences"], order)
            table = table[order]
        if settings.eod_id is not None:
            last = np.cumsum(table["sequences"]) - 1
            tokens = np.insert(tokens, np.cumsum(table["tokens"]), settings.eod_id)
            lengths[last] += 1
            table["tokens"] += 1
        return tokens, lengths, table

    def _split(self, texts: list[str]) -> tuple[NDArray[np.int64], list[str]]:
        """(sequences of each document, the text of each sequence)."""
        if not self.settings.split_sentences:
            return np.ones(len(texts), np.int64), texts
        from bloomery.prepare.sentences import split_sentences

        split = [split_sentences(text) for text in texts]
        return np.fromiter(map(len, split), np.int64), [sentence for text in split for sentence in text]

    def _forged(self, block: Block, ids: NDArray[np.uint32], document_tokens: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Which documents have a special token that no text may give, such as an end of document in their middle."""
        forged = np.zeros(len(document_tokens), bool)
        forbidden = [] if self.settings.special_tokens == "as_ids" else forbidden_ids(self.tokenizer)
        if not forbidden or not len(places := np.flatnonzero((ids >= forbidden[0]) & (ids <= forbidden[-1]))):
            return forged
        places = places[np.isin(ids[places], forbidden)]
        forged[np.searchsorted(np.cumsum(document_tokens), places, side="right")] = True
        if len(places) and self.settings.bad_records != "skip":
            first = int(np.argmax(forged))
            number, offset = map(int, np.concatenate(block.places)[first])
            file = next(span.file for unit in self.units for span in unit.spans if span.file.number == number)
            what = f"has a text that gives the special token {ids[places[0]]}; it begins {block.texts[first]!r:.60}"
            rule = "this tokenizer's model takes the text of a special token for it, so documents could forge an end"
            remedy = (
                "leave them out with `bad_records: skip`, allow it with `special_tokens: as_ids`, or use another one"
            )
            raise DataError(Problem(what, rule, remedy, place_of(file, offset)))
        return forged

    def _keep(self, table: NDArray[Any], forged: NDArray[np.bool_], dropped: dict[str, int]) -> NDArray[np.bool_]:
        """Lengths are those of the text, without an end-of-document token."""
        tokens = table["tokens"]
        empty = tokens == 0
        short = ~empty & ~forged & (tokens < self.settings.min_tokens)
        long = ~forged & (tokens > (self.settings.max_tokens or np.iinfo(np.int64).max))
        keep: NDArray[np.bool_] = ~(empty | short | long | forged)
        duplicate = np.zeros(len(keep), bool)
        if self.settings.deduplicate:
            duplicate[keep] = True
            duplicate[np.unique(table["hash"], axis=0, return_index=True)[1]] = False
        for why, which in ((EMPTY, empty), (SHORT, short), (LONG, long), (BAD, forged), (DUPLICATE, duplicate)):
            dropped[why] += int(which.sum())
        return keep & ~duplicate


def shuffle_keys(seed: int, places: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """A random number for each document, from the seed and the place alone; documents are sorted by it."""
    file_keys = splitmix64(places[:, 0] + splitmix64(np.array([seed], np.uint64)))
    return splitmix64(file_keys + places[:, 1])


def _sums(values: NDArray[Any], lengths: NDArray[Any]) -> NDArray[np.int64]:
    """The sum of each row."""
    totals = np.concatenate(([0], np.cumsum(values, dtype=np.int64)))
    ends = np.cumsum(lengths, dtype=np.int64)
    return np.asarray(totals[ends] - totals[ends - lengths], np.int64)
