"""Recipes as they are written: YAML, bases, overrides; and what a user is told when one is wrong."""

# ruff: noqa: E501  (tables of cases, one a line)

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from bloomery.base.errors import RecipeError, on_one_line
from bloomery.base.units import Amount, Duration
from bloomery.config import yaml_nodes
from bloomery.config.load import (
    as_dict,
    as_yaml,
    explain,
    fingerprint,
    load_recipe,
    shipped_recipes,
)
from bloomery.config.recipe import Recipe
from bloomery.config.schema import all_paths, field_at
from bloomery.config.yaml_nodes import dump_yaml, parse_yaml
from bloomery.sizing.check import load_checked_recipe

DESIGN = """\
name: tr1-13b
seed: 42
model:
  family: gpt2                    # gpt2 | bloom | llama | bert
  num_layers: 40
  hidden_size: 5120
  num_heads: 32                   # num_kv_heads, ffn_hidden_size, ... default per family
  seq_length: 2048
  vocab_size: 50257               # padded once, to a size that no layout changes (never a function of TP)
  dropout: 0.1
tokenizer: {path: tokenizers/gpt2}
data:
  order: timeless                 # timeless | megatron | bigscience (the latter two bit-identical to megatron-core's and
                                  # Megatron-DeepSpeed's sample order, to continue existing runs)
  train:
    - {path: shards/oscar-en, weight: 1.0}
  validation:                     # named groups, each evaluated and logged on its own
    oscar: [{path: shards/oscar-en-valid, weight: 1.0}]
  # or one list and a split:  split: "949,50,1"
  cache_dir: cache/               # the data folder itself may be read-only
batch:
  micro_batch_size: 1
  global_batch_size: 1024
  rampup: {start: 16, increment: 16, samples: 5_000_000}
optimizer: {name: adamw, betas: [0.9, 0.999], eps: 1e-8, weight_decay: 0.1, clip_grad_norm: 1.0}
lr: {peak: 1e-4, min: 1e-5, schedule: cosine, warmup: 216_320 samples, decay: 126_953_125 samples}
train:
  for: 300_000_000 samples        # or steps, or tokens
  exit_after: 19h50m              # wall clock of this job; also: "500 steps" of this job
  evaluate: {every: 1000 steps, steps: 5}
precision: bf16                   # fp32 | bf16 | fp16 | fp8
parallel: {tp: 2, pp: 4, cp: 1, zero: 1, recompute: full}     # dp is what remains of the world
checkpoint:
  phases:                         # tr1's three rounds, in one run
    - {until: 100 steps, every: 10 steps}
    - {until: 1000 steps, every: 18 steps}
    - {every: 1500 steps}
  keep: {last: 3, every: 10_000 steps}
monitor: {log_every: 10 steps, tensorboard: true, carbon: {country: FRA}}
launch: {on: slurm, nodes: 32, gpus_per_node: 4, time_limit: 20h, array: 10}
"""
"""The recipe of design.md, section 5: a public contract, comments included."""

SMALL = """\
name: small
model:
  family: gpt2
  num_layers: 2
  hidden_size: 64
  num_heads: 4
  seq_length: 16
  vocab_size: 100
data:
  train:
    - {path: shards/a}
batch:
  micro_batch_size: 2
  global_batch_size: 8
lr:
  peak: 1e-3
train:
  for: 100 steps
"""
"""Line numbers below refer to this."""

Write = Callable[..., str]


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Write:
    """Write a recipe file into an empty working directory; returns its name."""
    monkeypatch.chdir(tmp_path)

    def write_file(text: str | bytes, name: str = "my.yaml") -> str:
        path = Path(name)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(text.encode() if isinstance(text, str) else text)
        return name

    return write_file


def loaded(name: str, *overrides: str) -> Recipe:
    recipe = load_checked_recipe(name, overrides).recipe
    assert isinstance(recipe, Recipe)
    return recipe


def complaints(name: str, *overrides: str) -> list[str]:
    """What the user is told; fails if the recipe is accepted."""
    with pytest.raises(RecipeError) as caught:
        load_checked_recipe(name, overrides)
    return [str(problem) for problem in caught.value.problems]


def the_complaint(name: str, *overrides: str) -> str:
    told = complaints(name, *overrides)
    assert len(told) == 1, told
    return told[0]


