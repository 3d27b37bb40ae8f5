"""FLOPs per token under named definitions. The same run differs by a quarter between them, so a number without its
definition means nothing: print `definition.description` beside any TFLOP/s.
"""

from __future__ import annotations

from enum import Enum

from bloomery.config.recipe import ModelSection
from bloomery.families.registry import FAMILIES
from bloomery.sizing.parameters import count_parameters, matmul_parameters_per_layer, padded_vocab_size


class FlopCount(Enum):
    """A way to count the FLOPs of training on one token. W: matmul weights with the output head, N: all parameters."""

    MODEL_FULL = "model_full"
    MODEL_CAUSAL = "model_causal"
    HARDWARE_FULL_RECOMPUTE = "hardware_full_recompute"
    HARDWARE_SELECTIVE = "hardware_selective"
    SIX_N_12LHS = "six_n_12lhs"
    SIX_N = "six_n"

    @property
    def description(self) -> str:
        """One line for people."""
        return _DESCRIPTIONS[self]


_DESCRIPTIONS = {
    FlopCount.MODEL_FULL: "model FLOPs, 6W + 12Lhs: full attention, head once, no recomputation (NeMo, llm-foundry)",
    FlopCount.MODEL_CAUSAL: "model FLOPs, 6W + 6Lhs: only the causal half of attention (Megatron-Core today)",
    FlopCount.HARDWARE_FULL_RECOMPUTE: "hardware FLOPs, 8(W-Vh) + 6Vh + 16Lhs: blocks recomputed (Megatron eq. 3)",
    FlopCount.HARDWARE_SELECTIVE: "hardware FLOPs, 6W + 16Lhs: only the attention core recomputed (2205.05198 HFU)",
    FlopCount.SIX_N_12LHS: "model FLOPs, 6N + 12Lhs: N counts every parameter, embeddings included (torchtitan)",
    FlopCount.SIX_N: "rule of thumb, 6N: N counts every parameter, attention scores not counted",
}


def flops_per_token(model: ModelSection, definition: FlopCount) -> int:
    """FLOPs of forward and backward on one token of a full sequence, with the padded vocabulary.

    An encoder attends in both directions, so for it MODEL_CAUSAL counts all of attention. Its pooler and the dense
    layer of its MLM head are left out of W, as every published formula does. `h` of the scores is the width of all
    heads together.
    """
    vocab_size = padded_vocab_size(model)
    blocks = model.num_layers * matmul_parameters_per_layer(model)
    head = vocab_size * model.hidden_size
    scores = model.num_layers * model.num_heads * model.head_size * model.seq_length
    match definition:
        case FlopCount.MODEL_FULL:
            return 6 * (blocks + head) + 12 * scores
        case FlopCount.MODEL_CAUSAL:
            return 6 * (blocks + head) + (12 if FAMILIES[model.family].encoder else 6) * scores
        case FlopCount.HARDWARE_FULL_RECOMPUTE:
            return 8 * blocks + 16 * scores + 6 * head
        case FlopCount.HARDWARE_SELECTIVE:
            return 6 * (blocks + head) + 16 * scores
        case FlopCount.SIX_N_12LHS:
            return 6 * count_parameters(model, vocab_size=vocab_size).total + 12 * scores
        case FlopCount.SIX_N:
            return 6 * count_parameters(model, vocab_size=vocab_size).total


def tflops_per_device(
    model: ModelSection, definition: FlopCount, *, tokens_per_second: float, num_devices: int
) -> float:
    """Achieved TFLOP/s of one device; `tokens_per_second` is that of all devices together."""
    return flops_per_token(model, definition) * tokens_per_second / num_devices / 1e12
