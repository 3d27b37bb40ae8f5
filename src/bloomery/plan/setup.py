"""What memory and time follow from: a model, its layout and its machine, as numbers. Each field is one number, or an
array with one per candidate, so that thousands of layouts, or published runs, are computed at once."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

Column = NDArray[np.float64]
"""One number per candidate; a lone number stands for all of them."""
RECOMPUTE = ("none", "selective", "full", "mlp")
ATTENTION = ("unfused", "flash1", "flash", "flex")
"""Scores written to memory (until 2022); the first flash attention; what replaced it; and the same for scores that a
family changes (ALiBi)."""


@dataclass(frozen=True)
class Setup:
    layers: Column
    hidden: Column
    heads: Column
    kv_heads: Column
    head_dim: Column
    ffn: Column
    gated: Column
    """1 for an MLP of three matrices."""
    vocab: Column
    tied: Column
    seq: Column
    tp: Column
    pp: Column
    chunks: Column
    """Stages per pipeline rank."""
    dp: Column
    cp: Column
    zero: Column
    shard: Column
    """Ranks that share what ZeRO shards."""
    micro_batch: Column
    global_batch: Column
    recompute: Column
    """Index in RECOMPUTE."""
    per_operator: Column
    """1 where `selective` makes the results of most operators again, 0 where only those of the attention core."""
    attention: Column
    """Index in ATTENTION."""
    sequence_parallel: Column
    """1 where tensor-parallel ranks share norms and dropout too."""
    compiled: Column
    """1 where elementwise kernels are fused by a compiler."""
    whole_bytes: Column
    """Of weights and gradients per parameter, before data-parallel ranks share them."""
    late_gradients: Column
    """1 where gradients come only as activations go."""
    shared_bytes: Column
    """Of states per parameter that the ranks of `shard` share."""
    peak_flops: Column
    """Of one device at this precision, FLOP/s without sparsity."""
    bf16_flops: Column
    """The same at 16 bit: attention and small kernels never use 8."""
    cores: Column
    """Processors of one device that share the tiles of a matrix product."""
    memory_bytes: Column
    memory_bytes_per_s: Column
    link_bytes_per_s: Column
    """Between devices of a node, one direction."""
    nic_bytes_per_s: Column
    """Out of a node, one direction, all of its cards together."""
    node: Column
    """Devices per node."""

    @classmethod
    def of(cls, **numbers: Any) -> Setup:
        return cls(**{field.name: np.asarray(numbers[field.name], dtype=np.float64) for field in fields(cls)})

    @property
    def is_fp8(self) -> Column:
        return np.where(self.peak_flops > self.bf16_flops, 1.0, 0.0)

    @property
    def devices(self) -> Column:
        return self.tp * self.pp * self.dp * self.cp

    @property
    def tokens(self) -> Column:
        """Of one micro-batch on one rank."""
        return self.micro_batch * self.seq / self.cp

    @property
    def micro_batches(self) -> Column:
        return np.maximum(1.0, np.floor(self.global_batch / (self.dp * self.micro_batch)))

    @property
    def layers_of_stage(self) -> Column:
        """Of the rank that has most; the ends count as a layer each where there are that many layers to spare."""
        stages = self.pp * self.chunks
        return np.ceil(self.layers / stages) * self.chunks

    @property
    def heads_width(self) -> Column:
        return self.heads * self.head_dim

    @property
    def kv_width(self) -> Column:
        return self.kv_heads * self.head_dim

    @property
    def layer_parameters(self) -> Column:
        return 2 * self.hidden * (self.heads_width + self.kv_width) + (2 + self.gated) * self.hidden * self.ffn

    @property
    def fullest_parameters(self) -> Column:
        """Of the fullest rank, before data-parallel ranks share them."""
        ends = self.vocab * self.hidden
        one_rank = np.where(self.pp > 1, 1, 2 - self.tied)
        return (self.layers_of_stage * (self.layer_parameters + 13 * self.hidden) + one_rank * ends) / self.tp
