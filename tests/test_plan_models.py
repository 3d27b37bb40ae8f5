"""The planner's models: published figures, the search, forecasts, calculators, and the benchmark that judges them."""

from __future__ import annotations

import csv
import json
import random
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from bloomery.base.errors import RecipeError
from bloomery.config.load import load_recipe
from bloomery.config.recipe import Recipe
from bloomery.families import registry
from bloomery.plan.answer import answer, stored_plan
from bloomery.plan.calculators import activation_bytes, days, gpt, state_bytes, tflops
from bloomery.plan.calibrate import entry, store, trainings
from bloomery.plan.candidates import COLUMNS, Grid, Question, setup_of
from bloomery.plan.constants import fitted
from bloomery.plan.forecast import Assumptions, forecast, write_minutes
from bloomery.plan.hardware import Machine, here, read_catalogue, shipped
from bloomery.plan.memory import memory
from bloomery.plan.search import Ranking, layout_name, preference, with_layout
from bloomery.plan.step_time import PARTS, gemm_seconds, step_time
from bloomery.plan.trials import Trial
from bloomery.sizing.check import layout_problems
from bloomery.sizing.layout import Layout, Place, world_size
from bloomery.sizing.memory import held_elements, weight_bytes
from conftest import Workshop
from monitor_samples import step_record

Command = Callable[..., tuple[int, str, str]]
ROOT = Path(__file__).parents[1]
A100 = Machine.of(shipped(), "a100-80g", None, 8)
BIG = ["batch.rampup=null"]


def recipe(name: str, *overrides: str) -> Recipe:
    return load_recipe(name, list(overrides)).recipe


# ---------------------------------------------------------------- calculators


@pytest.mark.parametrize(
    ("layers", "hidden", "heads", "micro_batch", "pp", "chunks", "without", "with_both"),
    [
        (48, 6144, 64, 4, 1, 1, 59.25, 9.56),
        (96, 12288, 96, 1, 8, 3, 66.84, 12.35),
        (105, 20480, 128, 1, 35, 3, 114.02, 23.08),
        (128, 25600, 160, 1, 64, 1, 131.25, 26.56),
    ],
    ids=["22B", "175B", "530B", "1T"],
)
def test_activations_equal_the_published_figure(
    layers: int, hidden: int, heads: int, micro_batch: int, pp: int, chunks: int, without: float, with_both: float
) -> None:
    shape = gpt(layers=layers, hidden=hidden, vocab=51200, seq=2048, heads=heads)
    given = {"micro_batch": micro_batch, "tp": 8, "pp": pp, "chunks": chunks}
    plain = activation_bytes(shape, **given, recompute="none", sequence_parallel=False)
    small = activation_bytes(shape, **given, recompute="selective", sequence_parallel=True)
    assert (round(plain / 2**30, 2), round(small / 2**30, 2)) == (without, with_both)


def test_tflops_equal_the_log_line_of_bloom() -> None:
    shape = gpt(layers=70, hidden=14336, vocab=250880, seq=2048)
    found = tflops(shape, global_batch=2048, gpus=384, step_seconds=105.22, recompute="full")
    assert round(found["megatron"], 2) == 149.02
    assert found["hardware"] == pytest.approx(found["megatron"])


def test_days_equal_the_printed_ones() -> None:
    printed = days(tokens=300e9, params=13e9, gpus=256, tflops=45, factor=8)
    assert round(printed, 2) == 31.35
    assert round(days(tokens=300e9, params=13e9, gpus=256, tflops=45, factor=6), 2) == 23.51


def test_the_schemes_take_16_18_and_20_bytes() -> None:
    rows = {row["scheme"]: row for row in state_bytes(1e9, 8)}
    assert [rows[name]["zero0_bytes"] for name in ("zero_paper", "megatron", "deepspeed_bf16")] == [16e9, 18e9, 20e9]
    assert rows["deepspeed_bf16"]["zero1_bytes"] == 8e9 + 12e9 / 8
    assert rows["zero_paper"]["zero3_bytes"] == 16e9 / 8


