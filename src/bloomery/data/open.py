"""From a recipe's `data:` to streams of samples, every source checked before anything else is built."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, cast

from bloomery.base.doing import doing
from bloomery.base.errors import DataError, Problem, first_few
from bloomery.config.recipe import Recipe, SourceSection
from bloomery.data import manifest as manifests
from bloomery.data.batch import Packing, ShardSource, Stream
from bloomery.data.blend import TimelessBlend
from bloomery.data.causal import CausalSource, DataCursor, blend_after
from bloomery.data.manifest import ShardManifest
from bloomery.data.masked import MaskedSource, MaskVocabulary
from bloomery.data.megatron import MegatronOpening, MegatronSource
from bloomery.data.megatron_order import Part
from bloomery.data.own import OwnSource
from bloomery.data.shards import ShardReader
from bloomery.data.tokenizer import Tokenizer
from bloomery.families.registry import FAMILIES
from bloomery.sizing.check import source_key, split_shares
from bloomery.sizing.parameters import second_loss
from bloomery.sizing.schedule import TrainingPlan

_FINDS_ENDS = "data.mask_documents, data.reset_positions and data.eod_loss find the ends of documents by their token"


@dataclass(frozen=True)
class OpenData:
    train: Stream
    validation: dict[str, Stream]
    test: dict[str, Stream]
    blend: TimelessBlend | None
    """The training stream's blend, whose state belongs into the checkpoint; None for orders without state."""
    warnings: list[str]
    """What could not be checked."""
    notices: list[str]
    """What has changed in the order since the checkpoint, and what is not evaluated."""
    tokenizer: Tokenizer | None
    """The recipe's."""
    tokenizer_hash: str | None
    """Of the tokenizer whose tokens are trained on; None if that is not known."""

    def shards(self) -> dict[str, dict[str, Any]]:
        """By source, what identifies the shard that is trained on, and where it lies."""
        return {source.key: {**source.shard.facts(), "path": source.shard.prefix} for source in self.train.sources}


@contextmanager
def open_data(
    recipe: Recipe, *, plan: TrainingPlan | None = None, cursor: DataCursor | None = None
) -> Iterator[OpenData]:
    """Every source, checked against tokenizer and vocabulary; DataError with all that do not fit.

    `cursor` is what a checkpoint has taken: weights that have changed since hold from there on, and orders without
    state must come out as they did for it. `plan` is the recipe's, of a run that resumes.
    """
    assert recipe.data is not None
    data, notices = recipe.data, list[str]()
    shares = split_shares(data.split) if data.split and recipe.train.evaluate else [0.0] * 3
    sections = {"valid": data.train} if shares[1] else {}
    sections |= data.validation
    with ExitStack() as closing, ExitStack() as said:
        said.enter_context(doing("opening the data"))
        opening = _Opening(recipe, plan or TrainingPlan.of(recipe), closing)
        train = opening.sources(data.train, "train")
        groups = {name: opening.sources(group, "valid") for name, group in sections.items()}
        tests = {name: opening.sources(group, "test") for name, group in data.test.items()}
        rest, why = opening.last_part() if shares[2] else ([], "")
        opening.check_together()
        if opening.problems:
            raise DataError(opening.problems)
        stream = opening.stream(data.train, train, "train")
        if opening.megatron is not None:
            opening.megatron.check(stream, data.train, cursor)
        elif cursor is not None and cursor.blend is not None:
            windows = cast(Sequence[CausalSource], train)  # bert has others, but never another length
            blend, notices = blend_after(cursor, _weights(data.train), windows, seq_length=recipe.model.seq_length)
            stream = Stream(train, blend)
        validation = {name: opening.stream(sections[name], group, "valid") for name, group in groups.items()}
        test = {"test": opening.stream(data.train, rest, "test")} if rest else {}
        test |= {name: opening.stream(data.test[name], group, "test") for name, group in tests.items()}
        notices += [f"nothing is tested after the training: {why}"] if why else []
        tokenizer, tokenizer_hash = opening.tokenizer, opening.tokenizer_hash()
        state = None if opening.megatron is not None else cast(TimelessBlend, stream.blend)
        said.close()
        yield OpenData(stream, validation, test, state, opening.warnings, notices, tokenizer, tokenizer_hash)


def _weights(sections: Sequence[SourceSection]) -> dict[str, float]:
    return {source_key(section): section.weight for section in sections}


