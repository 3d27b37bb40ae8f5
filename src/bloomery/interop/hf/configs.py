"""config.json both ways, from the tables of a family: what transformers calls our fields, and what it must not say."""

from collections.abc import Callable, Mapping
from typing import Any

from pydantic import ValidationError

from bloomery.base.errors import DataError, Problem
from bloomery.config.recipe import ModelSection
from bloomery.families.registry import FAMILIES, family_defaults
from bloomery.sizing.parameters import second_loss

_ENDINGS = ("LMHeadModel", "ForCausalLM", "ForPreTraining", "ForMaskedLM", "Model")
_NONE: dict[str, tuple[tuple[Any, ...], str]] = {
    "quantization_config": (({},), "weights must be fp32, bf16 or fp16: import the unquantized model"),
    "auto_map": (({},), "the model has code of its own, which may compute something else"),
}


def hf_config(config: ModelSection) -> dict[str, Any]:
    """What goes into config.json. The token ids (bos, eos, pad) are null: only the tokenizer knows them, so the
    exporter fills them in, with the dtype."""
    hf = FAMILIES[config.family].hf
    values = {**config.model_dump(), "head_dim": config.head_size}
    is_whole = not hf.without_second_head or second_loss(config)
    architecture = hf.architecture if is_whole else hf.without_second_head
    written: dict[str, Any] = {"architectures": [architecture], "model_type": config.family}
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
    hf, problems = family.hf, list[Problem]()

    def refuse(what: str, rule: str, remedy: str = "") -> None:
        problems.append(Problem(what, rule, remedy, place))

    class_prefix = next(hf.architecture.removesuffix(end) for end in _ENDINGS if hf.architecture.endswith(end))
    known = [f"{class_prefix}{ending}" for ending in _ENDINGS]
    architectures = content.get("architectures")
    if architectures and not (isinstance(architectures, list) and set(map(str, architectures)) & set(known)):
        refuse(f"architectures is {architectures!r:.80}", f"a {kind} model here is one of {', '.join(known)}")
    for name, (allowed, rule) in {**_NONE, **hf.only}.items():
        if (value := content.get(name)) is not None and value not in allowed:
            refuse(f"{name} is {value!r:.80}", rule)
    section, read = {"family": family.name, **hf.defaults}, dict[str, str]()
    if hf.without_second_head and architectures == [hf.without_second_head]:
        section["second_head"] = "none"
    for ours, theirs in hf.fields.items():
        names = (theirs,) if isinstance(theirs, str) else theirs
        read[ours] = next((name for name in names if content.get(name) is not None), names[0])
        if content.get(read[ours]) is not None:
            section[ours] = content[read[ours]]
        elif ours not in hf.defaults:
            refuse(f"{names[0]} is missing", "the size of the model follows from it")
        given = {name: hf.defaults.get(ours) if content.get(name) is None else content[name] for name in names}
        if ours == "dropout" and any(value != section[ours] for value in given.values()):
            listed = ", ".join(f"{name} {value!r:.80}" for name, value in given.items())
            refuse(f"dropouts differ: {listed}", "a recipe has one for all", "make them equal in config.json")
    if "rope_theta" in section:
        section["rope_theta"] = _rope_theta(content, section["rope_theta"], refuse)
    section = {ours: value for ours, value in section.items() if value is not None}
    section |= family_defaults(section)
    try:
        made = ModelSection.model_validate(section)
    except ValidationError as error:
        for item in error.errors(include_url=False):
            name = read.get(str(item["loc"][0]), "")
            if item["type"] != "missing":
                refuse(f"{name} is {item['input']!r:.80}", item["msg"].replace("Input should be", "it must be"))
    if problems:
        raise DataError(problems)
    if made.head_dim == made.hidden_size // made.num_heads:
        del section["head_dim"]
    return section


def _rope_theta(content: Mapping[str, Any], theta: Any, refuse: Callable[[str, str], None]) -> Any:
    """Of either of the sections that may hold it; what else these and the layers say of positions is refused."""
    for name in ("rope_scaling", "rope_parameters"):
        rope = content.get(name) or {}
        if not isinstance(rope, dict):
            refuse(f"{name} is {rope!r:.80}", "it must be an object")
            continue
        kind, factor = rope.get("rope_type", rope.get("type", "default")), rope.get("partial_rotary_factor", 1)
        if kind != "default":
            refuse(f"{name} is of the type {kind!r:.80}", "positions are not scaled here")
        if factor != 1:
            refuse(f"partial_rotary_factor is {factor!r:.80}", "positions turn the whole head here")
        theta = rope.get("rope_theta", theta)
    layers = content.get("layer_types") or []
    others = {str(each) for each in (layers if isinstance(layers, list) else [layers])} - {"full_attention"}
    if others:
        refuse(f"layer_types has {min(others)!r:.80}", "attention looks at the whole sequence here")
    return theta
