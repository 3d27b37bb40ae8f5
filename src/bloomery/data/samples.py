"""The samples of a recipe for a training loop of the user's own, as a dataset of torch."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any, Self

from torch import Tensor
from torch.utils.data import Dataset

from bloomery.base.errors import Problem, RecipeError
from bloomery.config.recipe import Recipe
from bloomery.data.batch import Stream
from bloomery.data.open import open_data
from bloomery.sizing.schedule import TrainingPlan


class Samples(Dataset[dict[str, Tensor]]):
    """Item i is the sample that a run of this recipe takes after `first + i` others, with its inputs and targets by
    their names; found at once, wherever it is. Use it unshuffled: it is in its order already."""

    def __init__(self, recipe: Recipe, *, first: int = 0, group: str | None = None) -> None:
        """`group`: of validation; default the training. DataError if the data does not fit the recipe."""
        self.recipe, self.first, self._group = recipe, first, group
        self._closing = ExitStack()
        self._stream: Stream | None = None
        stream = self._opened()
        self._length = sum(source.num_samples for source in stream.sources)
        self._length = TrainingPlan.of(recipe).train_samples if group is None else self._length

    def __len__(self) -> int:
        return max(0, self._length - self.first)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        if not 0 <= index < len(self):
            raise IndexError(f"{index} is not below {len(self)}")
        batch = self._opened().batch(self.first + index, 1)
        return {name: tensor[0] for name, tensor in {**batch.inputs, **batch.targets}.items()}

    def after(self, consumed: int) -> Self:
        """What is left when so many samples of the training are consumed: how a loop resumes."""
        return type(self)(self.recipe, first=consumed, group=self._group)

    def __getstate__(self) -> dict[str, Any]:
        """Without what is open: a worker of a DataLoader opens it again."""
        return {**vars(self), "_closing": ExitStack(), "_stream": None}

    def _opened(self) -> Stream:
        if self._stream is None:
            data = self._closing.enter_context(open_data(self.recipe))
            if self._group is not None and self._group not in data.validation:
                known = ", ".join(data.validation) or "none"
                what = f"there is no validation group {self._group}"
                raise RecipeError(Problem(what, f"there are: {known}", "name one"))
            self._stream = data.train if self._group is None else data.validation[self._group]
        return self._stream
