"""Each rule between fields, broken once: what the user is told, where, and what to do about it."""

# ruff: noqa: E501  (a table of cases, one a line)

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from bloomery.base.errors import Problem, RecipeError
from bloomery.config.load import load_recipe, shipped_recipes
from bloomery.sizing.check import RULES, load_checked_recipe, nearby_divisors

SOUND = """\
name: sound
model: {family: gpt2, num_layers: 4, hidden_size: 64, num_heads: 8, seq_length: 32, vocab_size: 1000}
tokenizer: {path: tokenizers/x}
data:
  train:
    - {path: shards/a}
  validation:
    main: [{path: shards/b}]
batch:
  micro_batch_size: 2
  global_batch_size: 64
  rampup: {start: 16, increment: 16, samples: 1000}
lr: {peak: 1e-3, min: 1e-4, schedule: cosine, warmup: 100 samples, decay: 5000 samples}
train:
  for: 6400 samples
  exit_after: 1h
  evaluate: {every: 10 steps}
precision: bf16
checkpoint:
  phases:
    - {until: 10 steps, every: 2 steps}
    - {every: 20 steps}
  keep: {last: 2, every: 20 steps}
launch: {on: slurm, nodes: 2, gpus_per_node: 2, time_limit: 2h}
"""

LLAMA = "model.family=llama"
BERT = "model.family=bert"
CASES: list[tuple[str, list[str], str, str, str]] = [
    # rule, overrides, what, rule text, remedy
    ("heads", ["model.num_heads=6"], "model.num_heads is 6 but model.hidden_size is 64", "divide the hidden size", "use 4 or 8 heads"),
    ("heads", [LLAMA, "model.hidden_size=24"], "a head is 3 wide", "must be even", "change model.head_dim or model.num_heads"),
    ("heads", [LLAMA, "model.num_kv_heads=3"], "model.num_kv_heads is 3 but model.num_heads is 8", "same number of query heads", "use 2 or 4"),
    ("heads", [LLAMA, "model.num_kv_heads=16"], "model.num_kv_heads is 16", "same number of query heads", "use 8"),
    ("ignored", ["model.num_kv_heads=4"], "model.num_kv_heads is set but model.family is gpt2", "would be ignored", "set it back to 8"),
    ("ignored", ["model.rope_theta=5e5"], "model.rope_theta is set", "would be ignored", "set it back to 10000.0"),
    ("tensor_parallel", ["parallel.tp=3", "launch=null"], "parallel.tp is 3 but model.num_heads is 8", "divide evenly across", "parallel.tp 2 or 4"),
    ("tensor_parallel", [LLAMA, "model.num_kv_heads=2", "parallel.tp=4"], "parallel.tp is 4 but model.num_kv_heads is 2", "divide evenly", "tp 2"),
    ("tensor_parallel", ["model.ffn_hidden_size=5", "parallel.tp=2"], "but model.ffn_hidden_size is 5", "divide evenly", "tp 1"),
    ("tensor_parallel", ["model.vocab_multiple=1", "model.vocab_size=1001", "parallel.tp=2"], "the padded vocabulary is 1001", "divide evenly", "tp 1"),
    ("tensor_parallel", ["model.seq_length=36", "parallel.tp=8"], "parallel.tp is 8 but the number of tokens of a sequence is 36", "divide evenly", "tp 4"),
    ("context", ["parallel.cp=4", "model.seq_length=36"], "parallel.cp is 4 but model.seq_length is 36", "2 * cp", "use parallel.cp 3 or 6, or 32 tokens"),
    ("context", [BERT, "parallel.cp=2"], "parallel.cp is 2 but model.family is bert", "first token", "parallel.cp=1"),
    ("pipeline", ["parallel.pp=8", "launch=null"], "parallel.pp * parallel.chunks is 8 but model.num_layers is 4", "at least one layer", "at most 4 stages"),
    ("pipeline", ["parallel.pp=2", "parallel.zero=2"], "parallel.zero is 2 with parallel.pp 2", "would act as ZeRO 1", "parallel.zero=1"),
    ("ignored", ["parallel.schedule=gpipe"], "parallel.schedule is set but parallel.pp is 1", "would be ignored", "set it back to 1f1b"),
    ("ignored", ["parallel.chunks=2"], "parallel.chunks is set but parallel.pp is 1", "would be ignored", "set it back to 1"),
    ("pipeline", ["parallel.pp=2", "parallel.chunks=2"], "parallel.chunks is 2 but parallel.schedule is 1f1b", "the others one", "interleaved"),
    ("pipeline", ["parallel.pp=2", "parallel.schedule=interleaved"], "parallel.chunks is 1 but parallel.schedule is interleaved", "at least two stages", "parallel.chunks=2"),
    ("pipeline", ["parallel.pp=4", "parallel.schedule=interleaved", "parallel.chunks=2", "model.num_layers=8", "batch.rampup=null", "batch.global_batch_size=6", "launch=null"], "a batch of 6 samples makes 3 micro-batches for parallel.pp 4", "in rounds of pp", "multiples of 8"),
    ("pipeline", ["parallel.pp=2", "parallel.schedule=zero_bubble", "parallel.chunks=2", "train.compile=true", "launch=null"], "parallel.schedule is zero_bubble but train.compile is True", "compiled blocks", "interleaved"),
    ("pipeline", ["parallel.pp=2", "parallel.schedule=zero_bubble", "parallel.chunks=2"], "zero_bubble with precision bf16 and 2 data-parallel ranks", "in 16 bits", "interleaved"),
    ("data_parallel", ["launch.nodes=3", "parallel.tp=4"], "launch starts 6 ranks", "tp * pp * cp = 4", "a multiple of 4 ranks, such as 4 or 8"),
    ("ignored", ["parallel.shard_size=2", "parallel.zero=0"], "parallel.shard_size is set but parallel.zero is 0", "would be ignored", "back to null"),
    ("data_parallel", ["parallel.shard_size=3"], "parallel.shard_size is 3 but there are 4", "must divide", "use 2 or 4"),
    ("launch", ["launch.on=local"], "launch.nodes is 2 but launch.on is local", "this one machine", "or one node"),
    ("launch", ["train.exit_after=2h"], "train.exit_after is 2h but launch.time_limit is 2h", "kill the job before it saves", "below the limit"),
    ("batch", ["batch.global_batch_size=60", "batch.rampup=null"], "batch.global_batch_size is 60", "micro_batch_size 2 times 4 data-parallel", "use 56 or 64"),
    ("batch", ["batch.global_batch_size=4", "batch.rampup=null"], "batch.global_batch_size is 4", "a multiple of", "use 8, or change"),
    ("ramp", ["batch.rampup.start=64"], "batch.rampup.start is 64 but batch.global_batch_size is 64", "below the full batch", "remove the ramp"),
    ("ramp", ["batch.rampup.increment=20"], "batch.rampup.increment is 20", "start = 48", "use 16 or 24"),
    ("ramp", ["batch.rampup.start=8", "batch.rampup.increment=4"], "7 of 14 levels of the batch ramp do not fit: 12, 20, 28, 36, 44, 52 and 1 more", "every level", "multiples of 8"),
    ("ramp", ["batch.global_batch_size=800000", "batch.rampup.increment=8"], "the batch ramp has 99,998 levels", "at most 10,000", "larger increment"),
    ("learning_rate", ["lr.min=1e-2"], "lr.min is 0.01 but lr.peak is 0.001", "below the peak", "lower lr.min"),
    ("ignored", ["lr.schedule=constant", "lr.min=0.0"], "lr.decay is set but lr.schedule is constant", "would be ignored", "back to null"),
    ("ignored", ["lr.schedule=constant", "lr.decay=null"], "lr.min is set but lr.schedule is constant", "would be ignored", "back to 0.0"),
    ("ignored", ["lr.cooldown=10 steps"], "lr.cooldown is set but lr.schedule is cosine", "would be ignored", "change lr.schedule"),
    ("learning_rate", ["lr.schedule=wsd"], "lr.cooldown is missing", "wsd needs", "cooldown: 1000 steps"),
    ("lengths", ["train.for=0 steps"], "train.for is 0 steps, which makes 0 steps", "one step takes 64 samples of 32 tokens", "at least one"),
    ("lengths", ["train.for=10 tokens", "batch.rampup=null"], "train.for is 10 tokens, which makes 0 steps", "one step takes", "at least one"),
    ("lengths", ["train.for=1T steps"], "which makes 1,000,000,000,000 steps", "1 to 100,000,000 steps", "train for less"),
    ("lengths", ["lr.warmup=5000 samples"], "lr.warmup is 5000 samples = 5,000 samples", "ends at 5,000 samples", "shorten the warm-up"),
    ("lengths", ["lr.warmup=1000 steps", "lr.decay=null"], "lr.warmup is 1000 steps", "shorter than the decay", "lengthen lr.decay"),
    ("lengths", ["lr.schedule=wsd", "lr.cooldown=4950 samples"], "lr.cooldown is 4950 samples", "between the end of warm-up and 5,000", "shorten it"),
    ("skips", ["train.skip=['10-5 steps']"], "train.skip has '10-5 steps'", "from its first step", "sort"),
    ("skips", ["train.skip=['0-5 steps']"], "train.skip has '0-5 steps'", "at least 1", "sort"),
    ("skips", ["train.skip=['1-5 steps','5-6 steps']"], "train.skip has '5-6 steps'", "do not overlap", "sort and join"),
    ("prepare", ["prepare=[{output: x, sources: [y]}]", "tokenizer=null"], "prepare is set but tokenizer is not", "text needs one", "add `tokenizer"),
    ("data", ["data.split='9,1'"], "data.split and data.validation are both set", "either from a split", "remove one"),
    ("data", ["data.validation={}"], "train.evaluate is set but there is nothing to evaluate", "data.validation or data.split", "remove train.evaluate"),
    ("ignored", ["train.evaluate=null"], "data.validation is set but train.evaluate is not set", "would be ignored", "set it back to"),
    ("data", ["data.validation={}", "data.split='0,1,1'"], "data.split is '0,1,1', which leaves nothing for training", "in this order", "'949,50,1'"),
    ("data", ["data.validation={}", "data.split='1,0,1'"], "leaves nothing for validation", "train, valid and test", "'949,50,1'"),
    ("data", ["data.train=[{path: shards/a}, {path: ./shards/a}]"], "data.train.1 and data.train.0 are both called 'shards/a'", "distinguish sources", "add up their weights"),
    ("data", ["data.train=[{path: a, name: x}, {path: b, name: x}]"], "data.train.1 and data.train.0 are both called 'x'", "distinguish sources", "give each a `name`, or add up their weights"),
    ("data", ["data.validation.main=[{path: a}, {path: a}]"], "data.validation.main.1 and data.validation.main.0 are both", "distinguish sources", "add up their weights"),
    ("data", ["data.order=megatron", "data.train=[{path: a}, {path: a}]"], "data.train.1 and data.train.0 are both called 'a'", "distinguish sources", "give each a `name`, or add up their weights"),
    ("data", ["data.train=[{path: s/a, name: x, weight: 2}, {path: ./s/a, name: y}]"], "data.train.1 and data.train.0 are the same shard, ./s/a", "text repeats", "the weight 3"),
    ("data", ["data.validation.main=[{path: a, name: x}, {path: a, name: y}]"], "data.validation.main.1 and data.validation.main.0 are the same shard, a", "text repeats", "the weight 2"),
    ("data", ["data.validation={}", "data.split='1'"], "data.split is '1', which leaves nothing for validation", "train, valid and test", "'949,50,1'"),
    ("prepare", ["prepare=[{output: x, sources: [y]}, {output: ./x, sources: [z]}]"], "prepare.1 and prepare.0 both write ./x", "would replace", "output of its own"),
    ("prepare", ["prepare=[{output: x, sources: [y], min_tokens: 9, max_tokens: 8}]"], "prepare.0.min_tokens is 9 and max_tokens is 8", "that few", "swap them"),
    ("ignored", ["data.blend_one_source=true"], "is set but data.order is timeless", "would be ignored", "set it back to"),
    ("ignored", ["data.masking={}"], "data.masking is set but model.family is gpt2", "would be ignored", "set it back to"),
    ("ignored", ["model.family=bloom", "data.reset_positions=true"], "data.reset_positions is set but model.family is bloom", "would be ignored", "set it back to"),
    ("ignored", [BERT, "data.mask_documents=true"], "data.mask_documents is set but model.family is bert", "would be ignored", "back to false"),
    ("ignored", [BERT, "data.reset_positions=true"], "data.reset_positions is set but model.family is bert", "would be ignored", "back to false"),
    ("ignored", [BERT, "data.eod_loss=false"], "data.eod_loss is set but model.family is bert", "would be ignored", "back to true"),
    ("samples", [BERT, "data.order=megatron"], "data.order is megatron but model.family is bert", "GPT datasets", "timeless"),
    ("samples", [BERT, "tokenizer=null"], "model.family is bert but tokenizer is not set", "[MASK]", "add `tokenizer"),
    ("samples", [BERT, "model.seq_length=4"], "model.seq_length is 4 but model.family is bert", "[CLS] A [SEP] B [SEP]", "at least 5"),
    ("samples", [BERT, "prepare=[{output: shards/b, sources: [y]}]"], "prepare.0 makes shards/b without split_sentences", "pairs of sentences", "split_sentences: true"),
    ("ignored", ["loss_scale.initial=2.0"], "loss_scale is set but precision is bf16", "would be ignored", "set it back to"),
    ("loss_scale", ["precision=fp16", "loss_scale.min=8192.0"], "loss_scale.initial is 4096.0 but loss_scale.min is 8192.0", "at or above", "raise"),
    ("phases", ["checkpoint.phases=[{every: 1 step},{every: 2 steps}]"], "checkpoint.phases.0 has no `until`", "each phase but the last", "sort the phases"),
    ("phases", ["checkpoint.phases=[{every: 1 step, until: 9 steps}]"], "checkpoint.phases.0 ends at 9 steps", "the last has none", "save to the end"),
    ("phases", ["checkpoint.phases=[{every: 1 step, until: 9 steps},{every: 1 step, until: 9 steps},{every: 2 steps}]"],
     "checkpoint.phases.1 ends at 9 steps", "later than those before", "sort the phases"),
]  # fmt: skip