class _Opening:
    """Collects what is open and what is wrong."""

    def __init__(self, recipe: Recipe, plan: TrainingPlan, closing: ExitStack) -> None:
        assert recipe.data is not None
        self.problems: list[Problem] = []
        self.warnings: list[str] = []
        self.tokenizer: Tokenizer | None = None
        self._recipe, self._data, self._closing = recipe, recipe.data, closing
        self._is_encoder = FAMILIES[recipe.model.family].encoder
        self._mask_vocabulary: MaskVocabulary | None = None
        self._shards: dict[str, tuple[ShardReader, ShardManifest | None]] = {}
        order = recipe.data.order
        self.megatron = MegatronOpening(recipe, plan, order) if order != "timeless" else None
        if recipe.tokenizer is None:
            return
        try:
            self.tokenizer = tokenizer = Tokenizer.load(recipe.tokenizer.path)
            self._mask_vocabulary = MaskVocabulary.of(tokenizer) if self._is_encoder else None
            tokenizer.check_fits(recipe.model.vocab_size, f"use model.vocab_size={tokenizer.vocab_size}")
        except DataError as error:
            self.problems += error.problems

    def sources(self, sections: Sequence[SourceSection], part: Part) -> list[ShardSource]:
        opened, samples = [], [0] * len(sections)
        if self.megatron is not None:
            samples = self.megatron.request(sections, part).member_samples
        for section, wanted in zip(sections, samples, strict=True):
            try:
                opened.append(self._open(section, part, wanted))
            except DataError as error:
                self.problems += [each for each in error.problems if each not in self.problems]
        return opened

    def last_part(self) -> tuple[list[ShardSource], str]:
        """The test part of the training sources, which nobody may have meant; or why it is none."""
        known = len(self.problems)
        found = self.sources(self._data.train, "test")
        problems, self.problems = self.problems[known:], self.problems[:known]
        return ([], str(problems[0])) if problems else (found, "")

    def stream(self, sections: Sequence[SourceSection], sources: list[ShardSource], part: Part) -> Stream:
        if self.megatron is not None:
            return self.megatron.stream(sections, cast(Sequence[MegatronSource], sources), part)
        return Stream(sources, TimelessBlend.start(_weights(sections)))

    def _open(self, section: SourceSection, part: Part, wanted: int) -> ShardSource:
        """`wanted` samples are requested of it, which only Megatron's orders need to know."""
        recipe = self._recipe
        if dataset := FAMILIES[recipe.model.family].dataset:
            made = dataset(recipe.model, section.path)
            return OwnSource(made, section.path, seed=recipe.seed, key=source_key(section))
        shard, manifest = self._shard(section.path)
        settings: dict[str, Any] = {
            "seq_length": recipe.model.seq_length,
            "vocab_size": recipe.model.vocab_size,
            "seed": recipe.seed,
            "part": part,
            "split": self._data.split if any(section is each for each in self._data.train) else None,
            "split_by": self._data.split_by,
            "key": source_key(section),
        }
        if self._is_encoder:
            return self._masked(shard, manifest, settings)
        packing = self._packing(shard, manifest)
        if self.megatron is not None:
            return self.megatron.source(shard, samples=wanted, packing=packing, **settings)
        return CausalSource(shard, packing=packing, **settings)

    def _shard(self, path: str) -> tuple[ShardReader, ShardManifest | None]:
        if path not in self._shards:
            shard = self._closing.enter_context(ShardReader(path))
            self._shards[path] = shard, manifests.manifest_of(shard)
        return self._shards[path]

    def _masked(self, shard: ShardReader, manifest: ShardManifest | None, settings: dict[str, Any]) -> MaskedSource:
        if self._mask_vocabulary is None:  # a problem of the tokenizer, which has been reported
            raise DataError([])
        return MaskedSource(
            shard,
            **settings,
            vocabulary=self._mask_vocabulary,
            masking=self._data.masking,
            second=second_loss(self._recipe.model),
            ends_with_eod=manifest is not None and manifest.eod_id is not None,
            split_sentences=manifest.settings.get("split_sentences") if manifest else None,
        )

    def _packing(self, shard: ShardReader, manifest: ShardManifest | None) -> Packing | None:
        """How documents of one sample are kept apart; None where they are not."""
        data = self._data
        if data.eod_loss and not data.mask_documents and not data.reset_positions:
            return None
        if manifest is not None:
            eod_id, remedy = manifest.eod_id, "prepare it again with append_eod: true, or turn them off"
        else:
            eod_id = self.tokenizer.eod_id if self.tokenizer else None
            remedy = "name the tokenizer of the shard in the recipe, or turn them off"
        if eod_id is None:
            raise DataError(Problem("its end-of-document token is not known", _FINDS_ENDS, remedy, shard.prefix))
        last = shard.read(max(0, shard.num_tokens - 1), min(1, shard.num_tokens))
        if manifest is None and (last != eod_id).any():
            what = f"its last token is {last[0]}, not {eod_id}, the end of a document"
            remedy = "prepare it again with append_eod: true (Megatron: --append-eod), or turn them off"
            raise DataError(Problem(what, _FINDS_ENDS, remedy, shard.prefix))
        return Packing(eod_id, data.mask_documents, data.reset_positions, data.eod_loss)

    def check_together(self) -> None:
        """All shards against the tokenizer and against each other."""
        known = {path: manifest for path, (_, manifest) in self._shards.items() if manifest is not None}
        if bare := [path for path in self._shards if path not in known]:
            self.warnings.append(manifests.without_manifest(bare))
        endless = [path for path, manifest in known.items() if manifest.eod_id is None]
        if endless and not self._is_encoder:
            self.warnings.append(f"documents of {first_few(endless)} have no ends: a decoder learns across them")
        self.problems += manifests.check_fits(known, tokenizer=self.tokenizer, vocab_size=self._recipe.model.vocab_size)

    def tokenizer_hash(self) -> str | None:
        """The recipe's tokenizer; without one, that of the manifests, which all have the same."""
        if self.tokenizer is not None:
            return self.tokenizer.content_hash
        return next((manifest.tokenizer_hash for _, manifest in self._shards.values() if manifest is not None), None)
