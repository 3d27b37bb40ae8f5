"""The special tokens of an export: config, generation config and tokenizer agree, and what was imported is kept."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tokenizers

from bloomery.config.recipe import ModelSection
from bloomery.data.tokenizer import Tokenizer
from export_samples import Command, checkpoint_of
from hf_samples import hf_folder
from model_samples import small_config

transformers = pytest.importorskip("transformers")

LLAMA, BLOOM, GPT2, BERT = (
    small_config(family, vocab_size=300)
    for family in ("llama", "bloom", "gpt2", "bert")  # type: ignore[arg-type]
)
SENTENCEPIECE = ["<unk>", "<s>", "</s>", "<pad>"]
TEMPLATE = "{% for m in messages %}<s>{{ m.content }}</s>{% endfor %} é"
TEXT = "once upon a <time>"
HUB = {
    "tokenizer_class": "LlamaTokenizer",
    "bos_token": {"__type": "AddedToken", "content": "<s>", "lstrip": False, "normalized": True},
    "eos_token": "</s>",
    "unk_token": "<unk>",
    "pad_token": "<pad>",
    "padding_side": "left",
    "add_bos_token": True,
    "model_max_length": 1000000000000000019884624838656,
    "name_or_path": "/home/somebody/llama",
    "added_tokens_decoder": {"3": {"content": "<pad>", "special": True}},
}


def tokenizer_json(folder: Path, special: list[str]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    made = tokenizers.Tokenizer(tokenizers.models.BPE())
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=290, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    made.train_from_iterator(["once upon a time there was a word"] * 5, trainer)
    made.save(str(folder / "tokenizer.json"))
    return folder


def exported(
    command: Command, tmp_path: Path, config: ModelSection, special: list[str], **files: Any
) -> tuple[dict[str, Any], dict[str, Any], Any]:
    """config.json, generation_config.json and the tokenizer of transformers, of a model imported and exported again."""
    folder = tokenizer_json(hf_folder(tmp_path / "hf", config), special)
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    code, _, err = command("import", "hf", str(folder), str(tmp_path / "run"))
    assert code == 0, err
    code, _, err = command("export", str(tmp_path / "run"), str(tmp_path / "out"), "--no-proof")
    assert code == 0, err
    return read(tmp_path / "out")


def read(out: Path) -> tuple[dict[str, Any], dict[str, Any], Any]:
    config = json.loads((out / "config.json").read_text())
    generation = out / "generation_config.json"
    tokenizer = transformers.AutoTokenizer.from_pretrained(out)
    for part in ("bos", "eos", "pad"):
        assert config.get(f"{part}_token_id") == getattr(tokenizer, f"{part}_token_id"), part
    return config, json.loads(generation.read_text()) if generation.exists() else {}, tokenizer


def ids(config: dict[str, Any]) -> tuple[Any, ...]:
    return tuple(config.get(f"{part}_token_id") for part in ("bos", "eos", "pad"))


@pytest.mark.parametrize(("config", "settings"), [(LLAMA, HUB), (BLOOM, None)], ids=["all files", "tokenizer.json"])
def test_all_files_name_the_same_tokens(config: ModelSection, settings: Any, tmp_path: Path, command: Command) -> None:
    files = {"tokenizer_config": settings} if settings else {}
    made, generation, tokenizer = exported(command, tmp_path, config, SENTENCEPIECE, **files)
    assert ids(made) == ids(generation) == (1, 2, 3)
    assert (tokenizer.bos_token, tokenizer.eos_token, tokenizer.pad_token) == ("<s>", "</s>", "<pad>")
    assert len(tokenizer) == Tokenizer.load(str(tmp_path / "hf")).vocab_size
    assert (
        tokenizer(TEXT)["input_ids"]
        == transformers.PreTrainedTokenizerFast(tokenizer_file=str(tmp_path / "hf" / "tokenizer.json"))(TEXT)[
            "input_ids"
        ]
    )


def test_settings_and_chat_templates_are_kept(tmp_path: Path, command: Command) -> None:
    told = {**HUB, "chat_template": TEMPLATE, "additional_special_tokens": ["<pad>", "<not there>"]}
    _, _, tokenizer = exported(command, tmp_path, LLAMA, SENTENCEPIECE, tokenizer_config=told)
    assert tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False) == "<s>hi</s> é"
    config = json.loads((tmp_path / "out" / "tokenizer_config.json").read_text())
    assert config["padding_side"] == "left"
    assert config["add_bos_token"] is True
    assert config["model_max_length"] == LLAMA.seq_length
    assert config["additional_special_tokens"] == ["<pad>"]
    assert not {"name_or_path", "added_tokens_decoder"} & config.keys()


def test_a_chat_template_of_its_own_goes_along_and_away_with_the_next_export(tmp_path: Path, command: Command) -> None:
    folder = tokenizer_json(hf_folder(tmp_path / "hf", LLAMA), SENTENCEPIECE)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    command("import", "hf", str(folder), str(tmp_path / "run"))
    command("export", str(tmp_path / "run"), str(tmp_path / "out"), "--no-proof")
    assert (tmp_path / "out" / "chat_template.jinja").read_text() == TEMPLATE
    assert read(tmp_path / "out")[2].chat_template == TEMPLATE
    (tmp_path / "run" / "tokenizer" / "chat_template.jinja").unlink()
    command("export", str(tmp_path / "run"), str(tmp_path / "out"), "--no-proof")
    assert not (tmp_path / "out" / "chat_template.jinja").exists()


def test_the_older_special_tokens_map_is_obeyed(tmp_path: Path, command: Command) -> None:
    older = {"bos_token": {"content": "<s>", "single_word": False}, "eos_token": "<s>", "pad_token": "</s>"}
    made, generation, _ = exported(command, tmp_path, BLOOM, SENTENCEPIECE, special_tokens_map=older)
    assert ids(made) == (1, 1, 2)
    assert ids(generation) == (1, [1, 2], 2), "</s> ended the documents of the training"


def test_a_token_that_the_tokenizer_lacks_plays_no_part(tmp_path: Path, command: Command) -> None:
    told = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "[PAD]", "image_token": "<image>"}
    made, _, tokenizer = exported(command, tmp_path, LLAMA, SENTENCEPIECE, tokenizer_config=told)
    assert ids(made) == (1, 2, None)
    assert len(tokenizer) == Tokenizer.load(str(tmp_path / "hf")).vocab_size


@pytest.mark.parametrize("told", [{"model_max_length": 1024}, None])
def test_gpt2_begins_and_ends_with_the_same_token(told: Any, tmp_path: Path, command: Command) -> None:
    files = {"tokenizer_config": told} if told else {}
    made, generation, tokenizer = exported(command, tmp_path, GPT2, ["<x>", "<|endoftext|>"], **files)
    assert ids(made) == ids(generation) == (1, 1, None)
    assert tokenizer.bos_token == tokenizer.eos_token == "<|endoftext|>"


def test_a_bert_says_the_same_everywhere(tmp_path: Path, command: Command) -> None:
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    made, generation, tokenizer = exported(
        command, tmp_path, BERT, special, tokenizer_config={"do_lower_case": True, "tokenizer_class": "BertTokenizer"}
    )
    assert ids(made) == (2, 3, 0)
    assert generation == {}
    assert (tokenizer.mask_token_id, tokenizer.cls_token_id) == (4, 2)
    assert tokenizer("a", "b")["token_type_ids"]


def test_without_files_beside_it_a_tokenizer_has_its_parts_by_name(tmp_path: Path, command: Command) -> None:
    checkpoint = checkpoint_of(LLAMA, tmp_path / "run", tokenizer_json(tmp_path / "tokenizer", SENTENCEPIECE))
    assert command("export", str(checkpoint), str(tmp_path / "out"), "--no-proof")[0] == 0
    assert ids(read(tmp_path / "out")[0]) == (1, 2, 3)


def test_settings_that_are_no_json_are_refused_by_the_import(tmp_path: Path, command: Command) -> None:
    folder = tokenizer_json(hf_folder(tmp_path / "hf", LLAMA), SENTENCEPIECE)
    (folder / "tokenizer_config.json").write_text("[")
    code, _, err = command("import", "hf", str(folder), str(tmp_path / "run"))
    assert code == 3
    assert "tokenizer_config.json: holds no JSON object" in err
    assert not (tmp_path / "run").exists()


END = "<\uff5cend\u2581of\u2581sentence\uff5c>"
RECIPE = """
base: quickstart
name: other
tokenizer: {path: tok}
model: {num_layers: 1, hidden_size: 32, num_heads: 2, seq_length: 16, vocab_size: 290}
prepare: [{output: shard, sources: [texts.jsonl]}]
data: {train: [{path: shard}], mask_documents: true, split: null, cache_dir: cache}
batch: {micro_batch_size: 2, global_batch_size: 2}
lr: {warmup: 1 steps}
train: {for: 2 steps, evaluate: null}
"""


def test_an_end_that_only_the_folder_names_holds_from_text_to_export(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And a manifest that says otherwise is refused."""
    monkeypatch.chdir(tmp_path)
    tokenizer_json(tmp_path / "tok", ["<\uff5cbegin\u2581of\u2581sentence\uff5c>", END])
    (tmp_path / "tok" / "tokenizer_config.json").write_text(json.dumps({"eos_token": {"content": END}}))
    (tmp_path / "texts.jsonl").write_text(json.dumps({"text": f"once upon {END} a time"}) + "\n")
    with open(tmp_path / "texts.jsonl", "a") as file:
        file.writelines(json.dumps({"text": f"{number} words"}) + "\n" for number in range(40))
    (tmp_path / "other.yaml").write_text(RECIPE)
    code, _, err = command("prepare", "other.yaml")
    assert code == 0, err
    assert command("prepare", "other.yaml", "--verify")[0] == 0
    manifest = json.loads((tmp_path / "shard.manifest.json").read_text())
    assert (manifest["eod_id"], manifest["documents"]) == (1, 41)
    for change in ({"eod_id": 7}, {"vocab_size": 289}):
        (tmp_path / "shard.manifest.json").write_text(json.dumps(manifest | change))
        code, _, err = command("train", "other.yaml", "--run-dir", "refused")
        ((name, value),) = change.items()
        assert code == 3
        assert f"its {name} is {value}, that of tok/tokenizer.json is {manifest[name]}" in err
    (tmp_path / "shard.manifest.json").write_text(json.dumps(manifest))
    code, _, err = command("train", "other.yaml", "--run-dir", "run")
    assert code == 0, err
    code, _, err = command("export", "run", "hf", "--no-proof")
    assert code == 0, err
    assert json.loads((tmp_path / "hf" / "config.json").read_text())["eos_token_id"] == 1
    assert transformers.AutoTokenizer.from_pretrained("hf").eos_token == END
    ours, theirs = (Tokenizer.load(str(tmp_path / name)) for name in ("tok", "hf"))
    assert (theirs.eod_id, theirs.content_hash) == (1, ours.content_hash)
