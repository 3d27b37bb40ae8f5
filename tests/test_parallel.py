"""Ranks that agree: one decision for all, nothing lost, nobody left waiting. Parity of layouts is in test_verify.py."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
import yaml
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import rank_commands
from bloomery.base import exit_codes
from bloomery.base.errors import LostRankError
from bloomery.base.ranks import Started, first_host, started_as
from bloomery.launch.local import run_local_ranks
from bloomery.parallel.mesh import Mesh
from bloomery.parallel.ranks import joined
from bloomery.parallel.runner import Runner
from bloomery.sizing.check import fit, load_checked_recipe
from bloomery.sizing.layout import stage_layers
from conftest import Workshop, start_training, wait_for_steps

TWO = ("launch={on: local, gpus_per_node: 2}", "batch={micro_batch_size: 2, global_batch_size: 8}")


def run_ranks(
    workshop: Workshop,
    *overrides: str,
    run: str = "run",
    size: int = 2,
    command: Callable[[Sequence[str]], int] = rank_commands.main,
) -> int:
    arguments = ["train", str(workshop.recipe), *overrides, "--run-dir", str(workshop.folder / run), "--device", "cpu"]
    logged = partial(rank_commands.logged, command, str(workshop.folder / "said.txt"))
    return run_local_ranks(size, logged, [*arguments, "--quiet"])


def said(workshop: Workshop) -> str:
    return (workshop.folder / "said.txt").read_text()


def test_blooms_stages_count_embedding_and_head_as_work() -> None:
    assert [len(layers) for layers in stage_layers(70, 12)] == [5, *[6] * 10, 5]


@pytest.mark.parametrize(("layers", "stages"), [(5, 3), (4, 4), (3, 1), (96, 16), (13, 5)])
def test_stages_own_every_layer_once_and_are_balanced(layers: int, stages: int) -> None:
    owned = stage_layers(layers, stages)
    assert [layer for each in owned for layer in each] == list(range(layers))
    assert all(len(each) for each in owned)
    work = [len(each) + (i == 0) + (i == stages - 1) for i, each in enumerate(owned)]
    assert max(work) == max(-(-(layers + 2) // stages), 2 if stages > 1 else layers + 2)


def test_ranks_are_read_from_torchrun_and_from_srun_but_not_from_a_batch_script() -> None:
    torchrun = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"}
    address = {"MASTER_ADDR": "head", "MASTER_PORT": "1234"}
    assert started_as({**torchrun, **address}) == Started(5, 8, 1, 4, "head", 1234)
    batch = {"SLURM_JOB_ID": "77", "SLURM_PROCID": "0", "SLURM_NTASKS": "8", "SLURM_LOCALID": "0"}
    assert started_as(batch) is None
    step = {
        "SLURM_JOB_ID": "77",
        "SLURM_STEP_ID": "0",
        "SLURM_PROCID": "6",
        "SLURM_LOCALID": "2",
        "SLURM_NODEID": "1",
        "SLURM_STEP_NUM_TASKS": "8",
        "SLURM_STEP_NODELIST": "gpu[017-018]",
        "SLURM_STEP_TASKS_PER_NODE": "4(x2)",
    }
    assert started_as(step) == Started(6, 8, 2, 4, "gpu017", 15_077)
    assert started_as({**step, **address}) == Started(6, 8, 2, 4, "head", 1234)
    assert started_as({**step, "SLURM_STEP_NUM_TASKS": "1"}) is None
    assert [first_host(nodes) for nodes in ("a1-[3,5]-x,b", "r[1-2]n[3-4],s1", "node7")] == ["a1-3-x", "r1n3", "node7"]


def test_one_interrupt_that_arrives_twice_still_saves(workshop: Workshop) -> None:
    """As from a terminal through `timeout` or a script, which pass on what the launcher has got already."""
    run = workshop.folder / "run"
    process = start_training(workshop, run, "parallel.tp=2")
    wait_for_steps(run, 2, process)
    process.send_signal(signal.SIGINT)
    process.send_signal(signal.SIGINT)
    assert process.wait(60) == exit_codes.OK
    (stop,) = workshop.events(run, "stop")
    assert stop["reason"] == "signal"
    assert (run / "checkpoints" / "latest").exists()


def test_a_killed_rank_is_named_ends_the_job_and_costs_only_the_steps_since_the_save(
    workshop: Workshop, capfd: pytest.CaptureFixture[str]
) -> None:
    saves = "checkpoint={phases: [{every: 5 steps}]}"
    kill = rank_commands.kill_rank_1
    assert run_ranks(workshop, *TWO, saves, "prepare=[]", command=kill) == exit_codes.LOST_RANK
    assert said(workshop).count("'prepare=[]' has no effect: this command does not read prepare") == 1
    assert "rank 1 of 2 is lost" in said(workshop)
    assert "rank 1 was killed by SIGKILL" in capfd.readouterr().err
    folder = workshop.folder / "run"
    (error,) = workshop.events(folder, "error")
    assert "rank 1 of 2 is lost" in error["text"]
    assert run_ranks(workshop, *TWO, saves) == exit_codes.OK
    assert workshop.events(folder, "start")[1]["resumed_from"] == "step-00000005"
    assert run_ranks(workshop, *TWO, run="undisturbed") == exit_codes.OK
    last = {record["step"]: record["losses"]["lm loss"] for record in workshop.metrics(folder)}
    whole = {
        record["step"]: record["losses"]["lm loss"] for record in workshop.metrics(workshop.folder / "undisturbed")
    }
    assert last == whole


@pytest.mark.parametrize("rank", [1, 2])
def test_a_rank_that_dies_while_the_ranks_join_is_no_traceback(monkeypatch: pytest.MonkeyPatch, rank: int) -> None:
    def breaks(*_: object, **__: object) -> None:
        raise dist.DistNetworkError("Failed to recv, got 0 bytes. Connection was likely closed. Did it crash?")

    monkeypatch.setattr(dist, "init_process_group", breaks)
    monkeypatch.setattr(os, "environ", dict(os.environ))
    with pytest.raises(LostRankError) as caught, joined(Started(rank, 4, rank, 4, "head", 1234), torch.device("cpu")):
        pass
    assert "the 4 ranks could not join at head:1234 (Failed to recv, got 0 bytes)" in str(caught.value)
    assert caught.value.exit_code == exit_codes.LOST_RANK
    assert caught.value.reported_by_rank_0 == (rank == 2)


def test_a_newer_start_ends_all_ranks_of_the_older_one_together(workshop: Workshop) -> None:
    saves = ("checkpoint={phases: [{every: 2 steps}]}", "train.for=100000 steps", "lr.decay=null")
    command = partial(rank_commands.newer_start_seen_by, [0])
    assert run_ranks(workshop, *TWO, *saves, command=command) == exit_codes.STORAGE
    assert all(said(workshop).count(f"on rank {rank}: start 2") <= 1 for rank in (0, 1))  # each rank is named once
    assert "lost" not in said(workshop)
    assert "Traceback" not in said(workshop)
    folder = workshop.folder / "run"
    assert (folder / "checkpoints" / "latest").read_text().strip() == "step-00000002"
    assert not (folder / "checkpoints" / "step-00000004").exists()
    assert workshop.events(folder, "error") == workshop.events(folder, "save_failed") == []  # it is the newer one's


@pytest.mark.parametrize("use", ["train", "valid"])
def test_data_that_one_rank_cannot_read_is_an_error_of_all_after_a_save(workshop: Workshop, use: str) -> None:
    evaluates = ("data.validation={v: [{path: valid}]}", "train.evaluate={every: 3 steps}")
    command = partial(rank_commands.broken_data_on_rank_1, use)
    assert run_ranks(workshop, *TWO, *evaluates, command=command) == exit_codes.DATA
    assert said(workshop).count(f"shard {use}.bin has gone") == 1
    assert (workshop.folder / "run" / "checkpoints" / "latest").read_text().strip() == "step-00000003"


def test_two_ranks_share_a_table_and_a_planted_slow_one_is_named(workshop: Workshop) -> None:
    settings = (*TWO, "train.for=8 steps", "monitor.tensorboard=true")
    assert run_ranks(workshop, *settings, command=rank_commands.slow_data_on_rank_1) == 0
    run = workshop.folder / "run"
    (event,) = workshop.events(run, "slow_rank")
    assert (event["rank"], event["phase"]) == (1, "data")
    assert 0.2 <= event["phase_seconds"] < 2
    assert event["usual_phase_seconds"] < 0.1
    assert "rank 1 on" in (run / "logs/main_log.txt").read_text()
    record = workshop.metrics(run)[-1]
    assert (record["world_size"], record["replicas"]) == (2, 2)
    low, _, high, rank = record["rank_timers"]["data"]
    assert low < 0.1 < 0.2 <= high
    assert rank == 1
    reader = EventAccumulator(str(run / "tensorboard")).Reload()
    points = {tag: reader.Scalars(tag)[-1].value for tag in reader.Tags()["scalars"]}
    assert points["iteration-time/world_size"] == 2
    ratio = points["iteration-time/tokens per second"] / points["iteration-time/tokens per second per replica"]
    assert ratio == pytest.approx(2)


def test_no_two_ranks_and_stages_draw_the_same_dropout() -> None:
    """Ranks that see other tokens, heads or layers must drop other units; one that is resumed must drop the same."""
    drawn = set()
    for stage, dp, cp, tp in product(range(4), range(2), range(2), range(2)):
        mesh = Mesh(pp=stage % 2, dp=dp, cp=cp, tp=tp)
        unused = dict.fromkeys(("execution", "gradients", "device", "seq_length", "num_sources"))
        runner = Runner(**unused, mesh=mesh, dropout_seed=7)  # type: ignore[arg-type]
        runner._seed_dropout(3, 1, stage)
        draw = torch.rand(3)
        runner._seed_dropout(3, 1, stage)
        assert torch.equal(draw, torch.rand(3))
        drawn.add(tuple(draw.tolist()))
    assert len(drawn) == 32


def test_a_mistake_that_all_ranks_see_is_told_once(workshop: Workshop) -> None:
    assert run_ranks(workshop, "parallel.tp=2", "data=null") == exit_codes.USAGE
    assert said(workshop).count("data is missing") == 1


@pytest.mark.parametrize(("action", "code"), [("stop", exit_codes.DIVERGED), ("warn", exit_codes.OK)])
def test_one_flipped_bit_of_a_replicated_norm_is_found_and_named(workshop: Workshop, action: str, code: int) -> None:
    watch, command = f"monitor.drift={{every: 2 steps, action: {action}}}", rank_commands.drift_on_rank_1
    assert run_ranks(workshop, "parallel.tp=2", "train.for=6 steps", watch, command=command) == code
    text = "model.layers.1.mlp_norm.weight on rank 1 differs from rank 0"
    assert text in said(workshop)
    first = workshop.events(workshop.folder / "run", "drift")[0]
    assert (first["step"], first["drifts"][0]["ranks"]) == (4, [1])
    (newest,) = (workshop.folder / "run" / "checkpoints").glob("step-*/manifest.json")
    assert json.loads(newest.read_text())["suspicious"] == (action == "stop")


def test_the_sentinel_is_silent_when_nothing_drifts(workshop: Workshop) -> None:
    layout = ("parallel.pp=2", "model.family=bloom", "monitor.drift.every=1 steps", "train.for=4 steps")
    assert run_ranks(workshop, *layout) == exit_codes.OK
    assert workshop.events(workshop.folder / "run", "drift") == []


@pytest.mark.parametrize(("zero", "gathers", "scatters"), [(0, 0, 0), (2, 3, 12), (3, 20, 12)])
def test_micro_batches_communicate_no_more_than_their_zero_stage_needs(
    workshop: Workshop, zero: int, gathers: int, scatters: int
) -> None:
    """Two blocks and the rest of the model make three groups; a step has four micro-batches."""
    layout = ("launch={on: local, gpus_per_node: 2}", "batch={micro_batch_size: 1, global_batch_size: 8}")
    command = rank_commands.count_collectives
    assert run_ranks(workshop, *layout, f"parallel.zero={zero}", "train.for=2 steps", command=command) == exit_codes.OK
    counts = json.loads((workshop.folder / "counts.json").read_text())
    found = {
        key: sum(n for name, n in counts.items() if key in name) for key in ("allgather", "reduce_scatter", "allreduce")
    }
    assert (found["allgather"], found["reduce_scatter"]) == (gathers, scatters), counts
    assert found["allreduce"] == (3 if zero == 0 else 0), counts


def test_torchrun_starts_the_same_training(workshop: Workshop) -> None:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--master-port=0", "--standalone"]
    arguments = [str(workshop.recipe), "parallel.tp=2", "train.for=4 steps", "--device", "cpu", "--quiet"]
    script = [*torchrun, "-m", "bloomery", "train", *arguments, "--run-dir", str(workshop.folder / "theirs")]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(script, env=environment, capture_output=True, text=True, cwd=workshop.folder, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    ours = workshop.losses(workshop.train("train.for=4 steps", run="ours"))
    assert workshop.losses(workshop.folder / "theirs") == pytest.approx(ours, rel=1e-6)
    (start,) = workshop.events(workshop.folder / "theirs", "start")
    assert start["ranks"] == 2


def test_more_ranks_than_the_recipe_says_become_replicas(workshop: Workshop) -> None:
    """A launcher's world wins: the recipe names no launch section, and tp 1 on 2 ranks makes 2 replicas."""
    assert run_ranks(workshop, "train.for=4 steps") == exit_codes.OK
    resolved = yaml.safe_load((workshop.folder / "run" / "recipe.yaml").read_text())
    assert resolved["launch"]["gpus_per_node"] == 2
    one = workshop.losses(workshop.train("train.for=4 steps", run="one"))
    assert workshop.losses(workshop.folder / "run") == pytest.approx(one, rel=1e-6)