def test_calculators_answer_on_the_command_line(command: Command) -> None:
    shape = ["--layers", "70", "--hidden", "14336", "--vocab", "250880", "--seq", "2048"]
    measured = ["--global-batch", "2048", "--gpus", "384", "--step-seconds", "105.22", "--recompute", "full", "--json"]
    found = json.loads(command("plan", "tflops", *shape, *measured)[1])
    assert round(found["tflops_per_gpu"]["megatron"], 2) == 149.02
    words = ["--tokens", "300B", "--params", "13B", "--gpus", "256", "--tflops", "45", "--factor", "8", "--json"]
    assert round(json.loads(command("plan", "days", *words)[1])["days"], 2) == 31.35
    shape = ["--layers", "48", "--hidden", "6144", "--seq", "2048", "--heads", "64"]
    small = [*shape, "--micro-batch", "4", "--tp", "8", "--params", "22B", "--json"]
    facts = json.loads(command("plan", "memory", *small)[1])
    assert round(facts["activation_bytes"] / 2**30, 2) == 59.25
    assert facts["schemes"][0]["zero0_bytes"] == 18 * 22_000_000_000


def fake_run(folder: Path, **measured: Any) -> Path:
    """Of the recipe quickstart, at step 50."""
    record = step_record(50, consumed_tokens=102_400, **measured)
    folder.mkdir()
    (folder / "metrics.jsonl").write_text(json.dumps(vars(record)) + "\n")
    foretold = stored_plan(recipe("quickstart"), "NVIDIA H200")
    (folder / "events.jsonl").write_text(json.dumps({"kind": "plan", "step": 0, **foretold}) + "\n")
    (folder / "recipe.yaml").write_text("base: quickstart\n")
    return folder


def test_runs_are_scored_and_the_trend_is_shown(tmp_path: Path, command: Command) -> None:
    runs = [
        fake_run(tmp_path / name, time=began, tokens_per_second=speed, seconds_per_step=2048 / speed)
        for name, began, speed in (("old", 1.0, 10_000.0), ("new", 2.0, 100_000.0))
    ]
    code, out, err = command("plan", "--score", *map(str, reversed(runs)), "--json")
    assert code == 0, err
    found = json.loads(out)
    assert [Path(row["run"]).name for row in found["runs"]] == ["old", "new"]
    for row in found["runs"]:
        step = row["step_seconds"]
        assert step["error"] == pytest.approx(step["predicted"] / step["measured"] - 1)
        assert row["machine"] == "h200"
        assert step["measured"] == pytest.approx(2048 / (10_000 if row is found["runs"][0] else 100_000))
        assert "memory_bytes" not in row, "it measured none"
    errors = [abs(row["step_seconds"]["error"]) for row in found["runs"]]
    assert found["trend"]["step_seconds"] == pytest.approx(errors[1] - errors[0])
    assert "shows no plan or no step" in command("plan", "--score", str(tmp_path))[2]


