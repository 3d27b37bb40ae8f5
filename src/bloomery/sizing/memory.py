"""What a rank's part of the weights takes, on the device, in host memory and in a checkpoint: to the byte.

Tests hold it to ranks that the code of training builds (verify/simulate.py). Activations are no arithmetic: they are
found there.
"""

from dataclasses import asdict, dataclass
from functools import cache
from math import prod
from typing import Any

from bloomery.config.recipe import ModelSection, Recipe
from bloomery.sizing.layout import (
    Layout,
    Place,
    cut_dimension,
    micro_batches,
    ranks_per_node,
    stage_layers,
    stages_of_rank,
)
from bloomery.sizing.parameters import HEAD, count_parameters, model_shapes, padded_vocab_size

_FP32 = 4
_MOMENTS = 2
_COMPUTE_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2, "fp8": 2, "auto": 2}
"""`auto` as on an accelerator."""
_SAVED_BYTES = _FP32 * (1 + _MOMENTS)


@dataclass(frozen=True)
class HeldElements:
    """Elements of the weights of one rank."""

    pieces: int
    """What it holds of them."""
    whole: int
    """The same weights before data-parallel ranks have cut them."""
    owned: int
    """Of its pieces, those that it alone counts and saves."""


@dataclass(frozen=True)
class WeightBytes:
    """Bytes of one rank, all but activations."""

    masters: int
    """Its fp32 weights on the device."""
    compute_copies: int
    """Weights in the precision that is computed in, where those are other tensors; all that it computes with at once,
    except under ZeRO 3, which gathers one block at a time (that counts as activations)."""
    gradients: int
    """fp32 sums that are kept between micro-batches; with one micro-batch, gradients in the precision that is computed
    in, but for FSDP's."""
    reduced_gradients: int
    """fp32, after data-parallel ranks have added theirs, where those are other tensors."""
    optimizer: int
    """Moments and the number of updates; 0 with parallel.offload, which keeps them in `host`."""
    host: int
    """In host memory with parallel.offload: masters, moments, and gradients while they are applied (of large models a
    part at a time)."""
    saves: int
    """In host memory, pinned: the snapshot that a save writes, of the pieces that the rank alone saves. (Rank 0 adds a
    step count of 4 bytes.)"""

    @property
    def device(self) -> int:
        """At least this much at once on the device: sums of gradients go as reduced ones come."""
        sums = max(self.gradients, self.reduced_gradients)
        return self.masters + self.compute_copies + sums + self.optimizer


def weight_bytes(recipe: Recipe, layout: Layout, held: HeldElements) -> WeightBytes:
    """By the rules of parallel/ and of train/optimizer.py."""
    itemsize, zero, offload = _COMPUTE_BYTES[recipe.precision], recipe.parallel.zero, recipe.parallel.offload
    pieces, whole = _FP32 * held.pieces, _FP32 * held.whole
    state = _MOMENTS * pieces + _FP32
    if layout.dp * layout.cp > 1:  # then FSDP computes with copies, and adds up gradients before it reduces them
        masters, copies = pieces, 0 if zero == 3 else itemsize * held.whole
        sums = whole if micro_batches(recipe, layout) > 1 else 0
        gradients, reduced = (sums, pieces) if zero < 2 else (pieces, 0)
    else:
        copies = 0 if itemsize == _FP32 else itemsize * held.pieces
        masters = 0 if copies and offload else pieces
        gradients, reduced = pieces if micro_batches(recipe, layout) > 1 else itemsize * held.pieces, 0
    return WeightBytes(
        masters=masters,
        compute_copies=copies,
        gradients=gradients,
        reduced_gradients=reduced,
        optimizer=0 if offload else state,
        host=2 * pieces + state if offload else 0,
        saves=_SAVED_BYTES * held.owned,
    )


def checkpoint_bytes(model: ModelSection) -> int:
    """Of its tensors; headers and the index add little."""
    return _SAVED_BYTES * count_parameters(model, padded=True).total