@pytest.fixture
def sound(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)
    Path("sound.yaml").write_text(SOUND)
    return "sound.yaml"


def problems(name: str, overrides: Sequence[str]) -> list[Problem]:
    with pytest.raises(RecipeError) as caught:
        load_checked_recipe(name, overrides)
    return caught.value.problems


@pytest.mark.parametrize(
    ("rule", "overrides", "what", "why", "remedy"), CASES, ids=[f"{c[0]}: {c[2][:60]}" for c in CASES]
)
def test_a_broken_rule_is_told(sound: str, rule: str, overrides: list[str], what: str, why: str, remedy: str) -> None:
    told = problems(sound, overrides)
    found = [problem for problem in told if what in problem.what]
    assert found, [str(problem) for problem in told]
    assert why in found[0].rule
    assert remedy in found[0].remedy
    assert found[0].place.startswith("command line '")


@pytest.mark.parametrize("rule", [rule.__name__ for rule in RULES])
def test_every_rule_is_broken_by_a_case_that_names_it(sound: str, rule: str) -> None:
    judge = next(candidate for candidate in RULES if candidate.__name__ == rule)
    named = [case for case in CASES if case[0] == rule]
    assert named
    for _, overrides, what, *_ in named:
        draft = load_recipe(sound, overrides)
        assert any(what in finding.what for finding in judge(draft.recipe)), (rule, what)