def test_a_start_stores_its_plan_and_the_report_shows_it(
    workshop: Workshop, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = workshop.train("train.exit_after=3 steps")
    (plan,) = workshop.events(run, "plan")
    assert plan["machine"] == "cpu"
    score = json.loads(command("plan", "--score", str(run), "--json")[1])
    (row,) = score["runs"]
    assert row["step_seconds"]["predicted"] == plan["step_seconds"]
    assert row["memory_bytes"]["measured"] > 1e8
    assert command("report", str(run))[0] == 0
    page = (run / "report.html").read_text()
    assert page.count("predicted (") == 3
    monkeypatch.setattr("bloomery.plan.answer.stored_plan", lambda *_: 1 / 0)
    again = workshop.train("train.exit_after=3 steps", run="again")
    assert not workshop.events(again, "plan")


def test_what_is_left_of_a_run_follows_from_its_speed(tmp_path: Path, command: Command) -> None:
    run = fake_run(tmp_path / "run", tokens_per_second=2048.0)
    code, out, err = command("plan", "left", str(run), "--json")
    assert code == 0, err
    assert json.loads(out)["tokens_left"] == 491_520 - 102_400
    assert json.loads(out)["days_left"] == pytest.approx((491_520 - 102_400) / 2048 / 86400)
    code, _, err = command("plan", "left", str(tmp_path))
    assert code == 3
    assert "shows no step of a run" in err


# ---------------------------------------------------------------- models


@pytest.mark.parametrize(
    "layout",
    ["tp=2 pp=3", "zero=0", "zero=1", "zero=2", "zero=3", "tp=2 pp=3 zero=0", "zero=1 recompute=full", "offload=true"],
)
def test_states_are_those_that_training_holds(layout: str) -> None:
    """The planner's two numbers against the exact account, which tests hold to what training builds."""
    words = [f"parallel.{word}" for word in layout.split()]
    found = recipe("gpt-1.3b", *words, "launch.on=slurm", "launch.nodes=3", "launch.gpus_per_node=4", *BATCH)
    setup, there = setup_of(found, A100), Layout.of(found)
    held = held_elements(found, there, Place(pp=1 if there.pp > 1 else 0))
    exact = weight_bytes(found, there, held).device
    whole = float(setup.whole_bytes + setup.shared_bytes / setup.shard) * held.whole
    assert whole == pytest.approx(exact, rel=0.002)


BATCH = ["batch.global_batch_size=96", "batch.micro_batch_size=1"]


@pytest.mark.parametrize("family", sorted(registry.FAMILIES))
def test_parameters_of_the_fullest_rank_are_close_to_the_exact_count(family: str) -> None:
    shape = [f"model.family={family}", "model.num_layers=24", "model.hidden_size=1024", "model.num_heads=16"]
    found = recipe("quickstart", *shape, "model.vocab_size=30000", "model.seq_length=512")
    exact = held_elements(found, Layout.of(found), Place()).whole
    assert float(setup_of(found, A100).fullest_parameters) == pytest.approx(exact, rel=0.01)


def test_parts_add_up_and_the_safe_figure_is_larger(command: Command) -> None:
    facts = json.loads(command("plan", "bloom-176b", "--network", "omnipath", "--json")[1])
    memory = facts["memory_bytes"]
    parts = ("weights", "gradients", "optimizer", "activations", "logits", "buffers", "context")
    assert sum(memory[name] for name in parts) == memory["expected"] < memory["safe"]
    assert sum(facts["step_share"].values()) == pytest.approx(1)
    assert sum(facts["training"]["days_by_part"].values()) == pytest.approx(facts["training"]["days"])
    assert facts["step"]["mfu"] < facts["step"]["hfu"] < 1
    assert [row["storage"] for row in facts["storage"]] == list(shipped().storage)
    assert len(facts["largest_costs"]) == 3
    assert (facts["training"]["assumed"]["grid"], facts["training"]["assumed"]["grams_per_kwh"]) == ("FRA", 56)


def seconds(base: Recipe, machine: Machine) -> float:
    return float(step_time(setup_of(base, machine), fitted()).total)


def test_a_step_is_longer_with_less_of_everything() -> None:
    base = recipe("bloom-176b")
    fitted_time = seconds(base, A100)
    slow = Machine.of(shipped(), "a100-80g", "ethernet-25g", 8)
    assert seconds(base, slow) > fitted_time
    assert seconds(base, Machine.of(shipped(), "h100", None, 8)) < fitted_time
    no_recompute = setup_of(base, A100, recompute=0)
    assert float(step_time(no_recompute, fitted()).total) < fitted_time
    assert memory(no_recompute, fitted()).expected > memory(setup_of(base, A100), fitted()).expected


# ---------------------------------------------------------------- hardware


def test_every_device_has_a_peak_a_network_and_a_source() -> None:
    for name, device in shipped().devices.items():
        assert device.peak("bf16") > 1e11, name
        assert device.network in shipped().networks
        assert device.source
    assert shipped().devices["h100"].peak("fp8") == 1979e12
    assert shipped().devices["a100-80g"].peak("fp8") == 312e12, "it has no 8-bit units, so it computes in 16"


def test_the_users_own_hardware_is_known_by_its_name(tmp_path: Path, command: Command) -> None:
    file = tmp_path / "ours.yaml"
    own = {"like": "h100", "memory_gib": 120, "usd_per_hour": 1.5, "network": "slow"}
    file.write_text(yaml.safe_dump({"devices": {"ours": own}, "networks": {"slow": {"gb_per_s": 10}}}))
    words = ("plan", "gpt-1.3b", "--gpu", "ours", "--hardware", str(file), "--json")
    facts = json.loads(command(*words)[1])
    assert facts["memory_bytes"]["device_has"] == 120 * 2**30
    assert facts["machine"]["network_gb_per_s"] == 10
    assert facts["training"]["assumed"]["usd_per_gpu_hour"] == 1.5
    assert json.loads(command(*words, "--price", "9")[1])["training"]["assumed"]["usd_per_gpu_hour"] == 9


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("devices: [a]", "a mapping of names to entries"),
        ("cars: {}", "cars is not known here"),
        ("devices: {mine: {memory_gib: 1}}", "mine is no whole entry"),
        ("devices: {mine: {like: h1000}}", "did you mean h100?"),
        ("networks: {mine: {gb_per_s: 1, colour: red}}", "mine is no whole entry"),
        ("a: [", "not valid YAML"),
    ],
)
def test_a_broken_hardware_file_is_explained(tmp_path: Path, text: str, said: str) -> None:
    (tmp_path / "ours.yaml").write_text(text)
    with pytest.raises(RecipeError) as caught:
        read_catalogue(tmp_path / "ours.yaml")
    assert said.lower() in str(caught.value).lower()


