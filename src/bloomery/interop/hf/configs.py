"""config.json both ways, from the tables of a family: what transformers calls our fields, and what it must not say."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from bloomery.base.errors import DataError, Problem
from bloomery.config.recipe import MOST_LAYERS, ModelSection
from bloomery.families.registry import FAMILIES

_ENDINGS = ("LMHeadModel", "ForCausalLM", "ForPreTraining", "ForMaskedLM", "Model")
_NUMBERS = ("dropout", "norm_eps", "init_std", "rope_theta")
_WHOLE_HEAD = "positions turn the whole head here"
_NONE: dict[str, tuple[tuple[Any, ...], str]] = {
    "quantization_config": (({},), "weights must be fp32, bf16 or fp16: import the unquantized model"),
    "auto_map": (({},), "the model has code of its own, which may compute something else"),
}


def hf_config(config: ModelSection) -> dict[str, Any]:
    """What goes into config.json. The token ids (bos, eos, pad) are null: only the tokenizer knows them, so the
    exporter fills them in, with the dtype."""
    hf = FAMILIES[config.family].hf
    values = {**config.model_dump(), "head_dim": config.head_size}
    written: dict[str, Any] = {"architectures": [hf.architecture], "model_type": config.family}
    for ours, theirs in hf.fields.items():
        names = (theirs,) if isinstance(theirs, str) else theirs
        written |= dict.fromkeys(names if ours == "dropout" else names[:1], values[ours])
    if "rope_theta" in hf.fields:  # transformers 5 reads it here, transformers 4 as a field
        written["rope_parameters"] = {"rope_type": "default", "rope_theta": config.rope_theta}
    return {**written, **hf.constants}


def model_section(content: Mapping[str, Any], place: str) -> dict[str, Any]:
    """A config.json as the `model` of a recipe. DataError with everything that no family here computes, at once."""
    kind = content.get("model_type")
    family = FAMILIES.get(str(kind))
    if family is None:
        rule = f"there are maps for {', '.join(FAMILIES)}"
        raise DataError(Problem(f"model_type is {kind!r}", rule, "import one of these", place))
    reader, hf = _Reader(content, place), family.hf
    class_prefix = next(hf.architecture.removesuffix(end) for end in _ENDINGS if hf.architecture.endswith(end))
    known = [f"{class_prefix}{ending}" for ending in _ENDINGS]
    architectures = content.get("architectures")
    if architectures and not (isinstance(architectures, list) and set(map(str, architectures)) & set(known)):
        reader.problem(f"architectures is {architectures!r:.80}", f"a {kind} model here is one of {', '.join(known)}")
    for name, (allowed, rule) in {**_NONE, **hf.only}.items():
        reader.require(name, allowed, rule)
    section: dict[str, Any] = {"family": family.name}
    section |= {ours: reader.value(ours, theirs, hf.defaults) for ours, theirs in hf.fields.items()}
    if "rope_theta" in section:
        section["rope_theta"] = reader.rope_theta(section["rope_theta"])
    hidden, heads = section["hidden_size"], section["num_heads"]
    derived = {"ffn_hidden_size": 4 * hidden, "num_kv_heads": heads}
    section |= {ours: value for ours, value in derived.items() if section.get(ours) is None}
    if section.get("head_dim") in (None, hidden // heads):
        section.pop("head_dim", None)
    if section["num_layers"] > MOST_LAYERS:
        reader.problem(f"num_layers is {section['num_layers']}", f"it must be at most {MOST_LAYERS}")
    if reader.problems:
        raise DataError(reader.problems)
    return section


class _Reader:
    """Values out of a config.json, and everything that is wrong with them."""

    def __init__(self, content: Mapping[str, Any], place: str) -> None:
        self.content = content
        self.problems: list[Problem] = []
        self._place = place

    def problem(self, what: str, rule: str, remedy: str = "") -> None:
        self.problems.append(Problem(what, rule, remedy, self._place))

    def require(self, name: str, allowed: tuple[Any, ...], rule: str) -> None:
        """A field that may be missing, but says nothing else."""
        value = self.content.get(name)
        if value is not None and value not in allowed:
            self.problem(f"{name} is {value!r:.80}", rule)

    def value(self, ours: str, theirs: str | tuple[str, ...], defaults: Mapping[str, Any]) -> Any:
        names = (theirs,) if isinstance(theirs, str) else theirs
        found = {name: self._checked(ours, name) for name in names if self.content.get(name) is not None}
        if not found:
            if ours not in defaults:
                self.problem(f"{names[0]} is missing", "the size of the model follows from it")
            return defaults.get(ours, 1)
        if ours == "dropout":
            found = {name: found.get(name, defaults[ours]) for name in names}
            if len(set(found.values())) > 1:
                listed = ", ".join(f"{name} {value:g}" for name, value in found.items())
                remedy = "make them equal in config.json"
                self.problem(f"dropouts differ: {listed}", "a recipe has one for all", remedy)
        return next(iter(found.values()))

    def _checked(self, ours: str, name: str) -> Any:
        """The value, or 1 in the place of one that cannot be."""
        value = self.content[name]
        if ours == "tie_embeddings":
            good, rule = isinstance(value, bool), "it must be true or false"
        elif ours in _NUMBERS:
            good = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
            rule = "it must be a number"
        else:
            good, rule = type(value) is int and value > 0, "it must be a positive integer"
        if not good:
            self.problem(f"{name} is {value!r}", rule)
            return 1
        return float(value) if ours in _NUMBERS else value

    def rope_theta(self, theta: float) -> float:
        """Of either of the sections that may hold it; what else these and the layers say of positions is refused."""
        for name in ("rope_scaling", "rope_parameters"):
            rope = self.content.get(name) or {}
            if not isinstance(rope, dict):
                self.problem(f"{name} is {rope!r}", "it must be an object")
                continue
            inner = _Reader(rope, self._place)
            kind = rope.get("rope_type", rope.get("type", "default"))
            if kind != "default":
                inner.problem(f"{name} is of the type {kind!r}", "positions are not scaled here")
            inner.require("partial_rotary_factor", (1,), _WHOLE_HEAD)
            theta = inner.value("rope_theta", "rope_theta", {"rope_theta": theta})
            self.problems += inner.problems
        layers = self.content.get("layer_types") or []
        if other := sorted(
            {str(each) for each in (layers if isinstance(layers, list) else [layers])} - {"full_attention"}
        ):
            self.problem(f"layer_types has {other[0]!r:.80}", "attention looks at the whole sequence here")
        return theta
