"""`train.for: 2 epochs`, which only opened data can count, in samples."""

from bisect import bisect_left
from typing import cast

from bloomery.base.errors import Problem, RecipeError
from bloomery.base.units import Amount, Epochs
from bloomery.config.recipe import Recipe
from bloomery.data.blend import TimelessBlend
from bloomery.data.open import open_data
from bloomery.sizing.check import length_problems
from bloomery.sizing.schedule import BatchPlan, TrainingPlan


def counted(recipe: Recipe) -> Recipe:
    """The recipe with its length in samples: until the source that is named, else the smallest, has given all of its
    samples so many times, rounded up to whole batches. A length in other units stays. DataError where the data cannot
    be opened."""
    length = recipe.train.for_
    if not isinstance(length, Epochs):
        return recipe
    if recipe.data is None:
        raise RecipeError(Problem(f"train.for is {length}", "there is no data to count", "add `data:` to the recipe"))
    train = recipe.data.model_copy(update={"validation": {}, "test": {}})
    with open_data(_for(recipe.model_copy(update={"data": train}), Amount(1, "steps"), evaluate=False)) as data:
        blend, sources = cast(TimelessBlend, data.blend), {source.key: source for source in data.train.sources}
        key = length.source or min(sources, key=lambda key: sources[key].num_samples)
        wanted = length.count * sources[key].num_samples
    samples = bisect_left(range(1 << 62), wanted, key=lambda samples: blend.taken(samples)[key])
    batch = BatchPlan.of(recipe.batch)
    step = batch.first_step_reaching(samples)
    found = _for(recipe, Amount(batch.consumed_after_step(step), "samples"))
    if not 0 < step == TrainingPlan.of(found).train_steps:  # within the ramp, where samples count otherwise
        found = _for(recipe, Amount(step, "steps"))
    if wrong := length_problems(found):
        raise RecipeError([Problem(f"train.for is {length}, which is {found.train.for_}", each) for each in wrong])
    return found


def _for(recipe: Recipe, length: Amount, *, evaluate: bool = True) -> Recipe:
    changes = {"for_": length} if evaluate else {"for_": length, "evaluate": None}
    return recipe.model_copy(update={"train": recipe.train.model_copy(update=changes)})
