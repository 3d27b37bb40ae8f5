"""`bloomery verify --simulate-world`: ranks of worlds that are not there hold exactly what real ones would."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml

from bloomery.checkpoint.save import Saver
from bloomery.config.recipe import Recipe
from bloomery.data.batch import GlobalBatch
from bloomery.families.family import LM_LOSS
from bloomery.parallel.apply import give_memory, make_runner, outline, parallelise
from bloomery.parallel.gradients import Gradients
from bloomery.parallel.mesh import Mesh
from bloomery.parallel.pipeline import schedule_in_force
from bloomery.parallel.runner import DTYPES
from bloomery.sizing.check import load_checked_recipe
from bloomery.sizing.layout import Layout, layout_overrides
from bloomery.sizing.memory import weight_bytes
from bloomery.sizing.parameters import padded_vocab_size
from bloomery.train.optimizer import Optimizer
from bloomery.verify import simulate
from bloomery.verify.simulate import MemoryMeter, fake_accelerator, simulate_rank

Command = Callable[..., tuple[int, str, str]]

SMALL: dict[str, Any] = {
    "name": "small",
    "model": {
        "family": "bloom",
        "num_layers": 5,
        "hidden_size": 48,
        "num_heads": 4,
        "seq_length": 32,
        "vocab_size": 250,
        "vocab_multiple": 8,
        "dropout": 0.1,
    },
    "batch": {"micro_batch_size": 2, "global_batch_size": 96},
    "lr": {"peak": 1e-3},
    "train": {"for": "10 steps"},
    "precision": "bf16",
}


@pytest.fixture
def recipe_of(tmp_path: Path) -> Callable[..., Recipe]:
    (tmp_path / "small.yaml").write_text(yaml.safe_dump(SMALL))

    def load(layout: str, *overrides: str) -> Recipe:
        return load_checked_recipe(str(tmp_path / "small.yaml"), [*layout_overrides(layout), *overrides]).recipe

    return load


def memory_of(recipe: Recipe) -> SimpleNamespace:
    return SimpleNamespace(**simulate_rank(recipe, Layout.of(recipe), 0)["memory_bytes"])


# ---------------------------------------------------------------- exact bytes


def test_bloom_176b_holds_what_was_counted_by_hand(command: Command) -> None:
    code, out, err = command("verify", "bloom-176b", "--simulate-world", "384", "--rank", "192", "--json")
    assert code == 0, err
    facts = json.loads(out)
    assert facts["parameters"] == facts["built_parameters"] == 176_247_271_424
    (middle,) = facts["ranks"]
    assert middle["layers"] == [[35, 36, 37, 38, 39, 40]]
    assert middle["elements"] == 462_505_344
    assert middle["forward_passes_held"] == 6
    memory = middle["memory_bytes"]
    assert memory["masters"] == memory["reduced_gradients"] == 4 * 462_505_344
    assert memory["compute_copies"] == 2 * 8 * 462_505_344
    assert memory["gradients"] == 4 * 8 * 462_505_344
    assert memory["optimizer"] == 8 * 462_505_344 + 4
    assert memory["receive_buffers"] == 128 * 2 * (2 * 512 * 14336 * 2)
    assert sum(memory[name] for name in ("masters", "compute_copies", "gradients", "optimizer")) < memory["peak"]
    # In a layer two inputs are gathered, two outputs scattered; backwards each the other way, and the inputs again.
    passes = 128 * 6 * 6
    assert middle["collectives"] == {
        "dp": {"all_gather": 6, "reduce_scatter": 6},
        "tp": {"all_gather": passes, "all_reduce": 1, "reduce_scatter": passes},
        "pp": {"send": 256, "receive": 256},
    }
    assert middle["exposed_collectives"] == 2 * passes + 1


@pytest.mark.parametrize(
    ("zero", "gathers", "reductions"), [(1, 4 + 1, 4 + 1), (2, 4 + 1, 3 * (4 + 1)), (3, 3 * (2 * 4 + 1), 3 * (4 + 1))]
)
def test_data_parallel_ranks_gather_nothing_in_vain(
    recipe_of: Callable[..., Recipe], zero: int, gathers: int, reductions: int
) -> None:
    """Four blocks, and what is around them, in three micro-batches."""
    batch = "batch={micro_batch_size: 1, global_batch_size: 6}"
    recipe = recipe_of(f"zero{zero}-dp2", "model.num_layers=4", batch)
    found = simulate_rank(recipe, Layout.of(recipe), 0)["collectives"]
    assert found == {"dp": {"all_gather": gathers, "reduce_scatter": reductions}}


@pytest.mark.parametrize(
    ("layout", "precision"),
    [("tp2", "bf16"), ("zero0-dp2", "fp32"), ("zero1-dp2-tp2-pp2", "bf16"), ("zero2-dp2", "bf16")],
)
def test_known_memory_is_what_lives_between_micro_batches(
    recipe_of: Callable[..., Recipe], monkeypatch: pytest.MonkeyPatch, layout: str, precision: str
) -> None:
    found: list[int] = []
    measure = simulate._Passes.measure

    def spy(passes: Any, stage: int, meter: MemoryMeter) -> tuple[int, int]:
        found.append(meter.live_bytes - passes.received_bytes)
        return measure(passes, stage, meter)

    monkeypatch.setattr(simulate._Passes, "measure", spy)
    recipe = recipe_of(layout, f"precision={precision}", "model.num_layers=2")
    memory = memory_of(recipe)
    known = memory.masters + memory.compute_copies + memory.gradients
    # Besides: tokens, slopes and what marks padding, and under ZeRO 2 what a reduction left behind for the next.
    allowed = 2048 + 4 * padded_vocab_size(recipe.model) if recipe.parallel.zero < 2 else memory.masters
    assert 0 <= found[0] - known <= allowed


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_known_memory_is_what_a_real_optimizer_holds(recipe_of: Callable[..., Recipe], precision: str) -> None:
    recipe = recipe_of("single", f"precision={precision}")
    parts = parallelise(recipe, Mesh(), device=torch.device("cpu"), compile_model=False)
    optimizer = Optimizer(parts.weights, recipe.optimizer, compute_dtype=DTYPES[precision])
    held = [weight.parameter.data for weight in parts.weights] + [weight.piece.tensor for weight in parts.weights]
    held += [*itertools.chain(*optimizer._moments), optimizer._step]
    gradients = Gradients(parts.weights, parts.mesh)
    gradients.clear(micro_batches=48)
    held += gradients._buffers.values() or [torch.empty_like(w.piece.tensor) for w in parts.weights]
    storages = {each.untyped_storage().data_ptr(): each.untyped_storage().nbytes() for each in held}
    known = weight_bytes(recipe, Layout(), simulate._held_elements(parts))
    assert sum(storages.values()) == known.device
    step_count = 4
    assert Saver(optimizer.pieces(), device=torch.device("cpu")).host_bytes == known.saves + step_count


@pytest.mark.parametrize(("layout", "precision"), [("single", "bf16"), ("dp2", "bf16")])
def test_offloaded_state_is_on_the_host_and_not_on_the_device(
    recipe_of: Callable[..., Recipe], layout: str, precision: str
) -> None:
    recipes = [
        recipe_of(layout, "model.num_layers=2", f"precision={precision}", f"parallel.offload={flag}")
        for flag in ("false", "true")
    ]
    here, away = (memory_of(recipe) for recipe in recipes)
    assert (here.host, away.optimizer) == (0, 0)
    assert away.host == 2 * here.masters + here.optimizer  # masters, their gradients while they are applied, moments
    # What is computed with stays: the fp32 weights themselves, where no 16-bit copies stand for them.
    assert away.masters == (0 if (layout, precision) == ("single", "bf16") else here.masters)
    assert here.peak - away.peak == here.optimizer + here.masters - away.masters


# ---------------------------------------------------------------- activations


class NumberingMeter(MemoryMeter):
    """Knows what a pipeline reads from fake tensors: which micro-batch it is, an element of 0, 1, 2, ...; and (torch
    2.13, int32) whether all stages agree that shapes are static."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default:
            return args[0].storage_offset() if args[0].dtype == torch.int64 else 1
        return super().__torch_dispatch__(func, types, args, kwargs)


