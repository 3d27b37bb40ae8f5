"""The command as a user types it: help, check, inspect; exit codes, JSON contracts, and no traceback for a mistake."""

# ruff: noqa: E501  (tables of cases, one a line)

from __future__ import annotations

import argparse
import importlib
import json
import os
import resource
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from bloomery.cli.main import COMMANDS, parser_of
from bloomery.config.load import shipped_recipes

Command = Callable[..., tuple[int, str, str]]
BLOOMERY = [sys.executable, "-m", "bloomery"]

BLOOM = """\
name: small-bloom
model: {family: bloom, num_layers: 2, hidden_size: 336, num_heads: 8, seq_length: 16, vocab_size: 100}
batch: {micro_batch_size: 1, global_batch_size: 4}
lr: {peak: 1e-3}
train: {for: 100 steps}
"""


def run(*words: str, **options: Any) -> subprocess.CompletedProcess[str]:
    """The real command in a process of its own."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run([*BLOOMERY, *words], capture_output=True, text=True, env=environment, timeout=60, **options)


def answer(command: Command, *words: str) -> Any:
    """The JSON that a command prints."""
    code, out, err = command(*words, "--json")
    assert code == 0, err
    return json.loads(out)


def refusal(command: Command, *words: str) -> str:
    """What the user is told on standard error by a command that refuses with exit code 2."""
    code, out, err = command(*words)
    assert code == 2, (code, out, err)
    assert err
    assert "Traceback" not in err
    return err


# ---------------------------------------------------------------- the command itself


def test_help_answers_in_less_than_a_third_of_a_second() -> None:
    """Of a core's time: other tests may have the cores for longer."""
    seconds = []
    for _ in range(5):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        assert run("--help").returncode == 0
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        seconds.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    assert min(seconds) < 0.3, seconds


