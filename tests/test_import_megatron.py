"""`bloomery import megatron`: published launch scripts flag by flag, the command, refusals, ds_config."""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from bloomery.base.errors import RecipeError
from bloomery.cli.train import add_arguments
from bloomery.config.load import leaves
from bloomery.config.schema import all_fields
from bloomery.interop.megatron.flags import FIELDS, OTHERS, RECORDED, REFUSED
from bloomery.interop.megatron.importer import Imported, import_megatron
from bloomery.model.linear import FORWARD, GRADIENT
from bloomery.monitor.tensorboard import scalars
from bloomery.sizing.check import load_checked_recipe
from bloomery.sizing.schedule import TrainingPlan
from megatron_scripts import GPT_TOKENS, LLAMA2, SMALL, TR1, TR11, different_fields, field_of, row_of, script
from monitor_samples import step_record, validation_record

Command = Callable[..., tuple[int, str, str]]
LLAMA = "--swiglu --disable-bias-linear --normalization RMSNorm --use-rotary-position-embeddings"


def flags(text: str = "", **options: Any) -> Imported:
    return import_megatron([*SMALL, *text.split()], **options)


def refused(*words: str, **options: Any) -> str:
    with pytest.raises(RecipeError) as caught:
        import_megatron([*SMALL, *words], **options)
    return str(caught.value)


def deepspeed(folder: Path, config: Any, *more: str) -> Imported:
    (folder / "ds.json").write_text(config if isinstance(config, str) else json.dumps(config))
    return import_megatron([*SMALL, "--deepspeed", *more], ds_config=folder / "ds.json")


# ---------------------------------------------------------------- published trainings


def test_tr1_becomes_the_shipped_recipe_and_its_published_schedule(tmp_path: Path) -> None:
    done = script(tmp_path, TR1)
    # the tokenizer is a folder of its own machine, and the script is one round of three
    assert different_fields(done, "tr1-13b") == {"name", "tokenizer.path", "checkpoint.phases.0.every"}
    plan = TrainingPlan.of(done.recipe)
    assert (plan.train_steps, plan.warmup_ends_at_step) == (311_541, 8_641)
    assert (plan.lr.warmup_samples, plan.lr.decay_samples) == (216_320, 126_953_125)
    assert plan.batch.consumed_after_step(29_020) == 10_698_064
    assert not done.rows_of("not understood", "differs")
    # a variable that is set wins over the script, in its conditions too
    assert field_of(script(tmp_path, TR1, given={"ROUND": "2"}), "checkpoint.phases") == [{"every": "18 steps"}]


def test_tr11_becomes_the_shipped_recipe_and_its_published_schedule(tmp_path: Path) -> None:
    done = script(tmp_path, TR11)
    assert different_fields(done, "bloom-176b") == {"name", "train.for"}  # shipped: the 366B tokens it ended at
    recipe, plan = done.recipe, TrainingPlan.of(done.recipe)
    assert (recipe.model.family, recipe.model.vocab_size, plan.train_steps) == ("bloom", 250_880, 115_311)
    assert plan.lr.at(59_312) == pytest.approx(1.944e-5, rel=1e-3)
    assert plan.lr.at(177_929_136) == pytest.approx(7.609e-6, rel=1e-3)
    zero = row_of(done, "--zero-stage")
    assert (zero.value, zero.result) == ("0", "1")
    left_out = {row.flag: row.remark for row in done.rows_of("left out")}
    files = {f"--{part}-weighted-split-paths-path" for part in ("train", "valid")}
    assert left_out.keys() == {*files, "--eval-interval", "--eval-iters"}
    assert "the file is not here: add --" in left_out["--train-weighted-split-paths-path"]


def test_llama2_of_megatron_deepspeed_becomes_a_llama(tmp_path: Path) -> None:
    done = script(tmp_path, LLAMA2)
    model = done.recipe.model
    assert (model.family, model.num_kv_heads, model.rope_theta, model.tie_embeddings) == ("llama", 4, 500000, False)
    assert (done.recipe.parallel.zero, done.recipe.precision) == (1, "bf16")
    assert not done.rows_of("not understood", "differs", "left out")
    assert not done.warnings