def changed(old: str, new: str) -> str:
    assert old in SMALL
    return SMALL.replace(old, new, 1)


# ---------------------------------------------------------------- reading


def test_the_recipe_of_the_design_loads_and_keeps_every_rule(write: Write) -> None:
    recipe = loaded(write(DESIGN))
    assert recipe.batch.rampup is not None
    assert recipe.batch.rampup.samples == 5_000_000
    assert recipe.lr.warmup == Amount(216_320, "samples")
    assert recipe.train.for_ == Amount(300_000_000, "samples")
    assert recipe.train.exit_after == Duration(71_400)
    assert recipe.launch is not None
    assert recipe.launch.on == "slurm"
    assert recipe.data is not None
    assert recipe.data.validation["oscar"][0].path == "shards/oscar-en-valid"
    assert [str(phase.every) for phase in recipe.checkpoint.phases] == ["10 steps", "18 steps", "1500 steps"]


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-4", 1e-4), ("1E5", 1e5), (".5", 0.5), ("1.", 1.0), ("216_320", 216_320), ("-3", -3), ("+3", 3), ("007", 7),
        ("no", "no"), ("yes", "yes"), ("on", "on"), ("off", "off"), ("y", "y"), ("True", True), ("FALSE", False),
        ("~", None), ("Null", None), ("", None), ("'1e-4'", "1e-4"), ('"3"', "3"), ("1:30", "1:30"), ("1_", "1_"),
        ("2021-01-01", "2021-01-01"), ("0x10", "0x10"), ("19h50m", "19h50m"), ("-.inf", float("-inf")), ("9" * 5000, "9" * 5000),
    ],
)  # fmt: skip
def test_scalars_follow_yaml_1_2(text: str, value: Any) -> None:
    parsed = parse_yaml(f"on: {text}", "{}".format)[0]
    assert parsed == {"on": value}
    assert type(parsed["on"]) is type(value)


@pytest.mark.parametrize(
    "text", ["1e5", "no", "1_000", ".inf", "true", "", "a: b", "- x", "#x", "ä", "'", "x\ny", "\x85", " ", "="]
)
def test_dumped_text_reads_back_as_the_same_text(text: str) -> None:
    written = {"path": text, "list": [text], text if text.isprintable() else "key": 1}
    assert parse_yaml(dump_yaml(written), "{}".format)[0] == written


