"""How many parameters a model has, exactly, by group. The owner of that number; a test holds it to the built model."""

from __future__ import annotations

from dataclasses import dataclass

from bloomery.config.recipe import ModelSection

_EMBEDDING_TABLES = ("token_embedding", "position_embedding", "token_type_embedding")
_BERT_TOKEN_TYPES = 2
_BERT_ORDER_CLASSES = 2


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
    h, layers = model.hidden_size, model.num_layers
    head = 0 if model.tie_embeddings else vocab_size * h
    groups = {
        "token_embedding": vocab_size * h,
        "position_embedding": model.seq_length * h if model.family in ("gpt2", "bert") else 0,
        "token_type_embedding": _BERT_TOKEN_TYPES * h if model.family == "bert" else 0,
        "embedding_norm": _norm(model) if model.family in ("bloom", "bert") else 0,
        "attention": layers * _attention(model),
        "mlp": layers * _mlp(model),
        "norms": layers * 2 * _norm(model),
        "final_norm": 0 if model.family == "bert" else _norm(model),
        "head": 0 if model.family == "bert" else head,
    }
    if model.family == "bert":
        groups["pooler"] = h * h + h
        groups["mlm_head"] = h * h + h + _norm(model) + vocab_size + head
        groups["order_head"] = _BERT_ORDER_CLASSES * (h + 1)
    return ParameterCount(groups={name: count for name, count in groups.items() if count})


def matmul_parameters_per_layer(model: ModelSection) -> int:
    """Weights of one block that multiply every token: projections of attention and MLP, no biases, no norms."""
    return _attention_weights(model) + _mlp_weights(model)


def _attention(model: ModelSection) -> int:
    biases = 0 if model.family == "llama" else 2 * model.hidden_size + 2 * _kv_width(model)
    return _attention_weights(model) + biases


def _attention_weights(model: ModelSection) -> int:
    """Query and output projections are square; keys and values are narrower with grouped heads."""
    return 2 * model.hidden_size**2 + 2 * model.hidden_size * _kv_width(model)


def _kv_width(model: ModelSection) -> int:
    return model.hidden_size // model.num_heads * model.num_kv_heads


def _mlp(model: ModelSection) -> int:
    biases = 0 if model.family == "llama" else model.ffn_hidden_size + model.hidden_size
    return _mlp_weights(model) + biases


def _mlp_weights(model: ModelSection) -> int:
    matrices = 3 if model.family == "llama" else 2
    return matrices * model.hidden_size * model.ffn_hidden_size


def _norm(model: ModelSection) -> int:
    return model.hidden_size if model.family == "llama" else 2 * model.hidden_size
