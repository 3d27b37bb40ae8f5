"""Each rule between fields, broken once: what the user is told, where, and what to do about it."""

# ruff: noqa: E501  (a table of cases, one a line)

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from bloomery.base.errors import Problem, RecipeError
from bloomery.sizing.check import RULES, load_checked_recipe
from bloomery.train.setup import prepared_run

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
CASES: list[tuple[str, list[str], str]] = [
    # rule, overrides, what the user reads
    ("heads", ["model.num_heads=6"], "model.num_heads is 6 but model.hidden_size is 64. Heads must divide the hidden size evenly. Use 4 or 8 heads."),
    ("heads", [LLAMA, "model.hidden_size=24"], "model.num_heads is 8 but model.hidden_size is 24. A head is 3 wide, and rotary positions turn pairs, so its width must be even. Change model.num_heads or model.hidden_size or model.head_dim."),
    ("heads", [LLAMA, "model.num_kv_heads=3"], "model.num_kv_heads is 3 but model.num_heads is 8. Every key/value head serves the same number of query heads. Use 2 or 4 key/value heads."),
    ("ignored", ["model.num_kv_heads=4"], "model.num_kv_heads is 4 but model.family is 'gpt2'. It would be ignored. Set it back to 8, or change model.family."),
    ("tensor_parallel", ["parallel.tp=3", "launch=null"], "parallel.tp is 3 but model.num_heads is 8. It must divide heads, MLP, the padded vocabulary and each rank's tokens, here 8 for model.num_heads, 8 for model.num_kv_heads, 256 for model.ffn_hidden_size, 1024 for model.vocab_size, 32 for model.seq_length. Use parallel.tp 2 or 4."),
    ("tensor_parallel", [LLAMA, "model.num_kv_heads=2", "parallel.tp=4"], "parallel.tp is 4 but model.num_kv_heads is 2. It must divide heads, MLP, the padded vocabulary and each rank's tokens, here 2 for model.num_kv_heads. Use parallel.tp 2."),
    ("tensor_parallel", ["model.ffn_hidden_size=5", "parallel.tp=2"], "parallel.tp is 2 but model.ffn_hidden_size is 5. It must divide heads, MLP, the padded vocabulary and each rank's tokens, here 5 for model.ffn_hidden_size. Use parallel.tp 1."),
    ("tensor_parallel", ["model.vocab_multiple=1", "model.vocab_size=1001", "parallel.tp=2"], "parallel.tp is 2 but model.vocab_size is 1001. It must divide heads, MLP, the padded vocabulary and each rank's tokens, here 1001 for model.vocab_size. Use parallel.tp 1."),
    ("tensor_parallel", ["model.seq_length=36", "parallel.tp=8"], "parallel.tp is 8 but model.seq_length is 36. It must divide heads, MLP, the padded vocabulary and each rank's tokens, here 36 for model.seq_length. Use parallel.tp 4."),
    ("context", ["parallel.cp=4", "model.seq_length=36"], "parallel.cp is 4 but model.seq_length is 36. A sequence is split into 2 * cp equal pieces. Use parallel.cp 3 or 6, or 32 tokens."),
    ("context", [BERT, "parallel.cp=2"], "parallel.cp is 2 but model.family is 'bert'. Its heads read the first token of a whole sequence, so sequences are not split between ranks. Use parallel.cp=1."),
    ("fp8", ["precision=fp8", "model.ffn_hidden_size=72", "launch=null"], "model.ffn_hidden_size is 72 but precision is 'fp8'. 8-bit products need multiples of 16 on each rank, and this makes 72. Change it, or use precision=bf16."),
    ("fp8", ["precision=fp8", "model.seq_length=20", "launch=null"], "batch.micro_batch_size is 2 but precision is 'fp8'. 8-bit products need multiples of 16 on each rank, and this makes 40. Change it, or use precision=bf16."),
    ("fp8", ["precision=fp8", "parallel.pp=2", "parallel.schedule=zero_bubble", "parallel.chunks=2", "launch=null"], "parallel.schedule is 'zero_bubble' but precision is 'fp8'. Its products give the gradients of inputs and of weights at once, which zero_bubble computes apart. Use the schedule interleaved."),
    ("pipeline", ["parallel.pp=8", "launch=null"], "parallel.pp is 8 but model.num_layers is 4. Each of pp * chunks = 8 pipeline stages owns at least one layer. Use at most 4 stages."),
    ("pipeline", ["parallel.pp=2", "parallel.zero=2"], "parallel.zero is 2 but parallel.pp is 2. Under a pipeline, gradients stay whole between micro-batches, so ZeRO 2 and 3 would act as ZeRO 1. Use parallel.zero=1."),
    ("ignored", ["parallel.schedule=gpipe"], "parallel.schedule is 'gpipe' but parallel.pp is 1. It would be ignored. Set it back to 1f1b, or change parallel.pp."),
    ("pipeline", ["parallel.pp=2", "parallel.chunks=2"], "parallel.chunks is 2 but parallel.schedule is '1f1b'. Interleaved and zero_bubble run at least two stages per rank, the others one. Use parallel.chunks=2 with these, parallel.chunks=1 with the others."),
    ("pipeline", ["parallel.pp=2", "parallel.schedule=interleaved"], "parallel.chunks is 1 but parallel.schedule is 'interleaved'. Interleaved and zero_bubble run at least two stages per rank, the others one. Use parallel.chunks=2 with these, parallel.chunks=1 with the others."),
    ("batch", ["parallel.pp=4", "parallel.schedule=interleaved", "parallel.chunks=2", "model.num_layers=8", "batch.rampup=null", "batch.global_batch_size=6", "launch=null"], "parallel.schedule is 'interleaved' but parallel.pp is 4. It takes the micro-batches of a batch, 2 samples at once, in rounds of pp. Use batches that are multiples of 8 samples, or the schedule 1f1b."),
    ("pipeline", ["parallel.pp=2", "parallel.schedule=zero_bubble", "parallel.chunks=2", "train.compile=true", "launch=null"], "parallel.schedule is 'zero_bubble' but train.compile is true. Torch cannot split compiled backward passes. Use train.compile=false, or the schedule interleaved."),
    ("pipeline", ["parallel.pp=2", "parallel.schedule=zero_bubble", "parallel.chunks=2"], "parallel.schedule is 'zero_bubble' but precision is 'bf16'. Across 2 data-parallel ranks, torch then adds the gradients of micro-batches in 16 bits. Use the schedule interleaved."),
    ("data_parallel", ["launch.nodes=3", "parallel.tp=4"], "launch.nodes is 3 but launch.gpus_per_node is 2. One replica takes tp * pp * cp = 4 of the 6 ranks that are launched, and must divide them. Use 4 or 8 ranks."),
    ("ignored", ["parallel.shard_size=2", "parallel.zero=0"], "parallel.shard_size is 2 but parallel.zero is 0. It would be ignored. Set it back to null, or change parallel.zero."),
    ("data_parallel", ["parallel.shard_size=3"], "parallel.shard_size is 3 but launch.nodes is 2. It must divide the 4 data- and context-parallel ranks. Use 2 or 4, or null for all of them."),
    ("prepare", ["prepare=[{output: x, sources: [y], limit: 9 documents, shuffle: false}]"], "prepare.0.limit is '9 documents' but prepare.0.shuffle is false. Documents that are drawn at random come in a random order. Remove one of the two."),
    ("launch", ["launch.on=local"], "launch.nodes is 2 but launch.on is 'local'. Local means this one machine. Use launch.on hosts, slurm or azureml, or one node."),
    ("launch", ["launch.nodes_after_ramp=3"], "launch.nodes_after_ramp is 3 but launch.nodes is 2. Every level of the ramp must be a multiple of micro_batch_size 2 times 6 data-parallel replicas, not 64. Change or remove it."),
    ("launch", ["launch.nodes_after_ramp=4", "batch.rampup=null"], "launch.nodes_after_ramp is 4 but launch.nodes is 2. There is no batch ramp. Change or remove it."),
    ("launch", ["train.exit_after=2h"], "train.exit_after is '2h' but launch.time_limit is '2h'. The scheduler would kill the job before it saves. Leave some minutes between them."),
    ("batch", ["batch.global_batch_size=60", "batch.rampup=null"], "batch.global_batch_size is 60 but batch.micro_batch_size is 2. It must be a multiple of micro_batch_size 2 times 4 data-parallel replicas. Use 56 or 64, or change micro_batch_size."),
    ("batch", ["batch.rampup.start=64"], "batch.rampup.start is 64 but batch.global_batch_size is 64. This ramp has 0 levels below the full batch, and 1 to 10,000 are possible. Change its start and increment, or remove it."),
    ("batch", ["batch.rampup.increment=20"], "batch.rampup.increment is 20 but batch.global_batch_size is 64. The increment must divide the full batch less the start, 48. Use 16 or 24."),
    ("batch", ["batch.rampup.start=8", "batch.rampup.increment=4"], "batch.rampup.start is 8 but batch.rampup.increment is 4. Every level of the ramp must be a multiple of micro_batch_size 2 times 4 data-parallel replicas, not 12, 20, 28, 36, 44, 52 and 1 more. Use multiples of 8, or change micro_batch_size, or begin with fewer nodes: launch.nodes_after_ramp is the number of those after the ramp."),
    ("batch", ["batch.global_batch_size=800000", "batch.rampup.increment=8"], "batch.rampup.start is 16 but batch.global_batch_size is 800000. This ramp has 99,998 levels below the full batch, and 1 to 10,000 are possible. Change its start and increment, or remove it."),
    ("lengths", ["lr.min=1e-2"], "lr.min is 0.01 but lr.peak is 0.001. The minimum lies below the peak. Lower lr.min."),
    ("ignored", ["lr.schedule=constant", "lr.min=0.0"], "lr.decay is '5000 samples' but lr.schedule is 'constant'. It would be ignored. Set it back to null, or change lr.schedule."),
    ("ignored", ["lr.cooldown=10 steps"], "lr.cooldown is '10 steps' but lr.schedule is 'cosine'. It would be ignored. Set it back to null, or change lr.schedule."),
    ("lengths", ["lr.schedule=wsd"], "lr.cooldown is null but lr.schedule is 'wsd'. Wsd needs a final decay that fits between 100 samples, the warm-up, and 5,000 samples. Give for example `cooldown: 1000 steps`."),
    ("lengths", ["train.for=0 steps"], "train.for is '0 steps' but batch.global_batch_size is 64. That makes 0 steps, and a training has 1 to 100,000,000. Train for at least one global batch, and not for so much more."),
    ("lengths", ["train.for=1T steps"], "train.for is '1000000000000 steps' but batch.global_batch_size is 64. That makes 1,000,000,000,000 steps, and a training has 1 to 100,000,000. Train for at least one global batch, and not for so much more."),
    ("lengths", ["lr.warmup=5000 samples"], "lr.warmup is '5000 samples' but lr.decay is '5000 samples'. A warm-up of 5,000 samples must be shorter than the decay, which ends at 5,000. Shorten the warm-up or lengthen lr.decay."),
    ("lengths", ["lr.warmup=1000 steps", "lr.decay=null"], "lr.warmup is '1000 steps' but lr.decay is null. A warm-up of 62,528 samples must be shorter than the decay, which ends at 6,400. Shorten the warm-up or lengthen lr.decay."),
    ("lengths", ["lr.schedule=wsd", "lr.cooldown=4950 samples"], "lr.cooldown is '4950 samples' but lr.schedule is 'wsd'. Wsd needs a final decay that fits between 100 samples, the warm-up, and 5,000 samples. Give for example `cooldown: 1000 steps`."),
    ("steps", ["train.skip=['10-5 steps']"], "train.skip.0 is '10-5 steps'. A range runs from its first step, at least 1, to its last. Swap them, or remove it."),
    ("prepare", ["prepare=[{output: x, sources: [y]}]", "tokenizer=null"], "prepare is [{\"output\": \"x\", \"sources\": [\"y\"], \"text_key\": \"text\", \" ... but tokenizer is null. Text needs a tokenizer. Add `tokenizer: {path: ...}`."),
    ("data", ["data.split='9,1'", "data.validation={valid: [{path: other}]}"], "data.validation is a section but data.split is '9,1'. `valid` is the name of the part which the split makes of the training sources. Give that group another name."),
    ("data", ["data.split='9,1'", "data.split_by=tokens", "data.order=megatron"], "data.split_by is 'tokens' but data.order is 'megatron'. Only samples of the timeless order may end within a document, and never those of bert. Use data.split_by=documents."),
    ("data", ["data.validation={}"], "train.evaluate is a section but data.validation is empty. Evaluation needs data.validation or data.split. Add one, or remove train.evaluate."),
    ("ignored", ["train.evaluate=null"], "data.validation is a section but train.evaluate is null. It would be ignored. Set it back to {}, or change train.evaluate."),
    ("data", ["data.validation={}", "data.split='0,1,1'"], "data.split is '0,1,1' but train.evaluate is a section. Of train, valid and test, in this order, nothing is left for train. Use for example '949,50,1'."),
    ("data", ["data.validation={}", "data.split='1,0,1'"], "data.split is '1,0,1' but train.evaluate is a section. Of train, valid and test, in this order, nothing is left for valid. Use for example '949,50,1'."),
    ("data", ["data.train=[{path: shards/a}, {path: ./shards/a}]"], "data.train is [{\"path\": \"shards/a\", \"name\": null, \"weight\": 1.0}, {\"pa ... Sources are distinguished by `name`, by default the path, and some share it: shards/a. Give each a `name`, or add up their weights in one of them."),
    ("data", ["data.validation.main=[{path: a}, {path: a}]"], "data.validation.main is [{\"path\": \"a\", \"name\": null, \"weight\": 1.0}, {\"path\": \"a ... Sources are distinguished by `name`, by default the path, and some share it: a. Give each a `name`, or add up their weights in one of them."),
    ("prepare", ["prepare=[{output: x, sources: [y]}, {output: ./x, sources: [z]}]"], 'prepare is [{"output": "x", "sources": ["y"], "text_key": "text", " ... A later section would replace the shard of an earlier one: x. Give each section an output of its own.'),
    ("ignored", ["data.blend_one_source=true"], "data.blend_one_source is true but data.order is 'timeless'. It would be ignored. Set it back to false, or change data.order."),
    ("ignored", ["data.masking={}"], "data.masking is a section but model.family is 'gpt2'. It would be ignored. Set it back to null, or change model.family."),
    ("ignored", ["model.family=bloom", "data.reset_positions=true"], "data.reset_positions is true but model.family is 'bloom'. It would be ignored. Set it back to false, or change model.family."),
    ("ignored", [BERT, "data.mask_documents=true"], "data.mask_documents is true but model.family is 'bert'. It would be ignored. Set it back to false, or change model.family."),
    ("data", ["data.order=megatron", "seed=4294967296"], "seed is 4294967296 but data.order is 'megatron'. It is below 2**32 there. Use the seed of the run to be continued."),
    ("data", [BERT, "data.order=megatron"], "data.order is 'megatron' but model.family is 'bert'. The orders of other systems are those of their GPT datasets. Use data.order=timeless."),
    ("data", [BERT, "model.seq_length=4"], "model.seq_length is 4 but model.family is 'bert'. A sample is [CLS] A [SEP] B [SEP] with at least one token in A and in B. Use at least 5."),
    ("ignored", ["loss_scale.initial=2.0"], "loss_scale is a section but precision is 'bf16'. It would be ignored. Set it back to {initial: 4096.0, window: 500 steps, hysteresis: 2, consecutive_hysteresis: false, min: 1.0}, or change precision."),
    ("steps", ["checkpoint.phases=[{every: 1 step},{every: 2 steps}]"], "checkpoint.phases is [{\"until\": null, \"every\": \"1 steps\"}, {\"until\": null, \"e ... Each phase but the last has an `until`, later than those before it; the last has none. Sort the phases by `until`, and save to the end in the last."),
    ("steps", ["checkpoint.phases=[{every: 1 step, until: 9 steps}]"], "checkpoint.phases is [{\"until\": \"9 steps\", \"every\": \"1 steps\"}]. Each phase but the last has an `until`, later than those before it; the last has none. Sort the phases by `until`, and save to the end in the last."),
    ("steps", ["checkpoint.phases=[{every: 1 step, until: 9 steps},{every: 1 step, until: 9 steps},{every: 2 steps}]"], "checkpoint.phases is [{\"until\": \"9 steps\", \"every\": \"1 steps\"}, {\"until\": \"9  ... Each phase but the last has an `until`, later than those before it; the last has none. Sort the phases by `until`, and save to the end in the last."),
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


@pytest.mark.parametrize(("rule", "overrides", "text"), CASES, ids=[f"{case[0]}: {case[2][:60]}" for case in CASES])
def test_a_broken_rule_is_reported_with_values_rule_and_remedy(
    sound: str, rule: str, overrides: list[str], text: str
) -> None:
    reported = problems(sound, overrides)
    assert text in [str(replace(problem, place="")) for problem in reported]
    assert all(problem.place.startswith("command line '") for problem in reported)


def test_every_rule_is_broken_by_a_case_that_names_it() -> None:
    assert {case[0] for case in CASES} == {rule.__name__ for rule in RULES}


def test_the_sound_recipe_breaks_no_rule(sound: str) -> None:
    assert load_checked_recipe(sound).warnings == []


def test_validation_on_what_is_trained_on_is_a_warning(sound: str) -> None:
    groups = "{main: [{path: new}, {path: ./shards/a}], other: [{path: shards/c}]}"
    (warning,) = load_checked_recipe(sound, [f"data.validation={groups}"]).warnings
    assert warning.rule.startswith("data.train trains on ./shards/a, so")
    assert load_checked_recipe(sound, ["data.validation={}", "data.split='9,1'"]).warnings == []


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


def test_tr1_on_64_nodes_fails_because_its_ramp_cannot_feed_32_replicas() -> None:
    (problem,) = problems("tr1-13b", ["launch.nodes=64"])
    assert "micro_batch_size 1 times 32 data-parallel replicas, not 16, 48, 80" in problem.rule
    assert problem.place == "command line 'launch.nodes=64'"


@pytest.mark.parametrize(
    ("overrides", "replicas"),
    [
        (["launch.nodes=64", "parallel.tp=4"], 16),
        (["launch.nodes=64", "batch.rampup.start=32", "batch.rampup.increment=32"], 32),
        (["launch=null"], 1),
        (["launch.nodes_after_ramp=64"], 16),
    ],
)
def test_tr1_passes_where_every_level_can_be_fed(overrides: list[str], replicas: int) -> None:
    recipe = load_checked_recipe("tr1-13b", overrides).recipe
    assert recipe.batch.rampup is not None
    levels = range(recipe.batch.rampup.start, 1025, recipe.batch.rampup.increment)
    assert all(level % replicas == 0 for level in levels)


def test_a_training_that_ends_inside_its_ramp_is_a_warning(sound: str) -> None:
    (warning,) = load_checked_recipe(sound, ["train.for=900 samples", "lr.decay=null"]).warnings
    assert "training ends inside the batch ramp" in warning.rule
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
        "checkpoint.phases",
    ):
        assert path in told


