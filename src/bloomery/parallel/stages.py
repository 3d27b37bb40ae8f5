"""Cutting a model into pipeline stages. Names of what remains do not change."""

from __future__ import annotations

from typing import Any, cast

from bloomery.config.recipe import Recipe
from bloomery.model.transformer import Decoder, Encoder, build_model
from bloomery.parallel.mesh import Mesh
from bloomery.sizing.stages import stage_layers, stages_of_rank


def build_stages(recipe: Recipe, mesh: Mesh) -> dict[int, Decoder | Encoder]:
    """The stages of this rank by their number, on the meta device: the whole model if there is no pipeline."""
    pp, chunks = mesh.layout.pp, recipe.parallel.chunks
    if pp == 1:
        return {0: build_model(recipe.model)}
    owned = stage_layers(recipe.model.num_layers, pp * chunks)
    stages = {}
    for stage in stages_of_rank(mesh.pp, pp, chunks):
        model = build_model(recipe.model)
        for key in list(model.layers):
            if int(key) not in owned[stage]:
                del model.layers[key]
        if stage > 0:
            model.embed = None
        if stage < len(owned) - 1:
            model.final_norm = None
            for end in ("head", "pooler", "order_head"):
                if hasattr(model, end):
                    setattr(cast(Any, model), end, None)
        stages[stage] = model
    return stages
