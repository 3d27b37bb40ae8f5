"""The .bin/.idx format. The referee is bytes written by hand with struct, never our own writer."""

import os
import struct
from pathlib import Path

import numpy as np
import pytest

from bloomery.base.errors import DataError, StorageError
from bloomery.data import shards
from bloomery.data.causal import CausalSource
from bloomery.data.manifest import ShardManifest, manifest_of
from bloomery.data.megatron import IndexCache, MegatronSource
from bloomery.data.shards import ShardReader, ShardWriter, file_checksum, token_dtype

DOCUMENTS = [[5, 6, 7], [8], [9, 10, 11, 12]]


def index_bytes(lengths, *, itemsize=2, code=8, magic=b"MMIDIDX\x00\x00", version=1, pointers=None, doc_idx=None):
    if pointers is None:
        pointers = [sum(lengths[:i]) * itemsize for i in range(len(lengths))]
    doc_idx = list(range(len(lengths) + 1)) if doc_idx is None else doc_idx
    header = magic + struct.pack("<QBQQ", version, code, len(lengths), len(doc_idx))
    return header + struct.pack(f"<{len(lengths)}i{len(lengths)}q{len(doc_idx)}q", *lengths, *pointers, *doc_idx)


def hand_made(tmp_path, idx=None, tokens=b""):
    (tmp_path / "x.idx").write_bytes(index_bytes([3, 1, 4]) if idx is None else idx)
    (tmp_path / "x.bin").write_bytes(tokens or struct.pack("<8H", *range(5, 13)))
    return str(tmp_path / "x")


def test_writer_makes_the_bytes_of_the_specification(tmp_path):
    with ShardWriter(str(tmp_path / "new" / "x"), np.uint16) as writer:
        for document in DOCUMENTS:
            writer.append(np.array(document))
    assert (writer.num_documents, writer.num_tokens) == (3, 8)
    assert (tmp_path / "new" / "x.idx").read_bytes() == index_bytes([3, 1, 4])
    assert (tmp_path / "new" / "x.bin").read_bytes() == struct.pack("<8H", *range(5, 13))
    assert sorted(path.name for path in (tmp_path / "new").iterdir()) == ["x.bin", "x.idx"]


@pytest.mark.parametrize(
    ("code", "letter", "dtype"),
    [(1, "B", "u1"), (2, "b", "i1"), (3, "h", "i2"), (4, "i", "i4"), (5, "q", "i8"), (8, "H", "u2")],
)
def test_reader_knows_every_integer_type(tmp_path, code, letter, dtype):
    itemsize = struct.calcsize(letter)
    idx = index_bytes([3, 1, 4], itemsize=itemsize, code=code)
    prefix = hand_made(tmp_path, idx, struct.pack(f"<8{letter}", *range(5, 13)))
    with ShardReader(prefix) as shard:
        assert shard.dtype == np.dtype(dtype)
        assert shard.read(0, 8).tolist() == list(range(5, 13))
    with ShardWriter(prefix, dtype) as writer:
        for document in DOCUMENTS:
            writer.append(np.array(document))
    assert (tmp_path / "x.idx").read_bytes() == idx


def test_reader_counts_documents_of_several_sequences(tmp_path):
    with ShardReader(hand_made(tmp_path, index_bytes([3, 0, 1, 4], doc_idx=[0, 2, 2, 4]))) as shard:
        assert (shard.num_sequences, shard.num_documents, shard.num_tokens) == (4, 3, 8)
        assert shard.document_starts().tolist() == [0, 3, 3, 8]
        assert shard.document_starts().dtype == np.int64
        assert shard.document_at(2) == (0, 2)
        assert shard.document_at(3) == (2, 0), "the empty document 1 holds no token"
        assert shard.read(2, 3).tolist() == [7, 8, 9]
        assert shard.read(8, 0).tolist() == []


@pytest.mark.parametrize("vocab_size", [1, 65499, 65500, 70000])
def test_token_dtype_is_megatrons(vocab_size):
    assert token_dtype(vocab_size) == (np.uint16 if vocab_size < 65500 else np.int32)