@pytest.mark.parametrize("name", shipped_recipes())
def test_libyaml_and_pyyaml_read_and_place_a_recipe_alike(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    text = dump_yaml(as_dict(load_recipe(name).recipe))
    fast = parse_yaml(text, "{}".format)
    monkeypatch.setattr(yaml_nodes, "_MOST_NESTED", -1)
    assert parse_yaml(text, "{}".format) == fast


# ---------------------------------------------------------------- bases


def test_a_child_overrides_its_base_field_by_field_and_replaces_lists(write: Write) -> None:
    write(
        SMALL + "checkpoint:\n  phases:\n    - {until: 10 steps, every: 5 steps}\n    - {every: 20 steps}\n",
        "base.yaml",
    )
    child = "base: base.yaml\nname: child\nmodel: {num_layers: 3}\ncheckpoint:\n  phases:\n    - {every: 7 steps}\n"
    recipe = loaded(write(child))
    assert (recipe.name, recipe.model.num_layers, recipe.model.hidden_size) == ("child", 3, 64)
    assert [phase.every.count for phase in recipe.checkpoint.phases] == [7]


def test_a_base_is_looked_for_beside_the_file_that_names_it(write: Write) -> None:
    write(SMALL, "team/common/base.yaml")
    write(changed("name: small", "name: wrong"), "common/base.yaml")
    assert loaded(write("base: common/base.yaml\n", "team/mine.yaml")).name == "small"


def test_a_file_may_have_the_name_of_its_shipped_base(write: Write) -> None:
    recipe = loaded(write("base: gpt3-356m\nseed: 5\n", "gpt3-356m.yaml"))
    assert (recipe.seed, recipe.model.num_layers) == (5, 24)


def test_a_folder_does_not_hide_the_shipped_recipe_of_that_name(write: Write) -> None:
    write("x", "quickstart/tokenizer/x")
    assert loaded("quickstart").name == "quickstart"


@pytest.mark.parametrize("back", ["a.yaml", "./a.yaml", "../there/a.yaml"])
def test_bases_in_a_circle_are_named(write: Write, back: str) -> None:
    write("base: b.yaml\nname: a\n", "there/a.yaml")
    write(f"seed: 1\nbase: {back}\n", "there/b.yaml")
    told = the_complaint("there/a.yaml")
    assert told.startswith("there/b.yaml:2: circular base: there/a.yaml -> there/b.yaml -> there/")


def test_a_problem_inside_a_base_points_into_the_base(write: Write) -> None:
    write(changed("peak: 1e-3", "peak: -1"), "base.yaml")
    assert the_complaint(write("base: base.yaml\nname: x\n")).startswith("base.yaml:16: lr.peak is -1")


# ---------------------------------------------------------------- overrides


@pytest.mark.parametrize(
    ("override", "path", "value"),
    [
        ("batch.micro_batch_size=4", "batch.micro_batch_size", 4),
        ("lr.warmup=2000 steps", "lr.warmup", "2000 steps"),
        ("checkpoint.phases.0.every=5 steps", "checkpoint.phases.0.every", "5 steps"),
        ("optimizer.betas=[0.9,0.99]", "optimizer.betas", [0.9, 0.99]),
        ("launch=null", "launch", None),
        ("data.validation.oscar.0.weight=2.5", "data.validation.oscar.0.weight", 2.5),
        (" lr.peak = 1e-3 ", "lr.peak", 1e-3),
    ],
)
def test_an_override_sets_its_field_and_is_its_origin(write: Write, override: str, path: str, value: Any) -> None:
    draft = load_recipe(write(DESIGN), [override])
    assert explain(draft)[path] == {"value": value, "origin": f"command line '{override}'"}


def test_an_override_of_a_whole_section_replaces_it_and_is_the_origin_of_its_fields(write: Write) -> None:
    draft = load_recipe(write(DESIGN), ["lr={peak: 5e-4, schedule: constant}"])
    values = explain(draft)
    assert (values["lr.peak"]["value"], values["lr.min"]["value"]) == (5e-4, 0.0)
    assert values["lr.peak"]["origin"].startswith("command line")
    assert values["lr.min"]["origin"] == "default"


def test_an_override_can_open_a_section_that_was_absent_or_null(write: Write) -> None:
    recipe = loaded(write(SMALL + "launch: null\n"), "launch.gpus_per_node=2", "train.exit_after=1h")
    assert recipe.launch is not None
    assert recipe.launch.gpus_per_node == 2


@pytest.mark.parametrize(
    "override",
    ["=3", "lr..peak=1", ".lr.peak=1", "lr.peak.=1", "foo", "", " =1", ".".join("a" * 5000) + "=1", "\udcff=1"],
)
def test_what_is_not_an_override_is_told_its_form(write: Write, override: str) -> None:
    told = the_complaint(write(SMALL), override)
    assert told.startswith("command line '")
    assert "this is not an override. Write it as section.field=value" in told
    assert len(told) < 400


@pytest.mark.parametrize(
    ("override", "fragment"),
    [
        ("lr.peak=", "lr.peak is null. Must be a valid number"),
        ("lr.peak={", "not valid YAML"),
        ("name=a\tb", "letters, digits"),
        ("name=\x00", "special characters are not allowed"),
        ("model=3", "model is 3. Must be a section"),
        ("data.train.5.path=x", "data.train has 1 items, counted from 0. Set data.train as a whole"),
        ("lr.peak.x=1", "lr.peak has no fields of its own"),
        ("base=tr1-13b", "base is not a field of a recipe. docs/recipe.md lists all fields"),
        ("micro_batch_size=4", "did you mean batch.micro_batch_size?"),
        ("nonsense.deep.path=4", "nonsense is not a field of a recipe"),
        ("parallel.dp=2", "parallel.dp is not a field of a recipe. It follows from the ranks"),
        ("parallel.data_parallel=2", "parallel.data_parallel is not a field of a recipe. It follows from the ranks"),
        ("train.skip=100-120", "train.skip is '100-120'. Must be a list, such as [1000-1010 steps]"),
        ("train.skip=[100-120]", "such as '1000-1010 steps'"),
        ("lr.warmup=10%", "or '300B tokens'; percent is no unit"),
        ("train.for=2.5 epochs", "`2 epochs of SOURCE`, whole ones only"),
        ("precision=mixed", "fp32 copies. auto: bf16 where the device is fast in it, else fp32"),
        ("data.split=[90,10]", "one to three numbers, such as '90,10'"),
        ("data.split=90%,10%", "one to three numbers, such as '90,10'"),
        ("data.split=90:10", "one to three numbers, such as '90,10'"),
        ("batch.size=4", "batch.size is not a field of a recipe. Did you mean batch.global_batch_size, or"),
        ("optimizer.lr=1e-3", "optimizer.lr is not a field of a recipe. Did you mean lr.peak?"),
        ("train.max_steps=10", "train.max_steps is not a field of a recipe. Did you mean train.for"),
        ("lr.warmup=1 epochs", "epochs are a length for train.for: `2 epochs`, `2 epochs of SOURCE`"),
        ("train.skip=[5-8]", "with their unit, such as '1000-1010 steps'"),
    ],
)
def test_a_bad_override_is_one_complaint_at_the_command_line(write: Write, override: str, fragment: str) -> None:
    told = the_complaint(write(SMALL), override)
    assert told.startswith(f"command line '{on_one_line(override)}': ")
    assert fragment.lower() in told.lower()


# ---------------------------------------------------------------- complaints


def test_an_error_names_place_value_rule_and_remedy(write: Write) -> None:
    with pytest.raises(RecipeError) as caught:
        load_checked_recipe(write(changed("family: gpt2", "family: gpt3")))
    problem = caught.value.problems[0]
    assert problem.place == "my.yaml:3"
    assert problem.what == "model.family is 'gpt3'"
    assert problem.rule == "must be one of gpt2, bloom, llama, qwen2, qwen3, bert"
    assert problem.remedy == "did you mean gpt2?"
    assert len(caught.value.problems) == 1


@pytest.mark.parametrize(
    ("text", "line", "wrong", "right"),
    [
        (changed("train:\n  for", "trian:\n  for"), 17, "trian", "train"),
        (changed("  hidden_size", "  hiden_size"), 5, "model.hiden_size", "model.hidden_size"),
        (changed("  peak", "  peek"), 16, "lr.peek", "lr.peak"),
        (changed("{path: shards/a}", "{path: shards/a, wieght: 2.0}"), 11, "data.train.0.wieght", "data.train.0.weight"),
        (changed("data:\n", "data:\n  validation:\n    path: [{pth: x, path: y}]\n"), 11,
         "data.validation.path.0.pth", "data.validation.*.0.path"),
        (SMALL + "monitor: {carbon: {country: FRA, contry: DEU}}\n", 19, "monitor.carbon.contry", "monitor.carbon.country"),
        (SMALL + "optimizer: {weight-decay: 0.1}\n", 19, "optimizer.weight-decay", "optimizer.weight_decay"),
        # the right name in the wrong section
        (SMALL + "micro_batch_size: 4\n", 19, "micro_batch_size", "batch.micro_batch_size"),
        (changed("  peak: 1e-3", "  peak: 1e-3\n  eps: 1e-8"), 17, "lr.eps", "optimizer.eps"),
        (SMALL + "checkpoint: {every: 10 steps}\n", 19, "checkpoint.every",
         "checkpoint.phases.0.every, such as '1000 steps'"),
    ],
)  # fmt: skip
def test_an_unknown_field_is_told_what_was_meant(write: Write, text: str, line: int, wrong: str, right: str) -> None:
    assert f"my.yaml:{line}: {wrong} is not a field of a recipe. Did you mean {right}?" in complaints(write(text))


def test_all_faults_of_the_schema_are_reported_at_once_and_then_all_broken_rules(write: Write) -> None:
    text = """\
name: many
model:
  family: gpt2
  num_layers: 2
  hidden_size: 64
  num_heads: 4
  seq_len: 16
  vocab_size: 100
batch:
  micro_batch_size: 3
  global_batch_size: 64
  rampup:
    start: 10
    increment: 9
    samples: 1000
lr:
  peak: -1e-3
  warmup: 2000
train:
  for: 100 steps
"""
    assert complaints(write(text)) == [
        "my.yaml:7: model.seq_len is not a field of a recipe. Did you mean model.seq_length?",
        "my.yaml:17: lr.peak is -0.001. Must be greater than 0. `peak`: The highest learning rate.",
        "my.yaml:18: lr.warmup is 2000. An amount is a number and a unit, such as '2000 steps' or '216_320 samples' "
        "or '300B tokens'. `warmup`: Linear rise from zero to the peak.",
    ]
    text = text.replace("seq_len:", "seq_length:").replace("-1e-3", "1e-3").replace("2000", "20 steps")
    text = text.replace("num_heads: 4", "num_heads: 5")
    assert complaints(write(text)) == [
        "my.yaml:6: model.num_heads is 5 but model.hidden_size is 64. Heads must divide the hidden size evenly. Use 4 or 8 "
        "heads.",
        "my.yaml:13: batch.rampup.start is 10 but batch.rampup.increment is 9. Every level of the ramp must be a "
        "multiple of micro_batch_size 3 times 1 data-parallel replicas, not 10, 19, 28, 37, 46, 55 and 1 more. Use "
        "multiples of 3, or change micro_batch_size.",
    ]


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ("  for: 100 steps", "  for: 10", "my.yaml:18: train.for is 10. An amount is a number and a unit, such as '2000 steps'"),
        ("  for: 100 steps", "  for: null", "my.yaml:18: train.for is null. An amount is a number and a unit"),
        ("  for: 100 steps", "  for: -5 steps", "my.yaml:18: train.for is '-5 steps'. An amount is a number and a unit"),
        ("  for: 100 steps", "  for: 1e3", "my.yaml:18: train.for is 1000.0. An amount is"),
        ("  for: 100 steps", "  for: 100 steps\n  exit_after: 500", "my.yaml:19: train.exit_after is 500. An amount is a number and "
         "a unit, such as '2000 steps' or '216_320 samples' or '300B tokens'; or write a time, such as '90m'"),
        ("  for: 100 steps", "  for: 100 steps\n  exit_after: 1.5 steps", "'1.5 steps' is not a whole number of steps"),
        ("  for: 100 steps", "  for: 100 steps\n  evaluate: {every: 5 samples}", "train.evaluate.every is '5 samples'. Must be counted in steps"),
        ("  for: 100 steps", "  for: 100 steps\n  exit_after: 0s", "train.exit_after is '0s'. Must be greater than 0"),
        ("  for: 100 steps", "  for: 100 steps\n  compile: maybe", "train.compile is 'maybe'. Must be one of true, false, auto"),
        ("  for: 100 steps", "  for: 100 steps\n  skip: ['10-20']", "train.skip.0 is '10-20'. Ranges of steps"),
        ("num_layers: 2", 'num_layers: "2"', "my.yaml:4: model.num_layers is '2'. Must be a valid integer"),
        ("num_layers: 2", "num_layers: 2.5", "my.yaml:4: model.num_layers is 2.5. Must be a valid integer"),
        ("num_layers: 2", "num_layers:", "my.yaml:4: model.num_layers is null. Must be a valid integer"),
        ("num_layers: 2", "num_layers: " + "9" * 5000, "my.yaml:4: model.num_layers is '99999"),
        ("num_layers: 2", "num_layers: " + "9" * 40, "must be less than or equal to 10000"),
        ("num_layers: 2", "num_layers: {a: 1}", "my.yaml:4: model.num_layers is a section. Must be a valid integer"),
        ("  num_layers: 2\n", "", "my.yaml:2: model.num_layers is missing. Transformer blocks. Add `num_layers:` to `model`."),
        ("name: small\n", "", "my.yaml: name is missing"),
        ("name: small", "name: ''", "my.yaml:1: name is ''. Name of the run"),
        ("name: small", "name: a/b", "my.yaml:1: name is 'a/b'. Name of the run and of its folder runs/<name>: letters"),
        ("name: small", 'name: "a\\u0007b"', 'my.yaml:1: name is "a\\u0007b". Name of the run'),
        ("name: small", 'name: "\\ud800"', "my.yaml:1: name is"),
        ("peak: 1e-3", "peak: .nan", "my.yaml:16: lr.peak is NaN. Must be a finite number"),
        ("peak: 1e-3", "peak: 1e999", "my.yaml:16: lr.peak is Infinity. Must be a finite number"),
        ("peak: 1e-3", "peak: 0", "my.yaml:16: lr.peak is 0. Must be greater than 0"),
        ("peak: 1e-3", "peak: high", "my.yaml:16: lr.peak is 'high'. Must be a valid number"),
        ("peak: 1e-3", "peak: 1e-3\n  warmup: 2000", "my.yaml:17: lr.warmup is 2000. An amount is a number and a unit"),
        ("name: small", "name: small\nseed: -1", "my.yaml:2: seed is -1. Must be greater than or equal to 0"),
        ("name: small", "name: small\nprecision: int8", "my.yaml:2: precision is 'int8'. Must be one of auto, fp32, bf16, fp16, fp8"),
        ("name: small", "name: small\nmonitor: {tensorboard: yes}", "monitor.tensorboard is 'yes'. Must be a valid boolean"),
        ("name: small", "name: small\noptimizer: {betas: [0.9]}", "optimizer.betas is [0.9]. List should have at least 2 items"),
        ("name: small", "name: small\noptimizer: {betas: [0.9, 1.0]}", "optimizer.betas.1 is 1.0. Must be less than 1. `betas`:"),
        ("name: small", "name: small\nlaunch: {time_limit: 20}", "launch.time_limit is 20. A duration is written like '19h50m'"),
        ("name: small", "name: small\ntokenizer: {path: ''}", "tokenizer.path is ''. String should have at least 1 character"),
        ("name: small", "name: small\ncheckpoint: {phases: []}", "checkpoint.phases is []. List should have at least 1 item"),
        ("name: small", "name: small\nmonitor: 3", "my.yaml:2: monitor is 3. Must be a section with fields of its own."),
    ],
)  # fmt: skip
def test_a_wrong_value_is_told_its_rule(write: Write, old: str, new: str, expected: str) -> None:
    told = the_complaint(write(changed(old, new)))
    assert expected.lower() in told.lower()
    assert len(told) < 400


