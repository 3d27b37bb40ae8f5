"""One rank of a world that is not there: built by the code that trains, with a process group and tensors that are fake.

How memory is found. Weights, gradients and optimizer state are counted from the pieces that the rank holds. For the
rest, micro-batches really go forward and backward through the rank's stages, as fake tensors, while a meter adds up
every storage: first one, that leaves gradients behind; then one that shows what a micro-batch keeps and what its
backward pass needs; then the last of a step, with its reductions. What is kept counts as often as the pipeline's
schedule holds micro-batches at once. Attention and dropout keep what the kernels of an accelerator keep; nothing is
compiled, and there is no allocator: real memory is rounded up and fragmented, compiled code keeps less.
"""

from __future__ import annotations

import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from functools import partial
from typing import Any, Literal, cast
from unittest.mock import patch

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.tensor import DTensor
from torch.nn import functional as F
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from bloomery.config.recipe import PipelineSchedule, Recipe
from bloomery.data.batch import Batch, Packing, causal_batch
from bloomery.families.family import LM_LOSS
from bloomery.families.registry import FAMILIES
from bloomery.model import attention, transformer
from bloomery.model.attention import choose_kernel
from bloomery.model.loss import row_losses
from bloomery.parallel.apply import Parallelised, give_memory, outline
from bloomery.parallel.context import own_tokens
from bloomery.parallel.fsdp import set_fsdp_sync
from bloomery.parallel.gradients import Gradients
from bloomery.parallel.mesh import Mesh, make_mesh
from bloomery.parallel.pipeline import hidden_states, schedule_in_force
from bloomery.parallel.runner import DTYPES
from bloomery.parallel.tensor import vocabulary_losses
from bloomery.sizing.layout import Layout, cut_dimension, micro_batches
from bloomery.sizing.memory import HeldElements, WeightBytes, layout_facts, stage_part, weight_bytes
from bloomery.sizing.parameters import count_parameters, labels_per_sample, second_loss

_CPU = torch.device("cpu")
_EXPOSED = ("tp", "cp")
"""A rank waits for these at once. FSDP's run beside the block before, a pipeline's beside other micro-batches."""
_COLLECTIVES = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all")


