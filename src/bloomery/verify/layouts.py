"""Which layouts are verified: those that the user names, or the standard matrix. Each is legal for the recipe before
anything starts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from bloomery.base.errors import Problem, RecipeError
from bloomery.config.recipe import Recipe
from bloomery.config.schema import closest
from bloomery.sizing.check import load_checked_recipe
from bloomery.sizing.layout import data_parallel_size, layout_overrides, world_size

SINGLE = "single"
"""The reference: one rank, one micro-batch, no process group."""
STANDARD = (
    *("zero0-dp2", "zero1-dp2", "zero2-dp2", "zero3-dp2", "tp2", "cp2", "pp2", "pp2-interleaved", "pp2-zero_bubble"),
    *("tp4", "zero3-dp4-shard2", "zero3-dp2-tp2", "dp2-cp2", "pp2-tp2", "pp2-dp2"),
    *("pp2-dp2-tp2", "pp2-cp2-tp2", "zero2-dp4-tp2"),
)
"""2, 4 and 8 ranks."""
_RULE = (
    "a layout is its factors joined by dashes: dpN, tpN, ppN, cpN, zero0 to zero3, shardN, chunksN, a schedule (gpipe, "
    "1f1b, interleaved, zero_bubble), a recompute (selective, full) and offload"
)


@dataclass(frozen=True)
class VerifiedLayout:
    """A layout that the user's recipe allows."""

    name: str
    overrides: tuple[str, ...]
    world: int
    dp: int
    tp: int
    pp: int
    cp: int
    stages: int


def choose_layouts(
    source: str, overrides: Sequence[str], recipe: Recipe, names: Sequence[str] | None, *, most_ranks: int | None = None
) -> tuple[list[VerifiedLayout], dict[str, str]]:
    """(layouts in the order given, those of the standard matrix that are left out and why).

    RecipeError for every named layout that is unknown, or that the recipe does not allow. `most_ranks`: devices here.
    """
    problems: list[Problem] = []
    left_out: dict[str, str] = {}
    found: list[VerifiedLayout] = []
    for name in dict.fromkeys(STANDARD if names is None else names):
        if name == SINGLE:
            continue  # always run
        try:
            layout = _legal(source, overrides, recipe, name)
            if most_ranks is not None and layout.world > most_ranks:
                what = f"{layout.world} ranks, and this machine has {most_ranks} devices"
                raise RecipeError(Problem(what, "every rank needs its own", "use --device cpu"))
            found.append(layout)
        except RecipeError as error:
            if names is None:
                left_out[name] = " ".join(str(problem) for problem in error.problems)
            problems += [Problem(each.what, each.rule, each.remedy, f"--layouts {name}") for each in error.problems]
    if names is not None and problems:
        raise RecipeError(problems)
    if not found:
        raise RecipeError(Problem("no layout is left to verify", remedy="name at least one, such as --layouts tp2"))
    return found, left_out


def _legal(source: str, overrides: Sequence[str], recipe: Recipe, name: str) -> VerifiedLayout:
    try:
        factors = layout_overrides(name)
    except ValueError as error:
        guess = closest(name, STANDARD)
        raise RecipeError(Problem(str(error), _RULE, f"did you mean {guess}?" if guess else "correct it")) from None
    own = f"parallel={{recompute: {recipe.parallel.recompute}, offload: {str(recipe.parallel.offload).lower()}}}"
    # The micro-batch is no part of the science: it is chosen again for the small recipe.
    checked = load_checked_recipe(source, [*overrides, own, *factors, "batch.micro_batch_size=1"]).recipe
    parallel = checked.parallel
    return VerifiedLayout(
        name=name,
        overrides=tuple(factors),
        world=world_size(checked),
        dp=data_parallel_size(checked),
        tp=parallel.tp,
        pp=parallel.pp,
        cp=parallel.cp,
        stages=parallel.pp * parallel.chunks,
    )
