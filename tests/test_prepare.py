"""Raw text to shards: sources, order, manifest, reuse, and every complaint."""

import json
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest

from bloomery.base.errors import DataError, StorageError
from bloomery.config.recipe import PrepareSection
from bloomery.data.manifest import check_fits, manifest_path, read_manifest
from bloomery.data.shards import ShardReader
from bloomery.data.tokenizer import Tokenizer
from bloomery.prepare.run import prepare
from bloomery.prepare.sources import ReadCounts, iter_documents
from bloomery.prepare.train_tokenizer import train_tokenizer


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory) -> Tokenizer:
    return train_tokenizer(
        ["some text to learn from, some more text"] * 2, vocab_size=270, output=str(tmp_path_factory.mktemp("t"))
    )


@pytest.fixture
def corpus(tmp_path, monkeypatch):
    """Eight documents in four files, one of them empty, and a file that is not text."""
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "corpus"
    (folder / "deep" / ".git").mkdir(parents=True)
    (folder / "deep" / ".git" / "config").write_text("hidden")
    (folder / "b.txt").write_text("bee")
    (folder / "a.md").write_text("# Aye\r\n")
    (folder / "empty.py").write_text("")
    (folder / "image.png").write_bytes(b"\x89PNG\xff")
    (folder / "deep" / "z.txt").write_text("zed <|endoftext|> żółć")
    lines = [json.dumps({"text": f"line {i}", "url": "x"}) for i in range(5)]
    (folder / "lines.jsonl").write_text("\n".join(lines) + "\n\n")
    return folder


def read_texts(prefix, tokenizer):
    with ShardReader(prefix) as shard:
        starts = shard.document_token_starts
        return [tokenizer.decode(shard.read(int(a), int(b - a))) for a, b in pairwise(starts)]


def test_documents_come_in_a_fixed_order_with_stable_names(corpus):
    counts = ReadCounts()
    documents = list(iter_documents("corpus", counts))
    assert [document.name for document in documents] == [
        "corpus/a.md",
        "corpus/b.txt",
        "corpus/deep/z.txt",
        *(f"corpus/lines.jsonl:{line}" for line in range(1, 6)),
    ]
    assert documents[0].text == "# Aye\r\n", "line ends are kept"
    assert counts == ReadCounts(files=6, empty=1, undecodable=1)


def test_files_and_globs(corpus):
    assert [document.text for document in iter_documents("corpus/b.txt", ReadCounts())] == ["bee"]
    names = [document.name for document in iter_documents("corpus/**/*.txt", ReadCounts())]
    assert names == ["corpus/b.txt", "corpus/deep/z.txt"]


def test_the_standard_library_is_a_source_on_every_machine():
    documents = []
    for document in iter_documents("python-stdlib", ReadCounts()):
        documents.append(document)
    names = [document.name for document in documents]
    assert "python-stdlib/json/decoder.py" in names
    assert names == sorted(names)
    assert not [name for name in names if "site-packages" in name or "/test/" in name]
    assert sum(len(document.text) for document in documents) > 3_000_000


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"text": "cut off', r"lines\.jsonl:2: is not JSON: Unterminated string"),
        ('{"content": "x", "id": 1}', r"lines\.jsonl:2: has no 'text': its keys are content, id"),
        ('{"text": 5}', r"lines\.jsonl:2: has a 'text' that is no string"),
        ('["text"]', r"lines\.jsonl:2: has no 'text': it is no object"),
    ],
)
def test_a_broken_line_is_named(corpus, line, message):
    (corpus / "lines.jsonl").write_text('{"text": "good"}\n' + line + "\n")
    with pytest.raises(DataError, match=message):
        list(iter_documents("corpus/lines.jsonl", ReadCounts()))


def test_half_a_surrogate_pair_is_counted_as_undecodable(corpus):
    (corpus / "lines.jsonl").write_text('{"text": "\\ud800 half"}\n{"text": ""}\n{"text": "whole"}\n')
    counts = ReadCounts()
    assert [document.text for document in iter_documents("corpus/lines.jsonl", counts)] == ["whole"]
    assert counts == ReadCounts(files=1, empty=1, undecodable=1)


def test_a_source_that_matches_nothing(corpus):
    for source in ("nowhere", "corpus/*.rst"):
        with pytest.raises(DataError, match=r"matches no file.*python-stdlib"):
            list(iter_documents(source, ReadCounts()))


def test_prepare_writes_every_document_with_its_end(corpus, tokenizer):
    seen = []
    section = PrepareSection(output="out/shards/x", sources=["corpus/b.txt", "corpus"], shuffle=False)
    result = prepare(section, tokenizer=tokenizer, seed=1, progress=seen.append)
    eod = "<|endoftext|>"
    expected = ["bee", "# Aye\r\n", "bee", "zed <|endoftext|> żółć", *(f"line {i}" for i in range(5))]
    assert read_texts("out/shards/x", tokenizer) == [text + eod for text in expected]
    assert (result.reused, result.empty_documents, result.undecodable_documents) == (False, 1, 1)

    manifest = read_manifest("out/shards/x")
    assert manifest == result.manifest
    assert (manifest.dtype, manifest.vocab_size, manifest.eod_id) == ("uint16", 270, tokenizer.eod_id)
    assert [(source.name, source.documents, source.bytes) for source in manifest.sources] == [
        ("corpus/b.txt", 1, 3),
        ("corpus", 8, sum(len(text.encode()) for text in expected[1:])),
    ]
    with ShardReader("out/shards/x") as shard:
        assert (shard.num_documents, shard.num_tokens) == (manifest.documents, manifest.tokens)
    assert sum(source.tokens for source in manifest.sources) == manifest.tokens
    assert (seen[-1].documents, seen[-1].total_documents, seen[-1].tokens) == (9, 9, manifest.tokens)
    assert seen[-1].bytes == seen[-1].total_bytes


