"""Raw text to shards: what ends up in them, in which order, what the manifest says, and when a shard is reused."""

import gzip
import json
import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from bloomery.base.errors import DataError, StorageError
from bloomery.config.recipe import PrepareSection
from bloomery.data.manifest import check_fits, manifest_of, manifest_path, read_manifest
from bloomery.data.shards import ShardReader, ShardWriter
from bloomery.data.tokenizer import Tokenizer
from prepare_samples import (
    make,
    make_texts,
    make_tokenizer,
    prepare,
    read_texts,
    shard_bytes,
    small_units,
    verified,
    write_jsonl,
)

EOD = "<|endoftext|>"


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory) -> Tokenizer:
    return make_tokenizer(tmp_path_factory.mktemp("t"))


@pytest.fixture
def corpus(tmp_path, monkeypatch):
    """Eight documents in four files, one of them empty."""
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "corpus"
    (folder / "deep" / ".git").mkdir(parents=True)
    (folder / "deep" / ".git" / "config").write_text("hidden")
    (folder / "b.txt").write_text("bee")
    (folder / "a.md").write_text("# Aye\r\n")
    (folder / "empty.py").write_text("")
    (folder / "deep" / "z.txt").write_text("zed <|endoftext|> żółć")
    lines = [json.dumps({"text": f"line {i}", "url": "x"}) for i in range(5)]
    (folder / "lines.jsonl").write_text("\n".join(lines) + "\n\n")
    return folder


@pytest.fixture
def many(tmp_path, monkeypatch):
    """1,000 documents in three files, cut into many units."""
    monkeypatch.chdir(tmp_path)
    small_units(monkeypatch)
    texts = make_texts(1000)
    for number, part in enumerate((texts[:600], texts[600:610], texts[610:])):
        write_jsonl(tmp_path / "corpus" / f"{number}.jsonl", part)
    return texts


@pytest.fixture
def some(tmp_path, monkeypatch):
    """100 documents in three files."""
    monkeypatch.chdir(tmp_path)
    texts = make_texts(100)
    for number, part in enumerate((texts[:60], texts[60:61], texts[61:])):
        write_jsonl(tmp_path / "corpus" / f"{number}.jsonl", part)
    return texts


def test_every_document_is_there_with_its_end_and_the_manifest_says_so(corpus, tokenizer):
    seen = []
    section = PrepareSection(output="out/shards/x", sources=["bee.txt", "corpus"], shuffle=False)
    Path("bee.txt").write_text("bee")
    result = prepare(section, tokenizer=tokenizer, seed=1, progress=seen.append)
    expected = ["bee", "# Aye\r\n", "bee", "zed <|endoftext|> żółć", *(f"line {i}" for i in range(5))]
    assert read_texts(tokenizer, "out/shards/x") == [text + EOD for text in expected]
    assert sorted(os.listdir("out/shards")) == [".x.lock", "x.bin", "x.idx", "x.manifest.json"]
    assert not result.reused

    manifest = read_manifest("out/shards/x")
    assert manifest == result.manifest
    assert (manifest.dtype, manifest.vocab_size, manifest.eod_id) == ("uint16", 300, tokenizer.eod_id)
    assert [(source.name, source.documents, source.bytes) for source in manifest.sources] == [
        ("bee.txt", 1, 3),
        ("corpus", 8, sum(len(text.encode()) for text in expected[1:])),
    ]
    assert manifest.dropped == {"empty": 1, "short": 0, "long": 0, "duplicate": 0, "bad": 0}
    names = ["a.md", "b.txt", "deep/z.txt", "empty.py", "lines.jsonl"]
    assert [file.name for file in manifest.source_files] == ["bee.txt", *(f"corpus/{name}" for name in names)]
    assert [file.bytes for file in manifest.source_files[:2]] == [3, 7]
    assert manifest.source_files[0].hash == manifest.source_files[2].hash != manifest.source_files[1].hash
    assert manifest.encoder.startswith("fastokens ")
    assert manifest.settings["special_tokens"] == "as_text"
    with ShardReader("out/shards/x") as shard:
        assert (shard.num_documents, shard.num_tokens) == (manifest.documents, manifest.tokens)
    assert sum(source.tokens for source in manifest.sources) == manifest.tokens
    assert (seen[-1].input_bytes, seen[-1].merged) == (seen[-1].total_input_bytes, 1.0)


