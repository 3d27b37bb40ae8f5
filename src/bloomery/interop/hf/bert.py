"""BertForPreTraining: separate projections, and norms named after the part whose output they follow."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from bloomery.base.errors import DataError, Problem
from bloomery.config.recipe import ModelSection
from bloomery.interop.hf.layout import Entry, linear, same, separate_qkv, vocabulary
from bloomery.model.families import ARCHITECTURES

PREFIX = "bert."
EMBEDDING, HEAD = f"{PREFIX}embeddings.word_embeddings.weight", "cls.predictions.decoder.weight"
_BIASES = ("cls.predictions.bias", "cls.predictions.decoder.bias")
TWINS = dict.fromkeys(_BIASES, _BIASES)
"""The head's bias under two names: transformers computes with the second, and takes the first where that is missing."""


def entries(config: ModelSection) -> list[Entry]:
    embeddings, predictions = f"{PREFIX}embeddings", "cls.predictions"
    found = [
        vocabulary("embed.tokens.weight", EMBEDDING, config),
        same("embed.positions.weight", f"{embeddings}.position_embeddings.weight"),
        same("embed.token_types.weight", f"{embeddings}.token_type_embeddings.weight"),
        *linear("embed.norm", f"{embeddings}.LayerNorm"),
        *linear("head.dense", f"{predictions}.transform.dense"),
        *linear("head.norm", f"{predictions}.transform.LayerNorm"),
        *linear("pooler.dense", f"{PREFIX}pooler.dense"),
        *linear("order_head", "cls.seq_relationship"),
    ]
    if config.tie_embeddings:
        found.append(vocabulary("head.bias", _BIASES[0], config))
    else:  # then the biases are not tied either
        found += [vocabulary("head.weight", HEAD, config), vocabulary("head.bias", _BIASES, config)]
    for n in range(config.num_layers):
        ours, theirs = f"layers.{n}", f"{PREFIX}encoder.layer.{n}"
        projections = [f"{theirs}.attention.self.{name}" for name in ("query", "key", "value")]
        found += [
            *(separate_qkv(f"{ours}.attention.qkv", projections, part, config) for part in ("weight", "bias")),
            *linear(f"{ours}.attention.out", f"{theirs}.attention.output.dense"),
            *linear(f"{ours}.attention_norm", f"{theirs}.attention.output.LayerNorm"),
            *linear(f"{ours}.mlp.up", f"{theirs}.intermediate.dense"),
            *linear(f"{ours}.mlp.down", f"{theirs}.output.dense"),
            *linear(f"{ours}.mlp_norm", f"{theirs}.output.LayerNorm"),
        ]
    return found


def require_heads(names: Iterable[str]) -> None:
    """DataError for a BERT of another architecture, such as BertForMaskedLM, which is not all that is trained here."""
    parts = {
        "masked-word head (cls.predictions.transform)": "cls.predictions.transform.dense.weight",
        "pooler (bert.pooler)": "pooler.dense.weight",
        "next-sentence head (cls.seq_relationship)": "cls.seq_relationship.weight",
    }
    found = list(names)
    missing = [part for part, name in parts.items() if not any(each.endswith(name) for each in found)]
    if missing and any(each.endswith("embeddings.word_embeddings.weight") for each in found):
        what = f"this BERT has no {' and no '.join(missing)}"
        rule = "a bert here is a BertForPreTraining; BertForMaskedLM and others lack parts of it"
        remedy = (
            "import a BertForPreTraining, or make one, whose missing parts are then new: "
            "transformers' BertForPreTraining.from_pretrained(DIR).save_pretrained(NEW)"
        )
        raise DataError(Problem(what, rule, remedy))


def hf_config(config: ModelSection) -> dict[str, Any]:
    return {
        "architectures": ["BertForPreTraining"],
        "model_type": "bert",
        "hidden_act": "gelu",  # the exact form
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "intermediate_size": config.ffn_hidden_size,
        "max_position_embeddings": config.seq_length,
        "type_vocab_size": ARCHITECTURES["bert"].token_types,
        "hidden_dropout_prob": config.dropout,
        "attention_probs_dropout_prob": config.dropout,
        "layer_norm_eps": config.norm_eps,
        "initializer_range": config.init_std,
        "tie_word_embeddings": config.tie_embeddings,
        "pad_token_id": None,
    }