def test_a_training_that_is_counted_in_tokens(tmp_path: Path) -> None:
    done = script(tmp_path, GPT_TOKENS, given={"2": "shards/pile"}, without_ds_config=True)
    recipe, plan = done.recipe, TrainingPlan.of(done.recipe)
    assert (str(recipe.train.for_), plan.train_steps) == ("300000000000 tokens", 286_102)
    assert (str(recipe.lr.warmup), str(recipe.lr.decay)) == ("3000000000 tokens", "300000000000 tokens")
    assert recipe.train.exit_after is None  # after 57 years
    assert not done.rows_of("not understood")


def test_the_written_recipe_passes_check_and_every_flag_has_a_row(tmp_path: Path, command: Command) -> None:
    (tmp_path / "launch.slurm").write_text(TR1)
    words = ("--script", str(tmp_path / "launch.slurm"), "--output", str(tmp_path / "r.yaml"))
    code, out, err = command("import", "megatron", *words)
    assert code == 0, err
    load_checked_recipe(str(tmp_path / "r.yaml"))
    written = set(re.findall(r"(?<=[\s\"])--[a-zA-Z0-9_=-]{2,}", TR1[TR1.index("OPTIMIZER_ARGS") :]))
    launcher = {"--master_addr", "--master_port", "--rdzv_endpoint", "--rdzv_backend", "--nnodes", "--nproc_per_node",
                "--max_restarts", "--tee", "--jobid", "--node_rank", "--wait=60", "--kill-on-bad-exit=1"}  # fmt: skip
    assert written - launcher == {line.split()[0] for line in out.splitlines() if line.startswith("--")}


# ---------------------------------------------------------------- the command


def test_every_form_of_the_command(tmp_path: Path, command: Command) -> None:
    (tmp_path / "s.sh").write_text(f"echo x > {tmp_path}/ran; pretrain_gpt.py {' '.join(SMALL)} --seed $((3 + 4))\n")
    path, answers = str(tmp_path / "s.sh"), []
    for words in (["--", "pretrain_gpt.py", *SMALL, "--seed", "7"], [*SMALL, "--seed", "7"], ["--script", path]):
        code, out, err = command("import", "megatron", "--json", "--name", "mine", *words)
        assert code == 0, err
        answers.append(json.loads(out)["recipe"])
    assert answers[0] == answers[1] == answers[2]
    assert not (tmp_path / "ran").exists()
    code, out, _ = command("import", "megatron", *SMALL, "--json")
    lr = {"kind": "mapped", "flag": "--lr", "value": "1e-3", "field": "lr.peak", "result": "0.001", "remark": ""}
    assert lr in json.loads(out)["rows"]


def test_usage_errors(tmp_path: Path, command: Command) -> None:
    (tmp_path / "bad.sh").write_text("A='\n")
    code, _, err = command("import", "megatron", "--script", str(tmp_path / "bad.sh"))
    assert code == 2
    assert "bad.sh: there is no training in this script" in err
    assert "cannot read nowhere.sh" in command("import", "megatron", "--script", "nowhere.sh")[2]
    assert "nothing to import" in command("import", "megatron")[2]
    for text in ("X", "a-b=1", "0=1"):
        err = command("import", "megatron", *SMALL, "--set", text)[2]
        assert f"--set {text}. It sets a variable of the script, NAME=VALUE, or an argument of it" in err
    assert command("import", "megatron", "--help")[0] == 0


def test_an_unknown_flag_is_listed_in_the_table_the_file_and_the_summary(tmp_path: Path, command: Command) -> None:
    words = [*SMALL, "--ffn_hidden_size", "256", "--my-own", "2"]
    code, out, err = command("import", "megatron", "--output", str(tmp_path / "r.yaml"), "--", *words)
    assert code == 0, err
    assert "warning: --my-own is not understood" in err
    assert "not understood: check whether it changes what is trained" in out
    assert out.splitlines()[-1].endswith("not understood: --ffn_hidden_size, --my-own")
    assert "#   --my-own 2  (check whether" in (tmp_path / "r.yaml").read_text()


