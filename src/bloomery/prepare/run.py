"""`bloomery prepare`: find the files, plan the units, make their parts in parallel, merge them into one shard."""

from __future__ import annotations

import contextlib
import copy
import mmap
import os
import queue
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, fields, replace
from glob import escape, glob
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from bloomery import __version__
from bloomery.base.errors import DataError, Problem, first_few
from bloomery.base.storage import writing, written_to
from bloomery.base.units import counted
from bloomery.config.recipe import PrepareSection
from bloomery.data import manifest as manifests
from bloomery.data.manifest import ShardManifest, SourceCount, SourceFile, manifest_path
from bloomery.data.shards import PARTIAL, ShardReader, ShardWriter, file_checksum, token_dtype
from bloomery.data.tokenizer import Tokenizer
from bloomery.prepare.encoders import choose_encoder, reject_dropout
from bloomery.prepare.estimate import Estimate, estimate
from bloomery.prepare.filters import band_shape, require
from bloomery.prepare.merge import Merge
from bloomery.prepare.parts import PartsFolder, ShardPart
from bloomery.prepare.pool import worker_pool
from bloomery.prepare.read import Block, Span, Unit, UnitReader, hash_span, plan_units
from bloomery.prepare.sources import find_files, not_lines
from bloomery.prepare.tokenize import (
    ALWAYS,
    DUPLICATE,
    NOT_DRAWN,
    REASONS,
    SIMILAR,
    Settings,
    UnitTokenizer,
    reusable,
)

AGAIN = "; then run the command again: it needs room for the tokens twice, --verify three times"
_SAMPLE_UNITS, SAMPLE_DOCUMENTS, _SAMPLE_BYTES = 8, 250, 1 << 14
"""On which fastokens is compared with the reference: of so many units the first documents, from each so many at most
and so many characters."""
_REPORT_SECONDS = 0.5


@dataclass(frozen=True)
class Progress:
    """How far a preparation is."""

    total_input_bytes: int
    """Of all files, as they lie there."""
    input_bytes: int = 0
    reused_bytes: int = 0
    """Of the input, what an earlier run had done."""
    merged: float = 0.0
    """Share of the shard that is written."""


@dataclass(frozen=True)
class PrepareResult:
    manifest: ShardManifest | None
    """None for a share, which merges nothing."""
    reused: bool
    """True when the shard was already there, made from the same texts in the same way, and was left as it is."""
    notes: list[str] = field(default_factory=list)
    """What a user should know: which encoder was taken and why, empty files, sources that gave nothing."""


def plan_all(sections: Sequence[PrepareSection], **settings: Any) -> list[Preparation]:
    """`settings`: those of Preparation. DataError with everything that keeps any of them from beginning."""
    plans: list[Preparation] = []
    problems: dict[Problem, None] = {}
    outputs = [section.output for section in sections]
    for section in sections:
        try:
            plans.append(Preparation(section, outputs=outputs, **settings))
        except DataError as error:
            problems |= dict.fromkeys(error.problems)
    if problems:
        raise DataError(list(problems))
    return plans