def test_an_exception_leaves_the_old_shard_and_no_debris(tmp_path):
    prefix = hand_made(tmp_path)

    def interrupted():
        with ShardWriter(prefix, np.uint16) as writer:
            writer.append(np.array([1, 2]))
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["x.bin", "x.idx"]
    assert ShardReader(prefix).num_tokens == 8


def test_a_failure_while_finishing_leaves_no_index(tmp_path, monkeypatch):
    def full(_descriptor):
        raise OSError(28, "No space left on device")

    def written():
        with ShardWriter(str(tmp_path / "x"), np.uint16) as writer:
            writer.append(np.array([1, 2]))
            monkeypatch.setattr("os.fsync", full)

    with pytest.raises(StorageError, match=r"x\.bin: No space left on device"):
        written()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("document", [[], [[1]], [70000], [-1]])
def test_writer_refuses_what_would_not_come_back(tmp_path, document):
    with (
        pytest.raises(ValueError, match="do not fit into uint16"),
        ShardWriter(str(tmp_path / "x"), np.uint16) as writer,
    ):
        writer.append(np.array(document, dtype=np.int64))


def test_writer_names_a_folder_that_cannot_be_made(tmp_path):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(StorageError, match="cannot create the folder"):
        ShardWriter(str(tmp_path / "file" / "x"), np.uint16)


