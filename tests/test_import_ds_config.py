"""`bloomery import megatron` with a ds_config: nothing of it is dropped, and what contradicts a default is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from bloomery.base.errors import RecipeError
from bloomery.checkpoint.megatron.flags import Row
from bloomery.checkpoint.megatron.importer import Imported, import_megatron

_SMALL = (
    "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 128 --max-position-embeddings 128 "
    "--micro-batch-size 2 --global-batch-size 8 --train-iters 100 --lr 1e-4 --vocab-size 1000 --deepspeed"
)
SMALL = _SMALL.split()


def imported(folder: Path, config: dict[str, Any], *more: str) -> Imported:
    file = folder / "ds.json"
    file.write_text(json.dumps(config))
    return import_megatron([*SMALL, *more], ds_config=file)


def rows_of(done: Imported) -> dict[str, str]:
    return {row.flag.removeprefix("ds_config "): row.kind for row in done.rows if row.flag.startswith("ds_config ")}


def test_clipping_is_that_of_the_ds_config_which_deepspeed_reads(tmp_path: Path) -> None:
    done = imported(tmp_path, {"gradient_clipping": 0.3})
    assert done.recipe.optimizer.clip_grad_norm == 0.3
    (row,) = (row for row in done.rows if row.field == "optimizer.clip_grad_norm")
    assert (row.kind, row.value, row.result) == ("mapped", "0.3", "0.3")
    assert "DeepSpeed clips, not Megatron, whose default is 1.0" in row.remark
    assert imported(tmp_path, {"gradient_clipping": 0}).recipe.optimizer.clip_grad_norm is None


def test_a_ds_config_without_clipping_is_told_because_deepspeed_would_not_clip(tmp_path: Path) -> None:
    for more in ([], ["--clip-grad", "0.7"]):
        done = imported(tmp_path, {"steps_per_print": 5}, *more)
        (row,) = done.rows_of("differs")
        assert row.field == "optimizer.clip_grad_norm"
        assert "it would not clip at all" in done.yaml()


@pytest.mark.parametrize(
    ("params", "shown"),
    [
        ({"betas": [0.8, 0.9]}, ["betas is [0.8, 0.9]", "Megatron takes [0.9, 0.999] without --adam-beta1 --adam-beta2",
                                 "Write --adam-beta1 0.8 --adam-beta2 0.9, or remove it"]),
        ({"weight_decay": 0.5}, ["weight_decay is 0.5", "takes 0.01 without", "Write --weight-decay 0.5"]),
        ({"eps": 0.1}, ["eps is 0.1", "takes 1e-08 without", "Write --adam-eps 0.1", "its own optimizer"]),
        ({"lr": 1.0}, ["lr is 1.0", "--lr 1e-4"]),
    ],
)  # fmt: skip
def test_an_optimizer_that_contradicts_megatrons_default_is_refused(
    params: dict[str, Any], shown: list[str], tmp_path: Path
) -> None:
    with pytest.raises(RecipeError) as caught:
        imported(tmp_path, {"optimizer": {"type": "Adam", "params": params}})
    for text in shown:
        assert text in str(caught.value)


def test_an_optimizer_with_the_same_values_is_checked_and_told(tmp_path: Path) -> None:
    params = {"betas": [0.9, 0.95], "eps": 1e-8, "lr": 1e-4, "weight_decay": "auto", "bias_correction": True}
    done = imported(tmp_path, {"optimizer": {"type": "AdamW", "params": params}}, "--adam-beta2", "0.95")
    assert rows_of(done) == {
        "optimizer.type": "mapped",
        "optimizer.params.betas": "mapped",
        "optimizer.params.eps": "mapped",
        "optimizer.params.lr": "mapped",
        "optimizer.params.weight_decay": "not needed",
        "optimizer.params.bias_correction": "left out",
    }


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"optimizer": {"type": "Lamb"}}, 'optimizer.type is "Lamb", but Megatron\'s optimizer is adam'),
        ({"scheduler": {"type": "WarmupLR", "params": {}}}, 'scheduler.type is "WarmupLR"'),
        ({"gradient_accumulation_steps": 3, "train_batch_size": 8, "train_micro_batch_size_per_gpu": 2},
         "8 samples is no whole number of replicas times 2 samples"),
        ({"gradient_accumulation_steps": 3}, "8 samples is no whole number of replicas times 2 samples"),
        ({"gradient_accumulation_steps": 0}, "Must be at least 1"),
        ({"curriculum_learning": {"enabled": True}}, "curriculum_learning is enabled. Every sample has"),
        ({"compression_training": {"weight_quantization": {"shared_parameters": {"enabled": True}}}},
         "compression_training is enabled"),
    ],
)  # fmt: skip
def test_what_deepspeed_would_do_otherwise_is_refused(config: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(RecipeError) as caught:
        imported(tmp_path, config)
    assert message in str(caught.value)


def test_every_key_of_a_ds_config_is_a_row(tmp_path: Path) -> None:
    config: dict[str, Any] = {
        "train_batch_size": 8,
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 2,
        "gradient_clipping": 1.0,
        "steps_per_print": 5,
        "fp16": {"enabled": True, "loss_scale": 0, "initial_scale_power": 12, "loss_scale_window": 500,
                 "hysteresis": 2, "min_loss_scale": 1, "auto_cast": False},
        "bf16": {"enabled": False},
        "zero_optimization": {"stage": 2, "overlap_comm": True, "offload_optimizer": {"device": "cpu"}},
        "curriculum_learning": {"enabled": False},
        "nebula": {"enabled": True},
    }  # fmt: skip
    done = imported(tmp_path, config, "--fp16")
    expected = {f"{key}.{inner}" for key in ("fp16", "bf16", "zero_optimization") for inner in config[key]}
    assert set(rows_of(done)) == expected | {key for key in config if key not in ("fp16", "bf16", "zero_optimization")}
    told = {name for name, kind in rows_of(done).items() if kind == "not understood"}
    assert told == {"fp16.auto_cast", "nebula"}
    assert (done.recipe.parallel.zero, done.recipe.parallel.offload) == (2, True)


def test_a_ds_config_that_says_nothing_of_zero_is_not_named_as_its_source(tmp_path: Path) -> None:
    done = imported(tmp_path, {"gradient_clipping": 1.0})
    (row,) = (row for row in done.rows if row.field == "parallel.zero")
    assert (row.result, done.recipe.parallel.zero) == ("0", 0)
    assert "DeepSpeed's default: ds_config does not say" in row.remark


# ---------------------------------------------------------------- the recipe and the table say the same


def row_of(done: Imported, flag: str) -> Row:
    (row,) = (row for row in done.rows if row.flag == flag)
    return row


@pytest.mark.parametrize("deepspeed", [True, False])
@pytest.mark.parametrize(("precision", "stage", "zero"), [("--bf16", 3, 3), ("--bf16", 0, 1), ("--fp16", 0, 0)])
def test_the_stage_of_a_ds_config_is_that_of_the_recipe(
    tmp_path: Path, precision: str, stage: int, zero: int, deepspeed: bool
) -> None:
    words = [word for word in SMALL if deepspeed or word != "--deepspeed"]
    file = tmp_path / "ds.json"
    file.write_text(json.dumps({"zero_optimization": {"stage": stage}}))
    done = import_megatron([*words, precision], ds_config=file)
    assert done.recipe.parallel.zero == zero
    rows = [row for row in done.rows if row.field == "parallel.zero"]
    assert {row.result for row in rows} == {str(zero)}
    assert all(("bf16 optimizer shards" in row.remark) is (zero != stage) for row in rows)
    told = [row.remark for row in done.rows_of("differs") if row.flag == "ds_config"]
    assert bool(told) is not deepspeed
    assert all("though --deepspeed is not there" in remark for remark in told)


def test_a_ds_config_that_a_script_names_counts_without_the_flag(tmp_path: Path) -> None:
    (tmp_path / "z2.json").write_text('{"zero_optimization": {"stage": 2}, "fp16": {"enabled": true}}')
    done = script(tmp_path, "pretrain_gpt.py FLAGS --fp16 --deepspeed_config z2.json\n")
    assert (done.recipe.parallel.zero, done.recipe.loss_scale.initial) == (2, 65536)
    assert "though --deepspeed is not there" in done.yaml()


def test_the_precision_of_a_ds_config_is_shown_by_its_name(tmp_path: Path) -> None:
    done = imported(tmp_path, {"bf16": {"enabled": True}, "fp16": {"enabled": False}}, "--bf16")
    assert {row_of(done, f"ds_config {name}.enabled").result for name in ("bf16", "fp16")} == {"bf16"}


@pytest.mark.parametrize("betas", [["auto", "auto"], [0.9, "auto"], ["auto", 0.999], "auto"])
def test_auto_is_the_flags_value_inside_lists_too(tmp_path: Path, betas: Any) -> None:
    done = imported(tmp_path, {"optimizer": {"type": "Adam", "params": {"betas": betas}}})
    assert done.recipe.optimizer.betas == [0.9, 0.999]
    says_nothing = betas in ("auto", ["auto", "auto"])
    assert row_of(done, "ds_config optimizer.params.betas").kind == ("not needed" if says_nothing else "mapped")
    with pytest.raises(RecipeError, match=r"betas is \[0.9, 0.95\]"):
        imported(tmp_path, {"optimizer": {"params": {"betas": ["auto", 0.95]}}})


# ---------------------------------------------------------------- what is no ds_config

WRONG: list[Any] = [None, [], {}, "x", "auto", True, -1, 0, 5000, 10**30, 1e308, 0.9, [1], ["auto"], [[]], {"a": 1}]
KEYS = [
    "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping",
    "fp16", "fp16.enabled", "fp16.loss_scale", "fp16.initial_scale_power", "fp16.loss_scale_window", "fp16.hysteresis",
    "fp16.min_loss_scale", "bf16", "bf16.enabled", "bfloat16", "zero_optimization", "zero_optimization.stage",
    "zero_optimization.offload_optimizer", "zero_optimization.offload_param", "optimizer", "optimizer.type",
    "optimizer.params", "optimizer.params.lr", "optimizer.params.betas", "optimizer.params.eps", "scheduler",
    "scheduler.type", "curriculum_learning", "data_efficiency", "steps_per_print", "other",
]  # fmt: skip


@pytest.mark.parametrize("path", KEYS)
def test_no_value_of_a_ds_config_is_a_traceback(tmp_path: Path, path: str) -> None:
    for value in WRONG:
        config: Any = value
        for key in reversed(path.split(".")):
            config = {key: config}
        try:
            imported(tmp_path, {"fp16": {"enabled": True}} | config, "--fp16")
        except RecipeError as error:
            for problem in error.problems:
                assert problem.rule, problem
                assert problem.remedy, problem
                assert problem.place, problem


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "not valid JSON: Expecting value"),
        ('{"fp16": {"enab', "not valid JSON: Unterminated string"),
        ("[{}]", "it holds list. A ds_config is a JSON object"),
        ('{"fp16": {"enabled": true, "enabled": false}}', 'not valid JSON: "enabled" stands twice in one object'),
        ('{"gradient_clipping": NaN}', "not valid JSON: NaN is no number"),
        ("[" * 100_000, "not valid JSON"),
        ('{"train_batch_size": ' + "9" * 5000 + "}", "not valid JSON"),
        ('{"optimizer": {"params": {"betas": 0.9}}}', "optimizer.params.betas is 0.9. It is a list"),
        ('{"optimizer": {"params": {"betas": [0.9]}}}', "betas is [0.9]. There are two of them"),
        ('{"fp16": {"initial_scale_power": 5000}}', "initial_scale_power is 5000. The first scale is 2 to that power"),
        ('{"train_batch_size": 1e30}', "train_batch_size is 1e+30. It is a whole number"),
        ('{"gradient_clipping": 1e30}', "gradient_clipping is 1e+30. It is at most 1,000,000,000,000,000,000"),
    ],
    ids=range(12),
)
def test_a_broken_ds_config_is_refused_with_its_place(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "ds.json").write_text(text)
    with pytest.raises(RecipeError) as caught:
        import_megatron(SMALL, ds_config=tmp_path / "ds.json")
    assert message in str(caught.value)
    assert all(problem.place.endswith("ds.json") for problem in caught.value.problems)


def test_a_byte_order_mark_is_passed_over(tmp_path: Path) -> None:
    (tmp_path / "ds.json").write_text('{"gradient_clipping": 0.3}', encoding="utf-8-sig")
    assert import_megatron(SMALL, ds_config=tmp_path / "ds.json").recipe.optimizer.clip_grad_norm == 0.3


# ---------------------------------------------------------------- which command of a script


def script(folder: Path, text: str) -> Imported:
    (folder / "run.sh").write_text(text.replace("FLAGS", " ".join(word for word in SMALL if word != "--deepspeed")))
    return import_megatron([str(folder / "run.sh")])


def test_two_different_trainings_in_a_script_are_refused_with_both_lines(tmp_path: Path) -> None:
    with pytest.raises(RecipeError) as caught:
        script(tmp_path, "torchrun pretrain_gpt.py FLAGS --seed 1\ntorchrun pretrain_gpt.py FLAGS --seed 7\n")
    told = str(caught.value)
    assert "lines 1 and 2 are different trainings" in told
    assert "line 1 has --seed 1, line 2 has --seed 7" in told
    assert "Import a copy of the script with one of them" in told
    again = "torchrun pretrain_gpt.py FLAGS || torchrun pretrain_gpt.py FLAGS\npython tools/eval.py FLAGS --seed 9\n"
    assert script(tmp_path, again).recipe.seed == 1234


def test_a_branch_that_is_never_taken_is_no_question(tmp_path: Path) -> None:
    text = "if false; then\n pretrain_gpt.py FLAGS --seed 1\nelse\n pretrain_gpt.py FLAGS --seed 7\nfi\n"
    assert script(tmp_path, text).recipe.seed == 7
    assert script(tmp_path, text.replace("if false", "if ! false")).recipe.seed == 1
    assert script(tmp_path, "false && pretrain_gpt.py FLAGS --seed 1\npretrain_gpt.py FLAGS --seed 7").recipe.seed == 7
    with pytest.raises(RecipeError, match="None of its 1 commands that are run has --num-layers"):
        script(tmp_path, "if false; then\n pretrain_gpt.py FLAGS\nfi\n")
    with pytest.raises(RecipeError, match="if it has none, give the flags themselves"):
        script(tmp_path, "if [ -f x ]; then\n pretrain_gpt.py FLAGS\nfi\n")