def test_duplicate_keys_name_both_lines(write: Write) -> None:
    told = the_complaint(write(changed("  peak: 1e-3", "  peak: 1e-3\n  peak: 2e-3")))
    assert told == "my.yaml:17: lr.peak is set twice. It is already set at my.yaml:16. Keep one of the two."


@pytest.mark.parametrize(
    ("content", "fragment"),
    [
        ("name: [a, b\nmodel: 3\n", "my.yaml:2: not valid YAML: "),
        ("name: x\n\tseed: 3\n", "my.yaml:2: not valid YAML: found character '\\t'"),
        ("a: 1\n---\nb: 2\n", "my.yaml:2: not valid YAML"),
        ("a: *nowhere\n", "my.yaml:1: not valid YAML: found undefined alias"),
        ("- a\n- b\n", "my.yaml:1: the recipe is ['a', 'b']. A recipe is a mapping of sections"),
        ("just text\n", "my.yaml:1: the recipe is 'just text'"),
        ("", "my.yaml:1: the recipe is empty"),
        (b"name: x\n\xff\xfe\x00garbage", "my.yaml:2: byte 8 is not UTF-8"),
        (bytes(range(256)), "my.yaml"),
        (b"name: x\nseed: \x00\n", "my.yaml:2: not valid YAML: unacceptable character #x0000"),
        ("x: " + "[" * 5000, "nested too deeply"),
        ("x: &x [*x]\n", "nested too deeply, or too many values"),
        ("a: &a [1,1,1,1,1,1,1,1,1,1]\n" + "".join(
            f"{chr(98 + i)}: &{chr(98 + i)} [{','.join(['*' + chr(97 + i)] * 10)}]\n" for i in range(8)), "too many values"),
        ('"\\ud800": 3\nname: x\n', "my.yaml:1: the recipe has a key that is not a word"),
        ("? [a, b]\n: 3\nname: x\n", "my.yaml:1: the recipe has a key that is not a word"),
    ],
)  # fmt: skip
def test_a_file_that_is_no_recipe_is_told_why(write: Write, content: str | bytes, fragment: str) -> None:
    told = complaints(write(content))
    assert any(fragment in text for text in told), told