# ---------------------------------------------------------------- flags


def test_flags_alone_make_a_recipe_with_megatrons_defaults() -> None:
    recipe = import_megatron(["pretrain_gpt.py", *SMALL]).recipe
    assert (recipe.seed, recipe.precision, recipe.optimizer.betas) == (1234, "fp32", [0.9, 0.999])
    assert (recipe.optimizer.weight_decay, recipe.parallel.zero, recipe.monitor.tensorboard) == (0.01, 0, False)
    assert (str(recipe.lr.decay), recipe.model.family, recipe.model.dropout) == ("100 steps", "gpt2", 0.1)
    (length,) = import_megatron([*SMALL[:-2], "--train-tokens", "256000"]).raw["train"].values()
    assert length == "256000 tokens"


MAPPED = f"""
--ds-sequence-parallel-size 2 --optimizer-cpu-offload --use-torch-fsdp2 -> parallel: {{cp: 2, offload: true, zero: 3}}
--recompute-granularity selective --use-distributed-optimizer -> parallel: {{recompute: selective, zero: 1}}
--checkpoint-activations --num-virtual-stages-per-pipeline-rank 1 -> parallel: {{recompute: full, chunks: 1}}
--use-megatron-fsdp --data-parallel-sharding-strategy optim_grads -> parallel: {{zero: 2}}
--fp8-hybrid --bf16 --tokenizer-model tok --padded-vocab-size 640 -> {{precision: fp8, tokenizer: {{path: tok}}}}
--fp16 -> loss_scale: {{initial: {2.0**32}, window: 1000 steps, hysteresis: 2, min: 1.0}}
--tokenizer-type NullTokenizer --vocab-file gpt2/vocab.json -> {{model: {{vocab_size: 513}}, tokenizer: {{path: gpt2}}}}
--optimizer fusedadamw --clip-grad 0 -> optimizer: {{name: adamw, clip_grad_norm: null}}
--use-alibi-position-embeddings --embed-layernorm -> model: {{family: bloom}}
{LLAMA} --rotary-base 500 --add-qkv-bias -> model: {{rope_theta: 500.0, family: qwen2}}
{LLAMA} --qk-layernorm --kv-channels 32 -> model: {{family: qwen3, head_dim: 32}}
{LLAMA} --group-query-attention --num-query-groups 2 -> model: {{num_kv_heads: 2, family: llama}}
{LLAMA.lower()} --num-key-value-heads 2 -> model: {{num_kv_heads: 2, tie_embeddings: true, ffn_hidden_size: 128}}
{LLAMA} --untie-embeddings-and-output-weights --position-embedding-type rotary -> model: {{tie_embeddings: false}}
--recompute-activations --num-virtual-stages-per-pipeline-rank 1 -> parallel: {{recompute: selective, chunks: 1}}
--exit-duration-in-mins 1190 --train-tokens 300e2 -> train: {{exit_after: 19h50m, for: 100 steps}}
--iterations-to-skip 7 3 --train-tokens 20480 -> train: {{skip: [4-4 steps, 8-8 steps], for: 20480 tokens}}
--train-tokens 99 --skip-train-iteration-range 3-4 -> train: {{for: 100 steps}}
--train-tokens 99 --pad-vocab-size-to 512 -> train: {{for: 100 steps}}
--lr-warmup-fraction .015 -> lr: {{warmup: 12 samples, decay: 100 steps}}
--lr-decay-tokens 12800 --lr-warmup-fraction .1 --lr-decay-iters 50 -> lr: {{warmup: 40 samples, decay: 12800 tokens}}
--lr-warmup-tokens 2560 --lr-warmup-iters 5 -> lr: {{warmup: 2560 tokens}}
--wandb-project ours -> monitor: {{wandb: ours}}
--save-interval 5 -> checkpoint: {{phases: [{{every: 5 steps}}]}}
--data-path 0.3 a 0.7 b -> data: {{train: [{{path: a, weight: 0.3}}, {{path: b, weight: 0.7}}], split: '969,30,1'}}
--data-path a --eod-mask-loss --eval-iters 3 -> {{data: {{eod_loss: false}}, train: {{evaluate: {{steps: 3}}}}}}
--train-data-path a --valid-data-path b -> data: {{validation: {{valid: [{{path: b}}]}}}}
"""