def test_write_times_are_in_honest_units() -> None:
    """The seeds' table divides TiB * 1024 by GB/s and prints 2.04, 0.61, 0.31 and 0.15 minutes for 2.3 TiB."""
    assert [round(tier.gb_per_s, 1) for tier in shipped().storage.values()] == [19.2, 64, 128, 256]
    minutes = [write_minutes(2.3 * 2**40, tier) for tier in shipped().storage.values()]
    assert [round(value, 2) for value in minutes] == [2.2, 0.66, 0.33, 0.16]


# ---------------------------------------------------------------- search


def test_176b_on_1024_devices_ranks_in_under_two_seconds() -> None:
    big = recipe("bloom-176b", *BIG, "launch.nodes=128", "launch.gpus_per_node=8")
    started = time.process_time()
    ranking = Ranking.of(Question(big, A100, fitted()))
    assert time.process_time() - started < 2
    wanted = preference(ranking.tokens_per_s, ranking.grid.setup.micro_batch)[ranking.order]
    assert (np.diff(wanted) < 0.1).all(), "the best first"
    assert len(ranking.grid.rows) > 1000


@pytest.mark.parametrize("name", ["bloom-176b", "gpt-1.3b", "llama-1b", "bert-large"])
def test_layouts_of_the_grid_are_legal(name: str) -> None:
    found = recipe(name)
    grid = Grid.of(found, A100, 48)
    rows = random.Random(0).sample(grid.rows.astype(int).tolist(), min(40, len(grid.rows)))
    for row in rows:
        layout = layout_name(dict(zip(COLUMNS, row, strict=True)))
        _, loaded = with_layout(name, [], layout, 8)
        assert not layout_problems(loaded.recipe), layout
        assert world_size(loaded.recipe) == 48


def test_no_legal_layout_is_missing_from_the_grid() -> None:
    """Of a small model on a few ranks, by trying them all."""
    words = ["model.num_layers=4", "batch.global_batch_size=16", "launch.on=local", "launch.gpus_per_node=8"]
    base = recipe("gpt-1.3b", *words)
    grid = {tuple(row) for row in Grid.of(base, A100, 8).rows[:, [0, 1, 3, 6]].astype(int).tolist()}
    for tp in (1, 2, 4, 8):
        for pp in (1, 2, 4):
            for cp in (1, 2, 4, 8):
                for micro in (1, 2, 3, 4, 8, 16):
                    changed = {"tp": tp, "pp": pp, "cp": cp, "zero": 1}
                    parallel = base.parallel.model_copy(update=changed)
                    batch = base.batch.model_copy(update={"micro_batch_size": micro})
                    tried = base.model_copy(update={"parallel": parallel, "batch": batch})
                    is_legal = tp * pp * cp <= 8 and not layout_problems(tried)
                    assert is_legal == ((tp, pp, cp, micro) in grid), (tp, pp, cp, micro)


