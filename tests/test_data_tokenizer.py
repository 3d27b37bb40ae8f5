"""The tokenizer folder: ids, the end of a document, what is never an id, and what transformers reads."""

import json
import shutil

import numpy as np
import pytest

from bloomery.base.errors import DataError, RecipeError, StorageError
from bloomery.data.tokenizer import Tokenizer
from bloomery.prepare.train_tokenizer import train_tokenizer

TEXTS = ["def read(self, path):\n    return open(path).read()\n", "the end of the text, the text of the end"] * 3


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    train_tokenizer(TEXTS, vocab_size=280, output=str(folder))
    return folder


@pytest.fixture
def tokenizer(folder):
    return Tokenizer.load(str(folder))


def test_it_has_exactly_the_size_that_was_asked_for(tokenizer):
    assert tokenizer.vocab_size == 280
    assert tokenizer.special_tokens == {"<|endoftext|>": tokenizer.eod_id}


@pytest.mark.parametrize("text", ["the end", " leading", "tabs\tand\n\nlines", "żółć 漢字 🙂 \x00", "a" * 300])
def test_any_text_comes_back(tokenizer, text):
    (ids,) = tokenizer.encode_batch([text])
    assert ids.dtype == np.int64
    assert tokenizer.decode(ids) == text


def test_a_document_cannot_forge_its_end(tokenizer):
    text = "before <|endoftext|> after"
    (ids,) = tokenizer.encode_batch([text])
    assert tokenizer.eod_id not in ids
    assert tokenizer.decode(ids) == text
    assert tokenizer.decode([tokenizer.eod_id]) == "<|endoftext|>"


def test_training_twice_gives_the_same_bytes(folder, tmp_path):
    train_tokenizer(iter(TEXTS), vocab_size=280, output=str(tmp_path / "new" / "again"))
    assert (tmp_path / "new" / "again" / "tokenizer.json").read_bytes() == (folder / "tokenizer.json").read_bytes()


def test_the_hash_knows_the_content_not_the_place_or_the_layout(tokenizer, folder, tmp_path):
    content = json.loads((folder / "tokenizer.json").read_text())
    content = dict(reversed(content.items()))
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    assert Tokenizer.load(str(tmp_path)).content_hash == tokenizer.content_hash
    content["model"]["merges"] = content["model"]["merges"][:-1]
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    assert Tokenizer.load(str(tmp_path)).content_hash != tokenizer.content_hash


def test_truncation_and_padding_of_the_file_are_not_obeyed(tokenizer, folder, tmp_path):
    content = json.loads((folder / "tokenizer.json").read_text())
    content["truncation"] = {"direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0}
    content["padding"] = {
        "strategy": {"Fixed": 50},
        "direction": "Right",
        "pad_to_multiple_of": None,
        "pad_id": 0,
        "pad_type_id": 0,
        "pad_token": "<|endoftext|>",
    }
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    limited = Tokenizer.load(str(tmp_path))
    assert limited.encode_batch(["the end of it"])[0].tolist() == tokenizer.encode_batch(["the end of it"])[0].tolist()
    assert limited.content_hash == tokenizer.content_hash


def test_transformers_reads_what_was_saved(tokenizer, tmp_path):
    transformers = pytest.importorskip("transformers")
    tokenizer.save_hf_files(str(tmp_path / "export"), model_max_length=128)
    theirs = transformers.AutoTokenizer.from_pretrained(str(tmp_path / "export"))
    assert theirs("the end of it")["input_ids"] == tokenizer.encode_batch(["the end of it"])[0].tolist()
    assert theirs.eos_token_id == theirs.bos_token_id == tokenizer.eod_id
    assert theirs.model_max_length == 128
    assert len(theirs) == tokenizer.vocab_size
    assert theirs.decode(tokenizer.encode_batch(["x ,y ."])[0]) == "x ,y ."


def test_a_tokenizer_without_an_end_lists_what_it_has(folder, tmp_path):
    text = (folder / "tokenizer.json").read_text().replace("<|endoftext|>", "<|other|>")
    (tmp_path / "tokenizer.json").write_text(text)
    other = Tokenizer.load(str(tmp_path))
    with pytest.raises(DataError, match=r"its special tokens are <\|other\|>.*append_eod: false"):
        other.eod_id  # noqa: B018
    (tmp_path / "tokenizer.json").write_text(text.replace("<|other|>", "</s>"))
    assert Tokenizer.load(str(tmp_path)).eod_id == 0


def test_missing_and_broken_files_are_named(tmp_path):
    with pytest.raises(DataError, match=r"tokenizer\.json: cannot be read: No such file"):
        Tokenizer.load(str(tmp_path))
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(DataError, match=r"tokenizer\.json: is not a tokenizer that"):
        Tokenizer.load(str(tmp_path))


def test_impossible_vocabularies_say_what_is_possible(tmp_path):
    with pytest.raises(DataError, match=r"only (\d+) entries where vocab_size is 5000.*set vocab_size to \1 or less"):
        train_tokenizer(["the end"], vocab_size=5000, output=str(tmp_path / "a"))
    with pytest.raises(RecipeError, match=r"vocab_size is 100.*257"):
        train_tokenizer(["the end"], vocab_size=100, output=str(tmp_path / "a"))
    assert not (tmp_path / "a").exists()
    (tmp_path / "file").touch()
    with pytest.raises(StorageError):
        train_tokenizer(["the end"], vocab_size=257, output=str(tmp_path / "file" / "a"))


def test_moving_the_folder_changes_nothing(tokenizer, folder, tmp_path):
    shutil.copytree(folder, tmp_path / "moved")
    assert Tokenizer.load(str(tmp_path / "moved")).content_hash == tokenizer.content_hash