@pytest.mark.parametrize("line", MAPPED.strip().splitlines())
def test_a_flag_becomes_its_field(line: str) -> None:
    text, _, expected = line.partition(" -> ")
    found = dict(leaves(flags(text).raw))
    for path, value in leaves(yaml.safe_load(expected)):
        assert found[path] == value, path


def test_bert_becomes_a_bert() -> None:
    assert import_megatron(["train_bert.py", *SMALL, "--data-path", "a"]).recipe.model.family == "bert"
    words = "--data-path a --mask-prob 0.2 --vocab-file bert/vocab.txt --no-bias-gelu-fusion"
    words += " --apply-residual-connection-post-layernorm"
    done = import_megatron(["pretrain_bert.py", *SMALL, *words.split()])
    assert done.recipe.model.family == "bert"
    assert field_of(done, "data.masking.probability") == 0.2
    alone = import_megatron(["pretrain_bert.py", *SMALL, "--bert-no-binary-head"])
    assert alone.recipe.model.second_head == "none"
    assert not done.rows_of("differs")
    assert "before each layer" in alone.rows_of("differs")[-1].remark
    with pytest.raises(RecipeError, match="the model has encoder: True, positions: learned, norm: layer, gated: True"):
        import_megatron(["pretrain_bert.py", *SMALL, "--swiglu"])


REPORTED = """
--exit-interval 50 -> left out
--exit-duration-in-mins 30000000 -> not needed
--no-bias-gelu-fusion -> differs
--lr-warmup-tokens 256 -> differs
--train-tokens 300e2 -> not needed
--rotary-base 500 -> not needed
--num-experts 1 -> not needed
--use-flash-attn-v2 -> not needed
--finetune -> left out
--tokenizer-model x/tok.model -> left out
--train-data-path a --valid-data-path $(ls) -> mapped
--eval-iters 0 --data-path a -> left out
--valid-weighted-split-paths v --data-path a -> left out
--data-path 1.0 a -> mapped
--fp8-format hybrid -> mapped
--fp8-format e4m3 -> differs
--fp8-margin 1 -> not needed
--fp8-margin 1 --fp8-hybrid -> differs
--log-num-zeros-in-grad -> not needed
--log-timers-to-tensorboard -> not needed
--profile-step-end 5 -> left out
--test-data-path a -> left out
"""


@pytest.mark.parametrize("line", REPORTED.strip().splitlines())
def test_what_is_reported_of_a_flag(line: str) -> None:
    text, _, kind = line.partition(" -> ")
    assert row_of(flags(text), text.split()[0]).kind == kind