def test_why_says_what_is_worse_or_illegal(command: Command) -> None:
    code, out, _ = command("plan", "bloom-176b", "--why", "tp4-pp12-dp8-zero1-mb2-full")
    assert code == 0
    assert "more computation (recomputation" in out
    code, _, err = command("plan", "bloom-176b", "--why", "tp3-pp12-dp8")
    assert code == 2
    assert "Use parallel.tp 2 or 4." in err
    assert "is not a factor of a layout" in command("plan", "bloom-176b", "--why", "tp4-nonsense")[2]


def test_the_emitted_recipe_is_checked_and_has_the_best_layout(tmp_path: Path, command: Command) -> None:
    out = tmp_path / "best.yaml"
    facts = json.loads(command("plan", "bloom-176b", *BIG, "--gpus", "1024", "--emit", str(out), "--json")[1])
    assert command("check", str(out))[0] == 0
    again = json.loads(command("plan", str(out), "--json")[1])
    assert again["world"] == 1024
    assert again["step"]["tokens_per_s_per_gpu"] == pytest.approx(
        facts["layouts"][0]["tokens_per_s_per_gpu"], rel=0.001
    )


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["gpt3-175b", "--gpus", "8"], "gpt3-175b does not fit on 8 devices of 80 GiB"),
        (["gpt-1.3b", "--gpu", "h1000"], "no device is called 'h1000'"),
        (["gpt-1.3b", "--network", "pigeons"], "no network is called 'pigeons'"),
        (["gpt-1.3b", "--gpus", "29", "--nodes", "1"], "no layout of gpt-1.3b takes 29 devices"),
        (["gpt-1.3b", "--gpus", "101"], "--gpus is 101. 12 nodes have equally many. Use 96 or 108."),
    ],
)
def test_impossible_asks_get_the_nearest_possible(command: Command, words: list[str], said: str) -> None:
    code, out, err = command("plan", *words)
    assert (code, out) == (2, "")
    assert said in err


@pytest.mark.parametrize(
    "words",
    [
        ["days", "--tokens", "1", "--params", "1", "--gpus", "1", "--tflops", "0"],
        ["memory", "--params", "many"],
        ["gpt-1.3b", "--price", "-3"],
        ["gpt-1.3b", "--gpus", "0"],
    ],
)
def test_numbers_that_make_no_sense_are_refused(command: Command, words: list[str]) -> None:
    code, out, err = command("plan", *words)
    assert (code, out) == (2, "")
    assert f"argument {words[-2]}" in err


# ---------------------------------------------------------------- forecasts and advice


def test_the_ramp_is_slower_and_its_levels_cover_the_training() -> None:
    found = forecast(Question(recipe("tr1-13b"), A100, fitted()))
    assert sum(level.steps for level in found.levels) == 311_541
    per_sample = [level.step_seconds / level.global_batch for level in found.levels]
    assert per_sample[0] > 2 * per_sample[-1]
    assert set(found.costs) == {*PARTS, "evaluation", "saves", "failures"}


def test_energy_and_carbon_of_a_published_training() -> None:
    """LLaMA-65B (arXiv 2302.13971, table 15): 1,022,362 hours at 400 W and a PUE of 1.1 are 449 MWh and 173 t."""
    kwh, kilograms = Assumptions(0.0, 385, pue=1.1, load=1.0, host_share=0.0).energy(1_022_362, 400)
    assert (int(kwh / 1000), int(kilograms / 1000)) == (449, 173)