def test_the_sound_recipe_breaks_no_rule(sound: str) -> None:
    assert load_checked_recipe(sound).warnings == []


def told(name: str, *overrides: str) -> list[str]:
    return [str(warning) for warning in load_checked_recipe(name, overrides).warnings]


def test_a_run_of_another_system_may_have_had_a_shard_twice(sound: str) -> None:
    (warning,) = told(sound, "data.order=bigscience", "data.train=[{path: a, name: x}, {path: a, name: y}]")
    assert "data.train.1 and data.train.0 are the same shard" in warning


def test_validation_on_what_is_trained_on_is_a_warning(sound: str) -> None:
    groups = "{main: [{path: new}, {path: ./shards/a}], other: [{path: shards/c}]}"
    (warning,) = told(sound, f"data.validation={groups}")
    assert "data.validation.main evaluates on ./shards/a, which data.train trains on" in warning
    assert "on new text. Give it its own shard" in warning
    assert told(sound, "data.validation={}", "data.split='9,1'") == [], "which divides the shard"


@pytest.mark.parametrize("split", ["1", "100", "'100'", "0.5"])
def test_a_split_of_one_number_is_all_for_training(sound: str, split: str) -> None:
    recipe = load_checked_recipe(sound, ["data.validation={}", "train.evaluate=null", f"data.split={split}"]).recipe
    assert recipe.data is not None
    assert recipe.data.split == split.strip("'")