@pytest.mark.parametrize("shuffle", [False, True])
def test_the_bytes_are_those_of_the_plain_way(many, tokenizer, shuffle):
    """The referee: Hugging Face's tokenizer, one document at a time, appended one by one."""
    make(tokenizer, shuffle=shuffle, workers=2)
    kept = [text for text in many if text]
    if shuffle:
        found = read_texts(tokenizer)
        assert found != [text + EOD for text in kept]
        assert sorted(found) == sorted(text + EOD for text in kept)
        kept = [text.removesuffix(EOD) for text in found]
    with ShardWriter("plain", np.uint16) as writer:
        for text in kept:
            writer.append(np.append(tokenizer.encode_batch([text])[0], tokenizer.eod_id))
    assert shard_bytes("plain") == shard_bytes()


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"deduplicate": True, "min_tokens": 5, "max_tokens": 150, "shuffle": False},
        {"split_sentences": True, "deduplicate": True},
    ],
)
def test_the_bytes_do_not_know_the_workers_the_shares_or_the_compression(
    many, tokenizer, tmp_path, fields, monkeypatch
):
    make(tokenizer, **fields)
    right = shard_bytes(manifest=True)
    make(tokenizer, output="two", workers=2, **fields)
    assert shard_bytes("two", manifest=True) == right
    for k in (2, 0, 1):
        assert make(tokenizer, output="shared", share=(k, 3), **fields).manifest is None
    make(tokenizer, output="shared", **fields)
    assert shard_bytes("shared", manifest=True) == right
    for ending in (".zst", ".gz"):
        folder = tmp_path / f"as{ending}"
        for number, part in enumerate((many[:600], many[600:610], many[610:])):
            write_jsonl(folder / "corpus" / f"{number}.jsonl{ending}", part)
        monkeypatch.chdir(folder)
        make(tokenizer, **fields)
        assert shard_bytes() == {name: right[name] for name in (".bin", ".idx")}, ending


def test_filters_and_exact_duplicates(many, tokenizer):
    texts = [text for text in many if text]
    lengths = {text: len(tokenizer.encode_batch([text])[0]) for text in texts}
    manifest = make(tokenizer, shuffle=False, min_tokens=20, max_tokens=100, deduplicate=True).manifest
    expected = [text for text in dict.fromkeys(texts) if 20 <= lengths[text] <= 100]
    assert read_texts(tokenizer) == [text + EOD for text in expected]
    short, long = (sum(test(lengths[text]) for text in texts) for test in (lambda n: n < 20, lambda n: n > 100))
    left_out = {"empty": many.count(""), "short": short, "long": long, "bad": 0}
    duplicates = len(texts) - short - long - len(expected)
    assert manifest.dropped == {**left_out, "duplicate": duplicates}
    assert duplicates > 20
    assert sum(source.bytes for source in manifest.sources) == sum(len(text.encode()) for text in expected)
    make(tokenizer, output="shuffled", min_tokens=20, max_tokens=100, deduplicate=True)
    assert sorted(read_texts(tokenizer, "shuffled")) == sorted(text + EOD for text in expected)


def test_the_first_of_two_copies_counts_for_its_source(many, tokenizer):
    Path("copy.jsonl").write_bytes(Path("corpus/1.jsonl").read_bytes())
    manifest = make(tokenizer, sources=["copy.jsonl", "corpus"], deduplicate=True).manifest
    alone = make(tokenizer, output="y", sources=["copy.jsonl"], deduplicate=True).manifest
    assert manifest.sources[0] == alone.sources[0]
    assert manifest.documents == make(tokenizer, output="z", deduplicate=True).manifest.documents


def test_shuffling_is_seeded(many, tokenizer):
    make(tokenizer, seed=1)
    first = read_texts(tokenizer)
    make(tokenizer, seed=2)
    assert read_texts(tokenizer) != first
    make(tokenizer, seed=1)
    assert read_texts(tokenizer) == first
    ranks = [first.index(f"{text}{EOD}") for text in many[:20] if text]
    assert max(np.diff(ranks)) > 100, "neighbours are far apart"


