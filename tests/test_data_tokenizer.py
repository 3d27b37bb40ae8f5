"""The tokenizer folder: ids, the end of a document, what is never an id, and what transformers reads."""

import base64
import json

import numpy as np
import pytest
import tokenizers

from bloomery.base.errors import DataError, StorageError
from bloomery.data import tokenizer as module
from bloomery.data.tokenizer import Tokenizer, is_other_tokenizer
from bloomery.data.tokenizer_files import _byte_letters
from bloomery.interop.hf.export import write_tokenizer
from bloomery.prepare.encoders import NASTY
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


def ids_of(tokenizer, text):
    (ids,) = tokenizer.encode_batch([text])
    return ids.tolist()


@pytest.mark.parametrize("text", ["tabs\tand\n\nlines", "żółć 漢字 🙂 \x00"])
def test_any_text_comes_back(tokenizer, text):
    (ids,) = tokenizer.encode_batch([text])
    assert ids.dtype == np.int64
    assert tokenizer.decode(ids) == text


def test_a_large_tokenizer_is_read_only_where_a_text_is(folder, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(module, "_LARGE_BYTES", 1)
    first = Tokenizer.load(str(folder))
    monkeypatch.setattr(module, "as_tokenizer_json", None)
    again = Tokenizer.load(str(folder))
    facts = [(each.vocab_size, each.content_hash, each.eod_id) for each in (first, again)]
    assert facts[0] == facts[1]
    monkeypatch.undo()
    assert again.encode_batch(["the end"])[0].tolist() == first.encode_batch(["the end"])[0].tolist()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(module, "_LARGE_BYTES", 1)
    (memory,) = (tmp_path / "bloomery").iterdir()
    memory.write_text('{"vocab_size": "many"}')
    assert Tokenizer.load(str(folder)).content_hash == first.content_hash
    assert "many" not in memory.read_text()


def test_a_document_cannot_forge_its_end(tokenizer):
    text = "before <|endoftext|> after"
    (ids,) = tokenizer.encode_batch([text])
    assert tokenizer.eod_id not in ids
    assert tokenizer.decode(ids) == text
    assert tokenizer.decode([tokenizer.eod_id]) == "<|endoftext|>"


def test_the_hash_knows_the_content_not_the_place_or_the_layout(tokenizer, folder, tmp_path):
    content = json.loads((folder / "tokenizer.json").read_text())
    content = dict(reversed(content.items()))
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    assert Tokenizer.load(str(tmp_path)).content_hash == tokenizer.content_hash
    content["model"]["merges"] = content["model"]["merges"][:-1]
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    assert Tokenizer.load(str(tmp_path)).content_hash != tokenizer.content_hash


def spelling(model=None, **parts):
    """A tokenizer.json with nothing in it that can be left out."""
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    added = [{"id": number, "content": token, **flags, "special": True} for number, token in ((1, "b"), (0, "a"))]
    model = model or {"type": "BPE", "vocab": {"a": 0, "b": 1, "ab": 2}, "merges": ["a b"]}
    return {"added_tokens": added, "model": model, **parts}


BYTES = {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True}
METASPACE = {"type": "Metaspace", "replacement": "\u2581"}
SPELLINGS = {
    "merges as strings": spelling(),
    "merges of quotes and commas": spelling(
        {"type": "BPE",
         "vocab": {"a": 0, "b": 1, '"': 2, ",": 3, "\\": 4, '",': 5, '",\\': 6, '\\"': 7, '\\",\\': 8, '\\",': 9},
         "merges": ['" ,', '", \\', '\\ "', '\\ ",\\', '\\ ",']}
    ),
    "dropout as a whole number": spelling({**spelling()["model"], "dropout": 0}),
    "unigram of many digits": spelling(
        {"type": "Unigram", "vocab": [["a", 0], ["b", -3.8214433963530685], *([str(n), -n / 7e3] for n in range(999))]}
    ),
    "byte level inside": spelling(
        pre_tokenizer={"type": "Sequence", "pretokenizers": [{"type": "Punctuation"}, BYTES, {"type": "FixedLength"}]}
    ),
    "byte level normalizer": spelling(normalizer={"type": "Sequence", "normalizers": [{"type": "ByteLevel"}]}),
    "old metaspace": spelling(pre_tokenizer={**METASPACE, "str_rep": "\u2581", "add_prefix_space": True}),
    "new metaspace": spelling(pre_tokenizer={**METASPACE, "prepend_scheme": "first"}, decoder=METASPACE),
    "bert": spelling(
        {"type": "WordPiece", "vocab": {"a": 0, "b": 1, "[UNK]": 2}, "unk_token": "[UNK]",
         "continuing_subword_prefix": "##", "max_input_chars_per_word": 100},
        normalizer={"type": "BertNormalizer", "clean_text": True, "handle_chinese_chars": True, "lowercase": True},
        pre_tokenizer={"type": "BertPreTokenizer"},
    ),
}  # fmt: skip

HASHED_BEFORE = {
    "merges as strings": "d51dd82e5f1f",
    "unigram of many digits": "9b5a80464f23",
    "byte level inside": "51400c3c4c9b",
    "old metaspace": "3a810b9e892d",
    "bert": "1c674fb890f5",
}
"""By versions with rules of their own instead of the library's: their shards stay those of the tokenizer."""


@pytest.mark.parametrize("name", SPELLINGS)
def test_the_hash_does_not_change_when_the_library_saves_the_file_again(name):
    content = json.dumps(SPELLINGS[name])
    saved = tokenizers.Tokenizer.from_str(content).to_str()
    assert json.loads(saved) != json.loads(content)
    assert Tokenizer(content, path="x").content_hash == Tokenizer(saved, path="x").content_hash
    if name in HASHED_BEFORE:
        assert Tokenizer(content, path="x").content_hash.startswith(HASHED_BEFORE[name])


def test_whether_an_added_token_is_normalized_counts_only_where_something_is():
    def hashed(flag, **parts):
        content = spelling(**parts)
        content["added_tokens"] = [{**token, "normalized": flag} for token in content["added_tokens"]]
        return Tokenizer(json.dumps(content), path="x").content_hash

    assert hashed(True) == hashed(False)
    assert hashed(True, normalizer={"type": "Lowercase"}) != hashed(False, normalizer={"type": "Lowercase"})
    mixed = spelling()
    mixed["added_tokens"][0]["normalized"] = True
    assert Tokenizer(json.dumps(mixed), path="x").content_hash != hashed(False)


def test_hashes_of_an_earlier_version_tell_nothing():
    new, other = Tokenizer(json.dumps(spelling()), path="x").content_hash, "0" * 64 + "-ids"
    assert is_other_tokenizer(new, other)
    assert not is_other_tokenizer(new, new)
    assert not is_other_tokenizer(new.removesuffix("-ids"), other)


@pytest.mark.parametrize(
    "change",
    [
        {"post_processor": None},
        {"decoder": None},
        {"model": {"continuing_subword_prefix": "", "end_of_word_suffix": ""}},
        {"model": {"dropout": 0.0}},
    ],
)
def test_the_hash_does_not_know_what_decides_no_id(tokenizer, change):
    content = {**tokenizer.parsed, **change, "model": {**tokenizer.parsed["model"], **change.get("model", {})}}
    changed = Tokenizer(json.dumps(content), path="x")
    assert json.loads(changed.content) != tokenizer.parsed
    assert changed.content_hash == tokenizer.content_hash
    assert ids_of(changed, "the end of it") == ids_of(tokenizer, "the end of it")


def test_truncation_and_padding_of_the_file_are_not_obeyed(tokenizer, folder, tmp_path):
    content = json.loads((folder / "tokenizer.json").read_text())
    content["truncation"] = {"direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0}
    content["padding"] = {"strategy": {"Fixed": 50}, "direction": "Right", "pad_to_multiple_of": None, "pad_id": 0}
    content["padding"] |= {"pad_type_id": 0, "pad_token": "<|endoftext|>"}
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    limited = Tokenizer.load(str(tmp_path))
    assert ids_of(limited, "the end of it") == ids_of(tokenizer, "the end of it")
    assert limited.content_hash == tokenizer.content_hash


def test_transformers_reads_what_was_saved(tokenizer, tmp_path):
    transformers = pytest.importorskip("transformers")
    write_tokenizer(tokenizer, tmp_path / "export", model_max_length=128)
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


END = "<\uff5cend\u2581of\u2581sentence\uff5c>"


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("tokenizer_config.json", {"eos_token": END}),
        ("tokenizer_config.json", {"eos_token": {"content": END, "lstrip": False}}),
        ("special_tokens_map.json", {"eos_token": END}),
    ],
)
def test_an_end_of_another_name_is_the_eos_token_of_its_folder(folder, tmp_path, name, told):
    text = (folder / "tokenizer.json").read_text()
    (tmp_path / "tokenizer.json").write_text(text.replace("<|endoftext|>", END))
    bare = Tokenizer.load(str(tmp_path))
    assert bare.end_of_document is None
    with pytest.raises(DataError, match=r"or else the eos_token of tokenizer_config.json .* Name one of its special"):
        bare.eod_id  # noqa: B018
    (tmp_path / name).write_text(json.dumps(told))
    named = Tokenizer.load(str(tmp_path))
    assert (named.eod_token, named.eod_id, named.content_hash) == (END, 0, bare.content_hash)
    ids = write_tokenizer(named, tmp_path / "export", model_max_length=8)
    assert ids["eos_token_id"] == 0
    exported = Tokenizer.load(str(tmp_path / "export"))
    assert (exported.eod_token, exported.content_hash) == (END, bare.content_hash)
    for other in ("the", None, 7, {"content": "nobody"}):  # a token that is not special, and none at all
        (tmp_path / name).write_text(json.dumps({"eos_token": other}))
        assert Tokenizer.load(str(tmp_path)).end_of_document is None