@pytest.mark.parametrize("split", ["1,2,3,4", "a", "-1", "1e30", "9" * 400])
def test_a_split_that_is_none_states_the_rule(sound: str, split: str) -> None:
    (problem,) = [
        str(problem) for problem in problems(sound, [f"data.split={split}"]) if "data.split is" in str(problem)
    ]
    assert "one to three numbers, '949,50,1'; missing ones are 0" in problem


@pytest.mark.parametrize("name", shipped_recipes())
def test_no_shipped_recipe_breaks_a_rule(name: str) -> None:
    assert load_checked_recipe(name).warnings == []


def test_tr1_on_64_nodes_fails_because_its_ramp_cannot_feed_32_replicas() -> None:
    (problem,) = problems("tr1-13b", ["launch.nodes=64"])
    assert "32 of 63 levels of the batch ramp do not fit: 16, 48, 80" in problem.what
    assert "micro_batch_size 1 times 32 data-parallel replicas" in problem.rule
    assert problem.place == "command line 'launch.nodes=64'"


@pytest.mark.parametrize(
    ("overrides", "replicas"),
    [
        (["launch.nodes=64", "parallel.tp=4"], 16),
        (["launch.nodes=64", "batch.rampup.start=32", "batch.rampup.increment=32"], 32),
        (["launch=null"], 1),
    ],
)
def test_tr1_passes_where_every_level_can_be_fed(overrides: list[str], replicas: int) -> None:
    recipe = load_checked_recipe("tr1-13b", overrides).recipe
    assert recipe.batch.rampup is not None
    levels = range(recipe.batch.rampup.start, 1025, recipe.batch.rampup.increment)
    assert all(level % replicas == 0 for level in levels)


