"""Encoders: a fast one is taken only where it agrees with Hugging Face's tokenizers, and given up when it stops."""

import gzip
import json
import os
import signal
import time
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import tokenizers
import zstandard

from bloomery.base.errors import DataError
from bloomery.data.tokenizer import Tokenizer
from bloomery.prepare import encoder
from bloomery.prepare.encoder import NASTY, Fastokens, Gigatoken, HuggingFace, Judge, choose_encoder
from bloomery.prepare.pool import Pool
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


class Liar(HuggingFace):
    """Right for the texts of the first check, wrong for one that comes later."""

    wrong_for = ""

    def encode(self, texts):
        ids, lengths = super().encode(texts)
        if self.wrong_for in texts:
            ids = ids.copy()
            end = int(np.cumsum(lengths)[texts.index(self.wrong_for)])
            ids[end - 1] = 0
        return ids, lengths


class Panic(BaseException):
    """As pyo3 raises for a panic of Rust."""


class Fails(HuggingFace):
    """Right for the texts of the first check, an error for one that comes later."""

    fails_for, error = "", Panic()

    def encode(self, texts):
        if self.fails_for in texts:
            raise self.error
        return super().encode(texts)


class AlwaysWrong(HuggingFace):
    def encode(self, texts):
        ids, lengths = super().encode(texts)
        return ids + 1, lengths


class Crashes(HuggingFace):
    def encode(self, texts):
        os.kill(os.getpid(), signal.SIGKILL)


class Hangs(HuggingFace):
    def encode(self, texts):
        time.sleep(60)


class Refuses:
    def __init__(self, tokenizer, as_ids):
        raise ValueError(f"no such pre-tokenizer{' but_these' * 20}\nmore")


class Absent:
    def __init__(self, tokenizer, as_ids):
        raise ImportError("fastokens")


def choose(tokenizer, *, as_ids=False, workers=1):
    def crew(chosen):
        return Pool(
            lambda texts, _report: chosen.encoder.encode(texts), workers=workers, strangers=[judge.child.connection]
        )

    judge = Judge(tokenizer, as_ids=as_ids)
    try:
        chosen, pool = choose_encoder(tokenizer, judge, ["some text"], as_ids=as_ids, refused={}, crew=crew)
        pool.close()
        return chosen
    finally:
        judge.close()


@pytest.mark.parametrize("as_ids", [False, True])
@pytest.mark.parametrize("make_encoder", [Fastokens, Gigatoken, HuggingFace])
def test_special_tokens_in_a_text_on_every_encoder(tokenizer, make_encoder, as_ids):
    pytest.importorskip(make_encoder.__name__.lower() if make_encoder is not HuggingFace else "tokenizers")
    ids, lengths = make_encoder(tokenizer, as_ids).encode(["a<|endoftext|>b", "", "x"])
    assert (tokenizer.eod_id in ids) == as_ids
    assert lengths.tolist() == [3 if as_ids else int(lengths[0]), 0, 1]
    assert len(ids) == lengths.sum()
    assert make_encoder(tokenizer, as_ids).encode([])[1].tolist() == []


@pytest.mark.parametrize("as_ids", [False, True])
def test_fastokens_equals_the_reference_on_nasty_strings(tokenizer, as_ids):
    pytest.importorskip("fastokens")
    fast, slow = Fastokens(tokenizer, as_ids).encode(list(NASTY)), HuggingFace(tokenizer, as_ids).encode(list(NASTY))
    assert all(np.array_equal(*pair) for pair in zip(fast, slow, strict=True))
    assert choose(tokenizer, as_ids=as_ids).name.startswith("fastokens ")


def test_no_library_starts_threads_before_the_workers_fork(tokenizer):
    """A fork copies one thread only: workers of a process in which fastokens had encoded waited for ever."""
    before = len(os.listdir("/proc/self/task"))
    for name, make_encoder in encoder.FAST.items():
        pytest.importorskip(name)
        make_encoder(tokenizer, False)
    choose(tokenizer)
    assert len(os.listdir("/proc/self/task")) == before


@pytest.mark.parametrize("workers", [2, 12])
def test_an_encoder_is_tried_by_all_who_will_use_it_even_if_there_are_too_few_texts(tokenizer, monkeypatch, workers):
    monkeypatch.setattr(encoder, "NASTY", ())
    monkeypatch.setattr(encoder, "FAST", {"one": AlwaysWrong, "two": HuggingFace})
    chosen = choose(tokenizer, workers=workers)
    assert chosen.name.startswith("two ")
    assert chosen.refused["one"].startswith("it gives other ids for ")


def test_an_encoder_that_crashes_or_hangs_is_passed_over(tokenizer, monkeypatch):
    monkeypatch.setattr(encoder, "_PATIENCE_SECONDS", 0.5)
    monkeypatch.setattr(encoder, "FAST", {"one": Crashes, "two": Hangs})
    chosen = choose(tokenizer)
    assert chosen.name.startswith("tokenizers ")
    assert "a worker process ended unexpectedly (SIGKILL)" in chosen.refused["one"]
    assert chosen.refused["two"] == "it fails: it has not answered for 0.5 seconds"


