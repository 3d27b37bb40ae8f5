"""`bloomery verify`: real ranks train small copies of recipes; planted mistakes are found and named."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

import planted_faults
from bloomery.base.errors import RecipeError
from bloomery.checkpoint.load import read_checkpoint as check_whole
from bloomery.cli.main import main
from bloomery.config.load import fingerprint
from bloomery.sizing.check import load_checked_recipe
from bloomery.verify import compare, shrink
from bloomery.verify.certify import certify, table
from bloomery.verify.shrink import STANDARD, choose_layouts
from bloomery.verify.trials import RankCommand
from conftest import SMALL, Workshop

Command = Callable[..., tuple[int, str, str]]


def write_recipe(folder: Path, *, model: dict[str, Any] | None = None, data: dict[str, Any] | None = None) -> str:
    """A recipe like the small one of all tests, with another model or other data."""
    values = SMALL | {"model": SMALL["model"] | {"num_heads": 4, "num_layers": 4} | (model or {})}
    values |= {"data": SMALL["data"] | (data or {}), "batch": {"micro_batch_size": 4, "global_batch_size": 16}}
    path = folder / "recipe.yaml"
    path.write_text(yaml.safe_dump(values))
    return str(path)


def certificate_of(source: str, layouts: str, work: Path, command: RankCommand, **options: Any) -> dict[str, Any]:
    recipe = load_checked_recipe(source).recipe
    chosen, _ = choose_layouts(source, [], recipe, layouts.split(","))
    (work / "work").mkdir()
    return certify(recipe, chosen, work / "work", command, **{"steps": 2, **options})


# ---------------------------------------------------------------- layouts that are right


def test_the_command_passes_and_writes_its_certificate(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: Command
) -> None:
    monkeypatch.chdir(tmp_path)
    sources = {"train": [{"path": "a", "weight": 0.7}, {"path": "b", "weight": 0.3}], "eod_loss": False}
    source = write_recipe(tmp_path, model={"dropout": 0.1, "softmax_over_padding": True}, data=sources)
    code, out, _ = command("verify", source, "--layouts", "tp2,zero3-dp2", "--steps", "4", "--pairs")
    assert code == 0, out
    assert "2 of 2 layouts equal one rank" in out
    assert out.count("2 of 2 exact, 2 of 2 continue") == 3
    assert "dropout 0.1: masks depend on the layout, verified with dropout 0" in out
    assert "; not verified: dropout 0.1. Certificate" in out
    written = json.loads((tmp_path / "certificate.json").read_text())
    assert written["verdict"] == "pass"
    assert not written["reasons"]
    assert written["not_verified"] == ["dropout 0.1"]
    assert written["fingerprint"] == fingerprint(load_checked_recipe(source).recipe)
    assert written["clipping"]["bound_on_every_step"] is True
    assert written["shrunk"]["model.dropout"] == {"from": 0.1, "to": 0.0}
    learned = written["learned"]["first_loss"]
    assert learned == pytest.approx(math.log(600), abs=0.05), "the softmax goes over 297 words and 303 rows of padding"
    assert written["versions"]["torch"] == torch.__version__
    assert [row["layout"] for row in written["layouts"]] == ["tp2", "zero3-dp2"]
    for row in [written["reference"], *written["layouts"]]:
        assert row["verdict"] == "pass"
        assert row["resharded_from"] == row["resharded_of"] == 2, "every ordered pair of layouts"
        assert row["continued_from"] not in (None, row["layout"])
        assert row["followed_from"] == row["followed_of"] == 2, "each learns from each checkpoint what its owner learns"
        assert row["followed_loss"]["difference"] <= compare.LOSS_RELATIVE
    for row in written["layouts"]:
        assert row["loss"]["difference"] <= compare.LOSS_RELATIVE
        assert 0 < row["gradient"]["difference"] <= compare.GRADIENT_RELATIVE
        assert row["data_order"] == "equal"


def test_norms_of_queries_and_keys_pass_and_json_is_the_certificate(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: Command
) -> None:
    monkeypatch.chdir(tmp_path)
    words = ["--layouts", "zero3-dp2-tp2", "--steps", "2", "--json", "--output", "here.json"]
    code, out, err = command("verify", "qwen3-0.6b", *words)
    assert code == 0, err
    certificate = json.loads(out)
    assert certificate == json.loads((tmp_path / "here.json").read_text())
    assert certificate["verdict"] == "pass"
    assert certificate["shrunk"]["model.head_dim"] == {"from": 128, "to": 16}


@pytest.mark.parametrize(("second", "layouts"), [("sentence_order", "tp2,pp2-mlp,zero1-dp2"), ("none", "tp2")])
def test_bert_learns_the_same_from_labelled_tokens_alone_in_every_layout(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: Command, second: str, layouts: str
) -> None:
    monkeypatch.chdir(tmp_path)
    code, out, err = command(
        "verify", "bert-large", f"model.second_head={second}", "--layouts", layouts, "--steps", "2"
    )
    assert code == 0, out + err
    assert f"{layouts.count(',') + 1} of {layouts.count(',') + 1} layouts equal one rank" in out


# ---------------------------------------------------------------- layouts that are wrong


@dataclass(frozen=True)
class Found:
    """What the certificate says of a planted fault."""

    first: str
    """How its first reason begins."""
    also: str = ""
    """What stands somewhere in its reasons."""


FOUND = {
    "tied_gradients_are_not_added": Found("gradients of step 1: 1 of 29 differ, embed.tokens.weight by"),
    "norms_are_not_summed": Found("gradients of step 1: 4 of", "attention_norm"),  # weight and bias of two layers
    "losses_are_averaged_by_micro_batch": Found("gradients of step 1: 29 of 29 differ"),
    "replicated_weights_count_twice": Found("global grad norm of step 1 is ", "some are counted twice or not at all"),
    "every_rank_takes_the_first_slopes": Found("gradients of step 1: 29 of 29 differ, layers.", "attention.qkv"),
    "replicas_read_the_same_samples": Found("data order: step 1, sample", "not read"),
    "pieces_lie_elsewhere": Found("continued from single at step 1: "),
    "rank_one_dies": Found("the training failed on rank 1: AssertionError: planted: rank 1 stumbles"),
}


def test_every_planted_fault_is_found_and_named_beside_what_is_right(tmp_path: Path, subtests: pytest.Subtests) -> None:
    """Each in a layout of its own, beside one reference and one layout without a fault."""
    source = write_recipe(tmp_path, model={"family": "bloom", "num_layers": 2}, data={"eod_loss": False})
    layouts = ",".join([*planted_faults.FAULTS, "pp2-dp1"])
    faulty = certificate_of(source, layouts, tmp_path, planted_faults.faults_by_layout)
    rows = {row["layout"]: row for row in faulty["layouts"]}
    planted = {fault.__name__: rows[layout] for layout, fault in planted_faults.FAULTS.items()}
    assert planted.keys() == FOUND.keys()
    for name, found in FOUND.items():
        with subtests.test(name):
            assert planted[name]["verdict"] == "fail", table(faulty)
            assert planted[name]["reasons"][0].startswith(found.first)
            assert found.also in "\n".join(planted[name]["reasons"])
    assert "Traceback" in planted["rank_one_dies"]["details"]
    averaged = "".join(planted["losses_are_averaged_by_micro_batch"]["reasons"])
    assert "lm loss of step 1" not in averaged, "what is learned is wrong, not what is reported"
    assert faulty["verdict"] == "fail"
    assert [row["layout"] for row in rows.values() if row["verdict"] == "pass"] == ["pp2-dp1"], table(faulty)
    assert faulty["reference"]["verdict"] == "pass", "it resumed from what was right"
    (remark,) = [remark for row in rows.values() for remark in row["remarks"] if "not judged" in remark]
    assert "differs itself" in remark


def test_faults_that_all_layouts_share_are_found_beside_plain_torch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shrink, "CLIP", 1000.0)
    fault = planted_faults.faults_of_the_reference
    certificate = certificate_of(write_recipe(tmp_path), "dp2", tmp_path, fault)
    assert [row["verdict"] for row in certificate["layouts"]] == ["pass"], table(certificate)
    assert certificate["verdict"] == "fail"
    loss, norm = certificate["reference"]["reasons"]
    assert loss.startswith("beside plain torch over the true vocabulary: lm loss")
    assert norm.startswith("norm of a large gradient of step 1 is 40")
    assert "clipping did not bind on every step" in certificate["reasons"][-1], "it would not show a wrong norm"
    assert "FAIL: clipping did not bind" in table(certificate)


def test_a_pair_that_learns_something_else_is_named(tmp_path: Path) -> None:
    """What single saved comes back bit by bit, but other samples follow; pp2 goes on from tp2 as it should."""
    fault = planted_faults.other_samples_after_the_checkpoint_of_single
    certificate = certificate_of(write_recipe(tmp_path), "tp2,pp2", tmp_path, fault, pairs=True)
    (row,) = [row for row in certificate["layouts"] if row["layout"] == "pp2"]
    assert (row["continued_from"], row["followed_from"], row["followed_of"]) == ("tp2", 1, 2)
    assert row["reasons"][0].startswith("continued from single at step 1: data order: step 2, sample ")


# ---------------------------------------------------------------- what is refused


def test_unknown_and_illegal_layouts_are_refused_before_anything_starts(tmp_path: Path, command: Command) -> None:
    code, out, err = command("verify", write_recipe(tmp_path), "--layouts", "tp3,pipeline2,dp12,zero3-pp2-dp2")
    assert code == 2
    assert not out
    assert "--layouts tp3: parallel.tp is 3 but model.num_heads is 4." in err
    assert "parallel.tp 2 or 4" in err, "the nearest legal values"
    assert "--layouts pipeline2: 'pipeline2' is not a factor of a layout. A layout is its factors" in err
    assert "--layouts dp12: batch.global_batch_size is 16 but batch.micro_batch_size is 1." in err
    assert "12 or 24" in err
    assert "--layouts zero3-pp2-dp2: parallel.zero is 3 but parallel.pp is 2." in err


def test_too_few_steps_are_refused(tmp_path: Path, command: Command) -> None:
    code, _, err = command("verify", write_recipe(tmp_path), "--steps", "1")
    assert code == 2
    assert "argument --steps: '1' is not an integer from 2" in err


def test_the_standard_matrix_leaves_out_what_a_recipe_does_not_allow(tmp_path: Path) -> None:
    source = write_recipe(tmp_path, model={"num_heads": 2, "hidden_size": 34})
    recipe = load_checked_recipe(source).recipe
    chosen, left_out = choose_layouts(source, [], recipe, None)
    assert "parallel.tp is 4 but model.num_heads is 2" in left_out["tp4"]
    assert {layout.name for layout in chosen} | set(left_out) == set(STANDARD)
    with pytest.raises(RecipeError, match="no layout is left"):
        choose_layouts(source, [], recipe, ["single"])


# ---------------------------------------------------------------- the small recipe


@pytest.mark.parametrize("name", ["tr1-13b", "bloom-176b", "llama-1b", "bert-large"])
def test_a_recipe_keeps_its_structure_when_it_is_shrunk(name: str, tmp_path: Path) -> None:
    recipe = load_checked_recipe(name).recipe
    layouts, left_out = choose_layouts(name, [], recipe, None)
    assert not {each for each in left_out if "cp" not in each.replace("cp2", "cp")} - set(STANDARD)
    shrunk = shrink.shrink(recipe, layouts, tmp_path, steps=20)
    file = tmp_path / "small.yaml"
    file.write_text(yaml.safe_dump(shrunk.values))
    for layout in layouts:
        cut = f"batch.micro_batch_size={shrunk.batch // layout.micro_batches}"
        small = load_checked_recipe(str(file), [*layout.overrides, cut]).recipe
    was, now = recipe.model, small.model
    assert (now.family, now.tie_embeddings) == (was.family, was.tie_embeddings)
    grouped = was.num_heads // was.num_kv_heads
    assert now.num_heads // now.num_kv_heads == min(grouped, 8)
    assert now.ffn_hidden_size / now.hidden_size == pytest.approx(was.ffn_hidden_size / was.hidden_size, rel=0.05)
    assert math.log2(now.num_heads).is_integer() == math.log2(was.num_heads).is_integer()
    assert now.vocab_size % now.vocab_multiple, "the vocabulary is padded"
    assert (small.batch.rampup is None) == (recipe.batch.rampup is None)
    assert small.lr.schedule == recipe.lr.schedule
    assert small.optimizer.betas == recipe.optimizer.betas
    assert recipe.data is not None
    assert small.data is not None
    assert len(small.data.train) == min(4, len(recipe.data.train))
    assert (small.data.split is None) == (recipe.data.split is None)
    assert small.seed == recipe.seed


# ---------------------------------------------------------------- the trace


def test_train_writes_a_trace_of_its_first_steps(workshop: Workshop) -> None:
    trace = workshop.folder / "trace"
    words = ["--run-dir", "run", "--quiet", "--device", "cpu", "--trace", str(trace), "--trace-steps", "1"]
    assert main(["train", str(workshop.recipe), "train.for=3 steps", "lr.warmup=1 steps", *words]) == 0
    (line,) = (trace / "samples.jsonl").read_text().splitlines()
    record = json.loads(line)
    assert record["step"] == 1
    assert list(record["samples"]) == [str(i) for i in range(8)]
    assert len(set(record["samples"].values())) == 8
    check_whole(trace / "step-00000001")
    assert not (trace / "step-00000002").exists()
    gradients = compare.whole_tensors(trace / "step-00000001")
    weights = compare.whole_tensors(workshop.folder / "run" / "checkpoints" / "step-00000003")
    assert {name.replace("grad.", "model.") for name in gradients} == {name for name in weights if "model." in name}
    norm = torch.stack([gradient.norm() for gradient in gradients.values()]).norm().item()
    assert norm == pytest.approx(workshop.metrics(workshop.folder / "run")[0]["grad_norm"], rel=1e-6), "not clipped"
