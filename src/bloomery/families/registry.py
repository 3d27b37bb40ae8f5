"""All families by name, and the defaults that depend on the family."""

from importlib.metadata import entry_points
from typing import Any

from bloomery.families.bert import BERT
from bloomery.families.bloom import BLOOM
from bloomery.families.family import Family
from bloomery.families.gpt2 import GPT2
from bloomery.families.llama import LLAMA
from bloomery.families.qwen import QWEN2, QWEN3

FAMILIES: dict[str, Family] = {family.name: family for family in (GPT2, BLOOM, LLAMA, QWEN2, QWEN3, BERT)}
for _entry in entry_points(group="bloomery.families"):  # of packages that are installed beside this one
    FAMILIES.setdefault(_entry.name, _entry.load())
READERS: dict[str, list[str]] = {
    name: [key for key, family in FAMILIES.items() if name in family.reads]
    for name in dict.fromkeys(name for family in FAMILIES.values() for name in family.reads)
}
"""Model fields that only some families read -> those families."""


def family_defaults(model: dict[str, Any]) -> dict[str, Any]:
    """Values for the `model` fields that the user left out; of a faulty recipe, values that do no further harm."""
    name = model.get("family")
    family = FAMILIES.get(name if isinstance(name, str) else "", GPT2)
    hidden_size, num_heads = _size(model.get("hidden_size")), _size(model.get("num_heads"))
    sizes = {"ffn_hidden_size": family.ffn_width(hidden_size), "num_kv_heads": num_heads}
    return {field: value for field, value in {**family.defaults, **sizes}.items() if field not in model}


def _size(value: Any) -> int:
    return value if isinstance(value, int) and value > 0 else 1
