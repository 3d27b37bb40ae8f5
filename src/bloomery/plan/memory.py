"""Bytes that a rank needs on its device, by part."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from bloomery.plan.constants import Constants
from bloomery.plan.setup import Column, Setup

_GIB = 2.0**30


@dataclass(frozen=True)
class Memory:
    """Bytes of the fullest rank."""

    weights: Column
    gradients: Column
    optimizer: Column
    activations: Column
    logits: Column
    buffers: Column
    context: Column

    @property
    def expected(self) -> Column:
        states = self.weights + self.gradients + self.optimizer
        return states + self.activations + self.logits + self.buffers + self.context

    def seen(self, torch_name: str) -> Column:
        """As `bloomery train` measures it: torch does not count the context; of a CPU it is the process's."""
        return self.expected - (0.0 if torch_name == "cpu" else self.context)


def activation_bytes_per_layer(s: Setup, kind: Column, footprint: Constants) -> Column:
    """Kept for the backward pass, per micro-batch. Korthikanti et al. 2022 (table 2); gated: the same count without
    dropout."""
    tokens, h, tp = s.tokens, s.hidden, s.tp
    outer_ways = np.where(s.sequence_parallel > 0, tp, 1)
    plain = 10 * h / outer_ways + 24 * h / tp * (s.ffn / (4 * h) * 2 / 3 + 1 / 3)
    gated = 10 * h / outer_ways + (4 * s.heads_width + 4 * s.kv_width + footprint.gated_bytes * s.ffn) / tp
    scores = np.where((s.attention == 0) & (kind == 0), 5 * s.heads * s.seq / tp, 0.0)
    # 8-bit products keep their inputs in 8 bits, and what attention's own backward pass needs besides.
    bytes_less = s.is_fp8 * (s.ffn + h) / tp
    again = np.where(kind == 3, footprint.mlp_bytes * s.ffn / tp / (1 + s.is_fp8), 0.0)
    whole = footprint.kept * (np.where(s.gated > 0, gated, plain) + scores) - bytes_less - again
    return tokens * np.where(kind == 2, 2 * h / outer_ways, whole)


def memory(s: Setup, footprint: Constants) -> Memory:
    """Of the fullest rank: of the first stage, which keeps most micro-batches, or of the last, which has the logits."""
    first, last = stage_memory(s, footprint, is_last=False), stage_memory(s, footprint, is_last=True)
    is_first = first.expected >= last.expected
    return Memory(
        *(np.where(is_first, one, other) for one, other in zip(vars(first).values(), vars(last).values(), strict=True))
    )


def stage_memory(s: Setup, footprint: Constants, *, is_last: bool) -> Memory:
    parameters, sharded, slack = s.fullest_parameters, s.zero == 3, footprint.slack
    layer = activation_bytes_per_layer(s, s.recompute, footprint)
    inner = s.tokens * footprint.mlp_bytes * s.ffn / s.tp / (1 + s.is_fp8)
    layer = layer * np.where((s.recompute == 1) & (s.per_operator > 0), footprint.partial, 1.0)
    none = np.zeros_like(s.recompute)
    whole = footprint.workspace * activation_bytes_per_layer(s, none, footprint)
    workspace = np.where(s.recompute == 2, whole, np.where(s.recompute == 3, inner, 0.0))
    # Of the first stage under 1F1B; interleaving keeps more, in chunks.
    of_first = s.pp * np.where(s.chunks > 1, 1 + (s.pp - 1) / (s.pp * s.chunks), 1.0)
    in_flight = np.minimum(s.micro_batches, 1 + (s.pp - 1) / s.pp if is_last else of_first)
    has_logits = np.where(s.pp > 1, float(is_last), 1.0)
    live = np.where(sharded, 4 * (2 * s.layer_parameters + s.vocab * s.hidden) / s.tp, 0.0)
    bucket = np.where(
        (s.zero > 0) & ~sharded & (s.attention == 0), 4 * np.minimum(parameters, footprint.bucket_parameters), 0.0
    )
    casts = s.is_fp8 * s.layers_of_stage * s.layer_parameters / s.tp
    groups = (s.tp > 1) * 1.0 + (s.pp > 1) + (s.dp * s.cp > 1)
    activations = slack * (s.layers_of_stage * layer * in_flight + workspace)
    per_token = footprint.logit_bytes * s.vocab + footprint.end_bytes * s.hidden
    logits = slack * has_logits * per_token * s.tokens / s.tp
    gradients = parameters * (s.whole_bytes - np.where(sharded, 0.0, 2.0))
    return Memory(
        weights=parameters * np.where(sharded, 0.0, 2.0),
        gradients=np.where(s.late_gradients > 0, np.maximum(0.0, gradients - activations - logits), gradients),
        optimizer=parameters * s.shared_bytes / s.shard,
        activations=activations,
        logits=logits,
        buffers=slack * live + bucket + casts + groups * footprint.group_gib * _GIB,
        context=footprint.context_gib * _GIB + 0 * parameters,
    )