def test_without_append_eod_nothing_is_added(corpus, tokenizer):
    result = prepare(
        PrepareSection(output="x", sources=["corpus/b.txt"], append_eod=False), tokenizer=tokenizer, seed=1
    )
    assert read_texts("x", tokenizer) == ["bee"]
    assert result.manifest.eod_id is None


def test_shuffling_is_seeded_and_keeps_its_order_when_documents_are_added(corpus, tokenizer):
    def texts(seed):
        prepare(PrepareSection(output="x", sources=["corpus"]), tokenizer=tokenizer, seed=seed)
        return read_texts("x", tokenizer)

    first = texts(1)
    assert texts(2) != first
    assert sorted(texts(2)) == sorted(first)
    assert texts(1) == first
    (corpus / "new.txt").write_text("new")
    assert [text for text in texts(1) if not text.startswith("new")] == first


def test_a_finished_shard_is_reused_until_anything_changes(corpus, tokenizer, tmp_path):
    section = PrepareSection(output="x", sources=["corpus"])

    def reused(section=section, seed=1, tokenizer=tokenizer):
        return prepare(section, tokenizer=tokenizer, seed=seed).reused

    assert not reused()
    before = (tmp_path / "x.bin").stat().st_mtime_ns
    assert reused()
    assert (tmp_path / "x.bin").stat().st_mtime_ns == before
    assert not reused(seed=2)
    assert not reused(PrepareSection(output="x", sources=["corpus"], append_eod=False))
    assert not reused(PrepareSection(output="x", sources=["corpus"], shuffle=False))
    assert not reused()
    (corpus / "b.txt").write_text("other")
    assert not reused()
    other = train_tokenizer(["quite another text"] * 2, vocab_size=270, output=str(tmp_path / "other"))
    assert not reused(tokenizer=other)
    assert not reused()
    assert reused()
    (tmp_path / "x.bin").write_bytes(b"damaged")
    assert not reused()
    (tmp_path / "x.manifest.json").write_text("{")
    assert not reused()
    assert reused()


def test_a_crash_leaves_the_old_shard_whole(corpus, tokenizer, tmp_path):
    section = PrepareSection(output="x", sources=["corpus"])
    prepare(section, tokenizer=tokenizer, seed=1)
    files = {path.name: path.read_bytes() for path in tmp_path.glob("x.*")}

    def interrupt(_progress):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        prepare(section, tokenizer=tokenizer, seed=2, progress=interrupt)
    assert {path.name: path.read_bytes() for path in tmp_path.glob("x.*")} == files


def test_a_source_without_text_and_a_folder_that_cannot_be_written(corpus, tokenizer):
    with pytest.raises(DataError, match=r"'corpus/image.png' holds no text.*1 were not UTF-8"):
        prepare(PrepareSection(output="x", sources=["corpus/image.png"]), tokenizer=tokenizer, seed=1)
    with pytest.raises(StorageError, match="cannot create the folder"):
        prepare(PrepareSection(output="corpus/b.txt/x", sources=["corpus"]), tokenizer=tokenizer, seed=1)


def test_manifest_says_when_it_does_not_fit(corpus, tokenizer):
    manifest = prepare(PrepareSection(output="x", sources=["corpus"]), tokenizer=tokenizer, seed=1).manifest
    fits = {"tokenizer_hash": tokenizer.content_hash, "vocab_size": 270, "place": "my.yaml:7"}
    assert check_fits(manifest, **fits) == []
    assert check_fits(manifest, **{**fits, "tokenizer_hash": None, "vocab_size": 300}) == []
    problems = check_fits(manifest, tokenizer_hash="0" * 64, vocab_size=256, place="my.yaml:7")
    assert [problem.place for problem in problems] == ["my.yaml:7"] * 2
    assert "made with another tokenizer" in str(problems[0])
    assert "has 270 entries but model.vocab_size is 256" in str(problems[1])


def test_manifest_missing_broken_or_foreign(corpus, tokenizer):
    assert read_manifest("nothing") is None
    manifest = prepare(PrepareSection(output="x", sources=["corpus"]), tokenizer=tokenizer, seed=1).manifest
    good = json.loads(Path(manifest_path("x")).read_text())
    for content, message in [
        ("{", r"x\.manifest\.json: cannot be read"),
        ("[]", "has format_version None. This Bloomery reads version 1"),
        (json.dumps({**good, "format_version": 2}), "has format_version 2"),
        (json.dumps({**good, "colour": 1}), "has unknown colour"),
        (json.dumps({key: good[key] for key in good if key != "tokens"}), "lacks tokens"),
        (json.dumps({**good, "sources": [{"name": "x"}]}), "broken list of sources"),
    ]:
        Path(manifest_path("x")).write_text(content)
        with pytest.raises(DataError, match=message):
            read_manifest("x")
    replace(manifest, documents=1).write("x")
    assert read_manifest("x").documents == 1