def test_end_of_document_can_be_left_out_and_cannot_be_forged(corpus, tokenizer):
    assert make(tokenizer, sources=["corpus/deep"], append_eod=False).manifest.eod_id is None
    with ShardReader("x") as shard:
        assert tokenizer.eod_id not in shard.read(0, shard.num_tokens)
    make(tokenizer, sources=["corpus/deep"], special_tokens="as_ids", append_eod=False)
    with ShardReader("x") as shard:
        assert (shard.read(0, shard.num_tokens) == tokenizer.eod_id).sum() == 1


def test_sentences_become_sequences_and_end_of_document_only_where_it_is_asked_for(corpus, tokenizer):
    (corpus / "lines.jsonl").write_text('{"text": "One thing. Another thing."}\n{"text": "  "}\n{"text": "Alone."}\n')
    fields = {"sources": ["corpus/lines.jsonl"], "split_sentences": True, "shuffle": False}
    manifest = make(tokenizer, **fields).manifest
    assert (manifest.documents, manifest.sequences, manifest.eod_id) == (2, 3, None)
    assert [text.strip() for text in read_texts(tokenizer)] == ["One thing.Another thing.", "Alone."]
    manifest = make(tokenizer, append_eod=True, **fields).manifest
    assert manifest.sequences == 3
    assert [text.count(EOD) for text in read_texts(tokenizer)] == [1, 1]
    make(tokenizer, output="y", append_eod=True, **{**fields, "shuffle": True})
    assert sorted(read_texts(tokenizer, "y")) == sorted(read_texts(tokenizer))


def test_a_finished_shard_is_reused_until_anything_changes(corpus, tokenizer, tmp_path):
    def reused(**fields):
        return make(fields.pop("tokenizer", tokenizer), **fields).reused

    assert not reused()
    before = (tmp_path / "x.bin").stat().st_mtime_ns
    assert reused()
    assert (tmp_path / "x.bin").stat().st_mtime_ns == before
    os.utime(corpus / "b.txt", ns=(1, 1))
    assert reused(), "another time stamp, but the same content"
    assert not reused(seed=2)
    assert not reused(append_eod=False)
    assert not reused(shuffle=False)
    assert not reused(min_tokens=2)
    assert not reused()
    (corpus / "b.txt").write_text("bea")
    assert not reused()
    (corpus / "new.txt").write_text("new")
    assert not reused()
    other = make_tokenizer(tmp_path / "other")
    assert reused(tokenizer=other), "the same content elsewhere"
    (tmp_path / "x.bin").write_bytes(b"damaged")
    assert not reused()
    (tmp_path / "x.manifest.json").write_text("{")
    assert not reused()
    assert reused()


def test_verify_finds_a_changed_token_a_changed_source_and_a_missing_shard(some, tokenizer, tmp_path):
    section = PrepareSection(output="x", sources=["corpus"], deduplicate=True)
    with pytest.raises(DataError, match="has no manifest"):
        verified(section, tokenizer=tokenizer, seed=1)
    prepare(section, tokenizer=tokenizer, seed=1)
    assert verified(section, tokenizer=tokenizer, seed=1, workers=2).documents
    assert not list(tmp_path.glob("x.verify*")), "nothing is left behind"
    data = bytearray((tmp_path / "x.bin").read_bytes())
    data[5000] ^= 1
    (tmp_path / "x.bin").write_bytes(data)
    message = r"x: x.bin is missing, or is not .*Delete x.manifest.json.*and make it again with `bloomery prepare`"
    with pytest.raises(DataError, match=message):
        verified(section, tokenizer=tokenizer, seed=1)
    (tmp_path / "x.manifest.json").unlink()
    prepare(section, tokenizer=tokenizer, seed=1)
    assert verified(section, tokenizer=tokenizer, seed=1).documents, "the remedy is one"
    prepare(section, tokenizer=tokenizer, seed=2)
    with pytest.raises(DataError, match="its shuffle_seed is 2 where now it would be 1"):
        verified(section, tokenizer=tokenizer, seed=1)
    (tmp_path / "corpus" / "1.jsonl").write_text('{"text": "x"}\n')
    with pytest.raises(DataError, match=r"corpus/1.jsonl has changed since"):
        verified(section, tokenizer=tokenizer, seed=2)


