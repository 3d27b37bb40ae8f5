"""`bloomery import megatron`: flags of Microsoft's Megatron-DeepSpeed and of newer Megatron-LM, arguments of a script,
and values that are none."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from bloomery.base.errors import RecipeError
from bloomery.checkpoint.megatron.flags import ARITY, Row, arity_of
from bloomery.checkpoint.megatron.importer import Imported, import_megatron
from bloomery.checkpoint.megatron.other_flags import NOT_NEEDED, REFUSED, TOLD
from bloomery.checkpoint.megatron.shell import read_script
from bloomery.sizing.plan import TrainingPlan
from megatron_scripts import GPT_TOKENS, LLAMA2

Command = Callable[..., tuple[int, str, str]]
_SMALL = (
    "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --max-position-embeddings 32 "
    "--micro-batch-size 2 --global-batch-size 8 --lr 1e-3 --lr-decay-style cosine --vocab-size 512"
)
SMALL = [*_SMALL.split(), "--train-iters", "100"]


def imported(text: str, **options: Any) -> Imported:
    return import_megatron([*SMALL, *text.split()], **options)


def refused(text: str) -> str:
    with pytest.raises(RecipeError) as caught:
        imported(text)
    return str(caught.value)


def script(folder: Path, text: str, **options: Any) -> Imported:
    (folder / "run.sh").write_text(text.replace("FLAGS", " ".join(SMALL)))
    return import_megatron([str(folder / "run.sh")], **options)


def row_of(done: Imported, flag: str) -> Row:
    (row,) = (row for row in done.rows if row.flag == flag)
    return row


# ---------------------------------------------------------------- two scripts of Microsoft's examples


def test_llama2_of_megatron_deepspeed_becomes_a_llama(tmp_path: Path) -> None:
    done = script(tmp_path, LLAMA2)
    model = done.recipe.model
    assert (model.family, model.num_kv_heads, model.rope_theta, model.tie_embeddings) == ("llama", 4, 500000, False)
    assert (done.recipe.parallel.zero, done.recipe.precision) == (1, "bf16")
    assert "bf16 optimizer shards" in row_of(done, "ds_config zero_optimization.stage").remark
    assert not done.rows_of("not understood", "differs", "left out")
    assert not done.warnings


def test_a_training_that_is_counted_in_tokens(tmp_path: Path) -> None:
    done = script(tmp_path, GPT_TOKENS, given={"2": "shards/pile"}, without_ds_config=True)
    recipe, plan = done.recipe, TrainingPlan.of(done.recipe)
    assert (str(recipe.train.for_), plan.train_steps) == ("300000000000 tokens", 286_102)
    assert (str(recipe.lr.warmup), str(recipe.lr.decay)) == ("3000000000 tokens", "300000000000 tokens")
    assert plan.lr.warmup_samples == 3_000_000_000 // 2048
    assert recipe.train.exit_after is None
    assert "57 years are never" in row_of(done, "--exit-duration-in-mins").remark
    assert "whichever comes first" in row_of(done, "--train-tokens").remark
    assert row_of(done, "--train-samples").kind == "not needed"
    assert not done.rows_of("not understood")


@pytest.mark.parametrize(
    ("flags", "length", "remark"),
    [
        ("--train-tokens 300e2", "100 steps", "whichever comes first, which is --train-iters"),
        ("--train-tokens 20480", "20480 tokens", "whichever comes first; the step that would pass it is not taken"),
        ("--train-tokens 99 --pad-vocab-size-to 512", "100 steps", "BigScience's Megatron-DeepSpeed, which has --pad"),
    ],
)
def test_train_tokens_end_a_training_where_the_fork_reads_them(flags: str, length: str, remark: str) -> None:
    done = imported(flags)
    assert str(done.recipe.train.for_) == length
    assert remark in row_of(done, "--train-tokens").remark


def test_tokens_alone_are_a_length() -> None:
    done = import_megatron([*_SMALL.split(), "--train-tokens", "256000"])
    assert (str(done.recipe.train.for_), str(done.recipe.lr.decay)) == ("256000 tokens", "256000 tokens")


def test_warmup_and_decay_in_tokens_overrule_those_in_steps() -> None:
    done = imported("--lr-warmup-tokens 2560 --lr-warmup-iters 5 --lr-decay-tokens 12800 --lr-decay-iters 9")
    assert (str(done.recipe.lr.warmup), str(done.recipe.lr.decay)) == ("2560 tokens", "12800 tokens")
    for flag in ("--lr-warmup-iters", "--lr-decay-iters"):
        assert "overrules it" in row_of(done, flag).remark
    assert str(imported("--lr-decay-tokens 12800 --lr-warmup-fraction .1").recipe.lr.warmup) == "10 steps"
    assert row_of(imported("--lr-warmup-tokens 256"), "--lr-warmup-tokens").kind == "differs"


# ---------------------------------------------------------------- other flags of the forks


@pytest.mark.parametrize(
    ("flags", "field", "value"),
    [
        ("--ds-sequence-parallel-size 2", "parallel.cp", 2),
        ("--num-virtual-stages-per-pipeline-rank 1", "parallel.chunks", 1),
        ("--use-torch-fsdp2", "parallel.zero", 3),
        ("--use-torch-fsdp2 --torch-fsdp2-no-reshard-after-forward", "parallel.zero", 2),
        ("--use-megatron-fsdp --data-parallel-sharding-strategy optim_grads", "parallel.zero", 2),
        ("--optimizer-cpu-offload", "parallel.offload", True),
        ("--fp8-hybrid --bf16", "precision", "fp8"),
        ("--padded-vocab-size 640", "model.vocab_size", 640),
        ("--tokenizer-type NullTokenizer", "model.vocab_size", 513),
        ("--iterations-to-skip 7 3", "train.skip", ["4-4 steps", "8-8 steps"]),
        ("--optimizer fusedadamw", "optimizer.name", "adamw"),
        ("--use-alibi-position-embeddings --embed-layernorm", "model.family", "bloom"),
        ("--exit-duration-in-mins 30000000 --exit-interval 5", "train.exit_after", "5 steps"),
        ("--train-iters 1e2", "train.for", "100 steps"),
    ],
)
def test_a_flag_becomes_its_field(flags: str, field: str, value: Any) -> None:
    found: Any = imported(flags).raw
    for part in field.split("."):
        found = found[part]
    assert found == value


def test_names_of_norms_are_read_in_either_case_and_rotary_is_rope() -> None:
    words = "--swiglu --disable-bias-linear --no-position-embedding"
    assert imported(f"{words} --use-rotary-position-embeddings --normalization rmsnorm").recipe.model.family == "llama"
    assert imported(f"{words} --position-embedding-type rotary --normalization RMSNorm").recipe.model.family == "llama"
    assert "--normalization is 'batchnorm'" in refused("--normalization batchnorm")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--num-experts 8", "--num-experts 8 is set. No family here has experts"),
        ("--decoupled-lr 5e-4", "A recipe has one learning rate"),
        ("--weight-decay-incr-style linear", "A recipe has one weight decay"),
        ("--init-method-xavier-uniform", "Weights begin normally distributed"),
        ("--qk-layernorm", "No family here has such an attention"),
        ("--window-size 128,0", "No family here has such an attention"),
        ("--use-rope-scaling", "Rotary positions turn the whole head"),
        ("--glu-activation swiglu", "gated SiLU"),
        ("--random-ltd", "Every sample is a stretch"),
        ("--batch-size 4", "Megatron asks for --micro-batch-size instead"),
        ("--eval-only True", "It ends without a training"),
        ("--no-position-embedding", "Every family here knows the places of its tokens"),
        ("--data-path a --train-data-path b", "--data-path and --train-data-path are both set"),
    ],
)
def test_what_changes_the_training_and_has_no_field_is_refused(flags: str, message: str) -> None:
    told = refused(flags)
    assert message in told
    assert told.startswith("command line: ")


def test_a_flag_that_is_off_is_not_refused() -> None:
    done = imported("--num-experts 1 --weight-decay-incr-style constant --lr-warmup-init 0.0 --softmax-type vanilla")
    assert not done.rows_of("not understood", "differs", "left out")


def test_a_program_of_another_model_is_refused() -> None:
    for program in ("pretrain_t5.py", "pretrain_mamba.py"):
        with pytest.raises(RecipeError, match=f"the program is {program}"):
            import_megatron([program, *SMALL])


def test_a_head_wider_than_its_share_is_refused_with_a_remedy() -> None:
    assert "A head is hidden-size / num-attention-heads wide here. Remove it" in refused("--kv-channels 99")


# ---------------------------------------------------------------- arguments of a script


def test_arguments_have_defaults_and_can_be_set(tmp_path: Path) -> None:
    text = "LAYERS=${1:-4}\npretrain_gpt.py FLAGS --num-layers $LAYERS --seed ${2}\n"
    with pytest.raises(RecipeError, match=r"--seed is \$2. \$2: it is an argument of the script. .* --set 2=VALUE"):
        script(tmp_path, text)
    assert script(tmp_path, text, given={"2": "7"}).recipe.model.num_layers == 4
    assert script(tmp_path, text, given={"1": "6", "2": "7"}).recipe.model.num_layers == 6


def test_an_unset_variable_in_a_path_is_told_in_the_table_the_file_and_a_warning(tmp_path: Path) -> None:
    done = script(tmp_path, "DATA=$4\npretrain_gpt.py FLAGS --data-path $DATA --vocab-file $VOCAB --split 9,1,0\n")
    told = {row.flag: row.remark for row in done.rows_of("left out")}
    assert told["--data-path"] == "complete it by hand: $4: it is an argument of the script"
    assert told["--vocab-file"] == "complete it by hand: $VOCAB: the script does not set it"
    assert "#   --data-path $4 -> data.train: [{path: $4}]  (" in done.yaml()
    assert ["--set 4=VALUE" in str(each) for each in done.warnings].count(True) == 1


def test_a_setting_that_changes_nothing_is_told(tmp_path: Path, command: Command) -> None:
    told = [str(each) for each in script(tmp_path, "pretrain_gpt.py FLAGS $X\n", given={"X": "", "Y": "1"}).warnings]
    assert told == ["command line: --set Y=1 changes nothing. The script has no $Y."]
    assert not script(tmp_path, 'pretrain_gpt.py FLAGS "$@"\n', given={"1": "--bf16"}).warnings
    assert "there is no script" in str(imported("", given={"X": "1"}).warnings[0]).lower()
    assert "--set a-b=1. It sets a variable" in command("import", "megatron", *SMALL, "--set", "a-b=1")[2]


@pytest.mark.parametrize(
    ("text", "given", "words"),
    [
        ('run "$@" $# $* end', {}, ["run", "0", "end"]),
        ('run "$@" $#', {"1": "a b", "2": "c"}, ["run", "a b", "c", "2"]),
        ("shift\nrun $1 ${2:-x}", {"1": "a", "2": "b"}, ["run", "b", "x"]),
        ("set -- 5 6\nrun $2", {}, ["run", "6"]),
        ("A=1\nwhile [[ $# -gt 0 ]]; do A=$1; shift; done\nrun $A", {}, ["run", "1"]),
        ("A=1\nwhile [[ $# -gt 0 ]]; do A=$1; shift; done\nrun $A", {"1": "a"}, ["run", "$A"]),
        ("run $((600 * 10**9 / 2048)) $((-7 / 2)) $((-7 % 2)) $((9**64))", {}, None),
    ],
)
def test_arguments_are_what_bash_makes_of_them(text: str, given: dict[str, str], words: list[str] | None) -> None:
    found = read_script(text, given).commands[-1].words
    assert found == (words or ["run", "292968750", "-3", "-1", "$((9**64))"])


# ---------------------------------------------------------------- values that are none

VALUES = [[], [""], ["nan"], ["-1"], ["abc"], ["1e400"], ["[]"], ["9" * 5000], ["1.2.3"], ["1", "1", "1e18"], ["$X"]]


@pytest.mark.parametrize("values", VALUES, ids=range(len(VALUES)))
def test_no_value_of_a_flag_is_a_traceback(values: list[str]) -> None:
    problems = []
    for number, name in enumerate([*ARITY, *REFUSED]):
        more = ["--deepspeed", "--data-path", "a"] if number % 2 else ["--fp16"]
        try:
            import_megatron([*SMALL, *more, f"--{name}", *values])
        except RecipeError as error:
            problems += error.problems
    assert problems
    for problem in problems:
        assert problem.place, problem
        assert problem.rule or problem.remedy, problem


def test_every_flag_that_is_known_is_understood() -> None:
    others = [word for name in [*NOT_NEEDED, *TOLD] for word in (f"--{name}", *(["1"] if arity_of(name) else []))]
    done = import_megatron([*SMALL, *others])
    assert not done.rows_of("not understood")
    assert {row.flag for row in done.rows} >= {word for word in others if word.startswith("--")}
    assert not [each for each in done.warnings if "belongs to no flag" in str(each)]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--zero-stage nan --deepspeed", "--zero-stage is 'nan'. It is a whole number. Write one, or remove the flag"),
        ("--lr-warmup-fraction nan", "--lr-warmup-fraction is 'nan'. It is a finite number"),
        ("--lr-warmup-fraction 1e400", "--lr-warmup-fraction is '1e400'. It is a finite number"),
        ("--lr-warmup-fraction 1.5", "--lr-warmup-fraction is 1.5. It is the part of the decay that is warm-up"),
        ("--lr-warmup-iters 1e30", "It is a whole number of at most 1,000,000,000,000,000,000"),
        ("--exit-duration-in-mins -5", "--exit-duration-in-mins is -5. A job lasts some minutes"),
    ],
)
def test_a_number_that_is_none_is_refused(flags: str, message: str) -> None:
    assert message in refused(flags)


def test_a_ramp_or_a_launcher_beyond_all_sizes_is_refused_at_once(tmp_path: Path) -> None:
    ramp = "--train-samples 100000 --rampup-batch-size 1 1 1000 --global-batch-size 1000000000 --micro-batch-size 1"
    flags = " ".join(word for word in SMALL if word not in ("--train-iters", "100"))
    with pytest.raises(RecipeError, match="levels"):
        script(tmp_path, f"torchrun --nnodes 999999 pretrain_gpt.py {flags} {ramp}\n")
    with pytest.raises(RecipeError, match="calls itself"):
        script(tmp_path, 'X=\'eval "$X"\'\neval "$X"\npretrain_gpt.py FLAGS\n')
    text = "#SBATCH --time=UNLIMITED\n#SBATCH --nodes=1\ntorchrun pretrain_gpt.py FLAGS\n"
    assert row_of(script(tmp_path, text), "#SBATCH --time").remark == "no limit here"