def test_a_name_that_is_known_comes_before_the_eos_token_of_the_folder(folder, tmp_path):
    """It may be the end of a turn."""
    hugging = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    hugging.add_special_tokens(["<|im_end|>"])
    hugging.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "<|im_end|>"}')
    assert Tokenizer.load(str(tmp_path)).eod_token == "<|endoftext|>"


def test_missing_and_broken_files_are_named(tmp_path):
    with pytest.raises(DataError, match=r"tokenizer\.json: cannot be read: No such file"):
        Tokenizer.load(str(tmp_path))
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(DataError, match=r"tokenizer\.json: is not a tokenizer that"):
        Tokenizer.load(str(tmp_path))


def deep(levels: int) -> dict:
    part: dict = {}
    for _ in range(levels):
        part = {"a": part}
    return part


WORDS = {"type": "BPE", "vocab": {"a": 0, "b": 1, "ab": 2}, "merges": []}


def backtracking(tokenizer: Tokenizer) -> str:
    """A tokenizer whose pattern needs exponential time for words of one letter."""
    pattern = {"type": "Split", "pattern": {"Regex": r"(a|aa)+$"}, "behavior": "Isolated", "invert": False}
    return json.dumps(json.loads(tokenizer.content) | {"pre_tokenizer": pattern})