def test_a_finished_shard_is_up_to_date_where_nothing_can_be_written(corpus, tokenizer, monkeypatch):
    make(tokenizer)
    monkeypatch.setattr("bloomery.prepare.parts.PartsFolder.locked", None)
    assert make(tokenizer).reused
    assert make(tokenizer, share=(1, 3)).reused


def swapped_lengths(path: Path) -> None:
    """Two sequences of the first document share their tokens in another way; the index is consistent in itself."""
    data = bytearray(path.read_bytes())
    count = int.from_bytes(data[18:26], "little")
    lengths = np.frombuffer(data, "<i4", count, 34)
    pointers = np.frombuffer(data, "<i8", count, 34 + 4 * count)
    lengths[0] += 1
    lengths[1] -= 1
    pointers[1] += 2
    path.write_bytes(data)


def falsified(path: Path, **fields) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def test_verify_compares_all_that_is_written(some, tokenizer, tmp_path):
    section = PrepareSection(output="x", sources=["corpus"], split_sentences=True, shuffle=False)
    prepare(section, tokenizer=tokenizer, seed=1)
    falsified(tmp_path / "x.manifest.json", encoder="another", bloomery_version="0")
    (tmp_path / "x.verify").mkdir()
    assert verified(section, tokenizer=tokenizer, seed=1).documents
    assert sorted(tmp_path.glob("x.verify*")) == [tmp_path / "x.verify"], "somebody else's"
    other_source = [{"name": "corpus", "documents": 939, "tokens": 1, "bytes": 1}]
    damages = [
        ("x.idx", swapped_lengths, "x.idx is missing, or is not what"),
        ("x.bin", Path.unlink, "x.bin is missing"),
    ]
    for fields, message in [
        ({"vocab_size": 299}, "its vocab_size is 299 where .* be 300"),
        ({"dropped": {}}, "its dropped is {} where now it would be {'empty': 5"),
        ({"append_eod": True}, "its append_eod is True where"),
        ({"sequences": 1}, "its sequences is 1 where"),
        ({"sources": []}, r"its sources is \(\) where .*name='corpus'"),
        ({"sources": other_source}, r"x: its sources is .*tokens=1, .* where now it would be .*tokens=\d\d"),
    ]:
        damages.append(("x.manifest.json", lambda path, fields=fields: falsified(path, **fields), message))
    for name, damage, message in damages:
        right = (tmp_path / name).read_bytes()
        damage(tmp_path / name)
        with pytest.raises(DataError, match=message):
            verified(section, tokenizer=tokenizer, seed=1)
        (tmp_path / name).write_bytes(right)


def test_nothing_left_is_an_error_and_an_empty_source_a_note(corpus, tokenizer):
    (corpus / "nothing.jsonl").touch()
    result = make(tokenizer, sources=["corpus/nothing.jsonl", "corpus/b.txt"])
    assert "the source 'corpus/nothing.jsonl' gave no document" in result.notes
    assert "1 of 2 files without bytes: corpus/nothing.jsonl" in result.notes
    message = r"no document is left \(there is no text\); 1 of 1 file without bytes: corpus/nothing.jsonl. A shard"
    with pytest.raises(DataError, match=message):
        make(tokenizer, sources=["corpus/nothing.jsonl"])
    with pytest.raises(DataError, match=r"no document is left \(8 short\)|no document is left \(1 empty, 8 short\)"):
        make(tokenizer, min_tokens=1000)
    with pytest.raises(StorageError, match="cannot create the folder"):
        make(tokenizer, output="corpus/b.txt/x")