def test_a_world_that_does_not_fit_is_refused_once_by_rank_0(workshop: Workshop) -> None:
    assert run_ranks(workshop, "parallel.tp=2", size=3) == exit_codes.USAGE
    assert said(workshop).count("3 ranks were started, and no layout of them can train this recipe") == 1
    assert not (workshop.folder / "run").exists()


def test_another_number_of_ranks_goes_on_with_a_layout_that_fits(workshop: Workshop) -> None:
    """Four ranks stop, two go on: the recipe's layout needs four, so another is chosen and explained."""
    four = ("parallel={tp: 2, pp: 2}", "checkpoint={phases: [{every: 5 steps}]}")
    assert run_ranks(workshop, *four, "train.exit_after=10 steps", size=4) == exit_codes.OK
    assert run_ranks(workshop, *four, size=2) == exit_codes.OK
    assert "2 ranks instead of 4: " in said(workshop)
    assert "; parallel.pp 1 instead of 2" in said(workshop)
    one = workshop.losses(workshop.train(run="one"))
    assert workshop.losses(workshop.folder / "run") == pytest.approx(one, rel=2e-6)


@pytest.mark.parametrize(
    ("changes", "world", "expected"),
    [
        ({}, 4, []),  # replicas only
        ({"parallel": {"tp": 2}}, 6, ["parallel.pp 3 instead of 1"]),  # three replicas cannot share 64 samples in twos
        ({"model": {"num_layers": 2}}, 3, None),  # nor can three stages share two layers
        (
            {"parallel": {"cp": 2, "shard_size": 2}},
            1,
            ["parallel.cp 1 instead of 2", "parallel.shard_size None instead of 2"],
        ),
        ({"batch": {"micro_batch_size": 16}}, 8, ["batch.micro_batch_size 8 instead of 16"]),
    ],
)
def test_as_little_as_possible_changes(changes: dict[str, Any], world: int, expected: list[str] | None) -> None:
    model = "model={family: gpt2, num_layers: 4, hidden_size: 64, num_heads: 8, seq_length: 32, vocab_size: 1000}"
    words = [model, "batch={micro_batch_size: 2, global_batch_size: 64}", "parallel={}", "launch=null"]
    recipe = load_checked_recipe("quickstart", words).recipe
    for section, given in changes.items():
        recipe = recipe.model_copy(update={section: getattr(recipe, section).model_copy(update=given)})
    fitted = fit(recipe, nodes=1, ranks_per_node=world)
    assert (fitted and fitted[1][1:]) == expected