def test_a_pattern_that_needs_exponential_time_ends_with_a_sentence(tokenizer, monkeypatch):
    hostile = Tokenizer(backtracking(tokenizer), path="theirs/tokenizer.json")
    assert len(hostile.encode_batch(["a short text"])) == 1
    with pytest.raises(DataError, match=r"theirs/tokenizer.json: fails at a text: Onig: .*retry-limit-in-match over"):
        hostile.encode_batch(["a" * 60 + "!"])
    monkeypatch.setattr("bloomery.data.tokenizer.LEAST_SECONDS", 0.5)
    with pytest.raises(DataError, match=r"theirs/tokenizer.json: has not done 5,200 characters in 1 s. A pattern"):
        hostile.encode_batch([("a" * 24 + "! ") * 200])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model": WORDS | {"vocab": {"a": True}}}, "expected u32"),
        ({"model": WORDS | {"vocab": {"a": 4_000_000_000}}}, "from 0 to 16,777,215"),
        ({"model": WORDS | {"vocab": {"a": 1, "b": 1}}}, "each token has an id of its own"),
        ({"model": WORDS | {"vocab": 5}}, "expected a map"),
        ({"model": WORDS | {"merges": ["a b"], "continuing_subword_prefix": "##"}}, "slice index"),
        ({"model": None}, "did not match any variant"),
        ({"normalizer": {"type": "Precompiled", "precompiled_charsmap": None}}, "can read"),
        ({"normalizer": deep(100)}, "can read"),
        ({"normalizer": deep(400)}, "recursion limit"),
        ({"added_tokens": [{"content": 3, "special": True, "id": 1}]}, "expected a string"),
    ],
)
def test_nonsense_in_a_tokenizer_is_named(tokenizer, tmp_path, change, message):
    (tmp_path / "tokenizer.json").write_text(json.dumps(json.loads(tokenizer.content) | change))
    with pytest.raises(DataError, match=rf"tokenizer.json: is not a tokenizer that .*{message}"):
        Tokenizer.load(str(tmp_path))