def test_those_that_are_absent_refuse_or_differ_are_passed_over_with_the_reason(tokenizer, monkeypatch):
    monkeypatch.setattr(encoder, "FAST", {"one": Absent, "two": Refuses, "three": AlwaysWrong})
    chosen = choose(tokenizer)
    assert chosen.name.startswith("tokenizers ")
    assert chosen.refused["one"] == "it is not installed"
    assert chosen.refused["two"] == f"it cannot read this tokenizer: no such pre-tokenizer{' but_these' * 9} ..."
    assert chosen.refused["three"].startswith("it gives other ids for ")


@pytest.mark.parametrize("flag", ["single_word", "lstrip", "rstrip", "normalized"])
@pytest.mark.parametrize("special", [True, False])
@pytest.mark.parametrize("library", ["fastokens", "gigatoken"])
def test_added_tokens_are_tried_with_all_their_flags(tokenizer, monkeypatch, flag, special, library):
    """Whoever passes gives the right ids where the one token of its kind, the last of many, may hide."""
    hugging = tokenizers.Tokenizer.from_str(tokenizer.content)
    add = hugging.add_special_tokens if special else hugging.add_tokens
    odd = tokenizers.AddedToken("walk", **{"normalized": False, flag: True})
    add([*(tokenizers.AddedToken(f"tok{number}") for number in range(300)), odd])
    other = Tokenizer(hugging.to_str(), path="x")
    monkeypatch.setattr(encoder, "FAST", {library: encoder.FAST[library]})
    monkeypatch.setattr(encoder, "NASTY", ())  # on which this version of a library may fail already
    for as_ids in (False, True):
        chosen = choose(other, as_ids=as_ids)
        texts = ["cakewalk", "walks", "we walk it", "a  walk \n b", "awalkb walkwalk.", "tok7 tok299 stok299"]
        ids, lengths = chosen.encoder.encode(texts)
        expected = other.encode_batch(texts, special_tokens_as_ids=as_ids)
        found = np.split(ids, np.cumsum(lengths)[:-1])
        assert all(map(np.array_equal, found, expected)), chosen.name


def test_the_bytes_do_not_know_the_encoder(corpus, tokenizer, monkeypatch):
    manifest = make(tokenizer).manifest
    assert manifest.encoder.startswith("fastokens ")
    monkeypatch.setattr(encoder, "FAST", {})
    slow = make(tokenizer, output="slow")
    assert slow.manifest.encoder.startswith("tokenizers ")
    assert shard_bytes("slow") == shard_bytes()
    assert "encoder: tokenizers" in slow.notes[0]


def test_an_encoder_that_lies_later_is_given_up_and_its_work_done_again(corpus, tokenizer, monkeypatch, tmp_path):
    monkeypatch.setattr("bloomery.prepare.run.SAMPLE_DOCUMENTS", 5)
    monkeypatch.setattr("bloomery.prepare.tokenize.RECHECK_EVERY", 3)
    monkeypatch.setattr(encoder, "FAST", {})
    make(tokenizer, output="right")
    Liar.wrong_for = corpus[330]
    monkeypatch.setattr(encoder, "FAST", {"liar": Liar})
    monkeypatch.setattr("bloomery.prepare.tokenize.RECHECK_EVERY", 1)
    result = make(tokenizer, workers=2)
    assert shard_bytes() == shard_bytes("right")
    assert result.manifest.encoder.startswith("tokenizers ")
    assert result.notes[0].startswith("liar ? was given up in the middle of the work: it gives other ids for '330 ")
    assert not list(tmp_path.glob("x.parts*"))


@pytest.mark.parametrize(
    ("error", "why"),
    [
        (RuntimeError(f"no such {'pair ' * 40}\nmore"), f"no such {'pair ' * 21}..."),
        (KeyError(), "KeyError"),
        (Panic("overflow"), "overflow"),
    ],
)
def test_an_encoder_that_fails_later_is_given_up_and_its_work_done_again(corpus, tokenizer, monkeypatch, error, why):
    monkeypatch.setattr("bloomery.prepare.run.SAMPLE_DOCUMENTS", 5)
    monkeypatch.setattr(encoder, "FAST", {})
    make(tokenizer, output="right")
    monkeypatch.setattr(Fails, "fails_for", corpus[330])
    monkeypatch.setattr(Fails, "error", error)
    monkeypatch.setattr(encoder, "FAST", {"fast": Fails})
    result = make(tokenizer, workers=2)
    assert shard_bytes() == shard_bytes("right")
    assert result.manifest.encoder.startswith("tokenizers ")
    assert result.notes[0] == f"fast ? was given up in the middle of the work: it fails: {why}"
    assert "not fast: it gave wrong ids, or failed, earlier in this work" in result.notes


