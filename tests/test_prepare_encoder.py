"""Encoders: a fast one is used only where it equals Hugging Face's tokenizers, on a sample of the user's text."""

import gzip
import json
import os
import signal
import time
from pathlib import Path

import numpy as np
import pytest
import tokenizers
import zstandard

from bloomery.base.errors import DataError
from bloomery.data.tokenizer import Tokenizer
from bloomery.prepare import encoders
from bloomery.prepare.encoders import NASTY, Encoder, fastokens, reference
from prepare_samples import jsonl, make, make_texts, make_tokenizer, shard_bytes, small_units, write_jsonl


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory) -> Tokenizer:
    return make_tokenizer(tmp_path_factory.mktemp("t"))


@pytest.fixture
def corpus(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    small_units(monkeypatch)
    texts = make_texts(400)
    write_jsonl(tmp_path / "corpus" / "a.jsonl", texts)
    return texts


class Panic(BaseException):
    """As pyo3 raises for a panic of Rust."""


def fails_for(wanted, error):
    """An encoder that raises this where a text is among those to encode; where none is given, always."""

    def load(tokenizer, as_ids):
        def encode(texts):
            if wanted is None or wanted in texts:
                raise error
            return reference(tokenizer, as_ids).encode(texts)

        return Encoder("pytest", encode)

    return load


def wrong_for_one(tokenizer, as_ids):
    """Of the user's texts."""

    def encode(texts):
        ids, lengths = reference(tokenizer, as_ids).encode(texts)
        return ids + np.repeat([text.startswith("0 ") for text in texts], lengths), lengths

    return Encoder("pytest", encode)


def crashes(tokenizer, as_ids):
    return Encoder("pytest", lambda texts: os.kill(os.getpid(), signal.SIGKILL))


def hangs(tokenizer, as_ids):
    return Encoder("pytest", lambda texts: time.sleep(60))


def refuses(tokenizer, as_ids):
    raise ValueError(f"no such pre-tokenizer{' but_these' * 20}\nmore")


def absent(tokenizer, as_ids):
    raise ImportError("fastokens")


@pytest.mark.parametrize("as_ids", [False, True])
@pytest.mark.parametrize("load", [fastokens, reference])
def test_special_tokens_in_a_text_on_every_encoder(tokenizer, load, as_ids):
    pytest.importorskip("tokenizers" if load is reference else load.__name__)
    ids, lengths = load(tokenizer, as_ids).encode(["a<|endoftext|>b", "", "x"])
    assert (tokenizer.eod_id in ids) == as_ids
    assert lengths.tolist() == [3 if as_ids else int(lengths[0]), 0, 1]
    assert len(ids) == lengths.sum()
    assert load(tokenizer, as_ids).encode([])[1].tolist() == []


@pytest.mark.parametrize("as_ids", [False, True])
def test_fastokens_equals_the_reference_on_nasty_strings(tokenizer, as_ids):
    pytest.importorskip("fastokens")
    right, fast = (load(tokenizer, as_ids) for load in (reference, fastokens))
    assert encoders.first_difference(list(NASTY), right, fast) == ""


def test_no_library_starts_threads_before_the_workers_fork(tokenizer):
    """A fork copies one thread only: workers of a process in which fastokens had encoded waited for ever."""
    before = len(os.listdir("/proc/self/task"))
    pytest.importorskip("fastokens")
    fastokens(tokenizer, False)
    assert len(os.listdir("/proc/self/task")) <= before


def test_an_encoder_that_does_not_equal_the_reference_is_rejected_with_the_reason(corpus, tokenizer, monkeypatch):
    for bad, reason in [
        (absent, "it is not installed"),
        (refuses, "it cannot read this tokenizer: no such pre-tokenizer but_these"),
        (wrong_for_one, "gives other ids for '0 "),
        (fails_for(None, Panic("overflow")), "fails at a text: overflow"),
        (crashes, "a worker process was killed"),
        (hangs, "has not done"),
    ]:
        monkeypatch.setattr("bloomery.data.tokenizer.LEAST_SECONDS", 0.3 if bad is hangs else 60.0)
        monkeypatch.setattr(encoders, "fastokens", bad)
        result = make(tokenizer, output=bad.__name__, workers=2)
        assert shard_bytes(bad.__name__) == shard_bytes("absent")
        assert result.manifest.encoder.startswith("tokenizers ")
        assert result.notes[0] == f"encoder: {result.manifest.encoder}"
        assert result.notes[1].startswith(f"not fastokens: {reason}")
        assert not list(Path().glob("*.parts"))


def test_where_a_fast_encoder_fails_later_the_reference_encodes_these_texts(corpus, tokenizer, monkeypatch):
    monkeypatch.setattr("bloomery.prepare.run.SAMPLE_DOCUMENTS", 0)
    make(tokenizer, output="right")
    monkeypatch.setattr(encoders, "fastokens", fails_for(corpus[330], Panic("overflow")))
    result = make(tokenizer, workers=2)
    assert shard_bytes() == shard_bytes("right")
    assert result.notes == [f"encoder: {result.manifest.encoder}"], "it was used"
    assert result.manifest.encoder.startswith("pytest ")


def test_a_reference_that_fails_is_an_error(corpus, tokenizer, monkeypatch):
    monkeypatch.setattr(encoders, "fastokens", absent)
    monkeypatch.setattr(encoders, "reference", fails_for(corpus[330], RuntimeError("no such pair")))
    with pytest.raises(DataError, match=r"^pytest .*: fails at a text: no such pair"):
        make(tokenizer)


@pytest.mark.parametrize(("special", "as_ids"), [(True, "as_text"), (False, "as_ids"), (True, "as_ids")])
def test_added_tokens_are_tried_with_all_their_flags(corpus, tokenizer, monkeypatch, special, as_ids, tmp_path):
    """Whoever passes gives the right ids where the one token of its kind, one of the last of many, may hide."""
    hugging = tokenizers.Tokenizer.from_str(tokenizer.content)
    flags = {"walk": "single_word", "swim": "lstrip", "jump": "rstrip", "sing": "normalized"}
    odd = [tokenizers.AddedToken(word, **{"normalized": False, flag: True}) for word, flag in flags.items()]
    many = [tokenizers.AddedToken(f"tok{number}") for number in range(300)]
    (hugging.add_special_tokens if special else hugging.add_tokens)([*many, *odd])
    other = Tokenizer(hugging.to_str(), path="x")
    forms = ("cake{}", "{}s", "we {} it", "a  {} \n b", "a{0}b {0}{0}.", "tok7 tok299 stok299")
    write_jsonl(tmp_path / "corpus" / "z.jsonl", [form.format(word) for word in flags for form in forms])
    monkeypatch.setattr("bloomery.prepare.run.SAMPLE_DOCUMENTS", 1)
    monkeypatch.setattr(encoders, "NASTY", ())  # on which this version of a library may fail already
    make(other, output="fast", special_tokens=as_ids)
    monkeypatch.setattr(encoders, "fastokens", absent)
    make(other, output="right", special_tokens=as_ids)
    assert shard_bytes("fast") == shard_bytes("right")


def test_a_tokenizer_with_dropout_is_refused(corpus, tokenizer):
    content = json.loads(tokenizer.content)
    content["model"]["dropout"] = 0.5
    with pytest.raises(
        DataError, match=r't.json: has a model with dropout 0.5.*other ids each time. Set "dropout" to null'
    ):
        make(Tokenizer(json.dumps(content), path="t.json"))
    content["model"]["dropout"] = 0.0
    assert make(Tokenizer(json.dumps(content), path="t.json")).manifest.documents


def forging(kind: str) -> Tokenizer:
    """Tokenizers whose model has `</s>` among its own tokens and can reach it."""
    words = {"<unk>": 0, "</s>": 1, "the": 2, "fox": 3, "sees": 4}
    letters = {letter: 5 + number for number, letter in enumerate("</s>thefoxu nk")}
    if kind == "unigram":
        pieces = [("<unk>", 0.0), ("</s>", 0.0), ("▁", -2.0), *((letter, -5.0) for letter in "</s>thefox")]
        model = tokenizers.models.Unigram(pieces, unk_id=0)
    elif kind == "words":
        model = tokenizers.models.WordLevel(words, unk_token="<unk>")
    else:
        model = tokenizers.models.BPE(words | letters, [], ignore_merges=True, unk_token="<unk>")
    made = tokenizers.Tokenizer(model)
    split = tokenizers.pre_tokenizers.Metaspace() if kind == "unigram" else tokenizers.pre_tokenizers.WhitespaceSplit()
    made.pre_tokenizer = split
    made.add_special_tokens(["<unk>", "</s>"])
    return Tokenizer(made.to_str(), path="t.json")


@pytest.mark.parametrize("kind", ["unigram", "words", "merges ignored"])
def test_no_model_lets_a_text_forge_an_end_of_document(tmp_path, monkeypatch, kind):
    monkeypatch.chdir(tmp_path)
    tokenizer = forging(kind)
    write_jsonl(tmp_path / "corpus" / "a.jsonl", ["the fox sees", "what the <unk> sees", "the fox </s> sees"])
    with pytest.raises(
        DataError, match=r"a.jsonl:3: has a text that gives the special token 1; it begins 'the fox </s> sees'"
    ):
        make(tokenizer)
    manifest = make(tokenizer, bad_records="skip").manifest
    assert (manifest.documents, manifest.dropped["bad"], manifest.dropped["short"]) == (2, 1, 0)
    assert (np.fromfile("x.bin", np.uint16) == 1).sum() == 2, "the two ends"
    assert make(tokenizer, output="y", special_tokens="as_ids").manifest.documents == 3
    write_jsonl(tmp_path / "corpus" / "a.jsonl", ["the </s> fox"])
    with pytest.raises(DataError, match="forge an end"):
        make(tokenizer, append_eod=False)


@pytest.mark.parametrize(
    ("name", "place"),
    [
        ("a.jsonl", ":1901"),
        ("a.jsonl.gz", ":1901"),
        ("a.jsonl.zst", ":1901"),
        ("a.parquet", ":row 1900"),
        ("a.txt", ""),
    ],
)
def test_a_text_that_forges_an_end_is_named_by_its_line_or_row(tmp_path, monkeypatch, name, place):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("bloomery.prepare.read._SMALLEST_UNIT_BYTES", 6000)
    monkeypatch.setattr("bloomery.prepare.read.BLOCK_BYTES", 2000)
    texts = ["the fox sees"] * 1899 + ["the fox </s> sees"] + ["the fox sees"] * 50
    if name == "a.parquet":
        arrow = pytest.importorskip("pyarrow")
        pytest.importorskip("pyarrow.parquet").write_table(arrow.table({"text": texts}), name)
    elif name == "a.txt":
        (tmp_path / name).write_text("\n".join(texts))
    else:
        lines = b"\n" + jsonl(texts)
        pack = {".gz": gzip.compress, ".zst": zstandard.compress}.get(Path(name).suffix, bytes)
        (tmp_path / name).write_bytes(pack(lines))
    with pytest.raises(DataError, match=rf"^{name}{place}: has a text that gives the special token 1"):
        make(forging("words"), sources=[name], workers=2)


def test_an_end_that_only_an_odd_text_gives_is_found_too(tmp_path, monkeypatch):
    """Its own text, alone or between others, gives no end here: a word begins with a mark unless a line does."""
    monkeypatch.chdir(tmp_path)
    words = {"<unk>": 0, "\u2581a": 1, "b": 2, "</s>": 3, "a": 4}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="<unk>"))
    parts = tokenizers.pre_tokenizers
    made.pre_tokenizer = parts.Sequence([parts.Metaspace(prepend_scheme="always"), parts.Split("\n", "removed")])
    made.add_special_tokens(["<unk>", "</s>"])
    tokenizer = Tokenizer(made.to_str(), path="t.json")
    probes = [ids.tolist() for ids in tokenizer.encode_batch(["</s>", "a </s> b", "a</s>b"])]
    assert not any(3 in ids for ids in probes)
    assert tokenizer.encode_batch(["a\n</s>\nb"])[0].tolist() == [1, 3, 2]
    write_jsonl(tmp_path / "corpus" / "a.jsonl", ["a\n</s>\nb"])
    with pytest.raises(DataError, match=r"gives the special token 3.*forge an end"):
        make(tokenizer)