def test_impossible_vocabularies_say_what_is_possible(tmp_path, command):
    with pytest.raises(DataError, match=r"only (\d+) entries where vocab_size is 5000.*set vocab_size to \1 or less"):
        train_tokenizer(["the end"], vocab_size=5000, output=str(tmp_path / "a"))
    code, _, err = command("tokenizer", "train", "x", "--vocab-size", "256", "--output", str(tmp_path / "a"))
    assert (code, "'256' is not an integer from 257 to" in err) == (2, True)
    assert not (tmp_path / "a").exists()
    (tmp_path / "file").touch()
    with pytest.raises(StorageError):
        train_tokenizer(["the end"], vocab_size=257, output=str(tmp_path / "file" / "a"))


@pytest.fixture
def gpt2_folder(folder, tmp_path):
    """The same tokenizer as GPT-2's two files."""
    model = json.loads((folder / "tokenizer.json").read_text())["model"]
    (tmp_path / "vocab.json").write_text(json.dumps(model["vocab"]))
    merges = "\n".join(pair if isinstance(pair, str) else " ".join(pair) for pair in model["merges"])
    (tmp_path / "merges.txt").write_text(f"#version: 0.2\n{merges}\n")
    return tmp_path


def test_gpt2_vocabulary_and_merges(gpt2_folder, tokenizer):
    loaded = Tokenizer.load(str(gpt2_folder))
    texts = [*TEXTS, "żółć 漢字 🙂 \x00", "a <|endoftext|> b", " # x"]
    for right, found in zip(tokenizer.encode_batch(texts), loaded.encode_batch(texts), strict=True):
        assert right.tolist() == found.tolist()
    assert (loaded.vocab_size, loaded.eod_id) == (tokenizer.vocab_size, tokenizer.eod_id)
    assert loaded.decode(loaded.encode_batch(["the end"])[0]) == "the end"
    assert Tokenizer.load(str(gpt2_folder)).content_hash == loaded.content_hash


def test_gpt2_files_have_the_hash_of_what_transformers_and_tokenizers_make_of_them(gpt2_folder, tmp_path):
    transformers = pytest.importorskip("transformers")
    ours = Tokenizer.load(str(gpt2_folder))
    transformers.GPT2TokenizerFast.from_pretrained(str(gpt2_folder)).save_pretrained(tmp_path / "fast")
    files = [str(gpt2_folder / name) for name in ("vocab.json", "merges.txt")]
    by_hand = tokenizers.ByteLevelBPETokenizer(*files)
    by_hand.add_special_tokens(["<|endoftext|>"])
    (tmp_path / "hand").mkdir()
    by_hand.save(str(tmp_path / "hand" / "tokenizer.json"))
    for folder in ("fast", "hand"):
        assert Tokenizer.load(str(tmp_path / folder)).content_hash == ours.content_hash


@pytest.mark.parametrize(
    ("merges", "vocab", "message"),
    [
        ("a b c\n", None, "merges.txt: does not fit the vocab.json beside it: .* A line is a pair of tokens"),
        ("nobody knows\n", None, "merges.txt: does not fit the vocab.json beside it: .*nobody.*out of vocabulary"),
        ("a b\n", '{"a": 0, "b": 1}', "merges.txt: does not fit the vocab.json beside it"),  # the library panics
        ("", '{"a": 0, "b": 0}', "merges.txt: does not fit .*each token has an id of its own"),
        (None, '{"a": 1.5}', "merges.txt: does not fit the vocab.json beside it"),
        (None, "[]", "vocab.json: holds no JSON object"),
        (None, "{", "vocab.json: holds no JSON object"),
    ],
)
def test_broken_gpt2_files_are_named(gpt2_folder, merges, vocab, message):
    for name, content in (("merges.txt", merges), ("vocab.json", vocab)):
        if content is not None:
            (gpt2_folder / name).write_text(content)
    with pytest.raises(DataError, match=message):
        Tokenizer.load(str(gpt2_folder))