def test_check_warns_of_all_that_train_will_refuse(
    sound: str, tmp_path: Path, command: Callable[..., tuple[int, str, str]]
) -> None:
    overrides = [BERT, "data=null", "tokenizer=null", "train.evaluate=null", "launch=null"]
    code, _, warnings = command("check", sound, *overrides)
    assert code == 0
    recipe = load_checked_recipe(sound, overrides).recipe
    with pytest.raises(RecipeError) as caught, prepared_run(recipe, tmp_path / "run", device=torch.device("cpu")):
        pass
    assert [problem.what for problem in caught.value.problems] == ["data is missing", "tokenizer is missing"]
    for problem in caught.value.problems:
        assert f"warning: `bloomery train` would refuse it: {problem}" in warnings


@pytest.mark.parametrize(
    ("overrides", "warning"),
    [
        (["lr={peak: 1e-3, schedule: constant, warmup: 1000000 samples}"], "the rate never reaches lr.peak"),
        (["lr.peak=1e-12", "lr.min=0"], "a model learns nothing with so little"),
        (["optimizer.weight_decay=10"], "0.1 is usual"),
        (["lr.peak=1e3"], "AdamW diverges"),
    ],
)
def test_what_is_legal_and_surely_wrong_is_a_warning(sound: str, overrides: list[str], warning: str) -> None:
    (found,) = load_checked_recipe(sound, overrides).warnings
    assert warning in found.rule
