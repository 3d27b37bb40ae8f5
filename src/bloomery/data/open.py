"""From a recipe's `data:` to streams of samples, every source checked before anything else is built."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

from bloomery.base.errors import DataError, Problem
from bloomery.config.recipe import Recipe, SourceSection
from bloomery.data.batch import SampleSource
from bloomery.data.blend import BlendState, TimelessBlend
from bloomery.data.causal import CausalSource
from bloomery.data.manifest import check_fits, manifest_path, read_manifest
from bloomery.data.split import Part
from bloomery.data.stream import Stream
from bloomery.data.tokenizer import Tokenizer

SPLIT_GROUP = "valid"
"""Name of the validation group that `data.split` makes."""


@dataclass(frozen=True)
class OpenData:
    train: Stream
    validation: dict[str, Stream]
    blend: TimelessBlend
    """The training stream's blend; its state belongs into the checkpoint."""
    warnings: list[str]
    """What could not be checked."""


@contextmanager
def open_data(
    recipe: Recipe, *, blend_state: BlendState | None = None, consumed_samples: int = 0
) -> Iterator[OpenData]:
    """Every source, checked against tokenizer and vocabulary; DataError with all that do not fit.

    `blend_state` is what a checkpoint kept; weights that have changed since hold from `consumed_samples` on.
    """
    assert recipe.data is not None
    opening = _Opening(recipe)
    try:
        opening.check_tokenizer()
        split = recipe.data.split
        train = opening.sources(recipe.data.train, "train" if split else "all")
        groups = {name: opening.sources(sources, "all") for name, sources in recipe.data.validation.items()}
        if split and recipe.train.evaluate:
            groups[SPLIT_GROUP] = opening.sources(recipe.data.train, "valid")
        if opening.problems:
            raise DataError(opening.problems)
        weights = _weights(recipe.data.train)
        blend = TimelessBlend.start(weights)
        if blend_state is not None:
            blend = TimelessBlend.resume(blend_state, weights, consumed_samples=consumed_samples)
        validation = {}
        for name, sources in groups.items():
            sections = recipe.data.train if name == SPLIT_GROUP and split else recipe.data.validation[name]
            validation[name] = Stream(sources, TimelessBlend.start(_weights(sections)))
        yield OpenData(Stream(train, blend), validation, blend, opening.warnings)
    finally:
        opening.close()


def source_key(section: SourceSection) -> str:
    """What names a source in orders, checkpoints and metrics."""
    return section.name or section.path


def _weights(sections: Sequence[SourceSection]) -> dict[str, float]:
    return {source_key(section): section.weight for section in sections}


class _Opening:
    """Collects what is open and what is wrong."""

    def __init__(self, recipe: Recipe) -> None:
        self.problems: list[Problem] = []
        self.warnings: list[str] = []
        self._recipe = recipe
        self._tokenizer_hash: str | None = None
        self._opened: list[SampleSource] = []
        self._manifests_seen: set[str] = set()

    def check_tokenizer(self) -> None:
        if self._recipe.tokenizer is None:
            return
        try:
            tokenizer = Tokenizer.load(self._recipe.tokenizer.path)
        except DataError as error:
            self.problems += error.problems
            return
        self._tokenizer_hash = tokenizer.content_hash
        have, room = tokenizer.vocab_size, self._recipe.model.vocab_size
        if have > room:
            what = f"the tokenizer has {have} entries but model.vocab_size is {room}"
            self.problems.append(Problem(what, remedy=f"use model.vocab_size={have}", place=tokenizer.path))

    def sources(self, sections: Sequence[SourceSection], part: Part | Literal["all"]) -> list[SampleSource]:
        opened: list[SampleSource] = []
        for section in sections:
            try:
                opened.append(self._open(section, part))
            except DataError as error:
                self.problems += error.problems
        return opened

    def _open(self, section: SourceSection, part: Part | Literal["all"]) -> SampleSource:
        assert self._recipe.data is not None
        source = CausalSource(
            section.path,
            seq_length=self._recipe.model.seq_length,
            vocab_size=self._recipe.model.vocab_size,
            seed=self._recipe.seed,
            part=part,
            split=None if part == "all" else self._recipe.data.split,
            key=source_key(section),
        )
        self._opened.append(source)
        if section.path not in self._manifests_seen:
            self._manifests_seen.add(section.path)
            self._check_manifest(section.path)
        return source

    def _check_manifest(self, path: str) -> None:
        manifest, place = read_manifest(path), manifest_path(path)
        if manifest is None:
            what = "its tokenizer, vocabulary and end-of-document token could not be checked"
            self.warnings.append(f"{path} has no manifest ({place}): {what}")
            return
        vocab_size = self._recipe.model.vocab_size
        self.problems += check_fits(manifest, tokenizer_hash=self._tokenizer_hash, vocab_size=vocab_size, place=place)

    def close(self) -> None:
        for source in self._opened:
            source.close()