@pytest.fixture
def bert_folder(tmp_path):
    pieces = "[PAD] [UNK] [CLS] [SEP] [MASK] un ##aff ##able cafe café Hello hello , 漢"
    (tmp_path / "vocab.txt").write_text(pieces.replace(" ", "\n") + "\n")
    return tmp_path


def test_bert_wordpiece_lower_case_and_cased(bert_folder):
    loaded = Tokenizer.load(str(bert_folder))
    assert loaded.vocab_size == 14
    assert [loaded.special_tokens[f"[{name}]"] for name in ("PAD", "CLS", "SEP", "MASK")] == [0, 2, 3, 4]
    assert loaded.eod_id == 3
    assert loaded.encode_batch(["Hello, UNAFFABLE café 漢x", ""])[0].tolist() == [11, 12, 5, 6, 7, 8, 13, 1]
    assert 4 not in loaded.encode_batch(["[MASK]"])[0]
    (bert_folder / "tokenizer_config.json").write_text('{"do_lower_case": false}')
    cased = Tokenizer.load(str(bert_folder))
    assert cased.encode_batch(["Hello, hello café"])[0].tolist() == [10, 12, 11, 9]
    assert cased.content_hash != loaded.content_hash


def test_bert_files_equal_transformers(bert_folder, tmp_path):
    transformers = pytest.importorskip("transformers")
    theirs = transformers.BertTokenizerFast(str(bert_folder / "vocab.txt"))
    ours = Tokenizer.load(str(bert_folder))
    for text in ("Hello, unaffable CAFÉ", "un\u0301 漢 hello\tx", "a" * 200):
        assert theirs(text, add_special_tokens=False)["input_ids"] == ours.encode_batch([text])[0].tolist()
    write_tokenizer(ours, tmp_path / "export", model_max_length=8)
    again = transformers.AutoTokenizer.from_pretrained(str(tmp_path / "export"))
    assert (again.mask_token_id, again.cls_token_id, again.pad_token_id) == (4, 2, 0)


def test_a_bert_vocabulary_without_its_special_tokens_is_named(bert_folder):
    (bert_folder / "vocab.txt").write_text("a\nb\n")
    with pytest.raises(DataError, match=r"vocab.txt: lacks \[PAD\], \[UNK\]"):
        Tokenizer.load(str(bert_folder))