def test_advice_names_the_most_devices_of_the_ramp(command: Command) -> None:
    facts = json.loads(command("plan", "tr1-13b", "--gpu", "v100-32g", "--json")[1])
    ramp = next(text for text in facts["advice"] if text.startswith("Batch ramp"))
    assert "at most 16 replicas, 128 GPUs (32 nodes of 4)" in ramp
    assert "up to 1,024 replicas, 8,192 GPUs, at batch 1,024" in ramp


@pytest.mark.parametrize(("name", "stage"), [("gpt3-64m-smoke", 0), ("gpt3-356m", 1), ("gpt-1.3b", 2)])
def test_zero_by_size_is_explained(command: Command, name: str, stage: int) -> None:
    facts = json.loads(command("plan", name, "--json")[1])
    assert f"stage {stage} is usual" in facts["advice"][0]


def test_a_plan_that_is_possible_and_absurd_is_called_so(command: Command) -> None:
    """The seeds' 200B on 80 devices, 300B tokens."""
    shape = ["model.num_layers=80", "model.hidden_size=14400", "model.num_heads=96", "train.for=300B tokens"]
    batch = ["batch.global_batch_size=64", "batch.micro_batch_size=1", "parallel.tp=8", "parallel.pp=10"]
    code, out, err = command("plan", "bloom-176b", *BIG, *shape, *batch, "--gpus", "80", "--json")
    assert code == 0
    assert "is absurd" in err
    assert 400 < json.loads(out)["training"]["days"] < 800


def test_pictures_are_one_page_with_all_of_them(tmp_path: Path, command: Command) -> None:
    page = tmp_path / "plan.html"
    assert command("plan", "bloom-176b", "--html", str(page), "--json")[0] == 0
    text = page.read_text()
    for title in ("memory of the fullest rank", "a step,", "fastest layout that fits", "the training", "efficiency"):
        assert title in text
    for data in re.findall(r'<script type="application/json">(.*?)</script>', text):
        for line in json.loads(data)["curves"]:
            places = [place for place, _ in line["points"]]
            assert places == sorted(set(places)), "a chart needs ascending places"
    assert "http://" not in text.replace("http://www.w3.org", "")


# ---------------------------------------------------------------- calibration


def test_calibration_finds_the_constants_that_explain_what_was_measured(tmp_path: Path) -> None:
    """Measurements made by a planner with other constants: the fit must find the way back from the shipped ones."""
    true = fitted().but({"speed": 0.8, "gemm": 0.7, "flash": 0.6, "kept": 1.1})
    device = shipped().devices["h200"]
    base = recipe("gpt-1.3b", "precision=bf16")
    setup = setup_of(base, Machine("h200", device, "none", shipped().networks["infiniband-ndr"], 8))
    gemm = [
        {
            "m": m,
            "n": 4 * k,
            "k": k,
            "fp8": False,
            "seconds": float(gemm_seconds(setup, true, *np.array([m, 4 * k, k]))),
        }
        for k, m in ((1024, 32768), (2048, 4096), (4096, 16384))
    ]
    copied = device.memory_gb_per_s * true.memory * 1e9
    measured = {
        **{
            "device": "NVIDIA H200",
            "devices": 1,
            "memory_bytes": 140 * 2**30,
            "cores": 132,
            "torch": "2",
            "precision": "bf16",
        },
        **{"copy_bytes_per_s": copied, "gemm": gemm, "attention": [], "link_bytes_per_s": None},
    }
    trials = []
    for words in trainings(measured):
        there = setup_of(
            recipe("gpt-1.3b", *words), Machine("h200", device, "none", shipped().networks["infiniband-ndr"], 8)
        )
        step, used = float(step_time(there, true).total), int(memory(there, true).seen("NVIDIA H200"))
        trials.append(Trial(words, "ok", step, 1.0, 1.0, used))
    found, explained = entry(measured, [*trials, Trial([], "out of memory")], [])
    for row in explained:
        assert row["explained_step_seconds"] == pytest.approx(row["step_seconds"], rel=0.02)
        assert row["explained_memory_bytes"] == pytest.approx(row["peak_memory_bytes"], rel=0.01)
    assert found["measured"]["kept"] == pytest.approx(1.1, rel=0.03)
    store(found, 1e9, tmp_path / "ours.yaml")
    device = read_catalogue(tmp_path / "ours.yaml").devices[here()]
    assert device.memory_gib == 140
    larger = recipe("gpt-1.3b")
    there = setup_of(larger, Machine.of(read_catalogue(tmp_path / "ours.yaml"), here(), None, 1))
    assert float(step_time(there, fitted().on(device)).total) == pytest.approx(
        float(
            step_time(
                setup_of(
                    larger, Machine("h200", shipped().devices["h200"], "none", shipped().networks["infiniband-ndr"], 8)
                ),
                true,
            ).total
        ),
        rel=0.03,
    )


