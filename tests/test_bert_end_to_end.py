"""BERT on a CPU, the whole way: text, sentence shards, masked samples, training, resume, export, transformers."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml

from bloomery.cli.main import main
from bloomery.data.open import open_data
from bloomery.data.shards import ShardReader
from bloomery.data.tokenizer import Tokenizer
from bloomery.sizing.check import load_checked_recipe
from checkpoints import assert_same_tensors
from conftest import Workshop
from export_samples import logits_difference

TIMES = ["at dawn", "at noon", "at night"]
PEOPLE = {"anna": "mill", "bruno": "forge", "clara": "river", "dario": "market", "emma": "school", "felix": "harbour"}
VERBS = ["walk", "work", "talk", "rest", "look"]
PIECES = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", ".", "the", "near", "at", "dr", *VERBS, "##ed", "##ing"]
PIECES += ["was", "dawn", "noon", "night", *PEOPLE, *PEOPLE.values()]

RECIPE: dict[str, Any] = {
    "name": "small-bert",
    "seed": 3,
    "model": {
        "family": "bert", "num_layers": 2, "hidden_size": 64, "num_heads": 4, "seq_length": 44,
        "vocab_size": len(PIECES), "vocab_multiple": 16, "init_std": 0.1, "dropout": 0.0,
    },
    "tokenizer": {"path": "wordpiece"},
    "prepare": [{"output": "days", "sources": ["days.jsonl"], "split_sentences": True}],
    "data": {"train": [{"path": "days"}], "split": "9,1", "masking": {"probability": 0.15}},
    "batch": {"micro_batch_size": 16, "global_batch_size": 32},
    "optimizer": {"weight_decay": 0.01},
    "lr": {"peak": 5e-3, "schedule": "linear", "warmup": "10 steps"},
    "train": {"for": "80 steps", "evaluate": {"every": "40 steps", "steps": 3}},
    "precision": "fp32",
    "checkpoint": {"phases": [{"every": "40 steps"}]},
    "monitor": {"log_every": "1 steps", "tensorboard": False},
}  # fmt: skip


def a_day(chance: random.Random) -> str:
    """A story in the order of the day: who it is tells where, and the hour tells the order."""
    who = chance.choice(list(PEOPLE))
    hours = sorted(chance.sample(range(3), chance.choice([2, 2, 3])))
    sentences = []
    for hour in hours:
        verb = chance.choice([f"{chance.choice(VERBS)}ed", f"was {chance.choice(VERBS)}ing"])
        sentences.append(f"{TIMES[hour].capitalize()} Dr. {who.capitalize()} {verb} near the {PEOPLE[who]}.")
    return " ".join(sentences)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Text, a BERT vocabulary, a recipe, and what `prepare` makes of them."""
    here = tmp_path_factory.mktemp("bert")
    chance = random.Random(0)
    with open(here / "days.jsonl", "w") as file:
        for _ in range(1200):
            file.write(json.dumps({"text": a_day(chance)}) + "\n")
    (here / "wordpiece").mkdir()
    (here / "wordpiece" / "vocab.txt").write_text("\n".join(PIECES) + "\n")
    (here / "bert.yaml").write_text(yaml.safe_dump(RECIPE))
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(here)
        assert main(["prepare", "bert.yaml", "--workers", "1"]) == 0
    return here


