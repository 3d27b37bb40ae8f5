"""`bloomery plan`: what a rank, a node and a disk must hold is what the code that trains puts there."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import yaml

from bloomery.config.recipe import Recipe
from bloomery.families import registry
from bloomery.model.transformer import build_model
from bloomery.parallel.apply import outline
from bloomery.sizing.check import load_checked_recipe
from bloomery.sizing.layout import Layout, layout_overrides, world_size
from bloomery.sizing.memory import HeldElements, held_elements, node_bytes, stage_facts, weight_bytes
from bloomery.sizing.parameters import model_shapes, padded_vocab_size, parameter_shapes
from bloomery.sizing.schedule import kept_checkpoints
from bloomery.verify import simulate
from conftest import Workshop
from model_samples import small_config

Command = Callable[..., tuple[int, str, str]]
Load = Callable[..., Recipe]

STEP_COUNT = 4
"""Bytes that rank 0 saves besides."""
SMALL: dict[str, Any] = {
    "name": "small",
    "model": {
        "family": "bloom",
        "num_layers": 5,
        "hidden_size": 48,
        "num_heads": 4,
        "ffn_hidden_size": 100,
        "seq_length": 32,
        "vocab_size": 250,
        "vocab_multiple": 4,
    },
    "batch": {"micro_batch_size": 2, "global_batch_size": 96},
    "lr": {"peak": 1e-3},
    "train": {"for": "1000 steps"},
    "checkpoint": {"phases": [{"every": "100 steps"}]},
}


@pytest.fixture
def small(tmp_path: Path) -> Path:
    (tmp_path / "small.yaml").write_text(yaml.safe_dump(SMALL))
    return tmp_path / "small.yaml"


@pytest.fixture
def recipe_of(small: Path) -> Load:
    def load(layout: str, *overrides: str) -> Recipe:
        return load_checked_recipe(str(small), [*layout_overrides(layout), *overrides]).recipe

    return load


def layout_of(recipe: Recipe) -> Layout:
    return Layout.of(recipe)


def planned(recipe: Recipe, rank: int) -> HeldElements:
    layout = layout_of(recipe)
    return held_elements(recipe, layout, layout.place_of(rank))


def built(recipe: Recipe, rank: int) -> HeldElements:
    """Counted from a rank that the code of training outlines."""
    with simulate._fake_world(layout_of(recipe), rank) as mesh:
        return simulate._held_elements(outline(recipe, mesh, compile_model=False))


# ---------------------------------------------------------------- the table of shapes


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("family", registry.FAMILIES)
def test_the_shapes_are_those_of_the_built_model(family: str, tied: bool) -> None:
    model = small_config(family, tie_embeddings=tied)
    real = {name: tuple(each.shape) for name, each in build_model(model).named_parameters()}
    assert dict(parameter_shapes(model)) == real
    shapes = model_shapes(model, vocab_size=padded_vocab_size(model), num_layers=2)
    assert sum(weight.count * weight.elements for weight in shapes) == sum(map(math.prod, real.values()))


# ---------------------------------------------------------------- against what training builds

LAYOUTS = ("single", "zero3-dp2", "tp2", "pp2-dp2-tp2", "dp4-shard2-tp2", "pp2-interleaved-dp2", "dp48")


@pytest.mark.parametrize(
    ("family", "layout"),
    [
        *(("bloom", layout) for layout in LAYOUTS),
        *((family, "pp2-dp2-tp2") for family in ("gpt2", "qwen3", "bert")),
        ("qwen3", "cp2-dp2"),
        ("gpt2", "zero0-dp2"),
    ],
)
def test_every_rank_holds_and_owns_what_is_planned(recipe_of: Load, family: str, layout: str) -> None:
    recipe = recipe_of(layout, f"model.family={family}")
    world = world_size(recipe)
    for rank in {*range(min(world, 4)), world // 2, world - 1}:
        assert planned(recipe, rank) == built(recipe, rank), f"rank {rank}"


@pytest.mark.parametrize(("family", "layout"), [("gpt2", "pp5-dp2"), ("bert", "pp2-tp2")])
def test_an_untied_head_is_owned_and_a_tied_copy_is_not(recipe_of: Load, family: str, layout: str) -> None:
    for tied in ("true", "false"):
        recipe = recipe_of(layout, f"model.family={family}", f"model.tie_embeddings={tied}")
        for rank in range(world_size(recipe)):
            assert planned(recipe, rank) == built(recipe, rank), f"rank {rank}, tied {tied}"


@pytest.mark.parametrize(
    ("family", "layout", "overrides"),
    [
        ("gpt2", "single", ["precision=fp16"]),
        ("llama", "single", ["parallel.offload=true"]),
        ("bloom", "dp4", ["batch.global_batch_size=8"]),
        ("llama", "zero3-dp2", []),
        ("bert", "tp2", ["precision=fp16"]),
        ("bloom", "pp2-dp2-tp2", ["parallel.offload=true"]),
        ("llama", "cp2-dp2", []),
        ("bloom", "pp2-interleaved-chunks2-dp2", []),
        ("gpt2", "zero1-dp3", ["model.hidden_size=52"]),
    ],
)
def test_the_bytes_of_a_stage_are_those_of_a_built_rank(
    recipe_of: Load, family: str, layout: str, overrides: list[str]
) -> None:
    """test_simulate.py holds these bytes to the memory of a real optimizer and of simulated passes."""
    recipe = recipe_of(layout, f"model.family={family}", *overrides)
    world = layout_of(recipe)
    for stage in stage_facts(recipe, world):
        held = built(recipe, stage["pipeline_ranks"][0] * world.world // world.pp)
        known = weight_bytes(recipe, world, held)
        assert stage["memory_bytes"] == asdict(known) | {"device": known.device}
        assert (stage["elements"], stage["owned_elements"]) == (held.pieces, held.owned)


@pytest.mark.parametrize("layout", ["pp2-dp2-tp2", "dp4-shard2-tp2", "dp48"])
def test_a_stage_shows_its_fullest_rank_and_a_node_all_of_its_ranks(recipe_of: Load, layout: str) -> None:
    world = world_size(recipe_of(layout))
    nodes = 2 if world % 2 == 0 else 1
    places = ["launch.on=slurm", f"launch.nodes={nodes}", f"launch.gpus_per_node={world // nodes}"]
    recipe = recipe_of(layout, *places, "parallel.offload=true")
    ranks = [planned(recipe, rank) for rank in range(world)]
    stages = stage_facts(recipe, layout_of(recipe))
    assert max(stage["elements"] for stage in stages) == max(rank.pieces for rank in ranks)
    assert max(stage["owned_elements"] for stage in stages) == max(rank.owned for rank in ranks)
    size = world // nodes
    halves = [ranks[first : first + size] for first in range(0, world, size)]
    saves = [sum(12 * rank.owned for rank in half) for half in halves]
    offload = [sum(16 * rank.pieces + 4 for rank in half) for half in halves]
    found = node_bytes(recipe, layout_of(recipe))
    assert (found["saves"], found["offload"]) == (max(saves), max(offload))
    assert found["host"] == max(map(sum, zip(saves, offload, strict=True)))


def test_a_real_training_takes_and_writes_what_is_planned(workshop: Workshop, command: Command) -> None:
    words = ["launch={on: local, gpus_per_node: 4}", "parallel={tp: 2, pp: 2}"]
    run = workshop.train(*words, "train.exit_after=2 steps")
    recipe = load_checked_recipe(str(workshop.recipe), words).recipe
    (start,) = workshop.events(run, "start")
    ranks = [12 * planned(recipe, rank).owned + STEP_COUNT * (rank == 0) for rank in range(4)]
    assert start["save_host_bytes"] == ranks[0]
    files = sorted((run / "checkpoints" / "step-00000002").glob("*.safetensors"))
    assert [data_bytes(file) for file in files] == ranks
    facts = json.loads(command("plan", str(workshop.recipe), *words, "--json")[1])
    assert facts["stages"][0]["memory_bytes"]["saves"] == ranks[0] - STEP_COUNT
    assert facts["checkpoint_bytes"] == facts["node_memory_bytes"]["saves"] == sum(ranks) - STEP_COUNT


def data_bytes(file: Path) -> int:
    with file.open("rb") as opened:
        return file.stat().st_size - 8 - int.from_bytes(opened.read(8), "little")


# ---------------------------------------------------------------- what is kept


@pytest.mark.parametrize(
    ("keep", "count", "being_written", "bound"),
    [
        ("null", 11, 0, "at least"),
        ("{last: 3}", 3, 1, "up to"),
        ("{last: 3, best: 2, steps: [100, 200]}", 7, 1, "up to"),
        ("{last: 3, every: 500 steps}", 4, 1, "at least"),
        ("{last: 3, every: 500 steps, steps: [100, 700]}", 6, 1, "at least"),
    ],
)
def test_the_run_folder_keeps_what_retention_leaves(
    recipe_of: Load, keep: str, count: int, being_written: int, bound: str
) -> None:
    recipe = recipe_of("single", "train.for=1050 steps", f"checkpoint.keep={keep}")
    kept = kept_checkpoints(recipe)["durable"]
    assert kept == {"count": count, "being_written": being_written, "bound": bound}


def test_every_place_has_its_own_rule(small: Path, command: Command) -> None:
    overrides = [
        "checkpoint.local={path: /nvme, every: 10 steps, keep: 2}",
        "checkpoint.upload={to: far, every: 300 steps}",
        "parallel={tp: 2, pp: 2}",
        "launch={on: slurm, nodes: 2, gpus_per_node: 2}",
    ]
    code, out, err = command("plan", str(small), *overrides, "--json")
    assert code == 0, err
    facts = json.loads(out)
    kept, checkpoint, node = facts["kept"], facts["checkpoint_bytes"], facts["node_memory_bytes"]
    assert kept["durable"] == {"count": 10, "being_written": 0, "bound": "at least", "bytes": 10 * checkpoint}
    assert kept["local"] == {"count": 2, "being_written": 1, "bound": "up to", "bytes": 3 * node["saves"]}
    assert kept["upload"] == {"count": 4, "being_written": 0, "bound": "about", "bytes": 4 * checkpoint}
    assert checkpoint / 2 < node["saves"] < checkpoint


# ---------------------------------------------------------------- the command


def test_bloom_176b_needs_what_was_counted_by_hand(command: Command) -> None:
    facts = json.loads(command("plan", "bloom-176b", "--json")[1])
    first, middle, last = facts["stages"]
    assert facts["padded_parameters"] == 176_247_271_424
    assert facts["checkpoint_bytes"] == 12 * 176_247_271_424
    assert middle["pipeline_ranks"] == list(range(1, 11))
    assert middle["elements"] == middle["owned_elements"] == 462_505_344
    assert middle["memory_bytes"]["saves"] == 12 * 462_505_344
    assert first["elements"] == last["elements"] == 497_818_944
    head_rows = 250_880 * 14_336 // 4 // 8  # a copy of the embedding, cut by 4 and by 8, that another rank saves
    assert last["owned_elements"] == 497_818_944 - head_rows
    assert facts["fullest_pipeline_ranks"] == [0, 11]


def test_the_answer_for_people(command: Command) -> None:
    code, out, err = command("plan", "bloom-176b")
    assert (code, err) == (0, "")
    lines = [" ".join(line.split()) for line in out.splitlines()]
    assert lines[0] == "name bloom-176b"
    assert "pipeline_ranks 0 1-10 11" in lines
    assert "memory_bytes.masters 1.855 GiB 1.723 GiB 1.855 GiB" in lines
    assert "fullest_device_bytes 27.82 GiB" in lines
    assert "kept.durable.bytes 219.3 TiB" in lines
    measures = "bloomery verify bloom-176b --simulate-world 384"
    assert lines[-1] == f"Activations are estimated. This measures them: {measures}"


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("parallel.tp=3", "parallel.tp is 3 but model.num_heads is 4"),
        ("model.layers=3", "did you mean"),
    ],
)
def test_a_bad_recipe_is_refused_as_check_refuses_it(small: Path, command: Command, override: str, said: str) -> None:
    code, out, err = command("plan", str(small), override)
    assert (code, out) == (2, "")
    assert said.lower() in err.lower()
