"""`bloomery import megatron`: two published launch scripts flag by flag, their shell, every refusal."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from bloomery.base.errors import RecipeError
from bloomery.checkpoint.megatron.importer import Imported, import_megatron
from bloomery.checkpoint.megatron.shell import read_script
from bloomery.checkpoint.megatron.shell_words import ShellError
from bloomery.config.describe import as_dict
from bloomery.config.load import load_recipe
from bloomery.sizing.check import load_checked_recipe
from bloomery.sizing.plan import TrainingPlan
from megatron_scripts import TR1, TR11

Command = Callable[..., tuple[int, str, str]]
_SMALL = (
    "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --max-position-embeddings 32 "
    "--micro-batch-size 2 --global-batch-size 8 --train-iters 100 --lr 1e-3 --lr-decay-style cosine --vocab-size 512"
)
SMALL = _SMALL.split()


def import_text(text: str, folder: Path, *more: str, **options: Any) -> Imported:
    script = folder / "script.slurm"
    script.write_text(text)
    return import_megatron([str(script), *more], **options)


def refused(*words: str, **options: Any) -> str:
    with pytest.raises(RecipeError) as caught:
        import_megatron(words, **options)
    return str(caught.value)


def different_fields(imported: Imported, shipped: str) -> set[str]:
    """Fields where both speak and do not agree."""
    recipe = load_recipe(shipped).recipe
    assert recipe is not None
    ours = as_dict(recipe)
    found = set()

    def compare(left: Any, right: Any, path: str) -> None:
        if isinstance(left, dict) and isinstance(right, dict):
            for key in left.keys() & right.keys():
                compare(left[key], right[key], f"{path}.{key}".strip("."))
        elif isinstance(left, list) and isinstance(right, list) and len(left) == len(right):
            for i, (one, other) in enumerate(zip(left, right, strict=True)):
                compare(one, other, f"{path}.{i}")
        elif right is not None and left != right:
            found.add(path)

    compare(imported.raw, ours, "")
    return found


# ---------------------------------------------------------------- the two published trainings


def test_tr1_becomes_the_shipped_recipe_and_its_published_schedule(tmp_path: Path) -> None:
    done = import_text(TR1, tmp_path)
    assert different_fields(done, "tr1-13b") == {
        "name",
        "tokenizer.path",  # a folder of its own machine
        "checkpoint.phases",  # one round of the three
    }
    plan = TrainingPlan.of(done.recipe)
    assert plan.train_steps == 311_541
    assert plan.warmup_ends_at_step == 8_641
    assert (plan.lr.warmup_samples, plan.lr.decay_samples) == (216_320, 126_953_125)
    assert plan.batch.consumed_after_step(29_020) == 10_698_064
    assert done.recipe.data is not None
    assert done.recipe.data.split == "949,50,1"
    assert not done.rows_of("not understood")
    (nodes,) = done.rows_of("differs")
    assert (nodes.value, nodes.result) == ("128", "32")


@pytest.mark.parametrize(("round_", "every"), [("1", 10), ("2", 18), ("3", 1500)])
def test_a_variable_from_outside_chooses_the_round(tmp_path: Path, round_: str, every: int) -> None:
    done = import_text(TR1, tmp_path, given={"ROUND": round_})
    assert done.recipe.checkpoint.phases[0].every.count == every


def test_tr11_becomes_the_shipped_recipe_and_its_published_schedule(tmp_path: Path) -> None:
    done = import_text(TR11, tmp_path)
    assert different_fields(done, "bloom-176b") == {"name", "train.for"}  # shipped: the 366B tokens it ended at
    recipe, plan = done.recipe, TrainingPlan.of(done.recipe)
    assert (recipe.model.family, recipe.model.vocab_size) == ("bloom", 250_880)
    assert plan.train_steps == 115_311
    assert plan.lr.at(59_312) == pytest.approx(1.944e-5, rel=1e-3)
    assert plan.lr.at(177_929_136) == pytest.approx(7.609e-6, rel=1e-3)
    zero = next(row for row in done.rows if row.flag == "--zero-stage")
    assert (zero.value, zero.result) == ("0", "1")
    left_out = {row.flag for row in done.rows_of("left out")}
    assert left_out == {
        "--train-weighted-split-paths-path", "--valid-weighted-split-paths-path", "--eval-interval", "--eval-iters"
    }  # fmt: skip


@pytest.mark.parametrize("text", [TR1, TR11], ids=["tr1", "tr11"])
def test_the_written_recipe_passes_check_and_every_flag_has_a_row(text: str, tmp_path: Path, command: Command) -> None:
    (tmp_path / "launch.slurm").write_text(text)
    code, out, err = command("import", "megatron", str(tmp_path / "launch.slurm"), "--output", str(tmp_path / "r.yaml"))
    assert code == 0, err
    load_checked_recipe(str(tmp_path / "r.yaml"))
    flags = set(re.findall(r"(?<=[\s\"])--[a-zA-Z0-9_=-]{2,}", text[text.index("OPTIMIZER_ARGS") :]))
    launcher = {"--nproc_per_node", "--nnodes", "--master_addr", "--master_port", "--rdzv_endpoint", "--rdzv_backend",
                "--max_restarts", "--tee", "--jobid", "--node_rank", "--wait=60", "--kill-on-bad-exit=1"}  # fmt: skip
    told = {line.split()[0] for line in out.splitlines() if line.startswith("--")}
    assert flags - launcher == told


# ---------------------------------------------------------------- a ds_config that says something else


@pytest.mark.parametrize(
    ("old", "new", "shown"),
    [
        ('"stage": $ZERO_STAGE', '"stage": 2', ["stage is 2", "--zero-stage 1"]),
        ('"train_batch_size": $GLOBAL_BATCH_SIZE', '"train_batch_size": 512', ["is 512", "--global-batch-size 1024"]),
        ('_per_gpu": $MICRO_BATCH_SIZE', '_per_gpu": 4', ["is 4", "--micro-batch-size 1"]),
        ('"gradient_clipping": 1.0', '"gradient_clipping": 0.5', ["is 0.5", "--clip-grad 1.0"]),
        ('"fp16": {"enabled": true', '"bf16": {"enabled": true}, "fp16": {"enabled": false',
         ["fp16.enabled is false", "--fp16", "bf16.enabled is true", "no --bf16"]),
        ('"steps_per_print": 2000', '"optimizer": {"params": {"lr": 3e-4, "betas": [0.9, 0.95]}}',
         ["lr is 0.0003", "--lr 1e-4", "betas is [0.9, 0.95]"]),
        ('"loss_scale": 0', '"loss_scale": 128', ["fp16.loss_scale is 128", "dynamic"]),
    ],
)  # fmt: skip
def test_a_contradiction_shows_both_values(tmp_path: Path, old: str, new: str, shown: list[str]) -> None:
    assert old in TR1
    with pytest.raises(RecipeError) as caught:
        import_text(TR1.replace(old, new), tmp_path)
    for text in shown:
        assert text in str(caught.value)


def test_all_contradictions_are_told_at_once_and_a_file_wins_over_the_script(tmp_path: Path) -> None:
    file = tmp_path / "ds.json"
    config = {"train_batch_size": 8, "zero_optimization": {"stage": 3}, "nebula": {"enabled": True}}
    file.write_text(json.dumps(config))
    with pytest.raises(RecipeError) as caught:
        import_text(TR1, tmp_path, ds_config=file)
    assert len(caught.value.problems) == 2
    config = {"nebula": {"enabled": True}, "zero_optimization": {"reduce_bucket_size": 5, "stage": 1, "zzz": 1}}
    file.write_text(json.dumps(config))
    done = import_text(TR1, tmp_path, ds_config=file)
    assert {row.flag for row in done.rows_of("not understood")} == {
        "ds_config nebula",
        "ds_config zero_optimization.zzz",
    }


def test_accumulation_steps_are_compared_where_the_batch_is_constant(tmp_path: Path) -> None:
    text = "torchrun --nproc_per_node 4 --nnodes 1 pretrain_gpt.py " + " ".join(SMALL)
    text += " --deepspeed --deepspeed_config ds.json --fp16 --zero-stage 1\n"
    (tmp_path / "ds.json").write_text('{"gradient_accumulation_steps": 2, "fp16": {"enabled": true}}')
    with pytest.raises(RecipeError, match=r"gradient_accumulation_steps is 2 .* takes 1 with 4 replicas"):
        import_text(text, tmp_path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"train_batch_size": 1_024}', "not valid JSON.*no underscores"),
        ("[1]", "it holds list"),
        ('{"train_batch_size": "many"}', 'train_batch_size is "many"'),
    ],
)
def test_a_ds_config_that_is_none_is_refused(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "ds.json").write_text(text)
    with pytest.raises(RecipeError, match=message):
        import_megatron([*SMALL, "--deepspeed"], ds_config=tmp_path / "ds.json")
    assert "Correct --ds-config" in refused(*SMALL, ds_config=tmp_path / "nowhere.json")


_SEEN = """cat <<EOT > ds.json
{"fp16": {"enabled": true, "initial_scale_power": 12}}
EOT
"""


@pytest.mark.parametrize(
    ("before", "named"),
    [
        ("", "nowhere.json"),
        ("", "$HERE/ds.json"),
        ("sed s/A/B/ template.json > ds.json\n", "ds.json"),
        ("python make.py | jq . > ds.json\n", "ds.json"),
        (_SEEN.replace("> ds", ">> ds"), "ds.json"),
        (f"if [ -f x ]; then\n{_SEEN}fi\n", "ds.json"),
        (f"{_SEEN}sed -i s/12/20/ ds.json\n", "ds.json"),
        (f"{_SEEN}cp other.json ds.json\n", "ds.json"),
        (f"{_SEEN}jq .fp16.x=1 t.json > ds.json\n", "ds.json"),
        ("", None),
    ],
)
def test_a_ds_config_that_cannot_be_seen_is_refused_unless_it_may_be_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, before: str, named: str | None
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "ds.json").write_text('{"fp16": {"enabled": true, "initial_scale_power": 9}}')  # of an older job
    flag = f"--deepspeed_config {named}" if named else ""
    text = f"{before}python pretrain_gpt.py {' '.join(SMALL)} --deepspeed {flag} --fp16\n"
    with pytest.raises(RecipeError, match=r"ds_config.*--ds-config FILE, or import without it: --without-ds-config"):
        import_text(text, tmp_path)
    done = import_text(text, tmp_path, without_ds_config=True)
    assert any(row.flag == "--deepspeed_config" for row in done.rows_of("left out"))
    assert done.recipe.loss_scale.initial == 65536
    seen = import_text(f"{_SEEN}python pretrain_gpt.py {' '.join(SMALL)} --deepspeed_config ds.json --fp16\n", tmp_path)
    assert seen.recipe.loss_scale.initial == 4096


@pytest.mark.parametrize(
    "flags",
    ["--step-batch-size-schedule 0:768,250B:1536", "--fim-data", "--use-mup", "--no-weight-decay-cond-type x"],
)
def test_flags_of_current_megatron_that_no_recipe_can_say_are_refused(flags: str) -> None:
    assert f"{flags} is set" in refused(*SMALL, *flags.split())


# ---------------------------------------------------------------- flags


def test_flags_alone_make_a_recipe_with_megatrons_defaults() -> None:
    done = import_megatron(["pretrain_gpt.py", *SMALL])
    recipe = done.recipe
    assert (recipe.seed, recipe.precision, recipe.optimizer.betas) == (1234, "fp32", [0.9, 0.999])
    assert (recipe.optimizer.weight_decay, recipe.parallel.zero, recipe.monitor.tensorboard) == (0.01, 0, False)
    assert str(recipe.lr.decay) == "100 steps"


def test_an_unknown_flag_is_listed_in_the_table_the_file_and_the_summary(tmp_path: Path, command: Command) -> None:
    words = [*SMALL, "--ffn_hidden_size", "256", "--my-own", "2"]
    code, out, err = command("import", "megatron", *words, "--output", str(tmp_path / "r.yaml"))
    assert code == 0, err
    assert "warning: --my-own is not understood" in err
    assert "not understood: did you mean --ffn-hidden-size?" in out
    assert out.splitlines()[-1].endswith("not understood: --ffn_hidden_size, --my-own")
    assert (
        "#   --my-own 2  (unknown here: check whether it changes what is trained)" in (tmp_path / "r.yaml").read_text()
    )


def test_llama_flags_become_a_llama() -> None:
    flags = (
        "--use-rotary-position-embeddings --swiglu --normalization RMSNorm --disable-bias-linear --rotary-base 500000"
    )
    more = "--untie-embeddings-and-output-weights --group-query-attention --num-query-groups 2 --ffn-hidden-size 192"
    drop = "--hidden-dropout 0 --attention-dropout 0 --bf16 --use-distributed-optimizer --sequence-parallel"
    model = import_megatron([*SMALL, *f"{flags} {more} {drop}".split()]).recipe.model
    assert (model.family, model.num_kv_heads, model.ffn_hidden_size, model.rope_theta) == ("llama", 2, 192, 500000)
    assert (model.tie_embeddings, model.dropout) == (False, 0.0)


def test_bert_becomes_a_bert() -> None:
    words = [
        "pretrain_bert.py",
        *SMALL,
        "--data-path",
        "shards/a_text_sentence",
        "--split",
        "949,50,1",
        "--mask-prob",
        "0.2",
    ]
    done = import_megatron([*words, "--vocab-file", "bert/vocab.txt", "--no-bias-gelu-fusion"])
    assert done.recipe.model.family == "bert"
    assert done.recipe.data is not None
    assert done.recipe.data.masking is not None
    assert done.recipe.data.masking.probability == 0.2


def test_warmup_as_a_fraction_and_a_blend_and_native_fp16() -> None:
    words = [*SMALL, "--lr-warmup-fraction", ".01", "--fp16", "--data-path", "0.3", "a", "0.7", "b", "--split", "9,1,0"]
    recipe = import_megatron(words).recipe
    assert str(recipe.lr.warmup) == "1 steps"
    assert recipe.data is not None
    assert [(source.path, source.weight) for source in recipe.data.train] == [("a", 0.3), ("b", 0.7)]
    assert (recipe.loss_scale.initial, recipe.loss_scale.window.count) == (2.0**32, 1000)
    odd = import_megatron([*SMALL, "--lr-warmup-fraction", ".015"]).recipe
    assert str(odd.lr.warmup) == "12 samples"


def test_one_source_with_a_weight_is_told_to_be_a_blend() -> None:
    rows = {row.field: row.remark for row in import_megatron([*SMALL, "--data-path", "1.0", "a"]).rows}
    assert "data.order=megatron needs data.blend_one_source=true" in rows["data.train"]
    rows = {row.field: row.remark for row in import_megatron([*SMALL, "--data-path", "a"]).rows}
    assert not rows["data.train"]


def test_exit_interval_is_told_as_different_and_zero_is_off() -> None:
    done = import_megatron([*SMALL, "--exit-interval", "50", "--no-bias-gelu-fusion"])
    assert {row.flag for row in done.rows_of("differs")} == {"--exit-interval", "--no-bias-gelu-fusion"}
    assert str(done.recipe.train.exit_after) == "50 steps"
    assert import_megatron([*SMALL, "--exit-interval", "0"]).recipe.train.exit_after is None


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--position-embedding-type", "alibi"], "alibi without --embed-layernorm"),
        (["--embed-layernorm"], "--embed-layernorm without alibi"),
        (["--position-embedding-type", "rope"], "--swiglu, --disable-bias-linear, --normalization RMSNorm missing"),
        (["--position-embedding-type", "relative"], "--position-embedding-type is relative"),
        (["--swiglu"], "--swiglu without rotary positions"),
        (["--hidden-dropout", "0"], "--hidden-dropout is 0.0 and --attention-dropout is 0.1"),
        (["--optimizer", "sgd"], "--optimizer is sgd"),
        (["--lr-decay-style", "inverse-square-root"], "--lr-decay-style is inverse-square-root"),
        (["--lr-decay-style", "WSD", "--lr-wsd-decay-iters", "9"], "--lr-wsd-decay-style is exponential"),
        (["--lr-warmup-iters", "2", "--lr-warmup-samples", "3"], "are both set"),
        (["--train-samples", "9"], "--train-samples is 9 and --train-iters is 100"),
        (["--rampup-batch-size", "2", "2", "90"], "--train-iters with --rampup-batch-size"),
        (["--rampup-batch-size", "2", "2"], "--rampup-batch-size has 2 values"),
        (["--fp16", "--bf16"], "--fp16 and --bf16 are both set"),
        (["--fp16", "--loss-scale", "12"], "--loss-scale is a fixed scale"),
        (["--data-path", "0.5", "a", "0.5"], "has 3 words"),
        (["--data-path", "a", "b"], "names 2 paths without weights. Megatron then blends by their lengths"),
        (["--data-path", "a", "b", "c"], "names 3 paths without weights"),
        (["--data-path", "1", "a", "b", "c"], "--data-path is 'b'"),
        (["--kv-channels", "5"], "--kv-channels is 5"),
        (["--squared-relu"], "--squared-relu is set"),
        (["--num-layers", "two"], "--num-layers is 'two'"),
        (["--seed"], "--seed has 0 values"),
        (["--global-batch-size", "7"], "batch.global_batch_size is 7"),
        (["--num-attention-heads", "5"], "command line --num-attention-heads: model.num_heads is 5"),
    ],
)  # fmt: skip
def test_what_cannot_be_said_in_a_recipe_is_refused(words: list[str], message: str) -> None:
    assert message in refused(*SMALL, *words)


def test_missing_flags_and_vocabulary_are_told_at_once() -> None:
    told = refused("--tokenizer-type", "SentencePieceTokenizer", "--num-layers", "2")
    for text in ("--hidden-size is missing", "--micro-batch-size is missing", "--global-batch-size is missing",
                 "--lr is missing", "--train-samples is missing", "vocabulary of SentencePieceTokenizer"):  # fmt: skip
        assert text in told


# ---------------------------------------------------------------- weighted split paths


def data_of(done: Imported) -> dict[str, Any]:
    data: dict[str, Any] = done.raw["data"]
    return data


TRAIN_FILE = '"TRAIN: 0.7 0:0.950 shards/en, 0.3 0:0.950 shards/fr"\n'
VALID_FILE = (
    '"ALL: 0.7 0.950:1.0 shards/en, 0.3 0.950:1.0 shards/fr" "en: 1 0.950:1.0 shards/en" "fr: 1 0.950:1.0 shards/fr"\n'
)


def test_tr11_converts_with_its_files_of_splits_and_tells_the_groups_that_a_recipe_cannot_have(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "train-splits.txt").write_text(TRAIN_FILE)
    (tmp_path / "data" / "valid-splits.txt").write_text(VALID_FILE)
    done = import_text(TR11, tmp_path, given={"MEGATRON": str(tmp_path)})
    assert data_of(done) == {
        "train": [{"path": "shards/en", "weight": 0.7}, {"path": "shards/fr", "weight": 0.3}],
        "split": "0.95,0.05,0",
    }
    assert done.recipe.train.evaluate is not None
    told = {(row.flag, row.value): row.remark for row in done.rows_of("left out")}
    flag = "--valid-weighted-split-paths-path"
    assert told.keys() == {(flag, "en"), (flag, "fr")}
    assert "documents 0.950:1.0 of shards/en" in told[flag, "en"]
    assert "prepare these documents as a shard of their own and add it to data.validation.en" in told[flag, "en"]
    (differs,) = [row for row in done.rows_of("differs") if row.flag == flag]
    assert (differs.value, differs.field, differs.remark) == ("ALL", "data.split", "its group is called valid")
    assert "#   --valid-weighted-split-paths-path fr  (" in done.yaml()


def test_tr11_without_its_files_says_what_is_missing(tmp_path: Path) -> None:
    told = {row.flag: row.remark for row in import_text(TR11, tmp_path).rows_of("left out")}
    for part in ("train", "valid"):
        remark = told[f"--{part}-weighted-split-paths-path"]
        assert "the file is not here" in remark
        assert f"add --{part}-weighted-split-paths-path FILE behind the script" in remark


def test_groups_on_the_command_line_become_training_and_validation_groups() -> None:
    words = [*SMALL, "--train-weighted-split-paths", "TRAIN: 2 0:1 a, 1 0:1.0 b", "--valid-weighted-split-paths"]
    done = import_megatron(
        [*words, "books: 1 0:1 held/books", "web: 3 0:1 held/web,1 0:1 held/news", "--eval-iters", "3"]
    )
    assert data_of(done) == {
        "train": [{"path": "a", "weight": 2.0}, {"path": "b", "weight": 1.0}],
        "validation": {
            "books": [{"path": "held/books", "weight": 1.0}],
            "web": [{"path": "held/web", "weight": 3.0}, {"path": "held/news", "weight": 1.0}],
        },
    }
    assert done.recipe.train.evaluate is not None
    assert not done.rows_of("left out", "not understood")


def test_a_range_of_a_shard_that_validation_cannot_have_is_left_out_by_name() -> None:
    words = [*SMALL, "--train-weighted-split-paths", "T: 1 0:1 a", "--valid-weighted-split-paths"]
    done = import_megatron([*words, "whole: 1 0:1 b", "cut: 1 0.5:1 c"])
    assert list(data_of(done)["validation"]) == ["whole"]
    (row,) = done.rows_of("left out")
    assert (row.flag, row.value) == ("--valid-weighted-split-paths", "cut")
    assert row.remark.startswith("documents 0.5:1 of c, but a group reads whole shards: prepare these documents")


def test_training_without_validation_keeps_its_cut() -> None:
    done = import_megatron([*SMALL, "--train-weighted-split-paths", "T: 1 0:0.9 a"])
    assert data_of(done) == {"train": [{"path": "a", "weight": 1.0}], "split": "0.9,0,0.1"}
    assert done.recipe.train.evaluate is None
    with_test = import_megatron(
        [*SMALL, "--train-weighted-split-paths", "T: 1 0:0.9 a", "--valid-weighted-split-paths", "valid: 1 0.9:0.98 a"]
    )
    assert data_of(with_test)["split"] == "0.9,0.08,0.02"
    assert not with_test.rows_of("left out")


def test_words_that_a_shell_took_apart_are_put_together_again() -> None:
    done = import_megatron([*SMALL, "--train-weighted-split-paths", *["T:", "1", "0:1", "a,", "2", "0:1", "b"]])
    assert [source["path"] for source in data_of(done)["train"]] == ["a", "b"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["T: 1 0.1:1 a"], "asks for documents 0.1:1 of a. A recipe cuts all training sources at the same place"),
        (["T: 1 0:0.9 a, 1 0:0.8 b"], "documents 0:0.9 of a, 0:0.8 of b"),
        (["T: 1 0:1 a", "U: 1 0:1 b"], "has 2 groups: T, U. A training has one"),
        (["T: 1 0:1 a", "T: 1 0:1 b"], "two groups are called 'T'"),
        (["1 a, 2 b"], "'1 a, 2 b' has no name"),
        (["T: 1 a"], "'1 a' is no part of a group. A group is"),
        (["T: 1 0.9:0.5 a"], "'1 0.9:0.5 a' is no part of a group"),
        (["T: 1 0:1.5 a"], "'1 0:1.5 a' is no part of a group"),
        (["T: -1 0:1 a"], "'-1 0:1 a' is no part of a group"),
        (["T: x 0:1 a"], "'x 0:1 a' is no part of a group"),
        (["T: $W 0:1 a"], "--train-weighted-split-paths is $W 0:1 a"),
        (["T: 1 0:1 a", "--data-path", "b"], "--data-path and --train-weighted-split-paths are both set"),
        (["T: 1 0:1 a", "--split", "9,1,0"], "--split and --train-weighted-split-paths are both set"),
        (["T: 1 0:1 a", "--train-weighted-split-paths-path", "b"], "-paths-path are both set"),
    ],
)  # fmt: skip
def test_a_split_that_a_recipe_cannot_have_is_refused(words: list[str], message: str) -> None:
    assert message in refused(*SMALL, "--train-weighted-split-paths", *words)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "train.txt is empty"),
        ('"T: 1 0:1 a', "train.txt cannot be read: No closing quotation"),
        ("T: 1 0:1 a", "is no part of a group"),
    ],
)
def test_a_file_of_splits_that_is_none_is_refused(text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "train.txt").write_text(text)
    assert message in refused(*SMALL, "--train-weighted-split-paths-path", str(tmp_path / "train.txt"))


def test_validation_groups_without_training_groups_are_told() -> None:
    done = import_megatron([*SMALL, "--data-path", "a", "--valid-weighted-split-paths", "v: 1 0:1 b"])
    (row,) = done.rows_of("left out")
    assert row.flag == "--valid-weighted-split-paths"


# ---------------------------------------------------------------- the shell


def words_of(text: str, **given: str) -> list[str]:
    return read_script(text, given).commands[-1].words


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('A=3\nB="x  $A"\nrun $B \'$A\' "$B"', ["run", "x", "3", "$A", "x  3"]),
        ("run ${A:-7} ${A-8} ${A:+x}end $((2 * (3 + 4) - 1))", ["run", "7", "8", "end", "13"]),
        ("N=4\nrun $((N * 2)) $(($N / 3)) $((N % 3))", ["run", "8", "1", "1"]),
        ('A=(1 "2 3" # no\n 4)\nA+=(5)\nrun "${A[@]}" ${A[1]}', ["run", "1", "2 3", "4", "5", "2", "3"]),
        ("A=1\nA+=2\nrun $A pre${A}post", ["run", "12", "pre12post"]),
        ("run a\\\n  b # c\n", ["run", "a", "b"]),
        ("A=1 B=2\nexport C=3 D=$B\nrun $A$B$C$D 2>&1 > out", ["run", "1232"]),
        ("if [ 2 -gt 1 -a x = x ]; then A=1; else A=2; fi\nrun $A", ["run", "1"]),
        ("if [[ a != a || -z '' ]]\nthen\n A=1\nelse A=2\nfi\nrun $A", ["run", "1"]),
        ("if ! [[ 1 == 2 ]]; then A=1; fi\n[ 1 -eq 2 ] && A=5\n[[ x == x ]] || A=6\nrun $A", ["run", "1"]),
        ("if [ 1 -eq 2 ]; then if true; then A=1; fi; elif [ 1 -eq 1 ]; then A=2; else A=3; fi; run $A", ["run", "2"]),
        ('run `date` $(a b) "$(c)"', ["run", "$(date)", "$(a\ue000b)", "$(c)"]),
        ("X='run 1'\nsrun -n 2 bash -c \"cd y && $X \\$Z\"", ["srun", "-n", "2", "run", "1", "$Z"]),
        ("{ A=1; }\ncd x && run $A", ["run", "1"]),
        ("f() { A=9; }\nA=1\nrun $A", ["run", "1"]),
    ],
)
def test_words_are_what_bash_makes_of_them(text: str, words: list[str]) -> None:
    assert words_of(text) == words


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("for A in 1 2; do B=$A; done\nrun $B", "`for` of line 1"),
        ("while read L; do B=$L; done\nrun $B", "`while` of line 1"),
        ("case $X in\n a) B=1;;\nesac\nrun $B", "`case` of line 1"),
        ("if [ -f x ]; then B=1; else B=2; fi\nrun $B", "condition of line 1"),
        ("if nvidia-smi; then B=1; fi\nrun $B", "condition of line 1"),
        ("readarray -t B < <(find .)\nrun $B", "line 1 fills it"),
        ("B=1\n[ -d y ] && B=2\nrun $B", "line 2 depends on a test"),
        ("run $B", "the script does not set it"),
    ],
)
def test_what_only_a_running_shell_knows_has_no_value_and_a_reason(text: str, reason: str) -> None:
    script = read_script(text)
    assert script.commands[-1].words == ["run", "$B"]
    assert reason in script.reasons["B"]


@pytest.mark.parametrize(
    ("text", "line", "message"),
    [
        ("a\nb 'c", 2, "quote"),
        ('a "b', 1, "quote"),
        ("cat <<EOT > x\nabc\n", 1, "here-document"),
        ("A=(1\n2", 1, "array"),
        ("echo $(a", 1, "bracket"),
        ("if true; then\na\n", 2, "`elif` is missing"),
    ],
)
def test_a_script_that_is_not_whole_is_refused_with_its_line(text: str, line: int, message: str) -> None:
    with pytest.raises(ShellError, match=message) as caught:
        read_script(text)
    assert caught.value.line in (line, line + 1)


def test_a_broken_script_a_missing_file_and_no_arguments_are_usage_errors(tmp_path: Path, command: Command) -> None:
    (tmp_path / "bad.sh").write_text("A='\n")
    code, _, err = command("import", "megatron", str(tmp_path / "bad.sh"))
    assert code == 2
    assert "bad.sh:1: this script cannot be read" in err
    assert "cannot read nowhere.sh" in command("import", "megatron", "nowhere.sh")[2]
    assert "nothing to import" in command("import", "megatron")[2]
    assert "--set X: It is NAME=VALUE" in command("import", "megatron", *SMALL, "--set", "X")[2].replace(". ", ": ")
    assert command("import", "megatron", "--help")[0] == 0


def test_a_value_without_a_source_names_the_variable_and_how_to_give_it(tmp_path: Path) -> None:
    text = "pretrain_gpt.py " + " ".join(SMALL).replace("--seq-length 32", "--seq-length $SEQ") + "\n"
    with pytest.raises(
        RecipeError, match=r"--seq-length is \$SEQ. \$SEQ: the script does not set it. .*--set SEQ=VALUE"
    ):
        import_text(text, tmp_path)
    assert import_text(text, tmp_path, given={"SEQ": "32"}).recipe.model.seq_length == 32
    assert import_text(text, tmp_path, "--seq-length", "32").recipe.model.seq_length == 32


def test_a_script_without_a_training_or_in_doubt_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="there is no training in this script"):
        import_text("source x\nls\n", tmp_path)
    doubtful = f"if [ -f x ]; then\n pretrain_gpt.py {' '.join(SMALL)}\nfi\n"
    with pytest.raises(RecipeError, match="may not be run"):
        import_text(doubtful, tmp_path)
    ended = f"exit 0\npretrain_gpt.py {' '.join(SMALL)}\n"
    with pytest.raises(RecipeError, match="ends here with `exit`"):
        import_text(ended, tmp_path)


def test_the_launcher_and_the_scheduler_must_name_the_same_nodes(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="#SBATCH --nodes is 128 but the launcher starts 64"):
        import_text(TR1.replace("NNODES=$SLURM_NNODES", "NNODES=64"), tmp_path)


def test_repeated_flags_stray_words_and_paths_are_warnings(tmp_path: Path) -> None:
    text = f"pretrain_gpt.py {' '.join(SMALL)} --lr 2e-3 --fp16 stray --data-path $ROOT/a --split 1,0,0\n"
    told = "\n".join(str(warning) for warning in import_text(text, tmp_path).warnings)
    assert "--lr is 1e-3 and then 2e-3" in told
    assert "'stray' belongs to no flag" in told
    assert "data.train is [{path: $ROOT/a}]. $ROOT: the script does not set it. Give it with --set ROOT=VALUE" in told


def test_a_habana_script_with_options_from_the_environment(tmp_path: Path) -> None:
    text = f"""