@pytest.fixture
def inside(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(folder)
    return folder


def train(run: str, *overrides: str) -> Path:
    assert main(["train", "bert.yaml", *overrides, "--run-dir", run, "--quiet", "--device", "cpu"]) == 0
    return Path(run).absolute()


@pytest.fixture(scope="module")
def trained(folder: Path) -> Path:
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        return train("run")


def test_every_sentence_is_a_sequence(inside: Path) -> None:
    stories = [json.loads(line)["text"] for line in (inside / "days.jsonl").read_text().splitlines()]
    with ShardReader("days") as shard:
        assert shard.num_documents == 1200
        assert shard.num_sequences == sum(story.count("Dr.") for story in stories), "`Dr.` ends no sentence"


def test_a_sample_reads_as_a_pair_of_masked_segments(inside: Path) -> None:
    recipe = load_checked_recipe("bert.yaml").recipe
    tokenizer = Tokenizer.load("wordpiece")
    with open_data(recipe) as data:
        batch = data.train.batch(0, 64)
        labels = batch.targets["lm loss"].numpy()
        whole = np.where(labels >= 0, labels, batch.inputs["tokens"].numpy())
        for tokens, exchanged in zip(whole, batch.targets["sop loss"].tolist(), strict=True):
            text = tokenizer.decode(tokens)
            assert text.startswith("[CLS] ")
            assert text.count("[SEP]") == 2, "the end-of-document token of the shard is not in the sample"
            segments = text.removeprefix("[CLS]").split("[SEP]")[:2]
            assert all(segment.startswith(" at ") for segment in segments), "cut between sentences"
            times = ["dawn", "noon", "night"]
            hours = [[times.index(word) for word in segment.split() if word in times] for segment in segments]
            assert max(hours[exchanged]) < min(hours[1 - exchanged]), "1 means that they were exchanged"


def test_both_losses_fall_and_are_logged(trained: Path) -> None:
    rows = Workshop.metrics(trained)
    assert all(set(row["losses"]) == {"lm loss", "sop loss"} for row in rows)
    for name, start, end in [("lm loss", 3.0, 1.5), ("sop loss", 0.6, 0.35)]:
        values = [row["losses"][name] for row in rows]
        assert np.mean(values[:3]) > start
        assert np.mean(values[-10:]) < end, name
    line = (trained / "logs" / "main_log.txt").read_text()
    assert "| lm loss: " in line
    assert "| sop loss: " in line


def test_validation_has_both_losses_and_the_perplexity_of_the_first(trained: Path) -> None:
    rows = Workshop.metrics(trained, "validation")
    assert [row["step"] for row in rows] == [40, 80]
    assert rows[1]["perplexity"] == pytest.approx(np.exp(rows[1]["losses"]["lm loss"]))
    assert rows[1]["losses"]["sop loss"] < 0.4, "it learned the order of the day, not the training stories"


def test_resume_is_exact_to_the_bit(inside: Path) -> None:
    settings = ("train.for=12 steps", "train.evaluate=null", "data.split=null", "model.dropout=0.1")
    whole = train("whole", *settings)
    run = train("resumed", *settings, "train.exit_after=7 steps")
    assert len(Workshop.metrics(run)) == 7
    train("resumed", *settings)
    assert [row["losses"] for row in Workshop.metrics(run)] == [row["losses"] for row in Workshop.metrics(whole)]
    assert_same_tensors(whole, run)


def test_the_exported_folder_is_bert_for_pretraining(
    trained: Path, inside: Path, command: Callable[..., tuple[int, str, str]]
) -> None:
    code, out, error = command("export", str(trained), "exported")
    assert code == 0, out + error
    assert logits_difference(trained, Path("exported")) < 1e-4
    from transformers import AutoTokenizer, BertForPreTraining

    model = BertForPreTraining.from_pretrained("exported").eval()
    tokenizer = AutoTokenizer.from_pretrained("exported")
    words = (
        "[CLS] at dawn dr . anna walked near the [MASK] . [SEP] at night dr . anna was resting near the mill . [SEP]"
    )
    ids = torch.tensor([[tokenizer.convert_tokens_to_ids(piece) for piece in tokenizer.tokenize(words)]])
    types = (ids == tokenizer.sep_token_id).cumsum(1) - (ids == tokenizer.sep_token_id).long()
    with torch.no_grad():
        straight = model(ids, token_type_ids=types)
        second = ids[0, types[0] == 1].tolist()
        first = ids[0, 1 : len(ids[0]) - len(second)].tolist()
        turned = torch.tensor([[int(ids[0, 0]), *second, *first]])
        turned_types = torch.tensor([[0] * (1 + len(second)) + [1] * len(first)])
        exchanged = model(turned, token_type_ids=turned_types)
    place = int((ids[0] == tokenizer.mask_token_id).nonzero())
    assert tokenizer.convert_ids_to_tokens(int(straight.prediction_logits[0, place].argmax())) in PEOPLE.values()
    assert straight.seq_relationship_logits.argmax().item() == 0
    assert exchanged.seq_relationship_logits.argmax().item() == 1


def test_the_exported_tokenizer_puts_texts_together_as_they_were_trained(
    trained: Path, inside: Path, command: Callable[..., tuple[int, str, str]]
) -> None:
    from transformers import AutoTokenizer, BertForPreTraining

    assert command("export", str(trained), "pairs")[0] == 0
    tokenizer = AutoTokenizer.from_pretrained("pairs")
    pair = tokenizer("At dawn", "at noon")
    assert " ".join(tokenizer.convert_ids_to_tokens(pair["input_ids"])) == "[CLS] at dawn [SEP] at noon [SEP]"
    assert pair["token_type_ids"] == [0, 0, 0, 0, 1, 1, 1]
    assert tokenizer.decode(pair["input_ids"], skip_special_tokens=True) == "at dawn at noon"
    text = "at dawn dr. anna walked near the [MASK]."
    filled = tokenizer(text, return_tensors="pt")
    pieces = tokenizer.convert_ids_to_tokens(filled["input_ids"][0].tolist())
    assert (pieces[0], pieces[-1], pieces.count("[MASK]")) == ("[CLS]", "[SEP]", 1)
    with torch.no_grad():
        logits = BertForPreTraining.from_pretrained("pairs").eval()(**filled).prediction_logits
    place = pieces.index("[MASK]")
    assert tokenizer.convert_ids_to_tokens(int(logits[0, place].argmax())) in PEOPLE.values()
    ours, exported = Tokenizer.load("wordpiece"), Tokenizer.load("pairs")
    assert exported.content_hash == ours.content_hash, "the shards are still those of this tokenizer"
    assert exported.encode_batch(["At dawn"])[0].tolist() == ours.encode_batch(["At dawn"])[0].tolist()


def test_a_bert_that_goes_out_and_in_and_out_is_the_same_to_the_byte(
    trained: Path, inside: Path, command: Callable[..., tuple[int, str, str]]
) -> None:
    for words in (("export", str(trained), "out"), ("import", "hf", "out", "in"), ("export", "in", "again")):
        code, out, error = command(*words)
        assert code == 0, out + error
    for name in ("tokenizer.json", "tokenizer_config.json", "config.json", "model.safetensors"):
        assert Path("out", name).read_bytes() == Path("again", name).read_bytes(), name


def stories_of(batch: Any, name: str) -> list[tuple[int, list[str]]]:
    """(label, the segments as text, without masks) of each sample."""
    tokenizer, labels = Tokenizer.load("wordpiece"), batch.targets["lm loss"].numpy()
    whole = np.where(labels >= 0, labels, batch.inputs["tokens"].numpy())
    kinds = batch.targets[name].tolist() if name else [0] * len(whole)
    return [
        (kind, tokenizer.decode(tokens).removeprefix("[CLS]").split("[SEP]")[:-1])
        for kind, tokens in zip(kinds, whole, strict=True)
    ]


def test_next_sentences_follow_or_are_of_another_story(inside: Path) -> None:
    recipe = load_checked_recipe("bert.yaml", ["model.second_head=next_sentence", "train.evaluate=null"]).recipe
    stories = [json.loads(line)["text"].lower() for line in (inside / "days.jsonl").read_text().splitlines()]
    known = {"".join(story.replace(".", " . ").split()) for story in stories}
    with open_data(recipe) as data:
        found = stories_of(data.train.batch(0, 400), "nsp loss")
    assert 150 < sum(kind for kind, _ in found) < 250
    for kind, (first, second) in found:
        if kind == 0:
            assert any(("".join((first + second).split())) in story for story in known)
    elsewhere = [pair for kind, pair in found if kind == 1]
    apart = [not any("".join((a + b).split()) in story for story in known) for a, b in elsewhere]
    assert np.mean(apart) > 0.9, "a small world has coincidences"


def test_masked_tokens_alone_are_one_segment_of_full_length(inside: Path) -> None:
    recipe = load_checked_recipe("bert.yaml", ["model.second_head=none", "train.evaluate=null"]).recipe
    with open_data(recipe) as data:
        batch = data.train.batch(0, 64)
    assert set(batch.targets) == {"lm loss"}
    assert not batch.inputs["token_types"].any()
    assert all(len(segments) == 1 for _, segments in stories_of(batch, ""))


@pytest.mark.parametrize("second", ["next_sentence", "none"])
def test_another_second_head_trains_resumes_goes_out_and_in(
    second: str, inside: Path, command: Callable[..., tuple[int, str, str]]
) -> None:
    settings = ("train.for=30 steps", f"model.second_head={second}")
    whole = train(f"{second}-whole", *settings)
    run = train(f"{second}-run", *settings, "train.exit_after=7 steps")
    train(f"{second}-run", *settings)
    losses = [row["losses"] for row in Workshop.metrics(whole)]
    assert [row["losses"] for row in Workshop.metrics(run)] == losses
    assert set(losses[0]) == {"lm loss"} | ({"nsp loss"} if second == "next_sentence" else set())
    assert losses[-1]["lm loss"] < 0.8 * losses[0]["lm loss"]
    out, imported, again = (f"{second}-{name}" for name in ("out", "in", "again"))
    for words in (("export", str(run), out), ("import", "hf", out, imported), ("export", imported, again)):
        code, said, error = command(*words)
        assert code == 0, said + error
        assert "proof: " in said
    for name in ("config.json", "model.safetensors"):
        assert Path(out, name).read_bytes() == Path(again, name).read_bytes(), name
    config = json.loads(Path(out, "config.json").read_text())
    assert config["architectures"] == ["BertForMaskedLM" if second == "none" else "BertForPreTraining"]
    saved = yaml.safe_load(Path(imported, "recipe.yaml").read_text())
    assert saved["model"]["second_head"] == second


def test_a_masked_lm_of_transformers_is_imported(
    inside: Path, command: Callable[..., tuple[int, str, str]], tmp_path: Path
) -> None:
    from transformers import BertConfig, BertForMaskedLM

    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64}
    BertForMaskedLM(BertConfig(vocab_size=100, max_position_embeddings=16, **sizes)).save_pretrained(tmp_path / "hf")
    code, out, err = command("import", "hf", str(tmp_path / "hf"), str(tmp_path / "run"))
    assert code == 0, err
    assert "proof: " in out
    assert yaml.safe_load((tmp_path / "run/recipe.yaml").read_text())["model"]["second_head"] == "none"


def test_an_export_with_another_tokenizer_is_refused(
    trained: Path, inside: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of the same size, so that only its content tells it apart from the one it was trained with."""
    (inside / "other").mkdir()
    *words, first, last = PIECES
    (inside / "other" / "vocab.txt").write_text("\n".join([*words, last, first]) + "\n")
    assert main(["export", str(trained), "refused", "--tokenizer", "other"]) == 3
    said = capsys.readouterr().err
    assert "was trained with" in said
    assert "--tokenizer" in said
    assert not (inside / "refused").exists()