def test_a_training_that_ends_inside_its_ramp_is_a_warning(sound: str) -> None:
    (warning,) = load_checked_recipe(sound, ["train.for=900 samples", "lr.decay=null"]).warnings
    assert "train.for ends inside the batch ramp: 900 of 1,000 samples" in warning.what
    assert warning.place == "command line 'train.for=900 samples'"


@pytest.mark.parametrize(
    "overrides",
    [
        ["model.num_kv_heads=8", "model.rope_theta=10000.0"],
        ["lr.schedule=constant", "lr.decay=null", "lr.min=0.0"],
        ["loss_scale={}"],
        ["loss_scale.initial=4096.0"],
        ["train.evaluate=null", "data.validation={}"],
        ["data.masking=null", "data.mask_documents=false", "data.reset_positions=false", "data.eod_loss=true"],
        [BERT, "data.mask_documents=false", "data.reset_positions=false", "data.eod_loss=true"],
    ],
)
def test_a_field_at_its_default_takes_back_what_a_base_had_set(sound: str, overrides: list[str]) -> None:
    load_checked_recipe(sound, overrides)


@pytest.mark.parametrize("family", ["gpt2", "bloom", "llama"])
def test_decoders_may_keep_their_packed_documents_apart(sound: str, family: str) -> None:
    apart = [f"model.family={family}", "data.mask_documents=true", "data.eod_loss=false"]
    load_checked_recipe(sound, apart if family == "bloom" else [*apart, "data.reset_positions=true"])


def test_bert_may_be_masked_in_its_own_way(sound: str) -> None:
    prepare = "prepare=[{output: shards/a, sources: [y], split_sentences: true}]"
    load_checked_recipe(sound, [BERT, "data.masking={probability: 0.2}", prepare])


def test_a_finding_points_at_the_line_of_the_first_field_that_was_written(sound: str) -> None:
    Path("bad.yaml").write_text(SOUND.replace("global_batch_size: 64", "global_batch_size: 60"))
    places = [problem.place for problem in problems("bad.yaml", ["batch.rampup=null"])]
    assert places == ["bad.yaml:11"]
    Path("bad.yaml").write_text(SOUND.replace("decay: 5000 samples}", "decay: 50 samples}"))
    assert [problem.place for problem in problems("bad.yaml", [])] == ["bad.yaml:13"]


def test_rules_of_one_subject_do_not_hide_those_of_another(sound: str) -> None:
    broken = [
        "batch.global_batch_size=60",
        "lr.warmup=9000 samples",
        "model.num_heads=5",
        "checkpoint.phases.0.until=null",
    ]
    told = "\n".join(problem.what for problem in problems(sound, broken))
    for path in (
        "batch.global_batch_size",
        "batch.rampup.increment",
        "lr.warmup",
        "model.num_heads",
        "checkpoint.phases.0",
    ):
        assert path in told


@pytest.mark.parametrize(
    ("number", "near", "expected"),
    [(64, 6, "4 or 8"), (7, 3, "1 or 7"), (10**12, 3, "2 or 4"), (8, 100, "8"), (48, 20, "16 or 24")],
)
def test_the_divisors_offered_are_those_around(number: int, near: int, expected: str) -> None:
    assert nearby_divisors(number, near) == expected