REFUSALS = f"""
--position-embedding-type alibi -> positions: alibi, norm: layer
--embed-layernorm -> embedding_norm: True. The families here are gpt2, bloom, llama, qwen2, qwen3, bert
--position-embedding-type relative --normalization batchnorm -> positions: relative, norm: batchnorm
--no-position-embedding --qk-layernorm -> positions: no, norm: layer; qk_norm: True
{LLAMA} --use-alibi-position-embeddings -> positions: rotary and alibi
--hidden-dropout 0 --fp16 --bf16 -> dropout is 0.0 and --attention-dropout is 0.1; --fp16 and --bf16 are both set
--fp16 --loss-scale 12 --train-samples 9 -> --loss-scale is a fixed scale; --train-samples and --train-iters are both
--lr-decay-style WSD --lr-wsd-decay-iters 9 -> --lr-wsd-decay-style is exponential
--lr-warmup-iters 2 --lr-warmup-samples 3 --seed -> --lr-warmup-iters are both set; --seed has 0 values
--lr-warmup-fraction nan --num-layers two -> fraction is nan. It is a finite number; is two. It is a finite whole number
--train-iters 1e30 --lr 9e9999999999999999 -> a finite whole number of at most 1,000,000,000,000,000,000; finite number
--rampup-batch-size 2 2 --data-path 0.5 a 0.5 -> has 2 values; has 3 words
--data-path a b --num-layers 2 --encoder-num-layers 3 -> Megatron blends by lengths; but --num-layers is 2
--data-path 1 a b c --train-data-path b -> --data-path is b; --data-path and --train-data-path are both set
--num-experts 8 --eval-only True -> --num-experts 8 is set. No family here has; --eval-only True is set. A recipe has no
--step-batch-size-schedule 0:8,9:16 -> --step-batch-size-schedule 0:8,9:16 is set. A recipe's batch grows in equal
--kv-channels 5 --optimizer sgd -> command line --optimizer: optimizer.name is 'sgd'
--kv-channels 5 -> command line --kv-channels: model.head_dim is 5
--lr-decay-style inverse-square-root -> command line --lr-decay-style: lr.schedule is 'inverse-square-root'
--lr-warmup-fraction 1.5 -> command line --lr-warmup-fraction: lr.warmup is '1200 samples'
--exit-duration-in-mins -5 -> command line --exit-duration-in-mins: train.exit_after is '-1h55m'
--use-custom-fsdp --data-parallel-sharding-strategy x -> parallel.zero is 'x'
--global-batch-size 7 -> command line --global-batch-size: batch.global_batch_size is 7
"""


@pytest.mark.parametrize("line", REFUSALS.strip().splitlines())
def test_what_cannot_be_in_a_recipe_is_refused(line: str) -> None:
    text, _, messages = line.partition(" -> ")
    found = refused(*text.split())
    assert found.startswith("command line")
    for message in messages.split("; "):
        assert message in found


def test_missing_flags_other_programs_and_sizes_beyond_reason_are_refused(tmp_path: Path) -> None:
    with pytest.raises(RecipeError) as caught:
        import_megatron(["pretrain_t5.py", "--tokenizer-type", "SentencePieceTokenizer", "--num-layers", "2"])
    for text in ("--hidden-size is missing", "--micro-batch-size is missing", "--global-batch-size is missing",
                 "--lr is missing", "--train-samples is missing", "vocabulary of SentencePieceTokenizer",
                 "the program is pretrain_t5.py"):  # fmt: skip
        assert text in str(caught.value)
    ramp = "--train-samples 100000 --rampup-batch-size 1 1 1000 --global-batch-size 1000000000 --micro-batch-size 1"
    with pytest.raises(RecipeError, match="levels"):
        script(tmp_path, f"torchrun --nnodes 999999 pretrain_gpt.py {' '.join(SMALL[:-2])} {ramp}\n")


@pytest.mark.parametrize("values", [[], [""], ["-1"], ["9" * 5000], ["1", "1", "1e18"], ["$X"]], ids=range(6))
def test_no_value_of_a_flag_is_a_traceback(values: list[str]) -> None:
    problems = []
    mapped = [name for name in OTHERS[0][2] if name != "deepspeed"]
    for name in [*mapped, *next(iter(REFUSED.values()))]:
        try:
            import_megatron([*SMALL, "--fp16", "--data-path", "a", f"--{name}", *values])
        except RecipeError as error:
            problems += error.problems
    assert problems
    for problem in problems:
        assert problem.place, problem
        assert problem.rule or problem.remedy, problem


def test_every_flag_of_the_table_is_understood_or_refused() -> None:
    for why, names in REFUSED.items():
        for name in {name.partition("=")[0] for name in names if ":" not in name}:
            assert f" is set. {why[:1].upper()}{why[1:]}" in refused(f"--{name}", "7").replace(" 7 ", " ")
    names = [name for *_, names in OTHERS[1:] for name in names if not set("*?:") & set(name)]
    others = [name for name in names if name not in ("eval-interval", "eval-iters")]
    done = import_megatron([*SMALL, *(f"--{name}" for name in others)])
    assert len(others) > 60
    assert not done.rows_of("not understood")
    assert {row.flag for row in done.rows} >= {f"--{name}" for name in others}


