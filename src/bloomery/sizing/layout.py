"""How the ranks of a recipe are divided. Whether the division is legal is for sizing/rules.py to say."""

from __future__ import annotations

from bloomery.config.recipe import Recipe


def world_size(recipe: Recipe) -> int:
    """Ranks that the recipe launches; without a launch section, the ranks of one replica."""
    if recipe.launch is None:
        return ranks_per_replica(recipe)
    return recipe.launch.nodes * recipe.launch.gpus_per_node


def ranks_per_replica(recipe: Recipe) -> int:
    """Ranks that hold one copy of the model and work on one micro-batch together."""
    return recipe.parallel.tp * recipe.parallel.pp * recipe.parallel.cp


def data_parallel_size(recipe: Recipe) -> int:
    """Replicas: what remains of the world, rounded down; 0 when the world is smaller than one replica."""
    return world_size(recipe) // ranks_per_replica(recipe)
