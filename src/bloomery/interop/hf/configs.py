"""A Hugging Face config.json as the model section of a recipe, or everything in it that no family here computes."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from bloomery.base.errors import DataError, Problem
from bloomery.config.recipe import MOST_LAYERS

_TANH_GELU = ("gelu_new", "gelu_pytorch_tanh", "gelu_fast")


@dataclass
class Config:
    """Values taken out of a config.json, and what was wrong with them."""

    content: Mapping[str, Any]
    place: str
    problems: list[Problem] = field(default_factory=list)

    def size(self, *names: str, default: int | None = None) -> int:
        """The first of these fields that is there."""
        for name in names:
            value = self.content.get(name)
            if value is not None:
                if type(value) is int and value > 0:
                    return value
                self.problem(f"{name} is {value!r}", "it must be a whole number above 0")
                return 1
        if default is None:
            self.problem(f"{names[0]} is missing", "the size of the model follows from it")
        return default or 1

    def number(self, name: str, default: float) -> float:
        value = self.content.get(name)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            self.problem(f"{name} is {value!r}", "it must be a number")
            return default
        return float(value)

    def flag(self, name: str, default: bool) -> bool:
        value = self.content.get(name)
        if value is None or isinstance(value, bool):
            return default if value is None else value
        self.problem(f"{name} is {value!r}", "it must be true or false")
        return default

    def part(self, name: str) -> Config:
        """A section of the file; empty if it is not there. Shares the list of problems."""
        value = self.content.get(name)
        if value is not None and not isinstance(value, dict):
            self.problem(f"{name} is {value!r}", "it must be an object")
            value = None
        return Config(value or {}, self.place, self.problems)

    def only(self, name: str, *allowed: Any, rule: str) -> None:
        """A field that may be missing, but says nothing else."""
        value = self.content.get(name)
        if value is not None and value not in allowed:
            self.problem(f"{name} is {value!r}", rule)

    def dropout(self, *names: str, default: float) -> float:
        values = {name: self.number(name, default) for name in names}
        if len(set(values.values())) > 1:
            told = ", ".join(f"{name} {value:g}" for name, value in values.items())
            self.problem(f"dropouts differ: {told}", "a recipe has one for all", "make them equal in config.json")
        return next(iter(values.values()))

    def problem(self, what: str, rule: str, remedy: str = "") -> None:
        self.problems.append(Problem(what, rule, remedy, self.place))


_CLASSES = {"gpt2": "GPT2", "bloom": "Bloom", "llama": "Llama", "bert": "Bert"}
_ENDINGS = ("LMHeadModel", "ForCausalLM", "ForPreTraining", "ForMaskedLM", "Model")


def model_section(content: Mapping[str, Any], place: str) -> dict[str, Any]:
    """Fields of a recipe's `model`. DataError with everything that is not supported, at once."""
    config = Config(content, place)
    kind = content.get("model_type")
    read = _READERS.get(str(kind))
    if read is None:
        rule = f"there are maps for {', '.join(_READERS)}"
        raise DataError(Problem(f"model_type is {kind!r}", rule, "import one of these, or add a map", place))
    if content.get("quantization_config"):
        config.problem(
            "quantization_config is set", "weights must be fp32, bf16 or fp16", "import the unquantized model"
        )
    if content.get("auto_map"):
        config.problem("auto_map is set", "the model has code of its own, which may compute something else")
    known = [f"{_CLASSES[str(kind)]}{ending}" for ending in _ENDINGS]
    architectures = content.get("architectures")
    if architectures and not (isinstance(architectures, list) and set(map(str, architectures)) & set(known)):
        config.problem(f"architectures is {architectures!r:.80}", f"a {kind} model here is one of {', '.join(known)}")
    section = {"family": str(kind), **read(config)}
    if section["num_layers"] > MOST_LAYERS:
        config.problem(f"num_layers is {section['num_layers']}", f"it must be at most {MOST_LAYERS}")
    if config.problems:
        raise DataError(config.problems)
    return section


def _gpt2(c: Config) -> dict[str, Any]:
    hidden = c.size("n_embd", "hidden_size")
    c.only("activation_function", *_TANH_GELU, rule="gpt2 has the tanh form of GELU here (gelu_new)")
    c.only("scale_attn_weights", True, rule="scores are always divided by the root of the head size")
    c.only("scale_attn_by_inverse_layer_idx", False, rule="scores are not divided by the number of the layer")
    c.only("add_cross_attention", False, rule="there is no encoder to look at")
    return {
        "num_layers": c.size("n_layer"),
        "hidden_size": hidden,
        "num_heads": c.size("n_head"),
        "ffn_hidden_size": c.size("n_inner", default=4 * hidden),
        "seq_length": c.size("n_positions", "n_ctx"),
        "vocab_size": c.size("vocab_size"),
        "dropout": c.dropout("resid_pdrop", "embd_pdrop", "attn_pdrop", default=0.1),
        "norm_eps": c.number("layer_norm_epsilon", 1e-5),
        "init_std": c.number("initializer_range", 0.02),
        "tie_embeddings": c.flag("tie_word_embeddings", True),
    }