def test_what_the_table_says_of_this_program_is_so() -> None:
    fields, remarks = all_fields(), [remark for _, remark, _ in OTHERS] + [*REFUSED]
    assert {path for table in FIELDS.values() for _, path, *_ in table} <= fields.keys()
    named = {word for remark in remarks for word in re.findall(r"[a-z_]+\.[a-z_]+", remark) if "json" not in word}
    assert named - {"monitor.carbon"} <= {path.replace("from_", "from") for path in fields}
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    for remark in remarks:
        for option in re.findall(r"bloomery train.*?(--[a-z]+)", remark):
            assert option in parser.format_help()
    record = step_record(
        1,
        loss_scale=2.0,
        memory_bytes=1,
        megatron_tflops=1.0,
        params_norm=1.0,
        timers={"forward": 1.0},
        energy={"joules": 1.0, "measured_seconds": 1.0, "device_seconds": 1.0},
    )
    curves = {tag for each in (record, validation_record(1, group="valid")) for tag, _, _ in scalars(each)}
    assert set(RECORDED.values()) <= curves
    assert (torch.float8_e4m3fn, torch.float8_e5m2) == (FORWARD, GRADIENT)  # hybrid


# ---------------------------------------------------------------- weighted split paths

TRAIN_FILE = '"TRAIN: 0.7 0:0.950 shards/en, 0.3 0:0.950 shards/fr"\n'


def test_tr11_with_its_file_of_splits(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "train-splits.txt").write_text(TRAIN_FILE)
    done = script(tmp_path, TR11, given={"MEGATRON": str(tmp_path)})
    sources = [{"path": "shards/en", "weight": 0.7}, {"path": "shards/fr", "weight": 0.3}]
    assert done.raw["data"] == {"train": sources, "split": "0.950,0.050,0"}
    assert done.recipe.train.evaluate is not None
    assert row_of(done, "--valid-weighted-split-paths-path").kind == "left out"


SPLITS = """
T: 1 0.1:1 a
T: 1 0:0.9 a, 1 0:0.8 b
T: 1 0:1 a|U: 1 0:1 b
T: 1 a
T: 1 0.9:0.5 a
T: 1 0:1.5 a
T: $W 0:1 a
"""


@pytest.mark.parametrize("words", SPLITS.strip().splitlines())
def test_a_split_that_a_recipe_cannot_have_is_refused(words: str, tmp_path: Path) -> None:
    message = "A recipe has one group, all cut at one place"
    assert message in refused("--train-weighted-split-paths", *words.split("|"))
    (tmp_path / "train.txt").write_text(words.replace("|", '" "').join('""'))
    assert message in refused("--train-weighted-split-paths-path", str(tmp_path / "train.txt"))
    whole = flags("--train-weighted-split-paths T: 2 0:1 a, 1 0:1.0 b")
    assert whole.raw["data"] == {"train": [{"path": "a", "weight": 2.0}, {"path": "b", "weight": 1.0}]}
    assert "are both set" in refused("--train-weighted-split-paths", "T: 1 0:1 a", "--data-path", "b")


@pytest.mark.parametrize("text", ["", '"T: 1 0:1 a', "T: 1 0:1 a"])
def test_a_file_of_splits_that_is_none_is_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "train.txt").write_text(text)
    assert "A recipe has one group" in refused("--train-weighted-split-paths-path", str(tmp_path / "train.txt"))


# ---------------------------------------------------------------- ds_config

_SEEN = 'cat <<EOT > ds.json\n{"fp16": {"enabled": true, "initial_scale_power": 12}}\nEOT\n'


@pytest.mark.parametrize("before", ["python make.py | jq . >", f"{_SEEN}sed -i s/1/2/", f"{_SEEN}jq .x=1 t.json >", ""])
def test_a_ds_config_that_cannot_be_seen_is_refused_unless_it_may_be_left_out(tmp_path: Path, before: str) -> None:
    (tmp_path / "ds.json").write_text('{"fp16": {"enabled": true, "initial_scale_power": 9}}')  # of an older job
    flag = "--deepspeed_config ds.json" if before else ""
    text = f"{before} ds.json\npython pretrain_gpt.py FLAGS --deepspeed {flag} --fp16\n"
    with pytest.raises(RecipeError, match=r"ds_config.*--ds-config FILE, or import without it: --without-ds-config"):
        script(tmp_path, text)
    done = script(tmp_path, text, without_ds_config=True)
    assert any(row.flag == "--deepspeed_config" for row in done.rows_of("left out"))
    assert done.recipe.loss_scale.initial == 65536
    assert "'nowhere.json' cannot be seen" in refused("--deepspeed_config", "nowhere.json")


