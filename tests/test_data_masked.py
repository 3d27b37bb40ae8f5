"""Masked samples: their form, their statistics, and that they follow from seed, source, epoch and sample alone."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer as HfTokenizer
from tokenizers import models

from bloomery.base.errors import DataError
from bloomery.config.recipe import MaskingSection
from bloomery.data.batch import Batch
from bloomery.data.masked import MaskedSource, MaskVocabulary, mask_tokens
from bloomery.data.shards import ShardReader, ShardWriter
from bloomery.data.tokenizer import Tokenizer
from bloomery.sizing.check import load_checked_recipe
from bloomery.sizing.parameters import labels_per_sample

SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
PAD, UNK, CLS, SEP, MASK = range(5)
WORDS, PIECES = 150, 50
SIZE = 5 + WORDS + PIECES


def make_tokenizer(special: list[str] = SPECIAL, model: Any = None) -> Tokenizer:
    tokens = [*special, *(f"w{i}" for i in range(WORDS)), *(f"##p{i}" for i in range(PIECES))]
    vocab = {token: number for number, token in enumerate(tokens)}
    made = HfTokenizer(model or models.WordPiece(vocab, unk_token="[UNK]"))
    made.add_special_tokens(special)
    return Tokenizer(made.to_str(), path="test")


@pytest.fixture(scope="module")
def vocabulary() -> MaskVocabulary:
    return MaskVocabulary.of(make_tokenizer())


def sentence(random: np.random.Generator, words: int) -> list[int]:
    """Words of one to three pieces."""
    tokens = []
    for _ in range(words):
        tokens.append(int(random.integers(5, 5 + WORDS)))
        tokens += random.integers(5 + WORDS, SIZE, random.choice([0, 0, 0, 1, 2])).tolist()
    return tokens


def write_sentences(prefix: Path, documents: list[list[list[int]]]) -> str:
    with ShardWriter(str(prefix), np.uint16) as writer:
        for document in documents:
            tokens = np.array([token for part in document for token in part], np.uint16)
            lengths = np.array([len(part) for part in document], np.int32)
            writer.append_many(tokens.tobytes(), lengths, np.array([len(document)], np.int32))
    return str(prefix)


@pytest.fixture(scope="module")
def shard(tmp_path_factory: pytest.TempPathFactory) -> str:
    """400 documents of 1 to 12 sentences."""
    random = np.random.default_rng(3)
    documents = [
        [sentence(random, int(random.integers(1, 15))) for _ in range(random.integers(1, 13))] for _ in range(400)
    ]
    documents += [[[7]], [[8, 9]]]  # a single token makes no pair, two do
    return write_sentences(tmp_path_factory.mktemp("masked") / "x", documents)


def open_source(shard: str, vocabulary: MaskVocabulary, **changes: Any) -> MaskedSource:
    settings: dict[str, Any] = {"seq_length": 64, "vocab_size": SIZE, "seed": 1, "vocabulary": vocabulary, "key": "x"}
    return MaskedSource(ShardReader(shard), **{**settings, **changes})


@pytest.fixture(scope="module")
def source(shard: str, vocabulary: MaskVocabulary) -> MaskedSource:
    return open_source(shard, vocabulary)


@pytest.fixture(scope="module")
def epoch(source: MaskedSource) -> Batch:
    return source.read(np.arange(source.num_samples))


def original(batch: Batch) -> np.ndarray:
    """The tokens before masking."""
    labels = batch.targets["lm loss"].numpy()
    return np.where(labels >= 0, labels, batch.inputs["tokens"].numpy())


def segments(row: np.ndarray) -> tuple[list[int], list[int]]:
    first, second = np.flatnonzero(row == SEP)
    return row[1:first].tolist(), row[first + 1 : second].tolist()


def test_a_sample_is_cls_a_sep_b_sep_and_padding(epoch: Batch) -> None:
    assert {name: tuple(t.shape[1:]) for name, t in epoch.inputs.items()} == {
        "tokens": (64,), "token_types": (64,), "attention_mask": (64,)
    }  # fmt: skip
    assert all(tensor.dtype == torch.int64 for tensor in [*epoch.inputs.values(), *epoch.targets.values()])
    assert epoch.targets["sop loss"].shape == epoch.targets["lm loss"].shape[:1]
    types, mask = epoch.inputs["token_types"].numpy(), epoch.inputs["attention_mask"].numpy()
    for row, kind, real in zip(original(epoch), types, mask, strict=True):
        middle, end = np.flatnonzero(row == SEP)
        assert row[0] == CLS
        assert middle >= 2
        assert end >= middle + 2
        assert (row[end + 1 :] == PAD).all()
        assert (real == (np.arange(64) <= end)).all()
        assert (kind == ((np.arange(64) > middle) & (np.arange(64) <= end))).all()


def test_every_sentence_is_used_once_in_an_epoch_and_stays_in_its_document(
    source: MaskedSource, epoch: Batch, shard: str
) -> None:
    pairs = [segments(row) for row in original(epoch)]
    together = [
        [*b, *a] if exchanged else [*a, *b]
        for (a, b), exchanged in zip(pairs, epoch.targets["sop loss"].tolist(), strict=True)
    ]
    _, samples = source.order.locate(np.arange(source.num_samples))
    with ShardReader(shard) as reader:
        bounds = reader.document_starts()
        texts = [reader.read(int(start), int(stop - start)).tolist() for start, stop in itertools.pairwise(bounds)]
        found = [token for place in np.argsort(samples) for token in together[place]]
        assert found == [token for text in texts for token in text if len(text) > 1]
        for ordinal, sample in enumerate(samples.tolist()):
            ((start, stop),) = source.stretches(sample)
            assert stop - start == len(together[ordinal])
            assert reader.document_at(start)[0] == reader.document_at(stop - 1)[0]


def test_segments_are_cut_between_sentences_unless_there_is_only_one(
    source: MaskedSource, epoch: Batch, vocabulary: MaskVocabulary
) -> None:
    _, samples = source.order.locate(np.arange(source.num_samples))
    exchanged = epoch.targets["sop loss"].tolist()
    for row, sample, was_exchanged in zip(original(epoch), samples, exchanged, strict=True):
        first, last = source.first[sample], source.last[sample]
        a, b = segments(row)
        length_of_first = len(b) if was_exchanged else len(a)
        lengths = source.lengths[first:last]
        if last - first > 1:
            assert length_of_first in np.cumsum(lengths)[:-1]
        elif lengths[0] > 3:  # longer than any word
            assert not vocabulary.continues[a[0] if was_exchanged else b[0]]


def test_statistics_of_masking(source: MaskedSource, vocabulary: MaskVocabulary) -> None:
    batch = source.read(np.arange(6 * source.num_samples))
    tokens, labels = batch.inputs["tokens"].numpy(), batch.targets["lm loss"].numpy()
    before = original(batch)
    predicted = labels >= 0
    words = np.isin(before, (PAD, CLS, SEP, MASK), invert=True)
    long = words.sum(1) >= 40
    assert long.sum() > 1500
    assert predicted[long].sum() / words[long].sum() == pytest.approx(0.15, abs=0.003)
    assert (predicted.sum(1) >= 1).all(), "every sample has something to predict"
    assert not (predicted & ~words).any(), "never a special token, never padding"
    assert (tokens == before)[~predicted].all()
    masked, kept = tokens[predicted] == MASK, tokens[predicted] == labels[predicted]
    assert masked.mean() == pytest.approx(0.8, abs=0.01)
    assert kept.mean() == pytest.approx(0.1 + 0.1 / (SIZE - 5), abs=0.01)
    others = tokens[predicted][~masked & ~kept]
    assert set(others) == set(vocabulary.replacements), "any ordinary token may stand in, no special one"
    assert np.bincount(others, minlength=SIZE)[5:].std() / np.bincount(others, minlength=SIZE)[5:].mean() < 0.4
    assert batch.targets["sop loss"].float().mean().item() == pytest.approx(0.5, abs=0.02)
    assert (batch.row_counts()["sop loss"] == 1).all()
    assert (batch.row_counts()["lm loss"] == predicted.sum(1)).all()


def test_words_are_predicted_whole(source: MaskedSource, vocabulary: MaskVocabulary) -> None:
    batch = source.read(np.arange(3 * source.num_samples))
    for row, labels in zip(original(batch), batch.targets["lm loss"].numpy(), strict=True):
        inside = vocabulary.continues[row]
        inside[0] = False
        first_of_segment = np.isin(np.roll(row, 1), (CLS, SEP))
        joined = inside[1:] & ~first_of_segment[1:]
        assert ((labels[1:] >= 0) == (labels[:-1] >= 0))[joined].all()


def test_runs_of_one_to_three_words(vocabulary: MaskVocabulary) -> None:
    """All words have one token and few are predicted, so that runs hardly touch: 1 : 1/2 : 1/3."""
    counts = np.zeros(4, int)
    words = np.arange(5, 5 + 100)
    for key in range(4000):
        _, predicted = mask_tokens((words, words), vocabulary=vocabulary, probability=0.015, key=key)
        assert predicted.sum() == 3
        edges = np.flatnonzero(np.diff(predicted.astype(int), prepend=0, append=0))
        if len(edges) == 2:
            counts[edges[1] - edges[0]] += 1
        for start, stop in edges.reshape(-1, 2):
            counts[0] += start < 100 < stop
    assert counts[3] / 4000 == pytest.approx(2 / 11, abs=0.04), "three words at once, from the first draw"
    assert counts[0] < 40, "runs do not cross from one segment into the other, but neighbours may meet there"


def test_at_least_one_word_even_where_all_are_long(vocabulary: MaskVocabulary) -> None:
    word = np.array([5, 5 + WORDS, 6 + WORDS])
    for key in range(50):
        seen, predicted = mask_tokens((word, word), vocabulary=vocabulary, probability=0.01, key=key)
        assert predicted.tolist() in ([True] * 3 + [False] * 3, [False] * 3 + [True] * 3)
        assert (seen == np.concatenate((word, word)))[~predicted].all()


def test_special_tokens_inside_a_text_are_left_alone(vocabulary: MaskVocabulary) -> None:
    text = np.array([5, MASK, 6, SEP, PAD, 7, CLS, 8])
    for key in range(50):
        _, predicted = mask_tokens((text, text[:1]), vocabulary=vocabulary, probability=0.9, key=key)
        assert not predicted[[1, 3, 4, 6]].any()
        assert predicted.sum() == 4  # 90% of five


def test_a_sample_is_a_function_of_seed_source_epoch_and_place(shard: str, vocabulary: MaskVocabulary) -> None:
    source = open_source(shard, vocabulary)
    places = np.arange(source.num_samples)
    together = source.read(places)
    for place in (0, 17, source.num_samples - 1):
        alone = source.read(places[place : place + 1])
        for name in together.inputs:
            assert torch.equal(alone.inputs[name][0], together.inputs[name][place])
    again = open_source(shard, vocabulary).read(places)
    assert torch.equal(again.inputs["tokens"], together.inputs["tokens"])
    for other in (open_source(shard, vocabulary, seed=2), open_source(shard, vocabulary, key="another name")):
        assert not torch.equal(other.read(places[:50]).inputs["tokens"], together.inputs["tokens"][:50])


def test_the_next_epoch_masks_the_same_sample_otherwise(source: MaskedSource) -> None:
    count = source.num_samples
    first, second = source.read(np.arange(count)), source.read(np.arange(count, 2 * count))
    _, a = source.order.locate(np.arange(count))
    _, b = source.order.locate(np.arange(count, 2 * count))
    here, there = np.argsort(a), np.argsort(b)
    one, two = original(first)[here], original(second)[there]
    assert (np.sort(one, axis=1) == np.sort(two, axis=1)).all(), "the same tokens"
    different = (first.inputs["tokens"].numpy()[here] != second.inputs["tokens"].numpy()[there]).any(1)
    assert different.mean() > 0.9
    exchanged = first.targets["sop loss"].numpy()[here] != second.targets["sop loss"].numpy()[there]
    assert exchanged.mean() == pytest.approx(0.5, abs=0.1)


def test_the_numbers_of_the_first_sample_never_change(source: MaskedSource) -> None:
    """A change here changes the data of every existing run."""
    batch = source.read(np.array([0]))
    assert source.num_samples == 765
    assert batch.inputs["tokens"][0, :12].tolist() == [2, 147, 4, 4, 4, 64, 21, 110, 42, 62, 38, 3]
    assert batch.targets["sop loss"].tolist() == [1]


def test_short_sequences(shard: str, vocabulary: MaskVocabulary) -> None:
    def tokens_of(probability: float) -> np.ndarray:
        source = open_source(shard, vocabulary, masking=MaskingSection(short_sequence_probability=probability))
        return np.array([np.diff(source.stretches(i)[0])[0] for i in range(source.num_samples)])

    never, some, always = tokens_of(0.0), tokens_of(0.1), tokens_of(1.0)
    assert len(never) < len(some) < len(always)
    assert never.max() <= 61
    assert never.sum() == some.sum() == always.sum(), "no token is lost"
    assert always.mean() < 0.75 * never.mean()


def test_long_sentences_are_cut_and_nothing_is_lost(tmp_path: Path, vocabulary: MaskVocabulary) -> None:
    random = np.random.default_rng(0)
    documents = [[sentence(random, 200), sentence(random, 3)], [sentence(random, 90)], [[9], [9]]]
    source = open_source(write_sentences(tmp_path / "x", documents), vocabulary)
    batch = source.read(np.arange(source.num_samples))
    assert (original(batch) >= 5).sum() == sum(len(part) for document in documents for part in document)
    assert source.lengths.max() <= 61


def test_the_end_of_document_token_is_left_out(tmp_path: Path, vocabulary: MaskVocabulary) -> None:
    random = np.random.default_rng(0)
    documents = [[sentence(random, 4), [*sentence(random, 4), SEP]] for _ in range(20)] + [[[5, 6], [SEP]]]
    source = open_source(write_sentences(tmp_path / "x", documents), vocabulary, ends_with_eod=True)
    rows = original(source.read(np.arange(source.num_samples)))
    assert source.num_samples >= 21
    assert ((rows == SEP).sum(1) == 2).all()
    assert (rows >= 5).sum() == sum(len(part) for document in documents for part in document) - 21


def test_parts_share_no_document(shard: str, vocabulary: MaskVocabulary) -> None:
    documents = []
    for part in ("train", "valid", "test"):
        source = open_source(shard, vocabulary, part=part, split="7,2,1")
        places = [place for i in range(source.num_samples) for place in source.stretches(i)]
        documents.append({source.shard.document_at(start)[0] for start, _ in places})
    with ShardReader(shard) as reader:
        usable = int((np.diff(reader.document_starts()) > 1).sum())
    assert sum(map(len, documents)) == len(set.union(*documents)) == usable


def test_a_shard_without_sentences_is_refused_with_the_remedy(tmp_path: Path, vocabulary: MaskVocabulary) -> None:
    prefix = write_sentences(tmp_path / "x", [[[5, 6, 7]], [[8, 9]]])
    with pytest.raises(DataError, match=r"2 documents and 2 sequences.*Prepare it again with `split_sentences: true`"):
        open_source(prefix, vocabulary)
    with pytest.raises(DataError, match="2 documents and 2 sequences"):
        open_source(prefix, vocabulary, split_sentences=False)
    assert open_source(prefix, vocabulary, split_sentences=True).num_samples == 2, "documents of one sentence"


def test_a_shard_of_single_tokens_is_refused(tmp_path: Path, vocabulary: MaskVocabulary) -> None:
    prefix = write_sentences(tmp_path / "x", [[[5], [SEP]], [[6], [SEP]]])
    with pytest.raises(DataError, match=r"4 tokens in 2 documents gives no sample"):
        open_source(prefix, vocabulary, ends_with_eod=True)


def test_ids_of_another_tokenizer_are_refused(tmp_path: Path, vocabulary: MaskVocabulary) -> None:
    source = open_source(write_sentences(tmp_path / "x", [[[5, 6], [7, 9999]]]), vocabulary, vocab_size=20000)
    with pytest.raises(DataError, match=r"document 0 holds token id 9999 at position 3.*from 0 to 204"):
        source.read(np.array([0]))


def test_a_tokenizer_without_a_mask_is_refused() -> None:
    with pytest.raises(DataError, match=r"has no \[MASK\]; its special tokens are \[PAD\], \[UNK\]"):
        MaskVocabulary.of(make_tokenizer(SPECIAL[:4]))


def test_without_word_pieces_every_token_is_a_word() -> None:
    vocab = {token: number for number, token in enumerate([*SPECIAL, "##a", "b"])}
    made = MaskVocabulary.of(make_tokenizer(model=models.WordLevel(vocab, unk_token="[UNK]")))
    assert not made.continues.any()
    assert made.replacements.tolist() == [5, 6]


def test_labels_go_to_the_head_with_their_places_and_none_is_lost(source: MaskedSource) -> None:
    whole = source.read(np.arange(200))
    labels = whole.targets["lm loss"]
    recipe = load_checked_recipe("bert-large", ["model.seq_length=64"]).recipe
    width = labels_per_sample(recipe)
    assert width == round(0.15 * 61)
    batch = whole.labelled_only(width)
    places, chosen = batch.inputs["predicted"], batch.targets["lm loss"]
    assert places.shape == chosen.shape == (200, width)
    assert torch.equal(labels.gather(1, places), chosen)
    assert all(len(set(row)) == width for row in places.tolist()), "places that fill up are no label's"
    assert batch.row_counts()["lm loss"].tolist() == whole.row_counts()["lm loss"].tolist()
    assert whole.labelled_only(2).row_counts()["lm loss"].max() == 2
    assert labels_per_sample(load_checked_recipe("gpt-1.3b", []).recipe) is None
