"""How the ranks of a recipe are divided, and what of the model each holds. sizing/check.py checks that it is legal."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from bloomery.base.errors import Problem, RecipeError
from bloomery.config.recipe import Recipe

_FACTOR = re.compile(r"(tp|pp|cp|dp|zero|shard|chunks)(\d{1,6})")
_WORDS = {
    **dict.fromkeys(("gpipe", "1f1b", "interleaved", "zero_bubble"), "schedule"),
    **dict.fromkeys(("full", "selective", "mlp"), "recompute"),
}
_RULE = (
    "a layout is its factors joined by dashes: dpN, tpN, ppN, cpN, zero0 to zero3, shardN, chunksN, a schedule (gpipe, "
    "1f1b, interleaved, zero_bubble), a recompute (mlp, selective, full) and offload"
)


@dataclass(frozen=True)
class Place:
    """Where a rank stands in a layout."""

    pp: int = 0
    dp: int = 0
    cp: int = 0
    tp: int = 0
    copy: int = 0
    """Which of the equal copies of the weights' shards it belongs to."""
    shard: int = 0
    """Which shard of a copy it holds."""


@dataclass(frozen=True)
class Layout:
    """The factors of the world: pp * dp * cp * tp ranks, tensor-parallel ones next to each other."""

    dp: int = 1
    tp: int = 1
    pp: int = 1
    cp: int = 1
    shard: int = 1
    """Ranks that share one copy of what ZeRO shards; it divides dp * cp. With zero 0 it is 1."""

    @classmethod
    def of(cls, recipe: Recipe) -> Layout:
        """Replicas are what remains of the world, rounded down; none when it is smaller than one replica."""
        parallel = recipe.parallel
        dp = world_size(recipe) // ranks_per_replica(recipe)
        shard = 1 if parallel.zero == 0 else parallel.shard_size or dp * parallel.cp
        return cls(dp=dp, tp=parallel.tp, pp=parallel.pp, cp=parallel.cp, shard=shard)

    @property
    def world(self) -> int:
        return self.pp * self.dp * self.cp * self.tp

    @property
    def copies(self) -> int:
        """Ranks that hold the same piece of a weight because of data parallelism."""
        return self.dp * self.cp // self.shard

    def place_of(self, rank: int) -> Place:
        """Ranks are numbered with tensor parallelism fastest, then context, data and pipeline, so that those that
        communicate most are neighbours."""
        rest, tp = divmod(rank, self.tp)
        rest, cp = divmod(rest, self.cp)
        pp, dp = divmod(rest, self.dp)
        copy, shard = divmod(dp * self.cp + cp, self.shard)
        return Place(pp=pp, dp=dp, cp=cp, tp=tp, copy=copy, shard=shard)


def layout_overrides(name: str) -> list[str]:
    """The recipe overrides that a layout's name stands for: `pp2-dp2-tp2`, `zero3-dp2`, `pp2-interleaved-chunks2`.

    A layout is its factors joined by dashes; what is not named is 1, and ZeRO is 1 unless it is named.
    """
    values: dict[str, str] = {"tp": "1", "pp": "1", "cp": "1", "dp": "1", "zero": "1"}
    for part in [] if name == "single" else name.split("-"):
        if match := _FACTOR.fullmatch(part):
            values["shard_size" if match[1] == "shard" else match[1]] = match[2]
        elif part == "offload":
            values["offload"] = "true"
        elif part in _WORDS:
            values[_WORDS[part]] = part
        else:
            raise RecipeError(
                Problem(f"{part!r} is not a factor of a layout", _RULE, "write for example zero3-dp2-tp2")
            )
    if values.get("schedule") in ("interleaved", "zero_bubble"):
        values.setdefault("chunks", "2")
    ranks = int(values["tp"]) * int(values["pp"]) * int(values["cp"]) * int(values.pop("dp"))
    return [
        *(f"parallel.{key}={value}" for key, value in values.items()),
        "launch.on=local",
        "launch.nodes=1",
        f"launch.gpus_per_node={ranks}",
    ]


def world_size(recipe: Recipe) -> int:
    """Ranks that the recipe launches; without a launch section, the ranks of one replica."""
    if recipe.launch is None:
        return ranks_per_replica(recipe)
    return recipe.launch.nodes * recipe.launch.gpus_per_node


def ranks_per_node(recipe: Recipe) -> int:
    """Ranks of one machine; without a launch section there is one machine."""
    return world_size(recipe) if recipe.launch is None else recipe.launch.gpus_per_node


def micro_batches(recipe: Recipe, layout: Layout) -> int:
    """Per replica, in a step of the full global batch."""
    return recipe.batch.global_batch_size // (recipe.batch.micro_batch_size * layout.dp)


def ranks_per_replica(recipe: Recipe) -> int:
    """Ranks that hold one copy of the model and work on one micro-batch together."""
    return recipe.parallel.tp * recipe.parallel.pp * recipe.parallel.cp


def stage_layers(num_layers: int, num_stages: int) -> list[range]:
    """Layers of every stage, in order; each has at least one.

    The work is evened out: 70 layers on 12 stages give BLOOM's [embedding + 5] [6] x 10 [5 + head]. What does not
    divide goes to middle stages first.
    """
    assert num_stages <= num_layers
    layers, middle = [1] * num_stages, (num_stages - 1) / 2
    for _ in range(num_layers - num_stages):
        work = [count + (stage == 0) + (stage == num_stages - 1) for stage, count in enumerate(layers)]
        layers[min(range(num_stages), key=lambda stage: (work[stage], abs(stage - middle)))] += 1
    starts = [sum(layers[:stage]) for stage in range(num_stages)]
    return [range(start, start + count) for start, count in zip(starts, layers, strict=True)]


def stages_of_rank(pp_rank: int, pp: int, chunks: int) -> list[int]:
    """The stages that one pipeline rank owns: they are dealt out in turn."""
    return [pp_rank + chunk * pp for chunk in range(chunks)]


Cut = Literal["rows", "columns", "summed", "alike"]
"""rows, columns: cut along dimension 0 or 1. summed: whole on every rank, but each sees a part of the tokens, so that
gradients are to be summed. alike: whole, and every rank computes the same with it."""

CUTS: tuple[tuple[str, Cut], ...] = (
    (r"embed\.tokens\.weight|head\.(weight|bias)|slopes", "rows"),
    (r"layers\.\d+\.(attention\.qkv|mlp\.up|mlp\.gate)\.(weight|bias)", "rows"),
    (r"layers\.\d+\.(attention\.out|mlp\.down)\.weight", "columns"),
    (r"layers\.\d+\.(attention\.out|mlp\.down)\.bias", "summed"),
    (
        r"(layers\.\d+\.(attention_norm|mlp_norm)|embed\.norm|final_norm|head\.norm|head\.dense)\.(weight|bias)",
        "summed",
    ),
    (r"layers\.\d+\.attention\.(q_norm|k_norm)\.weight", "summed"),  # each rank sees only its own heads
    (r"embed\.(positions|token_types)\.weight", "summed"),
    (r"(pooler\.dense|order_head)\.(weight|bias)", "alike"),
)
"""Every parameter and buffer of every family matches exactly one; a test holds that."""


def cut_of(name: str) -> Cut:
    """How the parameter or buffer called `name` lies on tensor-parallel ranks. A model of the user's own is not cut."""
    return next((cut for pattern, cut in CUTS if re.fullmatch(pattern, name)), "alike")


def cut_dimension(name: str) -> int | None:
    """The dimension along which it is cut; None if every rank has all of it."""
    return {"rows": 0, "columns": 1}.get(cut_of(name))
