"""From a recipe and a mesh to a model that trains: the steps in their order."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from bloomery.config.recipe import Recipe
from bloomery.families.registry import FAMILIES
from bloomery.model.init import initialise
from bloomery.model.transformer import apply_recompute, materialise
from bloomery.parallel.context import apply_context_parallel
from bloomery.parallel.fsdp import apply_fsdp, init_fsdp
from bloomery.parallel.gradients import Gradients
from bloomery.parallel.mesh import Mesh
from bloomery.parallel.pipeline import PipelineExecution, build_stages
from bloomery.parallel.runner import Execution, PlainExecution, Runner
from bloomery.parallel.tensor import apply_tensor_parallel, cut_buffers, vocabulary_losses
from bloomery.parallel.weights import Weight, logical_shapes, weights_of
from bloomery.sizing.parameters import padded_vocab_size

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class Outline:
    """What one rank will hold of a model: modules cut and wrapped, without memory."""

    stages: Mapping[int, nn.Module]
    shapes: Mapping[str, tuple[int, ...]]
    """Of all parameters before anything was cut."""


@dataclass(frozen=True)
class Parallelised:
    """What one rank holds of a model, with memory and initial values, all in fp32."""

    stages: Mapping[int, nn.Module]
    weights: list[Weight]
    mesh: Mesh


def parallelise(recipe: Recipe, mesh: Mesh, *, device: torch.device, compile_model: bool) -> Parallelised:
    """Build, cut, attach, wrap; only then give it memory and values: no rank ever holds more than its part."""
    parts = give_memory(outline(recipe, mesh, compile_model=compile_model), recipe, mesh, device=device)
    initialise(((weight.name, weight.piece) for weight in parts.weights), recipe.model, recipe.seed)
    return parts


def outline(recipe: Recipe, mesh: Mesh, *, compile_model: bool) -> Outline:
    """Build, cut, attach, wrap, on the meta device."""
    stages = build_stages(recipe, mesh)
    shapes = logical_shapes(stages.values())
    for model in stages.values():
        apply_tensor_parallel(model, mesh)
        apply_context_parallel(model, mesh, recipe.model.seq_length)
        apply_recompute(model, recipe.parallel.recompute)
        if compile_model and not _compiles_whole(mesh):
            for block in cast(Any, model).layers.values():
                block.forward = torch.compile(block.forward, dynamic=False)
        apply_fsdp(model, mesh, zero=recipe.parallel.zero, dtype=DTYPES[recipe.precision])
    return Outline(stages, shapes)


def give_memory(outlined: Outline, recipe: Recipe, mesh: Mesh, *, device: torch.device) -> Parallelised:
    """Memory without values. (Inside a FakeTensorMode it is as fake as a simulation needs it.)"""
    for model in outlined.stages.values():
        materialise(model, device)
        cut_buffers(model, mesh)
        init_fsdp(model)
    weights = weights_of(outlined.stages.values(), outlined.shapes, mesh, tied=recipe.model.tie_embeddings)
    return Parallelised(outlined.stages, weights, mesh)


def make_runner(
    recipe: Recipe, parts: Parallelised, *, device: torch.device, compile_model: bool, num_sources: int
) -> Runner:
    """How this model is run. Call it when the parameters have the type they compute in."""
    mesh, parallel = parts.mesh, recipe.parallel
    gradients = Gradients(parts.weights, mesh)
    losses = vocabulary_losses(recipe.model, mesh.tp_group, device)
    execution: Execution
    if mesh.layout.pp == 1:
        whole = compile_model and _compiles_whole(mesh)
        execution = PlainExecution(parts.stages[0], gradients, losses, zero=parallel.zero, compile_model=whole)
    else:
        execution = PipelineExecution(
            parts.stages,
            gradients,
            losses,
            mesh,
            kind=parallel.schedule,
            num_stages=mesh.layout.pp * parallel.chunks,
            hidden=hidden_states(recipe, mesh),
            outputs=_outputs(recipe, mesh),
            device=device,
        )
    return Runner(
        execution,
        gradients,
        mesh,
        device=device,
        seq_length=recipe.model.seq_length,
        num_sources=num_sources,
        dropout_seed=recipe.seed if recipe.model.dropout > 0 else None,
    )


def _compiles_whole(mesh: Mesh) -> bool:
    """One graph, loss included, unless FSDP or a pipeline must step in between the blocks."""
    return mesh.data is None and mesh.layout.pp == 1


def hidden_states(recipe: Recipe, mesh: Mesh) -> Tensor:
    """What travels between stages: the tokens of this rank, between blocks. Gradients travel back."""
    tokens = recipe.model.seq_length // (mesh.layout.cp * mesh.layout.tp)
    shape = (recipe.batch.micro_batch_size, tokens, recipe.model.hidden_size)
    return torch.empty(shape, dtype=DTYPES[recipe.precision], device="meta", requires_grad=True)


def _outputs(recipe: Recipe, mesh: Mesh) -> tuple[Tensor, ...]:
    """What the last stage returns."""
    rows, dtype = recipe.batch.micro_batch_size, DTYPES[recipe.precision]
    words = padded_vocab_size(recipe.model) // mesh.layout.tp
    logits = torch.empty((rows, recipe.model.seq_length // mesh.layout.cp, words), dtype=dtype, device="meta")
    order = torch.empty((rows, 2), dtype=dtype, device="meta")
    return (logits, order) if FAMILIES[recipe.model.family].encoder else (logits,)