def test_manifest_says_when_it_does_not_fit(corpus, tokenizer):
    manifest = make(tokenizer).manifest
    fits = {"tokenizer": tokenizer, "vocab_size": 300}
    assert check_fits({"x": manifest}, **fits) == []
    assert check_fits({"x": manifest}, tokenizer=None, vocab_size=400) == []
    problems = check_fits({"x": replace(manifest, tokenizer_hash="0" * 64)}, tokenizer=tokenizer, vocab_size=256)
    assert [problem.place for problem in problems] == ["x.manifest.json"] * 2
    assert "made with another tokenizer: its tokenizer_hash is 000000000000, that of" in str(problems[0])
    assert "has 300 entries but model.vocab_size is 256" in str(problems[1])
    for name, value, right in (("vocab_size", 299, 300), ("eod_id", 7, tokenizer.eod_id)):
        (problem,) = check_fits({"x": replace(manifest, **{name: value})}, **fits)
        assert f"its {name} is {value}, that of {tokenizer.path} is {right}" in problem.what
        (problem,) = check_fits(
            {"x": manifest, "y": replace(manifest, **{name: value})}, tokenizer=None, vocab_size=300
        )
        assert (problem.place, f"that of x is {right}" in problem.what) == ("y.manifest.json", True)
    assert check_fits({"x": replace(manifest, eod_id=None)}, **fits) == [], "documents may have no end"


def test_a_manifest_beside_the_files_of_another_shard_is_found(corpus, tokenizer):
    manifest = make(tokenizer).manifest
    make(tokenizer, output="y", append_eod=False)
    with ShardReader("x") as shard:
        assert manifest_of(shard) == manifest
    for ending in (".bin", ".idx"):
        os.replace(f"y{ending}", f"x{ending}")
    wrong = f"it records tokens {manifest.tokens} where it is {manifest.tokens - manifest.documents}"
    with ShardReader("x") as shard, pytest.raises(DataError, match=rf"x.manifest.json: the manifest .* {wrong}"):
        manifest_of(shard)
    assert not make(tokenizer).reused


def test_json_that_is_no_jsonl_is_noted(corpus, tokenizer):
    for name in ("a.json", "b.JSON.gz"):
        (corpus / name).write_bytes(b'{"text": "x"}\n' if name == "a.json" else gzip.compress(b"{}"))
    assert "2 .json files taken for one text each: lines of JSON need the ending .jsonl" in make(tokenizer).notes


def test_manifest_missing_broken_or_foreign(corpus, tokenizer):
    assert read_manifest("nothing") is None
    manifest = make(tokenizer).manifest
    good = json.loads(Path(manifest_path("x")).read_text())
    for content, message in [
        ("{", r"x\.manifest\.json: has .*Invalid JSON"),
        ("[]", "This Bloomery reads exactly the fields of format_version 2"),
        (
            json.dumps({**good, "format_version": 1}),
            r"has format_version 1 \(should be 2\). This Bloomery reads exactly the fields",
        ),
        (json.dumps({**good, "colour": 1}), r"has colour 1 \(Unexpected"),
        (json.dumps({key: good[key] for key in good if key != "tokens"}), "has no tokens"),
        ("[" * 100_000, "Invalid JSON: recursion limit"),
        (json.dumps({**good, "sources": [{"name": "x"}]}), r"has no sources\[0\].documents; no sources\[0\].tokens"),
        (json.dumps({**good, "vocab_size": None}), r"has vocab_size null \(should be a valid integer\)"),
        (json.dumps({**good, "vocab_size": "300"}), r'has vocab_size "300" \(should be a valid integer\)'),
        (json.dumps({**good, "vocab_size": True}), r"has vocab_size true \(should be a valid integer\)"),
        (json.dumps({**good, "dropped": {"bad": -1}}), r"has dropped.bad -1 \(should be greater than or equal to 0\)"),
        (json.dumps({**good, "dtype": 5, "tokens": -1}), r"has dtype 5 \(.*string\); tokens -1 \(.*greater"),
        (json.dumps({**good, "source_files": 3}), "has source_files 3 "),
        (json.dumps({**good, "settings": None}), "has settings null "),
    ]:
        Path(manifest_path("x")).write_text(content)
        with pytest.raises(DataError, match=message):
            read_manifest("x")
    replace(manifest, documents=1).write("x")
    assert read_manifest("x").documents == 1
