"""What torch counts while a model runs is what our formulas say, in whole and of each module."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest

from bloomery.config.recipe import ModelSection
from bloomery.families.registry import FAMILIES, family_defaults
from bloomery.model.flops import module_costs
from bloomery.sizing.flops import FlopCount, flops_per_token
from bloomery.sizing.parameters import count_parameters, matmul_parameters_per_layer
from conftest import Workshop


def model(family: str, **changes: object) -> ModelSection:
    fields = {
        "family": family,
        "num_layers": 3,
        "hidden_size": 256,
        "num_heads": 4,
        "seq_length": 128,
        "vocab_size": 8000,
    }
    fields |= changes
    return ModelSection.model_validate(fields | family_defaults(fields))


@pytest.mark.parametrize("family", FAMILIES)
def test_counted_flops_are_those_of_the_formula_in_every_family(family: str) -> None:
    config = model(family)
    whole, *parts = module_costs(config, micro_batch_size=2)
    tokens = 2 * config.seq_length
    expected = flops_per_token(config, FlopCount.MODEL_FULL) * tokens
    # The dense layers beside bert's heads are in no published formula: 1.3% of a model this small, 0.3% of bert-large.
    within = 0.02 if FAMILIES[family].encoder else 1e-9
    assert whole.forward_flops + whole.backward_flops == pytest.approx(expected, rel=within)
    assert whole.parameters == count_parameters(config, padded=True).total
    by_name = {each.name: each for each in parts}
    block = by_name["layers.1"]
    scores = 4 * tokens * config.seq_length * config.num_heads * config.head_size
    assert block.forward_flops == 2 * tokens * matmul_parameters_per_layer(config) + scores
    assert by_name["layers"].forward_flops == 3 * block.forward_flops
    assert (block.depth, block.macs, block.seconds) == (2, block.forward_flops // 2, None)


def test_bert_large_is_within_a_third_of_a_percent() -> None:
    config = model("bert", num_layers=24, hidden_size=1024, num_heads=16, seq_length=512, vocab_size=30522)
    whole = module_costs(config, micro_batch_size=1)[0]
    expected = flops_per_token(config, FlopCount.MODEL_FULL) * 512
    assert whole.forward_flops + whole.backward_flops == pytest.approx(expected, rel=0.0033)


def test_the_table_has_shares_and_times_of_what_was_really_computed(
    workshop: Workshop, command: Callable[..., tuple[int, str, str]]
) -> None:
    words = ("inspect", "flops", str(workshop.recipe), "--device", "cpu")
    code, out, _ = command(*words, "--json")
    assert code == 0
    facts = json.loads(out)
    rows = {each["name"]: each for each in facts["modules"]}
    assert rows["layers.0"]["seconds"] > rows["layers.0.attention"]["seconds"] > 0
    assert rows[""]["seconds"] > rows["layers.0"]["seconds"] + rows["layers.1"]["seconds"]
    assert rows["layers.0.attention.core"]["macs"] > 0
    assert rows[""]["macs"] * 2 == rows[""]["forward_flops"]
    code, _, _ = command(*words, "--depth", "1", "--output", "flops.txt")
    text = (workshop.folder / "flops.txt").read_text()
    assert "100.0%" in text
    assert "TFLOP/s" in text
    assert "layers.0" not in text