def _bloom(c: Config) -> dict[str, Any]:
    rule = "the residual is taken before the norm"
    c.only("apply_residual_connection_post_layernorm", False, rule=rule)
    if c.flag("slow_but_exact", False) and (slices := c.size("pretraining_tp", default=1)) > 1:
        rule = "it sums the rows of a matrix in that many slices, which rounds otherwise; sums are not sliced here"
        remedy = "set slow_but_exact to false in config.json, if another rounding is acceptable"
        c.problem(f"slow_but_exact is true and pretraining_tp is {slices}", rule, remedy)
    hidden = c.size("hidden_size", "n_embed")
    return {
        "num_layers": c.size("n_layer", "num_hidden_layers"),
        "hidden_size": hidden,
        "num_heads": c.size("n_head", "num_attention_heads"),
        "ffn_hidden_size": 4 * hidden,
        "seq_length": c.size("seq_length", default=2048),
        "vocab_size": c.size("vocab_size"),
        "dropout": c.dropout("hidden_dropout", "attention_dropout", default=0.0),
        "norm_eps": c.number("layer_norm_epsilon", 1e-5),
        "init_std": c.number("initializer_range", 0.02),
        "tie_embeddings": c.flag("tie_word_embeddings", True),
    }


def _llama(c: Config) -> dict[str, Any]:
    hidden, heads = c.size("hidden_size"), c.size("num_attention_heads")
    c.only("hidden_act", "silu", rule="llama has a gated SiLU here")
    for name in ("attention_bias", "mlp_bias"):
        c.only(name, False, rule="its linear layers have no biases here")
    c.only("sliding_window", rule="attention looks at the whole sequence here")
    c.only("attention_dropout", 0, rule="a recipe's dropout is that of residuals and embeddings too")
    c.only(
        "head_dim", hidden // heads, rule=f"a head is hidden_size / num_attention_heads = {hidden // heads} wide here"
    )
    theta = c.number("rope_theta", 10000.0)
    for name in ("rope_scaling", "rope_parameters"):
        rope = c.part(name)
        kind = rope.content.get("rope_type", rope.content.get("type", "default"))
        if kind != "default":
            c.problem(f"{name} is of the type {kind!r}", "positions are not scaled here", "import a model without it")
        rope.only("partial_rotary_factor", 1, rule="positions turn the whole head here")
        theta = rope.number("rope_theta", theta)
    c.only("partial_rotary_factor", 1, rule="positions turn the whole head here")
    return {
        "num_layers": c.size("num_hidden_layers"),
        "hidden_size": hidden,
        "num_heads": heads,
        "num_kv_heads": c.size("num_key_value_heads", default=heads),
        "ffn_hidden_size": c.size("intermediate_size"),
        "seq_length": c.size("max_position_embeddings"),
        "vocab_size": c.size("vocab_size"),
        "dropout": 0.0,
        "norm_eps": c.number("rms_norm_eps", 1e-6),
        "init_std": c.number("initializer_range", 0.02),
        "rope_theta": theta,
        "tie_embeddings": c.flag("tie_word_embeddings", False),
    }


def _bert(c: Config) -> dict[str, Any]:
    c.only("hidden_act", "gelu", rule="bert has the exact GELU here")
    c.only("position_embedding_type", "absolute", rule="bert has learned positions here")
    c.only("type_vocab_size", 2, rule="bert has two token types here")
    c.only("is_decoder", False, rule="bert is an encoder here")
    return {
        "num_layers": c.size("num_hidden_layers"),
        "hidden_size": c.size("hidden_size"),
        "num_heads": c.size("num_attention_heads"),
        "ffn_hidden_size": c.size("intermediate_size"),
        "seq_length": c.size("max_position_embeddings"),
        "vocab_size": c.size("vocab_size"),
        "dropout": c.dropout("hidden_dropout_prob", "attention_probs_dropout_prob", default=0.1),
        "norm_eps": c.number("layer_norm_eps", 1e-12),
        "init_std": c.number("initializer_range", 0.02),
        "tie_embeddings": c.flag("tie_word_embeddings", True),
    }


_READERS: dict[str, Callable[[Config], dict[str, Any]]] = {
    "gpt2": _gpt2,
    "bloom": _bloom,
    "llama": _llama,
    "bert": _bert,
}