class Preparation:
    """One shard: its files are found and its units planned; `run` does the work. The same inputs always give the same
    bytes, with any number of workers and shares."""

    def __init__(
        self, section: PrepareSection, *, tokenizer: Tokenizer, seed: int, workers: int = 1, outputs: Sequence[str] = ()
    ) -> None:
        """`outputs`: those of other sections, which are no text either."""
        reject_dropout(tokenizer)
        self.output, self.tokenizer = section.output, tokenizer
        self._sources, self._workers = section.sources, max(1, workers)
        dtype = token_dtype(tokenizer.vocab_size)
        eod = section.append_eod and ("append_eod" in section.model_fields_set or not section.split_sentences)
        self._settings = Settings(
            tokenizer_hash=tokenizer.content_hash,
            dtype=dtype.name,
            eod_id=tokenizer.eod_id if eod else None,
            shuffle_seed=seed if section.shuffle else None,
            **{field.name: getattr(section, field.name) for field in fields(Settings) if hasattr(section, field.name)},
        )
        limit = section.limit.count if section.limit else None
        self._settings = replace(self._settings, limit=limit, languages=sorted(section.languages))
        require(languages=section.languages, similarity=section.near_duplicates)
        self._files = find_files(section.sources, outputs=[section.output, *outputs], which=section.files)
        self._units = plan_units(self._files)
        self._bands = band_shape(section.near_duplicates)[0] if section.near_duplicates else 0
        self._folder = PartsFolder(section.output, dtype, bands=self._bands)
        self._report: Callable[[Progress], None] = lambda _: None
        self._progress = Progress(sum(file.size for file in self._files))
        self._notes: list[str] = []

    def elsewhere(self, output: str) -> Preparation:
        """The same shard under another name."""
        other = copy.copy(self)
        other.output, other._folder = output, PartsFolder(output, self._folder.dtype, bands=self._bands)
        return other

    def run(
        self, share: tuple[int, int] | None = None, progress: Callable[[Progress], None] = lambda _: None
    ) -> PrepareResult:
        """`share`: (k, n) for the units k, k + n, k + 2n, ..., as one of several processes or machines."""
        self._report = progress
        with written_to("place for prepare.output", AGAIN):
            if not os.path.exists(self._folder.path) and (found := self._finished()):
                return PrepareResult(found, True)  # nothing to write, not even a lock
            with self._folder.locked(shared=share is not None) as lock:
                if found := self._finished():
                    self._folder.remove(lock)
                    return PrepareResult(found, True)
                units = self._units[share[0] :: share[1]] if share else self._units
                parts = self._reused_parts(units)
                if missing := [unit for unit in units if unit.number not in parts]:
                    parts |= self._new_parts(missing)
                if share:
                    return PrepareResult(None, False, self._notes)
                manifest = self._merge([parts[unit.number] for unit in units])
                self._folder.remove(lock)
                return PrepareResult(manifest, False, self._notes)

    def estimate(self) -> Estimate:
        """What `run` would make of all files, and how long its workers would take."""
        as_ids, no_units = self._settings.special_tokens == "as_ids", np.zeros(0, np.int64)
        encoder, _ = choose_encoder(self.tokenizer, self._sample_texts(), as_ids=as_ids)
        worker = UnitTokenizer(self._units, self._settings, self._folder, encoder, self.tokenizer, no_units)
        return estimate(self._files, worker, workers=self._workers)

    def _advance(self, **facts: Any) -> None:
        self._progress = replace(self._progress, **facts)
        self._report(self._progress)

    # ---------------------------------------------------------------- the parts

    def _reused_parts(self, units: Sequence[Unit]) -> dict[int, ShardPart]:
        """The parts that earlier runs have made of these units, verified by their hashes."""
        marked = [unit for unit in units if self._folder.marker(unit.number).exists()]
        with ThreadPoolExecutor(self._workers) as pool:
            verified = pool.map(lambda unit: reusable(unit, self._settings, self._folder), marked)
            parts = {part.unit: part for part in verified if part is not None}
        self._advance(reused_bytes=sum(unit.input_bytes for unit in marked if unit.number in parts))
        return parts

    def _new_parts(self, units: Sequence[Unit]) -> dict[int, ShardPart]:
        as_ids = self._settings.special_tokens == "as_ids"
        encoder, notes = choose_encoder(self.tokenizer, self._sample_texts(), as_ids=as_ids)
        self._notes += notes
        read_bytes = np.frombuffer(mmap.mmap(-1, 8 * len(self._units)), np.int64)  # shared by all processes
        worker = UnitTokenizer(self._units, self._settings, self._folder, encoder, self.tokenizer, read_bytes)
        parts: dict[int, ShardPart] = {}
        with worker_pool(worker.make_part, min(self._workers, len(units))) as submit:
            done: queue.SimpleQueue[Future[ShardPart]] = queue.SimpleQueue()
            for unit in units:
                submit(unit.number).add_done_callback(done.put)
            while len(parts) < len(units):
                with contextlib.suppress(queue.Empty):
                    part = done.get(timeout=_REPORT_SECONDS).result()
                    self._folder.mark(part)
                    parts[part.unit] = part
                self._advance(input_bytes=int(read_bytes.sum()))
        return parts

    def _sample_texts(self) -> list[str]:
        """The first documents of some units."""
        texts: list[str] = []
        for unit in self._units[:: -(-len(self._units) // _SAMPLE_UNITS)]:
            reader = UnitReader(unit, text_key=self._settings.text_key, skip_bad=True, block_bytes=_SAMPLE_BYTES)
            left = _SAMPLE_BYTES
            for text in next(reader.blocks(), Block()).texts[:SAMPLE_DOCUMENTS]:
                texts.append(text[:left])
                left -= len(texts[-1])
        return [text for text in texts if text]

    # ---------------------------------------------------------------- the shard

    def _merge(self, parts: list[ShardPart]) -> ShardManifest:
        """Makes the .bin, the .idx, and at last the manifest."""
        output = self.output
        dropped = {reason: sum(part.dropped[reason] for part in parts) for reason in REASONS}
        counts, source_of = np.zeros((len(self._sources), 3), np.int64), np.array([file.source for file in self._files])
        for stale in glob(f"{escape(output)}{PARTIAL}*"):
            _remove(stale)
        with writing(self._folder.path), ShardWriter(output, self._folder.dtype) as writer:
            merge = Merge(parts, self._folder)
            if self._settings.deduplicate:
                dropped[DUPLICATE] += merge.find_duplicates()
            if self._bands:
                dropped[SIMILAR] += merge.find_similar()
            limit, twice = self._settings.limit, merge.num_dropped
            for table in merge.write(writer, shuffle=self._settings.shuffle_seed is not None, limit=limit):
                rows = np.ones(len(table), np.int64), table["tokens"], table["text_bytes"]
                np.add.at(counts, source_of[table["file"]], np.column_stack(rows))
                self._advance(merged=writer.num_documents / merge.num_documents)
            dropped[NOT_DRAWN] += merge.num_documents - twice - writer.num_documents
            dropped = {reason: count for reason, count in dropped.items() if count or reason in ALWAYS}
            if not writer.num_documents:
                why = ", ".join(f"{count} {reason}" for reason, count in dropped.items() if count)
                what = "; ".join([f"no document is left ({why or 'there is no text'})", *self._without_bytes()])
                rule, remedy = "a shard needs at least one document", "correct prepare.sources or the filters"
                raise DataError(Problem(what, rule, remedy, output))
            # An older manifest must not describe the new shard, not even for the moment until its own is written.
            _remove(manifest_path(output))
        manifest = ShardManifest(
            **self._decisive(),
            documents=writer.num_documents,
            sequences=writer.num_sequences,
            tokens=writer.num_tokens,
            sources=tuple(SourceCount(name, *map(int, row)) for name, row in zip(self._sources, counts, strict=True)),
            source_files=self._source_files(parts),
            dropped=dropped,
            encoder=", ".join(sorted({part.encoder for part in parts})),
            bloomery_version=__version__,
            index_hash=file_checksum(f"{output}.idx"),
        )
        manifest.write(output)
        self._notes += [f"the source '{each.name}' gave no document" for each in manifest.sources if not each.documents]
        self._notes += self._without_bytes()
        self._notes += not_lines(self._files)
        return manifest

    def _without_bytes(self) -> list[str]:
        """A note, or none."""
        empty = [file.name for file in self._files if not file.size]
        return (
            [f"{len(empty):,} of {counted(len(self._files), 'file')} without bytes: {first_few(empty)}"]
            if empty
            else []
        )

    # ---------------------------------------------------------------- what it was made from

    def _decisive(self) -> dict[str, Any]:
        """Fields of the manifest that decide the content, besides the files."""
        settings = asdict(self._settings)
        for name in ("limit", "languages", "near_duplicates"):  # which shards of earlier versions do not have
            settings[name] or settings.pop(name)
        own = {name: settings.pop(name) for name in ("tokenizer_hash", "dtype", "eod_id", "shuffle_seed")}
        eod = self._settings.eod_id is not None
        return {**own, "vocab_size": self.tokenizer.vocab_size, "append_eod": eod, "settings": settings}

    def _source_files(self, parts: Sequence[ShardPart]) -> tuple[SourceFile, ...]:
        digests = [digest for part in parts for digest, _ in part.inputs]
        hashes = _file_hashes(zip((span for unit in self._units for span in unit.spans), digests, strict=True))
        return tuple(SourceFile(file.name, file.size, hashes[file.number], file.stamp) for file in self._files)

    def _finished(self) -> ShardManifest | None:
        """The manifest of a shard that was made from these files in this way, and is whole."""
        try:
            found = manifests.read_manifest(self.output)
            if found is None or any(getattr(found, name) != value for name, value in self._decisive().items()):
                return None
            names = [source.name for source in found.sources]
            if names != list(self._sources) or not self._same_files(found.source_files):
                return None
            with ShardReader(self.output) as shard:
                return manifests.manifest_of(shard)
        except DataError:
            return None

    def _same_files(self, known: Sequence[SourceFile]) -> bool:
        """By name, size and stamp; where the stamp is another one, by content."""
        if [(file.name, file.bytes) for file in known] != [(file.name, file.size) for file in self._files]:
            return False
        changed = {now.number: old.hash for old, now in zip(known, self._files, strict=True) if old.stamp != now.stamp}
        spans = [span for unit in self._units for span in unit.spans if span.file.number in changed]
        return _file_hashes((span, hash_span(span)) for span in spans) == changed


def _file_hashes(spans: Iterable[tuple[Span, str]]) -> dict[int, str]:
    """Of each file by its number, from the hashes of its spans."""
    digests: dict[int, list[str]] = {}
    for span, digest in spans:
        digests.setdefault(span.file.number, []).append(digest)
    joined = {number: xxhash.xxh3_128_hexdigest("".join(found).encode()) for number, found in digests.items()}
    return joined | {number: found[0] for number, found in digests.items() if len(found) == 1}


def _remove(path: str | Path) -> None:
    with writing(path, "remove"):
        Path(path).unlink(missing_ok=True)