@pytest.mark.parametrize("path", ["ds.json", "/nowhere/tmp/ds.json", "$PWD/new/ds.json"])
def test_a_ds_config_that_the_script_writes_is_read(tmp_path: Path, path: str) -> None:
    text = f"{_SEEN.replace('ds.json', path)}pretrain_gpt.py FLAGS --deepspeed_config {path} --fp16\n"
    done = script(tmp_path, text)
    assert done.recipe.loss_scale.initial == 4096
    assert "though --deepspeed is not there" in done.yaml()


def test_the_ds_config_that_the_user_names_counts(tmp_path: Path) -> None:
    (named := tmp_path / "ds.json").write_text('{"fp16": {"enabled": "auto", "initial_scale_power": 9}}')
    text = f"{_SEEN}pretrain_gpt.py FLAGS --deepspeed_config ds.json --fp16\n"
    assert script(tmp_path, text, ds_config=named).recipe.loss_scale.initial == 512
    for flag in ("--sequence-parallel", "--use-flash-attn", "--untie-embeddings-and-output-weights"):
        with pytest.raises(RecipeError, match=r"\$MORE has no value. It may hold flags"):
            script(tmp_path, f"pretrain_gpt.py FLAGS {flag} $MORE\n")


def test_every_contradiction_shows_both_values(tmp_path: Path) -> None:
    text = TR1
    for old, new in (
        ('"stage": $ZERO_STAGE', '"stage": 2'),
        ('"train_batch_size": $GLOBAL_BATCH_SIZE', '"train_batch_size": 512'),
        ('_per_gpu": $MICRO_BATCH_SIZE', '_per_gpu": 4'),
        ('"gradient_clipping": 1.0', '"gradient_clipping": 0.5'),
        ('"fp16": {"enabled": true', '"bf16": {"enabled": true}, "fp16": {"enabled": false'),
    ):
        assert old in text
        text = text.replace(old, new)
    with pytest.raises(RecipeError) as caught:
        script(tmp_path, text)
    for shown in ("stage is 2 but --zero-stage is 1", "is 512 but --global-batch-size is 1024",
                  "is 4 but --micro-batch-size is 1", "is 0.5 but --clip-grad is 1.0",
                  "fp16.enabled is false but the command line has --fp16",
                  "bf16.enabled is true but the command line has no --bf16"):  # fmt: skip
        assert shown in str(caught.value)


def test_clipping_and_zero_are_those_of_the_ds_config_which_deepspeed_reads(tmp_path: Path) -> None:
    done = deepspeed(tmp_path, {"gradient_clipping": 0.3})
    assert (field_of(done, "optimizer.clip_grad_norm"), done.recipe.parallel.zero) == (0.3, 0)
    assert field_of(deepspeed(tmp_path, {"gradient_clipping": 0}), "optimizer.clip_grad_norm") is None
    (row,) = deepspeed(tmp_path, {"steps_per_print": 5}).rows_of("differs")
    assert "it would not clip" in row.remark
    for precision, stage, zero in (("--bf16", 3, 3), ("--bf16", 0, 1), ("--fp16", 0, 0)):
        done = deepspeed(tmp_path, {"zero_optimization": {"stage": stage}}, precision)
        assert {row.result for row in done.rows if row.field == "parallel.zero"} == {str(zero)}
    with pytest.raises(RecipeError, match="--zero-stage is 0 but that of the ds_config is 1"):
        deepspeed(tmp_path, {"zero_optimization": {"stage": 1}}, "--bf16", "--zero-stage", "0")
    assert deepspeed(tmp_path, "\ufeff{}").recipe.parallel.zero == 0