TP=${{HL_TP:-4}}; RAMP=${{HL_RAMP:-1}}
CMD=""
CMD="${{CMD}} cd $REPO && python -u ./pretrain_gpt.py --deepspeed --tensor-model-parallel-size $TP \\
    {" ".join(SMALL).replace("--train-iters 100", "--train-samples 9_000")} --bf16 --zero-stage=0"
if [ $RAMP -eq 1 ]
then
    CMD="${{CMD}} --rampup-batch-size 2 2 100"
fi
deepspeed --num_nodes 1 --num_gpus 4 --no_python /usr/bin/bash -c "$CMD"
"""
    done = import_text(text, tmp_path, without_ds_config=True)
    assert (done.recipe.parallel.tp, done.recipe.parallel.zero) == (4, 1)
    assert done.recipe.batch.rampup is not None
    less = import_text(text, tmp_path, without_ds_config=True, given={"HL_RAMP": "0", "HL_TP": "2"})
    assert less.recipe.batch.rampup is None


def test_a_script_of_arrays_with_data_that_only_the_machine_knows(tmp_path: Path) -> None:
    text = f"""#SBATCH --gpus-per-node=8
readarray -t TRAIN < <(find data -name '*.bin' | sort)
DIST=(--nproc_per_node "$SLURM_GPUS_PER_NODE" --nnodes "$SLURM_NNODES")
MODEL=( {" ".join(SMALL).replace("batch-size 8", "batch-size 16")} ) # sizes
DATA=(--train-data-path $(echo "${{TRAIN[@]}}") --valid-data-path v --eval-interval 10 --eod-mask-loss)
srun torchrun "${{DIST[@]}}" pretrain_gpt.py "${{MODEL[@]}}" "${{DATA[@]}}" --fp16
"""
    done = import_text(text, tmp_path, given={"SLURM_NNODES": "1"})
    assert done.recipe.launch is not None
    assert (done.recipe.launch.nodes, done.recipe.launch.gpus_per_node) == (1, 8)
    assert done.recipe.data is None
    assert {row.flag for row in done.rows_of("left out")} == {
        "--train-data-path", "--valid-data-path", "--eval-interval", "--eod-mask-loss"
    }  # fmt: skip
    assert any(row.remark == "add it to `data:` as eod_loss: false" for row in done.rows)
    odd = import_megatron([*SMALL, "--rotary-base", "500", "--lr-wsd-decay-iters", "3"])
    assert {row.flag for row in odd.rows if "does not read it" in row.remark} == {
        "--rotary-base",
        "--lr-wsd-decay-iters",
    }


def test_the_json_says_what_the_table_says(command: Command) -> None:
    code, out, _ = command("import", "megatron", *SMALL, "--json", "--name", "mine")
    assert code == 0
    answer = json.loads(out)
    assert answer["recipe"]["name"] == "mine"
    assert {
        "flag": "--lr",
        "value": "1e-3",
        "field": "lr.peak",
        "result": "0.001",
        "kind": "mapped",
        "remark": "",
    } in answer["rows"]