@pytest.mark.parametrize(
    ("layout", "recompute", "num_layers"),
    [
        ("pp3-tp2-dp2", "full", 3),
        ("pp2-interleaved-dp2", "none", 5),
        ("pp2-gpipe", "selective", 2),
        ("zero3-dp2", "none", 2),
    ],
)
def test_the_peak_is_that_of_the_real_schedule(
    recipe_of: Callable[..., Recipe], layout: str, recompute: str, num_layers: int
) -> None:
    """The very runner that trains, over all micro-batches of a step, in the same fake world."""
    recipe = recipe_of(
        layout, f"parallel.recompute={recompute}", "batch.global_batch_size=24", f"model.num_layers={num_layers}"
    )
    world = Layout.of(recipe)
    simulated = memory_of(recipe)
    with simulate._fake_world(world, 0) as mesh:
        parts, meter = outline(recipe, mesh, compile_model=False), NumberingMeter()
        with fake_accelerator(meter):
            parts = give_memory(parts, torch.device("cpu"))
            simulate._compute_in(recipe, parts)
            runner = make_runner(recipe, parts, device=torch.device("cpu"), compile_model=False, num_sources=1)
            batch = simulate._batch(recipe)
            count = 24 // (2 * world.dp)
            runner.forward_backward(GlobalBatch(0, 24, [batch] * count, {}, {LM_LOSS: 1}), loss_scale=1.0, step=1)
    beside = count * 300  # places of tokens, which a simulation makes once
    assert 0 <= meter.peak_bytes - (simulated.peak - simulated.optimizer) <= beside


