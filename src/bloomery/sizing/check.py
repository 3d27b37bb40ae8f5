"""A recipe that keeps every rule, or every problem that it has: of the YAML, of the schema, and between fields."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from bloomery.base.errors import Problem, RecipeError
from bloomery.config.load import Draft, by_place, read_recipe

if TYPE_CHECKING:  # slow to import; see read_recipe
    from bloomery.config.recipe import Recipe
    from bloomery.sizing.finding import Finding


@dataclass(frozen=True)
class CheckedRecipe:
    """A recipe that keeps every rule."""

    recipe: Recipe
    draft: Draft
    warnings: list[Problem]


def load_checked_recipe(name: str, overrides: Sequence[str] = ()) -> CheckedRecipe:
    """The recipe, or RecipeError with every problem in the order of the file."""
    draft = read_recipe(name, overrides)
    problems = list(draft.problems)
    warnings: list[Problem] = []
    for finding in findings(draft):
        problem = Problem(finding.what, finding.rule, finding.remedy, draft.place(*finding.paths))
        (warnings if finding.is_warning else problems).append(problem)
    if problems:
        raise RecipeError(sorted(problems, key=by_place))
    assert draft.recipe is not None
    return CheckedRecipe(draft.recipe, draft, warnings)


def findings(draft: Draft) -> Iterator[Finding]:
    """Every broken rule."""
    if draft.recipe is None:
        return
    from bloomery.sizing.rules import RULES

    for rule in RULES:
        yield from rule(draft.recipe)
