"""From a recipe's `data:` to streams of samples, every source checked before anything else is built."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, cast

import numpy as np

from bloomery.base.errors import DataError, Problem, first_few
from bloomery.config.recipe import Recipe, SourceSection
from bloomery.data.batch import Packing, SampleSource, Stream
from bloomery.data.blend import TimelessBlend
from bloomery.data.causal import CausalSource, DataCursor, blend_after
from bloomery.data.manifest import (
    ShardManifest,
    check_describes,
    check_fits,
    manifest_path,
    read_manifest,
    without_manifest,
)
from bloomery.data.masked import MaskedSource, MaskVocabulary
from bloomery.data.megatron import MegatronOpening, Use
from bloomery.data.megatron_order import Part
from bloomery.data.shards import ShardReader
from bloomery.data.tokenizer import Tokenizer
from bloomery.families.registry import FAMILIES
from bloomery.sizing.check import source_key
from bloomery.sizing.schedule import TrainingPlan

SPLIT_GROUP = "valid"
"""Name of the validation group that `data.split` makes."""
_FINDS_ENDS = "data.mask_documents, data.reset_positions and data.eod_loss find the ends of documents by their token"
_ENDS_LOOKED_AT = 100
"""Documents whose last token is read where no manifest says how documents end."""


@dataclass(frozen=True)
class OpenData:
    train: Stream
    validation: dict[str, Stream]
    blend: TimelessBlend | None
    """The training stream's blend, whose state belongs into the checkpoint; None for orders without state."""
    warnings: list[str]
    """What could not be checked."""
    notices: list[str]
    """What has changed in the order since the checkpoint."""
    tokenizer_hash: str | None
    """Of the tokenizer whose tokens are trained on; None if that is not known."""

    def shards(self) -> dict[str, dict[str, Any]]:
        """By source, what identifies the shard that is trained on, and where it lies."""
        shards = {source.key: cast(Any, source).shard for source in self.train.sources}
        return {key: {**shard.facts(), "path": shard.prefix} for key, shard in shards.items()}


@contextmanager
def open_data(
    recipe: Recipe, *, plan: TrainingPlan | None = None, cursor: DataCursor | None = None
) -> Iterator[OpenData]:
    """Every source, checked against tokenizer and vocabulary; DataError with all that do not fit.

    `cursor` is what a checkpoint has taken: weights that have changed since hold from there on, and orders without
    state must come out as they did for it. `plan` is the recipe's, of a run that resumes.
    """
    assert recipe.data is not None
    opening = _Opening(recipe, plan or TrainingPlan.of(recipe))
    try:
        opening.check_tokenizer()
        data, split = recipe.data, recipe.data.split
        train = opening.sources(data.train, "train" if split else "all", "train")
        sections = dict(data.validation)
        groups = {name: opening.sources(group, "all", "validation") for name, group in sections.items()}
        if split and recipe.train.evaluate:
            sections[SPLIT_GROUP] = data.train
            groups[SPLIT_GROUP] = opening.sources(data.train, "valid", "validation")
        opening.check_together()
        if opening.problems:
            raise DataError(opening.problems)
        if opening.megatron:
            stream = opening.megatron.train_stream(data.train, train, cursor)
            validation = {
                name: opening.megatron.stream(sections[name], sources, "validation") for name, sources in groups.items()
            }
            yield OpenData(stream, validation, None, opening.warnings, [], opening.tokenizer_hash())
            return
        blend, notices = TimelessBlend.start(_weights(data.train)), list[str]()
        if cursor is not None and cursor.blend is not None:
            windows = cast(Sequence[CausalSource], train)  # bert has others, but never another length
            blend, notices = blend_after(cursor, _weights(data.train), windows, seq_length=recipe.model.seq_length)
        validation = {
            name: Stream(sources, TimelessBlend.start(_weights(sections[name]))) for name, sources in groups.items()
        }
        yield OpenData(Stream(train, blend), validation, blend, opening.warnings, notices, opening.tokenizer_hash())
    finally:
        opening.close()


def _weights(sections: Sequence[SourceSection]) -> dict[str, float]:
    return {source_key(section): section.weight for section in sections}


