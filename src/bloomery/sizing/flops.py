"""FLOPs per token under named definitions, and the peak FLOP/s of known devices. One run differs by a quarter between
definitions, so name the definition beside any TFLOP/s."""

import re
from enum import StrEnum
from functools import cache
from pathlib import Path

from bloomery.config.recipe import ModelSection, Recompute
from bloomery.config.yaml_nodes import parse_yaml
from bloomery.families.registry import FAMILIES
from bloomery.sizing.parameters import count_parameters, matmul_parameters_per_layer, padded_vocab_size


class FlopCount(StrEnum):
    """A way to count the FLOPs of training on one token. W: matmul weights with the output head, N: all parameters."""

    MODEL_FULL = "model_full"
    """6W + 12Lhs: full attention, head once, no recomputation (NeMo, llm-foundry)."""
    MODEL_CAUSAL = "model_causal"
    """6W + 6Lhs: only the causal half of attention (Megatron-Core today)."""
    HARDWARE_FULL_RECOMPUTE = "hardware_full_recompute"
    """8(W-Vh) + 6Vh + 16Lhs: blocks recomputed (Megatron eq. 3)."""
    HARDWARE_SELECTIVE = "hardware_selective"
    """6W + 16Lhs: only the attention core recomputed (2205.05198 HFU)."""
    SIX_N_12LHS = "six_n_12lhs"
    """6N + 12Lhs: N counts every parameter, embeddings included (torchtitan)."""
    SIX_N = "six_n"
    """6N: the rule of thumb, attention scores not counted."""


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
    parameters = count_parameters(model, padded=True).total
    return {
        FlopCount.MODEL_FULL: 6 * (blocks + head) + 12 * scores,
        FlopCount.MODEL_CAUSAL: 6 * (blocks + head) + (12 if FAMILIES[model.family].encoder else 6) * scores,
        FlopCount.HARDWARE_FULL_RECOMPUTE: 8 * blocks + 16 * scores + 6 * head,
        FlopCount.HARDWARE_SELECTIVE: 6 * (blocks + head) + 16 * scores,
        FlopCount.SIX_N_12LHS: 6 * parameters + 12 * scores,
        FlopCount.SIX_N: 6 * parameters,
    }[definition]


MEGATRON_FLOPS = "megatron"
"""Name of `megatron_flops_per_token`."""


def hardware_count(recompute: Recompute) -> FlopCount:
    """What the device really computes. What lies between the matrices of an MLP counts nowhere."""
    if recompute == "full":
        return FlopCount.HARDWARE_FULL_RECOMPUTE
    return FlopCount.HARDWARE_SELECTIVE if recompute == "selective" else FlopCount.MODEL_FULL


def megatron_flops_per_token(model: ModelSection, recompute: Recompute) -> float:
    """As Megatron-DeepSpeed's log line counts them, whatever the model's attention heads and MLP really are:
    24 f Lh^2 (1 + s/6h + V/16Lh), where f is 4 if blocks are recomputed, otherwise 3, and 24 is 32 for a gated MLP."""
    h, layers, vocab_size = model.hidden_size, model.num_layers, padded_vocab_size(model)
    factor = (32 if FAMILIES[model.family].gated else 24) * (4 if recompute == "full" else 3)
    return factor * layers * h * h * (1 + model.seq_length / (6 * h) + vocab_size / (16 * layers * h))


@cache
def _peaks() -> dict[str, dict[str, float]]:
    file = Path(__file__).with_name("peaks.yaml")
    peaks: dict[str, dict[str, float]] = parse_yaml(file.read_text(), lambda line: f"{file}:{line}")[0]
    return peaks


def peak_flops(device_name: str, precision: str) -> float | None:
    """FLOP/s without sparsity of one device at a recipe's precision, or None where we do not know: never a guess."""
    known = (peaks for name, peaks in _peaks().items() if re.fullmatch(name, device_name.strip(), re.IGNORECASE))
    peak = next(known, {}).get(precision)
    return peak and peak * 1e12