def test_what_only_answers_imports_no_torch() -> None:
    code = """
import sys
from bloomery.cli.main import main
for words in ("--help", "check tr1-13b --explain", "inspect schedule tr1-13b", "inspect model tr1-13b", "train --help",
              "generate --help", "quickstart --help", "plan --help", "nonsense", "plan tr1-13b"):
    main(words.split())
    heavy = {"torch", "transformers"} | ({"numpy"} if words != "plan tr1-13b" else set())  # it ranks many layouts
    assert not heavy & sys.modules.keys(), words
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_without_arguments_runs_or_says_which_one_it_needs(
    name: str, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = importlib.import_module(f"bloomery.cli.{COMMANDS[name][0]}")
    own = "run" if hasattr(module, "run") else f"run_{name.replace('-', ' ').split()[-1]}"
    monkeypatch.setattr(module, own, lambda args: 42)
    code, _, err = command(*name.split())
    needs = (
        []
        if name in ("calibrate", "doctor", "init", "quickstart", "recipes", "import megatron")
        else ["the following arguments are required"]
    )
    assert (code, [text for text in needs if text not in err]) == (2 if needs else 42, [])


def test_help_lists_every_command_and_each_has_help_of_its_own(command: Command) -> None:
    code, out, _ = command("--help")
    assert code == 0
    for name in COMMANDS:
        assert f"\n  {name} " in out
        code, own, _ = command(*name.split(), "--help")
        assert code == 0
        assert own.startswith(f"usage: bloomery {name} ")


def test_half_a_command_shows_its_other_halves(command: Command) -> None:
    assert command()[0] == 2
    code, out, _ = command("inspect")
    assert code == 2
    assert "inspect schedule" in out
    assert "quickstart" not in out
    assert command("inspect", "--help")[0] == 0


@pytest.mark.parametrize(
    ("words", "meant"),
    [
        (["chekc", "tr1-13b"], "did you mean `bloomery check`?"),
        (["inspect", "shedule", "tr1-13b"], "did you mean `bloomery inspect schedule`?"),
        (["xyzzy"], "see `bloomery --help`."),
    ],
)
def test_an_unknown_command_is_told_what_was_meant(command: Command, words: list[str], meant: str) -> None:
    assert meant in refusal(command, *words)


@pytest.mark.parametrize(
    "words", [["check"], ["inspect", "schedule"], ["check", "tr1-13b", "--explian"], ["inspect", "model"]]
)
def test_wrong_arguments_are_a_refusal_that_names_only_what_is_wrong(command: Command, words: list[str]) -> None:
    err = refusal(command, *words)
    assert "RECIPE" in err
    assert "required: RECIPE, section" not in err


@pytest.mark.parametrize("words", [["check", "bloom-176b", "--explain"]])
def test_a_reader_that_has_seen_enough_is_no_error(words: list[str]) -> None:
    process = subprocess.Popen([*BLOOMERY, *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.close()
    assert process.stderr.read() == ""
    assert process.wait(60) == 0
    process.stderr.close()


# ---------------------------------------------------------------- check


def test_check_passes_every_shipped_recipe(command: Command) -> None:
    for name in shipped_recipes():
        code, out, err = command("check", name)
        assert (code, err) == (0, "")
        assert out.startswith(f"{name}: ok.")
    assert command("check", "tr1-13b")[1].startswith(
        "tr1-13b: ok. 12.85B parameters, 311,541 steps, 614.4B tokens, fing"
    )


def test_check_explains_every_value(command: Command) -> None:
    code, out, _ = command("check", "bloom-azure-25b", "lr.peak=1e-4", "--explain")
    assert code == 0
    rows = {line.split()[0]: line for line in out.splitlines()}
    assert rows["lr.peak"].endswith("command line 'lr.peak=1e-4'")
    assert rows["model.num_layers"].endswith("bloom-azure-25b.yaml:5")
    assert "bloom-azure-20b.yaml:" in rows["model.hidden_size"]
    assert rows["model.norm_eps"].endswith("default of family bloom")
    assert rows["lr.schedule"].split()[1] == "cosine"
    assert rows["monitor.tensorboard"].split() == ["monitor.tensorboard", "true", "default"]
    assert rows["train.skip"].split() == ["train.skip", "[]", "default"]
    assert rows["monitor.carbon"].split() == ["monitor.carbon", "null", "default"]


def test_check_answers_in_json(command: Command) -> None:
    facts = answer(command, "check", "tr1-13b", "seed=3")
    assert facts["ok"] is True
    assert facts["name"] == "tr1-13b"
    assert len(facts["fingerprint"]) == 16
    assert facts["values"]["seed"] == {"value": 3, "origin": "command line 'seed=3'"}
    assert facts["values"]["train.for"]["value"] == "300000000 samples"


def test_check_answers_in_json_also_when_the_recipe_is_wrong(command: Command) -> None:
    code, out, err = command("check", "tr1-13b", "lr.peak=-1", "lr.pek=3", "--json")
    assert code == 2
    facts = json.loads(out)
    assert facts["ok"] is False
    assert [set(problem) for problem in facts["problems"]] == [{"what", "rule", "remedy", "place"}] * 2
    assert len(err.splitlines()) == 2


def test_every_mistake_is_reported_at_once_without_a_traceback(tmp_path: Path) -> None:
    (tmp_path / "my.yaml").write_text(BLOOM.replace("seq_length", "seq_lenght").replace("peak: 1e-3", "peak: -1e-3"))
    done = run("check", "my.yaml", cwd=tmp_path)
    assert done.returncode == 2
    assert done.stdout == ""
    assert [line.split(":")[2] for line in done.stderr.splitlines()] == ["2", "4"]
    assert "Traceback" not in done.stderr
    assert "Did you mean model.seq_length?" in done.stderr


HOSTILE = [
    "lr.peak=.nan", "lr.peak=.inf", "lr.peak=1e999", "lr.peak=", "lr.peak=-1", "lr.peak=x", "lr.peak='1e-4'", "=3", "lr..peak=1",
    "lr.peak", "model=3", "model=[]", "model={}", "lr=", "data.train.5.path=x", "data.train.0=", "data.train=[]", "data.train=[[]]",
    "train.for=10", "train.for=-5 steps", "train.for=0 steps", "train.for=''", "train.for=1e9", "train.for=9999T steps",
    "train.for=" + "9" * 5000 + " steps", "optimizer.betas=[0.9]", "optimizer.betas=[0.9, .nan]", "optimizer.betas={}", "model.num_layers=1.0",
    "model.num_layers=" + "9" * 5000, "model.num_layers=" + "9" * 40, "model.num_heads=1000000000", "seed=-1", "seed=1e3", "name=ü",
    "name=''", "name=a b", "name=\t", "name=../../etc", "name=" + "x" * 5000, "train.skip=['10-5 steps']", "train.skip=['a-b steps']",
    "train.exit_after=0s", "train.exit_after=soon", "batch.global_batch_size=0", "batch.global_batch_size=1000000000000",
    "batch.rampup.increment=0", "batch.rampup.samples=-1", "batch.rampup=5", "lr.peak=*x", "lr.peak=&x", "lr.peak=!!python/none", "lr.peak=@",
    "lr.peak={", "lr.peak=\x00", "lr.peak=\udcff", "\udcff=1", "parallel.tp=3", "parallel.zero=9", "precision=fp4", "launch.nodes=7",
    "model.family=gpt3", "model.family=[gpt2]", "model.family={a: b}", "model.family=null", "data.split=a", "data.order=random",
    "checkpoint.phases.9.every=1 step", "checkpoint.phases=[]", "checkpoint.keep.last=0", "monitor.carbon.country=France",
    "a.b.c.d.e.f.g=1", "base=x", "<<=x", "loss_scale=null", "data.validation.oscar=3", "data.validation={a: {b: c}}",
]  # fmt: skip


@pytest.mark.parametrize("override", HOSTILE, ids=lambda text: repr(text)[:40])
def test_a_hostile_override_is_a_clear_refusal(command: Command, override: str) -> None:
    err = refusal(command, "check", "tr1-13b", override)
    for line in err.splitlines():
        assert line.startswith("bloomery: command line"), line
        assert line.endswith((".", "?")), line
        assert "pydantic" not in line
        assert "instance of" not in line


def test_a_surrogate_on_the_real_command_line_is_a_clear_refusal() -> None:
    done = subprocess.run([*BLOOMERY, "check", "tr1-13b", b"name=\xff\xfe"], capture_output=True, timeout=60)
    assert done.returncode == 2
    assert b"Traceback" not in done.stderr


# ---------------------------------------------------------------- inspect schedule


def test_the_schedule_of_tr1_is_that_of_its_published_logs() -> None:
    done = run(
        "inspect",
        "schedule",
        "tr1-13b",
        "--json",
        "--at-steps",
        "4961,4962,29020,311541",
        "--at-samples",
        "216320,10698064",
    )
    assert done.returncode == 0, done.stderr
    facts = json.loads(done.stdout)
    assert facts["train_steps"] == 311_541
    first = {level["global_batch"]: level["first_step"] for level in facts["levels"]}
    assert {batch: first[batch] for batch in (16, 32, 48, 64, 1024)} == {
        16: 1,
        32: 4962,
        48: 7442,
        64: 9096,
        1024: 23_457,
    }
    assert len(facts["levels"]) == 64
    assert facts["warmup_ends_at_step"] == 8641
    at = {row["step"]: row for row in facts["at_steps"]}
    assert at[29_020]["consumed_samples"] == 10_698_064
    assert [at[step]["global_batch"] for step in (4961, 4962, 29_020)] == [16, 32, 1024]
    assert at[4961]["consumed_samples"] == 4961 * 16
    assert at[311_541]["lr"] == 1e-5
    assert facts["at_samples"][0] == {"samples": 216_320, "lr": 1e-4}
    assert facts["at_samples"][1]["lr"] == at[29_020]["lr"]


def test_the_schedule_json_has_exactly_the_keys_of_its_contract(command: Command) -> None:
    facts = answer(command, "inspect", "schedule", "tr1-13b", "--at-steps", "1", "--at-samples", "1")
    assert set(facts) == {
        "name", "train_steps", "train_samples", "train_tokens", "levels", "warmup_samples", "warmup_ends_at_step",
        "decay_samples", "phases", "at_steps", "at_samples",
    }  # fmt: skip
    assert all(set(level) == {"global_batch", "first_step", "consumed_samples"} for level in facts["levels"])
    assert [set(row) for row in facts["at_steps"]] == [{"step", "consumed_samples", "global_batch", "lr"}]
    assert [set(row) for row in facts["at_samples"]] == [{"samples", "lr"}]
    assert all(
        set(phase) == {"first_step", "last_step", "every_steps", "every_seconds", "saves"} for phase in facts["phases"]
    )


def test_the_answer_for_people_has_the_facts_of_the_json(command: Command) -> None:
    code, out, _ = command("inspect", "schedule", "tr1-13b", "--at-steps", "29_020")
    assert code == 0
    lines = [line.split() for line in out.splitlines()]
    for row in (["train_steps", "311,541"], ["32", "4,962", "79,376"], ["consumed_samples", "10,698,064"]):
        assert row in lines
    assert "... and 48 more, with --json" in out
    _, out, _ = command("inspect", "model", "bloom-1.3b")
    lines = [line.split(maxsplit=1) for line in out.splitlines()]
    assert ["groups.mlp", "805,552,128"] in lines
    assert any(name == "alibi_slopes" and slopes.startswith("0.7071068, 0.5, ") for name, slopes in lines)


@pytest.mark.parametrize("steps", ["0", "1,0", "311542"])
def test_steps_outside_the_training_are_refused_with_the_range(command: Command, steps: str) -> None:
    err = refusal(command, "inspect", "schedule", "tr1-13b", f"--at-steps={steps}")
    assert "the range is 1 to 311,541" in err


def test_samples_below_zero_are_refused_and_those_beyond_the_end_are_not(command: Command) -> None:
    for number in ("-1", "9" * 4000):
        err = refusal(command, "inspect", "schedule", "tr1-13b", f"--at-samples={number}")
        assert "argument --at-samples: " in err
        assert "is not an integer from 0 to" in err
    facts = answer(command, "inspect", "schedule", "tr1-13b", "--at-samples", "999_999_999_999")
    assert facts["at_samples"][0]["lr"] == 1e-5
    assert "argument --at-steps: invalid" in refusal(command, "inspect", "schedule", "tr1-13b", "--at-steps", "1,,2")


def test_an_override_that_a_command_does_not_read_is_checked_and_reported(command: Command) -> None:
    plain = command("inspect", "model", "tr1-13b", "--json")
    code, out, err = command("inspect", "model", "tr1-13b", "lr.peak=1e-3", "--json")
    assert (code, out) == plain[:2]
    assert err == "bloomery: warning: 'lr.peak=1e-3' has no effect: this command does not read lr\n"
    assert refusal(command, "inspect", "model", "tr1-13b", "lr.peak=[]")
    needed = ("train.evaluate={every: 10 steps, steps: 1}", "data={train: [{path: x}]}", "data.split=90,10")
    assert "'data.split=90,10' has no effect" not in command("inspect", "model", "tr1-13b", *needed)[2]


# ---------------------------------------------------------------- inspect model


def test_the_model_json_counts_its_own_and_the_padded_vocabulary(command: Command) -> None:
    facts = answer(command, "inspect", "model", "tr1-13b")
    assert set(facts) == {
        "name", "family", "parameters", "parameters_without_embeddings", "groups", "vocab_size", "padded_vocab_size",
        "padded_parameters", "flops_per_token",
    }  # fmt: skip
    assert facts["parameters"] == 12_853_386_240 == sum(facts["groups"].values())
    assert (facts["vocab_size"], facts["padded_vocab_size"]) == (50_257, 50_304)
    assert facts["padded_parameters"] - facts["parameters"] == (50_304 - 50_257) * 5120


@pytest.mark.parametrize(
    ("heads", "expected"),
    [
        (12, [2.0**-i for i in range(1, 9)] + [2.0**-0.5, 2.0**-1.5, 2.0**-2.5, 2.0**-3.5]),
        (112, [2.0 ** (-i / 8) for i in range(1, 65)] + [2.0 ** (-i / 16) for i in range(1, 97, 2)]),
    ],
)
def test_alibi_slopes_for_any_number_of_heads(
    command: Command, tmp_path: Path, heads: int, expected: list[float]
) -> None:
    recipe = tmp_path / "bloom.yaml"
    recipe.write_text(BLOOM)
    facts = answer(command, "inspect", "model", str(recipe), f"model.num_heads={heads}")
    assert len(facts["alibi_slopes"]) == heads
    assert facts["alibi_slopes"] == pytest.approx(expected, rel=1e-12)


def test_every_option_says_what_it_does_and_its_default() -> None:
    for name, (module, _) in COMMANDS.items():
        for action in parser_of(name, importlib.import_module(f"bloomery.cli.{module}"))._actions:
            where = f"{name} {action.option_strings or action.dest}"
            assert action.help, f"{where} has no help"
            if action.nargs != 0 and action.default not in (None, [], ""):
                assert "default" in action.help or action.help == argparse.SUPPRESS, f"{where} does not say its default"


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_shells_complete_commands_options_recipes_and_fields(command: Command, tmp_path: Path, shell: str) -> None:
    code, script, _ = command("completion", shell)
    assert (code, " --top-p" in script, "tr1-13b" in script) == (0, True, True)
    (tmp_path / "script").write_text(script)
    if shell == "zsh" or shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed, or answers a terminal only")
    cases = {
        "ins": "inspect",
        "inspect sam": "sample",
        "train quickstart lr.pe": "lr.peak=",
        "generate x --top-": "--top-k",
    }
    for line, found in cases.items():
        ask = f"COMP_WORDS=(bloomery {line}); COMP_CWORD={len(line.split())}; _bloomery; echo ${{COMPREPLY[@]}}"
        ask = ask if shell == "bash" else f"complete -C 'bloomery {line}'"
        done = subprocess.run([shell, "-c", f"source {tmp_path / 'script'}; {ask}"], capture_output=True, text=True)
        assert found in done.stdout.split(), (line, done)