# ---------------------------------------------------------------- evidence

ROW = {
    **{"source": "paper", "model": "gpt", "arch": "gpt", "gpu": "A100", "gpu_mem_gb": "80", "quality": "A"},
    **{"interconnect": "8x200Gb", "seq": "2048", "vocab": "51200", "vpp": "1", "cp": "1", "zero": "0"},
    **{"recompute": "full", "precision": "fp16", "attn": "unfused", "seq_parallel": "0", "stack": "megatron-2021"},
    **{"mem_gb_per_gpu_reported": "", "mem_definition": "", "group": "table-1"},
}
TABLE_1 = [
    # layers, hidden, heads, devices, tp, pp, micro-batch, global batch, tokens/s of a device (arXiv 2104.04473)
    (24, 2304, 24, 32, 1, 1, 16, 512, 9288),
    (40, 6144, 48, 256, 8, 1, 8, 1024, 871.6),
    (48, 8192, 64, 512, 8, 2, 4, 1536, 425.1),
]


def published(path: Path) -> Path:
    names = ("layers", "hidden", "heads", "n_gpus", "tp", "pp", "micro_batch", "global_batch", "tgs_derived")
    rows = []
    for values in TABLE_1:
        row = ROW | dict(zip(names, map(str, values), strict=True))
        devices = int(row["n_gpus"]) // int(row["tp"]) // int(row["pp"])
        rows.append(row | {"kv_heads": row["heads"], "ffn": str(4 * int(row["hidden"])), "dp": str(devices)})
    with path.open("w", newline="") as opened:
        writer = csv.DictWriter(opened, rows[0])
        writer.writeheader()
        writer.writerows([*rows, rows[0] | {"quality": "C"}, rows[0] | {"tp": ""}])
    return path


def test_the_benchmark_predicts_published_runs_from_their_configuration(tmp_path: Path) -> None:
    rows = str(published(tmp_path / "rows.csv"))
    words = [str(ROOT / "benchmarks" / "planner.py"), "--fit", rows, "--test", rows, "--json"]
    found = json.loads(subprocess.run([sys.executable, *words], check=True, capture_output=True).stdout)
    assert set(found["throughput"]) >= {"rows", "median", "p90"}
    assert found["throughput"]["rows"] == 3, "a row of quality C and one without a layout are left out"
    assert found["throughput"]["median"] < 0.06
    assert found["memory"]["rows"] == 0
    assert set(found["regret"]) >= {"families", "median", "worst"}
    assert list(found["scalars"]["throughput"]) == ["megatron-2021"]


def test_a_measured_column_changes_no_prediction(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import planner

    rows = planner.read_rows(published(tmp_path / "rows.csv"))[:3]
    before = planner.tokens_per_s(rows, fitted())
    after = planner.tokens_per_s([row | {"tgs_derived": "1"} for row in rows], fitted())
    assert np.array_equal(before, after)


def test_the_constants_are_few_and_physical() -> None:
    constants = vars(fitted())
    assert len(constants) < 50
    assert all(value > 0 for value in constants.values())
    shares = ("gemm", "flash", "bmm", "misaligned", "link", "tp_exposed", "dp_exposed", "contention", "uneven")
    assert all(constants[name] < 1 for name in shares)


def test_an_answer_needs_no_command_line() -> None:
    question = Question(recipe("gpt-1.3b"), A100, fitted())
    assert answer(question, shipped(), None).facts["name"] == "gpt-1.3b"