def test_every_key_of_a_ds_config_is_a_row(tmp_path: Path) -> None:
    config: dict[str, Any] = {
        "train_batch_size": 8, "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 2,
        "gradient_clipping": 1.0, "steps_per_print": 5, "my_own": 1, "curriculum_learning": {"enabled": False},
        "fp16": {"enabled": True, "loss_scale": 0, "initial_scale_power": 12, "loss_scale_window": 500,
                 "hysteresis": 2, "min_loss_scale": 1, "auto_cast": False},
        "bf16": {"enabled": False},
        "zero_optimization": {"stage": 2, "overlap_comm": True, "offload_optimizer": {"device": "cpu"}},
        "optimizer": {"type": "AdamW", "params": {"betas": [0.9, "auto"], "lr": "auto", "bias_correction": True}},
        "nebula": {"enabled": True, "persistent_storage_path": "/blob/run", "num_of_version_in_retention": 3,
                   "persistent_time_interval": 100, "enable_nebula_load": True, "load_path": "/blob/old"},
    }  # fmt: skip
    done = deepspeed(tmp_path, config, "--fp16", "--save-interval", "50")
    kinds = {row.flag.removeprefix("ds_config "): row.kind for row in done.rows if row.flag.startswith("ds_config ")}
    sections = ("fp16", "bf16", "zero_optimization", "nebula")
    expected = {f"{key}.{inner}" for key in sections for inner in config[key]} - {"zero_optimization.offload_optimizer"}
    expected |= {"zero_optimization.offload_optimizer.device"}
    assert kinds.keys() == expected | {key for key in config if key not in sections}
    assert {name for name, kind in kinds.items() if kind == "not understood"} == {"fp16.auto_cast", "my_own"}
    left_out = {name for name, kind in kinds.items() if kind == "left out"}
    assert left_out == {"nebula.load_path"}
    assert (done.recipe.parallel.zero, done.recipe.parallel.offload) == (2, True)
    phases = [{"every": "50 steps"}]
    assert done.raw["checkpoint"] == {
        "phases": phases,
        "upload": {"to": "/blob/run", "every": "100s"},
        "keep": {"last": 3},
    }
    config["nebula"]["enabled"] = False
    assert deepspeed(tmp_path, config, "--fp16", "--save-interval", "50").raw["checkpoint"] == {"phases": phases}


WRONG = """
{"train_batch_size": 1_024} -> not valid JSON
[{}] -> it is no object. A ds_config is a JSON object: numbers have no underscores
{"gradient_clipping": NaN} -> gradient_clipping is NaN. It is a finite number
{"gradient_clipping": 1e30} -> of at most 1,000,000,000,000,000,000
{"train_batch_size": "many"} -> train_batch_size is many. It is a finite whole number
{"fp16": {"enabled": true, "loss_scale": 128}} -> fp16.loss_scale 128 is set. The scale is dynamic here
{"fp16": {"enabled": true, "initial_scale_power": 5000}} -> initial_scale_power: loss_scale.initial is Infinity
{"scheduler": {"type": "WarmupLR", "params": {}}} -> scheduler.type WarmupLR is set
{"curriculum_learning": {"enabled": true}} -> is set. A recipe has no such field, and it changes what is trained
{"zero_optimization": {"offload_optimizer": {"device": "nvme"}}} -> offload_optimizer.device is nvme. Optimizer state
{"zero_optimization": {"offload_param": {"device": "cpu"}}} -> offload_param.device cpu is set. Weights stay on
{"compression_training": {"a": {"b": {"enabled": true}}}} -> compression_training
"""


@pytest.mark.parametrize("line", [*WRONG.strip().splitlines(), "[" * 10_000 + " -> not valid JSON"], ids=range(13))
def test_a_ds_config_that_is_wrong_or_does_something_else_is_refused(tmp_path: Path, line: str) -> None:
    config, _, message = line.partition(" -> ")
    with pytest.raises(RecipeError, match=re.escape(message)) as caught:
        deepspeed(tmp_path, config, "--fp16")
    assert all(problem.place for problem in caught.value.problems)
