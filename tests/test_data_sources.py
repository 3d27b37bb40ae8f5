"""Split, causal samples, batches and the loader."""

import threading
from contextlib import closing

import numpy as np
import pytest
import torch

from bloomery.base.errors import DataError
from bloomery.data.batch import Batch, Loader, read_batch
from bloomery.data.causal import CausalSource
from bloomery.data.megatron_order import split_boundaries
from bloomery.data.shards import ShardReader, ShardWriter


def windows(source, first=0, count=None):
    """(tokens, labels) of a source's samples, as arrays."""
    batch = source.read(np.arange(first, first + (source.num_samples if count is None else count)))
    return batch.inputs["tokens"].numpy(), batch.targets["lm loss"].numpy()


def make_shard(tmp_path, documents):
    with ShardWriter(str(tmp_path / "x"), np.uint16) as writer:
        for document in documents:
            writer.append(np.array(document))
    return writer.prefix


@pytest.fixture
def counting(tmp_path):
    """Ten documents of ten tokens whose ids are their own positions, 0..99."""
    return make_shard(tmp_path, np.arange(100).reshape(10, 10))


@pytest.mark.parametrize(
    ("split", "documents", "boundaries"),
    [
        ("969,30,1", 10000, [0, 9690, 9990, 10000]),
        ("949,50,1", 1000, [0, 949, 999, 1000]),
        ("98,2,0", 99, [0, 97, 99, 99]),
        ("969, 30, 1", 10, [0, 10, 10, 10]),
        ("90/5/5", 7, [0, 6, 7, 7]),
        ("95,5", 20, [0, 19, 20, 20]),
        ("0.5,0.5", 5, [0, 2, 5, 5]),
        ("100", 7, [0, 7, 7, 7]),
    ],
)
def test_split_follows_megatron_lm(split, documents, boundaries):
    assert split_boundaries(split, documents) == boundaries


def test_an_empty_part_names_itself_and_the_documents(counting):
    with pytest.raises(
        DataError, match=r"x\.idx: the split '949,50,1' of 10 documents leaves none for test .*9, 10, 10"
    ):
        CausalSource(ShardReader(counting), seq_length=3, vocab_size=100, seed=0, part="test", split="949,50,1")


def test_a_text_that_is_one_document_is_split_by_tokens(tmp_path, counting):
    (tmp_path / "one").mkdir()
    shard = ShardReader(make_shard(tmp_path / "one", [np.arange(100)]))
    settings = {"seq_length": 3, "vocab_size": 100, "seed": 0, "split": "90,10", "part": "valid"}
    with pytest.raises(DataError, match=r"'90,10' of 1 document leaves none for valid .*Use data.split_by=tokens"):
        CausalSource(shard, **settings)
    with pytest.raises(DataError, match=r"valid part of 100 tokens in 1 document gives .* or another data\.split\.$"):
        CausalSource(shard, **settings | {"seq_length": 50}, split_by="tokens")
    parts = [CausalSource(shard, **{**settings, "part": part}, split_by="tokens") for part in ("train", "valid")]
    tokens = [windows(source)[0] for source in parts]
    assert (tokens[0].max(), tokens[1].min(), len(parts[0].stretches(0))) == (86, 90, 1)
    assert [source.documents for source in parts] == [(0, 1), (0, 1)]
    across = CausalSource(ShardReader(counting), **settings | {"split": "45,55"}, split_by="tokens")
    assert (windows(across)[0].min(), across.documents) == (45, (4, 10))


def test_a_split_and_named_groups_are_evaluated_together(workshop):
    run = workshop.train(
        "data={train: [{path: train}], split: '9,1', split_by: tokens, validation: {held: [{path: valid}]}}",
        "train={for: 2 steps, evaluate: {every: 2 steps, steps: 1}}",
    )
    (record,) = workshop.metrics(run, "validation")[-1:]
    assert {each["group"] for each in workshop.metrics(run, "validation")} == {"valid", "held"}, record


def test_samples_are_windows_that_overlap_by_one_and_cover_every_token(counting):
    source = CausalSource(ShardReader(counting), seq_length=8, vocab_size=100, seed=1)
    assert source.num_samples == 99 // 8
    tokens, labels = windows(source)
    assert tokens.dtype == labels.dtype == np.int64
    assert (labels == tokens + 1).all()
    assert sorted(tokens[:, 0]) == list(range(0, 96, 8)), "each window once in an epoch"
    again, _ = windows(source, source.num_samples)
    assert sorted(again[:, 0]) == list(range(0, 96, 8))
    assert (again[:, 0] != tokens[:, 0]).any(), "the next epoch has another order"


def test_parts_share_no_token(counting):
    seen = []
    for part, expected in [("train", 70), ("valid", 20), ("test", 10)]:
        source = CausalSource(ShardReader(counting), seq_length=3, vocab_size=100, seed=1, part=part, split="7,2,1")
        tokens, labels = windows(source)
        ids = set(tokens.ravel()) | set(labels.ravel())
        assert len(ids) == (expected - 1) // 3 * 3 + 1
        seen += sorted(ids)
    assert len(seen) == len(set(seen))


def test_the_order_belongs_to_the_name_of_the_source(counting):
    first = [
        windows(CausalSource(ShardReader(counting), seq_length=3, vocab_size=100, seed=1, key=key), 0, 33)[0]
        for key in "aab"
    ]
    assert (first[0] == first[1]).all()
    assert (first[0] != first[2]).any()