class _Opening:
    """Collects what is open and what is wrong."""

    def __init__(self, recipe: Recipe, plan: TrainingPlan) -> None:
        self.problems: list[Problem] = []
        self.warnings: list[str] = []
        self._recipe = recipe
        self._tokenizer: Tokenizer | None = None
        self._mask_vocabulary: MaskVocabulary | None = None
        self._manifests: dict[str, ShardManifest | None] = {}
        self._opened: list[SampleSource] = []
        self._manifests_seen: set[str] = set()
        self.megatron: MegatronOpening | None = None
        if recipe.data is not None and recipe.data.order != "timeless":
            self.megatron = MegatronOpening(recipe, plan, recipe.data.order)

    def check_tokenizer(self) -> None:
        if self._recipe.tokenizer is None:
            return
        try:
            tokenizer = Tokenizer.load(self._recipe.tokenizer.path)
            if FAMILIES[self._recipe.model.family].encoder:
                self._mask_vocabulary = MaskVocabulary.of(tokenizer)
        except DataError as error:
            self.problems += error.problems
            return
        self._tokenizer = tokenizer
        have, room = tokenizer.vocab_size, self._recipe.model.vocab_size
        if have > room:
            what = f"the tokenizer has {have} entries but model.vocab_size is {room}"
            self.problems.append(Problem(what, remedy=f"use model.vocab_size={have}", place=tokenizer.path))

    def sources(self, sections: Sequence[SourceSection], part: Part | Literal["all"], use: Use) -> list[SampleSource]:
        opened: list[SampleSource] = []
        samples = self.megatron.member_samples(sections, use) if self.megatron else [0] * len(sections)
        for section, wanted in zip(sections, samples, strict=True):
            try:
                opened.append(self._open(section, part, wanted))
            except DataError as error:
                self.problems += error.problems
        return opened

    def _open(self, section: SourceSection, part: Part | Literal["all"], wanted: int) -> SampleSource:
        """`wanted` samples are requested of it, which only Megatron's orders need to know."""
        assert self._recipe.data is not None
        settings: dict[str, Any] = {
            "seq_length": self._recipe.model.seq_length,
            "vocab_size": self._recipe.model.vocab_size,
            "seed": self._recipe.seed,
            "part": part,
            "split": None if part == "all" else self._recipe.data.split,
            "key": source_key(section),
        }
        source: SampleSource
        if self.megatron:
            source = self.megatron.source(section.path, wanted, **settings, **self._packing(section.path))
        elif FAMILIES[self._recipe.model.family].encoder:
            source = self._masked(section.path, settings)
        else:
            source = CausalSource(section.path, **settings, **self._packing(section.path))
        self._opened.append(source)
        if section.path not in self._manifests_seen:
            self._manifests_seen.add(section.path)
            self._check_manifest(section.path, cast(Any, source).shard)
        return source

    def _check_manifest(self, path: str, shard: ShardReader) -> None:
        if (manifest := self._manifest(path)) is None:
            self._check_ends(path, shard)
        else:
            self.problems += check_describes(manifest, shard, place=manifest_path(path))

    def _check_ends(self, path: str, shard: ShardReader) -> None:
        """That documents of a shard without a manifest end as those want it who look for their ends."""
        if not (packing := self._packing(path).get("packing")):
            return
        last = shard.num_documents - 1
        for document in np.linspace(0, last, min(_ENDS_LOOKED_AT, last + 1), dtype=np.int64).tolist():
            start, stop = (shard.index.document_start(number) for number in (document, document + 1))
            if start == stop:
                continue
            token = int(shard.read(stop - 1, 1)[0])
            if token != packing.eod_id:
                what = f"document {document} ends with token {token}, not with {packing.eod_id}, the end of a document"
                remedy = "prepare it again with append_eod: true (Megatron: --append-eod), or turn them off"
                self.problems.append(Problem(what, _FINDS_ENDS, remedy, path))
                return

    def check_together(self) -> None:
        """All shards against the tokenizer and against each other."""
        if bare := [path for path, manifest in self._manifests.items() if manifest is None]:
            self.warnings.append(without_manifest(bare))
        known = {path: manifest for path, manifest in self._manifests.items() if manifest is not None}
        self.problems += check_fits(known, tokenizer=self._tokenizer, vocab_size=self._recipe.model.vocab_size)
        endless = [
            path
            for path, manifest in known.items()
            if manifest.eod_id is None and manifest.settings.get("special_tokens") != "as_ids"
        ]
        if endless and not FAMILIES[self._recipe.model.family].encoder:
            what = "documents have no end (append_eod: false), so the model does not learn to stop"
            self.warnings.append(f"{first_few(endless)}: {what}")

    def tokenizer_hash(self) -> str | None:
        """The recipe's tokenizer; without one, that of the manifests, which all have the same."""
        if self._tokenizer is not None:
            return self._tokenizer.content_hash
        return next((manifest.tokenizer_hash for manifest in self._manifests.values() if manifest is not None), None)

    def _manifest(self, path: str) -> ShardManifest | None:
        if path not in self._manifests:
            self._manifests[path] = read_manifest(path)
        return self._manifests[path]

    def _masked(self, path: str, settings: dict[str, Any]) -> MaskedSource:
        assert self._recipe.data is not None
        if self._mask_vocabulary is None:  # a problem that has been reported, unless there is no tokenizer at all
            what, rule = "the recipe names no tokenizer", "masking needs the ids of [CLS], [SEP], [MASK] and [PAD]"
            raise DataError([] if self.problems else Problem(what, rule, "add `tokenizer: {path: ...}`"))
        manifest = self._manifest(path)
        return MaskedSource(
            path,
            **settings,
            vocabulary=self._mask_vocabulary,
            masking=self._recipe.data.masking,
            ends_with_eod=manifest is not None and manifest.eod_id is not None,
            split_sentences=manifest.settings.get("split_sentences") if manifest else None,
        )

    def _packing(self, path: str) -> dict[str, Any]:
        """How documents of one sample are kept apart; nothing where they are not."""
        assert self._recipe.data is not None
        data = self._recipe.data
        if data.eod_loss and not data.mask_documents and not data.reset_positions:
            return {}
        manifest, eod_id = self._manifest(path), None
        if manifest is not None:
            eod_id, remedy = manifest.eod_id, "prepare it again with append_eod: true, or turn them off"
        else:
            remedy = "name the tokenizer of the shard in the recipe, or turn them off"
            if self._tokenizer is not None:
                eod_id = self._tokenizer.eod_id
        if eod_id is None:
            raise DataError(Problem("its end-of-document token is not known", _FINDS_ENDS, remedy, path))
        packing = Packing(eod_id, data.mask_documents, data.reset_positions, data.eod_loss)
        return {"packing": packing}

    def close(self) -> None:
        for source in self._opened:
            source.close()