def test_a_recipe_and_its_base_are_regular_files_of_a_bounded_size(write: Write, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    for name in (str(tmp_path / "fifo"), "/dev/zero"):
        assert the_complaint(name) == f"cannot read {name}: it is no regular file. Check the path."
    endless = write("base: /dev/zero\n" + SMALL, "endless.yaml")
    assert the_complaint(endless).startswith("endless.yaml:1: cannot read /dev/zero: it is no regular file")
    large = write(SMALL + "\n" + "x" * 50_000_000, "large.yaml")
    assert the_complaint(large) == "cannot read large.yaml: it is larger than 512 KiB. Check the path."


def test_a_name_that_is_no_recipe_suggests_one(write: Write) -> None:
    assert the_complaint("tr1-13").endswith("Did you mean tr1-13b?")
    assert the_complaint("bloom176b").endswith("Did you mean bloom-176b?")
    assert "Shipped recipes: bert-large, " in the_complaint("zzz")


@pytest.mark.parametrize("name", ["", "x" * 5000, "a/b/c.yaml", "nul\x00byte"])
def test_an_impossible_name_is_a_complaint(name: str) -> None:
    the_complaint(name)


# ---------------------------------------------------------------- saying it back


@pytest.mark.parametrize("name", ["tr1-13b", "bert-large", "quickstart"])
def test_the_resolved_recipe_of_a_run_loads_back_equal_and_keeps_every_rule(write: Write, name: str) -> None:
    recipe = loaded(name)
    again = loaded(write(as_yaml(recipe), "recipe.yaml"))
    assert again == recipe
    assert fingerprint(again) == fingerprint(recipe)
    assert as_yaml(again) == as_yaml(recipe)


@pytest.mark.parametrize("path", ["1e5", "no", "3", "a b: c", "ünicode/ä", "x" * 300])
def test_a_resolved_recipe_keeps_texts_that_look_like_something_else(write: Write, path: str) -> None:
    recipe = loaded(write(SMALL), f'tokenizer.path="{path}"', "train.exit_after=0.25s")
    assert loaded(write(as_yaml(recipe))) == recipe


def test_the_resolved_recipe_has_every_field_and_the_fingerprint(write: Write) -> None:
    recipe = loaded(write(SMALL))
    text = as_yaml(recipe)
    assert text.startswith(f"# Resolved by Bloomery. fingerprint: {fingerprint(recipe)}\n")
    assert (
        set(as_dict(recipe))
        == set(parse_yaml(text, "{}".format)[0])
        == {path for path in all_paths() if "." not in path}
    )


@pytest.mark.parametrize(
    "override",
    ["batch.micro_batch_size=4", "parallel.recompute=full", "launch={on: local, gpus_per_node: 4}", "monitor.log_every=3 steps",
     "checkpoint.phases=[{every: 3 steps}]", "train.exit_after=1h", "name=other", "train.compile=true"],
)  # fmt: skip
def test_the_fingerprint_ignores_layout_and_bookkeeping(write: Write, override: str) -> None:
    name = write(SMALL)
    assert fingerprint(loaded(name, override)) == fingerprint(loaded(name))


@pytest.mark.parametrize(
    "override",
    ["lr.peak=2e-3", "seed=1", "model.num_layers=3", "batch.global_batch_size=16", "train.for=99 steps", "precision=fp32",
     "optimizer.eps=1e-7", "data.train.0.path=y", "train.skip=['3-4 steps']", "lr.warmup=3 steps"],
)  # fmt: skip
def test_the_fingerprint_follows_the_science(write: Write, override: str) -> None:
    name = write(SMALL)
    assert fingerprint(loaded(name, override)) != fingerprint(loaded(name))


def test_explain_says_where_every_value_comes_from(write: Write) -> None:
    write(SMALL, "base.yaml")
    draft = load_recipe(write("base: base.yaml\nlr:\n  min: 1e-5\n"), ["seed=3"])
    values = {path: found["origin"] for path, found in explain(draft).items()}
    assert values["lr.min"] == "my.yaml:3"
    assert values["lr.peak"] == "base.yaml:16"
    assert values["data.train.0.path"] == "base.yaml:11"
    assert values["seed"] == "command line 'seed=3'"
    assert values["model.dropout"] == "default of family gpt2"
    assert explain(draft)["model.ffn_hidden_size"] == {"value": 256, "origin": "default of family gpt2"}
    assert values["lr.schedule"] == "default"
    assert values["model.init_std"] == "default"


def test_every_field_of_the_schema_says_what_it_means() -> None:
    paths = [path for path in all_paths() if not path.startswith("data.validation.")]
    leaves = [path for path in paths if not any(other.startswith(f"{path}.") for other in paths)]
    assert "data.train.0.weight" in leaves
    for path in leaves:
        spot = field_at(path.split("."))
        assert spot is not None, path
        assert spot.meaning, path
