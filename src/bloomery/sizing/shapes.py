"""The weights of every family: purpose, name and shape. The owner of those; a test holds them to the built model."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import prod

from bloomery.config.recipe import ModelSection

HEAD = "head.weight"
"""In a tied model it is the token embedding. On a pipeline rank without the embedding it is a copy."""
_BERT_TOKEN_TYPES = 2
_BERT_ORDER_CLASSES = 2


@dataclass(frozen=True)
class WeightShape:
    group: str
    """What it is for."""
    name: str
    """As in the built model; a weight of a block is called as in the first."""
    shape: tuple[int, ...]
    count: int = 1
    """Blocks that have one."""

    @property
    def elements(self) -> int:
        return prod(self.shape)


def model_shapes(
    model: ModelSection, *, vocab_size: int, num_layers: int, embedding: bool = True, head: bool = True
) -> list[WeightShape]:
    """What one pipeline rank has of a model: so many blocks, and perhaps the ends. A tied head is there only if the
    embedding is not."""
    weights = _embedding(model, vocab_size) if embedding else []
    weights += [replace(weight, count=num_layers) for weight in _block(model)]
    if head:
        is_there_already = embedding and model.tie_embeddings
        weights += [weight for weight in _end(model, vocab_size) if not (is_there_already and weight.name == HEAD)]
    return weights


def _embedding(model: ModelSection, vocab_size: int) -> list[WeightShape]:
    h, family = model.hidden_size, model.family
    weights = [WeightShape("token_embedding", "embed.tokens.weight", (vocab_size, h))]
    if family in ("gpt2", "bert"):
        weights.append(WeightShape("position_embedding", "embed.positions.weight", (model.seq_length, h)))
    if family == "bert":
        weights.append(WeightShape("token_type_embedding", "embed.token_types.weight", (_BERT_TOKEN_TYPES, h)))
    if family in ("bloom", "bert"):
        weights += _norm(model, "embedding_norm", "embed.norm")
    return weights


def _block(model: ModelSection) -> list[WeightShape]:
    h, wide = model.hidden_size, model.ffn_hidden_size
    kv = h // model.num_heads * model.num_kv_heads
    up = ("gate", "up") if model.family == "llama" else ("up",)
    return [
        *_linear(model, "attention", "layers.0.attention.qkv", (h + 2 * kv, h)),
        *_linear(model, "attention", "layers.0.attention.out", (h, h)),
        *(weight for name in up for weight in _linear(model, "mlp", f"layers.0.mlp.{name}", (wide, h))),
        *_linear(model, "mlp", "layers.0.mlp.down", (h, wide)),
        *_norm(model, "norms", "layers.0.attention_norm"),
        *_norm(model, "norms", "layers.0.mlp_norm"),
    ]


def _end(model: ModelSection, vocab_size: int) -> list[WeightShape]:
    """The last norm and the heads."""
    h = model.hidden_size
    if model.family != "bert":
        return [*_norm(model, "final_norm", "final_norm"), WeightShape("head", HEAD, (vocab_size, h))]
    return [
        *_linear(model, "pooler", "pooler.dense", (h, h)),
        *_linear(model, "mlm_head", "head.dense", (h, h)),
        *_norm(model, "mlm_head", "head.norm"),
        WeightShape("mlm_head", HEAD, (vocab_size, h)),
        WeightShape("mlm_head", "head.bias", (vocab_size,)),
        *_linear(model, "order_head", "order_head", (_BERT_ORDER_CLASSES, h)),
    ]


def _linear(model: ModelSection, group: str, name: str, shape: tuple[int, int]) -> list[WeightShape]:
    bias = [] if model.family == "llama" else [WeightShape(group, f"{name}.bias", shape[:1])]
    return [WeightShape(group, f"{name}.weight", shape), *bias]


def _norm(model: ModelSection, group: str, name: str) -> list[WeightShape]:
    parts = ("weight",) if model.family == "llama" else ("weight", "bias")
    return [WeightShape(group, f"{name}.{part}", (model.hidden_size,)) for part in parts]
