"""What tells model families apart, as data. `model`, `sizing`, `config` and `interop/hf` build everything from it.

Sizes are numbers of the recipe. A new family is one file here, a row in `registry.py`, and, where it brings a kind of
layer that no family had, that layer in `model/`.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

LM_LOSS = "lm loss"
"""The loss that perplexity, the console and the report's headline refer to. Batches carry labels by the names of
losses, models return losses by them, every log shows them."""
SOP_LOSS = "sop loss"
"""Sentence order prediction, of bert."""
NSP_LOSS = "nsp loss"
"""Next sentence prediction, of bert."""
SECOND_LOSSES = {"sentence_order": SOP_LOSS, "next_sentence": NSP_LOSS}
"""Of an encoder, by `model.second_head`."""
IGNORED_LABEL = -100
"""A label without a loss; torch's default."""


@dataclass(frozen=True)
class HuggingFace:
    """The same model in transformers, both ways: nothing is computed, values are renamed, cut, joined and
    transposed."""

    architecture: str
    """Of an encoder, with its second head."""
    prefix: str
    """Of all names but those of the heads; a bare model (without heads) is saved without it."""
    tensors: Mapping[str, str | tuple[str, ...]]
    """Our modules or parameters -> theirs, without `.weight` and `.bias` where both sides have them. N stands for the
    number of a layer. Three names for `attention.qkv` are query, key and value; two for a parameter are copies of
    which the last one is read."""
    fields: Mapping[str, str | tuple[str, ...]]
    """Fields of the recipe's `model` -> of config.json. Of several names the first is written and the first that is
    there is read; of `dropout` all are written, and must be equal. Without `ffn_hidden_size` it is 4 * hidden_size."""
    defaults: Mapping[str, Any] = field(default_factory=dict)
    """What it means there if a field is missing, by our name; a field without an entry here must be present."""
    only: Mapping[str, tuple[tuple[Any, ...], str]] = field(default_factory=dict)
    """Fields of config.json that select another computation: the values that are ours, and the rule."""
    constants: Mapping[str, Any] = field(default_factory=dict)
    """What else is written into config.json."""
    conv1d: bool = False
    """Linear weights of blocks are stored input by output, and `attention.qkv` as blocks of queries, keys and values;
    otherwise a fused `attention.qkv` has our layout."""
    without_second_head: str = ""
    """The architecture of an encoder that has none."""
    missing_remedy: str = ""
    """What to do where tensors are missing."""


NO_HF = HuggingFace(architecture="", prefix="", tensors={}, fields={})
"""Of a model that transformers does not have."""


@dataclass(frozen=True)
class Family:
    name: str
    defaults: Mapping[str, Any]
    """Of the recipe's `model`: dropout, norm_eps, tie_embeddings, and others that are not those of the schema."""
    hf: HuggingFace = NO_HF
    build: Callable[[Any], Any] | None = None
    """Of a model of the user's own (docs/python.md): the recipe's `model` -> the module, on the meta device."""
    losses: Callable[[Any, Mapping[str, Any]], dict[str, Any]] | None = None
    """Of such a model: (what it returns, targets) -> each target's loss summed over each sample, (B,)."""
    dataset: Callable[[Any, str], Any] | None = None
    """Of such a model, instead of shards: (the recipe's `model`, `path` of a source) -> items (inputs, targets)."""
    reads: tuple[str, ...] = ()
    """Fields of `model` that only some families read."""
    encoder: bool = False
    """Bidirectional with post-norm blocks, trained on masked tokens and sentence order; otherwise causal, pre-norm."""
    positions: Literal["learned", "alibi", "rotary"] = "learned"
    norm: Literal["layer", "rms"] = "layer"
    bias: bool = True
    """Whether linear layers and norms have biases. (An RMS norm has none.)"""
    qkv_bias: bool = True
    """Whether the projection to queries, keys and values has one."""
    qk_norm: bool = False
    """RMS norm of every query and key, over the width of a head, before the positions."""
    activation: Literal["gelu_tanh", "gelu", "silu"] = "gelu_tanh"
    gated: bool = False
    """The MLP computes activation(gate) * up instead of activation(up)."""
    embedding_norm: bool = False
    token_types: int = 0
    """Rows of the token-type embedding; 0: none."""
    scaled_residual_init: bool = True
    """Whether output projections start smaller by 1/sqrt(2 * num_layers)."""

    def ffn_width(self, hidden_size: int) -> int:
        """The default: a gated MLP has three matrices, so it is narrower."""
        return -(-8 * hidden_size // 3 // 256) * 256 if self.gated else 4 * hidden_size
