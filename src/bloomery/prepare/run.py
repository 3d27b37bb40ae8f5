"""`bloomery prepare`: find the files, cut them into units, make their parts in parallel, merge them into one shard."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from glob import escape, glob
from pathlib import Path
from typing import Any

import numpy as np

from bloomery.base.errors import BloomeryError, DataError, Problem, StorageError, first_few
from bloomery.base.storage import publish, writing, written_to
from bloomery.config.recipe import PrepareSection
from bloomery.data.index_cache import file_checksum
from bloomery.data.manifest import ShardManifest, SourceCount, manifest_path, origins_path
from bloomery.data.shards import PARTIAL, ShardWriter, token_dtype
from bloomery.data.tokenizer import Tokenizer
from bloomery.prepare.early import EarlyStart
from bloomery.prepare.encoder import SAMPLE_DOCUMENTS, Chosen, choose_encoder, refuse_chance, sample_bytes
from bloomery.prepare.judge import Judge
from bloomery.prepare.merge import Merge
from bloomery.prepare.origin import finished, planned_manifest, source_files
from bloomery.prepare.parts import DUPLICATE, REASONS, Part, PartFolder
from bloomery.prepare.pool import Pool, Report
from bloomery.prepare.read import Block, UnitReader
from bloomery.prepare.shard_files import origins_file, refuse_folders, refuse_long_names, remove
from bloomery.prepare.sources import find_files
from bloomery.prepare.tokenize import BlockDone, FailedEncoderError, Recheck, Settings, make_part, reusable
from bloomery.prepare.units import Unit, plan_units

_GOES_ON = "; then run the command again, which goes on where it stopped"


@dataclass
class Progress:
    """How far a preparation is."""

    total_input_bytes: int
    """Of all files, as they lie there."""
    input_bytes: int = 0
    reused_bytes: int = 0
    """Of the input, what an earlier run had done."""
    text_bytes: int = 0
    documents: int = 0
    tokens: int = 0
    merged: float = 0.0
    """Share of the shard that is written."""


@dataclass(frozen=True)
class Share:
    """One of several processes or machines: the units k, k + n, k + 2n, ..."""

    k: int
    n: int


@dataclass(frozen=True)
class PrepareResult:
    manifest: ShardManifest | None
    """None for a share, which merges nothing."""
    reused: bool
    """True when the shard was already there, made from the same texts in the same way, and was left as it is."""
    notes: list[str] = field(default_factory=list)
    """What a user should know: which encoder was taken and why, empty files, sources that gave nothing."""


def prepare(
    section: PrepareSection,
    *,
    tokenizer: Tokenizer,
    seed: int,
    workers: int = 1,
    share: Share | None = None,
    progress: Callable[[Progress], None] | None = None,
    early: EarlyStart | None = None,
    made: Sequence[str] = (),
    then: str = _GOES_ON,
) -> PrepareResult:
    """Makes the shard `section.output`. The same inputs always give the same bytes, whoever works on them. `made` and
    `then`: see Preparation and its `run`."""
    preparation = Preparation(section, tokenizer=tokenizer, seed=seed, workers=workers, early=early, made=made)
    return preparation.run(share, progress, then=then)


def plan_all(sections: Sequence[PrepareSection], **settings: Any) -> list[Preparation]:
    """`settings`: those of Preparation. BloomeryError with everything that keeps any of them from beginning."""
    found: list[Preparation] = []
    errors: list[BloomeryError] = []
    made = [section.output for section in sections]
    for section in sections:
        try:
            found.append(Preparation(section, made=made, **settings))
        except BloomeryError as error:
            errors.append(error)
    if errors:
        problems = dict.fromkeys(problem for error in errors for problem in error.problems)
        raise type(errors[0])(list(problems))
    return found


class Preparation:
    """One shard: its files are found and its units planned; `run` does the work."""

    def __init__(
        self,
        section: PrepareSection,
        *,
        tokenizer: Tokenizer,
        seed: int,
        workers: int = 1,
        early: EarlyStart | None = None,
        made: Sequence[str] = (),
    ) -> None:
        """`early`: the judge and an encoder of this tokenizer, which the caller closes. `made`: the outputs of other
        sections, which are no text either."""
        refuse_chance(tokenizer)
        refuse_folders(section.output)
        self._early = early
        self._section, self._tokenizer, self._workers = section, tokenizer, max(1, workers)
        self._dtype = token_dtype(tokenizer.vocab_size)
        eod = section.append_eod and ("append_eod" in section.model_fields_set or not section.split_sentences)
        self._settings = Settings(
            tokenizer_hash=tokenizer.content_hash,
            dtype=self._dtype.name,
            eod_id=tokenizer.eod_id if eod else None,
            shuffle_seed=seed if section.shuffle else None,
            text_key=section.text_key,
            special_tokens=section.special_tokens,
            split_sentences=section.split_sentences,
            min_tokens=section.min_tokens,
            max_tokens=section.max_tokens,
            deduplicate=section.deduplicate,
            bad_records=section.bad_records,
        )
        self._planned = planned_manifest(self._settings, tokenizer.vocab_size, section.sources)
        self._files = find_files(section.sources, made=[section.output, *made])
        self._units = plan_units(self._files)
        self._folder = PartFolder(section.output, self._dtype.itemsize)
        self._tell: Callable[[Progress], None] = lambda _: None
        self._progress = Progress(sum(file.size for file in self._files))
        self._notes: list[str] = []

    def run(
        self, share: Share | None = None, progress: Callable[[Progress], None] | None = None, *, then: str = _GOES_ON
    ) -> PrepareResult:
        """`then`: what errors of the disk add."""
        self._tell = progress or self._tell
        with written_to("place for prepare.output", then):
            if not os.path.exists(self._folder.path) and (found := self._finished()):
                return PrepareResult(found, True)  # nothing to write, not even a lock
            with self._folder.alone("" if share is None else f"{share.k}-of-{share.n}"):
                return self._run_alone(share)

    def _run_alone(self, share: Share | None) -> PrepareResult:
        if found := self._finished():
            self._folder.remove()
            return PrepareResult(found, True)
        refuse_long_names(self._section.output)
        mine = self._units if share is None else self._units[share.k :: share.n]
        cleaned = None if share is None else mine
        self._folder.clean(cleaned)
        if share is not None:
            self._folder.share(share.n)
        try:
            manifest = self._work(mine, merge=share is None)
        except BaseException:  # workers that were ended in the middle of a file
            with contextlib.suppress(StorageError):
                self._folder.clean(cleaned)
            raise
        if manifest is not None:
            self._folder.remove()
        return PrepareResult(manifest, False, self._notes)

    def _finished(self) -> ShardManifest | None:
        return finished(self._planned, self._section.output, self._files, self._units)

    def _work(self, units: Sequence[Unit], *, merge: bool) -> ShardManifest | None:
        parts = self._parts_there(units)
        missing = [unit for unit in units if unit.number not in parts]
        if missing and merge and (shares := self._folder.shares()):
            raise _missing(missing, shares, self._section.output, self._folder)
        if missing:
            parts = self._new_parts(units, parts)
        return self._merge([parts[unit.number] for unit in units]) if merge else None

    def _parts_there(self, units: Sequence[Unit]) -> dict[int, Part]:
        """The parts that earlier runs have made of these units, proven by their hashes."""
        folder, settings = self._folder, self._settings
        marked = {unit.number: unit for unit in units if folder.marker(unit.number).exists()}

        def task(number: int, _report: Report) -> Part | None:
            return reusable(marked[number], settings, folder)

        if not marked:
            return {}
        if self._early:
            self._early.wait()  # before processes fork
        parts: dict[int, Part] = {}
        with Pool(task, workers=min(self._workers, len(marked))) as pool:
            for number, part in pool.run(list(marked), lambda _: None):
                if part is not None:
                    parts[number] = part
                    self._progress.reused_bytes += marked[number].input_bytes
                    self._tell(replace(self._progress))
        return parts

    def _new_parts(self, units: Sequence[Unit], parts: dict[int, Part]) -> dict[int, Part]:
        """All parts of these units, of which some are there already. Made by the fastest encoder that agrees with the
        judge; where one stops agreeing, or fails, in the middle of the work, its parts are made again by another."""
        as_ids = self._settings.special_tokens == "as_ids"
        early = self._early if self._early and self._early.as_ids == as_ids else None
        judge = early.judge if early else Judge(self._tokenizer, as_ids=as_ids)
        try:
            sample = self._sample()
            while True:
                refused = dict.fromkeys(self._folder.liars(), "it gave wrong ids, or failed, earlier in this work")
                missing = [unit for unit in units if unit.number not in parts]
                chosen, pool = choose_encoder(
                    self._tokenizer,
                    judge,
                    sample,
                    as_ids=as_ids,
                    refused=refused,
                    crew=partial(self._crew, judge=judge, units=len(missing)),
                    early=early,
                )
                try:
                    parts |= self._parts_by(pool, judge, missing)
                except FailedEncoderError as failure:
                    if chosen.is_reference:  # nobody is left
                        rule = f"{chosen.name}, whose ids are the right ones, must always give the same"
                        what, place = f"disagrees with itself: {failure}", self._tokenizer.path
                        raise DataError(Problem(what, rule, "look for chance in its settings", place)) from failure
                    self._notes.append(f"{chosen.name} was given up in the middle of the work: {failure}")
                    self._folder.refuse(chosen.name)
                    self._progress = Progress(self._progress.total_input_bytes)
                    parts = self._parts_there(units)
                    continue
                self._notes.append(f"encoder: {chosen.name}")
                self._notes += [f"not {name}: {why}" for name, why in chosen.refused.items()]
                return parts
        finally:
            if not early:
                judge.close()

    def _sample(self) -> list[str]:
        """The first documents, to try encoders on."""
        room = sample_bytes(sum(file.size for file in self._files))
        reader = UnitReader(self._units[0], text_key=self._settings.text_key, skip_bad=True, block_bytes=room)
        texts: list[str] = []
        for text in next(reader.blocks(), Block()).texts[:SAMPLE_DOCUMENTS]:
            texts.append(text[:room])
            room -= len(texts[-1])
        return [text for text in texts if text]

    def _crew(self, chosen: Chosen, *, judge: Judge, units: int) -> Pool:
        """Processes that encode a list of texts, or make the part of the unit of a number."""
        settings, folder, all_units = self._settings, self._folder, self._units

        def task(asked: int | list[str], report: Report) -> Any:
            if isinstance(asked, list):
                return chosen.encoder.encode(asked)
            try:
                return make_part(all_units[asked], settings, chosen, folder, report)
            except FailedEncoderError as failure:
                return failure

        return Pool(task, workers=min(self._workers, units), strangers=[judge.child.connection])

    def _parts_by(self, pool: Pool, judge: Judge, units: Sequence[Unit]) -> dict[int, Part]:
        parts: dict[int, Part] = {}
        result: tuple[Part, Recheck] | FailedEncoderError
        with pool:
            for number, result in pool.run([unit.number for unit in units], self._block_done):
                if isinstance(result, FailedEncoderError):
                    raise result
                part, recheck = result
                if wrong := judge.first_difference(recheck.texts, recheck.ids):
                    raise FailedEncoderError(wrong)
                self._folder.mark(part)
                parts[number] = part
        return parts

    def _block_done(self, block: BlockDone) -> None:
        self._progress.input_bytes += block.input_bytes
        self._progress.text_bytes += block.text_bytes
        self._progress.documents += block.documents
        self._progress.tokens += block.tokens
        self._tell(replace(self._progress))

    def _merge(self, parts: list[Part]) -> ShardManifest:
        for leftover in glob(f"{escape(self._section.output)}{PARTIAL}*"):
            remove(leftover)
        merge = Merge(parts, self._folder, self._dtype)
        with self._folder.undisturbed(parts):
            if self._settings.deduplicate:
                merge.find_duplicates()
            sources, dropped = self._counts(merge)
        if not sum(source.documents for source in sources):
            reasons = ", ".join(f"{count} {reason}" for reason, count in dropped.items() if count)
            raise DataError(
                Problem(
                    what=(f"no document is left ({reasons})" if reasons else "the sources hold no text")
                    + "".join(f"; {note}" for note in self._without_bytes()),
                    rule="a shard needs at least one document",
                    remedy="correct prepare.sources or the filters",
                    place=self._section.output,
                )
            )
        partial, final = Path(f"{self._section.output}{PARTIAL}origins"), Path(origins_path(self._section.output))
        with ShardWriter(self._section.output, self._dtype) as writer, origins_file(partial) as origins:
            with self._folder.undisturbed(parts):
                merge.write(writer, origins, shuffle=self._settings.shuffle_seed is not None, done=self._merged)
            # An older manifest must not describe the new shard, not even for the moment until its own is written.
            remove(manifest_path(self._section.output))
            remove(final)
            if len(self._files) > 1:
                with writing(final):
                    origins.flush()
                    publish(partial, final)
        manifest = replace(
            self._planned,
            documents=writer.num_documents,
            sequences=writer.num_sequences,
            tokens=writer.num_tokens,
            sources=sources,
            source_files=source_files(self._files, self._units, parts),
            dropped=dropped,
            encoder=", ".join(sorted({part.encoder for part in parts})),
            index_hash=file_checksum(f"{self._section.output}.idx"),
        )
        manifest.write(self._section.output)
        return manifest

    def _merged(self, share: float) -> None:
        self._progress.merged = share
        self._tell(replace(self._progress))

    def _counts(self, merge: Merge) -> tuple[tuple[SourceCount, ...], dict[str, int]]:
        totals = np.zeros((len(self._section.sources), 3), np.int64)
        dropped: dict[str, int] = dict.fromkeys(REASONS, 0)
        for number, (unit, part) in enumerate(zip(self._units, merge.parts, strict=True)):
            documents, tokens, text_bytes, duplicates = merge.counts(number)
            totals[unit.source] += (documents, tokens, text_bytes)
            for reason, count in {**part.dropped, DUPLICATE: part.dropped[DUPLICATE] + duplicates}.items():
                dropped[reason] += count
        sources = tuple(
            SourceCount(name, *map(int, row)) for name, row in zip(self._section.sources, totals, strict=True)
        )
        self._notes += [f"the source '{source.name}' gave no document" for source in sources if not source.documents]
        self._notes += self._without_bytes()
        if whole := sum(file.is_json_text for file in self._files):
            self._notes.append(
                f"{whole} .json files were taken for one text each: lines of JSON need the ending .jsonl"
            )
        return sources, dropped

    def _without_bytes(self) -> list[str]:
        """A note, or none."""
        empty = [file.name for file in self._files if not file.size]
        return [f"{len(empty)} of {len(self._files)} files have no bytes: {first_few(empty)}"] if empty else []


def _missing(units: Sequence[Unit], n: int, output: str, folder: PartFolder) -> DataError:
    shares = sorted({unit.number % n for unit in units})
    named = ", ".join(f"{unit.number} ({unit.pieces[0].file.name})" for unit in units[:5])
    more = f" and {len(units) - 5} more" if len(units) > 5 else ""
    return DataError(
        Problem(
            what=f"cannot be merged: of its units {len(units)} are not done: {named}{more}",
            rule=f"the work is shared by {n} runs with --unit",
            remedy=f"run `bloomery prepare` with {', '.join(f'--unit {k}/{n}' for k in shares[:8])}"
            f"{' ...' if len(shares) > 8 else ''}, or delete {folder.shared} to do them here",
            place=output,
        )
    )
