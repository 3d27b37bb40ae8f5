"""The weights of a model from the facts of its family: name, shape and purpose, and how many there are. The owner of
those; tests hold them to the built model."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import groupby
from math import prod

from bloomery.config.recipe import MaskingSection, ModelSection, Recipe
from bloomery.families.family import SECOND_LOSSES
from bloomery.families.registry import FAMILIES

HEAD = "head.weight"
"""In a tied model it is the token embedding. On a pipeline rank without the embedding it is a copy."""
_ORDER_CLASSES = 2
_EMBEDDING_TABLES = ("token_embedding", "position_embedding", "token_type_embedding")


def padded_vocab_size(model: ModelSection) -> int:
    """Rows of the embedding: vocab_size rounded up to vocab_multiple. A function of the recipe, never of the layout."""
    return -(-model.vocab_size // model.vocab_multiple) * model.vocab_multiple


def softmax_size(model: ModelSection) -> int:
    """Rows of the head that take part in the softmax: the entries of the tokenizer, unless the recipe wants all."""
    return padded_vocab_size(model) if model.softmax_over_padding else model.vocab_size


def labels_per_sample(recipe: Recipe) -> int | None:
    """How many tokens of a sample an encoder predicts at most; None for a decoder, which predicts all. Fixed, so that
    what is compiled and what travels in a pipeline has one shape; only a word longer than that loses labels."""
    if not FAMILIES[recipe.model.family].encoder:
        return None
    masking = (recipe.data and recipe.data.masking) or MaskingSection()
    return max(1, round(masking.probability * (recipe.model.seq_length - special_tokens(recipe.model))))


def second_loss(model: ModelSection) -> str | None:
    """The name of the loss of an encoder's second head; None without one."""
    return SECOND_LOSSES.get(model.second_head) if FAMILIES[model.family].encoder else None


def special_tokens(model: ModelSection) -> int:
    """[CLS] and a [SEP] after each segment of every sample of an encoder, never predicted."""
    return 3 if second_loss(model) else 2


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


def parameter_shapes(model: ModelSection) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Name and shape of every parameter, with the padded vocabulary; a tied head is the embedding. One by one: a
    foreign recipe may have many layers."""
    weights = model_shapes(model, vocab_size=padded_vocab_size(model), num_layers=1)
    for in_block, found in groupby(weights, lambda weight: weight.name.startswith("layers.")):
        group = list(found)
        for layer in range(model.num_layers if in_block else 1):
            yield from ((weight.name.replace("layers.0.", f"layers.{layer}.", 1), weight.shape) for weight in group)


def _own(model: ModelSection) -> list[WeightShape]:
    """Of a model of the user's own, with the first of its blocks, which are all alike."""
    build = FAMILIES[model.family].build
    named = build(model).named_parameters() if build else ()
    others = tuple(f"layers.{n}." for n in range(1, model.num_layers))
    return [
        WeightShape(name.split(".")[0], name, tuple(each.shape)) for name, each in named if not name.startswith(others)
    ]


def _embedding(model: ModelSection, vocab_size: int) -> list[WeightShape]:
    h, family = model.hidden_size, FAMILIES[model.family]
    if family.build:
        return [weight for weight in _own(model) if weight.group == "embed"]
    weights = [WeightShape("token_embedding", "embed.tokens.weight", (vocab_size, h))]
    if family.positions == "learned":
        weights.append(WeightShape("position_embedding", "embed.positions.weight", (model.seq_length, h)))
    if family.token_types:
        weights.append(WeightShape("token_type_embedding", "embed.token_types.weight", (family.token_types, h)))
    if family.embedding_norm:
        weights += _norm(model, "embedding_norm", "embed.norm")
    return weights


def _block(model: ModelSection) -> list[WeightShape]:
    h, wide, family = model.hidden_size, model.ffn_hidden_size, FAMILIES[model.family]
    queries, kv = model.head_size * model.num_heads, model.head_size * model.num_kv_heads
    if family.build:
        return [weight for weight in _own(model) if weight.group == "layers"]
    head_norms = ("q_norm", "k_norm") if family.qk_norm else ()
    up = ("gate", "up") if family.gated else ("up",)
    return [
        *_linear("attention", "layers.0.attention.qkv", (queries + 2 * kv, h), bias=family.qkv_bias),
        *(WeightShape("norms", f"layers.0.attention.{name}.weight", (model.head_size,)) for name in head_norms),
        *_linear("attention", "layers.0.attention.out", (h, queries), bias=family.bias),
        *(weight for name in up for weight in _linear("mlp", f"layers.0.mlp.{name}", (wide, h), bias=family.bias)),
        *_linear("mlp", "layers.0.mlp.down", (h, wide), bias=family.bias),
        *_norm(model, "norms", "layers.0.attention_norm"),
        *_norm(model, "norms", "layers.0.mlp_norm"),
    ]


def _end(model: ModelSection, vocab_size: int) -> list[WeightShape]:
    """The last norm and the heads."""
    h = model.hidden_size
    if FAMILIES[model.family].build:
        return [weight for weight in _own(model) if weight.group not in ("embed", "layers")]
    if not FAMILIES[model.family].encoder:
        return [*_norm(model, "final_norm", "final_norm"), WeightShape("head", HEAD, (vocab_size, h))]
    is_paired = second_loss(model) is not None
    return [
        *(_linear("pooler", "pooler.dense", (h, h)) if is_paired else ()),
        *_linear("mlm_head", "head.dense", (h, h)),
        *_norm(model, "mlm_head", "head.norm"),
        WeightShape("mlm_head", HEAD, (vocab_size, h)),
        WeightShape("mlm_head", "head.bias", (vocab_size,)),
        *(_linear("order_head", "order_head", (_ORDER_CLASSES, h)) if is_paired else ()),
    ]


def _linear(group: str, name: str, shape: tuple[int, int], *, bias: bool = True) -> list[WeightShape]:
    weights = [WeightShape(group, f"{name}.weight", shape)]
    return [*weights, WeightShape(group, f"{name}.bias", shape[:1])] if bias else weights


def _norm(model: ModelSection, group: str, name: str) -> list[WeightShape]:
    parts = ("weight",) if FAMILIES[model.family].norm == "rms" else ("weight", "bias")
    return [WeightShape(group, f"{name}.{part}", (model.hidden_size,)) for part in parts]


@dataclass(frozen=True)
class ParameterCount:
    """Distinct parameters: a tied head is counted once, as the token embedding."""

    groups: dict[str, int]
    """Parameters by purpose; groups that this model does not have are absent."""

    @property
    def total(self) -> int:
        return sum(self.groups.values())

    @property
    def without_embeddings(self) -> int:
        """Without the token, position and token-type tables; an untied output head still counts."""
        return self.total - sum(self.groups.get(name, 0) for name in _EMBEDDING_TABLES)


def count_parameters(model: ModelSection, *, padded: bool = False) -> ParameterCount:
    """`padded`: with all rows of the embedding, as is built and saved; else with the model's own, as papers count."""
    groups: dict[str, int] = {}
    vocab_size = padded_vocab_size(model) if padded else model.vocab_size
    for weight in model_shapes(model, vocab_size=vocab_size, num_layers=model.num_layers):
        groups[weight.group] = groups.get(weight.group, 0) + weight.count * weight.elements
    return ParameterCount(groups)


def matmul_parameters_per_layer(model: ModelSection) -> int:
    """Weights of one block that multiply every token: projections of attention and MLP, no biases, no norms."""
    return sum(weight.elements for weight in _block(model) if len(weight.shape) == 2)