def test_an_id_beyond_the_vocabulary_is_named_with_its_place(tmp_path):
    prefix = make_shard(tmp_path, [[1, 2, 3], [4, 5, 60000, 6], [7, 8]])
    source = CausalSource(ShardReader(prefix), seq_length=8, vocab_size=50257, seed=0)
    with pytest.raises(DataError, match="document 1 holds token id 60000 at position 2") as caught:
        source.read(np.arange(1))
    message = str(caught.value)
    assert message.startswith(f"{prefix}.bin: ")
    assert "from 0 to 50256" in message
    assert "model.vocab_size" in message
    with ShardWriter(str(tmp_path / "y"), np.int32) as writer:
        writer.append(np.array([1, 2, -3, 4]))
    with pytest.raises(DataError, match="holds token id -3 at position 2"):
        CausalSource(ShardReader(writer.prefix), seq_length=3, vocab_size=10, seed=0).read(np.arange(1))


def test_too_few_tokens_for_one_sample(counting):
    with pytest.raises(DataError, match=r"x.bin: 100 tokens in 10 documents gives no sample. .*seq_length \+ 1 = 101"):
        CausalSource(ShardReader(counting), seq_length=100, vocab_size=100, seed=0)
    with pytest.raises(DataError, match=r"the valid part of 100 tokens in 10 documents gives no .*another data.split"):
        CausalSource(ShardReader(counting), seq_length=10, vocab_size=100, seed=0, part="valid", split="9,1")
    assert CausalSource(ShardReader(counting), seq_length=99, vocab_size=100, seed=0).num_samples == 1


class PositionSource:
    """Each sample is its own position; position 13 can be made to fail."""

    seq_length = 2
    num_samples = 100

    def __init__(self, fail=False):
        self.fail = fail
        self.largest = 0

    def batch(self, first, count):
        self.largest = max(self.largest, first + count)
        if self.fail and first <= 13 < first + count:
            raise DataError([])
        tokens = torch.arange(first, first + count)[:, None].expand(count, 2)
        return Batch({"tokens": tokens}, {"lm loss": torch.where(tokens % 5 == 0, -100, tokens)})

    def close(self):
        pass


def positions(batch):
    return [int(row[0]) for micro_batch in batch.micro_batches for row in micro_batch.inputs["tokens"]]


@pytest.mark.parametrize("micro_batch_size", [1, 6])
@pytest.mark.parametrize("replicas", [1, 4])
def test_a_global_batch_holds_the_same_samples_in_every_layout(micro_batch_size, replicas):
    parts = [
        read_batch(PositionSource(), 24, 24, micro_batch_size=micro_batch_size, replica=replica, replicas=replicas)
        for replica in range(replicas)
    ]
    assert sorted(position for part in parts for position in positions(part)) == list(range(24, 48))
    assert sum(part.counts["lm loss"] for part in parts) == 2 * (24 - 5), "25, 30, 35, 40 and 45 are ignored"
    assert all(len(part.micro_batches) == 24 // micro_batch_size // replicas for part in parts)
    assert {(part.first_sample, part.size) for part in parts} == {(24, 24)}


def test_replicas_take_turns_inside_each_window():
    part = read_batch(PositionSource(), 0, 12, micro_batch_size=2, replica=1, replicas=3)
    assert positions(part) == [2, 3, 8, 9]


def test_loader_follows_the_ramp_and_resumes_exactly():
    def loader():
        return Loader(PositionSource(), micro_batch_size=2, batch_size_at=lambda consumed: 4 if consumed < 8 else 8)

    with closing(loader()) as whole:
        batches = [whole.take() for _ in range(5)]
        assert [(batch.first_sample, batch.size) for batch in batches] == [(0, 4), (4, 4), (8, 8), (16, 8), (24, 8)]
        assert [position for batch in batches for position in positions(batch)] == list(range(32))
        assert whole.consumed_samples == 32
        whole.seek(4)
        assert positions(whole.take()) == [4, 5, 6, 7]
    with closing(loader()) as resumed:
        resumed.seek(16)
        assert resumed.consumed_samples == 16
        assert positions(resumed.take()) == list(range(16, 24))


def test_loader_reads_ahead_by_two_batches_only():
    source = PositionSource()
    with closing(Loader(source, micro_batch_size=2, batch_size_at=lambda _: 2)) as loader:
        loader.take()
        for _ in range(100):
            if source.largest == 6:
                break
            threading.Event().wait(0.01)
        threading.Event().wait(0.05)
        assert source.largest == 6


def test_an_error_in_the_thread_is_raised_by_take_at_its_place():
    source = PositionSource(fail=True)
    loader = Loader(source, micro_batch_size=2, batch_size_at=lambda _: 4)
    assert [loader.take().first_sample for _ in range(3)] == [0, 4, 8]
    for _ in range(2):
        with pytest.raises(DataError):
            loader.take()
        assert loader.consumed_samples == 12
    source.fail = False
    assert positions(loader.take()) == [12, 13, 14, 15]
    loader.close()


def test_close_ends_the_thread_at_any_time():
    loaders = [Loader(PositionSource(fail=True), micro_batch_size=1, batch_size_at=lambda _: 7) for _ in range(3)]
    loaders[1].take()
    loaders[2].seek(70)
    loaders[2].take()
    for loader in loaders:
        loader.close()
        loader.close()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("bloomery-loader")]
