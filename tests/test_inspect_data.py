"""`bloomery inspect data | sample | step | order`: what they show is what a training consumes."""

from __future__ import annotations

import itertools
import json
import os
import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
import torch

from bloomery.cli.main import main
from bloomery.config.load import load_recipe
from bloomery.data.batch import GlobalBatch, Loader
from bloomery.data.manifest import manifest_path
from bloomery.data.open import open_data
from bloomery.data.shards import ShardReader, ShardWriter
from bloomery.data.tokenizer import Tokenizer
from bloomery.families.family import IGNORED_LABEL
from conftest import Workshop, write_shard

Command = Callable[..., tuple[int, str, str]]


def answer(command: Command, *words: str) -> Any:
    code, out, err = command(*words, "--json")
    assert code == 0, err
    return json.loads(out)


@pytest.fixture
def consumed(monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """What trainings take from their loader, sample by sample: the inputs and the last label."""
    rows: list[list[int]] = []
    take = Loader.take

    def watched(self: Loader) -> GlobalBatch:
        batch = take(self)
        for part in batch.micro_batches:
            whole = torch.cat([part.inputs["tokens"], part.targets["lm loss"][:, -1:]], dim=1)
            rows.extend(whole.tolist())
        return batch

    monkeypatch.setattr(Loader, "take", watched)
    return rows


BLEND = "data.train=[{path: train, weight: 3}, {path: valid, name: books, weight: 1.5}]"


# ---------------------------------------------------------------- sample and step


@pytest.mark.parametrize(
    "overrides",
    [
        [BLEND, "batch.micro_batch_size=2", "batch.rampup={start: 4, increment: 2, samples: 40}"],
        ["data.split='80,20,0'", "train.evaluate={every: 30 steps, steps: 1}", "train.for=40 steps"],
        [BLEND, "data.order=megatron", "train.for=40 steps"],
    ],
    ids=["ramp-up", "split, second epoch", "megatron"],
)
def test_inspect_shows_what_the_training_consumes(
    workshop: Workshop, command: Command, consumed: list[list[int]], overrides: list[str]
) -> None:
    run = workshop.train(*overrides)
    steps = workshop.metrics(run)
    total = steps[-1]["consumed_samples"]
    assert len(consumed) == total
    shown = answer(command, "inspect", "sample", str(workshop.recipe), f"0-{total - 1}", *overrides)
    assert [sample["tokens"] for sample in shown] == consumed
    assert [sample["index"] for sample in shown] == list(range(total))
    before = 0
    for record in (steps[0], steps[3], steps[-1]):
        before = record["consumed_samples"] - record["global_batch"]
        part = answer(command, "inspect", "step", str(workshop.recipe), str(record["step"]), *overrides)
        assert part == shown[before : record["consumed_samples"]]
        assert {sample["step"] for sample in part} == {record["step"]}


def test_documents_and_epochs_lead_to_the_very_tokens(workshop: Workshop, command: Command) -> None:
    samples = answer(command, "inspect", "sample", str(workshop.recipe), "280-320", BLEND, "train.for=100 steps")
    assert {sample["source"] for sample in samples} == {"train", "books"}
    assert {sample["epoch"] for sample in samples if sample["source"] == "train"} == {0}
    with ShardReader("train") as train, ShardReader("valid") as valid:
        for sample in samples:
            shard = {"train": train, "valid": valid}[sample["shard"]]
            tokens: list[int] = []
            for span in sample["documents"]:
                assert set(span) == {"document", "start", "tokens"}
                start = int(shard.document_starts()[span["document"]]) + span["start"]
                tokens += shard.read(start, span["tokens"]).tolist()
            assert tokens == sample["tokens"]
    late = answer(command, "inspect", "sample", str(workshop.recipe), "700-799", BLEND, "train.for=100 steps")
    assert {sample["epoch"] for sample in late if sample["source"] == "books"} == {2}


def test_a_run_that_changed_its_weights_is_shown_by_its_checkpoint(
    workshop: Workshop, command: Command, consumed: list[list[int]]
) -> None:
    other = "data.train=[{path: train, weight: 1}, {path: valid, name: books, weight: 3}]"
    run = workshop.train(BLEND, "train.exit_after=10 steps")
    assert len(consumed) == 80
    workshop.train(other, changes=["data.train"])
    assert len(consumed) == 160
    words = ["inspect", "sample", str(workshop.recipe)]
    shown = answer(command, *words, "80-159", other, "--run-dir", str(run))
    assert [sample["tokens"] for sample in shown] == consumed[80:]
    assert [sample["tokens"] for sample in answer(command, *words, "0-79", BLEND)] == consumed[:80]
    code, _, err = command(*words, "79", other, "--run-dir", str(run))
    assert code == 3
    assert "sample 79 lies before sample 80, where sources, weights or sequence length last changed." in err
    assert "Give a checkpoint from before that change as --run-dir, and its own recipe.yaml." in err
    then = run / "checkpoints" / "step-00000010"
    (sample,) = answer(command, "inspect", "sample", str(then / "recipe.yaml"), "79", "--run-dir", str(then))
    assert sample["tokens"] == consumed[79]
    order = answer(command, "inspect", "order", str(workshop.recipe), other, "--run-dir", str(run))
    assert order["first_sample"] == 80
    assert [source["achieved"] for source in order["sources"]] == pytest.approx([0.25, 0.75], abs=0.02)


def test_a_run_is_inspected_with_the_checks_of_a_resumed_training(workshop: Workshop, command: Command) -> None:
    write_shard(workshop.folder / "other", seed=5)
    run = workshop.train(BLEND, "lr.peak=0.02", "train.exit_after=3 steps")
    of_run = ["--run-dir", str(run)]
    words = ["inspect", "step", str(workshop.recipe), "2", BLEND]
    assert command(*words, *of_run)[0] == 0, "lr is not read here, so it is not compared either"
    code, _, err = command(*words, "data.train.1.path=other", *of_run)
    assert code == 3
    assert "the source 'books' has 60 documents" in err
    assert "but the checkpoint is of another shard, with 20 documents" in err
    code, _, err = command(*words, "seed=8", *of_run)
    assert code == 3
    assert "seed is 8 but the checkpoint has 7. Fixed: " in err
    facts = answer(command, "inspect", "schedule", str(workshop.recipe), "batch.global_batch_size=16", *of_run)
    assert [level["global_batch"] for level in facts["levels"]] == [8, 16]
    heavier = "data.train.1.weight=6"
    order = answer(command, "inspect", "order", str(workshop.recipe), BLEND, heavier, *of_run)
    assert order["first_sample"] == 24, "what the change would come to"


def test_a_run_is_inspected_with_its_own_tokenizer_and_length(workshop: Workshop, command: Command) -> None:
    from tokenizers import models

    def make(letter: str) -> None:
        tokenizer = tokenizers.Tokenizer(models.BPE(vocab={"<|endoftext|>": 0, letter: 1}, merges=[]))
        tokenizer.save("tok/tokenizer.json")

    (workshop.folder / "tok").mkdir()
    make("a")
    settings = ["tokenizer={path: tok}", "data.order=megatron"]
    run = workshop.train(*settings, "train.for=160 samples", "train.exit_after=2 steps")
    words = ["inspect", "order", str(workshop.recipe), *settings, "--run-dir", str(run)]
    assert command(*words, "train.for=160 samples")[0] == 0
    code, _, err = command(*words, "train.for=6000 samples")
    assert code == 3
    assert "train.for is 6000 samples = 6000 samples but the checkpoint has 160 samples" in err
    make("b")
    code, _, err = command(*words, "train.for=160 samples")
    assert code == 3
    assert "was trained with" in err


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer, two shards made by `prepare`, and a recipe that trains on them."""
    with pytest.MonkeyPatch.context() as here:
        here.chdir(tmp_path_factory.mktemp("prepared"))
        for name in ("fables", "laws"):
            lines = [json.dumps({"text": f"{name} number {n}: the fox and the raven.\n" * 3}) for n in range(40)]
            Path(f"{name}.jsonl").write_text("\n".join(lines) + "\n")
        assert main(["tokenizer", "train", "*.jsonl", "--vocab-size", "300", "--output", "tok"]) == 0
        Path("text.yaml").write_text(
            "name: text\nseed: 1\ntokenizer: {path: tok}\n"
            "prepare:\n"
            "- {output: both, sources: [fables.jsonl, laws.jsonl], shuffle: false}\n"
            "- {output: mixed, sources: [fables.jsonl, laws.jsonl]}\n"
            "data: {train: [{path: both}, {path: mixed, name: the mixture}]}\n"
            "model: {family: gpt2, num_layers: 1, hidden_size: 16, num_heads: 1, seq_length: 24, vocab_size: 300}\n"
            "batch: {micro_batch_size: 2, global_batch_size: 4}\nlr: {peak: 1e-3}\ntrain: {for: 5 steps}\n"
        )
        assert main(["prepare", "text.yaml"]) == 0
        return Path.cwd()


@pytest.fixture
def text_recipe(prepared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    shutil.copytree(prepared, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    return tmp_path / "text.yaml"


def test_a_text_and_documents_without_ends_are_reported(text_recipe: Path, command: Command) -> None:
    code, _, err = command("inspect", "data", "fables.jsonl")
    assert (code, "fables.jsonl is text" in err, "with `bloomery prepare`" in err) == (3, True, True)
    assert command("prepare", str(text_recipe), "prepare.0.append_eod=false", "prepare.0.output=both")[0] == 0
    assert (
        "documents of both have no ends: a decoder learns across them"
        in command("inspect", "data", str(text_recipe))[2]
    )


def test_files_that_the_manifest_does_not_describe_are_refused(text_recipe: Path, command: Command) -> None:
    assert command("prepare", str(text_recipe), "prepare.0.append_eod=false", "prepare.0.output=other")[0] == 0
    for ending in (".bin", ".idx"):
        Path(f"other{ending}").replace(f"both{ending}")
    for words in (["inspect", "sample", str(text_recipe), "0"], ["train", str(text_recipe), "--device", "cpu"]):
        code, _, err = command(*words)
        assert code == 3
        assert "both.manifest.json: the manifest belongs to another shard: it records tokens" in err


def test_shards_of_two_tokenizers_do_not_train_together(text_recipe: Path, command: Command) -> None:
    assert command("tokenizer", "train", "fables.jsonl", "--vocab-size", "290", "--output", "tok2")[0] == 0
    other = ["tokenizer.path=tok2", "prepare.0.output=other", "prepare.1.output=other2"]
    assert command("prepare", str(text_recipe), *other)[0] == 0
    gone = ("tokenizer:", "prepare:", "- ")
    lines = [line for line in text_recipe.read_text().splitlines() if not line.startswith(gone)]
    text_recipe.write_text("\n".join(lines))
    assert command("inspect", "sample", str(text_recipe), "0")[0] == 0, "one tokenizer is fine"
    hashes = {name: json.loads(Path(manifest_path(name)).read_text())["tokenizer_hash"] for name in ("both", "other")}
    where = ["train.evaluate={every: 5 steps}", "--device", "cpu", "--run-dir", "bad"]
    for data in (
        "data={train: [{path: both}, {path: other}], validation: {held: [{path: mixed}]}}",
        "data.validation={held: [{path: other}]}",
    ):
        code, _, err = command("train", str(text_recipe), data, *where)
        assert code == 3, err
        expected = f"its tokenizer_hash is {hashes['other'][:12]}, that of both is {hashes['both'][:12]}"
        assert f"other.manifest.json: the shard was made with another tokenizer: {expected}" in err
        assert not list(Path("bad").glob("checkpoints/*"))
    facts = json.loads(Path(manifest_path("mixed")).read_text())
    Path(manifest_path("mixed")).write_text(json.dumps({**facts, "eod_id": 7}))
    code, _, err = command("train", str(text_recipe), "--device", "cpu", "--run-dir", "bad")
    assert code == 3
    assert "its eod_id is 7, that of both is 0" in err


def test_a_shard_is_compared_with_its_manifest(text_recipe: Path, command: Command) -> None:
    facts = json.loads(Path(manifest_path("mixed")).read_text())
    Path(manifest_path("mixed")).write_text(json.dumps({**facts, "dtype": "int32", "documents": 7}))
    code, _, err = command("inspect", "data", "mixed")
    assert code == 3
    assert (
        "mixed.manifest.json: the manifest belongs to another shard: it records dtype int32 where it is uint16" in err
    )
    assert "documents 7 where it is 80" in err
    Path(manifest_path("mixed")).write_text(json.dumps({**facts, "dtype": 5}))
    code, _, err = command("inspect", "data", "mixed")
    assert code == 3
    assert "mixed.manifest.json: has dtype 5 (should be a valid string)" in err


def test_samples_are_shown_as_text_with_their_documents(text_recipe: Path, command: Command) -> None:
    code, out, err = command("inspect", "sample", str(text_recipe), "0-7")
    assert code == 0, err
    assert out.count("\nsample ") == 7
    assert "sample 0 (step 1): " in out
    assert "25 tokens of both.bin" in out
    assert "25 tokens of mixed.bin" in out
    assert "the raven." in out
    assert not err
    tokenizer = Tokenizer.load("tok")
    samples = answer(command, "inspect", "sample", str(text_recipe), "0-19")
    for sample in samples:
        assert sample["text"] == tokenizer.decode(sample["tokens"])
        for span in sample["documents"]:
            if sample["shard"] == "both":
                with ShardReader("both") as shard:
                    begin = int(shard.document_starts()[span["document"]])
                    expected = "fables" if span["document"] < 40 else "laws"
                    assert tokenizer.decode(shard.read(begin, 12)).startswith(expected)


def test_a_masked_training_is_shown_as_it_is(tmp_path: Path, command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", ".", "The", "fox", "sees", "a", "raven", "and", "runs"]
    tokenizer = tokenizers.Tokenizer(
        tokenizers.models.WordPiece({word: n for n, word in enumerate(words)}, unk_token="[UNK]")
    )
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.BertPreTokenizer()
    tokenizer.add_special_tokens(words[:5])
    Path("tok").mkdir()
    tokenizer.save("tok/tokenizer.json")
    text = "The fox sees a raven. " * 5
    Path("text.jsonl").write_text(
        "".join(json.dumps({"text": text.replace(" a ", " and ", n)}) + "\n" for n in range(20))
    )
    Path("bert.yaml").write_text(
        "name: bert\nprecision: fp32\ntokenizer: {path: tok}\n"
        "prepare: [{output: shard, sources: [text.jsonl], split_sentences: true}]\ndata: {train: [{path: shard}]}\n"
        "model: {family: bert, num_layers: 1, hidden_size: 16, num_heads: 1, seq_length: 24, vocab_size: 13}\n"
        "batch: {micro_batch_size: 2, global_batch_size: 4}\nlr: {peak: 1e-3}\ntrain: {for: 5 steps}\n"
    )
    code, _, err = command("prepare", "bert.yaml")
    assert code == 0, err
    recipe = load_recipe("bert.yaml").recipe
    with open_data(recipe) as data:
        batch = data.train.batch(0, 20)
    for row, sample in enumerate(answer(command, "inspect", "sample", "bert.yaml", "0-19")):
        length = len(sample["tokens"])
        assert batch.inputs["tokens"][row].tolist() == sample["tokens"] + [0] * (24 - length)
        labels = batch.targets["lm loss"][row].tolist()
        assert {at["position"]: at["token"] for at in sample["labels"]["lm loss"]} == {
            position: label for position, label in enumerate(labels) if label != IGNORED_LABEL
        }
        assert sample["labels"]["sop loss"] == int(batch.targets["sop loss"][row])
        assert sum(span["tokens"] for span in sample["documents"]) == length - 3
    out = command("inspect", "step", "bert.yaml", "1")[1]
    assert "| [CLS] " in out
    assert "[MASK]" in out
    assert "  sop loss: " in out
    assert "  lm loss: " in out
    Path("short.jsonl").write_text('{"text": "The fox sees a raven."}\n' * 20)
    short = "prepare=[{output: short, sources: [short.jsonl], split_sentences: true}]"
    assert command("prepare", "bert.yaml", short)[0] == 0
    facts = answer(command, "inspect", "data", "bert.yaml", "data.train.0.path=short")["sources"][0]
    assert facts["sequences"] == facts["documents"] == facts["samples_per_epoch"] == 20, "one sentence each"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["sample", "160"], "there is no sample 160. For this training the range is 0 to 159"),
        (["sample", "150-1000"], "there is no sample 1,000"),
        (["sample", "5-3"], "is not a position such as 0"),
        (["sample", "_"], "is not a position such as 0"),
        (["step", "0"], "there is no step 0. For this training the range is 1 to 20"),
        (["sample", "0", "data=null"], "the recipe has no data"),
    ],
)
def test_numbers_beyond_the_training_are_refused(
    workshop: Workshop, command: Command, words: list[str], message: str
) -> None:
    code, out, err = command("inspect", words[0], str(workshop.recipe), *words[1:])
    assert code == 2, err
    assert message in err
    assert not out


def test_missing_data_is_an_error_that_names_it(workshop: Workshop, command: Command) -> None:
    for words in (
        ["sample", str(workshop.recipe), "0"],
        ["order", str(workshop.recipe)],
        ["data", str(workshop.recipe)],
    ):
        code, _, err = command("inspect", *words, "data.train=[{path: nowhere}]")
        assert code == 3
        assert "nowhere.bin: no such file" in err
    code, _, err = command("inspect", "order", str(workshop.recipe), "--run-dir", "nowhere")
    assert code == 3
    assert "nowhere" in err


def test_labels_without_loss_are_listed_and_the_last_token_is_not_lost(workshop: Workshop, command: Command) -> None:
    with ShardReader("train") as shard:
        tokens = shard.read(0, shard.num_tokens)
        starts = shard.document_starts().tolist()
    ends = ["data.eod_loss=false", "tokenizer={path: tok}"]
    eod = int(tokens[starts[1] - 1])
    words = {f"t{number}": number for number in range(64) if number != eod} | {"<|endoftext|>": eod}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token=f"t{(eod + 1) % 64}"))
    made.add_special_tokens(["<|endoftext|>"])
    Path("tok").mkdir()
    made.save("tok/tokenizer.json")
    with ShardWriter("ending", np.uint16) as writer:
        for start, stop in itertools.pairwise(starts):
            writer.append(np.append(tokens[start : stop - 1], eod))
    words_of = [str(workshop.recipe), "0-99", "data.train.0.path=ending", *ends]
    seen = 0
    with ShardReader("ending") as shard:
        for sample in answer(command, "inspect", "sample", *words_of):
            silent = [place for place, token in enumerate(sample["tokens"][:-1]) if token == eod]
            assert sample.get("no_loss", []) == silent
            seen += 15 in silent
            spans = [(shard.document_start(span["document"]) + span["start"], span["tokens"])
                     for span in sample["documents"]]  # fmt: skip
            assert [token for span in spans for token in shard.read(*span).tolist()] == sample["tokens"]
    assert seen, "where the last label has no loss, its token is shown"


# ---------------------------------------------------------------- order


def test_the_order_counts_what_the_samples_are(workshop: Workshop, command: Command) -> None:
    words = [str(workshop.recipe), BLEND, "train.for=100 steps"]
    samples = answer(command, "inspect", "sample", words[0], "0-799", *words[1:])
    facts = answer(command, "inspect", "order", *words)
    assert (facts["order"], facts["train_samples"], facts["first_sample"]) == ("timeless", 800, 0)
    for source in facts["sources"]:
        mine = [sample for sample in samples if sample["source"] == source["source"]]
        assert source["samples_taken"] == len(mine)
        assert source["achieved"] == len(mine) / 800
        assert source["epochs"] == len(mine) / source["samples_per_epoch"]
    assert [source["weight"] for source in facts["sources"]] == pytest.approx([2 / 3, 1 / 3])


# ---------------------------------------------------------------- data


def test_data_of_shards_is_counted(workshop: Workshop, command: Command) -> None:
    facts = answer(command, "inspect", "data", "train", "valid.bin")
    assert [source["shard"] for source in facts["sources"]] == ["train", "valid"]
    for source in facts["sources"]:
        with ShardReader(source["shard"]) as shard:
            tokens = shard.read(0, shard.num_tokens)
            lengths = np.diff(shard.document_starts())
        assert source["documents"] == len(lengths)
        assert (source["tokens"], source["bytes"], source["dtype"]) == (len(tokens), 2 * len(tokens), "uint16")
        assert source["document_tokens"] == {
            "mean": pytest.approx(lengths.mean()),
            "median": float(np.median(lengths)),
            "max": int(lengths.max()),
        }
        used = source["vocabulary"]
        assert (used["distinct_ids"], used["max_id"]) == (len(Counter(tokens.tolist())), int(tokens.max()))
        assert (used["eod_id"], used["eod_share"], source["manifest"]) == (None, None, None)
    code, out, err = command("inspect", "data", "train", "--quick")
    assert code == 0
    assert "distinct_ids" not in out
    assert "manifest -" in " ".join(out.split())
    assert "no manifest of train" in err


def test_data_of_a_recipe_says_how_often_each_source_is_taken(workshop: Workshop, command: Command) -> None:
    words = [str(workshop.recipe), BLEND, "train.for=100 steps", "data.validation={held-out: [{path: valid}]}"]
    words.append("train.evaluate={every: 5 steps, steps: 1}")
    facts = answer(command, "inspect", "data", *words)
    train, books, held_out = facts["sources"]
    order = answer(command, "inspect", "order", *words)
    for row, source in zip((train, books), order["sources"], strict=True):
        assert (row["epochs"], row["weight"]) == (source["epochs"], source["weight"])
        assert (row["group"], row["samples_per_epoch"]) == ("train", source["samples_per_epoch"])
    assert (held_out["group"], held_out["source"]) == ("held-out", "valid")
    assert "weight" not in held_out
    assert facts["train_samples"] == 800
    code, out, _ = command("inspect", "data", *words)
    assert code == 0
    lines = [" ".join(line.split()) for line in out.splitlines()]
    for shown in ("group train train held-out", "vocabulary.max_id 63 63 63", "weight 0.6666667 0.3333333 -"):
        assert shown in lines


def test_data_with_a_manifest(text_recipe: Path, command: Command) -> None:
    facts = answer(command, "inspect", "data", str(text_recipe))
    both = facts["sources"][0]
    assert both["documents"] == 80
    assert both["vocabulary"]["eod_share"] == pytest.approx(80 / both["tokens"])
    assert [source["name"] for source in both["manifest"]["sources"]] == ["fables.jsonl", "laws.jsonl"]
    code, out, err = command("inspect", "data", str(text_recipe))
    assert code == 0
    assert not err
    assert f"manifest.tokenizer_hash  {both['manifest']['tokenizer_hash'][:12]}" in out
    assert "manifest.tokens_from.laws.jsonl  " in out
    Path(manifest_path("both")).unlink()
    facts = answer(command, "inspect", "data", str(text_recipe))
    assert facts["sources"][0]["vocabulary"] == both["vocabulary"]  # the tokenizer tells the end of documents
    assert facts["sources"][0]["manifest"] is None


def test_ids_that_are_no_ids_are_an_error(tmp_path: Path, command: Command) -> None:
    with ShardWriter(str(tmp_path / "odd"), "int32") as writer:
        writer.append(np.array([1, 2, 2_000_000_000, -5, 3]))
    code, _, err = command("inspect", "data", str(tmp_path / "odd"))
    assert code == 3
    assert "odd.bin: holds tokens from -5 to 2,000,000,000. Token ids are from 0 to 16,777,215" in err


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (["trian"], 3, "trian.bin: no such file"),
        (["train", "nowhere"], 3, "nowhere.bin: no such file"),
        (["small.yaml", "train"], 2, "this is not an override"),
        (["nowhere.yaml"], 2, "nowhere.yaml"),
        (["small.yaml", "data=null"], 2, "the recipe has no data"),
        (["valid.manifest.json"], 0, ""),
    ],
)
def test_what_is_neither_recipe_nor_shard_is_an_error(
    workshop: Workshop, command: Command, words: list[str], code: int, message: str
) -> None:
    ended, _, err = command("inspect", "data", *words)
    assert ended == code, err
    assert message in err


def test_many_sources_are_all_listed(workshop: Workshop, command: Command) -> None:
    write_shard(workshop.folder / "tiny", documents=2)
    for number in range(300):
        for ending in (".bin", ".idx"):
            os.link(workshop.folder / f"tiny{ending}", workshop.folder / f"s{number}{ending}")
    paths = ", ".join(f"{{path: s{n}, weight: {n + 100}}}" for n in range(300))
    words = (str(workshop.recipe), f"data.train=[{paths}]", "train.for=1000 steps")
    facts = answer(command, "inspect", "order", *words)
    assert len(facts["sources"]) == 300
    assert sum(source["samples_taken"] for source in facts["sources"]) == 8000
    unchecked = "tokenizer, vocabulary and end-of-document token were not checked\n"
    warning = f"bloomery: warning: no manifest of s0, s1, s2 and 297 more: {unchecked}"
    assert command("inspect", "order", *words)[2] == warning, "one line, not 300"
    assert command("inspect", "data", "s0", "s1", "--quick")[2].endswith(f"no manifest of s0, s1: {unchecked}")


def test_epochs_of_megatrons_orders_are_those_of_their_tokens(workshop: Workshop, command: Command) -> None:
    words = [str(workshop.recipe), "train.for=100 steps", "data.order=megatron"]
    (source,) = answer(command, "inspect", "order", *words)["sources"]
    length = load_recipe(str(workshop.recipe)).recipe.model.seq_length
    with ShardReader("train") as shard:
        tokens = shard.num_tokens
    assert source["epochs"] == 800 * length / tokens


def test_megatrons_orders_say_which_documents_they_read(workshop: Workshop, command: Command) -> None:
    words = [str(workshop.recipe), "data.order=bigscience", "data.split='80,20,0'", "train.for=40 steps"]
    words += ["train.evaluate={every: 5 steps, steps: 1}"]
    (source,) = answer(command, "inspect", "order", *words)["sources"]
    first, last = source["document_range"]
    seen = {part["document"] for sample in range(0, 320, 32) for one in
            answer(command, "inspect", "sample", str(words[0]), f"{sample}-{sample + 31}", *words[1:])
            for part in one["documents"]}  # fmt: skip
    assert (first, last) == (0, 48)
    assert seen == set(range(first, last))
    rows = answer(command, "inspect", "data", *words)["sources"]
    assert [row["document_range"] for row in rows] == [[0, 48], [48, 60]]


def test_a_document_that_is_cut_belongs_to_both_parts(workshop: Workshop, command: Command) -> None:
    """Megatron's split counts sequences, of which a document may have several."""
    with ShardWriter(str(workshop.folder / "many"), np.uint16) as writer:
        for _ in range(4):
            writer.append_many(np.full(60, 7, np.uint16).tobytes(), np.full(3, 20), np.array([3]))
    words = [str(workshop.recipe), "data.train=[{path: many}]", "data.order=megatron", "data.split='7,5,0'"]
    words += ["train.evaluate={every: 5 steps, steps: 1}"]
    rows = answer(command, "inspect", "data", *words)["sources"]
    assert [row["document_range"] for row in rows] == [[0, 3], [2, 4]]
