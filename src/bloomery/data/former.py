"""The samples of a run from before its sources, their weights or its sequence length last changed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager

from bloomery.base.errors import DataError, Problem
from bloomery.config.recipe import Recipe, SourceSection
from bloomery.data.before import Before
from bloomery.data.blend import BlendState, Former
from bloomery.data.open import OpenData, open_data
from bloomery.sizing.plan import TrainingPlan


def stretches(state: BlendState, first: int, last: int) -> Iterator[tuple[Former | None, int, int]]:
    """The positions first..last in parts that one blend gives: (blend, first, last), None for the present one. What
    lies before the first blend that is known is left out."""
    begins = [*(former.first_sample for former in state.earlier), state.first_sample]
    ends = [*(begin - 1 for begin in begins[1:]), last]
    for former, begin, end in zip([*state.earlier, None], begins, ends, strict=True):
        if max(first, begin) <= min(last, end):
            yield former, max(first, begin), min(last, end)


def known_from(state: BlendState) -> int:
    """The first position whose blend is known: 0, unless an earlier version has forgotten some."""
    return state.earlier[0].first_sample if state.earlier else state.first_sample


@contextmanager
def open_former(
    recipe: Recipe, former: Former, *, plan: TrainingPlan, paths: Mapping[str, str]
) -> Iterator[tuple[list[SourceSection], OpenData]]:
    """The sources and the data as they were then. `recipe` and `plan` are those of the run now, `paths` the shards of
    all sources that it has known; DataError if one of them is no longer there."""
    assert recipe.data is not None
    first = former.first_sample
    sources = [SourceSection(path=paths[key], name=key, weight=share) for key, share in former.weights.items()]
    seq_length = plan.tokens_at(first + 1) - plan.tokens_at(first)
    then = recipe.model_copy(  # whatever else says what a sample is never changes in a run
        update={
            "data": recipe.data.model_copy(update={"train": sources, "validation": {}}),
            "model": recipe.model.model_copy(update={"seq_length": seq_length}),
            "train": recipe.train.model_copy(update={"evaluate": None}),
        }
    )
    blend = BlendState(first, former.cursors, former.weights, period=former.period)
    with ExitStack() as closing:
        try:
            data = closing.enter_context(open_data(then, plan=plan, before=Before(then, plan, 0, first, blend)))
        except DataError as error:
            what = f"sample {first:,} and those after it were taken from {', '.join(former.weights)}"
            rule, remedy = "they cannot be shown without these shards", "put them back where they lay"
            raise DataError([*error.problems, Problem(what, rule, remedy)]) from error
        yield sources, data
