"""How many parameters a model has, exactly, by group. The owner of that number; a test holds it to the built model."""

from __future__ import annotations

from dataclasses import dataclass

from bloomery.config.recipe import ModelSection
from bloomery.sizing.shapes import model_shapes

_EMBEDDING_TABLES = ("token_embedding", "position_embedding", "token_type_embedding")


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


def count_parameters(model: ModelSection, *, vocab_size: int) -> ParameterCount:
    """Count with `vocab_size` embedding rows: padded for what is built and saved, unpadded to compare with papers."""
    groups: dict[str, int] = {}
    for weight in model_shapes(model, vocab_size=vocab_size, num_layers=model.num_layers):
        groups[weight.group] = groups.get(weight.group, 0) + weight.count * weight.elements
    return ParameterCount(groups)


def matmul_parameters_per_layer(model: ModelSection) -> int:
    """Weights of one block that multiply every token: projections of attention and MLP, no biases, no norms."""
    block = model_shapes(model, vocab_size=model.vocab_size, num_layers=1, embedding=False, head=False)
    return sum(weight.elements for weight in block if len(weight.shape) == 2)