def simulate_world(recipe: Recipe, rank: int | None = None) -> dict[str, Any]:
    """Build ranks of the recipe's world: the given one, or those of the first, a middle and the last stage. What they
    hold, as the JSON of `verify --simulate-world`: a public contract. Sizes are in bytes."""
    began, layout = time.monotonic(), Layout.of(recipe)
    stage_size = layout.world // layout.pp
    chosen = [rank] if rank is not None else sorted({0, layout.pp // 2 * stage_size, layout.world - stage_size})
    parameters = count_parameters(recipe.model, padded=True).total
    built = sum(_elements_of_stage(recipe, layout, pp * stage_size) for pp in range(layout.pp))
    assert built == parameters, f"the ranks of all stages hold {built:,} parameters, the formula says {parameters:,}"
    return {
        "name": recipe.name,
        **layout_facts(recipe, layout),
        "parameters": parameters,
        "built_parameters": built,
        "ranks": [simulate_rank(recipe, layout, each) for each in chosen],
        "seconds": round(time.monotonic() - began, 1),
        "torch": torch.__version__,
    }


def simulate_rank(recipe: Recipe, layout: Layout, rank: int) -> dict[str, Any]:
    """`layers` are those of each of its pipeline stages; `owned_elements` those that it alone counts and saves."""
    batch = _batch(recipe)
    with _fake_world(layout, rank) as mesh:
        parts, meter = outline(recipe, mesh, compile_model=False), MemoryMeter()
        with fake_accelerator(meter):
            parts = _compute_in(recipe, give_memory(parts, _CPU))
            passes, held = _Passes(recipe, parts, batch), _held_elements(parts)
            memory, in_flight, calls = _measure(recipe, parts, passes, meter, weight_bytes(recipe, layout, held))
            collectives = _collectives(mesh, passes, calls, micro_batches(recipe, layout))
    layers, embedding, head = stage_part(recipe, layout, mesh.pp)
    return {
        "rank": rank,
        "place": {"pp": mesh.pp, "dp": mesh.dp, "cp": mesh.cp, "tp": mesh.tp},
        "layers": list(map(list, layers)),
        "embedding": embedding,
        "head": head,
        "elements": held.pieces,
        "owned_elements": held.owned,
        "forward_passes_held": in_flight,
        "memory_bytes": memory,
        "collectives": collectives,
        "exposed_collectives": sum(sum(collectives.get(name, {}).values()) for name in _EXPOSED),
    }


@contextmanager
def _fake_world(layout: Layout, rank: int) -> Iterator[Mesh]:
    """A process group whose other ranks never answer, and of which nobody notices that they do not."""
    assert not dist.is_initialized(), "a simulation needs a process without a process group"
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=layout.world)
    try:
        yield make_mesh(layout, _CPU)
    finally:
        dist.destroy_process_group()


def _elements_of_stage(recipe: Recipe, layout: Layout, rank: int) -> int:
    """What all ranks of a pipeline rank's stages own, from the first of them: it owns a part of everything they do."""
    with _fake_world(layout, rank) as mesh:
        weights = outline(recipe, mesh, compile_model=False).weights
    return sum(
        weight.parameter.numel() * (1 if cut_dimension(weight.name) is None else layout.tp)
        for weight in weights
        if weight.piece.owned
    )


def _compute_in(recipe: Recipe, parts: Parallelised) -> Parallelised:
    """Turn plain parameters into what is computed in, beside their masters, as train/optimizer.py does. Masters that
    are offloaded leave the device, and no host is simulated."""
    dtype = DTYPES[recipe.precision]
    if parts.mesh.data is not None or dtype == torch.float32:
        return parts
    for weight in parts.weights:
        weight.parameter.data = weight.piece.tensor.to(dtype)
    if not recipe.parallel.offload:
        return parts
    elsewhere = [replace(each, piece=each.piece.with_tensor(each.piece.tensor.to("meta"))) for each in parts.weights]
    return replace(parts, weights=elsewhere)


def _measure(
    recipe: Recipe, parts: Parallelised, passes: _Passes, meter: MemoryMeter, known: WeightBytes
) -> tuple[dict[str, int], int, Counter[tuple[str, str]]]:
    """(bytes of the rank by purpose, forward passes that are held at once, collectives of a step). `known`: what needs
    no simulation.

    `kept_per_micro_batch`: what one keeps from its forward to its backward pass, in all stages of the rank.
    `receive_buffers`: for hidden states and gradients from other stages; torch keeps them for all micro-batches of a
    step. `activations`: at the peak, kept by all micro-batches in flight, and the working memory of a backward pass."""
    mesh, parallel = parts.mesh, recipe.parallel
    count = micro_batches(recipe, mesh.layout)
    peak, in_flight, kept = 0, 1, [0] * len(parts.stages)
    calls: Counter[tuple[str, str]] = Counter()
    passes.gradients.clear(micro_batches=count)
    if count > 1:
        for stage in parts.stages:
            passes.forward(stage, last=False)()
        calls, base = meter.collectives.copy(), meter.live_bytes
        sizes = [passes.measure(stage, meter) for stage in parts.stages]
        each = meter.collectives - calls
        for _ in range(count - 2):
            calls += each
        kept, working = [size[0] for size in sizes], [size[1] for size in sizes]
        pp, chunks = mesh.layout.pp, parallel.chunks
        kind = schedule_in_force(parallel.schedule, num_stages=pp * chunks, num_micro_batches=count)
        order = passes_of_rank(kind, pp=pp, pp_rank=mesh.pp, chunks=chunks, micro_batches=count)
        held, in_flight = most_held(order, kept, working)
        peak = base + held
    meter.restart()
    meter.collectives.clear()
    for stage in parts.stages:
        passes.forward(stage, last=True)()
    passes.gradients.reduce_across_ranks()
    calls += meter.collectives
    peak = max(peak, meter.peak_bytes)
    buffers = count * passes.received_bytes
    peak += known.optimizer + buffers - passes.received_bytes
    activations = peak - buffers - known.masters - known.compute_copies - known.gradients - known.optimizer
    found = {"kept_per_micro_batch": sum(kept), "receive_buffers": buffers, "activations": activations, "peak": peak}
    return asdict(known) | found, in_flight, calls


def _collectives(
    mesh: Mesh, passes: _Passes, calls: Counter[tuple[str, str]], micro_batches: int
) -> dict[str, dict[str, int]]:
    """By the ranks between which they are, of one step, without those of norm and loss."""
    groups = (("tp", mesh.tp_group), ("cp", mesh.cp_group))
    names = {str(group.group_name): name for name, group in groups if group is not None}
    found: dict[str, dict[str, int]] = {}
    for (kind, group), number in sorted(calls.items()):
        found.setdefault(names.get(group, "dp"), {})[kind] = number
    if received := passes.received_per_micro_batch * micro_batches:
        found["pp"] = {"send": received, "receive": received}
    return found


def _held_elements(parts: Parallelised) -> HeldElements:
    """Counted from the pieces themselves."""
    pieces = [weight.piece for weight in parts.weights]
    return HeldElements(
        pieces=sum(piece.tensor.numel() for piece in pieces),
        whole=sum(weight.parameter.numel() for weight in parts.weights),
        owned=sum(piece.tensor.numel() for piece in pieces if piece.owned),
    )


class _Passes:
    """Fake micro-batches through the stages of a rank, as runner.py and pipeline.py send real ones."""

    def __init__(self, recipe: Recipe, parts: Parallelised, batch: Batch) -> None:
        self._stages = parts.stages
        self.gradients = Gradients(parts.weights, parts.mesh)
        self._mesh = parts.mesh
        self._zero = recipe.parallel.zero if parts.mesh.layout.pp == 1 else min(1, recipe.parallel.zero)
        self._num_stages = parts.mesh.layout.pp * recipe.parallel.chunks
        self._losses = vocabulary_losses(recipe.model, parts.mesh.tp_group, _CPU)
        inputs, targets = ({n: each.clone() for n, each in part.items()} for part in (batch.inputs, batch.targets))
        counted = replace(batch, inputs=inputs, targets=targets)
        self._batch = own_tokens(counted, parts.mesh, recipe.model.seq_length)
        buffer = partial(torch.empty_like, hidden_states(recipe, parts.mesh), device=_CPU, requires_grad=False)
        self._from_before = {n: buffer() for n in parts.stages if n > 0}
        self._from_behind = {n: buffer() for n in parts.stages if n < self._num_stages - 1}

    @property
    def received_bytes(self) -> int:
        """What torch's pipeline keeps per micro-batch to receive into."""
        buffers = [*self._from_before.values(), *self._from_behind.values()]
        return sum(buffer.untyped_storage().nbytes() for buffer in buffers)

    @property
    def received_per_micro_batch(self) -> int:
        return len(self._from_before) + len(self._from_behind)

    def forward(self, stage: int, *, last: bool) -> Callable[[], None]:
        """The backward pass that follows; until then it holds all that is kept. `last`: of a step's micro-batches."""
        model = self._stages[stage]
        model.train()
        set_fsdp_sync(model, zero=self._zero, last=last)
        inputs = dict(self._batch.inputs)
        tokens = inputs.pop("tokens")
        received = self._from_before[stage].detach().requires_grad_() if stage > 0 else None
        outputs = model(tokens if received is None else received, **inputs)
        kept = outputs if self._num_stages > 1 else None  # a pipeline holds on to what its stages return
        if stage < self._num_stages - 1:
            return partial(self._backward, outputs, self._from_behind[stage], received, kept)
        rows = row_losses(outputs, self._batch.targets, self._losses)
        return partial(self._backward, torch.stack([each.sum() for each in rows.values()]).sum(), None, received, kept)

    def _backward(self, root: Tensor, gradient: Tensor | None, *held: Any) -> None:
        torch.autograd.backward(root, gradient)
        self.gradients.accumulate()

    def measure(self, stage: int, meter: MemoryMeter) -> tuple[int, int]:
        """(bytes that a micro-batch keeps, bytes that its passes need on top of that)."""
        start = meter.live_bytes
        meter.restart()
        backward = self.forward(stage, last=False)
        kept = meter.live_bytes - start
        backward()
        return kept, meter.peak_bytes - start - kept


def _batch(recipe: Recipe) -> Batch:
    """A micro-batch of the recipe's shape."""
    rows, length, data = recipe.batch.micro_batch_size, recipe.model.seq_length, recipe.data
    if not FAMILIES[recipe.model.family].encoder:
        packing = Packing(0, data.mask_documents, data.reset_positions, data.eod_loss) if data else None
        return causal_batch(np.zeros((rows, length + 1), dtype=np.int64), packing)
    words = {name: torch.zeros(rows, length, dtype=torch.int64) for name in ("tokens", "token_types", "attention_mask")}
    targets = {LM_LOSS: torch.zeros(rows, length, dtype=torch.int64)}
    if second := second_loss(recipe.model):
        targets[second] = torch.zeros(rows, dtype=torch.int64)
    return Batch(words, targets).labelled_only(labels_per_sample(recipe) or length)


Pass = tuple[Literal["forward", "backward"], int]
"""A pass through one of the stages of a rank, counted from 0."""


def passes_of_rank(
    schedule: PipelineSchedule, *, pp: int, pp_rank: int, chunks: int, micro_batches: int
) -> Iterator[Pass]:
    """All passes of one step: some forward ones first, then in turns. Zero bubble puts off a part of its backward
    passes; what that part needs is not counted here."""
    total = micro_batches * chunks
    round_size = micro_batches // max(1, micro_batches // pp)
    behind = pp - 1 - pp_rank
    ahead = {
        "gpipe": total,
        "1f1b": behind,
        "interleaved": (chunks - 1) * round_size + 2 * behind,
        "zero_bubble": (chunks - 1) * round_size + behind,
    }[schedule]
    ahead = min(ahead, total)
    for i in range(total + ahead):
        if i < total:
            yield "forward", i // round_size % chunks
        if i >= ahead:
            yield "backward", chunks - 1 - (i - ahead) // round_size % chunks


def most_held(passes: Iterator[Pass], kept: Sequence[int], working: Sequence[int]) -> tuple[int, int]:
    """(bytes, forward passes) at the peak: what all held passes keep, and what one backward pass needs on top.
    `kept` and `working` are bytes of each stage of the rank."""
    held = [0] * len(kept)
    peak, most = 0, 0
    for direction, chunk in passes:
        if direction == "forward":
            held[chunk] += 1
            most = max(most, sum(held))
        peak = max(peak, sum(n * size for n, size in zip(held, kept, strict=True)) + working[chunk])
        if direction == "backward":
            held[chunk] -= 1
    return peak, most


def _accelerator_dropout(x: Tensor, p: float, training: bool) -> Tensor:
    """Keeps a byte per element; on a CPU it keeps a factor."""
    return torch.native_dropout(x, p, True)[0] if training and p > 0 else x


class _FusedAttention(torch.autograd.Function):
    """Keeps its arguments, its output and one number per query and head, whatever the kernel: never the scores."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None) -> Tensor:
        out, log_sum = torch.empty_like(q), q.new_empty(q.shape[:3], dtype=torch.float32)
        ctx.save_for_backward(q, k, v, out, log_sum, bias)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        q, k, v, *_ = ctx.saved_tensors
        return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v), None


def _fused_attention(q: Tensor, k: Tensor, v: Tensor, *_: Any, attn_mask: Tensor | None = None, **__: Any) -> Tensor:
    return cast(Tensor, cast(Any, _FusedAttention).apply(q, k, v, attn_mask))


@contextmanager
def fake_accelerator(meter: MemoryMeter) -> Iterator[None]:
    """Tensors are fake and counted, and models keep what the kernels of an accelerator keep."""
    with (
        patch.object(transformer, "choose_kernel", lambda _, **facts: choose_kernel("cuda", **facts)),
        patch.object(attention, "_flex", _fused_attention),
        patch.object(F, "scaled_dot_product_attention", _fused_attention),
        patch.object(F, "dropout", _accelerator_dropout),
        patch.object(torch.UntypedStorage, "resize_", meter.counted_resize),
        FakeTensorMode(allow_non_fake_inputs=True),
        meter,
    ):
        yield


class MemoryMeter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Bytes of all storages that were made while it was on and still live. It knows no allocator: no rounding, no
    fragmentation, no workspaces of libraries."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.live_bytes = 0
        self.peak_bytes = 0
        self.collectives: Counter[tuple[str, str]] = Counter()
        """Calls, by operation and name of the group."""
        self._sizes: dict[int, int] = {}
        """Of each living storage, by its identity."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # it comes back in pieces, and those are what takes memory
        out = func(*args, **(kwargs or {}))
        if func.namespace in ("c10d", "_c10d_functional"):
            self._count_collective(func._opname.replace("_", ""), args)
        for leaf in tree_leaves(out):
            if isinstance(leaf, Tensor) and leaf.device.type != "meta":
                self._count(leaf.untyped_storage())
        return out

    def _count_collective(self, name: str, args: Sequence[Any]) -> None:
        kind = next((kind for kind in _COLLECTIVES if kind.replace("_", "") in name), None)
        if kind is None:
            return
        objects = [each for each in args if isinstance(each, torch.ScriptObject)]
        groups = [
            str(dist.ProcessGroup.unbox(each).group_name) for each in objects if "ProcessGroup" in str(each._type())
        ]
        self.collectives[kind, (groups or [each for each in args if isinstance(each, str)])[-1]] += 1

    @property
    def counted_resize(self) -> Any:
        """Counts also what is resized: that is how FSDP frees weights."""
        resize = torch.UntypedStorage.resize_

        def counted(storage: torch.UntypedStorage, size: int) -> Any:
            result = resize(storage, size)
            if storage._cdata in self._sizes:
                self._change(storage._cdata, storage.nbytes())
            return result

        return counted

    def restart(self) -> None:
        """Look for a new peak from here on."""
        self.peak_bytes = self.live_bytes

    def _count(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        if key not in self._sizes:
            self._sizes[key] = 0
            weakref.finalize(storage, self._forget, key).atexit = False
        self._change(key, storage.nbytes())

    def _change(self, key: int, size: int) -> None:
        self.live_bytes += size - self._sizes[key]
        self._sizes[key] = size
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)

    def _forget(self, key: int) -> None:
        self.live_bytes -= self._sizes.pop(key)