def test_a_reference_that_fails_is_an_error(corpus, tokenizer, monkeypatch):
    monkeypatch.setattr("bloomery.prepare.run.SAMPLE_DOCUMENTS", 5)
    monkeypatch.setattr(encoder, "FAST", {})
    monkeypatch.setattr(encoder, "HuggingFace", Fails)
    monkeypatch.setattr(Fails, "fails_for", corpus[330])
    monkeypatch.setattr(Fails, "error", RuntimeError("no such pair"))
    with pytest.raises(RuntimeError, match="no such pair"):
        make(tokenizer)


def test_a_tokenizer_with_dropout_is_refused(corpus, tokenizer):
    content = json.loads(tokenizer.content)
    content["model"]["dropout"] = 0.5
    with pytest.raises(
        DataError, match=r't.json: has a model with dropout 0.5.*other ids each time. Set "dropout" to null'
    ):
        make(Tokenizer(json.dumps(content), path="t.json"))
    content["model"]["dropout"] = 0.0
    assert make(Tokenizer(json.dumps(content), path="t.json")).manifest.documents


def test_a_reference_that_disagrees_with_itself_is_an_error_not_an_endless_loop(corpus, tokenizer, monkeypatch):
    monkeypatch.setattr(encoder, "FAST", {})
    monkeypatch.setattr(encoder, "HuggingFace", AlwaysWrong)
    with pytest.raises(DataError, match=r"disagrees with itself: it gives other ids for '0 .*Look for chance"):
        make(tokenizer)


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
    assert tokenizer.unknown_id == 0
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
@pytest.mark.parametrize("workers", [1, 2])
def test_a_text_that_forges_an_end_is_named_by_its_line_or_row(tmp_path, monkeypatch, name, place, workers):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("bloomery.prepare.units._SMALLEST_UNIT_BYTES", 6000)
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
        make(forging("words"), sources=[name], workers=workers)


def test_an_end_that_only_an_odd_text_gives_is_found_too(tmp_path, monkeypatch):
    """Its own text, alone or between others, gives no end here: a word begins with a mark unless a line does."""
    monkeypatch.chdir(tmp_path)
    words = {"<unk>": 0, "\u2581a": 1, "b": 2, "</s>": 3, "a": 4}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="<unk>"))
    parts = tokenizers.pre_tokenizers
    made.pre_tokenizer = parts.Sequence([parts.Metaspace(prepend_scheme="always"), parts.Split("\n", "removed")])
    made.add_special_tokens(["<unk>", "</s>"])
    tokenizer = Tokenizer(made.to_str(), path="t.json")
    probes = tokenizer.encode_lists(["</s>", "a </s> b", "a</s>b"])
    assert not any(3 in ids for ids in probes)
    assert tokenizer.encode_lists(["a\n</s>\nb"]) == [[1, 3, 2]]
    write_jsonl(tmp_path / "corpus" / "a.jsonl", ["a\n</s>\nb"])
    with pytest.raises(DataError, match=r"gives the special token 3.*forge an end"):
        make(tokenizer)


def test_no_text_is_refused_where_the_model_cannot_give_special_tokens(tokenizer):
    assert not choose(tokenizer).forgeable
    assert not choose(tokenizer, as_ids=True).forgeable
    assert choose(forging("words")).forgeable == {1}


BPE = {
    "vocab": {"a": 0, "s": 1, "as": 2, "</s>": 3, "<": 4, "/": 5, ">": 6, "</": 7, "s>": 8},
    "merges": [("a", "s"), ("<", "/"), ("s", ">")],
}


@pytest.mark.parametrize(
    ("change", "forgeable"),
    [
        ({}, False),
        ({"merges": [*BPE["merges"], ("</", "s>")]}, True),
        ({"ignore_merges": True}, True),
        ({"unk_token": "</s>"}, True),
        ({"unk_token": "a"}, False),
        ({"byte_fallback": True}, None),
        ({"continuing_subword_prefix": "##", "merges": []}, None),
        ({"end_of_word_suffix": ">", "merges": []}, None),
    ],
)
@pytest.mark.parametrize("as_strings", [False, True])
def test_bpe_gives_a_special_token_only_by_merges_or_options(change, forgeable, as_strings):
    """What makes the check superfluous for GPT-2's kind is true of the library, for every text of up to five letters,
    with a pre-tokenizer and without one. None: it was not looked into, so the check stays."""
    made = tokenizers.Tokenizer(tokenizers.models.BPE(**{**BPE, **change}))
    made.add_special_tokens(["</s>"])
    content = json.loads(made.to_str())
    if as_strings:
        content["model"]["merges"] = list(map(" ".join, content["model"]["merges"]))
    texts = ["".join(letters) for size in range(1, 6) for letters in product("as</> x", repeat=size)]
    for pre_tokenizer in (None, {"type": "WhitespaceSplit"}):
        other = Tokenizer(json.dumps({**content, "pre_tokenizer": pre_tokenizer}), path="t.json")
        assert encoder._forgeable(other) == (frozenset() if forgeable is False else {3})
        if forgeable is not None:
            assert any(3 in ids for ids in other.encode_lists(texts)) == forgeable