def test_training_does_not_replace_another_tokenizer(tmp_path, monkeypatch, command):
    """Shards that were made with it would no longer fit."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.txt").write_text(TEXTS[0] * 9)
    (tmp_path / "b.txt").write_text(TEXTS[1] * 9)
    words = ("--vocab-size", "262", "--output", "tok")
    code, out, _ = command("tokenizer", "train", "a.txt", *words)
    assert code == 0
    file = tmp_path / "tok" / "tokenizer.json"
    before = file.stat().st_mtime_ns
    assert command("tokenizer", "train", "a.txt", *words)[:2] == (0, out), "the same again"
    code, _, err = command("tokenizer", "train", "b.txt", *words)
    assert code == 3
    assert "bloomery: tok: holds another tokenizer already (hash " in err
    assert "would no longer fit. Choose another --output, or move that one away." in err
    assert file.stat().st_mtime_ns == before
    file.write_text("{")
    assert "tok/tokenizer.json: is not a tokenizer that" in command("tokenizer", "train", "a.txt", *words)[2]
    file.rename(tmp_path / "tok" / "vocab.txt")
    assert command("tokenizer", "train", "a.txt", *words)[0] == 3, "it would hide BERT's"


@pytest.mark.parametrize("prefix", ["gpt2-", "my-"])
def test_files_may_have_the_names_that_megatron_gives_them(gpt2_folder, tokenizer, prefix):
    for name in ("vocab.json", "merges.txt"):
        (gpt2_folder / name).rename(gpt2_folder / f"{prefix}{name}")
    for path in (gpt2_folder, gpt2_folder / f"{prefix}vocab.json", gpt2_folder / f"{prefix}merges.txt"):
        assert ids_of(Tokenizer.load(str(path)), "the end") == ids_of(tokenizer, "the end")
    (gpt2_folder / "others-merges.txt").write_text("")
    with pytest.raises(DataError, match=rf"several tokenizers: {prefix}merges.txt, others-.* Name the file"):
        Tokenizer.load(str(gpt2_folder))


def test_a_cased_vocabulary_of_bert_is_known_by_its_name(bert_folder, tmp_path):
    for name, lower in (("bert-large-uncased-vocab.txt", True), ("bert-large-cased-vocab.txt", False)):
        (tmp_path / name).write_bytes((bert_folder / "vocab.txt").read_bytes())
        assert Tokenizer.load(str(tmp_path / name)).parsed["normalizer"]["lowercase"] is lower


@pytest.mark.parametrize("name", ["r50k_base", "p50k_base", "cl100k_base", "o200k_base"])
def test_a_tiktoken_file_gives_the_ids_of_tiktoken(folder, tmp_path, monkeypatch, name):
    import tiktoken
    from tiktoken_ext import openai_public

    model = json.loads((folder / "tokenizer.json").read_text())["model"]
    letters = {letter: byte for byte, letter in enumerate(_byte_letters())}
    tokens = sorted(model["vocab"].keys() - {"<|endoftext|>"}, key=model["vocab"].__getitem__)
    ranks = {bytes(letters[letter] for letter in token): rank for rank, token in enumerate(tokens)}
    path = tmp_path / f"{name}.tiktoken"
    path.write_text("".join(f"{base64.b64encode(token).decode()} {rank}\n" for token, rank in ranks.items()))
    for load in ("load_tiktoken_bpe", "data_gym_to_mergeable_bpe_ranks"):
        monkeypatch.setattr(openai_public, load, lambda *_, **__: ranks)
    right = tiktoken.Encoding(**{**getattr(openai_public, name)(), "explicit_n_vocab": None})
    loaded, texts = Tokenizer.load(str(tmp_path)), [*NASTY, *TEXTS, "It'S we'LL x\u017f'\u017f 1234567 \r\n\n  y"]
    assert loaded.eod_id == right.eot_token
    for text, found in zip(texts, loaded.encode_batch(texts), strict=True):
        assert (found.tolist(), loaded.decode(found)) == (right.encode_ordinary(text), text)
    path.write_text("IQ== 0\n")
    with pytest.raises(DataError, match="needs all 256 bytes"):
        Tokenizer.load(str(path))
    (other := tmp_path / "mine.tiktoken").write_text("")
    with pytest.raises(DataError, match=r"mine.tiktoken is of no known kind.*known are r50k"):
        Tokenizer.load(str(other))


def test_tokenizers_of_bytes_and_of_characters(tmp_path, command):
    (tmp_path / "a.txt").write_text("To be,\nor not é")
    words = ("tokenizer", "train", str(tmp_path / "a.txt"), "--output")
    (tmp_path / "list.json").write_text('[{"text": "a"}]')
    lines = command(
        "tokenizer", "train", str(tmp_path / "list.json"), "--kind", "bytes", "--output", str(tmp_path / "j")
    )
    assert "1 .json file taken for one text each: lines of JSON need the ending .jsonl" in lines[2]
    assert command(*words, str(tmp_path / "b"), "--kind", "bytes")[0] == 0
    assert command(*words, str(tmp_path / "c"), "--kind", "characters")[0] == 0
    of_bytes, of_characters = (Tokenizer.load(str(tmp_path / name)) for name in "bc")
    assert (of_bytes.vocab_size, of_characters.vocab_size) == (257, 2 + len(set("To be,\nor not é")))
    for tokenizer, length in ((of_bytes, 11), (of_characters, 10)):
        ids = ids_of(tokenizer, "not\n e é To"[-10:])
        assert (len(ids), tokenizer.decode(ids)) == (length, "not\n e é To"[-10:])
    assert ids_of(of_characters, "<|endoftext|>x")[-1] == of_characters.id_of("<|unknown|>")
    assert of_characters.eod_id not in ids_of(of_characters, "<|endoftext|>")
    assert "--vocab-size is missing. Bpe needs it" in command(*words, str(tmp_path / "d"))[2]
    assert "--vocab-size is 300" in command(*words, str(tmp_path / "d"), "--kind", "bytes", "--vocab-size", "300")[2]
