"""What a recipe asks of Megatron's orders: samples per source, blends, and that a resumed run asks for the same."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, Self, cast

from bloomery.base.errors import DataError, Problem, RecipeError
from bloomery.config.recipe import Recipe, SourceSection
from bloomery.data.batch import SampleSource
from bloomery.data.cursor import DataCursor
from bloomery.data.index_cache import IndexCache
from bloomery.data.megatron import GreedyBlend, MegatronSource, OneSource
from bloomery.data.megatron_order import BlendRequest, OrderShape
from bloomery.data.split import Flavour
from bloomery.data.stream import Stream
from bloomery.sizing.plan import TrainingPlan

Use = Literal["train", "validation"]
MAX_SEED = 2**32 - 1
"""RandomState takes no larger one."""


@dataclass(frozen=True)
class WantedSamples:
    """What Megatron asks of its datasets. Its orders follow from these numbers."""

    train: int
    validation: int
    """For all evaluations of the run, one behind the other."""

    @classmethod
    def of(cls, recipe: Recipe, plan: TrainingPlan) -> Self:
        evaluate = recipe.train.evaluate
        steps = (plan.train_steps // evaluate.every.count + 1) * evaluate.steps if evaluate else 0
        return cls(plan.asked_samples, steps * recipe.batch.global_batch_size)

    def of_use(self, use: Use) -> int:
        return self.train if use == "train" else self.validation


class MegatronOpening:
    """Opens the sources and blends of one recipe."""

    def __init__(self, recipe: Recipe, plan: TrainingPlan, flavour: Flavour) -> None:
        assert recipe.data is not None
        if recipe.seed > MAX_SEED:
            rule = f"with data.order={flavour} it is at most {MAX_SEED}"
            raise RecipeError(Problem(f"seed is {recipe.seed}", rule, "use the seed of the run to be continued"))
        self._wanted = WantedSamples.of(recipe, plan)
        self._flavour: Flavour = flavour
        self._length, self._plan = recipe.train.for_, plan
        self._cache = IndexCache(recipe.data.cache_dir)
        self._blends_one = recipe.data.blend_one_source

    def member_samples(self, sections: Sequence[SourceSection], use: Use) -> list[int]:
        """What each of these sources is asked for."""
        return self._member_samples(sections, self._wanted.of_use(use))

    def source(self, path: str, samples: int, **settings: Any) -> MegatronSource:
        return MegatronSource(path, flavour=self._flavour, samples=samples, cache=self._cache, **settings)

    def stream(self, sections: Sequence[SourceSection], sources: Sequence[SampleSource], use: Use) -> Stream:
        """DataError if a source has fewer samples than the blend takes from it."""
        members = cast(Sequence[MegatronSource], sources)
        request = self._request(sections, self._wanted.of_use(use))
        return Stream(sources, GreedyBlend(request, members, self._cache) if request else OneSource(members[0]))

    def train_stream(
        self, sections: Sequence[SourceSection], sources: Sequence[SampleSource], cursor: DataCursor | None
    ) -> Stream:
        """DataError also if the run is longer than its order, or resumes another order than that of `cursor`."""
        stream = self.stream(sections, sources, "train")
        size = cast(GreedyBlend | OneSource, stream.blend).size
        if self._plan.train_samples > size:
            what = f"the training takes {self._plan.train_samples} samples, but data.order={self._flavour} has {size}"
            rule = "a training that ends within its batch ramp takes more than train.for says"
            raise DataError(Problem(what, rule, "use a shorter ramp or a longer train.for"))
        if cursor is not None and not self._is_order_of(cursor, sections, cast(Sequence[MegatronSource], sources)):
            raise DataError(self._other_order(cursor))
        return stream

    def _other_order(self, cursor: DataCursor) -> Problem:
        then, now = cursor.recipe.train.for_, self._length
        then_samples, now_samples = WantedSamples.of(cursor.recipe, cursor.plan).train, self._wanted.train
        back = then if cursor.plan.batch == self._plan.batch else f"{then_samples} samples"
        return Problem(
            f"train.for is {now} = {now_samples} samples but the checkpoint has {then} = {then_samples} samples",
            f"with data.order={self._flavour} the order of all samples follows from it: some would come twice",
            f"use 'train.for={back}' to resume, or start afresh under another name or --run-dir",
        )

    def _request(self, sections: Sequence[SourceSection], wanted: int) -> BlendRequest | None:
        """None for one source that is not blended."""
        if len(sections) == 1 and not self._blends_one:
            return None
        return BlendRequest.of(self._flavour, [section.weight for section in sections], wanted)

    def _member_samples(self, sections: Sequence[SourceSection], wanted: int) -> list[int]:
        request = self._request(sections, wanted)
        return request.member_samples if request else [wanted]

    def _is_order_of(
        self, cursor: DataCursor, sections: Sequence[SourceSection], sources: Sequence[MegatronSource]
    ) -> bool:
        """Whether `cursor` gave these sources the same epochs and the same blend; all but the length is the same."""
        wanted = WantedSamples.of(cursor.recipe, cursor.plan).train
        return all(
            source.shape
            == OrderShape.of(
                self._flavour,
                tokens_per_epoch=source.shape.tokens_per_epoch,
                seq_length=source.seq_length,
                samples=samples,
            )
            for source, samples in zip(sources, self._member_samples(sections, wanted), strict=True)
        )
