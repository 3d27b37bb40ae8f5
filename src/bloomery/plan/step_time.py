"""Seconds of a training step, from the work of one layer up: what is computed, what is moved, and what waits. How far
hardware falls short of its data sheet are constants (constants.json); docs/plan.md says how well they hold."""

from __future__ import annotations

from dataclasses import dataclass, fields

import numpy as np

from bloomery.plan.constants import Constants
from bloomery.plan.setup import Column, Setup

_HALF = 2
"""Bytes of what is computed with."""
_TILE = 256 * 128


@dataclass(frozen=True)
class StepTime:
    """Seconds of one step; they add up to `total`."""

    compute: Column
    bubble: Column
    communication: Column
    """Not hidden behind computation."""
    optimizer: Column
    data: Column
    """Between micro-batches and steps: data, logging, the schedule."""

    @property
    def total(self) -> Column:
        return self.compute + self.bubble + self.communication + self.optimizer + self.data


PARTS = tuple(field.name for field in fields(StepTime))


def step_time(setup: Setup, pace: Constants) -> StepTime:
    layer, layer_traffic = _layer(setup, pace)
    head = _head(setup, pace)
    stages = setup.pp * setup.chunks
    most, uneven = setup.layers_of_stage, setup.layers % stages > 0
    slowest = np.maximum(most * layer, (most - uneven * (setup.pp > 1)) * layer + head)
    mean = (setup.layers * layer + head) / setup.pp
    traffic = most * layer_traffic + _between_stages(setup, pace)
    micro_batches = setup.micro_batches
    weights, gradients = _data_parallel(setup, pace, slowest)
    compute = micro_batches * mean
    fill = (setup.pp - 1) / setup.chunks
    bubble = micro_batches * pace.uneven * (slowest - mean) + fill * (mean + traffic)
    nodes = np.maximum(1.0, setup.devices / setup.node)
    slower = 1 + pace.growth * np.log2(nodes)
    states = setup.fullest_parameters * (setup.whole_bytes + setup.shared_bytes / setup.shard)
    optimizer = pace.optimizer_passes * states / (setup.memory_bytes_per_s * pace.memory)
    sums = (micro_batches - 1) * pace.sum_bytes * setup.fullest_parameters
    optimizer = optimizer + sums / (setup.memory_bytes_per_s * pace.memory)
    data = micro_batches * pace.micro_batch_s + pace.step_s
    communication = micro_batches * (traffic + weights) + gradients
    parts = (compute * slower, bubble * slower, communication * slower, optimizer, data + 0 * compute)
    return StepTime(*(part / pace.speed for part in parts))


def gemm_seconds(setup: Setup, pace: Constants, m: Column, n: Column, k: Column) -> Column:
    """Of a product (m, k) x (k, n), both ways of training in their mean: each dimension is the inner one once."""
    share = pace.gemm * np.where(setup.is_fp8 > 0, pace.fp8, 1.0)
    ideal = 2 * m * n * k * (1 / (setup.peak_flops * share) + 1 / pace.gemm_limit)
    least = pace.small_dimension * setup.peak_flops / setup.memory_bytes_per_s
    small = (1 + least / m) * (1 + least / n) * (1 + least / k)
    misaligned = (n % 64 > 0) | (k % 64 > 0)
    moved = _HALF * (m * n + m * k + n * k) / (setup.memory_bytes_per_s * pace.memory)
    rounds = m * n / (_TILE * setup.cores)
    uneven = 1 + pace.waves * (np.ceil(rounds) / rounds - 1)
    return np.maximum(ideal * small * uneven * np.where(misaligned, 1 / pace.misaligned, 1.0), moved)


def _layer(setup: Setup, pace: Constants) -> tuple[Column, Column]:
    """(computation, exposed traffic) of a layer on a micro-batch: forward, backward, and forward again."""
    s, tokens, h, tp = setup, setup.tokens, setup.hidden, setup.tp
    products = (
        gemm_seconds(s, pace, tokens, (s.heads_width + 2 * s.kv_width) / tp, h)
        + gemm_seconds(s, pace, tokens, h, s.heads_width / tp)
        + gemm_seconds(s, pace, tokens, (1 + s.gated) * s.ffn / tp, h)
        + gemm_seconds(s, pace, tokens, h, s.ffn / tp)
    )
    attention, backward_of_attention = attention_seconds(s, pace)
    outer = pace.norm_passes * h / np.where(s.sequence_parallel > 0, tp, 1)
    inner = pace.inner_passes * (s.heads_width + s.kv_width + (1 + s.gated) * s.ffn) / tp
    fused = np.where(s.compiled > 0, pace.fused, 1.0)
    moved = _HALF * tokens * fused / (s.memory_bytes_per_s * pace.memory)
    elementwise, again_mlp = moved * (outer + inner), moved * pace.inner_passes * s.ffn / tp * (s.recompute == 3)
    again_all, again_core = s.recompute == 2, s.recompute == 1
    launch = np.where(s.compiled > 0, pace.launch_fused_s, pace.launch_s)
    narrow, wide = (
        2 * h + (s.heads_width + s.ffn) / tp,
        h * 2 + (s.heads_width + 2 * s.kv_width + (1 + s.gated) * s.ffn) / tp,
    )
    casts = s.is_fp8 * pace.cast_bytes / (s.memory_bytes_per_s * pace.memory)
    forward = _longer(products + attention + elementwise + casts * (tokens * narrow + s.layer_parameters / tp), launch)
    backward = _longer(
        2 * products + backward_of_attention + 2 * elementwise + again_mlp + casts * tokens * wide, 1.5 * launch
    )
    again = np.where(again_all, pace.again * forward, np.where(again_core, attention, 0.0))
    return forward + backward + again, _layer_traffic(s, pace, again_all)