def test_a_ramp_may_begin_with_fewer_micro_batches_than_stages(recipe_of: Callable[..., Recipe]) -> None:
    recipe = recipe_of("pp3", "batch.global_batch_size=4")
    assert schedule_in_force("1f1b", num_stages=3, num_micro_batches=2) == "gpipe"
    assert schedule_in_force("1f1b", num_stages=3, num_micro_batches=3) == "1f1b"
    assert simulate_rank(recipe, Layout.of(recipe), 2)["forward_passes_held"] == 2


def test_an_encoder_is_simulated_too(command: Command) -> None:
    words = ("model.num_layers=2", "--simulate-world", "2", "--json")
    assert json.loads(command("verify", "bert-large", *words)[1])["ranks"][0]["memory_bytes"]["activations"] > 0


# ---------------------------------------------------------------- the command


def test_the_three_stages_of_a_pipeline_are_shown(
    recipe_of: Callable[..., Recipe], tmp_path: Path, command: Command
) -> None:
    words = ["verify", str(tmp_path / "small.yaml"), "parallel.pp=5", "parallel.tp=2", "--simulate-world", "20"]
    code, out, err = command(*words)
    assert code == 0, err
    lines = [" ".join(line.split()) for line in out.splitlines()]
    for shown in ("world 20", "layout.dp 2", "layout.schedule 1f1b", "rank 0 8 16", "place.pp 0 2 4", "layers 0 2 4"):
        assert shown in lines
    assert "embedding True False False" in lines
    assert "head False False True" in lines


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            ["--simulate-world", "13"],
            "tp * pp * cp = 6 of the 13 ranks that are launched, and must divide them. Use 12 or 18",
        ),
        (["--simulate-world", "0"], "launch.gpus_per_node is 0. Must be greater than 0."),
        (["--simulate-world", "12", "--rank", "12"], "--rank is 12. Ranks of this world are 0 to 11."),
        (["--rank", "6"], "Ranks of this world are 0 to 5."),
        (["--simulate-world", "30"], "it must be a multiple of micro_batch_size 2 times 5 data-parallel replicas"),
    ],
)
def test_impossible_worlds_are_refused(
    recipe_of: Callable[..., Recipe], tmp_path: Path, command: Command, words: list[str], said: str
) -> None:
    overrides = ["parallel.tp=2", "parallel.pp=3"]
    code, _, err = command("verify", str(tmp_path / "small.yaml"), *overrides, *words)
    assert code == 2
    assert said.lower() in err.lower()
