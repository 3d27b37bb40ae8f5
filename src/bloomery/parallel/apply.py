"""From a recipe and a mesh to a model that trains: the steps in their order."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, cast

import torch

from bloomery.config.recipe import Recipe
from bloomery.families.registry import FAMILIES
from bloomery.model.init import initialise
from bloomery.model.loss import row_losses
from bloomery.model.transformer import Transformer, apply_recompute, build_model, materialise, use_fp8
from bloomery.parallel.context import apply_context_parallel
from bloomery.parallel.fsdp import apply_fsdp, init_fsdp
from bloomery.parallel.gradients import Gradients, Weight, weights_of
from bloomery.parallel.mesh import Mesh
from bloomery.parallel.runner import DTYPES, Execution, Mark, PlainExecution, Runner, no_mark
from bloomery.parallel.tensor import apply_tensor_parallel, cut_buffers, vocabulary_losses
from bloomery.sizing.layout import stage_layers, stages_of_rank


@dataclass(frozen=True)
class Parallelised:
    """What one rank holds of a model: modules cut and wrapped."""

    stages: Mapping[int, Transformer]
    weights: list[Weight]
    mesh: Mesh


def parallelise(
    recipe: Recipe, mesh: Mesh, *, device: torch.device, compile_model: bool, has_values: bool = False
) -> Parallelised:
    """Build, cut, attach, wrap; only then give it memory and values: no rank ever holds more than its part. All in
    fp32. `has_values`: every weight will be loaded, so none gets an initial value."""
    parts = give_memory(outline(recipe, mesh, compile_model=compile_model), device)
    if not has_values:
        initialise(((weight.name, weight.piece) for weight in parts.weights), recipe.model, recipe.seed)
    return parts


def outline(recipe: Recipe, mesh: Mesh, *, compile_model: bool) -> Parallelised:
    """Build, cut, attach, wrap, on the meta device."""
    stages = build_stages(recipe, mesh)
    shapes = {name: tuple(each.shape) for model in stages.values() for name, each in model.named_parameters()}
    for model in stages.values():
        apply_tensor_parallel(model, mesh)
        apply_context_parallel(model, mesh, recipe.model.seq_length)
        apply_recompute(model, recipe.parallel.recompute)
        if recipe.precision == "fp8":
            use_fp8(model)
        if compile_model and not _compiles_whole(mesh):
            for block in model.layers.values():
                block.forward = torch.compile(block.forward, dynamic=False)
        apply_fsdp(model, mesh, zero=recipe.parallel.zero, dtype=DTYPES[recipe.precision])
    weights = weights_of(stages.values(), shapes, mesh, tied=recipe.model.tie_embeddings)
    return Parallelised(stages, weights, mesh)


def build_stages(recipe: Recipe, mesh: Mesh) -> dict[int, Transformer]:
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


def give_memory(parts: Parallelised, device: torch.device) -> Parallelised:
    """Memory without values. (Inside a FakeTensorMode it is as fake as a simulation needs it.)"""
    for model in parts.stages.values():
        materialise(model, device)
        cut_buffers(model, parts.mesh)
        init_fsdp(model)
    parameters = [each for model in parts.stages.values() for each in model.parameters()]
    return replace(parts, weights=[weight.at(each) for weight, each in zip(parts.weights, parameters, strict=True)])


def make_runner(
    recipe: Recipe,
    parts: Parallelised,
    *,
    device: torch.device,
    compile_model: bool,
    num_sources: int,
    mark: Mark = no_mark,
) -> Runner:
    """How this model is run. Call it when the parameters have the type they compute in."""
    mesh, parallel = parts.mesh, recipe.parallel
    gradients = Gradients(parts.weights, mesh)
    losses = vocabulary_losses(recipe.model, mesh.tp_group, device)
    execution: Execution
    if mesh.layout.pp == 1:
        whole = compile_model and _compiles_whole(mesh)
        row_losses_of = FAMILIES[recipe.model.family].losses or partial(row_losses, vocabulary_losses=losses)
        execution = PlainExecution(
            parts.stages[0], gradients, row_losses_of, zero=parallel.zero, compile_model=whole, mark=mark
        )
    else:
        from bloomery.parallel.pipeline import PipelineExecution  # seconds, where there is no pipeline

        execution = PipelineExecution(recipe, parts.stages, gradients, losses, mesh, device, mark)
    return Runner(
        execution=execution,
        gradients=gradients,
        mesh=mesh,
        device=device,
        seq_length=recipe.model.seq_length,
        num_sources=num_sources,
        dropout_seed=recipe.seed if recipe.model.dropout > 0 else None,
        mark=mark,
    )


def _compiles_whole(mesh: Mesh) -> bool:
    """One graph, loss included, unless FSDP or a pipeline must step in between the blocks."""
    return mesh.data is None and mesh.layout.pp == 1