def _longer(one: Column, other: Column) -> Column:
    """Of two that overlap; a little more where they are close."""
    return (one**4 + other**4) ** 0.25


def attention_seconds(s: Setup, pace: Constants) -> tuple[Column, Column]:
    """Seconds forward and backward of scores, softmax and values."""
    products = 4 * s.tokens * s.seq * s.heads_width / s.tp
    rate = 1 / (1 / (s.bf16_flops * pace.flash) + 1 / pace.flash_limit)
    slower = np.where(s.attention == 1, pace.flash_first, np.where(s.attention == 3, pace.flex, 1.0))
    flash = products / 2 / slower / rate
    scores = s.micro_batch * s.heads / s.tp * s.seq * s.seq / s.cp
    narrow = np.where(s.head_dim % 8 > 0, 1 / pace.bmm_misaligned, 1.0)
    bmm = products / (s.bf16_flops * pace.bmm) * narrow
    moved = _HALF * scores * pace.score_passes / (s.memory_bytes_per_s * pace.memory)
    unfused = s.attention == 0
    return np.where(unfused, bmm + moved, flash), np.where(unfused, 2 * bmm + 2 * moved, 2.5 * flash)


def _layer_traffic(s: Setup, pace: Constants, again: Column) -> Column:
    stream = _HALF * s.tokens * s.hidden
    rounds = 4 + 2 * again
    bandwidth = np.where(s.tp <= s.node, s.link_bytes_per_s * pace.link, _group_bandwidth(s, pace, s.node))
    tensor = rounds * 2 * (s.tp - 1) / s.tp * stream / bandwidth + rounds * (s.tp > 1) * 2 * pace.hop_s * s.tp
    near = np.where(s.tp * s.cp <= s.node, s.link_bytes_per_s * pace.link, _group_bandwidth(s, pace, s.node / s.tp))
    keys = _HALF * s.tokens * 2 * s.kv_width / s.tp
    context = 3 * keys * (s.cp - 1) / near
    overlaps = s.attention >= 2
    return np.where(overlaps, pace.tp_exposed, 1.0) * tensor + context * pace.tp_exposed


def _group_bandwidth(s: Setup, pace: Constants, per_node: Column) -> Column:
    """Bytes/s of a ring through all nodes, of a group that has so many ranks on each: groups share the cards."""
    share = np.clip(per_node, 1, s.node) / s.node
    return np.minimum(s.link_bytes_per_s * pace.link, s.nic_bytes_per_s * share * pace.nic)


def _head(s: Setup, pace: Constants) -> Column:
    product = gemm_seconds(s, pace, s.tokens, s.vocab / s.tp, s.hidden)
    passes = 4 * pace.loss_passes * s.tokens * s.vocab / s.tp / (s.memory_bytes_per_s * pace.memory)
    return 3 * product + passes


def _between_stages(s: Setup, pace: Constants) -> Column:
    """Exposed seconds per micro-batch: its residual stream to the next stage and its gradient back."""
    size = _HALF * s.tokens * s.hidden / np.where(s.sequence_parallel > 0, s.tp, 1)
    inside = s.devices <= s.node
    bandwidth = np.where(inside, s.link_bytes_per_s * pace.link, s.nic_bytes_per_s / s.node * pace.nic)
    return np.where(s.pp > 1, 2 * s.chunks * size / bandwidth * pace.p2p_exposed, 0.0)


def _data_parallel(s: Setup, pace: Constants, compute: Column) -> tuple[Column, Column]:
    """Exposed seconds: of gathering sharded weights and reducing their gradients per micro-batch (ZeRO 3), and of
    reducing gradients and gathering updated weights once per step."""
    ranks = s.dp * s.cp
    per_node = np.minimum(np.maximum(1.0, s.node / s.tp), ranks)
    spans = s.tp * ranks > s.node
    ring = np.where(spans, _group_bandwidth(s, pace, per_node), s.link_bytes_per_s * pace.link)
    share = (ranks - 1) / ranks
    parameters = s.fullest_parameters
    sharded = s.zero == 3
    hops = s.layers_of_stage * ranks * pace.hop_s
    gathered = 3 * share * _HALF * parameters / ring + 3 * hops
    hidden = np.minimum(gathered, compute)
    weights = np.where(sharded & (ranks > 1), gathered - hidden + pace.contention * hidden, 0.0)
    gradient_bytes = np.where(s.whole_bytes > 4, 4, _HALF)
    reduced = share * (gradient_bytes + _HALF) * parameters / ring + hops
    overlap = np.where(s.attention == 0, 0.0, np.minimum(reduced, compute / 2)) * (1 - pace.dp_exposed)
    once = np.where(sharded | (ranks == 1), 0.0, reduced - overlap + pace.rank_s * ranks)
    tied = np.where(
        (s.pp > 1) & (s.tied > 0), gradient_bytes * s.vocab * s.hidden / s.tp / (s.nic_bytes_per_s / s.node), 0.0
    )
    return weights, once + tied