def layout_facts(recipe: Recipe, layout: Layout) -> dict[str, Any]:
    """What `plan` and `verify --simulate-world` say of a layout."""
    parallel = recipe.parallel
    return {
        "world": layout.world,
        "layout": asdict(layout) | {"zero": parallel.zero, "schedule": parallel.schedule, "chunks": parallel.chunks},
        "recompute": parallel.recompute,
        "precision": recipe.precision,
        "micro_batch_size": recipe.batch.micro_batch_size,
        "micro_batches": micro_batches(recipe, layout),
    }


def stage_part(recipe: Recipe, layout: Layout, pp: int) -> tuple[list[range], bool, bool]:
    """(layers of each of its stages, has the embedding, has the head) of a pipeline rank."""
    layers = stage_layers(recipe.model.num_layers, layout.pp * recipe.parallel.chunks)
    numbers = stages_of_rank(pp, layout.pp, recipe.parallel.chunks)
    return [layers[number] for number in numbers], 0 in numbers, len(layers) - 1 in numbers


def held_elements(recipe: Recipe, layout: Layout, place: Place) -> HeldElements:
    """As parallel/gradients.py: FSDP cuts rows, after tensor parallelism has cut what it cuts, into equal portions, of
    which the last may be short or empty."""
    model, vocab_size = recipe.model, padded_vocab_size(recipe.model)
    layers, embedding, head = stage_part(recipe, layout, place.pp)
    num_layers = sum(map(len, layers))
    weights = model_shapes(model, vocab_size=vocab_size, num_layers=num_layers, embedding=embedding, head=head)
    pieces = whole = owned = 0
    for weight in weights:
        cut = cut_dimension(weight.name)
        rows, *others = (size // layout.tp if dim == cut else size for dim, size in enumerate(weight.shape))
        portion = -(-rows // layout.shard)
        own_rows = max(0, min(portion, rows - place.shard * portion))
        row_elements = weight.count * prod(others)
        is_copy = model.tie_embeddings and weight.name == HEAD
        is_owned = place.copy == 0 and not is_copy and (place.tp == 0 or cut is not None)
        pieces += own_rows * row_elements
        whole += rows * row_elements
        owned += own_rows * row_elements if is_owned else 0
    return HeldElements(pieces, whole, owned)


def stage_facts(recipe: Recipe, layout: Layout) -> list[dict[str, Any]]:
    """Of every kind of pipeline rank, in their order: the ranks that are alike, and what the fullest of them holds."""
    kinds: dict[tuple[int, bool, bool], list[int]] = {}
    for pp in range(layout.pp):
        layers, embedding, head = stage_part(recipe, layout, pp)
        kinds.setdefault((sum(map(len, layers)), embedding, head), []).append(pp)
    facts = []
    for (num_layers, embedding, head), pipeline_ranks in kinds.items():
        held = held_elements(recipe, layout, Place(pp=pipeline_ranks[0]))  # none of the stage holds or owns more
        memory = weight_bytes(recipe, layout, held)
        facts.append(
            {
                "pipeline_ranks": pipeline_ranks,
                "num_layers": num_layers,
                "embedding": embedding,
                "head": head,
                "elements": held.pieces,
                "owned_elements": held.owned,
                "memory_bytes": asdict(memory) | {"device": memory.device},
            }
        )
    return facts


def node_bytes(recipe: Recipe, layout: Layout) -> dict[str, int]:
    """Host memory of all ranks of a node together, of the node that needs most: for saves, for offload, for both."""

    @cache
    def used(place: Place) -> WeightBytes:
        return weight_bytes(recipe, layout, held_elements(recipe, layout, place))

    nodes: dict[int, list[WeightBytes]] = {}
    for rank in range(layout.world):
        place = layout.place_of(rank)
        alike = Place(pp=place.pp, tp=min(place.tp, 1), copy=min(place.copy, 1), shard=place.shard)
        nodes.setdefault(rank // ranks_per_node(recipe), []).append(used(alike))
    sums = [(sum(rank.saves for rank in ranks), sum(rank.host for rank in ranks)) for ranks in nodes.values()]
    return {
        "saves": max(saves for saves, _ in sums),
        "offload": max(offload for _, offload in sums),
        "host": max(map(sum, sums)),
    }