GOOD = index_bytes([3, 1, 4])
BROKEN = {
    "magic": (b"PK\x03\x04 is a zip file, not an index of any kind", r"x\.idx: .*starts with b'PK.*MMIDIDX"),
    "legacy": (b"TNTIDX\x00\x00" + bytes(40), "starts with b'TNTIDX.*older TNTIDX format"),
    "short header": (GOOD[:20], "holds 20 bytes.*truncated"),
    "empty file": (b"", "holds 0 bytes.*truncated"),
    "version": (index_bytes([3, 1, 4], version=2), "version 2.*The version is 1"),
    "dtype": (index_bytes([3, 1, 4], code=6), r"dtype code 6.*8 \(uint16\)"),
    "cut off": (GOOD[:-5], "holds 97 bytes where its header says 102. 3 sequences and 4 entries"),
    "too long": (GOOD + b"\0", "holds 103 bytes where its header says 102"),
    "modes": (GOOD + bytes(3), "without modes"),
    "absurd count": (GOOD[:18] + struct.pack("<Q", 2**62) + GOOD[26:], "holds 102 bytes where its header says"),
    "negative": (index_bytes([3, -1, 6]), "sequence 1 has length -1"),
    "pointer": (index_bytes([3, 1, 4], pointers=[0, 6, 10]), "sequence 2 .*points to byte 10 where .* add up to 8"),
    "first document": (index_bytes([3, 1, 4], doc_idx=[1, 2, 3]), "document 0 begins at sequence 1"),
    "last document": (index_bytes([3, 1, 4], doc_idx=[0, 1, 2]), "document 2 begins at sequence 2"),
    "falling documents": (index_bytes([3, 1, 4], doc_idx=[0, 2, 1, 3]), "document . begins at.*never fall"),
    "no entries": (index_bytes([3, 1, 4], doc_idx=[]), "0 entries of documents"),
    "bin too short": (index_bytes([3, 1, 5]), r"x\.bin: holds 16 bytes where its index says 18.*shorter"),
    "bin too long": (index_bytes([3, 1, 3]), r"x\.bin: holds 16 bytes where its index says 14.*longer"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_reader_names_the_damage(tmp_path, case):
    idx, message = BROKEN[case]
    with pytest.raises(DataError, match=message) as caught:
        ShardReader(hand_made(tmp_path, idx))
    problem = caught.value.problems[0]
    assert problem.what
    assert problem.rule
    assert problem.remedy
    assert problem.place.startswith(str(tmp_path))


@pytest.mark.parametrize("ending", [".idx", ".bin"])
def test_a_pipe_in_the_place_of_a_file_is_no_shard_and_nothing_waits(tmp_path, ending):
    prefix = str(tmp_path / "x")
    with ShardWriter(prefix, np.uint16) as writer:
        writer.append(np.arange(3))
    os.unlink(prefix + ending)
    os.mkfifo(prefix + ending)
    with pytest.raises(DataError, match="no regular file"):
        ShardReader(prefix)


def test_missing_files_are_all_named_with_a_hint(tmp_path):
    with pytest.raises(DataError) as caught:
        ShardReader(str(tmp_path / "nothing"))
    assert [problem.place[-4:] for problem in caught.value.problems] == [".bin", ".idx"]

    prefix = hand_made(tmp_path)
    with pytest.raises(DataError, match=rf"there is {prefix}\)"):
        ShardReader(f"{prefix}.bin")
    (tmp_path / "oscar_text_document.idx").touch()
    with pytest.raises(DataError, match=r"there is .*oscar_text_document\)"):
        ShardReader(str(tmp_path / "oscar"))
    (tmp_path / "x.bin").unlink()
    with pytest.raises(DataError, match=r"x\.bin: no such file.*prepare") as caught:
        ShardReader(prefix)
    assert len(caught.value.problems) == 1


def test_a_shard_cut_off_while_open_is_named(tmp_path):
    with ShardReader(hand_made(tmp_path)) as shard:
        (tmp_path / "x.bin").write_bytes(b"\0\0")
        with pytest.raises(DataError, match=r"ends at byte 2. It was truncated while it was being read"):
            shard.read(0, 8)


def test_an_index_cut_off_while_it_is_read_is_named(tmp_path, monkeypatch):
    prefix = hand_made(tmp_path, index_bytes([2, 2])[:-1], b"\0" * 8)
    monkeypatch.setattr(shards, "_read_header", lambda *_: (np.dtype("<u2"), 2, 3))  # it was whole then
    with pytest.raises(DataError, match=r"ends at byte 81. It was truncated while it was being read"):
        ShardReader(prefix)


@pytest.fixture
def short_ends(monkeypatch):
    """Indices of a few entries are large ones."""
    monkeypatch.setattr(shards, "_AN_END", 2)


def test_of_a_large_index_only_what_is_needed_is_read(tmp_path, short_ends):
    lengths, doc_idx = [3, 0, 1, 4, 2, 5, 1], [0, 2, 2, 3, 5, 6, 7]
    prefix = hand_made(tmp_path, index_bytes(lengths, doc_idx=doc_idx), bytes(32))
    with ShardReader(prefix) as shard, ShardReader(prefix) as whole:
        assert (shard.num_tokens, shard.num_documents, shard.num_sequences) == (16, 6, 7)
        starts = whole.document_starts().tolist()
        assert starts == [0, 3, 3, 4, 10, 15, 16]
        assert [shard.document_start(number) for number in range(7)] == starts
        assert [shard.document_at(token) for token in range(16)] == [whole.document_at(token) for token in range(16)]
        assert shard.facts() == whole.facts()


def test_damage_inside_a_large_index_is_named_when_it_is_met(tmp_path, short_ends):
    pointers = [0, 4, 8, 13, 16, 20, 24]
    for idx, damage in (
        (
            index_bytes([2] * 7, pointers=pointers),
            "sequence 3 has length 2 and points to byte 13 where the lengths before it add up to 12",
        ),
        (index_bytes([2, 2, 2, -2, 2, 2, 6]), "sequence 3 has length -2"),
        (index_bytes([2] * 7, doc_idx=[0, 1, 2, 99, 5, 6, 7]), "document 4 begins at sequence 5"),
    ):
        with ShardReader(hand_made(tmp_path, idx, bytes(28))) as shard, pytest.raises(DataError, match=damage):
            shard.document_starts()
    with (
        ShardReader(hand_made(tmp_path, idx, bytes(28))) as shard,
        pytest.raises(DataError, match="document 4 begins at sequence 5"),
    ):
        shard.document_start(3)
    idx = index_bytes([2] * 7, pointers=[0, 4, 8, 12, 16, 20, 25])
    with pytest.raises(DataError, match=r"sequence 6 .* points to byte 25 where the lengths before it add up to 24"):
        ShardReader(hand_made(tmp_path, idx, bytes(28)))


def test_many_documents_at_once_give_the_same_bytes(tmp_path):
    with ShardWriter(str(tmp_path / "one"), np.uint16) as writer:
        for document in DOCUMENTS:
            writer.append(np.array(document))
    flat, lengths = np.concatenate(DOCUMENTS).astype(np.uint16), np.array([3, 1, 4], np.int32)
    with ShardWriter(str(tmp_path / "many"), np.uint16) as writer:
        writer.append_many(flat.data, lengths, np.ones(3, np.int32))
    for ending in (".bin", ".idx"):
        assert (tmp_path / f"many{ending}").read_bytes() == (tmp_path / f"one{ending}").read_bytes()


def test_documents_of_several_sequences_are_written(tmp_path, monkeypatch):
    monkeypatch.setattr("bloomery.data.shards._INDEX_ENTRIES", 2)
    with ShardWriter(str(tmp_path / "x"), np.uint16) as writer:
        writer.append_many(np.arange(5, 13, dtype=np.uint16).data, np.array([3, 1, 4]), np.array([2, 1]))
    assert (writer.num_documents, writer.num_sequences, writer.num_tokens) == (2, 3, 8)
    assert (tmp_path / "x.idx").read_bytes() == index_bytes([3, 1, 4], doc_idx=[0, 2, 3])


@pytest.fixture(params=["plain", "plain, large", "sentences"])
def shard_of_a_kind(request, tmp_path, monkeypatch):
    """(prefix, what it is trained on now). Where several sequences make a document, a manifest has the index's hash."""
    sentences = request.param == "sentences"
    if request.param == "plain, large":
        monkeypatch.setattr(shards, "_AN_END", 2)
    prefix, random = str(tmp_path / "x"), np.random.default_rng(3)
    with ShardWriter(prefix, np.uint16) as writer:
        for _ in range(8):
            lengths = random.integers(3, 9, 3 if sentences else 1).astype("<i4")
            tokens = random.integers(0, 60, int(lengths.sum())).astype("<u2")
            writer.append_many(tokens.data, lengths, np.array([len(lengths)], "<i4"))
    if sentences:
        hashed = file_checksum(f"{prefix}.idx")
        ShardManifest(
            "ab", 64, "uint16", None, False, None, 8, 24, writer.num_tokens, (), (), {}, {}, "", "", index_hash=hashed
        ).write(prefix)

    def batches():
        told = []
        parts = [
            CausalSource(ShardReader(prefix), seq_length=4, vocab_size=64, seed=1, split="5,3,0", part=part)
            for part in ("train", "valid")
        ]
        cache = IndexCache(tmp_path / "cache")
        parts.append(
            MegatronSource(
                ShardReader(prefix), flavour="megatron", samples=20, seq_length=4, vocab_size=64, seed=1, cache=cache
            )
        )
        for source in parts:
            manifest_of(source.shard)
            told.append(source.read(np.arange(min(source.num_samples, 12))).inputs["tokens"].tolist())
        return [*told, parts[0].shard.facts()]

    return prefix, batches


def test_a_flipped_bit_of_an_index_is_an_error_or_changes_nothing(shard_of_a_kind):
    prefix, batches = shard_of_a_kind
    path, right = Path(f"{prefix}.idx"), batches()
    whole, found = path.read_bytes(), 0
    # 29 and 8 share no factor: every bit of a byte is met. And at the end the lowest of where documents begin.
    for bit in (*range(0, 8 * len(whole), 29), *range(8 * len(whole) - 64 * 40, 8 * len(whole), 64)):
        path.write_bytes(whole[: bit // 8] + bytes([whole[bit // 8] ^ 1 << bit % 8]) + whole[bit // 8 + 1 :])
        try:
            assert batches() == right, f"bit {bit} of {8 * len(whole)} is trained on"
        except DataError:
            found += 1
    assert found > 4 * len(whole) // 29
